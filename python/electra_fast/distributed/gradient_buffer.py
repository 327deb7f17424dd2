"""The gradients of a step in one flat buffer, and their sum over groups and ranks.

The buffer replaces DDP: models of this size send all gradients in one message after the last micro-batch, at fixed
addresses between two CUDA graphs.

Shapes: G groups of a rank, N elements of all gradients, R ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from electra_fast.distributed.division import Division
from electra_fast.distributed.world import World

# Floats per cache line. Each tensor starts at a multiple of it.
_ALIGNMENT = 16


class GradientBuffer:
    """Collects the gradients of a rank's groups, sums them over all ranks, and hands them to the parameters.

    Args:
        parameters: Trained parameters by name.
        division: The division of the step.
        is_exact: Sum the groups as a balanced binary tree, which gives the same sums for any number of ranks.
        world: The ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], division: Division, is_exact: bool, world: World
    ) -> None:
        self._parameters = list(parameters.values())
        self._world = world
        self._is_exact = is_exact
        self._names = list(parameters)
        sizes = [math.ceil(p.numel() / _ALIGNMENT) * _ALIGNMENT for p in self._parameters]
        starts = [0, *itertools.accumulate(sizes)]
        # Padded, so that the buffer divides into equal parts per rank.
        unit = _ALIGNMENT * world.size
        length = math.ceil(starts[-1] / unit) * unit
        device = self._parameters[0].device
        self._buffer_GN = torch.zeros(len(division.groups), length, device=device)
        self._views = [
            [row[start : start + p.numel()].view(p.shape) for start, p in zip(starts, self._parameters, strict=False)]
            for row in self._buffer_GN
        ]
        self.flat_N = self._buffer_GN[0]

    def collect(self, group: int) -> None:
        gradients = [parameter.grad for parameter in self._parameters]
        if all(gradient is None for gradient in gradients):
            self._buffer_GN[group].zero_()
            return
        for name, gradient in zip(self._names, gradients, strict=True):
            if gradient is None:
                raise RuntimeError(f"parameter {name} has no gradient")
        torch._foreach_copy_(self._views[group], [gradient for gradient in gradients if gradient is not None])

    def sum_groups(self) -> None:
        _tree_sum(self._buffer_GN.unbind())

    def reduce(self) -> None:
        """Sums over all ranks with collectives, which may run outside a CUDA graph."""
        if self._world.size == 1:
            return
        if not self._is_exact:
            self._world.all_reduce(self.flat_N)
            return
        parts_RN = self._world.all_to_all(self.flat_N.view(self._world.size, -1))
        _tree_sum(parts_RN.unbind())
        self._world.all_gather_into(parts_RN[0], self.flat_N)

    def discard(self, skipped: Tensor) -> None:
        """Zeroes the gradients, including nan, if the scalar `skipped` is 1."""
        self.flat_N.masked_fill_(skipped > 0, 0.0)

    def hand_over(self) -> None:
        for parameter, view in zip(self._parameters, self._views[0], strict=True):
            parameter.grad = view


def _tree_sum(tensors: Sequence[Tensor]) -> None:
    """Sums tensors into the first, in place, as a balanced binary tree: (0 + 1) + (2 + 3)."""
    distance = 1
    while distance < len(tensors):
        for i in range(0, len(tensors) - distance, 2 * distance):
            tensors[i].add_(tensors[i + distance])
        distance *= 2
