"""Batches of a prepared corpus: the loader, and record batch → torch tensors.

Sits between the Rust data engine (`_data`), which orders, packs and masks, and the training loop.
"""
# Shapes: B rows, L row length, M mask slots per row, S attention segments (padding tails included).

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from electra_fast import _data
from electra_fast._data import RecordBatch
from electra_fast.errors import InputError

if TYPE_CHECKING:
    from electra_fast.config import Config

_TOKEN_COLUMNS = ("input_ids", "token_type_ids", "position_ids", "segment_ids")
_MASK_COLUMNS = ("masked_positions", "masked_ids", "masked_weights")


class ArrowArray(Protocol):
    """Whatever hands over Arrow data through the PyCapsule interface."""

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Return capsules with the schema and the array."""


class BatchLoader(Iterator[RecordBatch]):
    """Masked, packed record batches of a corpus, endless unless `epochs` is given.

    The stream of rows depends on the corpus, `seed`, `sequence_length`, `masking`, `mask_prob` and
    `packing` only. `batch_size` counts rows over all ranks; rank r of W gets rows `r*batch_size//W`
    to `(r+1)*batch_size//W` of each batch, so the ranks' parts, concatenated, are the same for any W.
    After `epochs` passes it stops with a last batch of the rows that are left, shared by the same
    rule (a rank may then get no rows). Threads start with the first batch.

    A copy continues at the position of its original: a pickled loader, and the one that a forked
    process inherits, which starts threads of its own there.

    Args:
        corpus: Folder that `prepare` made.
        sequence_length: Tokens per row (L), special tokens included, 8 to 32,768.
        batch_size: Rows per batch, over all ranks.
        seed: Decides order, cuts and masks.
        masking: `paper`, `google` or `bert`.
        mask_prob: Share of a row's tokens that is masked.
        rank: Which part of each batch is wanted.
        world_size: Number of parts.
        packing: How documents become rows. `best-fit` keeps every token and fills the rows. `google`
            builds examples as the published code does: one or two segments of a document's lines
            (token types 0 and 1), one example per row, too long ones truncated; `inspect` reports how much that drops.
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
        self._options: dict[str, Any] = {
            "sequence_length": sequence_length,
            "batch_size": batch_size,
            "seed": seed,
            "masking": masking,
            "mask_prob": mask_prob,
            "packing": packing,
            "rank": rank,
            "world_size": world_size,
            "num_threads": num_threads,
            "prefetch": prefetch,
            "epochs": epochs,
        }
        self._loader = _data.BatchLoader(os.fspath(corpus), **self._options)

    @classmethod
    def from_config(cls, config: Config, **changes: Any) -> Self:
        """The loader of a run's configuration; `changes` are other values of the arguments above."""
        data, train = config.data, config.train
        arguments: dict[str, Any] = {
            "corpus": data.corpus,
            "sequence_length": data.sequence_length,
            "batch_size": train.batch_size,
            "seed": train.seed,
            "masking": data.masking,
            "mask_prob": data.mask_prob,
            "packing": data.packing,
            "num_threads": data.num_threads,
            "prefetch": data.prefetch,
        }
        return cls(**arguments | changes)

    def __getstate__(self) -> dict[str, Any]:
        return {"corpus": self._loader.corpus, "options": self._options, "state": self.state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self.__init__(pickled["corpus"], **pickled["options"])  # type: ignore[misc]
        self.restore(pickled["state"])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RecordBatch:
        return next(self._loader)

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch returned: JSON-serializable, under 256 bytes."""
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
    writes to the batch. For a CUDA device a loader's batch is copied once to pinned memory and from
    there asynchronously (`non_blocking`), ordered by the current stream; this path has not been measured.

    Returns:
        `input_ids` (masked), `token_type_ids`, `position_ids` [B, L] int32; `segment_ids` [B, L]
        int32, 1, 2, … for the attention segments of a row and 0 on padding; `masked_positions` and
        `masked_ids` (the originals) [B, M] int32; `masked_weights` [B, M] float32, 0 for unused
        slots; `cu_seqlens` [S + 1] int32, the ends of the attention segments in the flat buffer of
        B * L tokens, each row's padding tail being a segment of its own, so that the last is B * L.

    Raises:
        TypeError: `batch` is no record batch.
        ValueError: It lacks one of the loader's columns (named).
    """
    if not hasattr(batch, "__arrow_c_array__"):
        raise TypeError(f"batch is of type {type(batch).__name__}; give a record batch, such as next(loader)")
    target = torch.device(device)
    if isinstance(batch, RecordBatch) and batch.num_rows > 0:
        words = _to_device(torch.frombuffer(batch, dtype=torch.int32), target)
        ends = _to_device(torch.frombuffer(batch.segment_ends(), dtype=torch.int32), target)
        return _views(words, batch.layout, slice(0, batch.num_rows)) | {"cu_seqlens": ends}
    return {name: _to_device(tensor, target) for name, tensor in _from_columns(pa.record_batch(batch)).items()}


class MicroBatches:
    """A step's batch at a fixed place on the device, in equal parts, refilled in place at every step.

    A captured graph reads from the addresses of its capture, so the tensors of `parts` stay where they are:
    those of `to_torch`, except that `cu_seqlens` is padded at its end with empty segments. A batch of more
    segments than there is room for makes new tensors and raises `version`.

    Args:
        device: Where the tensors lie.
        count: Number of parts.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self.parts: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self._device, self._count = device, count
        self._words = torch.empty(0, dtype=torch.int32)
        self.capacity = 0

    def load(self, batch: RecordBatch) -> None:
        """Take a batch of the loader; its rows must divide into the parts, and be as many each time.

        On CUDA the copies are ordered by the current stream and nothing waits for them.
        """
        words = torch.frombuffer(batch, dtype=torch.int32)
        borders = self._borders(batch)
        if words.shape != self._words.shape or max(map(len, borders)) > self.capacity:
            self._allocate(batch, words, borders)
        self._words.copy_(_pinned(words, self._device), non_blocking=True)
        for part, ends in zip(self.parts, borders, strict=True):
            padded = np.full(self.capacity, ends[-1], dtype=np.int32)
            padded[: len(ends)] = ends
            part["cu_seqlens"].copy_(_pinned(torch.from_numpy(padded), self._device), non_blocking=True)

    def _borders(self, batch: RecordBatch) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        """The ends of each part's segments in that part's own flat buffer, beginning with 0."""
        ends = np.frombuffer(batch.segment_ends(), dtype=np.int32)
        size = int(ends[-1]) // self._count
        cuts = np.searchsorted(ends, np.arange(self._count + 1) * size)
        return [ends[a : b + 1] - ends[a] for a, b in itertools.pairwise(cuts)]

    def _allocate(self, batch: RecordBatch, words: torch.Tensor, borders: list[Any]) -> None:
        rows = batch.num_rows // self._count
        if rows * self._count != batch.num_rows:
            raise InputError(f"{batch.num_rows} rows do not divide into {self._count} micro-batches")
        self.version += 1
        self._words = torch.empty_like(words, device=self._device)
        # A quarter more than seen: the number of segments varies little from batch to batch.
        self.capacity = max(map(len, borders)) * 5 // 4
        self.parts = [
            _views(self._words, batch.layout, slice(i * rows, (i + 1) * rows))
            | {"cu_seqlens": torch.empty(self.capacity, dtype=torch.int32, device=self._device)}
            for i in range(self._count)
        ]


def _pinned(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A copy in pinned memory if it is to go to a GPU: its allocator waits for the stream before it is reused."""
    return tensor.pin_memory() if target.type == "cuda" else tensor


def _to_device(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    return _pinned(tensor, target).to(target, non_blocking=True)


def _views(words: torch.Tensor, layout: list[tuple[int, int]], rows: slice) -> dict[str, torch.Tensor]:
    """The fixed-size columns of some rows, in the one buffer that holds a loader's batch."""
    count = rows.stop - rows.start
    tensors = {
        name: words.as_strided((count, width), (width, 1), first + rows.start * width)
        for name, (first, width) in zip(_TOKEN_COLUMNS + _MASK_COLUMNS, layout, strict=True)
    }
    tensors["masked_weights"] = tensors["masked_weights"].view(torch.float32)
    return tensors


def _from_columns(columns: Any) -> dict[str, torch.Tensor]:
    """The same from the record batch of any Arrow library."""
    missing = {*_TOKEN_COLUMNS, *_MASK_COLUMNS, "segment_lengths"} - set(columns.schema.names)
    if missing:
        raise InputError(f"the record batch has no column {', '.join(sorted(missing))}; give one of a BatchLoader")
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
