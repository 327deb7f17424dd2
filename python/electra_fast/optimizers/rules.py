"""Update rules, which change parameters in place, and the state that they read and change.

A new rule is a subclass of `UpdateRule`, here or in a separate file, an entry in `RULES`, and a name in `[optimizer]`.

Shapes: K matrices in one batch or blocks of a parameter, m rows, n columns; G groups, N numbers per group; X elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from electra_fast.config.config import OptimizerConfig
from electra_fast.ops.branches import Branch
from electra_fast.optimizers.shards import Shards, assign_owners

# Streams over which Muon's stacks are distributed if a graph has branches.
NUM_LANES = 3
# 2-D parameters that Muon leaves to AdamW: tables and the classifier.
_NOT_MATRICES = (".token", ".position", ".relative", ".token_type", "classifier.weight")


@dataclass
class OptimizerState:
    """Parameters and moments by name, and the scalars of an update; `optimizer.Optimizer` documents the other fields.

    Args:
        exp_avg: First moments, fp32.
        exp_avg_sq: Second moments, fp32, of the parameters for which the rule keeps one.
        scalars: Set on the device before each update: Adam's two bias corrections, the number of updates that they
            correct for, and minus each of the rule's learning rates; fp32.
        skipped: 1 if the update must change neither parameters nor moments (gradients are then 0), else 0; an fp32
            scalar. None if no step is ever skipped.
        rows: For some tables, the rows that have moments, including this step's. All other rows have neither moments
            nor gradients, so a rule only needs to decay them.
    """

    config: OptimizerConfig
    parameters: dict[str, nn.Parameter]
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    scalars: Tensor
    lr_factors: Mapping[str, float]
    shards: Shards | None = None
    matrix_dtype: torch.dtype = torch.float32
    skipped: Tensor | None = None
    rows: Mapping[str, Tensor] = field(default_factory=dict)

    def lr_factor(self, name: str) -> float:
        return self.lr_factors.get(name, 1.0)

    def negative_lr(self, number: int = 0) -> Tensor:
        """Returns an entry of `UpdateRule.learning_rates` negated, or 0 if the step is skipped; an fp32 scalar."""
        rate = self.scalars[3 + number]
        return rate if self.skipped is None else rate * (1 - self.skipped)

    def update_exp_avg(self, gradients: Mapping[str, Tensor], beta: float) -> None:
        """Moves first moments toward the gradients, unless the step is skipped."""
        exp_avgs = [self.exp_avg[name] for name in gradients]
        used = list(gradients.values())
        if self.skipped is not None:
            used = list(torch._foreach_add(used, torch._foreach_mul(exp_avgs, self.skipped)))
        torch._foreach_lerp_(exp_avgs, used, 1 - beta)


class UpdateRule(ABC):
    """Updates parameters in place. Never synchronizes with the host, so a CUDA graph can contain it."""

    update_bytes: ClassVar[int]
    """Temporary memory of an update, in bytes per parameter, which memory estimates count."""

    learning_rates: ClassVar[tuple[str, ...]] = ("learning_rate",)
    """The configuration keys of its peak learning rates."""
    exchanges = False
    """True if `exchange` communicates, which a rule needs that divides work among ranks; `finish` then follows it."""

    def __init__(self, state: OptimizerState) -> None:
        self.state = state

    @staticmethod
    def has_second_moment(name: str, parameter: Tensor) -> bool:
        """True if the rule keeps an `exp_avg_sq` of a parameter."""
        return True

    def cost(self, name: str, shape: torch.Size) -> float:
        """Estimates the time of a parameter's update on a CPU, in units of AdamW's time per element."""
        return float(shape.numel())

    def choose(self, names: list[str]) -> None:  # noqa: B027  # most rules treat parameters separately
        """Prepares to update these parameters from now on."""

    @abstractmethod
    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Updates parameters and moments from clipped gradients, by name."""

    def divide_matrices(self, division: MatrixDivision) -> None:  # noqa: B027
        """Divides matrices among ranks: `update` computes this rank's part, `exchange` gathers the other parts."""

    def exchange(self) -> None:  # noqa: B027
        """Gathers the other ranks' parts of the update, in a collective that may stay outside a CUDA graph."""

    def finish(self) -> None:  # noqa: B027
        """Applies the exchanged part of the update."""


