"""The corrupt kernel equals its reference exactly."""

import pytest
import torch
from comparison import DEVICE, assert_same_bits
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import corrupt
from electra_fast.ops import operations as ops


def make_arguments(num_rows, length, num_slots, id_dtype=torch.int32):
    """Rows with unused slots, positions masked more than once, and samples equal to the original token."""
    random = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(5, 50, (num_rows, length), generator=random)
    column_BN = torch.randint(length, (num_rows, num_slots), generator=random)
    original_M = ids_BL.gather(1, column_BN).flatten()
    used_BN = torch.rand(num_rows, num_slots, generator=random) < 0.9
    position_BN = column_BN + torch.arange(num_rows)[:, None] * length
    position_M = torch.where(used_BN, position_BN, num_rows * length).flatten()
    masked_BL = ids_BL.scatter(1, torch.where(used_BN, column_BN, column_BN[:, :1]), 4)
    sample_M = torch.randint(5, 50, (num_rows * num_slots,), generator=random)
    right_M = torch.rand(sample_M.shape, generator=random) < 0.4
    sample_M = torch.where(right_M, original_M, sample_M)
    return [x.to(DEVICE) for x in (masked_BL.to(id_dtype), position_M, original_M, sample_M)]


# Rows shorter and longer than a block of tokens, slots fewer and more than a block of slots; no slots; no rows.
@pytest.mark.parametrize("shape", [(3, 12, 3), (2, 150, 20), (2, 70, 0), (0, 12, 3)])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_equals_reference(shape, id_dtype):
    arguments = make_arguments(*shape, id_dtype)
    found, expected = corrupt.corrupt(*arguments), ops.corrupt_reference(*arguments)
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert_same_bits(found, expected)
    assert shape != (2, 150, 20) or 0 < found[1].sum() < found[1].numel()


def test_large_ids_do_not_wrap():
    """The sum of one position's samples exceeds 2^31; its mean does not."""
    masked_BL = torch.full((1, 3), 4, device=DEVICE)
    position_M = torch.ones(5, dtype=torch.int64, device=DEVICE)
    sample_M = 2**31 - torch.tensor([1, 2, 5, 7, 9], device=DEVICE)
    corrupted_T, _ = corrupt.corrupt(masked_BL, position_M, torch.full_like(sample_M, 9), sample_M)
    assert corrupted_T.tolist() == [4, 2**31 - 5, 4]


def test_custom_op():
    torch.library.opcheck(corrupt.corrupt, tuple(make_arguments(3, 12, 3)))


def test_compiles_ahead_of_time():
    (code,) = compile_launches(lambda: corrupt.corrupt(*make_arguments(2, 128, 20))).values()
    code.check(programs_per_sm=8)
