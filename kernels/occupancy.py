"""How many programs of a kernel are resident on a device at once (Triton).

A kernel whose programs loop over rows and accumulate partial sums is launched with exactly that many:
fewer leave multiprocessors idle, slightly more start a second, nearly empty wave.
"""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a device; off the GPU, for the interpreter, an H200's 132."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def resident_programs(device: torch.device, programs_per_sm: int) -> int:
    """Programs in one wave, given how many of them fit on one multiprocessor."""
    return num_sms(device) * programs_per_sm
