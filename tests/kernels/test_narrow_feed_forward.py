"""The narrow feed-forward sublayer equals its reference with every gradient, and compiles for Hopper."""

import pytest
import torch
import torch.nn.functional as F
from comparison import (
    DEVICE,
    KEY,
    assert_no_worse,
    assert_strides_do_not_matter,
    output_and_gradients,
    sum_roundings,
)
from lib.ahead_of_time import card_of_target, compile_launches
from torch._subclasses.fake_tensor import FakeTensorMode

from electra_fast.kernels import launch, residual_norm
from electra_fast.kernels import narrow_feed_forward as kernels
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, linear

EPS = 1e-12


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


def check(inputs, dy, dropout):
    truth = output_and_gradients(lambda *x: eager(*x, dropout), dy, [x.double() for x in inputs])
    theirs = output_and_gradients(lambda *x: eager(*x, dropout), dy, inputs)
    (num_tokens, _), inner_width = inputs[0].shape, inputs[1].shape[0]

    def num_roundings(exact):
        if exact.shape != inputs[0].shape:  # a sum over the tokens
            return 2 * sum_roundings(num_tokens)
        return sum_roundings(inner_width) if inputs[0].dtype == torch.float32 else 1.0

    found = output_and_gradients(lambda *x: kernel(*x, dropout), dy, inputs)
    assert_no_worse(found, theirs, truth, 1.5, num_roundings)


# Tokens, D, F and the probability of dropout. The second has more tiles, of 64 tokens, than programs.
@pytest.mark.parametrize(
    ("num_tokens", "width", "inner_width", "probability", "dtype"),
    [(31, 64, 256, 0.0, torch.float32), (150, 16, 64, 0.1, torch.float16)],
)
def test_equals_reference(monkeypatch, num_tokens, width, inner_width, probability, dtype):
    for module in (kernels, residual_norm):
        monkeypatch.setattr(module, "resident_programs", lambda *_: 2)
    check(*random_inputs(num_tokens, width, inner_width, dtype), Dropout(probability, KEY, 5))


def test_strides_do_not_matter():
    inputs, dy = random_inputs(70, 16, 64, torch.float32)
    assert_strides_do_not_matter(lambda *x: kernel(*x, Dropout(0.1, KEY, 5)), dy, inputs)


def test_registered_for_autograd_and_compilation():
    inputs, dy = random_inputs(5, 16, 64, torch.float32)
    dropout = (0.1, KEY, 3)
    torch.library.opcheck(kernels.narrow_feed_forward, (*(x.requires_grad_() for x in inputs), EPS, *dropout))
    inputs = [x.detach() for x in inputs]
    _, *saved = kernels.narrow_feed_forward(*inputs, EPS, *dropout)
    torch.library.opcheck(kernels.narrow_feed_forward_backward, (dy, *inputs[:-1], *saved, *dropout))


def test_supports(monkeypatch):
    x = torch.empty(5, 64)
    assert kernels.supports(x, 256) and kernels.supports(x[:, :16], 64)
    for others in ((x, 512), (x[:, :48], 128), (x.repeat(1, 2), 256)):
        assert not kernels.supports(*others)
    with FakeTensorMode():
        x = torch.empty(5, 64, dtype=torch.bfloat16, device="cuda")
        for target, expected in ((90, True), (80, False), (100, False), ("gfx942", False)):
            monkeypatch.setattr(launch, "card", lambda _, found=target: card_of_target(found))
            assert kernels.supports(x, 256) == expected and not kernels.supports(x.float(), 256)


def test_compiles_ahead_of_time():
    (x, *weights), dy = random_inputs(128, 64, 256, torch.bfloat16)
    dropout = (0.1, KEY, 5)

    def launch():
        _, *saved = kernels.narrow_feed_forward(x, *weights, EPS, *dropout)
        kernels.narrow_feed_forward_backward(dy, x, *weights[:-1], *saved, *dropout)

    codes = compile_launches(launch)
    del codes["_residual_norm_backward_kernel"], codes["_partial_sums_kernel"]
    assert len(codes) == 3
    for code in codes.values():
        code.check(programs_per_sm=8 // code.num_warps)
        assert code.tensor_core_instructions > 0
