"""The generator head on narrow 16-bit tables: logits are never materialized (Triton).

One of two paths of `generator_head`, which pads the table and selects the path. The first kernel iterates over tiles of
128 vocabulary entries and tracks, per row, the running logsumexp, the tile with the largest logit, the tile with the
best Gumbel score and, if gradients are needed, the mean embedding under the softmax. The second combines the splits
of the vocabulary and samples within the chosen tile. Up to the upstream gradient, dx = mean - target embedding, so the
backward pass recomputes the logits only once, transposed, for the table and bias.

Shapes: M masked slots, V vocabulary, E embedding, P = V padded to K whole tiles, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.launch import FUSION, num_sms
from electra_fast.kernels.rng import exponential, inverse_cdf, philox4, uniform

TILE = 128
# Each split of the vocabulary costs an [M, E] fp32 buffer if gradients are needed.
MAX_SPLITS = 16
# Overhead of a split in units of tiles: its prologue and its partial results.
SPLIT_COST = 6
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _gumbel_kernel(
    slot_ptr, seed_and_step_ptr, gumbel_ptr, num_rows, num_tiles, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gumbel noise [K, M], in base-2 units, per tile and row (one Philox call per four tiles); then uniforms [M].

    It is precomputed because a branch in `_lse_sample_kernel` makes ptxas serialize the tensor-core instructions.
    """
    quad = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    # From device memory, so that every replay of a captured graph reads the current values.
    seed = tl.load(seed_and_step_ptr)
    step = tl.load(seed_and_step_ptr + 1)
    slot = tl.load(slot_ptr + row, mask=is_row, other=0)
    if quad == 0:
        word, _, _, _ = philox4(seed, step, slot, 0, 1)
        tl.store(gumbel_ptr + num_tiles * num_rows + row, uniform(word), mask=is_row)
    words = philox4(seed, step, slot, quad, 0)
    for lane in tl.static_range(4):
        tile = quad * 4 + lane
        is_used = row < tl.where(tile < num_tiles, num_rows, 0)
        tl.store(gumbel_ptr + tile * num_rows + row, -tl.log2(exponential(uniform(words[lane]))), mask=is_used)


