"""Checkpoints: folders that are whole or absent, and what a run needs to go on exactly.

`RUN/checkpoints/step-N/` holds config.toml, model.safetensors, optimizer.safetensors and state.json. It is
written under a temporary name, synced to disk and renamed, so a kill at any moment leaves the
previous checkpoints intact and no half-written one behind that looks whole.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from electra_fast.config import Config
from electra_fast.model import Electra
from electra_fast.tensor_files import save_file

_NAME = re.compile(r"step-(\d+)")
_TEMPORARY = "writing-"


def steps(run: Path) -> list[int]:
    """Steps of a run's checkpoints, ascending."""
    folder = run / "checkpoints"
    names = (_NAME.fullmatch(entry.name) for entry in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


def path_of(run: Path, step: int) -> Path:
    """The folder of a run's checkpoint."""
    return run / "checkpoints" / f"step-{step}"


def latest(run: Path) -> Path:
    """A run's newest checkpoint; FileNotFoundError when it has none."""
    known = steps(run)
    if not known:
        raise FileNotFoundError(f"{run}: no checkpoint here (looked for {run / 'checkpoints' / 'step-N'})")
    return path_of(run, known[-1])


def require_config(run: Path) -> None:
    """FileNotFoundError where a folder has checkpoints but lacks the config.toml that makes it a run."""
    if steps(run) and not (run / "config.toml").exists():
        raise FileNotFoundError(
            f"{run / 'config.toml'}: missing, though there are checkpoints; copy {latest(run) / 'config.toml'} there"
        )


def save(
    run: Path, step: int, model: Electra, optimizer: Mapping[str, Tensor] | None, state: Mapping[str, Any], keep: int
) -> Path:
    """Writes the checkpoint of a step atomically, then removes all but the `keep` newest.

    `optimizer` None (an imported model) makes a checkpoint from which training starts afresh.
    """
    final = path_of(run, step)
    temporary = final.with_name(_TEMPORARY + final.name)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_model(temporary, model)
        if optimizer is not None:
            save_file(_contiguous(optimizer), temporary / "optimizer.safetensors")
        (temporary / "state.json").write_text(json.dumps(dict(state), indent=1) + "\n", encoding="utf-8")
        for file in temporary.iterdir():
            _sync(file)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{final}: checkpoint not written: {error}; the earlier ones are intact") from error
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    _sync(final.parent)
    for old in steps(run)[:-keep]:
        shutil.rmtree(path_of(run, old))
    return final


def save_model(directory: Path, model: Electra) -> None:
    """Writes config.toml and model.safetensors (fp32, shared parameters once) into an existing folder."""
    (directory / "config.toml").write_text(model.config.to_toml(), encoding="utf-8")
    save_file(_contiguous(dict(model.named_parameters())), directory / "model.safetensors")


def load_model(directory: Path) -> Electra:
    """The model of a checkpoint, on the CPU, with the configuration stored beside it."""
    if not (directory / "config.toml").exists():
        raise FileNotFoundError(
            f"{directory / 'config.toml'}: missing; copy the run's there ({directory.parent.parent / 'config.toml'})"
        )
    model = Electra(Config.load(directory / "config.toml"))
    load_parameters(model, directory)
    return model


def load_parameters(model: Electra, directory: Path) -> None:
    """Fills a model from a checkpoint; ValueError names the first parameter that doesn't fit."""
    path = directory / "model.safetensors"
    stored = read_tensors(path)
    own = dict(model.named_parameters())
    for name in sorted(own.keys() | stored.keys()):
        if name not in stored or name not in own:
            where = "missing from" if name not in stored else "unknown to this configuration but in"
            raise ValueError(f"{path}: parameter {name} is {where} the checkpoint; it is of another model")
        if own[name].shape != stored[name].shape:
            raise ValueError(
                f"{path}: parameter {name} is {list(stored[name].shape)} in the checkpoint and "
                f"{list(own[name].shape)} in this configuration; it is of another model"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(stored[name])


def read_state(directory: Path) -> dict[str, Any]:
    """A checkpoint's state.json."""
    path = directory / "state.json"
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: missing; {directory} is not a whole checkpoint, remove it") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: damaged ({error}); remove {directory} to go on from the one before") from None
    if not isinstance(state, dict) or "step" not in state:
        raise ValueError(f"{path}: damaged (no step); remove {directory} to go on from the one before")
    return state


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file, on the CPU."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing; {path.parent} is not a whole checkpoint, remove it")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: damaged ({error}); remove {path.parent} to go on from the one before") from None


def remove_unfinished(run: Path) -> None:
    """Removes what a kill left half-written."""
    for entry in (run / "checkpoints").glob(_TEMPORARY + "*"):
        shutil.rmtree(entry)


def write_atomically(path: Path, text: str) -> None:
    """Replaces a text file in one step."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, path)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
