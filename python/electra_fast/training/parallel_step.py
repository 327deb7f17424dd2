"""The steps of several processes: on a CPU, data parallel over ranks, and sharded over ranks; `create_step` chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.data.loader import BatchLoader, HostBatch
from electra_fast.distributed.division import Division
from electra_fast.distributed.gradient_buffer import GradientBuffer
from electra_fast.distributed.step_processes import StepProcesses, Work, choose_num_processes
from electra_fast.distributed.world import World
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import OBJECTIVES, objective_of
from electra_fast.objectives.objective import Forward, Objective, Stage
from electra_fast.optimizers.optimizer import Optimizer, global_norm
from electra_fast.optimizers.rules import MatrixDivision
from electra_fast.optimizers.shards import Shards
from electra_fast.training.loss_scaling import discard, loss_scaler
from electra_fast.training.step import GRAD_NORM, SKIPPED, Backward, OneDeviceStep, TrainStep, add_totals


@dataclass(frozen=True)
class PretrainingWork(Work):
    """The steps of a pre-training run."""

    config: Config
    objective: type[Objective]
    """The class of `objective.name`, which may be defined outside this package."""
    compute: ComputeConfig
    execution: str
    buffers: Mapping[str, NDArray[Any]]
    """The model's buffers, by name."""
    num_entries: int
    """Size of the vocabulary. The model's tables may be larger."""

    def build_worker(self, rank: int, num_processes: int) -> tuple[Backward, Optimizer]:
        OBJECTIVES[self.config.objective.name] = self.objective
        model = Electra(self.config)
        model.limit_vocabulary(self.num_entries)
        for name, values in self.buffers.items():
            model.get_buffer(name).copy_(torch.from_numpy(values))
        backward = Backward(model, self.config, self.compute, self.execution, rank, num_processes)
        # Has the parameters of the first stage.
        optimizer = Optimizer(model.named_parameters(), self.config.optimizer, matrix_dtype=self.compute.dtype)
        return backward, optimizer


class CpuProcessesStep(TrainStep):
    """The step of several processes on a CPU, which divide each micro-batch and the parameters in shared memory."""

    def __init__(self, *arguments: Any, work: PretrainingWork, num_processes: int) -> None:
        super().__init__(*arguments)
        self.processes = StepProcesses(self.backward, self.optimizer, work, num_processes)

    def _start_processes(self, batch: HostBatch, step: int, lr_scale: float) -> None:
        self.processes.start(batch, step, lr_scale)

    def run(self) -> None:
        totals, norm = self.processes.run()
        add_totals(totals, self._totals)
        self._totals[GRAD_NORM] += norm

    def close(self) -> None:
        self.processes.close()


class _RanksStep(TrainStep):
    """Steps whose totals count only if the step is not skipped, and whose gradient norm is the same on each rank."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scaler = loss_scaler(self.backward.compute, self.device)
        self.backward.loss_scale = None if self.scaler is None else self.scaler.scale
        self._step_vector = torch.zeros_like(self._totals_vector)
        self._step_totals = dict(zip(self._totals, self._step_vector.unbind(), strict=True))

    def _count(self, norm: Tensor, skipped: Tensor | None) -> None:
        if self.world.is_first:  # all ranks have the same norm, and their totals are summed
            self._step_totals[GRAD_NORM] += norm
        if skipped is not None:
            self._step_vector.masked_fill_(skipped > 0, 0.0)
            if self.world.is_first:
                self._step_totals[SKIPPED] += skipped
        self._totals_vector += self._step_vector


class DataParallelStep(_RanksStep):
    """The step of ranks that each hold the whole model and compute the gradients of some rows.

    Collectives run between CUDA graphs, where NCCL's watchdog can see them. A single rank with `train.reduce = "exact"`
    or fp16 also uses this class.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._is_exact = self.config.train.reduce == "exact"
        self.optimizer.rule.divide_matrices(_matrix_division(self.world, self.backward.division, self._is_exact))
        self._make_buffer()
        self._gradient_events: list[tuple[Any, Any]] = []

    def run(self) -> None:
        buffer = self._buffer
        optimizer = self.optimizer
        self._step_vector.zero_()
        for group in range(len(self.backward.division.groups)):
            optimizer.zero_grad()
            totals = self.backward.run(group)  # forward and backward of each micro-batch
            add_totals(totals, self._step_totals)
            buffer.collect(group)
        buffer.sum_groups()
        self._communicate(self._end_gradients, buffer.reduce)
        buffer.hand_over()
        gradients = list(optimizer.gradients().values())
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        norm = global_norm(gradients)
        skipped = None if self.scaler is None else self.scaler.adapt(norm)
        if skipped is not None:
            buffer.discard(skipped)
        optimizer.update(norm, skipped)  # clips and updates, up to matrices of other ranks
        if optimizer.rule.exchanges:
            self._communicate(optimizer.rule.exchange)
            optimizer.finish()
        self._count(norm, skipped)

    def _communicate(self, *functions: Any) -> None:
        """Runs functions, the last of which is a collective, between two graphs. A single rank runs only the last."""
        if self.world.size == 1:
            functions[-1]()
        else:
            self.graphs.outside(*functions)

    def _run_or_replay(self, step: int) -> None:
        self._begin = None if self.graphs.stream is None or self.world.size == 1 else self.mark()
        super()._run_or_replay(step)

    def _end_gradients(self) -> None:
        if self._begin is not None:
            self._gradient_events.append((self._begin, self.mark()))

    def take_device_seconds(self) -> float:
        pairs = self._gradient_events
        self._gradient_events = []
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3

    def _set_stage(self, stage: Stage) -> None:
        super()._set_stage(stage)
        self._make_buffer()

    def _make_buffer(self) -> None:
        self._buffer = GradientBuffer(self.optimizer.parameters, self.backward.division, self._is_exact, self.world)


