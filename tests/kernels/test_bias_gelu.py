"""The fused GELUs equal their references with every gradient, and compile for supported GPUs."""

import pytest
import torch
import torch.nn.functional as F
from ahead_of_time import compile_launches
from comparison import DEVICE, assert_no_worse, assert_same_bits, output_and_gradients, zeros

from electra_fast.kernels import bias_gelu as kernels


def random_inputs(num_tokens, width, dtype=torch.float32):
    """Input, fp32 bias and the gradient of the output; some inputs are far out in the tails."""
    random = torch.Generator().manual_seed(0)
    h, bias, dy = (torch.randn(shape, generator=random) for shape in ((num_tokens, width), width, (num_tokens, width)))
    return (3 * h).to(DEVICE, dtype), bias.to(DEVICE), dy.to(DEVICE, dtype)


def eager_bias_gelu(h, bias=None):
    return F.gelu(h if bias is None else h + bias.to(h.dtype))


def eager_geglu(h):
    a, b = h.chunk(2, dim=-1)
    return F.gelu(a) * b


def check(kernel, eager, dy, *inputs):
    truth = output_and_gradients(eager, dy, [x.double() for x in inputs])
    theirs = output_and_gradients(eager, dy, inputs)
    assert_no_worse(output_and_gradients(kernel, dy, inputs), theirs, truth, factor=1.5)


# One token; partial blocks; several blocks of columns.
SHAPES = [(1, 64, torch.float32), (255, 96, torch.float32), (33, 1000, torch.float32), (255, 96, torch.bfloat16)]


@pytest.mark.parametrize(("num_tokens", "width", "dtype"), SHAPES)
def test_bias_gelu_equals_reference(num_tokens, width, dtype):
    h, bias, dy = random_inputs(num_tokens, width, dtype)
    check(kernels.bias_gelu, eager_bias_gelu, dy, h, bias)
    check(lambda h: kernels.bias_gelu(h, None), eager_bias_gelu, dy, h)


@pytest.mark.parametrize(("num_tokens", "width", "dtype"), SHAPES)
def test_geglu_equals_reference(num_tokens, width, dtype):
    h, _, dy = random_inputs(num_tokens, 2 * width, dtype)
    check(kernels.geglu, eager_geglu, dy[:, :width], h)


def test_more_tokens_than_programs_and_strided_inputs(monkeypatch):
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    h, bias, dy = random_inputs(150, 128)
    eager = output_and_gradients(eager_bias_gelu, dy, (h, bias))
    for grad in (dy, dy.T.contiguous().T):
        found = output_and_gradients(kernels.bias_gelu, grad, (h, bias))
        for ours, theirs in zip(found, eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
        assert_same_bits(output_and_gradients(kernels.bias_gelu, grad, (h, bias)), found)


def test_registered_for_autograd_and_compilation():
    h, bias, dy = random_inputs(5, 64)
    h.requires_grad_(), bias.requires_grad_()
    torch.library.opcheck(kernels.bias_gelu, (h, bias))
    torch.library.opcheck(kernels.bias_gelu, (h, None))
    torch.library.opcheck(kernels.geglu, (h,))
    torch.library.opcheck(kernels.bias_gelu_backward, (dy, h.detach(), bias.detach()))
    torch.library.opcheck(kernels.geglu_backward, (dy[:, :32].contiguous(), h.detach()))


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    h, bias = zeros(32, 3072, dtype=torch.bfloat16), zeros(3072)

    def launch():
        kernels.bias_gelu_backward(kernels.bias_gelu(h, bias), h, bias)
        kernels.geglu_backward(kernels.geglu(h), h)

    for code in compile_launches(launch, capability).values():
        code.check(kernels.PROGRAMS_PER_SM)
