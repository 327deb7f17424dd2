"""Sizes and recipes: tables of keys that override the defaults of `config`; what objectives and their options need.

Those defaults are the preset `small` in the recipe `modern`, so a table has only what differs from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from electra_fast.config.section import Scalar, Value, format_value
from electra_fast.errors import InputError

DEFAULT_PRESET = "small"
DEFAULT_RECIPE = "modern"

# In the recipe `modern`. GeGLU has three matrices instead of two: two thirds of the published width for the same FLOPs,
# rounded to whole tiles, also in the generator.
SIZES: dict[str, dict[str, Scalar]] = {
    "tiny": {
        "model.num_layers": 2,
        "model.hidden_size": 64,
        "model.intermediate_size": 176,
        "model.num_heads": 2,
        "model.embedding_size": 32,
        "model.max_positions": 128,
        "generator.fraction": 0.5,
        "train.batch_size": 16,
        "train.steps": 2_000,
        "train.log_every": 50,
        "train.eval_every": 500,
        "train.checkpoint_every": 500,
    },
    # Learns something in an hour or two on two cores: 20 M tokens at 4,096 per step.
    "mini": {
        "model.num_layers": 4,
        "train.batch_size": 32,
        "train.steps": 5_000,
        "train.log_every": 20,
        "train.eval_every": 500,
        "train.checkpoint_every": 500,
    },
    "small": {},
    "base": {
        "model.hidden_size": 768,
        "model.intermediate_size": 2048,
        "model.num_heads": 12,
        "model.embedding_size": 768,
        "data.sequence_length": 512,
        "train.batch_size": 256,
        "train.steps": 766_000,
    },
    "large": {
        "model.num_layers": 24,
        "model.hidden_size": 1024,
        "model.intermediate_size": 2752,
        "model.num_heads": 16,
        "model.embedding_size": 1024,
        "data.sequence_length": 512,
        "train.batch_size": 2048,
        "train.steps": 400_000,
    },
}

# What `paper` and `google` share: table 6 of the paper and `configure_pretraining.py` of the published code.
_PUBLISHED: dict[str, Scalar] = {
    "model.architecture": "bert",
    "model.dropout": 0.1,
    "model.attention_dropout": 0.1,
    "data.mask_prob": 0.15,
    "optimizer.learning_rate": 5e-4,
    "optimizer.muon_learning_rate": 0.02,
    "optimizer.beta2": 0.999,
    "objective.disc_weight": 50.0,
    "objective.corrective_weight": 0.0,
}

# The loss weights of `modern` were tuned at `tiny`, the mask probability also at `mini` (bench/LOG.md). Learning rates
# of 0 depend on the number of steps: at both sizes Muon's optimum falls with its square root, for one to four times the
# tokens per step, and its updates have the same spectral norm at any width.
RECIPES: dict[str, dict[str, Scalar]] = {
    "paper": _PUBLISHED | {"optimizer.name": "lamb"},
    "google": _PUBLISHED
    | {
        "data.masking": "with-repeats",
        "data.packing": "examples",
        "optimizer.name": "adamw",
        "optimizer.schedule": "product",
        "optimizer.bias_correction": False,
    },
    "modern": {},
    # DeBERTaV3: arXiv 2111.09543 and the published code, whose generator has half of the layers.
    "deberta": {
        "model.architecture": "deberta",
        "model.dropout": 0.1,
        "model.attention_dropout": 0.1,
        "model.tying": "disentangled",
        "generator.fraction": 1.0,
        "data.mask_prob": 0.15,
        "optimizer.name": "adamw",
        "optimizer.learning_rate": 3e-4,
        "optimizer.muon_learning_rate": 0.02,
        "optimizer.beta2": 0.999,
        "objective.disc_weight": 50.0,
        "objective.corrective_weight": 0.0,
    },
}

_PUBLISHED_SIZES: dict[str, dict[str, Scalar]] = {
    "tiny": {"model.intermediate_size": 256},
    "mini": {"model.intermediate_size": 1024},
    "small": {"model.intermediate_size": 1024},
    "base": {"model.intermediate_size": 3072, "generator.fraction": 1 / 3, "optimizer.learning_rate": 2e-4},
    "large": {"model.intermediate_size": 4096, "optimizer.learning_rate": 2e-4},
}
SIZE_RECIPES: dict[tuple[str, str], dict[str, Scalar]] = {
    (size, recipe): keys for size, keys in _PUBLISHED_SIZES.items() for recipe in ("paper", "google")
}
_DEBERTA_SIZES: dict[str, dict[str, Scalar]] = {
    "tiny": {"generator.num_layers": 1, "generator.fraction": 1.0, "model.embedding_size": 64},
    "mini": {"generator.num_layers": 2, "model.embedding_size": 256},
    "small": {"generator.num_layers": 6, "model.embedding_size": 256},
    "base": {"generator.num_layers": 6, "optimizer.learning_rate": 1e-4},
    "large": {"generator.num_layers": 12, "optimizer.learning_rate": 1e-4},
}
SIZE_RECIPES |= {
    (size, "deberta"): {"model.intermediate_size": _PUBLISHED_SIZES[size]["model.intermediate_size"]} | keys
    for size, keys in _DEBERTA_SIZES.items()
}
SIZE_RECIPES["large", "google"] = _PUBLISHED_SIZES["large"] | {"data.mask_prob": 0.25}

YOUNGER_KEYS: dict[str, Scalar] = {"objective.corrective_weight": 0.0}
"""What a run's `config.toml` means by lacking a key of the tables above: it was saved before the key existed."""


