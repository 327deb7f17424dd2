"""Saves and loads the tensors of checkpoints: model and optimizer.

A checkpoint is written under a temporary name, synced to disk and renamed, so a kill at any moment leaves earlier
checkpoints intact and no partial one. `checkpoint_folder` has names and checksums.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import remove, replace_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.model.model import Electra


def save(run: Path, model: Electra, optimizer: Mapping[str, Tensor] | None, state: TrainState, keep: int) -> Path:
    return write(run, model.config, stored(model), optimizer, state, keep)


def write(
    run: Path,
    config: Config,
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor] | None,
    state: TrainState,
    keep: int,
) -> Path:
    """Writes the checkpoint of `state.step` atomically, then removes all but the `keep` newest and the best.

    `tensors` (from `stored`) must not change during the call. Training from a checkpoint without `optimizer`, such as
    an imported model's, starts with a new optimizer state. Raises OSError if writing fails.
    """
    final = checkpoint_folder.path_of(run, state.step)

    def fill(directory: Path) -> None:
        (directory / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        write_tensors(tensors, directory / "model.safetensors")
        if optimizer is not None:
            write_tensors(optimizer, directory / "optimizer.safetensors")
        checkpoint_folder.seal(directory, state)

    try:
        replace_folder(final, fill)
    except (OSError, SafetensorError) as error:
        raise OSError(f"{final}: checkpoint not written: {error}; the earlier ones are intact") from error
    for old in set(checkpoint_folder.steps(run)[:-keep]) - {state.best_step}:
        remove(checkpoint_folder.path_of(run, old))
    return final


def load_model(directory: Path) -> Electra:
    checkpoint_folder.verify(directory, "config.toml", "model.safetensors")
    model = Electra(Config.load(directory / "config.toml"))
    load_parameters(model, directory)
    return model


def load_parameters(model: Electra, directory: Path) -> None:
    """Loads a checkpoint into a model. Raises ValueError naming the first parameter that does not fit."""
    parameters = read_parameters(model, directory)
    with torch.no_grad():
        for name, parameter in stored(model).items():
            parameter.copy_(parameters[name])


def read_parameters(model: Electra, directory: Path) -> dict[str, Tensor]:
    """Returns a model's parameters from a checkpoint, extended to its positions (`lengthened`).

    Raises ValueError naming the first parameter that does not fit.
    """
    path = directory / "model.safetensors"
    tensors = lengthened(read_tensors(path), model.config.model.max_positions)
    expected = stored(model)
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors or name not in expected:
            place = "missing from the checkpoint" if name not in tensors else "unknown to this configuration"
            raise InputError(f"{path}: parameter {name} is {place}; the checkpoint belongs to another model")
        if expected[name].shape != tensors[name].shape:
            raise InputError(
                f"{path}: parameter {name} has the shape {list(tensors[name].shape)}, and this configuration needs "
                f"{list(expected[name].shape)}; the checkpoint belongs to another model"
            )
    return tensors


def lengthened(tensors: Mapping[str, Tensor], num_positions: int) -> dict[str, Tensor]:
    """Returns a checkpoint's tensors for a model with `num_positions`, perhaps more than it was saved with.

    The learned positions are repeated from the first row, as are their moments: with second moments of 0, the first
    updates of the new rows would be many times too large.
    """
    repeated = torch.arange(num_positions)
    return {
        name: tensor[repeated % len(tensor)]
        if name.endswith("embeddings.position") and len(tensor) < num_positions
        else tensor
        for name, tensor in tensors.items()
    }


def stored(model: Electra) -> dict[str, Tensor]:
    """Returns the tensors of a checkpoint, not copied: parameters (shared ones once) and persistent buffers."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file to the CPU. Raises ValueError if it is damaged or has non-finite values."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: missing; {path.parent} is not a complete checkpoint")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: damaged ({error}); {path.parent} is not a complete checkpoint") from None
    require_finite(path, tensors)
    return tensors


def require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError naming the first tensor of a file that has non-finite values in fp32."""
    for name, tensor in tensors.items():
        if not tensor.float().isfinite().all():
            raise InputError(f"{path}: {name} has NaN or infinite values; use another checkpoint or model")


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file with the umask's permissions; `save_file` alone would restrict it to its owner."""
    path.touch()
    mode = path.stat().st_mode
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata=dict(metadata) if metadata else None)
    path.chmod(mode & 0o777)
