"""Attention within segments of a flat buffer: one contract, a readable reference, four backends.

`Segments` says once per micro-batch which tokens see each other, in the form that the chosen backend
reads; every layer of both networks then calls `attention`. A backend may change speed, never meaning.
Nothing here waits for the device. Backward passes of flash attention (`varlen`, `xformers`) add the
queries' gradients in any order where a segment spans several blocks of keys, so two runs give the
same bits only under `torch.use_deterministic_algorithms(True)`.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, N heads, H head width, S segments,
K blocks of keys a row.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Tokens a block of flex attention's mask, along queries and keys: what its kernels expect.
FLEX_BLOCK = 128
_WITH_DROPOUT = {"sdpa", "varlen", "xformers"}
_FLASH = {"varlen", "xformers"}


@dataclass(frozen=True)
class Segments:
    """How a flat buffer of T = B*L tokens divides into attention segments.

    A token attends to the tokens of its own segment only. Of the four forms the backend's own is
    there: `mask_B1LL` (bool, True = attend; None: whole rows) for `sdpa`, `cu_seqlens` (int32,
    [S+1]) for `varlen`, `block_mask` for `flex`, `block_diagonal` for `xformers`.
    """

    num_rows: int
    length: int
    backend: str = "sdpa"
    mask_B1LL: Tensor | None = None
    cu_seqlens: Tensor | None = None
    block_mask: BlockMask | None = None
    block_diagonal: Any = None

    @classmethod
    def packed(cls, segment_ids_BL: Tensor, cu_seqlens: Tensor, backend: str) -> Segments:
        """Segments of packed rows: equal ids within a row attend to each other (0 = padding, likewise).

        `cu_seqlens` (int32, [S+1]) are the same segments' borders in the flat buffer, padding tails
        being segments of their own; T may be repeated at its end, for a shape that never changes.
        """
        num_rows, length = segment_ids_BL.shape
        if backend == "varlen":
            return cls(num_rows, length, backend, cu_seqlens=cu_seqlens)
        if backend == "xformers":
            return cls(num_rows, length, backend, block_diagonal=_block_diagonal(cu_seqlens, num_rows, length))
        if backend == "flex":
            return cls(num_rows, length, backend, block_mask=_block_mask(segment_ids_BL))
        mask_BLL = segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]
        return cls(num_rows, length, mask_B1LL=mask_BLL[:, None])

    @classmethod
    def padded(cls, num_rows: int, length: int, attention_mask_BL: Tensor | None) -> Segments:
        """One segment a row whose padding (0 in the mask) nobody attends to, as in `transformers`."""
        if attention_mask_BL is None:
            return cls(num_rows, length)
        return cls(num_rows, length, mask_B1LL=attention_mask_BL.bool()[:, None, None, :].expand(-1, 1, length, -1))


def attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float = 0.0) -> Tensor:
    """Softmax attention within segments, scale 1/sqrt(H); [T, N, H] each → [T, N, H].

    `dropout` drops attention probabilities; ValueError where the backend can't.
    """
    if dropout > 0 and segments.backend not in _WITH_DROPOUT:
        raise ValueError(
            f'attention backend "{segments.backend}" has no dropout; set model.attention_dropout = 0.0, '
            'or model.attention = "sdpa"'
        )
    return _BACKENDS[segments.backend](q_TNH, k_TNH, v_TNH, segments, dropout)


def attention_reference(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`attention` written out, one segment after the other: what every backend must equal."""
    out_TNH = torch.zeros_like(q_TNH)
    scale = q_TNH.shape[-1] ** -0.5
    borders = cu_seqlens.tolist()
    for start, end in zip(borders, borders[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
        out_TNH[start:end] = ((q @ k.transpose(1, 2) * scale).softmax(-1) @ v).transpose(0, 1)
    return out_TNH


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype, dropout: float) -> str:
    """Resolves `auto` to a backend's name; raises ValueError where the requested one can't serve.

    `sdpa` (scaled_dot_product_attention with a dense mask) runs everywhere. `varlen`
    (torch.nn.attention.varlen, flash attention over ragged segments) and `xformers` (the same by
    another package) want CUDA and 16-bit activations, `flex` (compiled flex attention) CUDA and no
    dropout. `auto` is `varlen` where it can serve, else `sdpa`: never an extra, so that a run does not
    change with what happens to be installed.
    """
    if requested == "auto":
        return "sdpa" if _lacks("varlen", device, dtype, dropout) else "varlen"
    lacks = _lacks(requested, device, dtype, dropout)
    if lacks:
        raise ValueError(f'model.attention = "{requested}" needs {lacks}; or set model.attention = "sdpa"')
    return requested


def adds_in_any_order(backend: str) -> bool:
    """Whether a backend's gradient may differ in its last bits between two runs of the same seed."""
    return backend in _FLASH


def _lacks(backend: str, device: torch.device, dtype: torch.dtype, dropout: float) -> str | None:
    """What a backend needs and does not have here; None where it can serve."""
    if backend == "sdpa":
        return None
    if device.type != "cuda":
        return f"a CUDA device, and this is {device.type}"
    if backend in _FLASH and dtype not in (torch.bfloat16, torch.float16):
        return f"16-bit activations, and these are {dtype}; set train.precision = bf16"
    if dropout > 0 and backend not in _WITH_DROPOUT:
        return "model.attention_dropout = 0.0"
    return _missing_package(backend)


def _missing_package(backend: str) -> str | None:
    if backend == "xformers":
        if importlib.util.find_spec("xformers") is None:
            return 'the package xformers (pip install "electra-fast[xformers]")'
        try:
            import xformers.ops.fmha  # noqa: F401  # it checks torch's version as it loads
        except (ImportError, OSError, AttributeError) as error:
            return f"an xformers that loads beside torch {torch.__version__}, and this one says: {error}"
        return None
    module = {"varlen": "torch.nn.attention.varlen", "flex": "torch.nn.attention.flex_attention"}[backend]
    if importlib.util.find_spec(module) is None:
        return f"a torch that has {module}, and this is {torch.__version__}"
    return None


def _rows(x_TNH: Tensor, segments: Segments) -> Tensor:
    """[T, N, H] → [B, N, L, H], a view."""
    return x_TNH.view(segments.num_rows, segments.length, *x_TNH.shape[1:]).transpose(1, 2)


def _sdpa(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float) -> Tensor:
    q, k, v = (_rows(x, segments) for x in (q_TNH, k_TNH, v_TNH))
    out_BNLH = F.scaled_dot_product_attention(q, k, v, attn_mask=segments.mask_B1LL, dropout_p=dropout)
    return out_BNLH.transpose(1, 2).reshape(q_TNH.shape)


def _varlen(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imported here: it loads flash attention

    # A constant bound instead of the batch's longest segment: no sync with the device.
    borders, bound = segments.cu_seqlens, segments.length
    assert borders is not None
    if dropout:
        # `varlen_attn` always passes 0 for it; the operator below it, which has a gradient of its own, is the same.
        flash = torch.ops.aten._flash_attention_forward
        out = flash(q_TNH, k_TNH, v_TNH, borders, borders, bound, bound, dropout, False, False)[0]
    else:
        out = varlen_attn(q_TNH, k_TNH, v_TNH, borders, borders, bound, bound)
    assert isinstance(out, Tensor)
    return out


def _flex(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # imported here: it loads the compiler

    assert segments.block_mask is not None and not dropout
    # Uncompiled it writes out all scores. The CPU has no backward of it; there it serves the tests.
    compiled = q_TNH.is_cuda and not torch.compiler.is_compiling()
    attend: Any = _compiled_flex_attention() if compiled else flex_attention
    q, k, v = (_rows(x, segments) for x in (q_TNH, k_TNH, v_TNH))
    out_BNLH = attend(q, k, v, block_mask=segments.block_mask)
    assert isinstance(out_BNLH, Tensor)
    return out_BNLH.transpose(1, 2).reshape(q_TNH.shape)


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """One compiled function for all layers; it compiles anew for each of the two networks' shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def _block_mask(segment_ids_BL: Tensor) -> BlockMask:
    """Flex attention's mask of packed rows, from the range of ids in each block of tokens.

    Two blocks whose ranges do not meet share no segment; two that hold one and the same id are
    full. Torch's `create_block_mask` says the same of loader rows, but writes out [B, L, L] first.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_rows, length = segment_ids_BL.shape
    # Ids rise along a row, but padding is 0 at its end: give it the highest, and what lies behind the
    # row one more, so that a block across the row's end is never taken for full.
    padding = length + 1
    ids_BL = torch.where(segment_ids_BL == 0, padding, segment_ids_BL)
    ids_BL = F.pad(ids_BL, (0, -length % FLEX_BLOCK), value=padding + 1)
    low_BK, high_BK = ids_BL.view(num_rows, -1, FLEX_BLOCK).aminmax(dim=-1)
    meet_BKK = (low_BK[:, :, None] <= high_BK[:, None, :]) & (low_BK[:, None, :] <= high_BK[:, :, None])
    single_BK = low_BK == high_BK
    full_BKK = meet_BKK & single_BK[:, :, None] & single_BK[:, None, :]

    def same_segment(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return segment_ids_BL[row, query] == segment_ids_BL[row, key]

    return BlockMask.from_kv_blocks(
        *_listed(meet_BKK & ~full_BKK),
        *_listed(full_BKK),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=same_segment,
        seq_lengths=(length, length),
    )


def _listed(blocks_BKK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and their numbers first in a row; int32 [B, 1, K], [B, 1, K, K]."""
    blocks_B1KK = blocks_BKK[:, None].int()
    numbers = blocks_B1KK.argsort(dim=-1, descending=True, stable=True)
    return blocks_B1KK.sum(dim=-1, dtype=torch.int32), numbers.int()


def _xformers(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float) -> Tensor:
    from xformers.ops.fmha import memory_efficient_attention  # imported here: an optional extra

    q, k, v = (x[None] for x in (q_TNH, k_TNH, v_TNH))  # one "batch" of T tokens, [1, T, N, H]
    out: Tensor = memory_efficient_attention(q, k, v, attn_bias=segments.block_diagonal, p=dropout)
    return out[0]


def _block_diagonal(cu_seqlens: Tensor, num_rows: int, length: int) -> Any:
    """xformers' BlockDiagonalMask straight from borders on the device.

    Its constructor `from_seqlens` takes the lengths as Python integers, which would wait for the
    device at every batch. The kernels read `seqstart` and `max_seqlen` alone (0.0.35: fmha/flash.py,
    flash3.py, cutlass.py); `seqstart_py` serves `materialize` and `split`, and only its ends are known.
    """
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask, _SeqLenInfo

    # The row length bounds every segment, as a constant; 0 is a padded list's empty segment.
    borders = _SeqLenInfo(seqstart=cu_seqlens, max_seqlen=length, min_seqlen=0, seqstart_py=[0, num_rows * length])
    return BlockDiagonalMask(q_seqinfo=borders, k_seqinfo=borders)


_BACKENDS: dict[str, Callable[[Tensor, Tensor, Tensor, Segments, float], Tensor]] = {
    "sdpa": _sdpa,
    "varlen": _varlen,
    "flex": _flex,
    "xformers": _xformers,
}
ATTENTION_BACKENDS = tuple(_BACKENDS)
