# mypy: no-warn-return-any
# (The kernels' launchers have no types.)
"""Operations that combine several kernels in one autograd node, with explicit backward passes.

This saves work across operations: the last product adds the gradients of x as input and as residual, the derivative of
the GELU is applied as its gradient is computed, and no weight gradient is cast. `operations` has their contracts.

Shapes: T packed tokens, D hidden, F feed-forward, N heads, H head dimension; X = 3D; I inputs and O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.ops.branches import Branch

# Current casts by weight; empty outside of `WeightCasts.current`.
casts: dict[Tensor, Tensor] = {}


def kernels() -> Any:
    """Returns the launchers, imported at first use, because machines without a GPU need not have Triton."""
    from electra_fast.kernels import launchers

    return launchers


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a weight in the activations' dtype, detached."""
    copy = None if torch.compiler.is_compiling() else casts.get(weight)
    return weight.detach().to(dtype) if copy is None or copy.dtype != dtype else copy


def weight_gradient(dy_TO: Tensor, x_TI: Tensor) -> Tensor:
    """dy.T @ x, summed and returned in fp32 for factors of any dtype; → [O, I]."""
    if dy_TO.is_cuda and dy_TO.dtype != torch.float32:
        return torch.mm(dy_TO.T, x_TI, out_dtype=torch.float32)
    return dy_TO.T.float() @ x_TI.float()


class MixedLinear(torch.autograd.Function):
    """A linear layer with fp32 weights and 16-bit activations, whose weight gradient is not rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = cast(weight, x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dy_TO = dy.flatten(0, -2)
        x_TI = x.flatten(0, -2)
        dweight = Branch(weight_gradient, dy_TO, x_TI) if needs_weight else None
        dx = dy @ weight if needs_x else None
        dbias = dy_TO.sum(0, dtype=torch.float32) if needs_bias else None
        return dx, dweight.result() if dweight is not None else None, dbias


class RotaryQKV(torch.autograd.Function):
    """A linear layer with an in-place rotation of its product and one buffer for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, num_heads: int
    ) -> tuple[Tensor, ...]:
        weight = cast(weight, x_TD.dtype)
        ctx.save_for_backward(x_TD, weight, cos_T1H, sin_T1H)
        qkv_TX = x_TD @ weight.T
        kernels().rotate_qkv_(qkv_TX, cos_T1H, sin_T1H, num_heads)
        return qkv_TX.view(x_TD.shape[0], 3, num_heads, -1).unbind(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight, cos_T1H, sin_T1H = ctx.saved_tensors
        dqkv_TX = kernels().rotary_backward(*gradients, cos_T1H, sin_T1H)
        dweight = Branch(weight_gradient, dqkv_TX, x_TD)
        return dqkv_TX @ weight, dweight.result(), None, None, None


class SublayerWeights(NamedTuple):
    """The fp32 parameters of a sublayer: its first and last linear layers, and the norm at its end.

    Shapes: [X, D], [X], [D, D] in attention, [F, D], [F], [D, F] in the feed-forward; then [D] three times.
    """

    in_weight: Tensor
    in_bias: Tensor
    out_weight: Tensor
    out_bias: Tensor
    norm_weight: Tensor
    norm_bias: Tensor


class Attention(torch.autograd.Function):
    """`model.attention.attention`."""

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
        in_weight_XD = cast(in_weight_XD, x_TD.dtype)
        out_weight_DD = cast(out_weight_DD, x_TD.dtype)
        qkv_TX = x_TD @ in_weight_XD.T
        ctx.heads = (num_heads, window, attention_probability)
        mixed_TD, lse_NT = kernels().short_attention(
            qkv_TX, in_bias_X, ids_BL, None, None, *ctx.heads, attention_key, attention_call_index
        )
        z_TD = mixed_TD @ out_weight_DD.T
        norm = (out_bias_D, x_TD, norm_weight_D, norm_bias_D, eps, *dropout)
        y_TD, mean_T, rstd_T, _ = kernels().residual_norm(z_TD, *norm)
        ctx.attention_call_index = attention_call_index
        ctx.probability, key, ctx.call_index = dropout
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
        dout_weight = Branch(weight_gradient, dz_TD, mixed_TD)
        dmixed_TD = dz_TD @ out_weight_DD
        arguments = (qkv_TX, in_bias_X, ids_BL, None, None, mixed_TD, lse_NT)
        attention_dropout = (attention_key, ctx.attention_call_index)
        dqkv_TX, partial_BX = kernels().short_attention_backward(dmixed_TD, *arguments, *ctx.heads, *attention_dropout)
        din_bias_X, *dnorm = _vector_gradients(partial_BX, partial_P3D)
        din_weight = Branch(weight_gradient, dqkv_TX, x_TD)
        dout_weight_DD = dout_weight.result()  # before its input is overwritten
        dx_TD = dresidual_TD.addmm_(dqkv_TX, in_weight_XD)
        return dx_TD, din_weight.result(), din_bias_X, dout_weight_DD, *dnorm, *[None] * 10


class FeedForward(torch.autograd.Function):
    """`operations.feed_forward` with two or three kernels."""

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
        kernel: str,
        *dropout: Any,
    ) -> Tensor:
        in_weight_FD = cast(in_weight_FD, x_TD.dtype)
        out_weight_DF = cast(out_weight_DF, x_TD.dtype)
        ctx.kernel = kernel
        if kernel != "apart":
            h_TF, inner_TF = kernels().matmul_gelu(x_TD, in_weight_FD, in_bias_F, kernel == "pipelined")
        else:
            h_TF = x_TD @ in_weight_FD.T
            inner_TF = kernels().bias_gelu(h_TF, in_bias_F)
        z_TD = inner_TF @ out_weight_DF.T
        norm = (out_bias_D, x_TD, norm_weight_D, norm_bias_D, eps, *dropout)
        y_TD, mean_T, rstd_T, _ = kernels().residual_norm(z_TD, *norm)
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
        dout_weight = Branch(weight_gradient, dz_TD, inner_TF)
        if ctx.kernel != "apart":
            dh_TF, partial_PF = kernels().matmul_gelu_backward(dz_TD, out_weight_DF, h_TF, ctx.kernel == "pipelined")
        else:
            dh_TF, partial_PF = kernels().bias_gelu_backward(dz_TD @ out_weight_DF, h_TF, in_bias_F)
        din_bias_F, *dnorm = _vector_gradients(partial_PF, partial_P3D)
        din_weight = Branch(weight_gradient, dh_TF, x_TD)
        dout_weight_DF = dout_weight.result()  # before its input is overwritten
        dx_TD = dresidual_TD.addmm_(dh_TF, in_weight_FD)
        return dx_TD, din_weight.result(), din_bias_F, dout_weight_DF, *dnorm, *[None] * 5


