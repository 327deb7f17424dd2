"""The rows of the paper's comparisons have the documented settings and equal cost; wrong arguments are refused."""

import pytest
import torch

import electra_fast as ef
from electra_fast.config.config import Config
from electra_fast.errors import InputError
from electra_fast.hardware.flops import flops
from electra_fast.objectives import OBJECTIVES
from electra_fast.reproduction.experiments import (
    EXPERIMENTS,
    MIN_STEPS,
    PUBLISHED_SHAPES,
    base_config,
    common_precision,
    make_experiment,
    row_configs,
    training_size,
    with_steps,
)


def experiment(name, preset="mini", recipe="modern", overrides=None):
    base = Config.preset(preset, recipe).override({"model.vocab_size": 8192})
    return make_experiment(name, base, overrides or {})


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize(("preset", "recipe", "budget"), [("tiny", "modern", 1e13), ("base", "google", 1e18)])
def test_rows_cost_budget_within_one_percent(name, preset, recipe, budget):
    comparison = experiment(name, preset, recipe)
    configs = row_configs(comparison, budget, {})
    assert list(configs) == [row.name for row in comparison.rows] and len(configs) >= 3
    for config in configs.values():
        assert flops(config)["total"] == pytest.approx(budget, rel=0.01)  # the number that `electra-fast flops` prints
        assert training_size(config)["flops"] == flops(config)["total"]
    assert comparison.claims and all(claim.weights.keys() <= configs.keys() for claim in comparison.claims)
    assert all(sum(claim.weights.values()) == 0 for claim in comparison.claims)


def test_objectives_are_complete_and_differ_only_in_objective():
    comparison = experiment("objectives")
    assert {row.name for row in comparison.rows} == set(OBJECTIVES)
    assert [row.paper for row in comparison.rows[:5]] == [85.0, 84.3, 82.4, 82.4, 82.2]
    first = comparison.rows[0].config
    needed = {"objective.name", "data.masking", "model.tying", "generator.fraction"}  # two-stage needs the last two
    for row in comparison.rows[1:]:
        assert set(first.differences(row.config)) <= needed
        assert row.config.objective.name == row.name
    masking = {row.name: row.config.data.masking for row in comparison.rows}
    assert masking.pop("mlm") == "80-10-10" and set(masking.values()) == {"tokens"}


def test_generators_have_whole_heads():
    comparison = experiment("generators")
    assert [row.width for row in comparison.rows] == [0, 64, 128, 192, 256]
    assert comparison.rows[0].config.generator.kind == "unigram"
    assert [row.width for row in experiment("generators", "tiny").rows] == [0, 32, 64]


def test_sizes_scale_width_and_keep_heads():
    comparison = experiment("sizes", "small", "google")
    models = [row.config.model for row in comparison.rows]
    assert [row.group for row in comparison.rows] == ["ELECTRA", "BERT"] * 3
    shapes = [(model.hidden_size, model.intermediate_size, model.embedding_size) for model in models]
    assert shapes[::2] == shapes[1::2] == [(64, 256, 32), (128, 512, 64), (256, 1024, 128)]
    assert {model.num_heads for model in models} == {4}
    # Tables 1 and 2 have scores only for the shapes of small, base and large.
    assert [row.paper for row in comparison.rows] == [None] * 4 + [79.9, 75.1]
    assert [row.paper for row in experiment("sizes", "base").rows][-2:] == [85.1, 82.2]
    presets = [Config.preset(name).model for name in ("small", "base", "large")]
    assert {(model.hidden_size, model.num_layers) for model in presets} == PUBLISHED_SHAPES


@pytest.mark.parametrize(
    ("name", "key"), [("objectives", "objective.name"), ("tying", "model.tying"), ("sizes", "train.steps")]
)
def test_keys_set_by_experiment_are_refused(name, key):
    with pytest.raises(InputError, match=f"--{key}: is set by `reproduce {name}`; remove it"):
        experiment(name, overrides={key: "1"})
    assert experiment("sizes", overrides={"model.num_layers": "2"}).rows[3].config.model.num_layers == 2


def test_budget_too_small_for_warmup_is_refused():
    row = experiment("objectives").rows[0]
    message = r"--budget 1e\+12: is \d+ steps of electra, but .* needs 100; pass --budget"
    with pytest.raises(InputError, match=message):
        with_steps(row, 1e12)
    assert with_steps(row, 1e14).train.steps >= MIN_STEPS
    for warmup in (10_000, 10_300, 10_700):  # the suggested budget is rounded differently
        warm = experiment("objectives", overrides={"optimizer.warmup_steps": str(warmup)}).rows[0]
        with pytest.raises(InputError, match=f"a warmup of {warmup} steps needs {2 * warmup}") as refused:
            with_steps(warm, 1e14)
        enough = float(str(refused.value).split("pass --budget ")[1].split()[0])
        assert 2 * warmup <= with_steps(warm, enough).train.steps < 2.03 * warmup


def test_rows_have_same_precision(validation_corpus, monkeypatch):
    """If precision were measured, it might differ between runs."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    corpus = ef.Corpus(validation_corpus)
    base = base_config(Config.preset("tiny", "modern"), corpus, {}, common_precision("auto"))
    assert base.train.precision == ("bf16" if torch.cuda.is_available() else "fp32")
    overrides = {"train.precision": "bf16"}
    comparison = make_experiment(
        "objectives", base_config(Config.preset("tiny", "modern"), corpus, overrides, "fp32"), overrides
    )
    assert {row.config.train.precision for row in comparison.rows} == {"bf16"}
