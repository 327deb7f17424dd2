"""What follows from a configuration and a corpus before a run starts: counts, rates, quality, and what is unwise."""

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

# Beyond these, a run is warned of. None is an optimum; all but the last are round numbers.
MAX_EPOCHS = 40
# The same for a model that was trained before: Gururangan et al., 2020 (Don't Stop Pretraining), gain with 100.
MAX_EPOCHS_IMPORTED = 100
# Row length relative to the mean document; tokens of the corpus per entry of its vocabulary; the table's share of the
# model's parameters.
MAX_ROW_PER_DOCUMENT = 4
MIN_TOKENS_PER_ENTRY = 100
MAX_TABLE_SHARE = 2 / 3
# No vocabulary below this is called large.
FEWEST_ENTRIES = 1_000
# Steps of the longest runs in which other rates were compared with the rule's (bench/LOG.md).
MAX_RULE_STEPS = 19_000
# Warns if the learning rate never reaches this fraction of its peak.
LOW_PEAK = 0.5


def size(config: Config, mixture: Mixture | None, num_parameters: int) -> dict[str, Any]:
    """Returns what follows from the configuration and the corpus: counts and rates. `config` is resolved."""
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
    """Returns the rows of an evaluation of `num_batches` batches (0: all), as far as the validation text goes."""
    rows = -(-Mixture(holdout).num_tokens // config.data.sequence_length)
    return max(1, min(rows, num_batches * config.train.batch_size or rows))


def warnings(config: Config, mixture: Mixture | None, found: Mapping[str, Any], *, imported: bool) -> Iterator[str]:
    """Yields what is unwise about a run, each with its remedy; reads no tokens.

    `found` is its `size`. An `imported` model was trained before, on other text, so that its sizes are given.
    """
    data = config.data
    epochs = found["epochs"]
    most_epochs = MAX_EPOCHS_IMPORTED if imported else MAX_EPOCHS
    if mixture is not None and epochs > most_epochs:
        most = max(1, most_epochs * mixture.num_tokens // found["tokens_per_step"])
        yield (
            f"the run reads the corpus {epochs:,.0f} times, and repeated text teaches less and less; add text, "
            f"or lower train.steps (to {most:,} for {most_epochs} epochs)"
        )
    yield from low_peak_warnings(config)
    if mixture is not None:
        mean = mixture.num_tokens / max(1, sum(len(each) for each in mixture.corpora))
        if data.sequence_length > 32 and data.sequence_length > MAX_ROW_PER_DOCUMENT * mean:
            yield (
                f"rows of {data.sequence_length} tokens hold many documents of {mean:.0f} tokens each, which do not "
                f"attend to each other; lower data.sequence_length (and raise train.batch_size as much)"
            )
    is_by_rule = has_rule(config) and config.optimizer.muon_learning_rate == by_rule(config).muon_learning_rate
    if imported:
        if is_by_rule:
            yield (
                "the learning rates follow a rule for models that begin untrained, and may undo what this one has "
                "learned; lower optimizer.muon_learning_rate, or take electra-fast adapt, which does"
            )
        return
    if mixture is not None:
        largest = max(FEWEST_ENTRIES, mixture.num_tokens // MIN_TOKENS_PER_ENTRY)
        if mixture.vocab_size > largest:
            yield (
                f"a vocabulary of {mixture.vocab_size:,} entries is large for {mixture.num_tokens:,} tokens "
                f"({mixture.num_tokens / mixture.vocab_size:.0f} per entry); prepare with a smaller one "
                f"(vocab --size {largest})"
            )
    table = config.model.vocab_size * config.model.embedding_size
    if table > MAX_TABLE_SHARE * found["parameters"]:
        yield (
            f"the embedding table is {table / found['parameters']:.0%} of the parameters; a smaller vocabulary "
            "(vocab --size) leaves more to the layers"
        )
    if flops_per_token(config).generator and _has_large_generator(config):
        yield (
            "the generator is as large as the discriminator, which then learns less for more FLOPs; "
            "lower generator.fraction or generator.num_layers"
        )
    if is_by_rule and config.schedule_steps > MAX_RULE_STEPS:
        yield (
            f"the learning rates follow a rule that was tried in runs of at most {MAX_RULE_STEPS:,} steps; for "
            f"{config.schedule_steps:,} it is an extrapolation: compare rates in shorter runs first"
        )


def _has_large_generator(config: Config) -> bool:
    own = config.generator_shape()
    other = config.model
    must_be_large = config.model.tying == "all" or "generator.fraction" in OBJECTIVE_SPECS[config.objective.name].needs
    return not must_be_large and own.num_layers * own.hidden_size**2 >= other.num_layers * other.hidden_size**2


def has_rule(config: Config) -> bool:
    """Returns whether learning rates can be derived from the number of steps, as in recipe `modern`."""
    return config.model.architecture == "modernbert" and config.optimizer.name == "muon"


def by_rule(config: Config) -> OptimizerConfig:
    """Returns the optimizer of a resolved configuration with the rates that are derived from its steps."""
    fresh = dataclasses.replace(config.optimizer, learning_rate=0.0, muon_learning_rate=0.0)
    return fresh.for_steps(config.schedule_steps)


def low_peak_warnings(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    steps = config.schedule_steps
    # Both schedules have one peak: at the end of the warmup, or in the middle of a warmup that is too long.
    at = (min(optimizer.warmup_steps, steps - 1), steps // 2)
    peak = max(lr_scale(optimizer, step, steps) for step in at)
    if peak < LOW_PEAK:
        yield (
            f"optimizer.warmup_steps = {optimizer.warmup_steps} with train.steps = {config.train.steps}: "
            f"the learning rate never passes {peak:.0%} of optimizer.learning_rate = {optimizer.learning_rate:g}; "
            f"lower optimizer.warmup_steps (-1: a twentieth of the steps)"
        )


def corpus_warnings(mixture: Mixture, *, imported: bool) -> Iterator[str]:
    """Warns of unknown tokens; reads a sample of each corpus.

    They are easy to predict and to tell from others, so a run that learns little else looks good by its numbers.
    """
    for name, corpus in zip(mixture.names(), mixture.corpora, strict=True):
        if (share := corpus.coverage().unknown_share) > MOST_UNKNOWN:
            how = "give the model a vocabulary of this text (electra-fast vocab, then import --vocab)"
            remedy = how if imported else "prepare with a vocabulary of this text (electra-fast vocab)"
            yield f"{name}: {share:.1%} of the tokens are [UNK]; {remedy}"


def compact(config: Config, mixture: Mixture, num_parameters: int, *, imported: bool) -> Iterator[str]:
    """Yields the lines of a plan that need no measurement, for the start of a run."""
    found = size(config, mixture, num_parameters)
    rates = ", ".join(f"{name} {rate:g}" for name, rate in found["learning_rates"].items())
    yield (
        f"plan: {found['tokens'] / 1e6:,.2f} M tokens, {found['epochs']:.3g} epochs, {found['flops']:.3g} FLOPs; "
        f"{rates} after {found['warmup_steps']:,} steps of warmup"
    )
    yield from (f"warning: {line}" for line in warnings(config, mixture, found, imported=imported))


@dataclass(frozen=True)
class ScalingLaw:
    """1 - AUC = floor + size / N**alpha + data / D**beta, for N weights and D tokens, both in millions.

    The form is that of Hoffmann et al., 2022 (Training Compute-Optimal Large Language Models), with tokens that count
    less the more often they are read, as in Muennighoff et al., 2023 (Scaling Data-Constrained Language Models).
    `bench/scaling_law.py` fits the constants to the runs of `bench/data/recipes.jsonl`; `docs/background/scaling.md`
    reports how well they extrapolate.

    Args:
        floor: Error of an infinite model after infinite text.
        size: Error of a model of 1 M weights beyond the floor.
        alpha: Exponent of the weights.
        data: Error after 1 M tokens beyond that.
        beta: Exponent of the tokens.
        epochs: Epochs beyond the first that repeated text is worth at most.
    """

    floor: float
    size: float
    alpha: float
    data: float
    beta: float
    epochs: float

    def error(self, weights: float, tokens: float, text: float = math.inf) -> float:
        """Returns the expected 1 - AUC of a model of `weights` after `tokens` of a text of `text` tokens."""
        limit = self.floor + self.size * math.pow(weights / 1e6, -self.alpha)
        return limit + self.data * math.pow(self.fresh(tokens, text) / 1e6, -self.beta)

    def fresh(self, tokens: float, text: float) -> float:
        """Returns the number of tokens read once that teach as much as `tokens` of a text of `text` tokens."""
        repeats = max(0.0, tokens / text - 1)
        return min(tokens, text) + (text * self.epochs * -math.expm1(-repeats / self.epochs) if repeats else 0.0)


LAW = ScalingLaw(floor=0.0001, size=0.1008, alpha=0.1918, data=0.3229, beta=0.7063, epochs=45.44)


def layer_weights(shape: ModelConfig) -> int:
    """Returns the weights of all layers' matrices, which the law calls the size."""
    hidden = shape.hidden_size
    matrices = 3 if shape.architecture == "modernbert" else 2
    return shape.num_layers * hidden * (4 * hidden + matrices * shape.intermediate_size)
