"""`two-stage`: first the generator alone, then a discriminator that starts from its weights (section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from electra_fast.model.model import Electra
from electra_fast.model.networks import PARTS
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import Stage


@dataclass(frozen=True)
class TwoStageObjective(ElectraObjective):
    """Masked language modeling for half of the steps, then replaced-token detection against the frozen generator.

    The class itself is the objective of the second stage, whose loss is the discriminator's.
    """

    name = "two-stage"
    lowered_losses = ("discriminator_loss",)  # the generator's stays constant

    @property
    def gen_weight(self) -> float:
        """0: the generator does not train together with the discriminator."""
        return 0.0

    def stages(self) -> tuple[Stage, ...]:
        """The generator's and the discriminator's stage, which gets the extra step of an odd number."""
        steps = self.config.train.steps
        first, name = steps // 2, "replaced-token detection against the frozen generator"
        return (
            Stage("masked language modeling", MaskedLMObjective(self.config), 0, first, frozen=PARTS["discriminator"]),
            Stage(name, self, first, steps - first, frozen=PARTS["generator"]),
        )

    def begin_stage(self, model: Electra) -> None:
        """Copies embeddings and encoder; the heads differ."""
        for ours, theirs in zip(PARTS["discriminator"][:2], PARTS["generator"][:2], strict=True):
            model.get_submodule(ours).load_state_dict(model.get_submodule(theirs).state_dict())
