"""The tasks that a call of `finetune` names, with their data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_fast.config.section import did_you_mean
from electra_fast.errors import InputError
from electra_fast.finetuning.readers import glue, question_files
from electra_fast.finetuning.readers.delimited import DIALECT, Dialect, with_fields
from electra_fast.finetuning.task import TaskData, num_trained_on, overlap_warning
from electra_fast.finetuning.tasks import TASK_TYPES

SQUAD: dict[str, Callable[[Path], TaskData]] = {
    "squad1": functools.partial(question_files.read_squad, "squad1"),
    "squad2": functools.partial(question_files.read_squad, "squad2"),
}
ALL = "glue"
_READERS = {kind: task_type.read for kind, task_type in TASK_TYPES.items() if task_type.read is not None}
OWN_KINDS = tuple(_READERS)
_COLUMNS = ("text", "label", "dev_text", "dev_label", "test_text", "test_label")
_TUPLES = (*_COLUMNS, "labels", "label_map")
_FILES = ("train", "dev", "test")


def read_tasks(
    names: str | Sequence[str], data: Path | None, files: Mapping[str, Path], columns: Mapping[str, Any]
) -> list[TaskData]:
    """Reads the data of GLUE tasks and SQuAD from `data`, or own data from `files`.

    Args:
        names: Tasks; several as a sequence or with commas.
        data: Folder of GLUE tasks or of SQuAD's files.
        files: Own files: `train`, and optionally `dev` and `test`.
        columns: Keyword arguments of the reader of own data.

    Raises FileNotFoundError, or ValueError naming what is wrong.
    """
    asked = names.split(",") if isinstance(names, str) else list(names)
    chosen = list(dict.fromkeys(_known(name.strip()) for name in asked if name.strip()))
    if not chosen:
        raise InputError(f"--task names no task; there are {', '.join(_ALL_NAMES)}")
    defaults = {name: value for kind in OWN_KINDS for name, value in _options(kind).items()}
    unknown = next((name for name in columns if name not in defaults), None)
    if unknown is not None:
        raise TypeError(f"finetune() got an unexpected keyword argument {unknown!r}")
    given = {name: value for name, value in columns.items() if value != defaults[name]}
    if not set(chosen).isdisjoint(OWN_KINDS):
        return [_read_own(chosen, data, files, given)]
    refused = next(iter([*files, *given]), None)
    if refused is not None:
        own = ", ".join(kind for kind in OWN_KINDS if refused in (*_FILES, *_options(kind)))
        refuse([refused], (), f"for --task {own}; {chosen[0]} has --data DIR")
    if data is None:
        raise InputError(f"--task {','.join(chosen)} needs --data DIR, the folder of its files")
    return [SQUAD[name](data) if name in SQUAD else glue.read(name, data) for name in _with_all(chosen, data)]


def _read_own(
    chosen: Sequence[str], data: Path | None, files: Mapping[str, Path], given: Mapping[str, Any]
) -> TaskData:
    kind = chosen[0]
    if len(chosen) > 1:
        raise InputError(f"--task {','.join(chosen)}: own data and other tasks need calls of their own")
    if data is not None:
        raise InputError(f"--data is for GLUE and SQuAD; --task {kind} has --train FILE")
    if "train" not in files:
        raise InputError(f"--task {kind} needs --train FILE")
    refuse(given, _options(kind), f"not for --task {kind}")
    if "group" in given and "dev" in files:
        raise InputError("--group says which rows of --train stay together when it is split; leave it out with --dev")
    options = with_tuples(given)
    dialect = Dialect(*(options.pop(name, default) for name, default in DIALECT.items()))
    dialect = with_fields(dialect, (options.get(name, ()) for name in _COLUMNS))
    if dialect != Dialect():
        options["quoting"] = dialect
    found = _READERS[kind](files["train"], files.get("dev"), files.get("test"), **options)
    dev, overlap = found.dev[0], list(filter(None, [overlap_warning(found.train, found.dev[0])]))
    if not overlap and (num_known := num_trained_on(found.train, dev)):  # which inflates the scores
        overlap = [
            f"{dev.path}: {num_known:,} of {len(dev.texts):,} dev examples have a text that is in the training split"
        ]
    text, label = (
        [options[name] for name in (kind, f"dev_{kind}", f"test_{kind}") if name in options]
        for kind in ("text", "label")
    )
    return dataclasses.replace(
        found,
        notes=(*found.notes, *overlap),
        text_columns=tuple(dict.fromkeys((*found.text_columns, *text))),
        label_columns=tuple(dict.fromkeys((*found.label_columns, *label))),
    )


def with_tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options in which those of several names are tuples, whether one name was given or a list of them."""
    given = {name: options[name] for name in _TUPLES if name in options}
    ones = {name: (value,) for name, value in given.items() if isinstance(value, str)}
    return dict(options) | ones | {name: tuple(value) for name, value in given.items() if isinstance(value, list)}


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns names and defaults of keyword arguments, of which `quoting` is a whole `Dialect`."""
    parameters = inspect.signature(function).parameters.values()
    options = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return options | (DIALECT if "quoting" in options else {})


def _options(kind: str) -> dict[str, Any]:
    return options_of(_READERS[kind])


def refuse(options: Iterable[str], known: Collection[str], why: str) -> None:
    """Raises InputError for the first option that is not known."""
    refused = next((name for name in options if name not in known), None)
    if refused is not None:
        flag = "batches" if refused == "max_batches" else refused.replace("_", "-")
        raise InputError(f"--{flag} is {why}")


_ALL_NAMES = (*glue.TASKS, ALL, *SQUAD, *OWN_KINDS)


def _known(name: str) -> str:
    if name in _ALL_NAMES:
        return name
    if squad := re.fullmatch(r"squad[ _-]?v?([12])(\.[01])?", name.lower()):
        return f"squad{squad[1]}"
    if (task := glue.task_name(name)) is None:
        raise InputError(f"unknown task {name!r}{did_you_mean(name, _ALL_NAMES)}")
    return task


def _with_all(chosen: list[str], data: Path) -> list[str]:
    """Returns the tasks, with those in the folder in place of `glue`."""
    if ALL not in chosen:
        return chosen
    held = glue.held_tasks(data)
    if not held:
        folders = ", ".join(task.folder for task in glue.TASKS.values())
        raise FileNotFoundError(f"{data}: holds no folder of a GLUE task ({folders}); name the folder above those")
    return list(dict.fromkeys(held + [name for name in chosen if name != ALL]))
