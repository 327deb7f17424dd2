"""The generator head on narrow 16-bit tables: no logit ever lies in memory (Triton).

One half of `generator_head`, which pads the table and chooses between this and
`generator_head_chunked`. A first kernel walks over tiles of 128 vocabulary entries and keeps, a row,
the running logsumexp, the best Gumbel score, the best tile and (for the gradient) the softmax's mean
of the table; a second puts the vocabulary's splits together and draws inside the chosen tile. That
mean less the target's entry is, but for the upstream factor, the gradient of x: so backward computes
logits once more only, transposed, for the table and the bias.

Shapes: M masked slots, V vocabulary, E embedding, P = V padded to K whole tiles, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.noise import exponential, invert, uniform, words

TILE = 128
# Most splits of the vocabulary; each costs one [M, E] fp32 buffer where gradients are wanted.
MOST_SPLITS = 16
# What a split costs beside its tiles, in tiles: its start, and its row of partial results.
SPLIT_COST = 6
# Fused multiply-adds, said aloud: Triton is about to change its default.
FUSION = {"enable_fp_fusion": True}
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _gumbel_kernel(
    slot_ptr, seed_and_step_ptr, gumbel_ptr, num_rows, num_tiles, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Gumbel noise [K, M], in powers of two, of every tile and row: four tiles a draw; then the uniforms [M].

    In memory rather than drawn during the walk: a branch there makes ptxas serialise the tensor cores.
    """
    quad = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    # From device memory, so that a captured graph reads them afresh at every replay.
    seed, step = tl.load(seed_and_step_ptr), tl.load(seed_and_step_ptr + 1)
    slot = tl.load(slot_ptr + row, mask=is_row, other=0)
    if quad == 0:
        inner, _, _, _ = words(seed, step, slot, 0, 1)
        tl.store(gumbel_ptr + num_tiles * num_rows + row, uniform(inner), mask=is_row)
    drawn = words(seed, step, slot, quad, 0)
    for lane in tl.static_range(4):
        tile = quad * 4 + lane
        is_inside = row < tl.where(tile < num_tiles, num_rows, 0)
        tl.store(gumbel_ptr + tile * num_rows + row, -tl.log2(exponential(uniform(drawn[lane]))), mask=is_inside)


