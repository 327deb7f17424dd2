"""The report of a comparison: means and margins (compared with scipy), table and plot."""

import json
import statistics

import numpy as np
import pytest
from scipy import stats

from electra_fast.config.config import Config
from electra_fast.reproduction.experiments import Claim, make_experiment
from electra_fast.reproduction.report import assess, summarize, table, write_report

FACTS = {
    **{"experiment": "tying", "overrides": {}, "corpus": "0" * 16, "finetune_seeds": 1, "asked": {}, "other": 0},
    "preset": "tiny",
    "recipe": "modern",
    "budget": 1e13,
    "corrupted_by": "unigram",
    "examples": {"cola": 9, "rte": 5},
}


def made(name="tying"):
    return make_experiment(name, Config.preset("tiny", "modern").override({"model.vocab_size": 600}), {})


def run(seed, cola, rte, auc=0.7):
    tasks = {"cola": {"metric": "matthews", "median": cola}, "rte": {"metric": "accuracy", "median": rte}}
    return {"seed": seed, "tasks": tasks, "evaluation": {"discriminator_auc": auc, "mlm_accuracy": None}}


def summary(runs, name="tying"):
    experiment = made(name)
    sizes = {row.name: {"steps": 100, "tokens": 204_800, "flops": 1e13} for row in experiment.rows}
    return summarize(experiment, FACTS | {"sizes": sizes}, runs)


def test_means_over_tasks_and_deviations_over_seeds():
    comparison = summary({"tying-none": [run(0, 0.1, 0.5, 0.6), run(1, 0.2, 0.6, 0.8), run(2, 0.15, 0.7)]})
    row = comparison["rows"][0]
    scores = [30.0, 40.0, 42.5]
    assert [row_run["score"] for row_run in row["runs"]] == pytest.approx(scores)
    assert row["mean"] == pytest.approx(37.5) and row["sd"] == pytest.approx(statistics.stdev(scores))
    assert row["tasks"]["cola"] == pytest.approx({"mean": 15.0, "sd": 5.0})
    assert row["evaluation"]["discriminator_auc"]["mean"] == pytest.approx(0.7)
    assert row["evaluation"]["mlm_accuracy"] == {"mean": None, "sd": None}
    assert comparison["rows"][1]["mean"] is None and comparison["rows"][1]["runs"] == []


def test_verdict_equals_t_test():
    """For two rows, the pooled interval equals the interval of scipy's two-sample test."""
    rng = np.random.default_rng(0)
    for gap in (0.0, 0.5, 1.0, 3.0, -3.0):
        first = rng.normal(gap, 1, 4).tolist()
        second = rng.normal(0, 1, 3).tolist()
        verdict = assess(Claim("", {"a": 1.0, "b": -1.0}), {"a": first, "b": second})
        test = stats.ttest_ind(first, second)
        interval = test.confidence_interval(0.95)
        assert verdict["difference"] - verdict["margin"] == pytest.approx(interval.low)
        assert verdict["difference"] + verdict["margin"] == pytest.approx(interval.high)
        expected = "undecided" if test.pvalue > 0.05 else "agrees" if test.statistic > 0 else "disagrees"
        assert verdict["verdict"] == expected
    assert {
        assess(Claim("", {"a": 1.0, "b": -1.0}), {"a": [x, x + 0.1], "b": [0, 0.1]})["verdict"] for x in (-3, 0, 3)
    } == {*("agrees", "undecided", "disagrees")}


def test_pooled_variance_squared_weights_and_single_seed():
    scores = {"a": [1.0, 2.0], "b": [0.0, 1.0], "c": [5.0, 5.2, 5.4]}
    verdict = assess(Claim("", {"a": 1.0, "b": -2.0, "c": 1.0}), scores)
    variance = (0.5 + 0.5 + 0.08) / 4  # sums of squares over 1 + 1 + 2 degrees of freedom
    error = (variance * (1 / 2 + 4 / 2 + 1 / 3)) ** 0.5
    assert verdict["difference"] == pytest.approx(1.5 - 1.0 + 5.2)
    assert verdict["margin"] == pytest.approx(stats.t.ppf(0.975, 4) * error)
    claim = Claim("", {"a": 1.0, "b": -1.0})
    alone = {"claim": "", "difference": 8.0, "margin": None}
    assert assess(claim, {"a": [9.0], "b": [1.0]}) == alone | {"verdict": "undecided"}
    assert assess(claim, {"a": [9.0], "b": []})["verdict"] == "not measured"


def test_table_shows_failed_and_missing_runs():
    runs = {
        "tying-none": [run(0, 0.1, 0.5), {"seed": 1, "failed": "the loss became nan"}],
        "tying-all": [run(0, 0.3, 0.6)],
    }
    text = table(summary(runs))
    lines = {line.split(" | ")[0]: line for line in text.splitlines()}
    assert lines["| nothing tied"] == "| nothing tied | 100 | 0.2 M | 10.0 | 50.0 | 30.0 | 83.6 | 0.700 |  |  | 1 |"
    assert lines["| embeddings tied"].endswith("|  |  |  | 84.3 |  |  |  | 0 |")
    assert "* nothing tied, seed 1: the loss became nan" in text
    assert "* tied embeddings are better than none: not measured" in text
    columns = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(columns) == 1


@pytest.mark.parametrize(("name", "seeds"), [("objectives", 1), ("generators", 3), ("tying", 0), ("sizes", 3)])
def test_plot_of_incomplete_comparison(name, seeds, tmp_path):
    experiment = made(name)
    runs = {row.name: [run(seed, 0.1 + seed / 50, 0.5) for seed in range(seeds)] for row in experiment.rows[:-1]}
    results = summary(runs, name)
    write_report(tmp_path, experiment, results)
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "results.json").read_text()) == json.loads(results.to_json())
    assert (tmp_path / "table.md").read_text() == f"{results}\n"
