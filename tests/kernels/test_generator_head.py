"""The generator head's kernels against fp64, the reference's samples, and themselves with other block sizes."""

import itertools

import pytest
import torch
from ahead_of_time import compile_launches
from comparison import DEVICE, assert_same_bits

from electra_fast.kernels import generator_head, generator_head_chunked, generator_head_narrow
from electra_fast.kernels.generator_head import generator_head as by_kernels
from electra_fast.kernels.generator_head_narrow import Blocks, choose_splits
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import linear

KEY = torch.tensor([2**40 + 7, 12], device=DEVICE)
DTYPES = {"narrow": (torch.float32, torch.float16, torch.bfloat16), "chunked": ()}


@pytest.fixture(params=DTYPES)
def path(request, monkeypatch):
    """The path of all inputs, whatever their dtype."""
    monkeypatch.setattr(generator_head, "NARROW_DTYPES", DTYPES[request.param])


def make_inputs(num_rows, vocab_size, width, dtype=torch.float32, seed=0):
    """x, table, bias, targets (half of them the argmax), slots past int32's range."""
    random = torch.Generator().manual_seed(seed + vocab_size)
    x = torch.randn(num_rows, width, generator=random).to(dtype)
    table = torch.randn(vocab_size, width, generator=random) * (2 * width**-0.5)
    bias = torch.randn(vocab_size, generator=random) * 0.5
    target = torch.randint(vocab_size, (num_rows,), generator=random)
    best = linear(x.float(), table, bias).argmax(-1)
    target[::2] = best[::2]
    tensors = (x, table, bias, target, torch.arange(num_rows) + 2**31)
    return tuple(tensor.to(DEVICE) for tensor in tensors)


def run(function, inputs, upstream, key=KEY, temperature=1.0, disallow_correct=False, dtype=None):
    """((nll, sample, correct), gradients of x, table and bias)."""
    leaves = [tensor.to(dtype or tensor.dtype).requires_grad_() for tensor in inputs[:3]]
    outputs = function(*leaves, *inputs[3:], key, temperature, disallow_correct)
    return outputs, torch.autograd.grad((outputs[0] * upstream).sum(), leaves)


def truth(inputs, upstream):
    """nll and gradients in fp64; the sample is not asked for."""
    x, table, bias = (tensor.double().requires_grad_() for tensor in inputs[:3])
    logits = x @ table.T + bias
    nll = logits.logsumexp(-1) - logits.gather(1, inputs[3][:, None])[:, 0]
    return nll, torch.autograd.grad((nll * upstream).sum(), (x, table, bias))


