"""Class weights of the loss, temperatures and label thresholds of tasks with classes.

Shapes: n examples, C classes or labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.config.section import comma_separated
from electra_fast.errors import InputError

# `auto` weights classes if one has fewer examples than this fraction of the average class.
RARE_FRACTION = 0.1
# Largest weight with `auto`, reached at RARE_FRACTION. With a larger weight, a single example of the class would
# dominate its step.
MAX_WEIGHT = 1 / RARE_FRACTION
MAX_TEMPERATURE = 1000.0
NO_TARGET = -100
"""The class id of a token without a loss."""
# Weight, in examples, of the threshold shared by all labels. The best threshold on few examples is rarely a good one.
PRIOR_EXAMPLES = 30


def softmax(rows_nC: NDArray[Any]) -> NDArray[Any]:
    exponentials = np.exp(rows_nC - rows_nC.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(1 / (1 + np.exp(-np.clip(logits, -700, 700))))


def class_weights(
    text: str,
    labels: Sequence[str],
    targets: NDArray[Any],
    *,
    balanced: NDArray[Any] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> tuple[NDArray[np.float64] | None, str]:
    """Returns a weight per class, float64 [C], or None if all are 1, and a note for the user, empty for `none`.

    `text` is `finetune.class_weights`; `auto` means `balanced`, capped at `MAX_WEIGHT`, if a class is rare, else no
    weights. `balanced` are scikit-learn's weights by default. `groups` are additional names for several classes each.

    Raises InputError naming a part that is not LABEL=WEIGHT, or if no example has a weight above 0.
    """
    if text == "none":
        return None, ""
    counts = np.bincount(targets, minlength=len(labels))
    description = text
    occurs = np.flatnonzero(counts)
    average = counts.sum() / len(occurs)
    if text not in ("balanced", "auto"):
        weights = _parsed(text, labels, groups or {})
    elif balanced is not None:
        weights = balanced
    else:
        from sklearn.utils.class_weight import compute_class_weight  # slow to import and not needed for predictions

        weights = np.full(len(labels), average)
        weights[occurs] = compute_class_weight("balanced", classes=occurs, y=targets)
    if text == "auto":
        rarest = occurs[counts[occurs].argmin()]
        if counts[rarest] >= RARE_FRACTION * average:
            return None, "class_weights = auto: none, since no class is rare"
        weights = np.minimum(weights, MAX_WEIGHT)
        description = (
            f"auto: balanced, capped at {MAX_WEIGHT:g}, since {labels[rarest]!r} has {counts[rarest]:,} training "
            f"examples, under a tenth of the average {average:,.0f}"
        )
    if not weights[occurs].any():
        raise InputError(f"finetune.class_weights = {text!r}: no training example has a weight above 0")
    ends = (occurs[weights[occurs].argmin()], occurs[weights[occurs].argmax()])
    extremes = " to ".join(f"{weights[number]:.3g} ({labels[number]!r})" for number in ends)
    is_even = (weights[occurs] == 1).all()
    return None if is_even else weights, f"class_weights = {description}; weights from {extremes}"


def _parsed(text: str, labels: Sequence[str], groups: Mapping[str, Sequence[int]]) -> NDArray[np.float64]:
    classes = {label: [number] for number, label in enumerate(labels)}
    weights = np.ones(len(labels))
    for part in comma_separated(text):
        label, _, value = part.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not (label in classes or label in groups) or not 0 <= number < float("inf"):
            names = ", ".join((*labels, *groups))
            raise InputError(
                f"finetune.class_weights = {text!r}: {part!r} must be LABEL=WEIGHT with one of {names} and a number "
                "of at least 0; or pass none, auto or balanced"
            )
        weights[list(classes.get(label) or groups[label])] = number
    return weights


def fit_temperature(logits_nC: NDArray[Any], targets: NDArray[Any]) -> float:
    """Returns the temperature T that minimizes the negative log-likelihood of logits / T.

    Returns 1 if the model is right about all examples, since the likelihood then has no maximum.

    `targets` are class ids, int [n], or independent labels 0 and 1, float [n, C].
    """
    from scipy.optimize import minimize_scalar  # slow to import and not needed for predictions

    if targets.ndim == 2:  # each label as two classes; its absence has the logit 0
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
    """Returns for each label the probability above which it is predicted, float64 [C].

    The threshold maximizes the label's F1, but is pulled towards the threshold that maximizes F1 over all labels
    together: a weighted mean of both logits, with the label's number of examples and `PRIOR_EXAMPLES` as weights. In
    the same way, the threshold of all labels is pulled towards 0.5.
    """
    has_label = targets_nC > 0
    shared = _threshold(probabilities_nC.ravel(), has_label.ravel(), 0.5)
    labels = zip(probabilities_nC.T, has_label.T, strict=True)
    return np.array([_threshold(probabilities, has_one, shared) for probabilities, has_one in labels])


def _threshold(probabilities: NDArray[Any], has_label: NDArray[np.bool_], prior: float) -> float:
    """Returns the threshold with the highest F1 (at a tie the nearest to 0.5), pulled towards `prior`."""
    num_examples = int(has_label.sum())
    order = np.argsort(-probabilities)
    if not num_examples:
        return prior
    ordered = probabilities[order]
    following = np.append(ordered[1:], 0.0)
    f1 = 2 * np.cumsum(has_label[order]) / (np.arange(1, len(order) + 1) + num_examples)
    f1[ordered == following] = 0  # no threshold separates equal probabilities
    best = ((ordered + following) / 2)[f1 == f1.max()]
    chosen = np.array([best[np.abs(best - 0.5).argmin()], prior]).clip(1e-6, 1 - 1e-6)
    logit = np.average(np.log(chosen / (1 - chosen)), weights=(num_examples, PRIOR_EXAMPLES))
    return float(1 / (1 + np.exp(-logit)))
