"""The interface of an update rule, and the state that it reads and changes.

A new rule is a subclass in a separate file, an entry in `optimizer.RULES`, and a name in `[optimizer]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from electra_fast.config.config import OptimizerConfig
from electra_fast.optimizers.shards import Shards


@dataclass
class OptimizerState:
    """Parameters and moments by name, and the scalars of an update.

    Args:
        config: The rule and its settings.
        parameters: The model's parameters, whole or sharded.
        exp_avg: First moments, fp32.
        exp_avg_sq: Second moments, fp32, of parameters that have one under the rule.
        scalars: Set on the device before each update: -learning rate, -Muon's learning rate, Adam's two bias
            corrections, and the number of updates that they correct for; fp32 [5].
        lr_factors: Learning-rate factors other than 1, by parameter name.
        shards: The shards of a sharded model, whose rows on this rank are the parameters.
        matrix_dtype: Dtype of Muon's iterations.
        skipped: 1 if the update must change neither parameters nor moments (gradients are then 0), else 0; an fp32
            scalar. None if no step is ever skipped.
        rows: Of some tables, the rows that have moments once they have this step's; all others have neither moments nor
            gradients, so that a rule may leave them but for their decay.
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
        """Returns a parameter's learning-rate factor."""
        return self.lr_factors.get(name, 1.0)

    def negative_lr(self, number: int = 0) -> Tensor:
        """Returns minus the learning rate (0) or Muon's (1), or 0 if the step is skipped; an fp32 scalar."""
        rate = self.scalars[number]
        return rate if self.skipped is None else rate * (1 - self.skipped)

    def update_exp_avg(self, gradients: Mapping[str, Tensor], beta: float) -> None:
        """Moves first moments toward the gradients, unless the step is skipped."""
        exp_avgs, used = [self.exp_avg[name] for name in gradients], list(gradients.values())
        if self.skipped is not None:
            used = list(torch._foreach_add(used, torch._foreach_mul(exp_avgs, self.skipped)))
        torch._foreach_lerp_(exp_avgs, used, 1 - beta)


class UpdateRule(ABC):
    """Updates parameters in place. Never synchronizes with the host, so a CUDA graph can contain it."""

    update_bytes: ClassVar[int]
    """Temporary memory of an update, in bytes per parameter, which memory estimates count."""

    def __init__(self, state: OptimizerState) -> None:
        self.state = state

    @staticmethod
    def has_second_moment(name: str, parameter: Tensor) -> bool:
        """Returns whether the rule keeps an `exp_avg_sq` of a parameter."""
        return True

    def cost(self, name: str, shape: torch.Size) -> float:
        """Estimates the time of a parameter's update on a CPU, in units of AdamW's for one element."""
        return float(shape.numel())

    def choose(self, names: list[str]) -> None:  # noqa: B027  # most rules treat each parameter by itself
        """Prepares to update these parameters from now on."""

    @abstractmethod
    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Updates parameters and moments from clipped gradients, by name."""

    # Rules that divide work among ranks finish an update after an exchange, which may stay outside a CUDA graph.
    exchanges = False

    def exchange(self) -> None:  # noqa: B027
        """Gathers the other ranks' part of the update."""

    def finish(self) -> None:  # noqa: B027
        """Applies the exchanged part of the update."""