class AdamW(UpdateRule):
    """AdamW with torch's fused operator, in one pass over memory instead of ten."""

    update_bytes = 0

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        state = self.state
        config = self.state.config
        groups: dict[tuple[float, float], list[str]] = {}
        for name in gradients:
            is_decayed = state.parameters[name].dim() > 1
            lr_factor = state.lr_factors.get(name, 1.0)
            if name in state.rows and state.skipped is None:
                self._update_rows(name, gradients[name])
            else:
                groups.setdefault((config.weight_decay if is_decayed else 0.0, lr_factor), []).append(name)
        for (weight_decay, lr_factor), names in groups.items():
            tensors = (state.parameters, gradients, state.exp_avg, state.exp_avg_sq)
            self._fused([[table[name] for name in names] for table in tensors], weight_decay, lr_factor)

    def _update_rows(self, name: str, gradient: Tensor) -> None:
        """Updates the rows that have moments and decays the others: the same bits for a third of the memory traffic."""
        state = self.state
        rows = self.state.rows[name]
        lr_factor = self.state.lr_factor(name)
        tensors: list[Tensor] = [state.parameters[name], state.exp_avg[name], state.exp_avg_sq[name]]
        if state.config.weight_decay:
            tensors[0].mul_(1 - float(-state.scalars[3] * lr_factor) * state.config.weight_decay)
        parameter, exp_avg, exp_avg_sq = parts = [tensor.index_select(0, rows) for tensor in tensors]
        self._fused([[parameter], [gradient.index_select(0, rows)], [exp_avg], [exp_avg_sq]], 0.0, lr_factor)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.index_copy_(0, rows, part)

    def _fused(self, tensors: Sequence[list[Tensor]], weight_decay: float, lr_factor: float) -> None:
        """Updates parameters; `tensors` lists parameters, gradients, first moments and second moments."""
        state = self.state
        config = self.state.config
        parameters, gradients, exp_avgs, exp_avg_sqs = tensors
        torch._fused_adamw_(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [state.scalars[2]] * len(parameters),
            lr=-state.scalars[3] * lr_factor,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=weight_decay,
            eps=config.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=state.skipped,
        )


def num_blocks(name: str) -> int:
    """Returns how many matrices of the published layout a parameter fuses: query, key and value, or GeGLU's halves."""
    return {"qkv": 3, "geglu_in": 2}.get(name.split(".")[-2], 1)


class Lamb(UpdateRule):
    """LAMB (You et al., 2020): Adam's update, scaled by the norm of each matrix in the published layout."""

    update_bytes = 8  # denominators and updates

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Updates all parameters; norms and biases get no weight decay and no trust ratio."""
        state = self.state
        config = self.state.config
        names = list(gradients)
        grads = list(gradients.values())
        parameters: list[Tensor] = [state.parameters[name] for name in names]
        exp_avgs = [state.exp_avg[name] for name in names]
        exp_avg_sqs = [state.exp_avg_sq[name] for name in names]
        state.update_exp_avg(gradients, config.beta1)
        beta2 = config.beta2 if state.skipped is None else torch.where(state.skipped > 0, 1.0, config.beta2)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - config.beta2)

        denominators = torch._foreach_sqrt(exp_avg_sqs)
        if config.bias_correction:
            torch._foreach_mul_(denominators, state.scalars[1])
        torch._foreach_add_(denominators, config.epsilon)
        updates = torch._foreach_div(exp_avgs, denominators)
        if config.bias_correction:
            torch._foreach_mul_(updates, state.scalars[0])
        matrices = [i for i, parameter in enumerate(parameters) if parameter.dim() > 1]
        if matrices:
            weights = [parameters[i] for i in matrices]
            torch._foreach_add_([updates[i] for i in matrices], weights, alpha=config.weight_decay)
        self._apply_trust_ratios({names[i]: (parameters[i], updates[i]) for i in matrices})
        torch._foreach_mul_(updates, state.negative_lr())
        if state.lr_factors:
            torch._foreach_mul_(updates, [state.lr_factor(name) for name in names])
        torch._foreach_add_(parameters, updates)

    def _apply_trust_ratios(self, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Multiplies each block's update by its trust ratio; `matrices` has parameter and update by name."""
        shards = self.state.shards
        if shards is None:
            for name, (parameter, update) in matrices.items():
                blocks_KX = update.view(num_blocks(name), -1)
                sizes, lengths = (x.view(blocks_KX.shape).norm(dim=1, keepdim=True) for x in (parameter, update))
                blocks_KX.mul_(_trust_ratios(sizes, lengths))
            return
        parameters, updates = (
            [piece for name, pair in matrices.items() for piece in shards.blocks(name, pair[i], num_blocks(name))]
            for i in range(2)
        )
        sizes, lengths = shards.norms([*parameters, *updates]).chunk(2)
        torch._foreach_mul_(updates, list(_trust_ratios(sizes, lengths).unbind()))


def _trust_ratios(sizes: Tensor, lengths: Tensor) -> Tensor:
    """Returns |parameter| / |update| from both norms, or 1 where either is 0."""
    return torch.where((sizes > 0) & (lengths > 0), sizes / lengths, torch.ones_like(sizes))


