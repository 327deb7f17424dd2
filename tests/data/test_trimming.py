"""`vocab --trim`: text of kept entries keeps its tokens, here and in `transformers`."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from in_process import run
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Crate
from transformers import AutoTokenizer

import electra_fast as ef
from electra_fast.data.trimming import with_entries_of

NAMES = ["<s>", "<pad>", "</s>", "<unk>"]
SYLLABLES = "ka to mir an éle shu in ber ta ros ing the qu ü zza lo".split()
DICE = random.Random(1)
WORDS = ["".join(DICE.choices(SYLLABLES, k=DICE.randint(1, 4))) for _ in range(300)]
LINES = [" ".join(DICE.choices(WORDS, weights=[1 / (i + 1) for i in range(300)], k=9)).capitalize() for _ in range(300)]
METASPACE = pre_tokenizers.Metaspace()
TEMPLATE = processors.TemplateProcessing(
    single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
)


def word_piece() -> Crate:
    crate = Crate(models.WordPiece(unk_token="<unk>"))
    crate.normalizer = normalizers.BertNormalizer()
    crate.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    crate.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=400, special_tokens=NAMES))
    return crate


def byte_level() -> Crate:
    crate = Crate(models.BPE())
    crate.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=NAMES, initial_alphabet=alphabet)
    crate.train_from_iterator(LINES, trainer)
    return crate


def bpe(**model: str) -> Crate:
    crate = Crate(models.BPE(unk_token="<unk>", fuse_unk=True, **model))
    crate.normalizer = normalizers.NFKC()
    crate.pre_tokenizer = pre_tokenizers.Whitespace() if model else METASPACE
    crate.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=400, special_tokens=NAMES, **model))
    return crate


def unigram() -> Crate:
    crate = Crate(models.Unigram())
    crate.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    crate.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), METASPACE])
    crate.train_from_iterator(LINES, trainers.UnigramTrainer(vocab_size=250, special_tokens=NAMES, unk_token="<unk>"))
    return crate


KINDS = {
    "WordPiece": (word_piece, processors.BertProcessing(("</s>", 2), ("<s>", 0))),
    "byte-level BPE": (byte_level, processors.RobertaProcessing(("</s>", 2), ("<s>", 0))),
    "BPE": (bpe, processors.Sequence([TEMPLATE])),
    "BPE with ##": (lambda: bpe(continuing_subword_prefix="##"), TEMPLATE),
    "BPE with </w>": (lambda: bpe(end_of_word_suffix="</w>"), TEMPLATE),
    "Unigram": (unigram, TEMPLATE),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with two added tokens: <mask>, and a token that stays whole in text."""
    make, post_processor = KINDS[request.param]
    crate = make()
    crate.post_processor = post_processor
    crate.add_special_tokens(["<mask>"])
    crate.add_tokens(["NEW"])
    folder = tmp_path_factory.mktemp("model")
    crate.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77, "pad_token": "<pad>"}))
    return folder


