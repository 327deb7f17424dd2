"""Linear layers with fp32 weights and 16-bit activations: gradients, and casts that are always current."""

import pytest
import torch
from comparison import DEVICE
from torch import nn

from electra_fast.hardware.kernel_check import Call, excess
from electra_fast.ops.operations import cast, linear, use_impl
from electra_fast.ops.weight_casts import WeightCasts


def normal(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(("shape", "dtype"), [((300, 24), torch.bfloat16), ((7, 9, 24), torch.float16)])
def test_weight_gradients_are_not_rounded(shape, dtype):
    """Sums are in fp32, for weights and biases rounded to the activations' dtype."""
    weight, bias = (normal(*sizes, seed=len(sizes)).to(dtype).float() for sizes in ((40, 24), (40,)))
    call = Call("linear", linear, (normal(*shape, seed=0).to(dtype), weight, bias), dtype=dtype)
    call.args = tuple(x.requires_grad_() for x in call.args)
    with use_impl("kernel"):
        actual = call.outcome()
        assert torch.equal(actual[0], linear(call.args[0], weight, bias.detach()))
    call._upstream = [x.to(dtype) for x in call._upstream]
    with use_impl("reference"):
        eager = call.outcome()
        truth = call.outcome(torch.float64)
    assert excess(actual, eager, truth, 1.0, 0.0) <= 1
    for ours, exact in zip(actual[2:], truth[2:], strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_computes_only_needed_gradients():
    x = normal(5, 8, seed=0).bfloat16()
    weight = normal(4, 8, seed=1).requires_grad_()
    with use_impl("kernel"):
        linear(x, weight).sum().backward()
    assert x.grad is None and weight.grad is not None and weight.grad.dtype == torch.float32


def test_casts_are_renewed_per_context_and_used_only_there():
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(DEVICE)
    with use_impl("kernel"):
        casts = WeightCasts(model, torch.bfloat16)
        copies = []
        for _ in range(2):
            with torch.no_grad():
                model[2].weight += 1.0
            with casts.current():
                copies.append(cast(model[2].weight, torch.bfloat16))
                assert torch.equal(copies[-1], model[2].weight.bfloat16())
                assert cast(model[2].weight, torch.float16).dtype == torch.float16
            fresh = cast(model[2].weight, torch.bfloat16)
            assert torch.equal(fresh, copies[-1]) and fresh.data_ptr() != copies[-1].data_ptr()
        assert copies[0].data_ptr() == copies[1].data_ptr()  # a captured graph relies on this


def test_context_ends_after_an_error_and_skips_needless_casts():
    model = nn.Linear(6, 5)
    for impl, dtype, enabled in (("reference", torch.bfloat16, True), ("kernel", torch.float32, True),
                                 ("kernel", torch.bfloat16, False)):  # fmt: skip
        with use_impl(impl), WeightCasts(model, dtype, enabled).current():
            assert cast(model.weight, torch.bfloat16).data_ptr() != cast(model.weight, torch.bfloat16).data_ptr()
    with use_impl("kernel"):
        with pytest.raises(RuntimeError, match="stop"), WeightCasts(model, torch.bfloat16).current():
            raise RuntimeError("stop")
        assert cast(model.weight, torch.bfloat16).data_ptr() != cast(model.weight, torch.bfloat16).data_ptr()
