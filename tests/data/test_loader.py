"""BatchLoader through Python: bytes, masks, ranks, resuming, tensors, errors.

The crate's tests cover the content of rows and masks.
"""

import gc
import hashlib
import json
import math
import os
import re
import signal
import threading
import time
from inspect import signature
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from electra_fast.config.config import Config
from electra_fast.data.inspect import inspect
from electra_fast.data.loader import BatchLoader, merge_states, rows_of, to_torch
from electra_fast.data.prepare import prepare

LENGTH = 64
PUBLISHED = {"masking": "with-repeats", "mask_prob": 0.15}


@pytest.fixture(scope="module")
def folder_of_lanes(tmp_path_factory):
    """A corpus of four blocks."""
    folder = tmp_path_factory.mktemp("lanes")
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    prepare(iter(["a " * 1000] * 1000), vocab=folder / "vocab.txt", out=folder / "shards", progress=False)
    return folder / "shards"


@pytest.fixture
def open_loader(corpus):
    def open_with(**changes):
        options = {"sequence_length": LENGTH, "batch_size": 23, "seed": 5, "epochs": 1, **PUBLISHED}
        return BatchLoader(corpus, **(options | changes))

    return open_with


def test_repr_has_options_and_position(open_loader, corpus):
    loader = open_loader(rank=1, world_size=2)
    rows = f"23 rows of {LENGTH} tokens, best-fit packing, with-repeats masking of 15%, part 1 of 2"
    assert repr(loader) == f"BatchLoader({str(corpus)!r}): {rows}; at epoch 0"
    next(loader)
    assert 0 < float(repr(loader).rpartition(" ")[2]) < 1


def test_defaults_equal_the_configuration():
    """Except lanes and cache, which a run decides."""
    keys = vars(Config().data) | vars(Config().train)
    for function, num_shared in ((BatchLoader, 9), (inspect, 5)):
        parameters = signature(function).parameters.values()
        defaults = {option.name: option.default for option in parameters if option.default is not option.empty}
        shared = {name: value for name, value in defaults.items() if name in keys.keys() - {"lanes", "cache_dir"}}
        assert shared == {name: keys[name] for name in shared} and len(shared) >= num_shared


def digest(batches):
    """Hash of all columns of the batches, concatenated row-wise."""
    table = pa.Table.from_batches([pa.record_batch(batch) for batch in batches])
    sha = hashlib.sha256()
    for column in table.columns:
        flat = column.combine_chunks().flatten()
        sha.update(np.ascontiguousarray(flat.to_numpy(zero_copy_only=False)).tobytes())
    return sha.hexdigest()