DEBERTA_RATE = 5e-5
"""Learning rate of the published continuation of DeBERTaV3, which exists for xsmall and small."""


def adaptation_settings(architecture: str, hidden_size: int) -> tuple[tuple[dict[str, Scalar], str], ...]:
    """Returns settings, and why, for continuing an encoder of that width that brings none of its own.

    `import --generator` and `import --mlm` set them, and `adapt`.
    """
    rate = 2.5e-4 if hidden_size <= 512 else 1e-4
    why = "half of the rate that ELECTRA of this width was trained with"
    name = "ELECTRA"
    if architecture == "deberta":
        rate = DEBERTA_RATE
        why = "as the published code continues DeBERTaV3 xsmall and small"
        name = "DeBERTaV3"
    return (
        (
            {
                "optimizer.name": "adamw",
                "optimizer.learning_rate": rate,
                "optimizer.schedule": "linear",
                "optimizer.bias_correction": True,
            },
            why,
        ),
        (
            {"train.steps": 2_000, "train.batch_size": 64, "data.sequence_length": 128},
            "16 M tokens; take more steps for more text",
        ),
        ({"data.masking": "tokens", "data.mask_prob": 0.15, "objective.disc_weight": 50.0}, f"as {name} was trained"),
        ({"train.log_every": 50, "train.eval_every": 500, "train.checkpoint_every": 500}, "four times in 2,000 steps"),
    )


ADAPTATION_PASSES = (3, 20)
ADAPTATION_STEPS = (300, 20_000)
"""`adapt` reads a text as often as the first number says; up to the second to reach the fewest steps."""
GENERAL_SHARE = 0.25
"""Share of general text in each step of `adapt`, if there is any."""
LITTLE_TEXT = 100_000
"""Fewer tokens than this are too little to adapt to."""

Needs = Mapping[str, tuple[Scalar, ...]]
"""Allowed values by configuration key, the usual one first."""

DISTINCT = ("tokens", "80-10-10", "whole-word", "span")
"""The values of `data.masking` that draw no position twice."""
_WHY_DISTINCT = (
    "with-repeats draws some positions twice and averages their samples, whose probability is then undefined"
)


@dataclass(frozen=True)
class Head:
    """A head on an encoder.

    Args:
        kind: A key of a table in `model.HEADS`.
        is_of_masked: It computes for the masked tokens only, which sets its cost.
        num_forward: Forward passes per step.
        weight: The key of `[objective]` without whose weight there is no such head; "" for a head that is always there.
    """

    kind: str
    is_of_masked: bool = False
    num_forward: int = 1
    weight: str = ""


