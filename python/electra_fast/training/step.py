"""One optimizer step over tensors at fixed addresses: eager, compiled, or captured in CUDA graphs.

The trainer calls it once per step. All that its phases do happens on the device and never synchronizes with the
host; what changes from step to step is copied into tensors that they read, so that graphs can be replayed. A rank that
is alone has one phase. With others, messages come between graphs, where NCCL's watchdog can see them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from electra_fast._data import RecordBatch
from electra_fast.config.config import Config
from electra_fast.data.loader import HostBatch
from electra_fast.errors import InputError
from electra_fast.model.compute import ComputeConfig, capture
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Stage
from electra_fast.training.allocator import keep_freed_memory
from electra_fast.training.backward import Backward, PretrainingWork
from electra_fast.training.division import Division
from electra_fast.training.faults import Faults
from electra_fast.training.gradient_buffer import GradientBuffer
from electra_fast.training.muon import MatrixDivision
from electra_fast.training.optim import Optimizer, global_norm, lr_scale
from electra_fast.training.spikes import SpikeGuard
from electra_fast.training.step_processes import StepProcesses, choose_num_processes
from electra_fast.training.world import World

if TYPE_CHECKING:
    from electra_fast.training.sharding import Shards

# Eager steps before a capture: libraries allocate workspaces and kernels are compiled at first use.
WARM_UP = 3
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


@dataclass(frozen=True)
class Preparation:
    """A capture of the CUDA graph, or a compilation: before which step, its seconds, and why it was needed again."""

    step: int
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Phase:
    """A part of the step; `is_captured`: one that a CUDA graph may hold."""

    run: Callable[[], None]
    is_captured: bool = True


class TrainStep:
    """Trains on one batch per call, without waiting for the device.

    Args:
        model: On its device; its parts that train are put into training mode, frozen ones into evaluation mode.
        optimizer: Of the model's parameters.
        config: Objective, micro-batches, schedule and seed.
        compute: Attention backend and activation dtype.
        execution: `eager`; `compile` (torch.compile of forward and backward, on CUDA inside a graph);
            `graph` (the eager kernels captured in CUDA graphs, which are replayed).
        num_processes: On a CPU, processes that share each micro-batch; by default as many as
            `step_processes.choose_num_processes` finds useful.
        world: The ranks among which the step's rows are divided; alone by default.
        faults: What is to happen to the losses of this rank, in tests.
        shards: Of the model, if each rank holds only some rows of its parameters.

    The metric totals of the objective and the gradient norms (`GRAD_NORM`) add up on the device from call to call:
    `read_totals`, `set_totals`. `captures` lists the captures of the graphs: a second one means that a batch did not
    fit the first one's tensors, or that another stage of the objective began. `compilations` has one entry per stage.
    `spikes` recognizes the steps to skip, if there are to be any.
    """

    def __init__(
        self,
        model: Electra,
        optimizer: Optimizer,
        config: Config,
        compute: ComputeConfig,
        execution: str = "eager",
        num_processes: int | None = None,
        world: World | None = None,
        faults: Faults | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.model, self.optimizer, self.config, self._faults = model, optimizer, config, faults
        self.world, self.objective = world or World(), objective_of(config)
        device = next(model.parameters()).device
        names = (*self.objective.metric_totals, GRAD_NORM, SKIPPED)
        self._totals_vector = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._totals = dict(zip(names, self._totals_vector.unbind(), strict=True))
        if device.type == "cpu":
            keep_freed_memory()
        train = config.train
        # What one process can do without copying its gradients, it does.
        self._is_plain = self.world.size == 1 and train.reduce == "fast" and not train.skip_spikes
        if num_processes is None:
            num_processes = choose_num_processes(config, device) if self._is_plain else 1
        division = Division.of(train, self.world.rank, self.world.size, num_processes)
        self.backward = Backward(model, config, compute, execution, 0, num_processes, division, shards)
        self.processes: StepProcesses | None = None
        if num_processes > 1:
            buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
            work = PretrainingWork(config, type(self.objective), compute, execution, buffers, model.num_entries)
            self.processes = StepProcesses(self.backward, optimizer, work, num_processes)
        self.spikes = SpikeGuard(device) if train.skip_spikes else None
        if not self._is_plain:
            self._step_vector = torch.zeros_like(self._totals_vector)
            self._step_totals = dict(zip(names, self._step_vector.unbind(), strict=True))
            if shards is None:
                optimizer.divide_matrices(
                    MatrixDivision.among(self.world, division if train.reduce == "exact" else None)
                )
        self._captures = device.type == "cuda" and execution != "eager"
        # A stream of its own throughout: what runs before a capture must run where the capture does.
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._replays: list[Callable[[], None]] = []
        self._recapture_reason = ""
        self._num_eager, self._batches_version, self._is_first_of_stage = 0, 0, True
        self._ends: deque[torch.cuda.Event] = deque()
        self._own_work: list[tuple[Any, Any]] = []
        self.captures: list[Preparation] = []
        self.compilations: list[Preparation] = []
        if self.stage.frozen:
            self._set_stage(self.stage)
        else:
            self._make_buffer()

    @property
    def stage(self) -> Stage:
        """The objective's stage that trains now."""
        return self.backward.stage

    def __call__(self, rows: RecordBatch, step: int, news: Sequence[float] = ()) -> list[float]:
        """Takes the step with this number (0-based) on a batch of `data.loader.BatchLoader`.

        Returns the greatest of each of the `news` that the ranks tell each other with it.
        """
        self._enter_stage(step)
        batch, lr_scale = HostBatch.of(rows), self.lr_scale(step)
        if self.processes is not None:
            self.processes.start(batch, step, lr_scale)
        denominators, news = self._exchange(batch, news)
        if self._faults:
            denominators = self._faults.denominators(step, denominators)
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.backward.load(batch, step, denominators)
            self.optimizer.set_step_scalars(lr_scale)
            self._run_or_replay(step)
            self._bound_the_lead()
        return list(news)

    def _exchange(self, batch: HostBatch, news: Sequence[float]) -> tuple[Tensor, Sequence[float]]:
        """The denominators of all ranks' rows, and the greatest of each of their news."""
        own_GK = self.backward.group_denominators(batch)
        if self.world.size == 1:
            return own_GK.sum(0), news
        # NCCL wants a captured message to be captured, and replayed, by all ranks at once.
        is_larger = self.config.train.capture_collectives and not self.backward.micro_batches.fits(batch)
        message = torch.cat((torch.tensor([*news, is_larger], dtype=torch.float64), own_GK.flatten()))
        found = self.world.exchange(message)
        *news, is_any_larger = found[:, : len(news) + 1].amax(0).tolist()
        if is_any_larger:
            self._drop_graph("a batch of some rank has more segments than any before it")
        return found[:, len(news) + 1 :].reshape(-1, own_GK.shape[1]).sum(0), news

    def close(self) -> None:
        """Ends the processes that help with the step, which otherwise end with this object."""
        if self.processes is not None:
            self.processes.close()

    def lr_scale(self, step: int) -> float:
        """The learning rate of a step relative to its peak, by the schedule of the step's stage."""
        stage = self.objective.stage(step)
        return lr_scale(self.config.optimizer, step - stage.first_step, stage.num_steps)

    def resume(self, step: int) -> None:
        """Restores the stage that trained last before this step. Call it before the optimizer's state is loaded."""
        stage = self.objective.stage(max(0, step - 1))
        if stage != self.stage:
            self._set_stage(stage)

    def read_totals(self) -> dict[str, float]:
        """The totals of all ranks since they were last set; waits for the device and for the other ranks."""
        self.synchronize()
        sums = self.world.exchange(self._totals_vector.cpu()).sum(0)
        totals = dict(zip(self._totals, sums.tolist(), strict=True))
        if self.world.size > 1:
            self.set_totals(totals)
        return totals

    def take_device_seconds(self) -> float:
        """Seconds that the device has spent on this rank's own gradients since the last call, if there are other ranks.

        Call it after `read_totals`, which waits for the device; 0 on a CPU.
        """
        pairs, self._own_work = self._own_work, []
        return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1e3

    def set_totals(self, totals: Mapping[str, float]) -> None:
        """Sets the totals of all ranks, which the first one keeps; 0 where a name is not among them."""
        values = [totals.get(name, 0.0) if self.world.is_first else 0.0 for name in self._totals]
        self._totals_vector.copy_(torch.tensor(values, dtype=torch.float64))

    def synchronize(self) -> None:
        """Waits for the device, and makes what is done next on the caller's stream see the steps taken."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            with self.world.waiting("the device, which may wait for other ranks"):
                self.stream.synchronize()

    def _make_buffer(self) -> None:
        if not self._is_plain and self.backward.shards is None:
            is_exact = self.config.train.reduce == "exact"
            self._buffer = GradientBuffer(self.optimizer.parameters, self.backward.division, is_exact, self.world)

    def run(self) -> None:
        """Forward, backward and update on what has been copied to the device: all phases, one after another."""
        for phase in self._phases():
            phase.run()

    def _phases(self) -> list[Phase]:
        if self._is_plain:
            return [Phase(self._run_alone)]
        if self.backward.shards is not None:
            return [Phase(self._run_sharded, is_captured=False)]
        is_captured = self.world.size == 1 or self.config.train.capture_collectives
        phases = [Phase(self._compute_gradients), Phase(self._buffer.reduce, is_captured), Phase(self._update)]
        if self.optimizer.exchanges:
            phases += [Phase(self.optimizer.exchange, is_captured), Phase(self.optimizer.finish)]
        return phases

    def _run_alone(self) -> None:
        """The whole step of a rank without others."""
        if self.processes is None:
            self.optimizer.zero_grad()
            totals, norm = self.backward.run(), self.optimizer.step()
        else:
            totals, norm = self.processes.run()
        _add(totals, self._totals)
        self._totals[GRAD_NORM] += norm

    def _compute_gradients(self) -> None:
        """Gradients, loss and metric totals of this rank's rows, in the buffers whose sums are to be told."""
        self._step_vector.zero_()
        for group in range(len(self.backward.division.groups)):
            self.optimizer.zero_grad()
            _add(self.backward.run(group), self._step_totals)
            self._buffer.collect(group, self.backward.loss)
        self._buffer.sum_groups()

    def _run_sharded(self) -> None:
        """The whole step of a rank that holds some rows of the parameters; messages come in all of it."""
        shards = self.backward.shards
        assert shards is not None
        self._step_vector.zero_()
        shards.zero_grad()
        with self.world.watched("a sharded step"):
            _add(self.backward.run(), self._step_totals)
            shards.take_gradients()
            gradients = list(self.optimizer.gradients().values())
            loss, norm = self.backward.loss, shards.global_norm(gradients)
            self.world.sum(loss)
            skipped = None
            if self.spikes is not None:
                skipped = self.spikes.judge(loss, norm)
                torch._foreach_copy_(gradients, [torch.where(skipped > 0, 0.0, each) for each in gradients])
            self.optimizer.step(norm, skipped)
        self._count(norm, skipped)

    def _update(self) -> None:
        """The update by the gradients of all ranks, up to what these have to tell each other about it."""
        self._buffer.hand_over()
        norm, skipped = global_norm(self.optimizer.gradients().values()), None
        if self.spikes is not None:
            skipped = self.spikes.judge(self._buffer.loss, norm)
            self._buffer.discard(skipped)
        self.optimizer.prepare(norm, skipped)
        if not self.optimizer.exchanges:
            self.optimizer.finish()
        self._count(norm, skipped)

    def _count(self, norm: Tensor, skipped: Tensor | None) -> None:
        """Adds the step's totals to those of the log window, unless it was skipped."""
        if self.world.is_first:  # each rank has the same ones, and the totals of all ranks are added up
            self._step_totals[GRAD_NORM] += norm
        if skipped is not None:
            self._step_vector.masked_fill_(skipped > 0, 0.0)
            if self.world.is_first:
                self._step_totals[SKIPPED] += skipped
        self._totals_vector += self._step_vector

    def _run(self, phases: Sequence[Callable[[], None]]) -> None:
        """Runs the phases, and measures the first, which is this rank's own work on the device."""
        begin = self._mark()
        for number, run_phase in enumerate(phases):
            run_phase()
            if number == 0 and begin is not None:
                self._own_work.append((begin, self._mark()))

    def _mark(self) -> Any:
        if self.stream is None or self.world.size == 1 or self.backward.shards is not None:
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self.stream)
        return event

    def _run_or_replay(self, step: int) -> None:
        if self._batches_version != self.backward.micro_batches.version:
            # The tensors that a graph would read are gone; what compiles does so before the next capture.
            self._drop_graph("a batch has more segments than any before it")
            self._batches_version = self.backward.micro_batches.version
        if self._replays:
            self._run(self._replays)
        elif self._captures and self._num_eager >= WARM_UP:
            start = time.perf_counter()
            self._replays = [self._capture(phase) for phase in self._phases()]
            self.captures.append(Preparation(step, time.perf_counter() - start, self._recapture_reason))
            self._run(self._replays)
        else:
            start = time.perf_counter()
            self._run([phase.run for phase in self._phases()])
            if self.backward.is_compiled and self._is_first_of_stage:
                self.compilations.append(Preparation(step, time.perf_counter() - start))
            self._is_first_of_stage = False
            self._num_eager += 1

    def _capture(self, phase: Phase) -> Callable[[], None]:
        """A graph of a phase, or the phase itself where it is not to be captured."""
        if not phase.is_captured:
            return phase.run
        with capture(self.stream) as graph:
            phase.run()
        return graph.replay

    def _drop_graph(self, reason: str) -> None:
        self._recapture_reason, self._replays, self._num_eager = reason if self._replays else "", [], 0

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
        self._make_buffer()
        if self.spikes is not None:
            self.spikes.reset()
        self._is_first_of_stage = True
        self._drop_graph("another stage of the objective began")

    def _bound_the_lead(self) -> None:
        if self.stream is not None:
            self._ends.append(self.stream.record_event())
            if len(self._ends) > MAX_LEAD:
                with self.world.waiting("the device, which may wait for other ranks"):
                    self._ends.popleft().synchronize()


def _add(totals: Sequence[Mapping[str, Tensor]], sums: Mapping[str, Tensor]) -> None:
    for each in totals:
        for name, total in each.items():
            sums[name].add_(total)
