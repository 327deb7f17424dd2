"""Networks for fine-tuning: a pre-trained encoder with a head, their inputs, and their predictions.

Each task type has a network, a `TaskModel`.

Shapes: R rows, L row length, T = R * L tokens in the flat buffer, n examples, S segments, D hidden, C outputs of the
head (classes; 1 for regression).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.data.loader import to_device
from electra_fast.finetuning.batches import PackedBatch
from electra_fast.model.attention import AttentionMask, Queries
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.layers import Embeddings, Linear, Norm
from electra_fast.model.model import Encoder, glorot_uniform_
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

# First call index of the head's dropout, above the call indices of any encoder.
_HEAD_CALL = 1 << 14


@dataclass(frozen=True)
class Inputs:
    """The arrays of a `PackedBatch` on a device; `first_n` is `first_tokens`, and `second_n` is `second_starts`."""

    columns_5RL: Tensor
    cu_seqlens: Tensor
    first_n: Tensor
    second_n: Tensor
    longest: int

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Self:
        """Copies a batch to the device, asynchronously on CUDA."""
        columns, cu_seqlens, first, second = (
            to_device(torch.from_numpy(array), device)
            for array in (batch.columns, batch.cu_seqlens, batch.first_tokens, batch.second_starts)
        )
        return cls(columns, cu_seqlens, first, second, batch.longest)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.columns_5RL, self.cu_seqlens, self.first_n, self.second_n

    def mask(self, backend: str, shape: ModelConfig) -> AttentionMask:
        """Returns the mask that restricts attention to tokens of the same example."""
        return AttentionMask.packed(self.columns_5RL[3], self.cu_seqlens, backend, shape.local_attention)

    def first_tokens(self, shape: ModelConfig) -> Queries:
        """Returns the [CLS] of each example as a query on its segment (in a local layer, on its beginning)."""
        _, _, positions_RL, segments_RL, _ = self.columns_5RL.unbind()
        row_R1 = torch.arange(len(segments_RL), device=self.first_n.device)[:, None]
        # Unique, since a row has fewer segments than tokens.
        segment_T = (row_R1 * segments_RL.shape[1] + segments_RL).flatten()
        if shape.is_local(shape.num_layers - 1):
            segment_T = segment_T.where(positions_RL.flatten() <= shape.local_attention // 2, -1)
        return Queries(self.first_n, segment_T[self.first_n][:, None] == segment_T)

    def by_example(self, values_T: Tensor, fill: float, width: int = 0) -> Tensor:
        """Arranges the values of tokens by example, padded with `fill`; [T, ...] → [n, max(longest, width), ...]."""
        n = len(self.first_n)
        longest = max(self.longest, width)
        positions_T = self.columns_5RL[2].flatten()
        owners_T = self.columns_5RL[4].flatten()
        grid = values_T.new_full((n + 1, longest, *values_T.shape[1:]), fill)  # the last row takes the padding
        return grid.index_put((owners_T, positions_T.clamp(max=longest - 1)), values_T)[:n]


class LinearHead(nn.Module):
    """Dropout and one linear layer; [n, D] → fp32 [n, C].

    On [CLS] the paper's head, on tokens the head of Electra and DebertaV2 in `transformers`.
    """

    def __init__(self, shape: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.classifier = Linear(shape.hidden_size, num_outputs)

    def forward(self, x_nD: Tensor, dropout: Dropout) -> Tensor:
        outputs: Tensor = self.classifier(ops.dropout(x_nD.float(), dropout))
        return outputs


class ElectraHead(nn.Module):
    """ElectraClassificationHead of `transformers`: dropout, dense, gelu, dropout, one layer; [n, D] → fp32 [n, C].

    For `deberta` without the first dropout, like DebertaV2ForSequenceClassification.
    """

    def __init__(self, shape: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.drops_input = shape.architecture != "deberta"
        self.dense = Linear(shape.hidden_size, shape.hidden_size)
        self.classifier = Linear(shape.hidden_size, num_outputs)

    def forward(self, x_nD: Tensor, dropout: Dropout) -> Tensor:
        x_nD = ops.dropout(x_nD.float(), dropout) if self.drops_input else x_nD.float()
        inner = ops.bias_gelu(x_nD, self.dense.weight, self.dense.bias)
        outputs: Tensor = self.classifier(ops.dropout(inner, dropout.call(1)))
        return outputs


class ModernHead(nn.Module):
    """The head of the ModernBert classes: dense, gelu, norm, dropout, one layer; [n, D] → fp32 [n, C]."""

    def __init__(self, shape: ModelConfig, num_outputs: int) -> None:
        super().__init__()
        self.dense = Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = Norm(shape.hidden_size, shape)
        self.classifier = Linear(shape.hidden_size, num_outputs)

    def forward(self, x_nD: Tensor, dropout: Dropout) -> Tensor:
        inner = self.norm(ops.bias_gelu(x_nD.float(), self.dense.weight, None))
        outputs: Tensor = self.classifier(ops.dropout(inner, dropout))
        return outputs


def make_head(head: str, shape: ModelConfig, num_outputs: int, *, on_tokens: bool) -> nn.Module:
    """Returns the module for `finetune.head`, on the hidden states of [CLS] or of all tokens."""
    if shape.architecture == "modernbert" and head == "transformers":
        return ModernHead(shape, num_outputs)
    return (ElectraHead if head == "transformers" and not on_tokens else LinearHead)(shape, num_outputs)


class EncoderWithHead(nn.Module, ABC):
    """Embeddings, encoder and a head."""

    only_first = False
    """The head reads only the hidden states of [CLS]."""

    def __init__(self, shape: ModelConfig, head: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings = Embeddings(shape, has_sparse_gradient=True)
        self.encoder = Encoder(shape)
        self.head = head

    def hidden_states(self, inputs: Inputs, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns the hidden states that the head reads: of [CLS], [n, D], or of all tokens, [T, D]."""
        ids_T, types_T, positions_T, _, _ = (column.flatten() for column in inputs.columns_5RL)
        dropout = Dropout(self.shape.dropout if self.training else 0.0, key)
        x_TE = self.embeddings(ids_T, positions_T, types_T, compute.dtype, dropout)
        queries = inputs.first_tokens(self.shape) if self.only_first else None
        mask = inputs.mask(compute.attention, self.shape)
        absolute_TD = self.absolute(positions_T)
        hidden: Tensor = self.encoder(x_TE, positions_T, mask, dropout, queries, absolute_TD)
        return hidden

    def absolute(self, position_ids_T: Tensor) -> Tensor | None:
        """Returns embeddings of absolute positions for `Encoder`, or None."""
        return None

    @abstractmethod
    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """Returns predictions per example or per token; the first dimension is n or T."""


