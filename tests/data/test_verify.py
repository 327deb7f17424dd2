"""`verify` and the reader detect every flipped bit and every truncation of a corpus."""

import pytest

from electra_fast import _data
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.prepare import prepare

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "token", "shard"]


def prepare_small(tmp_path, **options):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(VOCAB))
    texts = ["token shard\n\ntoken", "shard", "token token", "shard shard"]
    prepare(iter(texts), vocab=vocab, out=tmp_path / "out", progress=False, **options)
    return tmp_path / "out"


@pytest.fixture
def corpus(tmp_path):
    return prepare_small(tmp_path, holdout=0.3)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def is_noticed(folder):
    try:
        return bool(_data.verify(str(folder))[2])
    except ValueError:
        return True


def test_a_sound_corpus(corpus):
    report = verify(corpus)
    assert report["files"] == len(files_of(corpus)) == 8
    assert report["bytes"] > 300 and report["content_hash"] == Corpus(corpus).content_hash


def test_every_flipped_bit_is_noticed(tmp_path):
    corpus = prepare_small(tmp_path)
    for path in files_of(corpus):
        sound = path.read_bytes()
        for at in range(len(sound)):
            # The crate's own tests cover every bit of the manifest.
            for bit in range(8) if path.suffix in (".tokens", ".lines") else [at % 8]:
                flipped = bytearray(sound)
                flipped[at] ^= 1 << bit
                path.write_bytes(flipped)
                assert is_noticed(corpus), (path.name, at, bit)
        path.write_bytes(sound)
    assert verify(corpus)


def test_a_file_cut_while_it_is_mapped_is_an_error_and_no_crash(tmp_path):
    folder = prepare_small(tmp_path)
    corpus = Corpus(folder)
    assert len(corpus[0]) == 3
    tokens = folder / "shard-000000-000.tokens"
    tokens.rename(tmp_path / "elsewhere")
    assert len(corpus[1]) == 1  # removed or replaced: the old file stays mapped
    (tmp_path / "elsewhere").rename(tokens)
    with tokens.open("r+b") as file:
        file.truncate(0)
    with pytest.raises(ValueError, match=r"shard-000000-000.tokens: 0 bytes instead of \d+: cut off while"):
        corpus[2]


def test_every_truncation_is_noticed(tmp_path):
    corpus = prepare_small(tmp_path)
    for path in files_of(corpus):
        sound = path.read_bytes()
        for data in [*(sound[:length] for length in range(len(sound))), sound + b"\0"]:
            path.write_bytes(data)
            if path.name == "manifest.json":
                with pytest.raises(ValueError, match="manifest"):
                    Corpus(path.parent)
            assert is_noticed(corpus), (path.name, len(data))
        path.write_bytes(sound)


def large(tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(VOCAB))
    prepare(iter(["token shard " * 5_000] * 20), vocab=vocab, out=tmp_path / "out", progress=False)
    return tmp_path / "out", next((tmp_path / "out").glob("*.tokens"))


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_damage_is_named_with_its_block(tmp_path):
    folder, tokens = large(tmp_path)
    flip(tokens, 3 * 65_536 + 17)
    flip(tokens, 5 * 65_536)
    with pytest.raises(ValueError, match=rf"{tokens.name}: block 3 of \d+ is damaged.*block 5 of .*2 damaged places"):
        verify(folder)


def test_reading_notices_damage_on_the_way(tmp_path):
    folder, tokens = large(tmp_path)
    flip(tokens, 3 * 65_536 + 17)
    corpus = Corpus(folder)
    assert len(corpus[0]) == 10_000
    with pytest.raises(ValueError, match=rf"{tokens.name}: block 3 of \d+ is damaged; restore"):
        list(corpus)
    with pytest.raises(ValueError, match="block 3"):  # again: reading a damaged block twice must not accept it
        list(corpus)


def test_a_cut_off_shard_is_refused_at_once(tmp_path):
    folder, tokens = large(tmp_path)
    tokens.write_bytes(tokens.read_bytes()[:200_000])
    with pytest.raises(ValueError, match=rf"{tokens.name}: 200000 bytes instead of \d+: truncated in block 3"):
        Corpus(folder)
    with pytest.raises(ValueError, match="truncated"):
        verify(folder)
    tokens.unlink()
    with pytest.raises(ValueError, match=f"{tokens.name}: missing, though the manifest names it"):
        Corpus(folder)


def test_a_shard_of_another_corpus_is_noticed(corpus, tmp_path):
    other = tmp_path / "other"
    prepare(
        iter(["shard token\n\nshard", "token", "shard token"]), vocab=corpus / "vocab.txt", out=other, progress=False
    )
    for shard in corpus.glob("*.tokens"):
        shard.write_bytes(next(other.glob("*.tokens")).read_bytes())
    with pytest.raises(ValueError, match=r"\.tokens"):
        verify(corpus)


def test_damage_in_the_holdout_is_noticed(corpus):
    for path in files_of(corpus / "holdout"):
        sound = path.read_bytes()
        flip(path, len(sound) // 2)
        with pytest.raises(ValueError, match=f"holdout/{path.name}"):
            verify(corpus)
        path.write_bytes(sound)


def test_a_lost_holdout_is_noticed(corpus):
    (corpus / "holdout/manifest.json").unlink()
    with pytest.raises(ValueError, match="holdout"):
        verify(corpus)
