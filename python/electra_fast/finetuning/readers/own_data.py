"""Reads a user's own .tsv, .csv, .jsonl or .parquet files as a classification, multi-label or regression task."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.annotations import rejected_note, rejected_rows, verdict_columns
from electra_fast.finetuning.readers.labels import (
    INTEGER,
    LabelReader,
    NoLabel,
    doubts,
    is_missing,
    is_number,
    known_rows,
    left_out,
    listed,
    near_label,
    parse_mapping,
)
from electra_fast.finetuning.readers.rows import (
    BadRows,
    abbreviated,
    check_columns,
    columns_note,
    named_rows,
    others_of,
    text_of,
    there_are,
)
from electra_fast.finetuning.readers.tables import Quoting, Table, class_names, column_names, read_table
from electra_fast.finetuning.readers.validation_split import (
    Fold,
    covering,
    group_values,
    grouped_rows,
    set_aside,
    stratified,
)
from electra_fast.finetuning.task import NO_CLASS, Split, Task, TaskData, check_dev_fraction

TEXT_COLUMNS = (
    ("text",),
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("premise", "hypo"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("sentence",),
)
LABEL_COLUMNS = ("label", "labels", "gold_label", "score", "target")
# More classes than this, most of them of a single example, are not classes.
MAX_SPARSE_CLASSES = 1000

_DIGITS = re.compile(r"[+-]?[0-9.,]*[0-9][0-9.,]*")
_DECIMAL_COMMA, _THOUSANDS = re.compile(r"[+-]?[0-9]+(,[0-9]+)?"), re.compile(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")

Columns = tuple[str, ...]


@dataclass(kw_only=True)
class _File:
    """A file's columns and usable rows: their numbers, texts, and labels, None for no label."""

    name: str
    table: Table
    text: Columns
    label: Columns
    """Empty if a test file has no labels."""
    notes: list[str]
    has_others: bool
    """The table has the rows' other columns too."""
    classes: Columns = ()
    """Names of the labels' numbers, as `datasets` stores them."""
    rows: list[int] = field(default_factory=list)
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.table.path

    def name_classes(self, names: Columns) -> None:
        """Puts the names of the labels' numbers in their place."""
        self.classes = names
        for row in self.table.rows if names else ():
            row[self.label[0]] = _named(row[self.label[0]], names)

    def keep(self, numbers: Sequence[int]) -> None:
        """Drops the other usable rows."""
        self.rows = [self.rows[number] for number in numbers]
        self.texts = [self.texts[number] for number in numbers]
        self.labels = [self.labels[number] for number in numbers]

    def split(self, targets: NDArray[Any] | None) -> Split:
        """Returns the usable rows with their targets."""
        others = [others_of(self.table.rows[row], self.text + self.label) for row in self.rows if self.has_others]
        ids, others = named_rows(self.rows, others)
        columns = others if self.has_others else None
        return Split(name=self.name, path=self.path, texts=self.texts, targets=targets, ids=ids, columns=columns)


