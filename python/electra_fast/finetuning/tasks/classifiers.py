"""Networks of classification, regression and tagging: a linear layer or more on [CLS] or on all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from electra_fast.config.config import ModelConfig
from electra_fast.finetuning.model import Inputs, TaskModel, make_head
from electra_fast.finetuning.tasks.classes import NO_TARGET
from electra_fast.model.compute import ComputeConfig

Losses = Callable[[Tensor, Tensor], Tensor]
"""From the outputs [n, C] and the targets to the loss of each example, fp32 [n]."""


class SequenceClassifier(TaskModel):
    """Classes or a value for each example, from its [CLS]."""

    only_first = True

    def __init__(
        self, shape: ModelConfig, head: str, num_outputs: int, losses: Losses, head_dropout: float = 0.0
    ) -> None:
        super().__init__(shape, make_head(head, shape, num_outputs, on_tokens=False), head, head_dropout)
        self._losses = losses

    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        return self._losses(self.outputs(inputs, compute, key), targets)


class TokenClassifier(TaskModel):
    """A class for each token."""

    def __init__(self, shape: ModelConfig, head: str, num_outputs: int, head_dropout: float = 0.0) -> None:
        super().__init__(shape, make_head(head, shape, num_outputs, on_tokens=True), head, head_dropout)

    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns cross-entropies; `targets` are class ids, int64 [R, L], `NO_TARGET` where there is none; [R, L]."""
        outputs_TC = self.outputs(inputs, compute, key)
        loss_T = F.cross_entropy(outputs_TC, targets.flatten(), ignore_index=NO_TARGET, reduction="none")
        return loss_T.view_as(targets)
