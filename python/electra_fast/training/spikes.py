"""Loss spikes: detected and skipped on the device, without synchronizing with the host."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 128
"""Number of previous steps that a step is compared with."""
SIGMAS = 6.0
"""Standard deviations above their mean at which a step is a spike."""
PREFIX = "spikes."


class SpikeGuard:
    """Detects steps whose loss or gradient norm is not finite, or far above those of the steps before.

    The comparison begins after `WINDOW` steps and leaves out skipped steps, as in OLMo's skip-step optimizer.
    """

    def __init__(self, device: torch.device) -> None:
        self._history_2W = torch.zeros(2, WINDOW, dtype=torch.float64, device=device)
        self._num_kept = torch.zeros((), dtype=torch.int64, device=device)
        self._num_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._longest = torch.zeros((), dtype=torch.int64, device=device)
        self._places_W = torch.arange(WINDOW, device=device)

    def judge(self, loss: Tensor, norm: Tensor, has_overflowed: Tensor | None = None) -> Tensor:
        """Counts a step; returns 1 if it is to be skipped, given its loss and gradient norm, else 0 (fp32 scalars).

        Where `has_overflowed` is 1, the loss scale made the norm infinite: the step is skipped, but is no spike.
        """
        values_2 = torch.stack((loss, norm)).double()
        std_2, mean_2 = torch.std_mean(self._history_2W, dim=1, correction=0)
        is_high = (values_2 > mean_2 + SIGMAS * std_2).any() & (self._num_kept >= WINDOW)
        is_skipped = is_high | ~values_2.isfinite().all()
        is_spike = is_skipped if has_overflowed is None else is_skipped & (has_overflowed == 0)
        is_place_W = (self._places_W == self._num_kept % WINDOW) & ~is_skipped
        self._history_2W.copy_(torch.where(is_place_W, values_2[:, None], self._history_2W))
        self._num_kept += ~is_skipped
        self._num_in_a_row.copy_((self._num_in_a_row + 1) * is_spike)
        self._longest.copy_(torch.maximum(self._longest, self._num_in_a_row))
        return is_skipped.float()

    def reset(self) -> None:
        """Forgets previous steps, which are not comparable to the next ones."""
        for tensor in (self._num_kept, self._num_in_a_row, self._longest):
            tensor.zero_()

    def take_longest(self) -> int:
        """Returns the most consecutive skipped steps since the last call; waits for the device."""
        longest = int(self._longest)
        self._longest.zero_()
        return longest

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors for a checkpoint by name; not copied."""
        tensors = {"history": self._history_2W, "kept": self._num_kept, "in_a_row": self._num_in_a_row}
        return {PREFIX + name: tensor for name, tensor in tensors.items()}
