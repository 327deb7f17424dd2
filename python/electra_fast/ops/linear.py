"""Linear layers with fp32 weights and activations of any dtype: casts, products and weight gradients.

Weights are cast where they are used. On a GPU that would launch a kernel per weight and step, so `WeightCasts` casts
all of them in a few launches, and `cast` returns those copies.

Shapes: T packed tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from electra_fast.ops.dispatch import uses_kernels

# The casts that are up to date, by weight; empty outside of `WeightCasts.current`.
_casts: dict[Tensor, Tensor] = {}


class WeightCasts:
    """Copies of the weights of a model's linear layers in the dtype of the activations, at fixed addresses.

    There are none where `linear` would not use them: without kernels, with fp32 activations, or if not `enabled`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, enabled: bool = True) -> None:
        weights = dict.fromkeys(module.weight for module in model.modules() if isinstance(module, nn.Linear))
        self._casts: dict[Tensor, Tensor] = {
            weight: torch.empty_like(weight, dtype=dtype, requires_grad=False)
            for weight in weights
            if enabled and uses_kernels(weight) and weight.dtype != dtype
        }

    @contextmanager
    def current(self) -> Iterator[None]:
        """Casts all weights; `cast` returns the copies within the context, in which no weight may change."""
        if self._casts:
            with torch.no_grad():
                torch._foreach_copy_(list(self._casts.values()), list(self._casts))
        _casts.update(self._casts)
        try:
            yield
        finally:
            _casts.clear()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the dtype of the activations, without a gradient of its own."""
    found = None if torch.compiler.is_compiling() else _casts.get(weight)
    return weight.detach().to(dtype) if found is None or found.dtype != dtype else found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; [..., I] → [..., O]."""
    if uses_kernels(x) and weight.dtype != x.dtype and not torch.compiler.is_compiling():
        out: Tensor = _MixedLinear.apply(x, weight, bias)
        return out
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def weight_gradient(dy_TO: Tensor, x_TI: Tensor) -> Tensor:
    """dy.T @ x, summed and returned in fp32 whatever the dtype of its factors; → [O, I]."""
    if dy_TO.is_cuda and dy_TO.dtype != torch.float32:
        return torch.mm(dy_TO.T, x_TI, out_dtype=torch.float32)
    return dy_TO.T.float() @ x_TI.float()


class _MixedLinear(torch.autograd.Function):
    """A linear layer with fp32 weights and 16-bit activations, whose weight gradient is not rounded to 16 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = cast(weight, x.dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx = dy @ weight if needs_x else None
        dy_TO, x_TI = dy.flatten(0, -2), x.flatten(0, -2)
        dweight = weight_gradient(dy_TO, x_TI) if needs_weight else None
        return dx, dweight, dy_TO.sum(0, dtype=torch.float32) if needs_bias else None
