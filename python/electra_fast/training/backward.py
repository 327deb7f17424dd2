"""Forward and backward passes of a step: what a process computes of it, and how pre-training does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from electra_fast.compute import ComputeConfig, RngKey, seed_generator
from electra_fast.config import Config
from electra_fast.data.loader import HostBatch, MicroBatches
from electra_fast.model import Electra
from electra_fast.objectives import OBJECTIVES, objective_of
from electra_fast.objectives.objective import Objective, Stage
from electra_fast.training.optim import Optimizer


class GradientComputation(ABC):
    """What adds the gradients of a step to a model's parameters; in one process, or in several with a share each.

    `model` has the parameters, `is_compiled` tells whether the forward pass is compiled.
    """

    model: nn.Module
    is_compiled: bool = False

    @abstractmethod
    def load(self, batch: Any, step: int) -> None:
        """Prepares for `run` a step's batch, which is one for all processes."""

    @abstractmethod
    def run(self) -> list[dict[str, Tensor]]:
        """Adds to the parameters' gradients those of the own share; returns metric totals."""

    def enter(self, step: int) -> bool:
        """Prepares for a step that may train other parameters than the one before; tells whether it does."""
        return False


class Work(ABC):
    """The work of a run's steps, of which any process can take a share: what it needs to know, without tensors."""

    @abstractmethod
    def share(self, rank: int, num_processes: int) -> tuple[GradientComputation, Optimizer]:
        """One process' computation of gradients and its optimizer, of a model with parameters of any value."""


@dataclass(frozen=True)
class PretrainingWork(Work):
    """The steps of a pre-training run."""

    config: Config
    objective: type[Objective]
    """The class that the configuration names, which may be one that this package does not have."""
    compute: ComputeConfig
    execution: str
    buffers: Mapping[str, NDArray[Any]]
    """Of the model, by name."""

    def share(self, rank: int, num_processes: int) -> tuple[Backward, Optimizer]:
        """The gradients of the process' rows."""
        OBJECTIVES[self.config.objective.name] = self.objective
        model = Electra(self.config)
        for name, values in self.buffers.items():
            model.get_buffer(name).copy_(torch.from_numpy(values))
        backward = Backward(model, self.config, self.compute, self.execution, rank, num_processes)
        return backward, Optimizer(model.named_parameters(), self.config.optimizer)  # of what the first stage trains


class Backward(GradientComputation):
    """Computes the gradients of a step's micro-batches, or one process' share of them.

    Args:
        model: On its device.
        config: Objective, micro-batches and seed.
        compute: Attention backend and activation dtype.
        execution: `compile` for torch.compile; otherwise eager.
        rank: Which process this is.
        num_processes: How many processes share each micro-batch.
    """

    model: Electra

    def __init__(
        self,
        model: Electra,
        config: Config,
        compute: ComputeConfig,
        execution: str,
        rank: int = 0,
        num_processes: int = 1,
    ) -> None:
        self.model, self.compute, self.is_compiled = model, compute, execution == "compile"
        self._config, self._seed, self._rank = config, config.train.seed, rank
        device, num_parts = next(model.parameters()).device, config.train.accumulate * num_processes
        self.micro_batches = MicroBatches(device, num_parts)
        self._own_parts = range(rank, num_parts, num_processes)
        rows = config.train.batch_size // num_parts
        self._first_rows = torch.arange(0, config.train.batch_size, rows, device=device)
        self._seed_and_step = torch.zeros(2, dtype=torch.int64, device=device)
        self.set_stage(objective_of(config).stage(0))

    def set_stage(self, stage: Stage) -> None:
        """Trains by a stage's loss what the stage does not freeze, which is put into evaluation mode."""
        self.stage = stage
        self.model.train().requires_grad_(True)
        for name in stage.frozen:
            self.model.get_submodule(name).eval().requires_grad_(False)
        forward = stage.objective.forward
        self._forward = torch.compile(forward, fullgraph=True, dynamic=False) if self.is_compiled else forward

    def enter(self, step: int) -> bool:
        """Switches to the stage of this step, if it is another."""
        stage = objective_of(self._config).stage(step)
        if stage == self.stage:
            return False
        self.set_stage(stage)
        return True

    def load(self, batch: HostBatch, step: int) -> None:
        """Copies a step's batch and number to the device."""
        self.micro_batches.load(batch)
        seed_and_step = torch.tensor([self._seed, step], pin_memory=self._seed_and_step.is_cuda)
        self._seed_and_step.copy_(seed_and_step, non_blocking=True)
        seed_generator(self._seed_and_step.device, self._seed, self._rank, step)

    def run(self) -> list[dict[str, Tensor]]:
        """Adds to the parameters' gradients those of the loaded batch; returns the metric totals of each micro-batch.

        Never synchronizes with the host, so a CUDA graph can hold it.
        """
        batches = self.micro_batches.parts
        per_batch = [self.stage.objective.loss_denominators(batch) for batch in batches]
        denominators = {name: torch.stack([each[name] for each in per_batch]).sum(0) for name in per_batch[0]}
        totals = []
        for part in self._own_parts:
            key = RngKey(self._seed_and_step, self._first_rows[part])
            output = self._forward(self.model, batches[part], self.compute, key, denominators)
            output.loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            totals.append(output.totals)
        return totals
