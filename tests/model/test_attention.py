"""Attention backends against the explicit reference, on one ragged batch with padded row ends.

Kernels that need a GPU (`varlen`, `xformers`, compiled `flex`) are compared only on a GPU; elsewhere their masks,
arguments and errors are tested.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from electra_fast.model.attention import (
    BACKENDS,
    AttentionMask,
    attend,
    attention_reference,
    self_attention,
    short_attention_reference,
)
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# Backends that read queries, keys and values; `short` reads the qkv product, and its kernel has separate tests.
SEPARATE = [name for name in BACKENDS if name != "short"]
WINDOWED = [name for name in SEPARATE if BACKENDS[name].has_windows]
eager_flex = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels of this backend run on CUDA only")

# Three rows of 160: segments within and across blocks of 128, a row without padding, a row of one token and padding.
LENGTHS = [[5, 70, 60], [160], [1]]
LENGTH = 160
NUM_HEADS = 2
HEAD_DIM = 32


def ragged(num_spare: int = 0, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """Returns segment ids [B, L] (0 = padding) and cu_seqlens, with T repeated `num_spare` more times at its end."""
    ids = torch.zeros(len(LENGTHS), LENGTH, dtype=torch.int32)
    borders = [0]
    for row, lengths in enumerate(LENGTHS):
        ends = list(itertools.accumulate(lengths))
        for number, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            ids[row, start:end] = number + 1
        borders += [row * LENGTH + end for end in (ends if ends[-1] == LENGTH else [*ends, LENGTH])]
    cu_seqlens = torch.tensor(borders + borders[-1:] * num_spare, dtype=torch.int32)
    return ids.to(device), cu_seqlens.to(device)


def random_qkv(dtype: torch.dtype, device: torch.device = CPU) -> list[Tensor]:
    """Returns queries, keys and values, views of one tensor as in the layers."""
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(len(LENGTHS) * LENGTH, 3, NUM_HEADS, HEAD_DIM, generator=random, dtype=torch.float64)
    return list(qkv.to(device, dtype).unbind(1))


def outcome(qkv: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Returns the output, and the gradients of a weighted sum of it."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def truth(dtype: torch.dtype, device: torch.device = CPU, window: int | None = None) -> list[Tensor]:
    _, cu_seqlens = ragged()
    exact = [x.to(dtype).double() for x in random_qkv(torch.float64)]
    return [x.to(device) for x in outcome(exact, lambda *qkv: attention_reference(*qkv, cu_seqlens, window))]


def packed_mask(backend: str, window: int | None, device: torch.device = CPU, num_spare: int = 0) -> AttentionMask:
    """Returns the mask of the ragged batch, or the local one with this window."""
    packed = AttentionMask.packed(*ragged(num_spare, device), backend, 2 * (window or 0))
    if window is None:
        return packed
    assert packed.local is not None and packed.local.window == window
    return packed.local


def test_reference_attends_within_the_window() -> None:
    """Compared with an explicit computation for one token at a time."""
    _, borders = ragged()
    q, k, v = random_qkv(torch.float64)
    window = 7
    actual = attention_reference(q, k, v, borders, window)
    for start, end in itertools.pairwise(borders.tolist()):
        for i in range(start, end):
            near = slice(max(start, i - window), min(end, i + window + 1))
            weights_NJ = (torch.einsum("nh,jnh->nj", q[i], k[near]) * HEAD_DIM**-0.5).softmax(-1)
            assert (actual[i] - torch.einsum("nj,jnh->nh", weights_NJ, v[near])).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, 1, 400])
def test_sdpa_equals_reference(window: int | None) -> None:
    mask = packed_mask("sdpa", window, num_spare=3)
    actual = outcome(random_qkv(torch.float64), lambda *qkv: attend(*qkv, mask))
    for a, b in zip(actual, truth(torch.float64, window=window), strict=True):
        assert (a - b).abs().max() < 1e-12
    whole_rows = attend(*random_qkv(torch.float64), AttentionMask.padded(len(LENGTHS), LENGTH, None))
    assert (whole_rows - actual[0]).abs().max() > 0.1


@eager_flex
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch itself reads it
@pytest.mark.parametrize("window", [None, 20])
def test_flex_equals_reference(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    # torch refuses flex attention's backward pass on the CPU, but its eager formula works there.
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    mask = packed_mask("flex", window)
    actual = outcome(random_qkv(torch.float32), lambda *qkv: attend(*qkv, mask))
    for a, b in zip(actual, truth(torch.float32, window=window), strict=True):
        assert (a - b).abs().max() < 1e-5


def test_padding_far_from_all_tokens_attends_to_itself() -> None:
    lengths = torch.tensor([LENGTH, 30, 1])
    keep = torch.arange(LENGTH) < lengths[:, None]
    mask = AttentionMask.padded(3, LENGTH, keep, local_attention=8)
    assert mask.local is not None and mask.window is None
    actual, *grads = outcome(random_qkv(torch.float64), lambda *qkv: attend(*qkv, mask.local))
    borders = torch.tensor(
        [0, *(x for row in range(3) for x in (row * LENGTH + int(lengths[row]), (row + 1) * LENGTH))]
    )
    expected = attention_reference(*random_qkv(torch.float64), borders, 4)
    assert (actual - expected)[keep.flatten()].abs().max() < 1e-12
    assert all(x.isfinite().all() for x in (actual, *grads))


def test_mask_is_local_only_for_local_attention() -> None:
    assert AttentionMask.packed(*ragged(), "sdpa").local is None
    assert AttentionMask.padded(3, LENGTH, torch.ones(3, LENGTH)).local is None


def short_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the qkv product of rows that end within the longest segment, its bias, segment ids and their offsets."""
    length = 100
    ids = ragged()[0][:, :length]
    borders = [row * length + int(i) for row in range(3) for i in [0, *(ids[row].diff().nonzero() + 1)]]
    random = torch.Generator().manual_seed(5)
    product = torch.randn(3 * length, 3 * NUM_HEADS * HEAD_DIM, generator=random, dtype=torch.float64)
    bias = torch.randn(product.shape[1], generator=random, dtype=torch.float64)
    return product.to(dtype), bias, ids, torch.tensor([*borders, 3 * length])


