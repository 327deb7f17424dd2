"""`packing = "examples"` compared with the published builder's rules, reimplemented here in plain Python."""

import itertools
import random
import statistics
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from test_loader import digest

from electra_fast import prepare
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.prepare_report import contents

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS = 2
SEP = 3
NUM_TOKENS = 60_000


@dataclass
class Example:
    """An example, without special tokens."""

    first: list[int]
    second: list[int]

    @property
    def length(self):
        return len(self.first) + 2 + (len(self.second) + 1 if self.second else 0)


class PublishedBuilder:
    """Builds examples from lines with the rules of the published code, for one file of documents."""

    def __init__(self, max_length, rng):
        self.max_length = max_length
        self.rng = rng
        self.target_length = max_length
        self.lines = []

    def examples(self, documents):
        """All examples of the documents; an empty line or the end of a document completes one."""
        for document in documents:
            for line in [*document, []]:
                if line:
                    self.lines.append(line)
                if self.lines and (not line or sum(map(len, self.lines)) >= self.target_length):
                    yield self.example()

    def example(self):
        """Assigns the lines to two segments, truncates them, and draws the next target length."""
        one_segment = self.rng.random() < 0.1
        target_first = 100_000 if one_segment else (self.target_length - 3) // 2
        first = []
        second = []
        for line in self.lines:
            if not first or len(first) + len(line) < target_first:
                first = first + line
            elif not second and len(first) < target_first and self.rng.random() < 0.5:
                first = first + line
            else:
                second = second + line
        first = first[: self.max_length - 2]
        second = second[: max(0, self.max_length - len(first) - 3)]
        self.lines = []
        short = self.rng.random() < 0.05
        self.target_length = self.rng.randint(5, self.max_length) if short else self.max_length
        return Example(first, second)


@pytest.fixture(scope="module")
def documents():
    """Documents with lines of 1 to 300 tokens, some blank; ids are unique, so a token identifies its position."""
    rng = random.Random(4)
    ids = itertools.count(len(SPECIAL_TOKENS))
    documents = []
    while sum(map(len, itertools.chain(*documents))) < NUM_TOKENS:
        lengths = [min(1 + int(rng.lognormvariate(2.6, 1.1)), 300) for _ in range(1 + int(rng.expovariate(1 / 12)))]
        lengths = [7, *(0 if rng.random() < 0.1 else length for length in lengths), 3]
        documents.append([list(itertools.islice(ids, length)) for length in lengths])
    return documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("lines")
    words = [f"w{i}" for i in range(documents[-1][-1][-1] + 1)]
    vocab = folder / "vocab.txt"
    vocab.write_text("\n".join(SPECIAL_TOKENS + words[len(SPECIAL_TOKENS) :]) + "\n")
    texts = ("\n".join(" ".join(words[i] for i in line) for line in document) for document in documents)
    prepare(texts, vocab=vocab, out=folder / "shards", cased=False, progress=False)
    return folder / "shards"


@pytest.fixture
def open_loader(corpus):
    def open_with(**changes):
        options = {"packing": "examples", "masking": "with-repeats", "mask_prob": 0.15}
        options |= {"sequence_length": 64, "batch_size": 41, "seed": 5, "epochs": 1}
        return BatchLoader(corpus, **(options | changes))

    return open_with


