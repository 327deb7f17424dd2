"""Disentangled attention of DeBERTa (arXiv 2006.03654): scores of contents, and of contents with relative positions.

The score of query token i and key token j is (q_i k_j + q_i K_r + k_j Q_r) / sqrt(3 H). K_r and Q_r are the key and the
query that the layer's matrices compute from row r of a table of relative positions, which all layers of a network
share; r is the bucket of i - j. As in `attention`, tokens attend only within their segments.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, D hidden, N heads, H head dimension, X = 3*N*H; S rows
of the table, Y = 2*N*H width of their queries and keys; J = 2*L - 1 distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.model.attention import AttentionMask, Queries, flex_function, mixed_values, rows_of, sdpa_kernels
from electra_fast.ops import cpu_ops
from electra_fast.ops.operations import Dropout, gather_rows, operation, uses_cpu_ops


@dataclass(frozen=True)
class RelativePositions:
    """The part of a network's table of relative positions that is needed for its row length.

    Args:
        table_SD: Normed rows, in the activations' dtype.
        first_row: Index of the first of them in the whole table.
        num_buckets: Half of the whole table's rows.
        max_positions: The distance at which the last bucket ends.
        position_ids_T: Positions of the tokens in their segments.
    """

    table_SD: Tensor
    first_row: int
    num_buckets: int
    max_positions: int
    position_ids_T: Tensor

    @classmethod
    def of(cls, table_SD: Tensor, max_positions: int, length: int, position_ids_T: Tensor) -> Self:
        """Returns the part of the whole table that rows of `length` tokens need."""
        num_buckets = len(table_SD) // 2
        first_row = 0
        if length - 1 <= num_buckets // 2:  # one bucket per distance
            first_row = num_buckets - (length - 1)
            table_SD = table_SD[first_row : num_buckets + length]
        return cls(table_SD, first_row, num_buckets, max_positions, position_ids_T)

    def rows(self, distance: Tensor) -> Tensor:
        """Returns the rows of `table_SD` for distances i - j, computed as in the published code; int64."""
        middle = self.num_buckets // 2
        size = distance.abs()
        width = torch.log(torch.tensor((self.max_positions - 1) / middle))  # on the CPU, a constant in captured graphs
        bucket = torch.ceil(torch.log(size.clamp(min=middle) / middle) / width * (middle - 1)) + middle
        bucket = torch.where(size <= middle, distance, bucket * distance.sign()).long()
        return (bucket + self.num_buckets - self.first_row).clamp(0, len(self.table_SD) - 1)

    def by_distance(self, positions_SY: Tensor, length: int, num_heads: int) -> tuple[Tensor, Tensor]:
        """Returns the keys and queries of the distances within rows of `length` tokens; [S, Y] → [N, J, H] twice.

        Keys are in ascending order of j - i, queries in ascending order of i - j.
        """
        rows_J = self.rows(torch.arange(1 - length, length, device=positions_SY.device))
        queries, keys = (
            gather_rows(x_SD.contiguous(), rows).view(len(rows), num_heads, -1).transpose(0, 1)
            for x_SD, rows in zip(positions_SY.chunk(2, dim=1), (rows_J, rows_J.flip(0)), strict=True)
        )
        return keys, queries


@operation
def disentangled_attention(
    qkv_TX: Tensor,
    positions_SY: Tensor,
    relative: RelativePositions,
    mask: AttentionMask,
    num_heads: int,
    dropout: Dropout,
) -> Tensor:
    """Attention with disentangled scores, from the tokens' queries, keys and values; [T, X], [S, Y] → [T, N*H].

    `positions_SY` has the queries and keys of the table's rows. `flex` has no dropout.
    """
    if mask.backend == "sdpa" and uses_cpu_ops(qkv_TX):
        if mask.cu_seqlens is not None and mask.length > cpu_ops.MIN_ROW:
            layout = mask.segments(qkv_TX.dtype)
            by_distance = relative.by_distance(positions_SY, layout.longest, num_heads)
            return cpu_ops.segment_attention(qkv_TX, layout, num_heads, dropout.probability, by_distance)
        by_distance = relative.by_distance(positions_SY, mask.length, num_heads)
        bias_B1LL = mask.bias(qkv_TX.dtype)
        return cpu_ops.self_attention(qkv_TX, bias_B1LL, mask.num_rows, num_heads, dropout.probability, by_distance)
    q, k, v = (rows_of(x, mask) for x in qkv_TX.view(qkv_TX.shape[0], 3, num_heads, -1).unbind(1))
    scale = (3 * q.shape[-1]) ** -0.5
    if mask.backend == "flex":
        queries, keys = (positions_SY * scale).view(-1, 2, num_heads, q.shape[-1]).permute(1, 2, 3, 0)  # [N, H, S] each
        assert not dropout.probability
        out_BNLH = _flex(q, k, v, q @ keys, k @ queries, relative, mask, scale)
    else:
        by_distance = relative.by_distance(positions_SY * scale, mask.length, num_heads)
        of_q, of_k = (cpu_ops.pairs((x @ of.mT).contiguous()) for x, of in zip((q, k), by_distance, strict=True))
        bias_BNLL = of_q + of_k.mT
        if (segments_B1LL := mask.bias(q.dtype)) is not None:
            bias_BNLL = bias_BNLL + segments_B1LL
        with sdpa_kernels(q):
            out_BNLH = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias_BNLL, dropout_p=dropout.probability, scale=scale
            )
    return out_BNLH.transpose(1, 2).reshape(qkv_TX.shape[0], -1)


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    content_BNLS: Tensor,
    position_BNLS: Tensor,
    relative: RelativePositions,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """Looks up position scores while it computes a tile of scores; their gradients are summed in no fixed order."""
    rows_J = relative.rows(torch.arange(1 - mask.length, mask.length, device=q.device))
    center = mask.length - 1

    def score(content: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        r = rows_J[i - j + center]
        return content + content_BNLS[row, head, i, r] + position_BNLS[row, head, j, r]

    out: Tensor = flex_function(q)(q, k, v, score_mod=score, block_mask=mask.block_mask, scale=scale)
    return out


def disentangled_query_attention(
    q_nNH: Tensor,
    k_TNH: Tensor,
    v_TNH: Tensor,
    positions_SY: Tensor,
    relative: RelativePositions,
    queries: Queries,
    dropout: Dropout,
) -> Tensor:
    """`disentangled_attention` for a few queries, with a softmax in fp32; [n, N, H], [T, N, H] twice → [n, N*H]."""
    num_heads = q_nNH.shape[1]
    positions_T = relative.position_ids_T
    rows_nT = relative.rows(positions_T[queries.index_n][:, None] - positions_T)
    query_NHS, key_NHS = positions_SY.view(len(positions_SY), 2, num_heads, -1).permute(1, 2, 3, 0)
    scores_NnT = q_nNH.transpose(0, 1) @ k_TNH.permute(1, 2, 0)
    scores_NnT = scores_NnT + (q_nNH.transpose(0, 1) @ key_NHS).gather(2, rows_nT.expand(num_heads, -1, -1))
    scores_NnT = scores_NnT + (k_TNH.transpose(0, 1) @ query_NHS).gather(2, rows_nT.T.expand(num_heads, -1, -1)).mT
    scores_NnT = scores_NnT.float() * (3 * q_nNH.shape[-1]) ** -0.5
    return mixed_values(scores_NnT, v_TNH, queries, dropout.probability)


def disentangled_attention_reference(
    qkv_TX: Tensor, positions_SY: Tensor, relative: RelativePositions, cu_seqlens: Tensor, num_heads: int
) -> Tensor:
    """`disentangled_attention` for one segment and head at a time: the specification of every backend."""
    q_TNH, k_TNH, v_TNH = qkv_TX.view(len(qkv_TX), 3, num_heads, -1).unbind(1)
    query_SNH, key_SNH = positions_SY.view(len(positions_SY), 2, num_heads, -1).unbind(1)
    out_TNH = torch.zeros_like(q_TNH)
    offsets = cu_seqlens.tolist()
    for start, end in zip(offsets, offsets[1:], strict=False):
        index_L = torch.arange(end - start)
        rows_LL = relative.rows(index_L[:, None] - index_L)
        for head in range(num_heads):
            q, k, v = (x[start:end, head] for x in (q_TNH, k_TNH, v_TNH))
            content_to_position = (q[:, None] * key_SNH[rows_LL, head]).sum(-1)
            position_to_content = (k[None] * query_SNH[rows_LL, head]).sum(-1)
            scores = (q @ k.T + content_to_position + position_to_content) / (3 * q.shape[1]) ** 0.5
            out_TNH[start:end, head] = scores.softmax(-1) @ v
    return out_TNH.flatten(1)
