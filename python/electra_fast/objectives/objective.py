"""The interface of an objective to the training step, reports and exports, and shared parts of objectives.

The parts make network inputs, samples, corrupted text and losses. All shapes are static (unused mask slots write to a
spare position after the flat buffer), and nothing synchronizes with the host. Losses are sums; an objective divides
them by the denominators of the whole step.

A new objective is a subclass, here or in a separate file, an entry in `OBJECTIVES`, and its networks and required
settings in `config.presets`.

Shapes: B rows, L row length, T = B*L flat tokens, M = B*N masked slots, D hidden.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.model.attention import BACKENDS, AttentionMask
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.heads import MaskedLMHead
from electra_fast.model.model import Electra
from electra_fast.model.networks import Network, networks_of
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import may_use_kernels
from electra_fast.ops.sampling import philox

Number = float | int | None
Totals = dict[str, Tensor]

METRICS = (
    "loss",
    "generator_loss",
    "discriminator_loss",
    "generator_accuracy",
    "discriminator_accuracy",
    "discriminator_precision",
    "discriminator_recall",
    "replaced_fraction",
)
"""Metrics that every objective reports, None if they do not apply; an objective may report more."""


@dataclass(frozen=True)
class RngKey:
    """The random key of a micro-batch's samples and dropout masks: (seed, step) as int64 [2], and its first row.

    If the first row is a tensor (int64 scalar), one compiled function serves all micro-batches of a step.
    """

    seed_and_step: Tensor
    first_row: int | Tensor = 0

    def dropout_key(self, length: int) -> Tensor | None:
        """Returns `ops.Dropout.key` for rows of this length; None on the CPU, which uses torch's generator."""
        if not may_use_kernels(self.seed_and_step.device):
            return None
        first_token = self.seed_and_step[:1] * 0 + self.first_row * length
        return torch.cat((self.seed_and_step, first_token))


def seed_generator(device: torch.device, seed: int, part: int, step: int) -> None:
    """Seeds torch's generator from the step and its next part, so that a resumed run draws the same numbers.

    Seeds only the device's generator: `torch.manual_seed` seeds all devices, and takes half a millisecond on a CPU,
    because it records a stack trace for a later use of CUDA. A CUDA graph reads the seed at each replay.
    """
    mixed = (seed * 0x9E3779B97F4A7C15 + part * 0xD1B54A32D192ED03 + step) % 2**63
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    generator.manual_seed(mixed)


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch, with all other inputs of its loss except the model.

    Args:
        tensors: Tensors of `data.loader.to_torch`.
        compute: Attention backend and activation dtype.
        rng_key: Key of the generator's samples and, on CUDA, of dropout.
        denominators: `Objective.loss_denominators` summed over all micro-batches of the step, so that their losses add
            up to the loss of the undivided batch; only losses use them.
    """

    tensors: Mapping[str, Tensor]
    compute: ComputeConfig
    rng_key: RngKey
    denominators: Mapping[str, Tensor] = field(default_factory=dict)

    def mean(self, loss_sum: Tensor, denominator: str) -> Tensor:
        """Divides a sum of losses by a denominator, in fp32; by 1 if the step has no such tokens."""
        return loss_sum / self.denominators[denominator].clamp(min=1).float()


@dataclass(frozen=True)
class Predictions:
    """The discriminator's inputs, labels and outputs, flat [T]; logits are fp32."""

    corrupted_ids_T: Tensor
    replaced_T: Tensor
    logits_T: Tensor
    valid_T: Tensor


@dataclass(frozen=True)
class Output:
    """The result of a forward pass: the loss (scalar), metric totals (scalars on the device), predictions."""

    loss: Tensor
    totals: dict[str, Tensor]
    predictions: Predictions | None = None


Forward = Callable[[Electra, MicroBatch], Output]
"""The type of `Objective.forward`."""


@dataclass(frozen=True)
class Stage:
    """Consecutive steps that train the same parameters with the same loss and a separate learning-rate schedule.

    Args:
        name: The stage's name in messages.
        objective: Computes the loss.
        first_step: The stage's first step, counted from the run's start.
        num_steps: Length of the stage and of its schedule.
        frozen: Names of the model's submodules that do not train.
    """

    name: str
    objective: Objective
    first_step: int
    num_steps: int
    frozen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loss:
    """A term of an objective's loss: weight * total / denominator.

    Args:
        weight: Its weight.
        denominator: The name of a total; the term is divided by the sum of that total over a step.
        uniform: The quotient for uniform predictions over the vocabulary and over both labels.
    """

    weight: float
    denominator: str
    uniform: float


