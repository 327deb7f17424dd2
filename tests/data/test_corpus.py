"""Text to ids and documents: the same ids as the `tokenizers` package, the same documents from every format."""

import gzip
import json
import lzma
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

import electra_fast as ef
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.prepare import prepare
from electra_fast.errors import InputError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = "the token ##s shard mask café naïve cafe naive strasse ##ing mark ##ed un ##able Σοφος σοφος 東 京".split()
PLAIN = [chr(code) for code in range(33, 127)]
VOCAB = SPECIAL + PLAIN + [f"##{letter}" for letter in PLAIN if letter.isalnum()] + WORDS

ODD = [
    "",
    " ",
    "\t\r\n",
    "The unmasked tokens, sharding... [MASK] [CLS]x[SEP]",
    "Café NAÏVE cafe\u0301 nai\u0308ve ÅÄÖ İstanbul ǅ ß ẞ ﬁ Σοφος ΣΟΦΟΣ",
    "東京都 タワー 한국어 ไทย हिन्दी עברית العربية",
    "zero\u200bwidth\u200djoiner \u00ad soft \ufeff bom \u2028 line \u0000 nul \x07 bell \ufffd bad",
    "🦀👩‍👩‍👧 e\u0301\u0302\u0303 \U000e0001 \U0002a6df",
    "x" * 100 + " " + "x" * 101 + " " + "é" * 101,
    "a_b-c'd\"e`f~g^h|i<j>k $5 +1=2 «q» „r“ …",
    "\u3000ideographic\u3000space\u00a0nbsp\u1680ogham",
]


@pytest.fixture
def vocab(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(VOCAB) + "\n", encoding="utf-8")
    return path


