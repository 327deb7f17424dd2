"""Settings of the recipes, compared with table 6 of the paper's draft and the published code."""

import itertools
from dataclasses import replace

import pytest

from electra_fast.config.config import Config
from electra_fast.config.section import format_value
from electra_fast.errors import InputError
from electra_fast.finetuning.config import RECIPES, RULES, FinetuneSection, FinetuningConfig, lr_factors, recipe_config
from electra_fast.finetuning.readers.glue import TASKS
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.training.step import FinetuningWork
from electra_fast.optimizers.optimizer import lr_scale

SMALL, BASE, LARGE = (
    Config.preset(size, "google").override(vocab_size=100).model for size in ("small", "base", "large")
)


def names_of(shape):
    import torch

    from electra_fast.model.compute import ComputeConfig

    work = FinetuningWork(shape, FinetuneSection(), "classification", 2, ComputeConfig("sdpa", torch.float32))
    with torch.device("meta"):
        return [name for name, _ in work.model().named_parameters()]


def test_google_learning_rates_by_depth():
    """`lr_factors` is d ** (n + 2 - depth), with embeddings at depth 0, layer i at i + 1, and the head at n + 2."""
    factors = lr_factors(names_of(SMALL), 12, FinetuneSection(layer_decay=0.8, layer_decay_form="squared"))
    assert factors["embeddings.token"] == factors["encoder.projection.weight"] == pytest.approx(0.044, abs=5e-4)
    assert factors["embeddings.norm.bias"] == factors["embeddings.token"]
    assert factors["encoder.layers.0.qkv.weight"] == pytest.approx(0.055, abs=5e-4)
    assert factors["encoder.layers.11.feed_forward_norm.bias"] == pytest.approx(0.64)
    assert factors["head.classifier.weight"] == 1
    names = ["embeddings.token", "encoder.layers.23.qkv.weight"]
    large = lr_factors(names, 24, FinetuneSection(layer_decay=0.9, layer_decay_form="squared"))
    assert list(large.values()) == pytest.approx([0.0646, 0.81], rel=1e-3)


def test_paper_learning_rates_have_no_leftover_depth():
    """The norms of a modern encoder have the depth of their input."""
    shape = Config.preset("small", "modern").override({"model.vocab_size": 100}).model
    factors = lr_factors(names_of(shape), 12, FinetuneSection(layer_decay=0.5))
    assert factors["encoder.input_norm.weight"] == factors["embeddings.token"] == 0.5**13
    assert factors["encoder.output_norm.weight"] == factors["encoder.layers.11.geglu_in.weight"] == 0.5
    assert factors["head.classifier.bias"] == 1


def test_deberta_learning_rates_equal_published_code():
    """Parameters that all layers read have the depth of the embeddings."""
    shape = Config.preset("base", "deberta").override({"vocab_size": 100, "model.conv_kernel_size": 3}).model
    factors = lr_factors(names_of(shape), 12, FinetuneSection(layer_decay=0.5))
    bottom = {name for name, factor in factors.items() if factor == factors["embeddings.token"] == 0.5**13}
    parts = ("relative_norm.weight", "input_norm.bias", "convolution.weight", "convolution.norm.bias", "relative")
    assert bottom >= {f"encoder.{part}" for part in parts} and factors["encoder.layers.11.qkv.weight"] == 0.5
    for changes, rate, decay in (({}, 3e-5, 1), ({"num_layers": 24}, 7e-6, 1), ({"hidden_size": 240}, 3e-4, 0.9)):
        assert_settings("fast", "mnli", replace(shape, **changes), {"learning_rate": rate, "layer_decay": decay})
    assert_settings("google", "mnli", shape, {"learning_rate": 1e-4, "layer_decay": 0.8})


def test_product_schedule_equals_published_code():
    config = FinetuneSection(schedule="product", warmup_fraction=0.1)
    total = 804
    scales = [lr_scale(config, t, total) for t in range(total)]
    assert scales[0] == 0 and scales[40] == pytest.approx((1 - 40 / 804) * 40 / 80.4)
    assert max(scales) == pytest.approx(0.9, abs=0.002) and scales[-1] == pytest.approx(1 / 804)


def test_linear_schedule():
    config = FinetuneSection(schedule="linear", warmup_fraction=0.1)
    scales = [lr_scale(config, t, 100) for t in range(100)]
    assert scales[:2] == pytest.approx([0.1, 0.2]) and max(scales) == scales[9] == 1
    assert scales[-1] == pytest.approx(1 / 90)
    assert lr_scale(FinetuneSection(warmup_fraction=0.0), 0, 10) == 1


TABLE_6 = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "warmup_fraction": 0.1, "batch_size": 32, "dropout": 0.1}
TABLE_6 |= {"attention_dropout": 0.1, "head": "published", "head_dropout": 0.1, "clip_norm": 1, "sequence_length": 128}
PAPER = {"weight_decay": 0.0, "schedule": "linear", "loss_reduction": "mean", "order": "shuffle"}
PAPER |= {"bias_correction": True, "layer_decay_form": "plain", "both_orders": False}
GOOGLE = {"weight_decay": 0.01, "schedule": "product", "loss_reduction": "sum", "order": "buffer"}
GOOGLE |= {"bias_correction": False, "layer_decay_form": "squared"}