@dataclass(frozen=True)
class Objective(ABC):
    """An objective with a configuration."""

    config: Config

    name: ClassVar[str]
    """Its key in `config.presets.OBJECTIVE_SPECS`."""
    metric_totals: ClassVar[tuple[str, ...]]
    """Names of the totals that `forward` may return."""
    lowered_losses: ClassVar[tuple[str, ...]] = ("generator_loss", "encoder_loss", "discriminator_loss")
    """Metrics that do not all rise for long while training goes well."""

    @abstractmethod
    def losses(self) -> dict[str, Loss]:
        """Returns the terms of the loss by the name of their total and metric, in the order in which they are added."""

    def output(self, batch: MicroBatch, totals: Totals, predictions: Predictions | None = None) -> Output:
        """Returns the result of `forward` from a micro-batch's totals; the losses among them have gradients."""
        losses = self.losses()
        terms = [batch.mean(loss.weight * totals[name], loss.denominator) for name, loss in losses.items()]
        totals = totals | {name: totals[name].detach() for name in losses}
        return Output(functools.reduce(operator.add, terms), totals, predictions)

    def loss_metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns the loss, and each of `losses` in nats per token, from their totals."""
        losses = self.losses()
        means = {name: ratio(totals, name, term.denominator) for name, term in losses.items()}
        loss = functools.reduce(operator.add, (term.weight * means[name] for name, term in losses.items()))
        return {"loss": loss, **means}

    def uniform_metrics(self) -> dict[str, Number]:
        """Returns the metrics of uniform predictions; only the losses among them are meaningful."""
        totals = dict.fromkeys(self.metric_totals, 1.0) | {name: loss.uniform for name, loss in self.losses().items()}
        return self.metrics(totals)

    def networks(self) -> dict[str, Network]:
        return networks_of(self.config, self.name)

    def could_have(self, head: str) -> bool:
        """Returns whether the head is missing only because its weight is 0."""
        present = {name for network in self.networks().values() for name in network.heads}
        return head not in present and any(head in heads for heads in OBJECTIVE_SPECS[self.name].networks.values())

    def loss_denominators(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the divisors of a batch's losses, fp64 scalars to be summed over the micro-batches of a step.

        By default, these are the weight of the masked slots and the number of tokens.
        """
        return {
            "masked_weight": batch["masked_weights"].sum(dtype=torch.float64),
            "tokens": (batch["segment_ids"] > 0).sum().double(),
        }

    @abstractmethod
    def forward(self, model: Electra, batch: MicroBatch) -> Output:
        """Computes the loss and the metric totals of one micro-batch, without synchronizing with the host.

        Args:
            model: The networks, which apply dropout in training mode.
            batch: The micro-batch, on the model's device.
        """

    @abstractmethod
    def metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns the metrics of a log window or an evaluation from its metric totals."""

    def comparable_loss(self, metrics: Mapping[str, Number]) -> float:
        """Returns the loss by which checkpoints of a run are compared."""
        return float(metrics["loss"] or 0)

    @abstractmethod
    def describe(self, role: str) -> tuple[str, str]:
        """Returns the title and first sentence of the model card for an exported network with this role."""

    def stages(self) -> tuple[Stage, ...]:
        """Returns the consecutive stages of the run."""
        return (Stage("pre-training", self, first_step=0, num_steps=self.config.train.steps),)

    def stage(self, step: int) -> Stage:
        """Returns the stage of a step (0-based). Each stage starts with a new optimizer."""
        return [stage for stage in self.stages() if stage.first_step <= step][-1]

    def begin_stage(self, model: Electra) -> None:  # noqa: B027  # most objectives have one stage
        """Prepares the model from the previous stage for the first step of this stage."""


@dataclass(frozen=True)
class GeneratorObjective(Objective):
    """An objective with a generator (a smaller network or a fixed distribution) in addition to its result."""

    @property
    def gen_weight(self) -> float:
        return self.config.objective.gen_weight

    def losses(self) -> dict[str, Loss]:
        uniform = math.log(self.config.model.vocab_size) if self.config.generator.kind == "model" else 0.0
        return {"generator_loss": Loss(self.gen_weight, "masked_weight", uniform)}

    def generator_metrics(self, totals: Mapping[str, float]) -> dict[str, Number]:
        """Returns the loss in nats per masked token, and the accuracy; None for a fixed distribution."""
        if self.config.generator.kind != "model":
            return {"generator_loss": None, "generator_accuracy": None}
        names = {"generator_loss": "generator_loss", "generator_accuracy": "generator_correct"}
        return {name: ratio(totals, total, "masked_weight") for name, total in names.items()}


def report(metrics: Mapping[str, Number]) -> dict[str, Number]:
    """Returns the metrics, with None for missing `METRICS`."""
    return dict.fromkeys(METRICS) | dict(metrics)


def ratio(totals: Mapping[str, float], numerator: str, denominator: str) -> float:
    """Returns the quotient of two totals; 0/0 is 0."""
    return totals[numerator] / totals[denominator] if totals[denominator] else 0.0


def detection_metrics(totals: Mapping[str, float], denominator: str) -> dict[str, Number]:
    """Returns accuracy, precision, recall and fraction of "replaced" over the tokens of `denominator`."""
    return {
        "discriminator_accuracy": ratio(totals, "discriminator_correct", denominator),
        "discriminator_precision": ratio(totals, "true_positives", "predicted_positives"),
        "discriminator_recall": ratio(totals, "true_positives", "replaced"),
        "replaced_fraction": ratio(totals, "replaced", denominator),
    }


@dataclass(frozen=True)
class Slots:
    """The masked slots of a batch, flat [M]; unused slots have weight 0 and the position T after the buffer.

    `number_M` counts slots from the first row of the step, so that samples do not depend on micro-batches.
    """

    num_rows: int
    number_M: Tensor
    position_M: Tensor
    target_M: Tensor
    weight_M: Tensor

    def of_tokens(self, x_T: Tensor) -> Tensor:
        """Gathers values at the slots; unused slots, with weight 0, read an arbitrary token; [T] → [M]."""
        return x_T[self.position_M.clamp(max=x_T.shape[0] - 1)]

    @property
    def places(self) -> tuple[Tensor, int]:
        """The arguments of `ops.slot_states` after the states."""
        return self.position_M, self.num_rows

    def of_states(self, x_TD: Tensor) -> Tensor:
        """Gathers vectors like `of_tokens`, differentiably; [T, D] → [M, D]."""
        return ops.slot_states(x_TD, *self.places)


@dataclass(frozen=True)
class NetworkInputs:
    """The inputs of the networks for a micro-batch.

    `context` has the arguments of `Electra.hidden` after the ids. `sampled_M` has the batch's samples, int64, if any.
    """

    masked_ids_BL: Tensor
    valid_T: Tensor
    slots: Slots
    context: tuple[Tensor, Tensor, AttentionMask, torch.dtype, Tensor | None]
    sampled_M: Tensor | None = None


def read_inputs(model: Electra, batch: MicroBatch) -> NetworkInputs:
    """Returns the inputs of a packed micro-batch.

    Its entry `sampled_ids` (int64, shaped like `masked_ids`), if present, replaces the generator's samples.
    """
    tensors = batch.tensors
    # Compiled code must not depend on the varying number of offsets if nothing reads them.
    cu_seqlens = tensors["cu_seqlens"] if BACKENDS[batch.compute.attention].reads_offsets else None
    shape = model.config.model
    mask = AttentionMask.packed(tensors["segment_ids"], cu_seqlens, batch.compute.attention, shape.local_attention)
    has_dropout = model.training and (shape.dropout or shape.attention_dropout)
    dropout_key = batch.rng_key.dropout_key(mask.length) if has_dropout else None
    positions_T = tensors["position_ids"].flatten()
    types_T = tensors["token_type_ids"].flatten()
    return NetworkInputs(
        masked_ids_BL=tensors["input_ids"],
        valid_T=tensors["segment_ids"].flatten() > 0,
        slots=_slots(tensors, batch.rng_key.first_row),
        context=(positions_T, types_T, mask, batch.compute.dtype, dropout_key),
        sampled_M=tensors["sampled_ids"].flatten() if "sampled_ids" in tensors else None,
    )


def _slots(batch: Mapping[str, Tensor], first_row: int | Tensor) -> Slots:
    num_rows, length = batch["input_ids"].shape
    slots_per_row = batch["masked_weights"].shape[1]
    weight_M = batch["masked_weights"].flatten()
    first_B1 = torch.arange(num_rows, device=weight_M.device)[:, None] * length
    position_M = (batch["masked_positions"] + first_B1).flatten()
    return Slots(
        num_rows=num_rows,
        number_M=torch.arange(weight_M.shape[0], device=weight_M.device) + first_row * slots_per_row,
        position_M=torch.where(weight_M > 0, position_M, num_rows * length),
        target_M=batch["masked_ids"].flatten().long(),
        weight_M=weight_M,
    )


@dataclass(frozen=True)
class Generated:
    """Predictions at the masked slots: summed cross-entropy, samples if requested, and correctness of the argmax."""

    loss: Tensor
    sample_M: Tensor | None
    correct_M: Tensor

    @property
    def drawn_M(self) -> Tensor:
        """The samples, which must have been requested."""
        assert self.sample_M is not None
        return self.sample_M

    def totals(self, slots: Slots, role: str) -> Totals:
        """Returns the loss, the slots' weight, and the weight of slots with a correct argmax."""
        return {
            f"{role}_loss": self.loss,
            "masked_weight": slots.weight_M.sum(),
            f"{role}_correct": (self.correct_M * slots.weight_M).sum(),
        }


