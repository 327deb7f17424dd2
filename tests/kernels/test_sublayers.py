"""The sublayers by kernels equal their compositions, with every gradient; what is added in place is nobody else's."""

import dataclasses

import pytest
import torch
from comparison import DEVICE, DOT_DTYPES, assert_no_worse

from electra_fast.kernels import launchers
from electra_fast.model.attention import AttentionMask, attention
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, SublayerWeights, use_impl

in_fp32 = pytest.mark.skipif(DEVICE == "cuda", reason="compares in fp32, which not all kernels have on a GPU")
KEY = torch.tensor([5, 11, 64], device=DEVICE)
NUM_ROWS, LENGTH, NUM_HEADS, EPS = 3, 24, 2, 1e-12
# Hidden and inner widths: products with the GELU in their epilogues, beside them, and one kernel for all.
WIDTHS = {"fused": (48, 80), "apart": (40, 56), "narrow": (32, 64)}

LAUNCHERS_OF_SUBLAYERS = {
    "attention": "short_attention",
    "fused": "matmul_gelu",
    "apart": "bias_gelu",
    "narrow": "narrow_feed_forward",
    "gated": "matmul_geglu",
}


@pytest.fixture(autouse=True)
def _gelu_apart(monkeypatch):
    """As where the matmul is bound by tensor cores."""
    monkeypatch.setattr(launchers, "matmul_gelu_is_profitable", lambda x: x.shape[1] != WIDTHS["apart"][0])


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def random_weights(width, inner, outer):
    """In fp64, rounded to fp16, so that all precisions compute with the same ones."""
    shapes = ((inner, width), (inner,), (width, outer), (width,), (width,), (width,))
    scales = (width**-0.5, 0.3, outer**-0.5, 0.3, 0.5, 0.3)
    found = [normal(*shape, seed=i) * scale for i, (shape, scale) in enumerate(zip(shapes, scales, strict=True))]
    found[4] += 1.0
    return [x.half().double() for x in found]


def packed_mask():
    ids = torch.ones(NUM_ROWS, LENGTH, dtype=torch.int32)
    ids[0, 7:], ids[0, 20:], ids[1, 13:] = 2, 0, 2
    return AttentionMask.packed(ids.to(DEVICE), None, "short")


def sublayer(name, dropout):
    """A function of x and the weights, on inputs of this width and inner width, and its inputs."""
    if name == "attention":
        inputs = [normal(NUM_ROWS * LENGTH, 32, seed=9).half().double(), *random_weights(32, 96, 32)]
        attention_dropout = dataclasses.replace(dropout, call_index=9)

        def function(x, *weights):
            weights, call = SublayerWeights(*weights), (packed_mask(), NUM_HEADS, attention_dropout, dropout)
            return attention(x, weights, EPS, *call)
    elif name == "gated":
        shapes = ((70, 48), (160, 48), (48, 80))
        inputs = [normal(*shape, seed=i) * shape[1] ** -0.5 for i, shape in enumerate(shapes)]
        inputs, function = [x.half().double() for x in inputs], ops.gated_feed_forward
    else:
        width, inner = WIDTHS[name]
        inputs = [normal(70, width, seed=9).half().double(), *random_weights(width, inner, inner)]

        def function(x, *weights):
            return ops.feed_forward(x, SublayerWeights(*weights), EPS, dropout)

    return function, inputs


def outcome(impl, function, inputs, dy, dtype=None):
    """Output and gradients: x in `dtype` and fp32 weights, or all in fp64."""
    dtypes = [dtype or torch.float64, *[torch.float32 if dtype else torch.float64] * (len(inputs) - 1)]
    leaves = [x.to(dtype).requires_grad_() for x, dtype in zip(inputs, dtypes, strict=True)]
    upstream = dy.to(dtypes[0])
    kept = upstream.clone()
    with use_impl(impl):
        y = function(*leaves)
        found = [y.detach().clone(), *torch.autograd.grad(y, leaves, upstream)]
    assert torch.equal(upstream, kept)
    return found


@pytest.mark.parametrize("name", LAUNCHERS_OF_SUBLAYERS)
def test_is_by_its_kernel_or_a_composition(name, monkeypatch):
    class Called(Exception):
        pass

    def refuse(*_):
        raise Called

    monkeypatch.setattr(launchers, LAUNCHERS_OF_SUBLAYERS[name], refuse)
    function, inputs = sublayer(name, Dropout())
    inputs = [inputs[0].half(), *(weight.float() for weight in inputs[1:])]
    with use_impl("kernel"), pytest.raises(Called):
        function(*inputs)
    with use_impl("reference"):
        function(*inputs)


DROPOUT = Dropout(0.2, KEY, 3)


@pytest.mark.parametrize(
    ("name", "dropout", "dtype"),
    [
        ("attention", DROPOUT, DOT_DTYPES[1]),
        ("fused", Dropout(), DOT_DTYPES[0]),
        ("apart", DROPOUT, DOT_DTYPES[1]),
        ("narrow", DROPOUT, DOT_DTYPES[1]),
        ("gated", Dropout(), DOT_DTYPES[0]),
    ],
)
def test_equals_its_composition(name, dropout, dtype):
    function, inputs = sublayer(name, dropout)
    dy = normal(*inputs[0].shape, seed=20).half().double()
    truth = outcome("reference", function, inputs, dy)
    eager = outcome("reference", function, inputs, dy, dtype)
    assert_no_worse(outcome("kernel", function, inputs, dy, dtype), eager, truth, factor=1.5)


@in_fp32
def test_gradients_of_what_is_used_again():
    """By three sublayers in a row, and beside them: none changes a gradient that another one still needs.

    Without dropout, where the two gradients of a residual norm are one tensor.
    """
    functions = [sublayer(name, Dropout()) for name in ("narrow", "attention", "narrow")]
    (first, (_, *weights)), (second, (x, *more)), (third, (_, *last)) = functions

    def chain(x, *weights):
        x1 = x[:70]
        y = first(x1, *weights[:6])
        z = second(torch.cat((y, x[70:])), *weights[6:12])
        return third(z, *weights[12:]) * 2 + z + x

    inputs, dy = [x, *weights, *more, *last], normal(*x.shape, seed=20)
    truth = outcome("reference", chain, inputs, dy, torch.float32)
    for ours, theirs in zip(outcome("kernel", chain, inputs, dy, torch.float32), truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@in_fp32
@pytest.mark.parametrize("name", ["attention", "fused", "narrow"])
def test_frozen_weights_and_no_gradients_at_all(name):
    function, inputs = sublayer(name, Dropout())
    x, *weights = (each.float() for each in inputs)
    with use_impl("kernel"):
        y = function(x.requires_grad_(), *weights)
        (dx,) = torch.autograd.grad(y.sum(), x)
        with torch.no_grad():
            assert torch.equal(function(x, *weights), y)
        with use_impl("reference"):
            (expected,) = torch.autograd.grad(function(x, *weights).sum(), x)
    torch.testing.assert_close(dx, expected, rtol=1e-3, atol=1e-4)
