"""Attention within the segments of short rows: one pass forward, one backward (Triton).

Contract and reference: `self_attention` and `short_attention_reference` in `electra_fast.model.attention`. A row of
at most 128 tokens fits into a program, and there is one program per row and head, without online softmax or atomics.
`blocked_attention` handles longer rows, and GPUs on which a row does not fit.

The kernels read the qkv layer's product in place, add the bias, rotate queries and keys, and write the gradient packed
like the product. They also sum the bias gradient per row, and the caller sums it over the rows. The backward pass
recomputes the weights from the product and one logsumexp per query, and does not read the output.

Queries are processed in parts of 64, so that a part's fp32 weights and their gradients fit into the registers of four
warps, with two programs per multiprocessor. Gradients are computed transposed, [H, L], because Triton 3.6 miscompiles
dots with a transposed accumulator as left operand on Hopper.

Shapes: B rows, L row length, T = B*L tokens, N heads, H head dimension, X = 3*N*H.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels import blocked_attention
from electra_fast.kernels.attention_tiles import kept_sign, load_tile, scores, store_gradient
from electra_fast.kernels.dropout import RESOLUTION, threshold
from electra_fast.kernels.launch import FUSION, card

MAX_LENGTH = 512
MAX_HEAD_DIM = 64
# Architectures on which the kernels for whole rows compile without spilling a large part of their tiles, and the
# largest such row; `blocked_attention` handles other architectures and rows.
_WITH_WHOLE_ROWS = ("Hopper", "Blackwell", "gfx942")
MAX_WHOLE_ROW = 128
NUM_WARPS = 4
# Tiles are at least as high and wide as Hopper's matrix instructions; narrower heads are padded.
PART = 64
BLOCK_H = 64


@triton.jit(do_not_specialize=["call_index"])
def _short_attention_forward_kernel(
    qkv_ptr, bias_ptr, ids_ptr, cos_ptr, sin_ptr, key_ptr, out_ptr, lse_ptr, num_rows, call_index,
    LENGTH: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, PART: tl.constexpr, BLOCK_H: tl.constexpr,
    WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    HIDDEN: tl.constexpr = NUM_HEADS * WIDTH
    STRIDE: tl.constexpr = 3 * HIDDEN
    head = tl.program_id(0) % NUM_HEADS
    first = (tl.program_id(0) // NUM_HEADS).to(tl.int64) * LENGTH
    qkv_ptr += first * STRIDE + head * WIDTH
    out_ptr += first * HIDDEN + head * WIDTH
    lse_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    v_bias_ptr = None if bias_ptr is None else bias_ptr + 2 * HIDDEN + head * WIDTH
    k_bias_ptr = None  # without rotation, it shifts all scores of a query equally, which softmax ignores
    if bias_ptr is not None:
        bias_ptr += head * WIDTH
        if cos_ptr is not None:
            k_bias_ptr = bias_ptr + HIDDEN
    position = tl.arange(0, BLOCK_L)
    column = tl.arange(0, BLOCK_H)
    k = load_tile(qkv_ptr + HIDDEN, k_bias_ptr, cos_ptr, sin_ptr, first, position, LENGTH, STRIDE, WIDTH, BLOCK_H)
    v = load_tile(qkv_ptr + 2 * HIDDEN, v_bias_ptr, None, None, first, position, LENGTH, STRIDE, WIDTH, BLOCK_H)
    for start in tl.static_range(0, BLOCK_L, PART):
        query = start + tl.arange(0, PART)
        q = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, query, LENGTH, STRIDE, WIDTH, BLOCK_H)
        s = scores(q, k, ids_ptr, first, query, tl.arange(0, BLOCK_L), LENGTH, WIDTH, WINDOW)
        row_max = tl.max(s, axis=1)
        p = tl.exp2(s - row_max[:, None])
        row_sum = tl.sum(p, axis=1)
        scale = 1 / row_sum
        if THRESHOLD > 0:
            # Without a barrier, the compiler draws the masks of both parts at once and runs out of registers.
            tl.debug_barrier()
            sign = kept_sign(key_ptr, call_index, first + query, head, 0, LENGTH, BLOCK_L, THRESHOLD, v.dtype)
            p = tl.maximum(p * sign.to(tl.float32), 0.0)
            scale *= RESOLUTION / (RESOLUTION - THRESHOLD)
        out = tl.dot(p.to(v.dtype), v, input_precision="ieee") * scale[:, None]
        mask = (query < LENGTH)[:, None] & (column < WIDTH)[None, :]
        tl.store(out_ptr + query[:, None] * HIDDEN + column[None, :], out.to(v.dtype), mask=mask)
        tl.store(lse_ptr + query, row_max + tl.log2(row_sum), mask=query < LENGTH)


@triton.jit
def _part_gradients(
    q, k, v, dout, ids_ptr, lse_ptr, key_ptr, call_index, first, head, query,
    LENGTH: tl.constexpr, BLOCK_L: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """The weights after dropout and the gradient of the scores, both without their scales; [queries, keys]."""
    if THRESHOLD > 0:
        tl.debug_barrier()
        sign = kept_sign(key_ptr, call_index, first + query, head, 0, LENGTH, BLOCK_L, THRESHOLD, q.dtype)
    # Past the row's end, the weights are 0, so every gradient is 0.
    lse = tl.load(lse_ptr + query, mask=query < LENGTH, other=float("inf"))
    s = scores(q, k, ids_ptr, first, query, tl.arange(0, BLOCK_L), LENGTH, WIDTH, WINDOW)
    p = tl.exp2(s - lse[:, None])
    if THRESHOLD > 0:  # from here on, dropped weights are negative
        p *= sign.to(tl.float32)
        dropped = tl.maximum(p, 0.0).to(q.dtype)
    else:
        dropped = p.to(q.dtype)
    dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
    if THRESHOLD > 0:
        dp = tl.where(p > 0, dp * (RESOLUTION / (RESOLUTION - THRESHOLD)), 0.0)
        p = tl.abs(p)
    delta = tl.sum(p * dp, axis=1)
    return dropped, (p * (dp - delta[:, None])).to(q.dtype)


@triton.jit(do_not_specialize=["call_index"])
def _short_attention_backward_kernel(
    dout_ptr, qkv_ptr, bias_ptr, ids_ptr, cos_ptr, sin_ptr, lse_ptr, key_ptr, dqkv_ptr, partial_ptr,
    num_rows, call_index,
    LENGTH: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, PART: tl.constexpr, BLOCK_H: tl.constexpr,
    WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    HIDDEN: tl.constexpr = NUM_HEADS * WIDTH
    STRIDE: tl.constexpr = 3 * HIDDEN
    SCALE: tl.constexpr = WIDTH**-0.5
    SUM: tl.constexpr = bias_ptr is not None
    TWO: tl.constexpr = PART < BLOCK_L
    head = tl.program_id(0) % NUM_HEADS
    row = tl.program_id(0) // NUM_HEADS
    first = row.to(tl.int64) * LENGTH
    qkv_ptr += first * STRIDE + head * WIDTH
    dqkv_ptr += first * STRIDE + head * WIDTH
    dout_ptr += first * HIDDEN + head * WIDTH
    lse_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    v_bias_ptr = None if bias_ptr is None else bias_ptr + 2 * HIDDEN + head * WIDTH
    k_bias_ptr = None  # without rotation, it shifts all scores of a query equally, which softmax ignores
    if bias_ptr is not None:
        bias_ptr += head * WIDTH
        if cos_ptr is not None:
            k_bias_ptr = bias_ptr + HIDDEN
    position = tl.arange(0, BLOCK_L)
    low = tl.arange(0, PART)
    high = PART + tl.arange(0, PART)
    q = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, low, LENGTH, STRIDE, WIDTH, BLOCK_H)
    k = load_tile(qkv_ptr + HIDDEN, k_bias_ptr, cos_ptr, sin_ptr, first, position, LENGTH, STRIDE, WIDTH, BLOCK_H)
    v = load_tile(qkv_ptr + 2 * HIDDEN, v_bias_ptr, None, None, first, position, LENGTH, STRIDE, WIDTH, BLOCK_H)
    dout = load_tile(dout_ptr, None, None, None, first, low, LENGTH, HIDDEN, WIDTH, BLOCK_H)
    p, ds = _part_gradients(q, k, v, dout, ids_ptr, lse_ptr, key_ptr, call_index, first, head, low,
                            LENGTH, BLOCK_L, WIDTH, WINDOW, THRESHOLD)  # fmt: skip
    if TWO:
        q2 = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, high, LENGTH, STRIDE, WIDTH, BLOCK_H)
        dout2 = load_tile(dout_ptr, None, None, None, first, high, LENGTH, HIDDEN, WIDTH, BLOCK_H)
        p2, ds2 = _part_gradients(q2, k, v, dout2, ids_ptr, lse_ptr, key_ptr, call_index, first, head, high,
                                  LENGTH, BLOCK_L, WIDTH, WINDOW, THRESHOLD)  # fmt: skip
    dv = tl.dot(tl.trans(dout), p, input_precision="ieee")
    if TWO:
        dv = tl.dot(tl.trans(dout2), p2, dv, input_precision="ieee")
    if THRESHOLD > 0:
        dv *= RESOLUTION / (RESOLUTION - THRESHOLD)
    dv_sum = store_gradient(dqkv_ptr + 2 * HIDDEN, dv, None, None, first, position, LENGTH, STRIDE, WIDTH, BLOCK_H, SUM)
    dq = tl.dot(tl.trans(k), tl.trans(ds), input_precision="ieee") * SCALE
    dq_sum = store_gradient(dqkv_ptr, dq, cos_ptr, sin_ptr, first, low, LENGTH, STRIDE, WIDTH, BLOCK_H, SUM)
    if TWO:
        dq = tl.dot(tl.trans(k), tl.trans(ds2), input_precision="ieee") * SCALE
        dq_sum += store_gradient(dqkv_ptr, dq, cos_ptr, sin_ptr, first, high, LENGTH, STRIDE, WIDTH, BLOCK_H, SUM)
    if bias_ptr is not None or cos_ptr is not None:  # a second load needs fewer registers
        q = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, low, LENGTH, STRIDE, WIDTH, BLOCK_H)
        if TWO:
            q2 = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, high, LENGTH, STRIDE, WIDTH, BLOCK_H)
    dk = tl.dot(tl.trans(q), ds, input_precision="ieee")
    if TWO:
        dk = tl.dot(tl.trans(q2), ds2, dk, input_precision="ieee")
    dk_sum = store_gradient(dqkv_ptr + HIDDEN, dk * SCALE, cos_ptr, sin_ptr, first, position,
                    LENGTH, STRIDE, WIDTH, BLOCK_H, k_bias_ptr is not None)  # fmt: skip
    if SUM:
        if k_bias_ptr is None:
            dk_sum = tl.zeros((BLOCK_H,), tl.float32)
        partial_ptr += row.to(tl.int64) * STRIDE + head * WIDTH
        column = tl.arange(0, BLOCK_H)
        qk_column = column if cos_ptr is None else column // 2 + column % 2 * (WIDTH // 2)
        tl.store(partial_ptr + qk_column, dq_sum, mask=column < WIDTH)
        tl.store(partial_ptr + HIDDEN + qk_column, dk_sum, mask=column < WIDTH)
        tl.store(partial_ptr + 2 * HIDDEN + column, dv_sum, mask=column < WIDTH)


def has_whole_rows(device: torch.device, length: int) -> bool:
    """Returns whether a program computes a whole row of this length, not a block of it."""
    return length <= MAX_WHOLE_ROW and card(device).architecture in _WITH_WHOLE_ROWS


def blocks(length: int) -> dict[str, int]:
    """Block sizes of both kernels for whole rows of this length."""
    block_l = max(16, triton.next_power_of_2(length))
    return {"BLOCK_L": block_l, "PART": min(block_l, PART), "BLOCK_H": BLOCK_H, "num_warps": NUM_WARPS, **FUSION}


def _constants(
    qkv_TX: Tensor, segment_ids_BL: Tensor, num_heads: int, window: int | None, probability: float
) -> dict[str, Any]:
    length = segment_ids_BL.shape[1]
    width = qkv_TX.shape[1] // (3 * num_heads)
    if length > MAX_LENGTH or width > MAX_HEAD_DIM:
        raise ValueError(
            f"row length = {length}, head dimension = {width}: must be at most {MAX_LENGTH} and {MAX_HEAD_DIM}"
        )
    sizes = {"LENGTH": length, "NUM_HEADS": num_heads, "WIDTH": width}
    return sizes | {"WINDOW": window, "THRESHOLD": threshold(probability)}


def _contiguous(*tensors: Tensor | None) -> list[Any]:
    return [None if x is None else x.contiguous() for x in tensors]


@torch.library.custom_op("electra_fast::short_attention", mutates_args=())
def short_attention(
    qkv_TX: Tensor, bias_X: Tensor | None, segment_ids_BL: Tensor, cos_TH: Tensor | None, sin_TH: Tensor | None,
    num_heads: int, window: int | None, probability: float, key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention within the segments of rows of at most 512 tokens; [T, N*H] in qkv's dtype.

    Also returns the base-2 logsumexp of each query's scores, fp32 [N, T], without terms that softmax ignores.

    Args:
        qkv_TX: The qkv layer's product without its bias, [T, 3, N, H] flattened; H is even and at most 64.
        bias_X: The layer's bias, fp32.
        segment_ids_BL: Tokens of a row with equal ids attend to each other; int, not negative.
        cos_TH: Cosine of the rotary angles of queries and keys, fp32 [T, H/2]; None for no rotation.
        sin_TH: Their sine.
        num_heads: N.
        window: The number of tokens to each side to which a token attends; None for no limit.
        probability: The dropout probability of the attention weights, which are elements [T, N*L].
        key: int64 [3], `ops.Dropout.key`.
        call_index: `ops.Dropout.call_index`.
    """
    num_rows = segment_ids_BL.shape[0]
    num_tokens = qkv_TX.shape[0]
    constants = _constants(qkv_TX, segment_ids_BL, num_heads, window, probability)
    qkv_TX, bias_X, ids_BL, cos_TH, sin_TH = _contiguous(qkv_TX, bias_X, segment_ids_BL, cos_TH, sin_TH)
    out_TD = qkv_TX.new_empty((num_tokens, qkv_TX.shape[1] // 3))
    lse_NT = qkv_TX.new_empty((num_heads, num_tokens), dtype=torch.float32)
    arguments = (qkv_TX, bias_X, ids_BL, cos_TH, sin_TH, key, out_TD, lse_NT, num_rows, call_index)
    if has_whole_rows(qkv_TX.device, length := constants["LENGTH"]):
        _short_attention_forward_kernel[(num_rows * num_heads,)](*arguments, **constants, **blocks(length))
    else:
        blocked_attention.forward(arguments, constants)
    return out_TD, lse_NT


@torch.library.custom_op("electra_fast::short_attention_backward", mutates_args=())
def short_attention_backward(
    dout_TD: Tensor, qkv_TX: Tensor, bias_X: Tensor | None, segment_ids_BL: Tensor, cos_TH: Tensor | None,
    sin_TH: Tensor | None, out_TD: Tensor, lse_NT: Tensor, num_heads: int, window: int | None, probability: float,
    key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of qkv [T, X] and, per row or block of a row, of the bias, fp32 [B*P, X], or [0] without a bias."""
    num_rows = segment_ids_BL.shape[0]
    device = qkv_TX.device
    constants = _constants(qkv_TX, segment_ids_BL, num_heads, window, probability)
    dout_TD, qkv_TX, bias_X, ids_BL, cos_TH, sin_TH, out_TD = _contiguous(
        dout_TD, qkv_TX, bias_X, segment_ids_BL, cos_TH, sin_TH, out_TD
    )
    dqkv_TX = torch.empty_like(qkv_TX)
    length = constants["LENGTH"]
    partial_PX = lse_NT.new_empty(0 if bias_X is None else (num_rows * _num_blocks(device, constants), *bias_X.shape))
    inputs = (qkv_TX, bias_X, ids_BL, cos_TH, sin_TH, lse_NT, key)
    outputs = (dqkv_TX, None if bias_X is None else partial_PX, num_rows, call_index)
    if has_whole_rows(device, length):
        grid = (num_rows * num_heads,)
        _short_attention_backward_kernel[grid](dout_TD, *inputs, *outputs, **constants, **blocks(length))
    else:
        blocked_attention.backward(dout_TD, out_TD, inputs, outputs, constants)
    return dqkv_TX, partial_PX


def _num_blocks(device: torch.device, constants: dict[str, Any]) -> int:
    """Number of programs that compute the gradients of a row and head."""
    return 1 if has_whole_rows(device, constants["LENGTH"]) else blocked_attention.num_blocks(constants)


@short_attention.register_fake
def _(qkv_TX, bias_X, segment_ids_BL, cos_TH, sin_TH, num_heads, window, probability, key, call_index):
    num_tokens, width = qkv_TX.shape
    return qkv_TX.new_empty((num_tokens, width // 3)), qkv_TX.new_empty((num_heads, num_tokens), dtype=torch.float32)


@short_attention_backward.register_fake
def _(
    dout_TD, qkv_TX, bias_X, segment_ids_BL, cos_TH, sin_TH, out_TD, lse_NT, num_heads, window, probability, key,
    call_index,
):  # fmt: skip
    constants = _constants(qkv_TX, segment_ids_BL, num_heads, window, probability)
    num_partials = segment_ids_BL.shape[0] * _num_blocks(qkv_TX.device, constants)
    return qkv_TX.new_empty(qkv_TX.shape), lse_NT.new_empty(0 if bias_X is None else (num_partials, *bias_X.shape))


def _save(ctx, inputs, output):
    *tensors, ctx.num_heads, ctx.window, ctx.probability, key, ctx.call_index = inputs
    ctx.save_for_backward(*tensors, *output, key)
    ctx.set_materialize_grads(False)  # the logsumexp is not differentiated


def _gradients(ctx, dout_TD, dlse_NT):
    *tensors, key = ctx.saved_tensors
    dqkv_TX, partial_PX = short_attention_backward(
        dout_TD, *tensors, ctx.num_heads, ctx.window, ctx.probability, key, ctx.call_index
    )
    return dqkv_TX, partial_PX.sum(0) if partial_PX.numel() else None, *(None,) * 8


short_attention.register_autograd(_gradients, setup_context=_save)
