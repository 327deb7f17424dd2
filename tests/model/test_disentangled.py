"""Disentangled attention: each form against the explicit one, for one segment and head at a time."""

import pytest
import torch
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.model.attention import AttentionMask, Queries
from electra_fast.model.disentangled import (
    RelativePositions,
    disentangled_attention,
    disentangled_attention_reference,
    disentangled_query_attention,
)
from electra_fast.model.model import Electra
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import Dropout

HEADS = 3
HEAD_DIM = 4
BUCKETS = 16
MAX_POSITIONS = 64
LENGTHS = {
    "a token": (1, [[1], [1]]),
    "whole rows": (9, [[9], [9]]),
    "each distance a bucket": (9, [[4, 5], [2, 6]]),
    "logarithmic buckets, padding": (40, [[11, 29], [39], [1, 20, 3]]),
    "segments as separate rows": (140, [[70, 70], [3, 120], [140]]),
}


class Case:
    """Segments, and random queries, keys and values of tokens and of relative positions."""

    def __init__(self, length: int, lengths: list[list[int]], dtype: torch.dtype = torch.float64) -> None:
        random = torch.Generator().manual_seed(1)
        self.offsets = [0]
        ids, positions = torch.zeros(2, len(lengths), length, dtype=torch.int32)
        for row, parts in enumerate(lengths):
            start = 0
            for number, part in enumerate(parts, 1):
                ids[row, start : start + part] = number
                positions[row, start : start + part] = torch.arange(part)
                start += part
                self.offsets.append(row * length + start)
            self.offsets += [(row + 1) * length] * (start < length)
        self.ids_BL = ids
        self.positions_T = positions.flatten()
        self.is_token_T = ids.flatten() > 0
        self.cu_seqlens = torch.tensor(self.offsets, dtype=torch.int32)
        width = HEADS * HEAD_DIM
        table_SD = torch.zeros(2 * BUCKETS, width, dtype=dtype)
        self.relative = RelativePositions.of(table_SD, MAX_POSITIONS, length, self.positions_T)
        sizes = (ids.numel(), 3 * width), (len(self.relative.table_SD), 2 * width), (ids.numel(), width)
        self.qkv_TX, self.positions_SY, grad_TD = (torch.randn(size, generator=random, dtype=dtype) for size in sizes)
        self.grad_TD = grad_TD * self.is_token_T[:, None]

    def reference(self) -> list[Tensor]:
        return self._with_gradients(
            lambda *tensors: disentangled_attention_reference(*tensors, self.relative, self.cu_seqlens, HEADS)
        )

    def found(self, backend: str = "sdpa", dropout: float = 0.0) -> list[Tensor]:
        mask = AttentionMask.packed(self.ids_BL, self.cu_seqlens, backend)
        return self._with_gradients(
            lambda *tensors: disentangled_attention(*tensors, self.relative, mask, HEADS, Dropout(dropout))
        )

    def _with_gradients(self, attention) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (self.qkv_TX, self.positions_SY)]
        out_TD = attention(*leaves)
        return [out_TD.detach() * self.is_token_T[:, None], *torch.autograd.grad(out_TD, leaves, self.grad_TD)]


@pytest.mark.parametrize("impl", [None, "reference"], ids=["on a CPU", "by scaled_dot_product_attention"])
@pytest.mark.parametrize("name", LENGTHS)
def test_outputs_and_gradients_equal_the_formula(name: str, impl) -> None:
    case = Case(*LENGTHS[name])
    with ops.use_impl(impl):
        actual = case.found()
    for ours, theirs in zip(actual, case.reference(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:The .grad attribute of a Tensor"
)
@pytest.mark.parametrize("name", LENGTHS)
def test_flex_attention_computes_the_formula(name: str, monkeypatch) -> None:
    """Uncompiled, and without its check that rejects a backward pass on a CPU."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    case = Case(*LENGTHS[name])
    for ours, theirs in zip(case.found("flex"), case.reference(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_16_bit_gradients_differ_only_by_rounding() -> None:
    exact = Case(*LENGTHS["logarithmic buckets, padding"])
    case = Case(*LENGTHS["logarithmic buckets, padding"], torch.bfloat16)
    exact.qkv_TX, exact.positions_SY, exact.grad_TD = (
        x.double() for x in (case.qkv_TX, case.positions_SY, case.grad_TD)
    )
    for ours, theirs in zip(case.found(), exact.reference(), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_subset_of_queries_gets_the_same_outputs() -> None:
    case = Case(*LENGTHS["logarithmic buckets, padding"])
    index_n = torch.tensor([0, 15, 42, 81])
    allowed_nT = torch.zeros(4, case.ids_BL.numel(), dtype=torch.bool)
    for number, index in enumerate(index_n.tolist()):
        end = next(end for end in case.offsets if end > index)
        allowed_nT[number, case.offsets[case.offsets.index(end) - 1] : end] = True
    q, k, v = case.qkv_TX.view(-1, 3, HEADS, HEAD_DIM).unbind(1)
    some = (case.positions_SY, case.relative, Queries(index_n, allowed_nT), Dropout())
    actual = disentangled_query_attention(q[index_n], k, v.float(), *some)
    torch.testing.assert_close(actual.double(), case.reference()[0][index_n], rtol=1e-5, atol=1e-5)


def test_dropout_preserves_the_mean() -> None:
    case = Case(9, [[9]] * 400, torch.float32)
    case.qkv_TX = case.qkv_TX[:9].repeat(400, 1)
    case.positions_SY = case.positions_SY * 0
    torch.manual_seed(0)
    dropped = case.found(dropout=0.2)[0]
    undropped = case.found()[0]
    assert not torch.equal(dropped, undropped)
    assert (dropped - undropped).view(400, 9, -1).mean(0).abs().max() < 0.1


def test_discriminator_trains_only_its_summand() -> None:
    """Gradient-disentangled embedding sharing."""
    model = Electra(Config.preset("tiny", "deberta").override(vocab_size=50))
    assert not model.embeddings.token.any() and torch.equal(model.embeddings.table, model.generator_embeddings.token)
    ids = torch.arange(4, 20)[None]
    model.discriminator_logits(ids).sum().backward()
    assert model.generator_embeddings.token.grad is None and model.embeddings.token.grad.any()
