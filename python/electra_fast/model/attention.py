"""Attention within the segments of a flat buffer: one contract, a readable reference, six backends.

An `AttentionMask` records, once per micro-batch, which tokens attend to each other, in the form that the
chosen backend reads; every layer of both networks then calls `self_attention`. A backend may change speed,
never meaning. Nothing here synchronizes with the device. The backward passes of flash attention
(`varlen`, `xformers`) sum the queries' gradients in no fixed order if a segment spans several blocks of
keys, so they are bitwise reproducible only under `torch.use_deterministic_algorithms(True)`.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, D hidden, N heads, H head dimension, X = 3*N*H,
S segments, K blocks of keys per row.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from electra_fast.card import Card, missing_for_triton
from electra_fast.config.config import ModelConfig
from electra_fast.errors import InputError
from electra_fast.model import flash_attention_4
from electra_fast.ops import cpu_ops, fused
from electra_fast.ops import operations as ops
from electra_fast.ops.cpu_ops import SegmentLayout, masking_bias, segment_layout
from electra_fast.ops.fused import SublayerWeights, kernels
from electra_fast.ops.operations import Dropout, linear, operation, uses_cpu_ops, uses_kernels

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Block size of flex attention's mask along queries and keys, as its kernels expect.
FLEX_BLOCK = 128
# The kernels from which scaled_dot_product_attention may choose on CUDA.
SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
MAX_SHORT_ROW = 512
MAX_SHORT_HEAD = 64
# Architectures for which the kernels of `short` compile without spilling a large part of their tiles.
_WITH_SHORT = ("Ampere", "Ada", "Hopper", "Blackwell", "consumer Blackwell", "gfx942")
# The longest row with which they have run, on Hopper.
MAX_PROVEN_ROW = 128

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionMask:
    """The division of a flat buffer of T = B*L tokens into segments, which attend only to themselves.

    Only the backend's field is set: `dense_B1LL` (bool, True = attend; None: whole rows) for `sdpa`, `cu_seqlens`
    (int32 [S+1]) for `varlen` and `flash4`, `block_mask` for `flex`, `block_diagonal` for `xformers`,
    `segment_ids_BL` for `short`. On a CPU, if the offsets are known, `sdpa` has `cu_seqlens` and `segment_ids_BL`
    instead of `dense_B1LL`. `local` is the mask for layers with local attention, if the model has them; its
    `window` is the number of tokens to each side to which a token attends.
    """

    num_rows: int
    length: int
    backend: str = "sdpa"
    dense_B1LL: Tensor | None = None
    cu_seqlens: Tensor | None = None
    block_mask: BlockMask | None = None
    block_diagonal: Any = None
    segment_ids_BL: Tensor | None = None
    window: int | None = None
    local: AttentionMask | None = None

    @classmethod
    def packed(
        cls, segment_ids_BL: Tensor, cu_seqlens: Tensor | None, backend: str, local_attention: int = 0
    ) -> AttentionMask:
        """Returns the mask of packed rows: equal ids within a row attend to each other, padding (0) to padding.

        `cu_seqlens` (int32 [S+1]) has the offsets of the same segments in the flat buffer, with each row's padding as
        one segment. T may be repeated at its end to keep its shape constant. It may be None for a backend that does
        not read it (`Backend.reads_offsets`). `local_attention` is the model's setting.
        """
        mask = cls._packed(segment_ids_BL, cu_seqlens, backend, None)
        if not local_attention:
            return mask
        return replace(mask, local=cls._packed(segment_ids_BL, cu_seqlens, backend, local_attention // 2))

    @classmethod
    def _packed(
        cls, segment_ids_BL: Tensor, cu_seqlens: Tensor | None, backend: str, window: int | None
    ) -> AttentionMask:
        num_rows, length = segment_ids_BL.shape
        fields = BACKENDS[backend].mask(segment_ids_BL, cu_seqlens, window)
        return cls(num_rows, length, backend, window=window, **fields)

    @classmethod
    def padded(
        cls, num_rows: int, length: int, attention_mask_BL: Tensor | None, local_attention: int = 0
    ) -> AttentionMask:
        """Returns a mask for `sdpa` with one segment per row; no token attends to padding (0), as in `transformers`.

        `local_attention` is the model's setting; if it is not 0, `attention_mask_BL` is required.
        """
        if attention_mask_BL is None:
            assert not local_attention
            return cls(num_rows, length)
        dense_B1LL = attention_mask_BL.bool()[:, None, None, :].expand(-1, 1, length, -1)
        mask = cls(num_rows, length, dense_B1LL=dense_B1LL)
        if not local_attention:
            return mask
        window = local_attention // 2
        device = dense_B1LL.device
        # Padding attends to itself: it may be far from all other tokens, and an empty softmax is NaN.
        local_B1LL = dense_B1LL & _within(window, length, device) | _within(0, length, device)
        return replace(mask, local=replace(mask, dense_B1LL=local_B1LL, window=window))

    def dense(self) -> Tensor | None:
        """Returns `dense_B1LL`, computed at its first use if the mask has offsets instead."""
        ids_BL = self.segment_ids_BL
        return self.dense_B1LL if ids_BL is None else self._cached("_dense", lambda: _dense(ids_BL, self.window))

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """Returns `dense` as a bias of scores in this dtype; computed once for all layers."""
        dense_B1LL = self.dense()
        return None if dense_B1LL is None else self._cached(f"_bias {dtype}", lambda: masking_bias(dense_B1LL, dtype))

    def segments(self, dtype: torch.dtype) -> SegmentLayout:
        """Returns the segments by length; computed once for all layers."""
        ids_BL = self.segment_ids_BL
        cu_seqlens = self.cu_seqlens
        assert ids_BL is not None and cu_seqlens is not None
        return self._cached(f"_segments {dtype}", lambda: segment_layout(ids_BL, cu_seqlens, self.window, dtype))

    @property
    def longest(self) -> int:
        """The length of the longest segment; on a CPU."""
        offsets = self.cu_seqlens
        return self.length if offsets is None else self._cached("_longest", lambda: int(offsets.diff().max()))

    def _cached(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.__dict__:
            self.__dict__[name] = make()
        return cast(T, self.__dict__[name])


def _dense(segment_ids_BL: Tensor, window: int | None) -> Tensor:
    """Returns the tokens of each row that attend to each other; bool [B, 1, L, L]."""
    mask_BLL = segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]
    if window is not None:
        mask_BLL = mask_BLL & _within(window, segment_ids_BL.shape[1], mask_BLL.device)
    return mask_BLL[:, None]


@operation
def attention(
    x_TD: Tensor,
    weights: SublayerWeights,
    eps: float,
    mask: AttentionMask,
    num_heads: int,
    attention_dropout: Dropout,
    dropout: Dropout,
) -> Tensor:
    """norm(x + dropout(self_attention(x) @ out_weight.T + out_bias)); [T, D] → [T, D]."""
    has_kernel = mask.backend == "short" and attention_dropout.has_kernel and dropout.has_kernel
    if has_kernel and uses_kernels(x_TD, "attention"):
        call = (mask.segment_ids_BL, num_heads, mask.window, *attention_dropout.arguments)
        y_TD: Tensor = fused.Attention.apply(x_TD, *weights, *call, eps, *dropout.arguments)
        return y_TD
    mixed_TD = self_attention(x_TD, weights.in_weight, weights.in_bias, mask, num_heads, attention_dropout)
    return ops.residual_norm(mixed_TD, *weights[2:4], x_TD, *weights[4:], eps, dropout)


@operation
def self_attention(
    x_TD: Tensor,
    qkv_weight_XD: Tensor,
    qkv_bias_X: Tensor | None,
    mask: AttentionMask,
    num_heads: int,
    dropout: Dropout,
    rotary: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attend` for the queries, keys and values of x, rotated by `rotary` (from `ops.rotary_angles`) unless None.

    [T, D] → [T, N*H]. `dropout` applies to the attention weights; only `short` uses its key.
    """
    if mask.backend == "short":
        cos_TH, sin_TH = (None, None) if rotary is None else (angle.squeeze(1) for angle in rotary)
        ids_BL = mask.segment_ids_BL
        assert ids_BL is not None
        arguments = (linear(x_TD, qkv_weight_XD), qkv_bias_X, ids_BL, cos_TH, sin_TH, num_heads, mask.window)
        if dropout.has_kernel and uses_kernels(x_TD, "self_attention"):
            return cast(Tensor, kernels().short_attention(*arguments, *dropout.arguments)[0])
        return short_attention_reference(*arguments, dropout)
    is_on_cpu = mask.backend == "sdpa" and uses_cpu_ops(x_TD)
    if is_on_cpu and (dropout.probability > 0 or mask.longest <= cpu_ops.MAX_ROW):
        if rotary is None:
            qkv_TX = linear(x_TD, qkv_weight_XD, qkv_bias_X)
        else:
            qkv_TX = cpu_ops.rotary_qkv(x_TD, qkv_weight_XD, *rotary, num_heads)
        if mask.cu_seqlens is not None and mask.length > cpu_ops.MIN_ROW:
            return cpu_ops.segment_attention(qkv_TX, mask.segments(x_TD.dtype), num_heads, dropout.probability)
        return cpu_ops.self_attention(qkv_TX, mask.bias(x_TD.dtype), mask.num_rows, num_heads, dropout.probability)
    if rotary is None:
        qkv_T3NH = linear(x_TD, qkv_weight_XD, qkv_bias_X).view(x_TD.shape[0], 3, num_heads, -1)
        if mask.backend == "flash4" and not dropout.probability:  # its gradient is one buffer
            return flash_attention_4.attend(*_offsets(mask), qkv_T3NH).flatten(1)
        q, k, v = qkv_T3NH.unbind(1)
    else:
        assert qkv_bias_X is None
        q, k, v = ops.rotary_qkv(x_TD, qkv_weight_XD, *rotary, num_heads)
    return attend(q, k, v, mask, dropout.probability).flatten(1)


