"""What is fitted on validation examples once a model is trained: its temperature, and thresholds of labels.

Shapes: n examples, C labels.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TEMPERATURE = 1000.0
# Weight of the threshold of all labels beside a label's own. The best one on few examples is rarely a good one.
PRIOR_EXAMPLES = 30


def fit_temperature(logits_nC: NDArray[Any], targets: NDArray[Any]) -> float:
    """Returns the temperature T for which logits / T have the lowest negative log-likelihood.

    If the model is right about all examples, they have none, and 1 is returned.

    `targets` are class ids, int [n], or 0 and 1, float [n, C], each of which is then predicted on its own.
    """
    from scipy.optimize import minimize_scalar  # takes long, and predictions need none

    if targets.ndim == 2:  # as two classes each, the logit of the other one is 0
        logits = np.stack((np.zeros(targets.size), np.asarray(logits_nC, np.float64).ravel()), axis=1)
        targets = targets.astype(np.int64).ravel()
    else:
        logits = np.asarray(logits_nC, np.float64)
    chosen = np.take_along_axis(logits, targets[:, None], axis=1)
    if (logits < chosen).sum() == logits.size - len(logits):
        return 1.0

    def loss(log_temperature: float) -> float:
        return float(np.logaddexp.reduce((logits - chosen) / math.exp(log_temperature), axis=1).mean())

    limit = math.log(MAX_TEMPERATURE)
    return math.exp(minimize_scalar(loss, bounds=(-limit, limit), method="bounded").x)


def choose_thresholds(probabilities_nC: NDArray[Any], targets_nC: NDArray[Any]) -> NDArray[np.float64]:
    """Returns for each label the probability above which it is chosen, float64 [C].

    It maximizes the label's F1, drawn towards the threshold that maximizes F1 over all labels together: a mean of the
    two logits, in which the label's own counts as its examples and the other as `PRIOR_EXAMPLES`. In the same way, the
    threshold of all labels is drawn towards 0.5.
    """
    has_label = targets_nC > 0
    shared = _threshold(probabilities_nC.ravel(), has_label.ravel(), 0.5)
    labels = zip(probabilities_nC.T, has_label.T, strict=True)
    return np.array([_threshold(probabilities, own, shared) for probabilities, own in labels])


def _threshold(probabilities: NDArray[Any], has_label: NDArray[np.bool_], prior: float) -> float:
    """Returns the threshold with the highest F1, of several the nearest to 0.5, drawn towards `prior`."""
    num_examples, order = int(has_label.sum()), np.argsort(-probabilities)
    if not num_examples:
        return prior
    ordered = probabilities[order]
    following = np.append(ordered[1:], 0.0)
    f1 = 2 * np.cumsum(has_label[order]) / (np.arange(1, len(order) + 1) + num_examples)
    f1[ordered == following] = 0  # no threshold is between them
    best = ((ordered + following) / 2)[f1 == f1.max()]
    chosen = np.array([best[np.abs(best - 0.5).argmin()], prior]).clip(1e-6, 1 - 1e-6)
    logit = np.average(np.log(chosen / (1 - chosen)), weights=(num_examples, PRIOR_EXAMPLES))
    return float(1 / (1 + np.exp(-logit)))
