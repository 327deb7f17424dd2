"""`bench/recipes.py`: budgets, tuning by halving, what is read off the curves, and real runs, one interrupted."""

import importlib
import json
import math
import subprocess
import time
from dataclasses import replace

import pytest
import torch
from test_bench import BENCH
from torch.utils.flop_counter import FlopCounterMode

import electra_fast as ef
from electra_fast import checkpoint_folder, model
from electra_fast.attention import AttentionMask, Queries
from electra_fast.ops import Dropout
from electra_fast.training.flops import flops_per_token
from electra_fast.training.muon import orthogonalize


@pytest.fixture(scope="module")
def modules():
    names = ("recipes", "recipe_studies", "recipe_report")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield [importlib.import_module(name) for name in names]


@pytest.fixture
def study(modules, validation_corpus, tmp_path):
    """A study of tiny budgets, on a corpus that is there."""
    recipes, studies, _ = modules
    rising = (2e10, 4e10)
    budgets = {"google": (4e10, 8e10), "google-rotary": rising, "modern": rising}
    lower = {side: (first / 2,) for side, (first, _) in budgets.items()}
    scale = replace(studies.SCALES["tiny"], budgets=budgets, lower_budgets=lower, ingredient_budget=2e9, eval_batches=1)
    study = recipes.Study(scale, tmp_path, tmp_path / "results.jsonl", math.inf, None)
    study.corpus = validation_corpus
    return study


def test_budgets_count_the_update(modules, study):
    recipes, studies, _ = modules
    job = recipes.Job(studies.MODERN, 3e11, 0)
    config = study.config(job)
    update = recipes.update_flops(config)
    step = config.train.batch_size * config.data.sequence_length * flops_per_token(config).total
    assert abs(config.train.steps * (step + update) - 3e11) <= (step + update) / 2
    assert update > 0.05 * step
    adamw = study.config(recipes.Job(studies.Setting("adamw", studies.ADAMW), 3e11, 0))
    assert recipes.update_flops(adamw) == 0 and adamw.train.steps > config.train.steps


def test_the_update_is_counted_as_torch_counts_it(modules, study):
    recipes, studies, _ = modules
    config = study.config(recipes.Job(studies.MODERN, 3e11, 0))
    optimizer = recipes.Optimizer(recipes.Electra(config).named_parameters(), config.optimizer)
    names = [name for name in optimizer.parameters if name not in optimizer.exp_avg_sq]
    assert len(names) > 10 and not any("token" in name for name in names)
    with FlopCounterMode(display=False) as counter:
        for stack in recipes.stacks({name: optimizer.parameters[name] for name in names}):
            orthogonalize(torch.ones(stack.num_matrices, *stack.shape))
    assert counter.get_total_flops() == recipes.update_flops(config)


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_modern_is_compared_as_it_is_shipped(modules, study, name):
    recipes, studies, _ = modules
    study.scale = studies.SCALES[name]
    compared = study.config(recipes.Job(studies.MODERN, 1e14, 0)).resolved()
    shipped = ef.Config.preset(name, "modern").replace({"train": {"steps": compared.train.steps}}).resolved()
    others = {"model.vocab_size", "train.log_every", "train.checkpoint_every", *studies.COMMON, *study.scale.keys}
    assert {*shipped.differences(compared)} <= others


@pytest.mark.parametrize("name", ["tiny", "mini"])
def test_every_setting_is_a_run_at_every_scale(modules, study, name):
    recipes, studies, _ = modules
    study.scale = studies.SCALES[name]
    for setting in (*studies.INGREDIENTS, *sum(studies.BASELINES.values(), ())):
        assert study.config(recipes.Job(setting, 1e14, 0)).train.steps > 100


def test_factors_multiply_the_rates_of_so_many_steps(modules, study):
    recipes, studies, _ = modules
    setting = replace(studies.MODERN, muon_factor=0.5, rest_factor=2.0)
    base, scaled = (study.config(recipes.Job(each, 3e12, 0)) for each in (studies.MODERN, setting))
    assert base.optimizer.muon_learning_rate == pytest.approx(0.5 / math.sqrt(base.train.steps), rel=0.01)
    assert scaled.optimizer.muon_learning_rate == base.optimizer.muon_learning_rate / 2
    assert scaled.optimizer.learning_rate == 2 * base.optimizer.learning_rate > 0


