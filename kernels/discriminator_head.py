"""The discriminator's head after its dense product (bias, GELU, norm, classifier), and its loss (Triton).

Contracts and references: `replaced_logits`, `token_logits` and `discriminator_loss` in `electra_fast.ops.operations`.
Each operation reads its [T, D] or [T] input once. Sums over tokens use no atomics: every program writes its partial
sums to a row of a small buffer, and the rows are added in a fixed order, so that results are bitwise reproducible.

The GELU is exact, without the tanh approximation. Sums are fp32; the loss and the counts are summed over
programs in fp64.

Shapes: T packed tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.gelu import gelu, gelu_and_derivative
from electra_fast.kernels.launch import resident_programs

NUM_WARPS = 4
# Elements per program and iteration: 32 and 16 per thread, in 16-byte loads. The backward pass keeps
# two running sums per element.
FORWARD_TILE = 4096
BACKWARD_TILE = 2048
MAX_COLUMNS = 256  # one warp per row: 16 bytes of bf16 per lane
BACKWARD_PROGRAMS_PER_SM = 5
MIN_TILES = 4  # per program; with fewer, the writes of partial sums would dominate
SUM_ROWS = 256
SUM_WARPS = 8
LOSS_TOKENS = 1024
LOSS_COLUMNS = 8  # partial sums: the loss, `ops.DISCRIMINATOR_TOTALS`, two unused
NUM_TOTALS = 5


@triton.jit
def _gelu_logit_forward_kernel(
    h_ptr, bias_ptr, weight_ptr, classifier_bias_ptr, logits_ptr, mean_ptr, rstd_ptr, num_tokens, eps,
    HAS_GELU: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    row_mask = first + row < num_tokens
    h_ptr += first * D
    logit = tl.zeros([ROWS], dtype=tl.float32)
    mean = tl.zeros([ROWS], dtype=tl.float32)
    square = tl.zeros([ROWS], dtype=tl.float32)  # the sum of squared distances from the mean
    total_weight = 0.0
    for first_column in tl.static_range(0, D, COLUMNS):
        column = first_column + tl.arange(0, COLUMNS)
        column_mask = column < D
        mask = row_mask[:, None] & column_mask[None, :]
        weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
        x = tl.load(h_ptr + row[:, None] * D + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x += tl.load(bias_ptr + column, mask=column_mask, other=0.0)[None, :]
        if HAS_GELU:
            x = gelu(x)
        logit += tl.sum(weight[None, :] * x, axis=1)
        if mean_ptr is not None:  # combines the moments of these columns with the previous ones
            count = min(COLUMNS, D - first_column)
            block_mean = tl.sum(x, axis=1) / count
            centered = tl.where(column_mask[None, :], x - block_mean[:, None], 0.0)
            distance = block_mean - mean
            square += tl.sum(centered * centered, axis=1)
            square += distance * distance * (first_column * count / (first_column + count))
            mean += distance * (count / (first_column + count))
            total_weight += tl.sum(weight, axis=0)
    if mean_ptr is not None:
        rstd = tl.rsqrt(square / D + eps)
        logit = (logit - mean * total_weight) * rstd
        tl.store(mean_ptr + first + row, mean, mask=row_mask)
        tl.store(rstd_ptr + first + row, rstd, mask=row_mask)
    if classifier_bias_ptr is not None:
        logit += tl.load(classifier_bias_ptr)
    tl.store(logits_ptr + first + row, logit, mask=row_mask)


@triton.jit
def _gelu_logit_backward_kernel(
    dlogits_ptr, h_ptr, bias_ptr, weight_ptr, classifier_bias_ptr, logits_ptr, mean_ptr, rstd_ptr, dh_ptr, partial_ptr,
    num_tokens, rows_per_program, partial_stride,
    HAS_GELU: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # A program has a block of columns of consecutive rows, because no sum here runs over columns. The sum of the normed
    # values times their gradient is the logit without its bias.
    first = tl.program_id(0).to(tl.int64) * rows_per_program
    first_column = tl.program_id(1) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    column_mask = column < D
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    centered_weight = weight
    classifier_bias = 0.0
    if mean_ptr is not None:
        total_weight = 0.0
        for other_column in tl.static_range(0, D, COLUMNS):
            other = other_column + tl.arange(0, COLUMNS)
            total_weight += tl.sum(tl.load(weight_ptr + other, mask=other < D, other=0.0), axis=0)
        centered_weight -= total_weight / D
        if classifier_bias_ptr is not None:
            classifier_bias += tl.load(classifier_bias_ptr)
    # One running sum per row of the tile, reduced at the end, since the rows of a tile are in different warps.
    dbias = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    dweight = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    dclassifier_bias = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, rows_per_program, ROWS):
        row = first + start + tl.arange(0, ROWS)
        row_mask = row < num_tokens
        mask = row_mask[:, None] & column_mask[None, :]
        offset = row[:, None] * D + column[None, :]
        x = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dlogit = tl.load(dlogits_ptr + row, mask=row_mask, other=0.0)
        if bias_ptr is not None:
            x += bias[None, :]
        if HAS_GELU:
            x, derivative = gelu_and_derivative(x)
        dclassifier_bias += dlogit
        if mean_ptr is None:
            dweight += dlogit[:, None] * x
            dh = dlogit[:, None] * weight[None, :]
        else:
            # Past the last row, rstd is 0, so every gradient is 0.
            rstd = tl.load(rstd_ptr + row, mask=row_mask, other=0.0)
            x = (x - tl.load(mean_ptr + row, mask=row_mask, other=0.0)[:, None]) * rstd[:, None]
            share = (tl.load(logits_ptr + row, mask=row_mask, other=0.0) - classifier_bias) / D
            dweight += dlogit[:, None] * x
            dh = (dlogit * rstd)[:, None] * (centered_weight[None, :] - x * share[:, None])
        if HAS_GELU:
            dh *= derivative
        tl.store(dh_ptr + offset, dh.to(dh_ptr.dtype.element_ty), mask=mask)
        if bias_ptr is not None:
            dbias += dh
    partial_ptr += tl.program_id(0) * partial_stride
    tl.store(partial_ptr + column, tl.sum(dweight, axis=0), mask=column_mask)
    if bias_ptr is not None:
        tl.store(partial_ptr + D + column, tl.sum(dbias, axis=0), mask=column_mask)
    if first_column == 0:
        tl.store(partial_ptr + D * (1 + (bias_ptr is not None)), tl.sum(dclassifier_bias, axis=0))


@triton.jit
def _log1p(u):
    # For u in [0, 1], the series of 2 artanh(u / (2 + u)): accurate in fp32 even for small u, unlike the
    # GPU's fast log(1 + u).
    s = u / (2.0 + u)
    q = s * s
    series = 1 / 11 + q * (1 / 13 + q * (1 / 15))
    series = 1 / 5 + q * (1 / 7 + q * (1 / 9 + q * series))
    return 2.0 * s * (1.0 + q * (1 / 3 + q * series))


@triton.jit
def _loss_forward_kernel(
    logits_ptr, replaced_ptr, valid_ptr, partial_ptr, num_tokens, TOKENS: tl.constexpr, COLUMNS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    z = tl.load(logits_ptr + token, mask=mask, other=0.0).to(tl.float32)
    replaced = tl.load(replaced_ptr + token, mask=mask, other=0) != 0
    valid = tl.load(valid_ptr + token, mask=mask, other=0) != 0
    loss = tl.maximum(z, 0.0) - z * replaced.to(tl.float32) + _log1p(tl.exp(-tl.abs(z)))
    predicted = (z > 0) & valid
    replaced = replaced & valid
    correct = (predicted == replaced) & valid

    partial_ptr += tl.program_id(0) * COLUMNS
    # A product instead of tl.where, so that NaN on padding reaches the loss, as in the reference.
    tl.store(partial_ptr, tl.sum(loss * valid.to(tl.float32), axis=0).to(tl.float64))
    tl.store(partial_ptr + 1, tl.sum(correct.to(tl.int32), axis=0).to(tl.float64))
    tl.store(partial_ptr + 2, tl.sum((predicted & replaced).to(tl.int32), axis=0).to(tl.float64))
    tl.store(partial_ptr + 3, tl.sum(predicted.to(tl.int32), axis=0).to(tl.float64))
    tl.store(partial_ptr + 4, tl.sum(replaced.to(tl.int32), axis=0).to(tl.float64))
    tl.store(partial_ptr + 5, tl.sum(valid.to(tl.int32), axis=0).to(tl.float64))


@triton.jit
def _loss_sums_kernel(
    partial_ptr, loss_ptr, totals_ptr, num_partials,
    NUM_TOTALS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float64)
    for first in range(0, num_partials, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < num_partials)[:, None] & (column <= NUM_TOTALS)[None, :]
        total += tl.load(partial_ptr + row[:, None] * COLUMNS + column[None, :], mask=mask, other=0.0)
    sums = tl.sum(total, axis=0)
    tl.store(loss_ptr + column, sums.to(tl.float32), mask=column == 0)
    is_total = (column > 0) & (column <= NUM_TOTALS)
    tl.store(totals_ptr + column - 1, tl.where(is_total, sums, 0.0).to(tl.int64), mask=is_total)


@triton.jit
def _loss_backward_kernel(
    dloss_ptr, logits_ptr, replaced_ptr, valid_ptr, dlogits_ptr, num_tokens, TOKENS: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    z = tl.load(logits_ptr + token, mask=mask, other=0.0).to(tl.float32)
    replaced = tl.load(replaced_ptr + token, mask=mask, other=0) != 0
    valid = tl.load(valid_ptr + token, mask=mask, other=0) != 0
    u = tl.exp(-tl.abs(z))
    # sigmoid(z) - y without cancellation, which is plus or minus the probability of the wrong label.
    wrong = tl.where((z >= 0) == replaced, u, 1.0) / (1.0 + u)
    dz = tl.where(replaced, -wrong, wrong) * valid.to(tl.float32) * tl.load(dloss_ptr)
    tl.store(dlogits_ptr + token, dz.to(dlogits_ptr.dtype.element_ty), mask=mask)


def block_columns(width: int) -> int:
    """Columns per tile: the largest power of two that divides the width, or covers it if the former is under 64."""
    divisor = width & -width
    return min(MAX_COLUMNS, divisor if divisor >= 64 else triton.next_power_of_2(width))


@torch.library.custom_op("electra_fast::classifier_logits", mutates_args=())
def classifier_logits(
    h_TD: Tensor, bias_D: Tensor | None, weight_1D: Tensor, classifier_bias_1: Tensor | None, eps: float | None,
    has_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """weight · x + classifier_bias, where x is h + bias, followed by GELU and norm (with `eps`) if requested.

    h [T, D], fp32 [D], [1, D] and [1] → fp32 [T]; mean and 1 / standard deviation, fp32 [T], empty without a norm.
    """
    num_tokens, width = h_TD.shape
    columns = block_columns(h_TD.shape[1])
    logits_T = torch.empty(num_tokens, dtype=torch.float32, device=h_TD.device)
    rows = FORWARD_TILE // columns
    mean_T, rstd_T = (logits_T.new_empty(0 if eps is None else num_tokens) for _ in range(2))
    statistics = (None, None) if eps is None else (mean_T, rstd_T)
    _gelu_logit_forward_kernel[(triton.cdiv(num_tokens, rows),)](
        h_TD.contiguous(), bias_D, weight_1D, classifier_bias_1, logits_T, *statistics, num_tokens, eps or 0.0,
        HAS_GELU=has_gelu, D=width, ROWS=rows, COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return logits_T, mean_T, rstd_T


@classifier_logits.register_fake
def _(
    h_TD: Tensor, bias_D: Tensor | None, weight_1D: Tensor, classifier_bias_1: Tensor | None, eps: float | None,
    has_gelu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = (h_TD.shape[0], *[0 if eps is None else h_TD.shape[0]] * 2)
    logits_T, mean_T, rstd_T = (h_TD.new_empty(size, dtype=torch.float32) for size in sizes)
    return logits_T, mean_T, rstd_T


@torch.library.custom_op("electra_fast::classifier_logits_backward", mutates_args=())
def classifier_logits_backward(
    dlogits_T: Tensor, h_TD: Tensor, bias_D: Tensor | None, weight_1D: Tensor, classifier_bias_1: Tensor | None,
    logits_T: Tensor, mean_T: Tensor, rstd_T: Tensor, has_norm: bool, has_gelu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dh [T, D] in h's dtype, and the fp32 gradients of weight, bias if any, and classifier bias, concatenated."""
    num_tokens, width = h_TD.shape
    columns = block_columns(width)
    rows = BACKWARD_TILE // columns
    column_blocks = triton.cdiv(width, columns)
    max_programs = resident_programs(h_TD.device, BACKWARD_PROGRAMS_PER_SM)
    rows_per_program = rows * max(MIN_TILES, triton.cdiv(num_tokens * column_blocks, rows * max_programs))
    num_programs = triton.cdiv(num_tokens, rows_per_program)
    dh_TD = torch.empty_like(h_TD, memory_format=torch.contiguous_format)
    num_sums = width * (1 + (bias_D is not None)) + 1
    partial_stride = num_sums + 3  # keeps rows 16-byte aligned
    partials = torch.empty(num_programs, partial_stride, dtype=torch.float32, device=h_TD.device)
    statistics = (logits_T, mean_T, rstd_T) if has_norm else (None, None, None)
    _gelu_logit_backward_kernel[(num_programs, column_blocks)](
        dlogits_T.contiguous(), h_TD.contiguous(), bias_D, weight_1D, classifier_bias_1, *statistics, dh_TD, partials,
        num_tokens, rows_per_program, partial_stride,
        HAS_GELU=has_gelu, D=width, ROWS=rows, COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dh_TD, partials[:, :num_sums].sum(0)


@classifier_logits_backward.register_fake
def _(dlogits_T: Tensor, h_TD: Tensor, bias_D: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    dh_TD = torch.empty_like(h_TD, memory_format=torch.contiguous_format)
    return dh_TD, h_TD.new_empty(h_TD.shape[1] * (1 + (bias_D is not None)) + 1, dtype=torch.float32)


def _save_logits(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, eps, ctx.has_gelu = inputs
    ctx.has_norm = eps is not None
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)  # the statistics are not differentiated


def _logit_gradients(ctx: Any, dlogits_T: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    dh_TD, sums = classifier_logits_backward(dlogits_T, *ctx.saved_tensors, ctx.has_norm, ctx.has_gelu)
    width = dh_TD.shape[1]
    _, bias_D, _, classifier_bias_1 = ctx.saved_tensors[:4]
    dbias_D = None if bias_D is None else sums[width : 2 * width]
    return dh_TD, dbias_D, sums[:width].view(1, width), None if classifier_bias_1 is None else sums[-1:], None, None


classifier_logits.register_autograd(_logit_gradients, setup_context=_save_logits)


def gelu_logit(
    h_TD: Tensor, bias_D: Tensor | None, weight_1D: Tensor, classifier_bias_1: Tensor,
    norm_weight_D: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """weight · gelu(h + bias) + classifier_bias, with a LayerNorm (without bias) after the GELU if it has a weight."""
    weight_1D, norm_eps = (weight_1D, None) if norm_weight_D is None else (weight_1D * norm_weight_D, eps)
    logits_T: Tensor = classifier_logits(h_TD, bias_D, weight_1D, classifier_bias_1, norm_eps, True)[0]
    return logits_T


def token_logits(x_TD: Tensor, weight_1D: Tensor, bias_1: Tensor | None) -> Tensor:
    """weight · x + bias; → fp32 [T]."""
    logits_T: Tensor = classifier_logits(x_TD, None, weight_1D, bias_1, None, False)[0]
    return logits_T


@torch.library.custom_op("electra_fast::discriminator_loss", mutates_args=())
def discriminator_loss(logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    """Float [T], bool [T], bool [T] → summed loss (fp32 scalar) and `ops.DISCRIMINATOR_TOTALS` (int64 [5])."""
    num_tokens = logits_T.shape[0]
    device = logits_T.device
    num_programs = triton.cdiv(num_tokens, LOSS_TOKENS)
    partials = torch.empty(num_programs, LOSS_COLUMNS, dtype=torch.float64, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    totals_5 = torch.empty(NUM_TOTALS, dtype=torch.int64, device=device)
    _loss_forward_kernel[(num_programs,)](
        logits_T.contiguous(), replaced_T.contiguous(), valid_T.contiguous(), partials, num_tokens,
        TOKENS=LOSS_TOKENS, COLUMNS=LOSS_COLUMNS, num_warps=NUM_WARPS,
    )  # fmt: skip
    _loss_sums_kernel[(1,)](
        partials, loss, totals_5, num_programs,
        NUM_TOTALS=NUM_TOTALS, ROWS=SUM_ROWS, COLUMNS=LOSS_COLUMNS, num_warps=SUM_WARPS,
    )  # fmt: skip
    return loss, totals_5


@discriminator_loss.register_fake
def _(logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    return logits_T.new_empty((), dtype=torch.float32), logits_T.new_empty(NUM_TOTALS, dtype=torch.int64)


@torch.library.custom_op("electra_fast::discriminator_loss_backward", mutates_args=())
def discriminator_loss_backward(dloss: Tensor, logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> Tensor:
    """dloss * (sigmoid(logits) - replaced) on valid tokens, else 0; dloss is an fp32 scalar. [T] in the logits' dtype.

    It is recomputed from the inputs of the forward pass, because a saved buffer would cost more memory traffic.
    """
    dlogits_T = torch.empty_like(logits_T, memory_format=torch.contiguous_format)
    num_tokens = logits_T.shape[0]
    _loss_backward_kernel[(triton.cdiv(num_tokens, LOSS_TOKENS),)](
        dloss, logits_T.contiguous(), replaced_T.contiguous(), valid_T.contiguous(), dlogits_T, num_tokens,
        TOKENS=LOSS_TOKENS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dlogits_T


@discriminator_loss_backward.register_fake
def _(dloss: Tensor, logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> Tensor:
    return torch.empty_like(logits_T, memory_format=torch.contiguous_format)


def _save_loss(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _loss_gradients(ctx: Any, dloss: Tensor, dtotals_5: Tensor | None) -> tuple[Tensor, None, None]:
    return discriminator_loss_backward(dloss, *ctx.saved_tensors), None, None


discriminator_loss.register_autograd(_loss_gradients, setup_context=_save_loss)