class NarrowFeedForward(torch.autograd.Function):
    """`operations.feed_forward` with one kernel."""

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
        in_weight_FD = cast(in_weight_FD, x_TD.dtype)
        out_weight_DF = cast(out_weight_DF, x_TD.dtype)
        inputs = (x_TD, in_weight_FD, in_bias_F, out_weight_DF, out_bias_D, norm_weight_D)
        y_TD, *saved = kernels().narrow_feed_forward(*inputs[:5], None, norm_weight_D, norm_bias_D, eps, *dropout)
        ctx.probability, key, ctx.call_index = dropout
        ctx.save_for_backward(*inputs, *saved, key)
        assert isinstance(y_TD, Tensor)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, in_weight_FD, in_bias_F, out_weight_DF, out_bias_D, norm_weight_D, *saved, key = ctx.saved_tensors
        z_TD, mean_T, rstd_T = saved
        norm = (x_TD, z_TD, out_bias_D, norm_weight_D, mean_T, rstd_T)
        dz_TD, dresidual_TD, partial_P3D = _residual_norm_backward((ctx.probability, key, ctx.call_index), dy_TD, *norm)
        inner = (x_TD, in_weight_FD, in_bias_F, out_weight_DF)
        dx_TD, partial_PN = kernels().narrow_feed_forward_backward(dz_TD, dresidual_TD, *inner)
        sums, *dnorm = _vector_gradients(partial_PN, partial_P3D)
        num_weights = in_weight_FD.numel()
        din_weight, dout_weight, din_bias_F = sums.split((num_weights, num_weights, in_weight_FD.shape[0]))
        dweights = din_weight.view_as(in_weight_FD), din_bias_F, dout_weight.view_as(out_weight_DF)
        return dx_TD, *dweights, *dnorm, *[None] * 4


