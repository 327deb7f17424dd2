"""Contents of tokenizer folders. `test_tokenizer_settings` compares ids with `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from electra_fast.data.corpus import Tokenizer, write_tokenizer
from electra_fast.huggingface.tokenizer import FILES, copy_tokenizer, special_ids

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "",
    "Café déjà-vu, e\u0301 中文字符, control\x00 zero\u200bwidth tabs\tand\u3000wide 😀👍🏽",
]


def test_folder_describes_its_tokenizer(tmp_path: Path) -> None:
    """A byte-order mark does not belong to the first entry."""
    vocab = tmp_path / "vocab.txt"
    content = "\n".join([*SPECIAL, "the"]).encode()
    vocab.write_bytes(b"\xef\xbb\xbf" + content)
    write_tokenizer(tmp_path / "out", Tokenizer(vocab, cased=True), 77)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {*FILES} - {"added_tokens.json"}
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == content
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert type(auto).__name__ == "BertTokenizer"
    assert (auto.model_max_length, auto.do_lower_case) == (77, False)
    assert sorted(auto.all_special_ids) == [0, 1, 2, 3, 4]
    assert special_ids(tmp_path / "out") == {"unk": 1, "sep": 3, "pad": 0, "cls": 2, "mask": 4}
    tokens = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert [getattr(auto, name) for name in tokens] == SPECIAL
    assert (len(auto("the " * 100, truncation=True)["input_ids"]), auto.mask_token_id) == (77, 4)


def test_unusual_vocabulary_lines_are_read_as_in_tokenizers(tmp_path: Path) -> None:
    """Trailing space, CRLF, an empty line, duplicate lines, separators other than line ends, no final newline."""
    vocab = tmp_path / "vocab.txt"
    lines = [*SPECIAL, "the ", "cat\r", "", "sat", "the", "a\u2028b", "\u3000", "x\x1c", "dog"]
    vocab.write_bytes("\n".join(lines).encode())
    write_tokenizer(tmp_path / "out", Tokenizer(vocab, cased=False), 512)
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    expected = models.WordPiece.read_file(str(vocab))
    assert written.get_vocab() == expected
    assert (expected["the"], expected["cat"], expected["dog"]) == (9, 6, 13)


def byte_level(folder: Path, names: list[str], **parts: Any) -> Path:
    """Returns another kind of tokenizer.json: byte-level BPE, cased, with special tokens not marked as special."""
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
def test_tokenizer_json_keeps_rules_and_gets_template(tmp_path: Path, names: list[str]) -> None:
    limits = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    source = byte_level(tmp_path, names, truncation=limits, added_tokens=[])
    write_tokenizer(tmp_path / "out", Tokenizer(source), 512)
    assert not (tmp_path / "out" / "vocab.txt").exists()
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    plain = tokenizers.Tokenizer.from_file(str(source))
    plain.no_truncation()
    ids = special_ids(tmp_path / "out")
    for text in TEXTS:
        expected = plain.encode(text, add_special_tokens=False).ids
        assert auto(text)["input_ids"] == [ids["cls"], *expected, ids["sep"]], text
    assert auto("x" + names[-1]).input_ids.count(ids["mask"]) == (1 if "mask" in names[-1].lower() else 0)
    assert auto.mask_token_id == ids["mask"] and auto.pad_token_id == ids["pad"]
    assert json.loads(source.read_text(encoding="utf-8"))["post_processor"] is None


def test_existing_template_is_kept(tmp_path: Path) -> None:
    source = byte_level(tmp_path, SPECIAL)
    tokenizer = tokenizers.Tokenizer.from_file(str(source))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    tokenizer.save(str(source))
    write_tokenizer(tmp_path / "out", Tokenizer(source), 512)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        auto("a")["input_ids"] == tokenizer.encode("a").ids == [*tokenizer.encode("a", add_special_tokens=False).ids, 3]
    )


def test_folder_without_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="tokenizer.json: not found, nor vocab.txt or spm.model"):
        copy_tokenizer(tmp_path, tmp_path / "out", ["input_ids"])
    assert not (tmp_path / "out").exists()


def test_training_uses_the_exported_special_tokens(tmp_path: Path) -> None:
    """If a vocabulary has two candidates for a special token, all readers choose the same one."""
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["<pad>", "<unk>", "<s>", "</s>", "<cls>", "<sep>", "<mask>", "a"]), encoding="utf-8")
    tokenizer = Tokenizer(vocab)
    assert tokenizer.special_tokens == {"pad": 0, "unk": 1, "cls": 4, "sep": 5, "mask": 6}
    write_tokenizer(tmp_path / "out", tokenizer, 512)
    assert special_ids(tmp_path / "out") == tokenizer.special_tokens
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (auto.cls_token_id, auto.sep_token_id, auto.unk_token_id) == (4, 5, 1)
    assert auto("a x")["input_ids"] == [4, 7, 1, 5]
