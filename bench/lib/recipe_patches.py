"""Changes to the recipe that the package does not have, for `recipes.py`: each replaces functions of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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


PATCHES: dict[str, Callable[[], None]] = {
    "rotary-positions": use_rotary_positions,
    "generator-first": _generator_first,
}