def assert_settings(recipe, task, shape, expected):
    config = recipe_config(recipe, task, shape, {}).finetune
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("recipe, small, settings", [("paper", 3e-4, PAPER), ("google", 1e-4, GOOGLE)])
def test_published_recipes(recipe, small, settings):
    for shape, rate, decay in ((SMALL, small, 0.8), (BASE, 1e-4, 0.8), (LARGE, 5e-5, 0.9)):
        sizes = {"learning_rate": rate, "layer_decay": decay, "epochs": 3}
        assert_settings(recipe, "cola", shape, TABLE_6 | settings | sizes)
    for task in ("rte", "stsb"):
        assert_settings(recipe, task, SMALL, {"epochs": 10})
    for task, both_orders in (("mrpc", True), ("stsb", True), ("qqp", False)):
        assert_settings(recipe, task, SMALL, {"both_orders": both_orders and recipe == "google"})


def test_fast_uses_dropout_of_encoder():
    widths = {64: 1e-3, 128: 1e-3, 256: 3e-4, 384: 3e-4, 512: 1e-4}
    by_width = ((replace(SMALL, hidden_size=width), rate) for width, rate in widths.items())
    for shape, rate in (*by_width, (BASE, 1e-4), (LARGE, 5e-5)):
        expected = {"dropout": 0.0, "attention_dropout": 0.2, "learning_rate": rate, "layer_decay": 0.9, "epochs": 3}
        expected |= {"schedule": "linear", "head": "transformers", "bias_correction": True}
        assert_settings("fast", "stsb", replace(shape, dropout=0.0, attention_dropout=0.2), expected)


@pytest.mark.parametrize(
    ("num_examples", "num_classes", "overrides", "epochs", "evals_per_epoch", "width"),
    [
        (0, 0, {}, 3, 1, 256),
        (60_000, 40, {}, 3, 1, 256),
        (60_000, 40, {}, 3, 1, 128),
        (3_169, 2, {}, 3, 1, 256),
        (3_168, 15, {}, 4, 1, 256),
        (1_000, 0, {}, 10, 1, 256),
        (1_000, 40, {}, 25, 20 / 25, 256),
        (3_200, 40, {}, 8, 1, 192),
        (3_200, 40, {}, 24, 20 / 24, 128),
        (1_000, 40, {}, 30, 20 / 30, 64),
        (1_000, 2, {}, 10, 1, 64),
        (1_000, 500, {}, 30, 20 / 30, 256),
        (100, 2, {}, 75, 20 / 75, 256),
        (5, 2, {}, 300, 20 / 300, 256),
        (1_000, 2, {"finetune.batch_size": "10"}, 3, 1, 256),
        (100, 40, {"finetune.epochs": "2"}, 2, 1, 256),
        (100, 2, {"finetune.evals_per_epoch": "4"}, 75, 4, 256),
    ],
)
def test_fast_has_minimum_number_of_steps(num_examples, num_classes, overrides, epochs, evals_per_epoch, width):
    """At least 300 steps, and 20 per class (60 for narrow encoders) in at most 30 epochs."""
    shape = replace(SMALL, hidden_size=width)
    fast, paper = (
        recipe_config(recipe, "sst2", shape, overrides, None, num_examples, num_classes).finetune
        for recipe in ("fast", "paper")
    )
    assert (fast.epochs, fast.evals_per_epoch) == (epochs, evals_per_epoch)
    assert paper.epochs == float(overrides.get("finetune.epochs", 3))


def default_configs(recipe):
    """Yields configurations for all tasks, several encoders, and different numbers of examples."""
    dropout = {"dropout": 0.0, "attention_dropout": 0.2}
    shapes = [replace(SMALL, hidden_size=width, **dropout) for width in (64, 256, 384)] + [BASE, LARGE]
    shapes += [replace(shape, architecture="deberta") for shape in (BASE, LARGE)]
    tasks = dict.fromkeys(TASKS, {}) | {kind: task_type.defaults for kind, task_type in TASK_TYPES.items()}
    sizes = ((0, 0), (100, 2), (1_000, 40), (60_000, 3))
    for (task, defaults), shape, size in itertools.product(tasks.items(), shapes, sizes):
        yield recipe_config(recipe, task, shape, {}, defaults, *size)


@pytest.mark.parametrize("recipe", RULES)
def test_documented_defaults_equal_recipes(recipe):
    """Defaults that differ between runs are documented by a rule that contains all their values."""
    values_by_key = {}
    recipe_defaults = FinetuningConfig().override(RECIPES[recipe])
    for config, name in itertools.product(default_configs(recipe), FinetuningConfig.key_names()):
        values_by_key.setdefault(name.partition(".")[2], set()).add(format_value(config.value(name)))
    rules = RULES[recipe]
    assert {name for name, values in values_by_key.items() if len(values) > 1} == rules.keys()
    for name, values in values_by_key.items():
        if name not in rules:
            assert values == {format_value(recipe_defaults.value(f"finetune.{name}"))}
        elif rules[name] != "the encoder's" and not name.startswith(("epochs", "evals")):
            assert all(value.removesuffix(".0") in rules[name] for value in map(shown, values)), (name, values)


def shown(value):
    return f"{float(value):g}" if value[0].isdigit() else value


def test_only_fast_weights_classes_and_keys_can_be_overridden():
    weights = {("fast", "classification"): "auto", ("fast", "sst2"): "none", ("paper", "classification"): "none"}
    for (recipe, task), expected in weights.items():
        assert_settings(recipe, task, SMALL, {"class_weights": expected})
    changes = {"epochs": "2.5", "head": "published", "both_orders": "true", "class_weights": "balanced"}
    for name, value in changes.items():
        config = recipe_config("fast", "mrpc", SMALL, {f"finetune.{name}": value}).finetune
        assert str(getattr(config, name)).lower() == value
    with pytest.raises(InputError, match="finetune.head = 'x': must be one of transformers, published"):
        recipe_config("fast", "mrpc", SMALL, {"finetune.head": "x"})