def read(loader):
    """The examples of all batches, unmasked, with every column checked."""
    examples = []
    for batch in loader:
        tensors = to_torch(batch)
        rows, length = tensors["input_ids"].shape
        ids = tensors["input_ids"].clone()
        used = tensors["masked_weights"] > 0
        row = torch.arange(rows)[:, None].expand_as(used)
        ids[row[used], tensors["masked_positions"][used].long()] = tensors["masked_ids"][used]
        expected = []
        for tokens in ids.tolist():
            seps = [place for place, token in enumerate(tokens) if token == SEP]
            assert tokens[0] == CLS and len(seps) in (1, 2) and CLS not in tokens[1:]
            example = Example(tokens[1 : seps[0]], tokens[seps[0] + 1 : seps[-1]])
            assert not any(tokens[seps[-1] + 1 :])  # padding
            assert example.first and (example.second or len(seps) == 1)
            examples.append(example)
            used_places = example.length
            first = len(example.first) + 2
            padding = [0] * (length - used_places)
            types = [0] * first + [1] * (used_places - first) + padding
            expected.append((types, [*range(used_places), *padding], [1] * used_places + padding))
        columns = (tensors[name].tolist() for name in ("token_type_ids", "position_ids", "segment_ids"))
        assert list(zip(*columns, strict=True)) == expected
        assert pa.record_batch(batch).column("segment_lengths").to_pylist() == [[sum(row[2])] for row in expected]
        assert tensors["cu_seqlens"][-1] == rows * length
    return examples


def test_statistics_match_the_published_rules(open_loader, documents):
    length = 48

    def statistics_of(examples):
        lengths = [example.length for example in examples]
        return {
            "examples": len(examples),
            "kept": sum(len(example.first) + len(example.second) for example in examples),
            "one segment": statistics.mean(not example.second for example in examples),
            "length": statistics.mean(lengths),
            "length squared": statistics.mean(n * n for n in lengths),
            "whole rows": statistics.mean(n == length for n in lengths),
            "segment 1": statistics.mean(len(example.first) for example in examples),
            "segment 2": statistics.mean(len(example.second) for example in examples),
            "segment 2, squared": statistics.mean(len(example.second) ** 2 for example in examples),
        }

    seeds = range(40)
    measured = [statistics_of(read(open_loader(sequence_length=length, seed=seed, batch_size=1000))) for seed in seeds]
    published = [
        statistics_of(list(PublishedBuilder(length, random.Random(seed)).examples(documents))) for seed in seeds
    ]
    for name in measured[0]:
        a = [values[name] for values in measured]
        b = [values[name] for values in published]
        error = ((statistics.variance(a) + statistics.variance(b)) / len(seeds)) ** 0.5
        assert abs(statistics.mean(a) - statistics.mean(b)) < 4 * error, (name, statistics.mean(a), statistics.mean(b))
        assert 0.5 < statistics.stdev(a) / statistics.stdev(b) < 2, name


def test_contents_match_the_batches(open_loader, corpus, documents):
    examples = read(open_loader())
    rows = contents(corpus, "examples", 64, seed=5)
    assert rows.rows == len(examples)
    assert rows.tokens == sum(len(example.first) + len(example.second) for example in examples)
    assert rows.fill == pytest.approx(sum(example.length for example in examples) / len(examples) / 64)
    whole = contents(corpus, "best-fit", 64)
    assert whole.tokens == sum(map(len, itertools.chain(*documents)))
    assert whole.fill > 0.99 and whole.rows == BatchLoader(corpus, sequence_length=64, batch_size=1).num_rows


def test_resumed_loader_continues_exactly_and_epochs_differ(open_loader):
    size = open_loader().num_rows
    loader = open_loader(epochs=2, batch_size=size)
    resumed = open_loader(num_threads=2, epochs=2)
    first = next(loader)
    state = loader.state()
    rest = list(loader)
    resumed.restore(state)
    assert digest(list(resumed)) == digest(rest)
    epochs = ({tuple(example.first) for example in read(batches)} for batches in ([first], rest))
    assert next(epochs) != next(epochs)
    with pytest.raises(ValueError, match="packing=examples"):
        open_loader(packing="best-fit").restore(state)


def test_batches_have_fixed_bytes(open_loader):
    # A different digest means that existing runs cannot resume exactly: say so in the changelog.
    golden = (Path(__file__).parents[1] / "golden" / "packing.txt").read_text()
    assert f"examples {digest(list(open_loader(epochs=2)))}\n" == golden
