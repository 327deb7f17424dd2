"""`finetune` as a user runs it: what it leaves, resumes, refuses and says."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import in_process
import numpy as np
import pytest
import torch
from tiny_task import NO_DROPOUT, QUICK, save_encoder, sentences, write_mrpc, write_sst2

import electra_fast as ef
from electra_fast.errors import InputError, TrainingFailed
from electra_fast.finetuning import batches, glue
from electra_fast.finetuning.config import FinetuningConfig
from electra_fast.finetuning.job import make_job
from electra_fast.finetuning.losses import batch_weights
from electra_fast.finetuning.step import FinetuneStep, StepBatch
from electra_fast.huggingface.encoder import load_encoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory, tiny_vocab):
    return save_encoder(tmp_path_factory.mktemp("encoder"), tiny_vocab)


@pytest.fixture(scope="module")
def glue_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    write_sst2(folder / "SST-2")
    write_mrpc(folder / "MRPC")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, encoder, glue_folder):
    """Both tasks with two seeds, uninterrupted."""
    out = tmp_path_factory.mktemp("whole")
    return out, ef.finetune("glue", model=encoder, data=glue_folder, out=out, seeds=2, overrides=QUICK)


def command(encoder, glue_folder, out, *more, **overrides):
    flags = [word for name, value in (QUICK | overrides).items() for word in (f"--{name}", value)]
    start = [sys.executable, "-m", "electra_fast", "finetune", "--task", "sst2,mrpc", "--seeds", "2"]
    return [*start, "--model", str(encoder), "--data", str(glue_folder), "--out", str(out), *flags, *more]


def model_bytes(out):
    return {path.parts[-4:]: path.read_bytes() for path in sorted(out.glob("*/seed-*/model/model.safetensors"))}


def without_times(results):
    if isinstance(results, dict):
        return {name: without_times(value) for name, value in results.items() if name != "seconds"}
    return [without_times(value) for value in results] if isinstance(results, list) else results


def test_results_have_each_run_the_median_and_the_spread(whole):
    out, results = whole
    assert list(results) == ["sst2", "mrpc"] and json.loads((out / "results.json").read_text()) == results
    for task, metrics in {"sst2": {"accuracy"}, "mrpc": {"accuracy", "f1"}}.items():
        found = results[task]
        scores = [run["accuracy"] for run in found["runs"]]
        assert [run["seed"] for run in found["runs"]] == [0, 1] and found["metric"] == "accuracy"
        assert found["median"] == sum(scores) / 2 and (found["min"], found["max"]) == (min(scores), max(scores))
        assert all(metrics <= run.keys() and run["seconds"] > 0 for run in found["runs"])


def test_each_seed_leaves_a_model_and_predictions(whole, glue_folder):
    out, results = whole
    for task, splits in {"sst2": {"dev": 16, "test": 8}, "mrpc": {"dev": 10}}.items():
        data = glue.read(task, glue_folder)
        for run in results[task]["runs"]:
            folder = out / task / f"seed-{run['seed']}"
            names = {"model", "metrics.jsonl", "result.json", *(f"predictions.{split}.tsv" for split in splits)}
            assert {path.name for path in folder.iterdir()} == names
            for split, count in splits.items():
                header, *rows = (folder / f"predictions.{split}.tsv").read_text().splitlines()
                assert header == "index\tprediction" and len(rows) == count
            predicted = [row.split("\t")[1] for row in (folder / "predictions.dev.tsv").read_text().splitlines()[1:]]
            targets = [data.task.labels[i] for i in data.dev[0].targets]
            accuracy = np.mean([a == b for a, b in zip(predicted, targets, strict=True)])
            assert accuracy == pytest.approx(run["accuracy"])
    assert (
        model_bytes(out)[("sst2", "seed-0", "model", "model.safetensors")]
        != model_bytes(out)[("sst2", "seed-1", "model", "model.safetensors")]
    )


def test_finished_seeds_are_not_trained_again(whole, encoder, glue_folder, tmp_path):
    out, results = whole
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    kept = {path: path.stat().st_mtime_ns for path in copy.glob("*/seed-*/model/model.safetensors")}
    again = in_process.run(*command(encoder, glue_folder, copy, "--json")[3:])
    assert again.returncode == 0 and json.loads(again.stdout) == results
    assert "from an earlier session" in again.stderr
    assert kept == {path: path.stat().st_mtime_ns for path in kept}
    more = ef.finetune("sst2", model=encoder, data=glue_folder, out=copy, seeds=3, overrides=QUICK)
    assert more["sst2"]["runs"][:2] == results["sst2"]["runs"] and len(more["sst2"]["runs"]) == 3
    assert json.loads((copy / "results.json").read_text())["mrpc"] == results["mrpc"]  # another task's are kept


def test_killed_at_any_moment_it_resumes_to_the_same_bits(whole, encoder, glue_folder, tmp_path):
    """kill -9 at growing delays until a session reaches the end; checkpoints after every step."""
    out, results = whole
    resumed, delay, kills = tmp_path / "resumed", 2.5, 0
    while True:
        arguments = command(encoder, glue_folder, resumed, **{"finetune.checkpoint_seconds": "0"})
        process = subprocess.Popen(arguments, stderr=subprocess.PIPE, start_new_session=True, text=True)
        try:
            _, errors = process.communicate(timeout=delay)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            delay, kills = delay * 1.15, kills + 1
            continue
        assert process.returncode == 0, errors
        break
    assert kills >= 1
    assert model_bytes(resumed) == model_bytes(out)
    assert without_times(json.loads((resumed / "results.json").read_text())) == without_times(results)
    for path in out.glob("*/seed-*/metrics.jsonl"):
        records = [
            [json.loads(line) for line in (folder / path.relative_to(out)).read_text().splitlines()]
            for folder in (out, resumed)
        ]
        assert without_times(records[0]) == without_times(records[1])


def test_a_signal_ends_in_a_checkpoint(encoder, glue_folder, tmp_path):
    out = tmp_path / "out"
    arguments = command(encoder, glue_folder, out, **{"finetune.epochs": "200"})
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    log = out / "sst2" / "seed-0" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "run again to resume" in errors.splitlines()[-1]
    step = json.loads((out / "sst2" / "seed-0" / "checkpoint" / "state.json").read_text())["step"]
    assert f"checkpoint at step {step}" in errors and step > 0


def test_other_settings_data_or_encoder_are_refused(whole, encoder, glue_folder, tmp_path, tiny_vocab):
    out = tmp_path / "copy"
    shutil.copytree(whole[0], out)
    with pytest.raises(InputError, match=r"sst2: was made with other settings \(finetune.epochs was 1.0 and is now 2"):
        ef.finetune("sst2", model=encoder, data=glue_folder, out=out, overrides=QUICK | {"finetune.epochs": "2"})
    other = save_encoder(tmp_path / "other", tiny_vocab, seed=1)
    with pytest.raises(InputError, match="encoder was"):
        ef.finetune("sst2", model=other, data=glue_folder, out=out, overrides=QUICK)
    with pytest.raises(InputError, match="data was"):
        ef.finetune("sst2", model=encoder, data=write_sst2(tmp_path / "data", train=41), out=out, overrides=QUICK)


def test_two_processes_compute_what_one_computes(encoder, glue_folder, tmp_path):
    config = FinetuningConfig().override(QUICK | NO_DROPOUT)
    job = make_job(glue.read("mrpc", glue_folder), config, load_encoder(encoder), tmp_path, CPU)
    order = batches.training_order(job.config, len(job.examples), 0)
    order[-1] = [3] + [-1] * 7  # fewer examples than processes
    losses, models = [], []
    torch.set_num_threads(2)
    try:
        for num_processes in (1, 2):
            model = job.work.model()
            model.load_encoder(job.encoder.state)
            model.initialize_head(0)
            step = FinetuneStep(model, job.work, num_processes)
            for number, row in enumerate(order):
                chosen = row[row >= 0]
                parts = batches.pack(job.examples, chosen, num_processes)
                weights = batch_weights(job.weights[chosen], job.config)
                loss, _ = step(StepBatch.of(parts, job.targets[chosen], weights, 0), number, 1.0)
                losses.append(float(loss))
            models.append({name: p.detach().clone() for name, p in model.named_parameters()})
            step.close()
    finally:
        torch.set_num_threads(1)
    half = len(losses) // 2
    assert losses[:half] == pytest.approx(losses[half:], rel=1e-5)
    for name, parameter in models[0].items():
        torch.testing.assert_close(parameter, models[1][name], rtol=1e-4, atol=2e-5, msg=name)


def trained(job, execution, device, pack, steps=12):
    """Losses and parameters after a few steps, without dropout."""
    work = replace(job.work, config=replace(job.config, execution=execution))
    model = work.model()
    model.load_encoder(job.encoder.state)
    model.initialize_head(0)
    step, found = FinetuneStep(model.to(device), work), []
    for number in range(steps):
        chosen = np.random.default_rng(number).permutation(len(job.examples))[: 8 - number % 3]
        batch = StepBatch.of(pack(chosen), job.targets[chosen], batch_weights(job.weights[chosen], job.config), 0)
        found.append(step(batch, number, 1.0))
    return [[float(x) for x in pair] for pair in found], {name: p.cpu() for name, p in model.named_parameters()}


def test_batches_of_fixed_shape_train_the_same(encoder, glue_folder, tmp_path):
    config = FinetuningConfig().override(QUICK | NO_DROPOUT)
    job = make_job(glue.read("mrpc", glue_folder), config, load_encoder(encoder), tmp_path, CPU)
    length, size = job.config.sequence_length, job.config.batch_size
    losses, parameters = trained(job, "eager", CPU, lambda chosen: batches.pack(job.examples, chosen))
    static = trained(job, "eager", CPU, lambda chosen: [batches.pack_static(job.examples, chosen, length, size)])
    np.testing.assert_allclose(losses, static[0], rtol=1e-4)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, static[1][name], rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_train_as_eager_steps_do(encoder, glue_folder, tmp_path):
    device = torch.device("cuda")
    config = FinetuningConfig().override(QUICK | NO_DROPOUT | {"finetune.precision": "fp32"})
    job = make_job(glue.read("mrpc", glue_folder), config, load_encoder(encoder), tmp_path, device)
    losses, parameters = trained(job, "eager", device, job.pack, steps=20)
    graph = trained(job, "graph", device, job.pack, steps=20)
    np.testing.assert_allclose(losses, graph[0], rtol=1e-4)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, graph[1][name], rtol=1e-4, atol=2e-5, msg=name)


def test_it_learns(encoder, glue_folder, tmp_path):
    """One word decides the class: a random encoder can learn that, and dropout and order follow the seed."""
    data = write_sst2(tmp_path / "data", train=400, dev=100)
    overrides = QUICK | NO_DROPOUT | {"finetune.epochs": "6", "finetune.learning_rate": "3e-3"}
    found = ef.finetune("sst2", model=encoder, data=data, out=tmp_path / "out", overrides=overrides)
    assert found["sst2"]["median"] > 0.9


def test_a_collapse_is_named(encoder, tmp_path):
    data = write_sst2(tmp_path / "data", train=16)
    lines = [f"{text}\t1" for text, _ in sentences(40)] + ["a false name\t0"]
    (data / "train.tsv").write_text("sentence\tlabel\n" + "\n".join(lines) + "\n")
    overrides = QUICK | {"finetune.epochs": "4", "finetune.learning_rate": "1e-3"}
    found = in_process.run(
        *("finetune", "--task", "sst2", "--model", encoder, "--data", data, "--out", tmp_path / "out"),
        *(word for name, value in overrides.items() for word in (f"--{name}", value)),
    )
    assert found.returncode == 0
    assert "are the class '1'" in found.stderr and "finetune.learning_rate" in found.stderr
    assert "warning" in json.loads((tmp_path / "out" / "results.json").read_text())["sst2"]["runs"][0]


def test_a_loss_that_is_no_number_stops_the_run(encoder, glue_folder, tmp_path):
    overrides = QUICK | {"finetune.learning_rate": "1e30"}
    with pytest.raises(TrainingFailed, match=r"seed-0: the loss became nan .* lower finetune.learning_rate"):
        ef.finetune("sst2", model=encoder, data=glue_folder, out=tmp_path / "out", overrides=overrides)


def test_a_full_disk_keeps_the_finished_seeds(whole, encoder, glue_folder, tmp_path):
    """Files may not grow past a limit, as on a full disk, after the first seed is finished."""
    out = tmp_path / "out"
    shutil.copytree(whole[0], out)
    shutil.rmtree(out / "mrpc" / "seed-1")
    size = (out / "mrpc" / "seed-0" / "model" / "model.safetensors").stat().st_size
    script = (
        "import resource, sys; from electra_fast.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, resource.RLIM_INFINITY))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = [sys.executable, "-c", script, *command(encoder, glue_folder, out)[3:]]
    full = subprocess.run(arguments, capture_output=True, text=True)
    assert full.returncode == 2
    assert len([line for line in full.stderr.splitlines() if "error" in line]) == 1
    assert "seed-1/model: not written" in full.stderr and "run again to resume" in full.stderr
    kept = json.loads((out / "results.json").read_text())
    assert kept["sst2"] == whole[1]["sst2"] and kept["mrpc"]["runs"] == whole[1]["mrpc"]["runs"][:1]
    assert not (out / "mrpc" / "seed-1" / "model").exists()
    ef.finetune("glue", model=encoder, data=glue_folder, out=out, seeds=2, overrides=QUICK)
    assert model_bytes(out) == model_bytes(whole[0])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--task", "sst3"], "'sst3' is not a GLUE task"),
        (["--task", "sst2", "--recipe", "fasst"], "unknown recipe 'fasst'; did you mean fast"),
        (["--task", "sst2", "--seeds", "0"], "seeds = 0"),
        (["--task", "sst2", "--finetune.epoch", "3"], "unknown key finetune.epoch; did you mean finetune.epochs"),
        (["--task", "sst2", "--finetune.sequence_length", "100"], "longer than the 64 positions of the encoder"),
        (["--task", "sst2", "--finetune.both_orders", "true"], "needs pairs of texts"),
        (["--task", "sst2", "--finetune.class_weights", "0=1,2=3"], "'2=3' must be LABEL=WEIGHT"),
        (["--task", "sst2", "--epochs", "3"], "did you mean --finetune.epochs"),
        (["--task", "sst2", "--train", "x.tsv"], "--train is for --task classification or regression"),
        (["--task", "classification"], "needs --train FILE"),
    ],
)
def test_a_mistake_is_one_line(encoder, glue_folder, tmp_path, arguments, message):
    common = ["--model", encoder, "--data", glue_folder, "--out", tmp_path / "out"]
    found = in_process.run("finetune", *common, *arguments)
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1
    assert message in found.stderr


def test_missing_models_and_folders_are_named(glue_folder, encoder, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        ef.finetune("sst2", model=tmp_path / "nowhere", data=glue_folder, out=tmp_path / "out")
    with pytest.raises(InputError, match="needs --data DIR"):
        ef.finetune("sst2", model=encoder, out=tmp_path / "out")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(InputError, match="model_type = 'bert' must be one of electra, modernbert"):
        ef.finetune("sst2", model=tmp_path / "bert", data=glue_folder, out=tmp_path / "out")


@pytest.mark.parametrize("recipe", ["google", "paper", "fast"])
@pytest.mark.parametrize("role", [None, "generator"])
def test_a_run_of_ours_in_every_recipe(whole_run, glue_folder, tmp_path, recipe, role):
    found = ef.finetune(
        "mrpc", model=whole_run, data=glue_folder, out=tmp_path, recipe=recipe, role=role, overrides=QUICK
    )
    assert 0 <= found["mrpc"]["median"] <= 1


def test_own_data_with_a_share_set_aside(encoder, tmp_path):
    path = tmp_path / "reviews.csv"
    rows = [f'"{text}, ""said"" he",{"good" if label else "bad"}' for text, label in sentences(60)]
    path.write_text("review,verdict\n" + "\n".join(rows) + "\n")
    flags = [word for name, value in QUICK.items() for word in (f"--{name}", value)]
    common = ("finetune", "--task", "classification", "--train", path, "--model", encoder, "--out", tmp_path / "out")
    found = in_process.run(*common, "--text", "review", "--label", "verdict", "--json", *flags)
    assert found.returncode == 0, found.stderr
    assert "6 of 60 examples are set aside" in found.stderr
    runs = json.loads(found.stdout)["classification"]["runs"]
    assert {"accuracy", "f1_macro", "matthews"} <= runs[0].keys()
    folder = tmp_path / "out" / "classification" / "seed-0"
    rows = [json.loads(line) for line in (folder / "predictions.dev.jsonl").read_text().splitlines()]
    assert len(rows) == 6 and all(row["scores"].keys() == {"bad", "good"} for row in rows)
    labels = json.loads((folder / "model" / "config.json").read_text())["id2label"]
    assert labels == {"0": "bad", "1": "good"}
