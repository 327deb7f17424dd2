"""The exact GELU and its derivative without erf, shared by the kernels that fuse it (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _upper_tail(a):
    """P(X > a) of a standard normal X, for a >= 0, as 2^-g(a).

    g is a minimax polynomial of degree 8, weighted by the error in x * cdf(x), which stays below fp32's
    rounding. 1 + erf(x) cancels for negative x and needs twice the instructions, which would make these
    memory-bound kernels compute-bound.
    """
    g = 1.5727908e-4 + a * (-3.2968070e-5 + a * 2.2758757e-6)
    g = 5.2546434e-2 + a * (-7.1427803e-3 + a * (2.0247810e-4 + a * g))
    return tl.exp2(-1.0 - a * (1.1511070 + a * (4.5919305e-1 + a * g)))


@triton.jit
def gelu(x):
    """x * cdf(x)."""
    a = tl.abs(x)
    return tl.maximum(x, 0.0) - a * _upper_tail(a)


@triton.jit
def gelu_and_derivative(x):
    """x * cdf(x) and its derivative, cdf(x) + x * pdf(x)."""
    a = tl.abs(x)
    tail = _upper_tail(a)
    y = tl.maximum(x, 0.0) - a * tail  # before the derivative; after it, Triton 3.6 would need 20 % more registers
    cdf = tl.where(x < 0, tail, 1.0 - tail)
    pdf = tl.exp2(-1.3257480647 - 0.7213475204 * x * x)  # exp(-x²/2) / sqrt(2 pi)
    return y, cdf + x * pdf