def oracle(lowercase, strip_accents=None):
    """The same tokenizer in the `tokenizers` package, without special tokens in text."""
    model = tokenizers.models.WordPiece({entry: i for i, entry in enumerate(VOCAB)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def random_texts(count):
    rng = random.Random(11)
    planes = [(0, 0x250), (0x250, 0x600), (0x600, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x2FFFF), (32, 127)]
    return ["".join(chr(rng.randint(*rng.choice(planes))) for _ in range(rng.randint(1, 60))) for _ in range(count)]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strip_accents", [None, True, False])
def test_ids_equal_the_tokenizers_package(vocab, lowercase, strip_accents):
    tokenizer = Tokenizer(vocab, cased=not lowercase, strip_accents=strip_accents)
    texts = ODD + random_texts(500)
    reference = oracle(lowercase, strip_accents)
    assert repr(tokenizer).startswith(f"Tokenizer({str(vocab)!r}): {len(VOCAB)} entries, ")
    assert ("lowercases" in repr(tokenizer)) == lowercase and "without the fast path" not in repr(tokenizer)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == reference.encode(text).ids, repr(text)


def test_tokenizer_json_ignores_truncation_padding_and_special_tokens(vocab, tmp_path):
    saved = oracle(True)
    saved.add_special_tokens(SPECIAL)
    saved.enable_truncation(4)
    saved.enable_padding(length=9)
    saved.save(str(tmp_path / "tokenizer.json"))
    texts = ODD + random_texts(100)
    from_json = Tokenizer(tmp_path / "tokenizer.json")
    from_vocab = Tokenizer(vocab, cased=False)
    pairs = zip(from_json.encode_batch(texts), from_vocab.encode_batch(texts), strict=True)
    assert all(a.tolist() == b.tolist() for a, b in pairs)
    with pytest.raises(ValueError, match="cased and strip_accents apply to a vocab.txt only"):
        Tokenizer(tmp_path / "tokenizer.json", cased=False)


def test_tokenizer_properties(vocab):
    tokenizer = Tokenizer(vocab)
    assert tokenizer.options == {"cased": True, "strip_accents": False}  # "A" is an ordinary entry
    assert tokenizer.special_tokens == {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    assert (tokenizer.vocab_size, tokenizer.fast) == (len(VOCAB), True)
    [ids] = tokenizer.encode_batch(["unable tokens"])
    assert [tokenizer.id_to_token(i) for i in ids] == ["un", "##able", "token", "##s"]
    assert tokenizer.decode(ids) == "unable tokens"
    with pytest.raises(IndexError, match="not in a vocabulary of"):
        tokenizer.id_to_token(10_000)


def other_rules():
    """Configurations without a fast path, each with the reported reason."""
    yield "normalizer is not BertNormalizer", lambda its: setattr(its, "normalizer", tokenizers.normalizers.NFKC())
    splitter = tokenizers.pre_tokenizers.Whitespace()
    yield "pre-tokenizer is not BertPreTokenizer", lambda its: setattr(its, "pre_tokenizer", splitter)
    yield "added tokens, or some that match normalized text", lambda its: its.add_tokens(["the tok"])
    twice = tokenizers.processors.TemplateProcessing(single="$A $A", pair="$A $B")
    yield "post-processor may change", lambda its: setattr(its, "post_processor", twice)


@pytest.mark.parametrize(
    ("reason", "change"), [*other_rules()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_other_rules_use_the_crate_and_prepare_reports_it(vocab, tmp_path, capfd, reason, change):
    saved = oracle(lowercase=True)
    text = "the tokens shard the ﬁrst maskable café"
    saved.add_special_tokens(SPECIAL)
    saved.save(str(tmp_path / "fast.json"))
    change(saved)
    saved.save(str(tmp_path / "slow.json"))
    (tmp_path / "text.txt").write_text(text)
    for name, fast in (("fast", True), ("slow", False)):
        tokenizer = Tokenizer(tmp_path / f"{name}.json")
        assert (tokenizer.fast, tokenizer.fallback_reason is None) == (fast, fast)
        prepare([tmp_path / "text.txt"], vocab=tokenizer, out=tmp_path / name)
        assert ("tokenizers crate" in capfd.readouterr().err) is not fast
    assert reason in tokenizer.fallback_reason
    assert tokenizer.encode_batch([text])[0].tolist() == saved.encode(text, add_special_tokens=False).ids


DOCUMENTS = [
    "The first token.\nIts second line, marked.",
    "Café — naïve 東京\nx\nunable",
    *(f"shard {n}\nmask {n * 7} the token" for n in range(300)),
]


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def halves(compress):
    """Two concatenated members or frames, as from `cat a.gz b.gz`."""
    return lambda data: compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


COMPRESS = {"": bytes, ".gz": halves(gzip.compress), ".zst": halves(zstd), ".xz": halves(lzma.compress)}


def arrow_bytes(open_writer, kind=None):
    """A table in several chunks, as a file or stream."""
    table = pa.table({"id": list(range(len(DOCUMENTS))), "text": pa.array(DOCUMENTS, kind or pa.string())})
    sink = pa.BufferOutputStream()
    with open_writer(sink, table.schema) as writer:
        for start in range(0, len(table), 64):
            writer.write_table(table[start : start + 64])
    return sink.getvalue().to_pybytes()


FORMATS = {
    ".txt": lambda: ("\ufeff" + "\r\n \r\n\r\n".join(DOCUMENTS).replace("\n", "\r\n")).encode(),
    ".jsonl": lambda: "\n".join(json.dumps({"id": 1, "text": text, "x": {"text": 2}}) for text in DOCUMENTS).encode(),
    ".parquet": lambda: arrow_bytes(pq.ParquetWriter),
    ".arrow": lambda: arrow_bytes(pa.ipc.new_stream),
    "-file.arrow": lambda: arrow_bytes(pa.ipc.new_file),
    "-large.parquet": lambda: arrow_bytes(pq.ParquetWriter, pa.large_string()),
    "-dict.parquet": lambda: arrow_bytes(pq.ParquetWriter, pa.dictionary(pa.int32(), pa.string())),
}


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        *((name, "") for name in FORMATS),
        *((".jsonl", suffix) for suffix in (".gz", ".zst", ".xz")),
        (".parquet", ".gz"),
    ],
)
def test_all_formats_give_the_same_corpus(vocab, tmp_path, name, compression):
    path = tmp_path / f"data{name}{compression}"
    path.write_bytes(COMPRESS[compression](FORMATS[name]()))
    prepare([path], vocab=vocab, out=tmp_path / "out", progress=False)
    prepare(iter(DOCUMENTS), vocab=vocab, out=tmp_path / "plain", progress=False)
    documents = len(DOCUMENTS)
    tokens = Corpus(tmp_path / "plain").num_tokens
    assert f": {documents} documents, {tokens:,} tokens, {len(VOCAB)} entries" in repr(Corpus(tmp_path / "plain"))
    corpus = Corpus(tmp_path / "out")
    assert corpus.content_hash == Corpus(tmp_path / "plain").content_hash
    expected = Tokenizer(vocab).encode_batch(DOCUMENTS)
    assert [ids.tolist() for ids in corpus] == [ids.tolist() for ids in expected]


def prepared(tmp_path, vocab, text, **options):
    path = tmp_path / "a.txt"
    path.write_bytes(text)
    prepare([path], vocab=vocab, out=tmp_path / "out", progress=False, **options)
    corpus = Corpus(tmp_path / "out")
    tokenizer = Tokenizer(vocab)
    return [tokenizer.decode(ids) for ids in corpus], corpus


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        (b"\n\nthe token\nshard\n\n \t\nmask\n\n", {"documents": "blank-line"}, ["the token shard", "mask"]),
        (b"\n\nthe token\nshard\n\n \t\nmask\n\n", {"documents": "line"}, ["the token", "shard", "mask"]),
        (b"\n\nthe token\nshard\n\n \t\nmask\n\n", {"documents": "file"}, ["the token shard mask"]),
        (b"mask\xff shard\n", {"invalid_utf8": "replace"}, ["mask shard"]),
    ],
)
def test_documents_of_a_text(vocab, tmp_path, text, options, expected):
    assert prepared(tmp_path, vocab, text, **options)[0] == expected


def test_documents_end_at_the_end_of_a_file(vocab, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in [("b", "token"), ("a", "the"), ("c", "shard\n")]:
        (folder / f"{name}.txt").write_text(text)
    for already in (False, True):  # the second time, the folder contains the corpus too
        report = prepare([folder], vocab=vocab, out=folder / "deep/out", progress=False)
        assert report.already_complete == already
    tokenizer = Tokenizer(vocab)
    corpus = Corpus(folder / "deep/out")
    assert [tokenizer.decode(ids) for ids in corpus] == ["the", "token", "shard"]


def test_empty_documents_are_counted_and_skipped(vocab, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "mask"}\n{"text": ""}\n\n{"text": null}\n{"text": "\\u200b \\n"}\n{"text": "the"}')
    report = prepare([path], vocab=vocab, out=tmp_path / "out", progress=False)
    assert (report.num_documents, report.empty_documents) == (2, 3)


def test_very_long_lines_have_the_same_ids(vocab, tmp_path):
    rng = random.Random(2)
    line = " ".join(rng.choice(["tokens", "unable", "café", "東京", "x" * 30, "e\u0301"]) for _ in range(40_000))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": line}))
    (tmp_path / "b.txt").write_text(line)
    prepare([tmp_path / "a.jsonl", tmp_path / "b.txt"], vocab=vocab, out=tmp_path / "out", progress=False)
    from_json, from_text = Corpus(tmp_path / "out")
    assert from_json.tolist() == from_text.tolist() == Tokenizer(vocab).encode_batch([line])[0].tolist()


def test_corpus_is_a_sequence(vocab, tmp_path):
    _, corpus = prepared(tmp_path, vocab, b"the\n\ntoken token\n\nshard shard shard\n")
    assert len(corpus) == 3 and corpus.num_tokens == 6 and corpus.shards == [(3, 6)]
    assert corpus[-1].tolist() == corpus[np.int64(2)].tolist() and len(corpus[-1]) == 3
    assert [len(ids) for ids in corpus[1:]] == [2, 3]
    assert len(corpus.content_hash) == 32 and corpus.holdout is None
    assert corpus.vocab_size == len(VOCAB) and corpus.special_tokens["mask"] == 4
    assert Tokenizer.of(corpus).options == corpus.tokenizer_options
    for outside in (3, -4):
        with pytest.raises(IndexError, match="out of range; the corpus has 3 documents"):
            corpus[outside]


def test_replaced_vocabulary_in_a_corpus_is_refused(vocab, tmp_path):
    prepare(iter(["some text"]), vocab=vocab, out=tmp_path / "shards", progress=False)
    (tmp_path / "shards/vocab.txt").write_text("\n".join(VOCAB[:-1]))
    for opened in (lambda: Tokenizer.of(Corpus(tmp_path / "shards")), lambda: Tokenizer(tmp_path / "shards")):
        with pytest.raises(InputError, match=r"vocab\.txt: not the file that the corpus.s manifest describes"):
            opened()


def test_token_counts_equal_counts_of_documents(tmp_path):
    unused = [f"unused{n}" for n in range(70_000)]  # ids of four bytes
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB + unused))
    prepare(iter([*DOCUMENTS, "[MASK] \u0e01"]), vocab=tmp_path / "vocab.txt", out=tmp_path / "out", progress=False)
    corpus = Corpus(tmp_path / "out")
    counts = corpus.token_counts()
    assert counts.dtype == np.int64 and counts.sum() == corpus.num_tokens
    assert np.array_equal(counts, np.bincount(np.concatenate(list(corpus)), minlength=len(VOCAB + unused)))
    assert counts[1] > 0 and not counts[[0, 2, 3, 4]].any()  # [UNK] is the only special token that is stored


