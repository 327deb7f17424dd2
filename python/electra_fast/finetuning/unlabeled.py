"""Reads unlabeled examples. A student learns them only from its teacher's answers."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError
from electra_fast.finetuning.prediction_input import Source, open_examples
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.readers.delimited import DIALECT, Dialect
from electra_fast.finetuning.readers.table_formats import file_or_table, is_table
from electra_fast.finetuning.task import Split, TaskData, num_trained_on, select
from electra_fast.finetuning.tasks import TASK_TYPES


def files_or_tables(data: Any) -> list[Path]:
    """Returns the files or tables of `unlabeled`, which may be a list or a single one."""
    is_single = isinstance(data, (str, Path)) or is_table(data)
    return [file_or_table("unlabeled", item) for item in ([data] if is_single else data)]


def read_unlabeled(files: Iterable[Path], data: TaskData, options: Mapping[str, Any]) -> tuple[Split, list[str]]:
    """Returns the examples of all files, and notes for the user.

    `options` are the reader's options for the training file; only text columns and dialect are used. Other columns,
    including labels, are ignored. Raises FileNotFoundError, or InputError that names the unusable row, column or value.
    """
    task_type = TASK_TYPES[data.task.kind]
    num_texts = len(data.train.texts[0])
    known = (*data.text_columns, *(glue.TASKS[data.task.name].texts if data.task.name in glue.TASKS else ()))
    usual = tuple(columns for columns in task_type.usual_columns if len(columns) == num_texts)
    dialect = Dialect(*(options[name] for name in DIALECT))
    examples = list[Any]()
    notes = list[str]()
    for file in files:
        with contextlib.ExitStack() as stack:
            path = stack.enter_context(local_file(file))
            source = Source(path, (), tuple(dict.fromkeys((*known, *usual))), num_texts, dialect)
            opened = stack.enter_context(open_examples(task_type, source))
            before = len(examples)
            examples += (example for example, _ in opened.rows)
            notes += opened.notes
        if len(examples) == before:
            raise InputError(f"{file}: no examples")
    return dataclasses.replace(task_type.split(examples, num_texts), name="unlabeled"), notes


def without_repeats(unlabeled: Split, data: TaskData) -> tuple[Split, list[str]]:
    """Drops empty and repeated examples and training examples; returns the rest, and notes for the user."""
    seen = set(data.train.texts)
    rows = list[int]()
    for row, texts in enumerate(unlabeled.texts):
        if texts not in seen and "".join(texts).strip():
            seen.add(texts)
            rows.append(row)
    left = select(unlabeled, unlabeled.name, rows)
    return left, list(_notes(len(unlabeled.texts) - len(rows), left, (*data.dev, *data.test)))


def _notes(num_dropped: int, left: Split, scored: Sequence[Split]) -> Iterable[str]:
    yield f"unlabeled examples: {len(left.texts):,}" + (
        f"; dropped {num_dropped:,} that are empty, repeated or in the training split" if num_dropped else ""
    )
    for split in scored:
        if number := num_trained_on(split, left):
            yield f"{number:,} unlabeled examples are in {split.name}: the student sees them without their labels"
