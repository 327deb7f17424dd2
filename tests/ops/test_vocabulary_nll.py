"""Cross-entropy of all tokens in blocks, against plain PyTorch in fp64, without logits [T, V] in memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from comparison import assert_no_worse
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from electra_fast.ops import vocabulary_nll
from electra_fast.ops.operations import use_impl

BLOCK = (8, 256)
# (T, V, E) for whole blocks, and for partial blocks and tiles in both dimensions.
SHAPES = [(16, 512, 32), (37, 300, 48)]
# Half an ulp. A probability in fp32 takes about 8 roundings (logit, distance to the maximum, exponential, sum,
# quotient, product, one-hot, product with the table), which depend on the order; in bf16 one cast exceeds them all.
ROUNDING = {torch.float64: 1e-13, torch.float32: 8 * 2**-24, torch.bfloat16: 2**-9}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    monkeypatch.setattr(vocabulary_nll, "BLOCK_SHAPE", {"cpu": BLOCK})


def make_inputs(num_tokens: int, vocab_size: int, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns x, table, bias and targets: a third of them the argmax, a third of them confident."""
    torch.manual_seed(num_tokens)
    parameter_dtype = torch.promote_types(dtype, torch.float32)
    x = torch.randn(num_tokens, width).to(dtype)
    table = torch.randn(vocab_size, width, dtype=parameter_dtype) * (2 * width**-0.5)
    bias = torch.randn(vocab_size, dtype=parameter_dtype) * 0.5
    target = torch.randint(vocab_size, (num_tokens,))
    target[::3] = F.linear(x.double(), table.double(), bias.double()).argmax(-1)[::3]
    bias[target[1::3]] += 12.0
    return x, table, bias, target


def make_upstream(num_tokens: int) -> Tensor:
    upstream = torch.randn(num_tokens, dtype=torch.float64)
    upstream[3::4] = 0.0  # tokens outside of the loss
    return upstream


def plain(x: Tensor, table: Tensor, bias: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, with all logits in memory."""
    logits_TV = F.linear(x, table.to(x.dtype), bias.to(x.dtype))
    logits_TV = logits_TV.to(torch.promote_types(x.dtype, torch.float32))
    return F.cross_entropy(logits_TV, target, reduction="none"), logits_TV.argmax(-1) == target


def run(function, inputs, upstream, dtype=None):
    """Returns (nll and the gradients of x, table and bias), is_argmax."""
    leaves = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs[:3]]
    nll, is_argmax = function(*leaves, inputs[3])
    gradients = torch.autograd.grad(nll, leaves, upstream.to(nll.dtype))
    return (nll.detach(), *gradients), is_argmax


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_errors_do_not_exceed_the_definition(shape, dtype):
    inputs = make_inputs(*shape, dtype)
    upstream = make_upstream(shape[0])
    ours, is_argmax = run(vocabulary_nll.vocabulary_nll, inputs, upstream)
    reference, reference_is_argmax = run(plain, inputs, upstream)
    exact, _ = run(plain, inputs, upstream, torch.float64)
    assert torch.equal(is_argmax, reference_is_argmax)
    parameter_dtype = torch.promote_types(dtype, torch.float32)
    assert [tensor.dtype for tensor in ours] == [parameter_dtype, dtype, parameter_dtype, parameter_dtype]
    assert_no_worse(ours, reference, exact, rounding=ROUNDING[dtype], min_scale=1.0)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_larger_than_a_block(dtype):
    num_tokens = 300
    vocab_size = 1000
    width = 2
    block_elements = math.prod(BLOCK)
    assert max(num_tokens, vocab_size) * width <= block_elements
    assert min(num_tokens * BLOCK[1], BLOCK[0] * vocab_size) > block_elements
    inputs = make_inputs(num_tokens, vocab_size, width, dtype)
    upstream = torch.ones(num_tokens)
    with LargestTensor() as largest:
        *_, most, total = vocabulary_nll._vocabulary_nll_impl(*inputs)
        vocabulary_nll._vocabulary_nll_backward_impl(upstream, *inputs, most, total)
    assert largest.num_elements == block_elements


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_is_registered_for_autograd_and_compilation():
    x, table, bias, target = make_inputs(10, 300, 4, torch.float32)
    grad = torch.randn(10)
    largest = torch.full((10,), 9.0)
    total = torch.full((10,), 99.0)
    leaves = [tensor.requires_grad_() for tensor in (x, table, bias)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    operators = torch.ops.electra_fast
    torch.library.opcheck(operators.vocabulary_nll.default, (*leaves, target), test_utils=tests)
    arguments = (grad, *(leaf.detach() for leaf in leaves), target, largest, total)
    torch.library.opcheck(operators.vocabulary_nll_backward.default, arguments, test_utils=tests)


@pytest.mark.slow
def test_compiles_as_one_graph():
    inputs = make_inputs(21, 300, 16, torch.bfloat16)
    upstream = make_upstream(21)
    expected, expected_is_argmax = run(vocabulary_nll.vocabulary_nll, inputs, upstream)
    compiled = torch.compile(vocabulary_nll.vocabulary_nll, backend="aot_eager", fullgraph=True)
    outputs, is_argmax = run(compiled, inputs, upstream)
    assert torch.equal(is_argmax, expected_is_argmax)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_argmax_of_equal_logits_is_the_first():
    x = torch.zeros(5, 4)
    table = torch.zeros(700, 4)
    bias = torch.zeros(700)
    target = torch.tensor([0, 1, 128, 256, 699])
    assert vocabulary_nll.vocabulary_nll(x, table, bias, target)[1].tolist() == [True, False, False, False, False]
    bias[[300, 650]] = 1.0
    target = torch.tensor([300, 0, 650, 256, 699])
    assert vocabulary_nll.vocabulary_nll(x, table, bias, target)[1].tolist() == [True, False, False, False, False]


def test_entries_of_probability_zero():
    """With a bias of -inf for a whole block."""
    inputs = make_inputs(9, 700, 16, torch.float64)
    upstream = make_upstream(9)
    inputs[2][:512] = -math.inf
    inputs[3][:] = torch.arange(9) + 600
    ours, is_argmax = run(vocabulary_nll.vocabulary_nll, inputs, upstream)
    expected, expected_is_argmax = run(plain, inputs, upstream)
    assert torch.equal(is_argmax, expected_is_argmax)
    torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def test_target_outside_the_vocabulary_has_probability_zero():
    x, table, bias, _ = make_inputs(3, 300, 4, torch.float32)
    nll, is_argmax = vocabulary_nll.vocabulary_nll(x, table, bias, torch.tensor([-100, 300, 299]))
    assert nll.tolist()[:2] == [math.inf, math.inf] and nll[2].isfinite()
    assert is_argmax.tolist()[:2] == [False, False]


def test_without_tokens_or_gradients():
    x, table, bias, target = make_inputs(5, 300, 4, torch.float32)
    nll, is_argmax = vocabulary_nll.vocabulary_nll(x[:0].requires_grad_(), table, bias, target[:0])
    assert nll.shape == is_argmax.shape == (0,)
    (x_grad,) = torch.autograd.grad(nll.sum(), (table.requires_grad_(),), allow_unused=True)
    assert x_grad is None
    with torch.no_grad():
        nll, _ = vocabulary_nll.vocabulary_nll(x, table, bias, target)
    assert not nll.requires_grad
    with use_impl("reference"):
        again, is_argmax = vocabulary_nll.vocabulary_nll(x, table, bias, target)
    assert torch.equal(nll, again) and again.requires_grad and not is_argmax.requires_grad
