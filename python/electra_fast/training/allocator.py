"""Settings of the C library's memory allocator for training on a CPU."""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Lets this process reuse the memory that it frees.

    A step allocates and frees buffers of many megabytes. By default glibc returns them to the system, and the next
    step faults in every page again, which takes a quarter of its time (bench/LOG.md). All threads share one arena,
    since others never grow beyond 64 MB. Does nothing if the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, -1)
    if not mallopt(_M_MMAP_THRESHOLD, 2**30):
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the maximum of older versions
