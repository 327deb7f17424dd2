"""Changes to the recipe that the package does not have, for `recipes.py`: each replaces functions of this process.

Shapes: T packed tokens, M masked slots, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.files import checkpoint_folder
from electra_fast.model.model import Electra
from electra_fast.objectives import objective as parts
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import MicroBatch, Output, RngKey, Stage
from electra_fast.optimizers.optimizer import Schedule
from electra_fast.training import step
from lib.rotary_bert import use_rotary_positions

# Share of the steps in which the rate falls.
_DECAY = 0.4


def _constant_then_decay() -> None:
    """Keeps the peak learning rate until the last 40 % of the steps, where it falls to 0 on a line."""

    def scale(config: Schedule, number: int, num_steps: int) -> float:
        warmup = config.num_warmup_steps(num_steps)
        return min(1.0, (number + 1) / max(1.0, warmup), (num_steps - number) / (_DECAY * num_steps))

    step.lr_scale = scale


def _decay_to_a_tenth() -> None:
    """Lets the learning rate fall to a tenth of its peak instead of 0."""
    linear = step.lr_scale

    def scale(config: Schedule, number: int, num_steps: int) -> float:
        rising = number < config.num_warmup_steps(num_steps)
        return linear(config, number, num_steps) if rising else 0.1 + 0.9 * linear(config, number, num_steps)

    step.lr_scale = scale


def _generator_first() -> None:
    """Trains the embeddings too while the generator trains alone, and lets one schedule span both stages."""
    stages = ElectraObjective.stages

    def unfrozen(self: ElectraObjective) -> tuple[Stage, ...]:
        first, *rest = stages(self)
        return (replace(first, frozen=tuple(name for name in first.frozen if name != "embeddings")), *rest)

    def scale(self: step.TrainStep, number: int) -> float:
        return step.lr_scale(self.config.optimizer, number, self.config.train.steps)

    ElectraObjective.stages = unfrozen  # type: ignore[method-assign]
    step.TrainStep.lr_scale = scale  # type: ignore[method-assign]


def _two_corruptions() -> None:
    """Samples twice from each prediction of the generator, and trains the discriminator on both texts."""
    once = ElectraObjective.forward

    def forward(self: ElectraObjective, model: Electra, batch: MicroBatch) -> Output:
        if not model.training:
            return once(self, model, batch)
        weights, inputs = self.config.objective, parts.read_inputs(model, batch)
        generated = parts.generate(model, inputs, batch.rng_key)
        seed, number = batch.rng_key.seed_and_step.unbind()
        other = RngKey(torch.stack((seed + 1, number)), batch.rng_key.first_row)
        with torch.no_grad():
            again = parts.generate(model, inputs, other)
        loss, totals = batch.mean(self.gen_weight * generated.loss, "masked_weight"), {}
        for sample_M in (generated.drawn_M, again.drawn_M):
            corrupted_T, replaced_T = parts.corrupt(inputs, sample_M)
            hidden_TD = model.hidden("discriminator", corrupted_T, *inputs.context)
            logits_T = model.discriminator_head(hidden_TD)
            found, totals = parts.rtd_loss(logits_T, replaced_T, inputs.valid_T)
            loss = loss + batch.mean(weights.disc_weight / 2 * found, "tokens")
            hidden_MD, table_VE = inputs.slots.of_states(hidden_TD), model.embeddings.token
            corrected = parts.predict(model.config, model.corrective_head, table_VE, hidden_MD, inputs.slots, None)
            loss = loss + batch.mean(weights.corrective_weight / 2 * corrected.loss, "masked_weight")
        totals |= generated.totals(inputs.slots, "generator") | corrected.totals(inputs.slots, "corrective")
        return Output(loss, totals)

    ElectraObjective.forward = forward  # type: ignore[method-assign]


def _averaged(num_checkpoints: int) -> Callable[[], None]:
    """Replaces the weights of a finished run by the mean of those of its last checkpoints, a twentieth apart."""
    pretrain = ef.pretrain

    def averaged(config: ef.Config, data: str, out: Path) -> None:
        pretrain(config, data=data, out=out)
        folders = [checkpoint_folder.path_of(out, number) for number in checkpoint_folder.steps(out)]
        model = checkpoint.load_model(folders[-1])
        all_parameters = [checkpoint.read_parameters(model, each) for each in folders[-num_checkpoints:]]
        with torch.no_grad():
            for name, parameter in checkpoint.stored(model).items():
                parameter.copy_(torch.stack([each[name] for each in all_parameters]).mean(0))
        checkpoint.save(out, model, None, checkpoint_folder.read_state(folders[-1]), keep=1)

    def patch() -> None:
        ef.pretrain = averaged  # type: ignore[assignment]

    return patch


PATCHES: dict[str, Callable[[], None]] = {
    "rotary-positions": use_rotary_positions,
    "constant-then-decay": _constant_then_decay,
    "decay-to-a-tenth": _decay_to_a_tenth,
    "generator-first": _generator_first,
    "two-corruptions": _two_corruptions,
    "averaged-3": _averaged(3),
    "averaged-5": _averaged(5),
}
