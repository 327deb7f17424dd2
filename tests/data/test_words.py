"""Masks of whole words and cuts at words and lines, compared with a plain transcription over the vocabulary's entries.

What begins a word is read from `vocab.txt` here, by its `##`; where lines begin, from the text.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import electra_fast
from electra_fast.data.corpus import Corpus
from electra_fast.data.inspect import show_row
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.prepare_report import contents

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
CLS, SEP, MASK = 2, 3, 4
LENGTH = 64
MASKINGS = ("whole-word", "span")
CUTS = ("word", "line")
Open = Callable[..., BatchLoader]


@pytest.fixture(scope="module")
def begins(tiny_vocab: Path) -> list[bool]:
    """For each id, whether it begins a word."""
    return [not entry.startswith("##") for entry in tiny_vocab.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def open_loader(tiny_corpus: Path) -> Open:
    def open_with(**changes: Any) -> BatchLoader:
        options: dict[str, Any] = {"sequence_length": LENGTH, "batch_size": 50, "seed": 5, "epochs": 1}
        return BatchLoader(tiny_corpus, **(options | changes))

    return open_with


def rows_of(loader: BatchLoader) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Of each row, without padding: the original ids, the ids in the batch, and the masked positions in their order."""
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


def words_of(ids: list[int], begins: list[bool]) -> list[list[int]]:
    """The positions of each word of a row."""
    words: list[list[int]] = []
    for position, token in enumerate(ids):
        if token in (CLS, SEP, MASK):
            continue
        if begins[token] or ids[position - 1] in (CLS, SEP, MASK):
            words.append([])
        words[-1].append(position)
    return words


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize(("length", "prob"), [(64, 0.15), (32, 0.4), (128, 0.02)])
def test_whole_words_are_masked_up_to_the_budget(
    open_loader: Open, begins: list[bool], masking: str, length: int, prob: float
):
    masked = allowed = 0
    for originals, ids, positions in rows_of(open_loader(masking=masking, sequence_length=length, mask_prob=prob)):
        words, chosen = words_of(originals, begins), set(positions)
        budget = max(1, min(round(prob * len(ids)), int((prob + 0.005) * length)))
        masked, allowed = masked + len(positions), allowed + budget
        assert len(chosen) == len(positions) <= budget
        assert all(
            now == (MASK if at in chosen else was) for at, (now, was) in enumerate(zip(ids, originals, strict=True))
        )
        if all(len(word) > budget for word in words):
            assert len(positions) == min(budget, sum(map(len, words)))
            continue
        assert all(chosen.issuperset(word) or chosen.isdisjoint(word) for word in words)
        assert all(chosen.issuperset(word) or len(positions) + len(word) > budget for word in words)
    assert masked > 0.99 * allowed, "skipped words leave more of the budget than they should"


def test_spans_are_longer_than_words(open_loader: Open, begins: list[bool]):
    """Adjacent words are masked together more often than by chance, and never as one n-gram across separators."""

    def share(masking: str) -> float:
        together = all_words = 0
        for originals, _, positions in rows_of(open_loader(masking=masking)):
            chosen = [word for word in words_of(originals, begins) if word[0] in positions]
            together += sum(left[-1] + 1 == right[0] for left, right in itertools.pairwise(chosen))
            all_words += len(chosen)
        return together / all_words

    # n-grams of 18/11 words on average: of the words, 7/18 follow another of theirs.
    assert share("whole-word") < 0.2 < 7 / 18 < share("span") < 0.55


def test_the_vocabulary_must_mark_words(tmp_path: Path):
    tokens = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat"])}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": "[UNK]"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model, "pre_tokenizer": {"type": "Whitespace"}}))
    out = tmp_path / "shards"
    electra_fast.prepare(iter(["cat cat"]), vocab=tmp_path / "tokenizer.json", out=out, progress=False)
    for option, others in (
        *(({"masking": masking}, '"paper", "google" or "bert"') for masking in MASKINGS),
        ({"cut_at": "word"}, '"token" or "line"'),
    ):
        (key, value), *_ = option.items()
        message = (
            rf'^{key} = "{value}": the entries of .*tokenizer.json do not mark where words begin; choose {others}, or '
            "prepare the text with a WordPiece, byte-level BPE or SentencePiece vocabulary$"
        )
        with pytest.raises(ValueError, match=message):
            BatchLoader(out, sequence_length=8, batch_size=1, **option)
    next(BatchLoader(out, sequence_length=8, batch_size=1, cut_at="line"))


def test_other_maskings_do_not_open_the_tokenizer(tiny_corpus: Path, tmp_path: Path):
    copy = shutil.copytree(tiny_corpus, tmp_path / "shards")
    (copy / "vocab.txt").unlink()
    options: dict[str, Any] = {"sequence_length": 16, "batch_size": 1}
    next(BatchLoader(copy, cut_at="line", **options))
    for needs in ({"masking": "span"}, {"cut_at": "word"}):
        with pytest.raises(FileNotFoundError, match=r"vocab\.txt"):
            BatchLoader(copy, **options, **needs)


