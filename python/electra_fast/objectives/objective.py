"""The contract of an objective: all that the model, the training step, reports and exports ask it.

A new objective is a subclass in a file of its own and an entry in `OBJECTIVES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.compute import ComputeConfig, RngKey
    from electra_fast.config import Config, ModelConfig
    from electra_fast.model import Electra

Number = float | int | None


@dataclass(frozen=True)
class Head:
    """A head on an encoder.

    Args:
        kind: A name of `model.HEADS`.
        token_fraction: Fraction of the tokens that it computes for, which is what it costs.
    """

    kind: str
    token_fraction: float = 1.0


@dataclass(frozen=True)
class Network:
    """An encoder that an objective trains, and its heads.

    Args:
        shape: Sizes of the encoder, and of its embeddings unless they are shared.
        heads: By the attribute of `Electra` that holds each.
    """

    shape: ModelConfig
    heads: dict[str, Head]


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
    """The networks that it trains, in the order in which they are built; each can be exported."""
    metric_totals: ClassVar[tuple[str, ...]]
    """Names of the totals that `forward` may return."""

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

    @abstractmethod
    def describe(self, role: str) -> tuple[str, str]:
        """Title and first sentence of the model card of an exported network."""

    def check(self) -> None:
        """Raises ValueError where the configuration does not suit the objective."""
        self.networks()

    def stage(self, step: int) -> Stage:
        """The stage that a step (0-based) belongs to. Where it changes, the optimizer starts afresh."""
        return Stage("pre-training", self, first_step=0, num_steps=self.config.train.steps)

    def begin_stage(self, model: Electra) -> None:  # noqa: B027  # most objectives have one stage
        """Prepares a model that an earlier stage has trained, before the first step of a later one."""


def ratio(totals: Mapping[str, float], numerator: str, denominator: str) -> float:
    """The quotient of two totals; 0/0 is 0."""
    return totals[numerator] / totals[denominator] if totals[denominator] else 0.0
