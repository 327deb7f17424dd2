"""The generator head on wide tables and in fp32: cuBLAS computes the logits in chunks of rows (Triton).

One of two paths of `generator_head`. A chunk's logits [m, P] are in a buffer of bounded size, and one
kernel reads them once for nll, logsumexp, sample and argmax. If gradients are needed, the logits of the
first chunks are saved, up to a second bound, and the others are recomputed; one kernel turns logits into
their gradient and sums the bias gradient, and cuBLAS computes the products.

Shapes: M masked slots, m slots of one chunk, V vocabulary, E embedding, P = V padded to whole tiles,
which also aligns rows of logits as cuBLAS prefers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.launch import FUSION, memory_bytes
from electra_fast.kernels.rng import exponential, inverse_cdf, philox4, uniform

TILE = 128
TILES_PER_STEP = 16
# Limits in bytes for the logits of one chunk, and for those saved for the backward pass, or this part of the memory.
CHUNK_LOGITS_BYTES = 256 << 20
SAVED_LOGITS_BYTES = 512 << 20
SAVED_LOGITS_PART = 64
# Block sizes for the logits' gradient: rows per program, rows per iteration, columns.
GRADIENT_ROWS = 64
GRADIENT_STEP = 8
GRADIENT_COLUMNS = 512
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _read_kernel(
    logits_ptr, target_ptr, slot_ptr, seed_and_step_ptr, nll_ptr, lse_ptr, sample_ptr, correct_ptr,
    num_tiles, inverse_temperature, penalty,
    TILE: tl.constexpr, TILES: tl.constexpr, SAMPLE: tl.constexpr, HAS_LOGIT_ADJUSTMENT: tl.constexpr,
):  # fmt: skip
    """One row of logits; maxima and scores are in base-2 units."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_tiles * TILE
    target = tl.load(target_ptr + row)
    column = tl.arange(0, TILE)
    row_max = -float("inf")
    row_sum = 0.0
    argmax_tile = 0
    score = -float("inf")
    sample_tile = 0
    adjusted_max = -float("inf")
    if SAMPLE:
        # From device memory, so that every replay of a captured graph reads the current values.
        seed = tl.load(seed_and_step_ptr)
        step = tl.load(seed_and_step_ptr + 1)
        slot = tl.load(slot_ptr + row)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        offset = tile[:, None] * TILE + column[None, :]
        is_tile = tile < num_tiles
        z = tl.load(logits_ptr + offset, mask=is_tile[:, None], other=-float("inf")).to(tl.float32)
        tile_max = tl.max(z, axis=1) * LOG2E
        step_max = tl.max(tile_max, axis=0)
        argmax_tile = tl.where(step_max > row_max, first + tl.argmax(tile_max, axis=0), argmax_tile)
        old_max = row_max
        row_max = tl.maximum(row_max, step_max)
        tile_sum = tl.sum(tl.exp2(z * LOG2E - row_max), axis=1)
        row_sum = row_sum * tl.exp2(old_max - row_max) + tl.sum(tile_sum, axis=0)
        if SAMPLE:
            score_max = row_max
            if HAS_LOGIT_ADJUSTMENT:
                z = z * inverse_temperature
                z = tl.where(offset == target, z - penalty, z)
                adjusted_max = tl.maximum(adjusted_max, tl.max(tl.max(z, axis=1), axis=0) * LOG2E)
                tile_sum = tl.sum(tl.exp2(z * LOG2E - adjusted_max), axis=1)
                score_max = adjusted_max
            w0, w1, w2, w3 = philox4(seed, step, tile * 0 + slot, tile // 4, 0)
            lane = tile % 4
            word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
            # Logsumexp of the tile + Gumbel noise. A tile whose sum underflows cannot win.
            tile_score = score_max + tl.log2(tl.maximum(tile_sum, 1e-37)) - tl.log2(exponential(uniform(word)))
            tile_score = tl.where(is_tile, tile_score, -float("inf"))
            step_score = tl.max(tile_score, axis=0)
            sample_tile = tl.where(step_score > score, first + tl.argmax(tile_score, axis=0), sample_tile)
            score = tl.maximum(score, step_score)

    lse = (row_max + tl.log2(row_sum)) * LN2
    tl.store(lse_ptr + row, lse)
    tl.store(nll_ptr + row, lse - tl.load(logits_ptr + target).to(tl.float32))
    z = tl.load(logits_ptr + argmax_tile * TILE + column)
    tl.store(correct_ptr + row, argmax_tile * TILE + tl.argmax(z, axis=0) == target)
    if SAMPLE:
        z = tl.load(logits_ptr + sample_tile * TILE + column).to(tl.float32)
        if HAS_LOGIT_ADJUSTMENT:
            z = z * inverse_temperature
            z = tl.where(sample_tile * TILE + column == target, z - penalty, z)
        word, _, _, _ = philox4(seed, step, slot, 0, 1)
        tl.store(sample_ptr + row, sample_tile * TILE + inverse_cdf(z, uniform(word)))


@triton.jit
def _logits_gradient_kernel(
    logits_ptr, logits_grad_ptr, grad_ptr, target_ptr, lse_ptr, bias_grad_ptr, num_rows, num_columns,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(softmax - one_hot) * grad for ROWS rows, possibly in place, and its sum over these rows."""
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for start in range(0, ROWS, STEP):
        row = block * ROWS + start + tl.arange(0, STEP)
        is_row = row < num_rows
        mask = is_row[:, None] & (column < num_columns)[None, :]
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        z = tl.load(logits_ptr + offset, mask=mask, other=-float("inf")).to(tl.float32)
        grad = tl.load(grad_ptr + row, mask=is_row, other=0.0)
        lse = tl.load(lse_ptr + row, mask=is_row, other=0.0) * LOG2E
        target = tl.load(target_ptr + row, mask=is_row, other=-1)
        target_grad = tl.where(column[None, :] == target[:, None], grad[:, None], 0.0)
        z_grad = tl.exp2(z * LOG2E - lse[:, None]) * grad[:, None] - target_grad
        total += z_grad
        tl.store(logits_grad_ptr + offset, z_grad.to(logits_grad_ptr.dtype.element_ty), mask=mask)
    partial_offset = block.to(tl.int64) * num_columns + column
    tl.store(bias_grad_ptr + partial_offset, tl.sum(total, axis=0), mask=column < num_columns)


def rows_per_chunk(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Rows per chunk: about equal for all chunks, and a multiple of 128 if that many fit."""
    max_rows = max(1, CHUNK_LOGITS_BYTES // (num_columns * itemsize))
    rows = -(-num_rows // -(-num_rows // max_rows))
    return rows if max_rows < 128 else min(-(-rows // 128) * 128, max_rows // 128 * 128)


def num_saved_rows(num_rows: int, num_columns: int, itemsize: int, memory_bytes: int = 0) -> int:
    """Rows whose logits are saved for the backward pass: the whole chunks that fit into the bound."""
    bound = max(SAVED_LOGITS_BYTES, memory_bytes // SAVED_LOGITS_PART)
    chunk = rows_per_chunk(num_rows, num_columns, itemsize)
    return min(num_rows, bound // (num_columns * itemsize) // chunk * chunk)


def _chunks(num_rows: int, num_columns: int, itemsize: int) -> list[slice]:
    step = rows_per_chunk(num_rows, num_columns, itemsize)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _logits(x_mE: Tensor, weight_PE: Tensor, bias_P: Tensor, out_mP: Tensor) -> Tensor:
    return torch.addmm(bias_P, x_mE, weight_PE.T, out=out_mP)


def forward(
    x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, target_M: Tensor, slot_M: Tensor,
    seed_and_step: Tensor | None, temperature: float, disallow_correct: bool, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(nll, sample, correct, logsumexp, saved logits); the weight is padded in V, the bias in x's dtype."""
    num_rows = x_ME.shape[0]
    num_columns = weight_PE.shape[0]
    itemsize = x_ME.element_size()
    chunks = _chunks(num_rows, num_columns, itemsize)
    num_saved = num_saved_rows(num_rows, num_columns, itemsize, memory_bytes(x_ME.device)) if with_gradient else 0
    saved = x_ME.new_empty((num_saved, num_columns))
    buffer = x_ME.new_empty((0 if num_saved == num_rows else chunks[0].stop, num_columns))
    nll_M, lse_M = (torch.empty(num_rows, dtype=torch.float32, device=x_ME.device) for _ in range(2))
    sampling = seed_and_step is not None
    sample_M = torch.empty(num_rows if sampling else 0, dtype=torch.int64, device=x_ME.device)
    correct_M = torch.empty(num_rows, dtype=torch.bool, device=x_ME.device)
    for rows in chunks:
        size = rows.stop - rows.start
        out = saved[rows] if rows.stop <= num_saved else buffer[:size]
        logits = _logits(x_ME[rows], weight_PE, bias_P, out)
        _read_kernel[(size,)](
            logits, target_M[rows], slot_M[rows], seed_and_step if sampling else target_M, nll_M[rows],
            lse_M[rows], sample_M[rows], correct_M[rows], num_columns // TILE, 1 / temperature,
            1000.0 if disallow_correct else 0.0, TILE=TILE, TILES=TILES_PER_STEP, SAMPLE=sampling,
            HAS_LOGIT_ADJUSTMENT=sampling and (temperature != 1.0 or disallow_correct), num_warps=4, **FUSION,
        )  # fmt: skip
    return nll_M, sample_M, correct_M, lse_M, saved


def backward(
    grad_M: Tensor, x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, target_M: Tensor, lse_M: Tensor,
    saved: Tensor, vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x [M, E], the table (fp32 [V, E]) and the bias (fp32 [V]); `saved` is not overwritten."""
    num_rows = x_ME.shape[0]
    num_columns = weight_PE.shape[0]
    chunks = _chunks(num_rows, num_columns, x_ME.element_size())
    buffer = x_ME.new_empty((chunks[0].stop, num_columns))
    x_grad_ME = torch.empty_like(x_ME)
    table_grad = None
    bias_grad = None
    for rows in chunks:
        size = rows.stop - rows.start
        logits_grad = buffer[:size]
        is_saved = rows.stop <= saved.shape[0]
        logits = saved[rows] if is_saved else _logits(x_ME[rows], weight_PE, bias_P, logits_grad)
        num_blocks = triton.cdiv(size, GRADIENT_ROWS)
        partial = torch.empty((num_blocks, num_columns), dtype=torch.float32, device=x_ME.device)
        _logits_gradient_kernel[(num_blocks, triton.cdiv(num_columns, GRADIENT_COLUMNS))](
            logits, logits_grad, grad_M[rows], target_M[rows], lse_M[rows], partial, size, num_columns,
            ROWS=GRADIENT_ROWS, STEP=GRADIENT_STEP, COLUMNS=GRADIENT_COLUMNS, num_warps=4, **FUSION,
        )  # fmt: skip
        torch.mm(logits_grad, weight_PE, out=x_grad_ME[rows])
        table_grad = _add_product(table_grad, logits_grad[:, :vocab_size].T, x_ME[rows])
        bias_grad = partial.sum(0) if bias_grad is None else bias_grad + partial.sum(0)
    assert table_grad is not None and bias_grad is not None
    return x_grad_ME, table_grad, bias_grad[:vocab_size].clone()


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, accumulated and returned in fp32."""
    if a.dtype == torch.float32 or not a.is_cuda:  # the CPU has no 16-bit product with fp32 output
        product = a.float() @ b.float()
        return product if total is None else total + product
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32)
