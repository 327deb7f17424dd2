"""The pre-training heads, which map hidden states to logits.

Shapes: T packed tokens, M masked slots, V vocabulary, E embedding, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.model.layers import Linear, Norm
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import linear


class MaskedLMHead(nn.Module):
    """Hidden states → logits over the vocabulary through the embedding table; [M, D] → [M, V].

    `bert` and `deberta`: dense D → E, gelu, norm, table. `modernbert`: dense D → D, gelu, norm, projection D → E,
    table. Plain heads: projection D → E, table, without a bias. There is a projection only if D and E differ.
    """

    bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        is_plain = config.heads == "plain"
        is_modern = config.architecture == "modernbert"
        hidden = config.hidden_size
        embedding = config.embedding_size
        bias_V = torch.zeros(config.vocab_size)
        inner = hidden if is_plain or is_modern else embedding
        self.dense = None if is_plain else Linear(hidden, inner, bias=not is_modern)
        self.norm = None if is_plain else Norm(inner, config)
        self.projection = Linear(inner, embedding, bias=False) if inner != embedding else None
        if is_plain:  # zeros, for operations that add a bias
            self.register_buffer("bias", bias_V, persistent=False)
        else:
            self.bias = nn.Parameter(bias_V)
        self.num_entries = config.vocab_size

    @property
    def output_bias(self) -> Tensor:
        """The bias of the logits; -3e4, finite in fp16, prevents predictions of rows after the last entry."""
        num_padding = len(self.bias) - self.num_entries
        if not num_padding:
            return self.bias
        return torch.cat([self.bias[: self.num_entries], self.bias.new_full((num_padding,), -3e4)])

    def transform(self, x_MD: Tensor) -> Tensor:
        """Applies the layers before the table; [M, D] → [M, E]."""
        if self.dense is not None and self.norm is not None:
            x_MD = self.norm(ops.bias_gelu(x_MD, self.dense.weight, self.dense.bias))
        return x_MD if self.projection is None else self.projection(x_MD)

    def forward(self, x_MD: Tensor, table_VE: Tensor) -> Tensor:
        return linear(self.transform(x_MD), table_VE, self.output_bias)

    def absolute(self, position_ids_T: Tensor) -> Tensor | None:
        """Returns the absolute position embeddings that an enhanced mask decoder adds, [T, D], or None without one."""
        return None


class EnhancedMaskedLMHead(MaskedLMHead):
    """The generator's head for `deberta`, with the positions of the enhanced mask decoder."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.position = nn.Parameter(torch.empty(config.max_positions, config.hidden_size))

    def absolute(self, position_ids_T: Tensor) -> Tensor:
        """See the base class."""
        return ops.gather_rows(self.position, position_ids_T)


class DiscriminatorHead(nn.Module):
    """Hidden states and positions → one logit per token, positive = "replaced"; [T, D], [T] → fp32 [T].

    `bert`: dense, gelu, dense(1). `modernbert`: dense, gelu, norm, dense(1). `deberta`: sum with the hidden state of
    the segment's [CLS], norm, dense, gelu, dense(1).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.architecture = config.architecture
        modern = config.architecture == "modernbert"
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=not modern)
        self.norm = None if config.architecture == "bert" else Norm(config.hidden_size, config)
        self.classifier = Linear(config.hidden_size, 1)

    def forward(self, x_TD: Tensor, position_ids_T: Tensor) -> Tensor:
        dense = self.dense
        classifier = self.classifier
        if self.norm is not None and self.architecture == "deberta":
            first_T = torch.arange(len(x_TD), device=x_TD.device) - position_ids_T
            # In fp32, because its gradient is a sum over all tokens of a segment.
            precision = torch.promote_types(x_TD.dtype, torch.float32)
            x_TD = self.norm(x_TD + ops.gather_rows(x_TD.to(precision), first_T).to(x_TD.dtype))
        norm = (self.norm.weight, self.norm.eps) if self.norm is not None and self.architecture == "modernbert" else ()
        return ops.replaced_logits(x_TD, dense.weight, dense.bias, classifier.weight, classifier.bias, *norm)


class LogitHead(nn.Module):
    """One logit per hidden state, w'h; [T, D] → fp32 [T].

    It has no bias in `bert` and `deberta`, because the preceding norm has one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.classifier = Linear(config.hidden_size, 1, bias=config.architecture == "modernbert")

    def forward(self, x_TD: Tensor, position_ids_T: Tensor | None = None) -> Tensor:
        return ops.token_logits(x_TD, self.classifier.weight, self.classifier.bias)


# By `networks.Head.kind`. Dense heads follow the published code, plain heads the formulas of the paper's draft: e(x)'h
# for the vocabulary, w'h for a token.
_DENSE: dict[str, type[nn.Module]] = {
    "masked_lm": MaskedLMHead,
    "replaced_token": DiscriminatorHead,
    "logit": LogitHead,
}
HEADS = {"dense": _DENSE, "plain": _DENSE | {"replaced_token": LogitHead}}


def make_head(role: str, kind: str, shape: ModelConfig) -> nn.Module:
    is_decoder = (role, kind, shape.architecture) == ("generator", "masked_lm", "deberta")
    return EnhancedMaskedLMHead(shape) if is_decoder else HEADS[shape.heads][kind](shape)
