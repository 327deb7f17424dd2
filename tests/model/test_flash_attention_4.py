"""FlashAttention 4, with a stand-in package: arguments, destination of gradients, and missing requirements."""

import math
import sys
import types
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor

from electra_fast.card import Card
from electra_fast.model import attention, flash_attention_4
from electra_fast.model.attention import AttentionMask, attend, attention_reference, self_attention
from electra_fast.ops.operations import Dropout

IDS = torch.tensor([[1, 1, 2, 3, 3, 3, 0, 0], [1, 1, 1, 1, 1, 2, 2, 2]])
OFFSETS = torch.tensor([0, 2, 3, 6, 8, 13, 16, 16, 16], dtype=torch.int32)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, qv: None = None, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    seqused_q: None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, return_lse: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    assert max_seqlen_q == max_seqlen_k == 8 and return_lse and window_size_left == window_size_right
    assert cu_seqlens_q is cu_seqlens_k and cu_seqlens_q.dtype == torch.int32
    return attention_reference(q, k, v, cu_seqlens_q, window_size_left), q.new_zeros(q.shape[1], len(q)), None, None


def _backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
    deterministic: bool = False, dq: Any = None, dk: Any = None, dv: Any = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert deterministic and lse.shape == (q.shape[1], len(q))
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        again = attention_reference(*leaves, cu_seqlens_q, window_size_left)
    for gradient, value in zip((dq, dk, dv), torch.autograd.grad(again, leaves, dout), strict=True):
        gradient.copy_(value)
    return dq, dk, dv


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd = _forward
    interface._flash_attn_bwd = _backward  # type: ignore[attr-defined]
    cute = types.ModuleType("flash_attn.cute")
    package = types.ModuleType("flash_attn")
    cute.interface = interface
    package.cute = cute  # type: ignore[attr-defined]
    for module in (interface, cute, package):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(metadata, "version", lambda name: flash_attention_4.RELEASE)
    return interface


@pytest.mark.parametrize("window", [None, 1])
@pytest.mark.usefixtures("package")
def test_equals_reference_with_and_without_one_buffer(window: int | None) -> None:
    local = 0 if window is None else 2 * window
    mask = AttentionMask.packed(IDS, OFFSETS, "flash4", local)
    mask = mask.local or mask
    random = torch.Generator().manual_seed(0)
    x = torch.randn(16, 8, generator=random)
    weight = torch.randn(24, 8, generator=random)
    bias = torch.randn(24, generator=random)
    dout = torch.randn(16, 8, generator=random)
    leaves = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    q, k, v = torch.nn.functional.linear(*leaves).view(16, 3, 2, 4).unbind(1)
    truth = attention_reference(q, k, v, OFFSETS, window).flatten(1)
    expected = torch.autograd.grad(truth, leaves, dout.double(), retain_graph=True)
    outs = self_attention(*leaves, mask, 2, Dropout()), attend(q, k, v, mask).flatten(1)
    for out in outs:
        torch.testing.assert_close(out, truth)
        torch.testing.assert_close(torch.autograd.grad(out, leaves, dout.double(), retain_graph=True), expected)


@pytest.mark.usefixtures("package")
def test_gradients_are_written_into_one_buffer() -> None:
    packed = torch.randn(16, 3, 2, 4, requires_grad=True)
    out = flash_attention_4.attend(OFFSETS, 8, None, packed)
    (gradient,) = torch.autograd.grad(out.sum(), packed)
    assert gradient.is_contiguous() and gradient.shape == packed.shape
    separate = [x.detach().requires_grad_() for x in packed.unbind(1)]
    gradients = torch.autograd.grad(flash_attention_4.attend(OFFSETS, 8, None, *separate).sum(), separate)
    assert len({x.untyped_storage().data_ptr() for x in gradients}) == 1
    torch.testing.assert_close(torch.stack(gradients, 1), gradient)


def test_missing_requirements_are_reported(package: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Card("H100", (9, 0))
    assert (
        flash_attention_4.missing(hopper, 64) is None and flash_attention_4.missing(Card("B200", (10, 0)), 128) is None
    )
    for card in (Card("A100", (8, 0)), Card("RTX 5090", (12, 0)), Card("MI300X", (9, 4), is_rocm=True, gfx="gfx942")):
        assert f"a Hopper or Blackwell GPU, which sums gradients in a fixed order, not {card.name}" == (
            flash_attention_4.missing(card, 64)
        )
    for head_dim in (136, 12):
        assert "a head dimension that is a multiple of 8" in str(flash_attention_4.missing(hopper, head_dim))
    monkeypatch.setattr(package, "_flash_attn_fwd", math.sin)
    assert "the installed one fails: TypeError: " in str(flash_attention_4.missing(hopper, 64))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    assert "the installed one fails: ModuleNotFoundError" in str(flash_attention_4.missing(hopper, 64))
    monkeypatch.undo()
    if "flash-attn-4" not in {distribution.name for distribution in metadata.distributions()}:
        assert (
            flash_attention_4.missing(hopper, 64) == "the package flash-attn-4 (pip install 'flash-attn-4>=4.0.0b36')"
        )


def test_installed_package_accepts_our_arguments() -> None:
    pytest.importorskip("flash_attn.cute.interface")
    assert flash_attention_4.failure() is None


def test_has_no_dropout() -> None:
    assert not attention.BACKENDS["flash4"].has_dropout and attention.BACKENDS["flash4"].is_deterministic
    mask = AttentionMask.packed(IDS, OFFSETS, "flash4")
    with pytest.raises(ValueError, match='"flash4": has no dropout'):
        self_attention(torch.ones(16, 8), torch.ones(24, 8), None, mask, 2, Dropout(0.1))
