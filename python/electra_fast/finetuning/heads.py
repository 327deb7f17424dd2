"""The heads of fine-tuning: from hidden states, of [CLS] or of all tokens, to a task's outputs.

Shapes: n hidden states (of [CLS], one per example, or of the tokens of the flat buffer), D hidden, C outputs.
"""

from __future__ import annotations

from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.model.layers import Linear, Norm
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout


class LinearHead(nn.Module):
    """Dropout and one layer; [n, D] → [n, C].

    On [CLS] the head of the paper and the published code, on tokens that of `transformers`' Electra classes.
    """

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
    """As in `transformers`' ModernBert classes: dense, gelu, norm, dropout, one layer; [n, D] → [n, C]."""

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


def head_class(kind: str, head: str, architecture: str) -> type[nn.Module]:
    """The module of `finetune.head` for a kind of task, but for the joint head of question answering."""
    if architecture == "modern" and head == "hf":
        return ModernHead
    on_tokens = kind in ("tagging", "question-answering")
    return ElectraHead if head == "hf" and not on_tokens else LinearHead