def read(
    kind: Literal["classification", "regression"],
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: Columns = (),
    label: Columns = (),
    dev_text: Columns = (),
    dev_label: Columns = (),
    test_text: Columns = (),
    test_label: Columns = (),
    labels: tuple[str, ...] = (),
    label_map: Mapping[str, str] | Sequence[str] = (),
    label_separator: str = "",
    quoting: Quoting = "auto",
    skip_bad_rows: int = 0,
    dev_fraction: float = 0.1,
    folds: Fold | None = None,
    group: str = "",
    seed: int = 0,
) -> TaskData:
    """Reads the files of a task.

    Examples without a label are left out; in `test` they are predicted but not scored.

    Args:
        kind: Whether the labels are classes or numbers.
        train: The training examples.
        dev: The validation examples; None to set a part of `train` aside, stratified by class.
        test: Examples to predict, with or without labels.
        text: One or two text columns; empty for the first of `TEXT_COLUMNS` that the training file has.
        label: The label columns; empty for the first of `LABEL_COLUMNS` that the training file has. Several, each of
            0/1 or true/false, make the task multi-label, as lists and `label_separator` do.
        dev_text: Text columns of `dev`, if named otherwise.
        dev_label: Label columns of `dev`, if named otherwise.
        test_text: Text columns of `test`, if named otherwise.
        test_label: Label columns of `test`, if named otherwise.
        labels: The classes in the order of their ids; empty for those of the training file, sorted.
        label_map: Labels of the files and their new names, or `OLD=NEW` strings; an empty name leaves the examples
            out.
        label_separator: Separator of the labels in one cell.
        quoting: As in `tables.iterate_rows`.
        skip_bad_rows: Number of unusable rows that may be left out.
        dev_fraction: Fraction of the training examples to set aside, above 0 and below 1.
        folds: Set this fold's examples aside instead.
        group: A column of the training file: examples with the same value are not separated. Examples with the same
            text never are.
        seed: Seeds the choice of the examples to set aside.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A file, a column or a value cannot be used, with the line and the remedy.
    """
    check_dev_fraction(dev_fraction)
    paths = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    given = {"train": (text, label), "dev": (dev_text, dev_label), "test": (test_text, test_label)}
    unused = next((name for name, columns in given.items() if name not in paths and any(columns)), None)
    if unused:
        raise InputError(f"--{unused}-text and --{unused}-label need --{unused} FILE")
    mapping = parse_mapping(label_map)
    bad = BadRows(skip_bad_rows)
    files = _read_files(kind, paths, given, quoting, bad)
    _check_options(kind, files["train"].label, labels, label_separator, mapping)
    reader: LabelReader | None = None
    if kind == "classification":
        reader = LabelReader(files["train"].table, files["train"].label, labels, label_separator, mapping)
    has_commas = reader is None and _has_decimal_commas(files["train"])
    for file in files.values():
        _read_rows(file, reader or partial(_number, mark="," if has_commas else "."), bad)
    columns = [" and ".join(map(repr, names)) for names in (files["train"].text, files["train"].label)]
    what = reader.described if reader else f"one number per example{', with decimal commas' if has_commas else ''}"
    notes = [columns_note(train, f"text in {columns[0]}, label in {columns[1]}: {what}", text, label)]
    notes += [note for file in files.values() for note in file.notes]
    hint = ""
    try:
        _check_labeled(files)
        if reader:
            task, targets, hint = _classification(files, reader, labels, bad)
            notes += _doubts(files["train"])
        else:
            task = Task(name=kind, kind=kind, metric="spearman")
            targets = {name: _values(file) for name, file in files.items()}
    except InputError:
        bad.finish()  # bad rows may be the reason
        raise
    notes += bad.finish(hint)
    _check_labeled(files)  # of those that are left

    splits = {name: file.split(targets[name]) for name, file in files.items()}
    if dev is None:
        whole = splits["train"]
        chosen = grouped_rows(
            whole,
            folds or dev_fraction,
            lambda rest, fraction: _validation_rows(rest, task, fraction, seed),
            seed,
            group_values(train, group, [files["train"].table.rows[row] for row in files["train"].rows]),
        )
        splits["train"], splits["dev"] = set_aside(whole, chosen, seed, notes if folds is None else [])
    if kind == "regression":
        task = _standardized(task, splits["train"])
    tests = (splits["test"],) if test is not None else ()
    return TaskData(
        task=task,
        train=splits["train"],
        dev=(splits["dev"],),
        test=tests,
        notes=tuple(notes),
        text_columns=tuple(dict.fromkeys(file.text for file in files.values())),
        label_columns=tuple(dict.fromkeys(file.label for file in files.values() if file.label)),
    )


