"""What a run has learned: a warning while its generator improves and its discriminator does not, a verdict at the end.

Losses and AUCs against a run's own generator hide it: the better the generator, the harder its samples. An AUC on
replacements that stay the same shows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from electra_fast.config.config import Config
from electra_fast.objectives import objective_of
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


# About the share of tokens that unigram replacements change.
_REPLACED = 0.14
# An AUC up to this, or within three standard errors of chance, is nothing; one up to that is little.
_NOTHING_AUC, _LITTLE_AUC = 0.52, 0.6
# As shares of the loss of a model that knows token frequencies only.
_NOTHING_LOSS, _LITTLE_LOSS = 0.98, 0.9
_SMALL_CORPUS = 10e6  # tokens


def verdict(
    config: Config, found: Mapping[str, Number], entropy: float | None, trained_tokens: int, corpus_tokens: int
) -> list[str]:
    """What a finished run has learned: a line, and another with the likely reasons if that is little or nothing.

    Args:
        config: Of the run.
        found: Its last evaluation.
        entropy: For objectives without a discriminator: `evaluate.unigram_entropy`.
        trained_tokens: What it was trained on, with repetitions.
        corpus_tokens: Size of its corpora.
    """
    what = "the model finds replaced tokens"
    if (auc := found.get("unigram_auc")) is not None:
        amount, measured = _auc_amount(auc, found), auc_text(auc)
    elif (auc := found.get("discriminator_auc")) is not None:
        amount = _auc_amount(auc, found)
        measured = f"AUC {auc:.3f} with its own generator's replacements (0.5 is chance)"
    elif entropy is not None:
        what, name = (
            "the model predicts masked tokens",
            "encoder_loss" if found.get("encoder_loss") else "generator_loss",
        )
        loss = float(found[name] or 0)
        amount = "nothing" if loss > _NOTHING_LOSS * entropy else "little" if loss > _LITTLE_LOSS * entropy else ""
        measured = f"{name} {loss:.3f} (token frequencies alone give {entropy:.3f})"
    else:
        return []
    if not amount:
        return [f"{what}: {measured}"]
    reasons = "; ".join(_reasons(config, trained_tokens, corpus_tokens))
    return [f"the model has learned {amount} yet: {measured}", f"likely reasons: {reasons}"]


def auc_text(auc: float) -> str:
    """The AUC of a discriminator on replacements by frequency, in words that say what it compares with."""
    return f"AUC {auc:.3f} with random tokens, by their frequency, as replacements (0.5 is chance)"


def _auc_amount(auc: float, found: Mapping[str, Number]) -> str:
    """How little an AUC is: "nothing", "little" or ""."""
    # The standard error of chance (Hanley and McNeil, 1982).
    error = math.sqrt(1 / (12 * _REPLACED * (1 - _REPLACED) * float(found["tokens"] or 1)))
    if auc < max(_NOTHING_AUC, 0.5 + 3 * error):
        return "nothing"
    return "little" if auc < _LITTLE_AUC else ""


def _reasons(config: Config, trained_tokens: int, corpus_tokens: int) -> Iterator[str]:
    steps, has_stages = config.train.steps, len(objective_of(config).stages()) > 1
    longer = f"{'start again' if has_stages else 'continue'} with --train.steps {10 * steps}"
    yield f"too little training ({steps:,} steps, {trained_tokens / 1e6:.2f} M tokens): {longer}"
    if config.model.architecture == "bert":
        yield "recipes google and paper begin to learn late: start again with --recipe modern"
    yield f"a learning rate that does not suit (optimizer.learning_rate = {config.optimizer.learning_rate:g})"
    if corpus_tokens < _SMALL_CORPUS:
        yield f"a small corpus ({corpus_tokens / 1e6:.2f} M tokens): add text"
