"""Reads a user's own .tsv, .csv, .jsonl or .parquet files as a classification, multi-label or regression task."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.examples import (
    Columns,
    Fold,
    Parser,
    Trained,
    check_labeled,
    covering,
    read_examples,
    stratified,
)
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
    Row,
    abbreviated,
    check_columns,
    columns_note,
    named_rows,
    others_of,
    rejected_rows,
    text_of,
    there_are,
    verdict_columns,
)
from electra_fast.finetuning.readers.tables import OpenTable, Quoting, open_tables
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

_LABEL_COLUMNS = tuple((name,) for name in LABEL_COLUMNS)
_DIGITS = re.compile(r"[+-]?[0-9.,]*[0-9][0-9.,]*")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+(,[0-9]+)?")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")


@dataclass(kw_only=True)
class _File:
    name: str
    table: OpenTable
    rows: list[Row]
    text: Columns
    label: Columns
    """Empty if a test file has no labels."""
    has_others: bool
    """The rows have the other columns too."""
    classes: Columns = ()
    """Names of the labels' numbers, as `datasets` stores them."""
    usable: list[int] = field(default_factory=list)
    """Positions of the rows that become examples, with their texts and labels, None for no label."""
    texts: list[tuple[str, ...]] = field(default_factory=list)
    labels: list[Any] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.table.path

    def name_classes(self, names: Columns) -> None:
        self.classes = names
        for row in self.rows if names else ():
            row[self.label[0]] = _named(row[self.label[0]], names)

    def keep(self, numbers: Sequence[int]) -> None:
        self.usable = [self.usable[number] for number in numbers]
        self.texts = [self.texts[number] for number in numbers]
        self.labels = [self.labels[number] for number in numbers]

    def split(self, targets: NDArray[Any] | None) -> Split:
        others = [others_of(self.rows[row], self.text + self.label) for row in self.usable if self.has_others]
        ids, others = named_rows(self.usable, others)
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
    """Reads the files of a task, of classes or of numbers.

    Examples without a label are left out; in `test` they are predicted but not scored. Several label columns, each of
    0/1 or true/false, make the task multi-label, as lists and `label_separator` do.

    Arguments are those of `electra_fast.finetune`, with names as tuples: empty for the first of `TEXT_COLUMNS` and
    `LABEL_COLUMNS` that the training file has. `seed` is `split_seed`; instead of a fraction, the examples of one of
    `folds` can be set aside, stratified by class too. Raises as `read_examples` does.
    """
    check_dev_fraction(dev_fraction)
    given = {"train": (text, label), "dev": (dev_text, dev_label), "test": (test_text, test_label)}
    for name, path in (("dev", dev), ("test", test)):
        if path is None and any(given[name]):
            raise InputError(f"--{name}-text and --{name}-label need --{name} FILE")
    parser = _TextParser(quoting, skip_bad_rows, group, kind, given, labels, label_map, label_separator)
    return read_examples(train, dev, test, parser, dev_fraction=dev_fraction, folds=folds, seed=seed)


