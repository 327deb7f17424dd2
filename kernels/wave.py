"""How many programs of a kernel a device runs at once (Triton).

A kernel whose programs loop over the rows and add up sums wants just so many: fewer leave
multiprocessors idle, a few more make a second wave that is nearly empty.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H200's, for the interpreter
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def programs_at_once(device: torch.device, a_multiprocessor: int) -> int:
    """Programs of one wave, where registers let each multiprocessor hold so many."""
    return _multiprocessors(device) * a_multiprocessor
