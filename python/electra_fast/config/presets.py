"""Sizes and recipes, as tables of keys that override the defaults of `config`, and requirements of objectives.

The defaults are the preset `small` in the recipe `modern`; the tables have only the differences from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from electra_fast.config.section import Scalar, Value, format_value
from electra_fast.errors import InputError

DEFAULT_PRESET = "small"
DEFAULT_RECIPE = "modern"

# In the recipe `modern`. GeGLU has three matrices instead of two, so its width is two thirds of the published one for
# the same FLOPs, rounded so that the generator's width, too, is a multiple of the kernels' tiles.
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
    # For an hour or two on two CPU cores: 20 M tokens in steps of 4,096.
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

# Common to `paper` and `google`: table 6 of the paper and `configure_pretraining.py` of the published code.
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

# The loss weights of `modern` were tuned with `tiny`, the mask probability also with `mini` (bench/LOG.md). A learning
# rate of 0 is derived from the number of steps: for both sizes, and for one to four times the tokens per step, Muon's
# best learning rate falls with the square root of the steps. Its updates have the same spectral norm at any width.
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
    # DeBERTaV3: arXiv 2111.09543 and the published code, with half of the layers in the generator.
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
"""Values of keys of the tables above that a run's `config.toml` lacks because it was saved before they existed."""


DEBERTA_RATE = 5e-5
"""Learning rate of the published script that continues DeBERTaV3, for xsmall and small."""


def adaptation_settings(architecture: str, hidden_size: int) -> tuple[tuple[dict[str, Scalar], str], ...]:
    """Returns settings, with their reasons, for continuing an encoder that comes without training settings.

    `import --generator`, `import --mlm` and `adapt` use them.
    """
    rate = 2.5e-4 if hidden_size <= 512 else 1e-4
    reason = "half of ELECTRA's learning rate at this width"
    name = "ELECTRA"
    if architecture == "deberta":
        rate = DEBERTA_RATE
        reason = "from the published script that continues DeBERTaV3 xsmall and small"
        name = "DeBERTaV3"
    return (
        (
            {
                "optimizer.name": "adamw",
                "optimizer.learning_rate": rate,
                "optimizer.schedule": "linear",
                "optimizer.bias_correction": True,
            },
            reason,
        ),
        (
            {"train.steps": 2_000, "train.batch_size": 64, "data.sequence_length": 128},
            "16 M tokens; use more steps for more text",
        ),
        ({"data.masking": "tokens", "data.mask_prob": 0.15, "objective.disc_weight": 50.0}, f"as {name} was trained"),
        ({"train.log_every": 50, "train.eval_every": 500, "train.checkpoint_every": 500}, "four times in 2,000 steps"),
    )


ADAPTATION_PASSES = (3, 20)
ADAPTATION_STEPS = (300, 20_000)
"""Passes of `adapt` over a text, with their maximum if the steps are too few; minimum and maximum steps."""
GENERAL_SHARE = 0.25
"""Fraction of general text in each step of `adapt`, if there is any."""
LITTLE_TEXT = 100_000
"""`adapt` warns about a text with fewer tokens."""

Needs = Mapping[str, tuple[Scalar, ...]]
"""Allowed values keyed by configuration key, the usual one first."""

DISTINCT = ("tokens", "80-10-10", "whole-word", "span")
"""The values of `data.masking` that draw every position at most once."""
_WHY_DISTINCT = "with-repeats may draw a position twice and then averages its samples, whose probability is undefined"


@dataclass(frozen=True)
class Head:
    """A head on an encoder.

    Args:
        kind: A key of a table in `model.HEADS`.
        is_of_masked: Whether it computes only the masked tokens, for the count of FLOPs.
        num_forward: Forward passes per step.
        weight: The key of `[objective]` with its weight; at 0 the head does not exist. "" if it always exists.
    """

    kind: str
    is_of_masked: bool = False
    num_forward: int = 1
    weight: str = ""


@dataclass(frozen=True)
class ObjectiveSpec:
    """The networks, required settings and stages of an objective; its loss is in `objectives/`.

    Args:
        networks: The heads of each trained network, keyed by the attribute of `Electra` that holds the network.
            Networks are built in this order; the last one is the result. A head named after its network is exported.
        needs: Required settings.
        num_stages: Training stages of at least one step. In the second stage, a generator only runs forward.
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
# The generator's head runs twice: to sample, and to compute the samples' likelihood.
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
"""For each option, the value that turns it off, and the settings that any other value requires."""


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


def _require(setting: str, needs: Needs, value: Callable[[str], Value]) -> None:
    missing = [
        f"{key} = {' or '.join(map(format_value, allowed))}, not {format_value(value(key))}"
        for key, allowed in needs.items()
        if value(key) not in allowed
    ]
    if missing:
        reason = f"; {_WHY_DISTINCT}" if missing[0].startswith("data.masking") else ""
        raise InputError(f"{setting}: needs {', '.join(missing)}{reason}")
