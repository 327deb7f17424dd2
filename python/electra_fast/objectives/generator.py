"""What objectives share whose text a generator corrupts: the generator, its loss, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from electra_fast.objectives.objective import Number, Objective, ratio


@dataclass(frozen=True)
class GeneratorObjective(Objective):
    """Has a generator beside the network that is its result: a smaller network, or a fixed distribution."""

    @property
    def gen_weight(self) -> float:
        """Weight of the generator's loss."""
        return self.config.objective.gen_weight

    def generator_metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Loss in nats per masked token, and accuracy; None for a fixed distribution."""
        is_network = self.config.generator.kind == "model"
        names = {"generator_loss": "generator_loss", "generator_accuracy": "generator_correct"}
        return {name: ratio(totals, total, "masked_weight") if is_network else None for name, total in names.items()}

    def generator_loss(self, totals: Mapping[str, float]) -> float:
        """Its part of the loss."""
        return self.gen_weight * ratio(totals, "generator_loss", "masked_weight")


def detection_metrics(totals: Mapping[str, float], denominator: str) -> dict[str, Number]:
    """Accuracy, precision and recall of "replaced" over the tokens that a total counts, and how many of them are."""
    return {
        "discriminator_accuracy": ratio(totals, "discriminator_correct", denominator),
        "discriminator_precision": ratio(totals, "true_positives", "predicted_positives"),
        "discriminator_recall": ratio(totals, "true_positives", "replaced"),
        "replaced_fraction": ratio(totals, "replaced", denominator),
    }
