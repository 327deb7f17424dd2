"""Branches of a captured CUDA graph: side streams for work that can run at the same time.

A kernel of a small model fills only a part of a GPU. Within `use_branches`, and only while a graph is captured,
`Branch` starts work on a side stream, and `on_branch` runs a network there, so that its backward pass is also a branch.

A side stream belongs to one current stream and waits for it before any work. The allocator reuses freed memory of a
stream in that stream's order, so it can safely reuse memory of a branch that the current stream has read. In the
other direction, the inputs of a branch stay alive until the current stream has waited for the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Plain globals, because autograd's threads read them, too.
_is_enabled = False
_sides: dict[tuple[torch.cuda.Stream, int], torch.cuda.Stream] = {}
# Inputs and outputs of networks on branches, by the branch; they stay alive until the wait for the backward passes.
_networks: list[tuple[torch.cuda.Stream, Any]] = []
# Alive until the capture has ended.
_events: list[torch.cuda.Event] = []
_NETWORK_LANE = -1


@contextmanager
def use_branches(enabled: bool) -> Iterator[None]:
    """Allows branches in graphs that are captured within the context."""
    global _is_enabled
    previous = _is_enabled
    _is_enabled = enabled
    # A table that both networks read gets gradients from two streams; autograd waits for both, but warns.
    warn = torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch
    warn(not enabled)
    try:
        yield
    finally:
        warn(not previous)
        _is_enabled = previous
        _networks.clear()
        _events.clear()


def on_branch(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls a function on a side stream and waits for it; its backward pass is a branch, and `join` waits for that.

    Autograd runs the backward pass of each operation on the stream of its forward pass.
    """
    if not _has_branches():
        return function(*args, **kwargs)
    current = torch.cuda.current_stream()
    side = _side(current, _NETWORK_LANE)
    side.wait_event(_event(current))
    with torch.cuda.stream(side):
        output = function(*args, **kwargs)
        end = _event(side)
    current.wait_event(end)
    _networks.append((side, (args, kwargs, output)))
    return output


def join() -> None:
    """Waits for the backward passes of `on_branch`."""
    for side in dict.fromkeys(side for side, _ in _networks):
        torch.cuda.current_stream().wait_event(_event(side))
    _networks.clear()


class Branch(Generic[R]):
    """A function call on a side stream; the current stream waits for it only in `result`.

    The function's inputs must not change before `result` is called. Calls with the same `lane` run one after another.
    """

    def __init__(self, function: Callable[..., R], *args: Any, lane: int = 0) -> None:
        self._end: torch.cuda.Event | None = None
        if not _has_branches():
            self._output = function(*args)
            return
        current = torch.cuda.current_stream()
        self._args = args
        side = _side(current, lane)
        side.wait_event(_event(current))
        with torch.cuda.stream(side):
            self._output = function(*args)
            self._end = _event(side)

    def result(self) -> R:
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
            self._args = ()
        return self._output


def _has_branches() -> bool:
    return _is_enabled and torch.cuda.is_current_stream_capturing()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Records an event after the current work of a stream."""
    _events.append(stream.record_event())
    return _events[-1]


def _side(current: torch.cuda.Stream, lane: int) -> torch.cuda.Stream:
    """Returns an unused side stream; torch hands out its 32 streams per device in turn, so used ones are skipped."""
    if (current, lane) not in _sides:
        used = {current, *_sides.values(), *(stream for stream, _ in _sides)}
        streams = (torch.cuda.Stream(current.device) for _ in range(64))
        _sides[current, lane] = next(stream for stream in streams if stream not in used)
    return _sides[current, lane]
