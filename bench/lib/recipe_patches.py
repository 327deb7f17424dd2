"""Changes to the recipe that the package does not have, for `recipes.py`: each replaces functions of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.files import checkpoint_folder
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import Stage
from electra_fast.training import step
from lib.rotary_bert import use_rotary_positions


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
    "generator-first": _generator_first,
    "averaged-3": _averaged(3),
    "averaged-5": _averaged(5),
}