@triton.jit
def _lse_sample_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr, gumbel_ptr, statistics_ptr, tiles_ptr, mean_ptr,
    num_rows, num_tiles, tiles_per_split, inverse_temperature, penalty,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    SAMPLE: tl.constexpr, HAS_LOGIT_ADJUSTMENT: tl.constexpr, WITH_MEAN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of rows over one split of the vocabulary.

    Writes `statistics` [3, S, M], the maximum logit (base 2), the sum of exponentials and the best score (base 2);
    `tiles` [2, S, M], with the maximum logit and with the best score; and the unnormalized `mean` [S, M, E].
    """
    split = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    e = tl.arange(0, BLOCK_E)
    column = tl.arange(0, TILE)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * WIDTH + e[None, :],
                mask=is_row[:, None] & (e < WIDTH)[None, :], other=0.0)  # fmt: skip
    weight_offset = column[:, None] * BLOCK_E + e[None, :]
    row_max = tl.full([BLOCK_M], -float("inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    argmax_tile = tl.zeros([BLOCK_M], tl.int32)
    if WITH_MEAN:
        mean = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if SAMPLE:
        score = tl.full([BLOCK_M], -float("inf"), tl.float32)
        sample_tile = tl.zeros([BLOCK_M], tl.int32)
    if HAS_LOGIT_ADJUSTMENT:
        target = tl.load(target_ptr + row, mask=is_row, other=0).to(tl.int32)
        adjusted_max = tl.full([BLOCK_M], -float("inf"), tl.float32)

    first = split * tiles_per_split
    for tile in tl.range(first, tl.minimum(first + tiles_per_split, num_tiles), num_stages=STAGES):
        weight = tl.load(weight_ptr + tile * TILE * BLOCK_E + weight_offset)
        bias = tl.load(bias_ptr + tile * TILE + column)
        z = tl.dot(x, tl.trans(weight), input_precision="ieee") + bias[None, :]
        tile_max = tl.max(z, axis=1) * LOG2E
        argmax_tile = tl.where(tile_max > row_max, tile, argmax_tile)
        old_max = row_max
        row_max = tl.maximum(row_max, tile_max)
        p = tl.exp2(z * LOG2E - row_max[:, None])
        tile_sum = tl.sum(p, axis=1)
        rescale = tl.exp2(old_max - row_max)
        row_sum = row_sum * rescale + tile_sum
        if WITH_MEAN:
            mean = tl.dot(p.to(weight.dtype), weight, mean * rescale[:, None], input_precision="ieee")
        if SAMPLE:
            gumbel = tl.load(gumbel_ptr + tile * num_rows + row, mask=is_row, other=0.0)
            score_max = row_max
            if HAS_LOGIT_ADJUSTMENT:
                adjusted = z * inverse_temperature
                adjusted = tl.where((tile * TILE + column)[None, :] == target[:, None], adjusted - penalty, adjusted)
                adjusted_max = tl.maximum(adjusted_max, tl.max(adjusted, axis=1) * LOG2E)
                tile_sum = tl.sum(tl.exp2(adjusted * LOG2E - adjusted_max[:, None]), axis=1)
                score_max = adjusted_max
            # Logsumexp of the tile + Gumbel noise. A tile whose sum underflows cannot win.
            tile_score = score_max + tl.log2(tl.maximum(tile_sum, 1e-37)) + gumbel
            sample_tile = tl.where(tile_score > score, tile, sample_tile)
            score = tl.maximum(tile_score, score)

    offset = (split * num_rows + row).to(tl.int64)
    size = tl.num_programs(1) * num_rows
    tl.store(statistics_ptr + offset, row_max, mask=is_row)
    tl.store(statistics_ptr + size + offset, row_sum, mask=is_row)
    tl.store(tiles_ptr + offset, argmax_tile, mask=is_row)
    if SAMPLE:
        tl.store(statistics_ptr + 2 * size + offset, score, mask=is_row)
        tl.store(tiles_ptr + size + offset, sample_tile, mask=is_row)
    if WITH_MEAN:
        tl.store(mean_ptr + offset[:, None] * BLOCK_E + e[None, :], mean, mask=is_row[:, None])


@triton.jit
def _tile_logits(x_ptr, weight_ptr, bias_ptr, tile, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr):
    """The logits [TILE] of one row in one tile, in slices of E that fit into registers."""
    SLICE: tl.constexpr = min(BLOCK_E, 64)
    entry = (tile * TILE + tl.arange(0, TILE)).to(tl.int64)
    z = tl.load(bias_ptr + entry)
    for start in tl.static_range(0, BLOCK_E, SLICE):
        e = start + tl.arange(0, SLICE)
        x = tl.load(x_ptr + e, mask=e < WIDTH, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + entry[:, None] * BLOCK_E + e[None, :]).to(tl.float32)
        z += tl.sum(weight * x[None, :], axis=1)
    return z


@triton.jit
def _combine_kernel(
    x_ptr, weight_ptr, bias_ptr, target_ptr, uniform_ptr, statistics_ptr, tiles_ptr, mean_ptr,
    nll_ptr, lse_ptr, sample_ptr, correct_ptr, dnll_dx_ptr,
    num_rows, num_splits, inverse_temperature, penalty,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr,
    SAMPLE: tl.constexpr, HAS_LOGIT_ADJUSTMENT: tl.constexpr, WITH_MEAN: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one row in a fixed order and recomputes the logits of the two selected tiles."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    e = tl.arange(0, BLOCK_E)
    column = tl.arange(0, TILE)
    is_split = split < num_splits
    offset = split * num_rows + row
    size = num_splits * num_rows
    max_S = tl.load(statistics_ptr + offset, mask=is_split, other=-float("inf"))
    sum_S = tl.load(statistics_ptr + size + offset, mask=is_split, other=0.0)
    row_max = tl.max(max_S, axis=0)
    row_sum = tl.sum(sum_S * tl.exp2(max_S - row_max), axis=0)
    lse = (row_max + tl.log2(row_sum)) * LN2

    target = tl.load(target_ptr + row)
    x_ptr += row * WIDTH
    x = tl.load(x_ptr + e, mask=e < WIDTH, other=0.0).to(tl.float32)
    target_embedding = tl.load(weight_ptr + target * BLOCK_E + e).to(tl.float32)
    tl.store(nll_ptr + row, lse - tl.sum(x * target_embedding, axis=0) - tl.load(bias_ptr + target))
    tl.store(lse_ptr + row, lse)
    if WITH_MEAN:
        mean = tl.zeros([BLOCK_E], tl.float32)
        for s in range(num_splits):
            split_row = s * num_rows + row
            rescale = tl.exp2(tl.load(statistics_ptr + split_row) - row_max)
            mean += tl.load(mean_ptr + split_row * BLOCK_E + e) * rescale
        tl.store(dnll_dx_ptr + row * WIDTH + e, mean / row_sum - target_embedding, mask=e < WIDTH)

    argmax_tile = tl.load(tiles_ptr + tl.argmax(max_S, axis=0) * num_rows + row)
    correct = False
    if argmax_tile == target // TILE:
        z = _tile_logits(x_ptr, weight_ptr, bias_ptr, argmax_tile, WIDTH, BLOCK_E, TILE)
        correct = argmax_tile * TILE + tl.argmax(z, axis=0) == target
    tl.store(correct_ptr + row, correct)
    if SAMPLE:
        score_S = tl.load(statistics_ptr + 2 * size + offset, mask=is_split, other=-float("inf"))
        tile = tl.load(tiles_ptr + size + tl.argmax(score_S, axis=0) * num_rows + row)
        z = _tile_logits(x_ptr, weight_ptr, bias_ptr, tile, WIDTH, BLOCK_E, TILE)
        if HAS_LOGIT_ADJUSTMENT:
            z *= inverse_temperature
            z = tl.where(tile * TILE + column == target, z - penalty, z)
        tl.store(sample_ptr + row, tile * TILE + inverse_cdf(z, tl.load(uniform_ptr + row)))


@triton.jit
def _row_gradient_kernel(
    grad_ptr, target_ptr, lse_ptr, dnll_dx_ptr, x_grad_ptr, rows_ptr, padded_target_ptr, num_rows, num_padded,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and each row's logsumexp, upstream gradient and target, padded to whole blocks."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    is_row = row < num_rows
    grad = tl.load(grad_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    offset = row.to(tl.int64)[:, None] * WIDTH + e[None, :]
    mask = is_row[:, None] & (e < WIDTH)[None, :]
    x_grad = tl.load(dnll_dx_ptr + offset, mask=mask, other=0.0) * grad[:, None]
    tl.store(x_grad_ptr + offset, x_grad.to(x_grad_ptr.dtype.element_ty), mask=mask)
    tl.store(rows_ptr + row, tl.load(lse_ptr + row, mask=is_row, other=0.0) * LOG2E)
    tl.store(rows_ptr + num_padded + row, grad)
    tl.store(padded_target_ptr + row, tl.load(target_ptr + row, mask=is_row, other=-1).to(tl.int32))


@triton.jit
def _table_gradient_kernel(
    x_ptr, weight_ptr, bias_ptr, rows_ptr, target_ptr, table_grad_ptr, bias_grad_ptr,
    num_rows, num_padded, vocab_size,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One block of the vocabulary over all rows, from transposed logits [BLOCK_V, BLOCK_M].

    They are transposed because Triton 3.6 miscompiles a dot of a transposed accumulator on Hopper.
    """
    entry = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    e = tl.arange(0, BLOCK_E)
    weight = tl.load(weight_ptr + entry.to(tl.int64)[:, None] * BLOCK_E + e[None, :])
    bias = tl.load(bias_ptr + entry) * LOG2E
    table_grad = tl.zeros([BLOCK_V, BLOCK_E], tl.float32)
    bias_grad = tl.zeros([BLOCK_V], tl.float32)
    for first in tl.range(0, num_padded, BLOCK_M, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_M)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * WIDTH + e[None, :],
                    mask=(row < num_rows)[:, None] & (e < WIDTH)[None, :], other=0.0)  # fmt: skip
        lse = tl.load(rows_ptr + row)
        grad = tl.load(rows_ptr + num_padded + row)
        target = tl.load(target_ptr + row)
        z = tl.dot(weight, tl.trans(x), input_precision="ieee")
        p = tl.exp2(z * LOG2E + (bias[:, None] - lse[None, :]))
        grad_z = p * grad[None, :] - tl.where(entry[:, None] == target[None, :], grad[None, :], 0.0)
        bias_grad += tl.sum(grad_z, axis=1)
        table_grad = tl.dot(grad_z.to(x.dtype), x, table_grad, input_precision="ieee")
    is_entry = entry < vocab_size
    tl.store(table_grad_ptr + entry.to(tl.int64)[:, None] * WIDTH + e[None, :], table_grad,
             mask=is_entry[:, None] & (e < WIDTH)[None, :])  # fmt: skip
    tl.store(bias_grad_ptr + entry, bias_grad, mask=is_entry)


