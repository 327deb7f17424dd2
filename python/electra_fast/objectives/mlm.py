"""`mlm`: masked language modeling of one full-size encoder, the BERT baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from electra_fast.model.model import Electra
from electra_fast.objectives.objective import (
    Loss,
    MicroBatch,
    Number,
    Objective,
    Output,
    generate,
    ratio,
    read_inputs,
    report,
)


@dataclass(frozen=True)
class MaskedLMObjective(Objective):
    """gen_weight * cross-entropy of the masked tokens; the one encoder has the role of the generator."""

    name = "mlm"
    metric_totals = ("generator_loss", "masked_weight", "generator_correct", "tokens")

    def losses(self) -> dict[str, Loss]:
        weight, uniform = self.config.objective.gen_weight, math.log(self.config.model.vocab_size)
        return {"generator_loss": Loss(weight, "masked_weight", uniform)}

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Encoder → loss."""
        inputs = read_inputs(model, batch)
        totals = generate(model, inputs, None).totals(inputs.slots, "generator")
        return self.output(batch, totals | {"tokens": inputs.valid_T.sum()})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Loss in nats per masked token, and accuracy."""
        accuracy = ratio(totals, "generator_correct", "masked_weight")
        return report({**self.loss_metrics(totals), "generator_accuracy": accuracy})

    def describe(self, role: str) -> tuple[str, str]:
        return "Masked language model", "A text encoder pre-trained by masked language modeling."
