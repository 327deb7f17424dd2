"""Samples of softmax(logits), one a row, in one pass over the logits (Triton).

The contract, the keys of the noise and the reference are in `electra_fast.sampling`: Gumbel-max
over the logsumexps of 128-wide tiles, then the inverse of the distribution inside the chosen tile.

Shapes: M rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.noise import exponential, invert, uniform, words

TILE = 128
TILES_A_STEP = 16


@triton.jit
def _sample_categorical_kernel(
    logits_ptr, row_stride, slot_ptr, seed_and_step_ptr, sample_ptr, vocab_size, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    # From device memory, so that a captured graph reads them afresh at every replay.
    seed = tl.load(seed_and_step_ptr)
    step = tl.load(seed_and_step_ptr + 1)
    slot = tl.load(slot_ptr + row)
    logits_ptr += row * row_stride
    column = tl.arange(0, TILE)

    best_score = -float("inf")
    best_tile = 0
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        offset = tile[:, None] * TILE + column[None, :]
        x = tl.load(logits_ptr + offset, mask=offset < vocab_size, other=-float("inf")).to(tl.float32)
        peak = tl.max(x, axis=1)
        # A tile without mass (behind the vocabulary, or all -inf) can't be chosen.
        has_mass = peak > -float("inf")
        peak = tl.where(has_mass, peak, 0.0)
        mass = tl.where(has_mass, tl.sum(tl.exp(x - peak[:, None]), axis=1), 1.0)
        logsumexp = peak + tl.log(mass)
        w0, w1, w2, w3 = words(seed, step, tile * 0 + slot, tile // 4, 0)
        lane = tile % 4
        word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
        score = tl.where(has_mass, logsumexp - tl.log(exponential(uniform(word))), -float("inf"))
        score_here = tl.max(score, axis=0)
        tile_here = first + tl.argmax(score, axis=0)
        best_tile = tl.where(score_here > best_score, tile_here, best_tile)
        best_score = tl.maximum(score_here, best_score)

    offset = best_tile * TILE + column
    x = tl.load(logits_ptr + offset, mask=offset < vocab_size, other=-float("inf")).to(tl.float32)
    inner, _, _, _ = words(seed, step, slot, 0, 1)
    tl.store(sample_ptr + row, best_tile * TILE + invert(x, column, uniform(inner)))


def sample_categorical(logits_MV: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    """One sample a row: float [M, V], int64 [M], int64 [2] → int64 [M], all on one device."""
    num_rows, vocab_size = logits_MV.shape
    if logits_MV.stride(1) != 1:
        raise ValueError("logits must be contiguous along the vocabulary")
    sample_M = torch.empty(num_rows, dtype=torch.int64, device=logits_MV.device)
    num_tiles = triton.cdiv(vocab_size, TILE)
    _sample_categorical_kernel[(num_rows,)](
        logits_MV, logits_MV.stride(0), slot_M, seed_and_step, sample_M, vocab_size, num_tiles,
        TILE=TILE, TILES=TILES_A_STEP, num_warps=4,
    )  # fmt: skip
    return sample_M
