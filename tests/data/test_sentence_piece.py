"""The `spm.model` of DeBERTa V2 and V3: ids equal SentencePiece's, also in the files that we write."""

import io
import json
from itertools import cycle, islice

import pytest
import sentencepiece
from tokenizers import Tokenizer as Crate
from transformers import AutoTokenizer, DebertaV2Tokenizer

import electra_fast as ef
from electra_fast.data.pair_template import BERT
from electra_fast.huggingface.tokenizer import copy_tokenizer

LINES = """The boatman sang an old song while the children listened on the shore
Die Straßenbahn fährt langsam über die Brücke und hält am Fluss
Le garçon mangeait déjà sa crêpe près de la forêt où naît la rivière
женщина читает книгу у окна и пьёт чай
هَذَا كِتَابٌ جَمِيلٌ جِدًّا
हिन्दी में लिखा हुआ एक वाक्य
ภาษาไทยไม่มีช่องว่างระหว่างคำ
東京都に住んでいる人は多い 中文句子没有空格
한국어 문장은 띄어쓰기가 있다
Tiếng Việt có nhiều dấu thanh""".split("\n")
TEXTS = [
    *LINES,
    *(
        "",
        " ",
        " \t\n ",
        "  two  spaces   within ",
        "tab\tline\nline\r\nend",
        "non\u00a0break\u2003em\u3000wide\u2028line",
    ),
    *(
        "cafe\u0301 de\u0301ja\u0300",
        "Ａｂｃ１２３　全角！？ ～",
        "ﬁne oﬃce ǆ ½ x² №",
        "\u0301lone",
        "\u0301",
        "شَدَّة \ufefb",
    ),
    *("zero\u200bwidth\u200cjoin\u200dx\ufeffz", "\u200bfirst", "last\u200b", "soft\u00adhyphen", "\u200fעברית\u200f"),
    *(
        "👩\u200d👧 🏳\ufe0f\u200d🌈 👍🏽 😀",
        "a\x00b\x01c\x1b[0m\x7f\x9f\u0085",
        "\ue000\uf8ff\U000f0000",
        "\ufffd",
        "𝒜𝓑𝔠 𝟘",
    ),
    *(
        "▁mark▁ ▁ ▁▁ x▁",
        "a" * 500,
        "Straßenbahn" * 30,
        "ｶﾅ ㍿ ① がか",
        "ΣΟΦΟΣ İı",
        "น้ำ ำ",
        "é" * 90,
        "0123 3.14 !!! --",
    ),
]
SPECIAL = {"pad": 0, "unk": 3, "cls": 1, "sep": 2}
RELEASED = {"do_lower_case": False, "vocab_type": "spm"}


def trained(**options):
    model = io.BytesIO()
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    numbers = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    sentencepiece.SentencePieceTrainer.train(
        **{"sentence_iterator": islice(cycle(LINES), 200), "model_writer": model, "minloglevel": 2, "num_threads": 1},
        **{"vocab_size": 500, "hard_vocab_limit": False, "character_coverage": 0.99},
        **{"byte_fallback": True} | names | numbers | options,
    )
    return model.getvalue()


@pytest.fixture(scope="module")
def released() -> bytes:
    return trained()


def folder_of(folder, model, config=RELEASED, **others):
    folder.mkdir()
    (folder / "spm.model").write_bytes(model)
    files = {"config": {"model_type": "deberta-v2"}, "tokenizer_config": config} | others
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def encoded(tokenizer, texts=TEXTS):
    return [ids.tolist() for ids in tokenizer.encode_batch(texts)]


