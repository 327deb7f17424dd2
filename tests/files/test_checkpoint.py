"""Checkpoints are complete or absent, and mismatches are reported."""

import contextlib
import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from electra_fast import checkpoint
from electra_fast.config.config import Config
from electra_fast.files import atomic_files, checkpoint_folder
from electra_fast.files.checkpoint_folder import LogWindow, LossHistory, TrainState
from electra_fast.files.json_files import read_object, write_object
from electra_fast.huggingface.folder import read_model
from electra_fast.model.model import Electra
from electra_fast.optimizers.optimizer import Optimizer


def make_model(**changes: str) -> Electra:
    return Electra(Config.preset("tiny", "google").override({"model.vocab_size": "40", **changes}))


def save(run, step, model=None, keep=2, **state):
    model = model or make_model()
    optimizer = Optimizer(model.named_parameters(), model.config.optimizer)
    return checkpoint.save(run, model, optimizer.state_dict(), TrainState(step=step, **state), keep)


def test_round_trip(tmp_path):
    model = make_model(**{"train.seed": "7"})
    directory = save(tmp_path, 12, model)
    assert directory == tmp_path / "checkpoints" / "step-12" == checkpoint_folder.latest(tmp_path)
    again = checkpoint.load_model(directory)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert checkpoint_folder.read_state(directory) == TrainState(step=12)


def test_state_round_trip(tmp_path):
    window = LogWindow({"generator_loss": 0.1 + 0.2, "tokens": 7.0}, steps=3, seconds=1.25)
    state = TrainState(5, 99, 2.5, window, corpus="ab", loader={"epoch": 1}, imported=True, token_type_1_trained=True)
    state.best_step = 4
    state.best_loss = 0.1 + 0.2
    state.history = LossHistory({"generator_loss": 1 / 3}, {"generator_loss": 0.7}, steps=2, num_lost=1)
    checkpoint_folder.seal(tmp_path, state)
    assert checkpoint_folder.read_state(tmp_path) == state
    content = json.loads((tmp_path / "state.json").read_text())
    assert content["log_window"]["totals"] == window.totals


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_follow_umask(tmp_path, umask, mode):
    path = tmp_path / "model.safetensors"
    before = os.umask(umask)
    try:
        checkpoint.write_tensors({"x": torch.ones(3)}, path, {"format": "pt"})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert torch.equal(load_file(path)["x"], torch.ones(3))


def test_missing_configuration_is_reported(tmp_path):
    directory = save(tmp_path, 3)
    with pytest.raises(FileNotFoundError, match=r"config\.toml: missing; restore it from .*step-3/config\.toml$"):
        checkpoint_folder.require_config(tmp_path)
    (directory / "config.toml").rename(tmp_path / "config.toml")
    checkpoint_folder.require_config(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"step-3/config\.toml: missing; pass an older checkpoint"):
        read_model(directory)


def test_shared_parameters_are_stored_once(tmp_path):
    stored = load_file(save(tmp_path, 1) / "model.safetensors")
    assert "generator_embeddings.token" in stored and "embeddings.token" not in stored


def test_best_checkpoint_is_kept_with_newest(tmp_path):
    for step in (1, 9, 10, 100):
        save(tmp_path / "several", step, keep=3)
    assert checkpoint_folder.steps(tmp_path / "several") == [9, 10, 100]
    for step, best in ((1, 1), (9, 9), (10, 9), (100, 9), (200, 200), (300, None)):
        save(tmp_path, step, keep=1, best_step=best)
        assert checkpoint_folder.steps(tmp_path) == sorted({best or step, step})