def attend(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, mask: AttentionMask, dropout: float = 0.0) -> Tensor:
    """Softmax attention within segments, scale 1/sqrt(H); [T, N, H] each → [T, N, H].

    `dropout` is the dropout probability of attention weights; raises ValueError if the backend has none. For all
    backends except `short`, which reads the qkv product directly.
    """
    backend = BACKENDS[mask.backend]
    if dropout > 0 and not backend.has_dropout:
        raise InputError(
            f'model.attention = "{mask.backend}": has no dropout; set model.attention_dropout = 0.0, or '
            'model.attention = "sdpa"'
        )
    assert backend.run is not None
    return backend.run(q_TNH, k_TNH, v_TNH, mask, dropout)


@dataclass(frozen=True)
class Queries:
    """The only tokens whose hidden states the last layer has to compute.

    `index_n` (int64) has their indices in the flat buffer, `allowed_nT` (bool) the tokens to which each one attends.
    """

    index_n: Tensor
    allowed_nT: Tensor


def query_attention(q_nNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, queries: Queries, dropout: float = 0.0) -> Tensor:
    """`attend` for a few queries, with a softmax in fp32; [n, N, H], [T, N, H] twice → [n, N*H]."""
    scores_NnT = torch.einsum("nah,tah->ant", q_nNH, k_TNH).float() * q_nNH.shape[-1] ** -0.5
    return mixed_values(scores_NnT, v_TNH, queries, dropout)


