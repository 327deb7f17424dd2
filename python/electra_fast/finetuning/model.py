"""The network that is fine-tuned: a pre-trained encoder and a head on the hidden state of [CLS].

Shapes: T tokens of the flat buffer, n examples, D hidden, C outputs of the head (classes; 1 for a value).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from electra_fast import ops
from electra_fast.attention import AttentionMask, Queries
from electra_fast.config import ModelConfig
from electra_fast.initialization import glorot_uniform_
from electra_fast.layers import Linear, Norm
from electra_fast.model import Embeddings, Encoder
from electra_fast.ops import Dropout

# Call indices of the head's dropout, past those of any encoder.
_HEAD_CALL = 1 << 14


class GoogleHead(nn.Module):
    """Dropout and one layer on [CLS], as in the paper and the published code; [n, D] → [n, C]."""

    def __init__(self, shape: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.classifier = Linear(shape.hidden_size, num_outputs)

    def forward(self, x_nD: Tensor, dropout: Dropout) -> Tensor:
        """The outputs in fp32."""
        outputs: Tensor = self.classifier(ops.dropout(x_nD.float(), dropout))
        return outputs


class ElectraHead(nn.Module):
    """As `transformers`' ElectraClassificationHead: dropout, dense, gelu, dropout, one layer; [n, D] → [n, C]."""

    def __init__(self, shape: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.dense = Linear(shape.hidden_size, shape.hidden_size)
        self.classifier = Linear(shape.hidden_size, num_outputs)

    def forward(self, x_nD: Tensor, dropout: Dropout) -> Tensor:
        """The outputs in fp32."""
        inner = ops.bias_gelu(ops.dropout(x_nD.float(), dropout), self.dense.weight, self.dense.bias)
        outputs: Tensor = self.classifier(ops.dropout(inner, dropout.call(1)))
        return outputs


class ModernHead(nn.Module):
    """As in `transformers`' ModernBertForSequenceClassification: dense, gelu, norm, dropout, one layer."""

    def __init__(self, shape: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.dense = Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = Norm(shape.hidden_size, shape)
        self.classifier = Linear(shape.hidden_size, num_outputs)

    def forward(self, x_nD: Tensor, dropout: Dropout) -> Tensor:
        """The outputs in fp32."""
        inner = self.norm(ops.bias_gelu(x_nD.float(), self.dense.weight, None))
        outputs: Tensor = self.classifier(ops.dropout(inner, dropout))
        return outputs


def head_class(head: str, architecture: str) -> type[nn.Module]:
    """The module of `finetune.head` on an architecture."""
    if head == "google":
        return GoogleHead
    return ElectraHead if architecture == "bert" else ModernHead


class SequenceClassifier(nn.Module):
    """Embeddings, encoder and a head on [CLS].

    Args:
        shape: Sizes of the encoder, and its dropout.
        head: `hf` or `google` (`finetune.head`).
        num_outputs: Of the head.
        head_dropout: Dropout probability in the head.
    """

    def __init__(self, shape: ModelConfig, head: str, num_outputs: int, head_dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.head_kind, self.head_dropout, self.num_outputs = shape, head, head_dropout, num_outputs
        self.embeddings, self.encoder = Embeddings(shape), Encoder(shape)
        self.head = head_class(head, shape.architecture)(shape, num_outputs)

    def load_encoder(self, state: Mapping[str, Tensor]) -> None:
        """Fills embeddings and encoder with tensors by their own parameters' names."""
        own = {name: p for name, p in self.named_parameters() if not name.startswith("head.")}
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])

    def initialize_head(self, seed: int) -> None:
        """Biases 0, norms 1; matrices Glorot uniform in the head `google`, as TensorFlow's default, otherwise normal.

        The normal distribution has a standard deviation of 0.02, as in `transformers`.
        """
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.head.named_parameters():
            with torch.no_grad():
                if parameter.dim() < 2:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                elif self.head_kind == "google":
                    glorot_uniform_(parameter, random)
                else:
                    parameter.normal_(0.0, 0.02, generator=random)

    def forward(
        self,
        ids_T: Tensor,
        types_T: Tensor,
        positions_T: Tensor,
        queries: Queries,
        mask: AttentionMask,
        dtype: torch.dtype,
        dropout_key: Tensor | None = None,
    ) -> Tensor:
        """The head's outputs for the examples whose [CLS] are the queries; fp32 [n, C]."""
        dropout = Dropout(self.shape.dropout if self.training else 0.0, dropout_key)
        x_TE = self.embeddings(ids_T, positions_T, types_T, dtype, dropout)
        hidden_nD = self.encoder(x_TE, positions_T, mask, dropout, queries)
        probability = self.head_dropout if self.training else 0.0
        outputs: Tensor = self.head(hidden_nD, Dropout(probability, dropout_key, _HEAD_CALL))
        return outputs
