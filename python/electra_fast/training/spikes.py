"""Loss spikes: detected and skipped on the device, without synchronizing with the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

WINDOW = 128
"""Number of previous steps that a step is compared with."""
SIGMAS = 6.0
"""Standard deviations above their mean at which a step is a spike."""
_PREFIX = "spikes."


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

    def judge(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Counts a step; returns 1 if it is to be skipped, given its loss and gradient norm, else 0 (fp32 scalars)."""
        values_2 = torch.stack((loss, norm)).double()
        std_2, mean_2 = torch.std_mean(self._history_2W, dim=1, correction=0)
        is_high = (values_2 > mean_2 + SIGMAS * std_2).any() & (self._num_kept >= WINDOW)
        is_spike = is_high | ~values_2.isfinite().all()
        is_place_W = (self._places_W == self._num_kept % WINDOW) & ~is_spike
        self._history_2W.copy_(torch.where(is_place_W, values_2[:, None], self._history_2W))
        self._num_kept += ~is_spike
        self._num_in_a_row.copy_((self._num_in_a_row + 1) * is_spike)
        self._longest.copy_(torch.maximum(self._longest, self._num_in_a_row))
        return is_spike.float()

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
        return {_PREFIX + name: tensor for name, tensor in tensors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state of `state_dict`."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def split_state(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Splits the tensors of a checkpoint into the optimizer's and a spike guard's."""
    spikes = {name: tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    return {name: tensor for name, tensor in state.items() if name not in spikes}, spikes
