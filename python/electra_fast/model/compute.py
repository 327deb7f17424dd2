"""Choice of device, activation dtype, attention backend and library for fp32 products."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from electra_fast.card import card_of
from electra_fast.config.config import AUTO, Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.model.attention import BACKENDS
from electra_fast.model.matmul import DEFAULT, choose_matmul, use_matmul
from electra_fast.ops.operations import use_choices

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# On a CPU, a measurement finds the faster of these.
CPU_PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class ComputeConfig:
    """The settings with which a model computes.

    Args:
        attention: Attention backend.
        dtype: Dtype of activations.
        matmul: Library for fp32 products on a CPU (`matmul.use_matmul`).
        kernels: Chosen implementations of operations (`ops.use_choices`), as pairs; none by default.
    """

    attention: str
    dtype: torch.dtype
    matmul: str = DEFAULT
    kernels: tuple[tuple[str, str], ...] = ()

    def computes_segments(self, device: torch.device) -> bool:
        """Returns whether attention computes scores only within the segments of a packed row."""
        return self.attention == "sdpa" and device.type == "cpu"


def is_repeatable(attention: str, shape: ModelConfig) -> bool:
    """Returns whether two runs with the same seed have bitwise equal gradients with this attention backend."""
    adds_up_scores = attention == "flex" and shape.architecture == "deberta"
    return BACKENDS[attention].is_deterministic and not adds_up_scores


@contextmanager
def use_compute(compute: ComputeConfig) -> Iterator[None]:
    """Applies a configuration's implementations of fp32 products and of operations within the context."""
    with use_matmul(compute.matmul), use_choices(dict(compute.kernels)):
        yield


def choose_device(name: str = AUTO) -> torch.device:
    """Returns the device for a name: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`, which becomes current.

    Raises ValueError for any other name, or if the device does not exist.
    """
    if name == AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"device = {name!r}: must be auto, cpu, cuda or cuda:N")
    device = torch.device(name)
    if device.type == "cuda":
        if (num_devices := torch.cuda.device_count()) <= (device.index or 0) or not torch.cuda.is_available():
            seen = f"{num_devices} GPUs" if num_devices else "no GPU that torch can use (see electra-fast doctor)"
            raise InputError(f"device = {name!r}: this machine has {seen}; remove the option, or pass cpu")
        if device.index is not None:
            torch.cuda.set_device(device)  # Triton's kernels run on the current device
    return device


def choose_compute(config: Config, device: torch.device) -> ComputeConfig:
    """Returns the activation dtype, attention backend and library for products of a configuration.

    Measures nothing: if only a measurement can resolve `auto` (`choose_precision`, `choose_matmul`), the dtype is fp32
    and the library the default. A run resolves both beforehand (`hardware.settings`). Raises ValueError if the
    attention backend or the library cannot run.
    """
    train = config.train
    row_length = config.data.sequence_length
    return resolve_compute(config.model, device, train.precision, train.matmul, config.model.attention, row_length)


def resolve_compute(
    shape: ModelConfig, device: torch.device, precision: str, matmul: str, attention: str, row_length: int | None = None
) -> ComputeConfig:
    """Resolves `auto` without a measurement, as in `choose_compute`; `row_length` is None if rows differ in length."""
    dtype = _dtype(precision, device)
    attention = choose_attention(attention, shape, device, dtype, row_length)
    matmul = choose_matmul(matmul, device)
    return ComputeConfig(attention, dtype, DEFAULT if matmul == AUTO else matmul)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of a precision, or fp32 if only a measurement can resolve it."""
    return DTYPES.get(choose_precision(precision, device), torch.float32)


def choose_precision(requested: str, device: torch.device) -> str:
    """Resolves `auto`: on a GPU to bf16 if the hardware multiplies it, else to fp16 if that is faster than fp32.

    On a CPU, to fp32 unless it has bf16 instructions. These are faster than fp32 on some processors and slower on
    others, so the result is then `auto`.
    """
    if requested != AUTO:
        return requested
    if device.type == "cuda":
        card = card_of(device)
        return "bf16" if card.has_bf16 else "fp16" if card.has_fp16_tensor_cores else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return AUTO if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def choose_attention(
    requested: str, shape: ModelConfig, device: torch.device, dtype: torch.dtype, row_length: int | None = None
) -> str:
    """Resolves `auto` to a backend's name; raises ValueError if the requested backend cannot run.

    `auto` is the first backend that can run and is proven on the card. It is never an optional package, so that a run
    does not depend on the installed packages. `dtype` is the activations' dtype; `row_length` is the number of tokens
    per row, or None if rows differ in length.
    """
    if requested == AUTO:
        is_hopper = device.type == "cuda" and card_of(device).is_hopper
        rows = (row_length or 0) if is_hopper else float("inf")
        names = [
            name
            for name, backend in BACKENDS.items()
            if backend.max_proven_row is None or rows <= backend.max_proven_row
        ]
        return next(name for name in names if not _missing_for(name, shape, device, dtype, row_length))
    if missing := _missing_for(requested, shape, device, dtype, row_length):
        raise InputError(f'model.attention = "{requested}": needs {missing}; or set model.attention = "sdpa"')
    return requested


def available_attention(config: Config, device: torch.device) -> list[str]:
    """Returns the attention backends that can run a configuration, the preferred one first."""
    run = (config.model, device, _dtype(config.train.precision, device), config.data.sequence_length)
    return [name for name in BACKENDS if not _missing_for(name, *run)]


def _missing_for(
    name: str, shape: ModelConfig, device: torch.device, dtype: torch.dtype, row_length: int | None
) -> str | None:
    """Returns the unmet requirement of a backend, or None; `row_length` is None if rows differ in length."""
    backend = BACKENDS[name]
    if backend.missing is None:
        return None
    if device.type != "cuda":
        return f"a CUDA device, not {device.type}"
    if dtype not in backend.dtypes:
        return f"16-bit activations, not {dtype}; set train.precision = auto"
    if shape.attention_dropout > 0 and not backend.has_dropout:
        return "model.attention_dropout = 0.0"
    if shape.local_attention and not backend.has_windows:
        return "model.local_attention = 0"
    if shape.architecture == "deberta" and not backend.is_disentangled:
        return 'another model.architecture than "deberta"'
    return backend.missing(card_of(device), shape, row_length)
