"""Tokenizers of every kind with every setting: ids equal those in `transformers`, or one line refuses the setting.

The exception is the rule for names in text, which is checked directly: the model's five special tokens
never come from text, and every other added token stays whole.
"""

import json
import pickle
import random
import shutil

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from electra_fast.data.corpus import Corpus, Tokenizer, write_tokenizer
from electra_fast.data.prepare import prepare
from electra_fast.huggingface.tokenizer import copy_tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

WORDS = (
    "the cat sat in new york ann annual İstanbul café ﬁn Straße naïve mask pad cls ΣΟΦΟΣ мир йод हिन्दी ไทย 한국".split()
)
CHARACTERS = sorted({*"".join(WORDS), *"".join(WORDS).lower(), *"東京都はか.,-!<>[]/_▁aeio0189ACDEKLMNPU"})
ALPHABET = [*CHARACTERS, "e\u0301", "  ", *"\u0323が\x00\u200b\u00ad\ufeff😀 \t\n\u3000"]
MARKERS = ["[E1]", "[/E1]", "<ent>", "</ent>", "new york", "ann", "東京"]
BRACKETS = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
PLAIN = {role: role for role in BRACKETS}
ANGLES = {"pad": "<pad>", "unk": "<unk>", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


def texts(names, count=120):
    """Random texts of letters, words, markers and names, with few spaces between them."""
    rng = random.Random(7)
    kinds = [ALPHABET, ALPHABET, WORDS, MARKERS, [*names.values(), "[mask]", "MASK", *"[]<>"], [" ", " ", "\n"]]
    return ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 14))) for _ in range(count)]


def check_ids(folder):
    """Compares ids with `transformers`, except for names in the text that it turns into special tokens."""
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer(folder)
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


def added_tokens():
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


def vocabulary(names, mark="", continues=""):
    entries = [*names.values(), *CHARACTERS, *(continues + c for c in CHARACTERS), *(mark + word for word in WORDS)]
    return {entry: number for number, entry in enumerate(dict.fromkeys(entries))}


def bpe(**options):
    vocab = vocabulary(ANGLES)
    for merged in ("th", "the", "an", "ann", "<s", "<s>"):
        vocab.setdefault(merged, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("a", "n"), ("an", "n"), ("<", "s"), ("<s", ">")]
    return tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", **options))


def byte_level(prefix):
    alphabet = [*ANGLES.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "he"]
    vocab = {entry: number for number, entry in enumerate(alphabet)}
    made = tokenizers.Tokenizer(models.BPE(vocab, [("Ġ", "t"), ("h", "e")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return made


def unigram(byte_fallback=False):
    entries = list(vocabulary(ANGLES, mark="▁"))
    if byte_fallback:
        entries += [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(entry, -len(entry) / 9 if number > 4 else 0.0) for number, entry in enumerate(entries)]
    return tokenizers.Tokenizer(models.Unigram(scores, unk_id=1, byte_fallback=byte_fallback))


def word_level():
    return tokenizers.Tokenizer(models.WordLevel(vocabulary(BRACKETS), unk_token="[UNK]"))


def word_piece(names=BRACKETS):
    return tokenizers.Tokenizer(models.WordPiece(vocabulary(names, continues="##"), unk_token=names["unk"]))


SPLITTERS = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
STEPS = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()])
BERT = normalizers.BertNormalizer(lowercase=True)
KINDS = {
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
    "WordPiece with plain names": (lambda: word_piece(PLAIN), BERT, pre_tokenizers.BertPreTokenizer()),
    "WordPiece": (lambda: word_piece(ANGLES), BERT, pre_tokenizers.BertPreTokenizer()),
}


def names_of(made):
    return next(names for names in (BRACKETS, ANGLES, PLAIN) if made.token_to_id(names["pad"]) == 0)


def saved(kind, folder, added):
    make, normalizer, splitter = KINDS[kind]
    made = make()
    if normalizer is not None:
        made.normalizer = normalizer
    if splitter is not None:
        made.pre_tokenizer = splitter
    names = {f"{role}_token": name for role, name in names_of(made).items()}
    prefix = json.loads(made.to_str())["pre_tokenizer"] or {}
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, **names, add_prefix_space=prefix.get("add_prefix_space", False)
    )
    if added:
        wrapped.add_tokens(added_tokens())
    wrapped.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "added"), [*((kind, True) for kind in KINDS), ("byte-level BPE", False), ("WordPiece", False)]
)
def test_every_kind_has_the_ids_of_transformers(kind, added, tmp_path):
    """With and without added tokens, which affect the choice between the fast path and the crate."""
    tokenizer = check_ids(saved(kind, tmp_path / "a", added))
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.special_tokens == tokenizer.special_tokens and again.content_hash == tokenizer.content_hash
    write_tokenizer(tmp_path / "b", tokenizer, 512)
    assert check_ids(tmp_path / "b").content_hash == tokenizer.content_hash
    copy_tokenizer(tmp_path / "a", tmp_path / "c", ["input_ids"], {"split_special_tokens": True})
    assert check_ids(tmp_path / "c").content_hash == tokenizer.content_hash
    # Threads get pieces of lines, cut where this does not change tokens.
    text = " ".join(texts(names_of(tokenizers.Tokenizer.from_str(tokenizer.to_json())))).replace("\n", " ")
    prepare(iter([text]), vocab=tokenizer, out=tmp_path / "shards", progress=False)
    corpus = Corpus(tmp_path / "shards")
    assert corpus[0].tolist() == tokenizer.encode_batch([text])[0].tolist()
    assert Tokenizer.of(corpus).special_tokens == Tokenizer(tmp_path / "shards").special_tokens == corpus.special_tokens


