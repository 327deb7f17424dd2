"""What tasks with classes share: weights of classes in the loss, temperatures, thresholds of labels.

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

# `auto` weights classes if one has fewer examples than this fraction of an even share.
RARE_SHARE = 0.1
# Largest weight that `auto` gives, that of a class at RARE_SHARE. A larger one would leave a step that has an example
# of the class little else to learn from.
MAX_WEIGHT = 1 / RARE_SHARE
MAX_TEMPERATURE = 1000.0
NO_TARGET = -100
"""The class id of a token without a loss."""
# Weight of the threshold of all labels beside a label's own. The best one on few examples is rarely a good one.
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
    """Returns a weight per class, float64 [C], or None if all are 1, and a line for the user, empty if none is asked.

    `text` is `finetune.class_weights`, of which `auto` is `balanced` up to `MAX_WEIGHT` if a class is rare, else 1.
    `balanced` are by default the weights of scikit-learn. `groups` are further names, each of several classes.

    Raises InputError naming what is not LABEL=WEIGHT, or if no example would have a weight above 0.
    """
    if text == "none":
        return None, ""
    counts = np.bincount(targets, minlength=len(labels))
    how = text
    occurs = np.flatnonzero(counts)
    share = counts.sum() / len(occurs)
    if text not in ("balanced", "auto"):
        weights = _given(text, labels, groups or {})
    elif balanced is not None:
        weights = balanced
    else:
        from sklearn.utils.class_weight import compute_class_weight  # takes long, and predictions need none

        weights = np.full(len(labels), share)
        weights[occurs] = compute_class_weight("balanced", classes=occurs, y=targets)
    if text == "auto":
        rarest = occurs[counts[occurs].argmin()]
        if counts[rarest] >= RARE_SHARE * share:
            return None, "class_weights = auto: none, since no class is rare"
        weights = np.minimum(weights, MAX_WEIGHT)
        how = (
            f"auto: balanced up to {MAX_WEIGHT:g}, since {labels[rarest]!r}, with {counts[rarest]:,} in training, is "
            f"below a tenth of an even share of {share:,.0f}"
        )
    if not weights[occurs].any():
        raise InputError(f"finetune.class_weights = {text!r}: no training example has a weight above 0")
    ends = (occurs[weights[occurs].argmin()], occurs[weights[occurs].argmax()])
    between = " to ".join(f"{weights[number]:.3g} ({labels[number]!r})" for number in ends)
    is_even = (weights[occurs] == 1).all()
    return None if is_even else weights, f"class_weights = {how}; weights from {between}"


def _given(text: str, labels: Sequence[str], groups: Mapping[str, Sequence[int]]) -> NDArray[np.float64]:
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
                f"finetune.class_weights = {text!r}: {part!r} must be LABEL=WEIGHT, a label of {names} and a number "
                "of at least 0 (or give none, auto or balanced)"
            )
        weights[list(classes.get(label) or groups[label])] = number
    return weights


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
    num_examples = int(has_label.sum())
    order = np.argsort(-probabilities)
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
