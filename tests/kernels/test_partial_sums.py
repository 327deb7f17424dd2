"""Sums of two matrices of partial sums are right whatever their shapes, and compile."""

import torch
from comparison import DEVICE
from lib.ahead_of_time import compile_launches

from electra_fast.kernels.partial_sums import partial_sums


def test_sums_of_rows():
    """More rows than an iteration has, fewer, none; columns that end within a block, and wider blocks."""
    random = torch.Generator().manual_seed(0)
    for shapes in (((600, 70), (3, 96)), ((1, 5), (257, 64)), ((0, 32), (2, 1)), ((130, 9000), (2, 1))):
        matrices = [torch.randn(shape, generator=random).to(DEVICE) for shape in shapes]
        exact = torch.cat([x.double().sum(0) for x in matrices])
        torch.testing.assert_close(partial_sums(*matrices).double(), exact, rtol=1e-5, atol=1e-5)
    torch.library.opcheck(partial_sums, matrices, test_utils=("test_schema", "test_faketensor"))


def test_compiles_ahead_of_time():
    matrices = [torch.zeros(shape, device=DEVICE) for shape in ((128, 768), (660, 768))]
    (code,) = compile_launches(lambda: partial_sums(*matrices)).values()
    code.check(programs_per_sm=3)
