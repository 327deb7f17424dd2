"""Philox against its published test vectors, and samples against their distributions."""

import math

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from electra_fast.errors import InputError
from electra_fast.ops.sampling import alias_table, philox, sample_alias_reference, sample_categorical

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
def test_philox_matches_random123_test_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    actual = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in actual) == expected


def draw(logits_V: Tensor, num_samples: int, seed: int = 3, step: int = 5) -> Tensor:
    """Returns samples of slots 0, 1, … from one distribution, in batches whose slots differ from their row indices."""
    key = torch.tensor([seed, step])
    batches = torch.arange(num_samples).split(20_000)
    return torch.cat([sample_categorical(logits_V.expand(len(slots), -1), slots, key) for slots in batches])


def p_value(samples: Tensor, probability_V: Tensor) -> float:
    """Returns the chi-squared goodness of fit; entries with an expected count under 10 are pooled."""
    counts = torch.bincount(samples, minlength=len(probability_V)).double()
    expected = probability_V.double() * len(samples)
    rare = expected < 10
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = expected > 0
    statistic = ((counts[keep] - expected[keep]) ** 2 / expected[keep]).sum().item()
    return float(chi2.sf(statistic, int(keep.sum()) - 1))


def skewed(vocab_size: int) -> Tensor:
    """Returns logits with one entry far more likely than the rest."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    logits[vocab_size // 2] += 4
    return logits


@pytest.mark.parametrize(
    "logits", [skewed(5), skewed(128), skewed(300), torch.tensor([-6.0, 0.0, 3.0]).repeat_interleave(128)]
)
def test_samples_follow_the_softmax(logits: Tensor) -> None:
    """The last logits have tiles of very different probability."""
    samples = draw(logits, 100_000)
    assert p_value(samples, logits.softmax(-1)) > 1e-3
    # The test is sensitive enough to reject a slightly flatter distribution.
    assert p_value(samples, (logits * 0.9).softmax(-1)) < 1e-6


def test_neighboring_slots_steps_and_seeds_are_independent() -> None:
    logits = torch.zeros(16)
    uniform = torch.full((256,), 1 / 256)
    first = draw(logits, 50_000)
    others = {"slot": first.roll(1), "step": draw(logits, 50_000, step=6), "seed": draw(logits, 50_000, seed=4)}
    for name, other in others.items():
        assert p_value(first * 16 + other, uniform) > 1e-3, name
        assert abs((first == other).double().mean().item() - 1 / 16) < 0.006, name


def test_slot_sample_is_independent_of_subset_and_order() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 700, generator=random)
    slots = torch.randperm(10_000, generator=random)[:200]
    key = torch.tensor([2**40 + 1, 9])
    whole = sample_categorical(logits, slots, key)
    for rows in (torch.arange(50, 120), torch.randperm(200, generator=random), torch.tensor([7])):
        assert torch.equal(sample_categorical(logits[rows], slots[rows], key), whole[rows])
    for changed in ((2**40 + 2, 9), (2**41 + 1, 9), (2**40 + 1, 10)):
        repeated = sample_categorical(logits, slots, torch.tensor(changed))
        assert (repeated != whole).double().mean() > 0.9
    assert (sample_categorical(logits, slots + 1, key) != whole).double().mean() > 0.9


@pytest.mark.parametrize("low", [-math.inf, -1000.0])
def test_entries_of_probability_0_are_never_sampled(low: float) -> None:
    vocab_size = 300
    logits = torch.full((vocab_size,), low)
    allowed = torch.tensor([1, vocab_size // 2, vocab_size - 2])
    logits[allowed] = torch.tensor([0.0, 1.0, -1.0])
    samples = draw(logits, 20_000)
    assert sorted(set(samples.tolist())) == allowed.tolist()


def test_half_precision_logits_are_sampled_in_full_precision() -> None:
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = torch.arange(64)
    key = torch.tensor([1, 1])
    assert torch.equal(sample_categorical(logits, slots, key), sample_categorical(logits.float(), slots, key))


def zipf(vocab_size: int) -> Tensor:
    """Returns weights like the frequencies of words, with some words that never occur."""
    weights = 1 / (torch.arange(vocab_size).double() + 1)
    random = torch.Generator().manual_seed(vocab_size)
    weights[torch.randperm(vocab_size, generator=random)[: vocab_size // 4]] = 0
    return weights


WEIGHTS = {
    "zipf": zipf(3000),
    "long": zipf(250_000),
    "uniform": torch.full((300,), 0.1, dtype=torch.float64),
    "counts": torch.tensor([0, 0, 7, 1, 0, 123_456_789_012]),
    "one": torch.tensor([0.0, 2.0, 0.0]),
    "single": torch.tensor([5.0]),
    "huge": torch.tensor([1e308, 1.5e308, 0, 1e308], dtype=torch.float64),
    "tiny": torch.tensor([5e-324, 1e-323, 0], dtype=torch.float64),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_alias_table_has_the_probabilities_of_its_weights(name: str) -> None:
    weights = WEIGHTS[name]
    vocab_size = len(weights)
    table = alias_table(weights)
    assert table.shape == (vocab_size, 2) and table.dtype == torch.int64 and table.is_contiguous()
    threshold, alias = table.unbind(1)
    assert ((threshold >= 0) & (threshold <= 2**32)).all() and ((alias >= 0) & (alias < vocab_size)).all()
    # In integers, every row has 2^32 units of probability for its entry and its alias.
    units = threshold.index_add(0, alias, 2**32 - threshold)
    assert units.sum() == vocab_size * 2**32 and not units[weights == 0].any()
    expected = weights.double() / weights.max()
    expected /= expected.sum()
    assert (units.double() / (vocab_size * 2**32) - expected).abs().max() < 2**-31


def test_equal_weights_always_keep_the_entry() -> None:
    for weight in (1, 0.1, 3e-300):
        threshold, alias = alias_table(torch.full((30_522,), weight, dtype=torch.float64)).unbind(1)
        assert (threshold == 2**32).all() and torch.equal(alias, torch.arange(30_522))


def test_invalid_weights_are_rejected() -> None:
    for weights, message in (
        ([0.0, 0.0], "the weights of all 2 entries are 0"),
        ([], "the weights of all 0 entries are 0"),
        ([1.0, -0.5], "weight of entry 1 = -0.5: must be finite"),
        ([math.nan, 1.0], "weight of entry 0 = nan: must be finite"),
        ([1.0, 2.0, math.inf], "weight of entry 2 = inf: must be finite"),
    ):
        with pytest.raises(InputError, match=message):
            alias_table(torch.tensor(weights))


def draw_alias(weights_V: Tensor, num_samples: int, seed: int = 3, step: int = 5) -> Tensor:
    return sample_alias_reference(alias_table(weights_V), torch.arange(num_samples), torch.tensor([seed, step]))


@pytest.mark.parametrize("name", ["zipf", "uniform", "counts", "single"])
def test_alias_samples_follow_the_weights(name: str) -> None:
    weights = WEIGHTS[name].double()
    samples = draw_alias(weights, 300_000)
    assert not weights[samples].eq(0).any()
    assert (weights > 0).sum() == 1 or p_value(samples, weights / weights.sum()) > 1e-3
    if name == "zipf":  # the test is sensitive enough to reject a slightly flatter distribution
        assert p_value(samples, weights**0.95 / (weights**0.95).sum()) < 1e-6


def test_alias_samples_depend_on_slot_step_and_seed_only() -> None:
    table = alias_table(zipf(3000))
    slots = torch.arange(1000)
    key = torch.tensor([2**40 + 1, 9])
    whole = sample_alias_reference(table, slots, key)
    for part in (slots[5:10], slots.flip(0), slots[7:8], slots[:0]):
        assert torch.equal(sample_alias_reference(table, part, key), whole[part])
    uniform = torch.ones(16)
    pairs = torch.full((256,), 1 / 256)
    first = draw_alias(uniform, 50_000)
    others = {"step": draw_alias(uniform, 50_000, step=6), "seed": draw_alias(uniform, 50_000, seed=2**32 + 3)}
    for name, other in (others | {"slot": first.roll(1)}).items():
        assert p_value(first * 16 + other, pairs) > 1e-3, name
