"""Shared parts of launchers: properties of the card, resident programs, and compile options (Triton)."""

from __future__ import annotations

import torch

from electra_fast.card import Card, card_of

# Shared memory that the hardware reserves per program.
RESERVED_BYTES = 1024
# Explicit because Triton is about to change the default.
FUSION = {"enable_fp_fusion": True}


def card(device: torch.device) -> Card:
    """The card of a device; without a GPU, for the interpreter, a card like an H200."""
    return card_of(device) if device.type == "cuda" else Card("interpreter", (9, 0))


def memory_bytes(device: torch.device) -> int:
    """Memory of a device; 0 without a GPU."""
    return card(device).memory_bytes


# torch.compile cannot trace calls to the driver.
@torch.compiler.assume_constant_result
def is_hopper(device: torch.device) -> bool:
    """Returns whether a device has NVIDIA's Hopper architecture."""
    return card(device).is_hopper


@torch.compiler.assume_constant_result
def has_tensor_cores(device: torch.device) -> bool:
    """Returns whether Triton multiplies 16-bit factors with tensor cores: not on Turing and older GPUs."""
    return card(device).is_rocm or card(device).capability >= (8, 0)


@torch.compiler.assume_constant_result
def shared_kib(device: torch.device) -> int:
    """Shared memory per multiprocessor in KiB: 228 on data-center Hopper and Blackwell, 164 on an A100."""
    return card(device).shared_bytes >> 10


def fitting_programs(device: torch.device, shared_bytes: int) -> int:
    """Programs whose shared memory fits on a multiprocessor, at least one."""
    return max(1, card(device).shared_bytes // (shared_bytes + RESERVED_BYTES))


def num_sms(device: torch.device) -> int:
    """Number of streaming multiprocessors of a device."""
    return card(device).num_multiprocessors


def resident_programs(device: torch.device, programs_per_sm: int) -> int:
    """Programs that run at once on a device, from the number that fits on one multiprocessor.

    A kernel whose programs loop over rows and accumulate partial sums is launched with exactly this number:
    fewer would leave multiprocessors idle, slightly more would start a second, nearly empty wave.
    """
    return num_sms(device) * programs_per_sm
