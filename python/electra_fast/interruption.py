"""Stop signals: handled immediately (`interrupt_at_once`) or after the current step (`stop_requests`)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from electra_fast.errors import Interrupted

# Sent by schedulers or shells, Ctrl-C, a closed terminal, and schedulers before a time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A launched process treats a signal repeated within this time as an echo of the first.
ECHO_SECONDS = 5.0
# Requests of the open `stop_requests` contexts, innermost last.
_active: list[StopRequest] = []
# Interval at which a process checks that its parent is alive.
PARENT_SECONDS = 1.0


@dataclass
class StopRequest:
    """The signal that requested a stop, or 0."""

    signal: int = 0

    def __bool__(self) -> bool:
        return self.signal != 0


@contextlib.contextmanager
def stop_requests(*, is_launched: bool = False) -> Iterator[StopRequest]:
    """Turns the first of each of `SIGNALS` into a stop request; repeated signals reach their previous handler.

    With `is_launched`, by torchrun for example, an immediate repetition is ignored, because launchers forward signals
    that their processes receive anyway. Signals that the process ignores (`nohup`, background jobs) stay ignored.
    Outside the main thread, where Python allows no signal handlers, a stop is never requested.
    """
    stop = StopRequest()
    first: dict[int, float] = {}

    def request(number: int, frame: FrameType | None) -> None:
        stop.signal = stop.signal or number
        seconds = time.monotonic() - first.setdefault(number, time.monotonic())
        if not is_launched or seconds > ECHO_SECONDS:
            signal.signal(number, before[signal.Signals(number)])
        if is_launched and seconds > ECHO_SECONDS:
            signal.raise_signal(number)
        # `print` is not reentrant, and a closed terminal must not end the run.
        with contextlib.suppress(OSError):
            os.write(2, b"stopping after this step; repeat to stop at once\n")

    before = {number: signal.getsignal(number) for number in SIGNALS} if _is_main_thread() else {}
    caught = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    try:
        for number in caught:
            signal.signal(number, request)
        _active.append(stop)
        yield stop
    finally:
        _active.remove(stop)
        for number in caught:
            signal.signal(number, before[number])


def requested_stop() -> int:
    """Returns the signal that requested a stop, or 0; for code within a step that may take long."""
    return _active[-1].signal if _active else 0


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Sends this process a signal when its parent, such as torchrun, dies without notice."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def launcher_seconds() -> float:
    """Returns how long this process's parent has been running, or 0 if unknown."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        start = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # since boot: proc(5), field 22
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start
    except OSError:
        return 0.0


def interrupt_at_once() -> None:
    """Makes SIGTERM and SIGHUP raise `Interrupted` in the main thread, as Ctrl-C raises KeyboardInterrupt."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, interrupt)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
