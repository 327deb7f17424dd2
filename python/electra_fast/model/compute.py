"""Settings of a step's computation: device, attention backend, activation dtype, RNG keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from electra_fast.config.config import AUTO, Config, ModelConfig
from electra_fast.model.attention_choice import choose_attention
from electra_fast.model.matmul import DEFAULT, choose_matmul
from electra_fast.ops.dispatch import uses_kernels

Precision = Literal["auto", "fp32", "bf16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class ComputeConfig:
    """Attention backend, dtype of activations, and the library of fp32 products on a CPU (`matmul.use_matmul`)."""

    attention: str
    dtype: torch.dtype
    matmul: str = DEFAULT


@dataclass(frozen=True)
class RngKey:
    """The key of a micro-batch's samples and dropout masks: (seed, step) as int64 [2], and its first row.

    With a tensor (int64 scalar) as first row, one compiled function serves all micro-batches of a step.
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
    """Seeds torch's own generator from the step and the part of it that follows, so that a resumed run draws the same.

    On a CPU `torch.manual_seed` takes half a millisecond, for a stack trace that it keeps in case CUDA comes into use.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + part * 0xD1B54A32D192ED03 + step) % 2**63
    torch.manual_seed(mixed) if device.type == "cuda" else torch.default_generator.manual_seed(mixed)


def choose_device() -> torch.device:
    """CUDA if available, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_compute(config: Config, device: torch.device) -> ComputeConfig:
    """Activation dtype, attention backend and library of products of a configuration.

    Measures nothing: where only a measurement can resolve `auto` (`choose_precision`, `choose_matmul`), the dtype is
    fp32 and the library the default. A run has both resolved before (`training.hardware`). Raises ValueError if the
    attention backend or the library cannot run.
    """
    model, train = config.model, config.train
    rows = (config.data.sequence_length, model.hidden_size // model.num_heads)
    return resolve_compute(model, device, train.precision, train.matmul, model.attention, rows)


def resolve_compute(
    shape: ModelConfig, device: torch.device, precision: str, matmul: str, attention: str, rows: tuple[int, ...] = ()
) -> ComputeConfig:
    """Resolves `auto` without measuring, as `choose_compute`; `rows` are length and head_dim, where rows are equal."""
    dtype = DTYPES.get(choose_precision(precision, device), torch.float32)
    attention = choose_attention(attention, device, dtype, shape.attention_dropout, shape.local_attention, *rows)
    matmul = choose_matmul(matmul, device)
    return ComputeConfig(attention, dtype, DEFAULT if matmul == AUTO else matmul)


def choose_precision(requested: str, device: torch.device) -> str:
    """Resolves `auto` to bf16 on a CUDA device that supports it, and to fp32 on any device that does not.

    Returns `auto` for a CPU with bf16 instructions: on some they are faster than fp32, on others slower.
    """
    if requested != AUTO:
        return requested
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return AUTO if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"