def random_upstream(num_rows):
    upstream = torch.randn(num_rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    upstream[1::5] = 0.0  # unused slots
    return upstream


def assert_no_worse(kernel, eager, exact, rounding):
    """The kernel's error is at most the reference's plus rounding, both the maximum and the mean."""
    scale = max(1.0, exact.abs().max().item())  # nll is the difference of numbers around 5
    for norm in (lambda error: error.abs().max().item(), lambda error: error.square().mean().sqrt().item()):
        error, allowed = norm(kernel.double() - exact), norm(eager.double() - exact)
        assert error <= 1.2 * allowed + rounding * scale, f"{error} > {allowed}"


SHAPES = [(1, 5, 16, 1.0, False), (37, 300, 48, 0.7, False), (66, 257, 32, 1.0, True), (5, 1000, 128, 2.0, True)]


@pytest.mark.parametrize(("num_rows", "vocab_size", "width", "temperature", "disallow_correct"), SHAPES)
@pytest.mark.usefixtures("path")
def test_equals_the_reference_in_fp32(num_rows, vocab_size, width, temperature, disallow_correct):
    inputs, upstream = make_inputs(num_rows, vocab_size, width), random_upstream(num_rows)
    arguments = (inputs, upstream, KEY, temperature, disallow_correct)
    (nll, sample, correct), gradients = run(by_kernels, *arguments)
    (eager_nll, eager_sample, eager_correct), eager_gradients = run(ops.generator_head_reference, *arguments)
    assert torch.equal(sample, eager_sample) and torch.equal(correct, eager_correct)
    if disallow_correct:
        assert (sample != inputs[3]).all()
    exact_nll, exact_gradients = truth(inputs, upstream)
    assert nll.dtype == torch.float32
    assert_no_worse(nll, eager_nll, exact_nll, 2e-6)
    for gradient, eager, exact in zip(gradients, eager_gradients, exact_gradients, strict=True):
        assert gradient.dtype == torch.float32
        assert_no_worse(gradient, eager, exact, 1e-6)


@pytest.mark.usefixtures("path")
def test_16_bit_errors_are_at_most_the_reference_s():
    inputs, upstream = make_inputs(40, 300, 64, torch.float16), random_upstream(40)
    (nll, _, _), gradients = run(by_kernels, inputs, upstream)
    (eager_nll, _, _), eager_gradients = run(ops.generator_head_reference, inputs, upstream)
    exact_nll, exact_gradients = truth(inputs, upstream)
    assert_no_worse(nll, eager_nll, exact_nll, 2e-6)
    for gradient, eager, exact in zip(gradients, eager_gradients, exact_gradients, strict=True):
        assert gradient.dtype == eager.dtype
        assert_no_worse(gradient, eager, exact, 2**-12)


@pytest.mark.usefixtures("path")
def test_the_whole_vocabulary():
    inputs = make_inputs(3, 30_522, 16)
    nll, sample, correct = by_kernels(*inputs, KEY, 1.0, False)
    expected = ops.generator_head_reference(*inputs, KEY)
    torch.testing.assert_close(nll, expected[0])
    assert torch.equal(sample, expected[1]) and torch.equal(correct, expected[2])


def test_confident_rows_have_a_precise_gradient():
    """Where the target's probability is near 1 the gradient's two terms cancel; the rest must still be right."""
    inputs, upstream = make_inputs(6, 200, 32, torch.float16), random_upstream(6)
    inputs[2][inputs[3]] += 12.0
    (_, _, _), gradients = run(by_kernels, inputs, upstream)
    (_, _, _), eager = run(ops.generator_head_reference, inputs, upstream)
    assert_no_worse(gradients[0], eager[0], truth(inputs, upstream)[1][0], 2**-11)


@pytest.mark.usefixtures("path")
def test_samples_of_tiles_of_very_different_probability():
    """Samples equal the reference's, whose distribution tests/ops/test_sampling.py checks."""
    x, table, bias, target, slots = make_inputs(40, 500, 16)
    bias[:] = -30.0
    likely = torch.tensor([0, 127, 128, 300, 301, 499], device=DEVICE)
    bias[likely] = torch.tensor([0.0, 0.5, 1.0, -0.5, 0.3, 0.7], device=DEVICE)
    found, expected = (
        function(x * 0, table, bias, target, slots, KEY, 1.0, False)[1]
        for function in (by_kernels, ops.generator_head_reference)
    )
    assert torch.equal(found, expected) and torch.equal(found.unique(), likely)


def test_block_sizes_change_no_sample(monkeypatch):
    """Splits of the vocabulary, blocks of rows, chunks, batches: the same samples, nll and gradients."""
    inputs, upstream = make_inputs(21, 900, 16), random_upstream(21)
    monkeypatch.setattr(generator_head, "NARROW_DTYPES", DTYPES["narrow"])
    results = [run(by_kernels, inputs, upstream)]
    for rows, splits in [(16, (1, 8)), (32, (3, 3))]:
        monkeypatch.setattr(generator_head_narrow, "lse_sample_blocks", lambda *_, rows=rows: Blocks(rows, 128, 4, 1))
        monkeypatch.setattr(generator_head_narrow, "gradient_blocks", lambda *_, rows=rows: Blocks(rows, 64, 4, 1))
        monkeypatch.setattr(generator_head_narrow, "choose_splits", lambda *_, splits=splits: splits)
        results.append(run(by_kernels, inputs, upstream))
    monkeypatch.setattr(generator_head, "NARROW_DTYPES", DTYPES["chunked"])
    for chunk_rows, saved in [(8, 0), (8, 8)]:
        monkeypatch.setattr(generator_head_chunked, "CHUNK_LOGITS_BYTES", chunk_rows * 1024 * 4)
        monkeypatch.setattr(generator_head_chunked, "SAVED_LOGITS_BYTES", saved * 1024 * 4)
        results.append(run(by_kernels, inputs, upstream))
    (nll, sample, correct), gradients = results[0]
    for (other_nll, other_sample, other_correct), other_gradients in results[1:]:
        assert torch.equal(sample, other_sample) and torch.equal(correct, other_correct)
        torch.testing.assert_close(nll, other_nll)
        torch.testing.assert_close(gradients, other_gradients, rtol=1e-5, atol=1e-5)
    part = [tensor[7:12] if len(tensor) == 21 else tensor for tensor in inputs]
    assert torch.equal(by_kernels(*part, KEY, 1.0, False)[1], sample[7:12])


@pytest.mark.usefixtures("path")
def test_is_reproducible_and_keeps_saved_tensors():
    inputs, upstream = make_inputs(9, 300, 16), random_upstream(9)
    first, second = (run(by_kernels, inputs, upstream) for _ in range(2))
    assert_same_bits((*first[0], *first[1]), (*second[0], *second[1]))
    x = inputs[0].clone().requires_grad_()
    nll = by_kernels(x, *inputs[1:], KEY, 1.0, False)[0]
    once = torch.autograd.grad(nll.sum(), x, retain_graph=True)[0]
    assert torch.equal(once, torch.autograd.grad(nll.sum(), x)[0])


@pytest.mark.usefixtures("path")
def test_without_seed_or_gradient():
    inputs = make_inputs(9, 300, 16)
    expected, (nll, sample, correct) = (
        function(*inputs, None, 1.0, False) for function in (ops.generator_head_reference, by_kernels)
    )
    assert sample is None and not nll.requires_grad
    torch.testing.assert_close(nll, expected[0])
    assert torch.equal(correct, expected[2])


@pytest.mark.usefixtures("path")
def test_argmax_of_equal_logits_is_the_first():
    x, table, bias, _, slots = make_inputs(4, 300, 16)
    target = torch.tensor([0, 1, 128, 0], device=DEVICE)
    correct = by_kernels(x * 0, table, bias * 0, target, slots, None, 1.0, False)[2]
    assert correct.tolist() == [True, False, False, True]


@pytest.mark.usefixtures("path")
def test_registered_for_autograd_and_compilation():
    x, table, bias, target, slots = make_inputs(3, 140, 16)
    leaves = [tensor.requires_grad_() for tensor in (x, table, bias)]
    arguments = (*leaves, target, slots, KEY, 1.0, False, True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.electra_fast.generator_head.default, arguments, test_utils=tests)


@pytest.mark.usefixtures("path")
def test_compiles_as_one_graph():
    inputs, upstream = make_inputs(6, 140, 16), random_upstream(6)
    expected = run(by_kernels, inputs, upstream)
    found = run(torch.compile(by_kernels, backend="aot_eager", fullgraph=True), inputs, upstream)
    assert_same_bits((*found[0], *found[1]), (*expected[0], *expected[1]))


def test_splits_cover_the_vocabulary_and_fill_the_gpu():
    for num_row_blocks, num_tiles in itertools.product((1, 5, 19, 154, 1000), (1, 3, 239)):
        splits, tiles = choose_splits(num_row_blocks, num_tiles, 132)
        assert (splits - 1) * tiles < num_tiles <= splits * tiles
        if num_tiles == 239:
            waves = -(-num_row_blocks * splits // 132)
            busy = num_row_blocks * splits / (waves * 132)
            assert busy > 0.8 or splits >= 15, (splits, busy)


def test_chunks_are_bounded():
    for num_rows in (1, 100, 5000, 40_000):
        chunk = generator_head_chunked.rows_per_chunk(num_rows, 30_592, 2)
        assert 0 < chunk * 30_592 * 2 <= generator_head_chunked.CHUNK_LOGITS_BYTES
        saved = generator_head_chunked.num_saved_rows(num_rows, 30_592, 2)
        assert saved * 30_592 * 2 <= generator_head_chunked.SAVED_LOGITS_BYTES
        assert saved % chunk == 0 or saved == num_rows


# Rows and width: each choice of blocks, and on smaller GPUs the widest that the narrow path takes there.
@pytest.mark.parametrize(
    ("num_rows", "width", "temperature", "capability"),
    [(512, 128, 1.0, 90), (528, 128, 1.0, 90), (528, 128, 1.0, 80), (528, 256, 0.5, 90), (528, 768, 1.0, 90)],
)
def test_compiles_ahead_of_time(num_rows, width, temperature, capability):
    x, *rest = make_inputs(num_rows, 300, width, torch.bfloat16)

    def launch():
        _, *_, lse, saved, weight, bias = generator_head._generator_head(x, *rest, KEY, temperature, False, True)
        generator_head._generator_head_backward(lse, x, rest[2], lse, saved, weight, bias, 300)

    for name, code in compile_launches(launch, capability).items():
        if name in ("_lse_sample_kernel", "_table_gradient_kernel"):
            # At a temperature there are two maxima and two sums beside the largest accumulator. GPUs before Hopper
            # have smaller tiles of products, for which about 14 of 255 registers may spill.
            code.check(1, max_spilled_bytes=64 if capability == 80 else 256 if temperature != 1.0 else 0)
            assert code.shared_bytes <= 99 * 1024 or capability == 90  # what GPUs of compute capability 8.6 have
            assert code.tensor_core_instructions > 0
        else:
            code.check(1)
            assert code.shared_bytes <= 48 * 1024
