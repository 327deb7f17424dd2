"""Reads the files of a task in one pass each: `read_examples` for every kind of task, with a `Parser` for each kind.

Without a validation file, a fraction of the training examples becomes the validation set. The functions that choose
them return rows of the training split; the result depends only on the examples, the fraction and the seed.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows, Row, check_columns
from electra_fast.finetuning.readers.tables import Quoting
from electra_fast.finetuning.report.train_overlap import text_key
from electra_fast.finetuning.task import Split, Task, TaskData, check_dev_fraction, select

F = TypeVar("F")
"""A file as its parser stores it."""
Columns = tuple[str, ...]
Trained = tuple[Sequence[Columns], Sequence[Columns]]
"""The text and label columns that a model was trained on, if known."""
Fold = tuple[int, int]
"""A fold's number, from 0, and the number of folds."""
_ROWS = -2
"""Key of the number of rows in a counter of labels."""


@dataclass
class Parser(ABC, Generic[F]):
    """Turns the rows or lines of files into the examples of one kind of task.

    Unusable rows are collected in `bad`, lines for the user in `notes`.
    """

    unit: ClassVar = "examples"

    quoting: Quoting
    skip_bad_rows: int
    group: str
    """A column whose equal values keep examples in the same split."""
    notes: list[str] = field(default_factory=list, init=False)
    hint: str = field(default="", init=False)
    """Text after the list of bad rows."""

    def __post_init__(self) -> None:
        self.bad = BadRows(self.skip_bad_rows)

    @abstractmethod
    def read(self, paths: Mapping[str, Path]) -> dict[str, F]:
        """Reads the files of the splits, with the labels as written."""

    @abstractmethod
    def task(self, files: dict[str, F]) -> Task:
        """Returns the task, derived from the training file; may convert the labels of all files."""

    @abstractmethod
    def split(self, name: str, file: F, task: Task) -> Split:
        """Returns the usable examples of a file."""

    @abstractmethod
    def choose(self, whole: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
        """Chooses a fraction of the training examples for validation."""

    def complete(self, task: Task, splits: dict[str, Split]) -> Task:
        """Returns the task, completed with statistics of the training split; adds notes on the splits."""
        return task

    def columns(self, files: dict[str, F]) -> Trained:
        """Returns the text and label columns that were read, if known."""
        return (), ()

    def group_rows(self, whole: Split) -> Sequence[Row]:
        """Returns the rows in which to look up the column of `--group`."""
        return whole.columns or []

    def validation_rows(
        self, whole: Split, share: float | Fold, choose: Callable[[Split, float], NDArray[np.intp]], seed: int
    ) -> NDArray[np.intp]:
        rows = self.group_rows(whole) if self.group else []
        if self.group:
            check_columns(whole.path, dict.fromkeys(name for row in rows for name in row), (self.group,), "--group")
        return grouped_rows(whole, share, choose, seed, [row.get(self.group) for row in rows])

    def described_part(self, whole: Split, chosen: NDArray[np.intp]) -> str:
        """Describes the validation set; raises InputError if it is empty."""
        if not len(chosen):
            problem = f"{len(whole.texts)} {self.unit} are too few for a validation set; pass one with --dev"
            raise InputError(f"{whole.path}: {problem}")
        return f"{len(chosen):,} of {len(whole.texts):,} {self.unit}"


def read_examples(
    train: Path,
    dev: Path | None,
    test: Path | None,
    parser: Parser[F],
    *,
    dev_fraction: float,
    folds: Fold | None,
    seed: int,
) -> TaskData:
    """Reads the files of a task; without `dev`, validates on a fraction or a fold of `train`.

    Raises FileNotFoundError, or InputError with the place and a remedy if a file, column or value cannot be used.
    """
    check_dev_fraction(dev_fraction)
    paths = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    files = parser.read(paths)
    try:
        task = parser.task(files)
        splits = {name: parser.split(name, file, task) for name, file in files.items()}
    except InputError:
        parser.bad.finish(parser.hint)  # bad rows may be the reason
        raise
    parser.notes += parser.bad.finish(parser.hint)
    for split in splits.values():
        check_labeled(split.name, split.path, len(split.texts))
    if dev is None:
        whole = splits["train"]
        choose = lambda rest, fraction: parser.choose(rest, task, fraction, seed)  # noqa: E731
        chosen = parser.validation_rows(whole, folds or dev_fraction, choose, seed)
        part = parser.described_part(whole, chosen)
        if folds is None:
            note = f"{part} become the validation set (seed {seed}); pass another one with --dev"
            parser.notes.append(f"{train}: {note}")
        rest = np.delete(np.arange(len(whole.texts)), chosen)
        splits["train"] = select(whole, "train", rest)
        splits["dev"] = select(whole, "dev", np.sort(chosen))
    task = parser.complete(task, splits)
    text_columns, label_columns = parser.columns(files)
    return TaskData(
        task=task,
        train=splits["train"],
        dev=(splits["dev"],),
        test=(splits["test"],) if test is not None else (),
        notes=tuple(dict.fromkeys(parser.notes)),
        text_columns=tuple(dict.fromkeys(text_columns)),
        label_columns=tuple(dict.fromkeys(filter(None, label_columns))),
    )


def check_labeled(name: str, path: Path, num_examples: int) -> None:
    if not num_examples:
        flag = "--label" if name in ("train", "data") else f"--{name}-label"
        raise InputError(f"{path}: no example has a usable label; choose the column with {flag}")


def validation_rows(
    whole: Split, share: float | Fold, choose: Callable[[Split, float], NDArray[np.intp]]
) -> NDArray[np.intp]:
    """Returns the rows for validation: a fraction of all rows, or one fold. Folds do not overlap.

    `choose` returns the positions of a fraction of the examples. Raises InputError for a fold without examples.
    """
    if isinstance(share, float):
        return choose(whole, share)
    number, num_folds = share
    rest = np.arange(len(whole.texts))
    for fold in range(num_folds - 1):
        chosen = choose(select(whole, whole.name, rest), 1 / (num_folds - fold))
        if not 0 < len(chosen) < len(rest):
            raise InputError(f"{whole.path}: too few examples or contexts for {num_folds} folds; lower --folds")
        if fold == number:
            return rest[chosen]
        rest = np.delete(rest, chosen)
    return rest


def grouped_rows(
    whole: Split,
    share: float | Fold,
    choose: Callable[[Split, float], NDArray[np.intp]],
    seed: int,
    values: Sequence[Any] = (),
) -> NDArray[np.intp]:
    """Returns the rows for validation, like `validation_rows`, but never splits a group of related rows.

    Rows are related if their texts are equal (ignoring case, spaces and punctuation) or if their `values`, one per row,
    are equal. Groups are assigned to parts as in scikit-learn's StratifiedGroupKFold: the largest first, each to the
    part that keeps the distribution of labels most even. If the split consists of a few repeated texts, equal texts may
    be split after all. Raises InputError if the values form fewer groups than there are parts.
    """
    groups = _groups(whole, values)
    number, shares = (0, [share, 1 - share]) if isinstance(share, float) else (share[0], [1 / share[1]] * share[1])
    num_groups = int(groups.max()) + 1
    if values and num_groups < len(shares):
        raise InputError(f"{whole.path}: --group makes {num_groups} groups of rows, too few for {len(shares)} parts")
    if not len(shares) <= num_groups < len(groups):
        return validation_rows(whole, share, choose)
    counts = [Counter[int]() for _ in range(num_groups)]
    for group, labels in zip(groups.tolist(), _labels(whole), strict=True):
        counts[group].update(labels)
        counts[group][_ROWS] += 1
    parts = _parts(counts, shares, seed)
    if isinstance(share, float):
        _cover(counts, parts)
    sizes = np.bincount(parts[groups], minlength=len(shares))
    if not values and (sizes < len(groups) * np.array(shares) / 2).any():  # a few texts, many times each
        return validation_rows(whole, share, choose)
    return np.flatnonzero(parts[groups] == number)


def _groups(whole: Split, values: Sequence[Any]) -> NDArray[np.int64]:
    """Numbers the groups of rows with equal texts or values, from 0; a row without words and value is a group."""
    known: dict[str, list[str]] = {}
    first = dict[tuple[str, Any], int]()
    parent = list(range(len(whole.texts)))

    def root(row: int) -> int:
        while parent[row] != row:
            parent[row] = row = parent[parent[row]]
        return row

    for row, texts in enumerate(whole.texts):
        key = text_key(texts, known)
        value = values[row] if values else None
        for kind, name in (("text", key.strip()), ("value", "" if value is None else str(value))):
            if name:
                parent[root(row)] = root(first.setdefault((kind, key if kind == "text" else name), row))
    return np.unique([root(row) for row in range(len(parent))], return_inverse=True)[1]


def _labels(whole: Split) -> Iterator[list[int]]:
    assert whole.targets is not None
    for target in whole.targets:
        if np.ndim(target) and whole.targets.dtype != object:
            yield np.flatnonzero(target > 0).tolist()
        else:
            yield [] if np.asarray(target).dtype.kind == "f" else np.atleast_1d(target).tolist()


def _parts(counts: Sequence[Counter[int]], shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Assigns each group to a part, by the label counts of the groups."""
    totals = Counter[int]()
    for labels in counts:
        totals.update(labels)
    filled = [Counter[int]() for _ in shares]
    parts = np.zeros(len(counts), np.int64)
    order = np.random.default_rng(seed).permutation(len(counts)).tolist()
    for group in sorted(order, key=lambda group: -counts[group][_ROWS]):
        costs = [
            sum(((have[label] + n) ** 2 - have[label] ** 2) / totals[label] ** 2 for label, n in counts[group].items())
            / share
            for have, share in zip(filled, shares, strict=True)
        ]
        parts[group] = int(np.argmin(costs))
        filled[parts[group]].update(counts[group])
    return parts


def _cover(counts: Sequence[Counter[int]], parts: NDArray[np.int64]) -> None:
    """Moves the smallest group with each label that part 0 lacks to part 0, if part 1 keeps the label."""
    left = Counter(label for labels, part in zip(counts, parts, strict=True) if part for label in labels)
    have = {label for labels, part in zip(counts, parts, strict=True) if not part for label in labels}
    for group in sorted(np.flatnonzero(parts).tolist(), key=lambda group: counts[group][_ROWS]):
        if not have.issuperset(counts[group]) and all(left[label] > 1 for label in counts[group]):
            parts[group] = 0
            have.update(counts[group])
            left.subtract(counts[group].keys())


def stratified(groups: NDArray[np.int64], num_wanted: int, seed: int) -> NDArray[np.intp]:
    """Chooses rows in proportion to the sizes of groups: from groups of two or more, at least one row and never all."""
    order = np.random.default_rng(seed).permutation(len(groups))
    shuffled = groups[order]
    sizes = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)  # within the group, in shuffled order
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank[np.argsort(shuffled, kind="stable")] = np.arange(len(groups)) - starts
    share = (rank + 0.5) / sizes[shuffled]
    share[rank == 0] = 0
    share[rank == sizes[shuffled] - 1] = np.inf
    num_chosen = min(max(num_wanted, int((sizes > 1).sum())), int(np.isfinite(share).sum()))
    return order[np.argsort(share, kind="stable")[:num_chosen]]


def covering(has_label: NDArray[np.bool_], num_wanted: int, seed: int) -> NDArray[np.intp]:
    """Chooses rows so that, if possible, each label of two or more rows is both among them and among the rest."""
    order = np.random.default_rng(seed).permutation(len(has_label))
    left = has_label.sum(0)
    chosen = dict[int, None]()

    def choose(rows: NDArray[np.intp], number: int) -> None:
        for row in rows:
            if len(chosen) >= number or len(chosen) == len(order) - 1:
                return
            if int(row) not in chosen and (left[has_label[row]] > 1).all():
                chosen[int(row)] = None
                left[has_label[row]] -= 1

    for label in np.argsort(left, kind="stable"):
        if not has_label[list(chosen), label].any():
            choose(order[has_label[order, label]], len(chosen) + 1)
    choose(order, num_wanted)
    return np.array(list(chosen), dtype=np.intp)


def with_all_tags(train: Split, task: Task, num_wanted: int, seed: int) -> NDArray[np.intp]:
    """Chooses sentences so that each tag keeps one for training and, if it has two or more, gets one for validation."""
    assert train.targets is not None  # only a test file may lack tags
    num_rows = len(train.texts)
    tags = [set(target.tolist()) for target in train.targets]
    left = Counter(itertools.chain.from_iterable(tags))
    chosen: dict[int, None] = {}
    order = np.random.default_rng(seed).permutation(num_rows).tolist()
    lacking = {number for number, label in enumerate(task.labels) if task.scheme == "none" or label[:1] == "B"}
    for is_any_wanted in (False, True):  # first the tags that the validation set lacks
        for row in order:
            is_wanted = len(chosen) < num_wanted if is_any_wanted else not lacking.isdisjoint(tags[row])
            if is_wanted and row not in chosen and all(left[tag] > 1 for tag in tags[row]):
                left.subtract(tags[row])
                lacking -= tags[row]
                chosen[row] = None
    return np.array(list(chosen), dtype=np.intp)


def whole_contexts(contexts: Sequence[str], fraction: float, seed: int) -> NDArray[np.intp]:
    distinct = list(dict.fromkeys(contexts))
    num_dev = min(max(1, round(len(distinct) * fraction)), len(distinct) - 1)
    chosen = {distinct[number] for number in np.random.default_rng(seed).permutation(len(distinct))[:num_dev]}
    return np.flatnonzero([context in chosen for context in contexts])