@dataclass(frozen=True)
class Blocks:
    """Block sizes and compile options of one kernel."""

    rows: int
    entries: int
    num_warps: int
    num_stages: int


def lse_sample_blocks(num_rows: int, block_e: int) -> Blocks:
    """Blocks of `_lse_sample_kernel`: 128 rows, or 64 for few rows if registers allow two programs per processor."""
    if block_e > 128:
        return Blocks(128, TILE, 8, 2)
    return Blocks(64, TILE, 4, 3) if num_rows <= 512 else Blocks(128, TILE, 8, 3)


def gradient_blocks(block_e: int) -> Blocks:
    """Blocks of `_table_gradient_kernel`; 128 rows would not fit into registers."""
    return Blocks(64, TILE, 8, 2 if block_e > 128 else 3)


def choose_splits(num_row_blocks: int, num_tiles: int, num_sms: int) -> tuple[int, int]:
    """(splits, tiles per split) that leave few multiprocessors idle in the last wave and are cheap to combine."""

    def cost(splits: int) -> int:
        waves = -(-num_row_blocks * splits // num_sms)
        return waves * (-(-num_tiles // splits) + SPLIT_COST)

    splits = min(range(1, min(MAX_SPLITS, num_tiles) + 1), key=cost)
    tiles_per_split = -(-num_tiles // splits)
    return -(-num_tiles // tiles_per_split), tiles_per_split


def forward(
    x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, target_M: Tensor, slot_M: Tensor,
    seed_and_step: Tensor | None, temperature: float, disallow_correct: bool, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(nll, sample, correct, logsumexp, dnll/dx [M, E]); the weight is padded in V and E, the bias is fp32."""
    num_rows, width = x_ME.shape
    block_e = weight_PE.shape[1]
    blocks = lse_sample_blocks(num_rows, block_e)
    num_tiles = weight_PE.shape[0] // TILE
    num_row_blocks = triton.cdiv(num_rows, blocks.rows)
    num_splits, tiles_per_split = choose_splits(num_row_blocks, num_tiles, num_sms(x_ME.device))

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x_ME.device)

    sampling = seed_and_step is not None
    noise = fp32(num_tiles + 1, num_rows) if sampling else fp32(1)
    statistics = fp32(3, num_splits, num_rows)
    mean = fp32(num_splits, num_rows, block_e) if with_gradient else fp32(0)
    tiles = torch.empty((2, num_splits, num_rows), dtype=torch.int32, device=x_ME.device)
    nll_M = fp32(num_rows)
    lse_M = fp32(num_rows)
    sample_M = torch.empty(num_rows if sampling else 0, dtype=torch.int64, device=x_ME.device)
    correct_M = torch.empty(num_rows, dtype=torch.bool, device=x_ME.device)
    dnll_dx_ME = fp32(num_rows, width) if with_gradient else fp32(0)

    adjustment = (1 / temperature, 1000.0 if disallow_correct else 0.0)
    constants = {
        "WIDTH": width, "BLOCK_E": block_e, "TILE": TILE, "SAMPLE": sampling, "WITH_MEAN": with_gradient,
        "HAS_LOGIT_ADJUSTMENT": sampling and (temperature != 1.0 or disallow_correct), **FUSION,
    }  # fmt: skip
    if sampling:
        grid = (triton.cdiv(num_rows, 128), triton.cdiv(num_tiles, 4))
        _gumbel_kernel[grid](slot_M, seed_and_step, noise, num_rows, num_tiles, BLOCK_M=128, **FUSION)
    _lse_sample_kernel[(num_row_blocks, num_splits)](
        x_ME, weight_PE, bias_P, target_M, noise, statistics, tiles, mean,
        num_rows, num_tiles, tiles_per_split, *adjustment, BLOCK_M=blocks.rows, STAGES=blocks.num_stages,
        num_warps=blocks.num_warps, **constants,
    )  # fmt: skip
    _combine_kernel[(num_rows,)](
        x_ME, weight_PE, bias_P, target_M, noise[-1], statistics, tiles, mean,
        nll_M, lse_M, sample_M, correct_M, dnll_dx_ME, num_rows, num_splits, *adjustment,
        BLOCK_S=triton.next_power_of_2(num_splits), num_warps=4, **constants,
    )  # fmt: skip
    return nll_M, sample_M, correct_M, lse_M, dnll_dx_ME


def backward(
    grad_M: Tensor, x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, target_M: Tensor, lse_M: Tensor,
    dnll_dx_ME: Tensor, vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x [M, E], the table (fp32 [V, E]) and the bias (fp32 [V]) from the gradient of nll."""
    num_rows, width = x_ME.shape
    block_e = weight_PE.shape[1]
    blocks = gradient_blocks(block_e)
    num_padded = triton.cdiv(num_rows, blocks.rows) * blocks.rows
    rows = torch.empty((2, num_padded), dtype=torch.float32, device=x_ME.device)
    padded_target = torch.empty(num_padded, dtype=torch.int32, device=x_ME.device)
    x_grad_ME = torch.empty_like(x_ME)
    _row_gradient_kernel[(num_padded // 16,)](
        grad_M, target_M, lse_M, dnll_dx_ME, x_grad_ME, rows, padded_target, num_rows, num_padded,
        WIDTH=width, BLOCK_E=block_e, BLOCK_M=16, **FUSION,
    )  # fmt: skip
    table_grad_VE = torch.empty((vocab_size, width), dtype=torch.float32, device=x_ME.device)
    bias_grad_V = torch.empty(vocab_size, dtype=torch.float32, device=x_ME.device)
    _table_gradient_kernel[(triton.cdiv(vocab_size, blocks.entries),)](
        x_ME, weight_PE, bias_P, rows, padded_target, table_grad_VE, bias_grad_V, num_rows, num_padded, vocab_size,
        WIDTH=width, BLOCK_E=block_e, BLOCK_M=blocks.rows, BLOCK_V=blocks.entries, STAGES=blocks.num_stages,
        num_warps=blocks.num_warps, **FUSION,
    )  # fmt: skip
    return x_grad_ME, table_grad_VE, bias_grad_V
