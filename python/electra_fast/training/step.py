"""One optimizer step, in three forms: on one device, data parallel over ranks, and sharded over ranks.

The trainer calls a step once per batch. Each form has a `run` that reads from top to bottom. It works on tensors at
fixed addresses and never synchronizes with the host, so that `graphs` can capture and replay it. What changes from step
to step is copied into those tensors first.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from electra_fast._data import RecordBatch
from electra_fast.config.config import Config
from electra_fast.data.loader import HostBatch
from electra_fast.errors import InputError
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Forward, Stage
from electra_fast.optimizers.muon import MatrixDivision
from electra_fast.optimizers.optimizer import Optimizer, global_norm, lr_scale
from electra_fast.optimizers.shards import Shards
from electra_fast.training.allocator import keep_freed_memory
from electra_fast.training.backward import Backward, PretrainingWork
from electra_fast.training.division import Division
from electra_fast.training.gradient_buffer import GradientBuffer
from electra_fast.training.graphs import GraphRunner, Preparation
from electra_fast.training.spikes import SpikeGuard
from electra_fast.training.step_processes import StepProcesses, choose_num_processes
from electra_fast.training.world import World

# Steps that the host may run ahead of the device; more would only pile up pinned batches.
MAX_LEAD = 2
GRAD_NORM, SKIPPED = "grad_norm", "skipped_steps"


def choose_execution(requested: str, device: torch.device, sharding: str = "none") -> str:
    """Resolves `auto` to an execution mode; raises ValueError if the requested one is not available."""
    if sharding == "full":
        if requested not in ("auto", "eager"):
            raise InputError(f'train.execution = "{requested}" cannot run with train.sharding = "full"; set "auto"')
        return "eager"
    if requested == "graph" and device.type != "cuda":
        raise InputError(f'train.execution = "graph" needs a CUDA device, and this is {device.type}; set "auto"')
    if requested == "auto":
        return "graph" if device.type == "cuda" else "eager"
    return requested


class TrainStep(ABC):
    """Trains on one batch per call, without waiting for the device; `create_step` makes one.

    The metric totals of the objective and the gradient norms (`GRAD_NORM`) add up on the device from call to call:
    `read_totals`, `set_totals`. `graphs.captures` lists the captures of CUDA graphs: a second one means that a batch
    did not fit the first one's tensors, or that another stage of the objective began. `compilations` has one entry per
    stage. `spikes` recognizes the steps to skip, if there are to be any.
    """

    spikes: SpikeGuard | None = None

    def __init__(
        self, model: Electra, optimizer: Optimizer, config: Config, backward: Backward, world: World, execution: str
    ) -> None:
        self.model, self.optimizer, self.config, self.world = model, optimizer, config, world
        self.backward, self.objective = backward, objective_of(config)
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        names = (*self.objective.metric_totals, GRAD_NORM, SKIPPED)
        self._totals_vector = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        self._totals = dict(zip(names, self._totals_vector.unbind(), strict=True))
        self.graphs: GraphRunner[None] = GraphRunner(self.device, captures=execution != "eager")
        self.compilations: list[Preparation] = []
        self._batches_version, self._is_first_of_stage = 0, True
        self._ends: deque[torch.cuda.Event] = deque()

    @abstractmethod
    def run(self) -> None:
        """Trains on what has been copied to the device."""

    @property
    def stage(self) -> Stage:
        """The objective's stage that trains now."""
        return self.backward.stage

    def __call__(self, rows: RecordBatch, step: int, flags: Sequence[float] = ()) -> list[float]:
        """Takes the step with this number (0-based) on a batch of `data.loader.BatchLoader`.

        Returns the maximum over the ranks of each of the `flags`.
        """
        self._enter_stage(step)
        batch, lr_scale = HostBatch.of(rows), self.lr_scale(step)
        self._start_processes(batch, step, lr_scale)
        denominators, flags = self._gather_denominators(batch, flags)
        with self.graphs.on_stream():
            self.backward.load(batch, step, denominators)
            self.optimizer.set_step_scalars(lr_scale)
            self._run_or_replay(step)
            self._bound_the_lead()
        return list(flags)

    def _start_processes(self, batch: HostBatch, step: int, lr_scale: float) -> None:  # noqa: B027  # most have none
        """Lets the processes that share the step begin."""

    def _gather_denominators(self, batch: HostBatch, flags: Sequence[float]) -> tuple[Tensor, Sequence[float]]:
        """Returns the denominators of all ranks' rows, and the maximum of each flag."""
        own_GK = self.backward.group_denominators(batch)
        if self.world.size == 1:
            return own_GK.sum(0), flags
        # NCCL wants a captured collective to be captured, and replayed, by all ranks at once.
        is_larger = self.config.train.capture_collectives and not self.backward.micro_batches.fits(batch)
        message = torch.cat((torch.tensor([*flags, is_larger], dtype=torch.float64), own_GK.flatten()))
        found = self.world.all_gather(message)
        *flags, is_any_larger = found[:, : len(flags) + 1].amax(0).tolist()
        if is_any_larger:
            self.graphs.drop("a batch of some rank has more segments than any before it")
        return found[:, len(flags) + 1 :].reshape(-1, own_GK.shape[1]).sum(0), flags

    def _run_or_replay(self, step: int) -> None:
        if self._batches_version != self.backward.micro_batches.version:
            # The tensors that a graph would read are gone; what compiles does so before the next capture.
            self.graphs.drop("a batch has more segments than any before it")
            self._batches_version = self.backward.micro_batches.version
        start = time.perf_counter()
        self.graphs.run(self.run, step)
        if self.backward.is_compiled and self._is_first_of_stage:
            self.compilations.append(Preparation(step, time.perf_counter() - start))
        self._is_first_of_stage = False

    def _bound_the_lead(self) -> None:
        if self.graphs.stream is not None:
            self._ends.append(self.graphs.stream.record_event())
            if len(self._ends) > MAX_LEAD:
                with self.world.waiting("the device, which may wait for other ranks"):
                    self._ends.popleft().synchronize()

    def lr_scale(self, step: int) -> float:
        """The learning rate of a step relative to its peak, by the schedule of the step's stage."""
        stage = self.objective.stage(step)
        return lr_scale(self.config.optimizer, step - stage.first_step, stage.num_steps)

    def resume(self, step: int) -> None:
        """Restores the stage that trained last before this step. Call it before the optimizer's state is loaded."""
        stage = self.objective.stage(max(0, step - 1))
        if stage != self.stage:
            self._set_stage(stage)

    def _enter_stage(self, step: int) -> None:
        """Switches to the stage of this step if it is another: new moments, a new schedule, a new graph."""
        stage = self.objective.stage(step)
        if stage != self.stage:
            self.synchronize()
            stage.objective.begin_stage(self.model)
            self._set_stage(stage)

    def _set_stage(self, stage: Stage) -> None:
        self.backward.set_stage(stage)
        self.optimizer.reset()
        self._is_first_of_stage = True
        self.graphs.drop("another stage of the objective began")

    def read_totals(self) -> dict[str, float]:
        """Returns the totals of all ranks since they were last set; waits for the device and for the other ranks."""
        self.synchronize()
        sums = self.world.all_gather(self._totals_vector.cpu()).sum(0)
        totals = dict(zip(self._totals, sums.tolist(), strict=True))
        if self.world.size > 1:
            self.set_totals(totals)
        return totals

    def set_totals(self, totals: Mapping[str, float]) -> None:
        """Sets the totals of all ranks, which the first one keeps; 0 where a name is not among them."""
        values = [totals.get(name, 0.0) if self.world.is_first else 0.0 for name in self._totals]
        self._totals_vector.copy_(torch.tensor(values, dtype=torch.float64))

    def take_device_seconds(self) -> float:
        """Returns the device's seconds for this rank's own gradients since the last call, if there are other ranks.

        Call it after `read_totals`, which waits for the device; 0 on a CPU.
        """
        return 0.0

    def synchronize(self) -> None:
        """Waits for the device, and makes what is done next on the caller's stream see the steps taken."""
        self.graphs.join()
        if self.graphs.stream is not None:
            with self.world.waiting("the device, which may wait for other ranks"):
                self.graphs.stream.synchronize()

    def waits_for_ranks(self) -> AbstractContextManager[None]:
        """A context for work on the model in which ranks wait for each other outside of `World`."""
        return contextlib.nullcontext()

    def close(self) -> None:  # noqa: B027  # most have none
        """Ends the processes that share the step."""


