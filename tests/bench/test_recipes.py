"""`bench/recipes.py`: budgets, the curves' factors, and real runs."""

import json
import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import recipes
import torch
from lib import recipe_report as report
from lib import recipe_studies as studies
from lib.groups import BENCH
from lib.rotary_bert import use_rotary_positions
from torch.utils.flop_counter import FlopCounterMode

import electra_fast as ef
from electra_fast.hardware.flops import flops_per_token
from electra_fast.model import model
from electra_fast.model.attention import AttentionMask, Queries
from electra_fast.ops.operations import Dropout
from electra_fast.optimizers.rules import orthogonalize

TINY = replace(
    studies.SCALES["mini"],
    name="tiny",
    preset="tiny",
    keys={"train.batch_size": "8"},
    modern_keys={"model.intermediate_size": "176"},
    vocab_size=2048,
    finetuned_from=2e10,
    corruptor=studies.SCALES["mini"].corruptor | {"model.hidden_size": "64", "model.intermediate_size": "176"},
    eval_batches=1,
)


@pytest.fixture
def study(validation_corpus, tmp_path):
    """A study of tiny budgets, on a corpus that is there."""
    study = recipes.Study(TINY, tmp_path, tmp_path / "results.jsonl", None)
    study.corpus = validation_corpus
    return study


@pytest.mark.slow
def test_update_flops_equal_torch(study):
    config, steps = study.config(recipes.Job(studies.MODERN, 3e11, 0))
    optimizer = recipes.Optimizer(recipes.Electra(config).named_parameters(), config.optimizer)
    names = [name for name in optimizer.parameters if name not in optimizer.exp_avg_sq]
    assert len(names) > 10 and not any("token" in name for name in names)
    with FlopCounterMode(display=False) as counter:
        for stack in recipes.stacks({name: optimizer.parameters[name] for name in names}):
            orthogonalize(torch.ones(stack.num_matrices, *stack.shape))
    update = counter.get_total_flops()
    step = config.train.batch_size * config.data.sequence_length * flops_per_token(config, of_all_tokens=True).total
    assert recipes.update_flops(config) == update > 0.05 * step
    assert steps == config.train.steps and abs(steps * (step + update) - 3e11) <= (step + update) / 2
    adamw, _ = study.config(recipes.Job(studies.GOOGLE_ROTARY, 3e11, 0))
    assert recipes.update_flops(adamw) == 0


def test_modern_uses_default_configuration(study):
    study.scale = studies.SCALES["mini"]
    compared = study.config(recipes.Job(studies.MODERN, 1e14, 0))[0].resolved()
    shipped = ef.Config.preset("mini", "modern").override({"train.steps": compared.train.steps}).resolved()
    others = {"model.vocab_size", "train.log_every", "train.checkpoint_every", *studies.COMMON, *study.scale.keys}
    assert {*shipped.differences(compared)} <= others


def test_settings_are_distinct(study):
    study.scale = studies.SCALES["mini"]
    for settings in (*studies.STUDIES.values(), *studies.HOUR):
        assert len({item.name for item in settings}) == len(settings)
        assert len({repr(replace(item, name="")) for item in settings}) == len(settings)
    for setting in sum(studies.STUDIES.values(), ()):
        assert study.config(recipes.Job(setting, 1e14, 0))[1] > 100


def judged(auc):
    metrics = {"discriminator_auc": auc, "discriminator_loss": None if auc is None else 0.4, "generator_loss": 5.0}
    return {"network": metrics, "unigram": metrics}


def test_interval_over_seeds():
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


def test_diverged_run_counts_as_chance():
    good = {"seconds": 10.0, "corrupted_by": judged(0.7)}
    point = report.Point("one", 1e9, [good, {"failed": "the loss became nan"}])
    curves = {"modern": [report.Point("other", 1e9, [good])], "google": [point]}
    text = report.report(curves)
    assert "| 0.6000 ± 0.1414 |" in text and "nan" not in text
    only = {"modern": curves["modern"], "google": [report.Point("one", 1e9, [{"failed": "nan"}])]}
    assert "diverged" in report.report(only)


@pytest.mark.parametrize(
    ("value", "cost", "bound"),
    [(0.6, 2.0, ""), (0.65, math.sqrt(8), ""), (0.55, 1.0, "at most"), (0.9, 8.0, "more than"), (0.8, 8.0, "")],
)
def test_crossing_of_a_curve(value, cost, bound):
    curve = [(1.0, 0.56), (2.0, 0.6), (4.0, 0.7), (8.0, 0.8)]
    assert report.crossing(curve, value) == (pytest.approx(cost), bound)


@pytest.mark.slow
def test_fixed_evaluation_set_needs_no_generator(study, monkeypatch):
    texts = [str(study.out / "text.txt")]
    words = [f"{first}{second}" for first in ("ab", "cd", "ef", "gh") for second in ("i", "k", "mn", "op")]
    lines = (" ".join(words[(3 * i * i + j) % 16] for j in range(40)) for i in range(2_000))
    (study.out / "text.txt").write_text("\n\n".join(lines))
    monkeypatch.setattr(recipes, "BENCH", study.out / "bench")
    monkeypatch.setattr(recipes, "CORRUPTOR_THREADS", torch.get_num_threads())  # other tests count on their number
    scale = replace(study.scale, vocab_size=64, corruptor_budget=1e9)
    made, used, changed = (study.out / name for name in ("made", "used", "changed"))
    for folder in (made, used, changed, study.out / "bench/data"):
        folder.mkdir(parents=True)
    first = recipes.Study(scale, made, study.results, None)
    first.prepare(texts)
    judged_on = first.judged_on
    (made / "ruler.npz").rename(study.out / "bench/data/ruler-tiny.npz")
    second = recipes.Study(scale, used, study.results, None)
    monkeypatch.setattr(ef, "vocab", None)
    second.prepare(texts)
    assert second.judged_on == judged_on and not (used / "corruptor").exists()
    (study.out / "text.txt").write_text("another text\n\n" * 2_000)
    other = recipes.Study(scale, changed, study.results, None)
    other.prepare(texts)
    assert (changed / "corruptor").exists() and other.corruptors["network"] == str(changed / "ruler.npz")


