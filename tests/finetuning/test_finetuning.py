"""`finetune` as a user runs it: files, resuming, errors and messages."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from unittest.mock import Mock

import in_process
import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from killed_call import killed_at_call
from tiny_reading import flags as settings
from tiny_task import QUICK, sentences, write_mrpc
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import electra_fast as ef
from electra_fast.files import checkpoint_folder
from electra_fast.finetuning import batches
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.training import seed_run
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.encoder import load_encoder


def command(encoder_folder, glue_folder, out, *more, **overrides):
    start = ["finetune", str(encoder_folder), "--task", "sst2,mrpc", "--seeds", "2"]
    return [*start, "--glue", str(glue_folder), "--out", str(out), *settings(QUICK | overrides), *more]


def model_bytes(out):
    return {path.parts[-4:]: path.read_bytes() for path in sorted(out.glob("*/seed-*/model/model.safetensors"))}


def without_times(results):
    if isinstance(results, Mapping):
        return {name: without_times(value) for name, value in results.items() if name != "seconds"}
    return [without_times(value) for value in results] if isinstance(results, list) else results


def test_results_and_files_of_each_seed(finetuned, glue_folder):
    out, results = finetuned
    assert list(results) == ["sst2", "mrpc"] and json.loads((out / "results.json").read_text()) == results
    assert json.loads(results.to_json()) == results and results["sst2"].median == results["sst2"]["median"]
    header, *lines = str(results).splitlines()
    assert header.split() == ["task", "metric", "median", "lowest", "highest", "majority", "runs", "seconds"]
    assert [line.split()[0] for line in lines] == ["sst2", "mrpc", "mean"] and "<pre>task" in results._repr_html_()
    for task, splits in {"sst2": {"dev": 16, "test": 8}, "mrpc": {"dev": 10}}.items():
        result = results[task]
        metrics = {"accuracy", *(["f1"] if task == "mrpc" else [])}
        scores = [run["accuracy"] for run in result["runs"]]
        assert [run["seed"] for run in result["runs"]] == [0, 1] and result["metric"] == "accuracy"
        assert result["majority"].keys() == metrics
        assert result["median"] == sum(scores) / 2 and (result["min"], result["max"]) == (min(scores), max(scores))
        data = glue.read(task, glue_folder)
        names = {"model", "metrics.jsonl", "result.json"}
        names |= {f"predictions.{split}.{kind}" for split in splits for kind in ("jsonl", "tsv")}
        for run in result["runs"]:
            assert metrics <= run.keys() and run["seconds"] > 0
            folder = out / task / f"seed-{run['seed']}"
            assert {path.name for path in folder.iterdir()} == names
            for split, count in splits.items():
                header, *rows = (folder / f"predictions.{split}.tsv").read_text().splitlines()
                assert header == "index\tprediction" and len(rows) == count
            _, *rows = (folder / "predictions.dev.tsv").read_text().splitlines()
            targets = [data.task.labels[i] for i in data.dev[0].targets]
            assert np.mean([row.split("\t")[1] for row in rows] == np.array(targets)) == pytest.approx(run["accuracy"])
    assert len(set(model_bytes(out).values())) == 4


def test_finished_seeds_are_not_retrained(finetuned, encoder_folder, glue_folder, tmp_path):
    out, results = finetuned
    copy = shutil.copytree(out, tmp_path / "copy")
    times = {path: path.stat().st_mtime_ns for path in copy.glob("*/seed-*/model/model.safetensors")}
    for path in copy.glob("*/report.*"):
        path.unlink()  # like after a kill before they are written
    again = in_process.run(*command(encoder_folder, glue_folder, copy, "--json"))
    assert again.returncode == 0 and json.loads(again.stdout) == results
    assert "from an earlier session" in again.stderr
    assert times == {path: path.stat().st_mtime_ns for path in times}
    reports = {path: (out / path.relative_to(copy)).read_bytes() for path in copy.glob("*/*.*") if path.is_file()}
    assert {"report.json", "report.md", "confusion.png"} <= {path.name for path in reports}
    assert reports == {path: path.read_bytes() for path in reports}
    more = ef.finetune(encoder_folder, task="sst2", glue=glue_folder, out=copy, seeds=3, overrides=QUICK)
    assert more["sst2"]["runs"][:2] == results["sst2"]["runs"] and len(more["sst2"]["runs"]) == 3
    assert json.loads((copy / "results.json").read_text())["mrpc"] == results["mrpc"]  # results of other tasks are kept


def with_other_labels(glue_folder, folder):
    """Copies the tasks and flips every validation label of SST-2."""
    shutil.copytree(glue_folder, folder)
    path = folder / "SST-2" / "dev.tsv"
    header, *lines = path.read_text().splitlines()
    path.write_text("\n".join([header, *(f"{line[:-1]}{1 - int(line[-1])}" for line in lines)]) + "\n")
    return folder


def test_changed_data_are_rescored_without_training(finetuned, encoder_folder, glue_folder, tmp_path):
    out = shutil.copytree(finetuned[0], tmp_path / "copy")
    results = finetuned[1]
    moved = shutil.copytree(glue_folder, tmp_path / "moved")
    models = model_bytes(out)
    again = in_process.run(*command(encoder_folder, moved, out, "--json"))
    assert json.loads(again.stdout) == results and "again" not in again.stderr
    tested = {path: path.stat().st_mtime_ns for path in out.glob("*/seed-*/predictions.test.tsv")}
    other = with_other_labels(glue_folder, tmp_path / "other")
    changed = in_process.run(*command(encoder_folder, other, out, "--json"))
    rescored = json.loads(changed.stdout)
    assert changed.stderr.count("dev predicted and scored again, as the data changed") == 2
    for before, now in zip(results["sst2"]["runs"], rescored["sst2"]["runs"], strict=True):
        assert now["accuracy"] == pytest.approx(1 - before["accuracy"])
    assert rescored["mrpc"] == results["mrpc"] and model_bytes(out) == models
    assert tested == {path: path.stat().st_mtime_ns for path in tested}
    card = (out / "sst2" / "seed-0" / "model" / "README.md").read_text()
    accuracy = rescored["sst2"]["runs"][0]["accuracy"]
    assert f"accuracy {accuracy:.4f} (majority " in card
    [score] = ModelCard(card).data.eval_results
    assert (score.task_type, score.dataset_name, score.dataset_split) == ("text-classification", "sst2", "dev")
    assert (score.metric_type, score.metric_value) == ("accuracy", accuracy) and str(tmp_path) not in card


@pytest.mark.parametrize("call", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_kill_during_rescoring_leaves_no_stale_scores(finetuned, encoder_folder, glue_folder, tmp_path, call):
    out = shutil.copytree(finetuned[0], tmp_path / "copy")
    common = {"model": encoder_folder, "out": out, "overrides": QUICK}
    with killed_at_call(os, "replace", call):
        ef.finetune(task="sst2", glue=with_other_labels(glue_folder, tmp_path / "other"), **common)
    runs = ef.finetune(task="sst2", glue=glue_folder, **common)["sst2"]["runs"]
    assert without_times(runs) == without_times(finetuned[1]["sst2"]["runs"][:1])
    predictions = (finetuned[0] / "sst2" / "seed-0" / "predictions.dev.tsv").read_text()
    assert (out / "sst2" / "seed-0" / "predictions.dev.tsv").read_text() == predictions


@pytest.mark.slow
def test_killed_run_resumes_bit_exactly(server, finetuned, encoder_folder, glue_folder, tmp_path):
    out, results = finetuned
    resumed = tmp_path / "resumed"

    def is_resumable():
        """Returns whether one seed is unfinished after some steps."""
        states = list(resumed.glob("*/seed-*/checkpoints/step-*/state.json"))
        steps = [json.loads(path.read_text())["step"] for path in states]
        return len({path.parents[2] for path in states}) == 1 and max(steps) > 0

    start = command(encoder_folder, glue_folder, resumed, **{"finetune.checkpoint_seconds": "0"})
    server.kill_until_done(start, tmp_path / "said.txt", is_resumable)
    assert model_bytes(resumed) == model_bytes(out)
    assert without_times(json.loads((resumed / "results.json").read_text())) == without_times(results)
    for path in out.glob("*/seed-*/metrics.jsonl"):
        logs = (path, resumed / path.relative_to(out))
        before, after = ([json.loads(line) for line in log.read_text().splitlines()] for log in logs)
        assert without_times(before) == without_times(after)


@pytest.mark.parametrize("call", [1, 2, 4])
def test_kill_before_first_step_is_resumable(encoder_folder, glue_folder, tmp_path, call):
    """Kills at each of the first file replacements."""
    arguments = {"model": encoder_folder, "glue": glue_folder, "out": tmp_path, "seeds": 1, "overrides": QUICK}
    with killed_at_call(os, "replace", call):
        ef.finetune(task="sst2", **arguments)
    assert len(ef.finetune(task="sst2", **arguments)["sst2"]["runs"]) == 1


def test_kill_after_last_step_repeats_no_step(encoder_folder, glue_folder, tmp_path, monkeypatch):
    def finetune():
        return ef.finetune(encoder_folder, task="sst2", glue=glue_folder, out=tmp_path, seeds=1, overrides=QUICK)

    with killed_at_call(seed_run, "write_result", 1):
        finetune()
    half_written = tmp_path / "sst2/seed-0/.of-an-earlier-version.writing"
    half_written.touch()
    monkeypatch.setattr(FinetuneStep, "__call__", Mock(side_effect=AssertionError))
    assert len(finetune()["sst2"]["runs"]) == 1 and not half_written.exists()


def test_signal_writes_checkpoint_and_log_is_complete(encoder_folder, glue_folder, tmp_path, monkeypatch):
    take = FinetuneStep.__call__
    taken = []

    def signalled(*arguments):
        if len(taken) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        taken.append(take(*arguments))
        return taken[-1]

    monkeypatch.setattr(FinetuneStep, "__call__", signalled)
    result = in_process.run(*command(encoder_folder, glue_folder, tmp_path))
    assert result.returncode == 128 + signal.SIGTERM
    assert "checkpoint at step 3; run again to resume" in result.stderr.splitlines()[-1]
    assert max(checkpoint_folder.steps(tmp_path / "sst2" / "seed-0")) == 3
    result = ef.finetune(encoder_folder, task="SST-2,sst2", glue=glue_folder, out=tmp_path, seeds=2, overrides=QUICK)
    *log, evaluation = [json.loads(line) for line in (tmp_path / "sst2/seed-0/metrics.jsonl").read_text().splitlines()]
    assert evaluation == {"step": len(log), "accuracy": result["sst2"]["runs"][0]["accuracy"]}
    expected = [(float(loss), float(norm)) for loss, norm in taken[: len(log)]]
    assert [(line["loss"], line["grad_norm"]) for line in log] == expected and len(log) > 3


def trained_by(job, num_processes, order):
    """Returns losses and parameters after the steps of `order`; with several processes, evaluates after each step."""
    torch.set_num_threads(2)
    try:
        model = job.work.model()
        losses = []
        model.load_encoder(job.encoder.state)
        model.initialize_head(0)
        step = FinetuneStep(model, job.work, num_processes)
        for number, row in enumerate(order):
            chosen = row[row >= 0]
            parts = batches.pack(job.examples, chosen, num_processes)
            loss, _ = step(job.training_set.batch(parts, chosen, "mean", 0), number, 1.0)
            losses.append(float(loss))
            if num_processes > 1:
                job.predict(model, job.data.dev[0])
        parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
        step.close()
    finally:
        torch.set_num_threads(1)
    return losses, parameters


@pytest.mark.process
def test_two_processes_equal_one(encoder_folder, job_of):
    """The embedding table is so large that most of its rows are in no batch, and its gradient is sparse."""
    encoder = load_encoder(encoder_folder)
    jobs = [job_of("mrpc", variant) for variant in (encoder, with_more_entries(encoder))]
    order = batches.training_order(jobs[0].config, len(jobs[0].examples), 0)
    order[1] = [3] + [-1] * 7  # fewer examples than processes
    one = trained_by(jobs[0], 1, order)
    two = trained_by(jobs[1], 2, order)
    assert one[0] == pytest.approx(two[0], rel=1e-5)
    for name, parameter in one[1].items():
        torch.testing.assert_close(parameter, two[1][name][: len(parameter)], rtol=1e-4, atol=2e-5, msg=name)


def with_more_entries(encoder):
    """Returns an encoder with additional rows in its token table that no text uses."""
    state = dict(encoder.state)
    table = encoder.state["embeddings.token"]
    state["embeddings.token"] = torch.cat((table, torch.ones(4096 - len(table), table.shape[1])))
    return replace(encoder, shape=replace(encoder.shape, vocab_size=4096), state=state)


def trained(job, pack, execution="eager"):
    """Returns losses with norms, and parameters, after a few steps without dropout."""
    work = replace(job.work, config=replace(job.config, execution=execution))
    model = work.model()
    model.load_encoder(job.encoder.state)
    model.initialize_head(0)
    step = FinetuneStep(model.to(job.device), work)
    losses_and_norms = []
    for number in range(6 if job.device.type == "cpu" else 20):
        chosen = np.random.default_rng(number).permutation(len(job.examples))[: 8 - number % 3]
        losses_and_norms.append(step(job.training_set.batch(pack(chosen), chosen, "mean", 0), number, 1.0))
    return [[float(x) for x in pair] for pair in losses_and_norms], {
        name: p.cpu() for name, p in model.named_parameters()
    }


def assert_trained_alike(actual, expected):
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4)
    for name, parameter in expected[1].items():
        torch.testing.assert_close(actual[1][name], parameter, rtol=1e-4, atol=2e-5, msg=name)


HEADS = dict.fromkeys(("mrpc", "tagging", "squad1"), "transformers") | {"squad2": "published"}


@pytest.mark.parametrize("task", ["mrpc", "squad2", "tagging"])
def test_static_batches_train_equally(job_of, task):
    """CUDA graphs replay static batches."""
    job = job_of(task, **{"finetune.head": HEADS[task]})
    size = (job.config.sequence_length, job.config.batch_size)
    packed = trained(job, lambda chosen: batches.pack(job.examples, chosen))
    static = trained(job, lambda chosen: [batches.pack_static(job.examples, chosen, *size)])
    assert_trained_alike(static, packed)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", HEADS)
def test_graphs_train_like_eager_steps(job_of, task):
    job = job_of(task, device="cuda", **{"finetune.head": HEADS[task]})
    assert_trained_alike(trained(job, job.pack, "graph"), trained(job, job.pack))


class SameDeviceGenerators(TorchDispatchMode):
    """Fails if a tensor is filled by a generator of another device, which fake tensors do not detect."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        generator = (kwargs or {}).get("generator")
        assert generator is None or generator.device.type == args[0].device.type
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("head", ["published", "transformers"])
def test_head_initialization_is_device_independent(job_of, head):
    model = job_of("mrpc", **{"finetune.head": head}).work.model()
    with FakeTensorMode(allow_non_fake_inputs=True), SameDeviceGenerators():
        for module in model.head.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(torch.empty(parameter.shape, device="cuda:0"))
        model.initialize_head(0)


