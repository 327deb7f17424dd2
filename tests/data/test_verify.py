"""`verify` and readers report damaged files. The crate tests that every flipped bit and wrong length is detected."""

import json
import os

import pytest

from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.prepare import prepare


@pytest.fixture
def corpus(vocab, tmp_path):
    texts = ["w1 w2\n\nw1", "w2", "w1 w1", "w2 w2"]
    records = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join([*records, "{", "[]"]))
    options = {"vocab": vocab, "progress": False, "holdout": 0.3, "skip_bad_rows": 2}
    prepare(tmp_path / "a.jsonl", out=tmp_path / "out", **options)
    return tmp_path / "out"


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_flipped_bit_in_each_file_is_reported(corpus):
    report = verify(corpus)
    assert report["files"] == len(files_of(corpus)) == 10
    assert report["bytes"] > 300 and report["content_hash"] == Corpus(corpus).content_hash
    for path in files_of(corpus):
        sound = path.read_bytes()
        for at in (0, len(sound) // 2, len(sound) - 1):
            flip(path, at)
            with pytest.raises(ValueError, match=str(path.relative_to(corpus))):
                verify(corpus)
            path.write_bytes(sound)
    (corpus / "holdout/manifest.json").unlink()
    with pytest.raises(ValueError, match="holdout"):
        verify(corpus)


def test_file_truncated_while_mapped_is_an_error(corpus):
    opened = Corpus(corpus)
    assert len(opened[0]) > 0
    os.truncate(corpus / "shard-000000-000.tokens", 0)
    with pytest.raises(ValueError, match=r"shard-000000-000.tokens: 0 bytes instead of \d+: truncated while"):
        opened[1]


@pytest.fixture
def large(vocab, tmp_path):
    """A corpus of several blocks, and the file of its tokens."""
    prepare(iter(["w1 w2 " * 5_000] * 20), vocab=vocab, out=tmp_path / "out", progress=False)
    return tmp_path / "out", next((tmp_path / "out").glob("*.tokens"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_damage_is_reported_with_its_block(large):
    folder, tokens = large
    flip(tokens, 3 * 65_536 + 17)
    corpus = Corpus(folder)
    assert len(corpus[0]) == 10_000
    for _ in range(2):  # reading a damaged block twice must not accept it
        with pytest.raises(ValueError, match=rf"{tokens.name}: block 3 of \d+ is damaged; restore"):
            list(corpus)
    flip(tokens, 5 * 65_536)
    with pytest.raises(ValueError, match=rf"{tokens.name}: block 3 of \d+ is damaged.*block 5 of .*2 damaged places"):
        verify(folder)


def test_truncated_shard_is_refused_at_once(large):
    folder, tokens = large
    tokens.write_bytes(tokens.read_bytes()[:200_000])
    with pytest.raises(ValueError, match=rf"{tokens.name}: 200000 bytes instead of \d+: truncated in block 3"):
        Corpus(folder)
    with pytest.raises(ValueError, match="truncated"):
        verify(folder)
    tokens.unlink()
    with pytest.raises(ValueError, match=f"{tokens.name}: missing, although the manifest lists it"):
        Corpus(folder)
