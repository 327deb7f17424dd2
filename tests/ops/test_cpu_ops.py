"""Operations in their form for the CPU, against their references and against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from electra_fast.model.attention import AttentionMask, self_attention
from electra_fast.ops import cpu_ops
from electra_fast.ops import operations as ops

KEY = torch.tensor([2**40 + 17, 5])
DTYPES = (torch.float32, torch.bfloat16)


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape) * scale


def run(operation, inputs, upstream, impl=None):
    """Outputs and the gradients of the floating-point inputs, which are leaves of their own dtype."""
    leaves = [x.detach().clone().requires_grad_() if torch.is_floating_point(x) else x for x in inputs]
    if impl is None:
        outputs = operation(*leaves)
    else:
        with ops.use_impl(impl):
            outputs = operation(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    floating = [x for x in outputs if x is not None and x.requires_grad]
    trained = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(floating, trained, upstream[: len(floating)])
    return [x.detach() if x is not None else None for x in outputs], gradients


def assert_no_worse(ours: Tensor, reference: Tensor, exact: Tensor, rounding: float) -> None:
    """Our error against fp64 is at most the reference's, plus what rounding in another order may give."""
    scale = exact.abs().max().item()
    for norm in (lambda error: error.abs().max().item(), lambda error: error.square().mean().sqrt().item()):
        error, allowed = norm(ours.double() - exact), norm(reference.double() - exact)
        assert error <= 1.2 * allowed + rounding * scale, f"{error} > {allowed}"


