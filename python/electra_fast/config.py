"""A run's whole configuration: frozen dataclasses, read from presets, TOML and the command line.

Defaults < preset and recipe < TOML file < `--section.key value`. Validation raises and never
rewrites a value, and the resolved configuration is saved with every run, so that `config.toml`
alone tells what was trained.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_type_hints

from electra_fast.config_file import TYPE_NAMES, Scalar, did_you_mean, format_value, parse_value, read_toml
from electra_fast.errors import InputError
from electra_fast.objectives import OBJECTIVES, objective_of
from electra_fast.presets import RECIPES, SIZE_RECIPES, SIZES

Architecture = Literal["bert", "modern"]

AUTO: Final = "auto"
# Epsilon of the norms in the published encoders.
NORM_EPS: dict[Architecture, float] = {"bert": 1e-12, "modern": 1e-5}
# Keys whose `auto` depends on the hardware. Chosen when a run starts, recorded in its config.toml, and then kept.
HARDWARE_KEYS = ("train.precision", "model.attention", "train.execution")


def _key(
    default: Scalar,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
) -> Any:
    """One configuration key: its default, meaning and allowed range (`open_low`: low itself excluded).

    `choices` is for names that a table holds; others are the key's Literal type.
    """
    metadata = {"doc": doc, "choices": choices, "low": low, "high": high, "open_low": open_low}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class _Section:
    """Checks every field of a section against its declared type, choices and range."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(f"{_section_name(type(self))}.{field.name}", getattr(self, field.name), field)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(_Section):
    """`[model]`: the encoder that is the result; for replaced-token detection the discriminator."""

    architecture: Architecture = _key(
        "bert", "post-norm encoder with learned positions, or pre-norm with rotary positions and GeGLU"
    )
    vocab_size: int = _key(0, "entries of the vocabulary; 0: taken from the corpus", low=0)
    max_positions: int = _key(512, "longest sequence the model can read, in tokens", low=8, high=32768)
    num_layers: int = _key(12, "transformer layers", low=1)
    hidden_size: int = _key(256, "width of the residual stream", low=1)
    intermediate_size: int = _key(1024, "width of the feed-forward layer", low=1)
    num_heads: int = _key(4, "attention heads", low=1)
    embedding_size: int = _key(128, "width of the embedding table", low=1)
    dropout: float = _key(0.1, "dropout on embeddings and sublayer outputs", low=0, high=0.99)
    attention_dropout: float = _key(0.1, "dropout on attention probabilities", low=0, high=0.99)
    tying: Literal["none", "embeddings", "all"] = _key("embeddings", "what generator and discriminator share")
    attention: Literal["auto", "sdpa", "varlen", "flex", "xformers"] = _key(
        "auto", "attention backend; auto: varlen on CUDA in 16 bits, else sdpa"
    )
    norm_eps: float = _key(0.0, "epsilon of the norms; 0: 1e-12 in bert, 1e-5 in modern", low=0, high=1)
    rope_theta: float = _key(10_000.0, "base of the rotary angles (modern)", low=1)
    local_rope_theta: float = _key(10_000.0, "base of the rotary angles in layers with local attention", low=1)
    local_attention: int = _key(
        0, "window of local attention (modern): this many tokens, half to each side; 0: all layers are global", low=0
    )
    global_attention_every: int = _key(
        3, "with local attention, one in so many layers is global, beginning with the first", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % self.num_heads:
            raise InputError(
                f"model.num_heads = {self.num_heads} does not divide model.hidden_size = {self.hidden_size}"
            )
        if self.architecture == "modern" and self.hidden_size // self.num_heads % 2:
            raise InputError(
                f"model.hidden_size / model.num_heads = {self.hidden_size // self.num_heads} is odd; "
                "rotary positions need an even head width"
            )
        if self.architecture == "bert" and self.local_attention:
            raise InputError(f'model.local_attention = {self.local_attention} needs model.architecture = "modern"')

    @property
    def eps(self) -> float:
        """The epsilon of the norms."""
        return self.norm_eps or NORM_EPS[self.architecture]

    def is_local(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has local attention."""
        return self.local_attention > 0 and layer % self.global_attention_every > 0


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(_Section):
    """`[generator]`: the network whose samples replace masked tokens."""

    kind: Literal["model"] = _key("model", "what proposes replacements")
    fraction: float = _key(0.25, "width, feed-forward and heads relative to the model's", low=0, high=1, open_low=True)
    num_layers: int = _key(0, "transformer layers; 0: as many as the model", low=0)


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(_Section):
    """`[objective]`: the loss."""

    name: str = _key("electra", "replaced-token detection, or masked language modelling", choices=tuple(OBJECTIVES))
    gen_weight: float = _key(1.0, "weight of the generator's loss", low=0)
    disc_weight: float = _key(50.0, "weight of the discriminator's loss", low=0)
    temperature: float = _key(1.0, "temperature of the generator's samples", low=0, open_low=True)
    disallow_correct: bool = _key(False, "never sample the original token")


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Section):
    """`[data]`: the corpus and how its rows are cut, packed and masked."""

    corpus: str = _key("", "folder written by `electra-fast prepare` (--data)")
    sequence_length: int = _key(128, "tokens per row, [CLS] and [SEP] included", low=8, high=32768)
    masking: Literal["paper", "google", "bert"] = _key("google", "how positions are drawn and masked")
    mask_prob: float = _key(0.15, "share of a row's tokens to mask", low=0, high=0.9, open_low=True)
    packing: Literal["best-fit", "google"] = _key(
        "best-fit", "how documents become rows: every token kept, or as the published code builds examples"
    )
    num_threads: int = _key(1, "threads that fill batches, beside one that plans", low=1, high=1024)
    prefetch: int = _key(4, "batches prepared ahead", low=1, high=1024)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(_Section):
    """`[optimizer]`: the update rule and its schedule."""

    name: Literal["adamw", "lamb", "muon"] = _key("adamw", "update rule")
    learning_rate: float = _key(5e-4, "peak learning rate", low=0, open_low=True)
    warmup_steps: int = _key(-1, "steps of linear warmup; -1: a twentieth of train.steps, at most 10,000", low=-1)
    schedule: Literal["linear", "product"] = _key(
        "product", "linear: warmup, then decay to 0; product: warmup times a decay that starts at step 0"
    )
    weight_decay: float = _key(0.01, "decoupled decay of all but norms and biases", low=0)
    clip_norm: float = _key(1.0, "largest global gradient norm; 0: no clipping", low=0)
    bias_correction: bool = _key(False, "Adam's bias correction")
    beta1: float = _key(0.9, "decay of the first moment", low=0, high=0.999999)
    beta2: float = _key(0.999, "decay of the second moment", low=0, high=0.999999)
    epsilon: float = _key(1e-6, "Adam's epsilon", low=0, open_low=True)
    muon_learning_rate: float = _key(0.02, "peak learning rate of the matrices under muon", low=0, open_low=True)
    muon_momentum: float = _key(0.95, "momentum of the matrices under muon", low=0, high=0.999999)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps of warmup in a run of `num_steps`."""
        return self.warmup_steps if self.warmup_steps >= 0 else min(10_000, num_steps // 20)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(_Section):
    """`[train]`: the run's folder, length, batch, precision and cadence."""

    out: str = _key("", "the run's folder (--out)")
    steps: int = _key(1_000_000, "optimizer steps", low=1)
    batch_size: int = _key(128, "rows of sequence_length per step, over all ranks", low=1)
    accumulate: int = _key(1, "micro-batches per step and rank", low=1)
    seed: int = _key(0, "the one seed of everything random", low=0, high=2**63 - 1)
    precision: Literal["auto", "fp32", "bf16"] = _key(
        "auto", "dtype of activations; auto: bf16 on CUDA, on a CPU the one that a short measurement finds faster"
    )
    execution: Literal["auto", "eager", "compile", "graph"] = _key(
        "auto", "how a step runs: eager, compile, or graph (captured once and replayed, CUDA only); auto: graph on CUDA"
    )
    log_every: int = _key(100, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = _key(5_000, "steps between evaluations of the validation data; 0: none", low=0)
    eval_batches: int = _key(50, "batches of an evaluation while training; 0: all", low=0)
    checkpoint_every: int = _key(5_000, "steps between checkpoints", low=1)
    keep_checkpoints: int = _key(2, "newest checkpoints to keep", low=1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run depends on besides its corpus. Sections as in `config.toml`."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    generator: GeneratorConfig = dataclasses.field(default_factory=GeneratorConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        model, train = self.model, self.train
        if self.data.sequence_length > model.max_positions:
            raise InputError(
                f"data.sequence_length = {self.data.sequence_length} is longer than "
                f"model.max_positions = {model.max_positions}; raise the latter"
            )
        if train.batch_size % train.accumulate:
            raise InputError(
                f"train.accumulate = {train.accumulate} does not divide train.batch_size = {train.batch_size}"
            )
        objective_of(self).check()

    def generator_shape(self) -> ModelConfig:
        """The generator's sizes: `generator.fraction` of width, feed-forward and heads; head_dim is kept."""
        model, hidden_fraction = self.model, self.generator.fraction
        num_heads = round(model.num_heads * hidden_fraction)
        if num_heads < 1 or abs(model.num_heads * hidden_fraction - num_heads) > 1e-3:
            raise InputError(
                f"generator.fraction = {hidden_fraction:g} of model.num_heads = {model.num_heads} is not a whole "
                f"number of heads; use a multiple of 1/{model.num_heads}"
            )
        return dataclasses.replace(
            model,
            num_layers=self.generator.num_layers or model.num_layers,
            num_heads=num_heads,
            hidden_size=num_heads * (model.hidden_size // model.num_heads),
            intermediate_size=round(model.intermediate_size * hidden_fraction),
        )

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, str] | None = None) -> Config:
        """Reads a TOML file. A top-level `preset` and `recipe` name what its keys are laid over.

        Raises FileNotFoundError, or ValueError naming the file, key, value and what is allowed.
        """
        table = read_toml(Path(path))
        preset, recipe = table.pop("preset", None), table.pop("recipe", None)
        if recipe is not None and preset is None:
            raise InputError(f"{path}: recipe = {recipe!r} needs a preset beside it")
        try:
            base = cls() if preset is None else cls.preset(str(preset), str(recipe or "google"))
            return base.replace(table).override(overrides or {})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def preset(cls, name: str, recipe: str = "google") -> Config:
        """A preset size (`tiny`, `mini`, `small`, `base`, `large`) in a recipe (`paper`, `google`, `modern`)."""
        if name not in SIZES:
            raise InputError(f"unknown preset {name!r}{did_you_mean(name, SIZES)}")
        if recipe not in RECIPES:
            raise InputError(f"unknown recipe {recipe!r}{did_you_mean(recipe, RECIPES)}")
        tables = (SIZES[name], RECIPES[recipe], SIZE_RECIPES.get((name, recipe), {}))
        merged: dict[str, dict[str, Scalar]] = {}
        for key, value in (item for table in tables for item in table.items()):
            section, _, field = key.partition(".")
            merged.setdefault(section, {})[field] = value
        return cls().replace(merged)

    def replace(self, table: Mapping[str, Any]) -> Config:
        """A copy with `table[section][key]` laid over it; unknown names raise with the nearest match."""
        sections = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name, values in table.items():
            if name not in sections:
                raise InputError(f"unknown section [{name}]{did_you_mean(name, sections)}")
            if not isinstance(values, Mapping):
                raise InputError(f"[{name}] is not a table")
            keys = [field.name for field in dataclasses.fields(sections[name])]
            for key in values:
                if key not in keys:
                    raise InputError(f"unknown key {name}.{key}{did_you_mean(key, keys)}")
            sections[name] = dataclasses.replace(sections[name], **integers_as_floats(sections[name], values))
        return Config(**sections)

    def override(self, overrides: Mapping[str, str]) -> Config:
        """A copy with command-line values, e.g. `{"train.steps": "100"}`, parsed as their key's type."""
        table: dict[str, dict[str, Scalar]] = {}
        for name, text in overrides.items():
            section, dot, key = name.partition(".")
            known = key_names()
            if not dot or name not in known:
                raise InputError(f"unknown key {name}{did_you_mean(name, known)}")
            table.setdefault(section, {})[key] = parse_value(name, text, type(self.value(name)))
        return self.replace(table)

    def to_toml(self) -> str:
        """The whole configuration as TOML, each key with its meaning; `load` reads it back exactly."""
        lines = []
        for section in dataclasses.fields(self):
            lines.append(f"[{section.name}]")
            values = getattr(self, section.name)
            for field in dataclasses.fields(values):
                value = f"{field.name} = {format_value(getattr(values, field.name))}"
                lines.append(f"{value:<32} # {field.metadata['doc']}")
            lines.append("")
        return "\n".join(lines)

    def differences(self, other: Config) -> dict[str, tuple[Scalar, Scalar]]:
        """Keys whose values differ: `{"train.steps": (own value, other value)}`."""
        pairs = {name: (self.value(name), other.value(name)) for name in key_names()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def value(self, name: str) -> Scalar:
        """The value of `section.key`."""
        section, _, key = name.partition(".")
        value: Scalar = getattr(getattr(self, section), key)
        return value


_SECTIONS: dict[str, type[_Section]] = {
    name: hint for name, hint in get_type_hints(Config).items() if isinstance(hint, type) and issubclass(hint, _Section)
}
# The values that a key may have, of those that are names: its Literal type, or the keys of the table that it names.
_CHOICES: dict[str, tuple[str, ...]] = {
    f"{name}.{field.name}": choices
    for name, section in _SECTIONS.items()
    for field, hint in zip(dataclasses.fields(section), get_type_hints(section).values(), strict=True)
    if (choices := field.metadata["choices"] or get_args(hint))
}


def key_names() -> list[str]:
    """Every key as `section.key`, in order."""
    return [f"{name}.{field.name}" for name, section in _SECTIONS.items() for field in dataclasses.fields(section)]


def describe_key(name: str) -> str:
    """A key's meaning and, where there are any, its choices: for help texts."""
    section, _, key = name.partition(".")
    (field,) = (f for f in dataclasses.fields(_SECTIONS[section]) if f.name == key)
    return str(field.metadata["doc"]) + (f" ({', '.join(_CHOICES[name])})" if name in _CHOICES else "")


def _section_name(section: type) -> str:
    return section.__name__.removesuffix("Config").lower()


def _check(name: str, value: object, field: dataclasses.Field[Any]) -> None:
    expected = type(field.default)
    if type(value) is not expected:
        raise InputError(f"{name} = {value!r} must be {TYPE_NAMES[expected]}, not {_type_name(value)}")
    if name in _CHOICES and value not in _CHOICES[name]:
        raise InputError(f"{name} = {value!r} must be one of {', '.join(_CHOICES[name])}")
    low, high = field.metadata["low"], field.metadata["high"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        below = value <= low if field.metadata["open_low"] else value < low
        if below or value > high or math.isnan(value) or math.isinf(value):
            bound = f"above {low:g}" if field.metadata["open_low"] else f"at least {low:g}"
            upper = f" and at most {high:g}" if high < math.inf else ""
            raise InputError(f"{name} = {value!r} must be {bound}{upper}")


def _type_name(value: object) -> str:
    return TYPE_NAMES.get(type(value), type(value).__name__)


def integers_as_floats(section: object, values: Mapping[str, Any]) -> dict[str, Any]:
    """TOML writes 1 where a float may be meant; the reverse (1.5 for an integer) stays an error."""
    return {
        key: float(value) if type(value) is int and type(getattr(section, key)) is float else value
        for key, value in values.items()
    }
