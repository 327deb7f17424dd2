"""The alias kernel equals its reference bit for bit."""

import pytest
import torch
from ahead_of_time import compile_launches
from comparison import DEVICE

from electra_fast.kernels import sample_alias as kernels
from electra_fast.ops.sampling import alias_table, sample_alias_reference

KEY = torch.tensor([2**40 + 7, 12], device=DEVICE)


def make_table(vocab_size, is_uniform=False):
    weights = torch.ones(vocab_size) if is_uniform else 1 / (torch.arange(vocab_size).double() + 1)
    if not is_uniform:
        weights[1 : vocab_size // 3] = 0
    return alias_table(weights.to(DEVICE))


# Slots fewer and more than a block, in any order, up to the largest that a counter has room for.
@pytest.mark.parametrize(
    ("num_slots", "vocab_size", "is_uniform"),
    [(0, 7, False), (1, 1, True), (255, 7, False), (256, 30_522, True), (1111, 30_522, False)],
)
def test_equals_reference(num_slots, vocab_size, is_uniform):
    random = torch.Generator().manual_seed(num_slots)
    slot_M = torch.randint(2**32, (num_slots,), generator=random).to(DEVICE)
    table_V2 = make_table(vocab_size, is_uniform)
    assert table_V2.device.type == DEVICE
    found = kernels.sample_alias(table_V2, slot_M, KEY)
    assert found.dtype == torch.int64
    assert torch.equal(found, sample_alias_reference(table_V2, slot_M, KEY))


def test_thresholds_at_and_beside_the_word_that_is_drawn():
    """The comparison is strict and unsigned: words above 2^31 are not negative."""
    slot_M = torch.arange(64, device=DEVICE)
    table_V2 = make_table(2)
    for threshold in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32):
        table_V2[:, 0] = threshold
        table_V2[:, 1] = torch.tensor([1, 0])
        found = kernels.sample_alias(table_V2, slot_M, KEY)
        assert torch.equal(found, sample_alias_reference(table_V2, slot_M, KEY))


def test_slices_of_larger_tensors():
    table_V2, slot_M = make_table(90), torch.arange(40, device=DEVICE)
    strided = torch.stack([slot_M, -slot_M], dim=1)[:, 0]
    columns = table_V2.T.contiguous().T
    assert torch.equal(kernels.sample_alias(columns, strided, KEY), sample_alias_reference(table_V2, slot_M, KEY))


def test_custom_op():
    torch.library.opcheck(kernels.sample_alias, (make_table(9), torch.arange(20, device=DEVICE), KEY))


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    arguments = (make_table(96), torch.arange(64, device=DEVICE), KEY)
    (code,) = compile_launches(lambda: kernels.sample_alias(*arguments), capability).values()
    code.check(programs_per_sm=8)