def test_settings_differ(modules):
    _, studies, _ = modules
    for trials in (*studies.BASELINES.values(), studies.INGREDIENTS):
        assert len({each.name for each in trials}) == len(trials)
        different = {repr(replace(each, name="", expected="")) for each in trials}
        assert len(different) == len(trials)


@pytest.mark.parametrize(("baseline", "factor"), [("google", 2), ("google-rotary", 1)])
def test_the_better_half_gets_twice_the_budget(modules, study, baseline, factor, monkeypatch):
    """With known results: settings whose AUC depends on their place in the list, the budget and the seed."""
    recipes, studies, report = modules
    sides = {baseline: [each.name for each in studies.BASELINES[baseline]], "modern": [studies.MODERN.name]}
    order = {name: place for names in sides.values() for place, name in enumerate(names)}
    done = []

    def run(self, job):
        done.append((job.setting.name, job.budget, job.seed, job.finetune))
        (low,) = (study.scale.budgets[side][0] for side, names in sides.items() if job.setting.name in names)
        auc = 0.5 + 0.01 * order[job.setting.name] + 0.02 * math.log2(job.budget / low) + 0.001 * job.seed
        auc += 0.05 * (job.setting.name in sides["modern"])
        judged = {"discriminator_auc": auc, "discriminator_loss": 0.4, "generator_loss": 5.0}
        found = {"seconds": 10 * job.budget / 2e9, "corrupted_by": dict.fromkeys(report.CORRUPTORS, judged)}
        found |= {"tasks": {"rte": 0.5}, "tasks_of": self.glue_hash} if job.finetune else {}
        self.found[recipes._name(self.identity(job))] = {"result": found}
        return True

    monkeypatch.setattr(recipes.Study, "_run", run)
    study.glue, study.judged_on = study.out, {}
    curves = recipes.compare(study, baseline, num_seeds=3, num_workers=1)
    for side, names in sides.items():
        low, high = study.scale.budgets[side]
        first = {name for name, budget, seed, _ in done if budget == low and seed == 0 and name in names}
        second = {name for name, budget, seed, _ in done if budget == high and seed == 0 and name in names}
        chosen = names[-1]
        assert first == set(names) and second == set(names[len(names) // 2 :])
        points = [(point.setting, point.budget) for point in curves[side]]
        assert points == [(chosen, budget) for budget in (low / 2, low, high)]
        assert [len(point.results) for point in curves[side]] == [3, 3, 3]
        assert [job[0] for job in done if job[1] == low / 2 and job[0] in names] == [chosen] * 3
        # What is chosen for each level, with every seed, and nothing else.
        tuned = [(budget, seed) for name, budget, seed, finetune in done if finetune and name in names]
        assert sorted(tuned) == [(budget, seed) for budget in (low, high) for seed in range(3)]
    assert len(set(done)) == len(done)
    text = report.write_comparison(study.out, "tiny", curves)
    path, last = study.out / f"recipes-tiny-{baseline}.json", study.scale.budgets[baseline][-1]
    assert f"{factor}.00 times" in text and path.with_suffix(".png").stat().st_size > 10_000
    assert json.loads(path.read_text())[baseline][2]["budget"] == last


def test_a_run_that_diverged_is_chance_and_stops_no_report(modules, tmp_path):
    _, _, report = modules
    judged = {"discriminator_auc": 0.7, "discriminator_loss": 0.4, "generator_loss": 5.0}
    good = {"seconds": 10.0, "corrupted_by": dict.fromkeys(report.CORRUPTORS, judged)}
    point = report.Point("one", 1e9, [good, {"failed": "the loss became nan"}])
    curves = {"google": [point], "modern": [report.Point("other", 1e9, [good])]}
    text = report.write_comparison(tmp_path, "tiny", curves)
    assert "| 0.6000 ± 0.1414 |" in text and "nan" not in text
    only = {"google": [report.Point("one", 1e9, [{"failed": "nan"}])], "modern": curves["modern"]}
    assert "diverged" in report.write_comparison(tmp_path, "tiny", only)


def test_points_without_tasks_are_not_on_the_curve_of_the_tasks(modules, tmp_path):
    _, _, report = modules
    judged = {"discriminator_auc": 0.7, "discriminator_loss": 0.4, "generator_loss": 5.0}

    def point(budget, *scores):
        results = [{"tasks": {"sst2": each, "mrpc": each + 2}} if each else {} for each in scores]
        corrupted = dict.fromkeys(report.CORRUPTORS, judged)
        return report.Point("one", budget, [{"seconds": 1.0, "corrupted_by": corrupted} | each for each in results])

    ours = [point(1e9, 0), point(2e9, 58, 60), point(4e9, 69, 0), point(8e9, 69)]
    text = report.write_comparison(tmp_path, "tiny", {"google": [point(8e9, 64)], "modern": ours})
    assert text.endswith("mean of the tasks: 2.00 times as much (65.0000)")  # half the way, in the logarithm
    assert "tasks:" not in report.write_comparison(tmp_path, "tiny", {"google": [point(8e9, 0)], "modern": ours})


def test_a_line_that_was_cut_short_is_no_result(modules, study):
    recipes, *_ = modules
    study.results.write_text('{"run": {"scale": "tiny"}, "result": {}}\n{"run": {"sca')
    assert len(recipes.Study(study.scale, study.out, study.results, math.inf, None).found) == 1
    assert study.results.read_text() == '{"run": {"scale": "tiny"}, "result": {}}\n'


@pytest.mark.parametrize(
    ("value", "cost", "bound"),
    [(0.6, 2.0, ""), (0.65, math.sqrt(8), ""), (0.55, 1.0, "at most"), (0.9, 8.0, "more than"), (0.8, 8.0, "")],
)
def test_where_a_curve_reaches_a_value(modules, value, cost, bound):
    curve = [(1.0, 0.56), (2.0, 0.6), (4.0, 0.7), (8.0, 0.8)]
    assert modules[2].crossing(curve, value) == (pytest.approx(cost), bound)


def test_a_name_that_no_setting_has_is_refused(modules, study):
    with pytest.raises(SystemExit, match="--only half the bacth: no setting has such a name"):
        modules[0].ingredients(study, ["half the bacth"], 2e9, 1, 1)


def test_a_run_is_never_done_twice(modules, study, monkeypatch):
    recipes, studies, report = modules
    corruptor = ef.Config.preset("tiny", "google").override({"train.steps": "2", "objective.name": "mlm"})
    ef.pretrain(corruptor, data=study.corpus, out=study.out / "corruptor")
    late = recipes.Study(study.scale, study.out, study.results, time.monotonic() - 1, None)
    late.corpus = study.corpus
    with pytest.raises(SystemExit, match="0 of 1 runs are finished"):
        recipes.ingredients(late, ["never the original"], 2e9, 1, 1)
    for _ in range(2):
        again = recipes.Study(study.scale, study.out, study.results, math.inf, None)
        again.corpus = study.corpus
        table = recipes.ingredients(again, ["never the original"], 2e9, 1, 1)
    assert table.splitlines()[2].startswith("| never the original | 0.")
    lines = study.results.read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["run"]["keys"]["objective.disallow_correct"] is True
    found = json.loads(lines[0])["result"]["corrupted_by"]
    assert found["network"]["corruption"] != found["unigram"]["corruption"]
    job = recipes.Job(next(each for each in studies.INGREDIENTS if each.name == "never the original"), 2e9, 0)
    assert again.result(job) is not None and again.result(replace(job, finetune=True)) is None
    # Both texts are those of the run; what was judged on another one is not found.
    assert again.judged_on == {name: each["corruption"] for name, each in found.items()}
    again.judged_on = again.judged_on | {"network": "0"}
    assert again.result(job) is None
    # A kill between the run's result and its line.
    study.results.write_text("")
    last = recipes.Study(study.scale, study.out, study.results, math.inf, None)
    last.corpus = study.corpus
    monkeypatch.setattr(subprocess, "Popen", None)
    last.run([job], 1)
    assert study.results.read_text().splitlines() == lines


def test_the_first_half_is_spent_otherwise(modules, study):
    """Also where it is interrupted before the second one."""
    recipes, studies, _ = modules
    recipe_run = importlib.import_module("recipe_run")
    corruptor = ef.Config.preset("tiny", "google").override({"train.steps": "2", "objective.name": "mlm"})
    ef.pretrain(corruptor, data=study.corpus, out=study.out / "corruptor")
    chosen = {each.name: each for each in studies.INGREDIENTS}
    job = recipes.Job(chosen["rows of a quarter at first"], 8e9, 0)
    (first, middle), (second, last) = study.parts(job)
    assert (first.data.sequence_length, first.train.batch_size) == (8, 128) and first.train.steps == last
    for config, steps in ((first, middle), (second, last - middle)):
        flops = 1024 * flops_per_token(config).total + recipes.update_flops(config)
        assert steps * flops == pytest.approx(4e9, rel=0.2)
    folder = study.out / "runs" / recipes._digest(study.identity(job))
    recipe_run._train_until(middle - 1, first, str(study.corpus), folder / "run", is_changed=False)
    assert checkpoint_folder.steps(folder / "run") == [middle - 1]
    assert study._run(job)
    (change,) = map(json.loads, (folder / "run" / "changes.jsonl").read_text().splitlines())
    assert change["step"] == middle and change["changes"]["data.sequence_length"] == [8, 32]
    assert checkpoint_folder.steps(folder / "run")[-1] == last
    assert study.result(recipes.Job(studies.MODERN, 8e9, 0)) is None


def test_scores_are_those_of_the_tasks_that_are_asked_for(modules, study):
    recipes, studies, report = modules
    corruptor = ef.Config.preset("tiny", "google").override({"train.steps": "2", "objective.name": "mlm"})
    ef.pretrain(corruptor, data=study.corpus, out=study.out / "corruptor")
    job = recipes.Job(studies.MODERN, 2e9, 0, finetune=True)
    for places in (2, 1):  # the second time with another folder, whose task has one example less
        glue = study.out / f"glue-{places}"
        (glue / "RTE").mkdir(parents=True)
        lines = ["index\tsentence1\tsentence2\tlabel", *(f"{i}\ta b\tc d\tentailment" for i in range(places))]
        for name in ("train", "dev"):
            (glue / "RTE" / f"{name}.tsv").write_text("\n".join([*lines, "9\te f\tg h\tnot_entailment"]) + "\n")
        asked = recipes.Study(study.scale, study.out, study.results, math.inf, glue)
        asked.corpus = study.corpus
        assert asked.result(job) is None
        assert asked._run(job)
        again = recipes.Study(study.scale, study.out, study.results, math.inf, glue)
        again.corpus = study.corpus
        (score,) = again.result(job)["tasks"].values()
        assert 0 <= score <= 1 and report.columns([again.result(job)])[4] == f"{score:.4f}"
    assert len(study.results.read_text().splitlines()) == 2


def test_rotary_positions_in_the_published_encoder_are_relative(modules, monkeypatch):
    for name in ("BertLayer", "Encoder", "Embeddings"):
        monkeypatch.setattr(model, name, getattr(model, name))
    config = ef.Config.preset("tiny", "google").override({"model.vocab_size": "64", "model.dropout": "0"})
    ids, types, mask = torch.arange(5, 21), torch.zeros(16, dtype=torch.int64), AttentionMask.padded(1, 16, None, 0)
    positions = torch.arange(16)

    def states(network, at, queries=None):
        with torch.no_grad():
            embedded = network.embeddings(ids, at, types, torch.float32, Dropout(0.0, None, 0))
            return network.discriminator(embedded, at, mask, Dropout(0.0, None, 0), queries)

    def distance(network, at):
        return (states(network, positions) - states(network, at)).abs().max().item()

    learned = model.Electra(config).eval()
    importlib.import_module("recipe_patches").apply(["rotary-positions"], config)
    rotary = model.Electra(config).eval()
    with torch.no_grad():
        for network in (learned, rotary):
            for layer in network.discriminator.layers:
                layer.qkv.weight.mul_(20)  # so that attention is not uniform
    assert distance(rotary, positions + 7) < 1e-4 and distance(learned, positions + 7) > 1e-2
    assert distance(rotary, positions.flip(0)) > 1e-2
    # As fine-tuning reads it: some hidden states alone.
    some = torch.tensor([3, 11])
    queries = Queries(some, torch.ones(2, 16, dtype=torch.bool))
    torch.testing.assert_close(states(rotary, positions, queries), states(rotary, positions)[some])
