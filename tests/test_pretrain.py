"""Training as a user runs it: killed, resumed, interrupted, misused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from electra_fast import checkpoint
from electra_fast.config import Config
from electra_fast.corpus import Corpus
from electra_fast.data import BatchLoader, to_torch
from electra_fast.electra import Backend
from electra_fast.evaluate import SEED, evaluate, evaluate_model
from electra_fast.export import load
from electra_fast.prepare_report import contents
from electra_fast.pretrain import TrainingFailed, pretrain

STEPS = 24
# Checkpoints fall between log lines, so that a resume has to carry a half-filled interval.
TINY = {
    "model.dropout": "0.1",
    "data.sequence_length": "16",
    "optimizer.learning_rate": "1e-3",
    "optimizer.warmup_steps": "4",
    "train.steps": str(STEPS),
    "train.batch_size": "8",
    "train.accumulate": "2",
    "train.log_every": "4",
    "train.checkpoint_every": "3",
    "train.eval_every": "8",
    "train.eval_batches": "2",
}
TIMES = {"tokens_per_second", "mfu", "seconds", "step_seconds", "step_seconds_longest"}


def tiny_config(recipe="google", **changes):
    return Config.preset("tiny", recipe).override(TINY | changes)


def command(corpus, out, **changes):
    flags = [word for name, value in (TINY | changes).items() for word in (f"--{name}", value)]
    start = [sys.executable, "-m", "electra_fast", "pretrain", "--preset", "tiny"]
    return [*start, "--data", str(corpus), "--out", str(out), *flags]


def lines(run, name="metrics.jsonl"):
    records = [json.loads(line) for line in (run / name).read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in records]


def weights(run):
    return load_file(checkpoint.latest(run) / "model.safetensors")


def assert_same_run(run, other):
    assert lines(run) == lines(other)
    assert lines(run, "evaluations.jsonl") == lines(other, "evaluations.jsonl")
    ours, theirs = weights(run), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, held_out_corpus):
    """An uninterrupted run, which the others have to equal."""
    out = tmp_path_factory.mktemp("whole") / "run"
    result = pretrain(tiny_config(), data=held_out_corpus, out=out)
    assert result.finished and result.step == STEPS
    return out


def test_metrics_have_the_promised_keys(whole_run):
    record = json.loads((whole_run / "metrics.jsonl").read_text().splitlines()[0])
    promised = (
        "step loss generator_loss discriminator_loss generator_accuracy discriminator_accuracy discriminator_precision "
        "discriminator_recall replaced_fraction learning_rate grad_norm tokens_per_second mfu seconds tokens "
        "step_seconds step_seconds_longest"
    )
    assert list(record) == promised.split()
    assert 0 < record["step_seconds"] <= record["step_seconds_longest"] < record["seconds"]
    assert [line["step"] for line in lines(whole_run)] == list(range(4, STEPS + 1, 4))
    assert [line["step"] for line in lines(whole_run, "evaluations.jsonl")] == [8, 16, 24]
    assert lines(whole_run)[-1]["loss"] < lines(whole_run)[0]["loss"]
    assert checkpoint.steps(whole_run) == [21, 24]
    facts = json.loads((whole_run / "environment.jsonl").read_text())
    assert facts["torch"] == torch.__version__ and facts["attention"] == "sdpa"


def test_same_seed_same_run_another_seed_another(whole_run, held_out_corpus, tmp_path):
    pretrain(tiny_config(), data=held_out_corpus, out=tmp_path / "same")
    assert_same_run(tmp_path / "same", whole_run)
    pretrain(tiny_config(**{"train.seed": "1"}), data=held_out_corpus, out=tmp_path / "other")
    assert lines(tmp_path / "other") != lines(whole_run)


def test_accumulation_changes_no_sample(whole_run, held_out_corpus, tmp_path):
    """One micro-batch or two: the same rows and samples (without dropout, whose noise is drawn by micro-batch)."""
    runs = []
    for parts in ("1", "2", "4"):
        exact = {"model.dropout": "0", "model.attention_dropout": "0", "train.precision": "fp32"}
        config = tiny_config(**{"train.accumulate": parts, **exact})
        pretrain(config, data=held_out_corpus, out=tmp_path / parts)
        runs.append(lines(tmp_path / parts))
    for run in runs[1:]:
        assert [line["replaced_fraction"] for line in run[:2]] == [line["replaced_fraction"] for line in runs[0][:2]]
        assert [line["loss"] for line in run] == pytest.approx([line["loss"] for line in runs[0]], rel=1e-3)


@pytest.mark.parametrize("attempt", range(3))
def test_kill_nine_loses_nothing(whole_run, held_out_corpus, tmp_path, attempt):
    """Killed at random moments until it gets through; more rounds with ELECTRA_FAST_KILLS."""
    draw = random.Random(attempt)
    out = tmp_path / "run"
    for _ in range(int(os.environ.get("ELECTRA_FAST_KILLS", "2"))):
        process = subprocess.Popen(command(held_out_corpus, out), stderr=subprocess.DEVNULL)
        goal = draw.randrange(1, STEPS)
        # Wait for work to begin, then for a random while, so that kills fall into steps and saves alike.
        while process.poll() is None and len(list((out / "checkpoints").glob("step-*"))) * 3 < goal % 7:
            time.sleep(0.01)
        time.sleep(draw.random() * 0.3)
        process.kill()
        process.wait()
    subprocess.run(command(held_out_corpus, out), check=True, stderr=subprocess.DEVNULL)
    assert_same_run(out, whole_run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_interruption_saves_and_exits_cleanly(whole_run, held_out_corpus, tmp_path, number):
    out = tmp_path / "run"
    rare = {"train.checkpoint_every": "1000"}  # so the only checkpoint is the interruption's
    process = subprocess.Popen(command(held_out_corpus, out, **rare), stderr=subprocess.PIPE, text=True)
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "interrupted, checkpoint written" in said and "Traceback" not in said
    assert 4 <= checkpoint.steps(out)[0] < STEPS
    subprocess.run(command(held_out_corpus, out), check=True, stderr=subprocess.DEVNULL)
    assert_same_run(out, whole_run)


def test_finished_run_is_left_alone(whole_run, held_out_corpus, tmp_path):
    out = shutil.copytree(whole_run, tmp_path / "run")
    assert pretrain(tiny_config(), data=held_out_corpus, out=out).finished
    assert_same_run(out, whole_run)


@pytest.mark.parametrize(("recipe", "learning_rate"), [("paper", "2e-2"), ("modern", "3e-3")])
def test_recipes_learn(recipe, learning_rate, tiny_corpus, tmp_path):
    changes = {"train.steps": "60", "train.batch_size": "16", "optimizer.learning_rate": learning_rate}
    pretrain(tiny_config(recipe, **changes), data=tiny_corpus, out=tmp_path / "run")
    run = lines(tmp_path / "run")
    assert run[-1]["generator_loss"] < run[0]["generator_loss"] - 0.1
    assert run[-1]["discriminator_loss"] < run[0]["discriminator_loss"]


def test_a_run_says_what_its_packing_drops(tiny_corpus, tmp_path, capsys):
    """As counted from the rows themselves; only where it starts, and only of the packing that drops anything."""
    kept = 0
    for rows in BatchLoader(tiny_corpus, sequence_length=16, batch_size=8, seed=0, packing="google", epochs=1):
        batch = to_torch(rows)
        cls_and_sep = (batch["input_ids"] == 2) | (batch["input_ids"] == 3)
        kept += int(((batch["segment_ids"] > 0) & ~cls_and_sep).sum())
    num_tokens = Corpus(tiny_corpus).num_tokens
    config = tiny_config(**{"train.steps": "2", "train.checkpoint_every": "1"})
    pretrain(config, data=tiny_corpus, out=tmp_path / "run")
    assert 0 < kept < num_tokens
    said = (
        f'data.packing = "google" drops {num_tokens - kept:,} of {num_tokens:,} tokens ({1 - kept / num_tokens:.1%}) '
    )
    assert f"{said}in rows of 16; --data.packing best-fit keeps them all" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    pretrain(config, data=tiny_corpus, out=tmp_path / "run")
    pretrain(config.replace({"data": {"packing": "best-fit"}}), data=tiny_corpus, out=tmp_path / "other")
    assert "drops" not in capsys.readouterr().err


def test_mlm_baseline(held_out_corpus, tmp_path):
    pretrain(tiny_config(**{"objective.name": "mlm"}), data=held_out_corpus, out=tmp_path / "run")
    last = lines(tmp_path / "run")[-1]
    assert last["loss"] == last["generator_loss"] and last["discriminator_loss"] is None
    figures = evaluate(tmp_path / "run", held_out_corpus)
    assert figures["discriminator_auc"] is None and figures["generator_loss"] > 0


def test_evaluate_is_one_pass_over_the_held_out_part(whole_run, held_out_corpus):
    figures = evaluate(whole_run, held_out_corpus)
    held_out = contents(held_out_corpus / "holdout", "google", 16, seed=SEED)
    # Every token that the packing keeps once, and two or three special tokens per example.
    assert figures["rows"] == held_out.rows
    assert figures["tokens"] - held_out.tokens in range(2 * held_out.rows, 3 * held_out.rows)
    assert figures == evaluate(whole_run, held_out_corpus)
    assert 0 < figures["discriminator_auc"] < 1
    assert figures == evaluate(checkpoint.latest(whole_run), held_out_corpus / "holdout")


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_the_auc_while_training_in_bf16_is_the_one_that_evaluate_finds(recipe, held_out_corpus, tmp_path):
    """Where all logits lie about the class shares' and so near each other that bf16 cannot tell them apart."""
    config = tiny_config(recipe, **{"train.steps": "8", "data.packing": "best-fit"})
    pretrain(config, data=held_out_corpus, out=tmp_path / "run")
    model = load(tmp_path / "run")
    with torch.no_grad():
        model.discriminator_head.classifier.weight.mul_(1e-3)
        model.discriminator_head.classifier.bias.fill_(-2.0)
    checkpoint.save(tmp_path / "run", 8, model, None, {"step": 8}, keep=1)
    figures = evaluate_model(model, held_out_corpus, model.config, Backend("sdpa", torch.bfloat16))
    expected = evaluate(tmp_path / "run", held_out_corpus)
    assert expected["discriminator_auc"] > 0.55
    assert figures["discriminator_auc"] == pytest.approx(expected["discriminator_auc"], abs=0.01)


