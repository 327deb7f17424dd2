"""Vocabulary coverage: the [UNK] rate, fertility, and a warning with the likely cause before the work starts."""

import json

import pytest
from in_process import run

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


def test_a_partition_alone_has_no_figures(vocab, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("cat" + "\n" * (4 << 20))
    inputs = [tmp_path / "a.txt", tmp_path / "b.txt"]
    report = prepare(inputs, vocab=vocab, out=tmp_path / "out", partition="1/2", progress=False)
    assert not report.complete and report.unknown_share is None and report.tokens_per_word is None


def test_chinese_with_an_english_vocabulary_is_told_before_and_after(vocab, tmp_path, capfd):
    (tmp_path / "a.txt").write_text(CHINESE)
    prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out", lowercase=True)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("warning: 100.0% of the tokens are [UNK] (of a sample, most often: 一 (50), ")
    assert lines[0].endswith("the vocabulary seems to be of another language or script: train one on this text")
    assert lines[1] == lines[0] and "100.00% [UNK]" in lines[2]


def test_the_warning_comes_before_the_first_unit(vocab, tmp_path, capfd):
    """The output folder cannot be used, but the text has already been sampled."""
    (tmp_path / "a.txt").write_text(CHINESE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/other").write_text("")
    with pytest.raises(ValueError, match="already holds something else"):
        prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "out")
    assert "100.0% of the tokens are [UNK]" in capfd.readouterr().err


def test_capitals_that_an_uncased_vocabulary_lacks_name_the_option(vocab, tmp_path, capfd):
    (tmp_path / "a.txt").write_text("The CAT. The Cat.")
    prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "cased", lowercase=False)
    assert (
        "66.7% of the tokens are [UNK] (of a sample, most often: The (2), CAT (1), Cat (1)); the vocabulary knows"
        in (capfd.readouterr().err)
    )
    prepare([tmp_path / "a.txt"], vocab=vocab, out=tmp_path / "uncased")
    assert "warning" not in capfd.readouterr().err


def test_a_stream_of_documents_is_sampled_and_loses_none(vocab, tmp_path, capfd):
    asked = []

    def documents():
        for number in range(1000):
            asked.append(number)
            yield "的" * 10 if number % 2 else "cat"

    report = prepare(documents(), vocab=vocab, out=tmp_path / "out", lowercase=True)
    assert len(asked) == report.num_documents == 1000 and report.num_tokens == 500 * 11
    assert capfd.readouterr().err.startswith("warning: 90.9% of the tokens are [UNK]")
    same = prepare(list(documents()), vocab=vocab, out=tmp_path / "same", kind="documents", progress=False)
    assert same.content_hash == report.content_hash


def test_files_all_over_the_input_are_sampled(vocab, tmp_path, capfd):
    """The first documents are fine; errors in others are raised by the run, not by the sample."""
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(CHINESE if number > 20 else "the cat")
    (tmp_path / "30.txt").write_bytes(b"cat \xff")
    with pytest.raises(ValueError, match=r"30\.txt: invalid UTF-8"):
        prepare([tmp_path / "[0-9]*.txt"], vocab=vocab, out=tmp_path / "out")
    assert "of the tokens are [UNK]" in capfd.readouterr().err


def test_tokenizers_without_a_prefix_have_no_fertility(tmp_path):
    tokens = {token: number for number, token in enumerate([*SPECIAL, "cat"])}
    description = {
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    report = prepare(iter(["cat dog"]), vocab=tmp_path / "tokenizer.json", out=tmp_path / "out", progress=False)
    assert report.unknown_share == 1 / 2 and report.tokens_per_word is None
