"""Progress of long-running work: a live line in a terminal or notebook, plain lines on standard error elsewhere.

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

from rich.console import Console, ConsoleOptions, RenderResult
from rich.filesize import decimal
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from electra_fast.messages import is_quiet, is_shown, pointer, printable

LINE_SECONDS = 10.0
# Period over which the remaining time is averaged, so that a validation hardly changes it.
SPEED_SECONDS = 300.0
# Wider than any row of text or table.
PIPE_WIDTH = 1_000_000
# Minimum width of a terminal, in columns, for a long bar.
WIDE = 100


class LastingStream:
    """A text stream that survives the loss of its terminal by dropping output that cannot be written.

    A run that is stopped because its terminal closed (SIGHUP) must still write its checkpoint.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Status:
    """Parts of a status on one line, most important first; parts that do not fit are dropped from the end."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = [printable(part) for part in parts]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = Text(" ".join(self._parts)).cell_len
        return Measurement(min(width, 1), width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._parts
        while len(parts) > 1 and Text(" ".join(parts)).cell_len > options.max_width:
            parts = parts[:-1]
        yield Text(" ".join(parts), no_wrap=True, overflow="ellipsis")


class _StatusColumn(ProgressColumn):
    """Shows the task's field `status`, a list of parts."""

    def render(self, task: Task) -> Any:
        return _Status(task.fields["status"])


class _WorkProgress:
    """A context manager with a live line of bar, count, status and ETA; in a notebook, the text of a plain line.

    With `--quiet` it prints only warnings.
    """

    def __init__(self, name: str, count: type[ProgressColumn], total: int | None, done: int, *, shown: bool) -> None:
        self.name = name
        self.console = Console(file=cast(TextIO, LastingStream(sys.stderr)), quiet=not shown)
        self._reports = shown and not is_quiet()
        self._is_notebook = self._reports and self.console.is_jupyter
        self.is_live = self._reports and self.console.is_terminal and not self._is_notebook
        self.start = self._last_line = time.monotonic()
        self._display: Any = None
        fixed = Column(no_wrap=True)  # a table first shrinks columns that may wrap
        self._progress = Progress(
            BarColumn(bar_width=20 if self.console.width >= WIDE else 6, table_column=fixed),
            count(table_column=fixed),
            _StatusColumn(),
            TextColumn("eta", table_column=fixed),
            TimeRemainingColumn(table_column=fixed),
            console=self.console,
            transient=total is None,
            disable=not self.is_live,
            speed_estimate_period=SPEED_SECONDS,
        )
        self._task = self._progress.add_task("", total=total, completed=done, status=())

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, message: str, style: str | None = None) -> None:
        """Prints a permanent line; with `--quiet`, only a warning."""
        if is_shown(message):
            self._print([printable(message)], style)

    def warn(self, *messages: str | None) -> None:
        """Prints permanent lines in yellow, also with `--quiet`; does nothing for `None`."""
        self._print([printable(message) for message in filter(None, messages)], "yellow")

    def _print(self, messages: list[str], style: str | None = None) -> None:
        for line in (*messages, *pointer(messages)):
            self.console.print(line, highlight=False, soft_wrap=True, markup=False, style=style)

    def _move(self, **changes: Any) -> None:
        self._progress.update(self._task, **changes)

    def _write_line(self, text: str) -> None:
        """Without a live line, shows progress as text: prints it or, in a notebook, replaces the previous text."""
        self._last_line = time.monotonic()
        if self._is_notebook:
            content = {"text/plain": printable(text)}
            if self._display is None:
                from IPython.display import display

                self._display = display(content, raw=True, display_id=True)
            else:
                self._display.update(content, raw=True)
        elif self._reports and not self.is_live:
            self.say(text)

    def _is_line_due(self) -> bool:
        """Returns whether a plain line is due, for work that reports many times per second."""
        pause = 0.5 if self._is_notebook else LINE_SECONDS
        return self._reports and not self.is_live and time.monotonic() - self._last_line >= pause


class ReadingProgress(_WorkProgress):
    """Bytes read, documents, tokens/s and ETA; without a terminal, a plain line every ten seconds."""

    def __init__(self, name: str, *, shown: bool) -> None:
        super().__init__(name, DownloadColumn, None, 0, shown=shown)

    def update(self, bytes_done: int, bytes_total: int, documents: int, tokens: int, step: str = "") -> None:
        seconds = max(time.monotonic() - self.start, 1e-9)
        status = (f"{documents:,} documents", f"{tokens / seconds / 1e6:.2f} Mtok/s") if tokens else ()
        self._move(completed=bytes_done, total=bytes_total or None, status=(step,) if step else status)
        if self._is_line_due():
            text = _reading_text(bytes_done, bytes_total, seconds)
            if step:
                text = f"{step}, {bytes_done / bytes_total:.0%} of {decimal(bytes_total)}" if bytes_total else step
            self._write_line("  ".join((f"{self.name}: {text}", *status)))


