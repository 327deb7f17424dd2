"""Batches of a prepared corpus: the loader, and record batch → torch tensors.

Sits between the Rust data engine (`_data`), which orders, packs and masks, and the training loop.
"""
# Shapes: B rows, L row length, M mask slots a row, S attention segments (padding tails included).

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from electra_fast import _data
from electra_fast._data import RecordBatch

_TOKEN_COLUMNS = ("input_ids", "token_type_ids", "position_ids", "segment_ids")
_MASK_COLUMNS = ("masked_positions", "masked_ids", "masked_weights")


class ArrowArray(Protocol):
    """Whatever hands over Arrow data through the PyCapsule interface."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Return capsules with the schema and the array."""


class BatchLoader(Iterator[RecordBatch]):
    """Masked, packed record batches of a corpus, endless unless `epochs` is given.

    The stream of rows is decided by the corpus, `seed`, `sequence_length`, `masking`, `mask_prob` and
    `packing` alone. `batch_size` counts rows over all ranks; rank r of W gets rows `r*batch_size//W`
    to `(r+1)*batch_size//W` of each batch, so the ranks' parts, concatenated, are the same for any W.
    After `epochs` passes it stops with a last batch of the rows that are left, shared by the same
    rule (a rank may then get no rows). Threads start with the first batch.

    Args:
        corpus: Folder that `prepare` made.
        sequence_length: Tokens a row (L), special tokens included, 8 to 32,768.
        batch_size: Rows a batch, over all ranks.
        seed: Decides order, cuts and masks.
        masking: `paper`, `google` or `bert`.
        mask_prob: Share of a row's tokens that is masked.
        rank: Which part of each batch is wanted.
        world_size: Number of parts.
        packing: How documents become rows. `best-fit` keeps every token and fills the rows. `google`
            builds examples as the published code does: one or two segments of a document's lines
            (token types 0 and 1), one example a row, what is too long thrown away; `inspect` tells how much.
        num_threads: Threads that fill batches, beside one that plans.
        prefetch: Batches prepared ahead.
        epochs: Stop after so many passes over the corpus; `None` never stops.

    Raises:
        FileNotFoundError: There is no corpus.
        ValueError: An option is out of range (named, with the range), or a file is damaged (named,
            with the block); the latter may come with any batch.
    """

    def __init__(
        self,
        corpus: str | os.PathLike[str],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int = 0,
        masking: str = "google",
        mask_prob: float = 0.15,
        rank: int = 0,
        world_size: int = 1,
        packing: str = "best-fit",
        num_threads: int = 1,
        prefetch: int = 4,
        epochs: int | None = None,
    ) -> None:
        self._loader = _data.BatchLoader(
            os.fspath(corpus),
            sequence_length=sequence_length,
            batch_size=batch_size,
            seed=seed,
            masking=masking,
            mask_prob=mask_prob,
            packing=packing,
            rank=rank,
            world_size=world_size,
            num_threads=num_threads,
            prefetch=prefetch,
            epochs=epochs,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RecordBatch:
        return next(self._loader)

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch given out: JSON-able, under 256 bytes."""
        state: dict[str, Any] = json.loads(self._loader.state())
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; batch size, rank, world size and threads may differ.

        Raises:
            ValueError: The state belongs to another corpus, seed or other row options, which are
                named, or is no state. The loader stays as it was.
        """
        self._loader.restore(json.dumps(dict(state)))

    @property
    def num_rows(self) -> int:
        """Rows in an epoch: the same in every one with `best-fit`; with `google` those of the first.

        Reads where documents end on each call; with `google` it reads all line lengths.
        """
        return self._loader.num_rows


def to_torch(batch: ArrowArray, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Turn a record batch of a `BatchLoader` into tensors.

    On the CPU all but `cu_seqlens` share the batch's memory: nothing is copied, and writing to them
    writes to the batch. For a CUDA device each tensor is copied to pinned memory and from there
    without waiting (`non_blocking`), ordered by the current stream; this path has not been measured.

    Returns:
        `input_ids` (masked), `token_type_ids`, `position_ids` [B, L] int32; `segment_ids` [B, L]
        int32, 1, 2, … for the attention segments of a row and 0 on padding; `masked_positions` and
        `masked_ids` (the originals) [B, M] int32; `masked_weights` [B, M] float32, 0 for unused
        slots; `cu_seqlens` [S + 1] int32, the ends of the attention segments in the flat buffer of
        B * L tokens, each row's padding tail being a segment of its own, so that the last is B * L.
    """
    whole = isinstance(batch, RecordBatch) and batch.num_rows > 0
    tensors = _from_buffer(batch) if whole else _from_columns(pa.record_batch(batch))
    target = torch.device(device)
    if target.type == "cpu":
        return tensors
    if target.type == "cuda":
        # The pinned block is not reused before the copy is done: its allocator waits for the stream.
        return {name: tensor.pin_memory().to(target, non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(target) for name, tensor in tensors.items()}


def _from_buffer(batch: Any) -> dict[str, torch.Tensor]:
    """Views of the one buffer that holds a loader's batch: an eighth of the time that columns take."""
    words, rows = torch.frombuffer(batch, dtype=torch.int32), batch.num_rows
    tensors = {
        name: words.as_strided((rows, width), (width, 1), first)
        for name, (first, width) in zip(_TOKEN_COLUMNS + _MASK_COLUMNS, batch.layout, strict=True)
    }
    tensors["masked_weights"] = tensors["masked_weights"].view(torch.float32)
    tensors["cu_seqlens"] = torch.frombuffer(batch.segment_ends(), dtype=torch.int32)
    return tensors


def _from_columns(columns: Any) -> dict[str, torch.Tensor]:
    """The same from the record batch of any Arrow library."""
    tensors = {name: _rows(columns.column(name)) for name in _TOKEN_COLUMNS + _MASK_COLUMNS}
    length = tensors["input_ids"].shape[1]
    tensors["cu_seqlens"] = torch.from_numpy(_segment_ends(columns.column("segment_lengths"), length))
    return tensors


def _rows(column: Any) -> torch.Tensor:
    """View a fixed-size list column as a matrix; lists have no DLPack, so its flat child goes over."""
    flat: torch.Tensor = from_dlpack(column.flatten())
    return flat.view(len(column), column.type.list_size)


def _segment_ends(lengths: Any, row_length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Cumulative ends of all segments and padding tails, beginning with 0."""
    offsets = lengths.offsets.to_numpy()
    offsets = offsets - offsets[0]  # a slice keeps its parent's offsets; `flatten` begins at the slice
    first, last = offsets[:-1], offsets[1:]
    ends = np.cumsum(lengths.flatten().to_numpy(), dtype=np.int32)
    row_ends = np.arange(1, len(lengths) + 1, dtype=np.int32) * np.int32(row_length)
    padding = row_ends - ends[last - 1]  # up to and with each row; every row has a segment
    before = np.zeros_like(padding)
    before[1:] = padding[:-1]
    ends += np.repeat(before, last - first)
    tails = row_ends[ends[last - 1] != row_ends]
    merged = np.concatenate((np.zeros(1, np.int32), ends, tails))
    merged.sort(kind="stable")  # two ascending runs: a merge
    return merged
