"""Cross-entropy of all tokens by the generator head's kernels, narrow and chunked, against plain PyTorch and fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comparison import DEVICE

from electra_fast.kernels import generator_head, generator_head_chunked
from electra_fast.ops import operations as ops
from electra_fast.ops import vocabulary_nll

NARROW, CHUNKED = "narrow", "chunked"
# The interpreter has no products of bf16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
# The dtype, the width and the path that they select.
CASES = {"narrow": (HALF, 64, NARROW), "wide": (HALF, 272, CHUNKED), "fp32": (torch.float32, 64, CHUNKED)}
# Half an ulp of the dtype in which products are computed; and how many of them a result may differ by: logits, and
# their logsumexp, are rounded at their own magnitude, up to 16, which shows in fp32; in 16 bits one cast exceeds that.
HALF_ULP = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-9}
NUM_ROUNDINGS = {torch.float32: 16, torch.float16: 1, torch.bfloat16: 1}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked path saves the logits of its first chunk of 16 tokens only (fp32; 32 tokens in 16 bits)."""
    monkeypatch.setattr(generator_head_chunked, "CHUNK_LOGITS_BYTES", 16 * 384 * 4)
    monkeypatch.setattr(generator_head_chunked, "SAVED_LOGITS_BYTES", 16 * 384 * 4)


def make_inputs(num_tokens, vocab_size, width, dtype):
    """x, table, bias, targets (half of them the argmax) and the upstream gradient (0 for some)."""
    random = torch.Generator().manual_seed(width)
    x = torch.randn(num_tokens, width, generator=random).to(dtype)
    table = torch.randn(vocab_size, width, generator=random) * (2 * width**-0.5)
    bias = torch.randn(vocab_size, generator=random) * 0.5
    target = torch.randint(vocab_size, (num_tokens,), generator=random)
    target[::2] = F.linear(x.float(), table, bias).argmax(-1)[::2]
    upstream = torch.randn(num_tokens, generator=random)
    upstream[1::5] = 0.0
    return tuple(tensor.to(DEVICE) for tensor in (x, table, bias, target, upstream))


def plain(x, table, bias, target):
    logits_TV = F.linear(x, table.to(x.dtype), bias.to(x.dtype))
    logits_TV = logits_TV.to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits_TV, target, reduction="none"), logits_TV.argmax(-1) == target


def run(function, inputs, dtype=None):
    """(nll and the gradients of x, table and bias), is_argmax."""
    leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs[:3]]
    nll, is_argmax = function(*leaves, inputs[3])
    gradients = torch.autograd.grad(nll, leaves, inputs[4].to(nll.dtype))
    return (nll.detach(), *gradients), is_argmax


def test_errors_are_at_most_those_of_the_definition(case):
    dtype, width, path = case
    inputs = make_inputs(70, 300, width, dtype)
    assert bool(generator_head._narrow_width(inputs[0])) == (path == NARROW)
    with ops.use_impl("kernel"):
        ours, is_argmax = run(vocabulary_nll.vocabulary_nll, inputs)
    reference, _ = run(plain, inputs)
    exact, exact_is_argmax = run(plain, inputs, torch.float64)
    is_clear = margin(inputs) > 4 * 16 * HALF_ULP[dtype]  # two logits, each of a rounded product and rounded at 16
    assert is_clear.float().mean() > 0.7 and is_argmax[is_clear].any() and not is_argmax[is_clear].all()
    assert torch.equal(is_argmax[is_clear], exact_is_argmax[is_clear])
    for found, wanted, truth in zip(ours, reference, exact, strict=True):
        assert found.dtype == wanted.dtype
        error, allowed = found.double() - truth, wanted.double() - truth
        rounding = NUM_ROUNDINGS[dtype] * HALF_ULP[dtype] * max(1.0, truth.abs().max().item())
        assert error.square().mean().sqrt() <= 1.2 * allowed.square().mean().sqrt() + rounding
        assert error.abs().max() <= 1.2 * allowed.abs().max() + rounding


def margin(inputs):
    """The distance between the two largest logits of each token, in fp64."""
    x, table, bias = (tensor.double() for tensor in inputs[:3])
    first, second = F.linear(x, table, bias).topk(2).values.unbind(1)
    return first - second
