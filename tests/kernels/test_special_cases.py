"""Kernels in cases that the table of cases lacks: missing operands, extreme values and rows, limits."""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from ahead_of_time import card_of_target
from comparison import DEVICE, DOT_DTYPES, KEY, assert_same_bits
from lib.kernel_cases import CASES, EPS, FP32
from torch._subclasses.fake_tensor import FakeTensorMode

from electra_fast.hardware.kernel_check import Call, excess
from electra_fast.kernels import (
    blocked_attention,
    corrupt,
    embedding_norm,
    launch,
    narrow_feed_forward,
    residual_norm,
    sample_alias,
    short_attention,
)
from electra_fast.model.attention import MAX_PROVEN_ROW, MAX_SHORT_HEAD, MAX_SHORT_ROW
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout, use_impl
from electra_fast.ops.sampling import alias_table, philox, sample_alias_reference


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def call_of(name, *sizes, dtype=FP32):
    return CASES[name].call(torch.device(DEVICE), dtype, *sizes)


class TestDropout:
    @staticmethod
    def keep_mask(num_tokens, width, dropout):
        return ops.dropout_reference(torch.ones(num_tokens, width, device=DEVICE), dropout) != 0

    def test_keeps_the_right_fraction_in_every_row_and_column(self):
        mask = self.keep_mask(4000, 256, Dropout(0.1, KEY, 1))
        deviation = (0.1 * 0.9) ** 0.5
        assert abs(mask.float().mean() - 0.9) < 4 * deviation / mask.numel() ** 0.5
        for along, number in ((0, 4000), (1, 256)):
            assert (mask.float().mean(along) - 0.9).abs().max() < 5 * deviation / number**0.5
        neighbors = (mask[:, 1:] & mask[:, :-1]).float().mean()
        assert abs(neighbors - 0.81) < 0.002

    def test_masks_differ_by_key_and_call_index(self):
        keys = [KEY + torch.tensor(delta, device=DEVICE) for delta in ([0, 0, 0], [1, 0, 0], [2**32, 0, 0], [0, 1, 0])]
        masks = [self.keep_mask(40, 256, Dropout(0.5, key, index)) for key in keys for index in (0, 1, 1 << 15)]
        for one, other in itertools.combinations(masks, 2):
            assert 0.4 < (one == other).float().mean() < 0.6

    def test_micro_batches_share_one_mask(self):
        whole = self.keep_mask(30, 64, Dropout(0.5, KEY, 2))
        later = KEY + torch.tensor([0, 0, 20], device=DEVICE)
        assert torch.equal(whole[20:], self.keep_mask(10, 64, Dropout(0.5, later, 2)))

    def test_without_key_torch_draws_the_mask(self):
        x = torch.ones(50, 8, device=DEVICE)
        torch.manual_seed(3)
        with use_impl("reference"):  # tests/ops/test_cpu_ops.py tests the CPU form
            actual = ops.dropout(x, Dropout(0.3, None, 9))
        torch.manual_seed(3)
        assert torch.equal(actual, torch.nn.functional.dropout(x, 0.3))
        assert ops.dropout(x, Dropout(0.0, KEY, 9)) is x


