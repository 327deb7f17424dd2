"""Forecasts from a configuration and a corpus before a run: counts, learning rates, quality, and warnings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from electra_fast.config.config import Config, ModelConfig, OptimizerConfig
from electra_fast.config.presets import OBJECTIVE_SPECS
from electra_fast.data.coverage import MOST_UNKNOWN
from electra_fast.data.mixture import Corpora, Mixture
from electra_fast.hardware.flops import flops_per_token
from electra_fast.optimizers.optimizer import lr_scale
from electra_fast.optimizers.rules import RULES

# Thresholds of the warnings. All but MAX_RULE_STEPS are round numbers, not optima.
MAX_EPOCHS = 40
# The same for a model that was trained before: Gururangan et al., 2020 (Don't Stop Pretraining), gain with 100.
MAX_EPOCHS_IMPORTED = 100
# Row length relative to the mean document; tokens of the corpus per entry of its vocabulary; the embedding table as a
# fraction of the model's parameters.
MAX_ROW_PER_DOCUMENT = 4
MIN_TOKENS_PER_ENTRY = 100
MAX_TABLE_SHARE = 2 / 3
# A smaller vocabulary is never reported as large.
MIN_LARGE_VOCAB = 1_000
# Steps of the longest runs in which other learning rates were compared with the rule (bench/LOG.md).
MAX_RULE_STEPS = 19_000
# Warns if the learning rate never reaches this fraction of its peak.
LOW_PEAK = 0.5


def size(config: Config, mixture: Mixture | None, num_parameters: int) -> dict[str, Any]:
    """Returns a run's counts and learning rates. `config` must be resolved."""
    tokens_per_step = config.train.batch_size * config.data.sequence_length
    tokens = config.train.steps * tokens_per_step
    per_token = flops_per_token(config).total
    optimizer = config.optimizer
    return {
        "parameters": num_parameters,
        "steps": config.train.steps,
        "tokens_per_step": tokens_per_step,
        "tokens": tokens,
        "corpus_tokens": None if mixture is None else mixture.num_tokens,
        "epochs": None if mixture is None else tokens / max(1, mixture.num_tokens),
        "flops_per_token": per_token,
        "flops": per_token * tokens,
        "learning_rates": {name: getattr(optimizer, name) for name in RULES[optimizer.name].learning_rates},
        "warmup_steps": optimizer.warmup_steps,
    }


