"""CPU forms of operations, against their references and against fp64."""

import pytest
import torch
from comparison import assert_no_worse
from torch import Tensor

from electra_fast.model.attention import AttentionMask, self_attention
from electra_fast.ops import cpu_ops
from electra_fast.ops import operations as ops
from electra_fast.ops.cpu_ops import segment_attention
from electra_fast.ops.operations import use_impl

DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape) * scale


def run(operation, inputs, upstream, impl=None):
    """Returns outputs, and gradients of the floating-point inputs, which become leaves with their dtype."""
    leaves = [x.detach().clone().requires_grad_() if torch.is_floating_point(x) else x for x in inputs]
    if impl is None:
        outputs = operation(*leaves)
    else:
        with use_impl(impl):
            outputs = operation(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    floating = [x for x in outputs if x is not None and x.requires_grad]
    trained = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(floating, trained, upstream[: len(floating)])
    return [x.detach() if x is not None else None for x in outputs], gradients


ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-9}


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_attention_scores_and_gradients(dtype):
    """Compares scores, values and gradients of the inputs, because the order of a head's dimensions is free."""
    num_tokens = 37
    num_heads = 3
    head_dim = 8
    width = num_heads * head_dim
    torch.manual_seed(0)
    x = random(num_tokens, width).to(dtype)
    weight = random(3 * width, width, scale=width**-0.5)
    positions = torch.randint(0, 100, (num_tokens,))
    upstream = (random(num_heads, num_tokens, num_tokens), random(num_tokens, num_heads, head_dim))

    def scores(x, weight):
        cos, sin = ops.rotary_angles(positions, head_dim, 10_000.0)
        q, k, v = ops.rotary_qkv(x, weight, cos.to(weight.dtype), sin.to(weight.dtype), num_heads)
        return q.to(weight.dtype).transpose(0, 1) @ k.to(weight.dtype).permute(1, 2, 0), v

    def exact_scores(x, weight):
        q, k, v = (x @ weight.t()).view(num_tokens, 3, num_heads, head_dim).unbind(1)
        angle = positions[:, None].double() * 10_000.0 ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]

        def rotate(y):
            pairs = torch.complex(*y.chunk(2, -1)) * turn
            return torch.cat((pairs.real, pairs.imag), -1)

        return rotate(q).transpose(0, 1) @ rotate(k).permute(1, 2, 0), v

    mixed = (upstream[0], upstream[1].to(dtype))
    ours, gradients = run(scores, (x, weight), mixed)
    reference, reference_gradients = run(scores, (x, weight), mixed, "reference")
    exact, exact_gradients = run(exact_scores, (x.double(), weight.double()), [u.double() for u in upstream])
    assert torch.equal(ours[1], reference[1]) or dtype == torch.float32
    # fp32 angles of up to 100 radians are 4e-6 off.
    rounding = max(ROUNDING[dtype], 5e-6)
    assert_no_worse(ours, reference, exact, rounding=rounding)
    assert_no_worse(gradients, reference_gradients, exact_gradients, rounding=rounding)


@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu(dtype):
    torch.manual_seed(0)
    x = random(50, 24).to(dtype)
    weight = random(2 * 40, 24, scale=0.2)
    upstream = random(50, 40)
    ours, gradients = run(ops.geglu, (x, weight), [upstream.to(dtype)])
    reference, reference_gradients = run(ops.geglu, (x, weight), [upstream.to(dtype)], "reference")
    exact, exact_gradients = run(ops.geglu_reference, (x.double(), weight.double()), [upstream.double()])
    assert_no_worse(ours, reference, exact, rounding=ROUNDING[dtype])
    assert_no_worse(gradients, reference_gradients, exact_gradients, rounding=ROUNDING[dtype])


def test_cpu_runs_the_cpu_ops(monkeypatch):
    calls = []

    def noted(name, original):
        return lambda *args: calls.append(name) or original(*args)

    for name in ("generator_head", "geglu", "rotary_qkv", "self_attention"):
        monkeypatch.setattr(cpu_ops, name, noted(name, getattr(cpu_ops, name)))
    rotary = ops.rotary_angles(torch.arange(4), 4, 1e4)
    ops.rotary_qkv(random(4, 8), random(24, 8), *rotary, 2)
    ops.geglu(random(4, 8), random(6, 8))
    target = torch.zeros(4, dtype=torch.int64)
    ops.generator_head(random(4, 8), random(20, 8), random(20), target, random(4), target, None)
    assert calls == ["rotary_qkv", "geglu", "generator_head"]
    self_attention(random(4, 8), random(24, 8), None, AttentionMask(1, 4), 2, ops.Dropout(), rotary)
    assert calls[3:] == ["rotary_qkv", "self_attention"]


