"""`electra` and its variants: a generator fills the masks, and a discriminator detects the replaced tokens.

Shapes: B rows, L row length, T = B*L flat tokens, M masked slots, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.model.model import Electra
from electra_fast.model.networks import PARTS, Network
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import (
    GeneratorObjective,
    Loss,
    MicroBatch,
    NetworkInputs,
    Number,
    Output,
    Predictions,
    RngKey,
    Stage,
    Totals,
    corrupt,
    detection_metrics,
    generate,
    predict,
    random_words,
    ratio,
    read_inputs,
    report,
    rtd_totals,
)
from electra_fast.ops import operations as ops
from electra_fast.ops.branches import on_branch

_UNCHANGED_PROBABILITY = 0.2  # probability that a segment stays unchanged under a contrastive weight
# Streams of `random_words`.
_SEGMENTS_STREAM = 4
_TOKENS_STREAM = 3


@dataclass(frozen=True)
class GeneratorAloneObjective(MaskedLMObjective):
    """Masked language modeling with the generator, before the joint training with its discriminator."""

    def networks(self) -> dict[str, Network]:
        return {"generator": ElectraObjective(self.config).networks()["generator"]}


@dataclass(frozen=True)
class ElectraObjective(GeneratorObjective):
    """gen_weight * masked language modeling with the generator + disc_weight * replaced-token detection.

    No gradient flows from the discriminator to the generator through the samples. With a corrective weight, the
    discriminator also predicts the original tokens at the masked positions of the corrupted text, through a separate
    head and its embedding table (after the corrective language modeling of COCO-LM, arXiv 2102.08473, which has a loss
    over all tokens and a copy mechanism). With a contrastive weight, a fifth of the segments stay unchanged, and a head
    on [CLS] recognizes them (Appendix H).

    `generator_first` is the number of steps in which the generator trains alone; both stages have separate
    learning-rate schedules. Meanwhile the discriminator, including shared embeddings, stays fixed, since the first
    gradients of a new generator are large and would damage it.
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
    """The name of the total with the number of tokens in the discriminator's loss."""

    def losses(self) -> dict[str, Loss]:
        weights = self.config.objective
        answer = math.log(2)
        losses = super().losses() | {"discriminator_loss": Loss(weights.disc_weight, self.denominator, answer)}
        if weights.corrective_weight and "corrective_head" in OBJECTIVE_SPECS[self.name].networks["discriminator"]:
            vocabulary = math.log(self.config.model.vocab_size)
            losses["corrective_loss"] = Loss(weights.corrective_weight, "masked_weight", vocabulary)
        if weights.contrastive_weight:
            losses["contrastive_loss"] = Loss(weights.contrastive_weight, "segments", answer)
        return losses

    def stages(self) -> tuple[Stage, ...]:
        first = self.config.objective.generator_first
        steps = self.config.train.steps
        if not first:
            return super().stages()
        frozen = ("embeddings", "discriminator", *self.networks()["discriminator"].heads)
        return (
            Stage("masked language modeling", GeneratorAloneObjective(self.config), 0, first, frozen),
            Stage("replaced-token detection", self, first, steps - first),
        )

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the base class's denominators, and the number of segments if they have a loss."""
        denominators = super().loss_denominators(batch)
        if self.config.objective.contrastive_weight:
            denominators["segments"] = ((batch["position_ids"] == 0) & (batch["segment_ids"] > 0)).sum().double()
        return denominators

    def counted(self, inputs: NetworkInputs, rng_key: RngKey) -> Tensor:
        """Returns the tokens in the discriminator's loss: all except padding; bool [T]."""
        return inputs.valid_T

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Runs the generator, its samples, the discriminator and the losses."""
        weights = self.config.objective
        inputs = read_inputs(model, batch)
        # Its backward pass runs in parallel with the discriminator's.
        generated = on_branch(generate, model, inputs, batch.rng_key)
        sample_M = generated.drawn_M
        if weights.contrastive_weight:
            sample_M = restore_some_segments(inputs, sample_M, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, sample_M)
        hidden_TD = model.hidden("discriminator", corrupted_T, *inputs.context)
        logits_T = model.discriminator_head(hidden_TD, inputs.context[0])
        counted_T = self.counted(inputs, batch.rng_key)
        totals = generated.totals(inputs.slots, "generator") | rtd_totals(logits_T, replaced_T, counted_T)
        if "corrective_loss" in self.losses():
            head = model.corrective_head
            table_VE = model.embeddings.table
            hidden_MD = inputs.slots.of_states(hidden_TD)
            corrected = predict(model.config, head, table_VE, hidden_MD, inputs.slots, None)
            totals |= corrected.totals(inputs.slots, "corrective")
        if weights.contrastive_weight:
            totals |= sentence_totals(model, inputs, hidden_TD, replaced_T)
        if self.denominator != "tokens":
            totals["tokens"] = inputs.valid_T.sum()
        return self.output(batch, totals, Predictions(corrupted_T, replaced_T, logits_T.detach(), counted_T))

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns losses in nats per masked token and per token, accuracies, precision and recall of "replaced".

        The discriminator's metrics cover the tokens in its loss.
        """
        metrics = {
            **self.loss_metrics(totals),
            **self.generator_metrics(totals),
            **detection_metrics(totals, self.denominator),
        }
        for name, denominator in (("corrective", "masked_weight"), ("contrastive", "segments")):
            if f"{name}_loss" in metrics:
                metrics[f"{name}_accuracy"] = ratio(totals, f"{name}_correct", denominator)
        return report(metrics)

    def describe(self, role: str) -> tuple[str, str]:
        if role == "discriminator":
            summary = "A text encoder pre-trained to detect the tokens of its input that a generator replaced."
        else:
            summary = "The small masked language model whose samples trained an ELECTRA discriminator."
        return f"ELECTRA {role}", summary


