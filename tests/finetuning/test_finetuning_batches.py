"""Tokenized examples, chunks, order and packing, compared with a direct implementation of the rules."""

import collections
import math
import random

import numpy as np
import pytest
import squad_reference
from transformers import AutoTokenizer

import electra_fast as ef
from electra_fast.finetuning.batches import ROW_MULTIPLE, TrainingSet, num_steps, pack, pack_static, training_order
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import EncodedExamples, chunk_spans, encode, max_context

PUBLISHED = FinetuneSection(order="buffer")


def published_truncation(a, b, room):
    """Reimplements `_truncate_seq_pair` of the published code."""
    a = list(a)
    b = list(b)
    while len(a) + len(b) > room:
        (a if len(a) > len(b) else b).pop()
    return a, b


def test_pair_truncation_equals_published_code(tiny_vocab):
    tokenizer = ef.Tokenizer(tiny_vocab)
    rng = random.Random(0)
    texts = [tuple(" ".join(["a"] * rng.randrange(0, 20)) for _ in range(2)) for _ in range(300)]
    for max_length in (8, 13, 14):
        encoded = encode(tokenizer, texts, max_length)
        cut = 0
        for i, (first, second) in enumerate(texts):
            a, b = published_truncation(first.split(), second.split(), max_length - 3)
            cut += len(a) + len(b) < len(first.split()) + len(second.split())
            types = encoded.token_types[encoded.offsets[i] : encoded.offsets[i + 1]]
            assert types.tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1)
        assert encoded.num_truncated == cut > 0
        assert encoded.empty == tuple(i for i, pair in enumerate(texts) if not any(pair))


@pytest.mark.parametrize("count", [1, 2])
def test_ids_equal_transformers(tiny_vocab, tmp_path, count):
    (tmp_path / "vocab.txt").write_text(tiny_vocab.read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": true}')
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = [("The class statement.", "An object, a value"), ("", "Names and strings"), ("é ü", "é")]
    texts = [example[:count] for example in texts]
    encoded = encode(ef.Tokenizer(tiny_vocab), texts, 64)
    for i, example in enumerate(texts):
        expected = hf_tokenizer(*example)
        place = slice(encoded.offsets[i], encoded.offsets[i + 1])
        assert encoded.ids[place].tolist() == expected["input_ids"]
        assert encoded.token_types[place].tolist() == expected["token_type_ids"]


def test_number_of_steps_equals_published_code():
    cola = (8_551, 3, 804)
    stsb = (2 * 5_749, 10, 3_600)
    rte = (2_490, 10, 780)
    for examples, epochs, steps in (cola, stsb, rte):
        assert num_steps(FinetuneSection(epochs=float(epochs)), examples) == steps


def test_each_epoch_has_new_order_of_all_examples():
    order = training_order(FinetuneSection(epochs=3.0, batch_size=8), 20, seed=1)
    assert order.shape == (9, 8)
    epochs = order.reshape(3, 24)
    for epoch in epochs:
        assert sorted(epoch[:20].tolist()) == list(range(20)) and (epoch[20:] == -1).all()
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3
    assert (order == training_order(FinetuneSection(epochs=3.0, batch_size=8), 20, seed=1)).all()
    assert (order != training_order(FinetuneSection(epochs=3.0, batch_size=8), 20, seed=2)).any()


def test_published_order_uses_shuffle_buffer_of_100():
    """Every epoch repeats one order, and each draw is one of 100 buffered examples."""
    count = 1_000
    steps = num_steps(PUBLISHED, 1_000)
    order = training_order(PUBLISHED, count, seed=0).flatten()
    per_epoch = math.ceil(count / 32) * 32
    assert len(order) == steps * 32 == 3 * per_epoch
    assert (order == -1).sum() == pytest.approx(3 * (per_epoch - count), abs=2 * (per_epoch - count))
    counts = collections.Counter(order[order >= 0].tolist())
    assert set(counts.values()) <= {2, 3, 4} and len(counts) == count
    # Draws lag the stream by about 100 positions, and epochs overlap, so an example may occur twice within 200 draws.
    places = collections.defaultdict(list)
    for place, example in enumerate(order.tolist()):
        places[example].append(place)
    gaps = [
        b - a
        for example, positions in places.items()
        if example >= 0
        for a, b in zip(positions, positions[1:], strict=False)
    ]
    assert np.mean(gaps) == pytest.approx(per_epoch, rel=0.02)
    assert 100 < np.std(gaps) < 180  # two independent geometric waits with mean 100: sqrt(2) * 100


def test_shuffle_buffer_with_few_examples():
    """With fewer examples than entries, the buffer contains several copies, as in the published code."""
    order = training_order(FinetuneSection(order="buffer", batch_size=4), 5, seed=0)
    assert order.shape == (6, 4) and set(order.flatten().tolist()) <= {-1, 0, 1, 2, 3, 4}


def random_examples(count, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 60, count)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)  # each token id is its index + 1
    return EncodedExamples(ids, ids % 2, offsets, 0, ())


