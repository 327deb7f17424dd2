"""`adversarial`: a generator that learns to raise the discriminator's loss, by REINFORCE (Appendix F)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from electra_fast.model.model import Electra
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import (
    Loss,
    MicroBatch,
    Number,
    Output,
    Predictions,
    corrupt,
    predict,
    ratio,
    read_inputs,
    rtd_totals,
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

    lowered_losses: ClassVar[tuple[str, ...]] = ()

    def losses(self) -> dict[str, Loss]:
        weights, answer = self.config.objective, math.log(2)
        return {
            # For uniform predictions the baseline is exactly the reward, so there is no advantage.
            "policy_loss": Loss(weights.gen_weight, "masked_weight", 0.0),
            "baseline_loss": Loss(1.0, "masked_weight", answer),
            "discriminator_loss": Loss(weights.disc_weight, "tokens", answer),
        }

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Generator → sample → discriminator → reward → likelihood of the sample → loss."""
        inputs = read_inputs(model, batch)
        slots, head, table_VE = inputs.slots, model.generator_head, model.generator_embeddings.token
        hidden_MD = slots.of_states(model.hidden("generator", inputs.masked_ids_BL.flatten(), *inputs.context))
        with torch.no_grad():
            generated = predict(model.config, head, table_VE, hidden_MD, slots, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, generated.drawn_M)
        logits_T = model.discriminator_head(model.hidden("discriminator", corrupted_T, *inputs.context))
        reward_M = slots.of_tokens(ops.binary_cross_entropy(logits_T.detach(), replaced_T))
        baseline_M = model.baseline_head(hidden_MD.detach())
        advantage_M = reward_M - F.softplus(-baseline_M.detach())
        # Descending the samples' negative log-likelihood times their advantage ascends the expected reward.
        sampled = replace(slots, target_M=generated.drawn_M, weight_M=slots.weight_M * advantage_M)
        policy = predict(model.config, head, table_VE, hidden_MD, sampled, None)
        cross_entropy_M = F.binary_cross_entropy_with_logits(baseline_M, torch.exp(-reward_M), reduction="none")
        totals = generated.totals(slots, "generator") | rtd_totals(logits_T, replaced_T, inputs.valid_T)
        totals |= {
            "policy_loss": policy.loss,
            "baseline_loss": (cross_entropy_M * slots.weight_M).sum(),
            "reward": (reward_M * slots.weight_M).sum(),
        }
        return self.output(batch, totals, Predictions(corrupted_T, replaced_T, logits_T.detach(), inputs.valid_T))

    def comparable_loss(self, metrics: Mapping[str, Number]) -> float:
        """The discriminator's loss, since the policy's measures no progress."""
        return self.config.objective.disc_weight * float(metrics["discriminator_loss"] or 0)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """As of `electra`, and the mean reward; the generator's cross-entropy is measured but not trained."""
        return super().metrics(totals) | {"reward": ratio(totals, "reward", "masked_weight")}
