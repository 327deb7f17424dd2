"""Rotary position embeddings of queries and keys, in the qkv layer's product and in its gradient (Triton).

Contract and reference: `rotary_qkv` in `electra_fast.ops.operations`. The forward kernel rotates the product in place.
The backward kernel reads the three gradients that attention returns and writes the product's gradient, so that no
separate pass stacks them.

Shapes: T tokens, N heads, H head dimension, X = 3*N*H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Pairs per program: each thread of four warps loads 8 elements of 16 bits from each half of a tile.
TILE = 1024


@triton.jit
def _rotate(x_ptr, y_ptr, cos, sin, mask, HALF: tl.constexpr):
    x1 = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr, x1 * cos - x2 * sin, mask=mask)
    tl.store(y_ptr + HALF, x2 * cos + x1 * sin, mask=mask)


@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, qkv_ptr, num_vectors,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Writes rotated q and k to qkv [T, 3, N, H], possibly in place; backward, writes q and k rotated back, and v."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token = (vector // NUM_HEADS)[:, None]
    head = (vector % NUM_HEADS)[:, None]
    pair = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (vector < num_vectors)[:, None] & (pair < HALF)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=mask, other=0.0)
    if BACKWARD:
        sin = -sin
    HIDDEN: tl.constexpr = NUM_HEADS * HALF * 2
    qkv_ptr += token * (3 * HIDDEN) + head * (HALF * 2) + pair
    _rotate(q_ptr + token * q_token_stride + head * q_head_stride + pair, qkv_ptr, cos, sin, mask, HALF)
    _rotate(k_ptr + token * k_token_stride + head * k_head_stride + pair, qkv_ptr + HIDDEN, cos, sin, mask, HALF)
    if BACKWARD:
        v_ptr += token * v_token_stride + head * v_head_stride + pair
        tl.store(qkv_ptr + 2 * HIDDEN, tl.load(v_ptr, mask=mask, other=0.0), mask=mask)
        tl.store(qkv_ptr + 2 * HIDDEN + HALF, tl.load(v_ptr + HALF, mask=mask, other=0.0), mask=mask)


def _launch(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cos: Tensor, sin: Tensor, qkv_TX: Tensor, backward: bool
) -> None:
    num_tokens, num_heads, width = q_TNH.shape
    block_half = triton.next_power_of_2(width // 2)
    block = max(1, TILE // block_half)
    num_vectors = num_tokens * num_heads
    strides = (stride for x in (q_TNH, k_TNH, v_TNH) for stride in x.stride()[:2])
    _rotary_kernel[(triton.cdiv(num_vectors, block),)](
        q_TNH, k_TNH, v_TNH, cos.contiguous(), sin.contiguous(), qkv_TX, num_vectors, *strides,
        NUM_HEADS=num_heads, HALF=width // 2, BACKWARD=backward, BLOCK=block, BLOCK_HALF=block_half, num_warps=4,
    )  # fmt: skip


@torch.library.custom_op("electra_fast::rotate_qkv_", mutates_args=("qkv_TX",))
def rotate_qkv_(qkv_TX: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, num_heads: int) -> None:
    """Rotates queries and keys in a contiguous qkv product [T, 3, N, H] by fp32 angles [T, 1, H/2], as `ops.rotate`."""
    q, k, v = qkv_TX.view(qkv_TX.shape[0], 3, num_heads, -1).unbind(1)
    _launch(q, k, v, cos_T1H, sin_T1H, qkv_TX, backward=False)


@torch.library.custom_op("electra_fast::rotary_backward", mutates_args=())
def rotary_backward(dq_TNH: Tensor, dk_TNH: Tensor, dv_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """The gradient of the product [T, X] from the gradients of rotated queries, rotated keys and values."""
    dq, dk, dv = (x if x.stride(2) == 1 else x.contiguous() for x in (dq_TNH, dk_TNH, dv_TNH))
    dqkv_TX = dq_TNH.new_empty((dq_TNH.shape[0], 3 * dq_TNH.shape[1] * dq_TNH.shape[2]))
    _launch(dq, dk, dv, cos_T1H, sin_T1H, dqkv_TX, backward=True)
    return dqkv_TX


@rotary_backward.register_fake
def _(dq_TNH, dk_TNH, dv_TNH, cos_T1H, sin_T1H):
    return dq_TNH.new_empty((dq_TNH.shape[0], 3 * dq_TNH.shape[1] * dq_TNH.shape[2]))
