"""Muon (Jordan et al., 2024): matrices of one shape in a batch, orthogonalized by Newton-Schulz iterations.

Shapes: K matrices in one batch, m rows, n columns; G groups, N numbers of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast.optimizers.adamw import AdamW
from electra_fast.optimizers.rule import OptimizerState, UpdateRule
from electra_fast.optimizers.shards import Shards, assign_owners

# 2-D parameters that AdamW updates: tables and the classifier.
_NOT_MATRICES = (".token", ".position", ".token_type", "classifier.weight")


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns approximately the nearest (semi-)orthogonal matrices; [K, m, n] → the same, in the same dtype.

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
    """Returns how many matrices of the published layout a parameter fuses: query, key and value, or GeGLU's halves."""
    return {"qkv": 3, "geglu_in": 2}.get(name.split(".")[-2], 1)


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape: the parameters' names, how many matrices each fuses, and the matrices' shape."""

    names: tuple[str, ...]
    num_blocks: tuple[int, ...]
    shape: tuple[int, int]

    @property
    def num_matrices(self) -> int:
        """The matrices of all its parameters."""
        return sum(self.num_blocks)

    def join(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Stacks the matrices of its parameters; [K, m, n]."""
        pairs = zip(self.num_blocks, self.names, strict=True)
        return torch.cat([parameters[name].view(k, *self.shape) for k, name in pairs])

    def split(self, matrices_Kmn: Tensor) -> dict[str, Tensor]:
        """Inverts `join`: returns each parameter's matrices by name."""
        return dict(zip(self.names, torch.split(matrices_Kmn, list(self.num_blocks)), strict=True))


def stacks(parameters: Mapping[str, Tensor]) -> list[Stack]:
    """Groups Muon's parameters by the shape of their matrices."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, parameter in parameters.items():
        shape = (parameter.shape[0] // num_blocks(name), parameter.shape[1])
        names.setdefault(shape, []).append(name)
    return [Stack(tuple(each), tuple(map(num_blocks, each)), shape) for shape, each in names.items()]


@dataclass(frozen=True)
class MatrixDivision:
    """The division of the matrices among ranks.

    Args:
        num_groups: Groups per stack. Each is one batched computation, so results for the same number of groups are
            bitwise equal for any number of ranks.
        own: This rank's groups.
        gather: Concatenates the ranks' flat tensors, [n] each, into one; None if this rank has all groups.
    """

    num_groups: int = 1
    own: range = range(1)
    gather: Callable[[Tensor, Tensor], None] | None = None


class Orthogonalization:
    """Orthogonalizes stacks of matrices, each matrix on one rank, and gathers the results on all ranks.

    Args:
        stacks: All stacks.
        division: The division among the ranks.
        device: The matrices' device.
        dtype: Dtype of the iterations.
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
            [len(_part(stack.num_matrices, group, num_groups)) for stack in stacks] for group in range(num_groups)
        ]
        numels = [math.prod(stack.shape) for stack in stacks]
        length = max(sum(count * numel for count, numel in zip(row, numels, strict=True)) for row in counts)
        # All ranks send equally long rows; the gathered result needs a buffer of its own.
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
            rows = _part(matrices_Kmn.shape[0], group, self._num_groups)
            if rows:
                views[number].copy_(orthogonalize(matrices_Kmn[rows.start : rows.stop], self._dtype))

    def exchange(self) -> None:
        """Gathers the other ranks' parts, a collective that may stay outside a CUDA graph."""
        if self._gather is not None and self._num_groups > 1:
            self._gather(self._own_GN.view(-1), self._all_GN.view(-1))

    def result(self, number: int) -> Tensor:
        """Returns a whole stack after `exchange`; fp32 [K, m, n]."""
        if self._num_groups == 1:
            return self._whole[number]
        return torch.cat([views[number] for views in self._views]).float()


