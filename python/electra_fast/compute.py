"""How a step computes, and from which keys it draws: device, attention backend, activation dtype, RNG keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast.attention_choice import choose_attention
from electra_fast.config import AUTO, Config
from electra_fast.dispatch import uses_kernels


@dataclass(frozen=True)
class ComputeConfig:
    """Attention backend and dtype of activations."""

    attention: str
    dtype: torch.dtype


@dataclass(frozen=True)
class RngKey:
    """What a micro-batch's samples and dropout masks are functions of: int64 [2] of (seed, step), and its first row.

    A tensor (int64 scalar) as first row lets one compiled function serve all micro-batches of a step.
    """

    seed_and_step: Tensor
    first_row: int | Tensor = 0

    def dropout_key(self, length: int) -> Tensor | None:
        """`ops.Dropout.key` for rows of this length; None on the CPU, where torch's generator draws the masks."""
        if not (self.seed_and_step.is_cuda or uses_kernels(self.seed_and_step)):
            return None
        first_token = self.seed_and_step[:1] * 0 + self.first_row * length
        return torch.cat((self.seed_and_step, first_token))


def seed_generator(device: torch.device, seed: int, part: int, step: int) -> None:
    """Keys torch's own generator by the step and what part of it comes next, so that a resumed run draws the same.

    On a CPU `torch.manual_seed` takes half a millisecond, for a stack trace that it keeps in case CUDA comes into use.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + part * 0xD1B54A32D192ED03 + step) % 2**63
    torch.manual_seed(mixed) if device.type == "cuda" else torch.default_generator.manual_seed(mixed)


def choose_device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_compute(config: Config, device: torch.device) -> ComputeConfig:
    """Activation dtype and attention backend of `train.precision` and `model.attention`.

    Measures nothing: where only a measurement can resolve `auto` (`choose_precision`), the dtype is fp32. A run has it
    resolved before (`training.hardware`). Raises ValueError where the attention backend cannot run.
    """
    precision = choose_precision(config.train.precision, device)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = config.model
    rows = (config.data.sequence_length, model.hidden_size // model.num_heads)
    attention = choose_attention(model.attention, device, dtype, model.attention_dropout, model.local_attention, *rows)
    return ComputeConfig(attention, dtype)


def choose_precision(requested: str, device: torch.device) -> str:
    """Resolves `auto` to bf16 on a CUDA device that has it, and to fp32 on any device that has not.

    Returns `auto` for a CPU with bf16 instructions: on some they are faster than fp32, on others slower.
    """
    if requested != AUTO:
        return requested
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return AUTO if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"
