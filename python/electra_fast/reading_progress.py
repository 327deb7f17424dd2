"""The live line while text is read: share, documents, tokens a second, ETA, on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import DownloadColumn, Progress

from electra_fast.progress_columns import progress_columns


class ReadingProgress:
    """A context that shows how far reading has come, if standard error is a terminal."""

    def __init__(self, what: str, *, shown: bool) -> None:
        self._console = Console(file=sys.stderr, quiet=not shown)
        self._start = time.monotonic()
        columns = progress_columns(what, DownloadColumn)
        hidden = not (shown and self._console.is_terminal)
        self._progress = Progress(*columns, console=self._console, transient=True, disable=hidden)
        self._task = self._progress.add_task("", total=None, figures="")

    def __enter__(self) -> ReadingProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, bytes_done: int, bytes_total: int, documents: int, tokens: int) -> None:
        """Moves the bar; `bytes_total` is 0 where it cannot be known."""
        rate = tokens / max(time.monotonic() - self._start, 1e-9)
        figures = f"{documents:,} documents  {rate / 1e6:.2f} Mtok/s" if tokens else ""
        self._progress.update(self._task, completed=bytes_done, total=bytes_total or None, figures=figures)

    def say(self, message: str) -> None:
        """One line that stays."""
        self._console.print(message, highlight=False, soft_wrap=True, markup=False)