@dataclass(frozen=True)
class Stack:
    """Parameters whose matrices share one shape up to transposition, [m, n] with m <= n.

    They are orthogonalized in one batch, with tall matrices transposed.
    """

    wide: tuple[str, ...]
    tall: tuple[str, ...]
    shape: tuple[int, int]

    @property
    def names(self) -> tuple[str, ...]:
        return self.wide + self.tall

    @property
    def num_matrices(self) -> int:
        return sum(map(num_blocks, self.names))

    def join(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Stacks the matrices of the parameters; [K, m, n]."""
        halves = ((self.wide, self.shape), (self.tall, self.shape[::-1]))
        # Concatenated before they are transposed: CUDA copies strided tensors one by one.
        wide, tall = (
            [torch.cat([parameters[name].view(num_blocks(name), *shape) for name in names])] if names else []
            for names, shape in halves
        )
        parts = wide + [x.mT for x in tall]
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def split(self, matrices_Kmn: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """Inverts `join` and scales the matrices in place; returns the matrices of each parameter by name.

        Tall matrices are also multiplied by sqrt(n / m), so that updates of all shapes have equal size (Jordan et al.).
        """
        m, n = self.shape
        num_wide = sum(map(num_blocks, self.wide))
        wide_Kmn = matrices_Kmn[:num_wide].mul_(scale)
        tall_Knm = matrices_Kmn[num_wide:].mT.contiguous()
        if self.tall:
            tall_Knm.mul_(scale * math.sqrt(n / m))
        parts = [
            part
            for names, x in ((self.wide, wide_Kmn), (self.tall, tall_Knm))
            for part in torch.split(x, list(map(num_blocks, names)))
        ]
        return dict(zip(self.names, parts, strict=True))


def stacks(parameters: Mapping[str, Tensor]) -> list[Stack]:
    """Groups Muon's parameters by the shape of their matrices; on a GPU, up to transposition, to save launches.

    On a CPU, the iterations on a transposed copy would give different bits.
    """
    halves: dict[tuple[tuple[int, int], bool], tuple[list[str], list[str]]] = {}
    for name, parameter in parameters.items():
        rows = parameter.shape[0] // num_blocks(name)
        columns = parameter.shape[1]
        is_tall = rows > columns
        shape = (min(rows, columns), max(rows, columns))
        halves.setdefault((shape, is_tall and not parameter.is_cuda), ([], []))[is_tall].append(name)
    return [Stack(tuple(wide), tuple(tall), shape) for (shape, _), (wide, tall) in halves.items()]


@dataclass(frozen=True)
class MatrixDivision:
    """The division of the matrices among ranks.

    Args:
        num_groups: Groups per stack. Each is one batched computation, so results for the same number of groups are
            bitwise equal for any number of ranks.
        owned: The groups of this rank.
        gather: Concatenates the ranks' flat tensors, [n] each; None if this rank has all groups.
    """

    num_groups: int = 1
    owned: range = range(1)
    gather: Callable[[Tensor, Tensor], None] | None = None


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximates the nearest (semi-)orthogonal matrices; [K, m, n] → [K, m, n], in the input's dtype.

    Runs five Newton-Schulz iterations in `dtype`; bf16 suffices (Jordan et al., 2024).
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(5):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


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
        self._num_groups = num_groups = division.num_groups
        self._owned = owned = division.owned
        self._gather = division.gather
        self._whole: list[Tensor] = [torch.empty(0)] * len(stacks)
        if num_groups == 1:
            return
        counts = [
            [len(_part(stack.num_matrices, group, num_groups)) for stack in stacks] for group in range(num_groups)
        ]
        numels = [math.prod(stack.shape) for stack in stacks]
        length = max(sum(count * numel for count, numel in zip(row, numels, strict=True)) for row in counts)
        # All ranks send rows of equal length; the gathered result needs a separate buffer.
        self._all_GN = torch.zeros(num_groups, length, dtype=self._dtype, device=device)
        self._owned_GN = torch.zeros_like(self._all_GN[: len(owned)]) if self._gather else self._all_GN
        self._views = [_views(row, counts[group], stacks) for group, row in enumerate(self._all_GN)]
        self._owned_views = [
            _views(row, counts[group], stacks) for group, row in zip(owned, self._owned_GN, strict=True)
        ]

    def compute(self, number: int, matrices_Kmn: Tensor) -> None:
        if self._num_groups == 1:
            self._whole[number] = orthogonalize(matrices_Kmn, self._dtype)
            return
        for group, views in zip(self._owned, self._owned_views, strict=True):
            rows = _part(matrices_Kmn.shape[0], group, self._num_groups)
            if rows:
                views[number].copy_(orthogonalize(matrices_Kmn[rows.start : rows.stop], self._dtype))

    def exchange(self) -> None:
        if self._gather is not None and self._num_groups > 1:
            self._gather(self._owned_GN.view(-1), self._all_GN.view(-1))

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
    """Muon (Jordan et al., 2024): orthogonalized momentum for the matrices of encoders and heads; AdamW for the rest.

    Matrices of one shape are orthogonalized in a batch (`stacks`).
    """

    update_bytes = 10  # at most 9.9 with the presets, for their largest stack of matrices
    learning_rates = ("learning_rate", "muon_learning_rate")

    def __init__(self, state: OptimizerState) -> None:
        super().__init__(state)
        self._adamw = AdamW(state)
        self._names = {name for name, p in state.parameters.items() if not self.has_second_moment(name, p)}
        self._division = MatrixDivision()
        self._chosen: list[str] = []

    @staticmethod
    def has_second_moment(name: str, parameter: Tensor) -> bool:
        return parameter.dim() != 2 or name.endswith(_NOT_MATRICES)

    def cost(self, name: str, shape: torch.Size) -> float:
        """See the base class; the iterations take about 30 multiplications per element and unit of the shorter side."""
        return shape.numel() * (1 + min(shape) / 16 if name in self._names else 1)

    def choose(self, names: list[str]) -> None:
        self._chosen = names
        state = self.state
        is_whole = state.shards is None
        self._stacks = stacks({name: state.parameters[name] for name in names if is_whole and name in self._names})
        self._orthogonalization = Orthogonalization(
            self._stacks, self._division, state.scalars.device, state.matrix_dtype
        )

    def divide_matrices(self, division: MatrixDivision) -> None:
        self._division = division
        self.choose(self._chosen)

    @property
    def exchanges(self) -> bool:  # type: ignore[override]
        return self._division.gather is not None and bool(self._stacks)

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Applies AdamW's updates, and orthogonalizes this rank's part of the matrices."""
        names = [name for stack in self._stacks for name in stack.names]
        matrices = self._nesterov(names, gradients) if names else {}
        orthogonal = [
            Branch(
                self._orthogonalization.compute,
                number,
                stack.join({name: matrices.pop(name) for name in stack.names}),
                lane=number % NUM_LANES,
            )
            for number, stack in enumerate(self._stacks)
        ]
        adamw = {name: grad for name, grad in gradients.items() if name not in self._names}
        if adamw:
            self._adamw.update(adamw)
        if self.state.shards is not None and len(adamw) < len(gradients):
            matrices = {name: gradients[name] for name in gradients if name in self._names}
            self._update_sharded(self.state.shards, matrices)
        for group in orthogonal:
            group.result()
        if not self.exchanges:
            self.finish()

    def exchange(self) -> None:
        self._orthogonalization.exchange()

    def finish(self) -> None:
        updates: dict[str, Tensor] = {}
        for number, stack in enumerate(self._stacks):
            updates |= stack.split(self._orthogonalization.result(number), self.state.negative_lr(1))
        if updates:
            self._apply({name: update.view(self.state.parameters[name].shape) for name, update in updates.items()})

    def _nesterov(self, names: Sequence[str], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Updates the momentum and returns the matrices to orthogonalize by name."""
        momentum = self.state.config.muon_momentum
        self.state.update_exp_avg({name: gradients[name] for name in names}, momentum)
        grads = [gradients[name] for name in names]
        exp_avgs = [self.state.exp_avg[name] for name in names]
        return dict(zip(names, torch._foreach_lerp(grads, exp_avgs, momentum), strict=True))

    def _update_sharded(self, shards: Shards, gradients: Mapping[str, Tensor]) -> None:
        """Updates the matrices of a sharded model; each whole matrix travels to one rank and back."""
        costs = {name: self.cost(name, shards.shapes[name]) for name in gradients}
        owners = assign_owners(costs, shards.num_processes)
        wholes = shards.to_owners(self._nesterov(list(gradients), gradients), owners)
        updates: dict[str, Tensor] = {}
        for stack in stacks(wholes):
            orthogonal = orthogonalize(stack.join(wholes), self.state.matrix_dtype)
            updates |= stack.split(orthogonal, self.state.negative_lr(1))
        updates = {name: update.reshape(shards.shapes[name]) for name, update in updates.items()}
        self._apply(shards.from_owners(updates, owners))

    def _apply(self, updates: Mapping[str, Tensor]) -> None:
        state = self.state
        directions = list(updates.values())
        parameters: list[Tensor] = [state.parameters[name] for name in updates]
        decay = state.negative_lr(1) * state.config.weight_decay
        if state.lr_factors:
            lr_factors = [state.lr_factor(name) for name in updates]
            torch._foreach_mul_(directions, lr_factors)
            torch._foreach_mul_(parameters, [1 + decay * factor for factor in lr_factors])
        else:
            torch._foreach_mul_(parameters, 1 + decay)
        torch._foreach_add_(parameters, directions)


RULES: dict[str, type[UpdateRule]] = {"adamw": AdamW, "lamb": Lamb, "muon": Muon}
