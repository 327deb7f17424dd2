"""Reads a user's own .tsv, .csv, .jsonl or .parquet files as a classification, multi-label or regression task."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.tables import (
    Quoting,
    Table,
    abbreviated,
    check_columns,
    column_names,
    read_table,
    text_of,
    there_are,
)
from electra_fast.finetuning.task import Split, Task, TaskData, check_dev_fraction, select

TEXT_COLUMNS = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)
LABEL_COLUMNS = ("label", "labels", "score", "target")
# More classes than this, most of them of a single example, are not classes.
MAX_SPARSE_CLASSES = 1000
# What a test file without labels may hold in the label column; -1 as in the `datasets` of Hugging Face.
HIDDEN_LABELS = (None, "", -1, "-1")
MAX_NAMED_LABELS = 20
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")


@dataclass(frozen=True, kw_only=True)
class _File:
    """A split without targets, the note about its empty texts, and its label columns if it has them."""

    split: Split
    notes: tuple[str, ...]
    labels: Table | None


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """How the cells of the label columns are to be read as label names."""

    columns: tuple[str, ...]
    separator: str = ""
    are_lists: bool = False

    @property
    def is_multi_label(self) -> bool:
        return self.are_lists or bool(self.separator) or len(self.columns) > 1


def read(
    kind: Literal["classification", "regression"],
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    label_separator: str = "",
    quoting: Quoting = "auto",
    dev_fraction: float = 0.1,
    seed: int = 0,
) -> TaskData:
    """Reads the files of a task.

    A classification is multi-label if the label cells are lists, if `label_separator` is given, or if there are
    several label columns, each of 0/1 or true/false.

    Args:
        kind: Whether the labels are classes or numbers.
        train: The training examples.
        dev: The validation examples; None to set a part of `train` aside, stratified by class.
        test: Examples to predict, with or without labels.
        text: One or two text columns; empty for the first of `TEXT_COLUMNS` that the training file has.
        label: The label columns; empty for the first of `LABEL_COLUMNS` that the training file has.
        labels: The classes in the order of their ids; empty for those of the training file, sorted.
        label_separator: What separates the labels of one cell.
        quoting: As in `tables.iterate_rows`.
        dev_fraction: Share of the training examples that is set aside, above 0 and below 1.
        seed: Chooses the examples that are set aside.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A file, a column or a value cannot be used, with the line and the remedy.
    """
    check_dev_fraction(dev_fraction)
    paths = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    available = {name: column_names(path, quoting=quoting) for name, path in paths.items()}
    text, label = _choose_columns(train, available["train"], text, label)
    _check_options(kind, label, labels, label_separator)
    files = {name: _read_file(name, path, available[name], text, label, quoting) for name, path in paths.items()}
    if kind == "classification":
        task, encode = _classification(_table(files["train"]), label, labels, label_separator)
    else:
        task, encode = Task(name=kind, kind=kind, metric="spearman"), _numbers

    splits = {name: _with_targets(file, encode) for name, file in files.items()}
    notes = [note for file in files.values() for note in file.notes]
    if dev is None:
        splits["train"], splits["dev"] = _set_aside(splits["train"], task, dev_fraction, seed)
        num_rows = len(files["train"].split.texts)
        notes.append(
            f"{train}: {len(splits['dev'].texts):,} of {num_rows:,} examples are set aside as the dev split "
            f"(seed {seed}); give your own with --dev"
        )
    if kind == "regression":
        task = _standardized(task, splits["train"])
    tests = (splits["test"],) if test is not None else ()
    return TaskData(
        task=task, train=splits["train"], dev=(splits["dev"],), test=tests, notes=tuple(notes), text_columns=(text,)
    )


def _choose_columns(
    path: Path, available: Sequence[str], text: tuple[str, ...], label: tuple[str, ...]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The text and label columns: those that are named, else the first of the usual ones."""
    text = text or next((names for names in TEXT_COLUMNS if set(names) <= set(available)), ())
    label = label or tuple(name for name in LABEL_COLUMNS if name in available)[:1]
    for kind, names in (("text", text), ("label", label)):
        if not names:
            raise InputError(f"{path}: no {kind} column; {there_are(available)}; choose with --{kind}")
        check_columns(path, available, names, f"--{kind}")
    if len(text) > 2:
        raise InputError(f"--text names {len(text)} columns ({', '.join(text)}); it can be one or two")
    repeated = {name for name in text + label if (text + label).count(name) > 1}
    if repeated:
        raise InputError(f"{path}: the column {min(repeated)!r} is chosen twice by --text and --label")
    return text, label


def _check_options(kind: str, label: tuple[str, ...], labels: tuple[str, ...], separator: str) -> None:
    if kind == "regression" and (labels or separator or len(label) > 1):
        raise InputError("a regression has one label column of numbers, and no --labels or --label-separator")
    if len(label) > 1 and (labels or separator):
        raise InputError("with several label columns, their names are the labels: leave --labels and the separator out")
    if len(set(labels)) < len(labels):
        raise InputError(f"--labels names a label twice: {', '.join(labels)}")