@pytest.mark.parametrize("parts, count", [(1, 32), (2, 32), (3, 2), (1, 0)])
def test_packed_batches_have_each_token_once(parts, count):
    encoded = random_examples(50)
    chosen = np.random.default_rng(1).permutation(50)[:count]
    packed = pack(encoded, chosen, parts)
    assert len(packed) == min(parts, count)
    assert sorted(item for part in packed for item in part.examples.tolist()) == list(range(count))
    for part in packed:
        ids, types, positions, segments, owners = part.columns
        for owner, (place, item) in enumerate(zip(part.first_tokens, part.examples, strict=True)):
            start = encoded.offsets[chosen[item]]
            end = encoded.offsets[chosen[item] + 1]
            span = slice(place, place + end - start)
            assert ids.flatten()[span].tolist() == encoded.ids[start:end].tolist()
            assert types.flatten()[span].tolist() == encoded.token_types[start:end].tolist()
            assert positions.flatten()[span].tolist() == list(range(end - start))
            assert len(set(segments.flatten()[span].tolist())) == 1
            assert (owners.flatten()[span] == owner).all()
            assert part.sources.flatten()[span].tolist() == list(range(start, end))
            assert {place, place + end - start} <= set(part.cu_seqlens.tolist())
        padding = segments == 0
        assert part.num_tokens == (~padding).sum() == encoded.lengths[chosen[part.examples]].sum()
        assert (ids[padding] == 0).all() and (part.sources[padding] == -1).all()
        assert (owners[padding] == len(part.examples)).all()
        assert part.longest == encoded.lengths[chosen[part.examples]].max()
        assert part.cu_seqlens[-1] == ids.size and (np.diff(part.cu_seqlens) > 0).all()
        # Row lengths differ by at most one example (60 tokens).
        assert padding.sum() <= len(ids) * 60


@pytest.mark.parametrize("per_token", [False, True])
def test_targets_and_weights_match_packed_examples(per_token):
    encoded = random_examples(20)
    chosen = np.random.default_rng(1).permutation(20)[:8]
    targets = np.arange(len(encoded.ids) if per_token else 20)
    training_set = TrainingSet(encoded, targets, 1.0 + targets % 3, per_token)
    for packed in (pack(encoded, chosen, 2), [pack_static(encoded, chosen, 64, 16)]):
        parts = training_set.batch(packed, chosen, "mean", 0).parts
        for part in parts:
            places = part.packed.sources if per_token else part.packed.examples
            is_real = places >= 0
            expected = places[is_real] if per_token else chosen[places[is_real]]
            assert (part.targets[is_real] == expected).all() and not part.weights[~is_real].any()
            scales = part.weights[is_real] / (1 + expected % 3)
            np.testing.assert_allclose(scales, scales[0], rtol=1e-6)
        assert sum(part.weights.sum() for part in parts) == pytest.approx(1)


