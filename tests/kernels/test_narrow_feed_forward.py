"""The narrow feed-forward sublayer equals its reference with every gradient, and compiles for Hopper."""

import pytest
import torch
import torch.nn.functional as F
from ahead_of_time import MAX_SHARED_BYTES, compile_kernels
from torch._subclasses.fake_tensor import FakeTensorMode

from electra_fast.kernels import narrow_feed_forward as kernels
from electra_fast.kernels import residual_norm
from electra_fast.kernels.dropout import threshold
from electra_fast.ops import operations as ops
from electra_fast.ops.linear import linear
from electra_fast.ops.operations import Dropout

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KEY = torch.tensor([2**40 + 7, 12, 77], device=DEVICE)
EPS = 1e-12
# Tokens, D, F and the probability of dropout; tiles have 64 tokens.
SHAPES = [(1, 64, 256, 0.1), (31, 64, 256, 0.0), (255, 64, 256, 0.1), (507, 64, 256, 0.0)]
SHAPES += [(31, 32, 128, 0.1), (507, 32, 128, 0.0), (1, 16, 64, 0.0), (255, 16, 64, 0.1)]


def random_inputs(num_tokens, width, inner_width, dtype):
    """x, both layers' weights and biases, the norm's weight and bias; and the gradient of the output."""
    random = torch.Generator().manual_seed(num_tokens + width)
    shapes = [(num_tokens, width), (inner_width, width), (inner_width,), (width, inner_width), *[(width,)] * 3]
    x, w1, b1, w2, *vectors = (torch.randn(shape, generator=random) for shape in shapes)
    # Weights as the networks' dtype rounds them; some inner activations are far out in the tails.
    w1, w2 = (2 * w1 * width**-0.5).to(dtype).float(), (w2 * inner_width**-0.5).to(dtype).float()
    dy = torch.randn(x.shape, generator=random).to(dtype)
    return [each.to(DEVICE) for each in (x.to(dtype), w1, b1, w2, *vectors)], dy.to(DEVICE)


def eager(x, w1, b1, w2, b2, norm_weight, norm_bias, dropout):
    h = linear(F.gelu(linear(x, w1, b1)), w2, b2)
    return ops.layer_norm_reference(x + ops.dropout_reference(h, dropout), norm_weight, norm_bias, EPS)


def kernel(*inputs):
    return kernels.narrow_feed_forward(*inputs[:-1], EPS, *inputs[-1].arguments)[0]


def output_and_gradients(function, dy, inputs, dropout):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = function(*leaves, dropout)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def assert_no_worse(found, theirs, truth):
    """The kernel's error is at most that of eager PyTorch in the same precision, plus rounding.

    NumPy, and so the interpreter, sums over the tokens one by one, PyTorch in a tree: its error grows like the root.
    """
    for ours, other, exact in zip(found, theirs, truth, strict=True):
        assert ours.dtype == other.dtype and ours.shape == other.shape
        rounding = torch.finfo(ours.dtype).eps * exact.abs().max()
        if exact.shape != truth[0].shape:
            rounding *= truth[0].shape[0] ** 0.5
        assert (ours - exact).abs().max() <= 1.5 * (other - exact).abs().max() + rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width", "inner_width", "probability"), SHAPES)
def test_equals_reference(num_tokens, width, inner_width, probability, dtype):
    inputs, dy = random_inputs(num_tokens, width, inner_width, dtype)
    dropout = Dropout(probability, KEY, 5)
    truth = output_and_gradients(eager, dy, [x.double() for x in inputs], dropout)
    theirs = output_and_gradients(eager, dy, inputs, dropout)
    assert_no_worse(output_and_gradients(kernel, dy, inputs, dropout), theirs, truth)


def test_more_tiles_than_programs_and_strided_inputs(monkeypatch):
    for module in (kernels, residual_norm):
        monkeypatch.setattr(module, "resident_programs", lambda *_: 3)
    inputs, dy = random_inputs(300, 32, 128, torch.float32)
    dropout = Dropout(0.1, KEY, 5)
    expected = output_and_gradients(eager, dy, inputs, dropout)
    strided = [x if x.dim() == 1 else x.T.contiguous().T for x in inputs]
    for given, grad in ((inputs, dy), (strided, dy.T.contiguous().T)):
        found = output_and_gradients(kernel, grad, given, dropout)
        for ours, other in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)
        again = output_and_gradients(kernel, grad, given, dropout)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_micro_batches_share_one_mask():
    """Tokens 70 to 99 alone, with their place in the step in the key, are what they are among all 100."""
    inputs, dy = random_inputs(100, 16, 64, torch.float32)
    later = KEY + torch.tensor([0, 0, 70], device=DEVICE)
    whole = output_and_gradients(kernel, dy, inputs, Dropout(0.5, KEY, 5))[:2]
    part = output_and_gradients(kernel, dy[70:], [inputs[0][70:], *inputs[1:]], Dropout(0.5, later, 5))[:2]
    for one, other in zip(whole, part, strict=True):
        torch.testing.assert_close(one[70:], other, rtol=1e-5, atol=1e-5)