def _read_file(
    name: str, path: Path, available: Sequence[str], text: tuple[str, ...], label: tuple[str, ...], quoting: Quoting
) -> _File:
    check_columns(path, available, text, "--text")
    is_labelled = name != "test" or set(label) <= set(available)
    if is_labelled:
        check_columns(path, available, label, "--label")
    table = read_table(path, text + label if is_labelled else text, quoting=quoting)
    if name == "test" and all(value in HIDDEN_LABELS for column in label for value in table.columns.get(column, ())):
        is_labelled = False
    texts = _texts(table, text)
    ids = [str(row) for row in range(len(texts))]
    split = Split(name=name, path=path, texts=texts, targets=None, ids=ids)
    return _File(split=split, notes=_empty_texts(table, texts, text), labels=table if is_labelled else None)


def _texts(table: Table, columns: tuple[str, ...]) -> list[tuple[str, ...]]:
    for name in columns:
        for row, value in enumerate(table.columns[name]):
            if not isinstance(value, str):
                text_of(table.path, table.lines[row], {name: value}, name)  # raises
    return list(zip(*(table.columns[name] for name in columns), strict=True))


def _empty_texts(table: Table, texts: list[tuple[str, ...]], columns: tuple[str, ...]) -> tuple[str, ...]:
    """A note about examples without text, which are kept; raises InputError if there are no others."""
    empty = [row for row, parts in enumerate(texts) if not any(part.strip() for part in parts)]
    if len(empty) == len(texts):
        raise InputError(f"{table.path}: every text is empty in {' and '.join(map(repr, columns))}; choose with --text")
    return (f"{table.place(empty[0])}: the first of {len(empty):,} examples with empty text",) if empty else ()


def _table(file: _File) -> Table:
    assert file.labels is not None  # only a test file may lack labels
    return file.labels


def _with_targets(file: _File, encode: Callable[[Table], NDArray[Any]]) -> Split:
    targets = None if file.labels is None else encode(file.labels)
    return dataclasses.replace(file.split, targets=targets)


def _classification(
    train: Table, columns: tuple[str, ...], given: tuple[str, ...], separator: str
) -> tuple[Task, Callable[[Table], NDArray[Any]]]:
    """The task, and the function from a table to its targets."""
    are_lists = any(isinstance(value, list) for value in train.columns[columns[0]])
    reading = _Labels(columns=columns, separator=separator, are_lists=are_lists)
    names = _label_names(train, reading)
    found = {name for row in names for name in row}
    if len(found) < (1 if reading.is_multi_label else 2):
        raise InputError(f"{train.path}: {_listed(found) or 'no label'} in every example; there is nothing to learn")
    classes = columns if len(columns) > 1 else given or _classes(train, names, reading)
    task = Task(
        name="classification",
        kind="multi-label" if reading.is_multi_label else "classification",
        labels=classes,
        metric="f1_micro" if reading.is_multi_label else "accuracy",
    )
    known = "--labels names" if given else f"{train.path} has"
    return task, lambda table: _class_ids(table, reading, classes, known)


def _classes(train: Table, names: list[list[str]], reading: _Labels) -> tuple[str, ...]:
    """The labels that occur, sorted; raises InputError if they look like numbers to predict or like ids."""
    found = {name for row in names for name in row}
    are_integers = all(map(INTEGER.fullmatch, found))
    if not are_integers and not reading.is_multi_label and all(map(_is_number, found)):
        row = next(row for row, (name,) in enumerate(names) if not INTEGER.fullmatch(name))
        raise InputError(
            f"{train.place(row)}: the label {names[row][0]!r} is a number with decimals; "
            "predict numbers with --task regression, or write classes as integers or words"
        )
    if len(found) > MAX_SPARSE_CLASSES and len(found) > len(names) / 2:
        raise InputError(
            f"{train.path}: {len(found):,} different labels in {len(names):,} examples; "
            "predict numbers with --task regression, or choose another column with --label"
        )
    return tuple(sorted(found, key=lambda name: (int(name) if are_integers else 0, name)))


def _label_names(table: Table, reading: _Labels) -> list[list[str]]:
    """The label names of every row: one, or in a multi-label task any number."""
    if len(reading.columns) > 1:
        cells = [table.columns[column] for column in reading.columns]
        return [
            [
                column
                for column, value in zip(reading.columns, values, strict=True)
                if _is_set(table, row, column, value)
            ]
            for row, values in enumerate(zip(*cells, strict=True))
        ]
    values = table.columns[reading.columns[0]]
    return [_names_in_cell(table, row, value, reading) for row, value in enumerate(values)]