@pytest.mark.parametrize("options", [{}, {"byte_fallback": False}, {"normalization_rule_name": "nmt_nfkc_cf"}], ids=str)
def test_ids_equal_sentence_piece(options, tmp_path):
    model = trained(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = ef.Tokenizer(folder_of(tmp_path / "a", model, added_tokens={"[MASK]": len(theirs)}))
    for text, ids in zip(TEXTS, encoded(ours), strict=True):
        assert ids == theirs.encode(text), (text, theirs.encode(text, out_type=str))
    special = SPECIAL | {"mask": len(theirs)}
    assert ours.special_tokens == special and ours.vocab_size == len(theirs) + 1
    assert ef.Tokenizer(tmp_path / "a/spm.model").content_hash == ours.content_hash
    [names] = encoded(ours, ["[CLS] [MASK][SEP][PAD]"])
    assert not {i for role, i in special.items() if role != "unk"} & {*names}
    copy_tokenizer(tmp_path / "a", tmp_path / "b", ["input_ids"])
    written = AutoTokenizer.from_pretrained(tmp_path / "b")
    assert written(TEXTS, add_special_tokens=False).input_ids == encoded(ours)
    assert ef.Tokenizer(tmp_path / "b").content_hash == ours.content_hash
    first = theirs.encode("the shore")
    second = theirs.encode("an old song")
    assert written("the shore", "an old song").input_ids == [1, *first, 2, *second, 2] and ours.pair_template == BERT
    assert written.decode(first) == ours.decode(first) == "the shore"


def test_unknown_characters_become_bytes(released, tmp_path):
    tokenizer = ef.Tokenizer(folder_of(tmp_path / "a", released))
    [pieces] = tokenizer.encode_with_offsets(["song 😀"])
    assert [tokenizer.id_to_token(i) for i in pieces.ids][-4:] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert pieces.offsets[-4:].tolist() == [[5, 6]] * 4 and tokenizer.decode(pieces.ids) == "song 😀"


def test_added_tokens_stay_whole(tmp_path):
    model = trained(user_defined_symbols=["<ent>"], control_symbols=["<ctl>"])
    folder = folder_of(tmp_path / "a", model, RELEASED | {"additional_special_tokens": ["<own>"]})
    tokenizer = ef.Tokenizer(folder)
    pieces = [tokenizer.id_to_token(i) for i in tokenizer.encode_batch(["a<ent> <ctl> song <own>"])[0]]
    assert [piece for piece in pieces if piece[0] == "<"] == ["<ent>", "<ctl>", "<own>"]
    assert [tokenizer.id_to_token(tokenizer.vocab_size - i) for i in (2, 1)] == ["[MASK]", "<own>"]


def test_lowercase_is_honored(released, tmp_path):
    cased, lower = (
        ef.Tokenizer(folder_of(tmp_path / str(value), released, {"do_lower_case": value})) for value in (False, True)
    )
    assert encoded(lower, LINES) == encoded(cased, [line.lower() for line in LINES]) != encoded(cased, LINES)


def test_text_of_kept_entries_keeps_its_tokens(released, tmp_path):
    whole = folder_of(tmp_path / "a", released)
    report = ef.vocab(LINES[:3], out=tmp_path / "b", trim=whole, kind="documents", progress=False)
    trimmed = ef.Tokenizer(tmp_path / "b")
    assert report.num_entries == trimmed.vocab_size == trimmed.special_tokens["mask"] + 1 < report.trimmed_from
    pieces = [
        [[tokenizer.id_to_token(i) for i in ids] for ids in encoded(tokenizer, [*LINES[:3], "😀"])]
        for tokenizer in (ef.Tokenizer(whole), trimmed)
    ]
    assert pieces[0] == pieces[1]


def saved_by_transformers_4(folder, model):
    """The rules of `transformers` 4 for an spm.model with these entries; its class reads the rules of the file."""
    tokenizer = json.loads(ef.Tokenizer(folder_of(folder, model)).to_json())
    [character_map] = [step for step in tokenizer["normalizer"]["normalizers"] if step["type"] == "Precompiled"]
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    ends = {"type": "Strip", "strip_left": True, "strip_right": True}
    tokenizer["normalizer"]["normalizers"] = [ends, character_map, spaces]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [tokenizer["pre_tokenizer"]]}
    tokenizer["model"]["byte_fallback"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return Crate.from_file(str(folder / "tokenizer.json")).encode_batch(TEXTS, add_special_tokens=False)


def test_files_of_both_transformers_classes_keep_their_rules(released, tmp_path):
    theirs = [encoding.ids for encoding in saved_by_transformers_4(tmp_path / "4", released)]
    assert encoded(ef.Tokenizer(tmp_path / "4")) == theirs
    vocab = json.loads((tmp_path / "4/tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    made = DebertaV2Tokenizer(vocab=[(piece, score) for piece, score in vocab], unk_id=3)
    made.save_pretrained(tmp_path / "5")
    assert encoded(ef.Tokenizer(tmp_path / "5")) == made(TEXTS, add_special_tokens=False).input_ids != theirs
    for name in "45":
        copy_tokenizer(tmp_path / name, tmp_path / f"copy {name}", ["input_ids"])
        written = AutoTokenizer.from_pretrained(tmp_path / f"copy {name}")
        assert written(TEXTS, add_special_tokens=False).input_ids == encoded(ef.Tokenizer(tmp_path / name))


@pytest.mark.parametrize("name", ["do_lower_case", "split_by_punct"])
def test_tokenizer_json_and_setting_that_disagree_are_refused(name, released, tmp_path):
    saved_by_transformers_4(tmp_path / "a", released)
    (tmp_path / "a/tokenizer_config.json").write_text(json.dumps({name: True}), encoding="utf-8")
    with pytest.raises(ValueError, match=f"{name} is true, but .*tokenizer.json has other rules"):
        ef.Tokenizer(tmp_path / "a")


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"model_type": "bpe"}, RELEASED, "spm.model: model_type = BPE of this SentencePiece model"),
        ({"add_dummy_prefix": False}, RELEASED, "spm.model: add_dummy_prefix = False"),
        ({"remove_extra_whitespaces": False}, RELEASED, "spm.model: remove_extra_whitespaces = False"),
        ({"treat_whitespace_as_suffix": True}, RELEASED, "spm.model: treat_whitespace_as_suffix = True"),
        ({}, {"split_by_punct": True}, "tokenizer_config.json: split_by_punct is true, but .*spm.model"),
        ({}, {"add_prefix_space": False}, "tokenizer_config.json: add_prefix_space is false, but .*spm.model"),
        ({}, {"tokenizer_class": "BertTokenizer"}, 'tokenizer_class is "BertTokenizer" in .*config.json, but an spm'),
        ({}, {"added_tokens_decoder": {"9": {"content": "[MASK]"}}}, r'"\[MASK\]" has id 9, but'),
    ],
)
def test_unsupported_settings_are_refused_by_name(options, config, message, released, tmp_path):
    model = trained(**options) if options else released
    with pytest.raises(ValueError, match=message) as caught:
        ef.Tokenizer(folder_of(tmp_path / "a", model, config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7, 4000, -1])
def test_truncated_file_is_refused(size, released, tmp_path):
    folder = folder_of(tmp_path / "a", released[:size])
    with pytest.raises(ValueError, match=r"spm.model: not a complete SentencePiece model; download"):
        ef.Tokenizer(folder)


def test_case_options_are_refused(released, tmp_path):
    with pytest.raises(ValueError, match=r"spm.model: cased and strip_accents apply to a vocab.txt only"):
        ef.Tokenizer(folder_of(tmp_path / "a", released), cased=True)