@pytest.mark.parametrize(("is_rotary", "window"), [(False, None), (True, 7)])
def test_reference_of_short_equals_general_reference(is_rotary: bool, window: int | None) -> None:
    product, bias, ids, borders = short_inputs()
    q, k, v = (product + bias).view(-1, 3, NUM_HEADS, HEAD_DIM).unbind(1)
    angles: tuple[Tensor | None, Tensor | None] = (None, None)
    if is_rotary:
        rotary = ops.rotary_angles(torch.arange(100).repeat(3), HEAD_DIM, 1e4, torch.float64)
        q = ops.rotate(q, *rotary)
        k = ops.rotate(k, *rotary)
        angles = (rotary[0][:, 0], rotary[1][:, 0])
    actual = short_attention_reference(product, bias, ids, *angles, NUM_HEADS, window, Dropout())
    expected = attention_reference(q, k, v, borders, window).flatten(1)
    assert (actual - expected).abs().max() < 1e-12


def test_short_draws_one_mask_per_weight() -> None:
    """With a key, the mask is a matrix of queries by heads and keys, and is equal for a row in another micro-batch."""
    product, bias, ids, _ = short_inputs(torch.float32)
    width = NUM_HEADS * HEAD_DIM
    dropout = Dropout(0.3, torch.tensor([3, 4, 500]), 6)
    product[:, : 2 * width] = 0.0  # all weights equal
    product[:, 2 * width :] = 1.0  # all values 1
    ids = torch.ones_like(ids)
    arguments = (None, ids, None, None, NUM_HEADS, None)
    out = short_attention_reference(product, *arguments, dropout).view(300, NUM_HEADS, HEAD_DIM)
    weights = ops.dropout_reference(torch.ones(300, NUM_HEADS * 100), dropout).view(300, NUM_HEADS, 100)
    torch.testing.assert_close(out, weights.mean(2)[:, :, None].expand(out.shape))
    last = Dropout(0.3, torch.tensor([3, 4, 700]), 6)
    repeated = short_attention_reference(product[200:], None, ids[2:], None, None, NUM_HEADS, None, last)
    assert torch.equal(repeated.view(100, NUM_HEADS, HEAD_DIM), out[200:])


