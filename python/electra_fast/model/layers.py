"""Linear layers and norms, with fp32 weights whatever the dtype of the activations, and the heads of pre-training.

Heads map hidden states to logits over the vocabulary, or to one logit per token. Those of `model.heads = "dense"` are
the published code's, those of "plain" the formulas of the paper's draft: e(x)'h for the vocabulary, w'h for a token.

Shapes: T packed tokens, M masked slots, V vocabulary, E embedding, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.ops import operations as ops
from electra_fast.ops.linear import linear
from electra_fast.ops.operations import Dropout


class Norm(nn.Module):
    """LayerNorm; without bias in the `modern` architecture."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.architecture == "bert" else None
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def after_residual(self, linear: Linear, x_TF: Tensor, residual_TD: Tensor, dropout: Dropout) -> Tensor:
        """LayerNorm(residual + dropout(linear(x)))."""
        weights = (linear.weight, linear.bias, residual_TD, self.weight, self.bias)
        return ops.residual_norm(x_TF, *weights, self.eps, dropout)


class Linear(nn.Linear):
    """A linear layer whose fp32 weights are cast to the activations' dtype where they are used."""

    def reset_parameters(self) -> None:
        """Leaves the weights to `initialize`, and the global random state alone."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class MaskedLMHead(nn.Module):
    """Hidden states → logits over the vocabulary through the embedding table; [M, D] → [M, V].

    `bert`: dense D → E, gelu, norm, table. `modern`: dense D → D, gelu, norm, projection D → E, table. Plain heads of
    both: projection D → E, table, without a bias. There is a projection only where D and E differ.
    """

    bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        is_plain, is_modern = config.heads == "plain", config.architecture == "modern"
        hidden, embedding, bias_V = config.hidden_size, config.embedding_size, torch.zeros(config.vocab_size)
        inner = hidden if is_plain or is_modern else embedding
        self.dense = None if is_plain else Linear(hidden, inner, bias=not is_modern)
        self.norm = None if is_plain else Norm(inner, config)
        self.projection = Linear(inner, embedding, bias=False) if inner != embedding else None
        if is_plain:  # what the operations of the other head add
            self.register_buffer("bias", bias_V, persistent=False)
        else:
            self.bias = nn.Parameter(bias_V)
        self.num_entries = config.vocab_size

    @property
    def output_bias(self) -> Tensor:
        """The bias of the logits, which keeps rows after the tokenizer's last entry from being predicted.

        It is finite in 16 bits.
        """
        num_padding = len(self.bias) - self.num_entries
        if not num_padding:
            return self.bias
        return torch.cat([self.bias[: self.num_entries], self.bias.new_full((num_padding,), -3e4)])

    def transform(self, x_MD: Tensor) -> Tensor:
        """The layers before the table; [M, D] → [M, E]."""
        if self.dense is not None and self.norm is not None:
            x_MD = self.norm(ops.bias_gelu(x_MD, self.dense.weight, self.dense.bias))
        return x_MD if self.projection is None else self.projection(x_MD)

    def forward(self, x_MD: Tensor, table_VE: Tensor) -> Tensor:
        return linear(self.transform(x_MD), table_VE, self.output_bias)


class DiscriminatorHead(nn.Module):
    """Hidden states → one logit per token, positive = "replaced"; [T, D] → fp32 [T].

    `bert`: dense, gelu, dense(1). `modern`: dense, gelu, norm, dense(1).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        modern = config.architecture == "modern"
        self.dense = Linear(config.hidden_size, config.hidden_size, bias=not modern)
        self.norm = Norm(config.hidden_size, config) if modern else None
        self.classifier = Linear(config.hidden_size, 1)

    def forward(self, x_TD: Tensor) -> Tensor:
        dense, classifier = self.dense, self.classifier
        if self.norm is None:
            return ops.replaced_logits(x_TD, dense.weight, dense.bias, classifier.weight, classifier.bias)
        x_TD = self.norm(ops.bias_gelu(x_TD, dense.weight, dense.bias))
        return ops.token_logits(x_TD, classifier.weight, classifier.bias)


class LogitHead(nn.Module):
    """One logit per hidden state, w'h; [T, D] → fp32 [T].

    Without a bias in `bert`, whose hidden states come from a norm that has one.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.classifier = Linear(config.hidden_size, 1, bias=config.architecture == "modern")

    def forward(self, x_TD: Tensor) -> Tensor:
        return ops.token_logits(x_TD, self.classifier.weight, self.classifier.bias)


# By `networks.Head.kind`, with dense and with plain heads.
_DENSE: dict[str, type[nn.Module]] = {
    "masked_lm": MaskedLMHead,
    "replaced_token": DiscriminatorHead,
    "logit": LogitHead,
}
HEADS = {"dense": _DENSE, "plain": _DENSE | {"replaced_token": LogitHead}}
