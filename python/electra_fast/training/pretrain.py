"""`pretrain`: trains a run from a configuration and a corpus.

Checks as much as possible before importing torch, then leaves the work to `trainer`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from electra_fast.config.config import AUTO, Config
from electra_fast.data.corpus import Corpus
from electra_fast.data.mixture import Corpora, Mixture, absolute
from electra_fast.distributed.division import Division
from electra_fast.distributed.launch import Launch
from electra_fast.errors import InputError, Interrupted, ReportedElsewhere
from electra_fast.interruption import StopRequest, launcher_seconds, stop_requests, stop_with_parent
from electra_fast.results import Result
from electra_fast.training.loggers import Callback, Callbacks
from electra_fast.training.mirror import checked_url
from electra_fast.training.run import Run, config_of_run, exclusive, open_run

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, repr=False)
class PretrainResult(Result):
    """The result of `pretrain`: the run's folder, its last step, and whether it is finished."""

    run: Path
    step: int
    is_finished: bool = True
    """True at the run's last step. Otherwise `train.max_minutes` stopped it, and the same call resumes."""

    def lines(self) -> Iterator[str]:
        end = "finished" if self.is_finished else "stopped by train.max_minutes; the same call resumes"
        yield f"{self.run}: step {self.step}, {end}"


def pretrain(
    corpus: Corpora | None = None,
    *,
    out: str | Path | None = None,
    config: Config | str | os.PathLike[str] | None = None,
    overrides: Mapping[str, object] | None = None,
    device: str = AUTO,
    allow_changes: bool = False,
    from_step: int | None = None,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> PretrainResult:
    """Trains a run to completion, resuming it if an earlier call was interrupted.

    If torchrun starts several processes, each calls this function and trains as one rank.

    Args:
        corpus: Corpus folder, or several: a list of "FOLDER:WEIGHT", or a mapping from folder to weight; `data.corpus`
            of the configuration by default.
        out: Run folder; `train.out` of the configuration by default.
        config: The run's configuration, or its TOML file. By default the configuration of the run in `out`, with its
            recorded hardware choices if they work on this machine, or else `Config()`.
        overrides: Configuration keys to change, in the form of `Config.override`. `train.steps` may differ from an
            earlier call: a run, finished or not, continues to the new number, and the learning-rate schedule is
            stretched to it.
        device: "auto" (CUDA if there is a GPU), "cpu", "cuda" or "cuda:N". Several ranks choose their GPUs themselves.
        allow_changes: Resume with changed optimizer, objective, data and training keys, with other corpora of the same
            vocabulary, or with other weights of the corpora. Changes are recorded in RUN/changes.jsonl. Model sizes can
            never change, except that `model.max_positions` and the bases of rotary positions may grow.
        from_step: Go back to the checkpoint of this step instead of the newest one. Renames later checkpoints and
            removes later log lines.
        on_log: Called on the first rank with each line of metrics.jsonl, as a dictionary. An exception in a callback is
            reported once, and training continues; `StopTraining` stops the run.
        on_evaluation: Called in the same way with each line of evaluations.jsonl.
        on_checkpoint: Called when a checkpoint is complete, with `{"step": N, "path": "RUN/checkpoints/…"}`.

    Returns:
        The folder, the last step, and whether the run is finished or `train.max_minutes` stopped it.

    Raises:
        ValueError, FileNotFoundError: The configuration, corpus or folder is wrong, or they do not match.
        Diverged: The loss is not finite, or so high that the run is lost (`train.stop_on_divergence`); the best
            checkpoint is kept.
        TrainingFailed: Another rank is lost; the last good checkpoint is kept.
        StopTraining: A callback raised it, and a checkpoint was written.
        Interrupted: A signal (SIGTERM, Ctrl-C, SIGHUP, SIGUSR1, SIGUSR2) to any rank requested a stop, and a checkpoint
            was written. It is a subclass of `KeyboardInterrupt`, so it stops the cells of a notebook.
    """
    config = config_of_run(config, corpus, overrides, out, from_step)
    config = config.override(
        {
            # Absolute, so that the run can be resumed from any directory.
            "data.corpus": absolute(corpus if corpus is not None else config.data.corpus),
            "train.out": str(out if out is not None else config.train.out),
            "train.mirror": checked_url(config.train.mirror),
        }
    )
    if not config.data.corpus or not config.train.out:
        raise InputError("a corpus or an output folder is missing; pass both: electra-fast pretrain CORPUS --out RUN")
    launch = Launch.from_environment()
    start = time.monotonic() - (launcher_seconds() if launch.attempt else 0.0)
    with stop_requests(is_launched=launch.launcher != "") as stop:
        if launch.launcher == "torchrun":
            stop_with_parent()
        open_folder = partial(open_run, allow_changes=allow_changes, from_step=from_step)
        callbacks = Callbacks(on_log, on_evaluation, on_checkpoint)
        train = _train_alone if launch.world_size == 1 else partial(_train_among, launch)
        run, step = train(config, device, open_folder, stop, start, callbacks)
    if callbacks.stop is not None:
        raise callbacks.stop
    if stop and step < run.config.train.steps:
        raise Interrupted(
            stop.signal,
            f"{run.folder}: interrupted at step {step} of {run.config.train.steps}, checkpoint written; "
            "run again to resume",
            is_reported=launch.rank > 0,
        )
    return PretrainResult(run.folder, step, step == run.config.train.steps)


def _train_alone(
    config: Config,
    device: str,
    open_folder: Callable[[Config, Mixture], Run],
    stop: StopRequest,
    start: float,
    callbacks: Callbacks,
) -> tuple[Run, int]:
    """Trains on one device. Reports mistakes before it imports torch, which takes seconds."""
    mixture = Mixture(config.data.corpus)
    if device != AUTO:  # the device may be missing
        _choose_device(device)
    with exclusive(Path(config.train.out)):
        run = open_folder(config, mixture)
        from electra_fast.distributed.world import World
        from electra_fast.training.trainer import Trainer

        return run, Trainer(run, mixture, World(), callbacks, _choose_device(device)).train(stop, start)


def _choose_device(device: str) -> torch.device:
    from electra_fast.model.compute import choose_device

    return choose_device(device)


def _contents(mixture: Mixture) -> list[tuple[str, str | None]]:
    """Returns content hashes of the corpora, with their weights, and of their validation sets."""
    validation = [None if corpus.holdout is None else Corpus(corpus.holdout).content_hash for corpus in mixture.corpora]
    return list(zip(mixture.content_hash.split(" "), validation, strict=True))


def _require_same(mixture: Mixture, rank: int, local: list[tuple[str, str | None]], first: Sequence[object]) -> None:
    if len(local) != len(first):
        raise InputError(
            f"{mixture}: {len(local)} corpora on rank {rank}, but {len(first)} on the first rank; pass the same corpora"
        )
    for folder, ours, theirs in zip(mixture.folders, local, first, strict=True):
        if ours != theirs:
            raise InputError(
                f"{folder}: not the same corpus on rank {rank} as on the first rank; copy it to that machine again"
            )


def _train_among(
    launch: Launch,
    config: Config,
    device: str,
    open_folder: Callable[[Config, Mixture], Run],
    stop: StopRequest,
    start: float,
    callbacks: Callbacks,
) -> tuple[Run, int]:
    """Trains as one of several ranks; the first rank opens the run and writes its files."""
    try:
        Division.of(config.train, launch.rank, launch.world_size)
        if ":" in device:
            raise InputError(f"device = {device!r}: each rank chooses its GPU; remove the option, or pass cpu")
    except InputError:  # the same on each rank
        if launch.rank > 0:
            raise ReportedElsewhere from None
        raise
    from electra_fast.distributed.world import World
    from electra_fast.training.trainer import Trainer

    folder = Path(config.train.out)
    with (
        World.join(launch, folder, config.train.timeout_seconds, has_gpu=device != "cpu") as world,
        ExitStack() as held,
    ):
        chosen = world.agree(lambda: _choose_device(device))
        world.from_first(lambda: held.enter_context(exclusive(folder)))
        mixture = world.agree(lambda: Mixture(config.data.corpus))
        contents = world.all_gather_object(world.agree(lambda: _contents(mixture)))
        world.agree(lambda: _require_same(mixture, launch.rank, contents[launch.rank], contents[0]))
        run = world.from_first_patiently(lambda: open_folder(config, mixture))
        return run, Trainer(run, mixture, world, callbacks, chosen).train(stop, start)
