"""Settings of the C library's allocator for a training step on a CPU."""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Lets this process keep memory that it frees, for its next allocations.

    A step allocates and frees buffers of many megabytes. By default glibc returns them to the system, and the next
    step pays for every page again: a quarter of the time of a step (bench/LOG.md). One arena serves all threads, since
    others never grow beyond 64 MB. Does nothing where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, -1)
    if not mallopt(_M_MMAP_THRESHOLD, 2**30):
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the maximum of older versions
