"""Cross-validation on a user's data, and untrained baselines."""

import json
import shutil
import statistics
from collections import Counter

import in_process
import numpy as np
import pytest
import torch
from killed_call import killed_at_call
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from tiny_reading import articles, flags, write_conll
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.model.layers import Embeddings
from electra_fast.model.model import Encoder, initialize


@pytest.fixture
def files(write_rows, tmp_path):
    """A function that writes the training file of a kind of task."""

    def files(kind):
        if kind == "tagging":
            return write_conll(tmp_path, train=40) / "train.conll"
        if kind == "question-answering":
            path = tmp_path / "train.json"
            path.write_text(json.dumps({"data": [*articles(11)]}))
            return path
        rows = [{"text": text, "number": number} for number, (text, _) in enumerate(sentences(57))]
        labels = {
            "classification": lambda number: "abc"[min(2, number % 10 // 4)] if number % 11 else "rare",
            "multi-label": lambda number: (
                [name for name in "ab" if number % (3 if name == "a" else 4)] + ["c"] * (number % 9 == 0)
            ),
            "regression": float,
        }[kind]
        return write_rows([{"text": row["text"], "label": labels(row["number"])} for row in rows])

    return files


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression", "tagging", "question-answering"])
def test_examples_are_in_exactly_one_fold(files, kind):
    path = files(kind)
    task = "classification" if kind == "multi-label" else kind
    whole = read_tasks(task, files={"train": path})[0].train
    dev = Counter()
    everything = {*read_tasks(task, files={"train": path})[0].dev[0].ids, *whole.ids}
    folds = [read_tasks(task, files={"train": path}, columns={"folds": (number, 5)})[0] for number in range(5)]
    for fold in folds:
        dev.update(fold.dev[0].ids)
        assert {*fold.dev[0].ids} | {*fold.train.ids} == everything and "validation set" not in " ".join(fold.notes)
        assert len(everything) / 5 - 4 < len(fold.dev[0].ids) < len(everything) / 5 + 4
        if kind == "classification":
            assert {*fold.dev[0].targets.tolist()} == {*fold.train.targets.tolist()} == {0, 1, 2, 3}
        if kind == "multi-label":
            assert fold.dev[0].targets.any(0).all()
        if kind == "question-answering":
            assert {text for _, text in fold.dev[0].texts}.isdisjoint(text for _, text in fold.train.texts)
        if kind == "regression":
            assert fold.task.shift == pytest.approx(fold.train.targets.mean())
    assert {*dev} == everything and {*dev.values()} == {1}
    again = read_tasks(task, files={"train": path}, columns={"folds": (1, 5)})[0]
    assert again.dev[0].ids == folds[1].dev[0].ids


def pieces(count, kind):
    """Yields rows of `count` texts of six patients; each text occurs in two spellings, each class in several texts."""
    for number in range(2 * count):
        text = f"text number {number // 2}" if number % 2 else f"Text, number  {number // 2}!"
        row = {"text": text, "patient": number // 2 % 6, "label": "abc"[min(2, number // 2 % 5)]}
        if kind == "multi-label":
            row["label"] = [row["label"], "d"][: 1 + number // 2 % 2]
        if kind == "tagging":
            row = {"words": text.split(), "tags": ["B-X", "O", "O"], "patient": row["patient"]}
        yield row | ({"label": float(number // 2)} if kind == "regression" else {})


@pytest.mark.parametrize("kind", ["classification", "multi-label", "regression", "tagging"])
@pytest.mark.parametrize("group", ["", "patient"])
def test_equal_texts_and_groups_stay_together(write_rows, kind, group):
    path = write_rows([*pieces(30, kind)])
    task = "classification" if kind == "multi-label" else kind
    options = {"group": group} if group else {}
    for share in (*({"folds": (number, 3)} for number in range(3)), {"dev_fraction": 0.2}):
        (data,) = read_tasks(task, files={"train": path}, columns=options | share)
        splits = (data.train, data.dev[0])
        train, dev = ({int(text.split()[2].strip("!")) for (text,) in split.texts} for split in splits)
        if group:
            train, dev = ({number % 6 for number in numbers} for numbers in (train, dev))
        assert train and dev and train.isdisjoint(dev) and train | dev == {*range(6 if group else 30)}
        assert abs(len(data.dev[0].texts) - (20 if "folds" in share else 12)) <= (
            0 if group and "folds" in share else 8
        )
        if task == "classification" and not group:
            assert TASK_TYPES[data.task.kind].class_sizes(data.task, data.dev[0]).keys() == {*data.task.labels}
            assert 0 not in TASK_TYPES[data.task.kind].class_sizes(data.task, data.dev[0]).values()


def test_cross_validation_reports_folds_and_resumes(files, encoder_folder, tmp_path):
    path = files("classification")
    out = tmp_path / "out"
    command = ("finetune", encoder_folder, "--task", "classification", "--train", path, "--out", out)
    command += ("--folds", "3", "--json", *flags(QUICK))
    with killed_at_call(FinetuneStep, "__call__", 8):  # in the second fold
        ef.finetune(encoder_folder, task="classification", train=path, out=out, folds=3, overrides=QUICK)
    (partial,) = json.loads((out / "results.json").read_text())["classification"]["runs"]
    run = in_process.run(*command)
    results = json.loads(run.stdout)["classification"]
    assert results["runs"][0] == partial and [fold["fold"] for fold in results["runs"]] == [0, 1, 2]
    scores = [fold["accuracy"] for fold in results["runs"]]
    assert results["means"]["accuracy"] == pytest.approx(np.mean(scores))
    assert results["deviations"]["accuracy"] == pytest.approx(statistics.stdev(scores))
    assert f"classification: mean accuracy {np.mean(scores):.4f} ± " in run.stderr
    folder = out / "classification"
    predicted = []
    for number in range(3):
        lines = (folder / f"fold-{number}/seed-0/predictions.dev.jsonl").read_text().splitlines()
        predicted += [json.loads(line) for line in lines]
    assert len({row["id"] for row in predicted}) == len(predicted) == 57
    gold, labels = ([row[name] for row in predicted] for name in ("gold", "label"))
    expected = {"accuracy": accuracy_score(gold, labels), "f1_macro": f1_score(gold, labels, average="macro")}
    expected["matthews"] = matthews_corrcoef(gold, labels)
    assert results["out_of_fold"] == pytest.approx(expected)
    assert json.loads((out / "results.json").read_text())["classification"] == results
    report = json.loads((folder / "report.json").read_text())
    assert report["examples"] == 57
    assert {name: row["model"] for name, row in report["scores"].items()} == pytest.approx(expected)
    pictures = {"curves.png", "confusion.png", "calibration.png"}
    folds = {f"fold-{number}" for number in range(3)}
    assert {path.name for path in folder.iterdir()} == {"report.md", "report.json", *pictures, *folds}
    with pytest.raises(InputError, match="other files; choose another folder"):
        ef.finetune(encoder_folder, task="classification", train=path, out=out, overrides=QUICK)
    with pytest.raises(InputError, match="fold-0: was trained with other examples of train"):
        ef.finetune(encoder_folder, task="classification", train=path, out=out, folds=4, overrides=QUICK)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"folds": 1}, "folds = 1: must be at least 2"),
        ({"folds": 7}, r"only 6 examples of the class 'rare' for --folds 7; lower --folds"),
        ({"folds": 2, "dev": "dev.jsonl"}, "remove --dev and --dev-fraction"),
        ({"folds": 2, "dev_fraction": 0.3}, "--dev-fraction"),
        ({"folds": 2, "group": "patient"}, r"no column 'patient'; available columns: .*text.*; choose with --group"),
        ({"folds": 5, "group": "label"}, "--group makes 4 groups of rows, too few for 5 parts"),
        ({"dev": "dev.jsonl", "group": "label"}, "which --dev replaces"),
        ({"task": "mrpc", "glue": ".", "folds": 2}, "--folds: is for --train with --task classification, regression"),
        ({"task": "squad2", "squad": ".", "folds": 2}, "--folds: is for --train with --task classification, regress"),
        ({"task": "question-answering", "folds": 12}, "too few examples or contexts for 12 folds"),
    ],
)
def test_invalid_folds_are_refused(files, encoder_folder, tmp_path, more, message):
    arguments = {"task": "classification"} | more
    if arguments["task"] in ("classification", "question-answering"):
        arguments["train"] = files(arguments["task"])
    with pytest.raises(InputError, match=message):
        ef.finetune(encoder_folder, **arguments, out=tmp_path / "out", overrides=QUICK)


def test_untrained_baseline_starts_from_random_weights(finetuned, encoder_folder, glue_folder, tmp_path, monkeypatch):
    out = shutil.copytree(finetuned[0], tmp_path / "out")
    begin = FinetuneStep.reset
    encoders = []

    def watched(step):
        encoders.append({name: p.detach().clone() for name, p in step.model.named_parameters()})
        begin(step)

    monkeypatch.setattr(FinetuneStep, "reset", watched)
    arguments = {"model": encoder_folder, "glue": glue_folder, "out": out, "seeds": 2, "overrides": QUICK}
    results = ef.finetune(task="sst2", **arguments, untrained_twin=True)["sst2"]
    assert results["runs"] == finetuned[1]["sst2"]["runs"]
    result = json.loads((out / "sst2/untrained/seed-0/result.json").read_text())
    assert results["untrained"] == {"accuracy": result["accuracy"]}
    (start,) = encoders
    shape = ef.load(out / "sst2/seed-0/model")._model.shape
    fresh = torch.nn.ModuleDict({"embeddings": Embeddings(shape), "encoder": Encoder(shape)})
    initialize(fresh, "bert", 0)
    for name, parameter in fresh.named_parameters():
        assert start[name].equal(parameter), name
    assert ef.finetune(task="sst2", **arguments, untrained_twin=True)["sst2"] == results and len(encoders) == 1
