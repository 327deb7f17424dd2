"""Reads the nine GLUE tasks in their usual layouts and writes predictions in the format of the GLUE server.

In .tsv files quotes are text, and a file without a header has the official columns. In .parquet files from the Hub,
integer labels follow the class names in the file's metadata, or else the official order.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.readers.delimited import iterate_cells
from electra_fast.finetuning.readers.labels import is_number
from electra_fast.finetuning.readers.rows import abbreviated, available_columns, place
from electra_fast.finetuning.readers.tables import open_table
from electra_fast.finetuning.task import Split, Task, TaskData, select

LABEL_COLUMNS = ("gold_label", "Quality", "is_duplicate", "score", "label")
ID_COLUMNS = ("index", "id", "idx")
SENTENCE_PAIR = ("sentence1", "sentence2")
# The published QQP and MNLI training files have a few malformed lines.
MAX_MALFORMED_FRACTION = 0.01
MAX_SIMILARITY = 5.0
UNDECIDED = -1
UNKNOWN = -2
MRPC_ORIGINAL = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv")
MRPC_IDS = ("#1 ID", "#2 ID")


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """The files, columns and label words of a task."""

    task: Task
    folder: str
    """Official name of the folder and of the submission."""
    texts: tuple[tuple[str, ...], ...]
    """Names of the text columns: official, then in Hugging Face's exports."""
    columns: tuple[str, ...] = ()
    """Official columns of the training file; empty: an index, the texts and the label."""
    test_columns: tuple[str, ...] = ()
    """Official columns of the test file; empty: an index and the texts."""
    dev_columns: tuple[str, ...] = ()
    """Official columns of the dev file; empty: the same as in the training file."""
    words: tuple[str, ...] = ()
    """Other names of the labels."""
    aliases: tuple[str, ...] = ()
    """Other folder names, in lower case and without punctuation."""
    variants: tuple[str, ...] = ("",)
    """Suffixes of the dev and test file names."""

    def official_columns(self, split: str) -> tuple[str, ...]:
        usual = ("index", *self.texts[0])
        if split == "diagnostic":
            return usual
        columns = self.columns or (*usual, "label")
        if split == "train":
            return columns
        return self.dev_columns or columns if split.startswith("dev") else self.test_columns or usual


def _classification(
    name: str, folder: str, labels: tuple[str, ...] = ("0", "1"), metric: str = "accuracy", **rest: Any
) -> GlueTask:
    return GlueTask(task=Task(name=name, kind="classification", labels=labels, metric=metric), folder=folder, **rest)


ENTAILMENT = ("entailment", "not_entailment")
_PARSES = tuple(f"sentence{n}_{kind}" for kind in ("binary_parse", "parse") for n in (1, 2))
_MNLI = ("index", "promptID", "pairID", "genre", *_PARSES, *SENTENCE_PAIR)
_MRPC = ("#1 ID", "#2 ID", "#1 String", "#2 String")
_STSB = ("index", "genre", "filename", "year", "old_index", "source1", "source2", *SENTENCE_PAIR)