def test_packing_has_little_padding():
    encoded = random_examples(640)
    filled = 0
    total = 0
    for batch in np.arange(640).reshape(20, 32):
        for part in pack(encoded, batch, 2):
            filled = filled + part.num_tokens
            total = total + part.columns[0].size
    assert filled / total > 0.95


@pytest.mark.parametrize("length, per_row", [(20, 3), (70, 2), (400, 1)])
def test_long_examples_of_equal_length_have_separate_rows(length, per_row):
    offsets = np.arange(13) * length
    ids = np.arange(1, offsets[-1] + 1, dtype=np.int32)
    encoded = EncodedExamples(ids, np.zeros_like(ids), offsets, 0, ())
    (part,) = pack(encoded, np.arange(12), are_alike=True)
    assert part.columns[0].shape == (12 // per_row, per_row * length)
    assert sorted(part.sources.ravel().tolist()) == list(range(12 * length))


@pytest.mark.parametrize("length, has_one_row", [(31, False), (32, True), (512, True), (513, False)])
def test_one_row_unless_examples_are_short_or_very_long(length, has_one_row):
    ids = np.zeros(16 * length, np.int32)
    encoded = EncodedExamples(ids, ids, np.arange(17) * length, 0, ())
    parts = pack(encoded, np.arange(16), 2, in_one_row=True)
    assert all((part.columns[0].shape == (1, 8 * length)) == has_one_row for part in parts)


def test_static_batches_have_few_shapes_and_every_token():
    encoded = random_examples(2_000)
    shapes = set()
    for chosen in np.random.default_rng(0).permutation(2_000)[:1_984].reshape(62, 32):
        part = pack_static(encoded, chosen, 64, 32)
        shapes.add((part.columns[0].shape, part.cu_seqlens.shape, part.first_tokens.shape))
        assert part.columns[0].shape[1] == 64 and len(part.columns[0]) % ROW_MULTIPLE == 0
        for place, item in zip(part.first_tokens, part.examples, strict=True):
            start = encoded.offsets[chosen[item]]
            end = encoded.offsets[chosen[item] + 1]
            assert part.columns[0].flatten()[place : place + end - start].tolist() == encoded.ids[start:end].tolist()
            assert place // 64 == (place + end - start - 1) // 64  # within one row
    assert len(shapes) <= 5


@pytest.mark.parametrize("count", [0, 5])
def test_static_batches_are_padded_with_empty_examples(count):
    encoded = random_examples(10)
    part = pack_static(encoded, np.arange(count), 64, 8)
    assert part.examples.tolist().count(-1) == 8 - count == 8 - len(part.examples[part.examples >= 0])
    assert part.columns[0].shape == (ROW_MULTIPLE, 64) and part.num_tokens == encoded.lengths[:count].sum()
    assert part.cu_seqlens[0] == 0 and part.cu_seqlens[-1] == part.columns[0].size
    assert (part.columns[4][part.sources < 0] == 8).all() and part.longest == 64
    assert (np.diff(part.cu_seqlens) >= 0).all() and (np.diff(part.cu_seqlens) <= 64).all()


@pytest.mark.parametrize("room, strides", [(1, [1, 2]), (4, range(1, 6)), (13, range(1, 15)), (381, [64, 128, 200])])
def test_chunks_equal_published_code(room, strides):
    for stride in strides:
        for num_tokens in [*range(3 * room if room < 100 else 0), 2 * room, 3 * room + 7, 5 * room - 1]:
            spans = chunk_spans(num_tokens, room, stride)
            assert spans == squad_reference.chunk_spans(num_tokens, room, stride)
            expected = [squad_reference.chunk_of_most_context(spans, token) for token in range(num_tokens)]
            assert max_context(spans, num_tokens).tolist() == expected
