"""Progress of long-running work on standard error: a live line in a terminal, plain lines elsewhere.

`ReadingProgress` tracks the bytes that `prepare` and `vocab` read, `TrainingProgress` the steps of `pretrain`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from electra_fast.messages import printable

LINE_SECONDS = 10.0


class LastingStream:
    """A text stream that survives the loss of its terminal by dropping output that cannot be written.

    A run that is stopped because its terminal closed (SIGHUP) must still write its checkpoint.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text, ignoring OSError."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes, ignoring OSError."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _StatusColumn(ProgressColumn):
    """Shows the task's field `status` on one line, truncated to fit."""

    def render(self, task: Task) -> Text:
        """Returns the status text, never wrapped."""
        return Text(printable(task.fields["status"]), no_wrap=True, overflow="ellipsis")


class _WorkProgress:
    """A live line with name, bar, count, status, elapsed time and ETA, as a context manager; truncates the status."""

    def __init__(self, name: str, count: type[ProgressColumn], total: int | None, done: int, *, shown: bool) -> None:
        self.name = name
        self.console = Console(file=cast(TextIO, LastingStream(sys.stderr)), quiet=not shown)
        self.is_live = shown and self.console.is_terminal
        self.start = time.monotonic()
        fixed = Column(no_wrap=True)  # a table first shrinks columns that may wrap
        self._progress = Progress(
            TextColumn(name),
            BarColumn(bar_width=20),
            count(table_column=fixed),
            _StatusColumn(),
            TimeElapsedColumn(table_column=fixed),
            TextColumn("eta"),
            TimeRemainingColumn(table_column=fixed),
            console=self.console,
            transient=total is None,
            disable=not self.is_live,
        )
        self._task = self._progress.add_task("", total=total, completed=done, status="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, message: str, style: str | None = None) -> None:
        """Prints a permanent line."""
        self.console.print(printable(message), highlight=False, soft_wrap=True, markup=False, style=style)

    def warn(self, message: str | None) -> None:
        """Prints a permanent line in yellow; does nothing for `None`."""
        if message is not None:
            self.say(message, style="yellow")

    def _move(self, **changes: Any) -> None:
        self._progress.update(self._task, **changes)


class ReadingProgress(_WorkProgress):
    """Bytes read, documents, tokens/s and ETA; without a terminal, a plain line every ten seconds."""

    def __init__(self, name: str, *, shown: bool) -> None:
        super().__init__(name, DownloadColumn, None, 0, shown=shown)
        self._is_plain = shown and not self.is_live
        self._last_line = self.start

    def update(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        """Updates the bar or prints a line; `bytes_total` is 0 if unknown."""
        now = time.monotonic()
        seconds = max(now - self.start, 1e-9)
        status = f"{documents:,} documents  {tokens / seconds / 1e6:.2f} Mtok/s" if tokens else ""
        if not self._is_plain:
            self._move(completed=bytes_done, total=bytes_total or None, status=status)
        elif now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            self.say(
                "  ".join(filter(None, (f"{self.name}: {_reading_text(bytes_done, bytes_total, seconds)}", status)))
            )


class TrainingProgress(_WorkProgress):
    """Steps done, losses, tokens/s, MFU and ETA; without a terminal, a plain line per record of metrics.jsonl."""

    def __init__(self, first_step: int, num_steps: int, *, shown: bool = True) -> None:
        super().__init__("pretrain", MofNCompleteColumn, num_steps, first_step, shown=shown)
        self._first_step, self._num_steps = first_step, num_steps

    def advance(self, step: int) -> None:
        """Moves the bar; called at every step, so it must be cheap."""
        self._move(completed=step)

    def report(self, record: Mapping[str, Any]) -> None:
        """Shows a record of metrics.jsonl."""
        self._move(status=metrics_text(record))
        if not self.is_live:
            self.say(f"step {record['step']}/{self._num_steps}  {metrics_text(record)}  eta {self._remaining(record)}")

    def _remaining(self, record: Mapping[str, Any]) -> str:
        step = int(record["step"] or 0)
        seconds_per_step = (time.monotonic() - self.start) / max(1, step - self._first_step)
        return str(timedelta(seconds=round(seconds_per_step * (self._num_steps - step))))


class FinetuningProgress(_WorkProgress):
    """Tokens done of all tasks and seeds, the loss and ETA; without a terminal, a plain line every ten seconds."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__("finetune", TaskProgressColumn, num_tokens, 0, shown=True)
        self._num_tokens, self._done, self._skipped, self._last_line = num_tokens, 0, 0, self.start
        self._name = ""

    def enter(self, name: str) -> None:
        """Names the seed that trains now."""
        self._name = name

    def skip(self, tokens: int) -> None:
        """Counts tokens of an earlier session."""
        self._skipped += tokens
        self.advance(tokens)

    def advance(self, tokens: int) -> None:
        """Moves the bar."""
        self._done += tokens
        self._move(completed=self._done)

    def report(self, record: Mapping[str, Any], num_steps: int, score: str) -> None:
        """Shows a record of metrics.jsonl, and the best validation score so far."""
        now = time.monotonic()
        seconds, trained = now - self.start, self._done - self._skipped
        speed = trained / max(seconds, 1e-9)
        text = f"{self._name}  step {record['step']}/{num_steps}  loss {record['loss']:.4f}{score}  {speed:,.0f} tok/s"
        self._move(status=text)
        if not self.is_live and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            remaining = timedelta(seconds=round(max(0, self._num_tokens - self._done) / max(speed, 1e-9)))
            self.say(f"{text}  {min(1.0, self._done / self._num_tokens):.0%}  eta {remaining}")


class RunsProgress(_WorkProgress):
    """Finished runs of a comparison and the status of running ones; a permanent line per finished run."""

    def __init__(self, num_runs: int, num_done: int) -> None:
        super().__init__("reproduce", MofNCompleteColumn, num_runs, num_done, shown=True)
        self._num_runs, self._num_done = num_runs, num_done

    def show(self, standing: Sequence[str]) -> None:
        """Shows the status of the running runs."""
        self._move(status="  |  ".join(standing))

    def finish(self, message: str, seconds_per_run: float) -> None:
        """Counts a finished run, and prints its result and the time remaining."""
        self._num_done += 1
        self._move(completed=self._num_done)
        remaining = timedelta(seconds=round(seconds_per_run * (self._num_runs - self._num_done)))
        self.say(f"{message}; {self._num_done} of {self._num_runs} runs done, eta {remaining}")


_SHOWN = (
    ("generator_loss", "gen", ".3f"),
    ("encoder_loss", "enc", ".3f"),
    ("discriminator_loss", "disc", ".4f"),
    ("discriminator_recall", "recall", ".1%"),
    ("reward", "reward", ".3f"),
)


def metrics_text(record: Mapping[str, Any]) -> str:
    """Returns losses, the discriminator's recall, tokens/s and MFU as one short text."""
    parts = [f"loss {record['loss']:.3f}"]
    for name, label, form in _SHOWN:
        if record.get(name) is not None:
            parts.append(f"{label} {record[name]:{form}}")
    parts.append(f"{record['tokens_per_second']:,.0f} tok/s")
    parts.append(f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "MFU n/a")
    if record.get("skipped_steps"):
        parts.append(f"skipped {record['skipped_steps']}")
    if record.get("slowest_rank") is not None:
        parts.append(f"slowest rank {record['slowest_rank']}: {record['slowest_rank_seconds']:.3g} s/step")
    return "  ".join(parts)


def _reading_text(done: int, total: int, seconds: float) -> str:
    """Returns bytes read, percentage, rate and ETA."""
    rate = f"{decimal(round(done / seconds))}/s"
    if not total:
        return f"{decimal(done)}, {rate}"
    remaining = timedelta(seconds=round(seconds * (total - done) / max(1, done)))
    return f"{done / total:.1%} of {decimal(total)}, {rate}, eta {remaining}"