# The sentence-level contrastive loss in Appendix H of the paper, which detects changed segments.


def restore_some_segments(inputs: NetworkInputs, sample_M: Tensor, rng_key: RngKey) -> Tensor:
    """Returns the samples, with the original tokens in a fifth of the attention segments; int64 [M].

    The choice depends on seed, step, row within the step and the column of the segment's first token.
    """
    is_unchanged_T = (
        random_words(rng_key, _first_column(inputs), _SEGMENTS_STREAM) < round(_UNCHANGED_PROBABILITY * 2**32)
    ).flatten()
    return torch.where(inputs.slots.of_tokens(is_unchanged_T), inputs.slots.target_M, sample_M)


def sentence_totals(model: Electra, inputs: NetworkInputs, hidden_TD: Tensor, replaced_T: Tensor) -> Totals:
    """Sums the binary cross-entropy of `sentence_head` over all [CLS]; positive: a token of the segment is replaced."""
    first_BL = _first_column(inputs)
    num_rows, length = first_BL.shape
    first_T = (first_BL + torch.arange(num_rows, device=first_BL.device)[:, None] * length).flatten()
    has_replaced_T = torch.zeros_like(first_T).index_add(0, first_T, replaced_T.long()) > 0
    is_cls_T = (inputs.context[0] == 0) & inputs.valid_T
    logits_T = model.sentence_head(hidden_TD)
    return {
        "contrastive_loss": (ops.binary_cross_entropy(logits_T, has_replaced_T) * is_cls_T).sum(),
        "segments": is_cls_T.sum(),
        "contrastive_correct": (((logits_T.detach() > 0) == has_replaced_T) & is_cls_T).sum(),
    }


def _first_column(inputs: NetworkInputs) -> Tensor:
    """Returns the column of each token's [CLS], where its positions start; int64 [B, L]."""
    positions_BL = inputs.context[0].view(inputs.masked_ids_BL.shape).long()
    return torch.arange(positions_BL.shape[1], device=positions_BL.device) - positions_BL


