"""One training objective from batch to loss: generator → sample → discriminator → loss.

Everything has a static shape (unused mask slots write to a spare position behind the flat buffer),
nothing is read back to the host, and what a step reports is a vector of sums on the device.

Shapes: B rows, L row length, T = B*L flat tokens, M = B*N masked slots, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast import ops
from electra_fast.attention import AttentionMask
from electra_fast.model import Electra

# What a step adds up, in this order; `metrics.summarise` turns the sums into what is reported.
SUMS = (
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


@dataclass(frozen=True)
class Backend:
    """How a step computes: attention backend and the dtype of activations."""

    attention: str
    dtype: torch.dtype


@dataclass(frozen=True)
class RngKey:
    """Where a micro-batch's samples come from: int64 [2] of (seed, step) and its first row in the step.

    A tensor (int64 scalar) as first row lets one compiled function serve all micro-batches.
    """

    seed_and_step: Tensor
    first_row: int | Tensor = 0

    def dropout_key(self, length: int) -> Tensor | None:
        """`ops.Dropout.key` for rows of this length; None on the CPU, where torch's generator draws the masks."""
        if not (self.seed_and_step.is_cuda or ops.uses_kernels(self.seed_and_step)):
            return None
        first_token = self.seed_and_step[:1] * 0 + self.first_row * length
        return torch.cat((self.seed_and_step, first_token))


@dataclass(frozen=True)
class Output:
    """What an objective computes: the loss to minimise, `SUMS` (fp64), and the discriminator's view.

    The last four are None under the objective `mlm`; flat [T] otherwise.
    """

    loss: Tensor
    sums: Tensor
    corrupted_ids_T: Tensor | None = None
    replaced_T: Tensor | None = None
    logits_T: Tensor | None = None
    valid_T: Tensor | None = None


def count(batch: Mapping[str, Tensor]) -> Tensor:
    """The two denominators of a batch: weight of its masked slots and number of its tokens, fp64 [2]."""
    return torch.stack((batch["masked_weights"].sum(dtype=torch.float64), (batch["segment_ids"] > 0).sum().double()))


def forward(model: Electra, batch: Mapping[str, Tensor], backend: Backend, rng_key: RngKey, counts: Tensor) -> Output:
    """The loss of one micro-batch.

    Args:
        model: the networks; training mode decides about dropout.
        batch: tensors of `data.to_torch`.
        backend: attention backend and activation dtype.
        rng_key: keys of the generator's samples and, on CUDA, of dropout.
        counts: `count` summed over all micro-batches of the step, so that their losses add up to
            the loss of the undivided batch.
    """
    mask = AttentionMask.packed(batch["segment_ids"], batch["cu_seqlens"], backend.attention)
    flat = {name: batch[name].flatten() for name in ("input_ids", "position_ids", "token_type_ids", "segment_ids")}
    dropout_key = rng_key.dropout_key(mask.length) if model.training and model.config.model.dropout else None
    context = (flat["position_ids"], flat["token_type_ids"], mask, backend.dtype, dropout_key)
    slots, valid_T = _slots(batch, rng_key.first_row), flat["segment_ids"] > 0

    hidden_TD = model.generator_hidden(flat["input_ids"], *context)
    # Unused slots read any row: their weight is 0.
    hidden_MD = ops.gather_rows(hidden_TD, slots.position_M.clamp(max=hidden_TD.shape[0] - 1))
    objective, head = model.config.objective, model.generator_head
    nll_M, sample_M, correct_M = ops.generator_head(
        head.transform(hidden_MD),
        model.generator_embeddings.token,
        head.bias,
        slots.original_M,
        slots.number_M,
        rng_key.seed_and_step if model.has_discriminator else None,
        objective.temperature,
        objective.disallow_correct,
    )
    generator_loss = (nll_M * slots.weight_M).sum()
    sums = {
        "generator_loss": generator_loss.detach(),
        "masked_weight": slots.weight_M.sum(),
        "generator_correct": (correct_M * slots.weight_M).sum(),
    }
    masked_weight, num_tokens = counts.clamp(min=1).unbind()
    loss = objective.gen_weight * generator_loss / masked_weight.float()
    if sample_M is None:
        return Output(loss, _stack(sums | {"tokens": valid_T.sum()}))

    corrupted_T, replaced_T = ops.corrupt(batch["input_ids"], slots.position_M, slots.original_M, sample_M)
    logits_T = model.replaced_logits(corrupted_T, *context)
    discriminator_loss, totals_5 = ops.discriminator_loss(logits_T, replaced_T, valid_T)
    loss = loss + objective.disc_weight * discriminator_loss / num_tokens.float()
    sums["discriminator_loss"] = discriminator_loss.detach()
    sums |= dict(zip(ops.DISCRIMINATOR_TOTALS, totals_5.unbind(), strict=True))
    return Output(loss, _stack(sums), corrupted_T, replaced_T, logits_T.detach(), valid_T)


@dataclass(frozen=True)
class Slots:
    """The masked slots of a batch, flat [M]; unused ones have weight 0 and the position T behind the buffer.

    `number_M` counts slots from the step's first row on, so that noise does not depend on micro-batches.
    """

    number_M: Tensor
    position_M: Tensor
    original_M: Tensor
    weight_M: Tensor


def _slots(batch: Mapping[str, Tensor], first_row: int | Tensor) -> Slots:
    num_rows, length = batch["input_ids"].shape
    slots_per_row = batch["masked_weights"].shape[1]
    weight_M = batch["masked_weights"].flatten()
    first_B1 = torch.arange(num_rows, device=weight_M.device)[:, None] * length
    position_M = (batch["masked_positions"] + first_B1).flatten()
    return Slots(
        number_M=torch.arange(weight_M.shape[0], device=weight_M.device) + first_row * slots_per_row,
        position_M=torch.where(weight_M > 0, position_M, num_rows * length),
        original_M=batch["masked_ids"].flatten().long(),
        weight_M=weight_M,
    )


def _stack(sums: Mapping[str, Tensor]) -> Tensor:
    """In the order of `SUMS`, fp64; what an objective does not have is 0."""
    nothing = torch.zeros_like(sums["tokens"])
    return torch.stack([sums.get(name, nothing).double() for name in SUMS])
