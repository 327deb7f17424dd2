"""Scores a finished seed again if validation or test data have changed; the model does not depend on them."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from electra_fast.errors import Interrupted
from electra_fast.files.atomic_files import replace_folder
from electra_fast.files.json_files import read_object, write_object
from electra_fast.finetuning.model import TaskModel
from electra_fast.finetuning.model_folder import SETTINGS_KEY, read_finetuned
from electra_fast.finetuning.task import Split
from electra_fast.finetuning.training.card import write_model_card
from electra_fast.finetuning.training.job import Job
from electra_fast.finetuning.training.results import result_of, write_result
from electra_fast.finetuning.training.seed_run import predict_splits
from electra_fast.interruption import StopRequest


def outdated_splits(job: Job, result: dict[str, Any]) -> list[Split]:
    """Returns the splits whose examples or labels differ from those that a result was scored on."""
    known = {name: split["content"] for name, split in result.get("splits", {}).items()}
    splits = [*job.data.dev, *job.data.test]
    found = [each for each in splits if known.get(each.name) != job.predicted[each.name]]
    # The first validation split sets the threshold of the odds of no answer.
    return splits if job.task.has_unanswerable and job.data.dev[0].name in {each.name for each in found} else found


def rescore(
    job: Job, folder: Path, result: dict[str, Any], outdated: Sequence[Split], stop: StopRequest
) -> dict[str, Any]:
    """Predicts and scores the `outdated` splits with a finished model; returns the new result.

    Meanwhile, the result on disk lacks these splits.
    """
    started, known = time.monotonic(), dict(result.get("splits", {}))
    names = {each.name for each in outdated}
    scored = {name: known[name] for name in job.predicted if name in known and name not in names}
    write_result(folder, result | {"splits": scored}, unfinished=names)

    def check_stop() -> None:
        if stop:
            raise Interrupted(stop.signal, f"interrupted; {folder}: scored anew when run again")

    warning = result.get("warning")
    if outdated:
        changed = predict_splits(job, _finished_model(job, folder / "model"), folder, outdated, scored, check_stop)
        warning = changed if job.data.dev[0].name in names else warning
    ordered = {name: scored[name] for name in job.predicted}
    seconds = round(result["seconds"] + time.monotonic() - started, 3)
    new = result_of(result["seed"], ordered, warning, seconds)
    replace_folder(folder / "model", lambda target: _copy_model(job, folder / "model", target, new))
    write_result(folder, new)
    return new


def _finished_model(job: Job, folder: Path) -> TaskModel:
    """Returns the trained network, with outputs as in training."""
    finetuned = read_finetuned(folder)
    config = dataclasses.replace(job.config, head=cast(Any, finetuned.head), head_dropout=0.0)
    model = job.task_type.model(finetuned.shape, config, len(finetuned.labels))
    model.load_state_dict(job.task_type.from_units(finetuned.state, job.task))
    return model.to(job.device)


def _copy_model(job: Job, source: Path, target: Path, result: dict[str, Any]) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)
    table = read_object(target / "config.json")
    if SETTINGS_KEY in table:
        table[SETTINGS_KEY] |= job.task_type.settings(job.config, job.task, result)
        write_object(target / "config.json", table)
    write_model_card(target, job, table["architectures"][0], result)
