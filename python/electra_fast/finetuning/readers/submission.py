"""Predictions in the format of the GLUE server."""

from __future__ import annotations

import shutil
from pathlib import Path

from numpy.typing import ArrayLike

from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.readers.glue import MAX_SIMILARITY, TASKS
from electra_fast.finetuning.task import Split, Task, TaskData
from electra_fast.finetuning.tasks.metrics import finite


def submission_name(task: Task, split: Split) -> str:
    """The file name that the GLUE server expects for a test split."""
    if split.name == "diagnostic":
        return "AX.tsv"
    ending = {"test": "-m", "test-mismatched": "-mm"}[split.name] if task.name == "mnli" else ""
    return f"{TASKS[task.name].folder}{ending}.tsv"


def write_submission(path: Path, task: Task, split: Split, outputs: ArrayLike) -> None:
    """Writes predictions for the GLUE server: a header, then index and label, or the similarity from 0 to 5.

    Args:
        path: Replaced atomically.
        task: The `task` of a `TaskData` that `read` returned.
        split: The test split.
        outputs: Logits [n, classes], or for STS-B values [n].
    """
    values = finite(outputs)
    if task.kind == "regression":
        predictions = [f"{value:.3f}" for value in values.clip(0, MAX_SIMILARITY) + 0.0]  # + 0.0 turns -0.0 into 0.0
    else:
        predictions = [task.labels[label] for label in values.argmax(1)]
    lines = (f"{index}\t{prediction}\n" for index, prediction in zip(split.ids, predictions, strict=True))
    replace_file(path, "index\tprediction\n" + "".join(lines))


def copy_submissions(out: Path, folder: Path, data: TaskData, seed: int) -> None:
    """Copies a seed's predictions of a GLUE task's test splits to `out/submission`, named as the server expects."""
    for split in data.test if data.task.name in TASKS else ():
        (out / "submission").mkdir(exist_ok=True)
        source = folder / f"seed-{seed}" / f"predictions.{split.name}.tsv"
        shutil.copyfile(source, out / "submission" / submission_name(data.task, split))
