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
    layer_decay: float = config_key(0.9, "factor on the learning rate per layer below the head", low=0, high=1)
    layer_decay_form: Literal["plain", "squared"] = config_key(
        "plain", "factor of the top layer: layer_decay, or its square as in the published code"
    )
    epochs: float = config_key(3.0, "passes over the training data", low=0, high=1_000, open_low=True)
    batch_size: int = config_key(32, "examples per step", low=1, high=65_536)
    evals_per_epoch: float = config_key(
        1.0, "evaluations per epoch, such as 4 or 0.5, besides the one after the last step", low=0
    )
    select: Literal["best", "last"] = config_key(
        "best", "the model to keep: that of the step with the best validation score, or of the last step"
    )
    patience: int = config_key(
        0, "evaluations without a better score after which training stops; 0: it never stops early", low=0
    )
    schedule: Literal["linear", "product"] = config_key(
        "linear", "linear: warmup, then decay to 0; product: warmup times a decay that starts at step 0"
    )
    warmup_fraction: float = config_key(0.1, "fraction of the steps used for warmup", low=0, high=1)
    weight_decay: float = config_key(0.01, "decoupled weight decay, except on norms and biases", low=0)
    clip_norm: float = config_key(1.0, "maximum global gradient norm; 0: no clipping", low=0)
    bias_correction: bool = config_key(True, "correct the bias of Adam's moments")
    beta1: float = config_key(0.9, "decay of Adam's first moment", low=0, high=0.999999)
    beta2: float = config_key(0.999, "decay of Adam's second moment", low=0, high=0.999999)
    epsilon: float = config_key(1e-6, "Adam's epsilon", low=0, open_low=True)
    loss_reduction: Literal["mean", "sum"] = config_key("mean", "how the losses in a batch are combined")
    sequence_length: int = config_key(128, "maximum tokens per example, including [CLS] and [SEP]", low=8, high=32768)
    dropout: float = config_key(0.1, "dropout on embeddings and sublayer outputs", low=0, high=0.99)
    attention_dropout: float = config_key(0.1, "dropout on attention probabilities", low=0, high=0.99)
    head: Literal["transformers", "published"] = config_key(
        "transformers",
        "transformers: the head of its class for the task; published: that of the published code, a linear layer, or "
        "for questions an end that depends on the start and a classifier of unanswerable questions",
    )
    head_dropout: float = config_key(0.1, "dropout in the head", low=0, high=0.99)
    order: Literal["shuffle", "buffer"] = config_key(
        "shuffle", "shuffle: a new order each epoch; buffer: one order through a shuffle buffer of 100 (published code)"
    )
    both_orders: bool = config_key(False, "train on each pair of texts in both orders")
    class_weights: str = config_key(
        "none",
        "class weights in the loss: none, balanced, auto (balanced up to 10 where a class has under a tenth of an even "
        "share), or LABEL=WEIGHT,...",
    )
    teacher_weight: float = config_key(
        0.9, "with --teacher: weight of its answers; that of the labels is the rest", low=0, high=1, open_low=True
    )
    teacher_temperature: float = config_key(
        2.0, "with --teacher: temperature of its probabilities and of the student's in the loss", low=0, open_low=True
    )
    calibrate: bool = config_key(
        False, "after training, divide the logits by the temperature that fits the validation examples best"
    )
    doc_stride: int = config_key(
        128, "tokens between the starts of the chunks of a long text (question answering, tagging)", low=1, high=32768
    )
    max_query_length: int = config_key(64, "maximum tokens of a question", low=1, high=32768)
    max_answer_length: int = config_key(30, "maximum tokens of an answer", low=1, high=32768)
    n_best_size: int = config_key(20, "answers kept per question", low=1, high=1000)
    beam_size: int = config_key(20, "answer starts considered, and ends per start", low=1, high=1000)
    answerable_weight: float = config_key(
        0.5, "weight of the loss of the classifier of unanswerable questions (head published)", low=0
    )
    precision: Precision = config_key(
        "auto",
        "dtype of activations (fp16: with dynamic loss scaling); auto: bf16 on CUDA, or fp16 before Ampere, the faster "
        "of fp32 and bf16 on a CPU, by a short measurement",
    )
    matmul: Literal["auto", "default", "onednn"] = config_key(
        "auto", "library for fp32 matrix products on a CPU; auto: the faster, by a short measurement"
    )
    attention: Literal["auto", "sdpa", "varlen", "flex", "flash4", "xformers"] = config_key(
        "auto", "attention backend; auto: varlen on CUDA in 16 bits, else sdpa"
    )
    execution: Literal["auto", "eager", "graph"] = config_key(
        "auto", "eager, or graph: CUDA graphs, one per batch shape; auto: graph on CUDA"
    )
    loggers: str | list[str] = config_key(
        "", "loggers to use besides metrics.jsonl, separated by commas", choices=LOGGERS, takes_several=True
    )
    checkpoint_seconds: float = config_key(60.0, "seconds between checkpoints, from which a killed run resumes", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.patience and self.select == "last":
            raise InputError(f'finetune.patience = {self.patience} needs finetune.select = "best"')
        if self.patience and not self.evals_per_epoch:
            raise InputError(
                f"finetune.patience = {self.patience} needs evaluations before the last step: raise "
                "finetune.evals_per_epoch above 0"
            )

    def num_warmup_steps(self, num_steps: int) -> float:
        """Returns the number of warmup steps; not rounded in the schedule `product`, as in the published code."""
        steps = self.warmup_fraction * num_steps
        return steps if self.schedule == "product" else int(steps)

    def optimizer(self) -> OptimizerConfig:
        shared = {each.name for each in fields(self)} & {each.name for each in fields(OptimizerConfig)}
        return OptimizerConfig(name="adamw", **{name: getattr(self, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class FinetuningConfig(Configuration):
    """The configuration of fine-tuning; its recipes set what depends on the task and the encoder."""

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
        """Returns how the default recipe derives a key's default from task, encoder and data, or ""."""
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
# `fast` takes at least so many steps, or so many per class in at most so many epochs (measured in bench/LOG.md), and
# evaluates at most so often. Narrow encoders need more steps per class, and less time for them.
MIN_STEPS = 300
MAX_EPOCHS_FOR_CLASSES = 30
MAX_EVALUATIONS = 20
NARROW = 128
NARROW_STEPS_PER_CLASS = 60
STEPS_PER_CLASS = 20
# Widths of encoders and their rates, in a recipe (`fast`: measured in bench/LOG.md); wider ones have _BASE_RATE, and
# those of 24 layers or more _LARGE_RATE.
_RATES = {"paper": {256: 3e-4}, "google": {}, "fast": {128: 1e-3, 384: 3e-4}}
_BASE_RATE = 1e-4
_LARGE_RATE = 5e-5
_LARGE_LAYERS = 24
# `fast` with DeBERTa encoders wider than this: no layer decay, and about the rates of `experiments/glue` in V3's code,
# 4.5e-5 for small, 1.5e-5 for base, 5.5e-6 to 1e-5 for large.
_DEBERTA_WIDTH = 256
_DEBERTA = 3e-5
_DEBERTA_LARGE = 7e-6
# Tasks with small training sets, trained for 10 epochs in the paper and its code; tasks whose pairs have no order.
_LONG = {"rte", "stsb"}
_SYMMETRIC = {"mrpc", "stsb"}
_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def _rate_rule(recipe: str) -> str:
    widths = "".join(f"{rate:g} up to width {width}, " for width, rate in _RATES[recipe].items())
    return f"{widths}{_BASE_RATE:g}{' above' if widths else ''}; {_LARGE_RATE:g} from {_LARGE_LAYERS} layers"


_PUBLISHED_RULES = {
    "layer_decay": f"0.8; 0.9 from {_LARGE_LAYERS} layers",
    "epochs": "3; RTE, STS-B 10; questions 2",
    "sequence_length": "128; tags 256; questions 512; at most the encoder's positions",
    "head_dropout": "0.1; questions 0",
}
RULES: dict[str, dict[str, str]] = {
    "paper": _PUBLISHED_RULES | {"learning_rate": _rate_rule("paper")},
    "google": _PUBLISHED_RULES
    | {"learning_rate": _rate_rule("google"), "both_orders": "true for MRPC and STS-B, else false"},
    "fast": {
        "learning_rate": f"{_rate_rule('fast')}; deberta over width {_DEBERTA_WIDTH}: {_DEBERTA:g}, {_DEBERTA_LARGE:g}",
        "layer_decay": f"0.9; 1 for deberta over width {_DEBERTA_WIDTH}",
        "epochs": f"3; questions 2; more if these are under {MIN_STEPS} steps, or {STEPS_PER_CLASS} per class, "
        f"{NARROW_STEPS_PER_CLASS} up to width {NARROW} (for classes, {MAX_EPOCHS_FOR_CLASSES} epochs at most)",
        "evals_per_epoch": f"1; fewer for at most {MAX_EVALUATIONS} in all",
        "sequence_length": _PUBLISHED_RULES["sequence_length"],
        "dropout": "the encoder's",
        "attention_dropout": "the encoder's",
        "head_dropout": _PUBLISHED_RULES["head_dropout"],
        "class_weights": '"auto" for your own classes, else "none"',
    },
}
"""How each recipe derives the defaults that depend on the task, the encoder or the data, by key of `[finetune]`."""


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

    `type_defaults` are the defaults of the task type, `overrides` the keys that were given. `fast` depends on
    the numbers of training examples and classes, if these are known. Raises InputError for an unknown recipe, key or
    value.
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
    """Returns learning rate and layer decay by the encoder's size; `fast` also takes the encoder's dropout.

    `fast` differs from the paper where another value measured better with small encoders (bench/LOG.md).
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
    """Returns each parameter's factor on the learning rate: layer_decay to the power of its distance from the head.

    The published code gives embeddings and their projection depth 0, layer i (0-based) depth i + 1, and the head depth
    n + 2 with n the number of layers, so that the exponent n + 2 - depth is 2 in the top layer and n + 2 in the
    embeddings: with n = 12 and a decay of 0.8, 0.64 and 0.044. No layer has depth n + 1, which the code's author calls
    a leftover; in the form `plain` the head takes that depth, and all exponents but its own are one less.

    An encoder's own norm of embeddings, and a DeBERTa's relative positions and convolution, count as embeddings; a
    modern encoder's last norm, whose input is the top layer's, as the top layer.
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
