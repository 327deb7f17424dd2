"""Update rules and learning-rate schedules: AdamW (with and without bias correction), LAMB, Muon.

One optimizer holds fp32 moments by parameter name, so that its state is a flat dictionary of tensors
that a checkpoint can store. Each rule follows its source exactly: AdamW without bias correction as in
BERT's and ELECTRA's published code, LAMB as in You et al. (2020), Muon as in Jordan et al. (2024) with
five Newton-Schulz iterations.

Shapes: K blocks of a parameter, X elements of one block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from electra_fast.config.config import OptimizerConfig
from electra_fast.errors import InputError
from electra_fast.training.muon import MatrixDivision, Orthogonalization, Stack, num_blocks, orthogonalize, stacks

if TYPE_CHECKING:
    from electra_fast.training.sharding import Shards

# 2-D parameters that Muon leaves to AdamW: tables and the classifier.
_NOT_FOR_MUON = (".token", ".position", ".token_type", "classifier.weight")


class Schedule(Protocol):
    """A configuration that says how the learning rate changes."""

    @property
    def schedule(self) -> str:
        """`linear` or `product`."""

    def num_warmup_steps(self, num_steps: int) -> float:
        """Steps of warmup in a run of `num_steps`."""


def lr_scale(config: Schedule, step: int, num_steps: int) -> float:
    """The learning rate at a step (0-based) of `num_steps`, as a fraction of its peak.

    With t the step, T the number of steps and W the warmup steps: `product`, of the published code, is
    (1 - t/T) * min(1, t/W). `linear` rises linearly over W steps and then falls to 0.
    """
    warmup = config.num_warmup_steps(num_steps)
    if config.schedule == "product":
        return (1 - step / num_steps) * (min(1.0, step / warmup) if warmup else 1.0)
    rising = (step + 1) / warmup if warmup else 1.0
    falling = (num_steps - step) / max(1, num_steps - warmup)
    return min(1.0, rising, falling)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all tensors concatenated; fp32 scalar."""
    norm: Tensor = torch.stack(torch._foreach_norm(list(tensors))).norm()
    return norm