class OneDeviceStep(TrainStep):
    """The step of a process that is alone, on one device."""

    def run(self) -> None:
        """Trains on what has been copied to the device."""
        self.optimizer.zero_grad()
        totals = self.backward.run()  # forward and backward of each micro-batch
        norm = self.optimizer.step()  # clips and updates
        _add(totals, self._totals)
        self._totals[GRAD_NORM] += norm


class CpuProcessesStep(TrainStep):
    """The step of several processes that divide each micro-batch and the parameters, in shared memory of a CPU."""

    def __init__(self, *arguments: Any, work: PretrainingWork, num_processes: int) -> None:
        super().__init__(*arguments)
        self.processes = StepProcesses(self.backward, self.optimizer, work, num_processes)

    def _start_processes(self, batch: HostBatch, step: int, lr_scale: float) -> None:
        self.processes.start(batch, step, lr_scale)

    def run(self) -> None:
        """Trains on what the processes have been given; `step_processes` has the same steps as `OneDeviceStep`."""
        totals, norm = self.processes.run()
        _add(totals, self._totals)
        self._totals[GRAD_NORM] += norm

    def close(self) -> None:
        """Ends the processes that share the step."""
        self.processes.close()


class _RanksStep(TrainStep):
    """Steps whose totals count only if the step is not skipped, and whose gradient norm is the same on each rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spikes = SpikeGuard(self.device) if self.config.train.skip_spikes else None
        self._step_vector = torch.zeros_like(self._totals_vector)
        self._step_totals = dict(zip(self._totals, self._step_vector.unbind(), strict=True))

    def _set_stage(self, stage: Stage) -> None:
        super()._set_stage(stage)
        if self.spikes is not None:
            self.spikes.reset()

    def _count(self, norm: Tensor, skipped: Tensor | None) -> None:
        """Adds the step's totals to those of the log window, unless it was skipped."""
        if self.world.is_first:  # each rank has the same ones, and the totals of all ranks are added up
            self._step_totals[GRAD_NORM] += norm
        if skipped is not None:
            self._step_vector.masked_fill_(skipped > 0, 0.0)
            if self.world.is_first:
                self._step_totals[SKIPPED] += skipped
        self._totals_vector += self._step_vector