def rows_of_evaluation(config: Config, holdout: Corpora, num_batches: int) -> int:
    """Returns the rows of an evaluation of `num_batches` batches (0: all), at most the whole validation set."""
    rows = -(-Mixture(holdout).num_tokens // config.data.sequence_length)
    return max(1, min(rows, num_batches * config.train.batch_size or rows))


def warnings(config: Config, mixture: Mixture | None, counts: Mapping[str, Any], *, imported: bool) -> Iterator[str]:
    """Yields warnings about a run, each with a remedy; reads no tokens.

    `counts` is the result of `size`. An `imported` model was trained before, so its sizes cannot change.
    """
    data = config.data
    epochs = counts["epochs"]
    max_epochs = MAX_EPOCHS_IMPORTED if imported else MAX_EPOCHS
    if mixture is not None and epochs > max_epochs:
        max_steps = max(1, max_epochs * mixture.num_tokens // counts["tokens_per_step"])
        yield (
            f"the run reads the corpus {epochs:,.0f} times, and a model learns less with each repetition; add text, "
            f"or lower train.steps (to {max_steps:,} for {max_epochs} epochs)"
        )
    yield from low_peak_warnings(config)
    if mixture is not None:
        mean = mixture.num_tokens / max(1, sum(len(corpus) for corpus in mixture.corpora))
        if data.sequence_length > 32 and data.sequence_length > MAX_ROW_PER_DOCUMENT * mean:
            yield (
                f"rows of {data.sequence_length} tokens hold many documents of about {mean:.0f} tokens, which do not "
                f"attend to each other; lower data.sequence_length (and raise train.batch_size in proportion)"
            )
    is_by_rule = has_rule(config) and config.optimizer.muon_learning_rate == by_rule(config).muon_learning_rate
    if imported:
        if is_by_rule:
            yield (
                "the learning rates follow a rule for untrained models and may undo earlier training of this model; "
                "lower optimizer.muon_learning_rate, or use electra-fast adapt, which lowers it"
            )
        return
    if mixture is not None:
        largest = max(MIN_LARGE_VOCAB, mixture.num_tokens // MIN_TOKENS_PER_ENTRY)
        if mixture.vocab_size > largest:
            yield (
                f"a vocabulary of {mixture.vocab_size:,} entries is large for {mixture.num_tokens:,} tokens "
                f"({mixture.num_tokens / mixture.vocab_size:.0f} per entry); prepare with a smaller one "
                f"(vocab --size {largest})"
            )
    table = config.model.vocab_size * config.model.embedding_size
    if table > MAX_TABLE_SHARE * counts["parameters"]:
        yield (
            f"the embedding table has {table / counts['parameters']:.0%} of the parameters; train a smaller vocabulary "
            "(vocab --size) to leave more parameters for the layers"
        )
    if flops_per_token(config).generator and _has_large_generator(config):
        yield (
            "the generator is as large as the discriminator, so the discriminator learns less and a step costs more "
            "FLOPs; lower generator.fraction or generator.num_layers"
        )
    if is_by_rule and config.schedule_steps > MAX_RULE_STEPS:
        yield (
            f"the learning rates follow a rule that was tested in runs of at most {MAX_RULE_STEPS:,} steps; this run "
            f"has {config.schedule_steps:,}, so compare learning rates in shorter runs first"
        )


def _has_large_generator(config: Config) -> bool:
    generator = config.generator_shape()
    discriminator = config.model
    must_be_large = config.model.tying == "all" or "generator.fraction" in OBJECTIVE_SPECS[config.objective.name].needs
    return (
        not must_be_large
        and generator.num_layers * generator.hidden_size**2 >= discriminator.num_layers * discriminator.hidden_size**2
    )


def has_rule(config: Config) -> bool:
    """Returns whether the learning rates can be derived from the number of steps, as in recipe `modern`."""
    return config.model.architecture == "modernbert" and config.optimizer.name == "muon"


def by_rule(config: Config) -> OptimizerConfig:
    """Returns the optimizer of a resolved configuration, with the learning rates that are derived from its steps."""
    fresh = dataclasses.replace(config.optimizer, learning_rate=0.0, muon_learning_rate=0.0)
    return fresh.for_steps(config.schedule_steps)


def low_peak_warnings(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    steps = config.schedule_steps
    # Both schedules have one peak: at the end of the warmup, or in the middle of a warmup that is too long.
    candidates = (min(optimizer.warmup_steps, steps - 1), steps // 2)
    peak = max(lr_scale(optimizer, step, steps) for step in candidates)
    if peak < LOW_PEAK:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} with train.steps = {config.train.steps}: "
            f"the learning rate never exceeds {peak:.0%} of optimizer.learning_rate = {optimizer.learning_rate:g}; "
            f"lower optimizer.warmup_steps (-1: a twentieth of the steps)"
        )


def corpus_warnings(mixture: Mixture, *, imported: bool) -> Iterator[str]:
    """Yields warnings about unknown tokens; reads a sample of each corpus.

    They are easy to predict and to distinguish from other tokens, so a run that learns little else has good metrics.
    """
    for name, corpus in zip(mixture.names(), mixture.corpora, strict=True):
        if (share := corpus.coverage().unknown_share) > MOST_UNKNOWN:
            remedy = "train a vocabulary on this text (electra-fast vocab) and prepare with it"
            if imported:
                remedy = "train a vocabulary on this text (electra-fast vocab) and import the model with --vocab"
            yield f"{name}: {share:.1%} of the tokens are [UNK]; {remedy}"


def compact(config: Config, mixture: Mixture, num_parameters: int, *, imported: bool) -> Iterator[str]:
    """Yields the lines of a plan that need no measurement, for the start of a run."""
    counts = size(config, mixture, num_parameters)
    rates = ", ".join(f"{name} {rate:g}" for name, rate in counts["learning_rates"].items())
    yield (
        f"plan: {counts['tokens'] / 1e6:,.2f} M tokens, {counts['epochs']:.3g} epochs, {counts['flops']:.3g} FLOPs; "
        f"{rates} after {counts['warmup_steps']:,} steps of warmup"
    )
    yield from (f"warning: {line}" for line in warnings(config, mixture, counts, imported=imported))


@dataclass(frozen=True)
class ScalingLaw:
    """1 - AUC = floor + size / N**alpha + data / D**beta, for N weights and D tokens, both in millions.

    The formula is from Hoffmann et al., 2022 (Training Compute-Optimal Large Language Models). Repeated tokens count
    less, as in Muennighoff et al., 2023 (Scaling Data-Constrained Language Models).
    `bench/scaling_law.py` fits the constants to the runs of `bench/data/recipes.jsonl`; `docs/background/scaling.md`
    reports how well they extrapolate.

    Args:
        floor: Error of an infinite model after infinite text.
        size: Additional error of a model of 1 M weights.
        alpha: Exponent of the weights.
        data: Additional error after 1 M tokens.
        beta: Exponent of the tokens.
        epochs: Limit of the value of repeated text, in epochs of new text.
    """

    floor: float
    size: float
    alpha: float
    data: float
    beta: float
    epochs: float

    def error(self, weights: float, tokens: float, text: float = math.inf) -> float:
        """Returns the expected 1 - AUC of a model with `weights` after `tokens` of a text of `text` tokens."""
        limit = self.floor + self.size * math.pow(weights / 1e6, -self.alpha)
        return limit + self.data * math.pow(self.fresh(tokens, text) / 1e6, -self.beta)

    def fresh(self, tokens: float, text: float) -> float:
        """Returns the number of distinct tokens that are worth as much as `tokens` of a text of `text` tokens."""
        repeats = max(0.0, tokens / text - 1)
        return min(tokens, text) + (text * self.epochs * -math.expm1(-repeats / self.epochs) if repeats else 0.0)


LAW = ScalingLaw(floor=0.0001, size=0.1008, alpha=0.1918, data=0.3229, beta=0.7063, epochs=45.44)


def layer_weights(shape: ModelConfig) -> int:
    """Returns the number of weights in all layers' matrices, the model size in the scaling law."""
    hidden = shape.hidden_size
    matrices = 3 if shape.architecture == "modernbert" else 2
    return shape.num_layers * hidden * (4 * hidden + matrices * shape.intermediate_size)
