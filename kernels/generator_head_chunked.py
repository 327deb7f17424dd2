"""The generator head on wide tables and in fp32: cuBLAS makes the logits, rows in chunks (Triton).

One half of `generator_head`. A chunk's logits [rows, P] lie in a buffer of bounded size; one kernel
reads them once for nll, logsumexp, sample and argmax. Where a gradient is wanted the first chunks'
logits are kept, up to a second bound, and the others computed again; a kernel turns logits into
their gradient and sums the bias', and cuBLAS does the rest.

Shapes: M masked slots, V vocabulary, E embedding, P = V padded to whole tiles (a row of logits then
starts at an address that cuBLAS is fast at).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.noise import exponential, invert, uniform, words

TILE = 128
TILES_A_STEP = 16
# Bytes of one chunk's logits, and of the logits that are kept for the backward pass.
CHUNK_BYTES = 256 << 20
KEPT_BYTES = 512 << 20
# Blocks of the logits' gradient: rows a program (summed in its order), rows a step, columns.
GRADIENT_ROWS, GRADIENT_STEP, GRADIENT_COLUMNS = 64, 8, 512
FUSION = {"enable_fp_fusion": True}
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _read_kernel(
    logits_ptr, original_ptr, slot_ptr, seed_and_step_ptr, nll_ptr, lse_ptr, sample_ptr, correct_ptr,
    num_tiles, inverse_temperature, penalty,
    TILE: tl.constexpr, TILES: tl.constexpr, SAMPLE: tl.constexpr, SHAPED: tl.constexpr,
):  # fmt: skip
    """One row of logits; peaks and scores in powers of two."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * num_tiles * TILE
    original = tl.load(original_ptr + row)
    column = tl.arange(0, TILE)
    peak, mass, peak_tile = -float("inf"), 0.0, 0
    score, score_tile, shaped_peak = -float("inf"), 0, -float("inf")
    if SAMPLE:
        # From device memory, so that a captured graph reads them afresh at every replay.
        seed, step, slot = tl.load(seed_and_step_ptr), tl.load(seed_and_step_ptr + 1), tl.load(slot_ptr + row)
    for first in range(0, num_tiles, TILES):
        tile = first + tl.arange(0, TILES)
        offset = tile[:, None] * TILE + column[None, :]
        is_tile = tile < num_tiles
        z = tl.load(logits_ptr + offset, mask=is_tile[:, None], other=-float("inf")).to(tl.float32)
        peaks = tl.max(z, axis=1) * LOG2E
        here = tl.max(peaks, axis=0)
        peak_tile = tl.where(here > peak, first + tl.argmax(peaks, axis=0), peak_tile)
        before, peak = peak, tl.maximum(peak, here)
        tile_mass = tl.sum(tl.exp2(z * LOG2E - peak), axis=1)
        mass = mass * tl.exp2(before - peak) + tl.sum(tile_mass, axis=0)
        if SAMPLE:
            tile_peak = peak
            if SHAPED:
                z = z * inverse_temperature
                z = tl.where(offset == original, z - penalty, z)
                shaped_peak = tl.maximum(shaped_peak, tl.max(tl.max(z, axis=1), axis=0) * LOG2E)
                tile_mass = tl.sum(tl.exp2(z * LOG2E - shaped_peak), axis=1)
                tile_peak = shaped_peak
            w0, w1, w2, w3 = words(seed, step, tile * 0 + slot, tile // 4, 0)
            lane = tile % 4
            word = tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))
            # Logsumexp + Gumbel noise. A mass so far below the peak that it vanishes could not win.
            won = tile_peak + tl.log2(tl.maximum(tile_mass, 1e-37)) - tl.log2(exponential(uniform(word)))
            won = tl.where(is_tile, won, -float("inf"))
            best = tl.max(won, axis=0)
            score_tile = tl.where(best > score, first + tl.argmax(won, axis=0), score_tile)
            score = tl.maximum(score, best)

    lse = (peak + tl.log2(mass)) * LN2
    tl.store(lse_ptr + row, lse)
    tl.store(nll_ptr + row, lse - tl.load(logits_ptr + original).to(tl.float32))
    z = tl.load(logits_ptr + peak_tile * TILE + column)
    tl.store(correct_ptr + row, peak_tile * TILE + tl.argmax(z, axis=0) == original)
    if SAMPLE:
        z = tl.load(logits_ptr + score_tile * TILE + column).to(tl.float32)
        if SHAPED:
            z = z * inverse_temperature
            z = tl.where(score_tile * TILE + column == original, z - penalty, z)
        word, _, _, _ = words(seed, step, slot, 0, 1)
        tl.store(sample_ptr + row, score_tile * TILE + invert(z, column, uniform(word)))


