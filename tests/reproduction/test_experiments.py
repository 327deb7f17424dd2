"""The rows of the paper's comparisons: what they are, that they cost the same, and what they refuse."""

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
def test_all_rows_cost_the_budget_within_one_percent(name, preset, recipe, budget):
    made = experiment(name, preset, recipe)
    configs = row_configs(made, budget, {})
    assert list(configs) == [row.name for row in made.rows] and len(configs) >= 3
    for config in configs.values():
        assert flops(config)["total"] == pytest.approx(budget, rel=0.01)  # what `electra-fast flops` prints
        assert training_size(config)["flops"] == flops(config)["total"]
    assert made.claims and all(claim.weights.keys() <= configs.keys() for claim in made.claims)
    assert all(sum(claim.weights.values()) == 0 for claim in made.claims)


def test_objectives_are_all_there_and_differ_in_nothing_else():
    made = experiment("objectives")
    assert {row.name for row in made.rows} == set(OBJECTIVES)
    assert [row.paper for row in made.rows[:5]] == [85.0, 84.3, 82.4, 82.4, 82.2]
    first = made.rows[0].config
    needed = {"objective.name", "data.masking", "model.tying", "generator.fraction"}  # the last two by two stages
    for row in made.rows[1:]:
        assert set(first.differences(row.config)) <= needed
        assert row.config.objective.name == row.name
    masking = {row.name: row.config.data.masking for row in made.rows}
    assert masking.pop("mlm") == "80-10-10" and set(masking.values()) == {"tokens"}


def test_generators_have_whole_heads():
    made = experiment("generators")
    assert [row.width for row in made.rows] == [0, 64, 128, 192, 256]
    assert made.rows[0].config.generator.kind == "unigram"
    assert [row.width for row in experiment("generators", "tiny").rows] == [0, 32, 64]


def test_sizes_narrow_the_model_and_keep_its_heads():
    made = experiment("sizes", "small", "google")
    models = [row.config.model for row in made.rows]
    assert [row.group for row in made.rows] == ["ELECTRA", "BERT"] * 3
    shapes = [(model.hidden_size, model.intermediate_size, model.embedding_size) for model in models]
    assert shapes[::2] == shapes[1::2] == [(64, 256, 32), (128, 512, 64), (256, 1024, 128)]
    assert {model.num_heads for model in models} == {4}
    # Tables 1 and 2: published for the shapes of small, base and large, for no other.
    assert [row.paper for row in made.rows] == [None] * 4 + [79.9, 75.1]
    assert [row.paper for row in experiment("sizes", "base").rows][-2:] == [85.1, 82.2]
    presets = [Config.preset(name).model for name in ("small", "base", "large")]
    assert {(model.hidden_size, model.num_layers) for model in presets} == PUBLISHED_SHAPES


@pytest.mark.parametrize(
    ("name", "key"), [("objectives", "objective.name"), ("tying", "model.tying"), ("sizes", "train.steps")]
)
def test_keys_that_the_experiment_decides_are_refused(name, key):
    with pytest.raises(InputError, match=f"--{key}: cannot be set, because `reproduce {name}` decides it"):
        experiment(name, overrides={key: "1"})
    assert experiment("sizes", overrides={"model.num_layers": "2"}).rows[3].config.model.num_layers == 2


def test_a_budget_without_room_for_a_warmup_is_refused():
    row = experiment("objectives").rows[0]
    message = r"a budget of 1e\+12 FLOPs is \d+ steps of electra, and .* needs 100; give --budget"
    with pytest.raises(InputError, match=message):
        with_steps(row, 1e12)
    assert with_steps(row, 1e14).train.steps >= MIN_STEPS
    for warmup in (10_000, 10_300, 10_700):  # whatever the budget is rounded to
        warm = experiment("objectives", overrides={"optimizer.warmup_steps": str(warmup)}).rows[0]
        with pytest.raises(InputError, match=f"a warmup of {warmup} steps needs {2 * warmup}") as refused:
            with_steps(warm, 1e14)
        enough = float(str(refused.value).split("--budget ")[1].split()[0])
        assert 2 * warmup <= with_steps(warm, enough).train.steps < 2.03 * warmup


def test_all_rows_have_one_precision(validation_corpus, monkeypatch):
    """Where it would be measured, each run might choose another."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    corpus = ef.Corpus(validation_corpus)
    base = base_config(Config.preset("tiny", "modern"), corpus, {}, common_precision("auto"))
    assert base.train.precision == ("bf16" if torch.cuda.is_available() else "fp32")
    given = {"train.precision": "bf16"}
    made = make_experiment("objectives", base_config(Config.preset("tiny", "modern"), corpus, given, "fp32"), given)
    assert {row.config.train.precision for row in made.rows} == {"bf16"}
