"""Recognizes a run that has diverged: its loss has exploded, or all that it had learned is lost.

The yardstick is the loss of a model that answers uniformly, which every objective has. A healthy run is near it at its
first step and soon below it, whatever its recipe and batch size, so noise cannot take it to twice this loss. Only the
first updates may, before a short warmup or Adam without bias correction has settled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from electra_fast.config.config import Config, OptimizerConfig
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import LossHistory, TrainState
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
