"""Kernels and CPU form of the generator's head against fp64, the reference's samples, and other block sizes."""

import contextlib
import itertools

import pytest
import torch
import triton.language as tl
from ahead_of_time import compile_launches
from comparison import DEVICE, assert_no_worse, assert_same_bits
from lib.kernel_cases import CASES

from electra_fast.hardware.kernel_check import excess
from electra_fast.kernels import generator_head, generator_head_chunked, generator_head_narrow
from electra_fast.kernels.generator_head import generator_head as by_kernels
from electra_fast.kernels.generator_head_narrow import Blocks, choose_splits
from electra_fast.ops import cpu_ops
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl
from electra_fast.ops.vocabulary_nll import vocabulary_nll

KEY = torch.tensor([2**40 + 7, 12], device=DEVICE)
DTYPES = {"narrow": (torch.float32, torch.float16, torch.bfloat16), "chunked": ()}
TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(params=[*DTYPES, *(["cpu"] if DEVICE == "cpu" else [])])
def path(request, monkeypatch):
    """Makes `ops.generator_head` use this path for any dtype; on a CPU with chunks of seven rows of 300 entries."""
    monkeypatch.setattr(cpu_ops, "CHUNK_BYTES", 7 * 384 * 4)
    monkeypatch.setattr(generator_head, "NARROW_DTYPES", DTYPES.get(request.param))
    with use_impl("kernel") if request.param in DTYPES else contextlib.nullcontext():
        yield request.param


def call_of(num_rows, vocab_size, width, dtype=torch.float32, temperature=1.0, disallow_correct=False):
    """Returns x, table, bias, targets, weights, slots, key, and the options for samples."""
    sizes = num_rows, width, vocab_size, temperature, disallow_correct
    return CASES["generator_head"].call(torch.device(DEVICE), dtype, *sizes)


def make_inputs(*sizes):
    """Returns the arguments before the key."""
    return tuple(x.detach() for x in call_of(*sizes).args[:6])


def outcomes(call):
    """Returns loss, samples, comparisons and gradients from this test's path, from the reference, and in fp64."""
    actual = call.outcome()
    with use_impl("reference"):
        return actual, call.outcome(), call.outcome(torch.float64)


@pytest.mark.parametrize(
    ("row", "dtype"), [(0, None), *(pytest.param(row, None, marks=pytest.mark.slow) for row in (1, 2)),
                       pytest.param(3, torch.bfloat16, marks=pytest.mark.slow)]
)  # fmt: skip
def test_equals_reference(path, row, dtype):
    """For the sizes in the table of cases; Triton's interpreter computes bf16 products incorrectly."""
    case_dtype, *sizes = CASES["generator_head"].tested[row]
    call = CASES["generator_head"].call(torch.device(DEVICE), dtype if dtype and path == "cpu" else case_dtype, *sizes)
    actual, eager, exact = outcomes(call)
    assert excess(actual, eager, exact, 1.2, 1e-6) <= 1
    if call.args[-1]:
        assert (actual[1] != call.args[3]).all()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("sizes", "key"), [((1, 30_522, 16), KEY), ((9, 300, 16), None)], ids=["whole", "no samples"])
def test_without_gradient(sizes, key):
    """With the whole vocabulary, and without samples."""
    inputs = make_inputs(*sizes)
    loss, sample, correct = ops.generator_head(*inputs, key)
    with use_impl("reference"):
        expected = ops.generator_head(*inputs, key)
    torch.testing.assert_close(loss, expected[0])
    assert torch.equal(correct, expected[2]) and not loss.requires_grad
    assert sample is None if key is None else torch.equal(sample, expected[1])


def test_cross_entropy_of_all_tokens_uses_the_kernels():
    x, table, bias, target, *_ = make_inputs(5, 300, 16)
    with use_impl("kernel"):
        nll, correct = vocabulary_nll(x, table, bias, target)
    expected = ops.generator_head_reference(x, table, bias, target, target, None)
    torch.testing.assert_close(nll, expected[0])
    assert torch.equal(correct, expected[2])


