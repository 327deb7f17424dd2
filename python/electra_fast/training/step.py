"""One optimizer step: forward and backward passes, the base class of all steps, and the step of a single process.

The trainer calls a step once per batch. Each class has a `run` that reads from top to bottom; `parallel_step` has the
classes for several processes. `run` works on tensors at fixed addresses and never synchronizes with the host, so
`graphs` can capture and replay it. Inputs that change from step to step are copied into those tensors first.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from electra_fast._data import RecordBatch
from electra_fast.config.config import Config
from electra_fast.data.loader import HostBatch, MicroBatches
from electra_fast.distributed.division import Division
from electra_fast.distributed.step_processes import GradientComputation, keep_freed_memory
from electra_fast.distributed.world import World
from electra_fast.hardware.graphs import GraphRunner, Preparation
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Forward, MicroBatch, Objective, RngKey, Stage, seed_generator
from electra_fast.ops import branches
from electra_fast.ops.weight_casts import WeightCasts
from electra_fast.optimizers.optimizer import Optimizer, schedule_of
from electra_fast.training.loss_scaling import LossScaler

# Steps that the host may run ahead of the device. With more, pinned batches would pile up without any gain.
MAX_LEAD = 2
GRAD_NORM = "grad_norm"
SKIPPED = "skipped_steps"
# An empty batch. An objective returns the names of its denominators for it.
_NO_ROWS = {name: torch.zeros(0, 1) for name in ("masked_weights", "segment_ids", "position_ids")}


class Backward(GradientComputation):
    """Computes the gradients of a rank's rows, or one process's part of them.

    Args:
        rank: Index of this process among those that share each micro-batch.
        division: The rank's rows of a step; all rows by default. For other arguments, see `parallel_step.create_step`.

    `denominators` are the divisors of the step's losses, fp64 on the device, in the order of the objective's names.
    `loss_scale` multiplies all gradients, if it is set.
    """

    model: Electra
    loss_scale: Tensor | None = None

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
        self.model = model
        self.compute = compute
        self.is_compiled = execution == "compile"
        self._config = config
        self._seed = config.train.seed
        self._device = next(model.parameters()).device
        self.division = division or Division.of(config.train, num_processes=num_processes)
        groups = self.division.groups
        first_row = self.division.rows.start
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
        # Compiled code casts weights itself, and sharded weights have no fixed addresses.
        self._casts = WeightCasts(model, compute.dtype, enabled=not self.is_compiled and wrap is None)
        self.set_stage(objective_of(config).stage(0))

    def set_stage(self, stage: Stage) -> None:
        """Switches to a stage: its loss, and its frozen submodules, which go into evaluation mode."""
        self.stage = stage
        self.steps = range(stage.first_step, stage.first_step + stage.num_steps)
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
        """Switches to the stage of this step. Returns whether the stage changed."""
        if step in self.steps:
            return False
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

        `denominators` are the sums over all ranks, fp64 on the host; by default the sums over this batch.
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
        if self._device.type == "cpu" and self._own_parts[group]:
            # Seeded by the first row, so that a group draws the same numbers on any rank.
            seed_generator(self._device, self._seed, self._first_rows[self._own_parts[group][0]], self._step)
        with self._casts.current():
            for part in self._own_parts[group]:
                key = RngKey(self._seed_and_step, self._first_rows_on_device[part])
                output = self._forward(self.model, MicroBatch(batches[part], self.compute, key, denominators))
                output.loss.backward(self.loss_scale)
                branches.join()
                totals.append(output.totals)
        return totals

    def _copy(self, values: Tensor, target: Tensor) -> None:
        target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


class TrainStep(ABC):
    """Trains on one batch per call, without waiting for the device. `parallel_step.create_step` creates it.

    `marks` are the ends of the steps, seconds on a CPU and events on a GPU; `timing.StepTimer` reads and clears them.

    The metric totals of the objective and the gradient norms (`GRAD_NORM`) are summed on the device over all calls:
    see `read_totals` and `set_totals`. `graphs.captures` lists the captures of CUDA graphs: one per stage, and one
    after each batch that did not fit the graph's tensors. `compilations` has one entry per stage. `scaler` scales the
    losses of fp16.
    """

    scaler: LossScaler | None = None

    def __init__(
        self, model: Electra, optimizer: Optimizer, config: Config, backward: Backward, world: World, execution: str
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.world = world
        self.backward = backward
        self.objective = objective_of(config)
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        names = (*self.objective.metric_totals, GRAD_NORM, SKIPPED)
        self._totals_vector = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        self._totals = dict(zip(names, self._totals_vector.unbind(), strict=True))
        self.graphs: GraphRunner[None] = GraphRunner(self.device, captures=execution != "eager")
        self.compilations: list[Preparation] = []
        self._has_branches = execution == "branches"
        self._batches_version = 0
        self._is_first_of_stage = True
        self._schedule = schedule_of(config.optimizer, self.stage.num_steps)
        self.marks: list[Any] = []

    @abstractmethod
    def run(self) -> None:
        """Trains on the batch that has been copied to the device."""

    @property
    def stage(self) -> Stage:
        """The current stage of the objective."""
        return self.backward.stage

    def __call__(self, rows: RecordBatch, step: int, flags: Sequence[float] = ()) -> list[float]:
        """Runs the step with this number (0-based) on a batch of `data.loader.BatchLoader`.

        Returns the maximum of each of the `flags` over the ranks.
        """
        if step not in self.backward.steps:
            self._enter_stage(step)
        batch = HostBatch.of(rows)
        lr_scale = self.lr_scale(step)
        self._start_processes(batch, step, lr_scale)
        denominators, flags = self._gather_denominators(batch, flags)
        if self.graphs.stream is None:
            self._load_and_run(batch, step, denominators, lr_scale)
            self.marks.append(time.perf_counter())
        else:
            with self.graphs.on_stream():
                self._load_and_run(batch, step, denominators, lr_scale)
                self.marks.append(self.mark())
            self._bound_the_lead()
        return list(flags)

    def _load_and_run(self, batch: HostBatch, step: int, denominators: Tensor, lr_scale: float) -> None:
        self.backward.load(batch, step, denominators)
        self.optimizer.set_step_scalars(lr_scale)
        self._run_or_replay(step)

    def mark(self) -> Any:
        """Returns the current time in seconds on a CPU; on a GPU, an event after all work launched so far."""
        if self.graphs.stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.graphs.stream)
        return event

    def _start_processes(self, batch: HostBatch, step: int, lr_scale: float) -> None:  # noqa: B027  # most have none
        """Starts the step in the other processes that share it."""

    def _gather_denominators(self, batch: HostBatch, flags: Sequence[float]) -> tuple[Tensor, Sequence[float]]:
        """Returns the denominators of all ranks' rows, and the maximum of each flag."""
        local_GK = self.backward.group_denominators(batch)
        if self.world.size == 1:
            return local_GK.sum(0), flags
        gathered = self.world.all_gather(torch.cat((torch.tensor(flags, dtype=torch.float64), local_GK.flatten())))
        max_flags = gathered[:, : len(flags)].amax(0).tolist()
        return gathered[:, len(flags) :].reshape(-1, local_GK.shape[1]).sum(0), max_flags

    def _run_or_replay(self, step: int) -> None:
        if self._batches_version != self.backward.micro_batches.version:
            # The tensors that the graph reads were replaced. Any compilation happens before the next capture.
            self.graphs.drop("a batch has more segments than any before it")
            self._batches_version = self.backward.micro_batches.version
        start = time.perf_counter()
        if self.graphs.captures_graphs:
            with branches.use_branches(self._has_branches):
                self.graphs.run(self.run, step)
        else:
            self.run()
        if self.backward.is_compiled and self._is_first_of_stage:
            self.compilations.append(Preparation(step, time.perf_counter() - start))
        self._is_first_of_stage = False

    def _bound_the_lead(self) -> None:
        if len(self.marks) > MAX_LEAD:
            with self.world.waiting("the device, which may wait for other ranks"):
                self.marks[-1 - MAX_LEAD].synchronize()

    def lr_scale(self, step: int) -> float:
        """Returns the learning rate of a step of the current stage, relative to its peak."""
        return self._schedule(step - self.stage.first_step)

    def resume(self, step: int) -> None:
        """Restores the stage that trained last before this step. Call it before the optimizer's state is loaded."""
        stage = self.objective.stage(max(0, step - 1))
        if stage != self.stage:
            self._set_stage(stage)

    def _enter_stage(self, step: int) -> None:
        """Switches to the stage of this step. A new stage has new moments, a new schedule and a new graph."""
        stage = self.objective.stage(step)
        if stage != self.stage:
            self.synchronize()
            stage.objective.begin_stage(self.model)
            self._set_stage(stage)

    def _set_stage(self, stage: Stage) -> None:
        self.backward.set_stage(stage)
        self._schedule = schedule_of(self.config.optimizer, stage.num_steps)
        self.optimizer.reset()
        self._is_first_of_stage = True
        self.graphs.drop("another stage of the objective began")

    def read_totals(self) -> dict[str, float]:
        """Returns the totals of all ranks since the last `set_totals`; waits for the device and the other ranks."""
        self.synchronize()
        sums = self.world.all_gather(self._totals_vector.cpu()).sum(0)
        totals = dict(zip(self._totals, sums.tolist(), strict=True))
        if self.world.size > 1:
            self.set_totals(totals)
        return totals

    def set_totals(self, totals: Mapping[str, float]) -> None:
        """Sets the totals of all ranks, which the first rank stores; names that are missing get 0."""
        values = [totals.get(name, 0.0) if self.world.is_first else 0.0 for name in self._totals]
        self._totals_vector.copy_(torch.tensor(values, dtype=torch.float64))

    def take_device_seconds(self) -> float:
        """Returns the device's seconds for this rank's gradients since the last call; 0 on a CPU or a single rank.

        Call it after `read_totals`, which waits for the device.
        """
        return 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the loss scaler's tensors for a checkpoint, by name; not copied."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def synchronize(self) -> None:
        """Waits for the device. Work on the caller's stream then sees the results of all steps."""
        self.graphs.join()
        if self.graphs.stream is not None:
            with self.world.waiting("the device, which may wait for other ranks"):
                self.graphs.stream.synchronize()

    def waits_for_ranks(self) -> AbstractContextManager[None]:
        """Returns a context manager for work on the model in which ranks wait for each other outside of `World`."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027  # most have none
        """Ends the processes that share the step."""


class OneDeviceStep(TrainStep):
    """The step of a single process, on one device."""

    def run(self) -> None:
        """Trains on the batch that has been copied to the device."""
        self.optimizer.zero_grad()
        totals = self.backward.run()  # forward and backward of each micro-batch
        norm = self.optimizer.step()  # clips and updates
        add_totals(totals, self._totals)
        self._totals[GRAD_NORM] += norm


def add_totals(totals: Iterable[Mapping[str, Tensor]], sums: Mapping[str, Tensor]) -> None:
    """Adds the totals of micro-batches to sums by name."""
    for step_totals in totals:
        for name, total in step_totals.items():
            sums[name].add_(total)