@pytest.mark.parametrize(("dtype", "probability"), [(torch.float32, 0.1), (torch.bfloat16, 0.5)])
def test_dropout_zeroes_a_fraction_and_preserves_the_mean(dtype, probability):
    x = torch.ones(1000, 257, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    out = cpu_ops.unkeyed_dropout(x, probability)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())  # the mask is the same in both directions
    values = out.detach().float()
    nonzero = values[values != 0]
    assert len(nonzero) / values.numel() == pytest.approx(1 - probability, abs=0.003)
    assert (
        nonzero.min()
        == nonzero.max()
        == pytest.approx(1 / (1 - probability), rel=5e-3 if dtype == torch.bfloat16 else 1e-4)
    )
    columns = values.mean(0)
    rows = values.mean(1)
    assert columns.std() < 3 * rows.std() and rows.std() < 0.2  # no element, row or column is favored
    assert (values[:, 1:] * values[:, :-1]).mean() == pytest.approx(1, abs=0.02)  # neighbors are independent


def test_dropout_masks_differ_and_repeat_with_the_seed():
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        masks += [cpu_ops.unkeyed_dropout(torch.ones(64, 64), 0.3), cpu_ops.unkeyed_dropout(torch.ones(64, 64), 0.3)]
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[4])


NUM_ROWS = 5
LENGTH = 17
HEAD_DIM = 8


def attention_inputs(num_heads, dtype, masked=True):
    """Returns concatenated queries, keys and values, a gradient, and a mask with mostly two segments, [B, 1, L, L]."""
    torch.manual_seed(0)
    width = num_heads * HEAD_DIM
    qkv_TX = random(NUM_ROWS * LENGTH, 3 * width).to(dtype)
    upstream_TD = random(NUM_ROWS * LENGTH, width).to(dtype)
    segments_BL = torch.arange(LENGTH) < torch.tensor([9, 17, 1, 4, 12])[:, None]
    dense_B1LL = (segments_BL[:, :, None] == segments_BL[:, None, :])[:, None]
    mask = AttentionMask(NUM_ROWS, LENGTH, dense_B1LL=dense_B1LL if masked else None)
    return qkv_TX, upstream_TD, mask


def attention_formula(qkv_TX, mask, num_heads, dropout):
    q, k, v = qkv_TX.view(NUM_ROWS, LENGTH, 3, num_heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / HEAD_DIM**0.5
    if mask.dense_B1LL is not None:
        scores = scores.masked_fill(~mask.dense_B1LL, float("-inf"))
    weights = scores.softmax(-1)
    if dropout:
        weights = cpu_ops.unkeyed_dropout(weights, dropout)
    return (weights @ v).transpose(1, 2).flatten(2).flatten(0, 1)


def attended(inputs, num_heads, dropout=0.0):
    qkv_TX, upstream_TD, mask = inputs
    torch.manual_seed(1)
    bias = mask.bias(qkv_TX.dtype)
    (out,), (gradient,) = run(
        lambda x: cpu_ops.self_attention(x, bias, NUM_ROWS, num_heads, dropout), [qkv_TX], [upstream_TD]
    )
    return out, gradient


@pytest.mark.parametrize(
    ("num_heads", "dropout", "masked", "dtype"),
    [
        (1, 0.2, True, torch.float64),
        (3, 0.0, False, torch.float64),
        (3, 0.2, True, torch.float32),
        (3, 0.2, True, torch.bfloat16),
    ],
)
def test_self_attention_equals_the_formula(num_heads, dropout, masked, dtype):
    qkv_TX, upstream_TD, mask = inputs = attention_inputs(num_heads, dtype, masked)

    def formula(dtype):
        torch.manual_seed(1)
        operation = lambda x: attention_formula(x, mask, num_heads, dropout)  # noqa: E731
        (out,), (gradient,) = run(operation, [qkv_TX.to(dtype)], [upstream_TD.to(dtype)])
        return out, gradient

    ours = attended(inputs, num_heads, dropout)
    assert_no_worse(ours, formula(dtype), formula(torch.float64), rounding=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 2])
