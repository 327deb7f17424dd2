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
from electra_fast.model import Electra
from electra_fast.ops import Segments

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
class Noise:
    """Where a micro-batch's samples come from: int64 [2] of (seed, step) and its first row in the step."""

    seed_and_step: Tensor
    first_row: int = 0


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


def forward(model: Electra, batch: Mapping[str, Tensor], backend: Backend, noise: Noise, counts: Tensor) -> Output:
    """The loss of one micro-batch.

    Args:
        model: the networks; training mode decides about dropout.
        batch: tensors of `data.to_torch`.
        backend: attention backend and activation dtype.
        noise: keys of the generator's samples.
        counts: `count` summed over all micro-batches of the step, so that their losses add up to
            the loss of the undivided batch.
    """
    segments = Segments.packed(batch["segment_ids"], batch["cu_seqlens"], backend.attention)
    flat = {name: batch[name].flatten() for name in ("input_ids", "position_ids", "token_type_ids", "segment_ids")}
    context = (flat["position_ids"], flat["token_type_ids"], segments, backend.dtype)
    slots, valid_T = _slots(batch, noise.first_row), flat["segment_ids"] > 0

    hidden_TD = model.generator_hidden(flat["input_ids"], *context)
    # Unused slots read any row: their weight is 0.
    hidden_MD = hidden_TD.index_select(0, slots.position_M.clamp(max=hidden_TD.shape[0] - 1))
    objective, head = model.config.objective, model.generator_head
    nll_M, sample_M, correct_M = ops.generator_head(
        head.transform(hidden_MD),
        model.generator_embeddings.token,
        head.bias,
        slots.original_M,
        slots.number_M,
        noise.seed_and_step if model.has_discriminator else None,
        objective.temperature,
        objective.disallow_correct,
    )
    generator_loss = (nll_M * slots.weight_M).sum()
    sums = {
        "generator_loss": generator_loss.detach(),
        "masked_weight": slots.weight_M.sum(),
        "generator_correct": (correct_M * slots.weight_M).sum(),
        "tokens": valid_T.sum(),
    }
    masked_weight, num_tokens = counts.clamp(min=1).unbind()
    loss = objective.gen_weight * generator_loss / masked_weight.float()
    if sample_M is None:
        return Output(loss, _stack(sums))

    corrupted_T, replaced_T = corrupt(flat["input_ids"], slots, sample_M)
    logits_T = model.replaced_logits(corrupted_T, *context)
    discriminator_loss = (ops.binary_cross_entropy(logits_T, replaced_T) * valid_T).sum()
    loss = loss + objective.disc_weight * discriminator_loss / num_tokens.float()
    predicted_T = (logits_T.detach() > 0) & valid_T
    sums |= {
        "discriminator_loss": discriminator_loss.detach(),
        "discriminator_correct": ((predicted_T == replaced_T) & valid_T).sum(),
        "true_positives": (predicted_T & replaced_T).sum(),
        "predicted_positives": predicted_T.sum(),
        "replaced": replaced_T.sum(),
    }
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


def _slots(batch: Mapping[str, Tensor], first_row: int) -> Slots:
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


def corrupt(masked_ids_T: Tensor, slots: Slots, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    """The discriminator's input and labels: originals with the samples scattered in, and where they differ.

    Where a position was drawn more than once its samples become floor(mean), an arbitrary token, as
    in the published code (`scatter_update`). A sample that equals the original counts as original.
    """
    num_tokens = masked_ids_T.shape[0]
    spare = torch.zeros(num_tokens + 1, dtype=torch.int64, device=masked_ids_T.device)
    original_T = spare.clone()
    original_T[:num_tokens] = masked_ids_T
    original_T = original_T.scatter(0, slots.position_M, slots.original_M)[:num_tokens]
    total_T = spare.index_add(0, slots.position_M, sample_M)[:num_tokens]
    draws_T = spare.index_add(0, slots.position_M, torch.ones_like(sample_M))[:num_tokens]
    corrupted_T = torch.where(draws_T > 0, total_T // draws_T.clamp(min=1), original_T)
    return corrupted_T, corrupted_T != original_T


def _stack(sums: Mapping[str, Tensor]) -> Tensor:
    """In the order of `SUMS`, fp64; what an objective does not have is 0."""
    nothing = torch.zeros_like(sums["tokens"])
    return torch.stack([sums.get(name, nothing).double() for name in SUMS])