@pytest.mark.slow
def test_finished_run_is_not_repeated(study, monkeypatch):
    corruptor = ef.Config.preset("tiny", "google").override({"train.steps": "2", "objective.name": "mlm"})
    ef.pretrain(study.corpus, config=corruptor, out=study.out / "corruptor")
    glue = study.out / "glue"
    (glue / "RTE").mkdir(parents=True)
    lines = ["index\tsentence1\tsentence2\tlabel", "0\ta b\tc d\tentailment", "1\te f\tg h\tnot_entailment"]
    for name in ("train", "dev"):
        (glue / "RTE" / f"{name}.tsv").write_text("\n".join(lines) + "\n")

    def opened():
        scale = replace(study.scale, finetuned_from=2e9)
        copy = recipes.Study(scale, study.out, study.results, glue)
        copy.corpus = study.corpus
        return copy

    arguments = ("sizes", ["2 layers of 64"], [2e9], 1, 1)
    for _ in range(2):
        again = opened()
        table = recipes.compare(again, *arguments)
    assert table.splitlines()[2].startswith("| 2 layers of 64 | 0.002 | 0.")
    lines = study.results.read_text().splitlines()
    assert len(lines) == 1 and json.loads(lines[0])["run"]["keys"]["data.mask_prob"] == 0.25
    corrupted = json.loads(lines[0])["result"]["corrupted_by"]
    assert corrupted["network"]["corruption"] != corrupted["unigram"]["corruption"]
    job = recipes.Job(studies.STUDIES["sizes"][0], 2e9, 0, finetune=1)
    (score,) = again.result(job)["tasks"].values()
    assert 0 <= score <= 1 and report.columns([again.result(job)])[4] == f"{100 * score:.4f}"
    # Both texts are the run's. A result on another text, or on other tasks, does not count.
    assert again.judged_on == {name: entry["corruption"] for name, entry in corrupted.items()}
    again.judged_on = again.judged_on | {"network": "0"}
    assert again.result(job) is None
    (glue / "RTE" / "train.tsv").write_text("\n".join(lines[:1]))
    assert opened().result(job) is None and opened().result(replace(job, finetune=0)) is not None
    (glue / "RTE" / "train.tsv").write_text((glue / "RTE" / "dev.tsv").read_text())
    # A kill between the run's result and its line.
    study.results.write_text("")
    last = opened()
    monkeypatch.setattr(recipes, "subprocess", None)  # no process is started
    last.run([job], 1)
    assert study.results.read_text().splitlines() == lines


def test_rotary_positions_are_relative(monkeypatch):
    for name in ("BertLayer", "Encoder", "Embeddings"):
        monkeypatch.setattr(model, name, getattr(model, name))
    config = ef.Config.preset("tiny", "google").override({"model.vocab_size": "64", "model.dropout": "0"})
    ids = torch.arange(5, 21)
    positions = torch.arange(16)
    mask = AttentionMask.padded(1, 16, None, 0)
    learned = model.Electra(config).eval()
    use_rotary_positions()
    rotary = model.Electra(config).eval()
    none = Dropout(0.0, None, 0)

    @torch.no_grad()
    def states(network, at, queries=None):
        embedded = network.embeddings(ids, at, ids * 0, torch.float32, none)
        return network.discriminator(embedded, at, mask, none, queries)

    with torch.no_grad():
        for layer in (*learned.discriminator.layers, *rotary.discriminator.layers):
            layer.qkv.weight.mul_(20)  # so that attention is not uniform
    for network, at, is_near in (
        (rotary, positions + 7, True),
        (learned, positions + 7, False),
        (rotary, positions.flip(0), False),
    ):
        distance = (states(network, positions) - states(network, at)).abs().max()
        assert distance < 1e-4 if is_near else distance > 1e-2
    # As fine-tuning reads it: some hidden states alone.
    some = torch.tensor([3, 11])
    queries = Queries(some, torch.ones(2, 16, dtype=torch.bool))
    torch.testing.assert_close(states(rotary, positions, queries), states(rotary, positions)[some])


def test_documents_match_committed_runs(tmp_path):
    study = recipes.Study(studies.SCALES["mini"], tmp_path, BENCH / "data/recipes.jsonl", None)
    ruler = np.load(BENCH / "data/ruler-mini.npz")
    num_entries = len(ruler["vocab"].tobytes().split())
    study.opened = SimpleNamespace(vocab_size=num_entries, content_hash=str(ruler["corpus"]))
    study.judged_on = next(line["run"]["judged_on"] for line in study.lines.values() if line["name"] == "mlm")
    page = (BENCH.parent / "docs/background/measurements.md").read_text()
    assert report.hour_table(study.lines.values()) in page

    points = [study.point(item, 90e12, 3) for item in studies.STUDIES["curves"]]
    assert [len(point.results) for point in points] == [3, 3, 3]
    scores = [[report.score(item) for item in point.results] for point in points]
    ours, published, mlm = (f"{statistics.mean(item):.1f} ± {statistics.stdev(item):.1f}" for item in scores)
    claim = (
        f"the default recipe averages {ours} on these tasks. The published recipe, tuned and with rotary positions, "
        f"averages {published}, and a masked language model with the encoder and optimizer of the default recipe {mlm}"
    )
    assert claim in " ".join(page.split())