def read_labeled(
    task: Task,
    path: Path,
    trained: tuple[Sequence[Columns], Sequence[Columns]],
    *,
    text: Columns = (),
    label: Columns = (),
    label_map: Mapping[str, str] | Sequence[str] = (),
    label_separator: str = "",
    quoting: Quoting = "auto",
    skip_bad_rows: int = 0,
) -> tuple[Split, list[str]]:
    """Reads labeled examples of a trained model's task; returns them and notes for the user.

    `trained` are the text and label columns of training, if known, of which the first that the file has are read. Rows
    with a label that the task lacks are bad rows. Other arguments, and what it raises, are those of `read`.
    """
    available, usual = column_names(path, quoting=quoting), [(name,) for name in LABEL_COLUMNS]
    text = _training_columns(path, available, text, trained[0] or TEXT_COLUMNS, "text")
    label = _training_columns(path, available, label, trained[1] or usual, "label")
    has_classes, mapping, bad = task.kind != "regression", parse_mapping(label_map), BadRows(skip_bad_rows)
    _check_options("classification" if has_classes else "regression", label, (), label_separator, mapping)
    file = _read_file("data", path, available, text, label, [], quoting, bad, has_others=True)
    names = class_names(path).get(label[0], ()) if has_classes and len(label) == 1 else ()
    if not {*names}.isdisjoint(task.labels):  # else the model was trained on the numbers
        file.name_classes(names)
    if not has_classes:
        _read_rows(file, partial(_number, mark="," if _has_decimal_commas(file) else "."), bad)
    else:
        reader = LabelReader(file.table, label, task.labels, label_separator, mapping)
        if reader.is_multi_label and task.kind != "multi-label":
            raise InputError(f"{path}: an example has several labels in {', '.join(label)}, and the model predicts one")
        _read_rows(file, reader, bad)
        ids = {reader.canonical(name): number for number, name in enumerate(task.labels)}
        file.keep(known_rows(path, file.labels, ids, bad))
    notes = [*file.notes, *bad.finish()]
    _check_labeled({"data": file})
    targets = _class_targets(file, ids, task.kind == "multi-label") if has_classes else _values(file)
    return file.split(targets), notes


def _read_files(
    kind: str, paths: Mapping[str, Path], given: Mapping[str, tuple[Columns, Columns]], quoting: Quoting, bad: BadRows
) -> dict[str, _File]:
    available = {name: column_names(path, quoting=quoting) for name, path in paths.items()}
    usual = tuple((name,) for name in LABEL_COLUMNS)
    text = _training_columns(paths["train"], available["train"], given["train"][0], TEXT_COLUMNS, "text")
    label = _training_columns(paths["train"], available["train"], given["train"][1], usual, "label")
    if len(text) > 2:
        raise InputError(f"--text names {len(text)} columns ({', '.join(text)}); it can be one or two")
    # A `score` is rarely the class.
    usual = tuple(names for names in usual if kind == "regression" or names != ("score",))
    files: dict[str, _File] = {}
    for name, path in paths.items():
        texts, labels, notes = text, label, list[str]()
        if name != "train":
            there, (own_text, own_label) = available[name], given[name]
            texts = _columns(path, there, own_text, text, TEXT_COLUMNS, f"--{name}-text", notes)
            labels = _columns(path, there, own_label, label, usual, f"--{name}-label", notes, name == "test")
        has_others = name != "train" or "dev" not in paths  # of the training file only to set some aside
        chosen = (available[name], texts, labels, notes)
        files[name] = _read_file(name, path, *chosen, quoting, bad, has_others=has_others)
        if kind == "classification" and len(labels) == 1:
            files[name].name_classes(class_names(path).get(labels[0], ()))
    return files


def _read_file(
    name: str,
    path: Path,
    available: Columns,
    text: Columns,
    label: Columns,
    notes: list[str],
    quoting: Quoting,
    bad: BadRows,
    *,
    has_others: bool,
) -> _File:
    if repeated := {each for each in text + label if (text + label).count(each) > 1}:
        raise InputError(f"{path}: the column {min(repeated)!r} is chosen twice by --text and --label")
    verdicts = verdict_columns(available, text + label)
    table = read_table(path, text + label + verdicts, bad, quoting=quoting, has_others=has_others)
    return _File(name=name, table=table, text=text, label=label, notes=notes, has_others=has_others)


