"""The paper's comparisons: the configuration of each row, the paper's score, and the paper's conclusions.

Rows differ only in the subject of the comparison. All use the paper's masking and the same budget of true FLOPs, so
their numbers of steps differ, and with them the warmup and the learning rates of the recipe `modern`. In the paper, the
rows of `generators` and `tying` have the same number of steps instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from electra_fast.config.config import AUTO, Config
from electra_fast.config.section import Scalar, did_you_mean
from electra_fast.data.corpus import Corpus
from electra_fast.errors import InputError
from electra_fast.hardware.flops import flops_per_token
from electra_fast.model.compute import choose_device, choose_precision

# With fewer steps, the warmup (a twentieth of the steps) would have fewer than five.
MIN_STEPS = 100

PUBLISHED = {"ELECTRA": {256: 79.9, 768: 85.1, 1024: 89.0}, "BERT": {256: 75.1, 768: 82.2, 1024: 87.2}}
"""Validation scores on GLUE of small, base and large, by hidden size (Tables 1 and 2); equal compute per size."""
PUBLISHED_SHAPES = {(256, 12), (768, 12), (1024, 24)}
"""Hidden sizes and layers of these models."""


@dataclass(frozen=True)
class Row:
    """One row of a comparison; its steps follow from the budget, and its seed from the run.

    `paper` is the GLUE score in the paper (mean over tasks, validation), if there is one. The rows of a `group` are one
    line in the plot, by the `width` of the network that the experiment varies.
    """

    name: str
    title: str
    config: Config
    paper: float | None = None
    group: str = ""
    width: int = 0


@dataclass(frozen=True)
class Claim:
    """A conclusion of the paper: a weighted sum of row scores is above 0."""

    text: str
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Experiment:
    """A comparison of the paper; `published` has the paper's scores by group and width."""

    name: str
    title: str
    source: str
    rows: tuple[Row, ...]
    claims: tuple[Claim, ...]
    axis: str = ""
    published: Mapping[str, Mapping[int, float]] = field(default_factory=dict)


def make_experiment(name: str, base: Config, overrides: Mapping[str, str]) -> Experiment:
    """Returns the experiment with `overrides` applied to the preset and recipe `base`.

    Raises ValueError for an unknown name, for keys that the rows or the budget set, and for an unsuitable base.
    """
    if name not in EXPERIMENTS:
        raise InputError(f"unknown experiment {name!r}{did_you_mean(name, EXPERIMENTS)}")
    varied, make = EXPERIMENTS[name]
    for key in overrides:
        if key in (*varied, *DECIDED):
            raise InputError(f"--{key}: is set by `reproduce {name}`; remove it")
    # The corrective loss is not in the paper, and it would favor one row.
    return make(base.override({"data.masking": "tokens", "objective.corrective_weight": "0"} | dict(overrides)))


def with_steps(row: Row, budget: float) -> Config:
    """Returns the row's configuration with the number of steps nearest to `budget` FLOPs.

    Raises ValueError if these are too few for training or for the warmup.
    """
    config = row.config.override({"train.steps": 100_000})  # even, for objectives with two stages
    per_step = flops_per_token(config).total * config.train.batch_size * config.data.sequence_length
    steps = round(budget / per_step)
    needed = max(MIN_STEPS, 2 * config.optimizer.warmup_steps)
    if steps < needed:
        purpose = f"a warmup of {needed // 2} steps" if needed > MIN_STEPS else "a learning-rate schedule with warmup"
        raise InputError(
            f"--budget {budget:.3g}: is {steps} steps of {row.name}, but {purpose} needs {needed}; "
            f"pass --budget {1.01 * needed * per_step:.3g} or more"
        )
    return config.override({"train.steps": steps})


def base_config(config: Config, corpus: Corpus, overrides: Mapping[str, str], precision: str) -> Config:
    """Returns the configuration with the corpus and the precision that all rows share."""
    changes: dict[str, Scalar] = {"data.corpus": os.path.abspath(corpus.path), "model.vocab_size": corpus.vocab_size}
    if config.train.precision == AUTO and "train.precision" not in overrides:
        changes["train.precision"] = precision
    return config.override(changes)


def common_precision(device: str) -> str:
    """Returns the default precision of all rows; `auto` is measured per run and could differ between rows."""
    precision = choose_precision(AUTO, choose_device(device))
    return "fp32" if precision == AUTO else precision


