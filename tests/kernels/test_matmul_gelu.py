"""GELUs in the epilogue of their matmul equal their references with every gradient, and compile for supported GPUs."""

import pytest
import torch
import torch.nn.functional as F
from comparison import DEVICE, DOT_DTYPES, assert_no_worse, sum_roundings, zeros
from lib.ahead_of_time import card_of_target, compile_launches
from test_bias_gelu import eager_geglu

from electra_fast.kernels import launch
from electra_fast.kernels import matmul_gelu as kernels

# Tokens, D, F. In fp32 D takes two blocks; in 16 bits one for D up to 256; blocks of F are whole in the second.
CASES = [(70, 40, 72, torch.float32)]
CASES += [(*shape, d) for d in DOT_DTYPES for shape in ((70, 96, 64), (70, 320, 100)) if d != torch.float32]
by_case = pytest.mark.parametrize(("num_tokens", "width", "columns", "dtype"), CASES)


def random_inputs(num_tokens, width, columns, dtype, gated=False):
    """Input, weight, bias, the next layer's weight and gradient: products are around 3, far into the tails."""
    random = torch.Generator().manual_seed(num_tokens + width)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=random) * scale).to(DEVICE)

    x, dz = normal(num_tokens, width).to(dtype), normal(num_tokens, width).to(dtype)
    weight = normal(columns * (2 if gated else 1), width, scale=3 * width**-0.5).to(dtype)
    return x, weight, normal(columns), normal(width, columns, scale=columns**-0.5).to(dtype), dz


def forward(x, weight, bias):
    h = F.linear(x, weight, None if bias is None else bias.to(x.dtype))
    return h, F.gelu(h)


def backward(dz, weight, h):
    """By autograd, through the linear layer that follows; the bias, which is already in h, has only its gradient."""
    h = h.clone().requires_grad_()
    bias = torch.zeros(h.shape[1], dtype=torch.promote_types(h.dtype, torch.float32), device=DEVICE, requires_grad=True)
    return torch.autograd.grad(F.linear(F.gelu(h + bias.to(h.dtype)), weight), (h, bias), dz)


def geglu_backward(dz, weight, h):
    h = h.clone().requires_grad_()
    return torch.autograd.grad(F.linear(eager_geglu(h), weight), h, dz)


def double(*tensors):
    return [None if x is None else x.double() for x in tensors]


def check(found, eager, truth, num_terms):
    in_fp32 = found[0].dtype == torch.float32
    assert_no_worse(found, eager, truth, 1.5, sum_roundings(num_terms) if in_fp32 else 1.0)


@by_case
def test_matmul_gelu_equals_reference(num_tokens, width, columns, dtype):
    x, weight, bias, next_weight, dz = random_inputs(num_tokens, width, columns, dtype)
    for inputs in ((x, weight, bias), (x, weight, None)):
        found = kernels.matmul_gelu(*inputs)
        check(found, forward(*inputs), forward(*double(*inputs)), width)
    inputs = dz, next_weight, found[0]
    check(outputs(kernels.matmul_gelu_backward, inputs), backward(*inputs), backward(*double(*inputs)), width)


@by_case
def test_matmul_geglu_equals_reference(num_tokens, width, columns, dtype):
    x, weight, _, next_weight, dz = random_inputs(num_tokens, width, columns, dtype, gated=True)

    def reference(x, weight):
        return (h := F.linear(x, weight)), eager_geglu(h)

    found = kernels.matmul_geglu(x, weight)
    check(found, reference(x, weight), reference(*double(x, weight)), width)
    inputs = dz, next_weight, found[0]
    ours = kernels.matmul_geglu_backward(*inputs)
    check([ours], geglu_backward(*inputs), geglu_backward(*double(*inputs)), width)


