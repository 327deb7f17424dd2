"""Networks of classification, regression and tagging: one or more layers on [CLS] or on all tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.config.config import ModelConfig
from electra_fast.finetuning.model import Inputs, TeachableModel, make_head
from electra_fast.finetuning.tasks.classes import NO_TARGET
from electra_fast.model.compute import ComputeConfig

Losses = Callable[[Tensor, Tensor], Tensor]
"""Computes the loss of each example, fp32 [n], from the outputs [n, C] and the targets."""


def softmax_divergence(outputs_nC: Tensor, answers_nC: Tensor, temperature: float) -> Tensor:
    """Returns T^2 KL(teacher || student) of the class probabilities at temperature T; fp32 [n].

    The factor T^2 keeps the size of gradients about the same at every temperature (Hinton et al., 2015).
    """
    student, teacher = ((outputs / temperature).log_softmax(1) for outputs in (outputs_nC, answers_nC))
    return temperature**2 * F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)


def sigmoid_divergence(outputs_nC: Tensor, answers_nC: Tensor, temperature: float) -> Tensor:
    """Returns `softmax_divergence` of each label and its absence, averaged over the labels; fp32 [n]."""
    student, teacher = (
        torch.stack((outputs, torch.zeros_like(outputs)), -1).flatten(0, 1) for outputs in (outputs_nC, answers_nC)
    )
    return softmax_divergence(student, teacher, temperature).view_as(outputs_nC).mean(1)


class SequenceClassifier(TeachableModel):
    """A network that outputs classes or a value for each example from its [CLS]."""

    only_first = True

    def __init__(
        self,
        shape: ModelConfig,
        head: str,
        num_outputs: int,
        losses: Losses,
        divergences: Losses,
        head_dropout: float = 0.0,
    ) -> None:
        super().__init__(shape, make_head(head, shape, num_outputs, on_tokens=False), head, head_dropout)
        self._losses = losses
        self._divergences = divergences

    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        return self._losses(self.outputs(inputs, compute, key), targets)

    def taught_losses(
        self, inputs: Inputs, targets: Tensor, answers: Tensor, compute: ComputeConfig, key: Tensor | None = None
    ) -> Tensor:
        outputs_nC = self.outputs(inputs, compute, key)
        return torch.stack((self._losses(outputs_nC, targets), self._divergences(outputs_nC, answers)))


class TokenClassifier(TeachableModel):
    """A network that outputs a class for each token."""

    def __init__(
        self, shape: ModelConfig, head: str, num_outputs: int, divergences: Losses, head_dropout: float = 0.0
    ) -> None:
        super().__init__(shape, make_head(head, shape, num_outputs, on_tokens=True), head, head_dropout)
        self._divergences = divergences

    def losses(self, inputs: Inputs, targets: Tensor, compute: ComputeConfig, key: Tensor | None = None) -> Tensor:
        """Returns cross-entropies [R, L]; `targets` are class ids, int64 [R, L], or `NO_TARGET`."""
        return _token_losses(self.outputs(inputs, compute, key), targets)

    def taught_losses(
        self, inputs: Inputs, targets: Tensor, answers: Tensor, compute: ComputeConfig, key: Tensor | None = None
    ) -> Tensor:
        """Returns cross-entropies and divergences, [2, R, L]; `answers` are [R, L, C]."""
        outputs_TC = self.outputs(inputs, compute, key)
        divergence_T = self._divergences(outputs_TC, answers.flatten(0, 1))
        return torch.stack((_token_losses(outputs_TC, targets), divergence_T.view_as(targets)))


def _token_losses(outputs_TC: Tensor, targets_RL: Tensor) -> Tensor:
    loss_T = F.cross_entropy(outputs_TC, targets_RL.flatten(), ignore_index=NO_TARGET, reduction="none")
    return loss_T.view_as(targets_RL)
