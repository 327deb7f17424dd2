"""The contract of an objective: all that the model, the training step, reports and exports ask it.

A new objective is a subclass in a file of its own and an entry in `OBJECTIVES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from electra_fast.config_file import Scalar, format_value
from electra_fast.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.compute import ComputeConfig, RngKey
    from electra_fast.config import Config, ModelConfig
    from electra_fast.model import Electra

Number = float | int | None

PARTS = {
    "discriminator": ("embeddings", "discriminator", "discriminator_head"),
    "encoder": ("embeddings", "encoder", "encoder_head"),
    "generator": ("generator_embeddings", "generator", "generator_head"),
}
"""Submodules of `Electra` by role: embeddings, encoder, head. The result of an objective comes before its generator."""

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

Needs = Mapping[str, tuple[Scalar, ...]]
"""Values that are allowed, by configuration key; the first is the usual one."""

DISTINCT = ("paper", "bert", "whole-word", "span")
"""The values of `data.masking` that draw no position twice."""
_WHY_DISTINCT = "google draws some positions twice and averages their samples, which then have no probability"

OPTION_NEEDS: dict[str, tuple[Scalar, Needs]] = {
    "objective.contrastive_weight": (0.0, {"data.masking": DISTINCT, "objective.name": ("electra",)}),
    "objective.disc_positions": ("masked", {"objective.name": ("electra15",)}),
    "generator.kind": ("model", {"objective.temperature": (1.0,), "objective.disallow_correct": (False,)}),
}
"""What an option needs wherever it has another value than this."""


@dataclass(frozen=True)
class Head:
    """A head on an encoder.

    Args:
        kind: A name in `heads.HEADS`.
        token_fraction: Fraction of the tokens that it computes for, which is what it costs.
        num_forward: How many forward passes it makes in a step.
    """

    kind: str
    token_fraction: float = 1.0
    num_forward: int = 1


@dataclass(frozen=True)
class Network:
    """An encoder of an objective, and its heads.

    Args:
        shape: Sizes of the encoder, and of its embeddings unless they are shared.
        heads: By the attribute of `Electra` that holds each. One that is called by its role is exported with it.
        is_trained: Whether it computes gradients, or runs forward only.
    """

    shape: ModelConfig
    heads: dict[str, Head]
    is_trained: bool = True


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

    roles: ClassVar[tuple[str, ...]]
    """The networks that it trains, in the order in which they are built, the result last; each can be exported."""
    metric_totals: ClassVar[tuple[str, ...]]
    """Names of the totals that `forward` may return."""
    needs: ClassVar[Needs] = {}
    """What it can be trained with, where that is not everything."""
    lowered_losses: ClassVar[tuple[str, ...]] = ("generator_loss", "encoder_loss", "discriminator_loss")
    """Metrics, where an objective has them, that do not all rise for long while training goes well."""

    @abstractmethod
    def networks(self) -> dict[str, Network]:
        """The networks by role; ValueError where the configuration does not describe them."""

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the losses of a batch are divided by: fp64 scalars, to be added up over the micro-batches of a step.

        Unless an objective says otherwise, the weight of the masked slots and the number of tokens.
        """
        from electra_fast.objectives import losses

        return losses.loss_denominators(batch)

    @abstractmethod
    def forward(
        self,
        model: Electra,
        batch: Mapping[str, Tensor],
        compute: ComputeConfig,
        rng_key: RngKey,
        denominators: Mapping[str, Tensor],
    ) -> Output:
        """The loss and the metric totals of one micro-batch, without synchronizing with the host.

        Args:
            model: The networks; its training mode decides about dropout.
            batch: Tensors of `data.loader.to_torch`.
            compute: Attention backend and activation dtype.
            rng_key: Key of the generator's samples and, on CUDA, of dropout.
            denominators: `loss_denominators` summed over all micro-batches of the step, so that their losses add
                up to the loss of the undivided batch.
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

    def check(self) -> None:
        """Raises ValueError where the configuration does not suit the objective."""
        self._require(f"objective.name = {format_value(self.config.objective.name)}", self.needs)
        for key, (off, needs) in OPTION_NEEDS.items():
            if self.config.value(key) != off:
                self._require(f"{key} = {format_value(self.config.value(key))}", needs)
        self.networks()

    def _require(self, what: str, needs: Needs) -> None:
        found = {key: (allowed, self.config.value(key)) for key, allowed in needs.items()}
        missing = [
            f"{key} = {' or '.join(map(format_value, allowed))} (it is {format_value(value)})"
            for key, (allowed, value) in found.items()
            if value not in allowed
        ]
        if missing:
            why = f"; {_WHY_DISTINCT}" if missing[0].startswith("data.masking") else ""
            raise InputError(f"{what} needs {', '.join(missing)}{why}")

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
