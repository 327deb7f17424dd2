"""The data model of fine-tuning: a task and its splits. The readers return them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError

NO_CLASS = -1
"""The class id of a test example without a label."""
Prediction = dict[str, Any]
"""A model's answer for an example, as JSON."""
Answers = Sequence[Prediction]
Scores = Mapping[str, Any]
"""Scores by name; for multi-label tasks also the table of thresholds."""
Settings = Mapping[str, Any]
"""Settings for prediction by name, stored with the weights or chosen by the user."""


class Answer(NamedTuple):
    """An annotated answer to a question."""

    text: str
    start: int
    """Position of the first character in the context, in Unicode code points."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: its type, labels and metric."""

    name: str
    """A benchmark task such as `sst2` or `squad2`; for the user's data, the task type."""
    kind: str
    """The task type, a key of `tasks.TASK_TYPES`."""
    labels: tuple[str, ...] = ()
    """Names by class id; for tagging, the tags; empty for regression and question answering."""
    metric: str
    """The main score, a key of the result of `TaskType.scores`."""
    shift: float = 0.0
    """Regression: the model is trained on (value - shift) / scale."""
    scale: float = 1.0
    scheme: str = "none"
    """Tagging: `IOB2` if tags delimit entities (in any scheme in the file), `none` if each tag is a label."""
    has_unanswerable: bool = False
    """Question answering: some questions have no answer in their context."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The examples of one file, or of a part of it."""

    name: str
    """`train`, `dev`, `dev-mismatched`, `test`, ..."""
    path: Path
    texts: list[tuple[str, ...]]
    """One or two strings per example; for question answering, the question and the context."""
    targets: NDArray[Any] | None
    """int64 [n] class ids; float32 [n, labels] of 0 and 1 (multi-label); float64 [n] raw values (regression);
    object [n] of int64 [words] tag ids (tagging) or of tuples of `Answer`, empty without an answer (question
    answering). None if the file has no labels; `NO_CLASS` or NaN for a test example without a label."""
    ids: list[str]
    """Name of each example in prediction files: from the file's index column, otherwise its number from 0."""
    words: list[NDArray[np.int64]] | None = None
    """Tagging: start and end (exclusive) character of each word in its text, [words, 2]."""
    columns: list[dict[str, Any]] | None = None
    """The user's data: the other columns of each example's row, as read; None if they are not kept."""

    @property
    def gold(self) -> NDArray[Any]:
        """The targets of a split with labels."""
        assert self.targets is not None
        return self.targets


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task with its splits."""

    task: Task
    train: Split
    dev: tuple[Split, ...]
    """The score of the first split is reported."""
    test: tuple[Split, ...]
    notes: tuple[str, ...]
    """Lines for the user, such as numbers of dropped examples."""
    text_columns: tuple[tuple[str, ...], ...] = ()
    """The user's data: the text columns if known, the columns of the training file first."""
    label_columns: tuple[tuple[str, ...], ...] = ()
    """The user's data: the label columns if known, the columns of the training file first."""


def check_dev_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise InputError(f"dev_fraction = {fraction}: must be above 0 and below 1")


def num_trained_on(train: Split, split: Split) -> int:
    known = set(train.texts)
    return sum(texts in known for texts in split.texts)


def overlap_warning(train: Split, dev: Split) -> str | None:
    """Returns a warning if the texts of all validation examples are in the training split, else None."""
    if num_trained_on(train, dev) < len(dev.texts):
        return None
    return (
        f"{dev.path}: the texts of all {len(dev.texts):,} validation examples are in the training split, so the scores "
        "say nothing about new texts; pass other examples with --dev"
    )


def rounded(value: float) -> float:
    """Rounds to six significant digits, which fp32 has on any device."""
    return float(f"{value:.6g}")


def select(split: Split, name: str, rows: Sequence[int] | NDArray[np.intp]) -> Split:
    """Returns a new split of the examples with the indices `rows`."""
    return dataclasses.replace(
        split,
        name=name,
        texts=[split.texts[row] for row in rows],
        targets=None if split.targets is None else split.targets[rows],
        ids=[split.ids[row] for row in rows],
        words=None if split.words is None else [split.words[row] for row in rows],
        columns=None if split.columns is None else [split.columns[row] for row in rows],
    )
