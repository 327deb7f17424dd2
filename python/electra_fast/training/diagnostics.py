"""Diagnostics of a run: divergence, a stalled discriminator, differing ranks, and the verdict at the end.

Divergence is measured against the loss of uniform predictions, which every objective has. A healthy run, whatever its
recipe and batch size, starts near this loss and soon falls below it, so noise cannot take it to twice as much; only the
first updates can, with a short warmup or with Adam without bias correction.

Losses and AUCs against a run's own generator hide a stalled discriminator, since a better generator gives harder
samples. An AUC on fixed replacements reveals it.
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
# Learning is lost above this fraction of the way from the lowest loss to that of uniform predictions.
_LOST = 0.4
# Steps per average that is compared with the lowest, and how many averages in a row must be lost.
_STEPS = 100
_LASTING = 2


def has_exploded(objective: Objective, metrics: Mapping[str, Number]) -> bool:
    limit = _EXPLODED * objective.comparable_loss(objective.uniform_metrics())
    return not objective.comparable_loss(metrics) <= limit  # also true for nan


def lost_learning(history: LossHistory, objective: Objective, metrics: Mapping[str, Number], steps: int) -> str | None:
    """Adds the metrics of `steps` steps to the history. Returns a description of the losses if all have risen for good.

    A single loss may rise in a healthy run, such as the discriminator's when its generator learns.
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
    """Returns a sentence that names a good checkpoint of a diverged run and the command that goes back to it."""
    kept = checkpoint_folder.steps(run)
    optimizer = config.optimizer
    usual = by_rule(config) if has_rule(config) else optimizer
    if not kept:
        return f"there is no checkpoint yet; start again with {_lower(optimizer, usual)} or a longer warmup"
    step = state.best_step if state.best_step in kept else kept[-1]
    good = "the last good checkpoint"
    if step == state.best_step and state.best_loss is not None:
        good = f"the best checkpoint ({state.best_by} loss {state.best_loss:.4g})"
    before = Config.load(checkpoint_folder.path_of(run, step) / "config.toml").optimizer
    rates = _lower(optimizer, before, usual)
    command = f"electra-fast pretrain --out {run} --from-step {step} {rates} --allow-changes"
    return f"step-{step} is {good}; go back to it with lower rates: {command}"


def _lower(now: OptimizerConfig, *others: OptimizerConfig) -> str:
    """Returns options for lower rates: the lowest of `others` or, where none is lower than now, half of all rates."""
    rates = {name: getattr(now, name) for name in RULES[now.name].learning_rates}
    lowest = {name: min(getattr(each, name) or rate for each in others) for name, rate in rates.items()}
    lower = {name: rate for name, rate in lowest.items() if rate < rates[name]}
    halves = {name: rate / 2 for name, rate in rates.items()}
    return " ".join(f"--optimizer.{name} {rate:g}" for name, rate in (lower or halves).items())


def _losses(objective: Objective, metrics: Mapping[str, Number]) -> dict[str, float]:
    return {name: float(value) for name in objective.lowered_losses if (value := metrics.get(name)) is not None}


# A stall is judged between an evaluation and the third one after it.
_EVALUATIONS = 3
_GENERATOR_IMPROVES = 0.01  # of its loss
_DISCRIMINATOR_STAYS = 0.005  # of its AUC
# Above this, unigram replacements no longer tell a good discriminator from a better one.
_SATURATED = 0.9


def stall_warning(
    evaluations: Sequence[Mapping[str, Number]], first_step: int = 0, *, can_correct: bool = False
) -> str | None:
    """Returns a one-line warning about the newest of a run's evaluations, given in order, or None.

    Reads `step`, `generator_loss` and `unigram_auc`; None if an objective lacks one of these networks. Compares nothing
    before `first_step`, when a generator learns frequencies, which teach no discriminator. With `can_correct`, suggests
    the corrective loss, which needs a new run.
    """
    if len(evaluations) <= _EVALUATIONS:
        return None
    first = evaluations[-1 - _EVALUATIONS]
    last = evaluations[-1]
    begin = int(first["step"] or 0)
    end = int(last["step"] or 0)
    if begin < first_step or end - begin < MIN_STEPS:
        return None
    losses, aucs = ([each.get(name) for each in (first, last)] for name in ("generator_loss", "unigram_auc"))
    if None in losses or None in aucs:
        return None
    loss_before, loss = map(float, losses)  # type: ignore[arg-type]
    auc_before, auc = map(float, aucs)  # type: ignore[arg-type]
    if loss > (1 - _GENERATOR_IMPROVES) * loss_before or auc > auc_before + _DISCRIMINATOR_STAYS or auc > _SATURATED:
        return None
    remedy = "objective.corrective_weight = 1, " if can_correct else ""
    return (
        f"the discriminator has stalled since step {begin}: the generator's loss fell from {loss_before:.3f} "
        f"to {loss:.3f}, while the AUC on unigram replacements went from {auc_before:.3f} to {auc:.3f}; if this "
        f"continues, start again with {remedy}a smaller generator.fraction or a lower learning rate"
    )


# Approximate fraction of tokens that unigram replacements change.
_REPLACED = 0.14
# An AUC below the first, or within three standard errors of chance, shows nothing learned; below the second, little.
_NOTHING_AUC = 0.52
_LITTLE_AUC = 0.6
# Likewise, as fractions of the loss of a model that knows only token frequencies.
_NOTHING_LOSS = 0.98
_LITTLE_LOSS = 0.9
_SMALL_CORPUS = 10e6  # tokens


