"""Tiles for attention that reads the qkv layer's product in place (Triton).

`short_attention` and `blocked_attention` share these functions: loads with bias and rotation, stores of gradients with
the inverse rotation, masked scores, and dropout draws. Gradients are stored from their transposes, [H, positions].

Shapes: L row length, H head dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from electra_fast.kernels.dropout import philox_words

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    ptr, bias_ptr, cos_ptr, sin_ptr, first, position,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Loads [positions, H] of one head, with bias and rotation if given; finite past the row's end.

    In rotated tiles, the two dimensions of a pair, i and i + H/2, are adjacent: products of queries and keys do not
    depend on the order, and a thread that holds gradients of both can rotate them back.
    """
    dtype = ptr.dtype.element_ty
    if cos_ptr is None:
        column = tl.arange(0, BLOCK_H)
        mask = (position < LENGTH)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(ptr + position[:, None] * STRIDE + column[None, :], mask=mask, other=0.0)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + column, mask=column < WIDTH, other=0.0)
            x = (x.to(tl.float32) + bias[None, :]).to(dtype)
    else:
        HALF: tl.constexpr = WIDTH // 2
        column = tl.arange(0, BLOCK_H // 2)
        mask = (position < LENGTH)[:, None] & (column < HALF)[None, :]
        offset = position[:, None] * STRIDE + column[None, :]
        x1 = tl.load(ptr + offset, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(ptr + offset + HALF, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            x1 += tl.load(bias_ptr + column, mask=column < HALF, other=0.0)[None, :]
            x2 += tl.load(bias_ptr + HALF + column, mask=column < HALF, other=0.0)[None, :]
        angle = (first + position)[:, None] * HALF + column[None, :]
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        x = tl.interleave((x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype))
    return x


@triton.jit
def store_gradient(
    ptr, dx, cos_ptr, sin_ptr, first, position,
    LENGTH: tl.constexpr, STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_H: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of the input of `load_tile` from the gradient of its result, fp32 [H, positions].

    If `SUM`, returns its sums over the positions, [H] in the order of the result.
    """
    dtype = ptr.dtype.element_ty
    total = 0.0
    if cos_ptr is None:
        column = tl.arange(0, BLOCK_H)
        mask = (position < LENGTH)[:, None] & (column < WIDTH)[None, :]
        tl.store(ptr + position[:, None] * STRIDE + column[None, :], tl.trans(dx.to(dtype)), mask=mask)
        if SUM:
            total = tl.sum(dx, axis=1)
    else:
        HALF: tl.constexpr = WIDTH // 2
        column = tl.arange(0, BLOCK_H // 2)
        mask = (position < LENGTH)[:, None] & (column < HALF)[None, :]
        angle = (first + position)[:, None] * HALF + column[None, :]
        cos = tl.load(cos_ptr + angle, mask=mask, other=0.0)
        sin = tl.load(sin_ptr + angle, mask=mask, other=0.0)
        dx1, dx2 = tl.split(tl.reshape(tl.trans(dx), (dx.shape[1], BLOCK_H // 2, 2)))
        dx1, dx2 = dx1 * cos + dx2 * sin, dx2 * cos - dx1 * sin
        offset = position[:, None] * STRIDE + column[None, :]
        tl.store(ptr + offset, dx1.to(dtype), mask=mask)
        tl.store(ptr + offset + HALF, dx2.to(dtype), mask=mask)
        if SUM:
            total = tl.interleave(tl.sum(dx1, axis=0), tl.sum(dx2, axis=0))
    return total


@triton.jit
def scores(
    q, k, ids_ptr, first, query, key, LENGTH: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Scores [queries, keys] in base-2 units, -inf for masked pairs. Positions past the row's end form a segment."""
    query_id = tl.load(ids_ptr + first + query, mask=query < LENGTH, other=-1)
    key_id = tl.load(ids_ptr + first + key, mask=key < LENGTH, other=-1)
    attends = query_id[:, None] == key_id[None, :]
    if WINDOW is not None:
        attends &= tl.abs(query[:, None] - key[None, :]) <= WINDOW
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    return tl.where(attends, s * (WIDTH**-0.5 * LOG2E), -float("inf"))


@triton.jit
def kept_sign(
    key_ptr, call_index, token, head, first_key,
    LENGTH: tl.constexpr, NUM_KEYS: tl.constexpr, THRESHOLD: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Returns 1 for weights [queries, keys] that dropout keeps, else -1, from the draws of (token, head*L + key).

    `first_key` is a multiple of 4.
    """
    if LENGTH % 4 == 0:
        quad = head * (LENGTH // 4) + first_key // 4 + tl.arange(0, NUM_KEYS // 4)
        w0, w1, w2, w3 = philox_words(key_ptr, call_index, token, quad)
        s0 = _word_sign(w0, THRESHOLD, dtype)
        s1 = _word_sign(w1, THRESHOLD, dtype)
        s2 = _word_sign(w2, THRESHOLD, dtype)
        s3 = _word_sign(w3, THRESHOLD, dtype)
        sign = tl.interleave(tl.interleave(s0, s2), tl.interleave(s1, s3))
    else:  # a head may begin within a quad: one call per element
        column = head * LENGTH + first_key + tl.arange(0, NUM_KEYS)
        w0, w1, w2, w3 = philox_words(key_ptr, call_index, token, column // 4)
        lane = (column % 4)[None, :]
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
        sign = _word_sign(word, THRESHOLD, dtype)
    return sign


@triton.jit
def _word_sign(word, THRESHOLD: tl.constexpr, dtype: tl.constexpr):
    return tl.where((word >> 8).to(tl.int32) >= THRESHOLD, 1.0, -1.0).to(dtype)