class AddNorm(torch.autograd.Function):
    """`operations.add_norm`."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TF: Tensor,
        weight_DF: Tensor,
        residual_TD: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor | None,
        eps: float,
        *dropout: Any,
    ) -> tuple[Tensor, Tensor]:
        weight_DF = cast(weight_DF, x_TF.dtype)
        sum_TD, normed_TD, *saved = _add_norm(
            ctx, x_TF @ weight_DF.T, residual_TD, norm_weight_D, norm_bias_D, eps, *dropout
        )
        ctx.save_for_backward(x_TF, weight_DF, *saved)
        return sum_TD, normed_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TF, weight_DF, *saved = ctx.saved_tensors
        dz_TD, dresidual_TD, partial_PSD = _add_norm_backward(ctx, *gradients, *saved)
        dweight = Branch(weight_gradient, dz_TD, x_TF)
        dnorm = _norm_gradients(partial_PSD)[1:]
        return dz_TD @ weight_DF, dweight.result(), dresidual_TD, *dnorm, *[None] * 4


class GatedFeedForward(torch.autograd.Function):
    """`operations.gated_feed_forward` with two or three kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        in_weight: Tensor,
        out_weight_DF: Tensor,
        residual_TD: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor | None,
        eps: float,
        kernel: str,
        *dropout: Any,
    ) -> tuple[Tensor, Tensor]:
        in_weight = cast(in_weight, x_TD.dtype)
        out_weight_DF = cast(out_weight_DF, x_TD.dtype)
        ctx.kernel = kernel
        if kernel != "apart":
            h, inner_TF = kernels().matmul_geglu(x_TD, in_weight, kernel == "pipelined")
        else:
            h = x_TD @ in_weight.T
            inner_TF = kernels().geglu(h)
        norm = (residual_TD, norm_weight_D, norm_bias_D, eps, *dropout)
        sum_TD, normed_TD, *saved = _add_norm(ctx, inner_TF @ out_weight_DF.T, *norm)
        ctx.save_for_backward(x_TD, in_weight, out_weight_DF, h, inner_TF, *saved)
        return sum_TD, normed_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, in_weight, out_weight_DF, h, inner_TF, *saved = ctx.saved_tensors
        dz_TD, dresidual_TD, partial_PSD = _add_norm_backward(ctx, *gradients, *saved)
        dout_weight = Branch(weight_gradient, dz_TD, inner_TF)
        dnorm = _norm_gradients(partial_PSD)[1:]
        if ctx.kernel != "apart":
            dh = kernels().matmul_geglu_backward(dz_TD, out_weight_DF, h, ctx.kernel == "pipelined")
        else:
            dh = kernels().geglu_backward(dz_TD @ out_weight_DF, h)
        din_weight = Branch(weight_gradient, dh, x_TD)
        return dh @ in_weight, din_weight.result(), dout_weight.result(), dresidual_TD, *dnorm, *[None] * 5


