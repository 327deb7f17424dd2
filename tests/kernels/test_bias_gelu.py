"""The fused GELUs equal their references with every gradient, and compile for Hopper."""

import pytest
import torch
import torch.nn.functional as F
from comparison import DEVICE, assert_no_worse, assert_strides_do_not_matter, output_and_gradients, zeros
from lib.ahead_of_time import compile_launches

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


# Several blocks of columns, the last one partial; more blocks of tokens than programs.
@pytest.mark.parametrize(("num_tokens", "width", "dtype"), [(33, 600, torch.float32), (100, 96, torch.bfloat16)])
def test_equals_reference(monkeypatch, num_tokens, width, dtype):
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    h, bias, dy = random_inputs(num_tokens, width, dtype)
    check(kernels.bias_gelu, eager_bias_gelu, dy, h, bias)
    check(lambda h: kernels.bias_gelu(h, None), eager_bias_gelu, dy, h)
    h, _, dy = random_inputs(num_tokens, 2 * width, dtype)
    check(kernels.geglu, eager_geglu, dy[:, :width], h)


def test_strides_do_not_matter():
    h, bias, dy = random_inputs(50, 128)
    assert_strides_do_not_matter(kernels.bias_gelu, dy, (h, bias))
    assert_strides_do_not_matter(kernels.geglu, dy[:, :64], (h,))


def test_registered_for_autograd_and_compilation():
    h, bias, dy = random_inputs(5, 64)
    h.requires_grad_(), bias.requires_grad_()
    torch.library.opcheck(kernels.bias_gelu, (h, bias))
    torch.library.opcheck(kernels.bias_gelu, (h, None))
    torch.library.opcheck(kernels.geglu, (h,))
    torch.library.opcheck(kernels.bias_gelu_backward, (dy, h.detach(), bias.detach()))
    torch.library.opcheck(kernels.geglu_backward, (dy[:, :32].contiguous(), h.detach()))


def test_compiles_ahead_of_time():
    h, bias = zeros(32, 3072, dtype=torch.bfloat16), zeros(3072)

    def launch():
        kernels.bias_gelu_backward(kernels.bias_gelu(h, bias), h, bias)
        kernels.geglu_backward(kernels.geglu(h), h)

    for code in compile_launches(launch).values():
        code.check(kernels.PROGRAMS_PER_SM)
