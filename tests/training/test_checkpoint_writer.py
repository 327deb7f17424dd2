"""Checkpoints written in a thread: the same bytes, in order, one at a time. Failures are raised; kills do no harm."""

import copy
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import replace

import pytest
import torch
from ranks import wait_for

from electra_fast import checkpoint
from electra_fast.config.config import Config
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import LogWindow, TrainState
from electra_fast.training.checkpoint_writer import CheckpointWriter

CONFIG = Config.preset("tiny")

# Saves asynchronously in a series of children. Each is killed one write point later than the previous one, until one
# survives. Then it interrupts its wait for a write, and exits during the write.
KILLED = """
import itertools, os, shutil, signal, sys, time
from pathlib import Path
import torch
from electra_fast import checkpoint
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.config.config import Config
from electra_fast.training.checkpoint_writer import CheckpointWriter

config, folder, passed, fatal = Config.preset("tiny"), Path(sys.argv[1]), 0, 0

def tensors(value):
    return {"x": torch.full((1000,), value)}, {"exp_avg.x": torch.full((1000,), value)}

def is_fatal():
    global passed
    passed += 1
    return passed == fatal

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def watch(owner, name, path_at=None):
    original = getattr(owner, name)
    def watched(*arguments, **options):
        if is_fatal():
            kill()
        result = original(*arguments, **options)
        if path_at is not None and is_fatal():  # while it writes the file
            os.truncate(arguments[path_at], os.path.getsize(arguments[path_at]) // 2)
            kill()
        return result
    setattr(owner, name, watched)

def save(run, step):
    watch(checkpoint, "save_file", 1)
    watch(Path, "write_text", 0)
    watch(Path, "write_bytes", 0)
    watch(shutil, "rmtree")
    for name in ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir"):
        watch(os, name)
    with CheckpointWriter(run, keep=1) as writer:
        writer.save(config, *tensors(2.0), TrainState(step=step))

checkpoint.write(folder / "before", config, *tensors(1.0), TrainState(step=1), 1)
for name, step in (("next step", 2), ("same step", 1)):
    for fatal in itertools.count(1):
        run = shutil.copytree(folder / "before", folder / name / str(fatal))
        child = os.fork()
        if not child:
            save(run, step)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code == 0:
            break
        assert code == -signal.SIGKILL

def interrupt(descriptor):
    os.fsync = fsync
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.3)
    fsync(descriptor)

fsync, os.fsync = os.fsync, interrupt
with CheckpointWriter(folder / "interrupted", keep=1) as writer:
    writer.save(config, *tensors(2.0), TrainState(step=2))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Returns the folder that `KILLED` leaves."""
    folder = tmp_path_factory.mktemp("killed")
    process = subprocess.run([sys.executable, "-c", KILLED, str(folder)], stderr=subprocess.PIPE, text=True)
    assert process.returncode == -signal.SIGINT, process.stderr
    return folder


class Gate:
    """Makes writes wait before their first file until `go` is set."""

    def __init__(self):
        self.reached = threading.Event()
        self.go = threading.Event()

    def wait(self):
        self.reached.set()
        assert self.go.wait(60)


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    replace_folder = checkpoint.replace_folder

    def replace_later(*arguments):
        gate.wait()
        replace_folder(*arguments)

    monkeypatch.setattr(checkpoint, "replace_folder", replace_later)
    yield gate
    gate.go.set()


def tensors(value):
    return {"x": torch.full((8,), value)}, {"exp_avg.x": torch.full((8,), value)}


def save(writer, step):
    writer.save(CONFIG, *tensors(float(step)), TrainState(step=step))