def generate(model: Electra, inputs: NetworkInputs, rng_key: RngKey | None) -> Generated:
    """Runs the generator on the masked text, and samples replacements if there is a key.

    With a fixed distribution, or with samples in the batch and no generator, there are only samples, and the loss is 0.
    """
    slots = inputs.slots
    batch_M = inputs.sampled_M
    if batch_M is not None and "generator" not in model.networks:
        return _only_samples(batch_M)
    if model.proposal is not None and rng_key is not None:
        return _only_samples(model.proposal.sample(slots.number_M, rng_key.seed_and_step))
    hidden_MD = model.hidden("generator", inputs.masked_ids_BL.flatten(), *inputs.context, slots=slots.places)
    head = model.generator_head
    table_VE = model.generator_embeddings.table
    rng_key = rng_key if batch_M is None else None
    generated = predict(model.config, head, table_VE, hidden_MD, slots, rng_key)
    return generated if batch_M is None else replace(generated, sample_M=batch_M)


def _only_samples(sample_M: Tensor) -> Generated:
    zero = torch.zeros((), device=sample_M.device)
    return Generated(zero, sample_M, zero)


def predict(
    config: Config, head: MaskedLMHead, table_VE: Tensor, hidden_MD: Tensor, slots: Slots, rng_key: RngKey | None
) -> Generated:
    """Predicts the masked tokens from the hidden states at the masked slots, and samples if there is a key."""
    objective = config.objective
    return Generated(
        *ops.generator_head(
            head.transform(hidden_MD),
            table_VE,
            head.output_bias,
            slots.target_M,
            slots.weight_M,
            slots.number_M,
            None if rng_key is None else rng_key.seed_and_step,
            objective.temperature,
            objective.disallow_correct,
        )
    )