def read_labeled(
    task: Task,
    path: Path,
    trained: Trained,
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
    kind = "regression" if task.kind == "regression" else "classification"
    given = {"data": (text, label)}
    parser = _TextParser(quoting, skip_bad_rows, "", kind, given, (), label_map, label_separator)
    return parser.read_labeled(task, path, trained)


@dataclass
class _TextParser(Parser[_File]):
    """Texts and their classes or values."""

    kind: str
    given: Mapping[str, tuple[Columns, Columns]]
    """The chosen text and label columns of each file."""
    labels: Columns
    label_map: Mapping[str, str] | Sequence[str]
    label_separator: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.mapping = parse_mapping(self.label_map)
        self.reader: LabelReader | None = None
        self.ids: dict[str, int] = {}
        self.unknown: list[str] = []

    def read(self, paths: Mapping[str, Path]) -> dict[str, _File]:
        with open_tables(paths, self.quoting) as tables:
            chosen = self._columns(tables)
            files = {}
            for name, table in tables.items():
                has_others = name != "train" or "dev" not in paths  # of the training file only to set some aside
                files[name] = self._load(name, table, *chosen[name], has_others=has_others)
                files[name].name_classes(self._class_names(files[name]))
        self.train = train = files["train"]
        self._check_options(train.label)
        what = self._read_rows(files, self.labels)
        texts, labels = (" and ".join(map(repr, names)) for names in (train.text, train.label))
        columns = columns_note(train.path, f"text in {texts}, label in {labels}: {what}", *self.given["train"])
        self.notes[:0] = [*(note for table in tables.values() for note in table.notes), columns]
        return files

    def read_labeled(self, task: Task, path: Path, trained: Trained) -> tuple[Split, list[str]]:
        with open_tables({"data": path}, self.quoting) as tables:
            table = tables["data"]
            text = _training_columns(table, self.given["data"][0], trained[0] or TEXT_COLUMNS, "text")
            label = _training_columns(table, self.given["data"][1], trained[1] or _LABEL_COLUMNS, "label")
            self._check_options(label)
            file = self._load("data", table, text, label, has_others=True)
        names = self._class_names(file)
        if not {*names}.isdisjoint(task.labels):  # else the model was trained on the numbers
            file.name_classes(names)
        self._read_rows({"data": file}, task.labels, task)
        if self.reader:
            self.ids = {self.reader.canonical(name): number for number, name in enumerate(task.labels)}
            file.keep(known_rows(path, file.labels, self.ids, self.bad))
        notes = [*table.notes, *self.notes, *self.bad.finish()]
        check_labeled("data", path, len(file.usable))
        return file.split(self._targets(file, task)), notes

    def task(self, files: dict[str, _File]) -> Task:
        for file in files.values():
            check_labeled(file.name, file.path, len(file.usable))
        if self.reader is None:
            return Task(name=self.kind, kind=self.kind, metric="spearman")
        train = self.train
        is_multi_label = self.reader.is_multi_label
        found = {name for names in train.labels for name in names}
        if len(found) < (1 if is_multi_label else 2):
            unlabeled = (note for note in self.notes if note.startswith(f"{train.path}: ") and "no label" in note)
            rest = "".join(f" ({note})" for note in itertools.islice(unlabeled, 1))
            what = f"{listed(found) or 'no label'} in every example; there is nothing to learn"
            raise InputError(f"{train.path}: {what}{rest}")
        classes = self.reader.flags or self.labels or _classes(train, found, is_multi_label)
        self.reader.check_mapping(found)
        self.ids = {self.reader.canonical(name): number for number, name in enumerate(classes)}
        if len(self.ids) < len(classes):
            raise InputError(f"--labels names a label twice: {', '.join(classes)}")
        for file in files.values():
            file.keep(self.bad.passing(range(len(file.labels)), partial(self._check_known, file)))
        if self.unknown:
            known = "--labels names" if self.labels else f"{train.path} has"
            self.hint = f"; {known}: {listed(classes)}{near_label(self.unknown[0], classes)}"
        counts = Counter(name for names in train.labels for name in set(names))
        self.notes += [f"{train.path}: {doubt}" for doubt in doubts(counts)]
        kind, metric = ("multi-label", "f1_micro") if is_multi_label else ("classification", "accuracy")
        return Task(name="classification", kind=kind, labels=classes, metric=metric)

    def split(self, name: str, file: _File, task: Task) -> Split:
        return file.split(self._targets(file, task))

    def group_rows(self, whole: Split) -> list[Row]:
        return [self.train.rows[row] for row in self.train.usable]

    def choose(self, whole: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
        """Both parts have an example of every class that has two, if possible."""
        assert whole.targets is not None
        num_wanted = max(1, round(len(whole.texts) * fraction))
        if whole.targets.ndim > 1:
            return covering(whole.targets > 0, num_wanted, seed)
        classes = whole.targets if task.labels else np.zeros(len(whole.texts), dtype=np.int64)
        return stratified(classes, num_wanted, seed)

    def complete(self, task: Task, splits: dict[str, Split]) -> Task:
        return _standardized(task, splits["train"]) if self.kind == "regression" else task

    def columns(self, files: dict[str, _File]) -> Trained:
        return [file.text for file in files.values()], [file.label for file in files.values()]

    def _columns(self, tables: Mapping[str, OpenTable]) -> dict[str, tuple[Columns, Columns]]:
        """Returns the text and label columns of each file; notes those of other names than in training."""
        for table in tables.values():
            table.names()
        text = _training_columns(tables["train"], self.given["train"][0], TEXT_COLUMNS, "text")
        label = _training_columns(tables["train"], self.given["train"][1], _LABEL_COLUMNS, "label")
        if len(text) > 2:
            raise InputError(f"--text names {len(text)} columns ({', '.join(text)}); it can be one or two")
        # A `score` is rarely the class.
        usual = [names for names in _LABEL_COLUMNS if self.kind == "regression" or names != ("score",)]
        columns = {"train": (text, label)}
        for name, table in [*tables.items()][1:]:
            own_text, own_label = self.given[name]
            texts = self._other_columns(table, own_text, text, TEXT_COLUMNS, f"--{name}-text")
            is_test = name == "test"
            labels = self._other_columns(table, own_label, label, usual, f"--{name}-label", optional=is_test)
            columns[name] = texts, labels
        return columns

    def _other_columns(
        self,
        table: OpenTable,
        given: Columns,
        trained: Columns,
        usual: Sequence[Columns],
        flag: str,
        *,
        optional: bool = False,
    ) -> Columns:
        """Returns the named columns, else those of the training file, else the only usual ones (noted); () for none."""
        if given and len(given) != len(trained):
            there = f"the training file has {len(trained)}: {', '.join(trained)}"
            raise InputError(f"{flag} names {', '.join(given)}; {there}")
        path = table.path
        available = table.names()
        names = given or trained
        if not given and not set(names) <= set(available):
            found = [each for each in usual if len(each) == len(trained) and set(each) <= set(available)]
            if len(found) == 1:
                instead = f"{', '.join(found[0])} instead of {', '.join(trained)}"
                self.notes.append(f"{path}: reads the columns {instead}; choose others with {flag}")
                return found[0]
            if optional and not found:
                return ()
        check_columns(path, available, names, flag)
        return names

    def _class_names(self, file: _File) -> Columns:
        is_class = self.kind == "classification" and len(file.label) == 1
        return file.table.class_names.get(file.label[0], ()) if is_class else ()

    def _load(self, name: str, table: OpenTable, text: Columns, label: Columns, *, has_others: bool) -> _File:
        chosen = text + label
        if repeated := {each for each in chosen if chosen.count(each) > 1}:
            raise InputError(f"{table.path}: the column {min(repeated)!r} is chosen twice by --text and --label")
        wanted = chosen + verdict_columns(table.names(), chosen)
        rows = table.load(wanted, self.bad, has_others=has_others)
        return _File(name=name, table=table, rows=rows, text=text, label=label, has_others=has_others)

    def _check_options(self, label: Columns) -> None:
        if self.kind == "regression" and (self.labels or self.label_separator or self.mapping or len(label) > 1):
            raise InputError(
                "a regression has one label column of numbers, and no --labels, --label-map or --label-separator"
            )
        if len(label) > 1 and (self.labels or self.label_separator):
            what = "their names are the labels: leave --labels and the separator out"
            raise InputError(f"with several label columns, {what}")

    def _read_rows(self, files: Mapping[str, _File], classes: Columns, trained: Task | None = None) -> str:
        """Reads the rows of all files by what the labels of the first one are; returns a description of that."""
        first = next(iter(files.values()))
        read_cells: Callable[[Sequence[Any], str], Any]
        if self.kind == "classification":
            cells = [row[first.label[0]] for row in first.rows]
            reader = LabelReader(cells, first.table.place, first.label, classes, self.label_separator, self.mapping)
            if trained and reader.is_multi_label and trained.kind != "multi-label":
                several = f"an example has several labels in {', '.join(first.label)}, and the model predicts one"
                raise InputError(f"{first.path}: {several}")
            self.reader = read_cells = reader
            what = reader.described
        else:
            has_commas = _has_decimal_commas(first)
            read_cells = partial(_number, mark="," if has_commas else ".")
            what = f"one number per example{', with decimal commas' if has_commas else ''}"
        for file in files.values():
            self._read_file(file, read_cells)
        return what

    def _read_file(self, file: _File, read_cells: Callable[[Sequence[Any], str], Any]) -> None:
        """Reads the rows of a file; leaves those without a label out, except in a test file."""
        table = file.table
        is_test = file.name == "test"
        signs = Counter[str]()
        unlabeled = list[int]()
        rejected = rejected_rows(file.path, file.rows, file.text + file.label, self.notes, is_test=is_test)
        for row, values in enumerate(file.rows):
            if row in rejected:
                continue
            with self.bad.collect():
                label = None
                if file.label:
                    try:
                        label = read_cells([values[name] for name in file.label], table.place(row))
                    except NoLabel as sign:
                        signs[str(sign)] += 1
                        unlabeled.append(row)
                if label is None and not is_test:
                    continue
                file.texts.append(tuple(text_of(table.path, table.lines[row], values, name) for name in file.text))
                file.usable.append(row)
                file.labels.append(label)
        if is_test and all(label in (None, -1) for label in file.labels):  # hidden
            file.label = ()
            unlabeled = []
        self.notes += [*_unlabeled_note(file, signs, unlabeled), *_empty_texts(file)]

    def _check_known(self, file: _File, number: int) -> None:
        for name in file.labels[number] or ():
            if name not in self.ids:
                self.unknown.append(name)
                raise InputError(f"{file.table.place(file.usable[number])}: unknown label {name!r}")

    def _targets(self, file: _File, task: Task) -> NDArray[Any] | None:
        """Returns class ids, int64 [n]; of several labels 0 and 1, float32 [n, labels]; or values, float64 [n]."""
        if not file.label:
            return None
        if self.reader is None:
            return np.array([math.nan if label is None else label for label in file.labels], dtype=np.float64)
        if task.kind != "multi-label":
            return np.array([NO_CLASS if names is None else self.ids[names[0]] for names in file.labels], np.int64)
        targets = np.zeros((len(file.labels), len(self.ids)), dtype=np.float32)
        for row, names in enumerate(file.labels):
            targets[row, [self.ids[name] for name in names or ()]] = 1
            if names is None:
                targets[row] = np.nan
        return targets


def _training_columns(table: OpenTable, given: Columns, usual: Sequence[Columns], kind: str) -> Columns:
    available = table.names()
    names = given or next((names for names in usual if set(names) <= set(available)), ())
    if not names:
        raise InputError(f"{table.path}: no {kind} column; {there_are(available)}; choose with --{kind}")
    check_columns(table.path, available, names, f"--{kind}")
    return names


def _named(cell: Any, names: Columns) -> Any:
    if isinstance(cell, list):
        return [_named(item, names) for item in cell]
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell


def _unlabeled_note(file: _File, signs: Counter[str], unlabeled: list[int]) -> Iterator[str]:
    if not unlabeled:
        return
    what = "predicted and not scored" if file.name == "test" else "left out"
    first = file.table.place(unlabeled[0]).removeprefix(f"{file.path}: ")
    remedy = _how_to_keep(signs, file.labels) if file.name == "train" and len(file.label) == 1 else ""
    yield (
        f"{file.path}: {len(unlabeled):,} of {len(file.rows):,} examples have no label "
        f"({left_out(signs)}; the first in {first}): {what}{remedy}"
    )


def _how_to_keep(signs: Counter[str], labels: Sequence[Any]) -> str:
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
    empty = [row for row, parts in zip(file.usable, file.texts, strict=True) if not any(map(str.strip, parts))]
    if empty and len(empty) == len(file.texts):
        columns = " and ".join(map(repr, file.text))
        raise InputError(f"{file.path}: every text is empty in {columns}; choose with --text")
    return (f"{file.table.place(empty[0])}: the first of {len(empty):,} examples with empty text",) if empty else ()


def _classes(train: _File, found: set[str], is_multi_label: bool) -> Columns:
    """Returns the labels that occur, in the order of their numbers, else sorted.

    Raises InputError if they look like numbers to predict or like ids.
    """
    if found <= {*train.classes}:
        return tuple(name for name in train.classes if name in found)
    if not is_multi_label and all(map(is_number, found)) and not all(map(INTEGER.fullmatch, found)):
        names = zip(train.usable, train.labels, strict=True)
        row, name = next((row, name) for row, (name,) in names if not INTEGER.fullmatch(name))
        raise InputError(
            f"{train.table.place(row)}: the label {name!r} is a number with decimals; "
            "predict numbers with --task regression, or write classes as integers or words"
        )
    if len(found) > MAX_SPARSE_CLASSES and len(found) > len(train.usable) / 2:
        raise InputError(
            f"{train.path}: {len(found):,} different labels in {len(train.usable):,} examples; "
            "predict numbers with --task regression, or choose another column with --label"
        )
    return _sorted(found)


def _sorted(names: Collection[str]) -> Columns:
    are_integers = all(map(INTEGER.fullmatch, names))
    return tuple(sorted(names, key=lambda name: (int(name) if are_integers else 0, name)))


def _has_decimal_commas(file: _File) -> bool:
    """Returns whether all numbers of a file fit decimal commas, and some cannot be thousands."""
    texts = [str(row[name]).strip() for row in file.rows for name in file.label]
    numbers = {text for text in texts if _DIGITS.fullmatch(text)}
    has_commas = any("," in text and not _THOUSANDS.fullmatch(text) for text in numbers)
    return has_commas and all(map(_DECIMAL_COMMA.fullmatch, numbers))


def _number(cells: Sequence[Any], place: str, mark: str) -> float:
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
        shift = float(values.mean())
        scale = float(values.std())
    smallest, largest = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    # Double precision has 15 digits, and a value needs six of its deviation.
    if not (abs(shift) < largest and max(smallest, 1e-9 * abs(shift)) < scale < largest):
        raise InputError(
            f"{train.path}: training values from {values.min():.15g} to {values.max():.15g} are too large or too close "
            "together to compute with; rescale them"
        )
    return dataclasses.replace(task, shift=shift, scale=scale)
