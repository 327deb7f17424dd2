"""Vocabulary coverage: the [UNK] rate, fertility, and a warning with the likely cause before the work starts."""

import json
import unicodedata

import pytest
from in_process import run

import electra_fast as ef
from electra_fast import _data
from electra_fast.data.corpus import Corpus
from electra_fast.data.inspect import inspect
from electra_fast.data.prepare import prepare

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
ENGLISH = [*SPECIAL, "the", "cat", "sleep", "##s", "."]
CHINESE = "的一是不了人我在有他\n" * 50


@pytest.fixture
def vocab(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(ENGLISH))
    return path


def test_report_and_inspect_count_unknown_tokens_and_tokens_per_word(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("The cat sleeps.\nThe dog sleeps.")
    report = prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out", progress=False)
    # the cat sleep ##s . the [UNK] sleep ##s .
    assert report.unknown_share == 1 / 10 and report.tokens_per_word == 10 / 8
    again = prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out", progress=False)
    assert again.already_complete and again.unknown_share == 1 / 10
    report = inspect(tmp_path / "out")
    assert (report["unknown_share"], report["tokens_per_word"]) == (1 / 10, 10 / 8)
    assert Corpus(tmp_path / "out").coverage().words == 8
    shown = json.loads(run("inspect", tmp_path / "out", "--json").stdout)
    assert shown["unknown_share"] == 1 / 10 and shown["tokens_per_word"] == 10 / 8


def test_unknown_words_are_counted_and_listed(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, "un", "##able", "."]))
    counts = _data.text_coverage(_data.Tokenizer(str(tmp_path / "vocab.txt")), ["unable. 好 Grün", "好 好, un"])
    assert counts == (9, 5, 8, [("好", 3), (",", 1), ("Grün", 1)])


def test_chinese_with_an_english_vocabulary_warns_before_and_after(vocab, tmp_path, capfd):
    (tmp_path / "a.txt").write_text(CHINESE)
    report = prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out", cased=False)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("warning: 100.0% of the tokens are [UNK] (of a sample, most often: 一 (50), ")
    assert lines[0].endswith("the vocabulary seems to be of another language or script: train one on this text")
    assert lines == lines[:1] * 2 and "100.00% [UNK]" in str(report)


def test_stream_of_documents_is_sampled_without_loss(vocab, tmp_path, capfd):
    asked = []

    def documents():
        for number in range(1000):
            asked.append(number)
            yield "的" * 10 if number % 2 else "cat"

    report = prepare(documents(), vocab=vocab, out=tmp_path / "out", cased=False)
    assert len(asked) == report.num_documents == 1000 and report.num_tokens == 500 * 11
    assert capfd.readouterr().err.startswith("warning: 90.9% of the tokens are [UNK]")
    same = prepare(list(documents()), vocab=vocab, out=tmp_path / "same", kind="documents", progress=False)
    assert same.content_hash == report.content_hash


def test_sample_covers_the_whole_input(vocab, tmp_path, capfd):
    """The first documents are fine; the run, not the sample, raises the errors of the others."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(CHINESE if number > 20 else "the cat")
    (tmp_path / "30.txt").write_bytes(b"cat \xff")
    with pytest.raises(ValueError, match=r"30\.txt: invalid UTF-8"):
        prepare([tmp_path / "[0-9]*.txt"], vocab=vocab, out=tmp_path / "out")
    assert "of the tokens are [UNK]" in capfd.readouterr().err


def test_tokenizers_without_a_prefix_have_no_fertility(tmp_path):
    tokens = {token: number for number, token in enumerate([*SPECIAL, "cat"])}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    report = prepare(iter(["cat dog"]), vocab=tmp_path / "tokenizer.json", out=tmp_path / "out", progress=False)
    assert report.unknown_share == 1 / 2 and report.tokens_per_word is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ที่บ้าน มี แมว สี่ตัว", "มี → ม"),
        ("kor kór kör és es", "the words become equal to another (kor = kór = kör, és = es)"),
        ("がく かく", "が → か"),
        ("The café is open. " + "The long day was over and all of them were tired. " * 9, ""),
        ("한국어 한글", ""),
    ],
)
def test_dropped_accents_are_reported_with_merged_words(tmp_path, capfd, text, said):
    """Only if the vocabulary drops accents, and not for a rare foreign word in English."""
    (tmp_path / "a.txt").write_text(f"{text}\n\n" * 40, encoding="utf-8")
    for name, strip in [("kept", False), ("dropped", True)]:
        ef.vocab([tmp_path / "a.txt"], out=tmp_path / name / "vocab.txt", strip_accents=strip, progress=False)
        capfd.readouterr()
        prepare([tmp_path / "a.txt"], vocab=tmp_path / name, out=tmp_path / name / "out")
        lines = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
        assert len(lines) == (strip and said != "")
        if strip and said != "":
            assert lines[0].startswith("warning: the vocabulary drops accents and marks: ")
            assert said in lines[0] and "`electra-fast vocab` without --strip-accents" in lines[0]


def test_decomposed_text_is_reported(tmp_path, capfd):
    for form, text in [("NFC", "Việt Nam không ở đây"), ("NFD", "Việt Nam không ở đây"), ("NFD", "한국어")]:
        text = unicodedata.normalize(form, text)
        ef.vocab(iter([text] * 20), out=tmp_path / f"{form}{len(text)}.json")
        assert ("(Unicode NFD)" in capfd.readouterr().err) == (form == "NFD")


@pytest.mark.parametrize(
    ("entries", "text", "cause"),
    [
        (["日", "本", "人"], "日本人本日本人龘", "lacks 1 of the text's 4 characters, 龘 (20); train one on this"),
        (["ab"], "ab " + "ภาษาไทยไม่มีช่องว่าง" * 6, "these are words of more than 100 characters"),
        (["the", "cat"], "русский мир и дом 5", "seems to be of another language or script"),
        (["the", "cat"], "The CAT", "the vocabulary knows these words in lower case: prepare with --uncased"),
    ],
)
def test_cause_of_unknown_words_is_reported(tmp_path, capfd, entries, text, cause):
    (tmp_path / "vocab.txt").write_text("\n".join([*SPECIAL, *entries]), encoding="utf-8")
    prepare(iter([text] * 20), vocab=tmp_path / "vocab.txt", out=tmp_path / "out", cased=True)
    said = capfd.readouterr().err
    assert cause in said
    assert ("98.4% of the letters of a sample are in words of more than 100" in said) == ("more than 100" in cause)