def corrupt(inputs: NetworkInputs, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the text with samples instead of masks, and the tokens that differ from the original; [T] each."""
    slots = inputs.slots
    return ops.corrupt(inputs.masked_ids_BL, slots.position_M, slots.target_M, sample_M)


def rtd_totals(logits_T: Tensor, replaced_T: Tensor, counted_T: Tensor) -> Totals:
    """Returns the discriminator's binary cross-entropy and metric totals, summed over the tokens in `counted_T`."""
    loss, totals_5 = ops.discriminator_loss(logits_T, replaced_T, counted_T)
    return {"discriminator_loss": loss, **dict(zip(ops.DISCRIMINATOR_TOTALS, totals_5.unbind(), strict=True))}


def random_words(rng_key: RngKey, column_BL: Tensor, stream: int) -> Tensor:
    """Returns 32 random bits per element, a function of seed, step, row within the step and column; int64 [B, L].

    Args:
        rng_key: The micro-batch's key.
        column_BL: Column numbers, int64; elements of a row with the same number get the same bits.
        stream: Last word of Philox's counter, one per purpose: 0 to 2 belong to `sampling`, 5 to `training.corruptor`,
            2^16 and above to dropout.
    """
    seed, step = rng_key.seed_and_step.unbind()
    row_B1 = torch.arange(column_BL.shape[0], device=column_BL.device)[:, None] + rng_key.first_row
    key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    return philox((column_BL, row_B1, step, torch.full_like(step, stream)), key)[0]