@pytest.mark.parametrize("has_bias", [False, True])
def test_self_attention_is_equal_with_both_references(has_bias: bool) -> None:
    _, bias, ids, borders = short_inputs()
    random = torch.Generator().manual_seed(6)
    width = NUM_HEADS * HEAD_DIM
    x, weight = (torch.randn(n, width, generator=random, dtype=torch.float64) for n in (300, 3 * width))
    x /= width
    outputs = [
        self_attention(
            x,
            weight,
            bias if has_bias else None,
            AttentionMask.packed(ids, borders, backend),
            NUM_HEADS,
            Dropout(),
            None if has_bias else ops.rotary_angles(torch.arange(100).repeat(3), HEAD_DIM, 1e4, torch.float64),
        )
        for backend in ("sdpa", "short")
    ]
    assert (outputs[0] - outputs[1]).abs().max() < (1e-12 if has_bias else 1e-6)  # a CPU rotates in fp32


# Lengths around one and two blocks.
@pytest.mark.parametrize(
    ("length", "window"), [(128, None), (384, None), *((384, window) for window in (0, 127, 128, 129, 255, 256))]
)
def test_flex_block_mask_equals_torch(length: int, window: int | None) -> None:
    random = torch.Generator().manual_seed(3)
    starts = torch.rand(4, length, generator=random) < 0.01
    ids = starts.cumsum(1).int() + 1
    ids[1, 200:] = 0
    ids[2] = 1  # one segment
    ids[3] = 0  # only padding
    mask = AttentionMask.packed(ids, None, "flex", 2 * window + 1 if window is not None else 0)
    ours = mask.block_mask if window is None else mask.local and mask.local.block_mask
    far = length if window is None else window
    theirs = torch_flex.create_block_mask(
        lambda b, h, i, j: (ids[b, i] == ids[b, j]) & ((i - j).abs() <= far), 4, None, length, length, device="cpu"
    )
    assert ours is not None and ours.shape == theirs.shape and ours.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert theirs.full_kv_num_blocks is not None and (far < 127 or theirs.full_kv_num_blocks.sum() > 0)
    for name in ("kv", "full_kv", "q", "full_q"):
        count = getattr(ours, f"{name}_num_blocks")
        listed = getattr(ours, f"{name}_indices")
        assert torch.equal(count, getattr(theirs, f"{name}_num_blocks")), name
        assert torch.equal(listed, getattr(theirs, f"{name}_indices")), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_are_built_without_device_synchronization(backend: str) -> None:
    if backend == "xformers":
        pytest.importorskip("xformers")
    with FakeTensorMode() as mode:  # a read of a tensor without data raises an error
        ids, borders = (mode.from_tensor(x) for x in ragged(num_spare=2))
        with pytest.raises(DataDependentOutputException):
            borders[0].item()
        ids = ids[:, :128]
        mask = AttentionMask.packed(ids, borders, backend)
    assert (mask.num_rows, mask.length, mask.backend) == (3, 128, backend)


