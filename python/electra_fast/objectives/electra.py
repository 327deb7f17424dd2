"""`electra`: replaced-token detection. A small generator fills the masks; the discriminator finds its changes.

Shapes: B rows, L row length, T = B*L flat tokens, M masked slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from electra_fast.model.model import Electra
from electra_fast.model.networks import Network, corrective_weight
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import (
    MicroBatch,
    NetworkInputs,
    Number,
    Objective,
    Output,
    Predictions,
    RngKey,
    Stage,
    Totals,
    corrupt,
    generate,
    predict,
    random_words,
    ratio,
    read_inputs,
    report,
    rtd_loss,
)
from electra_fast.ops import operations as ops

_WHOLE = 0.2  # the probability that a segment is left unchanged under a contrastive weight
_STREAM = 4


@dataclass(frozen=True)
class GeneratorObjective(Objective):
    """An objective that has a generator, a smaller network or a fixed distribution, besides its result."""

    @property
    def gen_weight(self) -> float:
        """Weight of the generator's loss."""
        return self.config.objective.gen_weight

    def generator_metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns loss in nats per masked token, and accuracy; None for a fixed distribution."""
        is_network = self.config.generator.kind == "model"
        names = {"generator_loss": "generator_loss", "generator_accuracy": "generator_correct"}
        return {name: ratio(totals, total, "masked_weight") if is_network else None for name, total in names.items()}

    def generator_loss(self, totals: Mapping[str, float]) -> float:
        """Returns the generator's part of the loss."""
        return self.gen_weight * ratio(totals, "generator_loss", "masked_weight")


@dataclass(frozen=True)
class GeneratorAloneObjective(MaskedLMObjective):
    """Masked language modeling of the generator, before its discriminator trains with it."""

    def networks(self) -> dict[str, Network]:
        """Returns the generator."""
        return {"generator": ElectraObjective(self.config).networks()["generator"]}


@dataclass(frozen=True)
class ElectraObjective(GeneratorObjective):
    """gen_weight * masked language modeling of the generator + disc_weight * replaced-token detection.

    No gradient flows from the discriminator to the generator through the samples. With a corrective weight, the
    discriminator also predicts the original tokens at the masked positions of the corrupted text, through a head of its
    own and its embedding table (after the corrective language modeling of COCO-LM, arXiv 2102.08473, which has a loss
    over all tokens and a copy mechanism). With a contrastive weight, a fifth of the segments stay unchanged, and a head
    on [CLS] recognizes them (Appendix H).

    With `generator_first`, the generator trains alone in so many steps, a stage with a learning-rate schedule of its
    own, as is the rest. Nothing of the discriminator moves meanwhile, and so neither do shared embeddings: it is the
    large first gradients of a new generator that they have to be protected from.
    """

    name = "electra"
    metric_totals: ClassVar[tuple[str, ...]] = (
        "generator_loss",
        "masked_weight",
        "generator_correct",
        "discriminator_loss",
        "tokens",
        "discriminator_correct",
        "true_positives",
        "predicted_positives",
        "replaced",
        "corrective_loss",
        "corrective_correct",
        "contrastive_loss",
        "segments",
        "contrastive_correct",
    )
    denominator: ClassVar[str] = "tokens"
    """The total that counts the tokens of the discriminator's loss."""

    def stages(self) -> tuple[Stage, ...]:
        """Returns one stage, or two with `generator_first`."""
        first, steps = self.config.objective.generator_first, self.config.train.steps
        if not first:
            return super().stages()
        frozen = ("embeddings", "discriminator", *self.networks()["discriminator"].heads)
        return (
            Stage("masked language modeling", GeneratorAloneObjective(self.config), 0, first, frozen),
            Stage("replaced-token detection", self, first, steps - first),
        )

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Adds the number of segments if they have a loss."""
        found = super().loss_denominators(batch)
        if self.config.objective.contrastive_weight:
            found["segments"] = ((batch["position_ids"] == 0) & (batch["segment_ids"] > 0)).sum().double()
        return found

    def counted(self, inputs: NetworkInputs, rng_key: RngKey) -> Tensor:
        """Returns the mask of the discriminator's loss: all tokens except padding; bool [T]."""
        return inputs.valid_T

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Generator → sample → discriminator → loss."""
        weights = self.config.objective
        inputs = read_inputs(model, batch)
        generated = generate(model, inputs, batch.rng_key)
        sample_M = generated.drawn_M
        if weights.contrastive_weight:
            sample_M = keep_some_whole(inputs, sample_M, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, sample_M)
        hidden_TD = model.hidden("discriminator", corrupted_T, *inputs.context)
        logits_T = model.discriminator_head(hidden_TD)
        counted_T = self.counted(inputs, batch.rng_key)
        discriminator_loss, discriminator_totals = rtd_loss(logits_T, replaced_T, counted_T)

        loss = batch.mean(self.gen_weight * generated.loss, "masked_weight")
        loss = loss + batch.mean(weights.disc_weight * discriminator_loss, self.denominator)
        totals = generated.totals(inputs.slots, "generator") | discriminator_totals
        if "corrective_head" in model.networks["discriminator"].heads:
            head, table_VE = model.corrective_head, model.embeddings.token
            hidden_MD = inputs.slots.of_states(hidden_TD)
            corrected = predict(model.config, head, table_VE, hidden_MD, inputs.slots, None)
            loss = loss + batch.mean(weights.corrective_weight * corrected.loss, "masked_weight")
            totals |= corrected.totals(inputs.slots, "corrective")
        if weights.contrastive_weight:
            contrastive_loss, sentence_totals = sentence_loss(model, inputs, hidden_TD, replaced_T)
            loss = loss + batch.mean(weights.contrastive_weight * contrastive_loss, "segments")
            totals |= sentence_totals
        if self.denominator != "tokens":
            totals["tokens"] = inputs.valid_T.sum()
        return Output(loss, totals, Predictions(corrupted_T, replaced_T, logits_T.detach(), counted_T))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns losses in nats per masked token and per token, accuracies, precision and recall of "replaced".

        The discriminator's metrics cover the tokens of its loss.
        """
        weights = self.config.objective
        discriminator_loss = ratio(totals, "discriminator_loss", self.denominator)
        loss = self.generator_loss(totals) + weights.disc_weight * discriminator_loss
        found: dict[str, Number] = {
            **self.generator_metrics(totals),
            "discriminator_loss": discriminator_loss,
            **detection_metrics(totals, self.denominator),
        }
        if corrective_weight(self.config):
            corrective_loss = ratio(totals, "corrective_loss", "masked_weight")
            loss += corrective_weight(self.config) * corrective_loss
            found["corrective_loss"] = corrective_loss
            found["corrective_accuracy"] = ratio(totals, "corrective_correct", "masked_weight")
        if weights.contrastive_weight:
            contrastive_loss = ratio(totals, "contrastive_loss", "segments")
            loss += weights.contrastive_weight * contrastive_loss
            found["contrastive_loss"] = contrastive_loss
            found["contrastive_accuracy"] = ratio(totals, "contrastive_correct", "segments")
        return report(found | {"loss": loss})

    def describe(self, role: str) -> tuple[str, str]:
        """Returns the text for a role."""
        if role == "discriminator":
            summary = "A text encoder pre-trained to tell which tokens of its input a generator replaced."
        else:
            summary = "The small masked language model whose samples an ELECTRA discriminator was trained on."
        return f"ELECTRA {role}", summary


