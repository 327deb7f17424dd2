"""The live line of a long training run, and plain lines where standard error is no terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from electra_fast.metrics import Number
from electra_fast.progress_columns import progress_columns


class LastingStream:
    """A text stream that outlives its terminal: once nobody can read it, what is written is dropped.

    A run that is told to stop because its terminal closed (SIGHUP) must come to its checkpoint.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or does not."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes, or does not."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class TrainingProgress:
    """Steps done, losses, tokens/s, MFU and ETA on standard error."""

    def __init__(self, first_step: int, num_steps: int) -> None:
        self.console = Console(file=cast(TextIO, LastingStream(sys.stderr)))
        self.num_steps = num_steps
        self._first_step, self._start = first_step, time.monotonic()
        columns = progress_columns("pretrain", MofNCompleteColumn)
        self._progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._progress.add_task("", total=num_steps, completed=first_step, figures="")

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, step: int) -> None:
        """Moves the bar; called every step, so it does nothing else."""
        self._progress.update(self._task, completed=step)

    def report(self, record: Mapping[str, Number]) -> None:
        """Shows a line of metrics.jsonl."""
        self._progress.update(self._task, figures=figures(record))
        if not self.console.is_terminal:
            self.say(f"step {record['step']}/{self.num_steps}  {figures(record)}  eta {self._remaining(record)}")

    def say(self, message: str) -> None:
        """One line that stays."""
        self.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def _remaining(self, record: Mapping[str, Number]) -> str:
        step = int(record["step"] or 0)
        seconds_a_step = (time.monotonic() - self._start) / max(1, step - self._first_step)
        return str(timedelta(seconds=round(seconds_a_step * (self.num_steps - step))))


def figures(record: Mapping[str, Number]) -> str:
    """Loss, the discriminator's accuracy and recall, tokens/s and MFU in one short text."""
    parts = [f"loss {record['loss']:.3f}", f"gen {record['generator_loss']:.3f}"]
    if record["discriminator_loss"] is not None:
        parts += [f"disc {record['discriminator_loss']:.4f}", f"recall {record['discriminator_recall']:.1%}"]
    parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    parts.append(f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "MFU n/a")
    return "  ".join(parts)
