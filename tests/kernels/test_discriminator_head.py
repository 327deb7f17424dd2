"""Kernels of the discriminator's head and loss in cases that the table of cases lacks: tails, one token, no tokens."""

import math

import pytest
import torch
import torch.nn.functional as F
from comparison import DEVICE

from electra_fast.kernels import discriminator_head as head
from electra_fast.ops import operations as ops


def make_head(num_tokens, width, dtype=torch.float32):
    """Makes activations and parameters large enough that rounding hides no gradient."""
    random = torch.Generator().manual_seed(0)
    h_TD = (torch.randn(num_tokens, width, generator=random) * 2).to(dtype)
    bias_D = torch.randn(width, generator=random)
    weight_1D = torch.randn(1, width, generator=random) / width**0.5
    return [x.to(DEVICE).requires_grad_() for x in (h_TD, bias_D, weight_1D, torch.tensor([0.3]))]


def test_logits_of_bf16_activations_are_fp32(width=64):
    """They equal the exact sum up to fp32 rounding, and all differ; in bf16, only a few hundred would be distinct."""
    h_TD, bias_D, weight_1D, constant = make_head(2000, width, torch.bfloat16)
    weight_1D = weight_1D.detach() * 1e-2
    h, bias, weight = (x.detach().double() for x in (h_TD, bias_D, weight_1D))
    terms_TD = F.gelu(h + bias) * weight
    logits_T = head.gelu_logit(h_TD, bias_D, weight_1D, constant)
    bound_T = width * torch.finfo(torch.float32).eps * (terms_TD.abs().sum(1) + 0.3)
    assert ((logits_T - terms_TD.sum(1) - constant.double()).abs() <= bound_T).all()
    assert logits_T.unique().numel() > 1950


def test_gelu_over_its_range():
    """Value and derivative from -12 to 12 and far outside equal fp64 up to fp32 rounding, like torch's in fp32."""
    x_T = torch.cat((torch.linspace(-12, 12, 4001), torch.tensor([-1e4, -50.0, 50.0, 1e4]))).to(DEVICE)
    zero = torch.zeros(1, device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)

    def value_and_derivative(compute, x_T):
        h_T1 = x_T[:, None].clone().requires_grad_()
        y_T = compute(h_T1)
        y_T.sum().backward()
        return y_T.detach().double().flatten(), h_T1.grad.double().flatten()

    truth = value_and_derivative(F.gelu, x_T.double())
    theirs = value_and_derivative(F.gelu, x_T)
    ours = value_and_derivative(lambda h: head.gelu_logit(h, zero, one, zero), x_T)
    for true, eager, actual in zip(truth, theirs, ours, strict=True):
        bound = true.abs().clamp(min=1)
        assert ((actual - true).abs() / bound).max() <= 2e-7
        assert ((actual - true).abs() / bound).max() <= ((eager - true).abs() / bound).max() + 1e-7
    assert ours[0][-4:].tolist() == [0, 0, 50, 1e4]


def make_loss(num_tokens, case="mixed", dtype=torch.float32):
    random = torch.Generator().manual_seed(num_tokens)
    logits_T = torch.randn(num_tokens, generator=random) * 4
    replaced_T, valid_T = (torch.rand(num_tokens, generator=random) < p for p in (0.2, 0.8))
    if case == "extreme":
        logits_T = logits_T.sign() * 100
    if case == "small":
        logits_T = logits_T * 1e-4
    if case == "none valid":
        valid_T.fill_(False)
    if case == "all replaced":
        replaced_T.fill_(True)
    return [x.to(DEVICE) for x in (logits_T.to(dtype), replaced_T, valid_T)]


def loss_results(compute, arguments, scale):
    logits_T = arguments[0].detach().clone().requires_grad_()
    loss, totals = compute(logits_T, *arguments[1:])
    assert not totals.requires_grad and loss.dtype == torch.float32
    (loss * scale).backward()
    return loss.detach().double(), logits_T.grad, totals


@pytest.mark.parametrize("case", ["mixed", "extreme", "small", "none valid", "all replaced"])
def test_loss_equals_fp64(monkeypatch, case):
    """Several programs compute the mixed case, and their sums are added in several iterations."""
    monkeypatch.setattr(head, "SUM_ROWS", 2)
    num_tokens = 2 * head.LOSS_TOKENS + 5 if case == "mixed" else 255
    arguments = make_loss(num_tokens, case)
    scale = 50 / num_tokens
    z, y, valid = (x.double() for x in arguments)
    losses = (z.clamp(min=0) - z * y + torch.log1p(torch.exp(-z.abs()))) * valid
    gradient = scale * (torch.sigmoid(z) - y) * valid
    loss, dlogits_T, totals = loss_results(head.discriminator_loss, arguments, scale)
    eager, _, expected_totals = loss_results(ops.discriminator_loss_reference, arguments, scale)
    assert totals.dtype == expected_totals.dtype and torch.equal(totals, expected_totals)
    # Below 2^-126, floats are multiples of 2^-149: log1p's argument and its half are rounded to one, then doubled.
    rounding = 4 * torch.finfo(torch.float32).eps * losses.sum() + 1.5 * 2.0**-149 * num_tokens
    assert (loss - losses.sum()).abs() <= (eager - losses.sum()).abs() + rounding
    # Relative for each token, so sigmoid - y must not cancel.
    assert ((dlogits_T - gradient).abs() <= 1e-6 * gradient.abs() * (1 + z.abs()) + 1e-37).all()


def test_loss_of_single_tokens():
    """The relative precision of single tokens' losses, from 0 to underflow."""
    z_T = torch.cat((torch.linspace(-80, 80, 9), torch.linspace(-1, 1, 4))).to(DEVICE)
    for z in z_T:
        no = torch.zeros(1, dtype=torch.bool, device=DEVICE)
        loss, _ = head.discriminator_loss(z[None], no, ~no)
        assert loss.item() == pytest.approx(F.softplus(z.double()).item(), rel=1e-5 if z < -10 else 1e-6)


def test_loss_of_half_precision_logits(dtype=torch.bfloat16):
    arguments = make_loss(507, dtype=dtype)
    loss, dlogits_T, totals = loss_results(head.discriminator_loss, arguments, 1.0)
    eager, expected_dlogits_T, expected_totals = loss_results(ops.discriminator_loss_reference, arguments, 1.0)
    assert loss.item() == pytest.approx(eager.item(), rel=1e-6) and torch.equal(totals, expected_totals)
    assert dlogits_T.dtype == dtype
    torch.testing.assert_close(dlogits_T, expected_dlogits_T, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_no_tokens_and_nan():
    leaves = make_head(0, 64)
    head.gelu_logit(*leaves).sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)
    loss, totals = head.discriminator_loss(*make_loss(0))
    assert loss == 0 and totals.tolist() == [0] * len(ops.DISCRIMINATOR_TOTALS)
    logits_T, replaced_T, valid_T = make_loss(300)
    logits_T[7] = math.nan
    assert head.discriminator_loss(logits_T, replaced_T, valid_T)[0].isnan()