class ShardedStep(_RanksStep):
    """The step of ranks that each hold some rows of every parameter. Collectives run throughout the step."""

    def __init__(self, *arguments: Any, shards: Shards) -> None:
        super().__init__(*arguments)
        self._shards = shards

    def _set_stage(self, stage: Stage) -> None:
        self.backward.set_stage(stage)
        self._shards.follow()
        super()._set_stage(stage)

    def run(self) -> None:
        shards = self._shards
        optimizer = self.optimizer
        self._step_vector.zero_()
        shards.zero_grad()
        with self.world.watched("a sharded step"):
            totals = self.backward.run()  # forward and backward; FSDP gathers weights and scatters gradients
            add_totals(totals, self._step_totals)
            shards.take_gradients()
            gradients = list(optimizer.gradients().values())
            if self.scaler is not None:
                self.scaler.unscale(gradients)
            norm = shards.global_norm(gradients)
            skipped = None if self.scaler is None else self.scaler.adapt(norm)
            if skipped is not None:
                discard(gradients, skipped)
            optimizer.step(norm, skipped)  # clips and updates
        self._count(norm, skipped)

    def waits_for_ranks(self) -> AbstractContextManager[None]:
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
        model: The model. Its trained parts are put into training mode, frozen parts into evaluation mode.
        optimizer: An optimizer of the model's parameters.
        config: Objective, micro-batches, schedule and seed.
        compute: Attention backend and activation dtype.
        execution: `eager`; `compile` (torch.compile of forward and backward, on CUDA inside a graph);
            `graph` (the eager kernels captured in CUDA graphs, which are replayed); `branches` (a graph in which
            independent operations run in parallel, `ops.branches`).
        num_processes: On a CPU, the number of processes that share each micro-batch; by default
            `step_processes.choose_num_processes`.
        world: The ranks that share the step's rows; a single rank by default.
        shards: The rows of a sharded model's parameters that this rank holds.
        wrap: Wraps an objective's forward pass, if the model is sharded.
    """
    world = world or World()
    train = config.train
    device = next(model.parameters()).device
    is_alone = world.size == 1 and train.reduce == "fast"
    is_plain = is_alone and compute.dtype != torch.float16 and shards is None
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


def time_steps(
    config: Config, compute: ComputeConfig, execution: str, device: torch.device, num_steps: int
) -> tuple[list[float], dict[str, float]]:
    """Returns the seconds of each of a run's first steps, and the totals of losses and gradient norms."""
    model = Electra(config).to(device)
    optimizer = Optimizer(model.named_parameters(), config.optimizer, matrix_dtype=compute.dtype)
    step = create_step(model, optimizer, config, compute, execution)
    loader = BatchLoader.from_config(config, num_threads=1, prefetch=1)
    times = []
    for number in range(num_steps):
        rows = next(loader)
        step.synchronize()
        start = time.perf_counter()
        step(rows, number)
        step.synchronize()
        times.append(time.perf_counter() - start)
    totals = step.read_totals()
    return times, {name: total for name, total in totals.items() if name.endswith("_loss") or name == GRAD_NORM}


def _matrix_division(world: World, division: Division, is_exact: bool) -> MatrixDivision:
    """Divides matrices among the ranks of a node, or according to the groups of exact sums.

    Among more ranks, sending the results would take longer than computing them (bench/MANY_GPUS.md).
    """
    if is_exact:
        gather = world.all_gather_into if world.size > 1 else None
        return MatrixDivision(division.num_groups, division.local_groups, gather)
    if len(world.node_ranks) < 2:
        return MatrixDivision()
    number = world.node_ranks.index(world.rank)
    return MatrixDivision(len(world.node_ranks), range(number, number + 1), world.all_gather_in_node)
