"""The parts of encoders: embeddings, norms and layers.

Shapes: T packed tokens, V vocabulary, E embedding, D hidden, N heads, H head dimension, S rows of the table of relative
positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.model.attention import AttentionMask, Queries, attention, query_attention, self_attention
from electra_fast.model.disentangled import RelativePositions, disentangled_attention, disentangled_query_attention
from electra_fast.ops import operations as ops
from electra_fast.ops.fused import SublayerWeights
from electra_fast.ops.operations import Dropout, linear

# Offsets of the call index for the dropout of attention weights and of a layer's relative positions.
ATTENTION_CALL = 1 << 14
_POSITIONS_CALL = 1 << 13


class Norm(nn.Module):
    """LayerNorm, without a bias in the `modernbert` architecture."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if config.architecture == "modernbert" else nn.Parameter(torch.zeros(width))
        self.eps = config.eps

    def forward(self, x: Tensor, operation: Callable[..., Any] = ops.layer_norm) -> Any:
        """Computes LayerNorm(x), or an operation on x that ends with the norm and takes weight, bias and eps.

        The operation is called here because FSDP gathers parameters when their module is called.
        """
        return operation(x, self.weight, self.bias, self.eps)

    def after_residual(self, linear: Linear, x_TF: Tensor, residual_TD: Tensor, dropout: Dropout) -> Tensor:
        """Computes LayerNorm(residual + dropout(linear(x)))."""
        weights = (linear.weight, linear.bias, residual_TD, self.weight, self.bias)
        return ops.residual_norm(x_TF, *weights, self.eps, dropout)