def _part(total: int, part: int, num_parts: int) -> range:
    return range(part * total // num_parts, (part + 1) * total // num_parts)


def _views(row_N: Tensor, counts: Sequence[int], stacks: Sequence[Stack]) -> list[Tensor]:
    """Returns views of each stack's matrices in a flat buffer."""
    sizes = [count * math.prod(stack.shape) for count, stack in zip(counts, stacks, strict=True)]
    parts = torch.split(row_N[: sum(sizes)], sizes)
    return [part.view(-1, *stack.shape) for part, stack in zip(parts, stacks, strict=True)]


class Muon(UpdateRule):
    """Orthogonalized momentum for the matrices of encoders and heads; AdamW for everything else."""

    update_bytes = 8  # 7.1 at most with the presets, whose largest stack of matrices decides

    def __init__(self, state: OptimizerState) -> None:
        super().__init__(state)
        self._adamw = AdamW(state)
        self._names = {name for name, p in state.parameters.items() if not self.has_second_moment(name, p)}
        self._division = MatrixDivision()
        self._chosen: list[str] = []

    @staticmethod
    def has_second_moment(name: str, parameter: Tensor) -> bool:
        """Returns False for the matrices that Muon updates."""
        return parameter.dim() != 2 or name.endswith(_NOT_MATRICES)

    def cost(self, name: str, shape: torch.Size) -> float:
        """Counts the iterations, which multiply each element about 30 times by the length of the shorter side."""
        return shape.numel() * (1 + min(shape) / 16 if name in self._names else 1)

    def choose(self, names: list[str]) -> None:
        """Groups the matrices among these parameters by shape."""
        self._chosen, state = names, self.state
        is_whole = state.shards is None
        self._stacks = stacks({name: state.parameters[name] for name in names if is_whole and name in self._names})
        self._orthogonalization = Orthogonalization(
            self._stacks, self._division, state.scalars.device, state.matrix_dtype
        )

    def divide_matrices(self, division: MatrixDivision) -> None:
        """Divides the iterations among ranks: `update` computes this rank's part, `exchange` gathers the others'."""
        self._division = division
        self.choose(self._chosen)

    @property
    def exchanges(self) -> bool:  # type: ignore[override]
        """True if `exchange` communicates."""
        return self._division.gather is not None and bool(self._stacks)

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Applies AdamW's updates, and computes the orthogonalized matrices of this rank's part."""
        adamw = {name: grad for name, grad in gradients.items() if name not in self._names}
        if adamw:
            self._adamw.update(adamw)
        if self.state.shards is not None and len(adamw) < len(gradients):
            matrices = {name: gradients[name] for name in gradients if name in self._names}
            self._update_sharded(self.state.shards, matrices)
        for number, stack in enumerate(self._stacks):
            self._orthogonalization.compute(number, stack.join(self._nesterov(stack.names, gradients)))
        if not self.exchanges:
            self.finish()

    def exchange(self) -> None:
        """Gathers the other ranks' orthogonalized matrices."""
        self._orthogonalization.exchange()

    def finish(self) -> None:
        """Applies the updates of all matrices."""
        for number, stack in enumerate(self._stacks):
            updates = stack.split(self._orthogonalization.result(number) * self._scale(stack))
            self._apply({name: updates[name].reshape(self.state.parameters[name].shape) for name in stack.names})

    def _nesterov(self, names: Sequence[str], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Updates the momentum; returns the matrices to orthogonalize, by name."""
        momentum = self.state.config.muon_momentum
        self.state.update_exp_avg({name: gradients[name] for name in names}, momentum)
        grads, exp_avgs = [gradients[name] for name in names], [self.state.exp_avg[name] for name in names]
        return dict(zip(names, torch._foreach_lerp(grads, exp_avgs, momentum), strict=True))

    def _scale(self, stack: Stack) -> Tensor:
        """Returns minus the learning rate, scaled so that updates of all shapes have equal size (Jordan et al.)."""
        return self.state.negative_lr(1) * math.sqrt(max(1.0, stack.shape[0] / stack.shape[1]))

    def _update_sharded(self, shards: Shards, gradients: Mapping[str, Tensor]) -> None:
        """Updates the matrices of a sharded model, sending each whole matrix to one rank and back."""
        costs = {name: self.cost(name, shards.shapes[name]) for name in gradients}
        owners = assign_owners(costs, shards.num_processes)
        wholes = shards.to_owners(self._nesterov(list(gradients), gradients), owners)
        updates: dict[str, Tensor] = {}
        for stack in stacks(wholes):
            orthogonal = orthogonalize(stack.join(wholes), self.state.matrix_dtype)
            updates |= stack.split(orthogonal * self._scale(stack))
        updates = {name: update.reshape(shards.shapes[name]) for name, update in updates.items()}
        self._apply(shards.from_owners(updates, owners))

    def _apply(self, updates: Mapping[str, Tensor]) -> None:
        state, directions = self.state, list(updates.values())
        parameters: list[Tensor] = [state.parameters[name] for name in updates]
        decay = state.negative_lr(1) * state.config.weight_decay
        if state.lr_factors:
            lr_factors = [state.lr_factor(name) for name in updates]
            torch._foreach_mul_(directions, lr_factors)
            torch._foreach_mul_(parameters, [1 + decay * factor for factor in lr_factors])
        else:
            torch._foreach_mul_(parameters, 1 + decay)
        torch._foreach_add_(parameters, directions)
