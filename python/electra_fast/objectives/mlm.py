"""Masked language modeling: `mlm`, the BERT baseline, and section 3.5's `replace-mlm` and `all-tokens-mlm`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from electra_fast.model.model import Electra
from electra_fast.objectives.objective import (
    GeneratorObjective,
    Loss,
    MicroBatch,
    Number,
    Objective,
    Output,
    Predictions,
    corrupt,
    detection_metrics,
    generate,
    predict,
    ratio,
    read_inputs,
    report,
    rtd_totals,
)
from electra_fast.ops.vocabulary_nll import vocabulary_nll


@dataclass(frozen=True)
class MaskedLMObjective(Objective):
    """gen_weight * cross-entropy of the masked tokens; the only encoder has the role "generator"."""

    name = "mlm"
    metric_totals = ("generator_loss", "masked_weight", "generator_correct", "tokens")

    def losses(self) -> dict[str, Loss]:
        weight = self.config.objective.gen_weight
        uniform = math.log(self.config.model.vocab_size)
        return {"generator_loss": Loss(weight, "masked_weight", uniform)}

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        inputs = read_inputs(model, batch)
        totals = generate(model, inputs, None).totals(inputs.slots, "generator")
        return self.output(batch, totals | {"tokens": inputs.valid_T.sum()})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        accuracy = ratio(totals, "generator_correct", "masked_weight")
        return report({**self.loss_metrics(totals), "generator_accuracy": accuracy})

    def describe(self, role: str) -> tuple[str, str]:
        return "Masked language model", "A text encoder pre-trained by masked language modeling."


@dataclass(frozen=True)
class ReplaceMLMObjective(GeneratorObjective):
    """gen_weight * masked language modeling with the generator + encoder_weight * the same with the encoder.

    The full-size encoder reads the corrupted text and predicts the original tokens at all masked positions, including
    positions with a correct sample. No gradient flows to the generator through the samples.
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
        inputs = read_inputs(model, batch)
        generated = generate(model, inputs, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, generated.drawn_M)
        hidden_MD = model.hidden("encoder", corrupted_T, *inputs.context, slots=inputs.slots.places)
        head = model.encoder_head
        table_VE = model.embeddings.table
        predicted = predict(model.config, head, table_VE, hidden_MD, inputs.slots, None)
        totals = generated.totals(inputs.slots, "generator") | predicted.totals(inputs.slots, "encoder")
        return self.output(batch, totals | {"replaced": replaced_T.sum(), "tokens": inputs.valid_T.sum()})

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns losses in nats per token of each loss, and accuracies at the masked positions."""
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
            return "Masked language model for corrupted text", summary
        return "Generator", "The small masked language model whose samples trained a text encoder."


@dataclass(frozen=True)
class AllTokensMLMObjective(ReplaceMLMObjective):
    """`replace-mlm` with the encoder's loss over all tokens: the mean of -log(D [x = input] + (1 - D) softmax(x)).

    D = sigmoid(c) is the probability of copying the input, so -c detects replaced tokens. Its accuracy, precision,
    recall and AUC are reported as a discriminator's.
    """

    name = "all-tokens-mlm"
    metric_totals: ClassVar[tuple[str, ...]] = (
        *ReplaceMLMObjective.metric_totals,
        *("discriminator_correct", "true_positives", "predicted_positives"),
    )

    def losses(self) -> dict[str, Loss]:
        # A mean over all tokens; only masked tokens need a prediction over the vocabulary.
        uniform = math.log(2) + self.config.data.mask_prob * math.log(self.config.model.vocab_size)
        return super().losses() | {"encoder_loss": Loss(self.config.objective.encoder_weight, "tokens", uniform)}

    def describe(self, role: str) -> tuple[str, str]:
        title, summary = super().describe(role)
        copies = " Its logits are the softmax's; the head that decides whether to copy a token is not exported."
        return title, summary + (copies if role == "encoder" else "")

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        inputs = read_inputs(model, batch)
        generated = generate(model, inputs, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, generated.drawn_M)
        original_T, _ = corrupt(inputs, inputs.slots.target_M)
        hidden_TD = model.hidden("encoder", corrupted_T, *inputs.context)
        head = model.encoder_head
        copy_T = model.copy_head(hidden_TD)
        x_TE = head.transform(hidden_TD)
        table_VE = model.embeddings.table
        nll_T, is_argmax_T = vocabulary_nll(x_TE, table_VE, head.output_bias, original_T.long())
        by_softmax_T = F.logsigmoid(-copy_T) - nll_T
        either_T = torch.logaddexp(F.logsigmoid(copy_T), by_softmax_T)
        copy_totals = rtd_totals(-copy_T.detach(), replaced_T, inputs.valid_T)
        del copy_totals["discriminator_loss"]  # D is only a part of the predicted probability
        totals = generated.totals(inputs.slots, "generator") | copy_totals
        totals |= {
            "encoder_loss": -(torch.where(replaced_T, by_softmax_T, either_T) * inputs.valid_T).sum(),
            "encoder_correct": (inputs.slots.of_tokens(is_argmax_T) * inputs.slots.weight_M).sum(),
        }
        return self.output(batch, totals, Predictions(corrupted_T, replaced_T, -copy_T.detach(), inputs.valid_T))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns also the encoder's loss in nats per token, and the softmax's accuracy at the masked positions."""
        return super().metrics(totals) | detection_metrics(totals, "tokens")