def test_nan_is_said_and_not_saved(held_out_corpus, tmp_path):
    hot = {"optimizer.learning_rate": "1e30", "optimizer.warmup_steps": "0", "train.checkpoint_every": "1"}
    with pytest.raises(TrainingFailed, match=r"became nan or infinite in steps \d+-\d+; step-\d+ is the last good"):
        pretrain(tiny_config(**hot), data=held_out_corpus, out=tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())


class TestRefusals:
    def refused(self, match, config, corpus, out):
        with pytest.raises(ValueError, match=match):
            pretrain(config, data=corpus, out=out)

    def test_another_configuration(self, whole_run, held_out_corpus):
        changed = tiny_config(**{"optimizer.learning_rate": "2e-3"})
        self.refused("optimizer.learning_rate = 0.001, now it is 0.002", changed, held_out_corpus, whole_run)

    def test_another_corpus(self, whole_run, held_out_corpus, tiny_corpus, tmp_path):
        out = shutil.copytree(whole_run, tmp_path / "run")
        self.refused("content hash", tiny_config(), tiny_corpus, out)

    def test_a_folder_of_something_else(self, held_out_corpus, tmp_path):
        (tmp_path / "thesis.tex").write_text("years of work")
        self.refused("thesis.tex but no run", tiny_config(), held_out_corpus, tmp_path)

    def test_a_file(self, held_out_corpus, tmp_path):
        (tmp_path / "notes").write_text("mine")
        self.refused("notes: is a file", tiny_config(), held_out_corpus, tmp_path / "notes")

    def test_another_vocabulary_size(self, held_out_corpus, tmp_path):
        config = tiny_config(**{"model.vocab_size": "77"})
        self.refused("model.vocab_size = 77", config, held_out_corpus, tmp_path / "run")

    def test_a_backend_that_cannot_serve(self, held_out_corpus, tmp_path):
        if torch.cuda.is_available():
            return
        config = tiny_config(**{"model.attention": "varlen"})
        self.refused("varlen.*CUDA", config, held_out_corpus, tmp_path / "run")

    def test_two_at_once(self, held_out_corpus, tmp_path):
        from electra_fast.run import exclusive

        with exclusive(tmp_path / "run"):
            self.refused("another process is training", tiny_config(), held_out_corpus, tmp_path / "run")

    def test_several_ranks(self, held_out_corpus, tmp_path, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        self.refused("one device", tiny_config(), held_out_corpus, tmp_path / "run")
