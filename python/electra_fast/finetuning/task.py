"""The data model of fine-tuning: a task and its splits, as the readers return them."""

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
"""A model's answer for an example, as JSON has it."""
Answers = Sequence[Prediction]
Scores = Mapping[str, Any]
"""Scores by name; for labels also the table of their thresholds."""
Settings = Mapping[str, Any]
"""What prediction needs besides the weights, or a user's choices, by name."""


class Answer(NamedTuple):
    """An annotated answer to a question."""

    text: str
    start: int
    """Its first character in the context, counted in Unicode code points."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task: what is predicted, and how it is scored."""

    name: str
    """A task such as `sst2` or `squad2`; for a user's own data, the task type."""
    kind: str
    """The task type, a key of `tasks.TASK_TYPES`."""
    labels: tuple[str, ...] = ()
    """Names by class id; of tagging, the tags; empty for regression and question answering."""
    metric: str
    """The score that is reported, a key of what `TaskType.scores` returns."""
    shift: float = 0.0
    """Regression: the model is trained on (value - shift) / scale."""
    scale: float = 1.0
    scheme: str = "none"
    """Tagging: `IOB2` where tags delimit entities (in any scheme in the file), `none` where each is a label."""
    has_unanswerable: bool = False
    """Question answering: a question may have no answer in its context."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The examples of one file, or of a part of it."""

    name: str
    """`train`, `dev`, `dev-mismatched`, `test`, ..."""
    path: Path
    texts: list[tuple[str, ...]]
    """One or two strings per example; in question answering the question and the context."""
    targets: NDArray[Any] | None
    """int64 [n] class ids; float32 [n, labels] of 0 and 1 (multi-label); float64 [n] raw values (regression);
    object [n] of int64 [words] tag ids (tagging) or of tuples of `Answer`, empty where there is none (question
    answering). None if the file has no labels; a test example that has none is `NO_CLASS` or NaN."""
    ids: list[str]
    """The name of each example in prediction files: from the file's own index column, else its number from 0."""
    words: list[NDArray[np.int64]] | None = None
    """Tagging: the words of each text as [words, 2] first and past-the-last characters."""
    columns: list[dict[str, Any]] | None = None
    """Own data: the other columns of each example's row, as read; None where they are not kept."""

    @property
    def gold(self) -> NDArray[Any]:
        """The targets of a split that has labels."""
        assert self.targets is not None
        return self.targets


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """A task with its splits."""

    task: Task
    train: Split
    dev: tuple[Split, ...]
    """The first one's score is reported."""
    test: tuple[Split, ...]
    notes: tuple[str, ...]
    """Lines for the user: examples left out or set aside."""
    text_columns: tuple[tuple[str, ...], ...] = ()
    """Own data: the text columns if known, those of the training file first."""
    label_columns: tuple[tuple[str, ...], ...] = ()
    """Own data: the label columns likewise."""


def check_dev_fraction(fraction: float) -> None:
    if not 0 < fraction < 1:
        raise InputError(f"dev_fraction is {fraction}; it must be above 0 and below 1")


def num_trained_on(train: Split, split: Split) -> int:
    known = set(train.texts)
    return sum(texts in known for texts in split.texts)


def overlap_warning(train: Split, dev: Split) -> str | None:
    """Returns a line for the user if every validation example has a text of the training split, else None."""
    if num_trained_on(train, dev) < len(dev.texts):
        return None
    return (
        f"{dev.path}: all {len(dev.texts):,} dev examples have a text that is in the training split, so a score says "
        "nothing about other texts; give others with --dev"
    )


def rounded(value: float) -> float:
    """Returns six significant digits: the precision of fp32 on any device."""
    return float(f"{value:.6g}")


def select(split: Split, name: str, rows: Sequence[int] | NDArray[np.intp]) -> Split:
    """Returns a new split of the examples at the positions `rows`."""
    return dataclasses.replace(
        split,
        name=name,
        texts=[split.texts[row] for row in rows],
        targets=None if split.targets is None else split.targets[rows],
        ids=[split.ids[row] for row in rows],
        words=None if split.words is None else [split.words[row] for row in rows],
        columns=None if split.columns is None else [split.columns[row] for row in rows],
    )