def test_full_disk_keeps_finished_seeds(finetuned, encoder_folder, glue_folder, tmp_path, monkeypatch):
    out = shutil.copytree(finetuned[0], tmp_path / "out")
    shutil.rmtree(out / "mrpc" / "seed-1")
    with monkeypatch.context() as patch:
        patch.setattr(seed_run, "write_tensors", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        full = in_process.run(*command(encoder_folder, glue_folder, out))
    assert full.returncode == 2
    assert len([line for line in full.stderr.splitlines() if "error" in line]) == 1
    assert "seed-1/checkpoints/step-4: cannot be written" in full.stderr and "run again to resume" in full.stderr
    results = json.loads((out / "results.json").read_text())
    assert results["sst2"] == finetuned[1]["sst2"] and results["mrpc"]["runs"] == finetuned[1]["mrpc"]["runs"][:1]
    assert not (out / "mrpc" / "seed-1" / "model").exists()
    ef.finetune(encoder_folder, glue=glue_folder, out=out, seeds=2, overrides=QUICK)
    assert model_bytes(out) == model_bytes(finetuned[0])


def test_labeled_test_split_is_scored_and_submission_is_named(encoder_folder, tmp_path):
    data = write_mrpc(tmp_path / "MRPC")
    shutil.copyfile(data / "dev.tsv", data / "test.tsv")  # the test file of MRPC has labels
    result = ef.finetune(encoder_folder, task="mrpc", glue=data, out=tmp_path / "out", seeds=2, overrides=QUICK)["mrpc"]
    assert all(run["accuracy"] == run["accuracy_test"] and run["f1"] == run["f1_test"] for run in result["runs"])
    submitted = (tmp_path / "out" / "submission" / "MRPC.tsv").read_text()
    chosen = min(result["runs"], key=lambda run: abs(run["accuracy"] - result["median"]))["seed"]
    assert submitted == (tmp_path / "out" / "mrpc" / f"seed-{chosen}" / "predictions.test.tsv").read_text()


@pytest.mark.parametrize(("recipe", "role", "length"), [("google", None, "24"), ("paper", "generator", "16")])
def test_finetune_starts_from_run(whole_run, glue_folder, tmp_path, capfd, recipe, role, length):
    """The run was trained on rows of 16 tokens."""
    options = {"recipe": recipe, "role": role, "overrides": QUICK | {"finetune.sequence_length": length}}
    results = ef.finetune(whole_run, task="mrpc", glue=glue_folder, out=tmp_path, **options)
    assert 0 <= results["mrpc"]["median"] <= 1
    warning = "training examples are longer than the 16 tokens per row of the encoder's pre-training"
    assert (warning in capfd.readouterr().err) == (length == "24")


def test_absent_classes_are_reported_with_score(encoder_folder, tmp_path):
    rows = [{"text": text, "label": ("bad", "good")[label]} for text, label in sentences(30)]
    files = {
        "train": [*rows[:20], {"text": "code", "label": "rare"}],
        "dev": rows[20:],
        "test": [row | ({"label": None} if number % 2 else {}) for number, row in enumerate(rows)],
    }
    for name, content in files.items():
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    flags = [word for name in files for word in (f"--{name}", (tmp_path / name).with_suffix(".jsonl"))]
    start = ("finetune", encoder_folder, "--task", "classification", "--json")
    out = tmp_path / "out"
    run = in_process.run(*start, "--out", out, *flags, *settings(QUICK))
    (score,) = [line for line in run.stderr.splitlines() if "seed 0: accuracy" in line]
    assert score.endswith("; dev has no examples of 'rare'; test has no examples of 'rare'")
    result = json.loads(run.stdout)["classification"]
    assert result["absent_classes"] == {"dev": ["rare"], "test": ["rare"]}
    bad, good = (sum(row["label"] == label for row in files["train"]) for label in ("bad", "good"))
    assert f"examples per class, train: 'bad' {bad}, 'good' {good}, 'rare' 1" in run.stderr
    majority = "bad" if bad >= good else "good"
    truth = [row["label"] for row in files["test"]]
    assert result["majority"]["accuracy_test"] == pytest.approx(truth.count(majority) / 15)
    path = out / "classification" / "seed-0" / "predictions.test.jsonl"
    predicted = [json.loads(line)["label"] for line in path.read_text().splitlines()]
    num_right = sum(prediction == other for prediction, other in zip(predicted, truth, strict=True))
    assert result["runs"][0]["accuracy_test"] == pytest.approx(num_right / 15)
