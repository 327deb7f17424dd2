"""The networks that are fine-tuned: a pre-trained encoder and a head, their losses and what they predict.

Shapes: T tokens of the flat buffer, n examples, D hidden, C outputs of the head (classes; 1 for a value).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.finetuning.heads import head_class
from electra_fast.finetuning.inputs import Inputs
from electra_fast.finetuning.tasks.losses import NO_TARGET, losses
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.initialization import glorot_uniform_
from electra_fast.model.model import Embeddings, Encoder
from electra_fast.ops.operations import Dropout

# Call indices of the head's dropout, past those of any encoder.
_HEAD_CALL = 1 << 14


class EncoderWithHead(nn.Module, ABC):
    """Embeddings, encoder and a head.

    Args:
        shape: Sizes of the encoder, and its dropout.
        head: The head.
    """

    only_first = False
    """Whether the head reads the hidden states of [CLS] alone."""

    def __init__(self, shape: ModelConfig, head: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.embeddings, self.encoder = Embeddings(shape, has_sparse_gradient=True), Encoder(shape)
        self.head = head

    def hidden_states(self, inputs: Inputs, compute: ComputeConfig, dropout_key: Tensor | None = None) -> Tensor:
        """What the head reads: hidden states of [CLS], [n, D], or of all tokens, [T, D]."""
        ids_T, types_T, positions_T, _, _ = (column.flatten() for column in inputs.columns_5RL)
        dropout = Dropout(self.shape.dropout if self.training else 0.0, dropout_key)
        x_TE = self.embeddings(ids_T, positions_T, types_T, compute.dtype, dropout)
        queries = inputs.first_tokens(self.shape) if self.only_first else None
        hidden: Tensor = self.encoder(x_TE, positions_T, inputs.mask(compute.attention, self.shape), dropout, queries)
        return hidden

    @abstractmethod
    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """What the model says of each example, or of each token; the first dimension is n or T."""


class TaskModel(EncoderWithHead):
    """A network that is fine-tuned.

    Args:
        shape: Sizes of the encoder, and its dropout.
        head: The head.
        head_kind: `finetune.head`, which decides the head's first values.
        head_dropout: Dropout probability in the head.
    """

    def __init__(self, shape: ModelConfig, head: nn.Module, head_kind: str, head_dropout: float = 0.0) -> None:
        super().__init__(shape, head)
        self.head_kind, self.head_dropout = head_kind, head_dropout

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
            values = torch.empty(parameter.shape)  # drawn on the CPU, so that every device starts with the same head
            if parameter.dim() < 2:
                values.fill_(0.0 if name.endswith("bias") else 1.0)
            elif self.head_kind == "google":
                glorot_uniform_(values, random)
            else:
                values.normal_(0.0, 0.02, generator=random)
            with torch.no_grad():
                parameter.copy_(values)

    def outputs(self, inputs: Inputs, compute: ComputeConfig, dropout_key: Tensor | None = None) -> Tensor:
        """The head's outputs, fp32 [n, C] or [T, C]."""
        probability = self.head_dropout if self.training else 0.0
        hidden = self.hidden_states(inputs, compute, dropout_key)
        outputs: Tensor = self.head(hidden, Dropout(probability, dropout_key, _HEAD_CALL))
        return outputs

    @abstractmethod
    def losses(
        self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, dropout_key: Tensor | None = None
    ) -> Tensor:
        """The loss of each example, or of each token, fp32 [n] or [R, L]."""


class SequenceClassifier(TaskModel):
    """Classes or a value for each example, from its [CLS]."""

    only_first = True

    def __init__(
        self, shape: ModelConfig, head: str, num_outputs: int, kind: str = "classification", head_dropout: float = 0.0
    ) -> None:
        super().__init__(shape, head_class(kind, head, shape.architecture)(shape, num_outputs), head, head_dropout)
        self.kind = kind

    def losses(
        self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, dropout_key: Tensor | None = None
    ) -> Tensor:
        """As `losses.losses`; [n]."""
        return losses(self.kind, self.outputs(inputs, compute, dropout_key), targets)

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """Logits, or values; [n, C]."""
        return (self.outputs(inputs, compute),)


class TokenClassifier(TaskModel):
    """A class for each token."""

    def __init__(self, shape: ModelConfig, head: str, num_outputs: int, head_dropout: float = 0.0) -> None:
        super().__init__(shape, head_class("tagging", head, shape.architecture)(shape, num_outputs), head, head_dropout)

    def losses(
        self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, dropout_key: Tensor | None = None
    ) -> Tensor:
        """Cross-entropy; `targets` are class ids, int64 [R, L], `NO_TARGET` where there is none; [R, L]."""
        outputs_TC = self.outputs(inputs, compute, dropout_key)
        loss_T = F.cross_entropy(outputs_TC, targets.flatten(), ignore_index=NO_TARGET, reduction="none")
        return loss_T.view_as(targets)

    def predictions(self, inputs: Inputs, compute: ComputeConfig) -> tuple[Tensor, ...]:
        """Logits, [T, C]."""
        return (self.outputs(inputs, compute),)
