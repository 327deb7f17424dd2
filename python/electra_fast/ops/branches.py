"""Branches of a captured CUDA graph: streams beside the current one, for work that can run at the same time.

A kernel of a small model fills a part of a GPU. Within `use_branches`, and only while a graph is captured, `Beside`
starts work on another stream, and `on_branch` runs a network whose backward pass then is a branch of its own.

A stream beside another belongs to that one alone, and begins everything with a wait for it. So the allocator, which
reuses freed memory of a stream in the order of that stream, may reuse memory of a branch that the other stream has
read. In the other direction, what a branch reads is kept until the branch has been waited for.
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
# What networks on branches have read and given, by the branch, until their backward passes have been waited for.
_networks: list[tuple[torch.cuda.Stream, Any]] = []
# Kept until the capture has ended.
_events: list[torch.cuda.Event] = []
_NETWORK_LANE = -1


@contextmanager
def use_branches(enabled: bool) -> Iterator[None]:
    """Lets graphs that are captured within the context have branches."""
    global _is_enabled
    previous = _is_enabled
    _is_enabled = enabled
    # A table that both networks read gets gradients from two streams, for which autograd waits, and warns.
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
    """Calls a function on another stream, and waits for it; its backward pass is a branch, which `join` waits for.

    Autograd runs the backward pass of each operation on the stream of its forward pass.
    """
    if not _branches_here():
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


class Beside(Generic[R]):
    """A function's call on a stream beside the current one, which waits for it in `result`, and only there.

    Nothing may change what the function reads before `result` has been called. Calls with the same `lane` follow one
    another.
    """

    def __init__(self, function: Callable[..., R], *args: Any, lane: int = 0) -> None:
        self._end: torch.cuda.Event | None = None
        if not _branches_here():
            self._found = function(*args)
            return
        current = torch.cuda.current_stream()
        self._args = args
        side = _side(current, lane)
        side.wait_event(_event(current))
        with torch.cuda.stream(side):
            self._found = function(*args)
            self._end = _event(side)

    def result(self) -> R:
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
            self._args = ()
        return self._found


def _branches_here() -> bool:
    return _is_enabled and torch.cuda.is_current_stream_capturing()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The end of what a stream has to do now."""
    _events.append(stream.record_event())
    return _events[-1]


def _side(current: torch.cuda.Stream, lane: int) -> torch.cuda.Stream:
    """A stream beside another; torch has 32 per device and gives them out in turn, but none of these twice."""
    if (current, lane) not in _sides:
        used = {current, *_sides.values(), *(stream for stream, _ in _sides)}
        streams = (torch.cuda.Stream(current.device) for _ in range(64))
        _sides[current, lane] = next(stream for stream in streams if stream not in used)
    return _sides[current, lane]
