"""Diagnostics of a run: divergence, a discriminator that stops learning, ranks that differ, and the verdict at the end.

Divergence is measured against the loss of a model that answers uniformly, which every objective has. A healthy run is
near it at its first step and soon below it, whatever its recipe and batch size, so noise cannot take it to twice this
loss. Only the first updates may, before a short warmup or Adam without bias correction has settled.

Losses and AUCs against a run's own generator hide a discriminator that has stalled: the better the generator, the
harder its samples. An AUC on replacements that stay the same shows it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from electra_fast.config.config import Config, OptimizerConfig
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import LossHistory, TrainState
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import Number, Objective

# Times the loss of uniform answers: above this, a run has exploded.
_EXPLODED = 2.0
# Of the way from the lowest loss to that of uniform answers: above this, what was learned is lost.
_LOST = 0.4
# Steps over which losses are averaged before they are compared with the lowest, and how many averages have to be lost.
_STEPS, _LASTING = 100, 2


def has_exploded(objective: Objective, metrics: Mapping[str, Number]) -> bool:
    """Whether the metrics of some steps, or of an evaluation, are those of a run that has exploded."""
    limit = _EXPLODED * objective.comparable_loss(uniform_metrics(objective))
    return not objective.comparable_loss(metrics) <= limit  # nan is no better


def what_is_lost(history: LossHistory, objective: Objective, metrics: Mapping[str, Number], steps: int) -> str | None:
    """Adds the metrics of so many steps to the history; names the losses if all of them are lost for good.

    One alone may rise while a run goes well: the discriminator's, when its generator learns.
    """
    for name, value in _losses(objective, metrics).items():
        history.totals[name] = history.totals.get(name, 0.0) + steps * value
    history.steps += steps
    if history.steps < _STEPS:
        return None
    uniform, lowest = _losses(objective, uniform_metrics(objective)), history.lowest
    means = {name: total / history.steps for name, total in history.totals.items()}
    is_lost = [means[name] > low + _LOST * (uniform[name] - low) for name, low in lowest.items()]
    history.num_lost = history.num_lost + 1 if is_lost and all(is_lost) else 0
    history.lowest = {name: min(mean, lowest.get(name, math.inf)) for name, mean in means.items()}
    history.totals, history.steps = {}, 0
    if history.num_lost < _LASTING:
        return None
    return " and ".join(f"{name} rose from {low:.4g} to {means[name]:.4g}" for name, low in lowest.items())


def uniform_metrics(objective: Objective) -> dict[str, Number]:
    """The metrics of a model that gives all tokens of the vocabulary, and both answers, the same probability."""
    vocabulary, answer = math.log(objective.config.model.vocab_size), math.log(2)
    losses = {"encoder_loss": vocabulary, "corrective_loss": vocabulary}
    losses["generator_loss"] = vocabulary if "generator" in objective.networks() else 0.0
    losses |= {"discriminator_loss": answer, "contrastive_loss": answer, "baseline_loss": answer}
    return objective.metrics(dict.fromkeys(objective.metric_totals, 1.0) | losses)


def way_back(run: Path, state: TrainState, optimizer: OptimizerConfig) -> str:
    """Which checkpoint of a diverged run is good, and the command that goes back to it."""
    kept = checkpoint_folder.steps(run)
    if not kept:
        return f"there is no checkpoint yet; start again with {_lower(optimizer, optimizer)} or a longer warmup"
    step, good = state.best_step if state.best_step in kept else kept[-1], "the last good checkpoint"
    if step == state.best_step and state.best_loss is not None:
        good = f"the best checkpoint ({state.best_by} loss {state.best_loss:.4g})"
    before = Config.load(checkpoint_folder.path_of(run, step) / "config.toml").optimizer
    command = f"electra-fast pretrain --out {run} --from step-{step} {_lower(before, optimizer)} --allow-changes"
    return f"step-{step} is {good}; go back to it with lower rates: {command}"


def _lower(before: OptimizerConfig, now: OptimizerConfig) -> str:
    """Rates to try, as options: as before, those that have been raised since; if none has been, half of all."""
    names = ["learning_rate"] + ["muon_learning_rate"] * (now.name == "muon")
    rates = {name: getattr(now, name) / 2 for name in names}
    raised = {name: getattr(before, name) for name in names if 0 < getattr(before, name) < getattr(now, name)}
    return " ".join(f"--optimizer.{name} {rate:g}" for name, rate in (raised or rates).items())


def _losses(objective: Objective, metrics: Mapping[str, Number]) -> dict[str, float]:
    return {name: float(value) for name in objective.lowered_losses if (value := metrics.get(name)) is not None}


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


MIN_STEPS = 100
"""Before so many steps, and over fewer, no warning makes sense."""


def warning(metrics: Mapping[str, Number]) -> str | None:
    """A warning about a log window in one line, or None. Its thresholds make sense after the warmup only."""
    replaced, recall = metrics["replaced_fraction"], metrics["discriminator_recall"]
    loss = metrics["discriminator_loss"]
    if replaced is None or recall is None or loss is None:
        return None
    if replaced < 0.01:
        return (
            f"the generator is nearly always right: only {replaced:.1%} of the tokens are replaced, which teaches the "
            "discriminator little; use a smaller generator.fraction or a higher objective.temperature"
        )
    if replaced == 1:
        return None
    majority = -(replaced * math.log(replaced) + (1 - replaced) * math.log1p(-replaced))
    if loss > 1.02 * majority:
        return (
            f"the discriminator has collapsed: loss {loss:.4f} is worse than always answering the class shares "
            f"({majority:.4f}); lower optimizer.learning_rate, or make the generator weaker (generator.fraction)"
        )
    if recall == 0:
        return f"the discriminator calls every token original (loss {loss:.4f}, class shares alone {majority:.4f})"
    return None


class LastingWarning:
    """Tells a warning that lasts from one that passes: at most one in `pause` steps.

    It has to hold in two log windows in a row, and over `MIN_STEPS` steps.
    """

    def __init__(self, pause: int) -> None:
        self._pause, self._next = pause, 0
        self._windows, self._steps = 0, 0

    def take(self, metrics: Mapping[str, Number], num_steps: int, first_step: int) -> str | None:
        """The warning to give after a log window of so many steps, or None; windows before the first step are none."""
        step = int(metrics["step"] or 0)
        message = warning(metrics) if step - num_steps >= first_step else None
        self._windows, self._steps = (self._windows + 1, self._steps + num_steps) if message else (0, 0)
        if self._windows < 2 or self._steps < MIN_STEPS or step < self._next:
            return None
        self._next = step + self._pause
        return message


@torch.no_grad()
def fingerprint(model: nn.Module) -> int:
    """64 bits of the values of all parameters; another value of any single one changes them.

    An exact sum of the values' bit patterns, each parameter's times an odd number of its own.
    """
    sums: list[Tensor] = [_bits(p).sum(dtype=torch.int64) * (2 * i + 1) for i, p in enumerate(model.parameters())]
    return int(torch.stack(sums).sum())


def _bits(parameter: Tensor) -> Tensor:
    return parameter.detach().contiguous().view(torch.int32)


def diverged_ranks(fingerprints: Sequence[int]) -> str:
    """Which ranks differ, as a sentence; empty if none does."""
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
    """The rank that has spent the most seconds, and these."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank]