def mixed_values(scores_NnT: Tensor, v_TNH: Tensor, queries: Queries, dropout: float) -> Tensor:
    """Returns the values of allowed tokens, weighted by a softmax of the scores; → [n, N*H]."""
    weights_NnT = scores_NnT.masked_fill(~queries.allowed_nT, float("-inf")).softmax(-1)
    weights_NnT = ops.dropout_reference(weights_NnT, Dropout(dropout)).to(v_TNH.dtype)
    return torch.einsum("ant,tah->nah", weights_NnT, v_TNH).flatten(1)


def _short_mask(ids_BL: Tensor, cu_seqlens: Tensor | None, window: int | None) -> dict[str, Any]:
    assert ids_BL.shape[1] <= MAX_SHORT_ROW
    return {"segment_ids_BL": ids_BL}


def short_attention_reference(
    qkv_TX: Tensor,
    bias_X: Tensor | None,
    segment_ids_BL: Tensor,
    cos_TH: Tensor | None,
    sin_TH: Tensor | None,
    num_heads: int,
    window: int | None,
    dropout: Dropout,
) -> Tensor:
    """`short` in plain PyTorch, from a qkv product without its bias; → [T, N*H].

    With a key, dropout draws one mask [T, N*L] for the weights: query tokens by heads and keys of their rows.
    """
    num_rows, length = segment_ids_BL.shape
    num_tokens = qkv_TX.shape[0]
    if bias_X is not None:
        qkv_TX = qkv_TX + bias_X.to(qkv_TX.dtype)
    q, k, v = qkv_TX.view(num_tokens, 3, num_heads, -1).unbind(1)
    if cos_TH is not None and sin_TH is not None:
        q, k = (ops.rotate(x, cos_TH[:, None], sin_TH[:, None]) for x in (q, k))
    q, k, v = (x.view(num_rows, length, num_heads, -1).transpose(1, 2) for x in (q, k, v))
    allowed_B1LL = (segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :])[:, None]
    if window is not None:
        allowed_B1LL = allowed_B1LL & _within(window, length, qkv_TX.device)
    precision = torch.promote_types(qkv_TX.dtype, torch.float32)
    scores_BNLL = (q @ k.transpose(2, 3)).to(precision) * q.shape[-1] ** -0.5
    weights_BNLL = scores_BNLL.masked_fill(~allowed_B1LL, float("-inf")).softmax(-1)
    weights_BLNL = weights_BNLL.transpose(1, 2)
    dropped = ops.dropout_reference(weights_BLNL.reshape(num_tokens, -1), dropout).view(weights_BLNL.shape)
    return (dropped.transpose(1, 2).to(v.dtype) @ v).transpose(1, 2).reshape(num_tokens, -1)