class DataParallelStep(_RanksStep):
    """The step of ranks that each hold the whole model and compute gradients of their own rows.

    Collectives run between CUDA graphs, where NCCL's watchdog can see them, unless `train.capture_collectives`. It is
    also the step of one rank with `train.reduce = "exact"` or `train.skip_spikes`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_exact = self.config.train.reduce == "exact"
        self.optimizer.divide_matrices(_matrix_division(self.world, self.backward.division, self._is_exact))
        self._make_buffer()
        self._own_work: list[tuple[Any, Any]] = []

    def run(self) -> None:
        """Trains on what has been copied to the device."""
        buffer, optimizer = self._buffer, self.optimizer
        self._step_vector.zero_()
        for group in range(len(self.backward.division.groups)):
            optimizer.zero_grad()
            totals = self.backward.run(group)  # forward and backward of each micro-batch
            _add(totals, self._step_totals)
            buffer.collect(group, self.backward.loss)
        buffer.sum_groups()
        self._communicate(self._end_own_work, buffer.reduce)
        buffer.hand_over()
        norm, skipped = global_norm(optimizer.gradients().values()), None
        if self.spikes is not None:
            skipped = self.spikes.judge(buffer.loss, norm)
            buffer.discard(skipped)
        optimizer.update(norm, skipped)  # clips and updates, up to Muon's matrices of other ranks
        if optimizer.rule.exchanges:
            self._communicate(optimizer.rule.exchange)
            optimizer.finish()
        self._count(norm, skipped)

    def _communicate(self, *functions: Any) -> None:
        """Runs a collective, which comes last; between two graphs, unless it is to be captured."""
        *others, collective = functions
        if self.world.size == 1:
            collective()
        elif self.config.train.capture_collectives:
            if others:
                self.graphs.outside(*others)
            collective()
        else:
            self.graphs.outside(*functions)

    def _run_or_replay(self, step: int) -> None:
        self._begin = self._mark()
        super()._run_or_replay(step)

    def _end_own_work(self) -> None:
        if self._begin is not None:
            self._own_work.append((self._begin, self._mark()))

    def _mark(self) -> Any:
        if self.graphs.stream is None or self.world.size == 1:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self.graphs.stream)
        return event

    def take_device_seconds(self) -> float:
        """As in the base class."""
        pairs, self._own_work = self._own_work, []
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3

    def _set_stage(self, stage: Stage) -> None:
        super()._set_stage(stage)
        self._make_buffer()

    def _make_buffer(self) -> None:
        self._buffer = GradientBuffer(self.optimizer.parameters, self.backward.division, self._is_exact, self.world)


class ShardedStep(_RanksStep):
    """The step of ranks that each hold some rows of every parameter; collectives come in all of it."""

    def __init__(self, *arguments: Any, shards: Shards) -> None:
        super().__init__(*arguments)
        self._shards = shards

    def _set_stage(self, stage: Stage) -> None:
        self.backward.set_stage(stage)
        self._shards.follow()
        super()._set_stage(stage)

    def run(self) -> None:
        """Trains on what has been copied to the device."""
        shards, optimizer = self._shards, self.optimizer
        self._step_vector.zero_()
        shards.zero_grad()
        with self.world.watched("a sharded step"):
            totals = self.backward.run()  # forward and backward; FSDP gathers weights and scatters gradients
            _add(totals, self._step_totals)
            shards.take_gradients()
            gradients = list(optimizer.gradients().values())
            loss, norm, skipped = self.backward.loss, shards.global_norm(gradients), None
            self.world.all_reduce(loss)
            if self.spikes is not None:
                skipped = self.spikes.judge(loss, norm)
                torch._foreach_copy_(gradients, [torch.where(skipped > 0, 0.0, each) for each in gradients])
            optimizer.step(norm, skipped)  # clips and updates
        self._count(norm, skipped)

    def waits_for_ranks(self) -> AbstractContextManager[None]:
        """As in the base class."""
        return self.world.watched("the other ranks' rows")


def create_step(
    model: Electra,
    optimizer: Optimizer,
    config: Config,
    compute: ComputeConfig,
    execution: str = "eager",
    num_processes: int | None = None,
    world: World | None = None,
    shards: Shards | None = None,
    wrap: Callable[[Forward], Forward] | None = None,
) -> TrainStep:
    """Returns the step for a model on its device.

    Args:
        model: Its parts that train are put into training mode, frozen ones into evaluation mode.
        optimizer: An optimizer of the model's parameters.
        config: Objective, micro-batches, schedule and seed.
        compute: Attention backend and activation dtype.
        execution: `eager`; `compile` (torch.compile of forward and backward, on CUDA inside a graph);
            `graph` (the eager kernels captured in CUDA graphs, which are replayed).
        num_processes: On a CPU, processes that share each micro-batch; by default as many as
            `step_processes.choose_num_processes` finds useful.
        world: The ranks among which the step's rows are divided; alone by default.
        shards: The rows of a sharded model's parameters that this rank holds.
        wrap: Wraps an objective's forward pass, if the model is sharded.
    """
    world, train = world or World(), config.train
    device, is_alone = next(model.parameters()).device, world.size == 1 and train.reduce == "fast"
    is_plain = is_alone and not train.skip_spikes and shards is None
    if num_processes is None:
        num_processes = choose_num_processes(config, device) if is_plain else 1
    division = Division.of(train, world.rank, world.size, num_processes)
    backward = Backward(model, config, compute, execution, 0, num_processes, division, wrap)
    arguments = (model, optimizer, config, backward, world, execution)
    step: TrainStep
    if shards is not None:
        step = ShardedStep(*arguments, shards=shards)
    elif num_processes > 1:
        buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
        work = PretrainingWork(config, type(objective_of(config)), compute, execution, buffers, model.num_entries)
        step = CpuProcessesStep(*arguments, work=work, num_processes=num_processes)
    elif is_plain:
        step = OneDeviceStep(*arguments)
    else:
        step = DataParallelStep(*arguments)
    if step.stage.frozen:
        step._set_stage(step.stage)
    return step


def _matrix_division(world: World, division: Division, is_exact: bool) -> MatrixDivision:
    """Divides Muon's matrices among the ranks of a node, or by the groups of exact sums.

    Among more ranks, parts of a few matrices would take longer to send than to compute (docs/scale.md).
    """
    if is_exact:
        return MatrixDivision(division.num_groups, division.own, world.all_gather_into if world.size > 1 else None)
    if len(world.node_ranks) < 2:
        return MatrixDivision()
    number = world.node_ranks.index(world.rank)
    return MatrixDivision(len(world.node_ranks), range(number, number + 1), world.all_gather_in_node)


def _add(totals: Iterable[Mapping[str, Tensor]], sums: Mapping[str, Tensor]) -> None:
    for each in totals:
        for name, total in each.items():
            sums[name].add_(total)
