"""LayerNorm(residual + dropout(x + bias)), and plain LayerNorm, with one forward and one backward pass (Triton).

Contracts and references: `residual_norm`, `add_norm` and `layer_norm` in `electra_fast.ops.operations`. x is a linear
layer's product without its bias: the backward pass reads every row anyway, so the bias gradient costs nothing. The
inputs and two statistics per row are saved; the sum and the dropout mask are recomputed. If the sum is also an output,
it is saved instead of the inputs, and the backward pass adds its gradient. Vector gradients are summed per program,
then over the programs in a fixed order, so that results are bitwise reproducible. `residual_norm_backward` leaves the
second sum to its caller, which may combine it with others (`partial_sums`).

Shapes: T tokens, D hidden, P programs, S vectors with gradients (of weight, norm bias, bias).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.dropout import keep_scale, threshold
from electra_fast.kernels.launch import resident_programs

STAGES = tl.constexpr(3)  # tiles with loads in flight
TILE = 1024  # elements per four warps and iteration: one 16-byte load per thread and operand
# Resident programs of four warps: 64 registers per thread forward, 126 backward with dropout. Backward, four programs
# that load two tiles ahead have more loads in flight than five without, and more tiles per program in a small step.
FORWARD_PROGRAMS_PER_SM = 8
BACKWARD_PROGRAMS_PER_SM = 4


@triton.jit
def _before_norm(
    x_ptr, bias, residual_ptr, key_ptr, call_index, token, offset, mask,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr, IS_SUM: tl.constexpr = False,
):  # fmt: skip
    """residual + dropout(x + bias) in fp32, or x if it is that sum, and dropout's factors."""
    z = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        z += bias[None, :]
    scale = 1.0
    if THRESHOLD > 0:
        scale = keep_scale(key_ptr, call_index, token, BLOCK_T, BLOCK_D, THRESHOLD)
        if not IS_SUM:
            z *= scale
    if residual_ptr is not None:
        z += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    return z, scale


@triton.jit(do_not_specialize=["call_index"])
def _residual_norm_forward_kernel(
    x_ptr, bias_ptr, residual_ptr, weight_ptr, norm_bias_ptr, key_ptr, y_ptr, mean_ptr, rstd_ptr, sum_ptr,
    num_tokens, eps, call_index,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    column_mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    if norm_bias_ptr is not None:
        norm_bias = tl.load(norm_bias_ptr + column, mask=column_mask, other=0.0)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None] & column_mask[None, :]
        z, _ = _before_norm(x_ptr, bias, residual_ptr, key_ptr, call_index, token, offset, mask,
                            BLOCK_T, BLOCK_D, THRESHOLD)  # fmt: skip
        if sum_ptr is not None:
            tl.store(sum_ptr + offset, z, mask=mask)
        mean = tl.sum(z, axis=1) / WIDTH
        centered = tl.where(column_mask[None, :], z - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / WIDTH + eps)
        y = centered * rstd[:, None] * weight[None, :]
        if norm_bias_ptr is not None:
            y += norm_bias[None, :]
        tl.store(y_ptr + offset, y, mask=mask)
        tl.store(mean_ptr + token, mean, mask=token < num_tokens)
        tl.store(rstd_ptr + token, rstd, mask=token < num_tokens)