def test_confident_rows_have_a_precise_gradient():
    """If the target's probability is near 1, the gradient's two terms cancel, but the rest must still be right."""
    call = call_of(6, 200, 32, torch.float16)
    with torch.no_grad():
        call.args[2][call.args[3]] += 12.0
    with use_impl("kernel"):
        actual, eager, exact = outcomes(call)
    assert_no_worse(actual[3:4], eager[3:4], exact[3:4], rounding=2**-11, min_scale=1.0)


@pytest.mark.usefixtures("path")
def test_samples_of_tiles_of_very_different_probability():
    """Samples equal the reference's; tests/ops/test_sampling.py checks their distribution."""
    x, table, bias, *rest = make_inputs(40, 500, 16)
    bias[:] = -30.0
    likely = torch.tensor([0, 127, 128, 300, 301, 499], device=DEVICE)
    bias[likely] = torch.tensor([0.0, 0.5, 1.0, -0.5, 0.3, 0.7], device=DEVICE)
    sampled_M = ops.generator_head(x * 0, table, bias, *rest, KEY)[1]
    with use_impl("reference"):
        assert torch.equal(sampled_M, ops.generator_head(x * 0, table, bias, *rest, KEY)[1])
    assert torch.equal(sampled_M.unique(), likely)


@pytest.mark.skipif(DEVICE == "cuda", reason="replaces the scan, which only the interpreter looks up at each call")
def test_non_monotone_scan_samples_no_entry_of_probability_0(path, monkeypatch):
    """Neither the target nor an entry past the vocabulary, where sums of a compiled scan may exceed later ones.

    The excess is a rounding; here it is a factor, so that few samples suffice.
    """
    owner, library = (torch.Tensor, torch) if path == "cpu" else (tl, tl)

    def scan(x, axis, cumsum=owner.cumsum):
        return cumsum(x, axis) * library.where(library.arange(0, 128) % 118 == 2, 2.0, 1.0)

    monkeypatch.setattr(owner, "cumsum", scan)
    x, table, bias, target, *rest = make_inputs(60, 5, 16)
    sample = ops.generator_head(x * 0, table, bias * 0, target * 0 + 2, *rest, KEY, 1.0, True)[1]
    assert sample.unique().tolist() == [0, 1, 3, 4]


@pytest.mark.slow
def test_block_sizes_change_no_sample(monkeypatch):
    """Splits of the vocabulary, blocks of rows, chunks and batches give the same samples, losses and gradients."""
    call = call_of(21, 500, 16)
    with use_impl("kernel"):
        monkeypatch.setattr(generator_head, "NARROW_DTYPES", DTYPES["narrow"])
        results = [call.outcome()]
        for rows, splits in [(16, (1, 4)), (32, (2, 2))]:
            blocks = {"lse_sample_blocks": Blocks(rows, 128, 4, 1), "gradient_blocks": Blocks(rows, 64, 4, 1)}
            for name, size in {**blocks, "choose_splits": splits}.items():
                monkeypatch.setattr(generator_head_narrow, name, lambda *_, size=size: size)
            results.append(call.outcome())
        monkeypatch.setattr(generator_head, "NARROW_DTYPES", DTYPES["chunked"])
        for chunk_rows, saved in [(8, 0), (8, 8)]:
            monkeypatch.setattr(generator_head_chunked, "CHUNK_LOGITS_BYTES", chunk_rows * 512 * 4)
            monkeypatch.setattr(generator_head_chunked, "SAVED_LOGITS_BYTES", saved * 512 * 4)
            results.append(call.outcome())
        part = [x[7:12] if torch.is_tensor(x) and len(x) == 21 else x for x in call.args]
        assert torch.equal(ops.generator_head(*part)[1], results[0][1][7:12])
    for other in results[1:]:
        assert_same_bits(other[1:3], results[0][1:3])
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("path")
def test_results_repeat_bitwise_and_saved_tensors_do_not_change():
    x, *rest = make_inputs(9, 300, 16)
    x.requires_grad_()
    first, second = (ops.generator_head(x, *rest, KEY)[0] for _ in range(2))
    gradients = [torch.autograd.grad(loss, x, retain_graph=True)[0] for loss in (first, first, second)]
    assert_same_bits([first, *gradients[1:]], [second, *gradients[:1] * 2])


