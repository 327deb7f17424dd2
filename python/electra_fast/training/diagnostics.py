"""Diagnostics of a run: divergence, a stalled discriminator, differing ranks, and the verdict at the end.

Divergence is measured relative to the loss of uniform predictions, which every objective has. A healthy run, whatever
its recipe and batch size, starts near this loss and soon falls below it, so noise cannot double it. Only the first
updates can, with a short warmup or with Adam without bias correction.

Losses and AUCs on replacements of the run's generator hide a stalled discriminator, because a better generator makes
harder replacements. An AUC on fixed replacements reveals it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from electra_fast.config.config import Config, OptimizerConfig
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import LossHistory, TrainState
from electra_fast.objectives.objective import Number, Objective
from electra_fast.optimizers.rules import RULES
from electra_fast.training.forecast import by_rule, has_rule

# A run has exploded above this multiple of the loss of uniform predictions.
_EXPLODED = 2.0
# Learning is lost above this fraction of the way from the lowest loss to the loss of uniform predictions.
_LOST = 0.4
# Steps in each average that is compared with the lowest one, and the number of consecutive averages that must be lost.
_STEPS = 100
_LASTING = 2


def has_exploded(objective: Objective, metrics: Mapping[str, Number]) -> bool:
    limit = _EXPLODED * objective.comparable_loss(objective.uniform_metrics())
    return not objective.comparable_loss(metrics) <= limit  # also true for nan


def lost_learning(history: LossHistory, objective: Objective, metrics: Mapping[str, Number], steps: int) -> str | None:
    """Adds the metrics of `steps` steps to the history. Returns a description of the losses if all have risen to stay.

    A single loss may rise in a healthy run, such as the discriminator's loss while the generator learns.
    """
    for name, value in _losses(objective, metrics).items():
        history.totals[name] = history.totals.get(name, 0.0) + steps * value
    history.steps += steps
    if history.steps < _STEPS:
        return None
    uniform = _losses(objective, objective.uniform_metrics())
    lowest = history.lowest
    means = {name: total / history.steps for name, total in history.totals.items()}
    is_lost = [means[name] > low + _LOST * (uniform[name] - low) for name, low in lowest.items()]
    history.num_lost = history.num_lost + 1 if is_lost and all(is_lost) else 0
    history.lowest = {name: min(mean, lowest.get(name, math.inf)) for name, mean in means.items()}
    history.totals = {}
    history.steps = 0
    if history.num_lost < _LASTING:
        return None
    return " and ".join(f"{name} rose from {low:.4g} to {means[name]:.4g}" for name, low in lowest.items())


def recovery_advice(run: Path, state: TrainState, config: Config) -> str:
    """Returns a clause with a good checkpoint of a diverged run, and the command that goes back to it."""
    saved_steps = checkpoint_folder.steps(run)
    optimizer = config.optimizer
    usual = by_rule(config) if has_rule(config) else optimizer
    if not saved_steps:
        return f"there is no checkpoint yet; start again with {_lower(optimizer, usual)} or a longer warmup"
    step = state.best_step if state.best_step in saved_steps else saved_steps[-1]
    good = "the last good checkpoint"
    if step == state.best_step and state.best_loss is not None:
        good = f"the best checkpoint ({state.best_by} loss {state.best_loss:.4g})"
    before = Config.load(checkpoint_folder.path_of(run, step) / "config.toml").optimizer
    rates = _lower(optimizer, before, usual)
    command = f"electra-fast pretrain --out {run} --from-step {step} {rates} --allow-changes"
    return f"step-{step} is {good}; go back to it with lower learning rates: {command}"


def _lower(now: OptimizerConfig, *others: OptimizerConfig) -> str:
    """Returns options for lower learning rates: the lowest of `others` or, if none is lower than now, half of all."""
    rates = {name: getattr(now, name) for name in RULES[now.name].learning_rates}
    lowest = {name: min(getattr(other, name) or rate for other in others) for name, rate in rates.items()}
    lower = {name: rate for name, rate in lowest.items() if rate < rates[name]}
    halves = {name: rate / 2 for name, rate in rates.items()}
    return " ".join(f"--optimizer.{name} {rate:g}" for name, rate in (lower or halves).items())


def _losses(objective: Objective, metrics: Mapping[str, Number]) -> dict[str, float]:
    return {name: float(value) for name in objective.lowered_losses if (value := metrics.get(name)) is not None}


# A stall is a comparison of an evaluation with the third one after it.
_EVALUATIONS = 3
_GENERATOR_IMPROVES = 0.01  # of its loss
_DISCRIMINATOR_STAYS = 0.005  # of its AUC
# Above this AUC, unigram replacements no longer distinguish a good discriminator from a better one.
_SATURATED = 0.9


def stall_warning(
    evaluations: Sequence[Mapping[str, Number]], first_step: int = 0, *, can_correct: bool = False
) -> str | None:
    """Returns a one-line warning if the discriminator has stalled, or None. `evaluations` are in the order of steps.

    Reads `step`, `generator_loss` and `unigram_auc`; returns None if an objective lacks one of these networks. Ignores
    evaluations before `first_step`, while the generator learns token frequencies and the discriminator learns nothing.
    With `can_correct`, suggests the corrective loss, which needs a new run.
    """
    if len(evaluations) <= _EVALUATIONS:
        return None
    first = evaluations[-1 - _EVALUATIONS]
    last = evaluations[-1]
    begin = int(first["step"] or 0)
    end = int(last["step"] or 0)
    if begin < first_step or end - begin < MIN_STEPS:
        return None
    losses, aucs = (
        [evaluation.get(name) for evaluation in (first, last)] for name in ("generator_loss", "unigram_auc")
    )
    if None in losses or None in aucs:
        return None
    loss_before, loss = map(float, losses)  # type: ignore[arg-type]
    auc_before, auc = map(float, aucs)  # type: ignore[arg-type]
    if loss > (1 - _GENERATOR_IMPROVES) * loss_before or auc > auc_before + _DISCRIMINATOR_STAYS or auc > _SATURATED:
        return None
    remedy = "objective.corrective_weight = 1, " if can_correct else ""
    return (
        f"the discriminator has stalled since step {begin}: the generator's loss fell from {loss_before:.3f} "
        f"to {loss:.3f}, but the AUC on unigram replacements only went from {auc_before:.3f} to {auc:.3f}; if this "
        f"continues, start again with {remedy}a smaller generator.fraction or a lower learning rate"
    )


# Approximate fraction of tokens that unigram replacements change.
_REPLACED = 0.14
# Below the first AUC, or within three standard errors of chance, a model has learned nothing; below the second, little.
_NOTHING_AUC = 0.52
_LITTLE_AUC = 0.6
# The same for losses, as fractions of the loss of a model that knows only token frequencies.
_NOTHING_LOSS = 0.98
_LITTLE_LOSS = 0.9
_SMALL_CORPUS = 10e6  # tokens


def verdict(
    config: Config,
    evaluation: Mapping[str, Number],
    entropy: float | None,
    trained_tokens: int,
    corpus_tokens: int,
    *,
    imported: bool = False,
) -> list[str]:
    """Returns a line about the model's ability after a run and, if it has learned little, a line of likely reasons.

    For an imported model, the line describes the model, not the gain from continued training.

    Args:
        config: The run's configuration.
        evaluation: Its last evaluation.
        entropy: `evaluate.unigram_entropy`, for objectives without a discriminator.
        trained_tokens: Tokens trained on, including repetitions.
        corpus_tokens: Size of its corpora.
        imported: The model was trained before this run.
    """
    ability = "the model finds replaced tokens"
    if (auc := evaluation.get("unigram_auc")) is not None:
        amount = _auc_amount(auc, evaluation)
        measured = auc_text(auc)
    elif (auc := evaluation.get("discriminator_auc")) is not None:
        amount = _auc_amount(auc, evaluation)
        measured = f"AUC {auc:.3f} with its own generator's replacements (0.5 is chance)"
    elif entropy is not None:
        ability = "the model predicts masked tokens"
        name = "encoder_loss" if evaluation.get("encoder_loss") else "generator_loss"
        loss = float(evaluation[name] or 0)
        amount = "nothing" if loss > _NOTHING_LOSS * entropy else "little" if loss > _LITTLE_LOSS * entropy else ""
        measured = f"{name} {loss:.3f} (token frequencies alone give {entropy:.3f})"
    else:
        return []
    if not amount:
        return [f"{ability}: {measured}" + ("; this does not measure the gain from adapting" if imported else "")]
    reasons = "; ".join(_reasons(config, trained_tokens, corpus_tokens, imported))
    little = f"{ability} little better than untrained" if imported else f"the model has learned {amount} yet"
    return [f"warning: {little}: {measured}", f"warning: likely reasons: {reasons}"]


def auc_text(auc: float) -> str:
    return f"AUC {auc:.3f} with replacements drawn by token frequency (0.5 is chance)"


def _auc_amount(auc: float, evaluation: Mapping[str, Number]) -> str:
    """Returns "nothing" or "little" if the AUC of a model shows that it has learned no more, else ""."""
    # Standard error at chance level (Hanley and McNeil, 1982).
    error = math.sqrt(1 / (12 * _REPLACED * (1 - _REPLACED) * float(evaluation["tokens"] or 1)))
    if auc < max(_NOTHING_AUC, 0.5 + 3 * error):
        return "nothing"
    return "little" if auc < _LITTLE_AUC else ""


def _reasons(config: Config, trained_tokens: int, corpus_tokens: int, imported: bool) -> Iterator[str]:
    steps = config.train.steps
    is_fixed = OBJECTIVE_SPECS[config.objective.name].num_stages > 1
    longer = f"{'start again' if is_fixed else 'continue'} with --steps {10 * steps}"
    yield f"too little training ({steps:,} steps, {trained_tokens / 1e6:.2f} M tokens): {longer}"
    if config.model.architecture == "bert" and not imported:
        yield "recipes google and paper learn late: start again with --recipe modern"
    if imported or not has_rule(config):
        rate = config.optimizer.learning_rate
        yield f"an unsuitable learning rate (optimizer.learning_rate = {rate:g}): compare half and twice this value"
    elif config.optimizer != by_rule(config):
        yield "learning rates set by hand: start again without optimizer.learning_rate and muon_learning_rate"
    if corpus_tokens < _SMALL_CORPUS and not imported:
        yield f"a small corpus ({corpus_tokens / 1e6:.2f} M tokens): add text"


MIN_STEPS = 100
"""Minimum number of steps before the metrics of a warning, and in them."""


def warning(metrics: Mapping[str, Number]) -> str | None:
    """Returns a one-line warning about a log window, or None. The thresholds apply only after the warmup."""
    replaced = metrics["replaced_fraction"]
    recall = metrics["discriminator_recall"]
    loss = metrics["discriminator_loss"]
    if replaced is None or recall is None or loss is None:
        return None
    if replaced < 0.01:
        return (
            f"the generator is nearly always right: only {replaced:.1%} of the tokens are replaced, so the "
            "discriminator learns little; raise objective.temperature"
        )
    if replaced == 1:
        return None
    majority = -(replaced * math.log(replaced) + (1 - replaced) * math.log1p(-replaced))
    if loss > 1.02 * majority:
        return (
            f"the discriminator has collapsed: its loss {loss:.4f} is worse than always predicting the class "
            f"frequencies ({majority:.4f}); lower optimizer.learning_rate, or raise objective.temperature"
        )
    if recall == 0:
        return (
            f"the discriminator labels every token as original (loss {loss:.4f}; class frequencies alone give "
            f"{majority:.4f}); if unigram_auc also stays at 0.5, lower optimizer.learning_rate"
        )
    return None


class LastingWarning:
    """Selects warnings that hold in two consecutive log windows and over `MIN_STEPS` steps, one per `pause` steps."""

    def __init__(self, pause: int) -> None:
        self._pause = pause
        self._next = 0
        self._windows = 0
        self._steps = 0

    def take(self, metrics: Mapping[str, Number], num_steps: int, first_step: int) -> str | None:
        """Returns the warning to print after a log window of `num_steps` steps; None before `first_step`."""
        step = int(metrics["step"] or 0)
        message = warning(metrics) if step - num_steps >= first_step else None
        self._windows, self._steps = (self._windows + 1, self._steps + num_steps) if message else (0, 0)
        if self._windows < 2 or self._steps < MIN_STEPS or step < self._next:
            return None
        self._next = step + self._pause
        return message


@torch.no_grad()
def fingerprint(model: nn.Module) -> int:
    """Returns a 64-bit checksum of all parameters, which changes if any single value changes.

    It is the exact sum of the values' bit patterns, each multiplied by an odd number that depends on the parameter.
    """
    bits: list[Tensor] = [parameter.detach().contiguous().view(torch.int32) for parameter in model.parameters()]
    return int(torch.stack([values.sum(dtype=torch.int64) * (2 * i + 1) for i, values in enumerate(bits)]).sum())


def diverged_ranks(fingerprints: Sequence[int]) -> str:
    """Returns a sentence with the ranks whose parameters differ; empty if none differ."""
    counts = Counter(fingerprints)
    if len(counts) == 1:
        return ""
    (majority, number), *_ = counts.most_common()
    odd = [str(rank) for rank, checksum in enumerate(fingerprints) if checksum != majority]
    if 2 * number <= len(fingerprints):
        return (
            f"ranks {', '.join(map(str, range(len(fingerprints))))} have different parameters, and no majority agrees"
        )
    owner = f"rank {odd[0]}'s" if len(odd) == 1 else f"ranks {', '.join(odd)}'s"
    return f"{owner} parameters differ from the parameters of the other ranks"


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank]