def attention_reference(
    q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor, window: int | None = None
) -> Tensor:
    """`attend` for one segment at a time: the specification of every backend.

    With a `window`, token i attends to token j if |i - j| <= window.
    """
    out_TNH = torch.zeros_like(q_TNH)
    scale = q_TNH.shape[-1] ** -0.5
    offsets = cu_seqlens.tolist()
    for start, end in zip(offsets, offsets[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
        scores = q @ k.transpose(1, 2) * scale
        if window is not None:
            scores = scores.masked_fill(~_within(window, end - start, scores.device), -torch.inf)
        out_TNH[start:end] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out_TNH


def _within(window: int, length: int, device: torch.device) -> Tensor:
    """|i - j| <= window; bool [L, L]."""
    position_L = torch.arange(length, device=device)
    return (position_L[:, None] - position_L[None, :]).abs() <= window


def rows_of(x_TNH: Tensor, mask: AttentionMask) -> Tensor:
    """[T, N, H] → [B, N, L, H], a view."""
    return x_TNH.view(mask.num_rows, mask.length, *x_TNH.shape[1:]).transpose(1, 2)


def _sdpa_mask(ids_BL: Tensor, cu_seqlens: Tensor | None, window: int | None) -> dict[str, Any]:
    if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
        return {"cu_seqlens": cu_seqlens, "segment_ids_BL": ids_BL}
    return {"dense_B1LL": _dense(ids_BL, window)}


def sdpa_kernels(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Returns the context for scaled_dot_product_attention on this tensor's device.

    It excludes cuDNN, whose backward pass on Hopper gives NaN for masks of some lengths (PyTorch issue 196678).
    """
    return sdpa_kernel(SDPA_KERNELS) if x.is_cuda else contextlib.nullcontext()


def _sdpa(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    q, k, v = (rows_of(x, mask) for x in (q_TNH, k_TNH, v_TNH))
    with sdpa_kernels(q):
        out_BNLH = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(), dropout_p=dropout)
    return out_BNLH.transpose(1, 2).reshape(q_TNH.shape)


def _varlen_mask(ids_BL: Tensor, cu_seqlens: Tensor | None, window: int | None) -> dict[str, Any]:
    return {"cu_seqlens": cu_seqlens}


def _varlen(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    """Calls flash attention directly: `varlen_attn` prefers cuDNN, which before 9.25 gives NaN for empty segments."""
    # The row length is an upper bound; the length of the longest segment would have to be read from the device.
    offsets = mask.cu_seqlens
    out = torch.ops.aten._flash_attention_forward(
        *(q_TNH, k_TNH, v_TNH, offsets, offsets, mask.length, mask.length, dropout, False, False),
        window_size_left=mask.window,
        window_size_right=mask.window,
    )[0]
    assert isinstance(out, Tensor)
    return out


def _flash4(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    assert not dropout
    return flash_attention_4.attend(*_offsets(mask), q_TNH, k_TNH, v_TNH)


def _offsets(mask: AttentionMask) -> tuple[Tensor, int, int | None]:
    assert mask.cu_seqlens is not None
    return mask.cu_seqlens, mask.length, mask.window


def _flex_mask(ids_BL: Tensor, cu_seqlens: Tensor | None, window: int | None) -> dict[str, Any]:
    return {"block_mask": _block_mask(ids_BL, window)}


def _flex(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    assert mask.block_mask is not None and not dropout
    q, k, v = (rows_of(x, mask) for x in (q_TNH, k_TNH, v_TNH))
    out_BNLH: Tensor = flex_function(q)(q, k, v, block_mask=mask.block_mask)
    return out_BNLH.transpose(1, 2).reshape(q_TNH.shape)


def flex_function(x: Tensor) -> Callable[..., Any]:
    """Returns flex attention, compiled on CUDA. Uncompiled, only for tests, it materializes all scores."""
    from torch.nn.attention.flex_attention import flex_attention  # imported here because it loads the compiler

    compiled = x.is_cuda and not torch.compiler.is_compiling()
    plain: Any = flex_attention
    return _compiled_flex_attention() if compiled else plain


@functools.cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Returns one function for all layers, which is compiled once for each network's shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


def _block_mask(segment_ids_BL: Tensor, window: int | None) -> BlockMask:
    """Returns flex attention's mask of packed rows, from the range of segment ids in each block of tokens.

    Two blocks share no segment if their ranges do not overlap, and are full if they contain the same single id.
    torch's `create_block_mask` gives the same result for the loader's rows, but materializes [B, L, L] first.
    """
    from torch.nn.attention.flex_attention import BlockMask

    num_rows, length = segment_ids_BL.shape
    # Ids ascend along a row except for the padding (0) at its end. Padding therefore gets the highest id, and
    # elements past the row's end the next one, so that a block across the row's end is never full.
    padding = length + 1
    ids_BL = torch.where(segment_ids_BL == 0, padding, segment_ids_BL)
    ids_BL = F.pad(ids_BL, (0, -length % FLEX_BLOCK), value=padding + 1)
    low_BK, high_BK = ids_BL.view(num_rows, -1, FLEX_BLOCK).aminmax(dim=-1)
    overlap_BKK = (low_BK[:, :, None] <= high_BK[:, None, :]) & (low_BK[:, None, :] <= high_BK[:, :, None])
    single_BK = low_BK == high_BK
    full_BKK = overlap_BKK & single_BK[:, :, None] & single_BK[:, None, :]
    if window is not None:
        block_K = torch.arange(low_BK.shape[1], device=low_BK.device)
        distance_KK = (block_K[:, None] - block_K[None, :]).abs() * FLEX_BLOCK
        overlap_BKK = overlap_BKK & (distance_KK - FLEX_BLOCK < window)
        full_BKK = full_BKK & (distance_KK + FLEX_BLOCK - 1 <= window)

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_segment = segment_ids_BL[row, query] == segment_ids_BL[row, key]
        return same_segment if window is None else same_segment & ((query - key).abs() <= window)

    mask: BlockMask = BlockMask.from_kv_blocks(
        *_dense_to_ordered(overlap_BKK & ~full_BKK),
        *_dense_to_ordered(full_BKK),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=attends,
        seq_lengths=(length, length),
    )
    return mask


def _dense_to_ordered(blocks_BKK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of key blocks per query block, and all indices, these first; int32 [B, 1, K], [B, 1, K, K]."""
    blocks_B1KK = blocks_BKK[:, None].int()
    indices = blocks_B1KK.argsort(dim=-1, descending=True, stable=True)
    return blocks_B1KK.sum(dim=-1, dtype=torch.int32), indices.int()


def _xformers_mask(ids_BL: Tensor, cu_seqlens: Tensor | None, window: int | None) -> dict[str, Any]:
    assert cu_seqlens is not None and window is None
    return {"block_diagonal": _block_diagonal(cu_seqlens, *ids_BL.shape)}


def _xformers(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, mask: AttentionMask, dropout: float) -> Tensor:
    from xformers.ops.fmha import memory_efficient_attention  # imported here because it is optional

    q, k, v = (x[None] for x in (q_TNH, k_TNH, v_TNH))  # one "batch" of T tokens, [1, T, N, H]
    out: Tensor = memory_efficient_attention(q, k, v, attn_bias=mask.block_diagonal, p=dropout)
    return out[0]


def _block_diagonal(cu_seqlens: Tensor, num_rows: int, length: int) -> Any:
    """Returns xformers' BlockDiagonalMask from offsets on the device.

    Its constructor `from_seqlens` takes the lengths as Python integers, which would synchronize with the
    device at every batch. The kernels read only `seqstart` and `max_seqlen` (0.0.35: fmha/flash.py,
    flash3.py, cutlass.py); only `materialize` and `split` read `seqstart_py`, so its two ends suffice.
    """
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask, _SeqLenInfo

    # The row length is an upper bound; a repeated T at the end of cu_seqlens is a segment of length 0.
    seqlens = _SeqLenInfo(seqstart=cu_seqlens, max_seqlen=length, min_seqlen=0, seqstart_py=[0, num_rows * length])
    return BlockDiagonalMask(q_seqinfo=seqlens, k_seqinfo=seqlens)


def _missing_for_short(card: Card, shape: ModelConfig, row_length: int | None) -> str | None:
    if card.architecture not in _WITH_SHORT:
        return f"a GPU large enough for its kernels ({', '.join(_WITH_SHORT)}), not {card.name}"
    if row_length is None or row_length > MAX_SHORT_ROW:
        lengths = "different lengths" if row_length is None else f"{row_length}"
        return f"rows of one length up to {MAX_SHORT_ROW} tokens, not {lengths}"
    if (head_dim := _head_dim(shape)) > MAX_SHORT_HEAD:
        return f"a head dimension of at most {MAX_SHORT_HEAD}, not {head_dim}"
    return _missing_for_flex(card)


def _missing_for_flex(card: Card, *_: object) -> str | None:
    without_triton = missing_for_triton(card)
    return without_triton and f"a working Triton ({without_triton})"


def _head_dim(shape: ModelConfig) -> int:
    return shape.hidden_size // shape.num_heads


def _missing_for_flash(card: Card, shape: ModelConfig, row_length: int | None) -> str | None:
    if not card.has_flash_attention:
        return f"a GPU that runs torch's flash attention (NVIDIA's Ampere or later), not {card.name}"
    if not torch.backends.cuda.is_flash_attention_available():
        return f"a torch built with flash attention, not {torch.__version__}"
    if (head_dim := _head_dim(shape)) % 8:
        return f"a head dimension that is a multiple of 8, not {head_dim}"
    return None


def _missing_for_flash4(card: Card, shape: ModelConfig, row_length: int | None) -> str | None:
    return flash_attention_4.missing(card, _head_dim(shape))


def _missing_for_xformers(*_: object) -> str | None:
    if importlib.util.find_spec("xformers") is None:
        return "the package xformers (pip install xformers)"
    failure = failure_of_xformers()
    return failure and f"an xformers that works with torch {torch.__version__}; the installed one fails: {failure}"


def failure_of_xformers() -> str | None:
    """Returns the reason why the installed xformers cannot compute attention, or None.

    It uses torch's attention, or FlashAttention 3 if installed, but refuses CUDA tensors unless its extension loads,
    and wheels link the extension to the CUDA version of their build (0.0.35: CUDA 12).
    """
    logger = logging.getLogger("xformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it repeats this reason in several lines at every import
    try:
        import xformers.ops.fmha  # noqa: F401  # the import checks torch's version
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
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).split("\n")[0]


@dataclass(frozen=True)
class Backend:
    """An attention backend and its properties.

    Args:
        mask: Makes the fields of an `AttentionMask` from the segments' ids [B, L], their offsets and the window.
        run: Computes `attend`; None for the backend that reads the qkv product directly.
        missing: Returns an unmet requirement for a card, model and row length; None if it runs on any device.
        dtypes: The supported dtypes of activations.
        has_dropout: It supports dropout of attention weights.
        has_windows: It supports local attention.
        is_disentangled: It supports the relative positions of `disentangled`.
        reads_offsets: It reads the segments' offsets, not their ids.
        is_deterministic: Two runs with the same seed have bitwise equal gradients.
        is_ours: Our kernels compute it.
        max_proven_row: `auto` chooses it without a check only on Hopper, for rows of at most this many tokens; None if
            it is proven for other cards and rows too.
        alike: A backend that saves the same tensors, if it runs on fake tensors only after compilation, or not at all.
    """

    mask: Callable[[Tensor, Tensor | None, int | None], dict[str, Any]]
    run: Callable[[Tensor, Tensor, Tensor, AttentionMask, float], Tensor] | None
    missing: Callable[[Card, ModelConfig, int | None], str | None] | None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    has_dropout: bool = True
    has_windows: bool = True
    is_disentangled: bool = False
    reads_offsets: bool = False
    is_deterministic: bool = True
    is_ours: bool = False
    max_proven_row: int | None = None
    alike: str = ""


_FLASH: dict[str, Any] = {"reads_offsets": True, "is_deterministic": False}
_ALL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BACKENDS = {
    # Our kernels for rows of up to 512 tokens.
    "short": Backend(_short_mask, None, _missing_for_short, is_ours=True, max_proven_row=MAX_PROVEN_ROW),
    # torch's flash attention over segments of different lengths.
    "varlen": Backend(_varlen_mask, _varlen, _missing_for_flash, **_FLASH),
    # scaled_dot_product_attention with a dense mask.
    "sdpa": Backend(_sdpa_mask, _sdpa, None, _ALL_DTYPES, is_disentangled=True),
    # Compiled flex attention.
    "flex": Backend(
        _flex_mask, _flex, _missing_for_flex, _ALL_DTYPES, has_dropout=False, is_disentangled=True, alike="varlen"
    ),
    # Flash attention from other packages.
    "flash4": Backend(
        _varlen_mask, _flash4, _missing_for_flash4, has_dropout=False, reads_offsets=True, alike="varlen"
    ),
    "xformers": Backend(_xformers_mask, _xformers, _missing_for_xformers, has_windows=False, alike="varlen", **_FLASH),
}
"""The backends by name, the preferred one first."""
