"""The training examples of a task with what each counts in the loss, and the batches that a step takes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.finetuning.batches import EncodedExamples, PackedBatch


@dataclass(frozen=True)
class TrainingBatch:
    """The examples of a step, or of one process' part of it: their tokens, targets, and weights in the loss."""

    packed: PackedBatch
    targets: NDArray[Any]
    weights: NDArray[Any]


@dataclass(frozen=True)
class StepBatch:
    """A step's examples in one part per process, and the seed that with the step's number decides the dropout masks."""

    parts: list[TrainingBatch]
    seed: int


@dataclass(frozen=True)
class TrainingSet:
    """Tokenized training examples with their targets, and what each counts in the loss.

    Args:
        encoded: The examples.
        targets: Of each example, [n, ...], or of each token of `encoded.ids`.
        weights: Likewise, float64 of one dimension; 0 where there is no target.
        per_token: Whether they are the tokens'.
    """

    encoded: EncodedExamples
    targets: NDArray[Any]
    weights: NDArray[Any]
    per_token: bool = False

    def batch(self, parts: Sequence[PackedBatch], chosen: NDArray[Any], reduction: str, seed: int) -> StepBatch:
        """The examples `chosen`, packed in `parts`; `reduction` is `finetune.loss_reduction`."""
        places = [part.sources if self.per_token else _chosen(chosen, part.examples) for part in parts]
        weights = [self.weights[place] * (place >= 0) for place in places]
        total = sum(each.sum() for each in weights)
        scale = total if reduction == "mean" and total > 0 else 1.0
        return StepBatch(
            [
                TrainingBatch(part, self.targets[place], (each / scale).astype(np.float32))
                for part, place, each in zip(parts, places, weights, strict=True)
            ],
            seed,
        )


def _chosen(chosen: NDArray[Any], examples: NDArray[Any]) -> NDArray[Any]:
    """The training examples of a part; -1 where there is none."""
    return np.where(examples >= 0, chosen[examples], -1)