class TestNorms:
    @pytest.mark.parametrize("has", ["bias", "residual", "norm bias"])
    def test_operands_may_be_missing(self, has):
        """Tests each operand alone."""
        h = normal(33, 96)
        residual = normal(33, 96, seed=1)
        bias, weight, norm_bias = (normal(96, seed=seed) for seed in (2, 3, 4))
        dropout = Dropout(0.3, KEY, 1)

        def reference(h, bias, residual, weight, norm_bias):
            h = ops.dropout_reference(h if bias is None else h + bias, dropout)
            return ops.layer_norm_reference(h if residual is None else residual + h, weight, norm_bias, 1e-5)

        def kernel(*inputs):
            return residual_norm.residual_norm(*inputs, 1e-5, *dropout.arguments)[0]

        parts = (bias if has == "bias" else None, residual if has == "residual" else None, weight)
        inputs = [h, *parts, norm_bias if has == "norm bias" else None]
        inputs = tuple(x if x is None else x.requires_grad_() for x in inputs)
        eager = Call("", reference, inputs)
        truth = eager.outcome(torch.float64)
        assert excess(Call("", kernel, inputs).outcome(), eager.outcome(), truth, 1.5, 4e-7) <= 1

    def test_zero_variance_and_large_means(self):
        """Rows without variance, so that eps decides, and a mean much larger than the standard deviation."""
        x = normal(8, 128)
        weight = normal(128, seed=1)
        norm_bias = normal(128, seed=2)
        flat = torch.full_like(x, 3.0)
        assert torch.equal(residual_norm.layer_norm(flat, weight, norm_bias, EPS), norm_bias.expand(8, -1))
        actual, expected = (f(x + 1000, weight, norm_bias, 1e-5) for f in (residual_norm.layer_norm, ops.layer_norm))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
        assert residual_norm.layer_norm(x.view(2, 4, 128), weight, None, 1e-5).shape == (2, 4, 128)

    def test_sums_by_position_in_chunks(self, monkeypatch):
        """With chunks and blocks that do not divide evenly; a position without tokens gets 0."""
        monkeypatch.setattr(embedding_norm, "resident_programs", lambda *_: 30)
        random = torch.Generator().manual_seed(0)
        dz = torch.randn(900, 72, generator=random)
        positions = torch.randint(0, 130, (900,), generator=random)
        sums = embedding_norm.sum_by_position(dz.to(DEVICE), positions.to(DEVICE), 140, True)
        expected = torch.zeros(140, 72, dtype=torch.float64).index_add_(0, positions, dz.double())
        torch.testing.assert_close(sums.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
        assert (sums[130:] == 0).all()

    def test_result_does_not_depend_on_dtype_of_ids(self):
        call = call_of("embedding_norm", 50, 64, 300, 32, 0.1)
        with use_impl("kernel"):
            expected = call.outcome()
            call.args = (tuple(x.long() for x in call.args[0]), *call.args[1:])
            assert_same_bits(call.outcome(), expected)


def test_alias_thresholds_near_the_drawn_word():
    """The comparison is strict and unsigned: words above 2^31 are not negative."""
    slot_M = torch.arange(64, device=DEVICE)
    key = KEY[:2]
    table_V2 = alias_table(torch.ones(2, dtype=torch.float64, device=DEVICE))
    zero = key[1] * 0
    mask = 2**32 - 1
    coin_M = philox((zero, slot_M, key[1], zero + 2), (key[0] & mask, key[0] >> 32))[1]
    assert coin_M.max() > 2**31 > coin_M.min()
    for threshold in (0, 2**31, 2**32, *coin_M[:4].tolist(), *(coin_M[:4] + 1).tolist()):
        table_V2[:, 0] = threshold
        table_V2[:, 1] = torch.tensor([1, 0])
        sampled_M = sample_alias.sample_alias(table_V2, slot_M, key)
        assert torch.equal(sampled_M, sample_alias_reference(table_V2, slot_M, key))


def test_large_ids_do_not_wrap():
    """The sum of one position's samples exceeds 2^31; its mean does not."""
    masked_BL = torch.full((1, 3), 4, device=DEVICE)
    position_M = torch.ones(5, dtype=torch.int64, device=DEVICE)
    sample_M = 2**31 - torch.tensor([1, 2, 5, 7, 9], device=DEVICE)
    corrupted_T, _ = corrupt.corrupt(masked_BL, position_M, torch.full_like(sample_M, 9), sample_M)
    assert corrupted_T.tolist() == [4, 2**31 - 5, 4] and corrupted_T.dtype == torch.int64


class TestShortAttention:
    def test_values_past_the_row_end_are_ignored(self):
        """Neither positions up to the block's end nor values of the neighboring row have an effect."""
        width = 48
        mask = call_of("self_attention", 3, 17, 3, 16, True, False, 9, 0.1).args[3]
        product, dout = (normal(51, n, seed=n).to(DOT_DTYPES[1]) for n in (3 * width, width))
        bias = normal(3 * width, seed=2)

        def rows():
            leaf = product.clone().requires_grad_()
            arguments = (mask.segment_ids_BL, None, None, 3, mask.window, 0.1, KEY, 5)
            out = short_attention.short_attention(leaf, bias, *arguments)[0]
            return out.detach()[:34], torch.autograd.grad(out, leaf, dout)[0][:34]

        expected = rows()
        product[34:] = 1e4
        dout[34:] = torch.nan
        assert_same_bits(rows(), expected)

    def test_unsupported_sizes_are_rejected(self):
        assert (MAX_SHORT_ROW, MAX_SHORT_HEAD) == (short_attention.MAX_LENGTH, short_attention.MAX_HEAD_DIM)
        assert short_attention.MAX_WHOLE_ROW == MAX_PROVEN_ROW
        options = (None, None, 1, None, 0.0, None, 0)
        for length, width in ((513, 16), (16, 66)):
            ids = torch.ones(1, length, dtype=torch.int32, device=DEVICE)
            with pytest.raises(ValueError, match=f"row length = {length}, head dimension = {width}: must"):
                short_attention.short_attention(torch.zeros(length, 3 * width, device=DEVICE), None, ids, *options)


@triton.jit
def _visited(ids_ptr, found_ptr, LENGTH: tl.constexpr, BLOCK_L: tl.constexpr, OWN: tl.constexpr, WINDOW: tl.constexpr):
    block = tl.program_id(0)
    begin, end = blocked_attention._range(ids_ptr, block * OWN, LENGTH, BLOCK_L, OWN, WINDOW)
    tl.store(found_ptr + 2 * block, begin)
    tl.store(found_ptr + 2 * block + 1, end)


class TestBlockedAttention:
    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        """Makes blocks small, so that short rows have several; with dropout, blocks of keys are half as long."""
        monkeypatch.setattr(short_attention, "has_whole_rows", lambda *_: False)
        for name, rows, other in (("FORWARD", 16, 32), ("BACKWARD", 32, 32)):
            tile = {"OWN": rows, "OTHER": other, "num_warps": 4, "num_stages": 1}
            monkeypatch.setattr(blocked_attention, name, tile)

    @pytest.mark.parametrize(
        "sizes",
        [
            pytest.param((3, 37, 1, 16, True, True, 18, 0.1)),
            pytest.param((3, 72, 2, 24, True, False, 0, 0.1), marks=pytest.mark.slow),
            pytest.param((3, 70, 2, 40, False, True, 0, 0.0), marks=pytest.mark.slow),
            pytest.param((3, 100, 1, 64, True, False, 30, 0.0), marks=pytest.mark.slow),
            pytest.param((3, 1, 2, 16, True, False, 0, 0.0), marks=pytest.mark.slow),
        ],
    )
    def test_equals_reference(self, sizes):
        """Segments that cross blocks, that end with one, that have one token, and padding."""
        call = call_of("self_attention", *sizes, dtype=DOT_DTYPES[0])
        with use_impl("reference"):
            truth = call.outcome(torch.float64)
            eager = call.outcome()
        with use_impl("kernel"):
            assert excess(call.outcome(), eager, truth, 1.5, 4e-7) <= 1

    @pytest.mark.parametrize("window", [None, 3])
    def test_visits_blocks_that_share_a_segment(self, window):
        """Padding counts as the last segment; the row ends within a block."""
        ids = [1] * 21 + [2] * 11 + [3] + [4] * 18 + [0] * 8
        ranges = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
        _visited[(4,)](torch.tensor(ids, device=DEVICE), ranges, 59, 64, 16, window)
        for start, (begin, end) in zip(range(0, 64, 16), ranges.tolist(), strict=True):
            segments = set(ids[start : start + 16])
            reach = 64 if window is None else window
            shared = [n for n, id in enumerate(ids) if id in segments and start - reach <= n < start + 16 + reach]
            assert (begin, end) == (shared[0] // 4 * 4, shared[-1] + 1)

    def test_ids_need_not_ascend(self):
        """A segment that padding interrupts is one segment, as in the reference."""
        call = call_of("self_attention", 1, 64, 1, 16, False, False, 0, 0.0)
        call.args[3].segment_ids_BL[:] = torch.tensor([3, 1, 0, 3], device=DEVICE).repeat_interleave(16)
        with use_impl("reference"):
            truth = call.outcome()
        with use_impl("kernel"):
            torch.testing.assert_close(call.outcome(), truth, rtol=1e-4, atol=1e-5)


class TestSublayers:
    in_fp32 = pytest.mark.skipif(DEVICE == "cuda", reason="compares in fp32, which not all kernels have on a GPU")

    @in_fp32
    def test_gradients_of_reused_inputs(self):
        """Three sublayers in a row, and parallel ones, change no gradient that another one still needs.

        Without dropout, the two gradients of a residual norm are one tensor.
        """
        inner = [call_of("feed_forward", 70, 32, 64, 0.0) for _ in range(2)]
        middle = call_of("attention", 3, 24, 2, 16, 0.0)
        x, *rest = middle.args
        rest[-2:] = Dropout(), Dropout()

        def chain(x, weights, more, last):
            x1 = x[:70]
            y = ops.feed_forward(x1, weights, *inner[0].args[2:])
            z = middle.function(torch.cat((y, x[70:])), more, *rest[1:])
            return ops.feed_forward(z, last, *inner[1].args[2:]) * 2 + z + x

        call = Call("", chain, (x, inner[0].args[1], rest[0], inner[1].args[1]))
        with use_impl("reference"):
            truth = call.outcome()
        with use_impl("kernel"):
            torch.testing.assert_close(call.outcome(), truth, rtol=1e-4, atol=1e-4)

    @in_fp32
    @pytest.mark.parametrize(
        ("name", "sizes"),
        [("attention", (3, 24, 2, 16, 0.0)), ("feed_forward", (70, 48, 80, 0.0)), ("feed_forward", (70, 32, 64, 0.0))],
    )
    def test_frozen_weights_and_no_gradients_at_all(self, name, sizes):
        call = call_of(name, *sizes)
        x, weights, *rest = call.args
        weights = type(weights)(*(item.detach() for item in weights))
        rest = [Dropout() if isinstance(item, Dropout) else item for item in rest]
        with use_impl("kernel"):
            y = call.function(x, weights, *rest)
            (dx,) = torch.autograd.grad(y.sum(), x)
            with torch.no_grad():
                assert torch.equal(call.function(x, weights, *rest), y)
        with use_impl("reference"):
            (expected,) = torch.autograd.grad(call.function(x, weights, *rest).sum(), x)
        torch.testing.assert_close(dx, expected, rtol=1e-3, atol=1e-4)

    def test_widths_of_the_narrow_kernel(self, monkeypatch):
        x = torch.empty(5, 64)
        supports = narrow_feed_forward.supports
        assert supports(x, 256) and supports(x[:, :16], 64) and supports(x, 176, True)
        for others in ((x, 512), (x[:, :48], 128), (x.repeat(1, 2), 256), (x, 176), (x, 72, True), (x, 208, True)):
            assert not supports(*others)
        with FakeTensorMode():
            x = torch.empty(5, 64, dtype=torch.bfloat16, device="cuda")
            for target, expected in ((90, True), (80, False), (100, False), ("gfx942", False)):
                monkeypatch.setattr(launch, "card", lambda _, card_target=target: card_of_target(card_target))
                assert supports(x, 256) == expected and not supports(x.float(), 256)
