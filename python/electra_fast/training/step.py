"""One optimizer step over tensors at fixed addresses: eager, compiled, or one captured CUDA graph.

The trainer calls it once per step. Everything in `run` happens on the device and never synchronizes with
the host, so that a graph of it can be replayed; what changes from step to step (the batch, seed and step
number, the optimizer's scalars) is copied into tensors that it reads.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from electra_fast._data import RecordBatch
from electra_fast.compute import ComputeConfig, RngKey
from electra_fast.config import Config
from electra_fast.data.loader import MicroBatches
from electra_fast.errors import InputError
from electra_fast.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Output, Stage
from electra_fast.training.allocator import keep_freed_memory
from electra_fast.training.optim import Optimizer, lr_scale
from electra_fast.training.step_threads import StepThreads, choose_num_threads

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
        model: On its device, in training mode.
        optimizer: Of the model's parameters.
        config: Objective, micro-batches, schedule and seed.
        compute: Attention backend and activation dtype.
        execution: `eager`; `compile` (torch.compile of forward and backward, on CUDA inside a graph);
            `graph` (the eager kernels captured in one CUDA graph, which is replayed).
        num_threads: On a CPU, threads that compute parts of each micro-batch side by side; by default as many as
            `step_threads.choose_num_threads` finds useful.

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
        num_threads: int | None = None,
    ) -> None:
        self.model, self.optimizer, self.config, self.compute = model, optimizer, config, compute
        self.objective = objective_of(config)
        self.stage = self.objective.stage(0)
        device = next(model.parameters()).device
        names = (*self.objective.metric_totals, GRAD_NORM)
        self._totals_vector = torch.zeros(len(names), dtype=torch.float64, device=device)
        self._totals = dict(zip(names, self._totals_vector.unbind(), strict=True))
        self._seed_and_step = torch.zeros(2, dtype=torch.int64, device=device)
        if device.type == "cpu":
            keep_freed_memory()
        self._num_threads = choose_num_threads(config, device) if num_threads is None else num_threads
        num_parts = config.train.accumulate * self._num_threads
        self.micro_batches = MicroBatches(device, num_parts)
        rows = config.train.batch_size // num_parts
        self._first_rows = torch.arange(0, config.train.batch_size, rows, device=device)
        self._threads = StepThreads(self._num_threads) if self._num_threads > 1 else None
        self._is_compiled = execution == "compile"
        self._forward = self._stage_forward()
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

    def __call__(self, rows: RecordBatch, step: int) -> None:
        """Takes the step with this number (0-based) on a batch of `data.loader.BatchLoader`."""
        train = self.config.train
        self._enter_stage(step)
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self.micro_batches.load(rows)
            _send(self._seed_and_step, [train.seed, step])
            self.optimizer.set_step_scalars(self.lr_scale(step))
            # What draws from torch's own generator is keyed by the step, so that a resumed run draws the same.
            torch.manual_seed((train.seed * 0x9E3779B97F4A7C15 + step) % 2**63)
            self._run_or_replay(step)
            self._bound_the_lead()

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
        self.optimizer.zero_grad()
        batches = self.micro_batches.parts
        per_batch = [self.stage.objective.loss_denominators(batch) for batch in batches]
        denominators = {name: torch.stack([each[name] for each in per_batch]).sum(0) for name in per_batch[0]}

        def forward(part: int) -> Output:
            key = RngKey(self._seed_and_step, self._first_rows[part])
            return self._forward(self.model, batches[part], self.compute, key, denominators)

        if self._threads is None:
            for part in range(len(batches)):
                output = forward(part)
                output.loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                self._add_totals(output.totals)
        else:
            for totals in self._threads.backward(forward, len(batches), list(self.optimizer.parameters.values())):
                self._add_totals(totals)
        self._totals[GRAD_NORM] += self.optimizer.step()

    def _add_totals(self, totals: Mapping[str, Tensor]) -> None:
        for name, total in totals.items():
            self._totals[name] += total

    def _run_or_replay(self, step: int) -> None:
        if self._batches_version != self.micro_batches.version:
            # The tensors that a graph would read are gone; what compiles does so before the next capture.
            self._drop_graph("a batch has more segments than any before it")
            self._batches_version = self.micro_batches.version
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
            if self._is_compiled and self._is_first_of_stage:
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
        self.stage = stage
        self.model.requires_grad_(True)
        for name in stage.frozen:
            self.model.get_submodule(name).requires_grad_(False)
        self.optimizer.reset()
        self._forward, self._is_first_of_stage = self._stage_forward(), True
        self._threads = StepThreads(self._num_threads) if self._num_threads > 1 else None
        self._drop_graph("another stage of the objective began")

    def _stage_forward(self) -> Callable[..., Output]:
        forward = self.stage.objective.forward
        return torch.compile(forward, fullgraph=True, dynamic=False) if self._is_compiled else forward

    def _bound_the_lead(self) -> None:
        if self.stream is not None:
            self._ends.append(self.stream.record_event())
            if len(self._ends) > MAX_LEAD:
                self._ends.popleft().synchronize()


def _send(target: Tensor, values: list[int]) -> None:
    target.copy_(torch.tensor(values, pin_memory=target.is_cuda), non_blocking=True)


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