@pytest.mark.usefixtures("path")
def test_argmax_of_equal_logits_is_the_first():
    x, table, bias, _, *rest = make_inputs(4, 5000, 16)  # several tiles per split
    target = torch.tensor([0, 1, 128, 0], device=DEVICE)
    correct = ops.generator_head(x * 0, table, bias * 0, target, *rest, None)[2]
    assert correct.tolist() == [True, False, False, True]


def test_argmax_distinguishes_logits_with_equal_exponentials():
    """exp(a - b) is 1 for neighboring floats near 0, so the argmax must be computed from logits, on a CPU too."""
    x, table, bias, _, *rest = (tensor.cpu() for tensor in make_inputs(2, 300, 16))
    bias = bias.clamp(max=-1.0)
    bias[7] = 0.05
    bias[9] = torch.tensor(0.05).nextafter(torch.tensor(1.0))
    correct = ops.generator_head(x * 0, table, bias, torch.tensor([7, 9]), *rest, None)[2]
    assert correct.tolist() == [False, True]


@pytest.mark.usefixtures("path")
@pytest.mark.slow
def test_is_registered_for_autograd_and_compilation(path):
    x, table, bias, target, weight, slots = make_inputs(3, 140, 16)
    leaves = [tensor.requires_grad_() for tensor in (x, table, bias)]
    end = (KEY, 1.0, False, True)
    arguments = (*leaves, target, weight, slots, *end) if path == "cpu" else (*leaves, target, slots, *end)
    operator = torch.ops.electra_fast.generator_head_cpu if path == "cpu" else torch.ops.electra_fast.generator_head
    torch.library.opcheck(operator.default, arguments, test_utils=TESTS)


def test_compiles_as_one_graph():
    x, table, bias, target, _, slots = make_inputs(6, 140, 16)
    arguments = (x, table, bias, target, slots, KEY, 1.0, False)
    outputs = torch.compile(by_kernels, backend="aot_eager", fullgraph=True)(*arguments)
    assert_same_bits(outputs, by_kernels(*arguments))


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
    few, all_ = (generator_head_chunked.num_saved_rows(16_384, 30_592, 2, memory << 30) for memory in (24, 80))
    assert few < all_ == 16_384


PRODUCTS = ("_lse_sample_kernel", "_table_gradient_kernel")


# All kernels of both paths, with a temperature, and sizes at which the path depends on the GPU's shared memory.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "temperature", "target", "only"),
    [
        (128, 1.0, 90, ()),
        (768, 1.0, 90, ()),
        (256, 0.5, 90, PRODUCTS),
        (128, 1.0, 89, PRODUCTS),
        (128, 1.0, 100, PRODUCTS[:1]),
        (256, 1.0, 100, ()),
        (128, 1.0, "gfx942", ()),
        (16, 1.0, 75, ()),
    ],
)
def test_compiles_ahead_of_time(width, temperature, target, only):
    dtype = torch.float16 if target == 75 else torch.bfloat16
    x, table, bias, target_ids, _, slots = make_inputs(528, 300, width, dtype)

    def launch():
        arguments = (x, table, bias, target_ids, slots, KEY, temperature, False, True)
        _, *_, lse, saved, weight, bias_P = generator_head._generator_head(*arguments)
        generator_head._generator_head_backward(lse, x, target_ids, lse, saved, weight, bias_P, 300)

    codes = compile_launches(launch, target, only)
    is_narrow = width <= (256 if target == 90 else 128) and target not in (75, "gfx942")
    assert codes.keys().isdisjoint(PRODUCTS) != is_narrow
    for name, code in codes.items():
        if name in PRODUCTS:
            # With a temperature, there are two maxima and two sums next to the largest accumulator. GPUs before Hopper
            # have smaller tiles of products, and about 14 of 255 registers may spill.
            code.check(1, max_spilled_bytes=64 if target == 89 else 256 if temperature != 1.0 else 0)
            assert code.tensor_core_instructions > 0
        else:
            code.check(1)
            assert code.shared_bytes <= 48 * 1024
