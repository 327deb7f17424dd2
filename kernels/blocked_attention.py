"""Attention within the segments of rows of up to 512 tokens, block by block: one pass forward, two backward (Triton).

Contract and reference are in `short_attention`, which calls this module if a row does not fit into a program. A program
has a block of queries (in the pass for dk and dv, of keys) of one row and head. It visits only blocks that share a
segment with its block, according to the row's ids. There are no atomic additions, so gradients are reproducible. Each
backward pass writes its part of the packed gradient, and its bias gradient summed per block.

Shapes: B rows, L row length, P blocks per row, T = B*L tokens, N heads, H head dimension, X = 3*N*H.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.attention_tiles import kept_sign, load_tile, scores, store_gradient
from electra_fast.kernels.dropout import RESOLUTION
from electra_fast.kernels.launch import FUSION

# Tokens per block of a program, and per block that it visits. With two programs or more per multiprocessor, no
# architecture from Ampere on spills more than 16 bytes; with Triton 3.9, only 120 with dropout spills (8 bytes).
FORWARD = {"OWN": 64, "OTHER": 64, "num_warps": 4, "num_stages": 2}
BACKWARD = {"OWN": 64, "OTHER": 32, "num_warps": 4, "num_stages": 2}
# Above all ids, and below all scores.
LAST_ID = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _place(NUM_HEADS: tl.constexpr, LENGTH: tl.constexpr, OWN: tl.constexpr):
    """Row, head and first position of a program; programs of one row and head read the same data and are adjacent."""
    NUM_BLOCKS: tl.constexpr = (LENGTH + OWN - 1) // OWN
    unit = tl.program_id(0) // NUM_BLOCKS
    return unit // NUM_HEADS, unit % NUM_HEADS, tl.program_id(0) % NUM_BLOCKS * OWN


@triton.jit
def _range(ids_ptr, start, LENGTH: tl.constexpr, BLOCK_L: tl.constexpr, OWN: tl.constexpr, WINDOW: tl.constexpr):
    """The range of positions to visit for a block of a row: begin, a multiple of 4, and end."""
    position = tl.arange(0, BLOCK_L)
    is_inside = position < LENGTH
    id = tl.load(ids_ptr + position, mask=is_inside, other=0)
    id = tl.where(id == 0, LAST_ID, id)  # padding comes last, so a block with padding need not begin at 0
    is_own = is_inside & (position >= start) & (position < start + OWN)
    low = tl.min(tl.where(is_own, id, LAST_ID), axis=0)
    high = tl.max(tl.where(is_own, id, 0), axis=0)
    visits = is_inside & (id >= low) & (id <= high)
    if WINDOW is not None:
        visits &= (position >= start - WINDOW) & (position < start + OWN + WINDOW)
    begin = tl.min(tl.where(visits, position, BLOCK_L), axis=0)
    return begin // 4 * 4, tl.max(tl.where(visits, position + 1, 0), axis=0)


@triton.jit(do_not_specialize=["call_index"])
def _blocked_attention_forward_kernel(
    qkv_ptr, bias_ptr, ids_ptr, cos_ptr, sin_ptr, key_ptr, out_ptr, lse_ptr, num_rows, call_index,
    LENGTH: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, BLOCK_H: tl.constexpr,
    WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    HIDDEN: tl.constexpr = NUM_HEADS * WIDTH
    STRIDE: tl.constexpr = 3 * HIDDEN
    row, head, start = _place(NUM_HEADS, LENGTH, OWN)
    first = row.to(tl.int64) * LENGTH
    qkv_ptr += first * STRIDE + head * WIDTH
    out_ptr += first * HIDDEN + head * WIDTH
    lse_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    v_bias_ptr = None if bias_ptr is None else bias_ptr + 2 * HIDDEN + head * WIDTH
    k_bias_ptr = None  # without rotation, it shifts all scores of a query equally, which softmax ignores
    if bias_ptr is not None:
        bias_ptr += head * WIDTH
        if cos_ptr is not None:
            k_bias_ptr = bias_ptr + HIDDEN
    query = start + tl.arange(0, OWN)
    column = tl.arange(0, BLOCK_H)
    q = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, query, LENGTH, STRIDE, WIDTH, BLOCK_H)
    row_max = tl.full((OWN,), LOWEST, tl.float32)
    row_sum = tl.zeros((OWN,), tl.float32)
    out = tl.zeros((OWN, BLOCK_H), tl.float32)
    begin, end = _range(ids_ptr + first, start, LENGTH, BLOCK_L, OWN, WINDOW)
    for first_key in range(begin, end, OTHER):
        key = first_key + tl.arange(0, OTHER)
        k = load_tile(qkv_ptr + HIDDEN, k_bias_ptr, cos_ptr, sin_ptr, first, key, LENGTH, STRIDE, WIDTH, BLOCK_H)
        v = load_tile(qkv_ptr + 2 * HIDDEN, v_bias_ptr, None, None, first, key, LENGTH, STRIDE, WIDTH, BLOCK_H)
        s = scores(q, k, ids_ptr, first, query, key, LENGTH, WIDTH, WINDOW)
        # Finite even if a query attends to no key in these blocks.
        new_max = tl.maximum(row_max, tl.max(s, axis=1))
        p = tl.exp2(s - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * shrink + tl.sum(p, axis=1)
        if THRESHOLD > 0:
            sign = kept_sign(key_ptr, call_index, first + query, head, first_key, LENGTH, OTHER, THRESHOLD, v.dtype)
            p = tl.maximum(p * sign.to(tl.float32), 0.0)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None], input_precision="ieee")
    row_sum = tl.where(query < LENGTH, row_sum, 1.0)
    scale = RESOLUTION / (RESOLUTION - THRESHOLD) / row_sum
    mask = (query < LENGTH)[:, None] & (column < WIDTH)[None, :]
    tl.store(out_ptr + query[:, None] * HIDDEN + column[None, :], (out * scale[:, None]).to(q.dtype), mask=mask)
    tl.store(lse_ptr + query, row_max + tl.log2(row_sum), mask=query < LENGTH)


@triton.jit(do_not_specialize=["call_index"])
def _blocked_attention_query_gradient_kernel(
    dout_ptr, out_ptr, qkv_ptr, bias_ptr, ids_ptr, cos_ptr, sin_ptr, lse_ptr, key_ptr, delta_ptr, dqkv_ptr,
    partial_ptr, num_rows, call_index,
    LENGTH: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, BLOCK_H: tl.constexpr,
    WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """dq, and delta [N, T]: the sum of a query's output times its gradient."""
    HIDDEN: tl.constexpr = NUM_HEADS * WIDTH
    STRIDE: tl.constexpr = 3 * HIDDEN
    row, head, start = _place(NUM_HEADS, LENGTH, OWN)
    first = row.to(tl.int64) * LENGTH
    qkv_ptr += first * STRIDE + head * WIDTH
    dqkv_ptr += first * STRIDE + head * WIDTH
    out_ptr += first * HIDDEN + head * WIDTH
    dout_ptr += first * HIDDEN + head * WIDTH
    lse_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    delta_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    v_bias_ptr = None if bias_ptr is None else bias_ptr + 2 * HIDDEN + head * WIDTH
    k_bias_ptr = None
    if bias_ptr is not None:
        bias_ptr += head * WIDTH
        if cos_ptr is not None:
            k_bias_ptr = bias_ptr + HIDDEN
    query = start + tl.arange(0, OWN)
    dout = load_tile(dout_ptr, None, None, None, first, query, LENGTH, HIDDEN, WIDTH, BLOCK_H)
    out = load_tile(out_ptr, None, None, None, first, query, LENGTH, HIDDEN, WIDTH, BLOCK_H)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
    tl.store(delta_ptr + query, delta, mask=query < LENGTH)
    q = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, query, LENGTH, STRIDE, WIDTH, BLOCK_H)
    # Past the row's end, the weights are 0, so every gradient is 0.
    lse = tl.load(lse_ptr + query, mask=query < LENGTH, other=float("inf"))
    dq = tl.zeros((OWN, BLOCK_H), tl.float32)
    begin, end = _range(ids_ptr + first, start, LENGTH, BLOCK_L, OWN, WINDOW)
    for first_key in range(begin, end, OTHER):
        key = first_key + tl.arange(0, OTHER)
        k = load_tile(qkv_ptr + HIDDEN, k_bias_ptr, cos_ptr, sin_ptr, first, key, LENGTH, STRIDE, WIDTH, BLOCK_H)
        v = load_tile(qkv_ptr + 2 * HIDDEN, v_bias_ptr, None, None, first, key, LENGTH, STRIDE, WIDTH, BLOCK_H)
        p = tl.exp2(scores(q, k, ids_ptr, first, query, key, LENGTH, WIDTH, WINDOW) - lse[:, None])
        dp = tl.dot(dout, tl.trans(v), input_precision="ieee")
        if THRESHOLD > 0:
            sign = kept_sign(key_ptr, call_index, first + query, head, first_key, LENGTH, OTHER, THRESHOLD, q.dtype)
            dp = tl.where(sign > 0, dp * (RESOLUTION / (RESOLUTION - THRESHOLD)), 0.0)
        dq = tl.dot((p * (dp - delta[:, None])).to(q.dtype), k, dq, input_precision="ieee")
    total = store_gradient(dqkv_ptr, tl.trans(dq * WIDTH**-0.5), cos_ptr, sin_ptr, first, query,
                           LENGTH, STRIDE, WIDTH, BLOCK_H, bias_ptr is not None)  # fmt: skip
    if bias_ptr is not None:
        column = tl.arange(0, BLOCK_H)
        q_column = column if cos_ptr is None else column // 2 + column % 2 * (WIDTH // 2)
        partial_ptr += (row * tl.cdiv(LENGTH, OWN) + start // OWN).to(tl.int64) * STRIDE + head * WIDTH
        tl.store(partial_ptr + q_column, total, mask=column < WIDTH)


@triton.jit(do_not_specialize=["call_index"])
def _blocked_attention_key_gradient_kernel(
    dout_ptr, qkv_ptr, bias_ptr, ids_ptr, cos_ptr, sin_ptr, lse_ptr, key_ptr, delta_ptr, dqkv_ptr, partial_ptr,
    num_rows, call_index,
    LENGTH: tl.constexpr, NUM_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_L: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, BLOCK_H: tl.constexpr,
    WINDOW: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    """dk and dv, with scores as [keys, queries], so that no left factor is a transposed accumulator."""
    HIDDEN: tl.constexpr = NUM_HEADS * WIDTH
    STRIDE: tl.constexpr = 3 * HIDDEN
    row, head, start = _place(NUM_HEADS, LENGTH, OWN)
    first = row.to(tl.int64) * LENGTH
    qkv_ptr += first * STRIDE + head * WIDTH
    dqkv_ptr += first * STRIDE + head * WIDTH
    dout_ptr += first * HIDDEN + head * WIDTH
    lse_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    delta_ptr += head.to(tl.int64) * num_rows * LENGTH + first
    v_bias_ptr = None if bias_ptr is None else bias_ptr + 2 * HIDDEN + head * WIDTH
    k_bias_ptr = None
    if bias_ptr is not None:
        bias_ptr += head * WIDTH
        if cos_ptr is not None:
            k_bias_ptr = bias_ptr + HIDDEN
    key = start + tl.arange(0, OWN)
    k = load_tile(qkv_ptr + HIDDEN, k_bias_ptr, cos_ptr, sin_ptr, first, key, LENGTH, STRIDE, WIDTH, BLOCK_H)
    v = load_tile(qkv_ptr + 2 * HIDDEN, v_bias_ptr, None, None, first, key, LENGTH, STRIDE, WIDTH, BLOCK_H)
    dk = tl.zeros((OWN, BLOCK_H), tl.float32)
    dv = tl.zeros((OWN, BLOCK_H), tl.float32)
    begin, end = _range(ids_ptr + first, start, LENGTH, BLOCK_L, OWN, WINDOW)
    for first_query in range(begin, end, OTHER):
        query = first_query + tl.arange(0, OTHER)
        q = load_tile(qkv_ptr, bias_ptr, cos_ptr, sin_ptr, first, query, LENGTH, STRIDE, WIDTH, BLOCK_H)
        dout = load_tile(dout_ptr, None, None, None, first, query, LENGTH, HIDDEN, WIDTH, BLOCK_H)
        lse = tl.load(lse_ptr + query, mask=query < LENGTH, other=float("inf"))
        delta = tl.load(delta_ptr + query, mask=query < LENGTH, other=0.0)
        p = tl.exp2(scores(k, q, ids_ptr, first, key, query, LENGTH, WIDTH, WINDOW) - lse[None, :])
        dp = tl.dot(v, tl.trans(dout), input_precision="ieee")
        dropped = p
        if THRESHOLD > 0:
            sign = kept_sign(key_ptr, call_index, first + query, head, start, LENGTH, OWN, THRESHOLD, q.dtype)
            is_kept = tl.trans(sign) > 0
            dropped = tl.where(is_kept, p, 0.0)
            dp = tl.where(is_kept, dp * (RESOLUTION / (RESOLUTION - THRESHOLD)), 0.0)
        dv = tl.dot(dropped.to(q.dtype), dout, dv, input_precision="ieee")
        dk = tl.dot((p * (dp - delta[None, :])).to(q.dtype), q, dk, input_precision="ieee")
    dv_sum = store_gradient(dqkv_ptr + 2 * HIDDEN, tl.trans(dv * (RESOLUTION / (RESOLUTION - THRESHOLD))), None, None,
                            first, key, LENGTH, STRIDE, WIDTH, BLOCK_H, bias_ptr is not None)  # fmt: skip
    dk_sum = store_gradient(dqkv_ptr + HIDDEN, tl.trans(dk * WIDTH**-0.5), cos_ptr, sin_ptr, first, key,
                            LENGTH, STRIDE, WIDTH, BLOCK_H, k_bias_ptr is not None)  # fmt: skip
    if bias_ptr is not None:
        column = tl.arange(0, BLOCK_H)
        k_column = column
        if k_bias_ptr is None:
            dk_sum = tl.zeros((BLOCK_H,), tl.float32)
        else:
            k_column = column // 2 + column % 2 * (WIDTH // 2)
        partial_ptr += (row * tl.cdiv(LENGTH, OWN) + start // OWN).to(tl.int64) * STRIDE + head * WIDTH
        tl.store(partial_ptr + HIDDEN + k_column, dk_sum, mask=column < WIDTH)
        tl.store(partial_ptr + 2 * HIDDEN + column, dv_sum, mask=column < WIDTH)


def _options(tile: dict[str, int], constants: dict[str, Any]) -> dict[str, Any]:
    """Options of a launch; no block is longer than the row."""
    block_l, block_h = (max(16, triton.next_power_of_2(constants[name])) for name in ("LENGTH", "WIDTH"))
    other = tile["OTHER"] // 2 if constants["THRESHOLD"] else tile["OTHER"]  # dropout draws need registers too
    own_size, other = (min(size, block_l) for size in (tile["OWN"], other))
    return constants | tile | {"BLOCK_L": block_l, "OWN": own_size, "OTHER": other, "BLOCK_H": block_h, **FUSION}


def num_blocks(constants: dict[str, Any]) -> int:
    """Blocks per row in both backward passes."""
    blocks: int = triton.cdiv(constants["LENGTH"], _options(BACKWARD, constants)["OWN"])
    return blocks


def forward(arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launches the forward pass."""
    options = _options(FORWARD, constants)
    num_rows = arguments[-2]
    grid = (num_rows * options["NUM_HEADS"] * triton.cdiv(options["LENGTH"], options["OWN"]),)
    _blocked_attention_forward_kernel[grid](*arguments, **options)


def backward(
    dout_TD: Tensor, out_TD: Tensor, inputs: tuple[Any, ...], outputs: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launches both backward passes, first for queries: it writes the sums that the pass for keys reads."""
    options = _options(BACKWARD, constants)
    lse_NT = inputs[5]
    num_rows = outputs[-2]
    delta_NT = torch.empty_like(lse_NT)
    grid = (num_rows * options["NUM_HEADS"] * num_blocks(constants),)
    _blocked_attention_query_gradient_kernel[grid](dout_TD, out_TD, *inputs, delta_NT, *outputs, **options)
    _blocked_attention_key_gradient_kernel[grid](dout_TD, *inputs, delta_NT, *outputs, **options)
