"""Weights of classes in the loss, `finetune.class_weights`, which make up for rare ones.

Shapes: C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.config.file import comma_separated
from electra_fast.errors import InputError

# `auto` weights classes if one has fewer examples than this fraction of an even share.
RARE_SHARE = 0.1
# Largest weight that `auto` gives, that of a class at RARE_SHARE. A larger one would leave a step that has an example
# of the class little else to learn from.
MAX_WEIGHT = 1 / RARE_SHARE


def class_weights(
    text: str,
    labels: Sequence[str],
    counts: NDArray[Any],
    *,
    balanced: NDArray[Any] | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> tuple[NDArray[np.float64] | None, str]:
    """Returns a weight per class, float64 [C], or None if all are 1, and a line for the user, empty if none is asked.

    `balanced` is n / (C * count), with C the number of classes that occur, as in scikit-learn. `auto` is the same up to
    `MAX_WEIGHT` if a class is rare, else 1.

    Args:
        text: `finetune.class_weights`.
        labels: The classes.
        counts: Training examples of each class, int64 [C].
        balanced: The weights of `balanced`, if they are others.
        groups: Further names, each of several classes.

    Raises InputError naming what is not LABEL=WEIGHT, or if no example would have a weight above 0.
    """
    if text == "none":
        return None, ""
    how, occurs = text, np.flatnonzero(counts)
    share = counts.sum() / len(occurs)
    if balanced is None:
        balanced = share / np.maximum(counts, 1)
    if text == "auto":
        rarest = occurs[counts[occurs].argmin()]
        if counts[rarest] >= RARE_SHARE * share:
            return None, "class_weights = auto: none, since no class is rare"
        balanced = np.minimum(balanced, MAX_WEIGHT)
        how = (
            f"auto: balanced up to {MAX_WEIGHT:g}, since {labels[rarest]!r}, with {counts[rarest]:,} in training, is "
            f"below a tenth of an even share of {share:,.0f}"
        )
    weights = balanced if text in ("balanced", "auto") else _given(text, labels, groups or {})
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
