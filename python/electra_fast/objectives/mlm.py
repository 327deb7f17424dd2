"""`mlm`: masked language modelling of one full-size encoder, the BERT baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from electra_fast.objectives.objective import Head, Network, Number, Objective, Output, ratio, report

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.compute import ComputeConfig, RngKey
    from electra_fast.model import Electra


@dataclass(frozen=True)
class MaskedLMObjective(Objective):
    """gen_weight * cross-entropy of the masked tokens; the one encoder has the role of the generator."""

    roles = ("generator",)
    metric_totals = ("generator_loss", "masked_weight", "generator_correct", "tokens")
    needs = {"generator.kind": ("model",)}

    def networks(self) -> dict[str, Network]:
        """The model itself."""
        head = Head("masked_lm", self.config.data.mask_prob)
        return {"generator": Network(self.config.model, {"generator_head": head})}

    def forward(
        self,
        model: Electra,
        batch: Mapping[str, Tensor],
        compute: ComputeConfig,
        rng_key: RngKey,
        denominators: Mapping[str, Tensor],
    ) -> Output:
        """Encoder → loss."""
        from electra_fast.objectives import losses

        inputs = losses.read_inputs(model, batch, compute, rng_key)
        generated = losses.generate(model, inputs, None)
        loss = losses.divide(self.config.objective.gen_weight * generated.loss, denominators, "masked_weight")
        return Output(loss, generated.totals(inputs.slots, "generator") | {"tokens": inputs.valid_T.sum()})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Loss in nats per masked token, and accuracy."""
        generator_loss = ratio(totals, "generator_loss", "masked_weight")
        return report(
            {
                "loss": self.config.objective.gen_weight * generator_loss,
                "generator_loss": generator_loss,
                "generator_accuracy": ratio(totals, "generator_correct", "masked_weight"),
            }
        )

    def describe(self, role: str) -> tuple[str, str]:
        """Of the one encoder."""
        return "Masked language model", "A text encoder pre-trained by masked language modelling."
