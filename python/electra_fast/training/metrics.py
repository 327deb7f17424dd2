"""The discriminator's AUC, and warnings about what the metrics of a log window mean."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from electra_fast.objectives.objective import Number

MIN_STEPS = 100
"""Before so many steps, and over fewer, no warning makes sense."""


def area_under_curve(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve of the discriminator's logits; None where only one class occurs."""
    from sklearn.metrics import roc_auc_score  # imported here: a second that only evaluation needs

    if labels.all() or not labels.any():
        return None
    return float(roc_auc_score(labels, logits))


def warning(metrics: Mapping[str, Number]) -> str | None:
    """A warning about a log window in one line, or None. Its thresholds make sense after the warmup only."""
    replaced, recall = metrics["replaced_fraction"], metrics["discriminator_recall"]
    loss = metrics["discriminator_loss"]
    if replaced is None or recall is None or loss is None:
        return None
    if replaced < 0.01:
        return (
            f"the generator is nearly always right: only {replaced:.1%} of the tokens are replaced, which teaches the "
            "discriminator little; use a smaller generator.fraction or a higher objective.temperature"
        )
    if replaced == 1:
        return None
    majority = -(replaced * math.log(replaced) + (1 - replaced) * math.log1p(-replaced))
    if loss > 1.02 * majority:
        return (
            f"the discriminator has collapsed: loss {loss:.4f} is worse than always answering the class shares "
            f"({majority:.4f}); lower optimizer.learning_rate, or make the generator weaker (generator.fraction)"
        )
    if recall == 0:
        return f"the discriminator calls every token original (loss {loss:.4f}, class shares alone {majority:.4f})"
    return None


class LastingWarning:
    """Tells a warning that lasts from one that passes: at most one in `pause` steps.

    It has to hold in two log windows in a row, and over `MIN_STEPS` steps.
    """

    def __init__(self, pause: int) -> None:
        self._pause, self._next = pause, 0
        self._windows, self._steps = 0, 0

    def take(self, metrics: Mapping[str, Number], num_steps: int, first_step: int) -> str | None:
        """The warning to give after a log window of so many steps, or None; windows before the first step are none."""
        step = int(metrics["step"] or 0)
        message = warning(metrics) if step - num_steps >= first_step else None
        self._windows, self._steps = (self._windows + 1, self._steps + num_steps) if message else (0, 0)
        if self._windows < 2 or self._steps < MIN_STEPS or step < self._next:
            return None
        self._next = step + self._pause
        return message
