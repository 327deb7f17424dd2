"""Masks of whole words and cuts at words and lines, compared with a plain implementation on the vocabulary's entries.

Here, starts of words are read from `vocab.txt`, by `##`, and starts of lines from the text.
"""

import json
import shutil

import pytest
import torch

import electra_fast
from electra_fast.data.loader import BatchLoader, to_torch

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS = 2
SEP = 3
MASK = 4
LENGTH = 64


@pytest.fixture(scope="module")
def begins(tiny_vocab):
    """A flag for each id that begins a word."""
    return [not entry.startswith("##") for entry in tiny_vocab.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def open_loader(tiny_corpus):
    def open_with(**changes):
        options = {"sequence_length": LENGTH, "batch_size": 50, "seed": 5, "epochs": 1}
        return BatchLoader(tiny_corpus, **(options | changes))

    return open_with


def rows_of(loader):
    """For each row, without padding: the original ids, the ids in the batch, and the masked positions in order."""
    for batch in loader:
        tensors = to_torch(batch)
        for row in range(batch.num_rows):
            ids = tensors["input_ids"][row][tensors["segment_ids"][row] > 0].tolist()
            used = tensors["masked_weights"][row] > 0
            positions = tensors["masked_positions"][row][used].tolist()
            originals = list(ids)
            for position, original in zip(positions, tensors["masked_ids"][row][used].tolist(), strict=True):
                originals[position] = original
            yield originals, ids, positions


def words_of(ids, begins):
    """The positions of each word of a row."""
    words = []
    for position, token in enumerate(ids):
        if token in (CLS, SEP, MASK):
            continue
        if begins[token] or ids[position - 1] in (CLS, SEP, MASK):
            words.append([])
        words[-1].append(position)
    return words


@pytest.mark.parametrize(("masking", "length", "prob"), [("whole-word", 64, 0.15), ("span", 32, 0.4)])
def test_whole_words_are_masked_up_to_the_budget(open_loader, begins, masking, length, prob):
    masked = allowed = 0
    for originals, ids, positions in rows_of(open_loader(masking=masking, sequence_length=length, mask_prob=prob)):
        words = words_of(originals, begins)
        chosen = set(positions)
        budget = max(1, min(round(prob * len(ids)), int((prob + 0.005) * length)))
        masked = masked + len(positions)
        allowed = allowed + budget
        assert len(chosen) == len(positions) <= budget
        assert ids == [MASK if at in chosen else was for at, was in enumerate(originals)]
        if all(len(word) > budget for word in words):
            assert len(positions) == min(budget, sum(map(len, words)))
            continue
        assert all(chosen.issuperset(word) or chosen.isdisjoint(word) for word in words)
        assert all(chosen.issuperset(word) or len(positions) + len(word) > budget for word in words)
    assert masked > 0.99 * allowed, "skipped words leave more of the budget than they should"


def test_vocabulary_must_mark_words(tmp_path):
    tokens = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"])}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    out = tmp_path / "shards"
    electra_fast.prepare(iter(["cat cat"]), vocab=tmp_path / "tokenizer.json", out=out, progress=False)
    cases = ("masking", "whole-word", '"tokens", "with-repeats" or "80-10-10"'), ("cut_at", "word", '"token" or "line"')
    for key, value, others in cases:
        message = rf'^{key} = "{value}": .*tokenizer.json does not mark where words begin; choose {others}'
        with pytest.raises(ValueError, match=message):
            BatchLoader(out, sequence_length=8, batch_size=1, **{key: value})
    next(BatchLoader(out, sequence_length=8, batch_size=1, cut_at="line"))


def test_other_maskings_do_not_open_the_tokenizer(tiny_corpus, tmp_path):
    copy = shutil.copytree(tiny_corpus, tmp_path / "shards")
    (copy / "vocab.txt").unlink()
    options = {"sequence_length": 16, "batch_size": 1}
    next(BatchLoader(copy, cut_at="line", **options))
    with pytest.raises(FileNotFoundError, match=r"vocab\.txt"):
        BatchLoader(copy, **options, cut_at="word")


def test_packing_examples_refuses_cut_at(open_loader):
    assert "cut_at" not in open_loader(packing="examples").state()["options"]
    with pytest.raises(ValueError, match='^cut_at = "line": needs packing = "best-fit"; "examples" already'):
        open_loader(packing="examples", cut_at="line")
    with pytest.raises(ValueError, match='^cut_at = "page": must be "token", "word" or "line"$'):
        open_loader(cut_at="page")


def test_run_trains_on_whole_words(tiny_corpus, tmp_path):
    """The configuration's keys reach the loader, and an objective that needs distinct positions accepts the masks."""
    from tiny_run import tiny_config

    changes = {"data.masking": "span", "data.cut_at": "word", "data.packing": "best-fit"}
    config = tiny_config().override(changes | {"objective.name": "electra15", "data.corpus": str(tiny_corpus)})
    batch = to_torch(next(BatchLoader.from_config(config)))
    used = batch["masked_weights"] > 0
    assert bool((torch.gather(batch["input_ids"], 1, batch["masked_positions"].long())[used] == MASK).all())
    options = BatchLoader.from_config(config).state()["options"]
    assert "masking=span" in options and "cut_at=word" in options
