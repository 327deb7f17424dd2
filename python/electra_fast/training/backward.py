"""Forward and backward passes of a step: what a process computes of it, and how pre-training does."""

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

    compute: ComputeConfig

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
    num_entries: int
    """Of the vocabulary, which the model's tables may exceed."""

    def share(self, rank: int, num_processes: int) -> tuple[Backward, Optimizer]:
        """The gradients of the process' rows."""
        OBJECTIVES[self.config.objective.name] = self.objective
        model = Electra(self.config)
        model.limit_vocabulary(self.num_entries)
        for name, values in self.buffers.items():
            model.get_buffer(name).copy_(torch.from_numpy(values))
        backward = Backward(model, self.config, self.compute, self.execution, rank, num_processes)
        # Of what the first stage trains.
        optimizer = Optimizer(model.named_parameters(), self.config.optimizer, matrix_dtype=self.compute.dtype)
        return backward, optimizer


class Backward(GradientComputation):
    """Computes the gradients of a rank's share of the steps, or one process' part of that share.

    Args:
        model: On its device.
        config: Objective, micro-batches and seed.
        compute: Attention backend and activation dtype.
        execution: `compile` for torch.compile; otherwise eager.
        rank: Which of the processes this is that share each micro-batch.
        num_processes: How many processes share each micro-batch.
        division: What the rank computes of a step; by default all of it.
        wrap: Wraps an objective's forward pass, if the model is sharded.

    `denominators` are those of the step's losses, fp64 on the device, in the order of the objective's names. `loss` is
    the loss of the last `run`, an fp32 scalar.
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
        # What is compiled casts by itself, and sharded weights have no fixed addresses.
        self._casts = WeightCasts(model, compute.dtype, enabled=not self.is_compiled and wrap is None)
        self.set_stage(objective_of(config).stage(0))

    def set_stage(self, stage: Stage) -> None:
        """Trains by a stage's loss what the stage does not freeze, which is put into evaluation mode."""
        self.stage = stage
        self.model.train().requires_grad_(True)
        for name in stage.frozen:
            self.model.get_submodule(name).eval().requires_grad_(False)
        forward = self.forward(stage.objective)
        self._forward = torch.compile(forward, fullgraph=True, dynamic=False) if self.is_compiled else forward
        self._names = tuple(stage.objective.loss_denominators(_NO_ROWS))
        self.denominators = torch.ones(len(self._names), dtype=torch.float64, device=self._device)

    def forward(self, objective: Objective) -> Forward:
        """An objective's forward pass of the model, which may be sharded."""
        return objective.forward if self._wrap is None else self._wrap(objective.forward)

    def enter(self, step: int) -> bool:
        """Switches to the stage of this step, if it is another."""
        stage = objective_of(self._config).stage(step)
        if stage == self.stage:
            return False
        self.set_stage(stage)
        return True

    def group_denominators(self, batch: HostBatch) -> Tensor:
        """What each group of the rank adds to the step's denominators; fp64 on the host, [groups, denominators]."""
        parts = [self.stage.objective.loss_denominators(part) for part in self.micro_batches.on_host(batch)]
        sums = torch.zeros(len(self._parts), len(self._names), dtype=torch.float64)
        for group, numbers in enumerate(self._parts):
            for number in numbers:
                sums[group] += torch.stack([parts[number][name] for name in self._names])
        return sums

    def load(self, batch: HostBatch, step: int, denominators: Tensor | None = None) -> None:
        """Copies a step's batch and number to the device.

        `denominators` are those of all ranks, fp64 on the host; by default the batch's own.
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
        """Adds to the parameters' gradients those of one of the rank's groups.

        Returns the metric totals of each micro-batch. Never synchronizes with the host, so a CUDA graph can hold it.
        """
        batches = self.micro_batches.parts
        denominators = dict(zip(self._names, self.denominators.unbind(), strict=True))
        totals = []
        self.loss = torch.zeros((), device=self._device)
        if self._device.type == "cpu" and self._own_parts[group]:
            # By the rows, so that a group draws the same on any rank.
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


# A batch of no rows, of which an objective tells the names of its denominators.
_NO_ROWS = {name: torch.zeros(0, 1) for name in ("masked_weights", "segment_ids", "position_ids")}