def test_what_is_not_stored_is_not_rounded():
    """The GELU takes the fp32 product and the bias gradient sums fp32 values: eager PyTorch's errors hide both."""
    x, weight, bias, next_weight, dz = random_inputs(100, 64, 96, torch.float16)
    h, y = kernels.matmul_gelu(x, weight, bias)
    exact = forward(*double(x, weight, bias))[1]
    assert ((y - exact).abs() <= 0.55 * torch.finfo(y.dtype).eps * exact.abs() + 1e-5).all()
    dbias = outputs(kernels.matmul_gelu_backward, (dz, next_weight, h))[1]
    torch.testing.assert_close(dbias.double(), backward(*double(dz, next_weight, h))[1], rtol=0, atol=1e-4)


def calls(num_tokens, dtype):
    """Every operation with its inputs."""
    x, weight, bias, next_weight, dz = random_inputs(num_tokens, 32, 96, dtype)
    h = kernels.matmul_gelu(x, weight, bias)[0]
    yield kernels.matmul_gelu, (x, weight, bias)
    yield kernels.matmul_gelu, (x, weight, None)
    yield kernels.matmul_gelu_backward, (dz, next_weight, h)
    x, weight, _, next_weight, dz = random_inputs(num_tokens, 32, 96, dtype, gated=True)
    yield kernels.matmul_geglu, (x, weight)
    yield kernels.matmul_geglu_backward, (dz, next_weight, kernels.matmul_geglu(x, weight)[0])


def outputs(operation, inputs):
    """What an operation returns, partial sums being summed."""
    found = operation(*inputs)
    if operation is kernels.matmul_gelu_backward:
        return found[0], found[1].sum(0)
    return [found] if isinstance(found, torch.Tensor) else found


def strided(x):
    return x.T.contiguous().T if x is not None and x.ndim == 2 else x


def test_more_tiles_than_programs_and_strided_inputs(monkeypatch):
    for operation, inputs in calls(70, torch.float16):
        saved = [None if x is None else x.clone() for x in inputs]
        expected = outputs(operation, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "resident_programs", lambda *_: 1)
            few = outputs(operation, [strided(x) for x in inputs])
        for one, other in zip(expected, few, strict=True):
            # Only the order of the bias gradient's sum depends on the number of programs.
            tolerances = {"rtol": 1e-6, "atol": 1e-5} if one.ndim == 1 else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(one, other, **tolerances)
            assert other.is_contiguous()
        assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, saved, strict=True))


def test_registered_for_compilation():
    for operation, inputs in calls(5, torch.float16):
        torch.library.opcheck(operation, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("target", "width", "expected"), [(75, 64, False), (80, 256, True), (80, 257, False), ("gfx942", 256, True)]
)
def test_is_profitable_where_there_are_tensor_cores(monkeypatch, target, width, expected):
    monkeypatch.setattr(launch, "card", lambda _: card_of_target(target))
    assert kernels.is_profitable(zeros(1, width)) == expected


@pytest.mark.parametrize(
    ("width", "columns", "target"), [(256, 1024, t) for t in (89, 90)] + [(64, 256, 90), (128, 512, 89)]
)
def test_compiles_ahead_of_time(width, columns, target):
    """D and F of `small` and its generator."""
    x, weight, next_weight = (zeros(*shape).bfloat16() for shape in ((128, width), (columns, width), (width, columns)))

    def launch():
        h, _ = kernels.matmul_gelu(x, weight, zeros(columns))
        kernels.matmul_gelu_backward(x, next_weight, h)

    check_machine_code(launch, width, target)


@pytest.mark.parametrize(("width", "columns", "target"), [(256, 704, 90), (128, 352, 80)])
def test_geglu_compiles_ahead_of_time(width, columns, target):
    shapes = (128, width), (2 * columns, width), (width, columns), (128, 2 * columns)
    x, weight, next_weight, h = (zeros(*shape).bfloat16() for shape in shapes)
    check_machine_code(lambda: kernels.matmul_geglu(x, weight), width, target, gated=True)
    check_machine_code(lambda: kernels.matmul_geglu_backward(x, next_weight, h), width, target, gated=True)


def check_machine_code(call, width, target, gated=False):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "card", lambda _: card_of_target(target))
        fitting = kernels.programs_per_sm(torch.device("cuda"), width, gated)
    for code in compile_launches(call, target).values():
        code.check(fitting)
        assert code.tensor_core_instructions > 0
