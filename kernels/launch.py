"""Values that launchers share: resident programs, precision of products, compile options (Triton)."""

from __future__ import annotations

import functools

import torch

# Explicit because Triton is about to change the default.
FUSION = {"enable_fp_fusion": True}


def precision(dtype: torch.dtype) -> str:
    """The input precision of products of factors of this dtype: fp32 ones are not rounded to TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


@functools.cache
def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a device; off the GPU, for the interpreter, an H200's 132."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def resident_programs(device: torch.device, programs_per_sm: int) -> int:
    """Programs that run at once, given how many fit on one multiprocessor.

    A kernel whose programs loop over rows and accumulate partial sums is launched with exactly that many:
    fewer leave multiprocessors idle, slightly more start a second, nearly empty wave.
    """
    return num_sms(device) * programs_per_sm
