"""Step times, and the time limit of a session."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

from electra_fast.training.step import TrainStep

# A step is slow if it takes this multiple of the expected seconds.
SLOW = 1.3


@dataclass(frozen=True)
class StepTimes:
    """Seconds between the ends of consecutive steps: the median and the longest."""

    median: float
    longest: float


class StepTimer:
    """Measures the time of training without pauses, and the time of each step from its marks: on a GPU, CUDA events.

    Reads nothing from the device before `stop`. The caller must have waited for the device by then.
    """

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._step_seconds: list[float] = []
        self._started = 0.0

    def start(self) -> None:
        """Starts, or resumes after a pause."""
        self._started = time.perf_counter()
        self._step.marks = [self._step.mark()]

    def stop(self) -> float:
        """Returns the seconds since `start`."""
        pairs = itertools.pairwise(self._step.marks)
        if self._step.graphs.stream is None:
            self._step_seconds += [end - begin for begin, end in pairs]
        else:
            self._step_seconds += [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return time.perf_counter() - self._started

    def take_step_times(self) -> StepTimes | None:
        """Returns the times of the steps since the last call; None if there were no steps."""
        seconds = sorted(self._step_seconds)
        self._step_seconds = []
        return StepTimes(seconds[len(seconds) // 2], seconds[-1]) if seconds else None


class SlowSteps:
    """Warns once if steps take much longer than `expected` seconds. Does nothing if `expected` is None."""

    def __init__(self, expected: float | None) -> None:
        self._expected = expected
        self._windows = 0

    def warning(self, times: StepTimes | None) -> str | None:
        """Adds the times of a log window. Returns a warning if two consecutive windows were slow, else None."""
        if self._expected is None or times is None:
            return None
        ratio = times.median / self._expected
        self._windows = self._windows + 1 if ratio > SLOW else 0
        if self._windows < 2:
            return None
        self._expected = None
        return (
            f"a step takes {1e3 * times.median:.3g} ms, {ratio:.1f} times as long as when kernels were checked; look "
            "for other processes on this GPU, heat or slow storage, else please report it with RUN/kernels.json"
        )


# Assumed bytes per second for writing the first checkpoint.
_SLOW_DISK = 200e6


class TimeLimit:
    """The time limit of a session.

    Args:
        minutes: Its length; 0: no limit.
        start: `time.monotonic` of the session's start.
        checkpoint_bytes: Size of a checkpoint.
    """

    def __init__(self, minutes: float, start: float, checkpoint_bytes: float) -> None:
        self._end = start + 60 * minutes if minutes else math.inf
        self._assumed_seconds = checkpoint_bytes / _SLOW_DISK
        self._last = math.inf
        self._longest_step = 0.0

    def is_up(self, saving_seconds: float) -> bool:
        """Returns, before each step, whether another step and a checkpoint might exceed the limit.

        Assumes that the step takes at most four times the longest step so far, and the checkpoint at most twice
        `saving_seconds`, the time of the last checkpoint (0 if none was written yet).
        """
        now = time.monotonic()
        self._longest_step = max(self._longest_step, now - self._last)
        self._last = now
        return now + 4 * self._longest_step + 2 * (saving_seconds or self._assumed_seconds) > self._end

    def pause(self) -> None:
        """Excludes the time until the next `is_up` from the step times."""
        self._last = math.inf