def _training_columns(path: Path, available: Columns, given: Columns, usual: Sequence[Columns], kind: str) -> Columns:
    """Returns the named columns, else the first of the usual ones."""
    names = given or next((names for names in usual if set(names) <= set(available)), ())
    if not names:
        raise InputError(f"{path}: no {kind} column; {there_are(available)}; choose with --{kind}")
    check_columns(path, available, names, f"--{kind}")
    return names


def _columns(
    path: Path,
    available: Columns,
    given: Columns,
    trained: Columns,
    usual: Sequence[Columns],
    flag: str,
    notes: list[str],
    optional: bool = False,
) -> Columns:
    """Returns the named columns, else those of the training file, else the only usual ones (noted); () for none."""
    if given and len(given) != len(trained):
        raise InputError(f"{flag} names {', '.join(given)}; the training file has {len(trained)}: {', '.join(trained)}")
    names = given or trained
    if given or set(names) <= set(available):
        check_columns(path, available, names, flag)
        return names
    found = [each for each in usual if len(each) == len(trained) and set(each) <= set(available)]
    if len(found) == 1:
        instead = f"{', '.join(found[0])} instead of {', '.join(trained)}"
        notes.append(f"{path}: reads the columns {instead}; choose others with {flag}")
        return found[0]
    if not optional or len(found) > 1:
        check_columns(path, available, names, flag)  # raises
    return ()


def _check_options(
    kind: str, label: Columns, labels: tuple[str, ...], separator: str, mapping: Mapping[str, str]
) -> None:
    if kind == "regression" and (labels or separator or mapping or len(label) > 1):
        raise InputError(
            "a regression has one label column of numbers, and no --labels, --label-map or --label-separator"
        )
    if len(label) > 1 and (labels or separator):
        raise InputError("with several label columns, their names are the labels: leave --labels and the separator out")


def _read_rows(file: _File, read_cells: Callable[[Sequence[Any], str], Any], bad: BadRows) -> None:
    """Reads the rows of a file; leaves those without a label out, except in a test file."""
    table, signs, unlabeled = file.table, Counter[str](), list[int]()
    rejected = rejected_rows(table.rows, file.text + file.label, is_test=file.name == "test")
    for row, values in enumerate(table.rows):
        if row in rejected:
            continue
        with bad.collect():
            label = None
            if file.label:
                try:
                    label = read_cells([values[name] for name in file.label], table.place(row))
                except NoLabel as sign:
                    signs[str(sign)] += 1
                    unlabeled.append(row)
            if label is None and file.name != "test":
                continue
            file.texts.append(tuple(text_of(table.path, table.lines[row], values, name) for name in file.text))
            file.rows.append(row)
            file.labels.append(label)
    if file.name == "test" and all(label in (None, -1) for label in file.labels):  # hidden
        file.label, unlabeled = (), []
    file.notes += rejected_note(file.path, len(rejected), len(table.rows))
    file.notes += [*_unlabeled_note(file, signs, unlabeled), *_empty_texts(file)]


def _named(cell: Any, names: Columns) -> Any:
    if isinstance(cell, list):
        return [_named(item, names) for item in cell]
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell


def _check_labeled(files: Mapping[str, _File]) -> None:
    for name, file in files.items():
        if not file.rows:
            flag = "--label" if name in ("train", "data") else f"--{name}-label"
            raise InputError(f"{file.path}: no example has a label that can be used; choose the column with {flag}")


def _unlabeled_note(file: _File, signs: Counter[str], unlabeled: list[int]) -> Iterator[str]:
    if not unlabeled:
        return
    what = "predicted and not scored" if file.name == "test" else "left out"
    first = file.table.place(unlabeled[0]).removeprefix(f"{file.path}: ")
    remedy = _how_to_keep(signs, file.labels) if file.name == "train" and len(file.label) == 1 else ""
    yield (
        f"{file.path}: {len(unlabeled):,} of {len(file.table.rows):,} examples have no label "
        f"({left_out(signs)}; the first in {first}): {what}{remedy}"
    )


