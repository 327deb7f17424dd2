"""The interface of an objective to the training step, reports and exports.

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
"""Metrics that every objective reports, None where they do not apply; an objective may report more."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, and all else that its loss depends on besides the model.

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
        """Divides a sum of losses by a denominator, in fp32; by 1 if the step has no such tokens."""
        return loss_sum / self.denominators[denominator].clamp(min=1).float()


@dataclass(frozen=True)
class Predictions:
    """The discriminator's inputs, labels and outputs, flat [T]; logits are fp32."""

    corrupted_ids_T: Tensor
    replaced_T: Tensor
    logits_T: Tensor
    valid_T: Tensor


@dataclass(frozen=True)
class Output:
    """The result of a forward pass: the loss (scalar), metric totals (scalars on the device), predictions."""

    loss: Tensor
    totals: dict[str, Tensor]
    predictions: Predictions | None = None


Forward = Callable[[Electra, MicroBatch], Output]
"""The type of `Objective.forward`."""


@dataclass(frozen=True)
class Stage:
    """Consecutive steps that train the same parameters by the same loss, with a learning-rate schedule of their own.

    Args:
        name: Its name in messages.
        objective: Computes the loss.
        first_step: The stage's first step, counted from the run's start.
        num_steps: Length of the stage and of its schedule.
        frozen: Names of the model's submodules that do not train.
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
    """Metrics that, while training goes well, do not all rise for long."""

    def networks(self) -> dict[str, Network]:
        """Returns the networks by role."""
        return networks_of(self.config, self.name)

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the divisors of a batch's losses, fp64 scalars to be summed over the micro-batches of a step.

        By default, the weight of the masked slots and the number of tokens.
        """
        return {
            "masked_weight": batch["masked_weights"].sum(dtype=torch.float64),
            "tokens": (batch["segment_ids"] > 0).sum().double(),
        }

    @abstractmethod
    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Computes the loss and the metric totals of one micro-batch, without synchronizing with the host.

        Args:
            model: The networks, which apply dropout in training mode.
            batch: The micro-batch, on the model's device.
        """

    @abstractmethod
    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns the metrics of a log window or an evaluation from its metric totals."""

    def comparable_loss(self, metrics: Mapping[str, Number]) -> float:
        """Returns the loss by which checkpoints of a run are compared."""
        return float(metrics["loss"] or 0)

    @abstractmethod
    def describe(self, role: str) -> tuple[str, str]:
        """Returns title and first sentence of an exported network's model card."""

    def stages(self) -> tuple[Stage, ...]:
        """Returns the consecutive stages that make up the run."""
        return (Stage("pre-training", self, first_step=0, num_steps=self.config.train.steps),)

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step (0-based). The optimizer starts afresh with each stage."""
        return [stage for stage in self.stages() if stage.first_step <= step][-1]

    def begin_stage(self, model: Electra) -> None:  # noqa: B027  # most objectives have one stage
        """Prepares the model, trained by the stage before, for the first step of this stage."""


def report(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Adds None for absent `METRICS`."""
    return dict.fromkeys(METRICS) | dict(metrics)


def ratio(totals: Mapping[str, float], numerator: str, denominator: str) -> float:
    """Divides two totals; 0/0 is 0."""
    return totals[numerator] / totals[denominator] if totals[denominator] else 0.0
