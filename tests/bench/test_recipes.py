"""`bench/recipes.py`: budgets, tuning by halving, what is read off the curves, and real runs, one interrupted."""

import importlib
import json
import math
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_bench import BENCH
from torch.utils.flop_counter import FlopCounterMode

import electra_fast as ef
from electra_fast.files import checkpoint_folder
from electra_fast.model import model
from electra_fast.model.attention import AttentionMask, Queries
from electra_fast.ops.operations import Dropout
from electra_fast.optimizers.muon import orthogonalize
from electra_fast.training.flops import flops_per_token


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
    tiny = studies.SCALES["tiny"]
    budgets = {"google": (4e10, 8e10), "google-rotary": (2e10, 4e10), "mlm": (2e10, 4e10)}
    scale = replace(tiny, trial_budgets=budgets, ingredient_budget=2e9, finetuned_from=2e10, eval_batches=1)
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
    for setting in sum((*studies.STUDIES.values(), *studies.BASELINES.values()), ()):
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
    for trials in (*studies.BASELINES.values(), *studies.STUDIES.values(), *studies.HOUR):
        assert len({each.name for each in trials}) == len(trials)
        different = {repr(replace(each, name="", expected="")) for each in trials}
        assert len(different) == len(trials)


def known_runs(recipes, monkeypatch, result):
    """Lets runs have known results; returns what is asked for, in order."""
    done = []

    def run(self, job, _):
        done.append(job)
        tasks = {"tasks": {"rte": 0.5}, "tasks_of": self.tasks_of(job)} if job.finetune else {}
        found = {"seconds": 10.0, "tokens": 100, **tasks, "corrupted_by": result(job)}
        self.found[recipes._name(self.identity(job))] = {"run": self.identity(job), "name": job.setting.name}
        self.found[recipes._name(self.identity(job))]["result"] = found
        return True

    monkeypatch.setattr(recipes.Study, "_run", run)
    monkeypatch.setattr(recipes.Study, "judged_on", {})
    return done


def judged(auc):
    found = {"discriminator_auc": auc, "discriminator_loss": None if auc is None else 0.4, "generator_loss": 5.0}
    return {"network": found, "unigram": found}


