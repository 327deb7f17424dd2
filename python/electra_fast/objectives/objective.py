"""The contract of an objective: all that the training step, reports and exports ask it.

A new objective is a subclass in a file of its own, an entry in `OBJECTIVES` and `config.objectives`, and its networks
in `model.networks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.model.compute import ComputeConfig, RngKey
from electra_fast.model.model import Electra
from electra_fast.model.networks import Network, networks_of

Number = float | int | None

METRICS = (
    "loss",
    "generator_loss",
    "discriminator_loss",
    "generator_accuracy",
    "discriminator_accuracy",
    "discriminator_precision",
    "discriminator_recall",
    "replaced_fraction",
)
"""What every objective reports, None where it has no such thing; an objective may report more."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, and what its loss depends on besides the model.

    Args:
        tensors: Tensors of `data.loader.to_torch`.
        compute: Attention backend and activation dtype.
        rng_key: Key of the generator's samples and, on CUDA, of dropout.
        denominators: `Objective.loss_denominators` summed over all micro-batches of the step, so that their losses add
            up to the loss of the undivided batch. Only losses read them.
    """

    tensors: Mapping[str, Tensor]
    compute: ComputeConfig
    rng_key: RngKey
    denominators: Mapping[str, Tensor] = field(default_factory=dict)

    def mean(self, loss_sum: Tensor, denominator: str) -> Tensor:
        """A sum of losses over one of the denominators, in fp32; a step without such tokens divides by 1."""
        return loss_sum / self.denominators[denominator].clamp(min=1).float()


@dataclass(frozen=True)
class Predictions:
    """What the discriminator read and answered, flat [T]: ids, labels, fp32 logits, and what is not padding."""

    corrupted_ids_T: Tensor
    replaced_T: Tensor
    logits_T: Tensor
    valid_T: Tensor


@dataclass(frozen=True)
class Output:
    """What a forward pass gives: the loss to minimize (scalar), metric totals (scalars on the device), predictions."""

    loss: Tensor
    totals: dict[str, Tensor]
    predictions: Predictions | None = None


Forward = Callable[[Electra, MicroBatch], Output]
"""The type of `Objective.forward`."""


@dataclass(frozen=True)
class Stage:
    """Consecutive steps that train the same parameters by the same loss, under a learning rate schedule of their own.

    Args:
        name: What a run calls it when it begins.
        objective: Whose `forward` computes the loss.
        first_step: The stage's first step, counted from the run's start.
        num_steps: Length of the stage and of its schedule.
        frozen: Submodules of the model that do not train, by name.
    """

    name: str
    objective: Objective
    first_step: int
    num_steps: int
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Objective(ABC):
    """An objective under a configuration."""

    config: Config

    name: ClassVar[str]
    """Its key in `config.objectives.OBJECTIVE_SPECS`."""
    metric_totals: ClassVar[tuple[str, ...]]
    """Names of the totals that `forward` may return."""
    lowered_losses: ClassVar[tuple[str, ...]] = ("generator_loss", "encoder_loss", "discriminator_loss")
    """Metrics, where an objective has them, that do not all rise for long while training goes well."""

    def networks(self) -> dict[str, Network]:
        """The networks by role."""
        return networks_of(self.config, self.name)

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the losses of a batch are divided by: fp64 scalars, to be added up over the micro-batches of a step.

        Unless an objective says otherwise, the weight of the masked slots and the number of tokens.
        """
        return {
            "masked_weight": batch["masked_weights"].sum(dtype=torch.float64),
            "tokens": (batch["segment_ids"] > 0).sum().double(),
        }

    @abstractmethod
    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Computes the loss and the metric totals of one micro-batch, without synchronizing with the host.

        Args:
            model: The networks. Dropout is applied in training mode.
            batch: On the model's device.
        """

    @abstractmethod
    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """The metrics of a log window or an evaluation, from the metric totals over it."""

    def comparable_loss(self, metrics: Mapping[str, Number]) -> float:
        """By which the checkpoints of a run compare: the loss, unless an objective says otherwise."""
        return float(metrics["loss"] or 0)

    @abstractmethod
    def describe(self, role: str) -> tuple[str, str]:
        """Title and first sentence of the model card of an exported network."""

    def stages(self) -> tuple[Stage, ...]:
        """Its stages, in order; where one ends, the next begins. The last one ends with the run."""
        return (Stage("pre-training", self, first_step=0, num_steps=self.config.train.steps),)

    def stage(self, step: int) -> Stage:
        """The stage that a step (0-based) belongs to. Where it changes, the optimizer starts afresh."""
        return [stage for stage in self.stages() if stage.first_step <= step][-1]

    def begin_stage(self, model: Electra) -> None:  # noqa: B027  # most objectives have one stage
        """Prepares a model that an earlier stage has trained, before the first step of a later one."""


def report(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Some metrics, and None for those of `METRICS` that are not among them."""
    return dict.fromkeys(METRICS) | dict(metrics)


def ratio(totals: Mapping[str, float], numerator: str, denominator: str) -> float:
    """The quotient of two totals; 0/0 is 0."""
    return totals[numerator] / totals[denominator] if totals[denominator] else 0.0
