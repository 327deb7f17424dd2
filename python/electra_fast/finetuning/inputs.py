"""What a model reads of a packed batch: its tokens as tensors, and each example's share of them.

Shapes: R rows, L row length, T = R * L tokens of the flat buffer, n examples, S segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from electra_fast.config.config import ModelConfig
from electra_fast.data.loader import to_device
from electra_fast.finetuning.batches import PackedBatch
from electra_fast.model.attention import AttentionMask, Queries


@dataclass(frozen=True)
class Inputs:
    """The arrays of a `PackedBatch`, on a device.

    Args:
        columns_5RL: Ids, token types, positions, segments and owners.
        cu_seqlens: Cumulative lengths of the segments, int32 [S + 1].
        first_n: Where each example's [CLS] lies, int64 [n].
        longest: No example has more tokens.
    """

    columns_5RL: Tensor
    cu_seqlens: Tensor
    first_n: Tensor
    longest: int

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Self:
        """Copies a batch to the device, asynchronously on CUDA."""
        columns, cu_seqlens, first = (
            to_device(torch.from_numpy(array), device)
            for array in (batch.columns, batch.cu_seqlens, batch.first_tokens)
        )
        return cls(columns, cu_seqlens, first, batch.longest)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.columns_5RL, self.cu_seqlens, self.first_n

    def mask(self, backend: str, shape: ModelConfig) -> AttentionMask:
        """Every example attends to itself."""
        return AttentionMask.packed(self.columns_5RL[3], self.cu_seqlens, backend, shape.local_attention)

    def first_tokens(self, shape: ModelConfig) -> Queries:
        """The [CLS] of each example, which attends to its segment, or in a local layer to the beginning of that."""
        _, _, positions_RL, segments_RL, _ = self.columns_5RL.unbind()
        row_R1 = torch.arange(len(segments_RL), device=self.first_n.device)[:, None]
        # A row has fewer segments than tokens.
        segment_T = (row_R1 * segments_RL.shape[1] + segments_RL).flatten()
        if shape.is_local(shape.num_layers - 1):
            segment_T = segment_T.where(positions_RL.flatten() <= shape.local_attention // 2, -1)
        return Queries(self.first_n, segment_T[self.first_n][:, None] == segment_T)

    def by_example(self, values_T: Tensor, fill: float, width: int = 0) -> Tensor:
        """The values of each example's tokens in a row; [T] → [n, max(longest, width)], `fill` after its last token."""
        n, longest = len(self.first_n), max(self.longest, width)
        positions_T, owners_T = self.columns_5RL[2].flatten(), self.columns_5RL[4].flatten()
        grid = values_T.new_full((n + 1, longest), fill)  # the last row takes the padding
        return grid.index_put((owners_T, positions_T.clamp(max=longest - 1)), values_T)[:n]
