"""Ends a rank that waits too long for others, after writing down where every thread of every rank is."""

from __future__ import annotations

import contextlib
import faulthandler
import os
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
    """Threads that watch the waits of their process.

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
        self._waits: list[tuple[str, float]] = []
        self._closed, self._is_ending = threading.Event(), threading.Lock()
        # Two threads: a request to the store of a rank that is frozen never returns.
        watches = (self._watch_the_clock, self._watch_the_store)
        self._threads = [threading.Thread(target=watch, name="watchdog", daemon=True) for watch in watches]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Around a wait for other ranks; one may contain another."""
        self._waits.append((what, time.monotonic()))
        try:
            yield
        finally:
            self._waits.pop()

    def close(self) -> None:
        """Ends the watch."""
        self._closed.set()
        for thread in self._threads:
            # A thread within torch must not outlive the interpreter; one whose request is never answered cannot end.
            thread.join(2 * _INTERVAL)

    def _watch_the_clock(self) -> None:
        while not self._closed.wait(_INTERVAL):
            for what, start in self._waits[-1:]:
                if time.monotonic() - start > self._timeout:
                    threading.Thread(target=self._tell, daemon=True).start()
                    self._end(f"waited more than {self._timeout:g} s for {what}")

    def _watch_the_store(self) -> None:
        while not self._closed.wait(_INTERVAL):
            if self._is_told():
                self._end("another rank waited too long for this one")

    def _tell(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(_HUNG, str(self._rank))

    def _is_told(self) -> bool:
        try:
            return self._store.check([_HUNG])
        except RuntimeError:  # the first rank, which has the store, is gone: the next message finds that out
            return False

    def _end(self, reason: str) -> None:
        self._is_ending.acquire()  # never released: the other thread would say it again
        try:
            stacks = f"stacks in {self._write_stacks(reason)}"
        except OSError as error:  # only the first rank needs to see the run's folder
            stacks = f"no stacks ({error})"
        line = f"electra-fast: error: rank {self._rank}: {reason}; {stacks}; start again to resume\n"
        with contextlib.suppress(OSError):
            os.write(2, line.encode())
        time.sleep(_GRACE)
        os._exit(2)

    def _write_stacks(self, reason: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank}.txt"
        with path.open("w", encoding="utf-8") as file:
            print(f"rank {self._rank}, process {os.getpid()}: {reason}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        return path
