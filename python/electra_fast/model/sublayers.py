"""Sublayers: norm(x + dropout(attention(x))) and norm(x + dropout(feed_forward(x))) of post-norm layers; GeGLU.

With kernels, each is one node of autograd with its backward pass written out, because the savings span operations: the
last product adds the gradients of x as input and as residual, the derivative of the GELU is applied where its gradient
is computed, and no weight gradient is cast. Elsewhere they are compositions of operations, which are also their
references.

Shapes: T packed tokens, D hidden, F feed-forward, X = 3D.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from electra_fast.model.attention import AttentionMask, self_attention
from electra_fast.ops import operations as ops
from electra_fast.ops.choice import choice, operation, uses_kernels
from electra_fast.ops.operations import Dropout, cast, kernels, linear, weight_gradient


class SublayerWeights(NamedTuple):
    """The parameters of a sublayer, fp32: its first and last linear layers, and the norm that ends it.

    Shapes: [X, D], [X], [D, D] in attention, [F, D], [F], [D, F] in the feed-forward; then [D] three times.
    """

    in_weight: Tensor
    in_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


@operation
def attention(
    x_TD: Tensor,
    weights: SublayerWeights,
    eps: float,
    mask: AttentionMask,
    num_heads: int,
    attention_dropout: Dropout,
    dropout: Dropout,
) -> Tensor:
    """norm(x + dropout(self_attention(x) @ out_weight.T + out_bias)); [T, D] → [T, D]."""
    has_kernel = mask.backend == "short" and attention_dropout.has_kernel and dropout.has_kernel
    if has_kernel and uses_kernels(x_TD, "attention"):
        call = (mask.segment_ids_BL, num_heads, mask.window, *attention_dropout.arguments)
        y_TD: Tensor = _Attention.apply(x_TD, *weights, *call, eps, *dropout.arguments)
        return y_TD
    mixed_TD = self_attention(x_TD, weights.in_weight, weights.in_bias, mask, num_heads, attention_dropout)
    return ops.residual_norm(mixed_TD, *weights[2:4], x_TD, *weights[4:], eps, dropout)


# One kernel for all; the GELU in the epilogues of its products; the GELU beside them.
FEED_FORWARD_KERNELS = ("narrow", "fused", "apart")


def feed_forward_kernels(x_TD: Tensor, inner_width: int) -> list[str]:
    """Returns those of `FEED_FORWARD_KERNELS` that `feed_forward` can run by, the preferred one first."""
    runs = (
        kernels().narrow_feed_forward_supports(x_TD, inner_width),
        kernels().matmul_gelu_is_profitable(x_TD),
        True,
    )
    return [name for name, does_run in zip(FEED_FORWARD_KERNELS, runs, strict=True) if does_run]


@operation
def feed_forward(x_TD: Tensor, weights: SublayerWeights, eps: float, dropout: Dropout) -> Tensor:
    """norm(x + dropout(gelu(x @ in_weight.T + in_bias) @ out_weight.T + out_bias)); [T, D] → [T, D]."""
    how = choice("feed_forward", x_TD)
    if how != "reference" and dropout.has_kernel:
        how = feed_forward_kernels(x_TD, weights.in_weight.shape[0])[0] if how == "kernel" else how
        if how == "narrow":
            y_TD: Tensor = _NarrowFeedForward.apply(x_TD, *weights, eps, *dropout.arguments)
        else:
            y_TD = _FeedForward.apply(x_TD, *weights, eps, how == "fused", *dropout.arguments)
        return y_TD
    inner_TF = ops.bias_gelu(x_TD, weights.in_weight, weights.in_bias)
    return ops.residual_norm(inner_TF, *weights[2:4], x_TD, *weights[4:], eps, dropout)


@operation
def gated_feed_forward(x_TD: Tensor, in_weight: Tensor, out_weight_DF: Tensor) -> Tensor:
    """(gelu(a) * b) @ out_weight.T, where [a, b] = x @ in_weight.T; [T, D], [2F, D], [D, F] → [T, D]."""
    if uses_kernels(x_TD, "gated_feed_forward") and kernels().matmul_gelu_is_profitable(x_TD):
        z_TD: Tensor = _GatedFeedForward.apply(x_TD, in_weight, out_weight_DF)
        return z_TD
    return linear(ops.geglu(x_TD, in_weight), out_weight_DF)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        in_weight_XD: Tensor,
        in_bias_X: Tensor,
        out_weight_DD: Tensor,
        out_bias_D: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor,
        ids_BL: Tensor,
        num_heads: int,
        window: int | None,
        attention_probability: float,
        attention_key: Tensor | None,
        attention_call_index: int,
        eps: float,
        *dropout: Any,
    ) -> Tensor:
        in_weight_XD, out_weight_DD = cast(in_weight_XD, x_TD.dtype), cast(out_weight_DD, x_TD.dtype)
        qkv_TX, ctx.heads = x_TD @ in_weight_XD.T, (num_heads, window, attention_probability)
        mixed_TD, lse_NT = kernels().short_attention(
            qkv_TX, in_bias_X, ids_BL, None, None, *ctx.heads, attention_key, attention_call_index
        )
        z_TD = mixed_TD @ out_weight_DD.T
        norm = (out_bias_D, x_TD, norm_weight_D, norm_bias_D, eps, *dropout)
        y_TD, mean_T, rstd_T = kernels().residual_norm(z_TD, *norm)
        ctx.attention_call_index, (ctx.probability, key, ctx.call_index) = attention_call_index, dropout
        attended = (qkv_TX, in_bias_X, ids_BL, lse_NT, attention_key, mixed_TD)
        normed = (z_TD, out_bias_D, norm_weight_D, mean_T, rstd_T)
        ctx.save_for_backward(x_TD, in_weight_XD, *attended, out_weight_DD, *normed, key)
        assert isinstance(y_TD, Tensor)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, in_weight_XD, *attended = ctx.saved_tensors[:8]
        qkv_TX, in_bias_X, ids_BL, lse_NT, attention_key, mixed_TD = attended
        out_weight_DD, *normed, key = ctx.saved_tensors[8:]
        dropout = (ctx.probability, key, ctx.call_index)
        dz_TD, dresidual_TD, partial_P3D = _residual_norm_backward(dropout, dy_TD, x_TD, *normed)
        dmixed_TD, dout_weight_DD = dz_TD @ out_weight_DD, weight_gradient(dz_TD, mixed_TD)
        arguments = (qkv_TX, in_bias_X, ids_BL, None, None, lse_NT)
        attention_dropout = (attention_key, ctx.attention_call_index)
        dqkv_TX, partial_BX = kernels().short_attention_backward(dmixed_TD, *arguments, *ctx.heads, *attention_dropout)
        din_bias_X, *dnorm = _vector_gradients(partial_BX, partial_P3D)
        din_weight_XD = weight_gradient(dqkv_TX, x_TD)
        dx_TD = dresidual_TD.addmm_(dqkv_TX, in_weight_XD)
        return dx_TD, din_weight_XD, din_bias_X, dout_weight_DD, *dnorm, *[None] * 10


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        in_weight_FD: Tensor,
        in_bias_F: Tensor,
        out_weight_DF: Tensor,
        out_bias_D: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor,
        eps: float,
        is_fused: bool,
        *dropout: Any,
    ) -> Tensor:
        in_weight_FD, out_weight_DF = cast(in_weight_FD, x_TD.dtype), cast(out_weight_DF, x_TD.dtype)
        ctx.is_fused = is_fused
        if is_fused:
            h_TF, inner_TF = kernels().matmul_gelu(x_TD, in_weight_FD, in_bias_F)
        else:
            h_TF = x_TD @ in_weight_FD.T
            inner_TF = kernels().bias_gelu(h_TF, in_bias_F)
        z_TD = inner_TF @ out_weight_DF.T
        norm = (out_bias_D, x_TD, norm_weight_D, norm_bias_D, eps, *dropout)
        y_TD, mean_T, rstd_T = kernels().residual_norm(z_TD, *norm)
        ctx.probability, key, ctx.call_index = dropout
        normed = (z_TD, out_bias_D, norm_weight_D, mean_T, rstd_T)
        ctx.save_for_backward(x_TD, in_weight_FD, h_TF, in_bias_F, inner_TF, out_weight_DF, *normed, key)
        assert isinstance(y_TD, Tensor)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, in_weight_FD, h_TF, in_bias_F, inner_TF, out_weight_DF, *normed, key = ctx.saved_tensors
        dropout = (ctx.probability, key, ctx.call_index)
        dz_TD, dresidual_TD, partial_P3D = _residual_norm_backward(dropout, dy_TD, x_TD, *normed)
        dout_weight_DF = weight_gradient(dz_TD, inner_TF)
        if ctx.is_fused:
            dh_TF, partial_PF = kernels().matmul_gelu_backward(dz_TD, out_weight_DF, h_TF)
        else:
            dh_TF, partial_PF = kernels().bias_gelu_backward(dz_TD @ out_weight_DF, h_TF, in_bias_F)
        din_bias_F, *dnorm = _vector_gradients(partial_PF, partial_P3D)
        din_weight_FD = weight_gradient(dh_TF, x_TD)
        dx_TD = dresidual_TD.addmm_(dh_TF, in_weight_FD)
        return dx_TD, din_weight_FD, din_bias_F, dout_weight_DF, *dnorm, *[None] * 5


class _NarrowFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        in_weight_FD: Tensor,
        in_bias_F: Tensor,
        out_weight_DF: Tensor,
        out_bias_D: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor,
        eps: float,
        *dropout: Any,
    ) -> Tensor:
        in_weight_FD, out_weight_DF = cast(in_weight_FD, x_TD.dtype), cast(out_weight_DF, x_TD.dtype)
        inputs = (x_TD, in_weight_FD, in_bias_F, out_weight_DF, out_bias_D, norm_weight_D)
        y_TD, *saved = kernels().narrow_feed_forward(*inputs, norm_bias_D, eps, *dropout)
        ctx.probability, key, ctx.call_index = dropout
        ctx.save_for_backward(*inputs, *saved, key)
        assert isinstance(y_TD, Tensor)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        *saved, key = ctx.saved_tensors
        dropout = (ctx.probability, key, ctx.call_index)
        return *kernels().narrow_feed_forward_gradients(dy_TD, *saved, *dropout), *[None] * 4


class _GatedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, in_weight: Tensor, out_weight_DF: Tensor) -> Tensor:
        in_weight, out_weight_DF = cast(in_weight, x_TD.dtype), cast(out_weight_DF, x_TD.dtype)
        h, inner_TF = kernels().matmul_geglu(x_TD, in_weight)
        ctx.save_for_backward(x_TD, in_weight, out_weight_DF, h, inner_TF)
        z_TD: Tensor = inner_TF @ out_weight_DF.T
        return z_TD

    @staticmethod
    def backward(ctx: Any, dz_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TD, in_weight, out_weight_DF, h, inner_TF = ctx.saved_tensors
        dh = kernels().matmul_geglu_backward(dz_TD, out_weight_DF, h)
        return dh @ in_weight, weight_gradient(dh, x_TD), weight_gradient(dz_TD, inner_TF)


def _residual_norm_backward(
    dropout: tuple[float, Tensor | None, int],
    dy_TD: Tensor,
    x_TD: Tensor,
    z_TD: Tensor,
    out_bias_D: Tensor,
    norm_weight_D: Tensor,
    mean_T: Tensor,
    rstd_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of z and of the residual, and partial sums for `_vector_gradients`.

    Without dropout the first two are one tensor: what is added to the second comes after all uses of the first.
    """
    norm = (z_TD, out_bias_D, x_TD, norm_weight_D, mean_T, rstd_T, True, *dropout)
    dz_TD, dresidual_TD, partial_P3D = kernels().residual_norm_backward(dy_TD, *norm)
    return dz_TD, dresidual_TD if dresidual_TD.numel() else dz_TD, partial_P3D


def _vector_gradients(partial_QX: Tensor, partial_P3D: Tensor) -> tuple[Tensor, ...]:
    """Gradients of input bias, output bias, norm weight and norm bias, from partial sums."""
    sums, width = kernels().partial_sums(partial_QX, partial_P3D.flatten(1)), partial_P3D.shape[2]
    din_bias_X, dnorm_weight_D, dnorm_bias_D, dout_bias_D = sums.split((partial_QX.shape[1], width, width, width))
    return din_bias_X, dout_bias_D, dnorm_weight_D, dnorm_bias_D
