"""When a session of a run stops by itself, so that it ends within the time that its scheduler gives it."""

from __future__ import annotations

import math
import time

# Bytes per second at which a checkpoint is taken to be written until one was.
_SLOW_DISK = 200e6


class TimeLimit:
    """Tells when a session must stop.

    Args:
        minutes: That the session may take; 0: any.
        start: When it began, by `time.monotonic`.
        checkpoint_bytes: Size of a checkpoint.
    """

    def __init__(self, minutes: float, start: float, checkpoint_bytes: float) -> None:
        self._end = start + 60 * minutes if minutes else math.inf
        self._assumed_seconds = checkpoint_bytes / _SLOW_DISK
        self._last = math.inf
        self._longest_step = 0.0

    def is_up(self, saving_seconds: float) -> bool:
        """Asked before each step: whether the one after it, and then a checkpoint, may be too late.

        Steps are given four times the longest time that one has taken, a checkpoint twice `saving_seconds`, which is
        what the last one took, or 0 if none was written yet.
        """
        now = time.monotonic()
        self._longest_step, self._last = max(self._longest_step, now - self._last), now
        return now + 4 * self._longest_step + 2 * (saving_seconds or self._assumed_seconds) > self._end

    def pause(self) -> None:
        """Leaves out of the steps' times what comes before the next question."""
        self._last = math.inf
