"""The fused embedding equals its reference with every gradient, and compiles for supported GPUs."""

import pytest
import torch
from comparison import DEVICE, KEY, assert_no_worse, assert_same_bits, output_and_gradients
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import embedding_norm as kernels
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

VOCAB, EPS = 300, 1e-12


def random_inputs(num_tokens, width, num_positions):
    """Ids, tables with the norm's weight and bias, and the gradient of the output in fp64."""
    random = torch.Generator().manual_seed(num_tokens + width)
    sizes = (VOCAB, num_positions, 2)
    ids = [torch.randint(0, size, (num_tokens,), generator=random).to(DEVICE, torch.int32) for size in sizes]
    shapes = [*((size, width) for size in sizes), (width,), (width,)]
    tables = [torch.randn(shape, generator=random).to(DEVICE) for shape in shapes]
    return ids, tables, torch.randn(num_tokens, width, generator=random, dtype=torch.float64).to(DEVICE)


def eager(ids, dtype, dropout):
    def function(token, position, type_, weight, bias):
        return ops.embedding_norm_reference(tuple(ids), (token, position, type_), weight, bias, EPS, dtype, dropout)

    return function


def kernel(ids, dtype, dropout):
    return lambda *tables: kernels.embedding_norm(*ids, *tables, EPS, dtype, *dropout.arguments)[0]


# More tiles than programs, and a width that is no power of two; rows of a tile each.
@pytest.mark.parametrize(
    ("num_tokens", "width", "num_positions", "probability", "dtype"),
    [(100, 72, 130, 0.1, torch.bfloat16), (17, 1024, 20, 0.0, torch.float32)],
)
def test_equals_reference(monkeypatch, num_tokens, width, num_positions, probability, dtype):
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    ids, tables, dy = random_inputs(num_tokens, width, num_positions)
    dy, dropout = dy.to(dtype), Dropout(probability, KEY, 5)
    truth = output_and_gradients(eager(ids, torch.float64, dropout), dy, [x.double() for x in tables])
    theirs = output_and_gradients(eager(ids, dtype, dropout), dy, tables)
    found = output_and_gradients(kernel(ids, dtype, dropout), dy, tables)
    assert_no_worse(found, theirs, truth, num_roundings=2)


def test_sums_by_position_in_chunks(monkeypatch):
    """Chunks and blocks that divide nothing evenly; a position without tokens gets 0."""
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 30)
    random = torch.Generator().manual_seed(0)
    dz, positions = torch.randn(900, 72, generator=random), torch.randint(0, 130, (900,), generator=random)
    found = kernels.sum_by_position(dz.to(DEVICE), positions.to(DEVICE), 140, True)
    expected = torch.zeros(140, 72, dtype=torch.float64).index_add_(0, positions, dz.double())
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
    assert (found[130:] == 0).all()


def test_strides_and_the_dtype_of_ids_do_not_matter():
    ids, tables, dy = random_inputs(50, 64, 32)
    dropout = Dropout(0.1, KEY, 5)
    expected = output_and_gradients(kernel(ids, torch.float32, dropout), dy, tables)
    strided = [torch.stack((x, x), dim=1)[:, 0].long() for x in ids]
    found = output_and_gradients(kernel(strided, torch.float32, dropout), dy.T.contiguous().T, tables)
    assert_same_bits(found, expected)


def test_registered_for_autograd_and_compilation():
    ids, tables, dy = random_inputs(5, 64, 16)
    dropout = (0.1, KEY, 3)
    _, mean, rstd = kernels.embedding_norm(*ids, *tables, EPS, torch.bfloat16, *dropout)
    torch.library.opcheck(kernels.embedding_norm_backward, (dy, *ids, *tables[:4], mean, rstd, *dropout))
    torch.library.opcheck(kernels.sum_by_position, (dy.float(), ids[1], 16, True))
    leaves = [x.requires_grad_() for x in tables]
    torch.library.opcheck(kernels.embedding_norm, (*ids, *leaves, EPS, torch.bfloat16, *dropout))


# At width 1024 ptxas keeps one scalar on the stack, which each program writes and reads once.
@pytest.mark.parametrize(("width", "capability"), [(128, 80), (1024, 90)])
def test_compiles_ahead_of_time(width, capability):
    ids, tables, dy = random_inputs(32, width, 128)
    dropout = (0.1, KEY, 5)

    def launch():
        y, mean, rstd = kernels.embedding_norm(*ids, *tables, EPS, torch.bfloat16, *dropout)
        dz, _ = kernels.embedding_norm_backward(dy.bfloat16(), *ids, *tables[:4], mean, rstd, *dropout)
        kernels.sum_by_position(dz, ids[1], 128, False)

    forward, backward, sums = compile_launches(launch, capability).values()
    forward.check(kernels.FORWARD_PROGRAMS_PER_SM, max_spilled_bytes=8)
    backward.check(kernels.BACKWARD_PROGRAMS_PER_SM, max_spilled_bytes=8)
    sums.check(programs_per_sm=2)
    assert sums.tensor_core_instructions > 0
