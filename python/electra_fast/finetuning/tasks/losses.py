"""Losses of the kinds of tasks, per example, and the weights with which a batch adds them up.

Shapes: n examples, C outputs of the head.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from electra_fast.config.file import comma_separated
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuneConfig
from electra_fast.finetuning.task import Task

NO_TARGET = -100
"""The class id of a token that has no loss."""


def losses(kind: str, outputs_nC: Tensor, targets: Tensor) -> Tensor:
    """The loss of each example, fp32 [n].

    `classification`: cross-entropy with class ids, int64 [n]. `multi-label`: binary cross-entropy with 0 and 1,
    float [n, C], averaged over the labels. `regression`: the squared difference from values, float [n].
    """
    if kind == "classification":
        return F.cross_entropy(outputs_nC, targets, reduction="none")
    if kind == "multi-label":
        return F.binary_cross_entropy_with_logits(outputs_nC, targets.float(), reduction="none").mean(1)
    return (outputs_nC.squeeze(1) - targets.float()).square()


def example_weights(task: Task, targets: NDArray[Any], config: FinetuneConfig) -> NDArray[Any]:
    """Each example's weight in the loss by `finetune.class_weights`, float64 [n]."""
    if config.class_weights == "none":
        return np.ones(len(targets))
    if task.kind != "classification":
        raise InputError(f"finetune.class_weights = {config.class_weights!r} needs classes; {task.name} has none")
    if config.class_weights == "balanced":
        counts = np.bincount(targets, minlength=len(task.labels))
        weights = len(targets) / (len(task.labels) * np.maximum(counts, 1))
    else:
        weights = _given_weights(task, config.class_weights)
    if not weights[targets].any():
        raise InputError(f"finetune.class_weights = {config.class_weights!r}: no training example has a weight above 0")
    return np.asarray(weights[targets])


def _given_weights(task: Task, text: str) -> NDArray[Any]:
    weights = dict.fromkeys(task.labels, 1.0)
    for part in comma_separated(text):
        label, _, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if label not in weights or not 0 <= number < float("inf"):
            raise InputError(
                f"finetune.class_weights = {text!r}: {part!r} must be LABEL=WEIGHT, a label of "
                f"{', '.join(task.labels)} and a number of at least 0 (or give none or balanced)"
            )
        weights[label] = number
    return np.array(list(weights.values()))
