"""Forward and backward passes of a step in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from electra_fast.config.config import Config
from electra_fast.data.loader import HostBatch, MicroBatches
from electra_fast.model.compute import ComputeConfig, RngKey, seed_generator
from electra_fast.model.model import Electra
from electra_fast.objectives import OBJECTIVES, objective_of
from electra_fast.objectives.objective import Forward, MicroBatch, Objective, Stage
from electra_fast.ops.linear import WeightCasts
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training.division import Division


class GradientComputation(ABC):
    """Computes one process's part of a step's gradients.

    `model` has the parameters; `is_compiled` is true if the forward pass is compiled.
    """

    model: nn.Module
    is_compiled: bool = False

    @abstractmethod
    def load(self, batch: Any, step: int) -> None:
        """Prepares a step's batch, the same on all processes, for `run`."""

    @abstractmethod
    def run(self) -> list[dict[str, Tensor]]:
        """Adds this process's part to the parameters' gradients; returns metric totals."""

    def enter(self, step: int) -> bool:
        """Prepares for a step. Returns whether it trains other parameters than the step before."""
        return False


class Work(ABC):
    """Describes the steps of a run to worker processes, without tensors."""

    compute: ComputeConfig

    @abstractmethod
    def build_worker(self, rank: int, num_processes: int) -> tuple[GradientComputation, Optimizer]:
        """Returns a worker's gradient computation and optimizer, of a model whose parameters do not matter yet."""


@dataclass(frozen=True)
class PretrainingWork(Work):
    """The steps of a pre-training run."""

    config: Config
    objective: type[Objective]
    """The class that the configuration names, which may come from outside this package."""
    compute: ComputeConfig
    execution: str
    buffers: Mapping[str, NDArray[Any]]
    """The model's buffers, by name."""
    num_entries: int
    """Size of the vocabulary, which the model's tables may exceed."""

    def build_worker(self, rank: int, num_processes: int) -> tuple[Backward, Optimizer]:
        """As in the base class."""
        OBJECTIVES[self.config.objective.name] = self.objective
        model = Electra(self.config)
        model.limit_vocabulary(self.num_entries)
        for name, values in self.buffers.items():
            model.get_buffer(name).copy_(torch.from_numpy(values))
        backward = Backward(model, self.config, self.compute, self.execution, rank, num_processes)
        # Trains the parameters of the first stage.
        optimizer = Optimizer(model.named_parameters(), self.config.optimizer, matrix_dtype=self.compute.dtype)
        return backward, optimizer


