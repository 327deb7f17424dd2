"""Reads the data of the tasks of a `finetune` call."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_fast.config.section import did_you_mean
from electra_fast.errors import InputError
from electra_fast.finetuning.readers import glue as glue_files
from electra_fast.finetuning.readers import question_files
from electra_fast.finetuning.readers.delimited import DIALECT, Dialect, with_fields
from electra_fast.finetuning.readers.rows import as_names
from electra_fast.finetuning.task import TaskData, num_trained_on, overlap_warning
from electra_fast.finetuning.tasks import TASK_TYPES

_SQUAD = ("squad1", "squad2")
_READERS = {kind: task_type.read for kind, task_type in TASK_TYPES.items() if task_type.read is not None}
OWN_KINDS = tuple(_READERS)
_ONE_OF_OWN = f"--task {', '.join(OWN_KINDS[:-1])} or {OWN_KINDS[-1]}"
_COLUMNS = ("text", "label", "dev_text", "dev_label", "test_text", "test_label")
_TUPLES = (*_COLUMNS, "labels", "label_map")


def read_tasks(
    task: str | Sequence[str] | None,
    *,
    glue: Path | None = None,
    squad: Path | None = None,
    files: Mapping[str, Path] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> list[TaskData]:
    """Reads the data of GLUE tasks, of SQuAD, or of a task on the user's `files`; by default all tasks in the folder.

    `files` are `train`, and optionally `dev` and `test`; `columns` has keyword arguments of their reader. Raises
    FileNotFoundError, or ValueError that names the file, line, value or option.
    """
    requested = task.split(",") if isinstance(task, str) else list(task or ())
    chosen = list(dict.fromkeys(_known(name.strip()) for name in requested if name.strip()))
    if task is not None and not chosen:
        raise InputError(f"--task: names no task; must be one of {', '.join(_ALL_NAMES)}")
    files = files or {}
    folders = {"--glue DIR": glue, "--squad DIR": squad}
    sources = [*(flag for flag, folder in folders.items() if folder is not None), *(["--train FILE"] if files else [])]
    if len(sources) > 1:
        raise InputError(f"{' and '.join(sources)}: cannot be combined; pass one of them per call")
    needed = next(map(_source, chosen), f"--glue DIR or --squad DIR, or --train FILE with {_ONE_OF_OWN}")
    if not sources or files and "train" not in files:
        raise InputError(f"{f'--task {chosen[0]}' if chosen else 'finetune'} needs {needed}")
    (source,) = sources
    other = next((name for name in chosen if _source(name) != source), None)
    if other is not None:
        raise InputError(f"--task {other} needs {_source(other)}, not {source}")
    options = {name: value for name, value in (columns or {}).items() if value != _DEFAULTS[name]}
    if files:
        if len(chosen) != 1:
            raise InputError(f"--train needs one task: {_ONE_OF_OWN}")
        return [_read_own(chosen[0], files, options)]
    if options:
        kinds = ", ".join(kind for kind in OWN_KINDS if next(iter(options)) in options_of(_READERS[kind]))
        refuse(options, (), f"for --train with --task {kinds}")
    if squad is not None:
        return [question_files.read_squad(name, squad) for name in chosen or [question_files.held_version(squad)]]
    assert glue is not None
    return [glue_files.read(name, glue) for name in chosen or glue_files.held_tasks(glue)]


def _source(name: str) -> str:
    return "--glue DIR" if name in glue_files.TASKS else "--squad DIR" if name in _SQUAD else "--train FILE"


def _read_own(kind: str, files: Mapping[str, Path], arguments: Mapping[str, Any]) -> TaskData:
    options = reader_options(arguments, _READERS[kind], f"not for --task {kind}")
    if "group" in arguments and "dev" in files:
        raise InputError("--group: is for splitting --train, which --dev replaces; remove one of the two")
    task_data = _READERS[kind](files["train"], files.get("dev"), files.get("test"), **options)
    dev = task_data.dev[0]
    overlap = list(filter(None, [overlap_warning(task_data.train, task_data.dev[0])]))
    if not overlap and (num_known := num_trained_on(task_data.train, dev)):  # which inflates the scores
        number = f"{num_known:,} of {len(dev.texts):,}"
        overlap = [f"{dev.path}: the texts of {number} validation examples are in the training split"]
    text, label = (
        [options[name] for name in (kind, f"dev_{kind}", f"test_{kind}") if name in options]
        for kind in ("text", "label")
    )
    return dataclasses.replace(
        task_data,
        notes=(*task_data.notes, *overlap),
        text_columns=tuple(dict.fromkeys((*task_data.text_columns, *text))),
        label_columns=tuple(dict.fromkeys((*task_data.label_columns, *label))),
    )


def reader_options(
    arguments: Mapping[str, Any], reader: Callable[..., Any], why: str, trained: Iterable[tuple[str, ...]] = ()
) -> dict[str, Any]:
    """Returns arguments of a reader: names as tuples, and a `Dialect`. Raises InputError for unknown arguments.

    `trained` are the columns used in training.
    """
    refuse(arguments, options_of(reader), why)
    options: dict[str, Any] = {
        name: as_names(value) if name in _TUPLES and not isinstance(value, Mapping) else value
        for name, value in arguments.items()
    }
    dialect = Dialect(*(options.pop(name, default) for name, default in DIALECT.items()))
    columns = (*trained, *(options.get(name, ()) for name in _COLUMNS))
    return options | {"quoting": with_fields(dialect, columns)}


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns names and defaults of keyword arguments; `quoting` becomes the fields of a `Dialect`."""
    parameters = inspect.signature(function).parameters.values()
    keywords = (parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)
    options = {parameter.name: parameter.default for parameter in keywords}
    return options | (DIALECT if "quoting" in options else {})


def refuse(options: Iterable[str], known: Collection[str], why: str) -> None:
    """Raises InputError for the first unknown option."""
    refused = next((name for name in options if name not in known), None)
    if refused is not None:
        flag = "split-seed" if refused == "seed" else refused.replace("_", "-")
        raise InputError(f"--{flag}: is {why}")


_DEFAULTS = {name: value for reader in _READERS.values() for name, value in options_of(reader).items()}
OPTIONS = frozenset(_DEFAULTS) - {"folds", "seed"}
"""The arguments of `finetune` that are passed to the reader of the user's files."""
_ALL_NAMES = (*glue_files.TASKS, *_SQUAD, *OWN_KINDS)


def _known(name: str) -> str:
    if name in _ALL_NAMES:
        return name
    if squad := re.fullmatch(r"squad[ _-]?v?([12])(\.[01])?", name.lower()):
        return f"squad{squad[1]}"
    if (task := glue_files.task_name(name)) is None:
        hint = "; without --task, --glue DIR uses all tasks in DIR" if name == "glue" else ""
        raise InputError(f"unknown task {name!r}{hint or did_you_mean(name, _ALL_NAMES)}")
    return task
