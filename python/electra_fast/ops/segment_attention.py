"""Attention within segments of different lengths on a CPU.

A packed row of several segments has a score for each pair of its tokens, most of which a mask then removes. Here
segments of similar lengths are padded to one length and computed together, as rows of their own: half the scores or
fewer, with as many dropout masks (bench/LOG.md).

Shapes: T tokens of the flat buffer, S segments, K slots of the padded segments, c segments of a group, P their padded
length, N heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from electra_fast.ops import cpu_ops

# Segments are padded to multiples of this length.
MULTIPLE = 16
# Shorter rows have so few scores that more operations cost more.
MIN_ROW = 128


def masking_bias(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a summand of scores; finite, since a row of scores that are all -inf would become NaN."""
    return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(~attends, torch.finfo(dtype).min)


class SegmentGroup(NamedTuple):
    """Segments that are padded to one length: their number, slots (c * P), and bias ([c, 1, 1 or P, P]; None: 0)."""

    num_segments: int
    num_slots: int
    bias: Tensor | None


@dataclass(frozen=True)
class SegmentLayout:
    """Where the tokens of a flat buffer are once their segments are padded.

    Args:
        groups: The groups, in the order of their slots.
        token_K: The token in each slot; in padding, the last one of its segment.
        slot_T: The slot of each token; 0 for tokens outside of segments.
        padding: The slots of padding.
        outside: The tokens outside of segments.
    """

    groups: tuple[SegmentGroup, ...]
    token_K: Tensor
    slot_T: Tensor
    padding: Tensor
    outside: Tensor


def segment_layout(segment_ids: Tensor, cu_seqlens: Tensor, window: int | None, dtype: torch.dtype) -> SegmentLayout:
    """Returns the layout of the segments with these offsets, without those of padding, whose id is 0.

    With a `window`, token i attends to token j if |i - j| <= window.
    """
    offsets, ids_T = cu_seqlens.numpy().astype(np.int64), segment_ids.numpy().ravel()
    starts, lengths = offsets[:-1], np.diff(offsets)
    is_text = (lengths > 0) & (ids_T[np.minimum(starts, len(ids_T) - 1)] > 0)
    starts, lengths = starts[is_text], lengths[is_text]
    padded = -(-lengths // MULTIPLE) * MULTIPLE
    groups, tokens, valid = [], [], []
    for length in np.unique(padded):
        chosen = padded == length
        position_P, length_c1 = np.arange(length), lengths[chosen, None]
        is_token_cP = position_P < length_c1
        attends_cPP = is_token_cP[:, None, None, :]
        if window is not None:
            attends_cPP = attends_cPP & (np.abs(position_P[:, None] - position_P) <= window)
        bias = None if attends_cPP.all() else masking_bias(torch.from_numpy(attends_cPP), dtype)
        groups.append(SegmentGroup(len(length_c1), is_token_cP.size, bias))
        tokens.append((starts[chosen, None] + np.minimum(position_P, length_c1 - 1)).ravel())
        valid.append(is_token_cP.ravel())
    token_K, is_token_K = np.concatenate(tokens), np.concatenate(valid)
    slot_T = np.zeros(len(ids_T), np.int64)
    slot_T[token_K[is_token_K]] = np.flatnonzero(is_token_K)
    outside, padding = np.flatnonzero(ids_T == 0), np.flatnonzero(~is_token_K)
    return SegmentLayout(tuple(groups), *map(torch.from_numpy, (token_K, slot_T, padding, outside)))


def segment_attention(qkv_TX: Tensor, layout: SegmentLayout, num_heads: int, dropout: float = 0.0) -> Tensor:
    """`cpu_ops.self_attention` within segments; [T, 3D] → [T, D]. Rows of tokens outside of segments are arbitrary."""
    qkv_KX: Tensor = _Rearranged.apply(qkv_TX, layout.token_K, layout.slot_T, layout.outside)
    parts = zip(torch.split(qkv_KX, [group.num_slots for group in layout.groups]), layout.groups, strict=True)
    mixed = [cpu_ops.self_attention(qkv, bias, count, num_heads, dropout) for qkv, (count, _, bias) in parts]
    mixed_KD = torch.cat(mixed)
    mixed_TD: Tensor = _Rearranged.apply(mixed_KD, layout.slot_T, layout.token_K, layout.padding)
    return mixed_TD


class _Rearranged(torch.autograd.Function):
    """x[source], whose gradient is gathered instead of added up.

    `place` is the output's row of each row of x. Rows that have none, `missing`, have no gradient; nor has a further
    copy of a row, since nothing reads the outputs of padding.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor, missing: Tensor) -> Tensor:
        ctx.save_for_backward(place, missing)
        return x.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, missing = ctx.saved_tensors
        return grad.index_select(0, place).index_fill_(0, missing, 0), None, None, None
