"""Philox against its published test vectors, and samples against the distribution they are drawn from."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from electra_fast.sampling import philox, sample_categorical

ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    found = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in found) == expected


def test_philox_of_a_tensor_is_philox_of_its_elements() -> None:
    counters = torch.tensor([0, 7, ONES])
    together = torch.stack(philox((counters, *words(1, 2, 3)), words(4, 5)))  # type: ignore[arg-type]
    for i, counter in enumerate(counters):
        alone = torch.stack(philox((counter, *words(1, 2, 3)), words(4, 5)))  # type: ignore[arg-type]
        assert torch.equal(together[:, i], alone)


def draw(logits_V: Tensor, num_samples: int, seed: int = 3, step: int = 5) -> Tensor:
    """Samples of slots 0, 1, … from one distribution, in batches whose slots differ from their row indices."""
    key = torch.tensor([seed, step])
    batches = torch.arange(num_samples).split(20_000)
    return torch.cat([sample_categorical(logits_V.expand(len(slots), -1), slots, key) for slots in batches])


def p_value(samples: Tensor, probability_V: Tensor) -> float:
    """Chi-squared goodness of fit; entries with an expected count under 10 are pooled."""
    counts = torch.bincount(samples, minlength=len(probability_V)).double()
    expected = probability_V.double() * len(samples)
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum().item()
    return float(chi2.sf(statistic, int(keep.sum()) - 1))


@pytest.mark.parametrize("vocab_size", [5, 127, 128, 300, 1000])
def test_samples_follow_the_softmax(vocab_size: int) -> None:
    random = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(vocab_size, generator=random) * 2
    logits[vocab_size // 2] += 4  # skewed: one entry is far likelier than the rest
    samples = draw(logits, 100_000)
    assert p_value(samples, logits.softmax(-1)) > 1e-3
    # The test has power: it rejects a slightly flatter distribution.
    assert p_value(samples, (logits * 0.9).softmax(-1)) < 1e-6


def test_samples_follow_the_softmax_across_tiles_of_very_different_probability() -> None:
    logits = torch.zeros(384)
    logits[:128], logits[256:] = -6, 3
    samples = draw(logits, 100_000)
    assert p_value(samples, logits.softmax(-1)) > 1e-3
    assert (samples < 128).any()


def test_neighbouring_slots_steps_and_seeds_are_independent() -> None:
    logits = torch.zeros(16)
    uniform = torch.full((256,), 1 / 256)
    first = draw(logits, 50_000)
    others = {"slot": first.roll(1), "step": draw(logits, 50_000, step=6), "seed": draw(logits, 50_000, seed=4)}
    for name, other in others.items():
        assert p_value(first * 16 + other, uniform) > 1e-3, name
        assert abs((first == other).double().mean().item() - 1 / 16) < 0.006, name


def test_a_slot_gets_the_same_sample_in_any_subset_and_order() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 700, generator=random)
    slots = torch.randperm(10_000, generator=random)[:200]
    key = torch.tensor([2**40 + 1, 9])
    whole = sample_categorical(logits, slots, key)
    for rows in (torch.arange(50, 120), torch.randperm(200, generator=random), torch.tensor([7])):
        assert torch.equal(sample_categorical(logits[rows], slots[rows], key), whole[rows])
    for changed in ((2**40 + 2, 9), (2**41 + 1, 9), (2**40 + 1, 10)):
        again = sample_categorical(logits, slots, torch.tensor(changed))
        assert (again != whole).double().mean() > 0.9
    assert (sample_categorical(logits, slots + 1, key) != whole).double().mean() > 0.9


@pytest.mark.parametrize("low", [-math.inf, -1000.0])
@pytest.mark.parametrize("vocab_size", [100, 300, 1000])
def test_entries_of_probability_0_are_never_drawn(low: float, vocab_size: int) -> None:
    logits = torch.full((vocab_size,), low)
    allowed = torch.tensor([1, vocab_size // 2, vocab_size - 2])
    logits[allowed] = torch.tensor([0.0, 1.0, -1.0])
    samples = draw(logits, 20_000)
    assert sorted(set(samples.tolist())) == allowed.tolist()


def test_half_precision_logits_are_sampled_in_full_precision() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots, key = torch.arange(64), torch.tensor([1, 1])
    assert torch.equal(sample_categorical(logits, slots, key), sample_categorical(logits.float(), slots, key))
