"""Signals during training: a checkpoint is written at any point of the loop and in any process; exit codes."""

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import tiny_run
from ranks import wait_for
from tiny_run import STEPS, assert_same_run, tiny_config

import electra_fast as ef
from electra_fast import checkpoint, interruption
from electra_fast import pretrain as pretrain_verb
from electra_fast.data.loader import BatchLoader
from electra_fast.errors import Interrupted
from electra_fast.files import checkpoint_folder
from electra_fast.files.json_files import JsonLines
from electra_fast.training import timing, trainer
from electra_fast.training.checkpoint_writer import CheckpointWriter
from electra_fast.training.step import TrainStep
from electra_fast.training.timing import StepTimer

pretrain_module = sys.modules["electra_fast.training.pretrain"]
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]

# The points at which a signal arrives: owner, function, and the number of the call.
POINTS = {
    "opening the run": (pretrain_module, "open_run", 1),
    "the first batch": (BatchLoader, "__next__", 1),
    "a step": (TrainStep, "__call__", 7),
    "a log line": (JsonLines, "write", 2),
    "an evaluation": (trainer, "evaluate_model", 1),
    "a checkpoint": (CheckpointWriter, "save", 2),
    "writing a checkpoint": (checkpoint, "write", 2),
    "syncing a checkpoint": (os, "fsync", 18),
    "after a checkpoint": (StepTimer, "start", 5),
}


def interrupt_at(monkeypatch, point, number):
    """Sends this process a signal right after the chosen call."""
    owner, name, call = POINTS[point]
    original = getattr(owner, name)
    calls = [0]

    def interrupted(*arguments, **options):
        result = original(*arguments, **options)
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), number)
        return result

    monkeypatch.setattr(owner, name, interrupted)
    return calls


@pytest.mark.parametrize(
    ("point", "number"),
    [
        pytest.param(point, SIGNALS[i % 4], marks=() if point == "a step" else pytest.mark.slow)
        for i, point in enumerate(POINTS)
    ],
)
def test_signal_loses_no_step(whole_run, validation_corpus, tmp_path, monkeypatch, point, number):
    before = {number: signal.getsignal(number) for number in SIGNALS}
    rare = {"train.checkpoint_every": "1000"} if "checkpoint" not in point else {}
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"checkpoint written; run again") as caught:
        calls = interrupt_at(patch, point, number)
        ef.pretrain(validation_corpus, config=tiny_config(**rare), out=tmp_path / "run")
    assert calls[0] >= POINTS[point][2] and caught.value.signal == number
    step = checkpoint_folder.steps(tmp_path / "run")[-1]
    assert f"interrupted at step {step} of {STEPS}" in str(caught.value)
    assert {number: signal.getsignal(number) for number in SIGNALS} == before
    assert pretrain_verb(validation_corpus, config=tiny_config(), out=tmp_path / "run").step == STEPS
    assert_same_run(tmp_path / "run", whole_run)


def test_signal_after_last_step_finishes_run(whole_run, validation_corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(POINTS, "the last line", (JsonLines, "write", STEPS // 4 + STEPS // 8))
    interrupt_at(monkeypatch, "the last line", signal.SIGTERM)
    assert ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run").step == STEPS
    assert_same_run(tmp_path / "run", whole_run)


def test_second_signal_stops_immediately(validation_corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(POINTS, "before the last checkpoint", (TrainStep, "synchronize", 4))
    for point in ("a step", "before the last checkpoint"):
        interrupt_at(monkeypatch, point, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught:
        ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run")
    assert not isinstance(caught.value, Interrupted)
    assert checkpoint_folder.steps(tmp_path / "run") == [3, 6]


def test_ignored_signals_stay_ignored(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # like nohup
    try:
        with interruption.stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)


def test_training_in_another_thread(whole_run, validation_corpus, tmp_path):
    def work():
        ef.pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "run")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert_same_run(tmp_path / "run", whole_run)


ENDLESS = {"train.steps": "100000", "train.checkpoint_every": "100000"}


def has_logged(out):
    return (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").read_text()


def test_exit_code_has_signal_number(server, validation_corpus, tmp_path):
    ranks = server.start(1, validation_corpus, tmp_path / "run", **ENDLESS)
    wait_for(lambda: has_logged(tmp_path / "run"))
    ranks[0].kill(signal.SIGINT)
    (output,) = server.wait(ranks, 128 + signal.SIGINT)
    (step,) = checkpoint_folder.steps(tmp_path / "run")
    assert f"interrupted at step {step} of 100000, checkpoint written; run again to resume" in output.splitlines()[-1]
    assert "Traceback" not in output


def test_time_limit_reserves_time_for_step_and_checkpoint(monkeypatch):
    now = 0.0
    monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: now))

    def stops_at(saving_seconds):
        """Returns when a session of a minute stops. Its steps take three seconds; one pause takes 20 more."""
        nonlocal now
        now = 0.0
        limit = timing.TimeLimit(1, start=0.0, checkpoint_bytes=2e9)
        while not limit.is_up(saving_seconds):
            now += 3
            if now == 9:
                limit.pause()
                now += 20
        return now

    assert stops_at(saving_seconds=0) == 29  # 4 * 3 for steps, 2 * 10 for a checkpoint at 200 MB/s
    assert stops_at(saving_seconds=1) == 47


# Makes the terminal of its standard streams its controlling terminal, like a login shell, and becomes the command.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.slow
def test_closed_terminal_writes_checkpoint(validation_corpus, tmp_path):
    """After SIGHUP, writing to standard error fails."""
    ours, theirs = pty.openpty()
    command = tiny_run.command(validation_corpus, tmp_path / "run", **ENDLESS)
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", IN_TERMINAL, *command], **streams, start_new_session=True)
    os.close(theirs)
    fcntl.fcntl(ours, fcntl.F_SETFL, os.O_NONBLOCK)
    while not has_logged(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.01)
        try:
            os.read(ours, 1 << 16)  # or the terminal fills up
        except BlockingIOError:
            continue
    os.close(ours)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    (step,) = checkpoint_folder.steps(tmp_path / "run")
    checkpoint_folder.verify(checkpoint_folder.path_of(tmp_path / "run", step))


@pytest.mark.process
def test_other_commands_report_kept_work(tmp_path):
    os.mkfifo(tmp_path / "text.txt")  # nobody writes: the command waits
    command = [sys.executable, "-m", "electra_fast", "vocab", str(tmp_path / "text.txt"), "--out", str(tmp_path / "v")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    writer = os.open(tmp_path / "text.txt", os.O_WRONLY)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(BrokenPipeError):
        while process.poll() is None:  # it handles the signal after it has read some text
            os.write(writer, b"some text\n")
    os.close(writer)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert stderr == "electra-fast: interrupted; nothing was written\n"


@pytest.mark.slow
def test_launcher_seconds():
    child = "from electra_fast.interruption import launcher_seconds; print(launcher_seconds())"
    parent = (
        f"import subprocess, sys, time; time.sleep(0.5); subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    start = time.monotonic()
    seconds = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True).stdout
    assert 0.5 <= float(seconds) <= time.monotonic() - start + 0.02