@triton.jit
def _logits_gradient_kernel(
    logits_ptr, logits_grad_ptr, grad_ptr, original_ptr, lse_ptr, bias_grad_ptr, num_rows, num_columns,
    ROWS: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """(softmax - onehot) * grad of ROWS rows, possibly in place, and the sum of those rows."""
    block = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for start in range(0, ROWS, STEP):
        row = block * ROWS + start + tl.arange(0, STEP)
        is_row = row < num_rows
        inside = is_row[:, None] & (column < num_columns)[None, :]
        offset = row.to(tl.int64)[:, None] * num_columns + column[None, :]
        z = tl.load(logits_ptr + offset, mask=inside, other=-float("inf")).to(tl.float32)
        grad = tl.load(grad_ptr + row, mask=is_row, other=0.0)
        lse = tl.load(lse_ptr + row, mask=is_row, other=0.0) * LOG2E
        original = tl.load(original_ptr + row, mask=is_row, other=-1)
        target_grad = tl.where(column[None, :] == original[:, None], grad[:, None], 0.0)
        z_grad = tl.exp2(z * LOG2E - lse[:, None]) * grad[:, None] - target_grad
        total += z_grad
        tl.store(logits_grad_ptr + offset, z_grad.to(logits_grad_ptr.dtype.element_ty), mask=inside)
    place = block.to(tl.int64) * num_columns + column
    tl.store(bias_grad_ptr + place, tl.sum(total, axis=0), mask=column < num_columns)


def rows_a_chunk(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Rows of one chunk: chunks of about equal size, whole blocks of rows where they are large."""
    most = max(1, CHUNK_BYTES // (num_columns * itemsize))
    rows = -(-num_rows // -(-num_rows // most))
    return rows if most < 128 else min(-(-rows // 128) * 128, most // 128 * 128)


def kept_rows(num_rows: int, num_columns: int, itemsize: int) -> int:
    """Rows whose logits are kept for the backward pass: whole chunks within the bound."""
    chunk = rows_a_chunk(num_rows, num_columns, itemsize)
    return min(num_rows, KEPT_BYTES // (num_columns * itemsize) // chunk * chunk)


def _chunks(num_rows: int, num_columns: int, itemsize: int) -> list[slice]:
    step = rows_a_chunk(num_rows, num_columns, itemsize)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _logits(x_mE: Tensor, weight_PE: Tensor, bias_P: Tensor, out_mP: Tensor) -> Tensor:
    return torch.addmm(bias_P, x_mE, weight_PE.T, out=out_mP)


def forward(
    x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, original_M: Tensor, slot_M: Tensor,
    seed_and_step: Tensor | None, temperature: float, disallow_correct: bool, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(nll, sample, correct, logsumexp, kept logits); the weight padded in V, the bias in x's dtype."""
    num_rows, num_columns, itemsize = x_ME.shape[0], weight_PE.shape[0], x_ME.element_size()
    chunks = _chunks(num_rows, num_columns, itemsize)
    num_kept = kept_rows(num_rows, num_columns, itemsize) if with_gradient else 0
    kept = x_ME.new_empty((num_kept, num_columns))
    buffer = x_ME.new_empty((0 if num_kept == num_rows else chunks[0].stop, num_columns))
    nll_M, lse_M = (torch.empty(num_rows, dtype=torch.float32, device=x_ME.device) for _ in range(2))
    sampling = seed_and_step is not None
    sample_M = torch.empty(num_rows if sampling else 0, dtype=torch.int64, device=x_ME.device)
    correct_M = torch.empty(num_rows, dtype=torch.bool, device=x_ME.device)
    for rows in chunks:
        size = rows.stop - rows.start
        out = kept[rows] if rows.stop <= num_kept else buffer[:size]
        logits = _logits(x_ME[rows], weight_PE, bias_P, out)
        _read_kernel[(size,)](
            logits, original_M[rows], slot_M[rows], seed_and_step if sampling else original_M, nll_M[rows],
            lse_M[rows], sample_M[rows], correct_M[rows], num_columns // TILE, 1 / temperature,
            1000.0 if disallow_correct else 0.0, TILE=TILE, TILES=TILES_A_STEP, SAMPLE=sampling,
            SHAPED=sampling and (temperature != 1.0 or disallow_correct), num_warps=4, **FUSION,
        )  # fmt: skip
    return nll_M, sample_M, correct_M, lse_M, kept


def backward(
    grad_M: Tensor, x_ME: Tensor, weight_PE: Tensor, bias_P: Tensor, original_M: Tensor, lse_M: Tensor,
    kept: Tensor, vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the table and the bias; what was kept stays as it is."""
    num_rows, num_columns = x_ME.shape[0], weight_PE.shape[0]
    chunks = _chunks(num_rows, num_columns, x_ME.element_size())
    buffer = x_ME.new_empty((chunks[0].stop, num_columns))
    x_grad_ME, table_grad, bias_grad = torch.empty_like(x_ME), None, None
    for rows in chunks:
        size = rows.stop - rows.start
        logits_grad = buffer[:size]
        is_kept = rows.stop <= kept.shape[0]
        logits = kept[rows] if is_kept else _logits(x_ME[rows], weight_PE, bias_P, logits_grad)
        num_blocks = triton.cdiv(size, GRADIENT_ROWS)
        partial = torch.empty((num_blocks, num_columns), dtype=torch.float32, device=x_ME.device)
        _logits_gradient_kernel[(num_blocks, triton.cdiv(num_columns, GRADIENT_COLUMNS))](
            logits, logits_grad, grad_M[rows], original_M[rows], lse_M[rows], partial, size, num_columns,
            ROWS=GRADIENT_ROWS, STEP=GRADIENT_STEP, COLUMNS=GRADIENT_COLUMNS, num_warps=4, **FUSION,
        )  # fmt: skip
        torch.mm(logits_grad, weight_PE, out=x_grad_ME[rows])
        table_grad = _add_product(table_grad, logits_grad[:, :vocab_size].T, x_ME[rows])
        bias_grad = partial.sum(0) if bias_grad is None else bias_grad + partial.sum(0)
    assert table_grad is not None and bias_grad is not None
    return x_grad_ME, table_grad, bias_grad[:vocab_size].clone()


def _add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, accumulated and kept in fp32."""
    if a.dtype == torch.float32 or not a.is_cuda:  # off the GPU, 16-bit products have no fp32 output
        product = a.float() @ b.float()
        return product if total is None else total + product
    if total is None:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.addmm(total, a, b, out_dtype=torch.float32)
