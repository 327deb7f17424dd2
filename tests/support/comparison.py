"""Comparison of the errors of a kernel and its reference relative to fp64, for the output and every gradient."""

from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# For products on tensor cores: the interpreter computes them wrongly in bf16; some kernels have no fp32 form on a GPU.
DOT_DTYPES = [torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32, torch.float16]
KEY = torch.tensor([2**40 + 7, 12, 77], device=DEVICE)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def assert_no_worse(
    result: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor], rounding: float, min_scale: float = 0.0
) -> None:
    """Asserts that the largest and the mean error are at most 1.2 times those in eager PyTorch, plus a rounding error.

    The rounding error is relative to the largest element, or to `min_scale` if that is larger.
    """
    for ours, theirs, exact in zip(result, eager, truth, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        allowance = rounding * max(min_scale, exact.abs().max().item())
        error = ours.double() - exact
        allowed = theirs.double() - exact
        assert error.abs().max() <= 1.2 * allowed.abs().max() + allowance
        assert error.square().mean().sqrt() <= 1.2 * allowed.square().mean().sqrt() + allowance


def assert_same_bits(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected, strict=True))
