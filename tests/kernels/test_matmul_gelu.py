"""GELUs in the epilogue of their matmul equal their references with every gradient, and compile for supported GPUs."""

import pytest
import torch
import torch.nn.functional as F
from ahead_of_time import MAX_SHARED_BYTES, compile_kernels
from test_bias_gelu import assert_no_worse, eager_geglu

from electra_fast.kernels import matmul_gelu as kernels

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products of bf16 are wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
# Tokens, D, F. In 16 bits D up to 256 is one block. In fp32 even 64 takes two, so that larger shapes would take long.
SHAPES = [(1, 64, 256), (255, 96, 64), (33, 20, 24)]
LARGER_SHAPES = [(507, 256, 200), (70, 256, 1000), (130, 320, 100)]
CASES = [
    (*shape, dtype) for dtype in DTYPES for shape in SHAPES + (LARGER_SHAPES if dtype != torch.float32 else [])
]  # fmt: skip
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


@by_case
def test_matmul_gelu_equals_reference(num_tokens, width, columns, dtype):
    x, weight, bias, next_weight, dz = random_inputs(num_tokens, width, columns, dtype)
    for inputs in ((x, weight, bias), (x, weight, None)):
        found = kernels.matmul_gelu(*inputs)
        assert_no_worse(found, forward(*inputs), forward(*double(*inputs)))
    inputs = dz, next_weight, found[0]
    assert_no_worse(kernels.matmul_gelu_backward(*inputs), backward(*inputs), backward(*double(*inputs)))


@by_case
def test_matmul_geglu_equals_reference(num_tokens, width, columns, dtype):
    x, weight, _, next_weight, dz = random_inputs(num_tokens, width, columns, dtype, gated=True)

    def reference(x, weight):
        return (h := F.linear(x, weight)), eager_geglu(h)

    found = kernels.matmul_geglu(x, weight)
    assert_no_worse(found, reference(x, weight), reference(*double(x, weight)))
    inputs = dz, next_weight, found[0]
    ours = kernels.matmul_geglu_backward(*inputs)
    assert_no_worse([ours], geglu_backward(*inputs), geglu_backward(*double(*inputs)))


def test_what_is_not_stored_is_not_rounded():
    """The GELU takes the fp32 product and the bias gradient sums fp32 values: eager PyTorch's errors hide both."""
    x, weight, bias, next_weight, dz = random_inputs(300, 64, 96, torch.float16)
    h, y = kernels.matmul_gelu(x, weight, bias)
    exact = forward(*double(x, weight, bias))[1]
    assert ((y - exact).abs() <= 0.55 * torch.finfo(y.dtype).eps * exact.abs() + 1e-5).all()
    dbias = kernels.matmul_gelu_backward(dz, next_weight, h)[1]
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
    found = operation(*inputs)
    return [found] if isinstance(found, torch.Tensor) else found


def strided(x):
    return x.T.contiguous().T if x is not None and x.ndim == 2 else x


def test_more_tiles_than_programs_and_strided_inputs(monkeypatch):
    for operation, inputs in calls(150, torch.float16):
        saved = [None if x is None else x.clone() for x in inputs]
        expected = outputs(operation, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "resident_programs", lambda *_: 1)
            few = outputs(operation, inputs)
            again = outputs(operation, [strided(x) for x in inputs])
        for one, other, same in zip(expected, few, again, strict=True):
            # Only the order of the bias gradient's sum depends on the number of programs.
            torch.testing.assert_close(one, other, rtol=1e-6 if one.ndim == 1 else 0, atol=1e-5 if one.ndim == 1 else 0)
            assert torch.equal(other, same) and other.is_contiguous()
        assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, saved, strict=True))


def test_bit_equal_repeats():
    for operation, inputs in calls(70, torch.float16):
        first, second = (outputs(operation, inputs) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.15's own opcheck
def test_registered_for_compilation():
    for operation, inputs in calls(5, torch.float16):
        torch.library.opcheck(operation, inputs, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("width", [1, 64, 96, 128, 200, 256, 257, 768])
def test_pays_where_the_weight_stays_in_shared_memory(width):
    assert kernels.pays(width) == (kernels.blocks(width)["BLOCK_D"] >= width)


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    types = dict.fromkeys(("x_ptr", "dz_ptr", "weight_ptr", "h_ptr", "y_ptr", "dh_ptr"), "*bf16!")
    types |= {"bias_ptr": "*fp32!", "partial_ptr": "*fp32!", "num_tokens": "i32!"}
    # D and F of `small`, its generator, `base` and, where it is likely to run, `small` with GeGLU.
    shapes = [(256, 1024, False), (64, 256, False), (768, 3072, False)]
    for width, columns, gated in shapes + ([(256, 704, True)] if capability == 90 else []):
        tile = kernels.blocks(width, gated)
        constants = {"D": width, "F": columns, "GATED": gated, "PRECISION": "tf32", **tile}
        num_warps = constants.pop("num_warps")
        forward_constants = constants | ({"bias_ptr": None} if gated else {})
        backward_constants = constants | ({"partial_ptr": None} if gated else {})
        for code in compile_kernels([
            ("matmul_gelu", "_matmul_gelu_forward_kernel", types, forward_constants, capability, num_warps, 3),
            ("matmul_gelu", "_matmul_gelu_backward_kernel", types, backward_constants, capability, num_warps, 3),
        ]):  # fmt: skip
            assert code.tensor_core_instructions > 0 and code.spilled_bytes == 0, (width, code)
            assert code.shared_bytes <= MAX_SHARED_BYTES[capability]
            if capability == 90:  # as many programs fit into a multiprocessor as the launcher assumes
                num_programs = kernels.programs_per_sm(width)
                assert code.registers * 32 * num_warps * num_programs <= 65_536, (width, code)
                assert (code.shared_bytes + 1024) * num_programs <= 228 * 1024, (width, code)
