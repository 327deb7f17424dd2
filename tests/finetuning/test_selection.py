"""Evaluations during training select the kept checkpoint and do not change training."""

import itertools
import os
import random
import shutil
import signal

import numpy as np
import pytest
from killed_call import killed_at_call
from matplotlib.figure import Figure
from tiny_task import QUICK, WORDS, write_sst2

import electra_fast as ef
from electra_fast import progress
from electra_fast.errors import InputError, Interrupted
from electra_fast.files import checkpoint_folder
from electra_fast.files.json_files import JsonLines, read_object, read_records
from electra_fast.finetuning.batches import evaluation_steps
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.tasks.classification import Classification
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.training.plots import plot_finetuning

# Five steps per epoch, at a learning rate for which the score rises and falls.
SETTINGS = QUICK | {"finetune.epochs": "3", "finetune.learning_rate": "7e-4", "finetune.batch_size": "16"}
SETTINGS |= {"finetune.select": "best", "finetune.evals_per_epoch": "2.5", "finetune.checkpoint_seconds": "0"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_sst2(tmp_path_factory.mktemp("data"), train=80, dev=40)


@pytest.fixture
def train(encoder_folder, data):
    """Returns a function that fine-tunes and returns the content of the folder, without times."""

    def train(out, *, settings=SETTINGS, **arguments):
        ef.finetune(encoder_folder, task="sst2", glue=data, out=out, overrides=settings, **arguments)
        return files_of_seed(out / "sst2/seed-0")

    return train


def files_of_seed(folder):
    result = read_object(folder / "result.json")
    result_without_times = {
        name: value for name, value in result.items() if name not in ("seconds", "files", "checksum")
    }
    names = ("predictions.dev.tsv", "predictions.test.tsv", "model/model.safetensors")
    log = [{**record, "seconds": None} for record in read_records(folder / "metrics.jsonl")]
    return [result_without_times, log, *((folder / name).read_bytes() for name in names)]


@pytest.fixture(scope="module")
def reference(encoder_folder, data, tmp_path_factory):
    """An uninterrupted training: its folder, and the parameters after each step."""
    out = tmp_path_factory.mktemp("reference")
    take = FinetuneStep.__call__
    steps = []

    def watched(self, *arguments):
        outputs = take(self, *arguments)
        steps.append({name: p.detach().clone() for name, p in self.model.named_parameters()})
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FinetuneStep, "__call__", watched)
        ef.finetune(encoder_folder, task="sst2", glue=data, out=out, overrides=SETTINGS)
    return out / "sst2/seed-0", steps


@pytest.mark.parametrize(
    ("evals", "examples", "epochs", "expected"),
    [
        (1, 40, 3, [5, 10, 15]),
        (0, 40, 3, [15]),
        (2.5, 40, 2, [2, 4, 6, 8, 10]),
        (0.5, 40, 5, [10, 20, 25]),
        (100, 17, 1.5, [1, 2, 3, 4, 5]),
        (0.01, 1, 3, [3]),
    ],
)
def test_evaluation_steps_include_last_step(evals, examples, epochs, expected):
    config = FinetuneSection(evals_per_epoch=float(evals), epochs=float(epochs), batch_size=8)
    assert sorted(evaluation_steps(config, examples)) == expected


def test_best_step_is_kept(reference, data):
    folder, steps = reference
    result = read_object(folder / "result.json")
    log = read_records(folder / "metrics.jsonl")
    rows = [line.split("\t") for line in (data / "dev.tsv").read_text().splitlines()[1:]]
    reader = ef.load(folder / "model", precision="fp32")
    scores = {}
    for step in (*range(2, 15, 2), 15):
        reader._model.load_state_dict(steps[step - 1])
        predictions = reader.predict([text for text, _ in rows])
        scores[step] = np.mean([entry["label"] == label for entry, (_, label) in zip(predictions, rows, strict=True)])
    assert {entry["step"]: entry["accuracy"] for entry in log if "accuracy" in entry} == pytest.approx(scores)
    best = max(scores, key=scores.__getitem__)
    assert 2 < best < 14  # neither the first nor the last
    assert result["best_step"] == best and result["accuracy"] == pytest.approx(scores[best])
    for name, tensor in ef.load(folder / "model")._model.named_parameters():
        assert tensor.equal(steps[best - 1][name]), name
    reader._model.load_state_dict(steps[best - 1])
    lines = (folder / "predictions.dev.tsv").read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in lines] == [entry["label"] for entry in reader.predict(t for t, _ in rows)]
    assert f"after step {best}, selected by accuracy on dev" in (folder / "model/README.md").read_text()


