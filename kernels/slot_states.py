"""Hidden states at the masked slots, whose gradient needs no sort (Triton).

Contract and reference: `slot_states` in `electra_fast.ops.operations`. A tile of tokens compares its positions with all
slots of its row, as in `corrupt`, and sums the gradients of equal positions: a product with ones and zeros, in a fixed
order. The gradient of a general gather (`gather_rows`) has to sort its indices first, in about 16 launches.

Shapes: B rows, L row length, T = B*L tokens, S slots per row, M = B*S slots, D hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
SLOTS = 16  # compared per iteration
MAX_COLUMNS = 128
NUM_WARPS = 4


@triton.jit
def _slot_gradient_kernel(
    dy_ptr, position_ptr, dx_ptr, length, num_slots, width,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for first in range(0, num_slots, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        exists = slot < num_slots
        index = row * num_slots + slot
        position = tl.load(position_ptr + index, mask=exists, other=-1) - row * length
        # The position of an unused slot is past the end of the buffer, so also past the row's end.
        position = tl.where(exists & (position < length), position, -1).to(tl.int32)
        mask = exists[:, None] & (column < width)[None, :]
        dy = tl.load(dy_ptr + index[:, None] * width + column[None, :], mask=mask, other=0.0)
        hit = token[:, None] == position[None, :]
        total = tl.dot(hit.to(dy.dtype), dy, total, input_precision="ieee")
    offset = (row * length + token)[:, None] * width + column[None, :]
    mask = (token < length)[:, None] & (column < width)[None, :]
    tl.store(dx_ptr + offset, total.to(dx_ptr.dtype.element_ty), mask=mask)


@torch.library.custom_op("electra_fast::slot_states", mutates_args=())
def slot_states(x_TD: Tensor, position_M: Tensor, num_rows: int) -> Tensor:
    """Rows of x at the slots; float [T, D], int64 [M] (T for unused slots) → [M, D]."""
    return x_TD.index_select(0, position_M.clamp(max=x_TD.shape[0] - 1))


@torch.library.custom_op("electra_fast::slot_states_backward", mutates_args=())
def _slot_states_backward(dy_MD: Tensor, position_M: Tensor, num_tokens: int, num_rows: int) -> Tensor:
    dx_TD = dy_MD.new_empty((num_tokens, dy_MD.shape[1]))
    if dx_TD.numel() == 0:
        return dx_TD
    length = num_tokens // num_rows
    num_slots = dy_MD.shape[0] // num_rows
    width = dy_MD.shape[1]
    columns = max(16, min(MAX_COLUMNS, triton.next_power_of_2(width)))
    _slot_gradient_kernel[(num_rows, triton.cdiv(length, TOKENS), triton.cdiv(width, columns))](
        dy_MD.contiguous(), position_M.contiguous(), dx_TD, length, num_slots, width,
        TOKENS=TOKENS, SLOTS=SLOTS, COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return dx_TD


@slot_states.register_fake
def _(x_TD, position_M, num_rows):
    return x_TD.new_empty((position_M.shape[0], x_TD.shape[1]))


@_slot_states_backward.register_fake
def _(dy_MD, position_M, num_tokens, num_rows):
    return dy_MD.new_empty((num_tokens, dy_MD.shape[1]))


def _save(ctx, inputs, output):
    x_TD, position_M, ctx.num_rows = inputs
    ctx.num_tokens = x_TD.shape[0]
    ctx.save_for_backward(position_M)


def _gradient(ctx, dy_MD):
    return _slot_states_backward(dy_MD, *ctx.saved_tensors, ctx.num_tokens, ctx.num_rows), None, None


slot_states.register_autograd(_gradient, setup_context=_save)
