"""`replace-mlm`: masked language modeling with a generator's samples in place of [MASK] (section 3.5)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from electra_fast.model.model import Electra
from electra_fast.objectives.electra import GeneratorObjective
from electra_fast.objectives.objective import (
    Loss,
    MicroBatch,
    Number,
    Output,
    corrupt,
    generate,
    predict,
    ratio,
    read_inputs,
    report,
)


@dataclass(frozen=True)
class ReplaceMLMObjective(GeneratorObjective):
    """gen_weight * masked language modeling of the generator + encoder_weight * the same of the encoder.

    The full-size encoder reads the corrupted text and predicts the original tokens at all masked positions, including
    those where the sample is correct. No gradient flows to the generator through the samples.
    """

    name = "replace-mlm"
    metric_totals: ClassVar[tuple[str, ...]] = (
        *("generator_loss", "masked_weight", "generator_correct"),
        *("encoder_loss", "encoder_correct", "replaced", "tokens"),
    )

    def losses(self) -> dict[str, Loss]:
        vocabulary = math.log(self.config.model.vocab_size)
        return super().losses() | {
            "encoder_loss": Loss(self.config.objective.encoder_weight, "masked_weight", vocabulary)
        }

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Generator → sample → encoder → loss."""
        inputs = read_inputs(model, batch)
        generated = generate(model, inputs, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, generated.drawn_M)
        hidden_MD = inputs.slots.of_states(model.hidden("encoder", corrupted_T, *inputs.context))
        head, table_VE = model.encoder_head, model.embeddings.token
        predicted = predict(model.config, head, table_VE, hidden_MD, inputs.slots, None)
        totals = generated.totals(inputs.slots, "generator") | predicted.totals(inputs.slots, "encoder")
        return self.output(batch, totals | {"replaced": replaced_T.sum(), "tokens": inputs.valid_T.sum()})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Losses in nats per token of the loss, and accuracies at the masked positions."""
        return report(
            {
                **self.loss_metrics(totals),
                **self.generator_metrics(totals),
                "encoder_accuracy": ratio(totals, "encoder_correct", "masked_weight"),
                "replaced_fraction": ratio(totals, "replaced", "tokens"),
            }
        )

    def describe(self, role: str) -> tuple[str, str]:
        if role == "encoder":
            summary = "A text encoder pre-trained to predict the original tokens of text that a generator corrupted."
            return "Masked language model of corrupted text", summary
        return "Generator", "The small masked language model whose samples a text encoder was trained on."