class NarrowGatedFeedForward(torch.autograd.Function):
    """`operations.gated_feed_forward` with one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        in_weight: Tensor,
        out_weight_DF: Tensor,
        residual_TD: Tensor,
        norm_weight_D: Tensor,
        norm_bias_D: Tensor | None,
        eps: float,
        *dropout: Any,
    ) -> tuple[Tensor, Tensor]:
        in_weight = cast(in_weight, x_TD.dtype)
        out_weight_DF = cast(out_weight_DF, x_TD.dtype)
        norm = (residual_TD, norm_weight_D, norm_bias_D, eps, *dropout)
        normed_TD, sum_TD, *statistics = kernels().narrow_feed_forward(
            x_TD, in_weight, None, out_weight_DF, None, *norm
        )
        saved = _saved_for_backward(ctx, sum_TD, norm_weight_D, norm_bias_D, *statistics, *dropout)
        ctx.save_for_backward(x_TD, in_weight, out_weight_DF, *saved)
        return sum_TD, normed_TD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, in_weight, out_weight_DF, *saved = ctx.saved_tensors
        dz_TD, dresidual_TD, partial_PSD = _add_norm_backward(ctx, *gradients, *saved)
        inner = (x_TD, in_weight, None, out_weight_DF)
        dx_TD, partial_PN = kernels().narrow_feed_forward_backward(dz_TD, None, *inner)
        sums, *dnorm = _norm_gradients(partial_PSD, partial_PN)
        din_weight, dout_weight = sums.split((in_weight.numel(), out_weight_DF.numel()))
        dweights = din_weight.view_as(in_weight), dout_weight.view_as(out_weight_DF)
        return dx_TD, *dweights, dresidual_TD, *dnorm, *[None] * 4


def _add_norm(
    ctx: Any,
    z_TD: Tensor,
    residual_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor | None,
    eps: float,
    *dropout: Any,
) -> tuple[Tensor, ...]:
    """Returns residual + dropout(z) and its norm, then the tensors for `_add_norm_backward`, with the sum first."""
    norm = (None, residual_TD, norm_weight_D, norm_bias_D, eps, *dropout)
    normed_TD, mean_T, rstd_T, sum_TD = kernels().residual_norm(z_TD, *norm, True)
    return sum_TD, normed_TD, *_saved_for_backward(ctx, sum_TD, norm_weight_D, norm_bias_D, mean_T, rstd_T, *dropout)


def _saved_for_backward(
    ctx: Any,
    sum_TD: Tensor,
    norm_weight_D: Tensor,
    norm_bias_D: Tensor | None,
    mean_T: Tensor,
    rstd_T: Tensor,
    *dropout: Any,
) -> tuple[Tensor, ...]:
    """Returns the tensors for `_add_norm_backward`, with the sum first."""
    ctx.probability, key, ctx.call_index = dropout
    ctx.has_norm_bias = norm_bias_D is not None
    ctx.set_materialize_grads(False)  # only the norm reads the sum of the last layer
    return sum_TD, norm_weight_D, mean_T, rstd_T, key


def _add_norm_backward(
    ctx: Any,
    dsum_TD: Tensor | None,
    dnormed_TD: Tensor,
    sum_TD: Tensor,
    norm_weight_D: Tensor,
    mean_T: Tensor,
    rstd_T: Tensor,
    key: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of z and the residual (one tensor without dropout), and partial sums for `_norm_gradients`."""
    norm = (None, None, norm_weight_D, mean_T, rstd_T, ctx.has_norm_bias, ctx.probability, key, ctx.call_index)
    dz_TD, dresidual_TD, partial_PSD = kernels().residual_norm_backward(dnormed_TD, sum_TD, *norm, True, dsum_TD)
    return dz_TD, dresidual_TD if dresidual_TD.numel() else dz_TD, partial_PSD


def _norm_gradients(partial_PSD: Tensor, partial_QX: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the sums of `partial_QX`, if given, and the gradients of the norm's weight and bias."""
    partial_QX = partial_PSD.new_empty(0, 0) if partial_QX is None else partial_QX
    sums = kernels().partial_sums(partial_QX, partial_PSD.flatten(1))
    dweight_D, *dbias_D = sums[partial_QX.shape[1] :].view(partial_PSD.shape[1:])
    return sums[: partial_QX.shape[1]], dweight_D, dbias_D[0] if dbias_D else None


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
    """Returns gradients of z and of the residual, and partial sums for `_vector_gradients`.

    Without dropout, the first two are one tensor; callers add to the second after all uses of the first.
    """
    norm = (z_TD, out_bias_D, x_TD, norm_weight_D, mean_T, rstd_T, True, *dropout)
    dz_TD, dresidual_TD, partial_P3D = kernels().residual_norm_backward(dy_TD, *norm)
    return dz_TD, dresidual_TD if dresidual_TD.numel() else dz_TD, partial_P3D


def _vector_gradients(partial_QX: Tensor, partial_P3D: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradients of input bias, output bias, norm weight and norm bias from partial sums."""
    sums = kernels().partial_sums(partial_QX, partial_P3D.flatten(1))
    width = partial_P3D.shape[2]
    din_bias_X, dnorm_weight_D, dnorm_bias_D, dout_bias_D = sums.split((partial_QX.shape[1], width, width, width))
    return din_bias_X, dout_bias_D, dnorm_weight_D, dnorm_bias_D