def _how_to_keep(signs: Counter[str], labels: Sequence[Any]) -> str:
    """Returns the remedy if a sign is a class after all."""
    sign = next((sign for sign in ("-1", "-") if sign in signs), None)
    lists = [names for names in labels if isinstance(names, list)]
    if sign is None or not lists:
        return ""
    classes = _sorted({sign, *(name for names in lists for name in names)})
    if len(classes) > 10:
        return f"; if {sign} is a class, name it among --labels"
    return f"; if {sign} is a class, add --labels={','.join(classes)}"


def _empty_texts(file: _File) -> tuple[str, ...]:
    """Returns a note about examples without text, which are kept; raises InputError if there are no others."""
    empty = [row for row, parts in zip(file.rows, file.texts, strict=True) if not any(part.strip() for part in parts)]
    if empty and len(empty) == len(file.texts):
        columns = " and ".join(map(repr, file.text))
        raise InputError(f"{file.path}: every text is empty in {columns}; choose with --text")
    return (f"{file.table.place(empty[0])}: the first of {len(empty):,} examples with empty text",) if empty else ()


def _classification(
    files: Mapping[str, _File], reader: LabelReader, given: tuple[str, ...], bad: BadRows
) -> tuple[Task, dict[str, NDArray[Any] | None], str]:
    """Returns the task, the targets of the splits, and a hint about unknown labels."""
    train = files["train"]
    found = {name for names in train.labels for name in names}
    _check_found(train, found, reader)
    classes = reader.flags or given or _classes(train, found, reader.is_multi_label)
    task = Task(
        name="classification",
        kind="multi-label" if reader.is_multi_label else "classification",
        labels=classes,
        metric="f1_micro" if reader.is_multi_label else "accuracy",
    )
    reader.check_mapping(found)
    ids = {reader.canonical(name): number for number, name in enumerate(classes)}
    if len(ids) < len(classes):
        raise InputError(f"--labels names a label twice: {', '.join(classes)}")
    unknown: list[str] = []
    for each in files.values():
        _drop_unknown(each, ids, unknown, bad)
    known = "--labels names" if given else f"{train.path} has"
    hint = f"; {known}: {listed(classes)}{near_label(unknown[0], classes)}" if unknown else ""
    return task, {name: _class_targets(each, ids, reader.is_multi_label) for name, each in files.items()}, hint


def _check_found(train: _File, found: set[str], reader: LabelReader) -> None:
    """Raises InputError if there is nothing to learn."""
    if len(found) < (1 if reader.is_multi_label else 2):
        rest = next((note for note in train.notes if "no label" in note), "")
        raise InputError(
            f"{train.path}: {listed(found) or 'no label'} in every example; there is nothing to learn"
            f"{f' ({rest})' if rest else ''}"
        )


def _classes(train: _File, found: set[str], is_multi_label: bool) -> tuple[str, ...]:
    """Returns the labels that occur, in the order of their numbers, else sorted.

    Raises InputError if they look like numbers to predict or like ids.
    """
    table = train.table
    if found <= {*train.classes}:
        return tuple(name for name in train.classes if name in found)
    if not is_multi_label and all(map(is_number, found)) and not all(map(INTEGER.fullmatch, found)):
        names = zip(train.rows, train.labels, strict=True)
        row, name = next((row, name) for row, (name,) in names if not INTEGER.fullmatch(name))
        raise InputError(
            f"{table.place(row)}: the label {name!r} is a number with decimals; "
            "predict numbers with --task regression, or write classes as integers or words"
        )
    if len(found) > MAX_SPARSE_CLASSES and len(found) > len(train.rows) / 2:
        raise InputError(
            f"{table.path}: {len(found):,} different labels in {len(train.rows):,} examples; "
            "predict numbers with --task regression, or choose another column with --label"
        )
    return _sorted(found)