BAD_FILES = {
    "bad.txt": (b"fine\nab\xffc\n", r"bad\.txt: invalid UTF-8 at byte 7 of the text.*--invalid-utf8 replace"),
    "no-mark.jsonl": ('{"text": "мир"}\n'.encode("utf-16-be"), r"UTF-16 without a byte .* iconv -f UTF-16BE -t UTF-8"),
    "bad.jsonl": (b'{"text": "a"}\n\n{"text": "b}\n', r"bad\.jsonl: line 3, column \d+: broken JSON: EOF"),
    "field.jsonl": (b'{"body": "a", "id": 3}\n', r'line 1: no text field "text"; available: body, id'),
    "cut.txt.gz": (gzip.compress(b"token " * 999)[:-9], r"cut\.txt\.gz: the gzip data is truncated"),
    "cut.txt.zst": (zstd(b"token " * 999)[:-3], r"cut\.txt\.zst: the zstd data is truncated"),
    "cut.txt.xz": (lzma.compress(b"token " * 999)[:-9], r"cut\.txt\.xz: the xz data is truncated"),
    "not.txt.gz": (b"plain text", r"not\.txt\.gz: is not gzip data"),
    "bad.parquet": (b"PAR1 no", r"bad\.parquet: cannot be read as Parquet"),
    "bad.arrow": (b"no", r"bad\.arrow: cannot be read as Arrow"),
    "page.pdf": (b"x", r"page\.pdf: unknown kind of file; supported: \.txt"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_reported_by_name(vocab, tmp_path, name):
    data, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        prepare([tmp_path / name], vocab=vocab, out=tmp_path / "out", progress=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize(("name", "encoding"), [("a.txt", "utf-16"), ("a.jsonl.xz", "utf-16-be")])
def test_utf_16_gives_the_same_text_as_utf_8(vocab, tmp_path, name, encoding):
    texts = ["tokens 😀 un\nmask", "able shard"]
    text = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in texts)
    text = text if "jsonl" in name else "\r\n\r\n".join(texts)
    pack = lzma.compress if name.endswith("xz") else bytes
    for out, data in {"8": text.encode(), "16": ("\ufeff" * (encoding != "utf-16") + text).encode(encoding)}.items():
        (tmp_path / out).mkdir()
        (tmp_path / out / name).write_bytes(pack(data))
        prepare([tmp_path / out], vocab=vocab, out=tmp_path / out / "shards", progress=False)
        ef.vocab([tmp_path / out / name], out=tmp_path / out / "v.json", size=60, min_frequency=1, progress=False)
    assert Corpus(tmp_path / "16/shards").content_hash == Corpus(tmp_path / "8/shards").content_hash
    assert len(Corpus(tmp_path / "16/shards")) == 2
    assert (tmp_path / "16/v.json").read_bytes() == (tmp_path / "8/v.json").read_bytes()


def test_table_without_text_is_refused(vocab, tmp_path):
    for name, table, message in [
        ("numbers", {"text": [1]}, "no column of strings"),
        ("other", {"body": ["a"], "n": [1]}, 'no text field "text"; available: body'),
        ("kind", {"text": [1], "body": ["a"]}, 'column "text" is Int64, not a string; columns of strings: body'),
        ("list", {"text": [["a"]], "map": pa.array([[("a", "b")]], pa.map_("string", "string"))}, "no column of"),
    ]:
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table(table), path)
        with pytest.raises(ValueError, match=f"{name}.parquet: {message}"):
            prepare([path], vocab=vocab, out=tmp_path / "out", progress=False)


def test_missing_inputs_and_corpora(vocab, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/picture.png").write_bytes(b"x")
    for name, error, message in (
        ("none.txt", FileNotFoundError, "No files matched"),
        ("folder/*.txt", ValueError, r"No files matched .*\*\.txt"),
        ("folder", ValueError, r"No files matched .*1 of other kinds"),
    ):
        with pytest.raises(error, match=message):
            prepare([tmp_path / name], vocab=vocab, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "begun/parts").mkdir(parents=True)
    for name, message in {
        "none": "electra-fast prepare",
        "folder": r"manifest\.json: not found; it is not a corpus",
        "begun": "unfinished corpus",
    }.items():
        with pytest.raises(FileNotFoundError, match=message):
            Corpus(tmp_path / name)