class TaskModel(EncoderWithHead):
    """A network for fine-tuning; `head_kind` is `finetune.head` and determines the head's initialization."""

    def __init__(self, shape: ModelConfig, head: nn.Module, head_kind: str, head_dropout: float = 0.0) -> None:
        super().__init__(shape, head)
        self.head_kind = head_kind
        self.head_dropout = head_dropout

    def load_encoder(self, state: Mapping[str, Tensor]) -> None:
        """Copies tensors into embeddings and encoder, by parameter name."""
        parameters = {name: p for name, p in self.named_parameters() if not name.startswith("head.")}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])

    def initialize_head(self, seed: int) -> None:
        """Sets biases to 0 and norms to 1, and draws matrices.

        Matrices are Glorot uniform in the head `published` (the default of TensorFlow), otherwise normal with a
        standard deviation of 0.02, as in `transformers`.
        """
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.head.named_parameters():
            values = torch.empty(parameter.shape)  # drawn on the CPU for the same head on every device
            if parameter.dim() < 2:
                values.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.head_kind == "published":
                glorot_uniform_(values, random)
            else:
                values.normal_(0.0, 0.02, generator=random)
            with torch.no_grad():
                parameter.copy_(values)

    def outputs(self, inputs: Inputs, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns the head's outputs, fp32 [n, C] or [T, C]."""
        probability = self.head_dropout if self.training else 0.0
        hidden = self.hidden_states(inputs, compute, key)
        outputs: Tensor = self.head(hidden, Dropout(probability, key, _HEAD_CALL))
        return outputs

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """Returns the head's outputs, [n, C] or [T, C]."""
        return (self.outputs(inputs, compute),)

    @abstractmethod
    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns the loss of each example, fp32 [n], or of each token, [R, L]; the input is the whole batch."""


class TeachableModel(TaskModel):
    """A network that can also learn from a teacher's outputs."""

    @abstractmethod
    def taught_losses(
        self, inputs: Inputs, targets: Tensor, answers: Tensor, compute: ComputeConfig, key: Tensor | None = None
    ) -> Tensor:
        """Returns the losses, and the divergences from a teacher's `answers`: [2, n] or [2, R, L]."""