def test_weights_may_be_cast_before_and_their_gradients_stay_fp32():
    (x, w1, b1, w2, *vectors), dy = random_inputs(70, 16, 64, torch.float16)
    dropout = Dropout(0.1, KEY, 5)
    expected = output_and_gradients(kernel, dy, (x, w1, b1, w2, *vectors), dropout)
    weights = (w1.half(), b1, w2.half(), *vectors)
    y, *saved = kernels.narrow_feed_forward(x, *weights, EPS, *dropout.arguments)
    found = kernels.narrow_feed_forward_gradients(dy, x, *weights[:-1], *saved, *dropout.arguments)
    assert [grad.dtype for grad in found] == [torch.float16] + [torch.float32] * 6
    assert all(torch.equal(a, b) for a, b in zip((y, *found), expected, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch 2.15's own opcheck
@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_registered_for_autograd_and_compilation(probability):
    inputs, dy = random_inputs(5, 16, 64, torch.float32)
    dropout = (probability, KEY if probability else None, 3)
    torch.library.opcheck(kernels.narrow_feed_forward, (*(x.requires_grad_() for x in inputs), EPS, *dropout))
    inputs = [x.detach() for x in inputs]
    _, *saved = kernels.narrow_feed_forward(*inputs, EPS, *dropout)
    torch.library.opcheck(kernels.narrow_feed_forward_backward, (dy, *inputs[:-1], *saved, *dropout))


def test_fits(monkeypatch):
    x = torch.empty(5, 64)
    assert kernels.fits(x, 256) and kernels.fits(x[:, :16], 64)
    assert not kernels.fits(x, 512) and not kernels.fits(x[:, :48], 128) and not kernels.fits(x.repeat(1, 2), 256)
    with FakeTensorMode():
        x = torch.empty(5, 64, dtype=torch.bfloat16, device="cuda")
        for capability, expected in (((9, 0), True), ((8, 0), False), ((10, 0), False)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, found=capability: found)
            assert kernels.fits(x, 256) == expected and not kernels.fits(x.float(), 256)


def test_compiles_ahead_of_time():
    types = dict.fromkeys(("x_ptr", "w1_ptr", "w2_ptr", "y_ptr", "ff_ptr", "dff_ptr", "dz_ptr", "dx_ptr"), "*bf16!")
    vectors = ("b1_ptr", "b2_ptr", "norm_weight_ptr", "norm_bias_ptr", "mean_ptr", "rstd_ptr", "partial_ptr")
    types |= dict.fromkeys(vectors, "*fp32!")
    types |= {"key_ptr": "*i64!", "num_tokens": "i32!", "eps": "fp32", "call_index": "i32"}
    requests = []
    dropout, no_dropout = {"THRESHOLD": threshold(0.1)}, {"THRESHOLD": 0, "key_ptr": None}
    for width, inner_width, *settings in ((64, 256, dropout, no_dropout), (16, 64, dropout)):
        tile = kernels.blocks(width, inner_width) | {"PRECISION": "tf32"}
        requests += [("_narrow_feed_forward_forward_kernel", tile | setting, 4, 2) for setting in settings]
        requests.append(("_input_gradient_kernel", tile, 4, 2))
        tile = kernels.weight_gradient_blocks(width, inner_width) | {"PRECISION": "tf32"}
        requests.append(("_weight_gradient_kernel", tile, tile["BLOCK_F"] // 16, 3))
    requests = [("narrow_feed_forward", name, types, tile, 90, *options) for name, tile, *options in requests]
    for request, code in zip(requests, compile_kernels(requests), strict=True):
        # Eight warps fit into a multiprocessor's registers and shared memory, of which each program costs 1 KB more.
        num_programs = 8 // request[-2]
        assert code.spilled_bytes == 0 and code.registers * 32 * 8 <= 65_536
        assert num_programs * (code.shared_bytes + 1024) <= MAX_SHARED_BYTES[90] + 1024
        assert code.tensor_core_instructions > 0
