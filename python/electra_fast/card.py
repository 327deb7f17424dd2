"""Facts about GPUs on which choices depend: one place that knows capabilities, makers, and versions with known faults."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Card:
    """A GPU, as its driver describes it.

    Args:
        name: `torch.cuda.get_device_name`.
        capability: NVIDIA's compute capability; on ROCm, numbers of AMD's own, which mean nothing here.
        is_rocm: True for a GPU of AMD, by ROCm.
        num_multiprocessors: Streaming multiprocessors, or AMD's compute units.
    """

    name: str
    capability: tuple[int, int]
    is_rocm: bool = False
    num_multiprocessors: int = 132

    @property
    def is_hopper(self) -> bool:
        """True for H100, H200 and their kin. An MI300 has the capability (9, 4), and is none."""
        return not self.is_rocm and self.capability[0] == 9


@functools.cache
def card_of(device: torch.device) -> Card:
    """Returns the card of a CUDA device, asked once per process."""
    return Card(
        torch.cuda.get_device_name(device),
        torch.cuda.get_device_capability(device),
        torch.version.hip is not None,
        torch.cuda.get_device_properties(device).multi_processor_count,
    )
