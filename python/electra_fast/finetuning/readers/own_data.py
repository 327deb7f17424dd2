"""Reads a user's .tsv, .csv, .jsonl or .parquet files as a classification, multi-label or regression task."""

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
    available_columns,
    check_columns,
    columns_note,
    named_rows,
    others_of,
    rejected_rows,
    text_of,
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
# More labels than this with under two examples each, on average, are an error: the column does not contain classes.
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
    """The rows also have all other columns."""
    classes: Columns = ()
    """Class names of integer labels, as stored by `datasets`."""
    usable: list[int] = field(default_factory=list)
    """Positions of the rows that become examples; `texts` and `labels` are theirs. A missing label is None."""
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
    """Reads the files of a classification or regression task.

    Examples without a label are left out; in `test` they are predicted but not scored. The task is multi-label if
    there are several label columns (of 0/1 or true/false), lists of labels, or a `label_separator`.

    The arguments are the same as in `electra_fast.finetune`, with tuples of names: if empty, the first of
    `TEXT_COLUMNS` and `LABEL_COLUMNS` in the training file. `seed` is `split_seed`. With `folds`, the validation set is
    one fold instead of a fraction. Both are stratified by class. Raises the errors of `read_examples`.
    """
    check_dev_fraction(dev_fraction)
    chosen = {"train": (text, label), "dev": (dev_text, dev_label), "test": (test_text, test_label)}
    for name, path in (("dev", dev), ("test", test)):
        if path is None and any(chosen[name]):
            raise InputError(f"--{name}-text and --{name}-label need --{name} FILE")
    parser = _TextParser(quoting, skip_bad_rows, group, kind, chosen, labels, label_map, label_separator)
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
    """Reads labeled examples for a trained model's task; returns them and notes for the user.

    `trained` are the text and label columns that the model was trained on, if known; the first of them in the file are
    read. Rows with a label that the task lacks are bad rows. The other arguments and the errors are the same as in
    `read`.
    """
    kind = "regression" if task.kind == "regression" else "classification"
    chosen = {"data": (text, label)}
    parser = _TextParser(quoting, skip_bad_rows, "", kind, chosen, (), label_map, label_separator)
    return parser.read_labeled(task, path, trained)


