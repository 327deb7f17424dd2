"""Dynamic loss scaling for fp16: on the device, without synchronizing with the host."""

from __future__ import annotations

import torch
from torch import Tensor

from electra_fast.model.compute import ComputeConfig

INITIAL_SCALE = 2.0**16
MAX_SCALE = 2.0**24
GROWTH_INTERVAL = 2000
"""Number of consecutive steps with finite gradients after which the scale doubles."""
PREFIX = "loss_scale."


class LossScaler:
    """Keeps the gradients of fp16 activations, most of which would underflow, within the range of fp16.

    The loss is multiplied by `scale`, a power of two, before its backward pass, and the parameters' fp32 gradients are
    divided by it. Gradients that are not finite halve the scale, down to 1, and their step must be skipped.

    `scale` is an fp32 scalar at a fixed address.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.zeros((), device=device)
        self._num_good = torch.zeros((), dtype=torch.int64, device=device)
        self._num_failed = torch.zeros((), dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        self.scale.fill_(INITIAL_SCALE)
        self._num_good.zero_()
        self._num_failed.zero_()

    def unscale(self, gradients: list[Tensor]) -> None:
        torch._foreach_mul_(gradients, 1 / self.scale)

    def adapt(self, norm: Tensor) -> Tensor:
        """Adapts the scale to a step's gradient norm. Returns 1 if the step must be skipped, else 0 (fp32 scalar)."""
        has_overflowed = ~norm.isfinite()
        self._num_failed += has_overflowed & (self.scale <= 1)
        self._num_good.copy_((self._num_good + 1) * ~has_overflowed)
        grows = self._num_good >= GROWTH_INTERVAL
        self._num_good *= ~grows
        self.scale.mul_(torch.where(has_overflowed, 0.5, torch.where(grows, 2.0, 1.0))).clamp_(1, MAX_SCALE)
        return has_overflowed.float()

    def has_failed(self) -> bool:
        """Returns whether gradients were not finite although the scale was 1; waits for the device."""
        return bool(self._num_failed)

    def state_dict(self) -> dict[str, Tensor]:
        return {f"{PREFIX}scale": self.scale, f"{PREFIX}good": self._num_good}


def discard(gradients: list[Tensor], skipped: Tensor) -> None:
    """Zeroes gradients, including nan, if the scalar `skipped` is 1."""
    torch._foreach_copy_(gradients, [torch.where(skipped > 0, 0.0, gradient) for gradient in gradients])


def loss_scaler(compute: ComputeConfig, device: torch.device) -> LossScaler | None:
    return LossScaler(device) if compute.dtype == torch.float16 else None