def _sorted(names: set[str]) -> tuple[str, ...]:
    are_integers = all(map(INTEGER.fullmatch, names))
    return tuple(sorted(names, key=lambda name: (int(name) if are_integers else 0, name)))


def _drop_unknown(file: _File, ids: Mapping[str, int], unknown: list[str], bad: BadRows) -> None:
    """Leaves out, as bad rows, examples with unknown labels."""

    def check(number: int) -> None:
        for name in file.labels[number] or ():
            if name not in ids:
                unknown.append(name)
                raise InputError(f"{file.table.place(file.rows[number])}: unknown label {name!r}")

    file.keep(bad.passing(range(len(file.labels)), check))


def _class_targets(file: _File, ids: Mapping[str, int], is_multi_label: bool) -> NDArray[Any] | None:
    """Returns class ids, int64 [n]; for a multi-label task 0 and 1, float32 [n, labels]."""
    if not file.label:
        return None
    if not is_multi_label:
        return np.array([NO_CLASS if names is None else ids[names[0]] for names in file.labels], dtype=np.int64)
    targets = np.zeros((len(file.labels), len(ids)), dtype=np.float32)
    for row, names in enumerate(file.labels):
        targets[row, [ids[name] for name in names or ()]] = 1
        if names is None:
            targets[row] = np.nan
    return targets


def _doubts(train: _File) -> Iterator[str]:
    counts = Counter(name for names in train.labels for name in set(names))
    yield from (f"{train.path}: {doubt}" for doubt in doubts(counts))


def _values(file: _File) -> NDArray[np.float64] | None:
    if not file.label:
        return None
    return np.array([math.nan if label is None else label for label in file.labels], dtype=np.float64)


def _has_decimal_commas(file: _File) -> bool:
    """Returns whether all numbers of a file fit decimal commas, and some cannot be thousands."""
    texts = [str(row[name]).strip() for row in file.table.rows for name in file.label]
    numbers = {text for text in texts if _DIGITS.fullmatch(text)}
    has_commas = any("," in text and not _THOUSANDS.fullmatch(text) for text in numbers)
    return has_commas and all(map(_DECIMAL_COMMA.fullmatch, numbers))


def _number(cells: Sequence[Any], place: str, mark: str = ".") -> float:
    (value,) = cells
    if is_missing(value):
        raise NoLabel(value.strip() if isinstance(value, str) else "")
    text = value if mark == "." else str(value).replace(".", " ").replace(",", ".")
    if not isinstance(value, bool) and is_number(text) and math.isfinite(float(text)):
        return float(text)
    remedy = " with a decimal point and no marks of thousands" if "," in str(value) else ""
    remedy = remedy if mark == "." else " with a decimal comma, as elsewhere"
    raise InputError(f"{place}: the label is {abbreviated(value)}; it must be a finite number{remedy}")


def _standardized(task: Task, train: Split) -> Task:
    """Sets shift and scale to the mean and standard deviation of the training values."""
    values = train.targets
    assert values is not None
    if values.min() == values.max():
        raise InputError(f"{train.path}: every training value is {values[0]:g}; there is nothing to learn from it")
    with np.errstate(over="ignore", invalid="ignore"):
        shift, scale = float(values.mean()), float(values.std())
    smallest, largest = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    # Double precision has 15 digits, and a value needs six of its deviation.
    if not (abs(shift) < largest and max(smallest, 1e-9 * abs(shift)) < scale < largest):
        raise InputError(
            f"{train.path}: training values from {values.min():.15g} to {values.max():.15g} are too large or too close "
            "together to compute with; rescale them"
        )
    return dataclasses.replace(task, shift=shift, scale=scale)


def _validation_rows(train: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
    """Rows to validate on; these and the others have an example of every class that has two, if possible."""
    assert train.targets is not None
    num_wanted = max(1, round(len(train.texts) * fraction))
    if train.targets.ndim > 1:
        return covering(train.targets > 0, num_wanted, seed)
    return stratified(train.targets if task.labels else np.zeros(len(train.texts), dtype=np.int64), num_wanted, seed)
