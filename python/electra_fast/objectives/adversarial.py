"""`adversarial`: a generator that learns to raise the discriminator's loss, by REINFORCE (Appendix F)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from electra_fast.model.model import Electra
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import (
    MicroBatch,
    Number,
    Output,
    Predictions,
    corrupt,
    predict,
    ratio,
    read_inputs,
    rtd_loss,
)
from electra_fast.ops import operations as ops


@dataclass(frozen=True)
class AdversarialObjective(ElectraObjective):
    """gen_weight * REINFORCE of the generator + its baseline's cross-entropy + disc_weight * replaced-token detection.

    The reward of a sample is the discriminator's cross-entropy at its position, R = -log q, where q is the probability
    that the discriminator gives to the true label. (The draft's formula lacks the minus sign, with which the generator
    would help the discriminator.) The baseline -log sigmoid(w'h) predicts the reward: sigmoid(w'h) learns q by
    cross-entropy and passes no gradient to h, so the generator's only gradient is the policy's.
    """

    name = "adversarial"
    metric_totals: ClassVar[tuple[str, ...]] = (
        *ElectraObjective.metric_totals,
        "policy_loss",
        "baseline_loss",
        "reward",
    )

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Generator → sample → discriminator → reward → likelihood of the sample → loss."""
        inputs, weights = read_inputs(model, batch), self.config.objective
        slots, head, table_VE = inputs.slots, model.generator_head, model.generator_embeddings.token
        hidden_MD = slots.of_states(model.hidden("generator", inputs.masked_ids_BL.flatten(), *inputs.context))
        with torch.no_grad():
            generated = predict(model.config, head, table_VE, hidden_MD, slots, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, generated.drawn_M)
        logits_T = model.discriminator_head(model.hidden("discriminator", corrupted_T, *inputs.context))
        discriminator_loss, discriminator_totals = rtd_loss(logits_T, replaced_T, inputs.valid_T)

        reward_M = slots.of_tokens(ops.binary_cross_entropy(logits_T.detach(), replaced_T))
        baseline_M = model.baseline_head(hidden_MD.detach())
        advantage_M = reward_M - F.softplus(-baseline_M.detach())
        # Descending the samples' negative log-likelihood times their advantage ascends the expected reward.
        sampled = replace(slots, target_M=generated.drawn_M, weight_M=slots.weight_M * advantage_M)
        policy_loss = predict(model.config, head, table_VE, hidden_MD, sampled, None).loss
        cross_entropy_M = F.binary_cross_entropy_with_logits(baseline_M, torch.exp(-reward_M), reduction="none")
        baseline_loss = (cross_entropy_M * slots.weight_M).sum()

        loss = batch.mean(weights.gen_weight * policy_loss + baseline_loss, "masked_weight")
        loss = loss + batch.mean(weights.disc_weight * discriminator_loss, "tokens")
        totals = generated.totals(slots, "generator") | discriminator_totals
        totals |= {
            "policy_loss": policy_loss.detach(),
            "baseline_loss": baseline_loss.detach(),
            "reward": (reward_M * slots.weight_M).sum(),
        }
        return Output(loss, totals, Predictions(corrupted_T, replaced_T, logits_T.detach(), inputs.valid_T))

    lowered_losses: ClassVar[tuple[str, ...]] = ()

    def comparable_loss(self, metrics: Mapping[str, Number]) -> float:
        """Returns the discriminator's loss, since the policy's measures no progress."""
        return self.config.objective.disc_weight * float(metrics["discriminator_loss"] or 0)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Adds to the metrics of `electra`; the generator's cross-entropy is measured but not trained."""
        weights = self.config.objective
        policy_loss = ratio(totals, "policy_loss", "masked_weight")
        baseline_loss = ratio(totals, "baseline_loss", "masked_weight")
        found = super().metrics(totals)
        discriminator_loss = ratio(totals, "discriminator_loss", "tokens")
        return found | {
            "loss": weights.gen_weight * policy_loss + baseline_loss + weights.disc_weight * discriminator_loss,
            "policy_loss": policy_loss,
            "baseline_loss": baseline_loss,
            "reward": ratio(totals, "reward", "masked_weight"),
        }
