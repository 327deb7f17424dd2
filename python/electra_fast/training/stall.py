"""Recognizes a run whose generator keeps improving while its discriminator learns nothing.

Losses and AUCs against a run's own generator hide it: the better the generator, the harder its samples. An AUC on
replacements that stay the same shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from electra_fast.objectives.objective import Number

# What a run does between one evaluation and the third one after it.
_EVALUATIONS = 3
_GENERATOR_IMPROVES = 0.01  # of its loss
_DISCRIMINATOR_STAYS = 0.005  # of its AUC
# Above this, unigram replacements no longer tell a good discriminator from a better one.
_SATURATED = 0.9


def stall_warning(evaluations: Sequence[Mapping[str, Number]], can_correct: bool = False) -> str | None:
    """A warning in one line about the newest of a run's evaluations, in order, or None.

    Reads `step`, `generator_loss` and `unigram_auc`; None where one of the last two is missing, as in an objective
    that has no such network. With `can_correct` it suggests the corrective loss, which a run cannot begin later.
    """
    if len(evaluations) <= _EVALUATIONS:
        return None
    first, last = evaluations[-1 - _EVALUATIONS], evaluations[-1]
    losses, aucs = ([each.get(name) for each in (first, last)] for name in ("generator_loss", "unigram_auc"))
    if None in losses or None in aucs:
        return None
    (loss_before, loss), (auc_before, auc) = map(float, losses), map(float, aucs)  # type: ignore[arg-type]
    if loss > (1 - _GENERATOR_IMPROVES) * loss_before or auc > auc_before + _DISCRIMINATOR_STAYS or auc > _SATURATED:
        return None
    remedy = "objective.corrective_weight = 1, " if can_correct else ""
    return (
        f"the discriminator has stalled since step {first['step']}: the generator's loss fell from {loss_before:.3f} "
        f"to {loss:.3f}, while the AUC on unigram replacements went from {auc_before:.3f} to {auc:.3f}; if that goes "
        f"on, start again with {remedy}a smaller generator.fraction or a lower learning rate"
    )