def validation_losses(monkeypatch):
    """Returns a list that collects the losses of all evaluations."""
    loss = Classification.validation_loss
    losses = []
    monkeypatch.setattr(
        Classification, "validation_loss", lambda *arguments: losses.append(loss(*arguments)) or losses[-1]
    )
    return losses


def test_lowest_loss_decides_among_equal_scores(train, tmp_path, monkeypatch):
    losses = validation_losses(monkeypatch)
    result, log, *_ = train(tmp_path, settings=SETTINGS | {"finetune.learning_rate": "5e-4"})
    scores = [(record["accuracy"], record["step"]) for record in log if "accuracy" in record]
    ranks = {step: (score, -loss) for (score, step), loss in zip(scores, losses, strict=True)}
    highest = [step for score, step in scores if score == max(scores)[0]]
    assert result["best_step"] == max(ranks, key=ranks.__getitem__) > highest[0]


def test_class_weights_select_by_macro_f1(encoder_folder, tmp_path, monkeypatch):
    """The first steps, whose model always predicts "usual", have the highest accuracy, but not the best macro F1.

    GLUE tasks are selected by accuracy, and a warning gives the remedy.
    """
    rng = random.Random(0)
    losses = validation_losses(monkeypatch)

    def rows(count):
        for _ in range(count):
            label = "rare" if rng.random() < 0.04 else "usual"
            words = rng.choices(WORDS, k=8)
            if rng.random() < (0.7 if label == "rare" else 0.08):
                words[rng.randrange(8)] = "urgent"
            yield {"text": " ".join(words), "label": label}

    settings = {"learning_rate": 3e-3, "layer_decay": 1, "epochs": 5, "evals_per_epoch": 2, "dropout": 0}
    settings |= {"sequence_length": 16, "precision": "fp32", "matmul": "default", "attention_dropout": 0}
    overrides = {f"finetune.{name}": value for name, value in settings.items()}
    files = {"train": [*rows(500)], "dev": [*rows(200)]}
    out = tmp_path / "own"
    results = ef.finetune(encoder_folder, task="classification", **files, out=out, overrides=overrides)
    (run,) = results["classification"]["runs"]
    log = read_records(out / "classification/seed-0/metrics.jsonl")
    scores = [entry for entry in log if "f1_macro" in entry]
    ranks = {entry["step"]: (entry["f1_macro"], -loss) for entry, loss in zip(scores, losses, strict=True)}
    assert run["selected_by"] == "f1_macro" and run["best_step"] == max(ranks, key=ranks.__getitem__)
    assert run["accuracy"] < scores[0]["accuracy"] and scores[0]["matthews"] == 0 < 0.2 < run["matthews"]

    (tmp_path / "data").mkdir()
    for name, examples in files.items():
        lines = (f"{entry['text']}\t{int(entry['label'] == 'usual')}\n" for entry in examples)
        (tmp_path / "data" / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(lines))
    overrides |= {"finetune.class_weights": "0=10,1=0.5"}
    arguments = {"model": encoder_folder, "glue": tmp_path / "data", "out": tmp_path / "glue"}
    (run,) = ef.finetune(task="sst2", **arguments, overrides=overrides)["sst2"]["runs"]
    step = run["warning"].split("; or set finetune.select = last: the predictions of step ")[1].split()[0]
    assert run["accuracy"] == scores[0]["accuracy"] and int(step) > run["best_step"]


def test_evaluations_do_not_change_training(reference, encoder_folder, data, tmp_path):
    settings = SETTINGS | {"finetune.evals_per_epoch": "0", "finetune.select": "last"}
    ef.finetune(encoder_folder, task="sst2", glue=data, out=tmp_path, overrides=settings)
    folder = tmp_path / "sst2/seed-0"
    logs = (read_records(path / "metrics.jsonl") for path in (folder, reference[0]))
    losses, expected = ([record["loss"] for record in log if "loss" in record] for log in logs)
    assert losses == expected and len(losses) == 15
    for name, tensor in ef.load(folder / "model")._model.named_parameters():
        assert tensor.equal(reference[1][-1][name]), name


@pytest.mark.parametrize(("number", "is_damaged"), [(9, True), pytest.param(8, False, marks=pytest.mark.slow)])
def test_killed_anywhere_trains_same_model(reference, train, tmp_path, number, is_damaged):
    folder = tmp_path / "sst2/seed-0"
    for _ in range(12):
        if (folder / "result.json").exists():
            break
        with killed_at_call(JsonLines, "write", number, after=True):
            train(tmp_path)
        known = checkpoint_folder.steps(folder)
        if is_damaged and len(known) == 2:
            path = checkpoint_folder.path_of(folder, known[-1])
            target = path / ("best.safetensors" if (path / "best.safetensors").exists() else "model.safetensors")
            target.write_bytes(target.read_bytes()[:-1])
    assert train(tmp_path) == files_of_seed(reference[0])


