"""The optimizer, which applies an update rule to named parameters, and the learning-rate schedules.

Its state is a flat dictionary of tensors for checkpoints: fp32 moments by parameter name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from electra_fast.config.config import OptimizerConfig
from electra_fast.errors import InputError
from electra_fast.optimizers.rules import RULES, OptimizerState
from electra_fast.optimizers.shards import Shards, assign_owners

# Rows with moments are updated alone if the table has at least this many times as many rows; copying them costs time.
MIN_ROWS_BY_MOMENTS = 4


class Schedule(Protocol):
    """A configuration of the learning-rate schedule."""

    @property
    def schedule(self) -> str:
        """`linear` or `product`."""

    def num_warmup_steps(self, num_steps: int) -> float: ...


def schedule_of(config: Schedule, num_steps: int) -> Callable[[int], float]:
    """Returns a function that maps a step (0-based) to the learning rate as a fraction of its peak.

    With t the step, T the number of steps and W the warmup steps, `product`, as in the published code, is
    (1 - t/T) * min(1, t/W). `linear` rises linearly over W steps and then falls to 0.
    """
    warmup = config.num_warmup_steps(num_steps)

    def product(step: int) -> float:
        return (1 - step / num_steps) * (min(1.0, step / warmup) if warmup else 1.0)

    def linear(step: int) -> float:
        rising = (step + 1) / warmup if warmup else 1.0
        return min(1.0, rising, (num_steps - step) / max(1, num_steps - warmup))

    return product if config.schedule == "product" else linear


def lr_scale(config: Schedule, step: int, num_steps: int) -> float:
    return schedule_of(config, num_steps)(step)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all tensors concatenated; fp32 scalar."""
    norm: Tensor = torch.stack(torch._foreach_norm(list(tensors))).norm()
    return norm