class Optimizer:
    """Updates named parameters in place from their `.grad`; frozen ones (`requires_grad=False`) are left out.

    Which ones are frozen is read once: call `reset`, or `choose_parameters`, after freezing or unfreezing parameters.
    `exp_avg` and `exp_avg_sq` are the moments by parameter name, of frozen ones too; Muon's momentum is an `exp_avg`.
    `parameters` are those that it trains, `own_names` those that `step` updates.
    ValueError if no parameter requires a gradient.

    Args:
        named_parameters: Of the model.
        config: Update rule and its settings.
        lr_factors: What the learning rate of a parameter is multiplied by, where that is not 1, by name.
        shards: Where the parameters are only this rank's rows of a sharded model's.
        matrix_dtype: Of Muon's iterations: that of the activations, as bf16 suffices for both.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        lr_factors: Mapping[str, float] | None = None,
        shards: Shards | None = None,
        matrix_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.matrix_dtype = matrix_dtype
        self.config, self._lr_factors, self._shards = config, dict(lr_factors or {}), shards
        self._all_parameters = dict(named_parameters)
        # On the device, set for each step: -learning rate, -Muon's learning rate, Adam's two bias corrections, and the
        # number of updates that they correct for.
        self.scalars = torch.zeros(5, device=next(iter(self._all_parameters.values())).device)
        for_muon = config.name == "muon"
        matrices = {name for name, p in self._all_parameters.items() if p.dim() == 2}
        self._muon_names = {name for name in matrices if for_muon and not name.endswith(_NOT_FOR_MUON)}
        self.exp_avg = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self._all_parameters.items()}
        self.exp_avg_sq = {
            name: torch.zeros_like(x) for name, x in self.exp_avg.items() if name not in self._muon_names
        }
        # Where gradients came as sparse tensors: the rows that are not zero, and the whole tables.
        self.gradient_rows: dict[str, Tensor] = {}
        self._tables: dict[str, Tensor] = {}
        self.num_updates, self._rank, self._num_processes = 0, 0, 1
        self._matrix_division = MatrixDivision()
        self._skipped: Tensor | None = None
        self._lr_scalars = self.scalars[:2]
        self.choose_parameters()

    def divide(self, rank: int, num_processes: int) -> None:
        """Lets `step` update only the parameters of this process, where others update the rest of the same memory."""
        self._rank, self._num_processes = rank, num_processes
        self.choose_parameters()

    def reset(self) -> None:
        """Starts again, with the parameters that require a gradient now: zero moments, no update counted."""
        self.choose_parameters()
        self.num_updates = 0
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            moment.zero_()

    def choose_parameters(self) -> None:
        """Trains the parameters that require a gradient now."""
        self.parameters = {name: p for name, p in self._all_parameters.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        shares: list[set[str]] = [set() for _ in range(self._num_processes)]
        loads = [0.0] * self._num_processes
        for name in sorted(self.parameters, key=self._update_cost, reverse=True):
            least = loads.index(min(loads))
            shares[least].add(name)
            loads[least] += self._update_cost(name)
        self.own_names = [name for name in self.parameters if name in shares[self._rank]]
        is_whole = self._shards is None
        whole = {name: self.parameters[name] for name in self.own_names if is_whole and name in self._muon_names}
        self._stacks = stacks(whole)
        self._orthogonalization = Orthogonalization(
            self._stacks, self._matrix_division, self.scalars.device, self.matrix_dtype
        )

    def zero_grad(self) -> None:
        """Sets all gradients to None."""
        for name, rows in self.gradient_rows.items():
            self._tables[name].index_fill_(0, rows, 0)
        self.gradient_rows.clear()
        for parameter in self._all_parameters.values():
            parameter.grad = None

    def set_step_scalars(self, lr_scale: float) -> None:
        """Prepares the next `step`, at `lr_scale` times the peak learning rate: counts it and copies its scalars.

        This is the part of an update that a CUDA graph cannot contain. ValueError if a learning rate is 0.
        """
        config = self.config
        if config.learning_rate == 0 or (config.name == "muon" and config.muon_learning_rate == 0):
            raise ValueError("a learning rate is 0, to follow from the number of steps: use Config.resolved")
        self.num_updates += 1
        # After infinitely many updates both bias corrections are exactly 1.
        num_updates = self.num_updates if config.bias_correction else math.inf
        corrections = (1 / (1 - config.beta1**num_updates), 1 / math.sqrt(1 - config.beta2**num_updates))
        learning_rates = (-lr_scale * config.learning_rate, -lr_scale * config.muon_learning_rate)
        scalars = [*learning_rates, *corrections, num_updates]
        host = torch.tensor(scalars, pin_memory=self.scalars.is_cuda)
        self.scalars.copy_(host, non_blocking=True)

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by parameter name, none of them sparse; RuntimeError names a parameter without one."""
        found = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} has no gradient")
            if parameter.grad.is_sparse:
                parameter.grad = self._filled_table(name, parameter.grad.coalesce())
            found[name] = parameter.grad
        return found

    def add_rows(self, name: str, rows: Tensor, values: Tensor) -> None:
        """Adds to some rows of a gradient."""
        grad = self.parameters[name].grad
        assert grad is not None
        grad.index_add_(0, rows, values)
        if name in self.gradient_rows:
            self.gradient_rows[name] = torch.cat((self.gradient_rows[name], rows))

    def forget_rows(self, name: str) -> None:
        """A whole gradient was added to that of a parameter."""
        if name in self.gradient_rows:
            del self.gradient_rows[name], self._tables[name]

    def _filled_table(self, name: str, sparse: Tensor) -> Tensor:
        """A sparse gradient as a whole one, in a table that is kept; `zero_grad` zeroes these rows of it."""
        if name not in self._tables:
            self._tables[name] = torch.zeros_like(self.parameters[name])
        self.gradient_rows[name] = sparse.indices()[0]
        return self._tables[name].index_copy_(0, self.gradient_rows[name], sparse.values())

    def divide_matrices(self, division: MatrixDivision) -> None:
        """Divides Muon's work among ranks: `prepare` does this rank's part, `exchange` gets the others'."""
        self._matrix_division = division
        self.choose_parameters()

    @property
    def exchanges(self) -> bool:
        """Whether `exchange` sends messages."""
        return self._matrix_division.gather is not None and bool(self._stacks)

    @torch.no_grad()
    def step(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> Tensor:
        """One update with the scalars of `set_step_scalars`; never synchronizes with the host.

        Args:
            norm: Of all gradients, an fp32 scalar; computed by default.
            skipped: 1 where the step must change neither parameters nor moments, whose gradients are then 0; otherwise
                0. An fp32 scalar.

        Returns the norm before clipping.
        """
        norm = self.prepare(norm, skipped)
        self.exchange()
        self.finish()
        return norm

    @torch.no_grad()
    def prepare(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> Tensor:
        """The part of `step` before `exchange`: all of it without Muon."""
        gradients = self.gradients()
        if norm is None:
            norm = global_norm(gradients.values())
        own = {name: gradients[name] for name in self.own_names}
        self._skipped, self._lr_scalars = skipped, self.scalars[:2]
        if skipped is not None:
            self._lr_scalars = self._lr_scalars * (1 - skipped)
        if own and self.config.clip_norm:
            # clip / max(norm, clip), as in tf.clip_by_global_norm: exactly 1 below the bound.
            bounded = norm if skipped is None else torch.where(skipped > 0, 1.0, norm)
            torch._foreach_mul_(list(own.values()), self.config.clip_norm / bounded.clamp(min=self.config.clip_norm))
        adam = {name: grad for name, grad in own.items() if name not in self._muon_names}
        if adam:
            self._step_lamb(adam) if self.config.name == "lamb" else self._step_adamw(adam)
        if self._shards is not None and len(adam) < len(own):
            self._step_sharded_muon(self._shards, {name: own[name] for name in own if name in self._muon_names})
        for number, stack in enumerate(self._stacks):
            self._prepare_muon(number, stack, own)
        return norm

    def exchange(self) -> None:
        """Gets from other ranks what they have computed for Muon's matrices."""
        self._orthogonalization.exchange()

    @torch.no_grad()
    def finish(self) -> None:
        """The part of `step` after `exchange`."""
        for number, stack in enumerate(self._stacks):
            self._finish_muon(number, stack)

    def _update_cost(self, name: str) -> float:
        """About how long the update of a parameter takes on a CPU, in units of AdamW's time for one element."""
        return self._matrix_cost(self.parameters[name].shape, name)

    def _matrix_cost(self, shape: torch.Size, name: str) -> float:
        # Muon's iterations multiply each element about 30 times with as many numbers as the shorter side has.
        return shape.numel() * (1 + min(shape) / 16 if name in self._muon_names else 1)

    def _step_adamw(self, gradients: Mapping[str, Tensor]) -> None:
        """AdamW by torch's fused operator, which passes over memory once instead of ten times."""
        config = self.config
        groups: dict[tuple[bool, float], list[str]] = {}
        for name in gradients:
            groups.setdefault((self.parameters[name].dim() > 1, self._lr_factor(name)), []).append(name)
        for (is_decayed, lr_factor), names in groups.items():
            torch._fused_adamw_(
                [self.parameters[name] for name in names],
                [gradients[name] for name in names],
                [self.exp_avg[name] for name in names],
                [self.exp_avg_sq[name] for name in names],
                [],
                [self.scalars[4]] * len(names),
                lr=-self.scalars[0] * lr_factor,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=config.weight_decay if is_decayed else 0.0,
                eps=config.epsilon,
                amsgrad=False,
                maximize=False,
                found_inf=self._skipped,
            )

    def _step_lamb(self, gradients: Mapping[str, Tensor]) -> None:
        config = self.config
        (_, _, inv_correction1, inv_sqrt_correction2, _), negative_lr = self.scalars.unbind(), self._lr_scalars[0]
        names, grads = list(gradients), list(gradients.values())
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        exp_avgs = [self.exp_avg[name] for name in names]
        exp_avg_sqs = [self.exp_avg_sq[name] for name in names]
        torch._foreach_lerp_(exp_avgs, self._or_kept(grads, exp_avgs), 1 - config.beta1)
        beta2 = config.beta2 if self._skipped is None else torch.where(self._skipped > 0, 1.0, config.beta2)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - config.beta2)

        denominators = torch._foreach_sqrt(exp_avg_sqs)
        if config.bias_correction:
            torch._foreach_mul_(denominators, inv_sqrt_correction2)
        torch._foreach_add_(denominators, config.epsilon)
        updates = torch._foreach_div(exp_avgs, denominators)
        if config.bias_correction:
            torch._foreach_mul_(updates, inv_correction1)
        # Weight decay and the trust ratio apply to matrices and embeddings, not to norms and biases.
        decayed = [i for i, parameter in enumerate(parameters) if parameter.dim() > 1]
        if decayed:
            weights = [parameters[i] for i in decayed]
            torch._foreach_add_([updates[i] for i in decayed], weights, alpha=config.weight_decay)
        self._apply_trust_ratios({names[i]: (parameters[i], updates[i]) for i in decayed})
        torch._foreach_mul_(updates, negative_lr)
        if self._lr_factors:
            torch._foreach_mul_(updates, [self._lr_factor(name) for name in names])
        torch._foreach_add_(parameters, updates)

    def _apply_trust_ratios(self, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Multiplies the update of each block of the parameters by its trust ratio; both by name."""
        if self._shards is None:
            for name, (parameter, update) in matrices.items():
                blocks_KX = update.view(num_blocks(name), -1)
                sizes, lengths = (x.view(blocks_KX.shape).norm(dim=1, keepdim=True) for x in (parameter, update))
                blocks_KX.mul_(_trust_ratios(sizes, lengths))
            return
        parameters, updates = (
            [piece for name, pair in matrices.items() for piece in self._shards.blocks(name, pair[i], num_blocks(name))]
            for i in range(2)
        )
        sizes, lengths = self._shards.norms([*parameters, *updates]).chunk(2)
        torch._foreach_mul_(updates, list(_trust_ratios(sizes, lengths).unbind()))

    def _lr_factor(self, name: str) -> float:
        return self._lr_factors.get(name, 1.0)

    def _nesterov(self, names: Sequence[str], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Muon's momentum moved on, and what is to be orthogonalized, by name."""
        exp_avgs, grads = [self.exp_avg[name] for name in names], [gradients[name] for name in names]
        momentum = self.config.muon_momentum
        torch._foreach_lerp_(exp_avgs, self._or_kept(grads, exp_avgs), 1 - momentum)
        return dict(zip(names, torch._foreach_lerp(grads, exp_avgs, momentum), strict=True))

    def _prepare_muon(self, number: int, stack: Stack, gradients: Mapping[str, Tensor]) -> None:
        """Momentum of a stack, and the orthogonalized matrices of this rank's part."""
        self._orthogonalization.compute(number, stack.join(self._nesterov(stack.names, gradients)))

    def _finish_muon(self, number: int, stack: Stack) -> None:
        updates = stack.split(self._orthogonalization.result(number) * self._muon_scale(stack))
        self._apply_muon({name: updates[name].reshape(self.parameters[name].shape) for name in stack.names})

    def _muon_scale(self, stack: Stack) -> Tensor:
        """Minus the learning rate; an update's size becomes independent of the matrix's shape (Jordan et al.)."""
        return self._lr_scalars[1] * math.sqrt(max(1.0, stack.shape[0] / stack.shape[1]))

    def _step_sharded_muon(self, shards: Shards, gradients: Mapping[str, Tensor]) -> None:
        """Muon of parameters of which this rank has some rows: each whole matrix goes to one rank and back."""
        owners = shards.share({name: self._matrix_cost(shards.shapes[name], name) for name in gradients})
        wholes = shards.to_owners(self._nesterov(list(gradients), gradients), owners)
        updates: dict[str, Tensor] = {}
        for stack in stacks(wholes):
            orthogonal = orthogonalize(stack.join(wholes), self.matrix_dtype)
            updates |= stack.split(orthogonal * self._muon_scale(stack))
        updates = {name: update.reshape(shards.shapes[name]) for name, update in updates.items()}
        self._apply_muon(shards.from_owners(updates, owners))

    def _apply_muon(self, updates: Mapping[str, Tensor]) -> None:
        parameters: list[Tensor] = [self.parameters[name] for name in updates]
        directions = list(updates.values())
        decay = self._lr_scalars[1] * self.config.weight_decay
        if self._lr_factors:
            lr_factors = [self._lr_factor(name) for name in updates]
            torch._foreach_mul_(directions, lr_factors)
            torch._foreach_mul_(parameters, [1 + decay * factor for factor in lr_factors])
        else:
            torch._foreach_mul_(parameters, 1 + decay)
        torch._foreach_add_(parameters, directions)

    def _or_kept(self, gradients: list[Tensor], exp_avgs: list[Tensor]) -> list[Tensor]:
        """Gradients that leave the first moments as they are where the step is skipped."""
        if self._skipped is None:
            return gradients
        return list(torch._foreach_add(gradients, torch._foreach_mul(exp_avgs, self._skipped)))

    def state_dict(self) -> dict[str, Tensor]:
        """`exp_avg.NAME` and `exp_avg_sq.NAME` of every trained parameter, and `num_updates`; not copied."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        state = {
            f"{kind}.{name}": each[name] for kind, each in moments.items() for name in self.parameters if name in each
        }
        return state | {"num_updates": torch.tensor(self.num_updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `state_dict` returned. ValueError if it is of other trained parameters or another rule."""
        self.check_state(state)
        for name, tensor in self.state_dict().items():
            if name != "num_updates":
                tensor.copy_(state[name])
        self.num_updates = int(state["num_updates"])

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError if a state is of other trained parameters or another rule."""
        if odd := sorted(self.state_dict().keys() ^ state.keys()):
            raise InputError(f"optimizer state of another model or rule: only one of the two has {odd[0]}")


def _trust_ratios(sizes: Tensor, lengths: Tensor) -> Tensor:
    """LAMB's |parameter| / |update| by the norms of both, 1 where either is 0."""
    return torch.where((sizes > 0) & (lengths > 0), sizes / lengths, torch.ones_like(sizes))
