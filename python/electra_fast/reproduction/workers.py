"""Processes for the runs of a comparison, side by side: one per GPU, or per core where there is none."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from electra_fast.child_process import python_command
from electra_fast.interruption import StopRequest

LOG = "log.txt"
_PROGRAM = "from electra_fast.reproduction.row_run import main; sys.exit(main(sys.argv[1]))"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Slot:
    """A place for one process at a time: environment variables that select its GPU or number of threads."""

    environment: dict[str, str]


def choose_slots(num_workers: int, num_runs: int) -> list[Slot]:
    """Returns `num_workers` slots, at most one per run; 0: one per visible GPU, or else per core.

    On a CPU they share the cores.
    """
    gpus = _visible_gpus()
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = max(1, min(num_workers or len(gpus) or num_cores, num_runs))
    if gpus:
        return [Slot({"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]}) for i in range(count)]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, num_cores // count))
    return [Slot({"OMP_NUM_THREADS": threads}) for _ in range(count)]


def _visible_gpus() -> list[str]:
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


@dataclass(frozen=True)
class Ended:
    """A process that has ended: its folder, its exit code (negative: the signal that killed it), its duration."""

    folder: Path
    code: int
    seconds: float


@dataclass(frozen=True)
class _Running:
    folder: Path
    process: subprocess.Popen[bytes]
    start: float


class Workers:
    """The processes, one per slot. Closing it asks those that run to stop, and waits for their checkpoints."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots
        self._running: dict[int, _Running] = {}

    def run(self, folders: Sequence[Path], stop: StopRequest) -> Iterator[Ended | None]:
        """Runs all folders in order; yields each process that has ended, and None after each poll."""
        waiting = list(folders)
        while (waiting or self._running) and not stop:
            for number, slot in enumerate(self.slots):
                if waiting and number not in self._running:
                    self._running[number] = _start(waiting.pop(0), slot)
            yield from self._ended()
            yield None
            time.sleep(_POLL_SECONDS)

    @property
    def folders(self) -> list[Path]:
        """The folders of the runs in progress."""
        return [each.folder for each in self._running.values()]

    def close(self) -> None:
        """Sends SIGTERM to every process, which writes a checkpoint and ends."""
        for each in self._running.values():
            each.process.terminate()
        for each in self._running.values():
            with each.process:  # waits, and closes its pipe
                pass
        self._running.clear()

    def _ended(self) -> Iterator[Ended]:
        for number, each in list(self._running.items()):
            if (code := each.process.poll()) is not None:
                del self._running[number]
                with each.process:
                    yield Ended(each.folder, code, time.monotonic() - each.start)


def _start(folder: Path, slot: Slot) -> _Running:
    # A session of its own, so that it receives Ctrl-C only once, from this process. Its standard input is a pipe, which
    # closes when this process ends for any reason.
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            python_command(_PROGRAM, str(folder)),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **slot.environment},
        )
    return _Running(folder, process, time.monotonic())


def last_line(folder: Path) -> str:
    """Returns the last line that a run's process wrote, or an empty string."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines() if (folder / LOG).exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
