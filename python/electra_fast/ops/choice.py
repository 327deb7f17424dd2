"""The choice of an operation's implementation: kernel, reference, or CPU form."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

Impl = Literal["kernel", "reference"]
# None: by `_choices`, or else by device. Plain globals, because torch.compile of torch 2.11 cannot trace a ContextVar.
_impl: Impl | None = None
_choices: dict[str, str] = {}
# Takes the place of every operation while kernels are checked (`observe`).
_observer: Observer | None = None
# Set by the tests: to ask for an operation that the choices do not name is an error.
is_strict = False

# Names of all operations.
OPERATIONS: set[str] = set()

P = ParamSpec("P")
R = TypeVar("R")
Observer = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def operation(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function with a kernel and a reference, whose choice is named by the function's name."""
    OPERATIONS.add(function.__name__)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _observer is not None:
            found: R = _observer(function.__name__, function, args, kwargs)
            return found
        return function(*args, **kwargs)

    return call


@contextmanager
def observe(observer: Observer | None) -> Iterator[None]:
    """Calls `observer(name, function, args, kwargs)` in place of each operation within the context."""
    global _observer
    previous, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = previous


@contextmanager
def use_choices(choices: Mapping[str, str]) -> Iterator[None]:
    """Runs operations as chosen within the context: values are "reference", "kernel", or one of several kernels.

    Keys are those of `choice_key`, an operation's name for all widths, and "*" for all others. Without "*", choices
    name every operation that is called, and any other runs as its reference. Without any choices, operations run as
    their kernels on CUDA. As with `use_impl`, which takes precedence, the choice is read when an operation is called or
    traced.
    """
    global _choices
    previous, _choices = _choices, dict(choices)
    try:
        yield
    finally:
        _choices = previous


def choice_key(name: str, x: Tensor | None) -> str:
    """An operation at the width of its first floating-point matrix, such as "layer_norm:256"; without one, its name."""
    has_width = x is not None and x.dim() > 1 and x.is_floating_point()
    return f"{name}:{x.shape[-1]}" if has_width else name  # type: ignore[union-attr]  # has_width


def choice(name: str, x: Tensor) -> str:
    """Returns the implementation of an operation on this tensor: "reference", "kernel", or one of several kernels."""
    if _impl is not None:
        return _impl
    if not _choices:
        return "kernel" if x.is_cuda else "reference"
    for key in (choice_key(name, x), name, "*"):
        if key in _choices:
            return _choices[key]
    if is_strict:
        raise LookupError(f"{choice_key(name, x)} is not among the operations that were checked: {', '.join(_choices)}")
    return "reference"


@contextmanager
def use_impl(impl: Impl | None) -> Iterator[None]:
    """Runs every operation as its Triton kernel or as its reference within the context, on any device; None: as chosen.

    The choice is read when an operation is called or traced: torch.compile recompiles when it changes, a captured
    CUDA graph replays what it captured. It applies to the whole process, not to one thread. `gather_rows`
    has a single implementation. Raises RuntimeError for "kernel" without a CUDA device or Triton's interpreter.
    """
    global _impl
    if impl not in ("kernel", "reference", None):
        raise ValueError(f'impl is "kernel" or "reference", not {impl!r}')
    if impl == "kernel" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError('impl = "kernel" needs a CUDA device (or, for tests, TRITON_INTERPRET=1)')
    previous, _impl = _impl, impl
    try:
        yield
    finally:
        _impl = previous


def uses_kernels(x: Tensor, name: str) -> bool:
    """Returns True if the operation of this name runs as a Triton kernel on this tensor."""
    return choice(name, x) != "reference"


def may_use_kernels(device: torch.device) -> bool:
    """Returns True if any operation on this device may run as a Triton kernel."""
    return device.type == "cuda" or _impl == "kernel"


def uses_cpu_ops(x: Tensor, *, compiled: bool = False) -> bool:
    """Returns True if operations on this tensor run in their CPU form (`cpu_ops`).

    torch.compile traces the references, which it fuses itself, except for operations that set `compiled`.
    """
    is_free = _impl is None and not _choices
    return x.device.type == "cpu" and is_free and (compiled or not torch.compiler.is_compiling())
