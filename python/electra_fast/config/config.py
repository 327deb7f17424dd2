"""The configuration of a run: frozen dataclasses, read from presets, TOML and the command line.

Later sources win: defaults, preset and recipe, requirements of the objective, TOML file, `--section.key value`.
Validation raises and never rewrites a value. Every run saves its resolved configuration as `config.toml`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from electra_fast import _data
from electra_fast.config.presets import (
    DEFAULT_PRESET,
    DEFAULT_RECIPE,
    OBJECTIVE_SPECS,
    OPTION_NEEDS,
    RECIPES,
    SIZE_RECIPES,
    SIZES,
    YOUNGER_KEYS,
    check_needs,
)
from electra_fast.config.section import AUTO as AUTO
from electra_fast.config.section import LOGGERS, Configuration, Scalar, Section, config_key, did_you_mean, read_toml
from electra_fast.errors import InputError

Architecture = Literal["bert", "modernbert", "deberta"]

# Ten times the largest published encoders. Larger sizes are mistakes, and would fill the memory.
MAX_WEIGHTS = 10**11
# Epsilon of the norms in the published encoders.
NORM_EPS: dict[Architecture, float] = {"bert": 1e-12, "modernbert": 1e-5, "deberta": 1e-7}
# Longer representations have one key per line.
MAX_REPR_LINE = 100
_KERNELS = re.compile(r"(auto|triton|reference)(,\w+(:\d+)?=\w+)*")
# Keys whose `auto` depends on the hardware. A run resolves them when it starts and keeps them in its config.toml.
HARDWARE_KEYS = ("train.matmul", "train.precision", "model.attention", "train.execution", "train.accumulate")
# Keys that may change when a run resumes: locations, execution of steps, intervals.
FREE_KEYS = {
    "data.corpus",
    "data.cache_dir",
    "data.cache_bytes",
    "data.num_threads",
    "data.prefetch",
    "train.out",
    "train.execution",
    "train.kernels",
    "train.accumulate",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.mirror",
    "train.stop_on_divergence",
    "train.loggers",
    "train.max_minutes",
    "train.sharding",
    "train.timeout_seconds",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """`[model]`: the resulting encoder, which is the discriminator in replaced-token detection."""

    architecture: Architecture = config_key(
        "modernbert",
        "post-norm layers with learned positions; pre-norm layers with rotary positions and GeGLU; or post-norm layers "
        "with disentangled attention",
    )
    vocab_size: int = config_key(0, "vocabulary size; 0: as in the corpus", low=0, high=1 << 24)
    max_positions: int = config_key(512, "longest sequence in tokens", low=8, high=32768)
    num_layers: int = config_key(12, "transformer layers", low=1, high=1000)
    hidden_size: int = config_key(256, "width of the residual stream", low=1, high=1 << 16)
    intermediate_size: int = config_key(704, "width of the feed-forward layer", low=1, high=1 << 18)
    num_heads: int = config_key(4, "attention heads", low=1, high=1 << 16)
    embedding_size: int = config_key(128, "width of the embedding table", low=1, high=1 << 16)
    dropout: float = config_key(0.0, "dropout on embeddings and sublayer outputs", low=0, high=0.99)
    attention_dropout: float = config_key(0.0, "dropout on attention probabilities", low=0, high=0.99)
    heads: Literal["dense", "plain"] = config_key(
        "dense",
        "pre-training heads: with a dense layer before the output, or plain e(x)'h and w'h as in the paper's draft",
    )
    tying: Literal["none", "embeddings", "disentangled", "all"] = config_key(
        "embeddings",
        "weights shared by generator and discriminator; disentangled: the token table, plus a table that only "
        "the discriminator trains (GDES)",
    )
    attention: Literal["auto", "sdpa", "short", "varlen", "flex", "flash4", "xformers"] = config_key(
        "auto",
        "attention backend; short: for rows up to 512; auto: the fastest backend that passes the check of the GPU",
    )
    norm_eps: float = config_key(
        0.0, "epsilon of the norms; 0: 1e-12 in bert, 1e-5 in modernbert, 1e-7 in deberta", low=0, high=1
    )
    rope_theta: float = config_key(10_000.0, "base of the rotary angles (modernbert)", low=1)
    local_rope_theta: float = config_key(10_000.0, "base of the rotary angles in layers with local attention", low=1)
    local_attention: int = config_key(
        0, "window of local attention in tokens, half on each side (modernbert); 0: all layers are global", low=0
    )
    global_attention_every: int = config_key(
        3, "with local attention, every N-th layer is global, starting with the first", low=1
    )
    position_buckets: int = config_key(
        256,
        "relative positions on each side, logarithmic beyond half of this number (deberta)",
        low=2,
        high=1 << 15,
    )
    conv_kernel_size: int = config_key(
        0,
        "width in tokens of the convolution parallel to the first layer (deberta): 1, 3, 5, ...; 0: none",
        low=0,
        high=255,
    )
    conv_activation: Literal["gelu", "tanh"] = config_key("gelu", "activation of that convolution")

    def __post_init__(self) -> None:
        super().__post_init__()
        layer = (4 * self.hidden_size + 2 * self.intermediate_size) * self.hidden_size
        num_weights = self.num_layers * layer + self.vocab_size * self.embedding_size
        if num_weights > MAX_WEIGHTS:
            keys = ("num_layers", "hidden_size", "intermediate_size", "vocab_size")
            sizes = ", ".join(f"model.{key} = {getattr(self, key)}" for key in keys)
            limit = f"at most {MAX_WEIGHTS / 1e9:.0f} billion parameters"
            raise InputError(f"{sizes}: must give {limit}, not {num_weights / 1e9:,.0f} billion; lower them")
        if self.hidden_size % self.num_heads:
            raise InputError(f"model.num_heads = {self.num_heads}: must divide model.hidden_size = {self.hidden_size}")
        if self.architecture == "modernbert" and self.hidden_size // self.num_heads % 2:
            raise InputError(
                f"model.hidden_size / model.num_heads = {self.hidden_size // self.num_heads}: must be even for rotary "
                "positions; change one of them"
            )
        if self.architecture != "modernbert" and self.local_attention:
            raise InputError(f'model.local_attention = {self.local_attention}: needs model.architecture = "modernbert"')
        if (size := self.conv_kernel_size) and (self.architecture != "deberta" or size % 2 == 0):
            raise InputError(f'model.conv_kernel_size = {size}: must be odd, and needs model.architecture = "deberta"')

    @property
    def eps(self) -> float:
        return self.norm_eps or NORM_EPS[self.architecture]

    def is_local(self, layer: int) -> bool:
        return self.local_attention > 0 and layer % self.global_attention_every > 0


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(Section):
    """`[generator]`: the network whose samples replace masked tokens."""

    kind: Literal["model", "uniform", "unigram"] = config_key(
        "model", "source of replacements: a network, a uniform distribution, or the corpus's token frequencies"
    )
    fraction: float = config_key(
        0.25, "width, feed-forward width and heads as a fraction of the model's", low=0, high=1, open_low=True
    )
    num_layers: int = config_key(0, "transformer layers; 0: the model's number", low=0, high=1000)
    embedding_size: int = config_key(
        0, "width of the embedding table; 0: the model's, required for shared embeddings", low=0, high=1 << 16
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig(Section):
    """`[objective]`: the loss."""

    name: str = config_key("electra", "replaced-token detection or one of its variants", choices=tuple(OBJECTIVE_SPECS))
    gen_weight: float = config_key(1.0, "weight of the generator's loss", low=0)
    disc_weight: float = config_key(10.0, "weight of the discriminator's loss", low=0)
    encoder_weight: float = config_key(1.0, "weight of the encoder's loss in replace-mlm and all-tokens-mlm", low=0)
    corrective_weight: float = config_key(
        1.0,
        "weight of the discriminator's loss for predicting the original token at masked positions (electra)",
        low=0,
    )
    contrastive_weight: float = config_key(
        0.0, "weight of the loss for detecting unchanged segments (electra); 0: every segment is corrupted", low=0
    )
    generator_first: int = config_key(
        0,
        "initial steps that train only the generator (electra), with a separate learning-rate schedule",
        low=0,
    )
    disc_positions: Literal["masked", "random"] = config_key(
        "masked", "tokens in electra15's discriminator loss: the masked ones, or the same number drawn independently"
    )
    temperature: float = config_key(1.0, "sampling temperature of the generator", low=0, open_low=True)
    disallow_correct: bool = config_key(False, "never sample the original token")


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """`[data]`: the corpus, and the cutting, packing and masking of its rows."""

    corpus: str | list[str] | dict[str, float] = config_key(
        "",
        'corpus folder, or several to mix: ["FOLDER:WEIGHT", ...] or {FOLDER = WEIGHT, ...}',
        takes_several=True,
    )
    sequence_length: int = config_key(128, "tokens per row, including [CLS] and [SEP]", low=8, high=32768)
    masking: str = config_key(
        "tokens", "masking of single tokens, whole words, or spans of one to three words", choices=_data.MASKINGS
    )
    mask_prob: float = config_key(0.25, "fraction of a row's tokens to mask", low=0, high=0.9, open_low=True)
    packing: str = config_key(
        "best-fit",
        "packing of documents into rows: keeping every token, or as in the published code",
        choices=_data.PACKINGS,
    )
    cut_at: str = config_key(
        "token",
        "where best-fit packing may cut a document: anywhere, or only before a word or line",
        choices=_data.CUTS,
    )
    lanes: int | Literal["auto"] = config_key(
        AUTO,
        "parts of each batch that read separate blocks of the corpus, so that each node fetches only its blocks; auto: "
        "64 for large corpora in object stores (fewer if 64 does not divide the batch), otherwise 1",
        low=1,
        high=4096,
        or_auto=True,
    )
    num_threads: int = config_key(1, "threads that fill batches, in addition to a planning thread", low=1, high=1024)
    prefetch: int = config_key(4, "batches prepared ahead", low=1, high=1024)
    cache_dir: str = config_key("", "local cache of corpora in object stores; empty: ~/.cache/electra-fast/corpora")
    cache_bytes: int = config_key(1 << 34, "size limit of a node's cache of object-store corpora", low=1, high=1 << 60)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """`[optimizer]`: the update rule and its schedule."""

    name: Literal["adamw", "lamb", "muon"] = config_key("muon", "update rule")
    learning_rate: float = config_key(
        0.0, "peak learning rate; 0 (modernbert): 0.2 / sqrt(steps), at most 0.004", low=0
    )
    warmup_steps: int = config_key(-1, "steps of linear warmup; -1: 5% of the steps, at most 10,000", low=-1)
    schedule: Literal["linear", "product"] = config_key(
        "linear", "linear: warmup, then decay to 0; product: warmup times a decay that starts at step 0"
    )
    weight_decay: float = config_key(0.01, "decoupled weight decay of all but norms and biases", low=0)
    clip_norm: float = config_key(1.0, "largest global gradient norm; 0: no clipping", low=0)
    bias_correction: bool = config_key(True, "Adam's bias correction")
    beta1: float = config_key(0.9, "decay rate of the first moment", low=0, high=0.999999)
    beta2: float = config_key(0.98, "decay rate of the second moment", low=0, high=0.999999)
    epsilon: float = config_key(1e-6, "Adam's epsilon", low=0, open_low=True)
    muon_learning_rate: float = config_key(
        0.0, "peak learning rate of Muon's matrices; 0: 0.5 / sqrt(steps), at most 0.02", low=0
    )
    muon_momentum: float = config_key(0.95, "momentum of Muon's matrices", low=0, high=0.999999)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Returns the steps of warmup in a run of `num_steps`."""
        return self.warmup_steps if self.warmup_steps >= 0 else min(10_000, num_steps // 20)

    def for_steps(self, num_steps: int) -> Self:
        """Returns a copy for a run of `num_steps` with `unresolved_keys` filled in."""
        rate, muon_rate = (float(f"{peak / math.sqrt(num_steps):.3g}") for peak in (0.2, 0.5))
        return dataclasses.replace(
            self,
            warmup_steps=self.num_warmup_steps(num_steps),
            learning_rate=self.learning_rate or min(0.004, rate),
            muon_learning_rate=self.muon_learning_rate or min(0.02, muon_rate),
        )

    @property
    def unresolved_keys(self) -> list[str]:
        """The keys whose values still have to be derived from the number of steps."""
        left = {
            "warmup_steps": self.warmup_steps < 0,
            "learning_rate": self.learning_rate == 0,
            "muon_learning_rate": self.muon_learning_rate == 0,
        }
        return [key for key, is_left in left.items() if is_left]


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """`[train]`: the run's folder, length, batch, precision and intervals."""

    out: str = config_key("", "run folder (--out)")
    steps: int = config_key(1_000_000, "optimizer steps", low=1)
    batch_size: int = config_key(128, "rows per step, over all ranks", low=1, high=1 << 20)
    accumulate: int | Literal["auto"] = config_key(
        AUTO,
        "gradient-accumulation steps per rank; auto: the fewest that fit in GPU memory; on a CPU 1",
        low=1,
        or_auto=True,
    )
    seed: int = config_key(0, "random seed", low=0, high=2**63 - 1)
    precision: Literal["auto", "fp32", "fp16", "bf16"] = config_key(
        "auto",
        "dtype of activations (fp16: with dynamic loss scaling); auto: on CUDA bf16, or fp16 before Ampere; on a CPU "
        "the faster of fp32 and bf16 in a short test",
    )
    matmul: Literal["auto", "default", "onednn"] = config_key(
        "auto", "library for fp32 matrix products on a CPU: torch's default or oneDNN; auto: the faster in a short test"
    )
    execution: Literal["auto", "eager", "compile", "graph", "branches"] = config_key(
        "auto",
        "execution of a step: eager, torch.compile, a CUDA graph, or a CUDA graph with parallel branches, which needs "
        "more memory; auto: on CUDA the fastest except compile, otherwise eager",
    )
    kernels: str = config_key(
        "auto",
        "Triton kernels on a GPU: auto (checked and timed against their references at the start of a run), triton "
        "(unchecked) or reference; also per operation, as in auto,generator_head=reference",
    )
    log_every: int = config_key(100, "steps between lines of metrics.jsonl", low=1)
    eval_every: int = config_key(5_000, "steps between evaluations on the validation set; 0: none", low=0)
    eval_batches: int = config_key(50, "batches per evaluation during training; 0: all", low=0)
    checkpoint_every: int = config_key(5_000, "steps between checkpoints", low=1)
    keep_checkpoints: int = config_key(
        2, "newest checkpoints to keep, in addition to the best by validation (or training) loss", low=1
    )
    mirror: str = config_key(
        "", "URL in an object store (s3://bucket/run) to which checkpoints and logs are copied; empty: none"
    )
    stop_on_divergence: bool = config_key(
        True,
        "end the run, without another checkpoint, if its loss reaches twice the loss of uniform predictions or "
        "everything learned is lost",
    )
    loggers: str | list[str] = config_key(
        "", "loggers in addition to metrics.jsonl, separated by commas", choices=LOGGERS, takes_several=True
    )
    max_minutes: float = config_key(
        0.0, "time limit of a session: writes a checkpoint and exits with code 75; 0: no limit", low=0
    )
    reduce: Literal["fast", "exact"] = config_key(
        "fast", "sum of gradients over ranks: fast, or exact for bitwise equal results on 1, 2 and 4 ranks"
    )
    sharding: Literal["none", "full"] = config_key(
        "none", "weights and optimizer moments: whole on every rank, or sharded over the ranks (FSDP2)"
    )
    timeout_seconds: int = config_key(600, "maximum wait for another rank before the run ends", low=1, high=10**7)

    @property
    def num_micro_batches(self) -> int:
        """`accumulate`; 1 while it is `auto`."""
        return 1 if self.accumulate == AUTO else self.accumulate


@dataclass(frozen=True, kw_only=True)
class Config(Configuration):
    """All settings of a run, in the sections of `config.toml`.

    `Config()` is the preset `small` in the recipe `modern`. Configurations are immutable; `override` returns a copy.

    Example:
        config = Config.preset("tiny", "modern").override(steps=10_000, lr=1e-3, mask_prob=0.3)
        config = config.override({"generator.num_layers": 2})
        config.train.steps  # 10000
        help(config.train)  # the keys of a section, with defaults and descriptions
        Config.load("run/config.toml").differences(config)
    """

    SHORT_NAMES: ClassVar[Mapping[str, str]] = {
        "steps": "train.steps",
        "batch_size": "train.batch_size",
        "lr": "optimizer.learning_rate",
        "sequence_length": "data.sequence_length",
        "precision": "train.precision",
        "seed": "train.seed",
    }

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    generator: GeneratorConfig = dataclasses.field(default_factory=GeneratorConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        model = self.model
        train = self.train
        if self.data.sequence_length > model.max_positions:
            raise InputError(
                f"data.sequence_length = {self.data.sequence_length}: must be at most model.max_positions = "
                f"{model.max_positions}; raise the latter"
            )
        if not _KERNELS.fullmatch(train.kernels):
            raise InputError(
                f'train.kernels = "{train.kernels}": must be auto, triton or reference, '
                "possibly with choices, as in auto,generator_head=reference"
            )
        if train.batch_size % train.num_micro_batches:
            raise InputError(
                f"train.accumulate = {train.accumulate}: must divide train.batch_size = {train.batch_size}"
            )
        if train.sharding == "full" and train.reduce == "exact":
            raise InputError('train.sharding = "full": needs train.reduce = "fast", since it sums in another order')
        if self.optimizer.learning_rate == 0 and model.architecture != "modernbert":
            raise InputError(
                'optimizer.learning_rate = 0 (derived from train.steps): needs model.architecture = "modernbert"; set '
                "a learning rate above 0"
            )
        self._check_objective()

    def __repr__(self) -> str:
        """Returns the call that makes it: the nearest preset and recipe, and the differences from them."""
        objective = () if self.objective.name == "electra" else (self.objective.name,)
        presets = ((preset, recipe, *objective) for preset in SIZES for recipe in RECIPES)
        nearest = min(presets, key=lambda arguments: len(Config.preset(*arguments).differences(self)))
        changes = {key: now for key, (_, now) in Config.preset(*nearest).differences(self).items()}
        call = f"Config.preset({', '.join(map(repr, nearest))})"
        items = [f"{key!r}: {value!r}" for key, value in changes.items()]
        table = f"{{{', '.join(items)}}}"
        if len(call) + len(table) > MAX_REPR_LINE:
            table = "".join(["{\n", *(f"    {item},\n" for item in items), "}"])
        return f"{call}.override({table})" if changes else call

    def _check_objective(self) -> None:
        name = self.objective.name
        model = self.model
        check_needs(name, self.value)
        num_stages = OBJECTIVE_SPECS[name].num_stages
        if self.train.steps < num_stages:
            raise InputError(f'objective.name = "{name}": needs train.steps = {num_stages} or more, one per stage')
        if self.train.steps <= self.objective.generator_first:
            raise InputError(
                f"objective.generator_first = {self.objective.generator_first}: must be less than train.steps = "
                f"{self.train.steps}, or the discriminator has no steps; lower it"
            )
        has_pair = self.generator.kind == "model" and len(OBJECTIVE_SPECS[name].roles) > 1
        decoder = self.generator_shape() if has_pair else model
        if model.conv_kernel_size and self.generator.kind == "model" and decoder.num_layers < 2:
            raise InputError(
                f"model.conv_kernel_size = {model.conv_kernel_size}: needs a generator of 2 layers or more, since the "
                "convolution is parallel to the first one and the decoder repeats the last one"
            )
        if has_pair:
            shape = decoder
            same = (shape.hidden_size, shape.num_layers) == (model.hidden_size, model.num_layers)
            if model.tying == "all" and not same:
                raise InputError(
                    'model.tying = "all": needs a generator of the same size; set generator.fraction = 1.0 and '
                    "generator.num_layers = 0"
                )
            if model.tying != "none" and shape.embedding_size != model.embedding_size:
                raise InputError(
                    f'generator.embedding_size = {shape.embedding_size}: needs model.tying = "none", since '
                    f"model.embedding_size = {model.embedding_size}"
                )

    def generator_shape(self) -> ModelConfig:
        """Returns the generator's sizes: `generator.fraction` of the widths and heads, with the same head_dim."""
        model = self.model
        hidden_fraction = self.generator.fraction
        num_heads = round(model.num_heads * hidden_fraction)
        if num_heads < 1 or abs(model.num_heads * hidden_fraction - num_heads) > 1e-3:
            raise InputError(
                f"generator.fraction = {hidden_fraction:g}: must leave a whole number of heads of model.num_heads = "
                f"{model.num_heads}; use a multiple of 1/{model.num_heads}"
            )
        return dataclasses.replace(
            model,
            num_layers=self.generator.num_layers or model.num_layers,
            num_heads=num_heads,
            embedding_size=self.generator.embedding_size or model.embedding_size,
            hidden_size=num_heads * (model.hidden_size // model.num_heads),
            intermediate_size=round(model.intermediate_size * hidden_fraction),
        )

    @property
    def schedule_steps(self) -> int:
        """Steps of the learning-rate schedule: `train.steps` or, as each stage has a schedule, the longest stage's."""
        steps = self.train.steps
        first = self.objective.generator_first
        return max(first, steps - first) if first else -(-steps // OBJECTIVE_SPECS[self.objective.name].num_stages)

    def resolved(self) -> Config:
        """Returns a copy in which the warmup and learning rates that depend on `schedule_steps` are set."""
        return dataclasses.replace(self, optimizer=self.optimizer.for_steps(self.schedule_steps))

    def with_objective(self, name: str) -> Config:
        """Returns a copy with another objective and the settings that it requires."""
        ObjectiveConfig(name=name)  # raises for an unknown name
        changes: dict[str, Scalar] = {"objective.name": name}
        for key, (off, needs) in OPTION_NEEDS.items():
            if name not in needs.get("objective.name", (name,)):
                changes[key] = off
        for key, allowed in OBJECTIVE_SPECS[name].needs.items():
            if self.value(key) not in allowed:
                changes[key] = allowed[0]
        return self.override(changes)

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, object] | None = None) -> Config:
        """Reads a TOML file. Its keys override its top-level `preset` and `recipe`, by default small and modern.

        Raises FileNotFoundError, or ValueError naming the file, key, value and allowed values.
        """
        table = read_toml(Path(path))
        cls.values_of((overrides or {}).items())  # raises without naming the file
        try:
            return cls.of_table(table, overrides)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def of_table(cls, table: Mapping[str, Any], overrides: Mapping[str, object] | None = None) -> Config:
        """Returns the configuration of a parsed TOML file."""
        stored = cls.values_of_file({name: keys for name, keys in table.items() if name not in ("preset", "recipe")})
        values = stored | cls.values_of((overrides or {}).items())
        preset = table.get("preset", DEFAULT_PRESET)
        recipe = table.get("recipe", DEFAULT_RECIPE)
        config = cls.preset(str(preset), str(recipe), values.get("objective.name", "electra"))
        set_by_presets = set().union(*SIZES.values(), *RECIPES.values(), *SIZE_RECIPES.values())
        if set_by_presets - YOUNGER_KEYS.keys() <= stored.keys():  # a file that a run saved
            config = config.override(YOUNGER_KEYS)
        return config._replace(values)

    @classmethod
    def preset(cls, name: str, recipe: str = DEFAULT_RECIPE, objective: str = "electra") -> Config:
        """Returns a size (tiny, mini, small, base, large) in a recipe (modern, google, paper).

        The objective's required settings replace the recipe's. Raises InputError for an unknown name.
        """
        if name not in SIZES:
            raise InputError(f"unknown preset {name!r}{did_you_mean(name, SIZES)}")
        if recipe not in RECIPES:
            raise InputError(f"unknown recipe {recipe!r}{did_you_mean(recipe, RECIPES)}")
        config = cls().override(SIZES[name] | RECIPES[recipe] | SIZE_RECIPES.get((name, recipe), {}))
        return config.with_objective(objective)


def config_of(config: Config | str | os.PathLike[str] | None, overrides: Mapping[str, object] | None = None) -> Config:
    """Returns a configuration, a file's or the default one, with overrides as on the command line."""
    changes = overrides or {}
    if config is None:
        config = Config.preset(DEFAULT_PRESET, DEFAULT_RECIPE, str(changes.get("objective.name", "electra")))
    return config.override(changes) if isinstance(config, Config) else Config.load(Path(config), changes)