MARKS = dict.fromkeys(KINDS, "##") | {
    "byte-level BPE": "Ġ",
    "byte-level BPE with a first space": "Ġ",
    "BPE of marked words": "▁",
    "BPE of whole words": None,
    "Unigram": "▁",
    "Unigram of bytes": "▁",
    "Unigram without a splitter": "▁",
    "words": None,
    "words and punctuation": None,
}
"""The mark of tokens that begin a word, or continue one (`##`)."""


@pytest.mark.parametrize("kind", KINDS)
def test_word_starts_of_each_kind_of_vocabulary(kind, tmp_path):
    tokenizer = Tokenizer(saved(kind, tmp_path / "a", False))
    mark = MARKS[kind]
    starts = tokenizer.word_starts()
    if mark is None:
        assert starts is None
        return
    assert starts is not None and len(starts) == tokenizer.vocab_size and not all(starts)
    for number, begins in enumerate(starts):
        entry = tokenizer.id_to_token(number)
        special = number in tokenizer.special_tokens.values()
        assert begins == (special or entry.startswith(mark) == (mark != "##")), entry


def marker(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False} | flags


ENTRIES = list(vocabulary(BRACKETS, continues="##"))
NEXT = len(ENTRIES)
CASED = {"do_lower_case": False}
LOWER = {"do_lower_case": True}


@pytest.mark.parametrize(
    "config",
    [
        LOWER,
        CASED,
        CASED | {"strip_accents": True},
        LOWER | {"strip_accents": False, "tokenizer_class": "DistilBertTokenizer"},
        LOWER | {"strip_accents": None, "tokenize_chinese_chars": False},
        CASED | {"tokenize_chinese_chars": False, "tokenizer_class": "BertTokenizerFast"},
        LOWER | {"additional_special_tokens": ["[E1]", "ann"], "bos_token": "cat", "eos_token": "<ent>"},
        LOWER | {"added_tokens_decoder": {str(NEXT): marker("[E1]", special=True), str(NEXT + 1): marker("new york")}},
        CASED | {"mask_token": "mask", "pad_token": marker("pad", __type="AddedToken"), "unk_token": "cls"},
        LOWER | {"split_special_tokens": True, "never_split": None, "do_basic_tokenize": True},
    ],
    ids=str,
)
def test_every_setting_has_the_ids_of_transformers(config, tmp_path):
    tokenizer = check_ids(bert_folder(tmp_path / "a", config))
    write_tokenizer(tmp_path / "b", tokenizer, 512)
    assert check_ids(tmp_path / "b").content_hash == tokenizer.content_hash
    AutoTokenizer.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "c")
    assert check_ids(tmp_path / "c").content_hash == tokenizer.content_hash
    shutil.copy(tmp_path / "c/tokenizer.json", tmp_path / "a")
    assert check_ids(tmp_path / "a").content_hash == tokenizer.content_hash
    assert Tokenizer(tmp_path / "a/vocab.txt").content_hash == tokenizer.content_hash


def bert_folder(folder, config, **others):
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(ENTRIES) + "\n", encoding="utf-8")
    files = {"config": {"model_type": "electra"}, "tokenizer_config": config} | others
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_added_tokens_in_older_files(tmp_path):
    special = {"additional_special_tokens": ["[E1]", "<ent>"], "mask_token": "mask"}
    folder = bert_folder(
        tmp_path / "a", LOWER, added_tokens={"[E1]": NEXT, "new york": NEXT + 1}, special_tokens_map=special
    )
    tokenizer = check_ids(folder)
    [ids] = tokenizer.encode_batch(["[E1] new york <ent>"])
    assert ids.tolist() == [NEXT, NEXT + 1, NEXT + 2] and tokenizer.special_tokens["mask"] == ENTRIES.index("mask")


