"""Ends a rank that waits too long for others, after writing down where every thread of every rank is."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's own

# Seconds between two looks at the clock and at what other ranks have found.
_INTERVAL = 1.0
# After a rank has told the others, they have so many seconds to write their stacks before it ends.
_GRACE = 3 * _INTERVAL
_HUNG = "hung"


class Watchdog:
    """A thread that watches the waits of its process.

    When a wait takes longer than the timeout, all ranks, also one that hangs elsewhere, write the stacks of their
    threads to `FOLDER/rank-R.txt`, and end.

    Args:
        folder: For the stacks.
        rank: Of this process.
        store: That all ranks see, by a connection of the watchdog's own: a request of another thread would block it.
        timeout_seconds: Longest wait.
    """

    def __init__(self, folder: Path, rank: int, store: Store, timeout_seconds: float) -> None:
        self._folder, self._rank, self._store, self._timeout = folder, rank, store, timeout_seconds
        self._wait: tuple[str, float] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait for other ranks."""
        self._wait = (what, time.monotonic())
        try:
            yield
        finally:
            self._wait = None

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_INTERVAL):
            wait = self._wait
            if wait is not None and time.monotonic() - wait[1] > self._timeout:
                self._end(f"waited more than {self._timeout:g} s for {wait[0]}", tell=True)
            if self._is_told():
                self._end("another rank waited too long for this one", tell=False)

    def _is_told(self) -> bool:
        try:
            return self._store.check([_HUNG])
        except RuntimeError:  # the first rank, which has the store, is gone: the next message finds that out
            return False

    def _end(self, reason: str, tell: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank}.txt"
        with path.open("w", encoding="utf-8") as file:
            print(f"rank {self._rank}, process {os.getpid()}: {reason}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        line = f"electra-fast: error: rank {self._rank}: {reason}; stacks in {path}; start again to resume\n"
        with contextlib.suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
        if tell:
            with contextlib.suppress(RuntimeError):
                self._store.set(_HUNG, str(self._rank))
        time.sleep(_GRACE)
        os._exit(2)
