"""Keyed dropout: kernel and reference draw the same mask, and it is a function of its key alone."""

import itertools

import pytest
import torch
from comparison import DEVICE, zeros
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import dropout as kernels
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, use_impl

KEY = torch.tensor([2**40 + 7, 12, 2**31 + 5], device=DEVICE)


def keep_mask(num_tokens, width, dropout):
    return ops.dropout_reference(torch.ones(num_tokens, width, device=DEVICE), dropout) != 0


# Several blocks of tokens; a width that is no power of two; a probability next to 1.
@pytest.mark.parametrize(("num_tokens", "width", "probability"), [(50, 96, 0.1), (3, 66, 0.999)])
def test_equals_reference(num_tokens, width, probability):
    dropout = Dropout(probability, KEY, 3)
    x = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(0)).to(DEVICE).requires_grad_()
    found = kernels.dropout(x, probability, KEY, dropout.call_index)
    expected = ops.dropout_reference(x, dropout)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in (found, expected)))


def test_keeps_the_right_fraction_in_every_row_and_column():
    mask = keep_mask(4000, 256, Dropout(0.1, KEY, 1))
    deviation = (0.1 * 0.9) ** 0.5
    assert abs(mask.float().mean() - 0.9) < 4 * deviation / mask.numel() ** 0.5
    for along, number in ((0, 4000), (1, 256)):
        assert (mask.float().mean(along) - 0.9).abs().max() < 5 * deviation / number**0.5
    neighbors = (mask[:, 1:] & mask[:, :-1]).float().mean()
    assert abs(neighbors - 0.81) < 0.002


def test_every_key_and_call_index_has_its_own_mask():
    keys = [KEY + torch.tensor(delta, device=DEVICE) for delta in ([0, 0, 0], [1, 0, 0], [2**32, 0, 0], [0, 1, 0])]
    masks = [keep_mask(40, 256, Dropout(0.5, key, call_index)) for key in keys for call_index in (0, 1, 1 << 15)]
    for one, other in itertools.combinations(masks, 2):
        assert 0.4 < (one == other).float().mean() < 0.6


def test_micro_batches_share_one_mask():
    whole, later = keep_mask(30, 64, Dropout(0.5, KEY, 2)), KEY + torch.tensor([0, 0, 20], device=DEVICE)
    assert torch.equal(whole[20:], keep_mask(10, 64, Dropout(0.5, later, 2)))


def test_without_a_key_torch_draws():
    x = torch.ones(50, 8, device=DEVICE)
    torch.manual_seed(3)
    with use_impl("reference"):  # a CPU draws in a form of its own: tests/ops/test_cpu_ops.py
        found = ops.dropout(x, Dropout(0.3, None, 9))
    torch.manual_seed(3)
    assert torch.equal(found, torch.nn.functional.dropout(x, 0.3))
    assert ops.dropout(x, Dropout(0.0, KEY, 9)) is x


def test_registered_for_autograd_and_compilation():
    x = torch.randn(5, 64, device=DEVICE, requires_grad=True)
    torch.library.opcheck(kernels.dropout, (x, 0.1, KEY, 3))


def test_compiles_ahead_of_time():
    x = zeros(32, 256, dtype=torch.bfloat16)
    (code,) = compile_launches(lambda: kernels.dropout(x, 0.1, KEY, 5)).values()
    code.check(programs_per_sm=8)
