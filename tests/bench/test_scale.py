"""`docs/background/scaling.md` has the law of `bench/scaling_law.py`, `bench/MANY_GPUS.md` the tables of `scale.py`."""

import math
from dataclasses import replace

import pytest
import scale
import scaling_law
from lib.groups import BENCH
from lib.recipe_report import score
from lib.recipe_studies import TFLOP
from torch._subclasses.fake_tensor import FakeTensorMode

import electra_fast as ef
from electra_fast.training.forecast import LAW, ScalingLaw

LAW_PAGE = (BENCH.parent / "docs/background/scaling.md").read_text(encoding="utf-8")
PROJECTIONS = (BENCH / "MANY_GPUS.md").read_text(encoding="utf-8")
KNOWN = ScalingLaw(floor=0.07, size=0.03, alpha=0.4, data=0.3, beta=0.7, epochs=12.0)


def known_points():
    runs = [(n, d, math.inf) for n in (1e5, 8e5, 3e6, 1e7) for d in (1e6, 4e6, 16e6, 64e6)]
    runs += [(8e5, 4e6, 4e6 / epochs) for epochs in (8, 32, 128)]
    return [scaling_law.Point("", *run, KNOWN.error(*run), 1) for run in runs]


def test_fit_recovers_known_law():
    fitted = scaling_law.fit(known_points())
    assert fitted == ScalingLaw(*(pytest.approx(constant, rel=1e-3) for constant in scaling_law.astuple(KNOWN)))


def test_interval_without_and_with_noise():
    noisy = [replace(point, error=point.error * (1.03 if i % 2 else 0.97)) for i, point in enumerate(known_points())]
    expected = KNOWN.error(3e6, 2e7)
    for points, least, most in ((known_points(), 0.0, 1e-3), (noisy, 0.01, 0.1)):
        (low,), (high,) = scaling_law.intervals(points, 20, lambda law: [law.error(3e6, 2e7)])
        assert low <= expected * 1.001 and high >= expected * 0.999
        assert least <= (high - low) / expected <= most


def test_constants_equal_fit_of_runs():
    points = scaling_law.points()
    fitted = scaling_law.fit(points)
    assert len(points) >= 8
    for point in points:
        run = point.weights, point.tokens, point.text
        assert LAW.error(*run) == pytest.approx(fitted.error(*run), rel=0.005), point


def test_page_has_table_of_shapes():
    assert all(f"| {' | '.join(row)} |" in LAW_PAGE for row in scaling_law.shapes_by_budget(LAW))


def test_page_has_task_scores():
    page = " ".join(LAW_PAGE.split())
    results = {(line["name"], line["run"]["budget"]): line["result"] for line in scaling_law.lines()}
    runs = [("2 layers of 64", 30), ("2 layers of 128", 30), ("2 layers of 128", 90), ("4 layers of 128", 90)]
    small, wider, longer, deeper = (f"{score(results[name, tflop * TFLOP]):.1f}" for name, tflop in runs)
    assert f"2 layers of 64 with 30 TFLOPs average {small}, and 2 of 128 average {wider}" in page
    assert f"With 90, 2 of 128 average {longer}, 4 of 128 average {deeper}" in page


def test_variants_are_not_seeds():
    drawn = scaling_law.tasks()
    assert [len(scores) for scores in drawn["2 layers of 64"].values()] == [1]
    assert len(drawn["modern"][60.0]) == len(drawn["BertForMaskedLM"][60.0]) == 2


def test_projections_match_script():
    assert [table for table in scale.tables() if table not in PROJECTIONS] == []


@pytest.mark.parametrize("preset", scale.MODELS)
def test_sizes_equal_presets(preset):
    config = ef.Config.preset(preset, "google").override({"model.vocab_size": "30522"})
    with FakeTensorMode():
        parameters = sum(parameter.numel() for parameter in ef.Electra(config).parameters())
    assert scale.MODELS[preset][:3] == (parameters, config.model.num_layers, config.model.hidden_size)
