"""The fused GELUs equal their references with every gradient, and compile for supported GPUs."""

import pytest
import torch
import torch.nn.functional as F
from ahead_of_time import MAX_SHARED_BYTES, compile_kernels

from electra_fast.kernels import bias_gelu as kernels

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_inputs(num_tokens, width, seed=0):
    """Input, bias and the gradient of the output, fp64; some inputs are far out in the tails."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, width, generator=random, dtype=torch.float64) * 3
    bias = torch.randn(width, generator=random, dtype=torch.float64)
    return x.to(DEVICE), bias.to(DEVICE), torch.randn(x.shape, generator=random, dtype=torch.float64).to(DEVICE)


def output_and_gradients(function, dy, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy[:, : y.shape[1]].to(y.dtype))]


def assert_no_worse(found, eager, truth):
    """The kernel's error is at most that of eager PyTorch in the same precision, plus rounding."""
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + rounding


def eager_bias_gelu(h, bias):
    return F.gelu(h + bias.to(h.dtype))


def eager_geglu(h):
    a, b = h.chunk(2, dim=-1)
    return F.gelu(a) * b


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (255, 96), (507, 256), (33, 1000)])
def test_bias_gelu_equals_reference(num_tokens, width, dtype):
    h, bias, dy = random_inputs(num_tokens, width)
    h, dy, bias = h.to(dtype), dy.to(dtype), bias.float()  # truth and kernel see the same rounded inputs
    truth = output_and_gradients(eager_bias_gelu, dy.double(), h.double(), bias.double())
    eager = output_and_gradients(eager_bias_gelu, dy, h, bias)
    assert_no_worse(output_and_gradients(kernels.bias_gelu, dy, h, bias), eager, truth)

    truth = output_and_gradients(F.gelu, dy.double(), h.double())
    eager = output_and_gradients(F.gelu, dy, h)
    assert_no_worse(output_and_gradients(lambda x: kernels.bias_gelu(x, None), dy, h), eager, truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 64), (255, 192), (70, 2000)])
def test_geglu_equals_reference(num_tokens, width, dtype):
    h, _, dy = random_inputs(num_tokens, width)
    h, dy = h.to(dtype), dy.to(dtype)
    truth = output_and_gradients(eager_geglu, dy.double(), h.double())
    eager = output_and_gradients(eager_geglu, dy, h)
    assert_no_worse(output_and_gradients(kernels.geglu, dy, h), eager, truth)


def test_more_tokens_than_programs_and_strided_inputs(monkeypatch):
    monkeypatch.setattr(kernels, "resident_programs", lambda *_: 3)
    h, bias, dy = (x.float() for x in random_inputs(150, 128))
    eager = output_and_gradients(eager_bias_gelu, dy, h, bias)
    for grad in (dy, dy.T.contiguous().T):
        found = output_and_gradients(kernels.bias_gelu, grad, h, bias)
        for ours, theirs in zip(found, eager, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
        again = output_and_gradients(kernels.bias_gelu, grad, h, bias)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.15's own opcheck
def test_registered_for_autograd_and_compilation():
    h, bias, dy = (x.float() for x in random_inputs(5, 64))
    h.requires_grad_(), bias.requires_grad_()
    torch.library.opcheck(kernels.bias_gelu, (h, bias))
    torch.library.opcheck(kernels.bias_gelu, (h, None))
    torch.library.opcheck(kernels.geglu, (h,))
    torch.library.opcheck(kernels.bias_gelu_backward, (dy, h.detach(), bias.detach()))
    torch.library.opcheck(kernels.geglu_backward, (dy[:, :32].contiguous(), h.detach()))


@pytest.mark.parametrize("capability", [90, 80])
def test_compiles_ahead_of_time(capability):
    types = {"h_ptr": "*bf16!", "bias_ptr": "*fp32!", "y_ptr": "*bf16!", "dy_ptr": "*bf16!", "dh_ptr": "*bf16!"}
    types |= {"partial_ptr": "*fp32!", "num_tokens": "i32!"}
    names = (
        "_bias_gelu_forward_kernel",
        "_bias_gelu_backward_kernel",
        "_geglu_forward_kernel",
        "_geglu_backward_kernel",
    )
    # All widths from 256 up have the same blocks; the heads of `small` have width 128.
    requests = [("bias_gelu", name, types, kernels.blocks(3072), capability, 4, 3) for name in names]
    for constants in (kernels.blocks(128), kernels.blocks(768) | {"bias_ptr": None}):
        requests += [("bias_gelu", name, types, constants, capability, 4, 3) for name in names[:2]]
    for code in compile_kernels(requests):
        # As many programs as the launcher assumes fit into a multiprocessor's 65,536 registers.
        assert code.spilled_bytes == 0 and code.registers * 128 * kernels.PROGRAMS_PER_SM <= 65_536
        assert code.shared_bytes <= MAX_SHARED_BYTES[capability]