# In this corpus each token is a word and each document a line: cuts at words give the batches with repeats.
OPTIONS = [{"masking": masking} for masking in ("tokens", "with-repeats", "80-10-10", "whole-word", "span")]
OPTIONS += [{"cut_at": "word"}, {"cut_at": "line"}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_batches_have_fixed_bytes(open_loader, options):
    # A different digest means that existing runs cannot resume exactly: say so in the changelog.
    golden = (Path(__file__).parents[1] / "golden" / "batches.txt").read_text().splitlines()
    name = options.get("masking") or f"cut_at={options['cut_at']}"
    assert f"{name} {digest(list(open_loader(epochs=2, **options)))}" in golden


def test_global_batches_do_not_depend_on_ranks_and_threads(open_loader):
    whole = list(open_loader(epochs=2, cache_bytes=2**64 - 1))
    ranks = [open_loader(epochs=2, rank=rank, world_size=3, num_threads=1 + rank, prefetch=7) for rank in range(3)]
    for number, batch in enumerate(whole):
        parts = [next(rank) for rank in ranks]
        assert digest(parts) == digest([batch]), number
        sizes = [(rank + 1) * batch.num_rows // 3 - rank * batch.num_rows // 3 for rank in range(3)]
        assert [part.num_rows for part in parts] == sizes
    assert all(next(rank, None) is None for rank in ranks)


def test_rows_of_a_batch_equal_a_ranks_batch(open_loader):
    whole = to_torch(next(open_loader()))
    part = to_torch(next(open_loader(rank=1, world_size=3)))
    rows = rows_of(whole, range(23 // 3, 2 * 23 // 3))
    assert rows.keys() == part.keys() and all(torch.equal(rows[name], part[name]) for name in part)


def test_state_allows_another_batch_size_and_world_size(open_loader):
    def resumed(**changes):
        loader = open_loader(**changes)
        loader.restore(json.loads(text))
        assert loader.state() == json.loads(text)
        return loader

    loader = open_loader()
    next(loader)
    text = json.dumps(loader.state())
    assert len(text) < 256
    rest = digest(list(loader))
    assert digest(list(resumed(batch_size=1))) == rest
    assert digest([next(resumed(batch_size=10_000, rank=rank, world_size=2)) for rank in (0, 1)]) == rest
    beyond = "beyond the end of the corpus or of its epochs"
    before = loader.state()
    for wrong, message in (
        ({}, "pass the unchanged result of state"),
        ({"corpora": []}, "missing field `seed`"),
        ({"corpora": 1}, "invalid type"),
        (before | {"row": -1}, "invalid value"),
        (before | {"x": 1}, "unknown field"),
        (before | {"seed": 6}, 'seed = "6", but this loader has "5"; create the loader with the same settings'),
        (before | {"options": "cut_at=line"}, 'options = "cut_at=line", but this loader has "sequence_length='),
        (before | {"corpus": "0f"}, 'corpus = "0f", but this loader has "'),
        (before | {"epoch": 3}, f"epoch = 3: {beyond}"),
        (before | {"epoch": 2**32 - 1}, f"epoch = 4294967295: {beyond}"),
        (before | {"epoch": 0, "group": 9}, f"group = 9: {beyond}"),
        (before | {"epoch": 0, "group": 2**32 - 1}, f"group = 4294967295: {beyond}"),
        (before | {"epoch": 0, "row": 99_999}, f"row = 99999: {beyond}"),
        (before | {"epoch": 0, "row": 2**64 - 1}, f"row = 18446744073709551615: {beyond}"),
    ):
        with pytest.raises(ValueError, match=f"^state: .*{message}"):
            loader.restore(wrong)
        assert loader.state() == before


def test_longest_state_is_short_and_keeps_its_format(open_loader):
    state = open_loader(
        sequence_length=32_768, mask_prob=1 / 3, seed=2**63 - 1, masking="whole-word", cut_at="line", batch_size=1
    ).state()
    assert list(state) == ["epoch", "group", "row", "seed", "corpus", "options"]
    row = "sequence_length=32768 masking=whole-word mask_prob=0.3333333333333333"
    assert state["options"] == f"{row} packing=best-fit cut_at=line"
    largest = state | {"epoch": 2**32 - 1, "group": 2**32 - 1, "row": 2**64 - 1}
    assert len(json.dumps(largest, separators=(",", ":"))) < 256
    usual = "sequence_length=64 masking=with-repeats mask_prob=0.15 packing=best-fit"
    assert open_loader().state()["options"] == usual


def test_rank_needs_the_lanes_of_its_rows(folder_of_lanes):
    first, second = (
        BatchLoader(folder_of_lanes, sequence_length=8, batch_size=8, lanes=4, rank=rank, world_size=2)
        for rank in (0, 1)
    )
    with pytest.raises(ValueError, match=r"^state: lane 2 is missing; merge the states of all ranks \(merge_states\)$"):
        second.restore(first.state())
    first.restore(merge_states([first.state(), second.state()]))
    before = first.state()
    next(first)
    with pytest.raises(ValueError, match="^states of different loaders or batches cannot be merged: "):
        merge_states([before, first.state()])
    with pytest.raises(ValueError, match="^no states to merge"):
        merge_states([])
    with pytest.raises(ValueError, match='packing=best-fit", but this loader has ".* lanes=4"'):
        first.restore(BatchLoader(folder_of_lanes, sequence_length=8, batch_size=8).state())


def test_tensors_have_documented_shapes_and_share_memory(open_loader):
    batch = next(open_loader(masking="tokens"))
    columns = pa.record_batch(batch)
    tensors = to_torch(batch)
    slots = math.ceil(0.15 * LENGTH)
    for name in ("input_ids", "token_type_ids", "position_ids", "segment_ids"):
        assert tensors[name].shape == (23, LENGTH)
        assert tensors[name].dtype == torch.int32
    for name in ("masked_positions", "masked_ids", "masked_weights"):
        assert tensors[name].shape == (23, slots)
    assert tensors["masked_weights"].dtype == torch.float32
    for name in set(tensors) - {"cu_seqlens"}:
        assert tensors[name].data_ptr() == columns.column(name).values.buffers()[1].address


def test_any_record_batch_gives_the_same_tensors(open_loader):
    for batch in open_loader(epochs=1):
        tensors = to_torch(batch)
        columns = pa.record_batch(batch)
        from_columns = to_torch(columns)
        assert list(tensors) == list(from_columns)
        for name, tensor in tensors.items():
            assert tensor.dtype == from_columns[name].dtype
            assert torch.equal(tensor, from_columns[name]), name
        for row in range(batch.num_rows):
            part = to_torch(columns.slice(row, 1))
            expected = rows_of(tensors, range(row, row + 1))
            assert all(torch.equal(part[name], expected[name]) for name in expected)


def test_wrong_batch_or_corpus_type_is_reported(tmp_path):
    for wrong in (None, [1, 2], {"input_ids": 1}):
        message = rf"^batch: must be a record batch, such as next\(loader\), not {type(wrong).__name__}$"
        with pytest.raises(TypeError, match=message):
            to_torch(wrong)
    message = "^the record batch has no column input_ids, masked_ids, .*; pass a batch of a Batch"
    with pytest.raises(ValueError, match=message):
        to_torch(pa.record_batch({"text": ["a"]}))
    with pytest.raises(FileNotFoundError, match="no-such"):
        BatchLoader(tmp_path / "no-such", sequence_length=64, batch_size=1)


def test_segments_tile_the_flat_buffer(open_loader):
    for batch in open_loader():
        tensors = to_torch(batch)
        ends = tensors["cu_seqlens"]
        assert ends.dtype == torch.int32
        assert (ends[0], ends[-1]) == (0, batch.num_rows * LENGTH)
        assert (ends.diff() > 0).all()
        ids = tensors["segment_ids"].flatten()
        changes = (ids[1:] != ids[:-1]) | (torch.arange(1, len(ids)) % LENGTH == 0)
        assert ends[1:-1].tolist() == (changes.nonzero().flatten() + 1).tolist()
        positions = tensors["position_ids"].flatten()
        for start, end in zip(ends, ends[1:], strict=False):
            real = ids[start] > 0
            expected = torch.arange(end - start) if real else torch.zeros(end - start)
            assert torch.equal(positions[start:end], expected.int())
            assert real or not tensors["input_ids"].flatten()[start:end].any()


def test_capsules_are_named_and_released(open_loader):
    loader = open_loader(epochs=None)
    batch = next(loader)
    schema, array = batch.__arrow_c_array__()
    assert ('"arrow_schema"' in repr(schema)) and ('"arrow_array"' in repr(array))
    del schema, array  # released without being consumed
    imported = pa.record_batch(batch)
    before = digest([batch])
    del batch, loader
    gc.collect()
    assert digest([imported]) == before
    metadata = {key.decode(): value.decode() for key, value in imported.schema.metadata.items()}
    assert metadata == {"sequence_length": "64", "mask_slots": "9", "pad_id": "0"}


def test_memory_is_reused_unless_tensors_hold_it(open_loader):
    loader = open_loader(epochs=None)
    tensors = to_torch(next(loader))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    addresses = {to_torch(next(loader))["input_ids"].data_ptr() for _ in range(200)}
    assert len(addresses) < 20
    del loader
    gc.collect()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 7}, "sequence_length = 7: must be from 8 to 32768"),
        ({"rank": 2, "world_size": 2}, "rank = 2: must be from 0 to 1"),
        ({"mask_prob": float("nan")}, "mask_prob = NaN: not a finite number"),
        ({"mask_prob": 0}, "mask_prob = 0: must be above 0 and below 1"),
        ({"mask_prob": 1.0}, "mask_prob = 1: must be above 0"),
        ({"packing": "google"}, 'packing = "google": renamed to "examples"'),
        ({"masking": "bert"}, 'masking = "bert": renamed to "80-10-10"'),
        ({"packing": "no"}, 'packing = "no": must be "best-fit" or "examples"'),
        ({"masking": "roberta"}, 'masking = "roberta": must be "tokens", "with-repeats",'),
        ({"cut_at": "line", "packing": "examples"}, 'cut_at = "line": needs packing = "best-fit"'),
        ({"seed": -1}, "seed = -1: must be from 0"),
        ({"seed": "a"}, 'seed = "a": invalid type: string "a", expected i64'),
        ({"batch_size": 0}, "batch_size = 0: must be from 1"),
        ({"world_size": -(2**63)}, "world_size = -9223372036854775808: must be from 1"),
        ({"num_threads": 0}, "num_threads = 0: must be from 1 to 256"),
        ({"prefetch": 0}, "prefetch = 0: must be from 1 to 1024"),
        ({"epochs": 0}, "epochs = 0: must be from 1"),
        ({"cache_bytes": -1}, "cache_bytes = -1: must be from 0"),
        ({"batch_size": 2**24, "sequence_length": 32}, "batch_size = 16777216: must have at most"),
        ({"lanes": 0}, "lanes = 0: must be from 1 to 23"),
        ({"lanes": 100, "batch_size": 128}, "lanes = 100: must divide batch_size = 128; the next"),
        ({"lanes": 23, "epochs": 1}, "epochs = 1: needs lanes = 1, not 23"),
        (
            {"lanes": 23, "epochs": None},
            "lanes = 23: must be at most 1, the number of blocks of 262144 tokens in {corpus}",
        ),
    ],
)
def test_wrong_options_are_reported(open_loader, corpus, change, message):
    with pytest.raises(ValueError, match="^" + re.escape(message.replace("{corpus}", str(corpus)))):
        open_loader(**change)


def test_ctrl_c_interrupts_loading(open_loader):
    loader = open_loader(epochs=None)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            next(loader)
    assert next(loader).num_rows == 23


def test_loading_works_from_several_threads(open_loader):
    loader = open_loader()
    taken = []
    threads = [threading.Thread(target=lambda: taken.extend(loader)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(batch.num_rows for batch in taken) == loader.num_rows
