"""Masked-language-model accuracy as in Appendix G of the paper, compared with its formula in plain Python."""

import json
import math

import pytest
import torch
from test_corruptor import MLM, save_run
from test_electra import LOCAL
from variants import VARIANTS

import electra_fast as ef
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.distributed.world import World
from electra_fast.training import evaluate as evaluation
from electra_fast.training.evaluate import SEED, evaluate
from electra_fast.training.mlm_accuracy import Example, log_odds, mlm_accuracy, predict


def texts(corpus, length, count):
    """Yields the ids of segments with one masked token, without padding, its position, and the original token."""
    options = {"masking": "tokens", "mask_prob": 1e-6, "packing": "best-fit", "epochs": 1}
    loader = BatchLoader(ef.Corpus(corpus).holdout, sequence_length=length, batch_size=1, seed=SEED, **options)
    for _, batch in zip(range(count), map(to_torch, loader), strict=False):
        assert batch["masked_weights"].tolist() == [[1.0]] and (batch["input_ids"] == 4).sum() == 1
        column = int(batch["masked_positions"])
        segments = batch["segment_ids"][0].tolist()
        inside = [i for i, segment in enumerate(segments) if segment == segments[column]]
        yield batch["input_ids"][0, inside].tolist(), inside.index(column), int(batch["masked_ids"])


def by_the_paper(model, ids, position, num_candidates, sign=1, p_mask=None):
    """Returns candidates and prediction, with the formula of Appendix G for each candidate."""
    p_mask = p_mask or model.config.data.mask_prob
    a = (1 - p_mask) / p_mask
    logits = model.generator_logits(torch.tensor([ids]))[0, position].double()
    p_G = (logits / model.config.objective.temperature).softmax(-1).tolist()
    candidates = sorted(range(len(p_G)), key=lambda x: -p_G[x])[:num_candidates]
    scores = []
    for x in candidates:
        text = [*ids[:position], x, *ids[position + 1 :]]
        z = sign * model.discriminator_logits(torch.tensor([text]))[0, position].item()
        D = 1 - 1 / (1 + math.exp(-z))  # our logit is positive for "replaced"
        scores.append(D * p_G[x] / (a * (1 - D) + p_G[x]))
    return candidates, candidates[max(range(len(scores)), key=scores.__getitem__)]


@pytest.fixture(scope="module")
def models(tmp_path_factory, validation_corpus, whole_run):
    """Untrained models of both architectures whose logits differ from 0, and a briefly trained model."""
    folder = tmp_path_factory.mktemp("untrained")
    changes = {"data.sequence_length": "32", "data.mask_prob": "0.9"}
    google = ef.load(save_run(folder / "google", validation_corpus, **changes)).model
    changes |= {"objective.temperature": "4"}
    modern = ef.load(save_run(folder / "modern", validation_corpus, "modern", **changes, **LOCAL)).model
    with torch.no_grad():  # a confident generator, so that the weight of its probabilities in the formula matters
        google.generator_head.norm.weight.mul_(6)
    return {"google": google, "modern": modern, "trained": ef.load(whole_run).model}


@pytest.mark.parametrize(
    ("name", "num_candidates", "count"), [("google", 5, 40), ("modern", 5, 12), ("trained", 100, 6)]
)
@torch.no_grad()
def test_prediction_follows_appendix_g(name, num_candidates, count, models, validation_corpus):
    model = models[name]
    corpus = ef.Corpus(validation_corpus).holdout
    right = []
    recalled = []
    first = []
    wrong_sign = []
    wrong_prob = []
    for ids, position, target in texts(validation_corpus, 32, count):
        candidates, prediction = by_the_paper(model, ids, position, num_candidates)
        example = Example(torch.tensor(ids, dtype=torch.int32), torch.zeros(len(ids)).int(), position, target)
        assert predict(model, example, num_candidates) == (candidates, prediction)
        right.append(prediction == target)
        recalled.append(target in candidates)
        first.append(candidates[0] == target)
        if num_candidates == 5:
            wrong_sign.append(by_the_paper(model, ids, position, 5, sign=-1)[1] != prediction)
            wrong_prob.append(by_the_paper(model, ids, position, 5, p_mask=0.15)[1] != prediction)
    report = mlm_accuracy(
        model, corpus, sequence_length=32, seed=SEED, num_examples=count, num_candidates=num_candidates
    )
    rates = [sum(outcomes) / count for outcomes in (right, recalled, first)]
    assert [report[name] for name in MLM] == pytest.approx(rates) and report["mlm_examples"] == count
    assert 0 < rates[1] < 1 or name != "trained"
    assert any(wrong_sign) or num_candidates == 100
    assert any(wrong_prob) == (name == "google")


def test_no_accuracy_with_disallow_correct(validation_corpus, tmp_path):
    model = ef.load(save_run(tmp_path, validation_corpus, **{"objective.disallow_correct": "true"})).model
    corpus = ef.Corpus(validation_corpus).holdout
    report = mlm_accuracy(model, corpus, sequence_length=32, seed=SEED, num_examples=3)
    assert report == dict.fromkeys(MLM) | {"mlm_examples": 0}