def test_signal_stops_evaluation_and_resume_repeats_it(reference, train, tmp_path, monkeypatch):
    predict = Classification.predict
    calls = itertools.count(1)

    def signalled(*arguments):
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return predict(*arguments)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="checkpoint at step 4; run again"):
        patch.setattr(Classification, "predict", signalled)
        train(tmp_path)
    with killed_at_call(JsonLines, "write", 1, after=True):
        train(tmp_path)
    assert train(tmp_path) == files_of_seed(reference[0])


def test_callback_stops_training_after_checkpoint(reference, train, tmp_path):
    logs = []
    evaluations = []
    checkpoints = []

    def prune(record):
        evaluations.append(record)
        if record["step"] == 6:
            raise ef.StopTraining

    with pytest.raises(ef.StopTraining):
        train(tmp_path, settings=SETTINGS | {"finetune.checkpoint_seconds": "60"}, on_evaluation=prune)
    assert checkpoint_folder.steps(tmp_path / "sst2/seed-0") == [6]
    hooks = {"on_log": logs.append, "on_evaluation": evaluations.append, "on_checkpoint": checkpoints.append}
    assert train(tmp_path, **hooks) == files_of_seed(reference[0])
    records = [{**entry, "seconds": None} for entry in (*logs, *evaluations)]
    expected = [{"task": "sst2", "seed": 0} | entry for entry in files_of_seed(reference[0])[1]]
    assert [entry for entry in records if "loss" in entry] == [
        entry for entry in expected if entry["step"] > 6 and "loss" in entry
    ]
    assert [entry for entry in records if "accuracy" in entry] == [entry for entry in expected if "accuracy" in entry]
    assert checkpoints[-1]["step"] == 15 and checkpoints[-1]["path"].endswith("checkpoints/step-15")


def test_patience_stops_training_and_is_reported(train, tmp_path, monkeypatch, capsys):
    """With a learning rate of nearly 0, all scores are equal."""
    settings = SETTINGS | {"finetune.learning_rate": "1e-12", "finetune.patience": "2"}
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    result, log, *_ = train(tmp_path, settings=settings)
    stderr = capsys.readouterr().err
    assert f"  best accuracy {result['accuracy']:.4f} at 2  " in stderr and "(step 2, stopped at 6, " in stderr
    assert (result["best_step"], result["stopped_step"]) == (2, 6)
    assert [record["step"] for record in log if "accuracy" in record] == [2, 4, 6]
    card = (tmp_path / "sst2/seed-0/model/README.md").read_text()
    assert "3 epochs, 15 steps of 16, stopped early at step 6" in card and "after step 2, selected" in card


def test_changed_validation_data_are_refused_if_they_select_model(reference, data, encoder_folder, tmp_path):
    out = shutil.copytree(reference[0].parents[1], tmp_path / "out")
    other = shutil.copytree(data, tmp_path / "data")
    (other / "dev.tsv").write_text((other / "dev.tsv").read_text() + "fine\t1\n")
    with pytest.raises(InputError, match="was trained with other examples of dev"):
        ef.finetune(encoder_folder, task="sst2", glue=other, out=out, overrides=SETTINGS)


def test_curves_show_log(reference):
    folder = reference[0]
    figure = Figure()
    records = read_records(folder / "metrics.jsonl")
    best = read_object(folder / "result.json")["best_step"]
    plot_finetuning(figure, {"seed 0": records}, "accuracy", {"seed 0": best})
    left, right = figure.axes
    [line] = left.lines
    [scores, star] = right.lines
    assert line.get_xydata().tolist() == [[record["step"], record["loss"]] for record in records if "loss" in record]
    points = [[record["step"], record["accuracy"]] for record in records if "accuracy" in record]
    assert scores.get_xydata().tolist() == points
    assert star.get_xydata().tolist() == [point for point in points if point[0] == best]
    assert (folder.parent / "curves.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evals_per_epoch": -1.0}, "finetune.evals_per_epoch"),
        ({"patience": -1}, "finetune.patience"),
        ({"patience": 2, "select": "last"}, 'finetune.patience = 2: needs finetune.select = "best"'),
        ({"patience": 2, "evals_per_epoch": 0.0}, "raise finetune.evals_per_epoch above 0"),
    ],
)
def test_inconsistent_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        FinetuneSection(**settings)
