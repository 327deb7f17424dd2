"""The published encoder with rotary positions, a baseline of `recipes.py` that the package does not have.

It replaces classes rather than operations, so that a model loaded before, such as a corruptor, does not change.

Shapes: T packed tokens, E embedding, D hidden, N heads.
"""

import torch
from torch import Tensor

from electra_fast.model import model
from electra_fast.model.attention import AttentionMask, Queries, attend, query_attention
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout


class _RotaryBertLayer(model.BertLayer):
    def forward(
        self,
        x_TD: Tensor,
        mask: AttentionMask,
        rotary: tuple[Tensor, Tensor] | None,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        assert rotary is not None
        q, k, v = self.qkv(x_TD).view(x_TD.shape[0], 3, self.num_heads, -1).unbind(1)
        q = ops.rotate(q, *rotary)
        k = ops.rotate(k, *rotary)
        dropped = self.attention_dropout * self.training
        if queries is None:
            mixed = attend(q, k, v, mask, dropped)
        else:
            mixed = query_attention(q[queries.index_n], k, v, queries, dropped)
            x_TD = x_TD[queries.index_n]
        x_TD = self.attention_norm.after_residual(self.attention_out, mixed.flatten(1), x_TD, dropout)
        inner = ops.bias_gelu(x_TD, self.feed_forward_in.weight, self.feed_forward_in.bias)
        normed: Tensor = self.feed_forward_norm.after_residual(self.feed_forward_out, inner, x_TD, dropout.call(1))
        return normed


class _RotaryEncoder(model.Encoder):
    """An `Encoder` whose layers have the angles of rotary positions in `bert` too."""

    def forward(
        self,
        x_TE: Tensor,
        position_ids_T: Tensor,
        mask: AttentionMask,
        dropout: Dropout,
        queries: Queries | None = None,
    ) -> Tensor:
        x_TD = x_TE if self.projection is None else self.projection(x_TE)
        rotary = ops.rotary_angles(position_ids_T, self.head_dim, self.rope_theta, torch.float32)
        for i, layer in enumerate(self.layers):
            only = queries if i == len(self.layers) - 1 else None
            x_TD = layer(x_TD, mask, rotary, dropout.call(1 + 2 * i), only)
        return x_TD


class _OnePositionEmbeddings(model.Embeddings):
    """Embeddings that put all tokens at position 0, so that its row is a bias."""

    def forward(
        self,
        input_ids_T: Tensor,
        position_ids_T: Tensor,
        token_type_ids_T: Tensor,
        dtype: torch.dtype,
        dropout: Dropout,
    ) -> Tensor:
        x_TE: Tensor = super().forward(input_ids_T, torch.zeros_like(position_ids_T), token_type_ids_T, dtype, dropout)
        return x_TE


def use_rotary_positions() -> None:
    """Replaces learned positions in the published encoder by rotary ones in all models created afterwards."""
    model.BertLayer = _RotaryBertLayer
    model.Encoder = _RotaryEncoder
    model.Embeddings = _OnePositionEmbeddings
