# mypy: disable-error-code=assignment
# (Tuples of tensors grow in the kernels.)
"""Feed-forward sublayers whose weights fit into shared memory (Triton, Hopper).

    y = LayerNorm(x + dropout(gelu(x W1^T + b1) W2^T + b2)) * norm_weight + norm_bias

or, gated, with the rows of W1 in two halves A and B, and y the input of the next sublayer (pre-norm),

    z = residual + dropout((gelu(x A^T) * (x B^T)) W2^T), y = LayerNorm(z) * norm_weight (+ norm_bias)

At D = 64, memory traffic bounds the composition of `bias_gelu` and `residual_norm`, most of it for tensors of the
inner width. Here no tensor of that width is written: the forward kernel reads x and writes y, and the second product or
z. The backward pass consists of the backward pass of `residual_norm` and two kernels, for the gradients of x and of the
weights, which compute the inner activations again. One kernel for both would need 128 registers per thread for the sums
of the weights' gradients alone, and would spill.

Each program holds the weights in shared memory and iterates over tiles of tokens. Weight gradients are summed per
program, then over the programs in a fixed order, so that results are bitwise reproducible.

Shapes: T tokens, D hidden, F feed-forward, P programs along the tokens, N elements of W1, W2 and b1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.dropout import keep_scale, threshold
from electra_fast.kernels.gelu import gelu, gelu_and_derivative
from electra_fast.kernels.launch import FUSION, is_hopper, resident_programs

# Resident programs of four warps; two share a multiprocessor's memory and its 65,536 registers.
PROGRAMS_PER_SM = 2


@triton.jit
def _bias_operands(bias, BLOCK_T: tl.constexpr, dtype: tl.constexpr):
    """Returns [BLOCK_T, 16] and [16, BLOCK_F]; their product has the fp32 bias [BLOCK_F] in every row.

    Row 0 is the bias rounded to `dtype`, row 1 the rest. For a plain addition of the bias, a thread would need all
    bias columns of its accumulator: 64 registers at F = 256.
    """
    row = tl.arange(0, 16)
    ones = tl.where((row < 2)[None, :], tl.full((BLOCK_T, 1), 1.0, tl.float32), 0.0)
    rounded = bias.to(dtype).to(tl.float32)
    rest = tl.where((row == 1)[:, None], (bias - rounded)[None, :], 0.0)
    return ones.to(dtype), tl.where((row == 0)[:, None], rounded[None, :], rest).to(dtype)


@triton.jit(do_not_specialize=["call_index"])
def _narrow_feed_forward_forward_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, residual_ptr, norm_weight_ptr, norm_bias_ptr, key_ptr,
    y_ptr, saved_ptr, mean_ptr, rstd_ptr, num_tokens, eps, call_index,
    GATED: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, WIDTH)
    inner = tl.arange(0, BLOCK_F)
    # Loaded transposed, as [D, BLOCK_F] and [BLOCK_F, D], since Triton 3.9 would copy `tl.trans(w1[i])` per iteration.
    w1 = ()
    b1 = ()
    w2 = ()
    for first in tl.static_range(0, INNER, BLOCK_F):
        f = first + inner
        w1_offset = f[None, :] * WIDTH + column[:, None]
        is_inner = (f < INNER)[None, :]
        w1 += (tl.load(w1_ptr + w1_offset, mask=is_inner, other=0.0),)
        w2 += (tl.load(w2_ptr + column[None, :] * INNER + f[:, None], mask=(f < INNER)[:, None], other=0.0),)
        if GATED:
            b1 += (tl.load(w1_ptr + INNER * WIDTH + w1_offset, mask=is_inner, other=0.0),)
        else:
            ones, bias = _bias_operands(tl.load(b1_ptr + f, mask=f < INNER, other=0.0), BLOCK_T, dtype)
            b1 += (bias,)
    norm_weight = tl.load(norm_weight_ptr + column)
    if not GATED:
        b2 = tl.load(b2_ptr + column)
    if norm_bias_ptr is not None:
        norm_bias = tl.load(norm_bias_ptr + column)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        z = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        for i in tl.static_range((INNER + BLOCK_F - 1) // BLOCK_F):
            if GATED:
                h = gelu(tl.dot(x, w1[i], input_precision="ieee")) * tl.dot(x, b1[i], input_precision="ieee")
            else:
                h = tl.dot(ones, b1[i], input_precision="ieee")
                h = gelu(tl.dot(x, w1[i], h, input_precision="ieee"))
            z = tl.dot(h.to(dtype), w2[i], z, input_precision="ieee")
        if not GATED:
            tl.store(saved_ptr + offset, z, mask=mask)
            z += b2[None, :]
        if THRESHOLD > 0:
            z *= keep_scale(key_ptr, call_index, token, BLOCK_T, WIDTH, THRESHOLD)
        if GATED:
            z += tl.load(residual_ptr + offset, mask=mask, other=0.0).to(tl.float32)
            tl.store(saved_ptr + offset, z, mask=mask)
        else:
            z += x.to(tl.float32)
        mean = tl.sum(z, axis=1) / WIDTH
        centered = z - mean[:, None]
        rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / WIDTH + eps)
        y = centered * rstd[:, None] * norm_weight[None, :]
        if norm_bias_ptr is not None:
            y += norm_bias[None, :]
        tl.store(y_ptr + offset, y, mask=mask)
        tl.store(mean_ptr + token, mean, mask=token < num_tokens)
        tl.store(rstd_ptr + token, rstd, mask=token < num_tokens)


@triton.jit
def _input_gradient_kernel(
    dff_ptr, dz_ptr, x_ptr, w1_ptr, b1_ptr, w2_ptr, dx_ptr, num_tokens,
    GATED: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dx = dz + (dff W2 * gelu'(x W1^T + b1)) W1; gated, the gradient through both halves of W1, without dz."""
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, WIDTH)
    inner = tl.arange(0, BLOCK_F)
    w1 = ()
    w1_transposed = ()
    b1 = ()
    w2 = ()
    gate = ()
    for first in tl.static_range(0, INNER, BLOCK_F):
        f = first + inner
        w1_offset = f[:, None] * WIDTH + column[None, :]
        is_inner = (f < INNER)[:, None]
        weight = tl.load(w1_ptr + w1_offset, mask=is_inner, other=0.0)
        w1 += (weight,)
        w1_transposed += (tl.trans(weight),)  # before the loop, see above
        w2 += (tl.load(w2_ptr + column[:, None] * INNER + f[None, :], mask=(f < INNER)[None, :], other=0.0),)
        if GATED:
            weight = tl.load(w1_ptr + INNER * WIDTH + w1_offset, mask=is_inner, other=0.0)
            gate += (weight,)
            b1 += (tl.trans(weight),)
        else:
            ones, bias = _bias_operands(tl.load(b1_ptr + f, mask=f < INNER, other=0.0), BLOCK_T, dtype)
            b1 += (bias,)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        dff = tl.load(dff_ptr + offset, mask=mask, other=0.0)
        dx = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        for i in tl.static_range((INNER + BLOCK_F - 1) // BLOCK_F):
            if GATED:
                h = tl.dot(x, w1_transposed[i], input_precision="ieee")
            else:
                h = tl.dot(ones, b1[i], input_precision="ieee")
                h = tl.dot(x, w1_transposed[i], h, input_precision="ieee")
            da = tl.dot(dff, w2[i], input_precision="ieee")
            a, derivative = gelu_and_derivative(h)
            if GATED:
                dx = tl.dot((da * a).to(dtype), gate[i], dx, input_precision="ieee")
                da *= tl.dot(x, b1[i], input_precision="ieee")
            dx = tl.dot((da * derivative).to(dtype), w1[i], dx, input_precision="ieee")
        if not GATED:
            dx += tl.load(dz_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offset, dx, mask=mask)


@triton.jit
def _weight_gradient_kernel(
    dff_ptr, x_ptr, w1_ptr, b1_ptr, w2_ptr, partial_ptr, num_tokens,
    GATED: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One block of F over some tiles of tokens, transposed: h^T and its gradient are [BLOCK_F, BLOCK_T].

    They therefore enter the products as left operands directly from their accumulators. Triton 3.6 miscompiles a dot of
    a transposed accumulator on Hopper.
    """
    dtype = x_ptr.dtype.element_ty
    column = tl.arange(0, WIDTH)
    inner = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    w1_offset = inner[:, None] * WIDTH + column[None, :]
    w2_offset = column[None, :] * INNER + inner[:, None]
    is_inner = (inner < INNER)[:, None]
    w1 = tl.load(w1_ptr + w1_offset, mask=is_inner, other=0.0)
    w2 = tl.load(w2_ptr + w2_offset, mask=is_inner, other=0.0)
    dw1 = tl.zeros((BLOCK_F, WIDTH), tl.float32)
    dw2 = tl.zeros((BLOCK_F, WIDTH), tl.float32)
    if GATED:
        gate = tl.load(w1_ptr + INNER * WIDTH + w1_offset, mask=is_inner, other=0.0)
        dgate = tl.zeros((BLOCK_F, WIDTH), tl.float32)
    else:
        b1 = tl.load(b1_ptr + inner, mask=inner < INNER, other=0.0)
        db1 = tl.zeros((BLOCK_F,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None]
        # Past the last token, dff is 0, so every gradient is 0.
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        dff = tl.load(dff_ptr + offset, mask=mask, other=0.0)
        h = tl.dot(w1, tl.trans(x), input_precision="ieee")
        if not GATED:
            h += b1[:, None]
        da = tl.dot(w2, tl.trans(dff), input_precision="ieee")
        a, derivative = gelu_and_derivative(h)
        if GATED:
            dgate = tl.dot((da * a).to(dtype), x, dgate, input_precision="ieee")
            b = tl.dot(gate, tl.trans(x), input_precision="ieee")
            a = a * b
            da = da * b
        dh = da * derivative
        if not GATED:
            db1 += tl.sum(dh, axis=1)
        dw1 = tl.dot(dh.to(dtype), x, dw1, input_precision="ieee")
        dw2 = tl.dot(a.to(dtype), dff, dw2, input_precision="ieee")
    NUM_W1: tl.constexpr = (2 if GATED else 1) * INNER * WIDTH
    partial_ptr += tl.program_id(0) * (NUM_W1 + INNER * WIDTH + (0 if GATED else INNER))
    tl.store(partial_ptr + w1_offset, dw1, mask=is_inner)
    tl.store(partial_ptr + NUM_W1 + w2_offset, dw2, mask=is_inner)
    if GATED:
        tl.store(partial_ptr + INNER * WIDTH + w1_offset, dgate, mask=is_inner)
    else:
        tl.store(partial_ptr + NUM_W1 + INNER * WIDTH + inner, db1, mask=inner < INNER)


def supports(x_TD: Tensor, inner_width: int, gated: bool = False) -> bool:
    """Returns whether there are kernels for x's width, dtype and device: without wgmma, the weights would spill."""
    inner_fits = inner_width % 16 == 0 and 0 < inner_width <= 192 if gated else inner_width in (64, 128, 256)
    is_16_bit = x_TD.dtype in (torch.bfloat16, torch.float16)  # the interpreter accepts fp32 too
    return x_TD.shape[1] in (16, 32, 64) and inner_fits and is_hopper(x_TD.device) and (is_16_bit or not x_TD.is_cuda)


def blocks(w1_FD: Tensor, w2_DF: Tensor) -> dict[str, Any]:
    """Block sizes of the forward kernel and of the kernel for the gradient of x."""
    width, inner_width = w2_DF.shape
    is_gated = w1_FD.shape[0] == 2 * inner_width
    return {"GATED": is_gated, "WIDTH": width, "INNER": inner_width, "BLOCK_T": 64, "BLOCK_F": 64}


def weight_gradient_blocks(w1_FD: Tensor, w2_DF: Tensor) -> dict[str, Any]:
    """Block sizes for the weights' gradients, in parts of F that each read every token.

    With a gate, a thread has three sums and three products in registers, so tiles of tokens are smaller.
    """
    tile = blocks(w1_FD, w2_DF)
    return tile | ({"BLOCK_T": 32} if tile["GATED"] else {"BLOCK_F": min(tile["INNER"], 128)})


def _weights(x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(weight.to(x_TD.dtype).contiguous() for weight in weights)


@torch.library.custom_op("electra_fast::narrow_feed_forward", mutates_args=())
def narrow_feed_forward(
    x_TD: Tensor, w1_FD: Tensor, b1_F: Tensor | None, w2_DF: Tensor, b2_D: Tensor | None, residual_TD: Tensor | None,
    norm_weight_D: Tensor, norm_bias_D: Tensor | None,
    eps: float, probability: float, key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sublayer's output [T, D] in x's dtype, and tensors for its backward pass.

    These are the second product without its bias [T, D] or, with a gate, the sum before the norm; and mean and
    1 / standard deviation, fp32 [T]. With a gate, W1 is [2F, D], only the norm has a bias, and the residual is not x.
    The two weights are used in x's dtype, the vectors are fp32. `key` and `call_index` are as in `dropout`.
    """
    num_tokens = x_TD.shape[0]
    x_TD = x_TD.contiguous()
    tile = blocks(w1_FD, w2_DF)
    w1_FD, w2_DF = _weights(x_TD, w1_FD, w2_DF)
    residual_TD = None if residual_TD is None else residual_TD.contiguous()
    y_TD = torch.empty_like(x_TD)
    saved_TD = torch.empty_like(x_TD)
    mean_T, rstd_T = (x_TD.new_empty(num_tokens, dtype=torch.float32) for _ in range(2))
    grid = min(triton.cdiv(num_tokens, tile["BLOCK_T"]), resident_programs(x_TD.device, PROGRAMS_PER_SM))
    _narrow_feed_forward_forward_kernel[(grid,)](
        x_TD, w1_FD, b1_F, w2_DF, b2_D, residual_TD, norm_weight_D, norm_bias_D, key, y_TD, saved_TD, mean_T, rstd_T,
        num_tokens, eps, call_index, **tile, THRESHOLD=threshold(probability),
        num_warps=4, num_stages=2, **FUSION,
    )  # fmt: skip
    return y_TD, saved_TD, mean_T, rstd_T


def _along_tokens(x_TD: Tensor, w1_FD: Tensor, w2_DF: Tensor) -> tuple[int, int, int]:
    """Grid for the weights' gradients, and warps per program: eight per multiprocessor, as in the other kernels."""
    tile = weight_gradient_blocks(w1_FD, w2_DF)
    along_inner = triton.cdiv(tile["INNER"], tile["BLOCK_F"])
    num_warps = max(4, tile["BLOCK_F"] // 16)
    along_tokens = max(1, resident_programs(x_TD.device, 8 // num_warps) // along_inner)
    return min(triton.cdiv(x_TD.shape[0], tile["BLOCK_T"]), along_tokens), along_inner, num_warps


def _num_sums(w1_FD: Tensor, w2_DF: Tensor) -> int:
    return w1_FD.numel() + w2_DF.numel() + (0 if blocks(w1_FD, w2_DF)["GATED"] else w1_FD.shape[0])


@torch.library.custom_op("electra_fast::narrow_feed_forward_backward", mutates_args=())
def narrow_feed_forward_backward(
    dff_TD: Tensor, dz_TD: Tensor | None, x_TD: Tensor, w1_FD: Tensor, b1_F: Tensor | None, w2_DF: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x from the gradients of the second product and, if it is x, of the residual.

    Also returns partial sums of the gradients of W1, W2 and b1, if given, concatenated, fp32 [P, N].
    """
    num_tokens = x_TD.shape[0]
    x_TD = x_TD.contiguous()
    dff_TD = dff_TD.contiguous()
    dz_TD = None if dz_TD is None else dz_TD.contiguous()
    w1_FD, w2_DF = _weights(x_TD, w1_FD, w2_DF)
    tile = blocks(w1_FD, w2_DF)
    dx_TD = torch.empty_like(x_TD)
    grid = min(triton.cdiv(num_tokens, tile["BLOCK_T"]), resident_programs(x_TD.device, PROGRAMS_PER_SM))
    _input_gradient_kernel[(grid,)](
        dff_TD, dz_TD, x_TD, w1_FD, b1_F, w2_DF, dx_TD, num_tokens, **tile, num_warps=4, num_stages=2, **FUSION,
    )  # fmt: skip
    along_tokens, along_inner, num_warps = _along_tokens(x_TD, w1_FD, w2_DF)
    partial_PN = x_TD.new_empty((along_tokens, _num_sums(w1_FD, w2_DF)), dtype=torch.float32)
    _weight_gradient_kernel[(along_tokens, along_inner)](
        dff_TD, x_TD, w1_FD, b1_F, w2_DF, partial_PN, num_tokens,
        **weight_gradient_blocks(w1_FD, w2_DF), num_warps=num_warps, num_stages=3, **FUSION,
    )  # fmt: skip
    return dx_TD, partial_PN


@narrow_feed_forward.register_fake
def _(x_TD, w1_FD, b1_F, w2_DF, b2_D, residual_TD, norm_weight_D, norm_bias_D, eps, probability, key, call_index):
    row = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape), row, torch.empty_like(row)


@narrow_feed_forward_backward.register_fake
def _(dff_TD, dz_TD, x_TD, w1_FD, b1_F, w2_DF):
    shape = (_along_tokens(x_TD, w1_FD, w2_DF)[0], _num_sums(w1_FD, w2_DF))
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(shape, dtype=torch.float32)
