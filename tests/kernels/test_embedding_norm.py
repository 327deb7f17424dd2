"""The fused embedding equals its reference with every gradient, and compiles for supported GPUs."""

import pytest
import torch
import torch.nn.functional as F
from ahead_of_time import MAX_SHARED_BYTES, compile_kernels

from electra_fast.kernels import embedding_norm as kernels
from electra_fast.kernels.dropout import threshold
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = torch.tensor([2**40 + 7, 12, 77], device=DEVICE)
VOCAB, EPS = 300, 1e-12
SHAPES = [(1, 64, 40), (255, 128, 130), (507, 64, 512), (70, 256, 128), (33, 768, 64), (17, 1024, 20)]


def random_inputs(num_tokens, width, num_positions, ids_dtype=torch.int32):
    """Ids, tables with the norm's weight and bias, and the gradient of the output in fp64."""
    random = torch.Generator().manual_seed(num_tokens + width)
    sizes = (VOCAB, num_positions, 2)
    ids = [torch.randint(0, size, (num_tokens,), generator=random).to(DEVICE, ids_dtype) for size in sizes]
    shapes = [*((size, width) for size in sizes), (width,), (width,)]
    tables = [torch.randn(shape, generator=random).to(DEVICE) for shape in shapes]
    return ids, tables, torch.randn(num_tokens, width, generator=random, dtype=torch.float64).to(DEVICE)


def eager(ids, dtype, dropout):
    def function(token, position, type_, weight, bias):
        return ops.embedding_norm_reference(tuple(ids), (token, position, type_), weight, bias, EPS, dtype, dropout)

    return function


def kernel(ids, dtype, dropout):
    return lambda *tables: kernels.embedding_norm(*ids, *tables, EPS, dtype, *dropout.arguments)[0]


def output_and_gradients(function, dy, tables):
    leaves = [x.detach().clone().requires_grad_() for x in tables]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_no_worse(found, theirs, truth):
    """The kernel's error is at most that of eager PyTorch in the same precision, plus rounding."""
    for ours, other, exact in zip(found, theirs, truth, strict=True):
        assert ours.dtype == other.dtype and ours.shape == other.shape
        rounding = 2 * torch.finfo(ours.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= 1.2 * (other - exact).abs().max() + rounding


@pytest.mark.parametrize(("probability", "dtype"), [(0.0, torch.float32), (0.1, torch.bfloat16)])
@pytest.mark.parametrize(("num_tokens", "width", "num_positions"), SHAPES)
def test_equals_reference(num_tokens, width, num_positions, probability, dtype):
    ids, tables, dy = random_inputs(num_tokens, width, num_positions)
    dy, dropout = dy.to(dtype), Dropout(probability, KEY, 5)
    truth = output_and_gradients(eager(ids, torch.float64, dropout), dy, [x.double() for x in tables])
    theirs = output_and_gradients(eager(ids, dtype, dropout), dy, tables)
    assert_no_worse(output_and_gradients(kernel(ids, dtype, dropout), dy, tables), theirs, truth)


def test_sums_by_position_in_chunks(monkeypatch):
    """Chunks and blocks that divide nothing evenly; a position without tokens gets 0."""
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 30)
    random = torch.Generator().manual_seed(0)
    dz, positions = torch.randn(900, 72, generator=random), torch.randint(0, 130, (900,), generator=random)
    found = kernels.sum_by_position(dz.to(DEVICE), positions.to(DEVICE), 140, True)
    expected = torch.zeros(140, 72, dtype=torch.float64).index_add_(0, positions, dz.double())
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
    assert (found[130:] == 0).all()


def test_more_tokens_than_programs_and_wide_ids(monkeypatch):
    ids, tables, dy = random_inputs(150, 64, 32, torch.int64)
    dropout = Dropout(0.1, KEY, 5)
    expected = output_and_gradients(eager(ids, torch.float32, dropout), dy, tables)
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    strided = [torch.stack((x, x), dim=1)[:, 0] for x in ids]
    for given in (ids, strided):
        found = output_and_gradients(kernel(given, torch.float32, dropout), dy.T.contiguous().T, tables)
        for ours, other in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)
        again = output_and_gradients(kernel(given, torch.float32, dropout), dy, tables)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.15's own opcheck
@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_registered_for_autograd_and_compilation(probability):
    ids, tables, dy = random_inputs(5, 64, 16)
    key = KEY if probability else None
    rest = (EPS, torch.bfloat16, probability, key, 3)
    y, mean, rstd = kernels.embedding_norm(*ids, *tables, *rest)
    assert torch.isfinite(F.layer_norm(y.float(), (64,))).all()
    torch.library.opcheck(kernels.embedding_norm_backward, (dy, *ids, *tables[:4], mean, rstd, probability, key, 3))
    torch.library.opcheck(kernels.sum_by_position, (dy.float(), ids[1], 16, True))
    torch.library.opcheck(kernels.embedding_norm, (*ids, *(x.requires_grad_() for x in tables), *rest))


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    pointers = ("token", "position", "type", "weight", "bias", "mean", "rstd", "dz", "partial")
    types = {f"{name}_ptr": "*fp32!" for name in pointers} | {"y_ptr": "*bf16!", "dy_ptr": "*bf16!"}
    types |= {name: "*i32!" for name in ("ids_ptr", "positions_ptr", "types_ptr")} | {"key_ptr": "*i64!"}
    types |= {"eps": "fp32", "call_index": "i32", "num_tokens": "i32!", "num_positions": "i32!", "chunk": "i32!"}
    most = {"forward": kernels.FORWARD_PROGRAMS_PER_SM, "backward": kernels.BACKWARD_PROGRAMS_PER_SM}
    requests, programs = [], []
    for width in (64, 128, 768, 1024):
        for direction in ("forward", "backward"):
            name, warps = f"_embedding_norm_{direction}_kernel", kernels.num_warps(width)
            constants = kernels.blocks(width) | {"THRESHOLD": threshold(0.1)}
            requests.append(("embedding_norm", name, types, constants, capability, warps, 3))
            programs.append(most[direction] * warps)
    for code, warps in zip(compile_kernels(requests), programs, strict=True):
        # At width 1024 ptxas keeps one scalar on the stack, which each program writes and reads once.
        assert code.spilled_bytes <= 8 and code.registers * 32 * warps <= 65_536
        assert code.shared_bytes <= MAX_SHARED_BYTES[capability]

    constants = {"WIDTH": 768} | kernels.ONE_HOT_BLOCKS
    requests = [
        ("embedding_norm", "_sum_by_position_kernel", types, constants | {"PRECISION": precision}, capability)
        + (kernels.ONE_HOT_WARPS, 3)
        for precision in ("tf32", "ieee")
    ]
    fast, exact = compile_kernels(requests)
    assert fast.tensor_core_instructions > 0 and exact.tensor_core_instructions == 0
    for code in (fast, exact):
        assert code.spilled_bytes == 0 and code.registers * 128 * 2 <= 65_536
        assert code.shared_bytes <= MAX_SHARED_BYTES[capability] // 2