@pytest.mark.parametrize("baseline", ["google", "google-rotary", "mlm"])
def test_the_better_half_gets_twice_the_budget(modules, study, baseline, monkeypatch):
    """With known results: the later in the list, the better, by the AUC or else by the masked tokens' loss."""
    recipes, studies, _ = modules
    names = [each.name for each in studies.BASELINES[baseline]]

    def result(job):
        found = judged(None if baseline == "mlm" else 0.5 + 0.01 * names.index(job.setting.name))
        found["network"]["generator_loss"] -= 0.01 * names.index(job.setting.name)
        return found

    done = known_runs(recipes, monkeypatch, result)
    table = recipes.tune(study, baseline, 1).splitlines()
    low, high = study.scale.trial_budgets[baseline]
    assert [job.setting.name for job in done if job.budget == low] == names
    assert [job.setting.name for job in done if job.budget == high] == names[len(names) // 2 :]
    assert table[2].startswith(f"| {names[-1]} | {high:.3g} |") and len(table) == 2 + len(done)


def test_all_seeds_of_a_budget_come_before_the_next(modules, study, monkeypatch):
    recipes, studies, _ = modules
    order = ("google-rotary", "mlm", "modern")  # by what is known of them

    def result(job):
        value = 0.5 + 0.01 * order.index(job.setting.name) + 0.02 * math.log2(job.budget / 1e10) + 1e-4 * job.seed
        return judged(None if job.setting.name == "mlm" else value)

    done = known_runs(recipes, monkeypatch, result)
    study.glue, study.__dict__["glue_hash"] = study.out, "0"
    text = recipes.compare(study, "curves", [], [1e10, 2e10, 4e10], 3, 1)
    expected = [
        (budget, seed, name, budget >= 2e10)
        for budget in (1e10, 2e10, 4e10)
        for seed in range(3)
        for name in ("modern", "google-rotary", "mlm")
    ]
    assert [(job.budget, job.seed, job.setting.name, bool(job.finetune)) for job in done] == expected
    # Two hundredths are a factor of two; a masked language model has no AUC.
    assert "| AUC, network | google-rotary | 0.01 | at least 1.00 (1.00 to 1.00) |" in text
    assert "| AUC, network | google-rotary | 0.04 | 2.00 (" in text and "| AUC, network | mlm" not in text
    assert "| mean of the tasks | mlm | 0.04 | 2.00 (" in text
    assert (study.out / "curves-tiny.png").stat().st_size > 10_000
    # What is known by now, without another run.
    assert recipes.compare(study, "curves", ["modern"], [1e10], 3, 1).count("| modern |") == 1
    assert len(done) == len(expected)


def test_an_interval_is_of_the_seeds(modules):
    _, _, report = modules

    def point(budget, *values):
        return report.Point("", budget, [{"corrupted_by": judged(value)} for value in values])

    ours = [point(1e9, 0.6), point(2e9, 0.7), point(4e9, 0.8)]
    expected = {
        (0.7,): "4.00 (4.00 to 4.00)",
        (0.6, 0.8): "4.00 (2.00 to 8.00)",
        (0.5,): "at least 8.00 (8.00 to 8.00)",
        (0.9,): "less than 2.00 (2.00 to 2.00)",
    }
    for values, text in expected.items():
        assert str(report.factor(ours, point(8e9, *values), report.auc)) == text


def test_a_run_that_diverged_is_chance_and_stops_no_report(modules, tmp_path):
    _, _, report = modules
    good = {"seconds": 10.0, "corrupted_by": judged(0.7)}
    point = report.Point("one", 1e9, [good, {"failed": "the loss became nan"}])
    curves = {"modern": [report.Point("other", 1e9, [good])], "google": [point]}
    text = report.report(tmp_path / "none.png", "", curves)
    assert "| 0.6000 ± 0.1414 |" in text and "nan" not in text and not (tmp_path / "none.png").exists()
    only = {"modern": curves["modern"], "google": [report.Point("one", 1e9, [{"failed": "nan"}])]}
    assert "diverged" in report.report(tmp_path / "none.png", "", only)


def test_an_hour_is_a_number_of_steps(modules, study, monkeypatch):
    recipes, studies, report = modules
    study.scale = replace(studies.SCALES["mini"], eval_batches=1)
    names = {each.trainer: [] for settings in studies.HOUR for each in settings}

    def result(job):
        found = judged(None if job.setting.trainer else 0.7)
        found["network"]["generator_loss"] -= float(job.setting.keys["optimizer.learning_rate"])
        return found

    done = known_runs(recipes, monkeypatch, result)
    monkeypatch.setattr(report, "TASKS", {"rte": "RTE"})
    study.glue, study.__dict__["glue_hash"] = study.out, "0"
    table = recipes.hour(study, 2).splitlines()
    trials = [job for job in done if job.hours == studies.TRIAL_HOURS]
    assert len(trials) == 8 and all(job.setting.trainer and not job.finetune for job in trials)
    for job in (each for each in done if each not in trials):
        config, last_step = study.parts(job)[-1]
        tokens = last_step * config.train.batch_size * config.data.sequence_length
        assert tokens == pytest.approx(3600 * job.hours * job.setting.tokens_per_second, rel=1e-3)
        assert config.train.batch_size == 32 and job.finetune == 3
        names[job.setting.trainer].append((job.setting.name, job.hours, job.seed))
    for trainer, runs in names.items():
        best = f"{trainer}, 2e-3" if trainer else "electra-fast"
        assert runs == [(best, 1, 0), (best, 1, 1), (best, 0, 0)]
    assert len(table) == 2 + 6 and table[2].startswith("| BertForMaskedLM, 2e-3 | 0.0 M | 50.0 | 50.0 (50.0 to 50.0) |")
    assert table[-1].startswith("| electra-fast | untrained | 50.0 | 50.0 |")


@pytest.mark.parametrize("name", ["BertForMaskedLM", "ModernBertForMaskedLM"])
def test_their_models_are_trained_by_their_trainer_and_read_by_us(modules, study, validation_corpus, name):
    """Two steps, untrained and resumed: `finetune` reads the folder, whose logits are those of `transformers`."""
    recipes, studies, _ = modules
    import transformers

    trainer = importlib.import_module("recipe_trainer")
    (setting, *_), *_ = (
        [s for s in trials if s.trainer == name] for trials in studies.HOUR[1:] if trials[0].trainer == name
    )
    setting = replace(setting, keys={**setting.keys, "model.embedding_size": "64", "train.checkpoint_every": "1"})
    config, _ = study._sized(setting, 0)
    config = config.replace({"train": {"steps": 2, "precision": "fp32"}})
    saved = []
    with pytest.MonkeyPatch.context() as patch:
        save = trainer.save
        patch.setattr(trainer, "save", lambda model, *rest: (saved.append(model), save(model, *rest)))
        for steps in (0, 2, 2):
            trainer.train(name, config, steps, validation_corpus, study.out / f"{steps}")
    ids = torch.arange(5, 37).view(2, 16)
    for folder, theirs in zip(("0", "2"), saved, strict=False):
        ours = ef.load(study.out / folder / "model")
        assert type(theirs) is getattr(transformers, name)
        torch.testing.assert_close(
            ours.generator_logits(ids), theirs.eval()(input_ids=ids).logits, atol=1e-5, rtol=1e-5
        )
    assert not torch.equal(*(each.get_input_embeddings().weight for each in saved[:2]))
    assert torch.equal(*(each.get_input_embeddings().weight for each in saved[1:]))


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
        modules[0].compare(study, "ingredients", ["half the bacth"], [2e9], 1, 1)


def test_the_committed_ruler_gives_the_same_text_without_a_corruptor(modules, study, monkeypatch):
    recipes, *_ = modules
    texts = [str(study.out / "text.txt")]
    words = [f"{first}{second}" for first in ("ab", "cd", "ef", "gh") for second in ("i", "k", "mn", "op")]
    lines = (" ".join(words[(3 * i * i + j) % 16] for j in range(40)) for i in range(2_000))
    (study.out / "text.txt").write_text("\n\n".join(lines))
    monkeypatch.setattr(recipes, "HERE", study.out / "bench")
    monkeypatch.setattr(recipes, "CORRUPTOR_THREADS", torch.get_num_threads())  # other tests count on their number
    scale = replace(study.scale, vocab_size=64, corruptor_budget=1e9)
    made, used, changed = (study.out / name for name in ("made", "used", "changed"))
    for folder in (made, used, changed, study.out / "bench"):
        folder.mkdir()
    first = recipes.Study(scale, made, study.results, math.inf, None)
    first.prepare(texts)
    judged_on = first.judged_on
    (made / "ruler.npz").rename(study.out / "bench" / "ruler-tiny.npz")
    second = recipes.Study(scale, used, study.results, math.inf, None)
    monkeypatch.setattr(ef, "train_vocab", None)
    second.prepare(texts)
    assert second.judged_on == judged_on and not (used / "corruptor").exists()
    (study.out / "text.txt").write_text("another text\n\n" * 2_000)
    other = recipes.Study(scale, changed, study.results, math.inf, None)
    other.prepare(texts)
    assert (changed / "corruptor").exists() and other.corruptors["network"] == str(changed / "ruler.npz")


def test_a_run_is_never_done_twice(modules, study, monkeypatch):
    recipes, studies, report = modules
    corruptor = ef.Config.preset("tiny", "google").override({"train.steps": "2", "objective.name": "mlm"})
    ef.pretrain(corruptor, data=study.corpus, out=study.out / "corruptor")
    late = recipes.Study(study.scale, study.out, study.results, time.monotonic() - 1, None)
    late.corpus = study.corpus
    with pytest.raises(SystemExit, match="0 of 1 runs are finished"):
        recipes.compare(late, "ingredients", ["never the original"], [2e9], 1, 1)
    for _ in range(2):
        again = recipes.Study(study.scale, study.out, study.results, math.inf, None)
        again.corpus = study.corpus
        table = recipes.compare(again, "ingredients", ["never the original"], [2e9], 1, 1)
    assert table.splitlines()[2].startswith("| never the original | 0.002 | 0.")
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
    monkeypatch.setattr(recipes, "subprocess", None)  # no process is started
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
    assert study._run(job, 1)
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
        assert asked._run(job, 1)
        again = recipes.Study(study.scale, study.out, study.results, math.inf, glue)
        again.corpus = study.corpus
        (score,) = again.result(job)["tasks"].values()
        assert 0 <= score <= 1 and report.columns([again.result(job)])[4] == f"{100 * score:.4f}"
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


def test_the_documents_claim_what_the_committed_runs_say(modules, tmp_path):
    recipes, studies, report = modules
    study = recipes.Study(studies.SCALES["mini"], tmp_path, BENCH / "recipes.jsonl", math.inf, None)
    ruler = np.load(BENCH / "ruler-mini.npz")
    num_entries = len(ruler["vocab"].tobytes().split())
    study.opened = SimpleNamespace(vocab_size=num_entries, content_hash=str(ruler["corpus"]))
    study.judged_on = next(line["run"]["judged_on"] for line in study.found.values() if line["name"] == "mlm")
    page = (BENCH.parent / "docs/measurements.md").read_text()
    assert report.hour_table(study.found.values()) in page

    points = [study.point(each, 90e12, 3) for each in studies.CURVES]
    assert [len(point.results) for point in points] == [3, 3, 3]
    scores = [[report.score(each) for each in point.results] for point in points]
    ours, published, mlm = (f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in scores)
    claim = (
        f"the default recipe has a mean of {ours} on these tasks, the published one, given rotary positions and tuned, "
        f"{published}, and a masked language model with the encoder and optimizer of the default {mlm}"
    )
    assert claim in " ".join(page.split())