def _names_in_cell(table: Table, row: int, value: Any, reading: _Labels) -> list[str]:
    if reading.are_lists:
        if not isinstance(value, list):
            raise InputError(f"{table.place(row)}: the label is {abbreviated(value)}, elsewhere it is a list")
        return [_label_name(table, row, item) for item in value]
    if reading.separator and isinstance(value, str):
        return [part.strip() for part in value.split(reading.separator) if part.strip()]
    return [_label_name(table, row, value)]


def _label_name(table: Table, row: int, value: Any) -> str:
    """The name of a single label: text as it is, `3`, `true`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and value == value:
        return str(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    if value is None or isinstance(value, str | float):
        raise InputError(f"{table.place(row)}: no label")
    raise InputError(f"{table.place(row)}: the label is {abbreviated(value)}; it has to be text or an integer")


def _is_set(table: Table, row: int, column: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text in ("1", "true", "1.0"):
        return True
    if text in ("0", "false", "0.0"):
        return False
    raise InputError(f"{table.place(row)}: {column!r} is {abbreviated(value)}; it has to be 0, 1, true or false")


def _class_ids(table: Table, reading: _Labels, classes: tuple[str, ...], known: str) -> NDArray[Any]:
    """Class ids, int64 [n]; for a multi-label task a float32 [n, labels] of 0 and 1."""
    ids = {name: number for number, name in enumerate(classes)}
    names = _label_names(table, reading)
    for row, labels in enumerate(names):
        for name in labels:
            if name not in ids:
                raise InputError(f"{table.place(row)}: unknown label {name!r}; {known}: {_listed(classes)}")
    if not reading.is_multi_label:
        return np.array([ids[name] for (name,) in names], dtype=np.int64)
    targets = np.zeros((len(names), len(classes)), dtype=np.float32)
    for row, labels in enumerate(names):
        targets[row, [ids[name] for name in labels]] = 1
    return targets


def _numbers(table: Table) -> NDArray[np.float64]:
    column = next(reversed(table.columns))
    return np.array([_number(table, row, value) for row, value in enumerate(table.columns[column])], dtype=np.float64)


def _number(table: Table, row: int, value: Any) -> float:
    if value is None or value == "":
        raise InputError(f"{table.place(row)}: no label")
    if not isinstance(value, bool) and _is_number(value) and math.isfinite(float(value)):
        return float(value)
    raise InputError(f"{table.place(row)}: the label is {abbreviated(value)}; it has to be a finite number")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return "_" not in str(value)


def _standardized(task: Task, train: Split) -> Task:
    """Sets shift and scale to the mean and standard deviation of the training values."""
    values = train.targets
    assert values is not None
    if values.min() == values.max():
        raise InputError(f"{train.path}: every training value is {values[0]:g}; there is nothing to learn from it")
    with np.errstate(over="ignore", invalid="ignore"):
        shift, scale = float(values.mean()), float(values.std())
    if not (math.isfinite(shift) and np.finfo(np.float32).tiny < scale < np.finfo(np.float32).max):
        raise InputError(
            f"{train.path}: training values from {values.min():g} to {values.max():g} are too large or too close "
            "together to compute with; rescale them"
        )
    return dataclasses.replace(task, shift=shift, scale=scale)


def _set_aside(train: Split, task: Task, fraction: float, seed: int) -> tuple[Split, Split]:
    """A training and a dev split; every class keeps an example for training."""
    num_rows = len(train.texts)
    groups = np.zeros(num_rows, dtype=np.int64)
    if task.kind == "classification" and train.targets is not None:
        groups = train.targets
    num_dev = min(max(1, round(num_rows * fraction)), num_rows - len(np.unique(groups)))
    if num_dev < 1:
        raise InputError(f"{train.path}: {num_rows} examples are too few to set a dev split aside; give one with --dev")
    is_dev = np.zeros(num_rows, dtype=bool)
    is_dev[_stratified(groups, num_dev, np.random.default_rng(seed))] = True
    return select(train, "train", np.flatnonzero(~is_dev)), select(train, "dev", np.flatnonzero(is_dev))


def _stratified(groups: NDArray[np.int64], num_chosen: int, rng: np.random.Generator) -> NDArray[np.intp]:
    """Chooses rows from every group in proportion to its size, and never all of a group."""
    order = rng.permutation(len(groups))
    shuffled = groups[order]
    sizes = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)  # within the group, in shuffled order
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank[np.argsort(shuffled, kind="stable")] = np.arange(len(groups)) - starts
    share = (rank + 0.5) / sizes[shuffled]
    share[rank == sizes[shuffled] - 1] = np.inf
    return order[np.argsort(share, kind="stable")[:num_chosen]]


def _listed(labels: Iterable[str]) -> str:
    names = [repr(label) for label in labels]
    more = f" and {len(names) - MAX_NAMED_LABELS:,} more" if len(names) > MAX_NAMED_LABELS else ""
    return ", ".join(names[:MAX_NAMED_LABELS]) + more
