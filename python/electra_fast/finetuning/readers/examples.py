"""Reads the files of a task in one pass each: `read_examples` is the frame, a `Parser` per kind of task the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows, Row
from electra_fast.finetuning.readers.tables import Quoting
from electra_fast.finetuning.readers.validation_split import Fold, group_values, grouped_rows
from electra_fast.finetuning.task import Split, Task, TaskData, check_dev_fraction, select

F = TypeVar("F")
"""What a parser keeps of a file."""
Columns = tuple[str, ...]
Trained = tuple[Sequence[Columns], Sequence[Columns]]
"""The text and label columns of a model's training, if known."""


class Parser(ABC, Generic[F]):
    """The examples of one kind of task in rows or lines.

    A row that cannot be used raises InputError within `bad.collect()`; labels that no file explains do so in `split`.
    """

    what = "examples"

    def __init__(self, quoting: Quoting = "auto", skip_bad_rows: int = 0, group: str = "") -> None:
        self.quoting, self.group, self.bad = quoting, group, BadRows(skip_bad_rows)
        self.notes: list[str] = []
        self.hint = ""
        """Ends the list of bad rows."""

    @abstractmethod
    def read(self, paths: Mapping[str, Path]) -> dict[str, F]:
        """Reads the files of the splits, with labels as they have them."""

    @abstractmethod
    def task(self, files: dict[str, F]) -> Task:
        """Returns the task that the training file shows; may convert the labels of all files."""

    @abstractmethod
    def split(self, name: str, file: F, task: Task) -> Split:
        """Returns the usable examples of a file."""

    @abstractmethod
    def chosen(self, whole: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
        """Chooses a fraction of the training examples to validate on."""

    def finished(self, task: Task, splits: dict[str, Split]) -> Task:
        """Returns the task as the training split completes it; adds notes on the splits."""
        return task

    def columns(self, files: dict[str, F]) -> Trained:
        """Returns the columns of text and of labels that were read, if known."""
        return (), ()

    def group_rows(self, whole: Split) -> Sequence[Row]:
        """Returns the rows that have the column of `--group`."""
        return whole.columns or []

    def validation_rows(
        self, whole: Split, share: float | Fold, choose: Callable[[Split, float], NDArray[np.intp]], seed: int
    ) -> NDArray[np.intp]:
        values = group_values(whole.path, self.group, self.group_rows(whole))
        return grouped_rows(whole, share, choose, seed, values)

    def part(self, whole: Split, chosen: NDArray[np.intp]) -> str:
        """Says what is set aside; raises InputError if it is nothing."""
        if not len(chosen):
            few = f"{len(whole.texts)} {self.what} are too few to set a dev split aside; give one with --dev"
            raise InputError(f"{whole.path}: {few}")
        return f"{len(chosen):,} of {len(whole.texts):,} {self.what}"


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
    """Reads the files of a task; sets a fraction of `train` aside, or a fold, if there is no `dev`.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A file, a column or a value cannot be used, with the place and the remedy.
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
        choose = lambda rest, fraction: parser.chosen(rest, task, fraction, seed)  # noqa: E731
        chosen = parser.validation_rows(whole, folds or dev_fraction, choose, seed)
        part = parser.part(whole, chosen)
        if folds is None:
            how = f"{part} are set aside as the dev split (seed {seed}); give your own with --dev"
            parser.notes.append(f"{train}: {how}")
        rest = np.delete(np.arange(len(whole.texts)), chosen)
        splits["train"], splits["dev"] = select(whole, "train", rest), select(whole, "dev", np.sort(chosen))
    task = parser.finished(task, splits)
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
    """Raises InputError if a file has no examples."""
    if not num_examples:
        flag = "--label" if name in ("train", "data") else f"--{name}-label"
        raise InputError(f"{path}: no example has a label that can be used; choose the column with {flag}")