class Backward(GradientComputation):
    """Computes the gradients of a rank's rows, or one process's part of them.

    Args:
        model: The model, on its device.
        config: Objective, micro-batches and seed.
        compute: Attention backend and activation dtype.
        execution: `compile` for torch.compile; otherwise eager.
        rank: Index of this process among those that share each micro-batch.
        num_processes: Number of processes that share each micro-batch.
        division: The rank's part of a step; by default all of it.
        wrap: Wraps an objective's forward pass of a sharded model.

    `denominators` are the divisors of the step's losses, fp64 on the device, in the order of the objective's names.
    `loss` is the loss of the last `run`, an fp32 scalar.
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
        division: Division | None = None,
        wrap: Callable[[Forward], Forward] | None = None,
    ) -> None:
        self._wrap = wrap
        self.model, self.compute, self.is_compiled = model, compute, execution == "compile"
        self._config, self._seed = config, config.train.seed
        self._device = next(model.parameters()).device
        self.division = division or Division.of(config.train, num_processes=num_processes)
        groups, first_row = self.division.groups, self.division.rows.start
        rows = [rows for group in groups for rows in group]
        self.micro_batches = MicroBatches(
            self._device, [range(part.start - first_row, part.stop - first_row) for part in rows]
        )
        numbers = iter(range(len(rows)))
        self._parts = [[next(numbers) for _ in group] for group in groups]
        self._own_parts = [[part for part in group if part % num_processes == rank] for group in self._parts]
        self._first_rows = [part.start for part in rows]
        self._first_rows_on_device = torch.tensor(self._first_rows, device=self._device)
        self._seed_and_step = torch.zeros(2, dtype=torch.int64, device=self._device)
        self.loss = torch.zeros((), device=self._device)
        # Compiled code casts by itself, and sharded weights have no fixed addresses.
        self._casts = WeightCasts(model, compute.dtype, enabled=not self.is_compiled and wrap is None)
        self.set_stage(objective_of(config).stage(0))

    def set_stage(self, stage: Stage) -> None:
        """Switches to a stage: its loss, and its frozen submodules, which go into evaluation mode."""
        self.stage = stage
        self.model.train().requires_grad_(True)
        for name in stage.frozen:
            self.model.get_submodule(name).eval().requires_grad_(False)
        forward = self.forward(stage.objective)
        self._forward = torch.compile(forward, fullgraph=True, dynamic=False) if self.is_compiled else forward
        self._names = tuple(stage.objective.loss_denominators(_NO_ROWS))
        self.denominators = torch.ones(len(self._names), dtype=torch.float64, device=self._device)

    def forward(self, objective: Objective) -> Forward:
        """Returns an objective's forward pass, wrapped if the model is sharded."""
        return objective.forward if self._wrap is None else self._wrap(objective.forward)

    def enter(self, step: int) -> bool:
        """Switches to the stage of this step, if that is another."""
        stage = objective_of(self._config).stage(step)
        if stage == self.stage:
            return False
        self.set_stage(stage)
        return True

    def group_denominators(self, batch: HostBatch) -> Tensor:
        """Returns each group's contribution to the step's denominators; fp64 on the host, [groups, denominators]."""
        parts = [self.stage.objective.loss_denominators(part) for part in self.micro_batches.on_host(batch)]
        sums = torch.zeros(len(self._parts), len(self._names), dtype=torch.float64)
        for group, numbers in enumerate(self._parts):
            for number in numbers:
                sums[group] += torch.stack([parts[number][name] for name in self._names])
        return sums

    def load(self, batch: HostBatch, step: int, denominators: Tensor | None = None) -> None:
        """Copies a step's batch and number to the device.

        `denominators` are the sums over all ranks, fp64 on the host; by default those of the batch.
        """
        if denominators is None:
            denominators = self.group_denominators(batch).sum(0)
        self.micro_batches.load(batch)
        self._copy(denominators, self.denominators)
        self._copy(torch.tensor([self._seed, step]), self._seed_and_step)
        if self._device.type == "cuda":
            seed_generator(self._device, self._seed, self.division.rows.start, step)
        self._step = step

    def run(self, group: int = 0) -> list[dict[str, Tensor]]:
        """Adds the gradients of one of the rank's groups to the parameters' gradients.

        Returns the metric totals of each micro-batch. Never synchronizes with the host, so a CUDA graph can contain it.
        """
        batches = self.micro_batches.parts
        denominators = dict(zip(self._names, self.denominators.unbind(), strict=True))
        totals = []
        self.loss = torch.zeros((), device=self._device)
        if self._device.type == "cpu" and self._own_parts[group]:
            # Seeded by row, so that a group draws the same on any rank.
            seed_generator(self._device, self._seed, self._first_rows[self._own_parts[group][0]], self._step)
        with self._casts.current():
            for part in self._own_parts[group]:
                key = RngKey(self._seed_and_step, self._first_rows_on_device[part])
                output = self._forward(self.model, MicroBatch(batches[part], self.compute, key, denominators))
                output.loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                self.loss += output.loss.detach()
                totals.append(output.totals)
        return totals

    def _copy(self, values: Tensor, target: Tensor) -> None:
        target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


# An empty batch, from which an objective returns the names of its denominators.
_NO_ROWS = {name: torch.zeros(0, 1) for name in ("masked_weights", "segment_ids", "position_ids")}
