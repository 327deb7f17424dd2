"""Philox draws and their distributions, shared by the kernels that sample (Triton).

The layout of the counters and the reference are in `electra_fast.ops.sampling`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox4(seed, step, slot, quad, stream):
    """Four uint32 words: of tiles 4 * quad … 4 * quad + 3 (stream 0), or for the draw within a tile (stream 1).

    Stream 2 is for the alias method.
    """
    zero = slot * 0
    return tl.philox(seed, (zero + quad).to(tl.uint32), slot.to(tl.uint32), (zero + step).to(tl.uint32),
                     (zero + stream).to(tl.uint32))  # fmt: skip


@triton.jit
def uniform(word):
    """uint32 → fp32 in (0, 1], evenly spaced near 0; rounds like torch's int64 → fp32."""
    return (word.to(tl.uint32).to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential(u):
    """-log(1 - u) in fp32, computed from the same rounded 1 - u as the reference.

    Near 1, the GPU's fast logarithm bounds its absolute but not its relative error, so the series is used there.
    """
    rest = 1 - u
    x = tl.where(u < 0.0009765625, u, 1 - rest)
    series = x * (1 + x * (0.5 + x * (1 / 3 + x * (0.25 + x * (0.2 + x * (1 / 6))))))
    return tl.where(x < 0.0625, series, -tl.log(rest))


@triton.jit
def inverse_cdf(z, u):
    """The first index of positive probability at which the cumulative softmax of the logits z [TILE] reaches u <= 1.

    A compiled scan adds in another order for each element, so its sums may decrease by rounding, even at an entry of
    probability 0: such entries are neither chosen nor used as the threshold.
    """
    p = tl.exp(z - tl.max(z, axis=0))
    cumulative = tl.where(p > 0, tl.cumsum(p, axis=0), 0.0)
    reaches = cumulative >= u * tl.max(cumulative, axis=0)
    return tl.argmax(reaches.to(tl.int32), axis=0)
