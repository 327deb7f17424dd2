"""FlashAttention 4, from the package flash-attn-4, as an attention backend; not tested on a GPU.

The functions below the package's autograd function are called directly, so that its kernels write the gradients of
queries, keys and values into one buffer, in a fixed order. They are not a public interface, so a release whose
functions take other arguments counts as missing.

Shapes: T tokens, N heads, H head dimension, S segments.
"""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from electra_fast.card import Card

# The code below follows this release: all strides but the last may be any multiple of 16 bytes; it returns out,
# logsumexp and more; it has no dropout; sums have a fixed order on these architectures, up to this head dimension.
RELEASE = "4.0.0b36"
ARCHITECTURES = ("Hopper", "Blackwell")
MAX_HEAD_DIM = 128


def missing(card: Card, head_dim: int) -> str | None:
    """Returns the unmet requirement for a card and a head dimension, or None if FlashAttention 4 can run."""
    if card.architecture not in ARCHITECTURES:
        return f"a {' or '.join(ARCHITECTURES)} GPU, which sums gradients in a fixed order, not {card.name}"
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        return f"a head dimension that is a multiple of 8 and at most {MAX_HEAD_DIM}, not {head_dim}"
    try:
        metadata.version("flash-attn-4")  # FlashAttention 2 has a module of the same name
    except metadata.PackageNotFoundError:
        return f"the package flash-attn-4 (pip install 'flash-attn-4>={RELEASE}')"
    reason = failure()
    return reason and f"a flash-attn-4 with the interface of {RELEASE}; the installed one fails: {reason}"


def failure() -> str | None:
    """Returns the reason why the installed flash-attn-4 cannot be called, or None."""
    try:
        from flash_attn.cute import interface

        segments = _segments(None, 0, None)
        gradients = dict.fromkeys(("dq", "dk", "dv"))
        inspect.signature(interface._flash_attn_fwd).bind(*"qkv", **segments, return_lse=True)
        arguments = (*"qkv", "out", "dout", "lse")
        inspect.signature(interface._flash_attn_bwd).bind(*arguments, **segments, deterministic=True, **gradients)
    except Exception as error:  # the import compiles code with packages that raise various exceptions
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def attend(cu_seqlens: Tensor, length: int, window: int | None, *qkv: Tensor) -> Tensor:
    """Softmax attention within segments, scale 1/sqrt(H); → [T, N, H].

    Args:
        cu_seqlens: The segments' offsets, int32 [S+1].
        length: An upper bound of the segments' lengths.
        window: The number of tokens to each side to which a token attends; None for no limit.
        qkv: Queries, keys and values, [T, N, H] each or one [T, 3, N, H]; 16 bits.
    """
    out_TNH: Tensor = _FlashAttention4.apply(cu_seqlens, length, window, *qkv)
    return out_TNH


def _segments(cu_seqlens: Tensor | None, length: int, window: int | None) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": length,
        "max_seqlen_k": length,
        "window_size_left": window,
        "window_size_right": window,
    }


def _separate(qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return qkv[0].unbind(1) if len(qkv) == 1 else qkv


class _FlashAttention4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cu_seqlens: Tensor, length: int, window: int | None, *qkv: Tensor) -> Tensor:
        from flash_attn.cute.interface import _flash_attn_fwd  # imported here: an optional extra

        ctx.length = length
        ctx.window = window
        segments = _segments(cu_seqlens, length, window)
        out_TNH, lse_NT = _flash_attn_fwd(*_separate(qkv), **segments, return_lse=True)[:2]
        ctx.save_for_backward(cu_seqlens, out_TNH, lse_NT, *qkv)
        assert isinstance(out_TNH, Tensor)
        return out_TNH

    @staticmethod
    def backward(ctx: Any, dout_TNH: Tensor) -> tuple[Tensor | None, ...]:
        from flash_attn.cute.interface import _flash_attn_bwd

        cu_seqlens, out_TNH, lse_NT, *qkv = ctx.saved_tensors
        num_tokens, *heads = out_TNH.shape
        dqkv_T3NH = out_TNH.new_empty((num_tokens, 3, *heads))
        gradients = dqkv_T3NH.unbind(1)
        _flash_attn_bwd(
            *(*_separate(tuple(qkv)), out_TNH, dout_TNH, lse_NT),
            **_segments(cu_seqlens, ctx.length, ctx.window),
            deterministic=True,
            **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        )
        return None, None, None, *((dqkv_T3NH,) if len(qkv) == 1 else gradients)