@dataclass(frozen=True)
class ObjectiveSpec:
    """What the configuration and the model know of an objective; its loss is in `objectives/`.

    Args:
        networks: The heads of each network that it trains, by the attribute of `Electra` that holds each. Networks are
            built in this order; the last one is the result. A head named after its role is exported with it.
        needs: Settings that it requires.
        num_stages: Training stages, each at least one step long. In the second, a generator only runs forward.
    """

    networks: Mapping[str, Mapping[str, Head]]
    needs: Needs = field(default_factory=dict)
    num_stages: int = 1

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self.networks)


_MASKED_LM = Head("masked_lm", is_of_masked=True)
_GENERATOR = {"generator": {"generator_head": _MASKED_LM}}
_DISCRIMINATOR = {"discriminator_head": Head("replaced_token")}
_OPTIONAL = {
    "corrective_head": Head("masked_lm", is_of_masked=True, weight="corrective_weight"),
    "sentence_head": Head("logit", weight="contrastive_weight"),
}
# Its head runs twice: to sample, and for the likelihood of the samples.
_ADVERSARY = {
    "generator_head": Head("masked_lm", is_of_masked=True, num_forward=2),
    "baseline_head": Head("logit", is_of_masked=True),
}

OBJECTIVE_SPECS = {
    "electra": ObjectiveSpec(_GENERATOR | {"discriminator": _DISCRIMINATOR | _OPTIONAL}),
    "mlm": ObjectiveSpec(_GENERATOR, {"generator.kind": ("model",)}),
    "electra15": ObjectiveSpec(_GENERATOR | {"discriminator": _DISCRIMINATOR}, {"data.masking": DISTINCT}),
    "replace-mlm": ObjectiveSpec(
        _GENERATOR | {"encoder": {"encoder_head": _MASKED_LM}},
        {"data.masking": DISTINCT},
    ),
    "all-tokens-mlm": ObjectiveSpec(
        _GENERATOR | {"encoder": {"encoder_head": Head("masked_lm"), "copy_head": Head("logit")}},
        {"data.masking": DISTINCT},
    ),
    "two-stage": ObjectiveSpec(
        _GENERATOR | {"discriminator": _DISCRIMINATOR},
        {
            "data.masking": DISTINCT,
            "generator.kind": ("model",),
            "generator.fraction": (1.0,),
            "generator.num_layers": (0,),
            "generator.embedding_size": (0,),
            "model.tying": ("none",),
        },
        num_stages=2,
    ),
    "adversarial": ObjectiveSpec(
        {"generator": _ADVERSARY, "discriminator": _DISCRIMINATOR},
        {
            "data.masking": DISTINCT,
            "generator.kind": ("model",),
            "objective.temperature": (1.0,),
            "objective.disallow_correct": (False,),
        },
    ),
}

OPTION_NEEDS: dict[str, tuple[Scalar, Needs]] = {
    "objective.contrastive_weight": (0.0, {"data.masking": DISTINCT, "objective.name": ("electra",)}),
    "objective.generator_first": (
        0,
        {"objective.name": ("electra",), "generator.kind": ("model",), "model.tying": ("none", "embeddings")},
    ),
    "objective.disc_positions": ("masked", {"objective.name": ("electra15",)}),
    "generator.kind": ("model", {"objective.temperature": (1.0,), "objective.disallow_correct": (False,)}),
}
"""Per option, the value that turns it off, and what any other value requires."""


def check_needs(name: str, value: Callable[[str], Value]) -> None:
    """Raises ValueError if an objective or an option lacks a setting that it requires.

    Args:
        name: The objective.
        value: Returns the value of a configuration key.
    """
    _require(f"objective.name = {format_value(name)}", OBJECTIVE_SPECS[name].needs, value)
    for key, (off, needs) in OPTION_NEEDS.items():
        if value(key) != off:
            _require(f"{key} = {format_value(value(key))}", needs, value)


def _require(what: str, needs: Needs, value: Callable[[str], Value]) -> None:
    missing = [
        f"{key} = {' or '.join(map(format_value, allowed))} (it is {format_value(value(key))})"
        for key, allowed in needs.items()
        if value(key) not in allowed
    ]
    if missing:
        why = f"; {_WHY_DISTINCT}" if missing[0].startswith("data.masking") else ""
        raise InputError(f"{what} needs {', '.join(missing)}{why}")
