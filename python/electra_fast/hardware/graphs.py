"""CUDA graphs of a step: warm-up, capture, replay, and capture again."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

# Eager runs before a capture: libraries allocate workspaces and kernels are compiled at first use.
WARM_UP = 3


@dataclass(frozen=True)
class Preparation:
    """A capture or a compilation: the step that it preceded, its seconds, and the reason if it was repeated."""

    step: int
    seconds: float
    reason: str = ""


@dataclass
class _Runs(Generic[T]):
    """The runs on tensors of one shape: the number of eager runs, the functions to replay, and the outputs."""

    num_eager: int = 0
    replays: list[Callable[[], None]] = field(default_factory=list)
    outputs: T | None = None


class GraphRunner(Generic[T]):
    """Runs a function on tensors at fixed addresses: eagerly at first, then captured in CUDA graphs and replayed.

    The function is written as if it always ran eagerly. It never synchronizes with the host, and passes work that a
    graph must not contain, such as collectives, to `outside`. The outputs of a replay are the tensors of the capture.

    All graphs share one memory pool, so together they need only the memory of the largest: a capture reuses memory that
    an earlier one freed. This is safe because replays run one after another on one stream, each graph writes its
    intermediate results before it reads them, and tensors that outlive a run are allocated elsewhere, in the eager runs
    or by the caller. Only the outputs are read after a replay, and the replay of another graph may overwrite them: copy
    them within `on_stream`, before the next `run`.

    Args:
        device: The device to run on.
        captures: Capture after `WARM_UP` eager runs; on CUDA only.

    `captures` lists the captures of all graphs. `stream` is a separate CUDA stream, since the runs before a capture
    must use the same stream as the capture; None on a CPU. `captures_graphs` is False if all runs are eager.
    """

    def __init__(self, device: torch.device, captures: bool) -> None:
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        self.captures: list[Preparation] = []
        self.captures_graphs = captures and device.type == "cuda"
        self._reason = ""
        self._pool: Any = None  # torch's handle
        self._runs: dict[Hashable, _Runs[T]] = {}
        self._replays: list[Callable[[], None]] | None = None
        self._open_graph = contextlib.ExitStack()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes `stream` current. Its work starts after all earlier work on the caller's stream."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Makes the caller's stream wait for `stream`."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def run(self, function: Callable[[], T], step: int = 0, key: Hashable = None) -> T:
        """Runs, captures or replays the function; call it within `on_stream`.

        Args:
            function: A function without arguments, the same in each call.
            step: The step's number, for `captures`.
            key: Identifies tensors at other addresses, which need separate graphs.
        """
        runs = self._runs.setdefault(key, _Runs())
        if not self.captures_graphs or (not runs.replays and runs.num_eager < WARM_UP):
            runs.num_eager += 1
            return function()
        if not runs.replays:
            start = time.perf_counter()
            runs.replays, runs.outputs = self._capture(function)
            self.captures.append(Preparation(step, time.perf_counter() - start, self._reason))
        for replay in runs.replays:
            replay()
        return runs.outputs  # type: ignore[return-value]  # set by the capture

    def outside(self, *functions: Callable[[], None]) -> None:
        """Runs functions eagerly: now, and at each replay between two graphs."""
        if self._replays is None:
            for function in functions:
                function()
            return
        self._open_graph.close()
        self._replays += functions
        self._begin_graph()

    def drop(self, reason: str) -> None:
        """Drops all graphs, because their tensors no longer exist. The next capture reports the reason."""
        self._reason = reason if any(runs.replays for runs in self._runs.values()) else ""
        self._runs.clear()
        self._pool = None  # torch frees a pool without graphs

    def _capture(self, function: Callable[[], T]) -> tuple[list[Callable[[], None]], T]:
        replays: list[Callable[[], None]] = []
        self._replays = replays
        try:
            with self._open_graph:
                self._begin_graph()
                outputs = function()
        finally:
            self._replays = None
        return replays, outputs

    def _begin_graph(self) -> None:
        assert self._replays is not None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._replays.append(self._open_graph.enter_context(captured(self.stream, self._pool)).replay)


@contextlib.contextmanager
def captured(stream: torch.cuda.Stream | None, pool: Any = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures the kernels launched in the block into a CUDA graph, with memory of `pool` (None: a new pool).

    Freeing a graph or an event during the capture would invalidate it. So garbage, for example from an earlier training
    in this process, is collected first. Other threads may use the device.
    """
    graph = torch.cuda.CUDAGraph()
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield graph
    finally:
        if was_enabled:
            gc.enable()
