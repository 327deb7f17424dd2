"""One run of a comparison: pre-training, fine-tuning and evaluation of a row with a seed, in a process of its own.

It reads FOLDER/work.json, and resumes after an interruption. It writes run/, tasks.json and evaluation.json, or
failed.json if the training diverged.
"""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from electra_fast.config.config import Config
from electra_fast.errors import Diverged, ElectraFastError, InputError, TrainingFailed
from electra_fast.files.atomic_files import remove, replace_file
from electra_fast.files.json_files import json_text, read_object
from electra_fast.interruption import interrupt_at_once
from electra_fast.messages import error_line, say

SETTINGS, TASKS, EVALUATION, FAILED = "work.json", "tasks.json", "evaluation.json", "failed.json"


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Args:
        corpus: Folder of the corpus.
        glue: Folder of the tasks.
        tasks: Names of the tasks.
        finetune_seeds: Fine-tuning runs per task; their median is the score.
        finetune: Keys of `[finetune]`, as on the command line.
        corrupted_by: Corruptor for `evaluate`.
    """

    corpus: str
    glue: str
    tasks: list[str]
    finetune_seeds: int
    finetune: dict[str, str]
    corrupted_by: str


def write_run(folder: Path, config: Config, settings: RunSettings) -> None:
    """Prepares a run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "config.toml", config.to_toml())
    replace_file(folder / SETTINGS, json_text(asdict(settings)))


def read_result(folder: Path) -> dict[str, Any] | None:
    """Returns the results of a finished run, None for one that is not finished.

    Raises ValueError for a damaged file.
    """
    if (folder / FAILED).exists():
        return read_object(folder / FAILED)
    if not ((folder / TASKS).exists() and (folder / EVALUATION).exists()):
        return None
    return {"tasks": read_object(folder / TASKS), "evaluation": read_object(folder / EVALUATION)}


def run_row(folder: Path) -> None:
    """Does what is left of a run: pre-training, fine-tuning, evaluation."""
    from electra_fast.finetuning.finetune import finetune
    from electra_fast.training.evaluate import evaluate
    from electra_fast.training.pretrain import pretrain

    try:
        settings = RunSettings(**read_object(folder / SETTINGS))
    except TypeError as error:
        what = f"{folder / SETTINGS}: not the settings of a run ({error})"
        raise InputError(f"{what}; remove {folder} to start it again") from None
    config = Config.load(folder / "config.toml")
    run, tasks = folder / "run", folder / "tasks"
    try:
        if not (folder / TASKS).exists():
            if not pretrain(config, data=settings.corpus, out=run).is_finished:
                raise TrainingFailed(f"{run}: train.max_minutes ended the pre-training; run again to resume")
            seeds, overrides = settings.finetune_seeds, settings.finetune
            found = finetune(settings.tasks, model=run, data=settings.glue, out=tasks, seeds=seeds, overrides=overrides)
            replace_file(folder / TASKS, json_text(found))
        remove(tasks)  # one model per task and seed: too much to keep
        if not (folder / EVALUATION).exists():
            report = evaluate(
                run,
                settings.corpus,
                sequence_length=config.data.sequence_length,
                corrupted_by=settings.corrupted_by,
                mlm_examples=200,
            )
            replace_file(folder / EVALUATION, json_text(report))
    except Diverged as error:
        replace_file(folder / FAILED, json_text({"failed": str(error)}))


def _end_with_parent() -> None:
    """Stops this process when its standard input closes, because the process that started it has ended."""

    def watch() -> None:
        os.read(0, 1)  # not sys.stdin, whose lock a thread must not hold when the interpreter ends
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(name: str, run: Callable[[Path], None] = run_row) -> int:
    """Calls `run` with a folder as the main function of a process; returns the exit code."""
    folder = Path(name)
    interrupt_at_once()
    _end_with_parent()
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a process whose parent was killed may still be writing its checkpoint
            run(folder)
    except KeyboardInterrupt as interruption:
        return 128 + getattr(interruption, "signal", signal.SIGINT)
    except (ElectraFastError, OSError) as error:
        say(f"error: {error_line(str(error))}")
        return 2
    return 0
