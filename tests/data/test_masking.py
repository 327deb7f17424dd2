"""Masks in batches, compared with the distributions that each recipe specifies."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from electra_fast.data.loader import BatchLoader, to_torch

MASK = 4
SPECIALS = torch.tensor([0, 2, 3])


def load(corpus: Path, masking: str, epochs: int, length: int = 128, prob: float = 0.15) -> dict[str, torch.Tensor]:
    """All batches of some epochs as tensors, with each row's original ids and length."""
    options: dict[str, Any] = {"masking": masking, "mask_prob": prob, "epochs": epochs, "seed": 1}
    loader = BatchLoader(corpus, sequence_length=length, batch_size=1000, **options)
    parts = [to_torch(batch) for batch in loader]
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "cu_seqlens"}
    rows["used"] = rows["masked_weights"] > 0
    rows["lengths"] = (rows["segment_ids"] > 0).sum(1)
    row = torch.arange(len(rows["used"]))[:, None].expand_as(rows["used"])
    rows["originals"] = rows["input_ids"].clone()
    place = row[rows["used"]], rows["masked_positions"][rows["used"]].long()
    rows["originals"][place] = rows["masked_ids"][rows["used"]]
    rows["drawn"] = torch.zeros_like(rows["input_ids"])
    rows["drawn"].index_put_(place, torch.ones(len(place[0]), dtype=torch.int32), accumulate=True)
    return rows


def expected_counts(masking: str, lengths: torch.Tensor, slots: int, prob: float = 0.15) -> list[int]:
    if masking == "paper":
        return [math.ceil(prob * n) for n in lengths.tolist()]
    return [max(1, min(slots, round(n * prob))) for n in lengths.tolist()]


@pytest.mark.parametrize("length", [8, 32, 128, 512])
@pytest.mark.parametrize("masking", ["paper", "google", "bert", "whole-word", "span"])
def test_the_number_of_masked_tokens_is_exact(corpus: Path, masking: str, length: int):
    rows = load(corpus, masking, 1, length)
    slots = rows["used"].shape[1]
    published = max(1, int((0.15 + 0.005) * length))
    assert slots == (math.ceil(0.15 * length) if masking == "paper" else published)
    wanted = torch.tensor(expected_counts(masking, rows["lengths"], slots))
    if masking != "google":  # distinct positions: at most the number of ordinary tokens
        ordinary = ~torch.isin(rows["originals"], SPECIALS) & (rows["segment_ids"] > 0)
        wanted = torch.minimum(wanted, ordinary.sum(1))
    assert torch.equal(rows["used"].sum(1), wanted)
    unused = ~rows["used"]
    assert not rows["masked_positions"][unused].any() and not rows["masked_ids"][unused].any()


@pytest.mark.parametrize("masking", ["paper", "google", "bert", "whole-word", "span"])
def test_only_ordinary_tokens_are_drawn_and_others_stay(corpus: Path, masking: str):
    rows = load(corpus, masking, 3)
    assert not torch.isin(rows["originals"][rows["drawn"] > 0], SPECIALS).any()
    assert (rows["segment_ids"][rows["drawn"] > 0] > 0).all()
    assert not (rows["originals"] == MASK).any()
    untouched = rows["drawn"] == 0
    assert torch.equal(rows["input_ids"][untouched], rows["originals"][untouched])
    if masking != "google":
        assert rows["drawn"].max() == 1
    if masking not in ("google", "bert"):
        assert (rows["input_ids"][rows["drawn"] > 0] == MASK).all()


def test_google_draws_with_replacement(corpus: Path):
    rows = load(corpus, "google", 60)
    one = (rows["lengths"] == 128) & (rows["segment_ids"].amax(1) == 1)
    drawn, ids = rows["drawn"][one], rows["input_ids"][one]
    assert len(drawn) > 10_000
    distinct = (drawn > 0).sum(1).double()
    assert (drawn.sum(1) == 19).all()
    assert abs(distinct.mean() - 126 * (1 - (125 / 126) ** 19)) < 5 * distinct.std() / len(distinct) ** 0.5
    for times in (1, 2):  # masked unless no draw selects the position
        share = (ids[drawn == times] == MASK).double()
        expected = 1 - 0.15**times
        assert abs(share.mean() - expected) < 5 * (expected * (1 - expected) / len(share)) ** 0.5
    assert uneven(drawn[:, 1:127].sum(0)) < 5


def test_bert_replaces_eight_one_one(corpus: Path):
    rows = load(corpus, "bert", 60)
    now, before = rows["input_ids"][rows["drawn"] > 0], rows["originals"][rows["drawn"] > 0]
    count = len(now)
    shares = {"masked": now == MASK, "kept": now == before}
    shares["random"] = ~shares["masked"] & ~shares["kept"]
    for name, expected in {"masked": 0.8, "kept": 0.1, "random": 0.1}.items():
        deviation = (expected * (1 - expected) / count) ** 0.5
        assert abs(shares[name].double().mean() - expected) < 5 * deviation, name
    random = now[shares["random"]]
    assert uneven(torch.histc(random.double(), bins=20, min=0, max=40_000)) < 5
    whole = rows["lengths"] == 128
    one = whole & (rows["segment_ids"].amax(1) == 1)
    assert uneven(rows["drawn"][one][:, 1:127].sum(0)) < 5


def uneven(counts: torch.Tensor) -> float:
    """Chi-squared statistic for equal counts, in standard deviations above its mean."""
    counts = counts.double()
    freedom = len(counts) - 1
    chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    return (chi2 - freedom) / (2 * freedom) ** 0.5


def test_masks_of_a_row_change_with_the_epoch(corpus: Path):
    rows = load(corpus, "paper", 40)
    texts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for original, drawn in zip(rows["originals"].tolist(), rows["drawn"].tolist(), strict=True):
        texts.setdefault(tuple(original), []).append(tuple(drawn))
    repeated = [masks for masks in texts.values() if len(masks) > 1]
    assert repeated
    common = sum(count - 1 for masks in repeated for count in Counter(masks).values())
    assert common <= sum(len(masks) for masks in repeated) / 100