def test_word_starts_and_offsets_of_added_tokens(tmp_path):
    tokenizer = Tokenizer(bert_folder(tmp_path / "a", LOWER | {"additional_special_tokens": ["[E1]"]}))
    assert tokenizer.fast
    [pieces] = tokenizer.encode_with_offsets(["cat[E1]s  [MASK]"])
    assert [tokenizer.id_to_token(i) for i in pieces.ids] == ["cat", "[E1]", "s", "[", "mask", "]"]
    assert pieces.offsets.tolist() == [[0, 3], [3, 7], [7, 8], [10, 11], [11, 15], [15, 16]]
    assert pieces.words.tolist() == [0, 1, 2, 3, 4, 5]


JAPANESE = {"tokenizer_class": "BertJapaneseTokenizer", "word_tokenizer_type": "mecab"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (JAPANESE, 'tokenizer_class is "BertJapaneseTokenizer" in .*tokenizer_config.json'),
        (LOWER | {"tokenizer_class": "HerbertTokenizer"}, 'tokenizer_class is "HerbertTokenizer"'),
        (LOWER | {"auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}, "auto_map names a tokenizer in Python"),
        (LOWER | {"never_split": ["ann"]}, r'never_split = \["ann"\]'),
        (LOWER | {"do_basic_tokenize": False}, "do_basic_tokenize = false"),
        ({}, "no do_lower_case, so transformers lowercases and strips accents, but .*vocab.txt has entries"),
        (LOWER | {"mask_token": "<mask>"}, 'mask_token = "<mask>": not in .*vocab.txt'),
        (LOWER | {"image_token": "<image>"}, 'image_token = "<image>": only some releases'),
        (LOWER | {"added_tokens_decoder": {"999": marker("[E1]")}}, r'added token "\[E1\]" has id 999, but [0-9]+'),
        (LOWER | {"split_special_tokens": True, "additional_special_tokens": ["[E1]"]}, "split_special_tokens is true"),
    ],
)
def test_unsupported_settings_are_refused_by_name(config, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer(bert_folder(tmp_path / "a", config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("WordPiece", {"tokenizer_class": "BertTokenizer", "strip_accents": None}, "no do_lower_case: .*false"),
        ("words", {"tokenizer_class": "BertTokenizer"}, "tokenizer.json: has other rules than BERT's"),
        ("Unigram", {"tokenizer_class": "RobertaTokenizer"}, "tokenizer.json: has other rules than byte-level BPE"),
        ("words", {"tokenizer_class": "XLMRobertaTokenizer"}, "tokenizer.json: has other rules than SentencePiece's"),
        ("byte-level BPE", {"add_prefix_space": True}, "add_prefix_space is true, but false in .*tokenizer.json"),
        ("words", {"unk_token": "[SEP]"}, 'unk_token is "\\[SEP\\]", but "\\[UNK\\]" in the model of'),
        ("words", {"tokenizer_class": "PhobertTokenizer"}, 'tokenizer_class is "PhobertTokenizer"'),
        ("words", {"added_tokens_decoder": {"0": marker("[PAD]"), "3": marker("the")}}, '"the" has id 3, but'),
    ],
)
def test_conflicting_settings_of_a_tokenizer_json_are_refused(kind, changes, message, tmp_path):
    folder = saved(kind, tmp_path / "a", False)
    path = folder / "tokenizer.json"
    if kind == "WordPiece":
        path.write_text(path.read_text(encoding="utf-8").replace('"lowercase": true', '"lowercase": false'), "utf-8")
    path = folder / "tokenizer_config.json"
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changes), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        Tokenizer(folder)


@pytest.mark.parametrize("change", ["an id", "a missing entry"])
def test_conflicting_vocabularies_in_a_folder_are_refused(change, tmp_path):
    folder = bert_folder(tmp_path / "a", CASED)
    (folder / "tokenizer.json").write_text(Tokenizer(folder).to_json(), encoding="utf-8")
    assert Tokenizer(folder).path.name == "tokenizer.json"
    entries = ENTRIES.copy()
    if change == "an id":
        entries[10], entries[11] = entries[11], entries[10]
    else:
        entries.pop()
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")
    for path in (folder, folder / "vocab.txt"):
        with pytest.raises(ValueError, match=r"vocab.txt and .*tokenizer.json disagree: .*id"):
            Tokenizer(path)


def test_dropout_is_refused(tmp_path):
    made = byte_level(False)
    made.model.dropout = 0.1
    made.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json: model.dropout makes ids random"):
        Tokenizer(tmp_path)