@dataclass(frozen=True)
class Electra15Objective(ElectraObjective):
    """`electra` with the discriminator's loss over only as many tokens of each row as are masked.

    `objective.disc_positions` selects the masked tokens, or tokens sampled independently of the mask. (All unmasked
    tokens are original, so samples of these alone would be useless.)
    """

    name = "electra15"
    denominator = "masked_weight"

    def counted(self, inputs: NetworkInputs, rng_key: RngKey) -> Tensor:
        ids_BL = inputs.masked_ids_BL
        slots = inputs.slots
        masked_T = torch.zeros(ids_BL.numel() + 1, dtype=torch.bool, device=ids_BL.device)
        masked_T = masked_T.scatter(0, slots.position_M, slots.weight_M > 0)[:-1]
        if self.config.objective.disc_positions == "masked":
            return masked_T
        column_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(ids_BL.shape)
        words_BL = random_words(rng_key, column_BL, _TOKENS_STREAM)
        words_BL = torch.where(inputs.valid_T.view(ids_BL.shape), words_BL, 2**32)  # sorted after every valid token
        rank_BL = words_BL.argsort(dim=1, stable=True).argsort(dim=1)
        return (rank_BL < masked_T.view(ids_BL.shape).sum(1, keepdim=True)).flatten()


@dataclass(frozen=True)
class TwoStageObjective(ElectraObjective):
    """Masked language modeling for half of the steps, then replaced-token detection against the frozen generator.

    This class is the objective of the second stage, with only the discriminator's loss.
    """

    name = "two-stage"
    lowered_losses = ("discriminator_loss",)  # the generator's stays constant

    @property
    def gen_weight(self) -> float:
        """0: the generator does not train together with the discriminator."""
        return 0.0

    def stages(self) -> tuple[Stage, ...]:
        """Returns the generator's stage and the discriminator's, which gets the extra step of an odd number."""
        steps = self.config.train.steps
        first = steps // 2
        name = "replaced-token detection against the frozen generator"
        return (
            Stage("masked language modeling", MaskedLMObjective(self.config), 0, first, frozen=PARTS["discriminator"]),
            Stage(name, self, first, steps - first, frozen=PARTS["generator"]),
        )

    def begin_stage(self, model: Electra) -> None:
        """Copies embeddings and encoder from the generator to the discriminator; the heads differ."""
        for ours, theirs in zip(PARTS["discriminator"][:2], PARTS["generator"][:2], strict=True):
            model.get_submodule(ours).load_state_dict(model.get_submodule(theirs).state_dict())


@dataclass(frozen=True)
class AdversarialObjective(ElectraObjective):
    """gen_weight * REINFORCE for the generator + its baseline's cross-entropy + disc_weight * replaced-token detection.

    The reward of a sample is the discriminator's cross-entropy at its position, R = -log q, where q is the probability
    that the discriminator assigns to the true label. (The draft's formula lacks the minus sign; the generator would
    then help the discriminator.) The baseline -log sigmoid(w'h) predicts the reward: sigmoid(w'h) learns q with a
    cross-entropy loss and passes no gradient to h, so the generator's only gradient is the policy's.
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
        weights = self.config.objective
        answer = math.log(2)
        return {
            # For uniform predictions, the baseline equals the reward, so the advantage is 0.
            "policy_loss": Loss(weights.gen_weight, "masked_weight", 0.0),
            "baseline_loss": Loss(1.0, "masked_weight", answer),
            "discriminator_loss": Loss(weights.disc_weight, "tokens", answer),
        }

    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        inputs = read_inputs(model, batch)
        slots = inputs.slots
        head = model.generator_head
        table_VE = model.generator_embeddings.table
        hidden_MD = model.hidden("generator", inputs.masked_ids_BL.flatten(), *inputs.context, slots=slots.places)
        with torch.no_grad():
            generated = predict(model.config, head, table_VE, hidden_MD, slots, batch.rng_key)
        corrupted_T, replaced_T = corrupt(inputs, generated.drawn_M)
        hidden_TD = model.hidden("discriminator", corrupted_T, *inputs.context)
        logits_T = model.discriminator_head(hidden_TD, inputs.context[0])
        reward_M = slots.of_tokens(ops.binary_cross_entropy(logits_T.detach(), replaced_T))
        baseline_M = model.baseline_head(hidden_MD.detach())
        advantage_M = reward_M - F.softplus(-baseline_M.detach())
        # Minimizing the samples' negative log-likelihood times their advantage maximizes the expected reward.
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
        """Returns the discriminator's loss, since the policy's loss does not measure progress."""
        return self.config.objective.disc_weight * float(metrics["discriminator_loss"] or 0)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns the metrics of `electra` and the mean reward; the generator's cross-entropy is only measured."""
        return super().metrics(totals) | {"reward": ratio(totals, "reward", "masked_weight")}