class Linear(nn.Linear):
    """A linear layer whose fp32 weights are cast to the activations' dtype at each use."""

    def reset_parameters(self) -> None:
        """Does nothing: `initialize` sets the weights, and the global random state does not change."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Embeddings(nn.Module):
    """Token (and, in `bert`, position and type) embeddings, [T] → [T, E].

    With `has_sparse_gradient`, the token table's gradient may be a sparse tensor on a CPU if there are few tokens: a
    fine-tuning step reads a few hundred rows of a table of tens of megabytes, and only these get a gradient.

    With a `base`, which is not a submodule, `token` is added to the base's token table, and only `token` gets a
    gradient (gradient-disentangled embedding sharing, GDES, in DeBERTaV3, arXiv 2111.09543).
    """

    def __init__(
        self, config: ModelConfig, *, has_sparse_gradient: bool = False, base: Embeddings | None = None
    ) -> None:
        super().__init__()
        self.has_sparse_gradient = has_sparse_gradient
        self._base = (base,)
        width = config.embedding_size
        self.architecture = config.architecture
        self.token = nn.Parameter(torch.empty(config.vocab_size, width))
        if self.architecture == "bert":
            self.position = nn.Parameter(torch.empty(config.max_positions, width))
            self.token_type = nn.Parameter(torch.empty(2, width))
            self.norm = Norm(width, config)

    @property
    def table(self) -> Tensor:
        """The token table, which output layers share; [V, E]."""
        (base,) = self._base
        return self.token if base is None else base.token.detach() + self.token

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        token_type_ids_T: Tensor,
        dtype: torch.dtype,
        dropout: Dropout,
    ) -> Tensor:
        sparse = self.has_sparse_gradient and 4 * len(input_ids_T) < len(self.token)
        if self.architecture != "bert":
            return ops.gather_rows(self.table, input_ids_T, sparse=sparse).to(dtype)
        ids = (input_ids_T, position_ids_T, token_type_ids_T)
        tables = (self.table, self.position, self.token_type)
        norm = self.norm
        assert norm.bias is not None
        return ops.embedding_norm(ids, tables, norm.weight, norm.bias, norm.eps, dtype, dropout, sparse=sparse)


class BertLayer(nn.Module):
    """Post-norm layer: norm(x + attention(x)), norm(x + feed-forward(x)); [T, D] → [T, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention_out = Linear(hidden, hidden)
        self.attention_norm = Norm(hidden, config)
        self.feed_forward_in = Linear(hidden, config.intermediate_size)
        self.feed_forward_out = Linear(config.intermediate_size, hidden)
        self.feed_forward_norm = Norm(hidden, config)

    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
        slots: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        attention_dropout = _attention_dropout(self, dropout)
        norm = self.attention_norm
        if slots is not None:
            arguments = (self.qkv.weight, self.qkv.bias, mask, self.num_heads, attention_dropout)
            mixed_MD, x_TD = (ops.slot_states(x, *slots) for x in (self_attention(x_TD, *arguments), x_TD))
            x_TD = norm.after_residual(self.attention_out, mixed_MD, x_TD, dropout)
        elif queries is None:
            weights = _sublayer_weights(self.qkv, self.attention_out, norm)
            x_TD = attention(x_TD, weights, norm.eps, mask, self.num_heads, attention_dropout, dropout)
        else:
            q, k, v = _queries_keys_values(self.qkv, x_TD, queries.index_n, self.num_heads)
            mixed_TD = query_attention(q, k, v, queries, attention_dropout.probability)
            x_TD = ops.gather_rows(x_TD, queries.index_n)
            x_TD = norm.after_residual(self.attention_out, mixed_TD, x_TD, dropout)
        return self.feed_forward(x_TD, dropout)

    def feed_forward(self, x_TD: Tensor, dropout: Dropout) -> Tensor:
        """Applies the second sublayer; `dropout` is the layer's first dropout."""
        weights = _sublayer_weights(self.feed_forward_in, self.feed_forward_out, self.feed_forward_norm)
        return ops.feed_forward(x_TD, weights, self.feed_forward_norm.eps, dropout.call(1))


class DebertaLayer(BertLayer):
    """`BertLayer` with disentangled attention.

    `query_states_TD`, if given, replaces x as queries and residual (the enhanced mask decoder of DeBERTa).
    """

    def forward(  # type: ignore[override]  # relative positions in place of rotary angles
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        relative: RelativePositions,
        dropout: Dropout,
        queries: Queries | None = None,
        query_states_TD: Tensor | None = None,
    ) -> Tensor:
        attention_dropout = _attention_dropout(self, dropout)
        width = x_TD.shape[1]
        assert self.qkv.bias is not None
        # The key is the same in all micro-batches of a step.
        key = None if dropout.key is None else torch.cat((dropout.key[:2], dropout.key[:1] * 0))
        table_SD = ops.dropout(relative.table_SD, replace(dropout.call(_POSITIONS_CALL), key=key))
        positions_SX = linear(table_SD, self.qkv.weight[: 2 * width], self.qkv.bias[: 2 * width])
        if queries is not None:
            q, k, v = _queries_keys_values(self.qkv, x_TD, queries.index_n, self.num_heads)
            mixed_TD = disentangled_query_attention(q, k, v, positions_SX, relative, queries, attention_dropout)
            x_TD = ops.gather_rows(x_TD, queries.index_n)
        else:
            if query_states_TD is None:
                qkv_TX = self.qkv(x_TD)
                query_states_TD = x_TD
            else:
                q_TD = linear(query_states_TD, self.qkv.weight[:width], self.qkv.bias[:width])
                kv_TX = linear(x_TD, self.qkv.weight[width:], self.qkv.bias[width:])
                qkv_TX = torch.cat((q_TD, kv_TX), dim=1)
            mixed_TD = disentangled_attention(qkv_TX, positions_SX, relative, mask, self.num_heads, attention_dropout)
            x_TD = query_states_TD
        x_TD = self.attention_norm.after_residual(self.attention_out, mixed_TD, x_TD, dropout)
        return self.feed_forward(x_TD, dropout)


class Convolution(nn.Module):
    """norm(residual + activation(convolution(x))) within segments, at the first layer of DeBERTaV2's larger models.

    [T, D] → [T, D].
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.size = config.conv_kernel_size
        self.weight = nn.Parameter(torch.empty(hidden, hidden, self.size))
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.norm = Norm(hidden, config)
        self.is_tanh = config.conv_activation == "tanh"

    def forward(self, x_TD: Tensor, residual_TD: Tensor, position_ids_T: Tensor, dropout: Dropout) -> Tensor:
        num_tokens, width = x_TD.shape
        half = self.size // 2
        x_SD = nn.functional.pad(x_TD, (0, 0, half, half))
        position_S = nn.functional.pad(position_ids_T, (half, half), value=-1)
        parts = []
        for start in range(self.size):
            tokens = slice(start, start + num_tokens)
            # Positions in one segment differ by the tokens' distance in the buffer; padding has position 0.
            is_near_T = position_S[tokens] - position_ids_T == start - half
            parts.append(x_SD[tokens] * is_near_T[:, None])
        out_TD = linear(torch.cat(parts, dim=1), self.weight.transpose(1, 2).reshape(width, -1), self.bias)
        out_TD = ops.dropout(out_TD, dropout)
        normed: Tensor = self.norm(residual_TD + (out_TD.tanh() if self.is_tanh else nn.functional.gelu(out_TD)))
        return normed


def _attention_dropout(layer: BertLayer | ModernLayer, dropout: Dropout) -> Dropout:
    """Returns the dropout for a layer's attention weights from the layer's first dropout."""
    probability = layer.attention_dropout if layer.training else 0.0
    return replace(dropout.call(ATTENTION_CALL), probability=probability)


def _sublayer_weights(into: Linear, out: Linear, norm: Norm) -> SublayerWeights:
    assert norm.bias is not None
    return SublayerWeights(into.weight, into.bias, out.weight, out.bias, norm.weight, norm.bias)


class ModernLayer(nn.Module):
    """Pre-norm layer with rotary positions and GeGLU, without biases; hidden states and their norm → both, [T, D] each.

    Each sublayer ends with the next sublayer's norm (`ops.add_norm`), so the layer's input is already normed, and
    `next_norm` is the next layer's attention norm or the output norm. As in ModernBERT, the first layer has no
    attention norm, because the embeddings are already normed.
    """

    def __init__(self, config: ModelConfig, is_first: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.attention_dropout = config.attention_dropout
        self.attention_norm = None if is_first else Norm(hidden, config)
        self.qkv = Linear(hidden, 3 * hidden, bias=False)
        self.attention_out = Linear(hidden, hidden, bias=False)
        self.feed_forward_norm = Norm(hidden, config)
        self.geglu_in = Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.feed_forward_out = Linear(config.intermediate_size, hidden, bias=False)

    def forward(
        self,
        x_TD: Tensor,
        normed_TD: Tensor,
        next_norm: nn.Module,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor],
        dropout: Dropout,
        queries: Queries | None = None,
        slots: tuple[Tensor, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        attention_dropout = _attention_dropout(self, dropout)
        if queries is None:
            mixed_TD = self_attention(normed_TD, self.qkv.weight, None, mask, self.num_heads, attention_dropout, rotary)
        else:
            q, k, v = _queries_keys_values(self.qkv, normed_TD, queries.index_n, self.num_heads)
            q = ops.rotate(q, *(angles[queries.index_n] for angles in rotary))
            mixed_TD = query_attention(q, ops.rotate(k, *rotary), v, queries, attention_dropout.probability)
            x_TD = ops.gather_rows(x_TD, queries.index_n)
        if slots is not None:
            mixed_TD, x_TD = (ops.slot_states(x, *slots) for x in (mixed_TD, x_TD))
        norm = self.feed_forward_norm
        attention_end = (self.attention_out.weight, x_TD, norm.weight, norm.bias, norm.eps, dropout)
        x_TD, normed_TD = ops.add_norm(mixed_TD, *attention_end)

        def feed_forward(
            normed_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float
        ) -> tuple[Tensor, Tensor]:
            weights = (self.geglu_in.weight, self.feed_forward_out.weight)
            dropout_1 = dropout.call(1)
            return ops.gated_feed_forward(normed_TD, *weights, x_TD, weight_D, bias_D, eps, dropout_1)

        x_TD, normed_TD = next_norm(normed_TD, feed_forward)
        return x_TD, normed_TD


def _queries_keys_values(qkv: Linear, x_TD: Tensor, index_n: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries of some tokens, and keys and values of all; [T, D], [n] → [n, N, H], [T, N, H] twice."""
    width = x_TD.shape[1]
    bias_q, bias_kv = (None, None) if qkv.bias is None else (qkv.bias[:width], qkv.bias[width:])
    q_nD = linear(ops.gather_rows(x_TD, index_n), qkv.weight[:width], bias_q)
    k, v = linear(x_TD, qkv.weight[width:], bias_kv).view(x_TD.shape[0], 2, num_heads, -1).unbind(1)
    return q_nD.view(len(index_n), num_heads, -1), k, v
