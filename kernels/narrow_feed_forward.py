# mypy: disable-error-code=assignment
# (Tuples of tensors grow in the kernels.)
"""A post-norm feed-forward sublayer so narrow that its weights fit into shared memory (Triton, Hopper).

    y = LayerNorm(x + dropout(gelu(x W1^T + b1) W2^T + b2)) * norm_weight + norm_bias

At D = 64 the composition of `bias_gelu` and `residual_norm` is bound by memory traffic, most of it for tensors of the
inner width. Here none of that width is written: the forward kernel reads x and writes y and the second product; the
backward pass is `residual_norm_backward` and two kernels, one for the gradient of x and one for those of the weights,
which compute the inner activations again. One kernel for both would need 128 registers per thread for the sums of the
weights' gradients alone, and spills.

Each program keeps the weights in shared memory and iterates over tiles of tokens. Weight gradients are summed per
program, then over the programs in a fixed order, so that results are bitwise reproducible.

Shapes: T tokens, D hidden, F feed-forward, P programs along the tokens, N = 2FD + F elements of W1, W2, b1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.dropout import keep_scale, threshold
from electra_fast.kernels.gelu import gelu, gelu_and_derivative
from electra_fast.kernels.launch import FUSION, is_hopper, resident_programs
from electra_fast.kernels.partial_sums import partial_sums
from electra_fast.kernels.residual_norm import residual_norm_backward

# Resident programs of four warps, two of which share a multiprocessor's memory and its 65,536 registers.
PROGRAMS_PER_SM = 2


@triton.jit
def _bias_operands(bias, BLOCK_T: tl.constexpr, dtype: tl.constexpr):
    """[BLOCK_T, 16] and [16, BLOCK_F] whose product has the fp32 bias [BLOCK_F] in every row.

    Row 0 is the bias rounded to `dtype`, row 1 the rest. To add the bias itself, a thread would hold every column of
    it that it has in an accumulator: 64 registers at F = 256.
    """
    row = tl.arange(0, 16)
    ones = tl.where((row < 2)[None, :], tl.full((BLOCK_T, 1), 1.0, tl.float32), 0.0)
    rounded = bias.to(dtype).to(tl.float32)
    rest = tl.where((row == 1)[:, None], (bias - rounded)[None, :], 0.0)
    return ones.to(dtype), tl.where((row == 0)[:, None], rounded[None, :], rest).to(dtype)


@triton.jit(do_not_specialize=["call_index"])
def _narrow_feed_forward_forward_kernel(
    x_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, norm_weight_ptr, norm_bias_ptr, key_ptr,
    y_ptr, ff_ptr, mean_ptr, rstd_ptr, num_tokens, eps, call_index,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
    THRESHOLD: tl.constexpr,
):  # fmt: skip
    dtype = x_ptr.dtype.element_ty
    column, inner = tl.arange(0, WIDTH), tl.arange(0, BLOCK_F)
    # Loaded transposed, as [D, BLOCK_F] and [BLOCK_F, D]: Triton 3.9 would copy `tl.trans(w1[i])` in every iteration.
    w1, b1, w2 = (), (), ()
    for first in tl.static_range(0, INNER, BLOCK_F):
        w1 += (tl.load(w1_ptr + (first + inner)[None, :] * WIDTH + column[:, None]),)
        w2 += (tl.load(w2_ptr + column[None, :] * INNER + (first + inner)[:, None]),)
        ones, bias = _bias_operands(tl.load(b1_ptr + first + inner), BLOCK_T, dtype)
        b1 += (bias,)
    b2 = tl.load(b2_ptr + column)
    norm_weight, norm_bias = tl.load(norm_weight_ptr + column), tl.load(norm_bias_ptr + column)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        ff = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        for i in tl.static_range(INNER // BLOCK_F):
            h = tl.dot(ones, b1[i], input_precision="ieee")
            h = tl.dot(x, w1[i], h, input_precision="ieee")
            ff = tl.dot(gelu(h).to(dtype), w2[i], ff, input_precision="ieee")
        tl.store(ff_ptr + offset, ff, mask=mask)
        z = ff + b2[None, :]
        if THRESHOLD > 0:
            z *= keep_scale(key_ptr, call_index, token, BLOCK_T, WIDTH, THRESHOLD)
        z += x.to(tl.float32)
        mean = tl.sum(z, axis=1) / WIDTH
        centered = z - mean[:, None]
        rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / WIDTH + eps)
        y = centered * rstd[:, None] * norm_weight[None, :] + norm_bias[None, :]
        tl.store(y_ptr + offset, y, mask=mask)
        tl.store(mean_ptr + token, mean, mask=token < num_tokens)
        tl.store(rstd_ptr + token, rstd, mask=token < num_tokens)


@triton.jit
def _input_gradient_kernel(
    dff_ptr, dz_ptr, x_ptr, w1_ptr, b1_ptr, w2_ptr, dx_ptr, num_tokens,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """dx = dz + (dff W2 * gelu'(x W1^T + b1)) W1."""
    dtype = x_ptr.dtype.element_ty
    column, inner = tl.arange(0, WIDTH), tl.arange(0, BLOCK_F)
    w1, w1_transposed, b1, w2 = (), (), (), ()
    for first in tl.static_range(0, INNER, BLOCK_F):
        weight = tl.load(w1_ptr + (first + inner)[:, None] * WIDTH + column[None, :])
        w1 += (weight,)
        w1_transposed += (tl.trans(weight),)  # before the loop, see above
        w2 += (tl.load(w2_ptr + column[:, None] * INNER + (first + inner)[None, :]),)
        ones, bias = _bias_operands(tl.load(b1_ptr + first + inner), BLOCK_T, dtype)
        b1 += (bias,)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        dff = tl.load(dff_ptr + offset, mask=mask, other=0.0)
        dx = tl.zeros((BLOCK_T, WIDTH), tl.float32)
        for i in tl.static_range(INNER // BLOCK_F):
            h = tl.dot(ones, b1[i], input_precision="ieee")
            h = tl.dot(x, w1_transposed[i], h, input_precision="ieee")
            da = tl.dot(dff, w2[i], input_precision="ieee")
            _, derivative = gelu_and_derivative(h)
            dx = tl.dot((da * derivative).to(dtype), w1[i], dx, input_precision="ieee")
        dz = tl.load(dz_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + offset, dz + dx, mask=mask)


@triton.jit
def _weight_gradient_kernel(
    dff_ptr, x_ptr, w1_ptr, b1_ptr, w2_ptr, partial_ptr, num_tokens,
    WIDTH: tl.constexpr, INNER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """One block of F over some tiles of tokens, transposed: h^T and its gradient are [BLOCK_F, BLOCK_T].

    So they enter the products as left operands straight from their accumulators. Triton 3.6 miscompiles a dot of a
    transposed accumulator on Hopper.
    """
    dtype = x_ptr.dtype.element_ty
    column, inner = tl.arange(0, WIDTH), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    w1 = tl.load(w1_ptr + inner[:, None] * WIDTH + column[None, :])
    w2 = tl.load(w2_ptr + column[None, :] * INNER + inner[:, None])
    b1 = tl.load(b1_ptr + inner)
    dw1 = tl.zeros((BLOCK_F, WIDTH), tl.float32)
    dw2 = tl.zeros((BLOCK_F, WIDTH), tl.float32)
    db1 = tl.zeros((BLOCK_F,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        offset = token[:, None] * WIDTH + column[None, :]
        mask = (token < num_tokens)[:, None]
        # Past the last token dff is 0, and so is every gradient.
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        dff = tl.load(dff_ptr + offset, mask=mask, other=0.0)
        h = tl.dot(w1, tl.trans(x), input_precision="ieee") + b1[:, None]
        da = tl.dot(w2, tl.trans(dff), input_precision="ieee")
        a, derivative = gelu_and_derivative(h)
        dh = da * derivative
        db1 += tl.sum(dh, axis=1)
        dw1 = tl.dot(dh.to(dtype), x, dw1, input_precision="ieee")
        dw2 = tl.dot(a.to(dtype), dff, dw2, input_precision="ieee")
    partial_ptr += tl.program_id(0) * (2 * INNER * WIDTH + INNER)
    tl.store(partial_ptr + inner[:, None] * WIDTH + column[None, :], dw1)
    tl.store(partial_ptr + INNER * WIDTH + column[None, :] * INNER + inner[:, None], dw2)
    tl.store(partial_ptr + 2 * INNER * WIDTH + inner, db1)


def supports(x_TD: Tensor, inner_width: int) -> bool:
    """Tells if there are kernels for x's width, dtype and device: on GPUs without wgmma the weights would spill."""
    shape_fits = x_TD.shape[1] in (16, 32, 64) and inner_width in (64, 128, 256)
    is_16_bit = x_TD.dtype in (torch.bfloat16, torch.float16)  # the interpreter takes fp32 too
    return shape_fits and is_hopper(x_TD.device) and (is_16_bit or not x_TD.is_cuda)


def blocks(width: int, inner_width: int) -> dict[str, int]:
    """Block sizes of the forward kernel and of the one for the gradient of x."""
    return {"WIDTH": width, "INNER": inner_width, "BLOCK_T": 64, "BLOCK_F": 64}


def weight_gradient_blocks(width: int, inner_width: int) -> dict[str, int]:
    """Block sizes of the weights' gradients: halves of F = 256, each of which reads every token."""
    return {"WIDTH": width, "INNER": inner_width, "BLOCK_T": 64, "BLOCK_F": min(inner_width, 128)}


def _weights(x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(weight.to(x_TD.dtype).contiguous() for weight in weights)


@torch.library.custom_op("electra_fast::narrow_feed_forward", mutates_args=())
def narrow_feed_forward(
    x_TD: Tensor, w1_FD: Tensor, b1_F: Tensor, w2_DF: Tensor, b2_D: Tensor, norm_weight_D: Tensor, norm_bias_D: Tensor,
    eps: float, probability: float, key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The sublayer's output [T, D] in x's dtype, and tensors for its backward pass.

    These are the second product without its bias [T, D], and mean and 1 / standard deviation, fp32 [T]. The two
    weights are used in x's dtype, the vectors are fp32. `key` and `call_index` are those of `dropout`.
    """
    num_tokens, width = x_TD.shape
    x_TD, tile = x_TD.contiguous(), blocks(width, w1_FD.shape[0])
    w1_FD, w2_DF = _weights(x_TD, w1_FD, w2_DF)
    y_TD, ff_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    mean_T, rstd_T = (x_TD.new_empty(num_tokens, dtype=torch.float32) for _ in range(2))
    grid = min(triton.cdiv(num_tokens, tile["BLOCK_T"]), resident_programs(x_TD.device, PROGRAMS_PER_SM))
    _narrow_feed_forward_forward_kernel[(grid,)](
        x_TD, w1_FD, b1_F, w2_DF, b2_D, norm_weight_D, norm_bias_D, key, y_TD, ff_TD, mean_T, rstd_T,
        num_tokens, eps, call_index, **tile, THRESHOLD=threshold(probability),
        num_warps=4, num_stages=2, **FUSION,
    )  # fmt: skip
    return y_TD, ff_TD, mean_T, rstd_T


@torch.library.custom_op("electra_fast::narrow_feed_forward_backward", mutates_args=())
def narrow_feed_forward_backward(
    dy_TD: Tensor, x_TD: Tensor, w1_FD: Tensor, b1_F: Tensor, w2_DF: Tensor, b2_D: Tensor, norm_weight_D: Tensor,
    ff_TD: Tensor, mean_T: Tensor, rstd_T: Tensor, probability: float, key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and in fp32 those of W1, W2, b1, norm_weight, norm_bias and b2, concatenated [N + 3D]."""
    (num_tokens, width), inner_width = x_TD.shape, w1_FD.shape[0]
    x_TD = x_TD.contiguous()
    w1_FD, w2_DF = _weights(x_TD, w1_FD, w2_DF)
    dff_TD, dz_TD, partial_P3D = residual_norm_backward(
        dy_TD, ff_TD, b2_D, x_TD, norm_weight_D, mean_T, rstd_T, True, probability, key, call_index
    )
    tile, dx_TD = blocks(width, inner_width), torch.empty_like(x_TD)
    num_tiles = triton.cdiv(num_tokens, tile["BLOCK_T"])
    _input_gradient_kernel[(min(num_tiles, resident_programs(x_TD.device, PROGRAMS_PER_SM)),)](
        dff_TD, dz_TD if dz_TD.numel() else dff_TD, x_TD, w1_FD, b1_F, w2_DF, dx_TD, num_tokens,
        **tile, num_warps=4, num_stages=2, **FUSION,
    )  # fmt: skip
    tile = weight_gradient_blocks(width, inner_width)
    along_inner, num_warps = inner_width // tile["BLOCK_F"], tile["BLOCK_F"] // 16
    # Eight warps per multiprocessor, as above.
    along_tokens = min(num_tiles, max(1, resident_programs(x_TD.device, 8 // num_warps) // along_inner))
    partial_PN = x_TD.new_empty((along_tokens, 2 * inner_width * width + inner_width), dtype=torch.float32)
    _weight_gradient_kernel[(along_tokens, along_inner)](
        dff_TD, x_TD, w1_FD, b1_F, w2_DF, partial_PN, num_tokens,
        **tile, num_warps=num_warps, num_stages=3, **FUSION,
    )  # fmt: skip
    return dx_TD, partial_sums(partial_PN, partial_P3D.flatten(1))


@narrow_feed_forward.register_fake
def _(x_TD, w1_FD, b1_F, w2_DF, b2_D, norm_weight_D, norm_bias_D, eps, probability, key, call_index):
    row = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape), row, torch.empty_like(row)


@narrow_feed_forward_backward.register_fake
def _(
    dy_TD, x_TD, w1_FD, b1_F, w2_DF, b2_D, norm_weight_D, ff_TD, mean_T, rstd_T, probability, key, call_index
):  # fmt: skip
    width, inner_width = x_TD.shape[1], w1_FD.shape[0]
    num_sums = 2 * inner_width * width + inner_width + 3 * width
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_sums, dtype=torch.float32)


def narrow_feed_forward_gradients(
    dy_TD: Tensor, x_TD: Tensor, w1_FD: Tensor, *others: Tensor | float | None
) -> tuple[Tensor, ...]:  # fmt: skip
    """`narrow_feed_forward_backward` in parts: gradients of x, W1, b1, W2, b2, norm_weight and norm_bias."""
    dx_TD, sums = narrow_feed_forward_backward(dy_TD, x_TD, w1_FD, *others)
    sizes = (w1_FD.numel(), w1_FD.numel(), w1_FD.shape[0], *[x_TD.shape[1]] * 3)
    dw1, dw2, db1_F, dnorm_weight_D, dnorm_bias_D, db2_D = sums.split(sizes)
    return dx_TD, dw1.view(w1_FD.shape), db1_F, dw2.view(w1_FD.shape[::-1]), db2_D, dnorm_weight_D, dnorm_bias_D


def _save(ctx, inputs, output):
    x_TD, w1_FD, b1_F, w2_DF, b2_D, norm_weight_D, _, _, ctx.probability, key, ctx.call_index = inputs
    ctx.save_for_backward(x_TD, w1_FD, b1_F, w2_DF, b2_D, norm_weight_D, *output[1:], key)


def _gradients(ctx, dy_TD, *_):
    *saved, key = ctx.saved_tensors
    gradients = narrow_feed_forward_gradients(dy_TD, *saved, ctx.probability, key, ctx.call_index)
    return *gradients, None, None, None, None


narrow_feed_forward.register_autograd(_gradients, setup_context=_save)
