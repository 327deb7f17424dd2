"""`two-stage`: first the generator alone, then a discriminator that starts from its weights (section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from electra_fast.errors import InputError
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import DISTINCT, PARTS, Network, Stage

if TYPE_CHECKING:
    from electra_fast.model import Electra


@dataclass(frozen=True)
class TwoStageObjective(ElectraObjective):
    """Half of the steps masked language modelling, half replaced-token detection against a frozen generator.

    As an objective of its own it is the second stage, whose loss is the discriminator's.
    """

    needs = {
        "data.masking": DISTINCT,
        "generator.kind": ("model",),
        "generator.fraction": (1.0,),
        "generator.num_layers": (0,),
        "model.tying": ("none",),
    }
    lowered_losses = ("discriminator_loss",)  # the generator's stays as it is

    def check(self) -> None:
        """Each stage needs a step."""
        super().check()
        if self.config.train.steps < 2:
            raise InputError('objective.name = "two-stage" needs train.steps = 2 or more, one for each stage')

    @property
    def gen_weight(self) -> float:
        """The generator does not train beside the discriminator."""
        return 0.0

    def generator(self) -> dict[str, Network]:
        """A generator of the model's size."""
        return {role: replace(network, is_trained=False) for role, network in super().generator().items()}

    def stages(self) -> tuple[Stage, ...]:
        """The generator's and the discriminator's; of an odd number of steps the second has one more."""
        steps = self.config.train.steps
        first, name = steps // 2, "replaced-token detection against the frozen generator"
        return (
            Stage("masked language modelling", MaskedLMObjective(self.config), 0, first, frozen=PARTS["discriminator"]),
            Stage(name, self, first, steps - first, frozen=PARTS["generator"]),
        )

    def begin_stage(self, model: Electra) -> None:
        """Copies embeddings and encoder; the heads differ."""
        for ours, theirs in zip(PARTS["discriminator"][:2], PARTS["generator"][:2], strict=True):
            model.get_submodule(ours).load_state_dict(model.get_submodule(theirs).state_dict())
