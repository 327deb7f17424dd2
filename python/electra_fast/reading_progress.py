"""How far reading has come, on standard error: a live line in a terminal, else a plain line every 10 seconds."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.filesize import decimal
from rich.progress import DownloadColumn, Progress

from electra_fast.progress_columns import progress_columns

LINE_SECONDS = 10.0


class ReadingProgress:
    """A context that shows how far reading has come."""

    def __init__(self, what: str, *, shown: bool) -> None:
        self._what = what
        self._console = Console(file=sys.stderr, quiet=not shown)
        self._start = self._said = time.monotonic()
        columns = progress_columns(what, DownloadColumn)
        self._plain = shown and not self._console.is_terminal
        self._progress = Progress(*columns, console=self._console, transient=True, disable=not shown or self._plain)
        self._task = self._progress.add_task("", total=None, figures="")

    def __enter__(self) -> ReadingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        """Moves the bar or says a line; `bytes_total` is 0 where it cannot be known."""
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        figures = f"{documents:,} documents  {tokens / seconds / 1e6:.2f} Mtok/s" if tokens else ""
        if not self._plain:
            self._progress.update(self._task, completed=bytes_done, total=bytes_total or None, figures=figures)
        elif now - self._said >= LINE_SECONDS:
            self._said = now
            self.say("  ".join(filter(None, (f"{self._what}: {_share(bytes_done, bytes_total, seconds)}", figures))))

    def warn(self, message: str | None) -> None:
        """A message that stays, in yellow; nothing if there is nothing to warn of."""
        if message is not None:
            self._console.print(message, highlight=False, soft_wrap=True, markup=False, style="yellow")

    def say(self, message: str) -> None:
        """A message that stays."""
        self._console.print(message, highlight=False, soft_wrap=True, markup=False)


def _share(done: int, total: int, seconds: float) -> str:
    """Bytes read, their share, the rate and the time that the rest will take."""
    rate = f"{decimal(round(done / seconds))}/s"
    if not total:
        return f"{decimal(done)}, {rate}"
    remaining = timedelta(seconds=round(seconds * (total - done) / max(1, done)))
    return f"{done / total:.1%} of {decimal(total)}, {rate}, eta {remaining}"
