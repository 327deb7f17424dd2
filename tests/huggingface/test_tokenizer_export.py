"""Tokenizer folders: ids equal those of `tokenizers` and `AutoTokenizer` on unusual text; what is rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from electra_fast.data.corpus import Tokenizer
from electra_fast.huggingface.tokenizer import copy_tokenizer, special_ids, write_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "",
    "   \t\n ",
    "Café déjà-vu, naïve Ångström İstanbul STRASSE straße",
    "e\u0301 combining a\u030a; n\u0303o",
    "中文字符和English混排，日本語テキスト 한국어 텍스트",
    "control\x00 chars\x07 and\x1b escapes\x7f soft\u00adhyphen zero\u200bwidth \ufeffbom \ufffd",
    "tabs\tand\r\nlines\u2028sep\u00a0nbsp\u3000wide",
    "don't U.S.A. $3.50 50% a_b C++ <tag> [brackets] {x}|~^`",
    "emoji 😀👍🏽 and ﬁ ligature ½ ² ①",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101,
    "Ελληνικά ΣΊΣΥΦΟΣ русский ЁЖ עברית العربية हिन्दी ไทย",
    "[MASK] in the text, [CLS] too",
    "\U00020000 \U0002a6d6 rare ideographs \u4e00\u9fff",
]


def vocabulary() -> list[str]:
    """Special tokens, every character of the texts (cased and uncased, with and without accents), and some pieces."""
    strip = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    text = "".join(TEXTS)
    variants = (text, text.lower(), strip.normalize_str(text), strip.normalize_str(text).lower())
    characters = sorted({c for variant in variants for c in variant if not c.isspace() and c not in "😀Ε"})
    pieces = ["the", "The", "qu", "##ick", "cafe", "café", "caf", "straße", "##ing", "中文"]
    return [*SPECIAL, *characters, *(f"##{c}" for c in characters), *(p for p in pieces if p not in characters)]


def write_vocabulary(folder: Path) -> Path:
    path = folder / "vocab.txt"
    path.write_text("\n".join(vocabulary()) + "\n", encoding="utf-8")
    return path


def reference(vocab: Path, lowercase: bool, strip_accents: bool | None) -> tokenizers.Tokenizer:
    """The reference of the data engine: the tokenizers crate with BERT's rules."""
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece.from_file(str(vocab), unk_token="[UNK]", max_input_chars_per_word=100)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ids = [tokenizer.token_to_id(name) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=list(zip(("[CLS]", "[SEP]"), ids, strict=True)),
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def test_ids_equal_those_of_tokenizers_and_of_transformers(tmp_path: Path) -> None:
    """In a folder and in a copy of it; `test_tokenizer_settings` has other kinds and settings."""
    vocab = write_vocabulary(tmp_path)
    write_tokenizer(tmp_path / "one", Tokenizer(vocab, lowercase=True, strip_accents=False), 512)
    copy_tokenizer(tmp_path / "one", tmp_path / "two", ["input_ids", "attention_mask"])
    expected = reference(vocab, lowercase=True, strip_accents=False)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "two")
    assert auto.is_fast and auto.vocab_size == len(vocabulary()) and list(auto("a")) == ["input_ids", "attention_mask"]
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "one" / "tokenizer.json"))
    for text in TEXTS:
        assert written.encode(text).ids == auto(text)["input_ids"] == expected.encode(text).ids, text
    pair = expected.encode("the", "fox")
    for found in (written.encode("the", "fox"), auto("the", "fox").encodings[0]):
        assert (found.ids, found.type_ids) == (pair.ids, pair.type_ids)
    assert written.decode(written.encode("the quick").ids) == "the quick"


def test_the_folder_says_what_it_is(tmp_path: Path) -> None:
    """A byte-order mark is no part of the first entry."""
    vocab = write_vocabulary(tmp_path)
    content = vocab.read_bytes()
    vocab.write_bytes(b"\xef\xbb\xbf" + content)
    write_tokenizer(tmp_path / "out", Tokenizer(vocab, lowercase=False), 77)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == content
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(auto).__name__ == "BertTokenizer"
    assert (auto.model_max_length, auto.do_lower_case) == (77, False)
    assert sorted(auto.all_special_ids) == [0, 1, 2, 3, 4]
    assert special_ids(tmp_path / "out") == {"unk": 1, "sep": 3, "pad": 0, "cls": 2, "mask": 4}
    tokens = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert [getattr(auto, name) for name in tokens] == SPECIAL
    assert (len(auto("the " * 100, truncation=True)["input_ids"]), auto.mask_token_id) == (77, 4)


