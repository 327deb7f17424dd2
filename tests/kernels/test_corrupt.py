"""The corrupt kernel equals its reference exactly."""

import pytest
import torch
from ahead_of_time import compile_launches
from comparison import DEVICE

from electra_fast.kernels import corrupt
from electra_fast.ops import operations as ops


def make_arguments(num_rows, length, num_slots, vocab=50, id_dtype=torch.int32, seed=0):
    """Rows with unused slots, positions masked more than once, and samples equal to the original token."""
    random = torch.Generator().manual_seed(seed)
    ids_BL = torch.randint(5, vocab, (num_rows, length), generator=random)
    column_BN = torch.randint(length, (num_rows, num_slots), generator=random)
    original_M = ids_BL.gather(1, column_BN).flatten()
    used_BN = torch.rand(num_rows, num_slots, generator=random) < 0.9
    position_BN = column_BN + torch.arange(num_rows)[:, None] * length
    position_M = torch.where(used_BN, position_BN, num_rows * length).flatten()
    masked_BL = ids_BL.scatter(1, torch.where(used_BN, column_BN, column_BN[:, :1]), 4)
    sample_M = torch.randint(5, vocab, (num_rows * num_slots,), generator=random)
    right_M = torch.rand(sample_M.shape, generator=random) < 0.4
    sample_M = torch.where(right_M, original_M, sample_M)
    return [x.to(DEVICE) for x in (masked_BL.to(id_dtype), position_M, original_M, sample_M)]


def assert_equals_reference(arguments):
    for found, expected in zip(corrupt.corrupt(*arguments), ops.corrupt_reference(*arguments), strict=True):
        assert found.dtype == expected.dtype and torch.equal(found, expected)


# One token, rows shorter and longer than a block of tokens, slots fewer and more than a block of slots, none.
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 12, 3), (5, 128, 20), (2, 507, 77), (2, 300, 0)])
def test_equals_reference(shape):
    arguments = make_arguments(*shape, id_dtype=torch.int64 if shape[1] == 128 else torch.int32)
    assert_equals_reference(arguments)
    replaced_T = corrupt.corrupt(*arguments)[1]
    assert shape[2] < 3 or 0 < replaced_T.sum() < replaced_T.numel()


def test_no_slot_used():
    masked_BL, position_M, original_M, sample_M = make_arguments(3, 130, 7)
    position_M.fill_(masked_BL.numel())
    corrupted_T, replaced_T = corrupt.corrupt(masked_BL, position_M, original_M, sample_M)
    assert torch.equal(corrupted_T, masked_BL.flatten()) and not replaced_T.any()


def test_large_ids_do_not_wrap():
    """The sum of one position's samples exceeds 2^31; its mean does not."""
    masked_BL = torch.full((1, 3), 4, device=DEVICE)
    position_M = torch.ones(5, dtype=torch.int64, device=DEVICE)
    sample_M = 2**31 - torch.tensor([1, 2, 5, 7, 9], device=DEVICE)
    arguments = [masked_BL, position_M, torch.full_like(sample_M, 9), sample_M]
    assert_equals_reference(arguments)
    assert corrupt.corrupt(*arguments)[0].tolist() == [4, 2**31 - 5, 4]


def test_no_rows():
    corrupted_T, replaced_T = corrupt.corrupt(*make_arguments(0, 12, 3))
    assert corrupted_T.shape == replaced_T.shape == (0,)


def test_custom_op():
    torch.library.opcheck(corrupt.corrupt, tuple(make_arguments(3, 12, 3)))


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    (code,) = compile_launches(lambda: corrupt.corrupt(*make_arguments(2, 128, 20)), capability).values()
    code.check(programs_per_sm=8)