def files(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def saved_value(directory):
    """Returns the only number in the two files of tensors."""
    checkpoint_folder.verify(directory)
    stored = [checkpoint.read_tensors(directory / f"{name}.safetensors") for name in ("model", "optimizer")]
    (value,) = {float(value) for table in stored for tensor in table.values() for value in tensor}
    return value


def test_checkpoint_unaffected_by_later_changes(tmp_path, gate):
    shared = torch.arange(8.0)
    tensors = {
        "transposed": torch.arange(6.0).view(2, 3).T,
        "strided": torch.arange(10)[::3],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "first": shared[:4],  # like the parameters that processes share
        "second": shared[4:],
        "trained": torch.nn.Parameter(torch.ones(2)),
    }
    state = TrainState(1, 99, 2.5, LogWindow({"loss": 0.1}, 3, 1.25), "ab", {"epoch": 1, "options": {"seed": 2}})
    gate.go.set()
    expected = [
        checkpoint.write(tmp_path / str(step), CONFIG, tensors, tensors, replace(state, step=step), 1)
        for step in (1, 2)
    ]
    with CheckpointWriter(tmp_path / "run", keep=2) as writer:
        for step in (1, 2):  # the second save reuses the buffers of the first
            gate.go.clear()
            now = replace(copy.deepcopy(state), step=step)
            saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            writer.save(CONFIG, saved, saved, now)
            for tensor in saved.values():
                tensor.zero_()
            now.step = 7
            now.log_window.totals["loss"] = 7.0
            now.loader["options"]["seed"] = 7
            gate.go.set()
            writer.wait_up_to(60)
    for folder in expected:
        assert files(tmp_path / "run/checkpoints" / folder.name) == files(folder)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_tensors_may_change_after_save(tmp_path, gate):
    x = torch.ones(1 << 24, device="cuda")
    with CheckpointWriter(tmp_path, 3) as writer:
        for step in (1, 2, 3):
            gate.go.clear()
            writer.save(CONFIG, {"x": x}, {"exp_avg.x": x, "num_updates": torch.tensor(step)}, TrainState(step=step))
            x += 1
            gate.go.set()
            writer.wait_up_to(60)  # or the gate closes again before it is passed
    for step in (1, 2, 3):
        read = checkpoint.read_tensors(tmp_path / f"checkpoints/step-{step}/optimizer.safetensors")
        assert (read["exp_avg.x"] == step).all() and read["num_updates"] == step


def test_save_waits_for_previous_write(tmp_path, gate):
    with CheckpointWriter(tmp_path, keep=2) as writer:
        save(writer, 1)
        blocked = writer.blocked_seconds
        assert gate.reached.wait(60) and writer.num_written == 0 and blocked > 0 == writer.last_write_seconds
        threading.Timer(0.05, gate.go.set).start()
        save(writer, 2)
        assert writer.num_written >= 1 and saved_value(tmp_path / "checkpoints/step-1") == 1
        assert writer.last_write_seconds > 0 and writer.blocked_seconds > blocked + 0.04
        for step in (9, 10):
            save(writer, step)
    assert writer.num_written == 4 and checkpoint_folder.steps(tmp_path) == [9, 10]
    assert [saved_value(tmp_path / f"checkpoints/step-{step}") for step in (9, 10)] == [9, 10]


def test_buffers_reused_unless_shape_or_dtype_changes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        checkpoint, "write", lambda run, config, model, *_: seen.append((model["x"], model["x"].clone()))
    )
    saved = [
        torch.full((5000,), 1.0),
        torch.full((5000,), 2.0),
        torch.ones(7000),
        torch.ones(7000, dtype=torch.bfloat16),
    ]
    with CheckpointWriter(tmp_path, 1) as writer:
        for x in saved:
            writer.save(CONFIG, {"x": x}, {}, TrainState())
    first, second, third, fourth = (buffer.data_ptr() for buffer, _ in seen)
    assert first == second != third != fourth
    assert all(
        torch.equal(written, x) and written.dtype == x.dtype for (_, written), x in zip(seen, saved, strict=True)
    )


SURFACES = {
    "save again": lambda writer: save(writer, 3),
    "check until it fails": lambda writer: wait_for(writer.check),
    "wait up to a minute": lambda writer: writer.wait_up_to(60),
    "close": CheckpointWriter.close,
}


