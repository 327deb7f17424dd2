"""Dropout whose mask is a pure function of seed, step, call index, token and column (Triton).

Contract and reference: `Dropout` and `dropout` in `electra_fast.ops.operations`. No mask is stored: the backward
pass draws it again. Other kernels fuse dropout through `keep_scale`.

Shapes: T tokens, D columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Offset of the call index in the counter's last word, since samplers use 0, 1 and 2 there.
FIRST_CALL = tl.constexpr(1 << 16)
# Probabilities are multiples of 2^-24, so that the upper 24 bits of a word compare as signed integers.
RESOLUTION = tl.constexpr(1 << 24)
TILE = 2048


def threshold(probability: float) -> int:
    """The number of 24-bit values that drop an element."""
    return round(probability * (1 << 24))


@triton.jit
def philox_words(key_ptr, call_index, token, quad):
    """Four uint32 [tokens, quads]: the words of columns 4 * quad … 4 * quad + 3.

    `token` is the int64 index within the micro-batch, `quad` int32.
    """
    seed = tl.load(key_ptr)
    step = tl.load(key_ptr + 1)
    token += tl.load(key_ptr + 2)
    quad = quad[None, :] + tl.zeros((token.shape[0], 1), tl.int32)
    row = token[:, None] + tl.zeros((1, quad.shape[1]), tl.int64)
    return tl.philox(seed, quad.to(tl.uint32), row.to(tl.uint32), (row * 0 + step).to(tl.uint32),
                     (quad * 0 + FIRST_CALL + call_index).to(tl.uint32))  # fmt: skip


@triton.jit
def keep_scale(key_ptr, call_index, token, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr):
    """fp32 factors [BLOCK_T, BLOCK_D]: 0 for dropped elements, 1 / (1 - p) for the others.

    `token` is the int64 [BLOCK_T] index within the micro-batch. One Philox call serves four adjacent columns.
    """
    w0, w1, w2, w3 = philox_words(key_ptr, call_index, token, tl.arange(0, BLOCK_D // 4))
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return tl.where((word >> 8).to(tl.int32) >= THRESHOLD, RESOLUTION / (RESOLUTION - THRESHOLD), 0.0)


@triton.jit(do_not_specialize=["call_index"])
def _dropout_kernel(
    x_ptr, y_ptr, key_ptr, call_index, num_tokens,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    offset = token[:, None] * WIDTH + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + offset, x * keep_scale(key_ptr, call_index, token, BLOCK_T, BLOCK_D, THRESHOLD), mask=mask)


def blocks(width: int) -> dict[str, int]:
    """Block sizes of the kernel at this width."""
    columns = max(4, triton.next_power_of_2(width))
    return {"WIDTH": width, "BLOCK_T": max(1, TILE // columns), "BLOCK_D": columns}


@torch.library.custom_op("electra_fast::dropout", mutates_args=())
def dropout(x_TD: Tensor, probability: float, key: Tensor, call_index: int) -> Tensor:
    """Zeroes each element with this probability and divides the others by 1 - probability; [T, D] → [T, D].

    `key` is int64 [3], `ops.Dropout.key`.
    """
    num_tokens, width = x_TD.shape
    x_TD = x_TD.contiguous()
    tile = blocks(width)
    y_TD = torch.empty_like(x_TD)
    _dropout_kernel[(triton.cdiv(num_tokens, tile["BLOCK_T"]),)](
        x_TD, y_TD, key, call_index, num_tokens, **tile, THRESHOLD=threshold(probability), num_warps=4
    )
    return y_TD


@dropout.register_fake
def _(x_TD, probability, key, call_index):
    return x_TD.new_empty(x_TD.shape)


def _save(ctx, inputs, output):
    _, ctx.probability, key, ctx.call_index = inputs
    ctx.save_for_backward(key)


dropout.register_autograd(
    lambda ctx, dy_TD: (dropout(dy_TD, ctx.probability, *ctx.saved_tensors, ctx.call_index), None, None, None),
    setup_context=_save,
)
