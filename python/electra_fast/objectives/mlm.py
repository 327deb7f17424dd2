"""`mlm`: masked language modeling of one full-size encoder, the BERT baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from electra_fast.model.model import Electra
from electra_fast.objectives.objective import (
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

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Encoder → loss."""
        inputs = read_inputs(model, batch)
        generated = generate(model, inputs, None)
        loss = batch.mean(self.config.objective.gen_weight * generated.loss, "masked_weight")
        return Output(loss, generated.totals(inputs.slots, "generator") | {"tokens": inputs.valid_T.sum()})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns loss in nats per masked token, and accuracy."""
        generator_loss = ratio(totals, "generator_loss", "masked_weight")
        return report(
            {
                "loss": self.config.objective.gen_weight * generator_loss,
                "generator_loss": generator_loss,
                "generator_accuracy": ratio(totals, "generator_correct", "masked_weight"),
            }
        )

    def describe(self, role: str) -> tuple[str, str]:
        """Returns the text for the encoder."""
        return "Masked language model", "A text encoder pre-trained by masked language modeling."
