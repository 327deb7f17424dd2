"""Muon's matrices: grouped by shape, orthogonalized by Newton-Schulz iterations, each by one of the ranks.

Shapes: K matrices in one batch, m rows, n columns; G groups, N numbers of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast.training.division import Division, share
from electra_fast.training.world import World


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximately the nearest (semi-)orthogonal matrices; [K, m, n] → the same, in the same dtype.

    Five Newton-Schulz iterations, computed in `dtype`; bf16 suffices (Jordan et al., 2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


def num_blocks(name: str) -> int:
    """How many matrices of the published layout a parameter fuses: query, key and value, or GeGLU's two halves."""
    return {"qkv": 3, "geglu_in": 2}.get(name.split(".")[-2], 1)


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape: the parameters' names, how many matrices each fuses, and the matrices' shape."""

    names: tuple[str, ...]
    num_blocks: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def num_matrices(self) -> int:
        """Matrices of all its parameters."""
        return sum(self.num_blocks)

    def join(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The matrices of its parameters; [K, m, n]."""
        pairs = zip(self.num_blocks, self.names, strict=True)
        return torch.cat([parameters[name].view(k, *self.shape) for k, name in pairs])

    def split(self, matrices_Kmn: Tensor) -> dict[str, Tensor]:
        """The inverse of `join`: each parameter's matrices, by name."""
        return dict(zip(self.names, torch.split(matrices_Kmn, list(self.num_blocks)), strict=True))


def stacks(parameters: Mapping[str, Tensor]) -> list[Stack]:
    """Muon's parameters, grouped by the shape of their matrices."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, parameter in parameters.items():
        shape = (parameter.shape[0] // num_blocks(name), parameter.shape[1])
        names.setdefault(shape, []).append(name)
    return [Stack(tuple(each), tuple(map(num_blocks, each)), shape) for shape, each in names.items()]


@dataclass(frozen=True)
class MatrixDivision:
    """Which rank orthogonalizes which matrices.

    Args:
        num_groups: Groups of each stack, which are computed as batches of their own, so that with the same number of
            groups any number of ranks gets the same bits.
        own: The numbers of this rank's groups.
        gather: Concatenates what the ranks have, [n] each, into a tensor of all; None where this rank has all groups.
    """

    num_groups: int = 1
    own: range = range(1)
    gather: Callable[[Tensor, Tensor], None] | None = None

    @classmethod
    def among(cls, world: World, exact: Division | None) -> MatrixDivision:
        """Among the ranks of a machine; or by the groups of exact sums, which are the same for any number of ranks.

        Among more ranks, shares of a few matrices would take longer to send than to compute (docs/scale.md).
        """
        if exact is not None:
            return cls(exact.num_groups, exact.own, world.gather if world.size > 1 else None)
        if len(world.neighbours) < 2:
            return cls()
        place = world.neighbours.index(world.rank)
        return cls(len(world.neighbours), range(place, place + 1), world.gather_from_neighbours)


class Orthogonalization:
    """Orthogonalizes stacks of matrices, each matrix on one of the ranks, and tells all what came of it.

    Args:
        stacks: All of them.
        division: Among the ranks.
        device: Of the matrices.
        dtype: Of the iterations.
    """

    def __init__(
        self, stacks: Sequence[Stack], division: MatrixDivision, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._dtype = dtype
        num_groups, own = division.num_groups, division.own
        self._num_groups, self._own, self._gather = num_groups, own, division.gather
        self._whole: list[Tensor] = [torch.empty(0)] * len(stacks)
        if num_groups == 1:
            return
        counts = [
            [len(share(stack.num_matrices, group, num_groups)) for stack in stacks] for group in range(num_groups)
        ]
        numels = [math.prod(stack.shape) for stack in stacks]
        length = max(sum(count * numel for count, numel in zip(row, numels, strict=True)) for row in counts)
        # A message has rows of one length; the own part is apart from what it becomes a part of.
        self._all_GN = torch.zeros(num_groups, length, dtype=self._dtype, device=device)
        self._own_GN = torch.zeros_like(self._all_GN[: len(own)]) if self._gather else self._all_GN
        self._views = [_views(row, counts[group], stacks) for group, row in enumerate(self._all_GN)]
        self._own_views = [_views(row, counts[group], stacks) for group, row in zip(own, self._own_GN, strict=True)]

    def compute(self, number: int, matrices_Kmn: Tensor) -> None:
        """Computes this rank's part of a stack."""
        if self._num_groups == 1:
            self._whole[number] = orthogonalize(matrices_Kmn, self._dtype)
            return
        for group, views in zip(self._own, self._own_views, strict=True):
            rows = share(matrices_Kmn.shape[0], group, self._num_groups)
            if rows:
                views[number].copy_(orthogonalize(matrices_Kmn[rows.start : rows.stop], self._dtype))

    def exchange(self) -> None:
        """Gets the other ranks' parts: a message, which a CUDA graph need not hold."""
        if self._gather is not None and self._num_groups > 1:
            self._gather(self._own_GN.view(-1), self._all_GN.view(-1))

    def result(self, number: int) -> Tensor:
        """A whole stack, after `exchange`; fp32 [K, m, n]."""
        if self._num_groups == 1:
            return self._whole[number]
        return torch.cat([views[number] for views in self._views]).float()


def _views(row_N: Tensor, counts: Sequence[int], stacks: Sequence[Stack]) -> list[Tensor]:
    """The matrices of each stack in a flat buffer."""
    sizes = [count * math.prod(stack.shape) for count, stack in zip(counts, stacks, strict=True)]
    parts = torch.split(row_N[: sum(sizes)], sizes)
    return [part.view(-1, *stack.shape) for part, stack in zip(parts, stacks, strict=True)]
