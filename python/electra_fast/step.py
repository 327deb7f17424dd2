"""One optimizer step over tensors that stay where they are: eager, compiled, or one captured CUDA graph.

`pretrain` calls it once a step. Everything in `_run` happens on the device and depends on the host
for nothing, so that a graph of it can be replayed; what changes from step to step (the batch, seed
and step number, the optimizer's scalars) is copied into tensors that it reads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from electra_fast import electra
from electra_fast._data import RecordBatch
from electra_fast.config import Config
from electra_fast.data import MicroBatches
from electra_fast.electra import Backend, RngKey
from electra_fast.model import Electra
from electra_fast.optim import Optimizer, lr_scale

# Eager steps before a capture: libraries allocate workspaces and kernels are compiled at first use.
WARM_UP = 3
# Steps that the host may be ahead of the device; more would only pile up pinned batches.
AHEAD = 2


def choose_execution(requested: str, device: torch.device) -> str:
    """Resolves `auto` to how steps run; raises ValueError where the requested way can't be had."""
    if requested == "graph" and device.type != "cuda":
        raise ValueError(f'train.execution = "graph" needs a CUDA device, and this is {device.type}; set "auto"')
    if requested == "auto":
        return "graph" if device.type == "cuda" else "eager"
    return requested


@dataclass(frozen=True)
class Capture:
    """When the graph of a step was captured: before the step of this number, in so many seconds."""

    step: int
    seconds: float


class TrainStep:
    """Trains on one batch a call, without waiting for the device.

    Args:
        model: on its device, in training mode.
        optimizer: of the model's parameters.
        config: objective, micro-batches, schedule and seed.
        backend: attention backend and activation dtype.
        execution: `eager`; `compile` (torch.compile of forward and backward, on CUDA inside a graph);
            `graph` (the eager kernels captured in one CUDA graph, which is replayed).

    `sums` (fp64 [len(electra.SUMS) + 1], on the device) adds up `electra.SUMS` and the gradient norm
    of every step until the caller zeroes it in place; `synchronize` before reading or writing it.
    `captures` lists the captures of the graph: a second one means that a batch did not fit the first's tensors.
    """

    def __init__(
        self, model: Electra, optimizer: Optimizer, config: Config, backend: Backend, execution: str = "eager"
    ) -> None:
        self.model, self.optimizer, self.config, self.backend = model, optimizer, config, backend
        device = next(model.parameters()).device
        self.sums = torch.zeros(len(electra.SUMS) + 1, dtype=torch.float64, device=device)
        self._seed_and_step = torch.zeros(2, dtype=torch.int64, device=device)
        self._batches = MicroBatches(device, config.train.accumulate)
        rows = config.train.batch_size // config.train.accumulate
        self._first_rows = torch.arange(0, config.train.batch_size, rows, device=device)
        self._forward: Callable[..., electra.Output] = electra.forward
        if execution == "compile":
            self._forward = torch.compile(electra.forward, fullgraph=True, dynamic=False)
        self._captures = device.type == "cuda" and execution != "eager"
        # A stream of its own throughout: what runs before a capture must run where the capture does.
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_eager, self._generation = 0, 0
        self._ends: deque[torch.cuda.Event] = deque()
        self.captures: list[Capture] = []

    def __call__(self, rows: RecordBatch, step: int) -> None:
        """Takes the step with this number (0-based) on a batch of `data.BatchLoader`."""
        train = self.config.train
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            self._batches.load(rows)
            _send(self._seed_and_step, [train.seed, step])
            self.optimizer.set_step_scalars(lr_scale(self.config.optimizer, step, train.steps))
            # What draws from torch's own generator is keyed by the step, so that a resumed run draws the same.
            torch.manual_seed((train.seed * 0x9E3779B97F4A7C15 + step) % 2**63)
            self._run_or_replay(step)
            self._bound_the_lead()

    def synchronize(self) -> None:
        """Makes what is done next on the caller's stream see the steps taken."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.stream.synchronize()

    def _run_or_replay(self, step: int) -> None:
        if self._generation != self._batches.generation:
            # The tensors that a graph would read are gone; what compiles does so before the next capture.
            self._graph, self._generation, self._num_eager = None, self._batches.generation, 0
        if self._graph is not None:
            self._graph.replay()
        elif self._captures and self._num_eager >= WARM_UP:
            start, graph = time.perf_counter(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                self._run()
            self.captures.append(Capture(step, time.perf_counter() - start))
            self._graph = graph
            graph.replay()
        else:
            self._run()
            self._num_eager += 1

    def _run(self) -> None:
        self.optimizer.zero_grad()
        batches = self._batches.parts
        counts = torch.stack([electra.count(batch) for batch in batches]).sum(0)
        for batch, first_row in zip(batches, self._first_rows, strict=True):
            rng_key = RngKey(self._seed_and_step, first_row)
            output = self._forward(self.model, batch, self.backend, rng_key, counts)
            output.loss.backward()  # type: ignore[no-untyped-call]  # torch's own
            self.sums[:-1] += output.sums
        self.sums[-1] += self.optimizer.step()

    def _bound_the_lead(self) -> None:
        if self.stream is not None:
            self._ends.append(self.stream.record_event())
            if len(self._ends) > AHEAD:
                self._ends.popleft().synchronize()


def _send(target: Tensor, values: list[int]) -> None:
    target.copy_(torch.tensor(values, pin_memory=target.is_cuda), non_blocking=True)


@dataclass(frozen=True)
class StepTimes:
    """Seconds between the ends of consecutive steps: the middle one and the longest."""

    median: float
    longest: float


class StepClock:
    """Times of single steps, measured on the device where there is one, read without a wait of its own."""

    def __init__(self, step: TrainStep) -> None:
        self._stream = step.stream
        self._marks: list[Any] = []

    def start(self) -> None:
        """Forgets all and begins here: after a pause of training, or a reading."""
        self._marks = [self._mark()]

    def tick(self) -> None:
        """Marks the end of a step."""
        self._marks.append(self._mark())

    def read(self) -> StepTimes | None:
        """The times since `start`; call it when the device has been waited for anyway."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._stream is None:
            seconds = sorted(b - a for a, b in pairs)
        else:
            seconds = sorted(a.elapsed_time(b) / 1e3 for a, b in pairs)
        return StepTimes(seconds[len(seconds) // 2], seconds[-1]) if seconds else None

    def _mark(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(self._stream)
        return event