def test_partial_checkpoint_is_ignored(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoint_folder.latest(tmp_path)
    save(tmp_path, 1)
    half = tmp_path / "checkpoints" / ".step-2.writing"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    assert checkpoint_folder.steps(tmp_path) == [1]
    checkpoint_folder.remove_unfinished(tmp_path)
    assert not half.exists()


@contextlib.contextmanager
def full_disk(size):
    """Simulates a full disk with a limit on file size: the same system call fails in the same place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_full_disk_keeps_earlier_checkpoints(tmp_path):
    save(tmp_path, 1)
    size = (tmp_path / "checkpoints" / "step-1" / "model.safetensors").stat().st_size
    with full_disk(size // 2), pytest.raises(OSError, match="checkpoint not written.*earlier ones are intact"):
        checkpoint.save(tmp_path, make_model(), None, TrainState(step=2), 5)
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_shape_mismatch_is_reported(tmp_path):
    directory = save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"discriminator\..*the shape \[.* needs \[.*another model"):
        checkpoint.load_parameters(make_model(**{"model.hidden_size": "128"}), directory)
    with pytest.raises(ValueError, match="parameter .*layers.2.* is missing from"):
        checkpoint.load_parameters(make_model(**{"model.num_layers": "3"}), directory)
    with pytest.raises(ValueError, match="parameter .*layers.1.* is unknown to this configuration"):
        checkpoint.load_parameters(make_model(**{"model.num_layers": "1"}), directory)


def test_checkpoint_of_another_model_is_reported(tmp_path):
    directory = save(tmp_path, 1)
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model.safetensors: damaged .* not a complete checkpoint"):
        checkpoint.load_parameters(make_model(), directory)
    save_file({"x": torch.zeros(1)}, weights)
    with pytest.raises(ValueError, match="belongs to another model"):
        checkpoint.load_parameters(make_model(), directory)


@pytest.mark.parametrize("name", ["config.toml", "model.safetensors", "optimizer.safetensors", "state.json"])
def test_flipped_bit_is_detected(tmp_path, name):
    directory = save(tmp_path, 1)
    checkpoint_folder.verify(directory)
    path = directory / name
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), 8 * max(1, len(whole) // 40) + 1):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}: damaged .*; pass an older checkpoint, or run .*resume"):
            checkpoint_folder.verify(directory)
        if name in ("config.toml", "model.safetensors"):
            with pytest.raises(ValueError, match=f"{name}: damaged"):
                checkpoint.load_model(directory)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{name}: missing"):
        checkpoint_folder.verify(directory)


def test_recovery_uses_newest_intact_checkpoint_and_renames_damaged(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    (tmp_path / "checkpoints/step-2/state.json").write_text("{")
    model = tmp_path / "checkpoints/step-3/model.safetensors"
    os.truncate(model, model.stat().st_size // 2)
    intact, warnings = checkpoint_folder.recover_run(tmp_path)
    assert "model.safetensors: damaged" in warnings[0] and "state.json: damaged" in warnings[1]
    assert intact.name == "step-1" and checkpoint_folder.steps(tmp_path) == [1]
    assert [warning.rsplit(" ", 1)[1] for warning in warnings] == ["damaged-step-3", "damaged-step-2"]
    assert (tmp_path / "checkpoints/damaged-step-3/model.safetensors").exists()
    (intact / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no intact checkpoint: .*step-1/model.safetensors: missing"):
        checkpoint_folder.recover_run(tmp_path)
    assert checkpoint_folder.steps(tmp_path) == [1]


def test_missing_checksum_is_rejected(tmp_path):
    directory = save(tmp_path, 1)
    (directory / "notes.txt").write_text("added later")
    with pytest.raises(ValueError, match=r"notes\.txt: damaged"):
        checkpoint_folder.verify(directory, "notes.txt")
    state = read_object(directory / "state.json")
    del state["checksum"]
    write_object(directory / "state.json", state)
    with pytest.raises(ValueError, match=r"state\.json: damaged"):
        checkpoint_folder.verify(directory)


def test_later_checkpoints_are_renamed_newest_first(tmp_path, monkeypatch):
    """A kill between two renames leaves a sequence without gaps."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    replace = os.replace
    targets = []

    def killed(source, target):
        if targets:
            raise KeyboardInterrupt
        targets.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_folder.set_aside_after(tmp_path, 1)
    assert checkpoint_folder.steps(tmp_path) == [1, 2] and targets[0].name == "left-step-3"


def test_kill_between_renames_is_recovered(tmp_path):
    """A checkpoint that is written again is missing for a moment; recovery restores the earlier one."""
    directory = save(tmp_path, 5)
    (tmp_path / "checkpoints/.step-5.writing").mkdir()
    directory.rename(tmp_path / "checkpoints/.step-5.replaced")
    assert checkpoint_folder.steps(tmp_path) == []
    checkpoint_folder.remove_unfinished(tmp_path)
    checkpoint_folder.verify(directory)
    (tmp_path / "checkpoints/.step-5.writing").mkdir()
    save(tmp_path, 5)
    checkpoint_folder.verify(directory)
    assert [entry.name for entry in directory.parent.iterdir()] == ["step-5"]


def test_symbolic_link_to_folder_is_kept(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    atomic_files.replace_folder(tmp_path / "link", lambda folder: (folder / "new").touch())
    assert (tmp_path / "link").is_symlink() and [entry.name for entry in (tmp_path / "disk").iterdir()] == ["new"]


def test_files_are_synced_around_the_rename(tmp_path, monkeypatch):
    events = []
    fsync = os.fsync
    replace = os.replace

    def record_sync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def record_replace(source, target):
        events.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    save(tmp_path, 1)
    assert events.count("rename") == 1
    at = events.index("rename")
    files = {"config.toml", "model.safetensors", "optimizer.safetensors", "state.json"}
    assert files | {".step-1.writing"} <= set(events[:at]) and events[at - 1] == ".step-1.writing"
    assert events[at + 1 :] == ["checkpoints"]
    events.clear()
    atomic_files.replace_file(tmp_path / "file", "content")
    assert events[0].endswith(".writing") and events[1:] == ["rename", tmp_path.name]
