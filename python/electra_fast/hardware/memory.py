"""The estimated memory of a training step on a GPU, and the number of micro-batches that fit.

A forward pass on tensors without data (fake tensors) allocates like the real one, for any objective, attention backend
and choice of kernels. It takes less than a second for `base`, and needs neither memory nor a GPU.

Shapes: B rows, L row length.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from electra_fast.config.config import Config
from electra_fast.distributed.division import num_groups, smaller_micro_batches
from electra_fast.errors import InputError
from electra_fast.model.attention import BACKENDS
from electra_fast.model.compute import ComputeConfig, use_compute
from electra_fast.model.layers import BertLayer, ModernLayer
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey, Stage
from electra_fast.ops.weight_casts import WeightCasts
from electra_fast.optimizers.rules import RULES

# Bytes per parameter: both moments of AdamW and LAMB. For matrices, Muon stores updates instead of second moments.
_OPTIMIZER_STATE = 8
# Peak size of gradients during the backward pass, relative to the activations of a forward pass without gradients: at
# most 1.33, measured with `short` at three sizes in both architectures.
_BACKWARD = 1.4
# Libraries' workspaces, code of kernels, chunks of logits within the generator's head.
_FIXED = 1 << 30
# Fraction of the free memory that a step may use, since caching allocators waste some.
_USABLE = 0.9
_GIB = 1 << 30


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations create within the context: current bytes (`now`) and the `peak`."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in excluded}
        self._ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for output in tree_iter(outputs):
            if isinstance(output, Tensor) and output.untyped_storage()._cdata not in self._sizes:
                self._add(output.untyped_storage())
        return outputs

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._sizes[key] = storage.nbytes()
        self._ends[key] = weakref.ref(storage, lambda _: self._remove(key))
        self.now += self._sizes[key]
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._ends[key]


class StepMemory:
    """The bytes of a configuration's training steps on a GPU.

    Args:
        config: The run's configuration, with `model.vocab_size`.
        compute: Attention backend and activation dtype.
        device: A CUDA device, which need not exist.
        world_size: Ranks among which the step's rows are divided.
    """

    def __init__(self, config: Config, compute: ComputeConfig, device: torch.device, world_size: int = 1) -> None:
        self._config = config
        self._device = device
        self._world_size = world_size
        alike = BACKENDS[compute.attention].alike
        if alike and config.model.architecture == "deberta":
            alike = "sdpa"  # saves about as much: scores of all pairs of tokens instead of tokens and positions
        self._compute = replace(compute, attention=alike or compute.attention)
        with torch.device("meta"):
            self._model = Electra(config)
        self._mode = FakeTensorMode()
        with self._mode:
            for module in self._model.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = nn.Parameter(self._empty(*parameter.shape))
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = self._empty(*buffer.shape, dtype=buffer.dtype)
            with use_compute(compute):
                self._casts = WeightCasts(self._model, compute.dtype)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def forward(self, num_rows: int) -> tuple[int, int]:
        """Returns the bytes that a micro-batch saves for its backward pass, and its peak bytes without gradients.

        Both without parameters and inputs, for the stage of the objective that saves the most.
        """
        return max(self._forward(num_rows, stage) for stage in objective_of(self._config).stages())

    def _forward(self, num_rows: int, stage: Stage) -> tuple[int, int]:
        model = self._model.train().requires_grad_(True)
        measured = []
        for name in stage.frozen:
            model.get_submodule(name).eval().requires_grad_(False)
        with self._mode, use_compute(self._compute):
            tensors = self._batch(num_rows)
            key = RngKey(self._empty(2, dtype=torch.int64), self._empty(dtype=torch.int64))
            denominators = stage.objective.loss_denominators(tensors)
            batch = MicroBatch(tensors, self._compute, key, denominators)
            existing = (*model.parameters(), *model.buffers(), *self._casts.copies, *tensors.values())
            for with_gradients in (True, False):
                with torch.set_grad_enabled(with_gradients), self._casts.current(), _LiveBytes(existing) as live:
                    output = stage.objective.forward(model, batch)
                    measured.append(live.now if with_gradients else live.peak)
                    del output
        saved, working = measured
        return saved, working

    def _batch(self, num_rows: int) -> dict[str, Tensor]:
        """Returns the tensors of `data.loader.to_torch`, without values."""
        data = self._config.data
        int32 = torch.int32
        shape_BL = (num_rows, data.sequence_length)
        shape_BM = (num_rows, max(1, round(data.mask_prob * data.sequence_length)))
        return {
            **{name: self._empty(*shape_BL, dtype=int32) for name in ("input_ids", "token_type_ids")},
            **{name: self._empty(*shape_BL, dtype=int32) for name in ("position_ids", "segment_ids")},
            **{name: self._empty(*shape_BM, dtype=int32) for name in ("masked_positions", "masked_ids")},
            "masked_weights": self._empty(*shape_BM),
            "cu_seqlens": self._empty(2 * num_rows + 1, dtype=int32),
        }

    def bytes_per_token(self) -> float:
        """Returns the bytes that each additional token saves, while the generator's head saves its logits."""
        one, two = (self.forward(num_rows)[0] for num_rows in (1, 2))
        return (two - one) / self._config.data.sequence_length

    def step(self, num_rows: int) -> int:
        """Estimates the peak bytes of training steps in micro-batches of `num_rows` rows, and of evaluations."""
        return sum(self.parts(num_rows).values())

    def parts(self, num_rows: int) -> dict[str, int]:
        saved, working = self.forward(num_rows)
        local = self._num_parameters()
        train = self._config.train
        # With sharding: gathered parameters, in addition to this rank's shard. Without: a second copy of the gradients,
        # in the buffer of ranks and groups, or left by the last eager step in addition to a graph's memory pool.
        gathered = self._num_gathered() if train.sharding == "full" else 0
        twice = (
            0 if train.sharding == "full" else local * max(1, num_groups(train, self._world_size) // self._world_size)
        )
        updated = round(local * RULES[self._config.optimizer.name].update_bytes)
        return {
            "parameters": round(4 * (local + gathered)),
            "gradients": round(4 * (local + gathered + twice)),
            "moments": round(_OPTIMIZER_STATE * local),
            "casts": sum(cast.nbytes for cast in self._casts.copies),
            # An evaluation needs memory in addition to the pool of the step's CUDA graph.
            "activations": max(saved + round(_BACKWARD * working), updated) + working,
            "libraries": _FIXED,
        }

    def min_micro_batches(self, free: int) -> tuple[int, int, bool]:
        """Returns the fewest micro-batches per step that fit in `free` bytes, their rows, and whether they fit.

        At least `train.accumulate`, if it is a number.
        """
        choices = list(smaller_micro_batches(self._config.train, self._world_size).items())

        def fits(choice: tuple[int, int]) -> bool:
            return self.step(choice[1]) <= _USABLE * free

        position = 0 if fits(choices[0]) else bisect.bisect_left(choices, True, 1, key=fits)
        return *choices[min(position, len(choices) - 1)], position < len(choices)

    def too_large(self, num_rows: int, free: int) -> str:
        """Returns the message about micro-batches of `num_rows` rows that do not fit in `free` bytes, with remedies."""
        return (
            f"a micro-batch of {num_rows} {'row' if num_rows == 1 else 'rows'} of {self._config.data.sequence_length} "
            f"tokens needs about {self.step(num_rows) / _GIB:.3g} GiB of GPU memory, but a step can use only "
            f"{_USABLE:.0%} of the {free / _GIB:.3g} GiB that are free; choose a smaller model, lower "
            'data.sequence_length, or use more GPUs with train.sharding = "full"'
        )

    def _num_parameters(self) -> float:
        total = sum(parameter.numel() for parameter in self._model.parameters())
        return total / self._world_size if self._config.train.sharding == "full" else total

    def _num_gathered(self) -> int:
        """Returns the parameters of a sharded model that are gathered at the same time: two layers, and all others."""
        layers = [module for module in self._model.modules() if isinstance(module, BertLayer | ModernLayer)]
        sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        return sum(parameter.numel() for parameter in self._model.parameters()) - sum(sizes) + 2 * max(sizes)


def free_bytes(device: torch.device) -> int:
    """Returns a GPU's free memory in bytes, including memory that this process has cached."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def choose_accumulate(
    config: Config, compute: ComputeConfig, device: torch.device, world_size: int = 1
) -> tuple[int, str]:
    """Returns the fewest micro-batches per step that fit in the free memory of a GPU, and a message.

    A number in `train.accumulate` is the minimum. On a CPU, returns this number, or 1, without a message. Raises
    ValueError if no division of the step fits.
    """
    train = config.train
    if device.type != "cuda":
        return train.num_micro_batches, ""
    memory = StepMemory(config, compute, device, world_size)
    free = free_bytes(device)
    accumulate, num_rows, does_fit = memory.min_micro_batches(free)
    needed = f"{memory.step(num_rows) / _GIB:.3g}"
    if not does_fit:
        raise InputError(f"{memory.too_large(num_rows, free)}, or set train.accumulate to a number to try it anyway")
    rows = f"{accumulate} micro-{'batch' if accumulate == 1 else 'batches'} of {num_rows} rows"
    return accumulate, f"train.accumulate = auto: {rows}, about {needed} of {free / _GIB:.3g} GiB"
