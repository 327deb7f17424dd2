"""A model's outputs as a person or a program reads them: labels with probabilities, or values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Answer = dict[str, Any]


def answers(kind: str, labels: Sequence[str], outputs: NDArray[Any]) -> Iterator[Answer]:
    """One JSON-able object per row of `outputs`, float [n, C].

    `classification`: `label` and the softmax probabilities as `scores` by label. `multi-label`: the `labels` of a
    probability above one half, and all as `scores`. `regression`: `value`.
    """
    rows = outputs.astype(np.float64)
    if kind == "regression":
        yield from ({"value": _rounded(row[0])} for row in rows)
    elif kind == "classification":
        exponentials = np.exp(rows - rows.max(axis=1, keepdims=True))
        for row in exponentials / exponentials.sum(axis=1, keepdims=True):
            yield {"label": labels[int(row.argmax())], "scores": _scores(labels, row)}
    else:
        for row in 1 / (1 + np.exp(-np.clip(rows, -700, 700))):
            chosen = [label for label, score in zip(labels, row, strict=True) if score > 0.5]
            yield {"labels": chosen, "scores": _scores(labels, row)}


def _scores(labels: Sequence[str], row: NDArray[Any]) -> dict[str, float]:
    return {label: _rounded(score) for label, score in zip(labels, row, strict=True)}


def _rounded(value: float) -> float:
    """Six significant digits: what fp32 gives on any device."""
    return float(f"{value:.6g}")