@dataclass
class Numbered:
    """A corpus in which the n-th token has the n-th id, so that a token tells its place."""

    folder: Path
    num_tokens: int
    documents: set[int]
    """The first token of each document; likewise of each line and word."""
    lines: set[int]
    words: set[int]


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Numbered:
    """Documents of 1 to 40 lines of 1 to 12 words of 1 to 12 tokens, some lines blank."""
    rng, folder = random.Random(2), tmp_path_factory.mktemp("numbered")
    found = Numbered(folder / "shards", 0, set(), set(), set())
    entries, documents = list(SPECIAL_TOKENS), []
    while found.num_tokens < 15_000:
        found.documents.add(found.num_tokens)
        lines = []
        for _ in range(rng.randint(1, 40)):
            found.lines.add(found.num_tokens)
            words = []
            for _ in range(rng.randint(1, 12)):
                found.words.add(found.num_tokens)
                pieces = [f"x{at:x}" for at in range(found.num_tokens, found.num_tokens + rng.choice((1, 1, 2, 3, 12)))]
                found.num_tokens += len(pieces)
                entries += [piece if at == 0 else f"##{piece}" for at, piece in enumerate(pieces)]
                words.append("".join(pieces))
            lines += [" ".join(words), ""][: rng.choice((1, 1, 2))]
        documents.append("\n".join(lines))
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n")
    electra_fast.prepare(iter(documents), vocab=folder / "vocab.txt", out=found.folder, progress=False)
    assert Corpus(found.folder).num_tokens == found.num_tokens
    return found


@pytest.mark.parametrize("cut_at", CUTS)
@pytest.mark.parametrize("length", [8, 16, 64, 200])
def test_rows_begin_at_words_or_lines(numbered: Numbered, cut_at: str, length: int):
    points, seen = numbered.words if cut_at == "word" else numbered.lines, []
    for seed in range(3):
        loader = BatchLoader(numbered.folder, sequence_length=length, batch_size=64, seed=seed, epochs=1, cut_at=cut_at)
        num_rows, segments = loader.num_rows, []
        for ids, _, _ in rows_of(loader):
            num_rows -= 1
            ends = [at for at, token in enumerate(ids) if token == SEP]
            for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
                assert ids[start] == CLS
                segments.append([token - len(SPECIAL_TOKENS) for token in ids[start + 1 : end]])
        segments.sort()
        assert num_rows == 0 and list(itertools.chain(*segments)) == list(range(numbered.num_tokens))
        for segment in segments:
            assert numbered.documents.isdisjoint(segment[1:])
            # A word or line longer than a row is cut at tokens.
            full = length - 2
            assert segment[0] in points or points.isdisjoint(range(segment[0] - full + 1, segment[0]))
        seen.append({segment[0] for segment in segments})
    assert seen[0] != seen[1] != seen[2], "the seed moves the cuts"


@pytest.mark.parametrize("cut_at", CUTS)
def test_cuts_keep_every_token_and_resume_exactly(open_loader: Open, tiny_corpus: Path, cut_at: str):
    kept = contents(tiny_corpus, "best-fit", LENGTH, seed=5, cut_at=cut_at)
    assert kept.tokens == Corpus(tiny_corpus).num_tokens and kept.fill > 0.85
    whole = open_loader(cut_at=cut_at, epochs=2)
    next(whole)
    state = whole.state()
    assert state["options"].endswith(f"packing=best-fit cut_at={cut_at}") and len(json.dumps(state)) < 256
    rest = list(rows_of(whole))
    resumed = open_loader(cut_at=cut_at, epochs=2, num_threads=2)
    resumed.restore(state)
    assert list(rows_of(resumed)) == rest
    with pytest.raises(ValueError, match="^state: saved with options "):
        open_loader().restore(state)


def test_packing_google_has_cuts_of_its_own(open_loader: Open):
    assert "cut_at" not in open_loader(packing="google").state()["options"]
    for cut_at in CUTS:
        with pytest.raises(ValueError, match=rf'^cut_at = "{cut_at}" needs packing = "best-fit"; packing "google" is'):
            open_loader(packing="google", cut_at=cut_at)
    with pytest.raises(ValueError, match='^cut_at = "page": unknown; choose "token", "word" or "line"$'):
        open_loader(cut_at="page")


def test_a_run_trains_on_whole_words(tiny_corpus: Path, tmp_path: Path):
    """The keys of a configuration reach the loader, and an objective that needs distinct positions takes the masks."""
    from tiny_run import tiny_config

    changes = {"data.masking": "span", "data.cut_at": "word", "data.packing": "best-fit"}
    config = tiny_config().override(changes | {"objective.name": "electra15", "data.corpus": str(tiny_corpus)})
    batch = to_torch(next(BatchLoader.from_config(config)))
    used = batch["masked_weights"] > 0
    assert bool((torch.gather(batch["input_ids"], 1, batch["masked_positions"].long())[used] == MASK).all())
    assert (
        "masking=span" in (options := BatchLoader.from_config(config).state()["options"]) and "cut_at=word" in options
    )


@pytest.mark.parametrize("masking", MASKINGS)
def test_inspect_shows_a_row_with_masked_words(tiny_corpus: Path, capfd: pytest.CaptureFixture[str], masking: str):
    show_row(tiny_corpus, sequence_length=32, masking=masking, seed=0, cut_at="line")
    shown = capfd.readouterr().out
    assert shown.startswith("[CLS]") and "[MASK](" in shown