def detection_metrics(totals: Mapping[str, float], denominator: str) -> dict[str, Number]:
    """Returns accuracy, precision and recall of "replaced" over the tokens of `denominator`, and their fraction."""
    return {
        "discriminator_accuracy": ratio(totals, "discriminator_correct", denominator),
        "discriminator_precision": ratio(totals, "true_positives", "predicted_positives"),
        "discriminator_recall": ratio(totals, "true_positives", "replaced"),
        "replaced_fraction": ratio(totals, "replaced", denominator),
    }


# The sentence-level contrastive loss of the paper's Appendix H, which detects changed segments.


def keep_some_whole(inputs: NetworkInputs, sample_M: Tensor, rng_key: RngKey) -> Tensor:
    """Replaces the samples by the original tokens in a fifth of the attention segments; int64 [M].

    The choice depends on seed, step, row within the step and the column of the segment's first token.
    """
    is_whole_T = (random_words(rng_key, _first_column(inputs), _STREAM) < round(_WHOLE * 2**32)).flatten()
    return torch.where(inputs.slots.of_tokens(is_whole_T), inputs.slots.target_M, sample_M)


def sentence_loss(
    model: Electra, inputs: NetworkInputs, hidden_TD: Tensor, replaced_T: Tensor
) -> tuple[Tensor, Totals]:
    """Sums the binary cross-entropy of `sentence_head` over all [CLS]; positive: a token of the segment is replaced."""
    first_BL = _first_column(inputs)
    num_rows, length = first_BL.shape
    first_T = (first_BL + torch.arange(num_rows, device=first_BL.device)[:, None] * length).flatten()
    has_replaced_T = torch.zeros_like(first_T).index_add(0, first_T, replaced_T.long()) > 0
    is_cls_T = (inputs.context[0] == 0) & inputs.valid_T
    logits_T = model.sentence_head(hidden_TD)
    loss = (ops.binary_cross_entropy(logits_T, has_replaced_T) * is_cls_T).sum()
    return loss, {
        "contrastive_loss": loss.detach(),
        "segments": is_cls_T.sum(),
        "contrastive_correct": (((logits_T.detach() > 0) == has_replaced_T) & is_cls_T).sum(),
    }


def _first_column(inputs: NetworkInputs) -> Tensor:
    """Returns the column of each token's [CLS], from which its position counts; int64 [B, L]."""
    positions_BL = inputs.context[0].view(inputs.masked_ids_BL.shape).long()
    return torch.arange(positions_BL.shape[1], device=positions_BL.device) - positions_BL
