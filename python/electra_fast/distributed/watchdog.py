"""Ends ranks that wait too long for others, after writing the stacks of all threads."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # torch's own

from electra_fast.messages import printable

# Seconds between checks of the clock and of the other ranks' flag.
_INTERVAL = 1.0
# Time for the other ranks to write their stacks before the rank that set the flag ends.
_GRACE = 3 * _INTERVAL
_HUNG = "hung"


class Watchdog:
    """Threads that watch the waits of their process.

    If a wait exceeds the timeout, all ranks, including any that hangs elsewhere, write the stacks of their threads to
    `FOLDER/rank-R.txt` and end. The ranks' store is read through a separate connection, since on a shared one a request
    waits for the requests of other threads.
    """

    def __init__(self, folder: Path, rank: int, store: Store, timeout_seconds: float) -> None:
        self._folder = folder
        self._rank = rank
        self._store = store
        self._timeout = timeout_seconds
        self._waits: list[tuple[str, float]] = []
        self._closed = threading.Event()
        self._is_ending = threading.Lock()
        # Two threads: if the first rank is frozen, a request to its store never returns.
        watches = (self._watch_the_clock, self._watch_the_store)
        self._threads = [threading.Thread(target=watch, name="watchdog", daemon=True) for watch in watches]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def waiting(self, event: str) -> Iterator[None]:
        """Watches a wait for other ranks; waits may be nested."""
        self._waits.append((event, time.monotonic()))
        try:
            yield
        finally:
            self._waits.pop()

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            # No thread may be inside torch when the interpreter exits, but one with an unanswered request cannot end.
            thread.join(2 * _INTERVAL)

    def _watch_the_clock(self) -> None:
        while not self._closed.wait(_INTERVAL):
            for event, start in self._waits[-1:]:
                if time.monotonic() - start > self._timeout:
                    self._end(f"waited more than {self._timeout:g} s for {event}", sets_flag=True)

    def _watch_the_store(self) -> None:
        while not self._closed.wait(_INTERVAL):
            if self._is_flagged():
                self._end("another rank waited too long for this one")

    def _set_flag(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(_HUNG, str(self._rank))

    def _is_flagged(self) -> bool:
        try:
            return self._store.check([_HUNG])
        except RuntimeError:  # the first rank, which has the store, is lost: the next collective reports it
            return False

    def _end(self, reason: str, *, sets_flag: bool = False) -> None:
        self._is_ending.acquire()  # never released, so that the other thread does not report the flag too
        if sets_flag:
            threading.Thread(target=self._set_flag, daemon=True).start()
        try:
            stacks = f"stacks in {self._write_stacks(reason)}"
        except OSError as error:  # ranks other than the first may have no access to the run's folder
            stacks = f"no stacks ({error})"
        line = f"electra-fast: error: rank {self._rank}: {reason}; {stacks}; start again to resume"
        with contextlib.suppress(OSError):
            os.write(2, f"{printable(line)}\n".encode())
        time.sleep(_GRACE)
        os._exit(2)

    def _write_stacks(self, reason: str) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank}.txt"
        with path.open("w", encoding="utf-8") as file:
            print(f"rank {self._rank}, process {os.getpid()}: {reason}", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)
        return path
