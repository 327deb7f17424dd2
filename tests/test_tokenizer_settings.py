"""Tokenizers of every kind under every setting: ids are those of `transformers`, or one line refuses the setting.

The exception is the rule for names in text, which is checked directly: the five tokens that the model uses for itself
never come from text, and every other added token stays whole.
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from electra_fast import Corpus, Tokenizer, prepare
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

WORDS = "the cat sat in new york ann annual İstanbul café ﬁn Straße naïve mask pad cls ΣΟΦΟΣ мир йод हिन्दी ไทย 한국".split()
CHARACTERS = sorted({*"".join(WORDS), *"".join(WORDS).lower(), *"東京都はか.,-!<>[]/_▁aeio0189"})
ALPHABET = [*CHARACTERS, "e\u0301", "\u0323", "が", "\x00", "\u200b", "\u00ad", "\ufeff", "😀", " ", "  ", "\t", "\n", "\u3000"]
MARKERS = ["[E1]", "[/E1]", "<ent>", "</ent>", "new york", "ann", "東京"]
BRACKETS = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
ANGLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


def texts(names: dict[str, str], count: int = 120) -> list[str]:
    """Random texts of letters, words, markers and names, with few spaces between them."""
    rng = random.Random(7)
    kinds = [ALPHABET, ALPHABET, WORDS, MARKERS, [*names.values(), "[mask]", "MASK", *"[]<>"], [" ", " ", "\n"]]
    return ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 14))) for _ in range(count)]


def check_ids(folder: Path, **loading: Any) -> Tokenizer:
    """Compares ids with those of `transformers`, except where a name in the text gives one of the five there."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder)
    special = ours.special_tokens
    assert [theirs.convert_ids_to_tokens(i) for i in special.values()] == [
        getattr(theirs, f"{role}_token") for role in special
    ]
    names = {role: ours.id_to_token(i) for role, i in special.items()}
    never = {i for role, i in special.items() if role != "unk"}
    generated = texts(names)
    pieces = ours.encode_with_offsets(generated)
    compared = 0
    for text, ids, places in zip(generated, ours.encode_batch(generated), pieces, strict=True):
        assert not never & set(ids.tolist()), text
        assert ids.tolist() == places.ids.tolist(), text
        expected = theirs(text, add_special_tokens=False)["input_ids"]
        if not any(name in text for name in names.values()) and not never & set(expected):
            assert ids.tolist() == expected, (text, theirs.convert_ids_to_tokens(expected))
            compared += 1
    assert compared > 20
    return ours


def added_tokens() -> list[AddedToken]:
    """An added token of each flag."""
    return [
        AddedToken("[E1]", special=True),
        AddedToken("[/E1]", special=True, normalized=True),
        AddedToken("<ent>", lstrip=True, normalized=False),
        AddedToken("</ent>", rstrip=True, normalized=False, special=True),
        AddedToken("new york"),
        AddedToken("ann", single_word=True, normalized=False),
        AddedToken("東京"),
    ]


def vocabulary(names: dict[str, str], mark: str = "", continues: str = "") -> dict[str, int]:
    entries = [*names.values(), *CHARACTERS, *(continues + c for c in CHARACTERS), *(mark + word for word in WORDS)]
    return {entry: number for number, entry in enumerate(dict.fromkeys(entries))}


def bpe(**options: Any) -> tokenizers.Tokenizer:
    vocab = vocabulary(ANGLES)
    for merged in ("th", "the", "an", "ann", "<s", "<s>"):
        vocab.setdefault(merged, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "n"), ("<", "s"), ("<s", ">")]
    return tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", **options))


def byte_level(prefix: bool) -> tokenizers.Tokenizer:
    alphabet = [*ANGLES.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he"]
    vocab = {entry: number for number, entry in enumerate(alphabet)}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "t"), ("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return made


def unigram(byte_fallback: bool = False) -> tokenizers.Tokenizer:
    entries = list(vocabulary(ANGLES, mark="▁"))
    if byte_fallback:
        entries += [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(entry, -len(entry) / 9 if number > 4 else 0.0) for number, entry in enumerate(entries)]
    return tokenizers.Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=byte_fallback))


def word_level() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordLevel(vocabulary(BRACKETS), unk_token="[UNK]"))


def word_piece(names: dict[str, str] = BRACKETS) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordPiece(vocabulary(names, continues="##"), unk_token=names["unk"]))


SPLITTERS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
STEPS = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
BERT = normalizers.BertNormalizer(lowercase=True)
KINDS: dict[str, tuple[Callable[[], tokenizers.Tokenizer], Any, Any]] = {
    "byte-level BPE": (lambda: byte_level(False), None, None),
    "byte-level BPE with a first space": (lambda: byte_level(True), normalizers.NFC(), None),
    "BPE of marked words": (bpe, None, pre_tokenizers.Metaspace()),
    "BPE of whole words": (lambda: bpe(ignore_merges=True), None, pre_tokenizers.WhitespaceSplit()),
    "Unigram": (unigram, normalizers.NFKC(), SPLITTERS),
    "Unigram of bytes": (lambda: unigram(byte_fallback=True), None, pre_tokenizers.Metaspace()),
    "Unigram without a splitter": (unigram, normalizers.Replace(" ", "▁"), None),
    "words": (word_level, normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()),
    "words and punctuation": (word_level, None, pre_tokenizers.Whitespace()),
    "WordPiece of blanks": (word_piece, None, pre_tokenizers.WhitespaceSplit()),
    "WordPiece after steps": (word_piece, STEPS, pre_tokenizers.BertPreTokenizer()),
    "WordPiece with plain names": (
        lambda: word_piece({role: role for role in BRACKETS}), BERT, pre_tokenizers.BertPreTokenizer()
    ),
    "WordPiece": (lambda: word_piece(ANGLES), BERT, pre_tokenizers.BertPreTokenizer()),
}


def saved(kind: str, folder: Path, added: bool) -> Path:
    make, normalizer, splitter = KINDS[kind]
    made = make()
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    five = next(names for names in (BRACKETS, ANGLES, {role: role for role in BRACKETS}) if made.token_to_id(names["pad"]) == 0)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, **{f"{role}_token": name for role, name in five.items()},
                                      add_prefix_space="first space" in kind)
    if added:
        wrapped.add_tokens(added_tokens())
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("added", [False, True], ids=["", "added tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, added: bool, tmp_path: Path) -> None:
    tokenizer = check_ids(saved(kind, tmp_path / "a", added))
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.special_tokens == tokenizer.special_tokens and again.content_hash == tokenizer.content_hash
