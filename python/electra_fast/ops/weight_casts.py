"""Copies of weights in the activations' dtype, made once per step and read by `fused.cast`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from electra_fast.ops import fused
from electra_fast.ops.operations import uses_kernels


class WeightCasts:
    """Copies of the weights of a model's linear layers in the activations' dtype, at fixed addresses.

    There are none if `linear` would not use them: with fp32 activations, without kernels unless `without_gradient`
    (predictions on a CPU, which would cast all weights for each batch), or if not `enabled`. Copies for predictions are
    made again only after a weight has changed.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype, enabled: bool = True, *, without_gradient: bool = False
    ) -> None:
        weights = dict.fromkeys(module.weight for module in model.modules() if isinstance(module, nn.Linear))
        self._versions = list[int]()
        self._keeps = without_gradient
        self._casts: dict[Tensor, Tensor] = {
            weight: torch.empty_like(weight, dtype=dtype, requires_grad=False)
            for weight in weights
            if enabled and weight.dtype != dtype and (without_gradient or uses_kernels(weight, "linear"))
        }

    @property
    def copies(self) -> tuple[Tensor, ...]:
        return tuple(self._casts.values())

    @contextmanager
    def current(self) -> Iterator[None]:
        """Casts all weights; `cast` returns the copies within the context, and no weight may change there."""
        versions = [weight._version for weight in self._casts]
        if self._casts and not (self._keeps and versions == self._versions):
            self._versions = versions
            with torch.no_grad():
                torch._foreach_copy_(list(self._casts.values()), list(self._casts))
        fused.casts.update(self._casts)
        try:
            yield
        finally:
            fused.casts.clear()
