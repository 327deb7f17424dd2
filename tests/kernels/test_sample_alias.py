"""The alias kernel equals its reference bit for bit."""

import pytest
import torch
from comparison import DEVICE
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import sample_alias as kernels
from electra_fast.ops.sampling import alias_table, philox, sample_alias_reference

KEY = torch.tensor([2**40 + 7, 12], device=DEVICE)


def make_table(vocab_size):
    weights = 1 / (torch.arange(vocab_size).double() + 1)
    weights[1 : vocab_size // 3] = 0
    return alias_table(weights.to(DEVICE))


# None; several blocks of slots in any order, up to the largest that a counter has room for; strides.
@pytest.mark.parametrize(("num_slots", "vocab_size"), [(0, 7), (700, 30_522)])
def test_equals_reference(num_slots, vocab_size):
    slot_M = torch.randint(2**32, (num_slots,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table_V2 = make_table(vocab_size)
    expected = sample_alias_reference(table_V2, slot_M, KEY)
    strided = torch.stack([slot_M, -slot_M], dim=1)[:, 0]
    for inputs in ((table_V2, slot_M), (table_V2.T.contiguous().T, strided)):
        found = kernels.sample_alias(*inputs, KEY)
        assert found.dtype == torch.int64 and torch.equal(found, expected)


def test_thresholds_at_and_beside_the_word_that_is_drawn():
    """The comparison is strict and unsigned: words above 2^31 are not negative."""
    slot_M = torch.arange(64, device=DEVICE)
    table_V2 = make_table(2)
    zero, step, mask = KEY[1] * 0, KEY[1], 2**32 - 1
    coin_M = philox((zero, slot_M, step, zero + 2), (KEY[0] & mask, KEY[0] >> 32))[1]
    assert coin_M.max() > 2**31 > coin_M.min()
    for threshold in (0, 2**31, 2**32, *coin_M[:4].tolist(), *(coin_M[:4] + 1).tolist()):
        table_V2[:, 0] = threshold
        table_V2[:, 1] = torch.tensor([1, 0])
        found = kernels.sample_alias(table_V2, slot_M, KEY)
        assert torch.equal(found, sample_alias_reference(table_V2, slot_M, KEY))


def test_custom_op():
    torch.library.opcheck(kernels.sample_alias, (make_table(9), torch.arange(20, device=DEVICE), KEY))


def test_compiles_ahead_of_time():
    arguments = (make_table(96), torch.arange(64, device=DEVICE), KEY)
    (code,) = compile_launches(lambda: kernels.sample_alias(*arguments)).values()
    code.check(programs_per_sm=8)
