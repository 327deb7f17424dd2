"""The folders of a run's checkpoints, their state and checksums.

`RUN/checkpoints/step-N/` has config.toml, model.safetensors, optimizer.safetensors and state.json, which has the
training state and all checksums. `checkpoint` reads and writes the tensors. Fine-tuning writes checkpoints of the same
form, without config.toml, for each seed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.errors import InputError
from electra_fast.files import atomic_files
from electra_fast.files.json_files import read_object, record_of, write_object

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STATE = "state.json"
STATE_VERSION = 2
_NAME = re.compile(r"step-(\d+)")
_DAMAGED = "damaged-"
_LEFT = "left-"


@dataclass
class LogWindow:
    """Sums since the last line of metrics.jsonl: metric totals by name, steps, seconds of training."""

    totals: dict[str, float] = field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0


@dataclass
class LossHistory:
    """Losses of a stage, averaged over many steps and keyed by metric, to detect divergence."""

    lowest: dict[str, float] = field(default_factory=dict)  # lowest averages so far
    totals: dict[str, float] = field(default_factory=dict)  # sums over the steps since the last average
    steps: int = 0
    num_lost: int = 0  # consecutive averages far above the lowest


@dataclass
class TrainState:
    """The state of a run except its tensors, stored in a checkpoint's state.json."""

    step: int = 0
    tokens: int = 0  # trained on up to the last line of metrics.jsonl
    seconds: float = 0.0  # spent on steps
    log_window: LogWindow = field(default_factory=LogWindow)
    corpus: str | None = None  # content hash; of several corpora, HASH:WEIGHT of each
    loader: dict[str, Any] | None = None  # `BatchLoader.state`; None for an import whose training has not started
    imported: bool = False  # whether the run started from Hugging Face folders
    token_type_1_trained: bool = False  # whether here or before an import
    # The best checkpoint is never removed: it has the lowest loss of the current stage or, before any loss is measured,
    # it is the newest without divergence. `best_by` names the data of its loss: "validation" or "training".
    best_step: int | None = None
    best_loss: float | None = None
    best_by: str = ""
    history: LossHistory = field(default_factory=LossHistory)


def steps(run: Path) -> list[int]:
    folder = run / "checkpoints"
    numbers = (step_of(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(step for step in numbers if step is not None)


def step_of(name: str) -> int | None:
    """Returns the step of a checkpoint's folder name, or None for another name."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])


def is_imported(run: Path) -> bool:
    """Returns whether a run continues an imported model; False if no checkpoint can be read."""
    with contextlib.suppress(InputError, FileNotFoundError):
        return read_state(latest(run)).imported
    return False


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


def latest(run: Path) -> Path:
    known = steps(run)
    if not known:
        raise FileNotFoundError(f"{run}: no checkpoint; expected {run / 'checkpoints' / 'step-N'}")
    return path_of(run, known[-1])


def at_step(run: Path, step: int) -> Path:
    """Returns a run's checkpoint of a step. Raises FileNotFoundError with a list of the existing ones."""
    known = steps(run)
    if step not in known:
        available = ", ".join(f"step-{number}" for number in known) or "none"
        raise FileNotFoundError(f"{run}: no checkpoint step-{step}; available: {available}")
    return path_of(run, step)


def require_config(run: Path) -> None:
    if steps(run) and not (run / "config.toml").exists():
        raise FileNotFoundError(f"{run / 'config.toml'}: missing; restore it from {latest(run) / 'config.toml'}")


def seal(directory: Path, state: DataclassInstance) -> None:
    """Writes state.json with the checksums of all files in the folder."""
    content = {"version": STATE_VERSION, **asdict(state)}
    write_object(directory / STATE, sealed(content, directory, sorted(directory.iterdir())))


def sealed(content: Mapping[str, Any], directory: Path, files: Iterable[Path]) -> dict[str, Any]:
    """Adds the checksums of files in a folder, and its own, to a JSON object."""
    hashes = {file.relative_to(directory).as_posix(): _sha256(file) for file in files}
    content = {**content, "files": hashes}
    return content | {"checksum": _checksum(content)}


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Reads an object that `sealed` made. Raises FileNotFoundError or ValueError if it is missing or damaged."""
    try:
        content = read_object(path)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing; {remedy}") from None
    except InputError as error:
        raise InputError(f"{path}: damaged ({error}); {remedy}") from None
    if content.pop("checksum", None) != _checksum(content):
        raise InputError(f"{path}: damaged (its checksum does not match); {remedy}")
    return content


def read_state(directory: Path) -> TrainState:
    content = read_sealed(directory / STATE, _remedy(directory))
    if content.get("version") != STATE_VERSION:
        raise InputError(
            f"{directory / STATE}: format {content.get('version', 1)}, expected {STATE_VERSION}; continue the run with "
            "the version of electra-fast that wrote it, or export it there and import it here"
        )
    return record_of(TrainState, content, str(directory / STATE))


def verify(directory: Path, *names: str) -> None:
    """Checks files of a checkpoint, by default all of them, against their checksums.

    Raises FileNotFoundError or ValueError naming the first file that is missing or damaged.
    """
    files = read_sealed(directory / STATE, _remedy(directory))["files"]
    verify_files(directory, {name: files.get(name) for name in names or files}, _remedy(directory))


def verify_files(directory: Path, checksums: Mapping[str, str | None], remedy: str) -> None:
    """Checks files. Raises FileNotFoundError or ValueError naming the first missing or damaged one."""
    for name, expected in checksums.items():
        path = directory / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: missing; {remedy}")
        if _sha256(path) != expected:
            raise InputError(f"{path}: damaged (its checksum does not match); {remedy}")


def recover_run(run: Path, or_else: str = "start again with another --out") -> tuple[Path, list[str]]:
    """Returns a run's newest intact checkpoint, and warnings about the damaged newer ones, which it renames.

    If none is intact, raises ValueError without renaming any; the message suggests `or_else`.
    """
    damaged: list[tuple[Path, str]] = []
    for step in reversed(steps(run)):
        directory = path_of(run, step)
        try:
            verify(directory)
        except (InputError, FileNotFoundError) as error:
            damaged.append((directory, str(error).split(";")[0]))
            continue
        return directory, [_set_aside(path, reason) for path, reason in damaged]
    reasons = "; ".join(reason for _, reason in damaged)
    raise InputError(f"{run}: no intact checkpoint: {reasons}; restore one, or {or_else}")


def remove_unfinished(run: Path) -> None:
    if (run / "checkpoints").is_dir():
        atomic_files.recover_all(run / "checkpoints")


def set_aside_after(run: Path, step: int) -> list[str]:
    """Renames a run's checkpoints after a step, newest first, and returns messages about them."""
    later = reversed([path_of(run, number) for number in steps(run) if number > step])
    return [f"{path}: renamed to {_rename(path, _LEFT).name}; you may remove it" for path in later]


def _set_aside(directory: Path, reason: str) -> str:
    return f"{reason}; not used; renamed to {_rename(directory, _DAMAGED).name}"


def _rename(directory: Path, prefix: str) -> Path:
    target = directory.with_name(prefix + directory.name)
    atomic_files.remove(target)
    while os.path.lexists(target):  # removal failed
        target = target.with_name(prefix + target.name)
    os.replace(directory, target)
    return target


def _remedy(directory: Path) -> str:
    run = directory.parent.parent
    return f"pass an older checkpoint, or run `electra-fast pretrain --out {run}` to resume from one"


def _checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
