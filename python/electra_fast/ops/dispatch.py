"""Selects the implementation of an operation: its kernel, its CPU form, or its reference."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

Impl = Literal["kernel", "reference"]
# None: by device. A plain global, because torch.compile of torch 2.11 cannot trace a ContextVar.
_impl: Impl | None = None


@contextmanager
def use_impl(impl: Impl) -> Iterator[None]:
    """Runs every operation as its Triton kernel or as its reference within the context, on any device.

    The choice is read when an operation is called or traced: torch.compile recompiles when it changes, a captured
    CUDA graph replays what it captured. It applies to the whole process, not to one thread. `gather_rows`
    has a single implementation. Raises RuntimeError for "kernel" without a CUDA device or Triton's interpreter.
    """
    global _impl
    if impl not in ("kernel", "reference"):
        raise ValueError(f'impl is "kernel" or "reference", not {impl!r}')
    if impl == "kernel" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError('impl = "kernel" needs a CUDA device (or, for tests, TRITON_INTERPRET=1)')
    previous, _impl = _impl, impl
    try:
        yield
    finally:
        _impl = previous


def uses_kernels(x: Tensor) -> bool:
    """Returns True if operations on this tensor run as Triton kernels."""
    return x.is_cuda if _impl is None else _impl == "kernel"


def uses_cpu_ops(x: Tensor, *, compiled: bool = False) -> bool:
    """Returns True if operations on this tensor run in their CPU form (`cpu_ops`).

    torch.compile traces the references, which it fuses itself, except for operations that set `compiled`.
    """
    return x.device.type == "cpu" and _impl is None and (compiled or not torch.compiler.is_compiling())


def kernels() -> Any:
    """The launchers, imported at first use: machines without a GPU need not have Triton."""
    from electra_fast.kernels import launchers

    return launchers


def define_operator(name: str, dispatch_key: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Registers an operator, which torch.compile does not trace into; returns its qualified name.

    `torch.library.custom_op` does the same, but its calls import the compiler: seconds before the first step of a run.
    """
    name = f"electra_fast::{name}"
    torch.library.define(name, torch.library.infer_schema(implementation, mutates_args=()))
    torch.library.impl(name, dispatch_key, implementation)
    torch.library.register_fake(name, fake)
    return name