def verdict(
    config: Config,
    found: Mapping[str, Number],
    entropy: float | None,
    trained_tokens: int,
    corpus_tokens: int,
    *,
    imported: bool = False,
) -> list[str]:
    """Returns a line on what a finished run has learned and, if that is little, another with likely reasons.

    Of an imported model, it says what the model can do, which tells nothing of what continuing it has gained.

    Args:
        config: The run's configuration.
        found: Its last evaluation.
        entropy: `evaluate.unigram_entropy`, for objectives without a discriminator.
        trained_tokens: Tokens trained on, including repetitions.
        corpus_tokens: Size of its corpora.
        imported: Whether its model was trained before.
    """
    what = "the model finds replaced tokens"
    if (auc := found.get("unigram_auc")) is not None:
        amount = _auc_amount(auc, found)
        measured = auc_text(auc)
    elif (auc := found.get("discriminator_auc")) is not None:
        amount = _auc_amount(auc, found)
        measured = f"AUC {auc:.3f} with its own generator's replacements (0.5 is chance)"
    elif entropy is not None:
        what = "the model predicts masked tokens"
        name = "encoder_loss" if found.get("encoder_loss") else "generator_loss"
        loss = float(found[name] or 0)
        amount = "nothing" if loss > _NOTHING_LOSS * entropy else "little" if loss > _LITTLE_LOSS * entropy else ""
        measured = f"{name} {loss:.3f} (token frequencies alone give {entropy:.3f})"
    else:
        return []
    if not amount:
        return [f"{what}: {measured}" + ("; no measure of what adapting gained" if imported else "")]
    reasons = "; ".join(_reasons(config, trained_tokens, corpus_tokens, imported))
    little = f"{what} little better than untrained" if imported else f"the model has learned {amount} yet"
    return [f"warning: {little}: {measured}", f"warning: likely reasons: {reasons}"]


def auc_text(auc: float) -> str:
    return f"AUC {auc:.3f} with random tokens, by their frequency, as replacements (0.5 is chance)"


def _auc_amount(auc: float, found: Mapping[str, Number]) -> str:
    """Returns how little an AUC shows: "nothing", "little" or ""."""
    # Standard error at chance level (Hanley and McNeil, 1982).
    error = math.sqrt(1 / (12 * _REPLACED * (1 - _REPLACED) * float(found["tokens"] or 1)))
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
        yield f"a learning rate that does not suit (optimizer.learning_rate = {rate:g}): compare half and twice of it"
    elif config.optimizer != by_rule(config):
        yield "learning rates other than the rule's: start again without optimizer.learning_rate and muon_learning_rate"
    if corpus_tokens < _SMALL_CORPUS and not imported:
        yield f"a small corpus ({corpus_tokens / 1e6:.2f} M tokens): add text"


MIN_STEPS = 100
"""Warnings need at least this many steps before and during what they judge."""


def warning(metrics: Mapping[str, Number]) -> str | None:
    """Returns a one-line warning about a log window, or None. Its thresholds hold only after the warmup."""
    replaced = metrics["replaced_fraction"]
    recall = metrics["discriminator_recall"]
    loss = metrics["discriminator_loss"]
    if replaced is None or recall is None or loss is None:
        return None
    if replaced < 0.01:
        return (
            f"the generator is nearly always right: only {replaced:.1%} of the tokens are replaced, which teaches the "
            "discriminator little; use a higher objective.temperature"
        )
    if replaced == 1:
        return None
    majority = -(replaced * math.log(replaced) + (1 - replaced) * math.log1p(-replaced))
    if loss > 1.02 * majority:
        return (
            f"the discriminator has collapsed: loss {loss:.4f} is worse than always answering the class shares "
            f"({majority:.4f}); lower optimizer.learning_rate, or use a higher objective.temperature"
        )
    if recall == 0:
        return (
            f"the discriminator calls every token original (loss {loss:.4f}, class shares alone {majority:.4f}); "
            "if unigram_auc stays at 0.5 too, lower optimizer.learning_rate"
        )
    return None


class LastingWarning:
    """Passes on warnings that hold in two consecutive log windows and over `MIN_STEPS` steps, one per `pause` steps."""

    def __init__(self, pause: int) -> None:
        self._pause = pause
        self._next = 0
        self._windows = 0
        self._steps = 0

    def take(self, metrics: Mapping[str, Number], num_steps: int, first_step: int) -> str | None:
        """Returns the warning to print after a log window of `num_steps` steps, or None, as before `first_step`."""
        step = int(metrics["step"] or 0)
        message = warning(metrics) if step - num_steps >= first_step else None
        self._windows, self._steps = (self._windows + 1, self._steps + num_steps) if message else (0, 0)
        if self._windows < 2 or self._steps < MIN_STEPS or step < self._next:
            return None
        self._next = step + self._pause
        return message


@torch.no_grad()
def fingerprint(model: nn.Module) -> int:
    """Returns a 64-bit checksum of all parameters that changes with any single value.

    It is the exact sum of the values' bit patterns, times an odd number per parameter.
    """
    bits: list[Tensor] = [parameter.detach().contiguous().view(torch.int32) for parameter in model.parameters()]
    return int(torch.stack([each.sum(dtype=torch.int64) * (2 * i + 1) for i, each in enumerate(bits)]).sum())


def diverged_ranks(fingerprints: Sequence[int]) -> str:
    """Returns a sentence that names the ranks that differ; empty if none does."""
    counts = Counter(fingerprints)
    if len(counts) == 1:
        return ""
    (most, number), *_ = counts.most_common()
    odd = [str(rank) for rank, found in enumerate(fingerprints) if found != most]
    if 2 * number <= len(fingerprints):
        return (
            f"ranks {', '.join(map(str, range(len(fingerprints))))} have different parameters, and no majority agrees"
        )
    whose = f"rank {odd[0]}'s" if len(odd) == 1 else f"ranks {', '.join(odd)}'s"
    return f"{whose} parameters differ from those of the other ranks"


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank]
