"""`electra`: replaced-token detection. A small generator fills the masks, the discriminator finds what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from electra_fast.errors import InputError
from electra_fast.objectives.objective import Head, Network, Number, Objective, Output, Predictions, ratio

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.compute import ComputeConfig, RngKey
    from electra_fast.model import Electra


@dataclass(frozen=True)
class ElectraObjective(Objective):
    """gen_weight * masked language modelling of the generator + disc_weight * replaced-token detection.

    No gradient flows from the discriminator to the generator through the samples.
    """

    roles = ("generator", "discriminator")
    metric_totals = (
        "generator_loss",
        "masked_weight",
        "generator_correct",
        "discriminator_loss",
        "tokens",
        "discriminator_correct",
        "true_positives",
        "predicted_positives",
        "replaced",
    )

    def networks(self) -> dict[str, Network]:
        """A generator that is a fraction of the model, and the model as discriminator."""
        config = self.config
        generator, model = config.generator_shape(), config.model
        same = (generator.hidden_size, generator.num_layers) == (model.hidden_size, model.num_layers)
        if model.tying == "all" and not same:
            raise InputError(
                'model.tying = "all" needs a generator of the same size: set generator.fraction = 1.0 '
                "and generator.num_layers = 0"
            )
        return {
            "generator": Network(generator, {"generator_head": Head("masked_lm", config.data.mask_prob)}),
            "discriminator": Network(model, {"discriminator_head": Head("replaced_token")}),
        }

    def forward(
        self,
        model: Electra,
        batch: Mapping[str, Tensor],
        compute: ComputeConfig,
        rng_key: RngKey,
        denominators: Mapping[str, Tensor],
    ) -> Output:
        """Generator → sample → discriminator → loss."""
        from electra_fast.objectives import losses

        inputs = losses.read_inputs(model, batch, compute, rng_key)
        generated = losses.generate(model, inputs, rng_key)
        generator_loss, totals = losses.mlm_loss(generated, inputs.slots)

        assert generated.sample_M is not None
        corrupted_T, replaced_T = losses.corrupt(inputs, generated.sample_M)
        logits_T = model.replaced_logits(corrupted_T, *inputs.context)
        discriminator_loss, discriminator_totals = losses.rtd_loss(logits_T, replaced_T, inputs.valid_T)

        weights = self.config.objective
        loss = losses.divide(weights.gen_weight * generator_loss, denominators, "masked_weight")
        loss = loss + losses.divide(weights.disc_weight * discriminator_loss, denominators, "tokens")
        predictions = Predictions(corrupted_T, replaced_T, logits_T.detach(), inputs.valid_T)
        return Output(loss, totals | discriminator_totals, predictions)

    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Losses in nats per masked token and per token, accuracies, precision and recall of "replaced"."""
        generator_loss = ratio(totals, "generator_loss", "masked_weight")
        discriminator_loss = ratio(totals, "discriminator_loss", "tokens")
        weights = self.config.objective
        return {
            "loss": weights.gen_weight * generator_loss + weights.disc_weight * discriminator_loss,
            "generator_loss": generator_loss,
            "discriminator_loss": discriminator_loss,
            "generator_accuracy": ratio(totals, "generator_correct", "masked_weight"),
            "discriminator_accuracy": ratio(totals, "discriminator_correct", "tokens"),
            "discriminator_precision": ratio(totals, "true_positives", "predicted_positives"),
            "discriminator_recall": ratio(totals, "true_positives", "replaced"),
            "replaced_fraction": ratio(totals, "replaced", "tokens"),
        }

    def describe(self, role: str) -> tuple[str, str]:
        """By role."""
        if role == "discriminator":
            summary = "A text encoder pre-trained to tell which tokens of its input a generator replaced."
        else:
            summary = "The small masked language model whose samples an ELECTRA discriminator was trained on."
        return f"ELECTRA {role}", summary
