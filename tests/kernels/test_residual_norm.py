"""The fused end of a sublayer equals its reference with every gradient, and compiles for Hopper."""

import pytest
import torch
from comparison import DEVICE, KEY, assert_no_worse, assert_strides_do_not_matter, output_and_gradients
from lib.ahead_of_time import compile_launches

from electra_fast.kernels import residual_norm as kernels
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout


def random_inputs(num_tokens, width, dtype=torch.float32):
    """x, bias, residual, the norm's weight and bias, and the gradient of the output."""
    random = torch.Generator().manual_seed(num_tokens + width)
    x, residual, dy = (torch.randn(num_tokens, width, generator=random).to(dtype).to(DEVICE) for _ in range(3))
    bias, weight, norm_bias = (torch.randn(width, generator=random).to(DEVICE) for _ in range(3))
    return (x, bias, residual, weight, norm_bias), dy


def eager(eps, dropout):
    def function(x, bias, residual, weight, norm_bias):
        h = x if bias is None else x + bias.to(x.dtype)
        z = ops.dropout_reference(h, dropout) if residual is None else residual + ops.dropout_reference(h, dropout)
        return ops.layer_norm_reference(z, weight, norm_bias, eps)

    return function


def kernel(eps, dropout):
    return lambda *inputs: kernels.residual_norm(*inputs, eps, *dropout.arguments)[0]


def check(eps, dropout, inputs, dy):
    reference = eager(eps, dropout)
    truth = output_and_gradients(reference, dy, [None if x is None else x.double() for x in inputs])
    theirs = output_and_gradients(reference, dy, inputs)
    assert_no_worse(output_and_gradients(kernel(eps, dropout), dy, inputs), theirs, truth)


# More tiles than programs, and a width that is no power of two; rows of a tile each; rows wider than a tile.
@pytest.mark.parametrize(
    ("num_tokens", "width", "probability", "dtype"),
    [(100, 96, 0.1, torch.bfloat16), (17, 1024, 0.0, torch.float32), (3, 1500, 0.1, torch.float32)],
)
def test_residual_norm_equals_reference(monkeypatch, num_tokens, width, probability, dtype):
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    check(1e-12, Dropout(probability, KEY, 5), *random_inputs(num_tokens, width, dtype))


@pytest.mark.parametrize("has", ["bias", "residual", "norm bias"])
def test_parts_may_be_missing(has):
    (x, bias, residual, weight, norm_bias), dy = random_inputs(33, 96)
    inputs = (x, bias if has == "bias" else None, residual if has == "residual" else None, weight)
    check(1e-5, Dropout(0.3, KEY, 1), (*inputs, norm_bias if has == "norm bias" else None), dy)


def test_zero_variance_and_large_means():
    """Rows without variance, where eps decides, and a mean much larger than the standard deviation."""
    (x, _, _, weight, norm_bias), _ = random_inputs(8, 128)
    flat = torch.full_like(x, 3.0)
    assert torch.equal(kernels.layer_norm(flat, weight, norm_bias, 1e-12), norm_bias.expand(8, -1))
    found, expected = (f(x + 1000, weight, norm_bias, 1e-5) for f in (kernels.layer_norm, ops.layer_norm_reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert kernels.layer_norm(x.view(2, 4, 128), weight, None, 1e-5).shape == (2, 4, 128)


def test_strides_do_not_matter():
    inputs, dy = random_inputs(50, 128)
    assert_strides_do_not_matter(kernel(1e-12, Dropout(0.1, KEY, 5)), dy, inputs)


def test_registered_for_autograd_and_compilation():
    inputs, dy = random_inputs(5, 64)
    dropout = (0.1, KEY, 3)
    for given in (inputs, (inputs[0], None, None, inputs[3], None)):
        leaves = [None if x is None else x.requires_grad_() for x in given]
        torch.library.opcheck(kernels.residual_norm, (*leaves, 1e-12, *dropout))
    x, bias, residual, weight, _ = (x.detach() for x in inputs)
    _, mean, rstd = kernels.residual_norm(x, bias, residual, weight, None, 1e-12, *dropout)
    arguments = (dy, x, bias, residual, weight, mean, rstd, True, *dropout)
    torch.library.opcheck(kernels.residual_norm_backward, arguments)


def test_compiles_ahead_of_time():
    """With every operand and dropout, which take the most registers."""
    (x, bias, residual, weight, norm_bias), dy = random_inputs(32, 1024, torch.bfloat16)
    dropout = (0.1, KEY, 5)

    def launch():
        _, mean, rstd = kernels.residual_norm(x, bias, residual, weight, norm_bias, 1e-12, *dropout)
        kernels.residual_norm_backward(dy, x, bias, residual, weight, mean, rstd, True, *dropout)

    forward, backward = compile_launches(launch).values()
    forward.check(kernels.FORWARD_PROGRAMS_PER_SM)
    backward.check(kernels.BACKWARD_PROGRAMS_PER_SM)