def row_configs(experiment: Experiment, budget: float, overrides: Mapping[str, str]) -> dict[str, Config]:
    """Returns each row's configuration with its steps, without a seed. Raises ValueError if the budget is too small."""
    configs = {}
    for row in experiment.rows:
        config = with_steps(row, budget)
        steps = config.train.steps
        often = {
            "train.log_every": max(1, steps // 100),
            "train.checkpoint_every": max(1, steps // 20),
            "train.keep_checkpoints": 1,
            "train.eval_every": 0,  # rows are evaluated after training, on the same replacements
        }
        chosen = {name: value for name, value in often.items() if name not in overrides}
        configs[row.name] = config.override(chosen)
    return configs


def training_size(config: Config) -> dict[str, float]:
    """Returns steps, tokens and true FLOPs of a run."""
    tokens = config.train.steps * config.train.batch_size * config.data.sequence_length
    return {"steps": config.train.steps, "tokens": tokens, "flops": tokens * flops_per_token(config).total}


def _objectives(base: Config) -> Experiment:
    rows = (
        Row("electra", "ELECTRA", base.with_objective("electra"), 85.0),
        Row("all-tokens-mlm", "All-Tokens MLM", base.with_objective("all-tokens-mlm"), 84.3),
        Row("replace-mlm", "Replace MLM", base.with_objective("replace-mlm"), 82.4),
        Row("electra15", "ELECTRA 15%", base.with_objective("electra15"), 82.4),
        Row("mlm", "BERT", _bert(base), 82.2),
        Row("two-stage", "Two-stage ELECTRA", base.with_objective("two-stage")),
        Row("adversarial", "Adversarial ELECTRA", base.with_objective("adversarial")),
    )
    claims = (
        _above("electra", "mlm", "ELECTRA is better than BERT"),
        _above("electra", "electra15", "a loss on all tokens is better than on 15 %"),
        _above("electra", "all-tokens-mlm", "ELECTRA is better than All-Tokens MLM"),
        _above("all-tokens-mlm", "mlm", "All-Tokens MLM is better than BERT"),
        _above("replace-mlm", "mlm", "Replace MLM is slightly better than BERT"),
        _above("electra", "two-stage", "joint training is better than two stages"),
        _above("electra", "adversarial", "a maximum-likelihood generator is better than an adversarial generator"),
        _above("adversarial", "mlm", "adversarial ELECTRA is better than BERT"),
    )
    return Experiment("objectives", "Pre-training objectives", "Table 4 and Figure 3, right", rows, claims)


def _generators(base: Config) -> Experiment:
    """Generators of a quarter to the full width, if it has whole heads, and the unigram distribution."""
    electra = base.with_objective("electra")
    rows = [Row("unigram", "unigram", electra.override({"generator.kind": "unigram"}))]
    full = base.model.hidden_size
    fractions = [fraction for fraction in (0.25, 0.5, 0.75, 1.0) if base.model.num_heads * fraction % 1 == 0]
    for fraction in fractions:
        config = electra.override({"generator.fraction": str(fraction)})
        width = config.generator_shape().hidden_size
        title = "full width" if fraction == 1 else f"{fraction:g} of the width"
        rows.append(Row(f"fraction-{fraction:g}", title, config, None, "ELECTRA", width))
    claims = [
        _above(f"fraction-{fraction:g}", "fraction-1", f"{fraction:g} of the width is better than the full width")
        for fraction in fractions
        if fraction <= 0.5
    ]
    source = "Figure 3, left; a plot without numbers"
    axis = f"hidden size of the generator (discriminator: {full})"
    return Experiment("generators", "Generator sizes", source, tuple(rows), tuple(claims), axis)


def _tying(base: Config) -> Experiment:
    same = base.with_objective("electra").override({"generator.fraction": "1", "generator.num_layers": "0"})
    rows = tuple(
        Row(f"tying-{tying}", title, same.override({"model.tying": tying}), paper)
        for tying, title, paper in (
            ("none", "nothing tied", 83.6),
            ("embeddings", "embeddings tied", 84.3),
            ("all", "all weights tied", 84.4),
        )
    )
    claims = (
        _above("tying-embeddings", "tying-none", "tied embeddings are better than none"),
        _above("tying-all", "tying-embeddings", "tying all weights is slightly better than embeddings"),
    )
    return Experiment("tying", "Weight sharing, with a generator as large as the model", "Section 3.2", rows, claims)


def _sizes(base: Config) -> Experiment:
    """The model at a quarter, half and all of its width, with the same heads and layers."""
    rows = []
    model = base.model
    names = ("hidden_size", "intermediate_size", "embedding_size")
    widths = [model.hidden_size // divisor for divisor in (4, 2, 1)]
    for width, divisor in zip(widths, (4, 2, 1), strict=True):
        config = base.override({f"model.{name}": max(1, getattr(model, name) // divisor) for name in names})
        is_published = (width, config.model.num_layers) in PUBLISHED_SHAPES
        paper = {group: scores[width] if is_published else None for group, scores in PUBLISHED.items()}
        electra = config.with_objective("electra")
        bert = _bert(config)
        rows.append(Row(f"electra-{width}", f"ELECTRA {width}", electra, paper["ELECTRA"], "ELECTRA", width))
        rows.append(Row(f"mlm-{width}", f"BERT {width}", bert, paper["BERT"], "BERT", width))
    claims = [_above(f"electra-{width}", f"mlm-{width}", f"ELECTRA is better than BERT at {width}") for width in widths]
    small = widths[0]
    large = widths[-1]
    gains = {f"electra-{small}": 1.0, f"mlm-{small}": -1.0, f"electra-{large}": -1.0, f"mlm-{large}": 1.0}
    claims.append(Claim(f"the gain is larger at {small} than at {large}", gains))
    title = "ELECTRA and BERT by size"
    source = "Figure 4; scores of Tables 1 and 2"
    return Experiment("sizes", title, source, tuple(rows), tuple(claims), "hidden size", PUBLISHED)


EXPERIMENTS: dict[str, tuple[tuple[str, ...], Callable[[Config], Experiment]]] = {
    "objectives": (("objective.name",), _objectives),
    "generators": (("objective.name", "generator.fraction", "generator.kind"), _generators),
    "tying": (("objective.name", "model.tying", "generator.fraction", "generator.num_layers"), _tying),
    "sizes": (("objective.name", "model.hidden_size", "model.intermediate_size", "model.embedding_size"), _sizes),
}
"""Keys that an experiment varies, and the function that creates it."""

DECIDED = ("train.steps", "train.seed", "train.out", "train.mirror", "data.corpus")
"""Keys that the budget, the seed and the folders determine."""


def _above(better: str, worse: str, text: str) -> Claim:
    return Claim(text, {better: 1.0, worse: -1.0})


def _bert(base: Config) -> Config:
    """Returns the paper's baseline: 80 % [MASK], 10 % random tokens, 10 % unchanged."""
    return base.with_objective("mlm").override({"data.masking": "80-10-10"})