@triton.jit(do_not_specialize=["call_index"])
def _residual_norm_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, residual_ptr, weight_ptr, mean_ptr, rstd_ptr, key_ptr, dsum_ptr, dx_ptr, dresidual_ptr,
    partial_ptr, num_tokens, call_index, HAS_NORM_BIAS: tl.constexpr, IS_SUM: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    column_mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    bias = None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    dweight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dnorm_bias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0), num_stages=STAGES):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None] & column_mask[None, :]
        z, scale = _before_norm(x_ptr, bias, residual_ptr, key_ptr, call_index, token, offset, mask,
                                BLOCK_T, BLOCK_D, THRESHOLD, IS_SUM)  # fmt: skip
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        # Past the last row, rstd is 0, so every gradient is 0.
        mean = tl.load(mean_ptr + token, mask=token < num_tokens, other=0.0)
        rstd = tl.load(rstd_ptr + token, mask=token < num_tokens, other=0.0)
        normed = (z - mean[:, None]) * rstd[:, None]
        dnormed = dy * weight[None, :]
        mean_dnormed = tl.sum(dnormed, axis=1) / WIDTH
        mean_dnormed_normed = tl.sum(dnormed * normed, axis=1) / WIDTH
        dz = (dnormed - mean_dnormed[:, None] - normed * mean_dnormed_normed[:, None]) * rstd[:, None]
        if dsum_ptr is not None:
            dz += tl.load(dsum_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dx = dz * scale
        tl.store(dx_ptr + offset, dx, mask=mask)
        if dresidual_ptr is not None:
            tl.store(dresidual_ptr + offset, dz, mask=mask)
        dweight += dy * normed
        if HAS_NORM_BIAS:
            dnorm_bias += dy
        if bias_ptr is not None:
            dbias += dx
    # Row p of the partial sums for the weight, the norm's bias and the linear layer's bias, if present.
    partial_ptr += column + tl.program_id(0) * (WIDTH * (1 + HAS_NORM_BIAS + (bias_ptr is not None)))
    tl.store(partial_ptr, tl.sum(dweight, axis=0), mask=column_mask)
    if HAS_NORM_BIAS:
        tl.store(partial_ptr + WIDTH, tl.sum(dnorm_bias, axis=0), mask=column_mask)
    if bias_ptr is not None:
        tl.store(partial_ptr + WIDTH * (1 + HAS_NORM_BIAS), tl.sum(dbias, axis=0), mask=column_mask)


def blocks(width: int) -> dict[str, int]:
    """Block sizes of both kernels at this width: tiles of whole rows."""
    columns = max(4, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK_T": max(1, TILE // columns), "BLOCK_D": columns}


def num_warps(width: int) -> int:
    """Warps per program: more than four for rows wider than a tile."""
    return min(max(4, blocks(width)["BLOCK_D"] // 256), 16)


def _grid(x_TD: Tensor, tile: dict[str, int], programs_per_sm: int) -> tuple[int]:
    return (min(triton.cdiv(x_TD.shape[0], tile["BLOCK_T"]), resident_programs(x_TD.device, programs_per_sm)),)


@torch.library.custom_op("electra_fast::residual_norm", mutates_args=())
def residual_norm(
    x_TD: Tensor, bias_D: Tensor | None, residual_TD: Tensor | None, weight_D: Tensor, norm_bias_D: Tensor | None,
    eps: float, probability: float, key: Tensor | None, call_index: int, has_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """LayerNorm(residual + dropout(x + bias)) [T, D] in x's dtype; mean and 1 / standard deviation, fp32 [T].

    With `has_sum`, for callers with a separate backward pass, also the input of the norm; else an empty tensor.
    """
    num_tokens, width = x_TD.shape
    x_TD = x_TD.contiguous()
    tile = blocks(width)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    y_TD = torch.empty_like(x_TD)
    mean_T = x_TD.new_empty(num_tokens, dtype=torch.float32)
    rstd_T = torch.empty_like(mean_T)
    sum_TD = torch.empty_like(x_TD) if has_sum else x_TD.new_empty(0)
    _residual_norm_forward_kernel[_grid(x_TD, tile, FORWARD_PROGRAMS_PER_SM)](
        x_TD, bias_D, residual_TD, weight_D, norm_bias_D, key, y_TD, mean_T, rstd_T, sum_TD if has_sum else None,
        num_tokens, eps, call_index, **tile, THRESHOLD=threshold(probability), num_warps=num_warps(width),
    )  # fmt: skip
    return y_TD, mean_T, rstd_T, sum_TD


@torch.library.custom_op("electra_fast::residual_norm_backward", mutates_args=())
def residual_norm_backward(
    dy_TD: Tensor, x_TD: Tensor, bias_D: Tensor | None, residual_TD: Tensor | None, weight_D: Tensor,
    mean_T: Tensor, rstd_T: Tensor, has_norm_bias: bool, probability: float, key: Tensor | None, call_index: int,
    is_sum: bool = False, dsum_TD: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x and the residual [T, D], and partial sums for weight, norm bias and bias, if given.

    Without dropout, x and the residual have the same gradient; the second output is then empty. The partial sums are
    fp32 [P, S, D]. With `is_sum`, x is the input of the norm, including the residual, and `dsum_TD`, a further gradient
    of it, is added.
    """
    num_tokens, width = x_TD.shape
    dy_TD = dy_TD.contiguous()
    x_TD = x_TD.contiguous()
    tile = blocks(width)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    dsum_TD = None if dsum_TD is None else dsum_TD.contiguous()
    grid = _grid(x_TD, tile, BACKWARD_PROGRAMS_PER_SM)
    dx_TD = torch.empty_like(x_TD)
    shared = (residual_TD is None and not is_sum) or threshold(probability) == 0
    dresidual_TD = x_TD.new_empty(0) if shared else torch.empty_like(x_TD)
    partial_PSD = x_TD.new_empty((*grid, 1 + has_norm_bias + (bias_D is not None), width), dtype=torch.float32)
    _residual_norm_backward_kernel[grid](
        dy_TD, x_TD, bias_D, residual_TD, weight_D, mean_T, rstd_T, key, dsum_TD, dx_TD,
        None if shared else dresidual_TD, partial_PSD, num_tokens, call_index, has_norm_bias, is_sum,
        **tile, THRESHOLD=threshold(probability), num_warps=num_warps(width),
    )  # fmt: skip
    return dx_TD, dresidual_TD, partial_PSD


@residual_norm.register_fake
def _(x_TD, bias_D, residual_TD, weight_D, norm_bias_D, eps, probability, key, call_index, has_sum=False):
    row = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape), row, torch.empty_like(row), x_TD.new_empty(x_TD.shape if has_sum else 0)


@residual_norm_backward.register_fake
def _(
    dy_TD, x_TD, bias_D, residual_TD, weight_D, mean_T, rstd_T, has_norm_bias, probability, key, call_index,
    is_sum=False, dsum_TD=None,
):  # fmt: skip
    shared = (residual_TD is None and not is_sum) or threshold(probability) == 0
    grid = _grid(x_TD, blocks(x_TD.shape[1]), BACKWARD_PROGRAMS_PER_SM)
    shape = (*grid, 1 + has_norm_bias + (bias_D is not None), x_TD.shape[1])
    partial_PSD = x_TD.new_empty(shape, dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(0 if shared else x_TD.shape), partial_PSD


def _save(ctx, inputs, output):
    x_TD, bias_D, residual_TD, weight_D, norm_bias_D, _, ctx.probability, key, ctx.call_index, has_sum = inputs
    assert not has_sum
    ctx.has_norm_bias = norm_bias_D is not None
    ctx.save_for_backward(x_TD, bias_D, residual_TD, weight_D, *output[1:3], key)
    ctx.set_materialize_grads(False)  # the statistics are not differentiated


def _gradients(ctx, dy_TD, *_):
    x_TD, bias_D, residual_TD, weight_D, mean_T, rstd_T, key = ctx.saved_tensors
    dropout = (ctx.probability, key, ctx.call_index)
    dx_TD, dresidual_TD, partial_PSD = residual_norm_backward(
        dy_TD, x_TD, bias_D, residual_TD, weight_D, mean_T, rstd_T, ctx.has_norm_bias, *dropout
    )
    sums = iter(partial_PSD.sum(0).unbind())
    dweight_D = next(sums)
    dnorm_bias_D = next(sums) if ctx.has_norm_bias else None
    dbias_D = None if bias_D is None else next(sums)
    if residual_TD is None:
        dresidual_TD = None
    elif dresidual_TD.numel() == 0:
        dresidual_TD = dx_TD
    return dx_TD, dbias_D, dresidual_TD, dweight_D, dnorm_bias_D, None, None, None, None, None


residual_norm.register_autograd(_gradients, setup_context=_save)


def layer_norm(x: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """LayerNorm over the last dimension, with fp32 statistics; [..., D] → [..., D]."""
    y_TD: Tensor = residual_norm(x.reshape(-1, x.shape[-1]), None, None, weight_D, bias_D, eps, 0.0, None, 0)[0]
    return y_TD.view(x.shape)
