"""One optimizer step over tensors at fixed addresses: eager, compiled, or one captured CUDA graph.

The trainer calls it once per step. Everything in `run` happens on the device and never synchronizes with
the host, so that a graph of it can be replayed; what changes from step to step (the batch, seed and step
number, the optimizer's scalars) is copied into tensors that it reads.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from electra_fast._data import RecordBatch
from electra_fast.compute import ComputeConfig
from electra_fast.config import Config
from electra_fast.data.loader import HostBatch
from electra_fast.errors import InputError
from electra_fast.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Stage
from electra_fast.training.allocator import keep_freed_memory
from electra_fast.training.backward import Backward, PretrainingWork
from electra_fast.training.optim import Optimizer, lr_scale
from electra_fast.training.step_processes import StepProcesses, choose_num_processes

# Eager steps before a capture: libraries allocate workspaces and kernels are compiled at first use.
WARM_UP = 3
# Steps that the host may run ahead of the device; more would only pile up pinned batches.
MAX_LEAD = 2
GRAD_NORM = "grad_norm"


def choose_execution(requested: str, device: torch.device) -> str:
    """Resolves `auto` to an execution mode; raises ValueError if the requested one is not available."""
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


class TrainStep:
    """Trains on one batch per call, without waiting for the device.

    Args:
        model: On its device; its parts that train are put into training mode, frozen ones into evaluation mode.
        optimizer: Of the model's parameters.
        config: Objective, micro-batches, schedule and seed.
        compute: Attention backend and activation dtype.
        execution: `eager`; `compile` (torch.compile of forward and backward, on CUDA inside a graph);
            `graph` (the eager kernels captured in one CUDA graph, which is replayed).
        num_processes: On a CPU, processes that share each micro-batch; by default as many as
            `step_processes.choose_num_processes` finds useful.

    The metric totals of the objective and the gradient norms (`GRAD_NORM`) add up on the device from call to call:
    `read_totals`, `set_totals`. `captures` lists the captures of the graph: a second one means that a batch did not
    fit the first one's tensors, or that another stage of the objective began. `compilations` has one entry per stage.
    """

    def __init__(
        self,
        model: Electra,
        optimizer: Optimizer,
        config: Config,
        compute: ComputeConfig,
        execution: str = "eager",
        num_processes: int | None = None,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.objective = objective_of(config)
        device = next(model.parameters()).device
        names = (*self.objective.metric_totals, GRAD_NORM)
        self._totals_vector = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._totals = dict(zip(names, self._totals_vector.unbind(), strict=True))
        if device.type == "cpu":
            keep_freed_memory()
        if num_processes is None:
            num_processes = choose_num_processes(config, device)
        self.backward = Backward(model, config, compute, execution, num_processes=num_processes)
        self.processes: StepProcesses | None = None
        if num_processes > 1:
            buffers = {name: buffer.numpy() for name, buffer in model.named_buffers()}
            work = PretrainingWork(config, type(self.objective), compute, execution, buffers)
            self.processes = StepProcesses(self.backward, optimizer, work, num_processes)
        self._captures = device.type == "cuda" and execution != "eager"
        # A stream of its own throughout: what runs before a capture must run where the capture does.
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recapture_reason = ""
        self._num_eager, self._batches_version, self._is_first_of_stage = 0, 0, True
        self._ends: deque[torch.cuda.Event] = deque()
        self.captures: list[Preparation] = []
        self.compilations: list[Preparation] = []
        if self.stage.frozen:
            self._set_stage(self.stage)

    @property
    def stage(self) -> Stage:
        """The objective's stage that trains now."""
        return self.backward.stage

    def __call__(self, rows: RecordBatch, step: int) -> None:
        """Takes the step with this number (0-based) on a batch of `data.loader.BatchLoader`."""
        self._enter_stage(step)
        batch, lr_scale = HostBatch.of(rows), self.lr_scale(step)
        if self.processes is not None:
            self.processes.start(batch, step, lr_scale)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.backward.load(batch, step)
            self.optimizer.set_step_scalars(lr_scale)
            self._run_or_replay(step)
            self._bound_the_lead()

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
        """The totals since they were last set; waits for the device."""
        self.synchronize()
        return dict(zip(self._totals, self._totals_vector.tolist(), strict=True))

    def set_totals(self, totals: Mapping[str, float]) -> None:
        """Sets the totals; 0 where a name is not among them."""
        values = [totals.get(name, 0.0) for name in self._totals]
        self._totals_vector.copy_(torch.tensor(values, dtype=torch.float64))

    def synchronize(self) -> None:
        """Waits for the device, and makes what is done next on the caller's stream see the steps taken."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.stream.synchronize()

    def run(self) -> None:
        """Forward, backward and update on what has been copied to the device: all that a graph holds."""
        if self.processes is None:
            self.optimizer.zero_grad()
            totals, norm = self.backward.run(), self.optimizer.step()
        else:
            totals, norm = self.processes.run()
        for each in totals:
            for name, total in each.items():
                self._totals[name] += total
        self._totals[GRAD_NORM] += norm

    def _run_or_replay(self, step: int) -> None:
        if self._batches_version != self.backward.micro_batches.version:
            # The tensors that a graph would read are gone; what compiles does so before the next capture.
            self._drop_graph("a batch has more segments than any before it")
            self._batches_version = self.backward.micro_batches.version
        if self._graph is not None:
            self._graph.replay()
        elif self._captures and self._num_eager >= WARM_UP:
            start, graph = time.perf_counter(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self.run()
            self.captures.append(Preparation(step, time.perf_counter() - start, self._recapture_reason))
            self._graph = graph
            graph.replay()
        else:
            start = time.perf_counter()
            self.run()
            if self.backward.is_compiled and self._is_first_of_stage:
                self.compilations.append(Preparation(step, time.perf_counter() - start))
            self._is_first_of_stage = False
            self._num_eager += 1

    def _drop_graph(self, reason: str) -> None:
        self._recapture_reason = reason if self._graph is not None else ""
        self._graph, self._num_eager = None, 0

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
        self._drop_graph("another stage of the objective began")

    def _bound_the_lead(self) -> None:
        if self.stream is not None:
            self._ends.append(self.stream.record_event())
            if len(self._ends) > MAX_LEAD:
                self._ends.popleft().synchronize()


@dataclass(frozen=True)
class StepTimes:
    """Seconds between the ends of consecutive steps: the median and the longest."""

    median: float
    longest: float


class StepTimer:
    """Seconds of training without its pauses, and the times of single steps, measured on the device where there is one.

    Nothing is read from the device before `stop`, by when the caller has waited for it.
    """

    def __init__(self, step: TrainStep) -> None:
        self._stream = step.stream
        self._marks: list[Any] = []
        self._step_seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Begins, or resumes after a pause."""
        self._started = time.perf_counter()
        self._marks = [self._mark()]

    def tick(self) -> None:
        """Marks the end of a step."""
        self._marks.append(self._mark())

    def stop(self) -> float:
        """Ends the span since `start` and returns its length in seconds."""
        pairs = itertools.pairwise(self._marks)
        if self._stream is None:
            self._step_seconds += [end - begin for begin, end in pairs]
        else:
            self._step_seconds += [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return time.perf_counter() - self._started

    def take_step_times(self) -> StepTimes | None:
        """The times of the steps since the last call; None where there was none."""
        seconds, self._step_seconds = sorted(self._step_seconds), []
        return StepTimes(seconds[len(seconds) // 2], seconds[-1]) if seconds else None

    def _mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return event
