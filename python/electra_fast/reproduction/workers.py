"""Processes for the runs of a comparison, side by side: one per GPU, or per core where there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from electra_fast.interruption import StopRequest

LOG = "log.txt"
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Slot:
    """Where one process at a time runs: environment variables that say which GPU, or how many threads."""

    environment: dict[str, str]


def choose_slots(num_workers: int, num_runs: int) -> list[Slot]:
    """Slots for `num_workers` processes; 0: one per visible GPU, or else one per core, but no more than runs.

    On a CPU they divide the cores among them.
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
    """A process that has ended: its run's folder and exit code (negative: the signal that killed it)."""

    folder: Path
    code: int


@dataclass
class Workers:
    """The processes. Closing it asks those that run to stop, and waits for their checkpoints."""

    slots: Sequence[Slot]
    command: Sequence[str] = (sys.executable, "-m", "electra_fast.reproduction.row_run")
    _running: dict[int, tuple[Path, subprocess.Popen[bytes]]] = field(default_factory=dict)

    def run(self, folders: Sequence[Path], stop: StopRequest) -> Iterator[Ended | None]:
        """Runs all folders in order; yields each that has ended, and None every now and then while all run."""
        waiting = list(folders)
        while (waiting or self._running) and not stop:
            for slot in range(len(self.slots)):
                if waiting and slot not in self._running:
                    folder = waiting.pop(0)
                    self._running[slot] = folder, self._start(folder, self.slots[slot])
            yield from self._ended()
            yield None
            time.sleep(_POLL_SECONDS)

    @property
    def folders(self) -> list[Path]:
        """The runs that have a process now."""
        return [folder for folder, _ in self._running.values()]

    def close(self) -> None:
        """SIGTERM to every process, which writes a checkpoint and ends."""
        for _, process in self._running.values():
            process.terminate()
        for _, process in self._running.values():
            with process:  # waits, and closes its pipe
                pass
        self._running.clear()

    def _ended(self) -> Iterator[Ended]:
        for slot, (folder, process) in list(self._running.items()):
            if (code := process.poll()) is not None:
                del self._running[slot]
                with process:
                    yield Ended(folder, code)

    def _start(self, folder: Path, slot: Slot) -> subprocess.Popen[bytes]:
        # A session of its own: Ctrl-C reaches it through us only, once. Its standard input is a pipe that closes when
        # this process ends, however it ends.
        with (folder / LOG).open("ab") as log:
            return subprocess.Popen(
                [*self.command, str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **slot.environment},
            )


def last_line(folder: Path) -> str:
    """The last line that a run's process wrote."""
    lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines() if (folder / LOG).exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")


def describe_exit(code: int) -> str:
    """An exit code as text."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


__all__ = ["Ended", "Slot", "Workers", "choose_slots", "closing", "describe_exit", "last_line"]