@triton.jit
def _walk_kernel(
    x_ptr, weight_ptr, bias_ptr, original_ptr, gumbel_ptr, statistics_ptr, tiles_ptr, mean_ptr,
    num_rows, num_tiles, tiles_per_split, inverse_temperature, penalty,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    SAMPLE: tl.constexpr, SHAPED: tl.constexpr, WITH_MEAN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of rows over one split of the vocabulary; [S, M] each of what it keeps.

    `statistics` are peak, mass and score (in powers of two), `tiles` the sampled tile and the peak's.
    """
    split = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = row < num_rows
    e, column = tl.arange(0, BLOCK_E), tl.arange(0, TILE)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * WIDTH + e[None, :],
                mask=is_row[:, None] & (e < WIDTH)[None, :], other=0.0)  # fmt: skip
    weight_offset = column[:, None] * BLOCK_E + e[None, :]
    peak, mass = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    peak_tile = tl.zeros([BLOCK_M], tl.int32)
    if WITH_MEAN:
        mean = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if SAMPLE:
        score, score_tile = tl.full([BLOCK_M], -float("inf"), tl.float32), tl.zeros([BLOCK_M], tl.int32)
    if SHAPED:
        original = tl.load(original_ptr + row, mask=is_row, other=0).to(tl.int32)
        shaped_peak = tl.full([BLOCK_M], -float("inf"), tl.float32)

    first = split * tiles_per_split
    for tile in tl.range(first, tl.minimum(first + tiles_per_split, num_tiles), num_stages=STAGES):
        weight = tl.load(weight_ptr + tile * TILE * BLOCK_E + weight_offset)
        bias = tl.load(bias_ptr + tile * TILE + column)
        z = tl.dot(x, tl.trans(weight), input_precision=PRECISION) + bias[None, :]
        here = tl.max(z, axis=1) * LOG2E
        peak_tile = tl.where(here > peak, tile, peak_tile)
        before, peak = peak, tl.maximum(peak, here)
        p = tl.exp2(z * LOG2E - peak[:, None])
        tile_mass = tl.sum(p, axis=1)
        shrink = tl.exp2(before - peak)
        mass = mass * shrink + tile_mass
        if WITH_MEAN:
            mean = tl.dot(p.to(weight.dtype), weight, mean * shrink[:, None], input_precision=PRECISION)
        if SAMPLE:
            gumbel = tl.load(gumbel_ptr + tile * num_rows + row, mask=is_row, other=0.0)
            tile_peak = peak
            if SHAPED:
                shaped = z * inverse_temperature
                shaped = tl.where((tile * TILE + column)[None, :] == original[:, None], shaped - penalty, shaped)
                shaped_peak = tl.maximum(shaped_peak, tl.max(shaped, axis=1) * LOG2E)
                tile_mass = tl.sum(tl.exp2(shaped * LOG2E - shaped_peak[:, None]), axis=1)
                tile_peak = shaped_peak
            # Logsumexp + Gumbel noise. A mass so far below the peak that it vanishes could not win.
            won = tile_peak + tl.log2(tl.maximum(tile_mass, 1e-37)) + gumbel
            score_tile = tl.where(won > score, tile, score_tile)
            score = tl.maximum(won, score)

    place = (split * num_rows + row).to(tl.int64)
    size = tl.num_programs(1) * num_rows
    tl.store(statistics_ptr + place, peak, mask=is_row)
    tl.store(statistics_ptr + size + place, mass, mask=is_row)
    tl.store(tiles_ptr + place, peak_tile, mask=is_row)
    if SAMPLE:
        tl.store(statistics_ptr + 2 * size + place, score, mask=is_row)
        tl.store(tiles_ptr + size + place, score_tile, mask=is_row)
    if WITH_MEAN:
        tl.store(mean_ptr + place[:, None] * BLOCK_E + e[None, :], mean, mask=is_row[:, None])


@triton.jit
def _tile_logits(x_ptr, weight_ptr, bias_ptr, tile, WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr):
    """The logits [TILE] of one row in one tile; in slices of E that fit the registers."""
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
    x_ptr, weight_ptr, bias_ptr, original_ptr, uniform_ptr, statistics_ptr, tiles_ptr, mean_ptr,
    nll_ptr, lse_ptr, sample_ptr, correct_ptr, direction_ptr,
    num_rows, num_splits, inverse_temperature, penalty,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_S: tl.constexpr, TILE: tl.constexpr,
    SAMPLE: tl.constexpr, SHAPED: tl.constexpr, WITH_MEAN: tl.constexpr,
):  # fmt: skip
    """One row: its splits put together in their order, and what has to look at single logits again."""
    row = tl.program_id(0).to(tl.int64)
    split, e, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_E), tl.arange(0, TILE)
    is_split = split < num_splits
    place, size = split * num_rows + row, num_splits * num_rows
    peak_S = tl.load(statistics_ptr + place, mask=is_split, other=-float("inf"))
    mass_S = tl.load(statistics_ptr + size + place, mask=is_split, other=0.0)
    peak = tl.max(peak_S, axis=0)
    mass = tl.sum(mass_S * tl.exp2(peak_S - peak), axis=0)
    lse = (peak + tl.log2(mass)) * LN2

    original = tl.load(original_ptr + row)
    x_ptr += row * WIDTH
    x = tl.load(x_ptr + e, mask=e < WIDTH, other=0.0).to(tl.float32)
    target = tl.load(weight_ptr + original * BLOCK_E + e).to(tl.float32)
    tl.store(nll_ptr + row, lse - tl.sum(x * target, axis=0) - tl.load(bias_ptr + original))
    tl.store(lse_ptr + row, lse)
    if WITH_MEAN:
        mean = tl.zeros([BLOCK_E], tl.float32)
        for s in range(num_splits):
            at = s * num_rows + row
            mean += tl.load(mean_ptr + at * BLOCK_E + e) * tl.exp2(tl.load(statistics_ptr + at) - peak)
        tl.store(direction_ptr + row * WIDTH + e, mean / mass - target, mask=e < WIDTH)

    peak_tile = tl.load(tiles_ptr + tl.argmax(peak_S, axis=0) * num_rows + row)
    correct = False
    if peak_tile == original // TILE:
        z = _tile_logits(x_ptr, weight_ptr, bias_ptr, peak_tile, WIDTH, BLOCK_E, TILE)
        correct = peak_tile * TILE + tl.argmax(z, axis=0) == original
    tl.store(correct_ptr + row, correct)
    if SAMPLE:
        score_S = tl.load(statistics_ptr + 2 * size + place, mask=is_split, other=-float("inf"))
        tile = tl.load(tiles_ptr + size + tl.argmax(score_S, axis=0) * num_rows + row)
        z = _tile_logits(x_ptr, weight_ptr, bias_ptr, tile, WIDTH, BLOCK_E, TILE)
        if SHAPED:
            z *= inverse_temperature
            z = tl.where(tile * TILE + column == original, z - penalty, z)
        tl.store(sample_ptr + row, tile * TILE + invert(z, column, tl.load(uniform_ptr + row)))


@triton.jit
def _row_gradient_kernel(
    grad_ptr, original_ptr, lse_ptr, direction_ptr, x_grad_ptr, rows_ptr, target_ptr, num_rows, num_padded,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and what the table's gradient needs of each row, padded to whole blocks."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, BLOCK_E)
    is_row = row < num_rows
    grad = tl.load(grad_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    place = row.to(tl.int64)[:, None] * WIDTH + e[None, :]
    inside = is_row[:, None] & (e < WIDTH)[None, :]
    x_grad = tl.load(direction_ptr + place, mask=inside, other=0.0) * grad[:, None]
    tl.store(x_grad_ptr + place, x_grad.to(x_grad_ptr.dtype.element_ty), mask=inside)
    tl.store(rows_ptr + row, tl.load(lse_ptr + row, mask=is_row, other=0.0) * LOG2E)
    tl.store(rows_ptr + num_padded + row, grad)
    tl.store(target_ptr + row, tl.load(original_ptr + row, mask=is_row, other=-1).to(tl.int32))


@triton.jit
def _table_gradient_kernel(
    x_ptr, weight_ptr, bias_ptr, rows_ptr, target_ptr, table_grad_ptr, bias_grad_ptr,
    num_rows, num_padded, vocab_size,
    WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of the vocabulary over all rows, from the transposed logits [BLOCK_V, BLOCK_M].

    Transposed by the product itself: Triton 3.6 miscompiles a dot of a transposed accumulator on Hopper.
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
        z = tl.dot(weight, tl.trans(x), input_precision=PRECISION)
        p = tl.exp2(z * LOG2E + (bias[:, None] - lse[None, :]))
        grad_z = p * grad[None, :] - tl.where(entry[:, None] == target[None, :], grad[None, :], 0.0)
        bias_grad += tl.sum(grad_z, axis=1)
        table_grad = tl.dot(grad_z.to(x.dtype), x, table_grad, input_precision=PRECISION)
    is_entry = entry < vocab_size
    tl.store(table_grad_ptr + entry.to(tl.int64)[:, None] * WIDTH + e[None, :], table_grad,
             mask=is_entry[:, None] & (e < WIDTH)[None, :])  # fmt: skip
    tl.store(bias_grad_ptr + entry, bias_grad, mask=is_entry)


@dataclass(frozen=True)
class Blocks:
    """Sizes of one kernel's blocks and how it is compiled."""

    rows: int
    entries: int
    num_warps: int
    num_stages: int


def walk_blocks(num_rows: int, block_e: int) -> Blocks:
    """Blocks of the walk: 128 rows, or 64 where there are few and E leaves the registers."""
    if block_e > 128:
        return Blocks(128, TILE, 8, 2)
    return Blocks(64, TILE, 4, 3) if num_rows <= 512 else Blocks(128, TILE, 8, 3)


def gradient_blocks(block_e: int) -> Blocks:
    """Blocks of the table's gradient: with 128 rows a block the registers would not suffice."""
    return Blocks(64, TILE, 8, 2 if block_e > 128 else 3)


def choose_splits(num_row_blocks: int, num_tiles: int, num_processors: int) -> tuple[int, int]:
    """(splits, tiles a split) that keep all processors busy to the end, and cost little to put together."""

    def cost(splits: int) -> int:
        waves = -(-num_row_blocks * splits // num_processors)
        return waves * (-(-num_tiles // splits) + SPLIT_COST)

    splits = min(range(1, min(MOST_SPLITS, num_tiles) + 1), key=cost)
    tiles_per_split = -(-num_tiles // splits)
    return -(-num_tiles // tiles_per_split), tiles_per_split


def _num_processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 132


def _precision(x: Tensor) -> str:
    # Only tests in the interpreter come here with fp32.
    return "ieee" if x.dtype == torch.float32 else "tf32"


def forward(
    x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, original_M: Tensor, slot_M: Tensor,
    seed_and_step: Tensor | None, temperature: float, disallow_correct: bool, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(nll, sample, correct, logsumexp, direction [M, E] of x's gradient); the weight padded in V and E."""
    (num_rows, width), block_e = x_ME.shape, weight_PE.shape[1]
    blocks, num_tiles = walk_blocks(num_rows, block_e), weight_PE.shape[0] // TILE
    num_row_blocks = triton.cdiv(num_rows, blocks.rows)
    num_splits, tiles_per_split = choose_splits(num_row_blocks, num_tiles, _num_processors(x_ME))

    def fp32(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=x_ME.device)

    sampling = seed_and_step is not None
    noise = fp32(num_tiles + 1, num_rows) if sampling else fp32(1)
    statistics = fp32(3, num_splits, num_rows)
    mean = fp32(num_splits, num_rows, block_e) if with_gradient else fp32(0)
    tiles = torch.empty((2, num_splits, num_rows), dtype=torch.int32, device=x_ME.device)
    nll_M, lse_M = fp32(num_rows), fp32(num_rows)
    sample_M = torch.empty(num_rows if sampling else 0, dtype=torch.int64, device=x_ME.device)
    correct_M = torch.empty(num_rows, dtype=torch.bool, device=x_ME.device)
    direction_ME = fp32(num_rows, width) if with_gradient else fp32(0)

    shape = (1 / temperature, 1000.0 if disallow_correct else 0.0)
    constants = {
        "WIDTH": width, "BLOCK_E": block_e, "TILE": TILE, "SAMPLE": sampling, "WITH_MEAN": with_gradient,
        "SHAPED": sampling and (temperature != 1.0 or disallow_correct), **FUSION,
    }  # fmt: skip
    if sampling:
        grid = (triton.cdiv(num_rows, 128), triton.cdiv(num_tiles, 4))
        _gumbel_kernel[grid](slot_M, seed_and_step, noise, num_rows, num_tiles, BLOCK_M=128, **FUSION)
    _walk_kernel[(num_row_blocks, num_splits)](
        x_ME, weight_PE, bias_P, original_M, noise, statistics, tiles, mean,
        num_rows, num_tiles, tiles_per_split, *shape, BLOCK_M=blocks.rows, STAGES=blocks.num_stages,
        PRECISION=_precision(x_ME), num_warps=blocks.num_warps, **constants,
    )  # fmt: skip
    _combine_kernel[(num_rows,)](
        x_ME, weight_PE, bias_P, original_M, noise[-1], statistics, tiles, mean,
        nll_M, lse_M, sample_M, correct_M, direction_ME, num_rows, num_splits, *shape,
        BLOCK_S=triton.next_power_of_2(num_splits), num_warps=4, **constants,
    )  # fmt: skip
    return nll_M, sample_M, correct_M, lse_M, direction_ME


def backward(
    grad_M: Tensor, x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, original_M: Tensor, lse_M: Tensor,
    direction_ME: Tensor, vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the table and the bias."""
    (num_rows, width), block_e = x_ME.shape, weight_PE.shape[1]
    blocks = gradient_blocks(block_e)
    num_padded = triton.cdiv(num_rows, blocks.rows) * blocks.rows
    rows = torch.empty((2, num_padded), dtype=torch.float32, device=x_ME.device)
    target = torch.empty(num_padded, dtype=torch.int32, device=x_ME.device)
    x_grad_ME = torch.empty_like(x_ME)
    _row_gradient_kernel[(num_padded // 16,)](
        grad_M, original_M, lse_M, direction_ME, x_grad_ME, rows, target, num_rows, num_padded,
        WIDTH=width, BLOCK_E=block_e, BLOCK_M=16, **FUSION,
    )  # fmt: skip
    table_grad_VE = torch.empty((vocab_size, width), dtype=torch.float32, device=x_ME.device)
    bias_grad_V = torch.empty(vocab_size, dtype=torch.float32, device=x_ME.device)
    _table_gradient_kernel[(triton.cdiv(vocab_size, blocks.entries),)](
        x_ME, weight_PE, bias_P, rows, target, table_grad_VE, bias_grad_V, num_rows, num_padded, vocab_size,
        WIDTH=width, BLOCK_E=block_e, BLOCK_M=blocks.rows, BLOCK_V=blocks.entries, STAGES=blocks.num_stages,
        PRECISION=_precision(x_ME), num_warps=blocks.num_warps, **FUSION,
    )  # fmt: skip
    return x_grad_ME, table_grad_VE, bias_grad_V
