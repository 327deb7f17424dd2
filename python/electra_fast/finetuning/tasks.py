"""What a call of `finetune` asks for: the tasks by name, and their data."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from electra_fast.config_file import did_you_mean
from electra_fast.errors import InputError
from electra_fast.finetuning import glue, own_data
from electra_fast.finetuning.task import TaskData

OWN_KINDS = ("classification", "regression")
ALL = "glue"
_TUPLES = ("text", "label", "labels")


def read_tasks(
    names: str | Sequence[str], data: Path | None, files: Mapping[str, Path], columns: Mapping[str, Any]
) -> list[TaskData]:
    """Reads the data of GLUE tasks from `data`, or own data from `files`.

    Args:
        names: Tasks; several as a sequence or with commas.
        data: Folder of GLUE tasks.
        files: Own files: `train`, and `dev` and `test` where there are any.
        columns: Keyword arguments of `own_data.read`.

    Raises FileNotFoundError, or ValueError naming what is wrong.
    """
    asked = names.split(",") if isinstance(names, str) else list(names)
    chosen = list(dict.fromkeys(_known(name.strip()) for name in asked if name.strip()))
    if not chosen:
        raise InputError(f"--task names no task; there are {_all_names()}")
    options = inspect.signature(own_data.read).parameters
    given = {name: value for name, value in columns.items() if name not in options or value != options[name].default}
    if not set(chosen).isdisjoint(OWN_KINDS):
        if len(chosen) > 1:
            raise InputError(f"--task {','.join(chosen)}: own data and GLUE tasks need calls of their own")
        if data is not None:
            raise InputError(f"--data is for GLUE tasks; --task {chosen[0]} has --train FILE")
        if "train" not in files:
            raise InputError(f"--task {chosen[0]} needs --train FILE")
        given |= {name: (given[name],) for name in _TUPLES if isinstance(given.get(name), str)}
        kind: Any = chosen[0]
        return [own_data.read(kind, files["train"], files.get("dev"), files.get("test"), **given)]
    refused = next(iter([*files, *given]), None)
    if refused is not None:
        flag = f"--{refused.replace('_', '-')}"
        raise InputError(f"{flag} is for --task {' or '.join(OWN_KINDS)}; GLUE tasks have --data DIR")
    if data is None:
        raise InputError(f"--task {','.join(chosen)} needs --data DIR, the folder of its files")
    return [glue.read(name, data) for name in _with_all(chosen, data)]


def _known(name: str) -> str:
    found = name if name in (ALL, *OWN_KINDS) else glue.task_name(name)
    if found is None:
        raise InputError(f"unknown task {name!r}{did_you_mean(name, (*glue.TASKS, ALL, *OWN_KINDS))}")
    return found


def _all_names() -> str:
    return ", ".join((*glue.TASKS, ALL, *OWN_KINDS))


def _with_all(chosen: list[str], data: Path) -> list[str]:
    """The tasks, with those that the folder holds in place of `glue`."""
    if ALL not in chosen:
        return chosen
    held = glue.held_tasks(data)
    if not held:
        folders = ", ".join(task.folder for task in glue.TASKS.values())
        raise FileNotFoundError(f"{data}: holds no folder of a GLUE task ({folders}); name the folder above those")
    return list(dict.fromkeys(held + [name for name in chosen if name != ALL]))
