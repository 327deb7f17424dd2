"""Fixtures that several test files share."""

import random
from pathlib import Path

import pytest

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def unique_documents() -> list[list[int]]:
    """Documents of 1 to 800 tokens, 40,000 in all, no id twice: a token names its place."""
    rng, documents, next_id = random.Random(3), [], len(SPECIALS)
    while next_id < 40_000:
        length = min(1 + int(rng.expovariate(1 / 150)), 800)
        documents.append(list(range(next_id, next_id + length)))
        next_id += length
    return documents


@pytest.fixture(scope="session")
def documents() -> list[list[int]]:
    return unique_documents()


@pytest.fixture
def corpus(tmp_path: Path, documents: list[list[int]]) -> Path:
    """Prepare a folder of those documents; each test has its own and may damage it."""
    from electra_fast.data import prepare

    words = [f"w{i}" for i in range(documents[-1][-1] + 1)]
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(SPECIALS + words[len(SPECIALS) :]) + "\n")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(" ".join(words[i] for i in ids) for ids in documents) + "\n")
    prepare([text], vocab=vocab, out=tmp_path / "shards")
    return tmp_path / "shards"