class Optimizer:
    """Updates named parameters in place from their `.grad`; skips frozen ones (`requires_grad=False`).

    `parameters` holds the trained parameters, `own_names` the names of the parameters that this process updates, and
    `exp_avg` and `exp_avg_sq` the moments by parameter name, including frozen ones. Call `reset` or `choose_parameters`
    after freezing or unfreezing parameters.

    Args:
        named_parameters: The model's parameters by name.
        config: Update rule and its settings.
        lr_factors: Learning-rate factors other than 1, by parameter name.
        shards: The shards of a sharded model, whose rows on this rank are the parameters.
        matrix_dtype: Dtype of matrix products, usually the activations' dtype; bf16 suffices for both.

    Raises:
        ValueError: No parameter requires a gradient.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        lr_factors: Mapping[str, float] | None = None,
        shards: Shards | None = None,
        matrix_dtype: torch.dtype = torch.float32,
    ) -> None:
        parameters = dict(named_parameters)
        rule = RULES[config.name]
        self.exp_avg = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in parameters.items()}
        self.exp_avg_sq = {
            name: torch.zeros_like(x) for name, x in self.exp_avg.items() if rule.has_second_moment(name, x)
        }
        scalars = torch.zeros(3 + len(rule.learning_rates), device=next(iter(parameters.values())).device)
        self._state = OptimizerState(
            config, parameters, self.exp_avg, self.exp_avg_sq, scalars, dict(lr_factors or {}), shards, matrix_dtype
        )
        self.config = config
        self.rule = rule(self._state)
        # For sparse gradients: the nonzero rows, and the whole tables.
        self.gradient_rows: dict[str, Tensor] = {}
        self._tables: dict[str, Tensor] = {}
        # A mask per table of the rows that may have moments, while gradients are sparse. `num_loads` counts how often
        # all moments were replaced, so that processes that share them notice.
        self._has_moments: dict[str, Tensor] = {}
        self.num_loads = 0
        self._num_steps = 0
        self._rank = 0
        self._num_processes = 1
        self._num_skipped = torch.zeros_like(scalars[0])  # skipped steps; only the device knows their number
        self.choose_parameters()

    @property
    def num_updates(self) -> int:
        """Steps that changed the parameters; waits for the device."""
        return self._num_steps - int(self._num_skipped)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._num_steps = number
        self._num_skipped.zero_()

    def divide(self, rank: int, num_processes: int) -> None:
        """Divides the updates among processes that share the parameters' memory."""
        self._rank = rank
        self._num_processes = num_processes
        self.choose_parameters()

    def reset(self) -> None:
        """Chooses the parameters that require a gradient now, and resets moments and the number of updates."""
        self.choose_parameters()
        self.num_updates = 0
        self.follow_loads(self.num_loads + 1)
        for moment in (*self.exp_avg.values(), *self.exp_avg_sq.values()):
            moment.zero_()

    def choose_parameters(self) -> None:
        """Chooses the parameters that require a gradient now, divided among processes at about equal cost."""
        self.parameters = {name: p for name, p in self._state.parameters.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError("no parameter requires a gradient, so there is nothing to optimize")
        costs = {name: self.rule.cost(name, p.shape) for name, p in self.parameters.items()}
        owners = assign_owners(costs, self._num_processes)
        self.own_names = [name for name in self.parameters if owners[name] == self._rank]
        self.rule.choose(self.own_names)

    def zero_grad(self) -> None:
        for name, rows in self.gradient_rows.items():
            self._tables[name].index_fill_(0, rows, 0)
        self.gradient_rows.clear()
        for parameter in self._state.parameters.values():
            parameter.grad = None

    def set_step_scalars(self, lr_scale: float) -> None:
        """Counts the next step, at `lr_scale` times the peak learning rate, and copies its scalars to the device.

        A CUDA graph cannot contain this part of an update. Raises ValueError if a learning rate is 0.
        """
        config = self.config
        rates: list[float] = [getattr(config, name) for name in self.rule.learning_rates]
        if 0 in rates:
            raise ValueError("learning rate = 0: must be derived from the number of steps; call Config.resolved first")
        self._num_steps += 1
        # Both bias corrections are exactly 1 after infinitely many updates.
        num_updates = self._num_steps if config.bias_correction else math.inf
        corrections = (1 / (1 - config.beta1**num_updates), 1 / math.sqrt(1 - config.beta2**num_updates))
        scalars = [*corrections, num_updates, *(-lr_scale * rate for rate in rates)]
        host = torch.tensor(scalars, pin_memory=self._state.scalars.is_cuda)
        self._state.scalars.copy_(host, non_blocking=True)

    def follow_loads(self, num_loads: int) -> None:
        """Forgets which rows have moments if this process or another has replaced the moments since."""
        if num_loads != self.num_loads:
            self._has_moments.clear()
        self.num_loads = num_loads

    def gradients(self) -> dict[str, Tensor]:
        """Dense gradients by parameter name. Raises RuntimeError naming a parameter without one."""
        gradients = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"parameter {name} has no gradient")
            if parameter.grad.is_sparse:
                parameter.grad = self._filled_table(name, parameter.grad.coalesce())
            gradients[name] = parameter.grad
        return gradients

    def add_rows(self, name: str, rows: Tensor, values: Tensor) -> None:
        grad = self.parameters[name].grad
        assert grad is not None
        grad.index_add_(0, rows, values)
        if name in self.gradient_rows:
            self.gradient_rows[name] = torch.unique(torch.cat((self.gradient_rows[name], rows)))

    def forget_rows(self, name: str) -> None:
        if name in self.gradient_rows:
            del self.gradient_rows[name], self._tables[name]

    def nonzero(self, name: str, gradient: Tensor) -> Tensor:
        """Returns a copy of a gradient's nonzero rows if they are known, or else the whole gradient."""
        rows = self.gradient_rows.get(name)
        return gradient if rows is None else gradient.index_select(0, rows)

    def _rows_with_moments(self) -> dict[str, Tensor]:
        """Returns the rows that an update changes by more than decay, for tables in which they are few."""
        rows_of = {}
        for name in self._has_moments.keys() - self.gradient_rows.keys():
            del self._has_moments[name]  # any row may get moments now
        for name in self.gradient_rows.keys() & self.exp_avg_sq.keys() & set(self.own_names):
            if name not in self._has_moments:
                self._has_moments[name] = ((self.exp_avg[name] != 0) | (self.exp_avg_sq[name] != 0)).any(1)
            rows = self._has_moments[name].index_fill_(0, self.gradient_rows[name], True).nonzero()[:, 0]
            if MIN_ROWS_BY_MOMENTS * len(rows) <= len(self._has_moments[name]):
                rows_of[name] = rows
        return rows_of

    def _filled_table(self, name: str, sparse: Tensor) -> Tensor:
        """Returns a sparse gradient as a dense one, in a table that is reused; `zero_grad` clears its rows."""
        if name not in self._tables:
            self._tables[name] = torch.zeros_like(self.parameters[name])
        self.gradient_rows[name] = sparse.indices()[0]
        return self._tables[name].index_copy_(0, self.gradient_rows[name], sparse.values())

    @torch.no_grad()
    def step(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> Tensor:
        """Clips the gradients and updates the parameters, with the scalars that `set_step_scalars` copied.

        Never synchronizes with the host. Takes the arguments of `update`. Returns the norm before clipping.
        """
        norm = self.update(norm, skipped)
        if self.rule.exchanges:
            self.rule.exchange()
            self.rule.finish()
        return norm

    @torch.no_grad()
    def update(self, norm: Tensor | None = None, skipped: Tensor | None = None) -> Tensor:
        """Clips the gradients and updates the parameters: the whole `step`, unless `rule.exchanges` is set.

        Args:
            norm: The norm of all gradients, an fp32 scalar; computed by default.
            skipped: 1 if the step must change neither parameters nor moments (gradients are then 0), else 0; an fp32
                scalar.

        Returns the norm before clipping.
        """
        gradients = self.gradients()
        if norm is None:
            norm = global_norm([self.nonzero(name, gradient) for name, gradient in gradients.items()])
        owned = {name: gradients[name] for name in self.own_names}
        self._state.skipped = skipped
        if skipped is not None:
            self._correct_for_skipped(skipped)
        if owned and self.config.clip_norm:
            # clip / max(norm, clip), as in tf.clip_by_global_norm: exactly 1 below the bound.
            bounded = norm if skipped is None else torch.where(skipped > 0, 1.0, norm)
            factor = self.config.clip_norm / bounded.clamp(min=self.config.clip_norm)
            for name in self.gradient_rows.keys() & owned.keys():
                owned[name].index_copy_(0, self.gradient_rows[name], self.nonzero(name, owned[name]) * factor)
            if dense := [gradient for name, gradient in owned.items() if name not in self.gradient_rows]:
                torch._foreach_mul_(dense, factor)
        self._state.rows = self._rows_with_moments()
        self.rule.update(owned)
        return norm

    def _correct_for_skipped(self, skipped: Tensor) -> None:
        """Corrects the scalars for earlier skipped steps, which do not count as updates, as in torch's GradScaler."""
        scalars = self._state.scalars
        config = self.config
        num_updates = (scalars[2] - self._num_skipped).double()
        corrections = (1 / (1 - config.beta1**num_updates), (1 - config.beta2**num_updates).rsqrt())
        has_skipped = self._num_skipped > 0
        for place, value in enumerate((*corrections, num_updates)):
            scalars[place].copy_(torch.where(has_skipped, value.float(), scalars[place]))
        self._num_skipped += skipped

    @torch.no_grad()
    def finish(self) -> None:
        self.rule.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns `exp_avg.NAME` and `exp_avg_sq.NAME` of each trained parameter and `num_updates`, without copies."""
        moments = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        names = [(kind, name) for kind in moments for name in self.parameters if name in moments[kind]]
        state = {f"{kind}.{name}": moments[kind][name] for kind, name in names}
        return state | {"num_updates": torch.tensor(self.num_updates)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores the result of `state_dict`. Raises ValueError if its trained parameters or its rule differ."""
        self.check_state(state)
        self.follow_loads(self.num_loads + 1)
        for name, tensor in self.state_dict().items():
            if name != "num_updates":
                tensor.copy_(state[name])
        self.num_updates = int(state["num_updates"])

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError if a state belongs to other trained parameters or another rule."""
        if unmatched := sorted(self.state_dict().keys() ^ state.keys()):
            raise InputError(f"optimizer state of another model or rule: only one of the two has {unmatched[0]}")