TASKS: dict[str, GlueTask] = {
    "cola": _classification(
        "cola",
        "CoLA",
        metric="matthews",
        texts=(("sentence",),),
        columns=("source", "label", "star", "sentence"),
        words=("unacceptable", "acceptable"),
    ),
    "sst2": _classification(
        "sst2",
        "SST-2",
        texts=(("sentence",),),
        columns=("sentence", "label"),
        words=("negative", "positive"),
        aliases=("sst",),
    ),
    "mrpc": _classification(
        "mrpc",
        "MRPC",
        texts=(("#1 String", "#2 String"), SENTENCE_PAIR),
        columns=("Quality", *_MRPC),
        test_columns=("index", *_MRPC),
        words=("not_equivalent", "equivalent"),
    ),
    "stsb": GlueTask(
        task=Task(name="stsb", kind="regression", metric="spearman", scale=MAX_SIMILARITY),
        folder="STS-B",
        texts=(SENTENCE_PAIR,),
        columns=(*_STSB, "score"),
        test_columns=_STSB,
        aliases=("sts",),
    ),
    "qqp": _classification(
        "qqp",
        "QQP",
        texts=(("question1", "question2"),),
        columns=("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
        test_columns=("id", "question1", "question2"),
        words=("not_duplicate", "duplicate"),
    ),
    "mnli": _classification(
        "mnli",
        "MNLI",
        labels=("entailment", "neutral", "contradiction"),
        texts=(SENTENCE_PAIR, ("premise", "hypothesis")),
        columns=(*_MNLI, "label1", "gold_label"),
        dev_columns=(*_MNLI, *(f"label{n}" for n in range(1, 6)), "gold_label"),
        test_columns=_MNLI,
        variants=("_matched", "_mismatched"),
    ),
    "qnli": _classification("qnli", "QNLI", ENTAILMENT, texts=(("question", "sentence"),)),
    "rte": _classification("rte", "RTE", ENTAILMENT, texts=(SENTENCE_PAIR,)),
    "wnli": _classification("wnli", "WNLI", texts=(SENTENCE_PAIR,), words=("not_entailment", "entailment")),
}


def read(name: str, folder: Path) -> TaskData:
    """Reads a task from its folder or from the folder above the folders of several tasks.

    Raises FileNotFoundError, or InputError with the line and a remedy if a file cannot be used.
    """
    glue = TASKS[name]
    folder = locate(name, folder)
    notes: list[str] = []
    if name == "mrpc" and not _files(folder, "train"):
        return _read_original_mrpc(glue, folder)
    train = _read_split(glue, "train", _files(folder, "train"), notes)
    dev = [
        _read_split(glue, _split_name("dev", variant), _dev_files(folder, variant), notes) for variant in glue.variants
    ]
    tests = {_split_name("test", variant): _files(folder, f"test{variant}") for variant in glue.variants}
    if name == "mnli":
        tests["diagnostic"] = _diagnostic_files(folder)
    test = [_read_split(glue, split, files, notes) for split, files in tests.items() if files]
    return TaskData(task=glue.task, train=train, dev=tuple(dev), test=tuple(test), notes=tuple(notes))


def held_tasks(folder: Path) -> list[str]:
    """Returns the tasks with a folder in `folder`, in the order of `TASKS`, or the task to which `folder` belongs."""
    if names := [name for name in TASKS if _subfolder(name, folder)]:
        return names
    if name := task_name(folder.resolve().name):
        return [name]
    folders = ", ".join(task.folder for task in TASKS.values())
    raise FileNotFoundError(
        f"{folder}: contains no folder of a GLUE task ({folders}); pass the folder above them, or --task"
    )


def locate(name: str, folder: Path) -> Path:
    glue = TASKS[name]
    original = MRPC_ORIGINAL[:1] if name == "mrpc" else ()
    for candidate in (_subfolder(name, folder), folder):
        if candidate and (_files(candidate, "train") or any((candidate / file).is_file() for file in original)):
            return candidate
    files = " or ".join(("train.tsv", "train*.parquet", *original))
    raise FileNotFoundError(f"{folder}: no {files} in this folder or in {glue.folder}/")


def task_name(name: str) -> str | None:
    """Returns the key in `TASKS` for one of a task's usual names, such as `SST-2`; None for other names."""
    letters = _letters(name)
    return next((key for key, glue in TASKS.items() if letters in (key, *glue.aliases)), None)


def _subfolder(name: str, folder: Path) -> Path | None:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    glue = TASKS[name]
    names = (name, *glue.aliases)
    folders = [path for path in folder.iterdir() if path.is_dir() and _letters(path.name) in names]
    return min(folders, key=lambda path: (path.name != glue.folder, path.name), default=None)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _split_name(part: str, variant: str) -> str:
    return f"{part}-mismatched" if variant == "_mismatched" else part


def _dev_files(folder: Path, variant: str) -> list[Path]:
    names = [f"{part}{variant}" for part in ("dev", "validation")]
    for name in names:
        if files := _files(folder, name):
            return files
    missing = " or ".join(f"{name}.tsv" for name in names)
    raise FileNotFoundError(f"{folder}: contains no {missing}, and no .parquet file of these names")


def _files(folder: Path, name: str) -> list[Path]:
    """Returns a split's .tsv file or its files from the Hub: NAME-00000-of-00001.parquet, NAME/0000.parquet."""
    patterns = (f"{name}.tsv", f"{name}.parquet", f"{name}-*-of-*.parquet", f"{name}/*.parquet")
    for pattern in (*patterns, *(f"data/{pattern}" for pattern in patterns)):
        if files := sorted(path for path in folder.glob(pattern) if path.is_file()):
            total = re.search(r"-of-([0-9]+)\.parquet$", files[0].name)
            if total and int(total[1]) != len(files):
                raise FileNotFoundError(f"{files[0]}: only {len(files)} of {int(total[1])} parts; download the others")
            return files
    return []


def _diagnostic_files(folder: Path) -> list[Path]:
    names = ("diagnostic/diagnostic.tsv", "diagnostic.tsv", "AX.tsv")
    above = folder.absolute().parent
    paths = [place / name for place in (folder, above) for name in names]
    return list(filter(Path.is_file, paths))[:1] or _files(above / "ax", "test")


def _read_original_mrpc(glue: GlueTask, folder: Path) -> TaskData:
    """Reads Microsoft's files: dev_ids.tsv lists the dev examples in the training file."""
    notes: list[str] = []
    train_path, test_path, dev_ids_path = (folder / name for name in MRPC_ORIGINAL)
    train = _read_split(glue, "train", [train_path], notes, MRPC_IDS)
    if not test_path.is_file():
        raise FileNotFoundError(f"{test_path}: no such file")
    test = _read_split(glue, "test", [test_path], notes)
    if dev_ids_path.is_file():
        pairs = {"\t".join(cells) for _, cells in iterate_cells(dev_ids_path, "\t")}
        is_dev = np.array([pair in pairs for pair in train.ids])
        if is_dev.all() or not is_dev.any():
            raise InputError(f"{dev_ids_path}: lists {'all' if is_dev.all() else 'none'} of the pairs of {train_path}")
        dev = _numbered(select(train, "dev", np.flatnonzero(is_dev)))
        train = select(train, "train", np.flatnonzero(~is_dev))
    else:
        dev = dataclasses.replace(test, name="dev")
        notes.append(f"{folder}: no dev_ids.tsv, so {test_path.name} is also the validation set")
    return TaskData(task=glue.task, train=_numbered(train), dev=(dev,), test=(test,), notes=tuple(notes))


def _numbered(split: Split) -> Split:
    return dataclasses.replace(split, ids=[str(row) for row in range(len(split.ids))])


class _Columns(NamedTuple):
    num_fields: int
    texts: tuple[int, ...]
    label: int | None
    ids: tuple[int, ...]

    def problem(self, cells: list[str], needs_label: bool) -> str | None:
        if len(cells) < self.num_fields or any(cells[self.num_fields :]):
            return f"found {len(cells)} fields, expected {self.num_fields}"
        return "no label" if needs_label and self.label is not None and not cells[self.label].strip() else None


def _read_split(
    glue: GlueTask, name: str, files: list[Path], notes: list[str], id_columns: tuple[str, ...] = ()
) -> Split:
    """Reads a split's files; ids are the joined `id_columns`, by default the index column if the file has one."""
    path = files[0]
    is_test = name != "train" and not name.startswith("dev")
    places = []
    labels = []
    texts = []
    ids = list[str]()
    malformed = list[int]()
    for file in files:
        columns, records = _open(glue, name, file, id_columns)
        for line, cells in records:
            if problem := columns.problem(cells, needs_label=not is_test):
                if name != "train":
                    raise InputError(f"{place(file, line)}: {problem}")
                malformed.append(line)
                continue
            ids.append("\t".join(cells[position] for position in columns.ids) or str(len(ids) + len(malformed)))
            places.append((file, line))
            labels.append("" if columns.label is None else cells[columns.label].strip())
            texts.append(tuple(cells[position] for position in columns.texts))
    notes += _malformed_note(path, malformed, len(places) + len(malformed))
    targets = None if is_test and set(labels) <= {"", "-1"} else _targets(glue, places, labels)
    split = Split(name=name, path=path, texts=texts, targets=targets, ids=ids)
    if targets is not None and UNDECIDED in targets:  # MNLI: the annotators disagreed
        if not len(decided := np.flatnonzero(targets != UNDECIDED)):
            raise InputError(f"{path}: no example has a gold label")
        num_left_out = len(targets) - len(decided)
        notes.append(f"{path}: {num_left_out:,} of {len(targets):,} examples have no gold label and are left out")
        split = select(split, name, decided)
    if name == "train" and split.targets is not None and len(np.unique(split.targets)) == 1:
        raise InputError(f"{path}: every example has the label {labels[0]!r}; there is nothing to learn")
    return split


def _parquet_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the header and the rows as cells of text, with class names in place of integers if the file has them."""
    with open_table(path) as table:
        names = table.names()
        yield 0, list(names)
        for row, values in table.rows():
            yield row, [_cell(values[name], table.class_names.get(name, ())) for name in names]


def _cell(value: Any, classes: Sequence[str]) -> str:
    if classes and isinstance(value, int) and 0 <= value < len(classes):
        return classes[value]
    if isinstance(value, float):
        return f"{value:.7g}"  # the precision of fp32
    return "" if value is None else str(value)


def _open(
    glue: GlueTask, name: str, path: Path, id_columns: tuple[str, ...]
) -> tuple[_Columns, Iterator[tuple[int, list[str]]]]:
    """Finds the columns in the header; without a header, they are the official ones."""
    records = _parquet_cells(path) if path.suffix == ".parquet" else iterate_cells(path, "\t")
    first = next(records, None)
    if first is None:
        raise InputError(f"{path}: empty")
    names = tuple(cell.strip() for cell in first[1])
    texts = next((texts for texts in glue.texts if set(texts) <= set(names)), None)
    if texts is None and path.suffix == ".parquet":
        expected = " and ".join(glue.texts[-1])
        raise InputError(f"{path}: no columns {expected}; {available_columns(names)}")
    if texts is None:
        texts = glue.texts[0]
        names = glue.official_columns(name)
        records = itertools.chain([first], records)
    label = next((names.index(column) for column in LABEL_COLUMNS if column in names), None)
    if label is None and (name == "train" or name.startswith("dev")):
        raise InputError(f"{path}: no label column; available columns: {', '.join(names)}")
    ids = id_columns or tuple(column for column in ID_COLUMNS if column in names)[:1]
    positions = {column: position for position, column in enumerate(names)}
    text_positions, id_positions = (tuple(positions[column] for column in columns) for columns in (texts, ids))
    return _Columns(len(names), text_positions, label, id_positions), records


def _malformed_note(path: Path, malformed: list[int], num_lines: int) -> list[str]:
    if not num_lines:
        raise InputError(f"{path}: no examples")
    if not malformed:
        return []
    text = f"{path}: {len(malformed):,} of {num_lines:,} lines lack fields or a label (first: line {malformed[0]})"
    if len(malformed) > MAX_MALFORMED_FRACTION * num_lines:
        raise InputError(f"{text}; download the file again")
    return [f"{text}; they are left out"]


def _targets(glue: GlueTask, places: list[tuple[Path, int]], labels: list[str]) -> NDArray[Any]:
    if not glue.task.labels:
        values = np.array([float(label) if is_number(label) else math.nan for label in labels])
        wrong = ~((values >= 0) & (values <= MAX_SIMILARITY))
        allowed = f"a number from 0 to {MAX_SIMILARITY:g}"
    else:
        digits = tuple(map(str, range(len(glue.task.labels))))
        names = [*dict.fromkeys((*glue.task.labels, *glue.words, *digits))]
        codes = {word: code for words in (digits, glue.task.labels, glue.words) for code, word in enumerate(words)}
        codes |= {"-": UNDECIDED} if glue.task.name == "mnli" else {}
        values = np.array([codes.get(label, UNKNOWN) for label in labels], dtype=np.int64)
        wrong = values == UNKNOWN
        allowed = f"one of {', '.join(names)}"
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(f"{place(*places[row])}: label = {abbreviated(labels[row])}: must be {allowed}")
    return values


def submission_name(task: Task, split: Split) -> str:
    if split.name == "diagnostic":
        return "AX.tsv"
    ending = {"test": "-m", "test-mismatched": "-mm"}[split.name] if task.name == "mnli" else ""
    return f"{TASKS[task.name].folder}{ending}.tsv"


def write_submission(path: Path, task: Task, split: Split, outputs: NDArray[np.float64]) -> None:
    """Writes predictions for the GLUE server: a header, then lines of an index and a label or a similarity (0 to 5).

    `outputs` are logits [n, classes], or values [n] for STS-B. The file is replaced atomically.
    """
    if outputs.ndim == 1:
        predictions = [f"{value:.3f}" for value in outputs.clip(0, MAX_SIMILARITY) + 0.0]  # + 0.0 turns -0.0 into 0.0
    else:
        predictions = [task.labels[label] for label in outputs.argmax(1)]
    lines = (f"{index}\t{prediction}\n" for index, prediction in zip(split.ids, predictions, strict=True))
    replace_file(path, "index\tprediction\n" + "".join(lines))


def copy_submissions(out: Path, folder: Path, data: TaskData, seed: int) -> None:
    for split in data.test if data.task.name in TASKS else ():
        (out / "submission").mkdir(exist_ok=True)
        source = folder / f"seed-{seed}" / f"predictions.{split.name}.tsv"
        shutil.copyfile(source, out / "submission" / submission_name(data.task, split))
