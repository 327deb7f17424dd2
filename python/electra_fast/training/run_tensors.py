"""The tensors of a run on all ranks: collects them for a checkpoint and restores them from one.

A checkpoint does not depend on the number of ranks: it has whole tensors, which the first rank writes and reads. Only
this rank needs access to the run's folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from electra_fast import checkpoint
from electra_fast.distributed.world import World
from electra_fast.model.model import Electra
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.optimizers.shards import Shards
from electra_fast.training import loss_scaling

_Tensors = dict[str, Tensor]
# Prefixes of a step's tensors. Checkpoints of earlier versions may have tensors of a guard against spikes.
_OF_STEPS = (loss_scaling.PREFIX, "spikes.")


class RunTensors:
    """The tensors in a checkpoint: of a model, whole or sharded, of its optimizer, and of its `TrainStep.state_dict`.

    All ranks of the `world` must make the same calls.
    """

    def __init__(
        self, model: Electra, optimizer: Optimizer, step: Mapping[str, Tensor], world: World, shards: Shards | None
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._step = step
        self._world = world
        self._shards = shards

    def collect(self) -> tuple[_Tensors, _Tensors]:
        """Returns the tensors of model.safetensors and of optimizer.safetensors, not copied; used on the first rank."""
        model, optimizer = self._local()
        optimizer["num_updates"] = torch.tensor(self._optimizer.num_updates)
        if self._shards is not None:
            for tensors in (model, optimizer):
                for name, parameter in self._sharded(tensors).items():
                    whole = self._shards.gather(parameter, tensors[name])
                    tensors[name] = tensors[name] if whole is None else whole
        return model, optimizer

    def restore(self, directory: Path, *, has_optimizer: bool) -> None:
        """Restores all tensors from a checkpoint, which the first rank reads.

        `has_optimizer` is false for an imported model, whose training starts here.
        """
        loaded: tuple[_Tensors, _Tensors] = ({}, {})
        self._optimizer.num_updates = self._world.from_first(lambda: self._read(directory, has_optimizer, loaded))
        targets = self._local()
        for tensors, wholes in zip(targets if has_optimizer else targets[:1], loaded, strict=False):
            sharded = self._sharded(tensors)
            for name, tensor in tensors.items():
                if name.startswith("proposal."):
                    continue  # counted in the current corpus, which may differ from the checkpoint's
                if self._shards is not None and name in sharded:
                    self._shards.scatter(sharded[name], wholes.get(name), tensor)
                    continue
                if name in wholes:
                    tensor.detach().copy_(wholes[name])
                self._world.broadcast(tensor)

    def _local(self) -> tuple[_Tensors, _Tensors]:
        model = checkpoint.stored(self._model)
        if self._shards is not None:
            model |= self._shards.parameters
        optimizer = self._optimizer.state_dict()
        del optimizer["num_updates"]
        return model, optimizer | dict(self._step)

    def _sharded(self, tensors: _Tensors) -> dict[str, str]:
        """Maps the names of sharded tensors to the names of their parameters."""
        names = self._shards.shapes if self._shards is not None else {}
        parameters = {name: name.removeprefix("exp_avg_sq.").removeprefix("exp_avg.") for name in tensors}
        return {name: parameter for name, parameter in parameters.items() if parameter in names}

    def _read(self, directory: Path, has_optimizer: bool, loaded: tuple[_Tensors, _Tensors]) -> int:
        """Reads the whole tensors of a checkpoint into `loaded`; returns its number of updates."""
        model, optimizer = loaded
        model |= checkpoint.read_parameters(self._model, directory)
        if not has_optimizer:
            return 0
        state = checkpoint.read_tensors(directory / "optimizer.safetensors")
        optimizer_state, step = split_state(checkpoint.lengthened(state, self._model.config.model.max_positions))
        self._optimizer.check_state(optimizer_state)
        optimizer |= optimizer_state | {name: tensor for name, tensor in step.items() if name in self._step}
        return int(optimizer.pop("num_updates"))


def split_state(state: _Tensors) -> tuple[_Tensors, _Tensors]:
    """Splits the tensors of optimizer.safetensors into the optimizer's and the loss scaler's."""
    step = {name: tensor for name, tensor in state.items() if name.startswith(_OF_STEPS)}
    return {name: tensor for name, tensor in state.items() if name not in step}, step
