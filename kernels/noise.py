"""The arithmetic from random words to noise, shared by the kernels that sample (Triton).

The keys of the words and the plain version are in `electra_fast.sampling`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(word):
    """uint32 → fp32 in (0, 1], evenly spaced near 0; rounds as torch's int64 → fp32 does."""
    return (word.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential(u):
    """-log(1 - u) in fp32, of the very 1 - u that the reference rounds to.

    The GPU's logarithm is absolutely, not relatively, exact near 1: there its series takes over.
    """
    rest = 1 - u
    x = tl.where(u < 0.0009765625, u, 1 - rest)
    series = x * (1 + x * (0.5 + x * (1 / 3 + x * (0.25 + x * (0.2 + x * (1 / 6))))))
    return tl.where(x < 0.0625, series, -tl.log(rest))


@triton.jit
def words(seed, step, slot, quad, stream):
    """The four words of tiles 4 * quad .. 4 * quad + 3 (stream 0) or of the draw inside a tile (stream 1)."""
    zero = slot * 0
    return tl.philox(seed, (zero + quad).to(tl.uint32), slot.to(tl.uint32), (zero + step).to(tl.uint32),
                     (zero + stream).to(tl.uint32))  # fmt: skip


@triton.jit
def invert(z, column, u):
    """The first column whose cumulative softmax mass reaches u; z [TILE] in natural units."""
    cumulative = tl.cumsum(tl.exp(z - tl.max(z, axis=0)), axis=0)
    below = cumulative < u * tl.max(cumulative, axis=0)
    return tl.sum(below.to(tl.int32), axis=0)
