"""Configuration of fine-tuning: the section `[finetune]`, and recipes that set its keys by task and encoder size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

from electra_fast.config.config import ModelConfig, OptimizerConfig
from electra_fast.config.section import LOGGERS, Configuration, Scalar, Section, config_key, did_you_mean
from electra_fast.errors import InputError

DEFAULT_RECIPE = "fast"
Precision = Literal["auto", "fp32", "fp16", "bf16"]


@dataclass(frozen=True, kw_only=True)
class FinetuneSection(Section):
    """`[finetune]`: everything that determines the result besides the data, the encoder and the seed."""

    learning_rate: float = config_key(3e-4, "peak learning rate of the head", low=0, open_low=True)
    layer_decay: float = config_key(0.9, "learning-rate factor per layer below the head", low=0, high=1)
    layer_decay_form: Literal["plain", "squared"] = config_key(
        "plain", "factor of the top layer: layer_decay (plain), or its square (squared, as in the published code)"
    )
    epochs: float = config_key(3.0, "passes over the training data", low=0, high=1_000, open_low=True)
    batch_size: int = config_key(32, "examples per step", low=1, high=65_536)
    evals_per_epoch: float = config_key(
        1.0, "evaluations per epoch, such as 4 or 0.5, in addition to the evaluation after the last step", low=0
    )
    select: Literal["best", "last"] = config_key(
        "best", "checkpoint to keep: the step with the best validation score, or the last step"
    )
    patience: int = config_key(
        0, "stop training after this many evaluations without a better score; 0: never stop early", low=0
    )
    schedule: Literal["linear", "product"] = config_key(
        "linear", "linear: warmup, then linear decay to 0; product: warmup factor times a decay that starts at step 0"
    )
    warmup_fraction: float = config_key(0.1, "fraction of the steps used for warmup", low=0, high=1)
    weight_decay: float = config_key(0.01, "decoupled weight decay, except on norms and biases", low=0)
    clip_norm: float = config_key(1.0, "maximum global gradient norm; 0: no clipping", low=0)
    bias_correction: bool = config_key(True, "correct the bias of Adam's moments")
    beta1: float = config_key(0.9, "decay of Adam's first moment", low=0, high=0.999999)
    beta2: float = config_key(0.999, "decay of Adam's second moment", low=0, high=0.999999)
    epsilon: float = config_key(1e-6, "Adam's epsilon", low=0, open_low=True)
    loss_reduction: Literal["mean", "sum"] = config_key("mean", "reduction of the losses of a batch")
    sequence_length: int = config_key(128, "maximum tokens per example, including [CLS] and [SEP]", low=8, high=32768)
    dropout: float = config_key(0.1, "dropout on embeddings and sublayer outputs", low=0, high=0.99)
    attention_dropout: float = config_key(0.1, "dropout on attention probabilities", low=0, high=0.99)
    head: Literal["transformers", "published"] = config_key(
        "transformers",
        "transformers: the head of the transformers class for the task; published: the head of the published code, "
        "a linear layer (for questions, the end depends on the start, and a classifier finds unanswerable questions)",
    )
    head_dropout: float = config_key(0.1, "dropout in the head", low=0, high=0.99)
    order: Literal["shuffle", "buffer"] = config_key(
        "shuffle", "shuffle: a new order each epoch; buffer: one order through a shuffle buffer of 100 (published code)"
    )
    both_orders: bool = config_key(False, "train on each pair of texts in both orders")
    class_weights: str = config_key(
        "none",
        "class weights in the loss: none; balanced (inverse frequency); auto (balanced, at most 10, if a class has "
        "fewer than a tenth of the examples of an even split); or LABEL=WEIGHT,...",
    )
    teacher_weight: float = config_key(
        0.9, "with --teacher: weight of its answers; labels weigh 1 minus this", low=0, high=1, open_low=True
    )
    teacher_temperature: float = config_key(
        2.0, "with --teacher: softmax temperature of teacher and student in the loss", low=0, open_low=True
    )
    calibrate: bool = config_key(
        False, "after training, scale the logits by the temperature that fits the validation set best"
    )
    doc_stride: int = config_key(
        128, "tokens from one chunk of a long text to the next (question answering, tagging)", low=1, high=32768
    )
    max_query_length: int = config_key(64, "maximum tokens of a question", low=1, high=32768)
    max_answer_length: int = config_key(30, "maximum tokens of an answer", low=1, high=32768)
    n_best_size: int = config_key(20, "candidate answers kept per question", low=1, high=1000)
    beam_size: int = config_key(20, "answer starts to consider, and ends per start", low=1, high=1000)
    answerable_weight: float = config_key(
        0.5, "loss weight of the classifier of unanswerable questions (head published)", low=0
    )
    precision: Precision = config_key(
        "auto",
        "dtype of activations (fp16: with dynamic loss scaling); auto: bf16 on CUDA (fp16 before Ampere); on a CPU, "
        "fp32 or bf16, whichever a short measurement finds faster",
    )
    matmul: Literal["auto", "default", "onednn"] = config_key(
        "auto", "library for fp32 matrix products on a CPU; auto: the faster one in a short measurement"
    )
    attention: Literal["auto", "sdpa", "varlen", "flex", "flash4", "xformers"] = config_key(
        "auto", "attention backend; auto: varlen on CUDA with fp16 or bf16, else sdpa"
    )
    execution: Literal["auto", "eager", "graph"] = config_key(
        "auto", "eager, or graph (one CUDA graph per batch shape); auto: graph on CUDA, else eager"
    )
    loggers: str | list[str] = config_key(
        "", "loggers to use in addition to metrics.jsonl, separated by commas", choices=LOGGERS, takes_several=True
    )
    checkpoint_seconds: float = config_key(
        60.0, "seconds between checkpoints; a killed run resumes from the last one", low=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience and self.select == "last":
            raise InputError(f'finetune.patience = {self.patience}: needs finetune.select = "best"')
        if self.patience and not self.evals_per_epoch:
            raise InputError(
                f"finetune.patience = {self.patience}: needs evaluations before the last step; raise "
                "finetune.evals_per_epoch above 0"
            )

    def num_warmup_steps(self, num_steps: int) -> float:
        """Returns the number of warmup steps; not rounded for the schedule `product`, as in the published code."""
        steps = self.warmup_fraction * num_steps
        return steps if self.schedule == "product" else int(steps)

    def optimizer(self) -> OptimizerConfig:
        shared = {key.name for key in fields(self)} & {key.name for key in fields(OptimizerConfig)}
        return OptimizerConfig(name="adamw", **{name: getattr(self, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class FinetuningConfig(Configuration):
    """The configuration of fine-tuning; its recipes set the keys that depend on the task and the encoder."""

    SHORT_NAMES: ClassVar[Mapping[str, str]] = {
        "epochs": "finetune.epochs",
        "batch_size": "finetune.batch_size",
        "lr": "finetune.learning_rate",
        "sequence_length": "finetune.sequence_length",
        "precision": "finetune.precision",
    }

    finetune: FinetuneSection = field(default_factory=FinetuneSection)

    @classmethod
    def rule(cls, name: str) -> str:
        """Returns the default recipe's rule for a key's default by task, encoder and data, or ""."""
        return RULES[DEFAULT_RECIPE].get(name.partition(".")[2], "")


# Table 6 of the paper.
_PAPER: dict[str, Scalar] = {
    "select": "last",
    "schedule": "linear",
    "layer_decay_form": "plain",
    "weight_decay": 0.0,
    "bias_correction": True,
    "loss_reduction": "mean",
    "head": "published",
    "order": "shuffle",
}
# `configure_finetuning.py`, `optimization.py` and `preprocessing.py` of the published code.
_GOOGLE: dict[str, Scalar] = {
    "select": "last",
    "schedule": "product",
    "layer_decay_form": "squared",
    "weight_decay": 0.01,
    "bias_correction": False,
    "loss_reduction": "sum",
    "head": "published",
    "order": "buffer",
}
RECIPES: dict[str, dict[str, Scalar]] = {"paper": _PAPER, "google": _GOOGLE, "fast": {}}
# `fast`: minimum number of steps, and of steps per class within a maximum number of epochs (measured in bench/LOG.md);
# maximum number of evaluations. Narrow encoders need more steps per class, and their steps take less time.
MIN_STEPS = 300
MAX_EPOCHS_FOR_CLASSES = 30
MAX_EVALUATIONS = 20
NARROW = 128
NARROW_STEPS_PER_CLASS = 60
STEPS_PER_CLASS = 20
# Learning rates per recipe, by maximum width of the encoder (`fast`: measured in bench/LOG.md). Wider encoders have
# _BASE_RATE, and encoders with at least _LARGE_LAYERS layers have _LARGE_RATE.
_RATES = {"paper": {256: 3e-4}, "google": {}, "fast": {128: 1e-3, 384: 3e-4}}
_BASE_RATE = 1e-4
_LARGE_RATE = 5e-5
_LARGE_LAYERS = 24
# `fast` for DeBERTa encoders wider than this: no layer decay, and about the learning rates of `experiments/glue` in the
# code of DeBERTa V3: 4.5e-5 for small, 1.5e-5 for base, 5.5e-6 to 1e-5 for large.
_DEBERTA_WIDTH = 256
_DEBERTA = 3e-5
_DEBERTA_LARGE = 7e-6
# Tasks with small training sets, which the paper and its code train for 10 epochs; tasks with symmetric pairs.
_LONG = {"rte", "stsb"}
_SYMMETRIC = {"mrpc", "stsb"}
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def _rate_rule(recipe: str) -> str:
    widths = "".join(f"{rate:g} up to width {width}, " for width, rate in _RATES[recipe].items())
    return f"{widths}{_BASE_RATE:g}{' above' if widths else ''}; {_LARGE_RATE:g} from {_LARGE_LAYERS} layers"


_PUBLISHED_RULES = {
    "layer_decay": f"0.8; 0.9 from {_LARGE_LAYERS} layers",
    "epochs": "3; RTE and STS-B: 10; questions: 2",
    "sequence_length": "128; tags: 256; questions: 512; at most the encoder's positions",
    "head_dropout": "0.1; questions: 0",
}
RULES: dict[str, dict[str, str]] = {
    "paper": _PUBLISHED_RULES | {"learning_rate": _rate_rule("paper")},
    "google": _PUBLISHED_RULES
    | {"learning_rate": _rate_rule("google"), "both_orders": "true for MRPC and STS-B, false otherwise"},
    "fast": {
        "learning_rate": f"{_rate_rule('fast')}; deberta over width {_DEBERTA_WIDTH}: {_DEBERTA:g}, {_DEBERTA_LARGE:g}",
        "layer_decay": f"0.9; deberta above width {_DEBERTA_WIDTH}: 1",
        "epochs": f"3; questions: 2; more to reach {MIN_STEPS} steps, or (in at most {MAX_EPOCHS_FOR_CLASSES} epochs) "
        f"{STEPS_PER_CLASS} steps per class, {NARROW_STEPS_PER_CLASS} up to width {NARROW}",
        "evals_per_epoch": f"1; fewer if that exceeds {MAX_EVALUATIONS} evaluations in total",
        "sequence_length": _PUBLISHED_RULES["sequence_length"],
        "dropout": "the encoder's",
        "attention_dropout": "the encoder's",
        "head_dropout": _PUBLISHED_RULES["head_dropout"],
        "class_weights": '"auto" for the task classification, "none" otherwise',
    },
}
"""Rules of each recipe for the defaults that depend on the task, the encoder or the data, by key of `[finetune]`."""


def recipe_config(
    recipe: str,
    task: str,
    shape: ModelConfig,
    overrides: Mapping[str, object],
    type_defaults: Mapping[str, Scalar] | None = None,
    num_examples: int = 0,
    num_classes: int = 0,
) -> FinetuningConfig:
    """Returns a recipe (`paper`, `google`, `fast`) for a task and an encoder of this shape.

    `type_defaults` are the defaults of the task type, `overrides` the keys that the user set. `fast` depends on the
    numbers of training examples and classes, if they are known. Raises InputError for an unknown recipe, key or value.
    """
    if recipe not in RECIPES:
        raise InputError(f"unknown recipe {recipe!r}{did_you_mean(recipe, RECIPES)}")
    keys = RECIPES[recipe] | _by_encoder(recipe, shape) | _by_task(recipe, task)
    keys = {"sequence_length": FinetuneSection.sequence_length} | keys | dict(type_defaults or {})
    keys["sequence_length"] = min(int(keys["sequence_length"]), shape.max_positions)
    config = FinetuningConfig().override(keys).override(overrides)
    if recipe == "fast" and num_examples:
        epochs = config.finetune.epochs
        if "finetune.epochs" not in overrides:
            per_epoch = math.ceil(num_examples / config.finetune.batch_size)
            per_class = NARROW_STEPS_PER_CLASS if shape.hidden_size <= NARROW else STEPS_PER_CLASS
            for_classes = min(math.ceil(num_classes * per_class / per_epoch), MAX_EPOCHS_FOR_CLASSES)
            epochs = max(epochs, math.ceil(MIN_STEPS / per_epoch), for_classes)
        suited = {"epochs": epochs, "evals_per_epoch": min(1.0, MAX_EVALUATIONS / epochs)}
        config = config.override(suited).override(overrides)
    return config


def _by_encoder(recipe: str, shape: ModelConfig) -> dict[str, Scalar]:
    """Returns learning rate and layer decay for the encoder's size; `fast` also uses the encoder's dropout.

    `fast` differs from the paper if another value was better for small encoders (bench/LOG.md).
    """
    is_large = shape.num_layers >= _LARGE_LAYERS
    by_width = (rate for width, rate in _RATES[recipe].items() if shape.hidden_size <= width)
    rate = _LARGE_RATE if is_large else next(by_width, _BASE_RATE)
    keys: dict[str, Scalar] = {"learning_rate": rate, "layer_decay": 0.9 if is_large or recipe == "fast" else 0.8}
    if recipe == "fast" and shape.architecture == "deberta" and shape.hidden_size > _DEBERTA_WIDTH:
        keys = {"learning_rate": _DEBERTA_LARGE if is_large else _DEBERTA, "layer_decay": 1.0}
    if recipe == "fast":
        keys |= {"dropout": shape.dropout, "attention_dropout": shape.attention_dropout}
    return keys


def _by_task(recipe: str, task: str) -> dict[str, Scalar]:
    keys: dict[str, Scalar] = {"epochs": 10.0 if task in _LONG and recipe != "fast" else 3.0}
    if recipe == "google":
        keys["both_orders"] = task in _SYMMETRIC
    if recipe == "fast" and task == "classification":
        keys["class_weights"] = "auto"
    return keys


def lr_factors(names: Iterable[str], num_layers: int, config: FinetuneSection) -> dict[str, float]:
    """Returns each parameter's learning-rate factor: layer_decay to the power of its distance from the head.

    In the published code, embeddings and their projection have depth 0, layer i (0-based) has depth i + 1, and the head
    has depth n + 2, with n the number of layers. The exponent n + 2 - depth is thus 2 in the top layer and n + 2 in the
    embeddings: with n = 12 and a decay of 0.8, the factors are 0.64 and 0.044. No layer has depth n + 1, which the
    code's author calls a leftover. In the form `plain`, the head has depth n + 1, and all other exponents are one less.

    An encoder's norm of embeddings, and the relative positions and convolution of a DeBERTa, count as embeddings. The
    last norm of a modern encoder, whose input is the output of the top layer, counts as the top layer.
    """
    head_depth = num_layers + (2 if config.layer_decay_form == "squared" else 1)
    factors = {}
    for name in names:
        if match := _LAYER.match(name):
            depth = int(match[1]) + 1
        elif name.startswith("head."):
            depth = head_depth
        else:
            depth = num_layers if name.startswith("encoder.output_norm.") else 0
        factors[name] = config.layer_decay ** (head_depth - depth)
    return factors