def test_text_of_kept_entries_keeps_its_tokens(model: Path, tmp_path: Path) -> None:
    before = ef.Tokenizer(model)
    (tmp_path / ".out.shards.writing" / "of a killed run").mkdir(parents=True)
    report = ef.vocab(LINES[:40], out=tmp_path / "out", trim=model, kind="documents", progress=False)
    after = ef.Tokenizer(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert report.num_entries == after.vocab_size < report.trimmed_from == before.vocab_size
    _, kept_ids = with_entries_of(before, counts(before, LINES[:40]))
    old = [AutoTokenizer.from_pretrained(path) for path in (model, tmp_path / "out")]
    num_alike = 0
    for line in [*LINES, "NEW " + LINES[0], "ing ingthe", "ŋ" + LINES[1], ""]:
        ids = before.encode_batch([line])[0]
        trimmed = after.encode_batch([line])[0]
        if np.isin(ids, kept_ids).all():
            num_alike += 1
            assert kept_ids[trimmed].tolist() == ids.tolist()
        assert trimmed.tolist() == old[1](line, add_special_tokens=False).input_ids
    assert 45 < num_alike < len(LINES)
    theirs, ours = (tokenizer(LINES[0], LINES[1]).input_ids for tokenizer in old)
    assert kept_ids[ours].tolist() == theirs
    assert after.special_tokens == before.special_tokens | {"mask": after.vocab_size - 2}
    assert (old[1].model_max_length, old[1].mask_token, old[1].pad_token_id) == (77, "<mask>", 1)


def counts(tokenizer: ef.Tokenizer, texts: list[str]) -> np.ndarray:
    return np.bincount(np.concatenate(tokenizer.encode_batch(texts)), minlength=tokenizer.vocab_size)


def test_no_kept_character_is_unknown(model: Path) -> None:
    before = ef.Tokenizer(model)
    after, _ = with_entries_of(before, counts(before, LINES[:40]))
    for tokenizer in (before, after):
        assert before.special_tokens["unk"] not in np.concatenate(tokenizer.encode_batch(["zzakta", "rosaka"]))


def test_size_keeps_the_most_frequent_entries(model: Path) -> None:
    before = ef.Tokenizer(model)
    used = counts(before, LINES) > 0
    occurrences = np.where(used, 10 + np.arange(before.vocab_size), 0)  # another order than in training
    whole, _ = with_entries_of(before, occurrences)
    size = whole.vocab_size - 20
    after, kept_ids = with_entries_of(before, occurrences, size)
    assert size - 3 <= after.vocab_size <= size
    lost = np.setdiff1d(occurrences.nonzero()[0], kept_ids)
    assert len(lost) and lost.max() < np.median(used.nonzero()[0])
    with pytest.raises(
        ef.InputError, match=r"^size = 9: must be at least .* special tokens, bytes and ASCII characters$"
    ):
        with_entries_of(before, occurrences, 9)


def test_unknown_character_keeps_its_score(tmp_path: Path) -> None:
    """Ten below the score of the rarest entry, which is therefore kept."""
    pieces = [("unused", -3.0), ("rare", -30.0), ("Xa", -20.0), ("b", -15.0), ("ab", -1.0)]
    crate = Crate(models.Unigram([*pieces, *((name, 0.0) for name in [*NAMES, "<mask>"])], unk_id=8))
    crate.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    crate.save(str(tmp_path / "tokenizer.json"))
    before = ef.Tokenizer(tmp_path)
    after, kept_ids = with_entries_of(before, counts(before, ["Xab ab"]))
    assert kept_ids.tolist() == [1, 2, 3, 4, *range(5, 10)] and after.special_tokens["unk"] == 7
    for text in ("Xab ab", "ŋab"):
        assert kept_ids[after.encode_batch([text])[0]].tolist() == before.encode_batch([text])[0].tolist()


def test_trimming_without_unused_entries_changes_nothing(model: Path) -> None:
    before = ef.Tokenizer(model)
    after, _ = with_entries_of(before, counts(before, LINES))
    again, kept_ids = with_entries_of(after, counts(after, LINES))
    assert again.content_hash == after.content_hash and kept_ids.tolist() == list(range(after.vocab_size))


REFUSED = {
    "--cased": r"cased = True: applies to training a vocabulary only; remove cased or trim",
    "--sample 5000": r"sample = 5000: applies to training",
    "--out vocab.txt": r"vocab.txt: must be a folder, because a trimmed tokenizer has several files",
    "--out {full}": r".*full: not empty; choose another folder",
    "--size 7": r"size = 7: must be at least \d+, for special tokens, bytes and ASCII characters",
    "--trim {full}": r".*tokenizer.json: not found, nor vocab.txt",
    "{full}/empty.txt": r"the corpus is empty: the input has no tokens",
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_trimming_is_refused(model: Path, tmp_path: Path, words: str) -> None:
    full = tmp_path / "full"
    out = tmp_path / "out"
    full.mkdir()
    (full / "empty.txt").write_text("\n")
    text = full / "text.txt"
    text.write_text("\n".join(LINES))
    added = words.format(full=full).split()
    texts = [] if not words.startswith("--") else [text]
    usual = {"--trim": model, "--out": out}
    options = [part for pair in usual.items() if pair[0] not in added for part in pair]
    done = run("vocab", *texts, *options, *added)
    assert done.returncode == 2 and re.match(f"electra-fast: error: {REFUSED[words]}", done.stderr.splitlines()[-1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_text_of_another_script_is_reported(tmp_path: Path) -> None:
    crate = word_piece()
    crate.add_special_tokens(["<mask>"])
    crate.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("слово за словом the")
    done = run("vocab", tmp_path / "text.txt", "--trim", tmp_path / "tokenizer.json", "--out", tmp_path / "out")
    assert re.search(r"/out: \d+ of 401 entries; 75.00% of the text's tokens are \[UNK\]\nturn the model", done.stdout)
    assert "warning: 75.0% of the tokens are [UNK] (of a sample, most often: " in done.stderr
