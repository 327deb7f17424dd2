"""Choice of a run's attention backend: the requested one, or the fastest that can run."""

from __future__ import annotations

import importlib.util

import torch

from electra_fast.errors import InputError
from electra_fast.model.attention import FLASH, MAX_SHORT_HEAD, MAX_SHORT_ROW, WITH_DROPOUT


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