def test_odd_lines_of_a_vocabulary_are_read_as_tokenizers_reads_them(tmp_path: Path) -> None:
    """Trailing space, CRLF, an empty line, duplicate lines, separators that are not line ends, no final newline."""
    vocab = tmp_path / "vocab.txt"
    lines = [*SPECIAL, "the ", "cat\r", "", "sat", "the", "a\u2028b", "\u3000", "x\x1c", "dog"]
    vocab.write_bytes("\n".join(lines).encode())
    write_tokenizer(tmp_path / "out", Tokenizer(vocab, lowercase=True), 512)
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    expected = models.WordPiece.read_file(str(vocab))
    assert written.get_vocab() == expected
    assert (expected["the"], expected["cat"], expected["dog"]) == (9, 6, 13)


def byte_level(folder: Path, names: list[str], **parts: Any) -> Path:
    """Another kind of tokenizer.json: byte-level BPE, cased, with special tokens not marked as special."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3,
        trainers.BpeTrainer(vocab_size=400, special_tokens=names, initial_alphabet=alphabet, show_progress=False),
    )
    path = folder / "own.json"
    content = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(content | parts), encoding="utf-8")
    return path


@pytest.mark.parametrize("names", [SPECIAL, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]])
def test_a_tokenizer_json_keeps_its_rules_and_gets_a_template(tmp_path: Path, names: list[str]) -> None:
    limits = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    source = byte_level(tmp_path, names, truncation=limits, added_tokens=[])
    write_tokenizer(tmp_path / "out", Tokenizer(source), 512)
    assert not (tmp_path / "out" / "vocab.txt").exists()
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = tokenizers.Tokenizer.from_file(str(source))
    plain.no_truncation()
    ids = special_ids(tmp_path / "out")
    for text in TEXTS[:-2]:
        expected = plain.encode(text, add_special_tokens=False).ids
        assert auto(text)["input_ids"] == [ids["cls"], *expected, ids["sep"]], text
    assert auto("x" + names[-1]).input_ids.count(ids["mask"]) == (1 if "mask" in names[-1].lower() else 0)
    assert auto.mask_token_id == ids["mask"] and auto.pad_token_id == ids["pad"]
    assert json.loads(source.read_text(encoding="utf-8"))["post_processor"] is None


def test_a_template_that_is_there_stays(tmp_path: Path) -> None:
    source = byte_level(tmp_path, SPECIAL)
    tokenizer = tokenizers.Tokenizer.from_file(str(source))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    tokenizer.save(str(source))
    write_tokenizer(tmp_path / "out", Tokenizer(source), 512)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        auto("a")["input_ids"] == tokenizer.encode("a").ids == [*tokenizer.encode("a", add_special_tokens=False).ids, 3]
    )


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json: not found, nor vocab.txt, nor either of them in"):
        copy_tokenizer(tmp_path, tmp_path / "out", ["input_ids"])
    assert not (tmp_path / "out").exists()


def test_the_model_trains_on_the_names_that_are_exported(tmp_path: Path) -> None:
    """A vocabulary with two candidates for a special token: all readers choose the same one."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<mask>", "a"]), encoding="utf-8")
    tokenizer = Tokenizer(vocab)
    assert tokenizer.special_tokens == {"pad": 0, "unk": 1, "cls": 4, "sep": 5, "mask": 6}
    write_tokenizer(tmp_path / "out", tokenizer, 512)
    assert special_ids(tmp_path / "out") == tokenizer.special_tokens
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (auto.cls_token_id, auto.sep_token_id, auto.unk_token_id) == (4, 5, 1)
    assert auto("a x")["input_ids"] == [4, 7, 1, 5]
