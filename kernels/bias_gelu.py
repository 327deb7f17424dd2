"""gelu(h + bias), and GeGLU's gelu(a) * b, applied to a linear layer's product without its bias (Triton).

Contracts and references: `bias_gelu` and `geglu` in `electra_fast.ops.operations`. One pass forward and one
backward. The backward pass also sums the bias gradient: each program over its rows, then over the
programs in a fixed order, so that results are bitwise reproducible.

Shapes: T tokens, F feed-forward, P programs along the tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.gelu import gelu, gelu_and_derivative
from electra_fast.kernels.launch import resident_programs

TILE = 2048  # elements per program and iteration: two 16-byte loads per thread
MAX_COLUMNS = 256
# Resident programs of four warps: the backward kernel needs 80 registers per thread, the forward kernel fewer.
PROGRAMS_PER_SM = 6


@triton.jit
def _bias_gelu_forward_kernel(
    h_ptr, bias_ptr, y_ptr, num_tokens,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    column_mask = column < WIDTH
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(1)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None] & column_mask[None, :]
        h = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            h += bias[None, :]
        tl.store(y_ptr + offset, gelu(h), mask=mask)


@triton.jit
def _bias_gelu_backward_kernel(
    dy_ptr, h_ptr, bias_ptr, dh_ptr, partial_ptr, num_tokens,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    column_mask = column < WIDTH
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for tile in range(tl.program_id(1), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(1)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None] & column_mask[None, :]
        h = tl.load(h_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            h += bias[None, :]
        _, derivative = gelu_and_derivative(h)
        dh = dy * derivative
        tl.store(dh_ptr + offset, dh, mask=mask)
        if bias_ptr is not None:
            total += dh
    if bias_ptr is not None:
        row = tl.program_id(1).to(tl.int64) * WIDTH
        tl.store(partial_ptr + row + column, tl.sum(total, axis=0), mask=column_mask)


@triton.jit
def _geglu_forward_kernel(
    h_ptr, y_ptr, num_tokens, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    for tile in range(tl.program_id(1), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(1)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        row = token.to(tl.int64)[:, None] * WIDTH
        mask = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
        a = tl.load(h_ptr + 2 * row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        b = tl.load(h_ptr + 2 * row + WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row + column[None, :], gelu(a) * b, mask=mask)


@triton.jit
def _geglu_backward_kernel(
    dy_ptr, h_ptr, dh_ptr, num_tokens, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    for tile in range(tl.program_id(1), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(1)):
        token = tile * BLOCK_T + tl.arange(0, BLOCK_T)
        row = token.to(tl.int64)[:, None] * WIDTH
        mask = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
        a_offset = 2 * row + column[None, :]
        b_offset = 2 * row + WIDTH + column[None, :]
        a = tl.load(h_ptr + a_offset, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(h_ptr + b_offset, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row + column[None, :], mask=mask, other=0.0).to(tl.float32)
        activated, derivative = gelu_and_derivative(a)
        tl.store(dh_ptr + a_offset, dy * b * derivative, mask=mask)
        tl.store(dh_ptr + b_offset, dy * activated, mask=mask)


def blocks(width: int) -> dict[str, int]:
    """Block sizes of the kernels in this file at this width."""
    columns = min(triton.next_power_of_2(width), MAX_COLUMNS)
    return {"WIDTH": width, "BLOCK_T": TILE // columns, "BLOCK_F": columns}


def _grid(x_TF: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    column_blocks = triton.cdiv(tile["WIDTH"], tile["BLOCK_F"])
    along_tokens = max(1, resident_programs(x_TF.device, PROGRAMS_PER_SM) // column_blocks)
    return column_blocks, min(triton.cdiv(x_TF.shape[0], tile["BLOCK_T"]), along_tokens)


@torch.library.custom_op("electra_fast::bias_gelu", mutates_args=())
def bias_gelu(h_TF: Tensor, bias_F: Tensor | None) -> Tensor:
    """gelu(h + bias), the exact (erf) GELU; [T, F], fp32 [F] → [T, F] in h's dtype."""
    num_tokens, width = h_TF.shape
    h_TF, y_TF = h_TF.contiguous(), torch.empty_like(h_TF, memory_format=torch.contiguous_format)
    tile = blocks(width)
    _bias_gelu_forward_kernel[_grid(h_TF, tile)](h_TF, bias_F, y_TF, num_tokens, **tile, num_warps=4)
    return y_TF