def test_discriminator_decides_between_likely_candidates():
    """A candidate that looks replaced loses, even if the generator prefers it. Confident scores do not tie."""
    p = torch.tensor([0.6, 0.4], dtype=torch.float64)
    z = torch.tensor([3.0, -3.0], dtype=torch.float64)
    scores = log_odds(p.log(), z, 0.15).sigmoid()
    D = (-z).sigmoid()
    a = 0.85 / 0.15
    assert torch.allclose(scores, D * p / (a * (1 - D) + p)) and scores[1] > scores[0]
    sure = log_odds(p.log(), torch.tensor([-60.0, -61.0], dtype=torch.float64), 0.15)
    assert sure[1] > sure[0] and sure.sigmoid()[1] == sure.sigmoid()[0] == 1


def test_generator_alone_predicts_most_likely_token(validation_corpus, tmp_path):
    run = save_run(tmp_path / "run", validation_corpus, **VARIANTS["mlm"] | {"data.sequence_length": "32"})
    model = ef.load(run).model
    first = []
    recalled = []
    for ids, position, target in texts(validation_corpus, 32, 100):
        order = model.generator_logits(torch.tensor([ids]))[0, position].argsort(descending=True).tolist()
        first.append(order[0] == target)
        recalled.append(target in order[:100])
    report = evaluate(run, validation_corpus, mlm_examples=100)
    assert report["mlm_generator_accuracy"] is None and report["mlm_examples"] == 100
    assert report["discriminator_auc"] is None and report["generator_loss"] > 0
    assert (report["mlm_accuracy"], report["mlm_recall_at_100"]) == (sum(first) / 100, sum(recalled) / 100)
    assert 0 < report["mlm_recall_at_100"] < 1


def test_examples_independent_of_model(whole_run, validation_corpus):
    """Examples depend on the sequence length, not on the corruptor, the batch size or `max_batches`."""
    names = [*MLM, "mlm_examples"]
    few = {"mlm_examples": 20, "max_batches": 2}
    report_of_run = evaluate(whole_run, validation_corpus, **few)
    other = evaluate(whole_run, validation_corpus, batch_size=3, corrupted_by="unigram", sequence_length=16, **few)
    longer = evaluate(whole_run, validation_corpus, sequence_length=128, **few)
    ours, theirs, others = ([report[name] for name in names] for report in (report_of_run, other, longer))
    assert ours == theirs != others and ours[-1] == others[-1] == 20
    without = evaluate(whole_run, validation_corpus, max_batches=2)
    assert without == {name: value for name, value in report_of_run.items() if name not in names}


def test_matmul_library_changes_only_rounding(whole_run, validation_corpus, monkeypatch, products_by):
    settings = {"max_batches": 2, "mlm_examples": 5}
    expected = evaluate(whole_run, validation_corpus, **settings)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True})
    monkeypatch.setattr("electra_fast.training.evaluate.fastest_matmul", lambda *_: "onednn")
    used = products_by(ef.Electra, "hidden")
    actual = evaluate(whole_run, validation_corpus, **settings)
    assert used == {"onednn"}
    numbers = {name: value for name, value in expected.items() if isinstance(value, float)}
    assert {name: actual[name] for name in numbers} == pytest.approx(numbers, rel=1e-2)


def test_at_most_one_example_per_row(models, validation_corpus):
    corpus = ef.Corpus(validation_corpus).holdout
    report = mlm_accuracy(
        models["trained"], corpus, sequence_length=128, seed=SEED, num_examples=1000, num_candidates=1
    )
    assert report["mlm_examples"] == len(list(texts(validation_corpus, 128, 1000))) < 200
    assert report["mlm_accuracy"] == report["mlm_generator_accuracy"] == report["mlm_recall_at_100"]


@pytest.mark.parametrize(("name", "is_corrupted"), [("electra", False), ("contrastive", False), ("electra", True)])
def test_micro_batches_change_only_rounding(validation_corpus, tmp_path, monkeypatch, name, is_corrupted):
    run = save_run(tmp_path / "run", validation_corpus, **VARIANTS[name])
    settings = {"max_batches": 2, "sequence_length": 16, "corrupted_by": run if is_corrupted else None}
    expected = dict(evaluate(run, validation_corpus, **settings))
    config = ef.load(run).model.config.override({"train.accumulate": "4"})
    assert evaluation._max_rows(config, torch.device("cuda"), World()) == config.train.batch_size // 4
    monkeypatch.setattr(evaluation, "_max_rows", lambda *_: 3)
    actual = dict(evaluate(run, validation_corpus, **settings))
    floats = [name for name, value in expected.items() if isinstance(value, float)]
    assert [actual.pop(name) for name in floats] == pytest.approx([expected.pop(name) for name in floats], rel=1e-6)
    assert actual == expected and actual["rows"] == 16


def test_fp32_unless_precision_requested(whole_run, validation_corpus, tmp_path):
    few = {"max_batches": 1, "sequence_length": 16}
    exact, rounded = (
        ef.evaluate(whole_run, validation_corpus, precision=precision, out=tmp_path / "out", **few)
        for precision in (None, "bf16")
    )
    assert exact == evaluate(whole_run, validation_corpus, precision="fp32", **few)
    assert rounded != exact and rounded.loss == pytest.approx(exact.loss, rel=1e-2)
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text()) == rounded
    assert str(rounded).startswith("Comparable between models")