class TrainingProgress(_WorkProgress):
    """Finished steps, loss, AUC, tokens/s, MFU and ETA, and more if there is room.

    Without a terminal, one plain line per record of metrics.jsonl.
    """

    def __init__(self, first_step: int, num_steps: int, *, shown: bool = True) -> None:
        super().__init__("pretrain", MofNCompleteColumn, num_steps, first_step, shown=shown)
        self._first_step = first_step
        self._num_steps = num_steps
        self._auc: float | None = None
        self._record: Mapping[str, Any] | None = None

    def advance(self, step: int) -> None:
        self._move(completed=step)

    def report(self, record: Mapping[str, Any]) -> None:
        self._record = record
        status = metrics_parts(record, self._auc)
        self._move(status=status)
        remaining = self._remaining(record)
        self._write_line("  ".join((f"step {record['step']}/{self._num_steps}", *status, f"eta {remaining}")))

    def report_evaluation(self, record: Mapping[str, Any]) -> None:
        """Shows, from now on, the discriminator's AUC from a record of evaluations.jsonl."""
        self._auc = record.get("discriminator_auc")
        if self._record is not None:
            self._move(status=metrics_parts(self._record, self._auc))

    def _remaining(self, record: Mapping[str, Any]) -> str:
        step = int(record["step"] or 0)
        seconds_per_step = (time.monotonic() - self.start) / max(1, step - self._first_step)
        return str(timedelta(seconds=round(seconds_per_step * (self._num_steps - step))))


class _TokenProgress(_WorkProgress):
    """Finished tokens or other units, speed and ETA; without a terminal, a plain line every ten seconds."""

    def __init__(self, name: str, num_tokens: int, *, shown: bool = True, unit: str = "tok") -> None:
        super().__init__(name, TaskProgressColumn, num_tokens, 0, shown=shown)
        self._unit = unit
        self._num_tokens = num_tokens
        self._done = 0
        self._skipped = 0

    def _show(self, *status: str) -> None:
        """Shows the parts of a status, most important first, with the speed after the first."""
        speed = (self._done - self._skipped) / max(time.monotonic() - self.start, 1e-9)
        parts = (status[0], f"{_rate(speed)} {self._unit}/s", *status[1:])
        self._move(completed=self._done, status=(*parts, self.name))
        if self._is_line_due():
            remaining = timedelta(seconds=round(max(0, self._num_tokens - self._done) / max(speed, 1e-9)))
            done = f"{min(1.0, self._done / self._num_tokens):.0%}"
            self._write_line("  ".join((self.name, *reversed(parts), done, f"eta {remaining}")))


class FinetuningProgress(_TokenProgress):
    """Finished tokens over all tasks and seeds, the loss and ETA."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__("", num_tokens)

    def enter(self, name: str) -> None:
        self.name = name

    def skip(self, tokens: int) -> None:
        self._skipped += tokens
        self.advance(tokens)

    def advance(self, tokens: int) -> None:
        self._done += tokens
        self._move(completed=self._done)

    def report(self, record: Mapping[str, Any], num_steps: int, score: str) -> None:
        self._show(f"loss {record['loss']:.4f}{score}", f"step {record['step']}/{num_steps}")


class EncodingProgress(_TokenProgress):
    """Finished tokens, shown only after the work has taken two seconds."""

    def __enter__(self) -> Self:
        return self

    def advance(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self.start >= 2:
            self._progress.start()  # does nothing the second time
            self._show(f"{self._done:,} {'tokens' if self._unit == 'tok' else self._unit}")


_SHOWN = (
    ("generator_loss", "gen", ".3f"),
    ("encoder_loss", "enc", ".3f"),
    ("discriminator_loss", "disc", ".4f"),
    ("discriminator_recall", "recall", ".1%"),
    ("reward", "reward", ".3f"),
)


def metrics_parts(record: Mapping[str, Any], auc: float | None = None) -> list[str]:
    """Returns short texts, most important first: loss, AUC of the last validation, tokens/s, MFU, details."""
    parts = [f"loss {record['loss']:.3f}", *([] if auc is None else [f"AUC {auc:.3f}"])]
    parts.append(f"{_rate(record['tokens_per_second'])} tok/s")
    parts.append(f"MFU {record['mfu']:.1%}" if record["mfu"] is not None else "MFU n/a")
    if record.get("skipped_steps"):
        parts.append(f"skipped {record['skipped_steps']}")
    for name, label, form in _SHOWN:
        if record.get(name) is not None:
            parts.append(f"{label} {record[name]:{form}}")
    if record.get("slowest_rank") is not None:
        parts.append(f"slowest rank {record['slowest_rank']}: {record['slowest_rank_seconds']:.3g} s/step")
    return parts


def _rate(per_second: float) -> str:
    """Formats a speed with at least three digits: 12,345, 123k, 1.23M."""
    if per_second < 1e5:
        return f"{per_second:,.0f}"
    return f"{per_second / 1e3:.0f}k" if per_second < 999_500 else f"{per_second / 1e6:.3g}M"


def _reading_text(done: int, total: int, seconds: float) -> str:
    rate = f"{decimal(round(done / seconds))}/s"
    if not total:
        return f"{decimal(done)}, {rate}"
    remaining = timedelta(seconds=round(seconds * (total - done) / max(1, done)))
    return f"{done / total:.1%} of {decimal(total)}, {rate}, eta {remaining}"
