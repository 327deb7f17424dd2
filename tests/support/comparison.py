"""Comparison of a kernel with its reference, each against fp64: the output and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Products by tensor cores: the interpreter's of bf16 are wrong, and some kernels have no fp32 form on a GPU.
DOT_DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32, torch.float16]
KEY = torch.tensor([2**40 + 7, 12, 77], device=DEVICE)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def output_and_gradients(function: Callable[..., Tensor], dy: Tensor, inputs: Sequence[Any]) -> list[Tensor]:
    """The output, and the gradients of the inputs that are not None."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    gradients = torch.autograd.grad(y, [x for x in leaves if x is not None], dy.to(y.dtype))
    return [y.detach(), *gradients]


def assert_no_worse(
    found: Sequence[Tensor],
    eager: Sequence[Tensor],
    truth: Sequence[Tensor],
    factor: float = 1.2,
    num_roundings: float | Callable[[Tensor], float] = 1.0,
    rounding: float | None = None,
    least_scale: float = 0.0,
) -> None:
    """The largest and the mean error are at most `factor` times eager PyTorch's in the same precision, plus roundings.

    A rounding is an ulp, or `rounding`, relative to the largest element, or to `least_scale` if that is larger. A
    function gives their number for each exact result.
    """
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        number = num_roundings(exact) if callable(num_roundings) else num_roundings
        relative = number * (torch.finfo(ours.dtype).eps if rounding is None else rounding)
        allowance = relative * max(least_scale, exact.abs().max().item())
        error, allowed = ours.double() - exact, theirs.double() - exact
        assert error.abs().max() <= factor * allowed.abs().max() + allowance
        assert error.square().mean().sqrt() <= factor * allowed.square().mean().sqrt() + allowance


def sum_roundings(num_terms: int) -> float:
    """Ulps of the largest sum by which fp32 sums of this many random terms differ in another order.

    The kernels' products add their terms one by one on a GPU, in fused multiply-adds; cuBLAS adds several parts, which
    has smaller errors. Each addition rounds a partial sum by half an ulp at most, and n such errors grow like the root
    of n: Higham and Mary (2019), "A new approach to probabilistic rounding error analysis".
    """
    return max(1.0, num_terms**0.5 / 2)


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def assert_strides_do_not_matter(function: Callable[..., Tensor], dy: Tensor, inputs: Sequence[Any]) -> None:
    """The same bits again, and with matrices in column order."""

    def strided(x: Any) -> Any:
        return x if x is None or x.dim() == 1 else x.T.contiguous().T

    found = output_and_gradients(function, strided(dy), [strided(x) for x in inputs])
    assert_same_bits(found, output_and_gradients(function, dy, inputs))
