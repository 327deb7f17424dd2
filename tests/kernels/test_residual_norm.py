"""The fused end of a sublayer equals its reference with every gradient, and compiles for supported GPUs."""

import pytest
import torch
from ahead_of_time import MAX_SHARED_BYTES, compile_kernels

from electra_fast.kernels import residual_norm as kernels
from electra_fast.kernels.dropout import threshold
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = torch.tensor([2**40 + 7, 12, 77], device=DEVICE)
SHAPES = [(1, 64), (255, 64), (507, 128), (255, 256), (33, 768), (17, 1024), (3, 1500)]


def random_inputs(num_tokens, width, dtype):
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


def output_and_gradients(function, dy, inputs):
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, [x for x in leaves if x is not None], dy.to(y.dtype))]


def assert_no_worse(found, theirs, truth):
    """The kernel's error is at most that of eager PyTorch in the same precision, plus rounding."""
    for ours, other, exact in zip(found, theirs, truth, strict=True):
        assert ours.dtype == other.dtype and ours.shape == other.shape
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= 1.2 * (other - exact).abs().max() + rounding


@pytest.mark.parametrize(("probability", "dtype"), [(0.0, torch.float32), (0.1, torch.bfloat16)])
@pytest.mark.parametrize(("num_tokens", "width"), SHAPES)
def test_residual_norm_equals_reference(num_tokens, width, probability, dtype):
    inputs, dy = random_inputs(num_tokens, width, dtype)
    setting = (1e-12, Dropout(probability, KEY, 5))
    truth = output_and_gradients(eager(*setting), dy, [x.double() for x in inputs])
    theirs = output_and_gradients(eager(*setting), dy, inputs)
    assert_no_worse(output_and_gradients(kernel(*setting), dy, inputs), theirs, truth)


@pytest.mark.parametrize("has", ["bias", "residual", "norm bias", "nothing"])
def test_parts_may_be_missing(has):
    (x, bias, residual, weight, norm_bias), dy = random_inputs(65, 96, torch.float32)
    inputs = (x, bias if has == "bias" else None, residual if has == "residual" else None, weight)
    inputs += (norm_bias if has == "norm bias" else None,)
    for setting in ((1e-5, Dropout()), (1e-5, Dropout(0.3, KEY, 1))):
        truth = output_and_gradients(eager(*setting), dy, [None if x is None else x.double() for x in inputs])
        theirs = output_and_gradients(eager(*setting), dy, inputs)
        assert_no_worse(output_and_gradients(kernel(*setting), dy, inputs), theirs, truth)


def test_zero_variance_and_large_means():
    """Rows without variance, where eps decides, and a mean much larger than the standard deviation."""
    (x, _, _, weight, norm_bias), dy = random_inputs(8, 128, torch.float32)
    flat = torch.full_like(x, 3.0)
    assert torch.equal(kernels.layer_norm(flat, weight, norm_bias, 1e-12), norm_bias.expand(8, -1))
    found, expected = (f(x + 1000, weight, norm_bias, 1e-5) for f in (kernels.layer_norm, ops.layer_norm_reference))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert kernels.layer_norm(x.view(2, 4, 128), weight, None, 1e-5).shape == (2, 4, 128)


def test_more_tokens_than_programs_and_strided_inputs(monkeypatch):
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    inputs, dy = random_inputs(150, 128, torch.float32)
    setting = (1e-12, Dropout(0.1, KEY, 5))
    expected = output_and_gradients(eager(*setting), dy, inputs)
    strided = [x if x.dim() == 1 else x.T.contiguous().T for x in inputs]
    for given, grad in ((inputs, dy), (strided, dy.T.contiguous().T)):
        found = output_and_gradients(kernel(*setting), grad, given)
        for ours, other in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)
        again = output_and_gradients(kernel(*setting), grad, given)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.15's own opcheck
@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_registered_for_autograd_and_compilation(probability):
    inputs, dy = random_inputs(5, 64, torch.float32)
    key = KEY if probability else None
    for given in (inputs, (inputs[0], None, None, inputs[3], None)):
        leaves = [None if x is None else x.requires_grad_() for x in given]
        torch.library.opcheck(kernels.residual_norm, (*leaves, 1e-12, probability, key, 3))
    x, bias, residual, weight, _ = (x.detach() for x in inputs)
    _, mean, rstd = kernels.residual_norm(x, bias, residual, weight, None, 1e-12, probability, key, 3)
    arguments = (dy, x, bias, residual, weight, mean, rstd, True, probability, key, 3)
    torch.library.opcheck(kernels.residual_norm_backward, arguments)


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    types = dict.fromkeys(("x_ptr", "residual_ptr", "y_ptr", "dy_ptr", "dx_ptr", "dresidual_ptr"), "*bf16!")
    vectors = ("bias_ptr", "weight_ptr", "norm_bias_ptr", "mean_ptr", "rstd_ptr", "partial_ptr")
    types |= dict.fromkeys(vectors, "*fp32!")
    types |= {"key_ptr": "*i64!", "num_tokens": "i32!", "eps": "fp32", "call_index": "i32"}
    most = {"forward": kernels.FORWARD_PROGRAMS_PER_SM, "backward": kernels.BACKWARD_PROGRAMS_PER_SM}
    requests, programs = [], []
    for width in (64, 128, 256, 768, 1024):
        warps = kernels.num_warps(width)
        # With every operand, as in training; below without those that `modern` lacks.
        constants = kernels.blocks(width) | {"THRESHOLD": threshold(0.1)}
        for direction, own in (("forward", {}), ("backward", {"HAS_NORM_BIAS": True})):
            name = f"_residual_norm_{direction}_kernel"
            requests.append(("residual_norm", name, types, constants | own, capability, warps, 3))
            programs.append(most[direction] * warps)
    constants = kernels.blocks(768) | dict.fromkeys(("bias_ptr", "residual_ptr", "key_ptr")) | {"THRESHOLD": 0}
    without = {"forward": {"norm_bias_ptr": None}, "backward": {"HAS_NORM_BIAS": False, "dresidual_ptr": None}}
    for direction, own in without.items():
        name = f"_residual_norm_{direction}_kernel"
        requests.append(("residual_norm", name, types, constants | own, capability, 4, 3))
        programs.append(most[direction] * 4)
    for code, warps in zip(compile_kernels(requests), programs, strict=True):
        # As many programs as the launcher assumes fit into a multiprocessor's 65,536 registers.
        assert code.spilled_bytes == 0 and code.registers * 32 * warps <= 65_536
        assert code.shared_bytes <= MAX_SHARED_BYTES[capability]