@pytest.mark.parametrize("surface", SURFACES)
def test_failed_write_raised_once(tmp_path, surface):
    folder = tmp_path / "checkpoints"
    away = tmp_path / "away"
    with CheckpointWriter(tmp_path, keep=5) as writer:
        save(writer, 1)
    before = files(folder / "step-1")
    writer = CheckpointWriter(tmp_path, keep=5)
    folder.rename(away)
    folder.write_text("in the way")
    save(writer, 2)
    with pytest.raises(OSError, match="step-2: checkpoint not written: .*; the earlier ones are intact") as caught:
        SURFACES[surface](writer)
    assert "\n" not in str(caught.value)
    folder.unlink()
    away.rename(folder)
    assert files(folder / "step-1") == before and writer.num_written == 0 and writer.last_write_seconds > 0
    writer.check()
    if surface != "close":
        save(writer, 4)
        writer.close()
        assert checkpoint_folder.steps(tmp_path) == [1, 4] and saved_value(folder / "step-4") == 4
    with pytest.raises(RuntimeError, match="after shutdown"):
        save(writer, 5)


def test_exception_waits_for_write_and_propagates(tmp_path, gate):
    threading.Timer(0.05, gate.go.set).start()
    with pytest.raises(KeyError), CheckpointWriter(tmp_path / "whole", 1) as writer:
        save(writer, 1)
        raise KeyError("of the body")
    assert saved_value(tmp_path / "whole/checkpoints/step-1") == 1
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed/checkpoints").write_text("in the way")
    with pytest.raises(KeyError) as caught, CheckpointWriter(tmp_path / "failed", 1) as writer:
        save(writer, 1)
        raise KeyError("of the body")
    (note,) = caught.value.__notes__
    assert "step-1: checkpoint not written" in note


def interrupt_the_wait():
    """Sends SIGINT once the main thread waits for a write. A signal to another thread would not wake it."""
    main = threading.main_thread().ident
    wait_for(lambda: "_finish" in [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])])
    signal.pthread_kill(main, signal.SIGINT)


def test_interrupted_wait_can_be_repeated(tmp_path, gate):
    with CheckpointWriter(tmp_path, 2) as writer:
        save(writer, 1)
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt_the_wait).start()
            save(writer, 2)  # waits until it is interrupted
        assert writer.num_written == 0 and not writer.wait_up_to(0)
        gate.go.set()
        save(writer, 3)
    assert checkpoint_folder.steps(tmp_path) == [1, 3]
    assert [saved_value(tmp_path / f"checkpoints/step-{step}") for step in (1, 3)] == [1, 3]


def test_interrupted_submit_does_not_reuse_buffers(tmp_path, gate, monkeypatch):
    """A signal arrives after a write starts and before it is recorded, so the next save does not know about it."""
    writer = CheckpointWriter(tmp_path, 2)
    submit = writer._executor.submit

    def interrupted(*arguments):
        submit(*arguments)
        raise KeyboardInterrupt

    save(writer, 1)
    gate.go.set()
    writer.wait_up_to(60)
    gate.go.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer._executor, "submit", interrupted)
        save(writer, 2)
    save(writer, 3)
    gate.go.set()
    writer.close()
    assert [saved_value(tmp_path / f"checkpoints/step-{step}") for step in (2, 3)] == [2, 3]


@pytest.mark.process
@pytest.mark.parametrize("name", ["next step", "same step"])
def test_kill_leaves_old_or_new_checkpoint(killed, name):
    values = []
    runs = sorted((killed / name).iterdir(), key=lambda run: int(run.name))
    for run in runs:
        checkpoint_folder.remove_unfinished(run)
        newest, warnings = checkpoint_folder.recover_run(run)
        assert not warnings and not list((run / "checkpoints").glob(".*"))
        values.append(saved_value(newest))
        assert checkpoint_folder.read_state(newest).step == (2 if name == "next step" and values[-1] == 2 else 1)
        with CheckpointWriter(run, keep=1) as writer:
            save(writer, 3)
        assert [entry.name for entry in (run / "checkpoints").iterdir()] == ["step-3"]
    assert values == sorted(values) and set(values) == {1, 2}
    assert len(values) > 20  # four files, half-written, synced, renamed; the old files removed


@pytest.mark.process
def test_interrupted_process_finishes_write(killed):
    assert [entry.name for entry in (killed / "interrupted/checkpoints").iterdir()] == ["step-2"]
    assert saved_value(killed / "interrupted/checkpoints/step-2") == 2