def test_segment_attention_equals_masked_rows(poisoned_memory, window, dtype, num_heads=3):
    """Rows of one segment and of three, with and without padding, which has no gradient."""
    qkv_TX, upstream_TD, _ = attention_inputs(num_heads, dtype)
    lengths = [[17], [9, 8], [1, 2], [4, 12, 1], [16]]
    ids = [[number for number, length in enumerate(row, start=1) for _ in range(length)] for row in lengths]
    ids_BL = torch.tensor([row + [0] * (LENGTH - len(row)) for row in ids])
    ends = torch.cat([ids_BL.flatten().diff().nonzero().flatten() + 1, torch.tensor([ids_BL.numel()])])
    cu_seqlens = torch.cat([torch.zeros(1), ends, torch.arange(NUM_ROWS) * LENGTH]).unique().int()
    mask = AttentionMask.packed(ids_BL, cu_seqlens, "sdpa", 2 * (window or 0))
    mask = mask if window is None else mask.local
    upstream_TD = upstream_TD * (ids_BL.flatten() > 0)[:, None]

    def attended_by(attend, dtype):
        (out_TD,), (gradient_TX,) = run(attend, [qkv_TX.to(dtype)], [upstream_TD.to(dtype)])
        return out_TD[ids_BL.flatten() > 0], gradient_TX

    def formula(x):
        return attention_formula(x, AttentionMask(NUM_ROWS, LENGTH, dense_B1LL=mask.dense()), num_heads, 0.0)

    ours = attended_by(lambda x: segment_attention(x, mask.segments(dtype), num_heads), dtype)
    expected, exact = (attended_by(formula, precision) for precision in (dtype, torch.float64))
    assert_no_worse(ours, expected, exact, rounding=ROUNDING[dtype])


@pytest.mark.parametrize("num_heads", [1, 3])
def test_self_attention_of_two_rows_at_a_time(monkeypatch, poisoned_memory, num_heads, rows_at_once=2):
    inputs = attention_inputs(num_heads, torch.float32)
    together = attended(inputs, num_heads, dropout=0.1)
    monkeypatch.setattr(cpu_ops, "SCORES_BYTES", rows_at_once * num_heads * LENGTH**2 * 4)
    for ours, expected in zip(attended(inputs, num_heads, dropout=0.1), together, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotary", [False, True])
def test_long_rows_use_torch_attention(monkeypatch, rotary):
    """The attention weights of long rows would not fit; with dropout, they must be stored."""
    mask = attention_inputs(2, torch.float32)[2]
    x = random(mask.num_rows * mask.length, 8)
    weight = random(24, 8)
    angles = ops.rotary_angles(torch.arange(mask.length).repeat(mask.num_rows), 4, 1e4) if rotary else None
    calls = []
    original = cpu_ops.self_attention
    monkeypatch.setattr(cpu_ops, "self_attention", lambda *args: calls.append(args[-1]) or original(*args))
    outputs = []
    for longest in (mask.length, mask.length - 1):
        monkeypatch.setattr(cpu_ops, "MAX_ROW", longest)
        outputs.append(self_attention(x, weight, None, mask, 2, ops.Dropout(), angles))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    self_attention(x, weight, None, mask, 2, ops.Dropout(0.1), angles)
    assert calls == [0.0, 0.1]


def test_self_attention_does_not_change_the_mask(num_heads=1):
    """With one head, scores have the mask's shape, so an in-place addition must not change the mask."""
    inputs = attention_inputs(num_heads, torch.float32)
    bias = inputs[2].bias(torch.float32)
    before = bias.clone()
    first, repeated = (attended(inputs, num_heads) for _ in range(2))
    assert torch.equal(bias, before) and inputs[2].bias(torch.float32) is bias
    assert all(torch.equal(*pair) for pair in zip(first, repeated, strict=True))
    assert inputs[2].bias(torch.bfloat16).dtype == torch.bfloat16  # a cached one of another dtype is not used


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_that_attend_to_nothing_are_finite(dtype):
    qkv_TX, upstream_TD, mask = attention_inputs(2, dtype)
    mask.dense_B1LL[1:3] = False
    ours = attended((qkv_TX * 30, upstream_TD, mask), 2)
    assert all(tensor.isfinite().all() for tensor in ours)
