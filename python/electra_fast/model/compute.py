"""Chooses how a model computes: device, activation dtype, attention backend, library of fp32 products."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from electra_fast.card import Card, card_of, missing_for_triton
from electra_fast.config.config import AUTO, Config, ModelConfig
from electra_fast.errors import InputError
from electra_fast.model.attention import MAX_SHORT_HEAD, MAX_SHORT_ROW, WITH_DROPOUT
from electra_fast.model.matmul import DEFAULT, choose_matmul, use_matmul
from electra_fast.ops.operations import use_choices

Precision = Literal["auto", "fp32", "fp16", "bf16"]
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Those of which a measurement finds the faster one on a CPU.
CPU_PRECISIONS = ("fp32", "bf16")
# Architectures on which the kernels of `short` compile without spilling a large part of their tiles.
_WITH_SHORT = ("Hopper", "Blackwell", "gfx942")
# Attention backends: `auto` is the first that can run.
_BY_PREFERENCE = ("short", "varlen", "sdpa", "flex", "xformers")


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

    def computes_segments(self, device: torch.device) -> bool:
        """Returns True if attention computes scores within the segments of a packed row only."""
        return self.attention == "sdpa" and device.type == "cpu"


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
    fp32 and the library the default. A run has both resolved before (`hardware.settings`). Raises ValueError if the
    attention backend or the library cannot run.
    """
    train, row_length = config.train, config.data.sequence_length
    return resolve_compute(config.model, device, train.precision, train.matmul, config.model.attention, row_length)


def resolve_compute(
    shape: ModelConfig,
    device: torch.device,
    precision: str,
    matmul: str,
    attention: str,
    row_length: int | None = None,
) -> ComputeConfig:
    """Resolves `auto` without measuring, as `choose_compute`; `row_length` is None where rows differ."""
    dtype = _dtype(precision, device)
    attention = choose_attention(attention, shape, device, dtype, row_length)
    matmul = choose_matmul(matmul, device)
    return ComputeConfig(attention, dtype, DEFAULT if matmul == AUTO else matmul)


def _dtype(precision: str, device: torch.device) -> torch.dtype:
    """Returns the dtype of a precision, fp32 if only a measurement can tell."""
    return DTYPES.get(choose_precision(precision, device), torch.float32)


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
    requested: str, shape: ModelConfig, device: torch.device, dtype: torch.dtype, row_length: int | None = None
) -> str:
    """Resolves `auto` to a backend's name; raises ValueError if the requested backend cannot run.

    `sdpa` (scaled_dot_product_attention with a dense mask) runs everywhere, the others on CUDA. `short` (our kernel for
    rows of up to 128 tokens, on cards into which it fits), `varlen` (torch's flash attention over variable-length
    segments) and `xformers` (the same from another package) need 16-bit activations, `xformers` also a model without
    local attention; `flex` (compiled flex attention) has no dropout. `auto` is the first of `short` (on Hopper, the
    only cards that have run it), `varlen` and `sdpa` that can run; never an optional package, so that a run does not
    depend on what happens to be installed.

    Args:
        requested: `auto` or a backend.
        shape: The model, with its dropout of attention weights.
        device: The model's device.
        dtype: The dtype of the activations.
        row_length: Tokens per row, None where rows differ.
    """
    if requested == AUTO:
        is_proven = device.type == "cuda" and card_of(device).is_hopper
        names = [name for name in _BY_PREFERENCE if name != "short" or is_proven]
        return next(name for name in names if not _missing_for(name, shape, device, dtype, row_length))
    if what := _missing_for(requested, shape, device, dtype, row_length):
        raise InputError(f'model.attention = "{requested}" needs {what}; or set model.attention = "sdpa"')
    return requested


def available_attention(config: Config, device: torch.device) -> list[str]:
    """Returns the attention backends that can run a configuration."""
    run = (config.model, device, _dtype(config.train.precision, device), config.data.sequence_length)
    return [name for name in _BY_PREFERENCE if not _missing_for(name, *run)]


def _missing_for(
    backend: str, shape: ModelConfig, device: torch.device, dtype: torch.dtype, row_length: int | None
) -> str | None:
    """The requirement that a backend lacks here; None if it can run."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        return f"a CUDA device, and this is {device.type}"
    if backend != "flex" and dtype not in (torch.bfloat16, torch.float16):
        return f"16-bit activations, and these are {dtype}; set train.precision = auto"
    if shape.attention_dropout > 0 and backend not in WITH_DROPOUT:
        return "model.attention_dropout = 0.0"
    if shape.local_attention and backend == "xformers":
        return "model.local_attention = 0"
    card, head_dim = card_of(device), shape.hidden_size // shape.num_heads
    if backend == "varlen":
        return _missing_for_flash(card, head_dim)
    if backend == "xformers":
        return _missing_for_xformers()
    if backend == "short" and (what := _missing_for_short(card, row_length, head_dim)):
        return what
    without_triton = missing_for_triton(card)
    return without_triton and f"a working Triton ({without_triton})"


def _missing_for_short(card: Card, row_length: int | None, head_dim: int) -> str | None:
    if card.architecture not in _WITH_SHORT:
        return f"a GPU into which its kernels fit ({', '.join(_WITH_SHORT)}), and this is {card.name}"
    if row_length is None or row_length > MAX_SHORT_ROW:
        found = "differ in length" if row_length is None else f"have {row_length}"
        return f"rows of at most {MAX_SHORT_ROW} tokens, and these {found}"
    if head_dim > MAX_SHORT_HEAD:
        return f"heads of at most {MAX_SHORT_HEAD} dimensions, and these have {head_dim}"
    return None


def _missing_for_flash(card: Card, head_dim: int) -> str | None:
    if not card.has_flash_attention:
        return f"a GPU that runs torch's flash attention (NVIDIA's Ampere or later), and this is {card.name}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"a torch built with flash attention, and {torch.__version__} is not"
    if head_dim % 8:
        return f"heads of a multiple of 8 dimensions, and these have {head_dim}"
    return None


def _missing_for_xformers() -> str | None:
    if importlib.util.find_spec("xformers") is None:
        return "the package xformers (pip install xformers)"
    failure = failure_of_xformers()
    return failure and f"an xformers that works with torch {torch.__version__}; this one does not load: {failure}"


def failure_of_xformers() -> str | None:
    """Returns why the installed xformers cannot compute attention; None if it can.

    Its attention is that of torch, or FlashAttention 3 where that is installed. But it refuses CUDA tensors unless its
    own extension loads, which wheels link to the CUDA that they were built with (0.0.35: CUDA 12).
    """
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns in several lines, on every import, of what this returns in one
    try:
        import xformers.ops.fmha  # noqa: F401  # importing it checks torch's version
        from xformers import _cpp_lib
    except (ImportError, OSError, AttributeError) as error:
        return _first_line(error)
    finally:
        logger.setLevel(level)
    if (failure := getattr(_cpp_lib, "_cpp_library_load_exception", None)) is None:
        return None
    build = getattr(failure, "build_info", None)
    return _first_line(failure) + (f" (it was built with torch {build.torch_version})" if build else "")


def _first_line(error: BaseException) -> str:
    """Returns the first line of the message of an error's first cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).split("\n")[0]