def assert_all_no_worse(ours, reference, exact, rounding):
    for each in zip(ours, reference, exact, strict=True):
        assert each[0].dtype == each[1].dtype
        assert_no_worse(*each, rounding)


ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-9}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 1, 2), (37, 3, 8), (64, 2, 32)])
def test_rotary_attention_scores_and_gradients(dtype, num_tokens, num_heads, head_dim):
    """The order of a head's dimensions is free, so what is compared are scores, values and gradients of the inputs."""
    width = num_heads * head_dim
    torch.manual_seed(0)
    x, weight = random(num_tokens, width).to(dtype), random(3 * width, width, scale=width**-0.5)
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
    assert_all_no_worse(ours, reference, exact, max(ROUNDING[dtype], 5e-6))
    assert_all_no_worse(gradients, reference_gradients, exact_gradients, max(ROUNDING[dtype], 5e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_geglu(dtype):
    torch.manual_seed(0)
    x, weight, upstream = random(50, 24).to(dtype), random(2 * 40, 24, scale=0.2), random(50, 40)
    ours, gradients = run(ops.geglu, (x, weight), [upstream.to(dtype)])
    reference, reference_gradients = run(ops.geglu, (x, weight), [upstream.to(dtype)], "reference")
    exact, exact_gradients = run(ops.geglu_reference, (x.double(), weight.double()), [upstream.double()])
    assert_all_no_worse(ours, reference, exact, ROUNDING[dtype])
    assert_all_no_worse(gradients, reference_gradients, exact_gradients, ROUNDING[dtype])


def head_inputs(num_rows, vocab_size, width, dtype=torch.float32):
    torch.manual_seed(num_rows)
    x, table, bias = random(num_rows, width).to(dtype), random(vocab_size, width, scale=0.3), random(vocab_size)
    target, slots = torch.randint(0, vocab_size, (num_rows,)), torch.arange(num_rows) + 3
    weight = (torch.rand(num_rows) * 2).masked_fill(torch.rand(num_rows) < 0.2, 0.0)
    return x, table, bias, target, weight, slots


def run_head(inputs, upstream, impl=None, key=KEY, temperature=1.0, disallow_correct=False):
    x, table, bias, target, weight, slots = inputs

    def operation(x, table, bias):
        return ops.generator_head(x, table, bias, target, weight, slots, key, temperature, disallow_correct)

    return run(operation, (x, table, bias), [upstream], impl)


def exact_head(inputs, upstream):
    x, table, bias, target, weight, _ = (t.double() if torch.is_floating_point(t) else t for t in inputs)

    def operation(x, table, bias):
        nll = torch.nn.functional.cross_entropy(x @ table.t() + bias, target, reduction="none")
        return (nll * weight).sum()

    return run(operation, (x, table, bias), [upstream.double()])


SHAPES = [(1, 5, 16, 1.0, False), (37, 300, 48, 0.7, False), (66, 257, 32, 1.0, True), (5, 1000, 128, 2.0, True)]


@pytest.mark.parametrize("chunk_rows", [7, 1000])
@pytest.mark.parametrize(("num_rows", "vocab_size", "width", "temperature", "disallow_correct"), SHAPES)
def test_generator_head(monkeypatch, num_rows, vocab_size, width, temperature, disallow_correct, chunk_rows):
    monkeypatch.setattr(cpu_ops, "CHUNK_BYTES", chunk_rows * -(-vocab_size // 128) * 128 * 4)
    inputs, upstream = head_inputs(num_rows, vocab_size, width), torch.tensor(0.7)
    options = {"temperature": temperature, "disallow_correct": disallow_correct}
    (loss, sample, correct), gradients = run_head(inputs, upstream, **options)
    (other_loss, other_sample, other_correct), other_gradients = run_head(inputs, upstream, "reference", **options)
    (exact_loss,), exact_gradients = exact_head(inputs, upstream)
    assert torch.equal(sample, other_sample) and torch.equal(correct, other_correct)
    assert_no_worse(loss, other_loss, exact_loss, 1e-6)
    assert_all_no_worse(gradients, other_gradients, exact_gradients, 1e-6)


def test_generator_head_in_bf16():
    inputs, upstream = head_inputs(60, 300, 32, torch.bfloat16), torch.tensor(1.0)
    (loss, _, _), gradients = run_head(inputs, upstream)
    (other_loss, _, _), other_gradients = run_head(inputs, upstream, "reference")
    (exact_loss,), exact_gradients = exact_head(inputs, upstream)
    assert_no_worse(loss, other_loss, exact_loss, 1e-6)
    assert_all_no_worse(gradients, other_gradients, exact_gradients, 2**-9)


def test_generator_head_of_the_whole_vocabulary_draws_as_the_reference():
    inputs = head_inputs(130, 30_522, 16)
    with torch.no_grad():
        loss, sample, correct = ops.generator_head(*inputs, KEY)
        with ops.use_impl("reference"):
            expected = ops.generator_head(*inputs, KEY)
    torch.testing.assert_close(loss, expected[0])
    assert torch.equal(sample, expected[1]) and torch.equal(correct, expected[2])
    assert sample.unique().numel() > 60


def test_generator_head_without_samples_or_gradient():
    inputs = head_inputs(9, 300, 16)
    loss, sample, correct = ops.generator_head(*inputs, None)
    with ops.use_impl("reference"):
        expected = ops.generator_head(*inputs, None)
    assert sample is None and not loss.requires_grad
    torch.testing.assert_close(loss, expected[0])
    assert torch.equal(correct, expected[2])


def test_the_largest_of_equal_logits_is_the_first():
    x, table, bias, _, weight, slots = head_inputs(4, 300, 16)
    target = torch.tensor([0, 1, 128, 0])
    correct = ops.generator_head(x * 0, table, bias * 0, target, weight, slots, None)[2]
    assert correct.tolist() == [True, False, False, True]


def test_logits_that_differ_by_less_than_their_exponentials_resolve():
    """exp(a - b) of neighboring floats near 0 is 1: the argmax must be taken of the logits."""
    x, table, bias, target, weight, slots = head_inputs(2, 300, 16)
    bias = bias.clamp(max=-1.0)
    bias[7], bias[9] = 0.05, torch.tensor(0.05).nextafter(torch.tensor(1.0))
    correct = ops.generator_head(x * 0, table, bias, torch.tensor([7, 9]), weight, slots, None)[2]
    assert correct.tolist() == [False, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_generator_head_is_registered_for_autograd_and_compilation():
    x, table, bias, target, weight, slots = head_inputs(3, 140, 16)
    leaves = [tensor.requires_grad_() for tensor in (x, table, bias)]
    arguments = (*leaves, target, weight, slots, KEY, 1.0, False, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.electra_fast.generator_head_cpu.default, arguments, test_utils=tests)


def test_the_cpu_ops_are_what_runs_on_a_cpu(monkeypatch):
    calls = []

    def noted(name, original):
        return lambda *args: calls.append(name) or original(*args)

    for name in ("generator_head", "geglu", "rotary_qkv", "self_attention"):
        monkeypatch.setattr(cpu_ops, name, noted(name, getattr(cpu_ops, name)))
    rotary = ops.rotary_angles(torch.arange(4), 4, 1e4)
    ops.rotary_qkv(random(4, 8), random(24, 8), *rotary, 2)
    ops.geglu(random(4, 8), random(6, 8))
    ops.generator_head(*head_inputs(4, 20, 8), None)
    assert calls == ["rotary_qkv", "geglu", "generator_head"]
    self_attention(random(4, 8), random(24, 8), None, AttentionMask(1, 4), 2, ops.Dropout(), rotary)
    assert calls[3:] == ["rotary_qkv", "self_attention"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_zeroes_a_share_and_keeps_the_mean(dtype, probability):
    x = torch.ones(1000, 257, dtype=dtype, requires_grad=True)
    torch.manual_seed(0)
    out = cpu_ops.unkeyed_dropout(x, probability)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(gradient, out.detach())  # the mask is the same in both directions
    values = out.detach().float()
    kept = values[values != 0]
    assert len(kept) / values.numel() == pytest.approx(1 - probability, abs=0.003)
    assert (
        kept.min() == kept.max() == pytest.approx(1 / (1 - probability), rel=5e-3 if dtype == torch.bfloat16 else 1e-4)
    )
    columns, rows = values.mean(0), values.mean(1)
    assert columns.std() < 3 * rows.std() and rows.std() < 0.2  # no element, row or column is favored
    assert (values[:, 1:] * values[:, :-1]).mean() == pytest.approx(1, abs=0.02)  # neighbors are independent


def test_dropout_draws_anew_and_repeats_with_the_seed():
    masks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        masks += [cpu_ops.unkeyed_dropout(torch.ones(64, 64), 0.3), cpu_ops.unkeyed_dropout(torch.ones(64, 64), 0.3)]
    assert torch.equal(masks[0], masks[2]) and torch.equal(masks[1], masks[3])
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[4])


NUM_ROWS, LENGTH, HEAD_DIM = 5, 17, 8


def attention_inputs(num_heads, dtype, masked=True):
    """Queries, keys and values side by side, a gradient, and the mask: two segments in most rows, [B, 1, L, L]."""
    torch.manual_seed(0)
    width = num_heads * HEAD_DIM
    qkv_TX, upstream_TD = random(NUM_ROWS * LENGTH, 3 * width).to(dtype), random(NUM_ROWS * LENGTH, width).to(dtype)
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


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_self_attention_is_the_formula(num_heads, dropout, masked, dtype):
    qkv_TX, upstream_TD, mask = inputs = attention_inputs(num_heads, dtype, masked)

    def formula(dtype):
        torch.manual_seed(1)
        operation = lambda x: attention_formula(x, mask, num_heads, dropout)  # noqa: E731
        (out,), (gradient,) = run(operation, [qkv_TX.to(dtype)], [upstream_TD.to(dtype)])
        return out, gradient

    ours = attended(inputs, num_heads, dropout)
    assert_all_no_worse(ours, formula(dtype), formula(torch.float64), ROUNDING[dtype])


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_self_attention_of_some_rows_at_a_time(monkeypatch, poisoned_memory, num_heads, rows_at_once):
    inputs = attention_inputs(num_heads, torch.float32)
    together = attended(inputs, num_heads, dropout=0.1)
    monkeypatch.setattr(cpu_ops, "SCORES_BYTES", rows_at_once * num_heads * LENGTH**2 * 4)
    for ours, expected in zip(attended(inputs, num_heads, dropout=0.1), together, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotary", [False, True])
def test_long_rows_are_left_to_torch(monkeypatch, rotary):
    """Their weights would not fit; with dropout they must."""
    mask = attention_inputs(2, torch.float32)[2]
    x, weight = random(mask.num_rows * mask.length, 8), random(24, 8)
    angles = ops.rotary_angles(torch.arange(mask.length).repeat(mask.num_rows), 4, 1e4) if rotary else None
    calls, original = [], cpu_ops.self_attention
    monkeypatch.setattr(cpu_ops, "self_attention", lambda *args: calls.append(args[-1]) or original(*args))
    found = []
    for longest in (mask.length, mask.length - 1):
        monkeypatch.setattr(cpu_ops, "MAX_ROW", longest)
        found.append(self_attention(x, weight, None, mask, 2, ops.Dropout(), angles))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    self_attention(x, weight, None, mask, 2, ops.Dropout(0.1), angles)
    assert calls == [0.0, 0.1]


@pytest.mark.parametrize("num_heads", [1, 3])
def test_self_attention_leaves_the_mask_to_the_next_layer(num_heads):
    """The scores of one head have the mask's shape: to add to them in place must not add to the mask."""
    inputs = attention_inputs(num_heads, torch.float32)
    bias = inputs[2].bias(torch.float32)
    before = bias.clone()
    first, again = (attended(inputs, num_heads) for _ in range(2))
    assert torch.equal(bias, before) and inputs[2].bias(torch.float32) is bias
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert inputs[2].bias(torch.bfloat16).dtype == torch.bfloat16  # a cached one of another dtype is not used


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
def test_tokens_that_attend_to_nothing_are_finite(dtype):
    qkv_TX, upstream_TD, mask = attention_inputs(2, dtype)
    mask.dense_B1LL[1:3] = False
    ours = attended((qkv_TX * 30, upstream_TD, mask), 2)
    assert all(each.isfinite().all() for each in ours)
