"""`electra`: replaced-token detection. A small generator fills the masks, the discriminator finds what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from electra_fast.objectives.generator import GeneratorObjective, detection_metrics
from electra_fast.objectives.objective import Head, Network, Number, Output, Predictions, ratio, report

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.compute import ComputeConfig, RngKey
    from electra_fast.model import Electra
    from electra_fast.objectives.losses import Inputs


@dataclass(frozen=True)
class ElectraObjective(GeneratorObjective):
    """gen_weight * masked language modelling of the generator + disc_weight * replaced-token detection.

    No gradient flows from the discriminator to the generator through the samples. With a corrective weight, the
    discriminator also predicts the original tokens at the masked positions of the corrupted text, through a head of its
    own and its embedding table (after the corrective language modelling of COCO-LM, arXiv 2102.08473, which has a loss
    over all tokens and a copy mechanism). With a contrastive weight, a fifth of the segments stay whole, and a head on
    [CLS] tells them (`contrastive`).
    """

    roles = ("generator", "discriminator")
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

    @property
    def corrective_weight(self) -> float:
        """Weight of the corrective loss, which the variants of `electra` do not have."""
        objective = self.config.objective
        return objective.corrective_weight if objective.name == "electra" else 0.0

    def networks(self) -> dict[str, Network]:
        """A generator that is a fraction of the model, or none for a fixed distribution; the model as discriminator."""
        config = self.config
        heads = {"discriminator_head": Head("replaced_token")}
        if self.corrective_weight:
            heads["corrective_head"] = Head("masked_lm", config.data.mask_prob)
        if config.objective.contrastive_weight:
            heads["sentence_head"] = Head("logit")
        return self.generator() | {"discriminator": Network(config.model, heads)}

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weight of the masked slots and the number of tokens; of segments where they have a loss."""
        found = super().loss_denominators(batch)
        if self.config.objective.contrastive_weight:
            found["segments"] = ((batch["position_ids"] == 0) & (batch["segment_ids"] > 0)).sum().double()
        return found

    def counted(self, inputs: Inputs, rng_key: RngKey) -> Tensor:
        """The tokens of the discriminator's loss, bool [T]: all that are not padding."""
        return inputs.valid_T

    def forward(
        self,
        model: Electra,
        batch: Mapping[str, Tensor],
        compute: ComputeConfig,
        rng_key: RngKey,
        denominators: Mapping[str, Tensor],
    ) -> Output:
        """Generator → sample → discriminator → loss."""
        from electra_fast.objectives import contrastive, losses

        weights = self.config.objective
        inputs = losses.read_inputs(model, batch, compute, rng_key)
        generated = losses.generate(model, inputs, rng_key)
        sample_M = generated.drawn_M
        if weights.contrastive_weight:
            sample_M = contrastive.keep_some_whole(inputs, sample_M, rng_key)
        corrupted_T, replaced_T = losses.corrupt(inputs, sample_M)
        hidden_TD = model.hidden("discriminator", corrupted_T, *inputs.context)
        logits_T = model.discriminator_head(hidden_TD)
        counted_T = self.counted(inputs, rng_key)
        discriminator_loss, discriminator_totals = losses.rtd_loss(logits_T, replaced_T, counted_T)

        loss = losses.divide(self.gen_weight * generated.loss, denominators, "masked_weight")
        loss = loss + losses.divide(weights.disc_weight * discriminator_loss, denominators, self.denominator)
        totals = generated.totals(inputs.slots, "generator") | discriminator_totals
        if self.corrective_weight:
            head, table_VE = model.corrective_head, model.embeddings.token
            hidden_MD = inputs.slots.of_states(hidden_TD)
            corrected = losses.predict(model.config, head, table_VE, hidden_MD, inputs.slots, None)
            loss = loss + losses.divide(self.corrective_weight * corrected.loss, denominators, "masked_weight")
            totals |= corrected.totals(inputs.slots, "corrective")
        if weights.contrastive_weight:
            sentence_loss, sentence_totals = contrastive.sentence_loss(model, inputs, hidden_TD, replaced_T)
            loss = loss + losses.divide(weights.contrastive_weight * sentence_loss, denominators, "segments")
            totals |= sentence_totals
        if self.denominator != "tokens":
            totals["tokens"] = inputs.valid_T.sum()
        return Output(loss, totals, Predictions(corrupted_T, replaced_T, logits_T.detach(), counted_T))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Losses in nats per masked token and per token, accuracies, precision and recall of "replaced".

        The discriminator's are over the tokens that its loss is over.
        """
        weights = self.config.objective
        discriminator_loss = ratio(totals, "discriminator_loss", self.denominator)
        loss = self.generator_loss(totals) + weights.disc_weight * discriminator_loss
        found: dict[str, Number] = {
            **self.generator_metrics(totals),
            "discriminator_loss": discriminator_loss,
            **detection_metrics(totals, self.denominator),
        }
        if self.corrective_weight:
            corrective_loss = ratio(totals, "corrective_loss", "masked_weight")
            loss += self.corrective_weight * corrective_loss
            found["corrective_loss"] = corrective_loss
            found["corrective_accuracy"] = ratio(totals, "corrective_correct", "masked_weight")
        if weights.contrastive_weight:
            contrastive_loss = ratio(totals, "contrastive_loss", "segments")
            loss += weights.contrastive_weight * contrastive_loss
            found["contrastive_loss"] = contrastive_loss
            found["contrastive_accuracy"] = ratio(totals, "contrastive_correct", "segments")
        return report(found | {"loss": loss})

    def describe(self, role: str) -> tuple[str, str]:
        """By role."""
        if role == "discriminator":
            summary = "A text encoder pre-trained to tell which tokens of its input a generator replaced."
        else:
            summary = "The small masked language model whose samples an ELECTRA discriminator was trained on."
        return f"ELECTRA {role}", summary