@pytest.mark.parametrize(("dropout", "local_attention"), [(0.0, 0), (0.1, 0), (0.0, 8)])
def test_varlen_accepts_our_arguments_forward_and_backward(
    dropout: float, local_attention: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the kernel's shape functions run, not the kernel, and torch does not choose the kernel."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", None)
    with FakeTensorMode() as mode:
        mask = AttentionMask.packed(*(mode.from_tensor(x) for x in ragged(num_spare=2)), "varlen", local_attention)
        mask = mask.local or mask
        qkv = [mode.from_tensor(x) for x in random_qkv(torch.bfloat16)]
        leaves = [x.detach().requires_grad_() for x in qkv]
        out = attend(*leaves, mask, dropout)
        grads = torch.autograd.grad(out.sum(), leaves)
    assert {x.shape for x in (out, *grads)} == {qkv[0].shape} and {x.dtype for x in (out, *grads)} == {torch.bfloat16}


@needs_gpu
@pytest.mark.filterwarnings("default")  # compilers and extras may warn
@pytest.mark.parametrize(
    ("backend", "window"), [*((name, None) for name in SEPARATE), *((name, w) for name in WINDOWED for w in (1, 20))]
)
def test_backends_equal_reference_on_cuda(backend: str, window: int | None) -> None:
    """Each error is at most twice the error of the reference in the same precision."""
    if backend == "xformers":
        pytest.importorskip("xformers")
    borders = ragged(5, CUDA)[1]
    mask = packed_mask(backend, window, CUDA, 5)
    exact = truth(torch.bfloat16, CUDA, window)
    qkv = random_qkv(torch.bfloat16, CUDA)
    rounded = outcome(qkv, lambda *x: attention_reference(*x, borders, window))
    for a, b, t in zip(outcome(qkv, lambda *x: attend(*x, mask)), rounded, exact, strict=True):
        assert (a - t).abs().max() <= 2 * (b - t).abs().max()


@needs_gpu
def test_varlen_ignores_empty_segments_of_long_rows_on_cuda() -> None:
    borders = torch.tensor([0, 300, 512, 1024, 1025, 1536, *[1536] * 600], dtype=torch.int32, device=CUDA)
    random = torch.Generator().manual_seed(1)
    exact = [torch.randn(1536, 2, 64, generator=random, dtype=torch.bfloat16).to(CUDA) for _ in range(3)]
    mask = AttentionMask(3, 512, "varlen", cu_seqlens=borders)
    true, rounded = (
        outcome([x.to(dtype) for x in exact], lambda *x: attention_reference(*x, borders))
        for dtype in (torch.float64, torch.bfloat16)
    )
    for a, b, t in zip(outcome(exact, lambda *x: attend(*x, mask)), rounded, true, strict=True):
        assert (a - t).abs().max() <= 2 * (b - t).abs().max()


def test_reference_ignores_empty_segments() -> None:
    qkv = random_qkv(torch.float64)
    borders = ragged()[1]
    expected = outcome(qkv, lambda *x: attention_reference(*x, borders))
    actual = outcome(qkv, lambda *x: attention_reference(*x, ragged(num_spare=3)[1]))
    assert all(map(torch.equal, actual, expected))


def test_sdpa_never_uses_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass gives NaN on Hopper with masks for rows of 64, 192, 320, ... tokens."""
    is_allowed = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def noted(*arguments: Tensor, **options: Any) -> Tensor:
        is_allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return sdpa(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    with FakeTensorMode():
        q, k, v = (torch.empty(192, 2, 32, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
        attend(q, k, v, AttentionMask.packed(torch.ones(1, 192, device="cuda:0"), None, "sdpa"))
    assert is_allowed == [False] and torch.backends.cuda.cudnn_sdp_enabled()


@needs_gpu
@pytest.mark.parametrize("backend", ["sdpa", "varlen", "xformers"])
def test_dropout_drops_the_given_fraction_on_cuda(backend: str) -> None:
    if backend == "xformers":
        pytest.importorskip("xformers")
    ids, borders = ragged(0, CUDA)
    q, k, v = random_qkv(torch.bfloat16, CUDA)
    check_dropout(q, k, torch.ones_like(v), AttentionMask.packed(ids, borders, backend), 0.05)


def test_dropout_drops_the_given_fraction() -> None:
    q, k, v = random_qkv(torch.float32)
    check_dropout(q, k, torch.ones_like(v), AttentionMask.packed(*ragged(), "sdpa"), 0.02)


def check_dropout(q: Tensor, k: Tensor, ones: Tensor, mask: AttentionMask, tolerance: float) -> None:
    """Checks that values of 1 give 1 on average but not everywhere: some weights are dropped, the others scaled up."""
    out = attend(q, k, ones, mask, 0.3).float()
    assert out.std() > 0.05 and abs(out.mean() - 1) < tolerance
    assert (attend(q, k, ones, mask, 0.0).float() - 1).abs().max() < 1e-2


def test_dropout_without_support_is_an_error() -> None:
    mask = AttentionMask.packed(*ragged(), "flex")
    message = 'model.attention = "flex": has no dropout; set model.attention_dropout = 0.0'
    with pytest.raises(ValueError, match=message):
        attend(*random_qkv(torch.float32), mask, 0.1)
