"""Chooses how a model computes: device, activation dtype, attention backend, library of fp32 products."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from electra_fast.card import card_of
from electra_fast.config.config import AUTO, Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.model.attention import FLASH, MAX_SHORT_HEAD, MAX_SHORT_ROW, WITH_DROPOUT
from electra_fast.model.matmul import DEFAULT, choose_matmul, use_matmul
from electra_fast.ops.choice import use_choices

Precision = Literal["auto", "fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Those of which a measurement finds the faster one on a CPU.
CPU_PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class ComputeConfig:
    """How a model computes.

    Args:
        attention: Attention backend.
        dtype: Dtype of activations.
        matmul: Library of fp32 products on a CPU (`matmul.use_matmul`).
        kernels: Chosen implementations of operations (`ops.use_choices`), as pairs; none by default.
    """

    attention: str
    dtype: torch.dtype
    matmul: str = DEFAULT
    kernels: tuple[tuple[str, str], ...] = ()


@contextmanager
def use_compute(compute: ComputeConfig) -> Iterator[None]:
    """Computes fp32 products on a CPU, and operations, as a configuration says within the context."""
    with use_matmul(compute.matmul), use_choices(dict(compute.kernels)):
        yield


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
    """Resolves `auto`: on a GPU to bf16 if the hardware multiplies it, else to fp16 if that is faster than fp32.

    Otherwise to fp32, but for a CPU with bf16 instructions, which on some are faster than fp32, on others slower: for
    those, returns `auto`.
    """
    if requested != AUTO:
        return requested
    if device.type == "cuda":
        card = card_of(device)
        return "bf16" if card.has_bf16 else "fp16" if card.has_fp16_tensor_cores else "fp32"
    capabilities = torch.cpu.get_capabilities()
    return AUTO if capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") else "fp32"


def choose_attention(
    requested: str,
    device: torch.device,
    dtype: torch.dtype,
    dropout: float,
    local_attention: int = 0,
    row_length: int | None = None,
    head_dim: int = 64,
) -> str:
    """Resolves `auto` to a backend's name; raises ValueError if the requested backend cannot run.

    `sdpa` (scaled_dot_product_attention with a dense mask) runs everywhere, the others on CUDA. `short` (our
    kernel for rows of up to 128 tokens on Hopper), `varlen` (torch.nn.attention.varlen, flash attention over
    variable-length segments) and `xformers` (the same from another package) need 16-bit activations, `xformers` also a
    model without local attention; `flex` (compiled flex attention) has no dropout. `auto` is the first of `short`,
    `varlen` and `sdpa` that can run; never an optional package, so that a run does not depend on what happens to be
    installed.

    Args:
        requested: `auto` or a backend.
        device: The model's device.
        dtype: The dtype of the activations.
        dropout: The dropout probability of attention weights.
        local_attention: The model's `local_attention`, 0 if none.
        row_length: Tokens per row, None where rows differ.
        head_dim: Dimensions of a head.
    """

    def missing(backend: str) -> str | None:
        if backend == "short":
            return _missing_for_short(device, dtype, row_length, head_dim)
        return _missing_requirement(backend, device, dtype, dropout, local_attention)

    if requested == "auto":
        return next(name for name in ("short", "varlen", "sdpa") if not missing(name))
    if what := missing(requested):
        raise InputError(f'model.attention = "{requested}" needs {what}; or set model.attention = "sdpa"')
    return requested


def available_attention(config: Config, device: torch.device) -> list[str]:
    """Temporary."""
    return ["short", "varlen", "sdpa"]


def _missing_for_short(device: torch.device, dtype: torch.dtype, row_length: int | None, head_dim: int) -> str | None:
    if general := _missing_requirement("short", device, dtype, 0.0, 0):
        return general
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"a GPU of compute capability 9, for which alone its kernels were made, and this has {major}.{minor}"
    if row_length is None or row_length > MAX_SHORT_ROW:
        found = "differ in length" if row_length is None else f"have {row_length}"
        return f"rows of at most {MAX_SHORT_ROW} tokens, and these {found}"
    if head_dim > MAX_SHORT_HEAD:
        return f"heads of at most {MAX_SHORT_HEAD} dimensions, and these have {head_dim}"
    return None


def _missing_requirement(
    backend: str, device: torch.device, dtype: torch.dtype, dropout: float, local_attention: int
) -> str | None:
    """The requirement that a backend lacks here; None if it can run."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        return f"a CUDA device, and this is {device.type}"
    if backend in {*FLASH, "short"} and dtype not in (torch.bfloat16, torch.float16):
        return f"16-bit activations, and these are {dtype}; set train.precision = bf16"
    if dropout > 0 and backend not in WITH_DROPOUT:
        return "model.attention_dropout = 0.0"
    if local_attention and backend == "xformers":
        return "model.local_attention = 0"
    return _missing_package(backend)


def _missing_package(backend: str) -> str | None:
    if backend == "short":
        return None
    if backend == "xformers":
        if importlib.util.find_spec("xformers") is None:
            return "the package xformers (pip install xformers)"
        try:
            import xformers.ops.fmha  # noqa: F401  # importing it checks torch's version
        except (ImportError, OSError, AttributeError) as error:
            return f"an xformers that works with torch {torch.__version__}; importing this one fails: {error}"
        return None
    module = {"varlen": "torch.nn.attention.varlen", "flex": "torch.nn.attention.flex_attention"}[backend]
    if importlib.util.find_spec(module) is None:
        return f"a torch that has {module}, and this is {torch.__version__}"
    return None
