"""The data model of fine-tuning: a task, its splits, and what the readers `glue` and `own_data` return."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["classification", "multi-label", "regression"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is predicted, and how it is scored."""

    name: str
    """A GLUE task such as `sst2`; `classification` or `regression` for a user's own data."""
    kind: Kind
    labels: tuple[str, ...] = ()
    """Names by class id; empty for regression."""
    metric: str
    """The score that is reported, a key of `metrics.scores()`."""
    shift: float = 0.0
    """Regression: the model is trained on (value - shift) / scale."""
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Split:
    """The examples of one file, or of a part of it."""

    name: str
    """`train`, `dev`, `dev-mismatched`, `test`, ..."""
    path: Path
    texts: list[tuple[str, ...]]
    """One or two strings per example."""
    targets: NDArray[Any] | None
    """int64 [n] class ids; float32 [n, labels] of 0 and 1 (multi-label); float64 [n] raw values (regression).
    None if the file has no labels."""
    ids: list[str]
    """What a prediction file calls each example: the file's own index column if it has one, else the 0-based number."""


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task with its splits."""

    task: Task
    train: Split
    dev: tuple[Split, ...]
    """The first one's score counts."""
    test: tuple[Split, ...]
    notes: tuple[str, ...]
    """Lines that the user should see: what was left out, what was set aside."""


def select(split: Split, name: str, rows: Sequence[int] | NDArray[np.intp]) -> Split:
    """A new split of the examples at the positions `rows`."""
    return dataclasses.replace(
        split,
        name=name,
        texts=[split.texts[row] for row in rows],
        targets=None if split.targets is None else split.targets[rows],
        ids=[split.ids[row] for row in rows],
    )
