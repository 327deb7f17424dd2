"""Batches of a prepared corpus: the loader, and the conversion of record batches to torch tensors.

Sits between the Rust data engine (`_data`), which shuffles, packs and masks, and the training loop.
"""
# Shapes: B rows, L row length, M mask slots per row, S attention segments (including padding tails).

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch
from torch.utils.dlpack import from_dlpack

from electra_fast import _data
from electra_fast._data import RecordBatch
from electra_fast.config.config import Config, DataConfig, TrainConfig
from electra_fast.config.section import present_name
from electra_fast.data.mixture import Corpora, weighted_folders, with_present_names
from electra_fast.errors import InputError

_TOKEN_COLUMNS = ("input_ids", "token_type_ids", "position_ids", "segment_ids")
_MASK_COLUMNS = ("masked_positions", "masked_ids", "masked_weights")


def default_cache_dir() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "electra-fast", "corpora")


class BatchLoader(Iterator[RecordBatch]):
    """Masked, packed record batches of one or several corpora; endless unless `epochs` is set.

    The stream of rows depends only on the corpus, `seed`, `sequence_length`, `masking`, `mask_prob`, `packing`,
    `cut_at` and `lanes`. `batch_size` counts rows over all ranks; rank r of W gets rows `r*batch_size//W`
    to `(r+1)*batch_size//W` of each batch, so the concatenated batches are the same for any W.
    After `epochs` passes, it stops with a partial batch of the remaining rows, split the same way
    (a rank may then get no rows). Threads start with the first batch.

    A copy, whether unpickled or inherited by a forked process, continues at the original's position
    with separate threads.

    Args:
        corpus: Folder written by `prepare`. Or several folders, which supply rows in proportion to weights: a list of
            "FOLDER:WEIGHT" or a mapping from folder to weight; without weights in the list, in proportion to their
            tokens. After any number of rows, each corpus is within one row of its weight.
        sequence_length: Tokens per row (L), including special tokens, 8 to 32,768.
        batch_size: Rows per batch, over all ranks.
        seed: Determines the order of documents, the positions of cuts, and the masks.
        masking: Choice of the masked tokens. `tokens`: distinct tokens. `with-repeats`: draws that may repeat, 85 % of
            them masked. `80-10-10`: distinct tokens, 80 % masked, 10 % replaced. `whole-word`: all tokens of words in
            random order, skipping words that would exceed `mask_prob`. `span`: n adjacent words, n from 1 to 3, with
            probability proportional to 1/n, fewer if a special token, a masked word or `mask_prob` ends them
            (the n-grams of DeBERTa). The vocabulary marks words (`##`, `Ġ`, `▁`); the first token
            of a segment counts as the start of a word. If no word of a row is short enough, tokens are masked
            one by one.
        mask_prob: Fraction of a row's tokens that are masked; with whole words, the maximum.
        rank: Part of each batch to return.
        world_size: Number of parts.
        packing: Packing of documents into rows. `best-fit` keeps every token and fills the rows. `examples`
            builds examples like the published code: one or two segments of a document's lines
            (token types 0 and 1), one example per row, truncated if too long; `inspect` reports the loss.
        cut_at: Positions at which `best-fit` may cut a document: at any `token`, or only before a `word` or `line`,
            at the price of more padding. A word or line longer than a row is cut at tokens.
        lanes: Equal parts of each batch, in order, each with a separate stream: every epoch divides the blocks of the
            corpus again among the lanes. A rank reads only the blocks of the lanes that its rows come from, so nodes
            fetch different blocks from an object store. Must divide `batch_size`; several lanes need `epochs=None`,
            since lanes begin their next epoch at different batches.
        num_threads: Threads that fill batches, in addition to the planning thread.
        prefetch: Number of batches prepared in advance.
        cache_dir: Folder on a local disk for blocks fetched from object stores (URLs `s3://`, `gs://`, `az://`,
            `http(s)://`), shared by all processes of a node and kept for the next run; by default
            `electra-fast/corpora` in $XDG_CACHE_HOME or ~/.cache. Shared file systems are refused.
        cache_bytes: Size limit of this cache. The least recently used blocks are removed.
        epochs: Passes over each corpus; `None` for no limit. After that, the other corpora supply its rows.

    Raises:
        FileNotFoundError: A corpus does not exist.
        ValueError: An option is out of range (the message has the range), the vocabulary does not mark the
            words that an option needs, or a file is damaged (the message has the file and block), which any batch
            may raise. Corpora have different vocabularies, or one is repeated, or a weight is missing or not above
            0. The cache is too small for the corpus, or a store refused a request.
        OSError: A store did not respond, or the cache's disk is full; any batch may raise it.
    """

    def __init__(
        self,
        corpus: Corpora,
        *,
        sequence_length: int = DataConfig.sequence_length,
        batch_size: int = TrainConfig.batch_size,
        seed: int = TrainConfig.seed,
        masking: str = DataConfig.masking,
        mask_prob: float = DataConfig.mask_prob,
        rank: int = 0,
        world_size: int = 1,
        packing: str = DataConfig.packing,
        cut_at: str = DataConfig.cut_at,
        lanes: int = 1,
        num_threads: int = DataConfig.num_threads,
        prefetch: int = DataConfig.prefetch,
        epochs: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int = DataConfig.cache_bytes,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "corpus")}
        options["cache_dir"] = os.path.abspath(cache_dir or default_cache_dir())
        options["cache_bytes"] = min(cache_bytes, 2**63 - 1)  # more than any disk
        for name, value in (("masking", masking), ("packing", packing)):
            if (now := present_name(f"data.{name}", value)) != value:
                raise InputError(f'{name} = "{value}": renamed to "{now}"')
        self._options: dict[str, Any] = options
        self._loader = _data.BatchLoader(weighted_folders(corpus), options)

    @classmethod
    def from_config(cls, config: Config, **changes: Any) -> Self:
        """The loader of a configuration, with one lane; `changes` override the constructor's arguments."""
        keys = vars(config.data) | vars(config.train) | {"lanes": 1}
        arguments = {name: keys[name] for name in inspect.signature(cls).parameters if name in keys}
        return cls(**arguments | changes)

    def __getstate__(self) -> dict[str, Any]:
        return {"corpora": self._loader.corpora, "options": self._options, "state": self.state()}

    def __setstate__(self, pickled: dict[str, Any]) -> None:
        self._options = pickled["options"]
        self._loader = _data.BatchLoader(pickled["corpora"], self._options)
        self.restore(pickled["state"])

    def __repr__(self) -> str:
        corpora = self._loader.corpora
        options = self._options
        names = ", ".join(repr(folder) for folder, _ in corpora)
        rows = "{batch_size} rows of {sequence_length} tokens, {packing} packing, {masking} masking of {mask_prob:.0%}"
        part = "" if options["world_size"] == 1 else ", part {rank} of {world_size}"
        epochs = ", ".join(f"{epoch:.4g}" for epoch in self.passes())
        return f"BatchLoader({names}): {(rows + part).format(**options)}; at epoch {epochs}"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RecordBatch:
        return next(self._loader)

    def state(self) -> dict[str, Any]:
        """Position after the last returned batch: JSON, under 256 bytes; several corpora take about 110 bytes each.

        With several lanes, about 20 bytes per corpus and lane; a rank knows only the positions of its lanes, and
        `merge_states` combines the states of all ranks.
        """
        state: dict[str, Any] = json.loads(self._loader.state())
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`, merged if there are several lanes; batch size, rank, world size and threads may differ.

        Raises:
            ValueError: The state belongs to other corpora, weights, seed or row options (the message names
                them), or is not a state. The loader is left unchanged.
        """
        self._loader.restore(json.dumps(with_present_names(state)))

    def passes(self) -> list[float]:
        """Returns the epochs of each corpus up to the last batch: finished epochs and a fraction of the next.

        With several lanes, the average over the lanes of this rank.
        """
        return self._loader.passes()

    @property
    def num_rows(self) -> int:
        """Rows per epoch of all corpora; rows of the first epoch with `examples` or `cut_at`, where epochs differ.

        Each call reads the lengths of all documents, or of all lines with `examples` and `cut_at="line"`; with
        `cut_at="word"`, also the tokens around each cut.
        """
        return self._loader.num_rows


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the state of loaders with several lanes, from the states of all ranks after the same batch.

    Raises:
        ValueError: The states belong to different loaders or batches.
    """
    merged: dict[str, Any] = json.loads(_data.merge_states([json.dumps(dict(state)) for state in states]))
    return merged


def to_torch(batch: RecordBatch | pa.RecordBatch, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Converts a record batch of a `BatchLoader` to tensors.

    On the CPU, all tensors but `cu_seqlens` share the batch's memory: nothing is copied, and writing to
    them writes to the batch. For a CUDA device, a loader's batch is copied once to pinned memory and from
    there asynchronously (`non_blocking`) on the current stream; this path has not been benchmarked.

    Returns:
        `input_ids` (masked), `token_type_ids`, `position_ids` [B, L] int32; `segment_ids` [B, L]
        int32, 1, 2, … for the attention segments of a row and 0 on padding; `masked_positions` and
        `masked_ids` (the original ids) [B, M] int32; `masked_weights` [B, M] float32, 0 for unused
        slots; `cu_seqlens` [S + 1] int32, the cumulative segment lengths in the flat buffer of B * L
        tokens; each row's padding tail is a separate segment, so the last entry is B * L.

    Raises:
        TypeError: `batch` is not a record batch.
        ValueError: `batch` lacks one of the loader's columns (the message names it).
    """
    if not hasattr(batch, "__arrow_c_array__"):
        raise TypeError(f"batch: must be a record batch, such as next(loader), not {type(batch).__name__}")
    target = torch.device(device)
    if isinstance(batch, RecordBatch) and batch.num_rows > 0:
        buffer = to_device(torch.frombuffer(batch, dtype=torch.int32), target)
        ends = to_device(torch.frombuffer(batch.segment_ends(), dtype=torch.int32), target)
        return _views(buffer, batch.layout, slice(0, batch.num_rows)) | {"cu_seqlens": ends}
    return {name: to_device(tensor, target) for name, tensor in _from_columns(pa.record_batch(batch)).items()}


def rows_of(batch: Mapping[str, torch.Tensor], rows: range) -> dict[str, torch.Tensor]:
    """Returns some rows of a batch (from `to_torch`): views, except `cu_seqlens`. Synchronizes with the device."""
    length = batch["input_ids"].shape[1]
    ends = batch["cu_seqlens"]
    first = rows.start * length
    last = rows.stop * length
    columns = {name: tensor[rows.start : rows.stop] for name, tensor in batch.items() if name != "cu_seqlens"}
    return columns | {"cu_seqlens": ends[(ends >= first) & (ends <= last)] - first}


def padding_row(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A row of padding, which no loss counts, for a process without rows in a micro-batch.

    Its forward and backward passes make the calls that the other processes wait for, with gradients of 0. The
    shapes are taken from `batch` (from `to_torch`), which may have no rows.
    """
    row = {name: tensor.new_zeros((1, *tensor.shape[1:])) for name, tensor in batch.items() if name != "cu_seqlens"}
    ends = torch.zeros(2, dtype=torch.int32, device=row["input_ids"].device)
    ends[1:] = row["input_ids"].shape[1]
    return row | {"cu_seqlens": ends}


class HostBatch(NamedTuple):
    """A batch of a `BatchLoader` as arrays, which can be sent to another process.

    Args:
        values: The concatenated fixed-size columns, flat int32.
        layout: First element and row width of each column.
        num_rows: Number of rows.
        segment_ends: `cu_seqlens` of `to_torch`.
    """

    values: np.ndarray[Any, np.dtype[np.int32]]
    layout: list[tuple[int, int]]
    num_rows: int
    segment_ends: np.ndarray[Any, np.dtype[np.int32]]

    @classmethod
    def of(cls, batch: RecordBatch) -> Self:
        """Views of a loader's batch, which may have no rows for this rank."""
        if batch.num_rows == 0:
            return cls(np.empty(0, np.int32), [], 0, np.zeros(1, np.int32))
        ends = np.frombuffer(batch.segment_ends(), dtype=np.int32)
        return cls(np.frombuffer(memoryview(batch), dtype=np.int32), batch.layout, batch.num_rows, ends)


class MicroBatches:
    """Static device buffers for a step's batch, split into micro-batches and refilled at every step.

    A captured CUDA graph reads from fixed addresses, so the tensors of `parts` keep their addresses. They equal the
    tensors of `to_torch`, except that `cu_seqlens` is padded with empty segments at its end. A batch with more
    segments than fit reallocates the tensors and increments `version`. The `rows` of the micro-batches are consecutive
    ranges that begin at 0.
    """

    def __init__(self, device: torch.device, rows: Sequence[range]) -> None:
        self.parts: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self._device = device
        self._rows = rows
        self._num_rows = rows[-1].stop if rows else 0
        self._buffer = torch.empty(0, dtype=torch.int32)
        self.capacity = 0

    def load(self, batch: HostBatch) -> None:
        """Copies a batch of the loader into the buffers; ValueError if it has the wrong number of rows.

        On CUDA the copies are asynchronous, on the current stream.
        """
        self._check(batch)
        if not self._rows:
            return
        buffer = torch.from_numpy(batch.values)
        seqlens = self._part_seqlens(batch)
        if not self._fit(batch, seqlens):
            self._allocate(batch, buffer, seqlens)
        self._buffer.copy_(_pinned(buffer, self._device), non_blocking=True)
        for part, ends in zip(self.parts, seqlens, strict=True):
            padded = np.full(self.capacity, ends[-1], dtype=np.int32)
            padded[: len(ends)] = ends
            part["cu_seqlens"].copy_(_pinned(torch.from_numpy(padded), self._device), non_blocking=True)

    def _fit(self, batch: HostBatch, seqlens: list[Any]) -> bool:
        return len(batch.values) == len(self._buffer) and max(map(len, seqlens)) <= self.capacity

    def on_host(self, batch: HostBatch) -> list[dict[str, torch.Tensor]]:
        """The micro-batches as views of the batch in host memory, without `cu_seqlens`."""
        self._check(batch)
        buffer = torch.from_numpy(batch.values)
        return [_views(buffer, batch.layout, slice(rows.start, rows.stop)) for rows in self._rows]

    def _check(self, batch: HostBatch) -> None:
        if batch.num_rows != self._num_rows:
            raise InputError(f"the batch has {batch.num_rows} rows, expected {self._num_rows}")

    def _part_seqlens(self, batch: HostBatch) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
        """`cu_seqlens` of each part, relative to its flat buffer."""
        ends = batch.segment_ends
        length = int(ends[-1]) // batch.num_rows
        cuts = np.searchsorted(ends, [0, *(rows.stop * length for rows in self._rows)])
        return [ends[a : b + 1] - ends[a] for a, b in itertools.pairwise(cuts)]

    def _allocate(self, batch: HostBatch, buffer: torch.Tensor, seqlens: list[Any]) -> None:
        self.version += 1
        self._buffer = torch.empty_like(buffer, device=self._device)
        # 25 % headroom: the number of segments varies little between batches.
        self.capacity = max(map(len, seqlens)) * 5 // 4
        self.parts = [
            _views(self._buffer, batch.layout, slice(rows.start, rows.stop))
            | {"cu_seqlens": torch.empty(self.capacity, dtype=torch.int32, device=self._device)}
            for rows in self._rows
        ]


def _pinned(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    """A pinned copy if the target is a GPU; the caching allocator reuses it only after the stream has used it."""
    return tensor.pin_memory() if target.type == "cuda" else tensor


def to_device(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    return _pinned(tensor, target).to(target, non_blocking=True)


def _views(buffer: torch.Tensor, layout: list[tuple[int, int]], rows: slice) -> dict[str, torch.Tensor]:
    count = rows.stop - rows.start
    tensors = {
        name: buffer.as_strided((count, width), (width, 1), first + rows.start * width)
        for name, (first, width) in zip(_TOKEN_COLUMNS + _MASK_COLUMNS, layout, strict=True)
    }
    tensors["masked_weights"] = tensors["masked_weights"].view(torch.float32)
    return tensors


def _from_columns(columns: Any) -> dict[str, torch.Tensor]:
    missing = {*_TOKEN_COLUMNS, *_MASK_COLUMNS, "segment_lengths"} - set(columns.schema.names)
    if missing:
        raise InputError(f"the record batch has no column {', '.join(sorted(missing))}; pass a batch of a BatchLoader")
    tensors = {name: _rows(columns.column(name)) for name in _TOKEN_COLUMNS + _MASK_COLUMNS}
    length = tensors["input_ids"].shape[1]
    tensors["cu_seqlens"] = torch.from_numpy(_segment_ends(columns.column("segment_lengths"), length))
    return tensors


def _rows(column: Any) -> torch.Tensor:
    """Views a fixed-size list column as a matrix, through its flat child because lists do not support DLPack."""
    flat: torch.Tensor = from_dlpack(column.flatten())
    return flat.view(len(column), column.type.list_size)


def _segment_ends(lengths: Any, row_length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Cumulative lengths of all segments and padding tails, starting with 0."""
    ends = {0}
    for row, segments in enumerate(lengths.to_pylist()):
        ends.update(itertools.accumulate(segments, initial=row * row_length), [(row + 1) * row_length])
    return np.array(sorted(ends), dtype=np.int32)