@torch.library.custom_op("electra_fast::bias_gelu_backward", mutates_args=())
def bias_gelu_backward(dy_TF: Tensor, h_TF: Tensor, bias_F: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradient of h ([T, F], h's dtype) and partial sums of the bias gradient (fp32 [P, F]; [P, 0] without a bias)."""
    num_tokens, width = h_TF.shape
    dy_TF = dy_TF.contiguous()
    h_TF = h_TF.contiguous()
    dh_TF = torch.empty_like(h_TF)
    tile = blocks(width)
    grid = _grid(h_TF, tile)
    partial_PF = h_TF.new_empty((grid[1], 0 if bias_F is None else width), dtype=torch.float32)
    _bias_gelu_backward_kernel[grid](dy_TF, h_TF, bias_F, dh_TF, partial_PF, num_tokens, **tile, num_warps=4)
    return dh_TF, partial_PF


@torch.library.custom_op("electra_fast::geglu", mutates_args=())
def geglu(h_TF: Tensor) -> Tensor:
    """gelu(a) * b, where h = [a, b]; [T, 2F] → [T, F] in h's dtype."""
    num_tokens = h_TF.shape[0]
    width = h_TF.shape[1] // 2
    h_TF, y_TF, tile = h_TF.contiguous(), h_TF.new_empty((num_tokens, width)), blocks(width)
    _geglu_forward_kernel[_grid(h_TF, tile)](h_TF, y_TF, num_tokens, **tile, num_warps=4)
    return y_TF


@torch.library.custom_op("electra_fast::geglu_backward", mutates_args=())
def geglu_backward(dy_TF: Tensor, h_TF: Tensor) -> Tensor:
    """Gradient of h; [T, F], [T, 2F] → [T, 2F]."""
    num_tokens, width = dy_TF.shape
    dy_TF = dy_TF.contiguous()
    h_TF = h_TF.contiguous()
    dh_TF = torch.empty_like(h_TF)
    tile = blocks(width)
    _geglu_backward_kernel[_grid(h_TF, tile)](dy_TF, h_TF, dh_TF, num_tokens, **tile, num_warps=4)
    return dh_TF


@bias_gelu.register_fake
def _(h_TF, bias_F):
    return h_TF.new_empty(h_TF.shape)


@bias_gelu_backward.register_fake
def _(dy_TF, h_TF, bias_F):
    shape = (_grid(h_TF, blocks(h_TF.shape[1]))[1], 0 if bias_F is None else h_TF.shape[1])
    return h_TF.new_empty(h_TF.shape), h_TF.new_empty(shape, dtype=torch.float32)


@geglu.register_fake
def _(h_TF):
    return h_TF.new_empty((h_TF.shape[0], h_TF.shape[1] // 2))


@geglu_backward.register_fake
def _(dy_TF, h_TF):
    return h_TF.new_empty(h_TF.shape)


def _bias_gelu_gradients(ctx, dy_TF):
    h_TF, bias_F = ctx.saved_tensors
    dh_TF, partial_PF = bias_gelu_backward(dy_TF, h_TF, bias_F)
    return dh_TF, None if bias_F is None else partial_PF.sum(0)


bias_gelu.register_autograd(
    _bias_gelu_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)
geglu.register_autograd(
    lambda ctx, dy_TF: geglu_backward(dy_TF, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
