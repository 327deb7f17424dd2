"""The verb `pretrain`: from a configuration, a corpus and a folder to a trained run.

Checks everything that it can before torch is imported, then leaves the work to `trainer`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from electra_fast.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.errors import InputError, Interrupted
from electra_fast.interruption import stop_requests
from electra_fast.training.run import exclusive, open_run


@dataclass(frozen=True)
class Result:
    """What a call of `pretrain` ended with."""

    run: Path
    step: int


def pretrain(
    config: Config, *, data: str | Path | None = None, out: str | Path | None = None, allow_changes: bool = False
) -> Result:
    """Trains a run to its end: from the start, or from where an earlier call was stopped.

    Args:
        config: The run's configuration. `train.steps` may differ from that of an earlier call: a run, finished
            or not, is continued to the new number of steps, and the schedule of the learning rate is
            stretched to it.
        data: Corpus folder; `data.corpus` by default.
        out: The run's folder; `train.out` by default.
        allow_changes: Resume with other values of optimizer, objective, data and training keys, or another
            corpus of the same vocabulary. Recorded in RUN/changes.jsonl. Model sizes can never change.

    Returns:
        The folder and the last step.

    Raises:
        ValueError, FileNotFoundError: The configuration, corpus and folder don't fit together.
        TrainingFailed: The loss is not a number; the last good checkpoint is kept.
        Interrupted: A signal (SIGTERM, Ctrl-C, SIGHUP, SIGUSR1) asked to stop, and a checkpoint was written. It is a
            `KeyboardInterrupt`, so a notebook stops at the cell.
    """
    corpus_folder = str(data if data is not None else config.data.corpus)
    config = config.replace(
        {
            # Absolute, so that the saved configuration means the same folder wherever the run is resumed.
            "data": {"corpus": os.path.abspath(corpus_folder) if corpus_folder else ""},
            "train": {"out": str(out if out is not None else config.train.out)},
        }
    )
    if not config.data.corpus or not config.train.out:
        raise InputError(
            "pretrain needs a corpus (--data DIR, data.corpus) and a folder for the run (--out, train.out)"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError(
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}: this version trains on one device; start it plainly"
        )
    corpus = Corpus(config.data.corpus)
    with exclusive(Path(config.train.out)), stop_requests() as stop:
        run = open_run(config, corpus, allow_changes=allow_changes)
        from electra_fast.training.trainer import Trainer  # here, because torch takes seconds

        step = Trainer(run, corpus).train(stop)
    if step < run.config.train.steps:
        raise Interrupted(
            stop.signal,
            f"{run.folder}: interrupted at step {step} of {run.config.train.steps}, checkpoint written; "
            "run again to resume",
        )
    return Result(run.folder, step)