@dataclass
class _TextParser(Parser[_File]):
    """Texts and their classes or values."""

    kind: str
    chosen: Mapping[str, tuple[Columns, Columns]]
    """The user's text and label columns of each file; empty for the default."""
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
                has_others = name != "train" or "dev" not in paths  # the training file's only for a validation set
                files[name] = self._load(name, table, *chosen[name], has_others=has_others)
                files[name].name_classes(self._class_names(files[name]))
        self.train = train = files["train"]
        self._check_options(train.label)
        form = self._read_rows(files, self.labels)
        texts, labels = (" and ".join(map(repr, names)) for names in (train.text, train.label))
        columns = columns_note(train.path, f"text in {texts}, label in {labels}: {form}", *self.chosen["train"])
        self.notes[:0] = [*(note for table in tables.values() for note in table.notes), columns]
        return files

    def read_labeled(self, task: Task, path: Path, trained: Trained) -> tuple[Split, list[str]]:
        with open_tables({"data": path}, self.quoting) as tables:
            table = tables["data"]
            text = _training_columns(table, self.chosen["data"][0], trained[0] or TEXT_COLUMNS, "text")
            label = _training_columns(table, self.chosen["data"][1], trained[1] or _LABEL_COLUMNS, "label")
            self._check_options(label)
            file = self._load("data", table, text, label, has_others=True)
        names = self._class_names(file)
        if not {*names}.isdisjoint(task.labels):  # otherwise the model was trained on integers
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
        labels = {name for names in train.labels for name in names}
        if len(labels) < (1 if is_multi_label else 2):
            unlabeled = (note for note in self.notes if note.startswith(f"{train.path}: ") and "no label" in note)
            rest = "".join(f" ({note})" for note in itertools.islice(unlabeled, 1))
            label = f"the label {listed(labels)}" if labels else "no label"
            raise InputError(f"{train.path}: every example has {label}; there is nothing to learn{rest}")
        classes = self.reader.flags or self.labels or _classes(train, labels, is_multi_label)
        self.reader.check_mapping(labels)
        self.ids = {self.reader.canonical(name): number for number, name in enumerate(classes)}
        if len(self.ids) < len(classes):
            raise InputError(f"--labels = {','.join(classes)}: must not repeat a label")
        for file in files.values():
            file.keep(self.bad.passing(range(len(file.labels)), partial(self._check_known, file)))
        if self.unknown:
            source = "--labels" if self.labels else f"labels of {train.path}"
            self.hint = f"; {source}: {listed(classes)}{near_label(self.unknown[0], classes)}"
        counts = Counter(name for names in train.labels for name in set(names))
        self.notes += [f"{train.path}: {doubt}" for doubt in doubts(counts)]
        kind, metric = ("multi-label", "f1_micro") if is_multi_label else ("classification", "accuracy")
        return Task(name="classification", kind=kind, labels=classes, metric=metric)

    def split(self, name: str, file: _File, task: Task) -> Split:
        return file.split(self._targets(file, task))

    def group_rows(self, whole: Split) -> list[Row]:
        return [self.train.rows[row] for row in self.train.usable]

    def choose(self, whole: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
        """Chooses so that, if possible, both parts have an example of every class with at least two examples."""
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
        """Returns the text and label columns of each file; adds a note if names differ from the training file's."""
        for table in tables.values():
            table.names()
        text = _training_columns(tables["train"], self.chosen["train"][0], TEXT_COLUMNS, "text")
        label = _training_columns(tables["train"], self.chosen["train"][1], _LABEL_COLUMNS, "label")
        if len(text) > 2:
            raise InputError(f"--text = {','.join(text)}: must be one or two columns, got {len(text)}")
        # A column `score` rarely has classes.
        usual = [names for names in _LABEL_COLUMNS if self.kind == "regression" or names != ("score",)]
        columns = {"train": (text, label)}
        for name, table in [*tables.items()][1:]:
            own_text, own_label = self.chosen[name]
            texts = self._other_columns(table, own_text, text, TEXT_COLUMNS, f"--{name}-text")
            is_test = name == "test"
            labels = self._other_columns(table, own_label, label, usual, f"--{name}-label", optional=is_test)
            columns[name] = texts, labels
        return columns

    def _other_columns(
        self,
        table: OpenTable,
        chosen: Columns,
        trained: Columns,
        usual: Sequence[Columns],
        flag: str,
        *,
        optional: bool = False,
    ) -> Columns:
        """Returns the chosen columns, the training file's, or the only usual ones (with a note); () if none exist."""
        if chosen and len(chosen) != len(trained):
            expected = f"must have {len(trained)} names, as in the training file: {', '.join(trained)}"
            raise InputError(f"{flag} = {','.join(chosen)}: {expected}")
        path = table.path
        available = table.names()
        names = chosen or trained
        if not chosen and not set(names) <= set(available):
            matches = [columns for columns in usual if len(columns) == len(trained) and set(columns) <= set(available)]
            if len(matches) == 1:
                instead = f"{', '.join(matches[0])} instead of {', '.join(trained)}"
                self.notes.append(f"{path}: reads {instead}; choose other columns with {flag}")
                return matches[0]
            if optional and not matches:
                return ()
        check_columns(path, available, names, flag)
        return names

    def _class_names(self, file: _File) -> Columns:
        is_class = self.kind == "classification" and len(file.label) == 1
        return file.table.class_names.get(file.label[0], ()) if is_class else ()

    def _load(self, name: str, table: OpenTable, text: Columns, label: Columns, *, has_others: bool) -> _File:
        chosen = text + label
        if repeated := {name for name in chosen if chosen.count(name) > 1}:
            raise InputError(f"{table.path}: --text and --label name the column {min(repeated)!r} twice; name it once")
        wanted = chosen + verdict_columns(table.names(), chosen)
        rows = table.load(wanted, self.bad, has_others=has_others)
        return _File(name=name, table=table, rows=rows, text=text, label=label, has_others=has_others)

    def _check_options(self, label: Columns) -> None:
        if self.kind == "regression" and (self.labels or self.label_separator or self.mapping or len(label) > 1):
            raise InputError(
                "a regression needs one label column of numbers; remove --labels, --label-map and --label-separator"
            )
        if len(label) > 1 and (self.labels or self.label_separator):
            raise InputError("the names of several label columns are the labels; remove --labels and --label-separator")

    def _read_rows(self, files: Mapping[str, _File], classes: Columns, trained: Task | None = None) -> str:
        """Reads the rows of all files with the label form of the first file; returns a description of the form."""
        first = next(iter(files.values()))
        read_cells: Callable[[Sequence[Any], str], Any]
        if self.kind == "classification":
            cells = [row[first.label[0]] for row in first.rows]
            reader = LabelReader(cells, first.table.place, first.label, classes, self.label_separator, self.mapping)
            if trained and reader.is_multi_label and trained.kind != "multi-label":
                several = f"examples have several labels in {', '.join(first.label)}, but the model predicts one"
                raise InputError(f"{first.path}: {several}; choose another column with --label")
            self.reader = read_cells = reader
            form = reader.described
        else:
            has_commas = _has_decimal_commas(first)
            read_cells = partial(_number, mark="," if has_commas else ".")
            form = f"one number per example{', with decimal commas' if has_commas else ''}"
        for file in files.values():
            self._read_file(file, read_cells)
        return form

    def _read_file(self, file: _File, read_cells: Callable[[Sequence[Any], str], Any]) -> None:
        """Reads the rows of a file; leaves out rows without a label, except in a test file."""
        table = file.table
        is_test = file.name == "test"
        markers = Counter[str]()
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
                    except NoLabel as marker:
                        markers[str(marker)] += 1
                        unlabeled.append(row)
                if label is None and not is_test:
                    continue
                file.texts.append(tuple(text_of(table.path, table.lines[row], values, name) for name in file.text))
                file.usable.append(row)
                file.labels.append(label)
        if is_test and all(label in (None, -1) for label in file.labels):  # the labels are hidden
            file.label = ()
            unlabeled = []
        self.notes += [*_unlabeled_note(file, markers, unlabeled), *_empty_texts(file)]

    def _check_known(self, file: _File, number: int) -> None:
        for name in file.labels[number] or ():
            if name not in self.ids:
                self.unknown.append(name)
                raise InputError(f"{file.table.place(file.usable[number])}: unknown label {name!r}")

    def _targets(self, file: _File, task: Task) -> NDArray[Any] | None:
        """Returns class ids, int64 [n]; flags of a multi-label task, float32 [n, labels]; or values, float64 [n]."""
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


def _training_columns(table: OpenTable, chosen: Columns, usual: Sequence[Columns], kind: str) -> Columns:
    available = table.names()
    names = chosen or next((names for names in usual if set(names) <= set(available)), ())
    if not names:
        raise InputError(f"{table.path}: no {kind} column; {available_columns(available)}; choose with --{kind}")
    check_columns(table.path, available, names, f"--{kind}")
    return names


def _named(cell: Any, names: Columns) -> Any:
    if isinstance(cell, list):
        return [_named(item, names) for item in cell]
    return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else cell


def _unlabeled_note(file: _File, markers: Counter[str], unlabeled: list[int]) -> Iterator[str]:
    if not unlabeled:
        return
    treatment = "predicted but not scored" if file.name == "test" else "left out"
    first = file.table.place(unlabeled[0]).removeprefix(f"{file.path}: ")
    remedy = _how_to_keep(markers, file.labels) if file.name == "train" and len(file.label) == 1 else ""
    yield (
        f"{file.path}: {len(unlabeled):,} of {len(file.rows):,} examples have no label "
        f"({left_out(markers)}; first: {first}) and are {treatment}{remedy}"
    )


def _how_to_keep(markers: Counter[str], labels: Sequence[Any]) -> str:
    marker = next((marker for marker in ("-1", "-") if marker in markers), None)
    lists = [names for names in labels if isinstance(names, list)]
    if marker is None or not lists:
        return ""
    classes = _sorted({marker, *(name for names in lists for name in names)})
    if len(classes) > 10:
        return f"; if {marker} is a class, name it among --labels"
    return f"; if {marker} is a class, add --labels={','.join(classes)}"


def _empty_texts(file: _File) -> tuple[str, ...]:
    """Returns a note about examples without text, which are kept; raises InputError if no example has text."""
    empty = [row for row, parts in zip(file.usable, file.texts, strict=True) if not any(map(str.strip, parts))]
    if empty and len(empty) == len(file.texts):
        columns = " and ".join(map(repr, file.text))
        raise InputError(f"{file.path}: every text in {columns} is empty; choose another column with --text")
    return (f"{file.table.place(empty[0])}: the first of {len(empty):,} examples with empty text",) if empty else ()


def _classes(train: _File, labels: set[str], is_multi_label: bool) -> Columns:
    """Returns the labels that occur, in the order of stored class names or sorted.

    Raises InputError if they look like numbers to predict or ids.
    """
    if labels <= {*train.classes}:
        return tuple(name for name in train.classes if name in labels)
    if not is_multi_label and all(map(is_number, labels)) and not all(map(INTEGER.fullmatch, labels)):
        names = zip(train.usable, train.labels, strict=True)
        row, name = next((row, name) for row, (name,) in names if not INTEGER.fullmatch(name))
        raise InputError(
            f"{train.table.place(row)}: label = {name!r}: a class cannot be a number with decimals; "
            "pass --task regression to predict numbers, or write classes as integers or words"
        )
    if len(labels) > MAX_SPARSE_CLASSES and len(labels) > len(train.usable) / 2:
        raise InputError(
            f"{train.path}: {len(labels):,} different labels in {len(train.usable):,} examples; "
            "pass --task regression to predict numbers, or choose another column with --label"
        )
    return _sorted(labels)


def _sorted(names: Collection[str]) -> Columns:
    are_integers = all(map(INTEGER.fullmatch, names))
    return tuple(sorted(names, key=lambda name: (int(name) if are_integers else 0, name)))


def _has_decimal_commas(file: _File) -> bool:
    """Returns whether all numbers of a file fit decimal commas, and some do not fit thousands separators."""
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
    remedy = " with a decimal point and no thousands separators" if "," in str(value) else ""
    remedy = remedy if mark == "." else " with a decimal comma, as in other rows"
    raise InputError(f"{place}: label = {abbreviated(value)}: must be a finite number{remedy}")


def _standardized(task: Task, train: Split) -> Task:
    """Returns the task with shift and scale set to the mean and standard deviation of the training values."""
    values = train.targets
    assert values is not None
    if values.min() == values.max():
        raise InputError(f"{train.path}: every training value is {values[0]:g}; there is nothing to learn")
    with np.errstate(over="ignore", invalid="ignore"):
        shift = float(values.mean())
        scale = float(values.std())
    smallest, largest = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
    # Double precision has 15 digits; six of them must remain for deviations from the mean.
    if not (abs(shift) < largest and max(smallest, 1e-9 * abs(shift)) < scale < largest):
        raise InputError(
            f"{train.path}: training values from {values.min():.15g} to {values.max():.15g}: too large or too close "
            "together for the computation; rescale them"
        )
    return dataclasses.replace(task, shift=shift, scale=scale)
