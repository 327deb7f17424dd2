"""Training runs as users start them: complete, killed, evaluated, and with mistakes."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tiny_run import STEPS, assert_same_run, lines, tiny_config, weights

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.cli import main
from electra_fast.data.corpus import Corpus
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.mixture import Mixture
from electra_fast.data.prepare import prepare
from electra_fast.data.prepare_report import contents
from electra_fast.errors import InputError, ReportedElsewhere, TrainingFailed
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.huggingface.export import export, import_
from electra_fast.huggingface.folder import read_model
from electra_fast.model.compute import ComputeConfig
from electra_fast.training import trainer
from electra_fast.training.evaluate import SEED, evaluate, evaluate_model
from electra_fast.training.pretrain import PretrainResult, pretrain
from electra_fast.training.reporting import words_to_mask


def test_metrics_have_documented_keys(whole_run):
    record = json.loads((whole_run / "metrics.jsonl").read_text().splitlines()[0])
    promised = (
        "step loss generator_loss discriminator_loss generator_accuracy discriminator_accuracy discriminator_precision "
        "discriminator_recall replaced_fraction learning_rate grad_norm tokens_per_second mfu seconds tokens "
        "step_seconds step_seconds_longest checkpoint_seconds"
    )
    assert list(record) == promised.split()
    assert 0 < record["step_seconds"] <= record["step_seconds_longest"] < record["seconds"]
    assert [line["step"] for line in lines(whole_run)] == list(range(4, STEPS + 1, 4))
    assert [line["step"] for line in lines(whole_run, "evaluations.jsonl")] == [8, 16, 24]
    assert lines(whole_run)[-1]["loss"] < lines(whole_run)[0]["loss"]
    assert checkpoint_folder.steps(whole_run) == [21, 24]
    facts = json.loads((whole_run / "environment.jsonl").read_text())
    assert facts["torch"] == torch.__version__ and facts["attention"] == "sdpa"


RANKS = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "x"}


@pytest.mark.parametrize(
    ("corpus", "options", "message"),
    [
        (ef.Config(), {}, "the first argument is the corpus; pass the configuration as config="),
        ("own.toml", {}, "own.toml: must be the folder of a corpus; pass a configuration with --config"),
        (
            ["shards:1", "own.toml:2"],
            {},
            "own.toml: must be the folder of a corpus; pass a configuration with --config",
        ),
        ("shards", {"device": "gpu"}, "device = 'gpu': must be auto, cpu, cuda or cuda:N"),
        ("shards", {"device": "cuda:99"}, "device = 'cuda:99': this machine has "),
        ("shards", {"device": "cuda:0", "ranks": RANKS}, "each rank chooses its GPU"),
        ("shards", {"device": "cuda:0", "ranks": RANKS | {"RANK": "1"}}, None),
    ],
)
def test_invalid_arguments_refused_before_run_exists(
    corpus, options, message, validation_corpus, tmp_path, monkeypatch
):
    for name, value in options.pop("ranks", {"WORLD_SIZE": ""}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    argument = validation_corpus if corpus == "shards" else corpus
    with pytest.raises(InputError if message else ReportedElsewhere, match=message):
        pretrain(argument, config=tiny_config(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_only_first_rank_prints_result(monkeypatch, capsys):
    result = PretrainResult(Path("run"), 3, is_finished=False)
    monkeypatch.setattr("electra_fast.training.pretrain.pretrain", lambda *_, **__: result)
    for name, value in (RANKS | {"MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    for rank, printed in (("0", "run: step 3, stopped by train.max_minutes; the same call resumes\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        assert main(["pretrain", "shards"]) == 75 and capsys.readouterr().out == printed


def test_seed_changes_losses(whole_run, validation_corpus, tmp_path):
    pretrain(validation_corpus, config=tiny_config(**{"train.seed": "1"}), out=tmp_path / "run")
    assert lines(tmp_path / "run")[0]["loss"] != lines(whole_run)[0]["loss"]


def test_resume_after_sigkill(server, whole_run, validation_corpus, tmp_path):
    """Killed before the first checkpoint, while a checkpoint is written, and after a log line without a checkpoint."""
    out = tmp_path / "run"
    for step, resumed in ((2, []), (9, []), (20, [6, 9]), (STEPS, [15, 18])):
        fault = {"ELECTRA_FAST_FAULT": f"kill@{step}/0"}
        (output,) = server.wait(server.start(1, validation_corpus, out, fault), 0 if step == STEPS else -signal.SIGKILL)
        assert not resumed or any(f"resumes at step {start} of {STEPS}" in output for start in resumed), output
    assert_same_run(out, whole_run)


@pytest.mark.parametrize(
    ("text", "size", "whole_words", "spans"),
    [
        ("the broken tokens of longer words", 40, "", ""),
        ("中文的文字之间没有空格所以分词是一个问题", 60, "100.0% of the tokens are whole words .* span", ""),
        ("ข้าวเช้าทุกวันที่บ้านของฉันมีแมวสี่ตัว ฉัน", 60, "of more than 10 tokens, .* tokens", "of more than 10 tokens, .* tokens"),
    ],
)
def test_warning_if_word_masking_has_no_effect(tmp_path, text, size, whole_words, spans):
    """Each Chinese character is a word. Thai has no spaces, so its words exceed the budget of masked tokens."""
    ef.vocab(iter([text]), out=tmp_path / "vocab.txt", size=size, progress=False)
    prepare(iter([f"{text}\n" * 9]), vocab=tmp_path, out=tmp_path / "shards", progress=False)
    for masking, expected in [("whole-word", whole_words), ("span", spans)]:
        changes = {"data.masking": masking, "data.corpus": str(tmp_path / "shards"), "data.sequence_length": "64"}
        config = tiny_config(**changes)
        warnings = list(words_to_mask(config, Mixture(config.data.corpus)))
        assert len(warnings) == (expected != "") and all(re.search(expected, line) for line in warnings), warnings


def test_warning_about_unknown_tokens_at_start(tmp_path, capfd):
    """Unknown tokens are easy to predict, so the metrics of such a run look good."""
    vocab = tmp_path / "vocab.txt"
    ef.vocab(iter(["the broken tokens of longer words"] * 9), out=vocab, size=40, progress=False)
    text = "the broken tokens of longer words " * 9
    for name, more, is_unknown in [("known", "", False), ("unknown", "的" * 9, True)]:
        data = tmp_path / name
        out = tmp_path / f"{name}-run"
        prepare(iter([f"{text}{more}"] * 40), vocab=vocab, out=data, progress=False)
        for steps, is_new in [("2", True), ("3", False)]:
            config = tiny_config(**{"train.steps": steps, "train.eval_every": "0", "optimizer.warmup_steps": "1"})
            pretrain(data, config=config, out=out)
            lines = [line for line in capfd.readouterr().err.splitlines() if "of the tokens are [UNK]" in line]
            assert len(lines) == (is_unknown and is_new)
            assert all(line.startswith(f"warning: {name}: ") for line in lines)
        assert ("[UNK]" in (out / "warnings.jsonl").read_text()) == is_unknown


def test_slow_steps_reported_once(validation_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "expected_seconds", lambda *_: 1e-6)
    pretrain(validation_corpus, config=tiny_config(**{"train.steps": "12"}), out=tmp_path / "run")
    (record,) = (line for line in lines(tmp_path / "run", "warnings.jsonl") if " when kernels were " in line["message"])
    assert record["step"] == 8


def test_tokens_dropped_by_packing_reported(tiny_corpus, tmp_path, capsys):
    """The number matches the rows. It is reported only at a run's start, and only for the packing that drops tokens."""
    num_kept = 0
    for rows in BatchLoader(tiny_corpus, sequence_length=16, batch_size=8, seed=0, packing="examples", epochs=1):
        batch = to_torch(rows)
        cls_and_sep = (batch["input_ids"] == 2) | (batch["input_ids"] == 3)
        num_kept += int(((batch["segment_ids"] > 0) & ~cls_and_sep).sum())
    num_tokens = Corpus(tiny_corpus).num_tokens
    config = tiny_config(**{"train.steps": "2", "train.checkpoint_every": "1"})
    pretrain(tiny_corpus, config=config, out=tmp_path / "run")
    assert 0 < num_kept < num_tokens
    num_dropped = num_tokens - num_kept
    fraction = num_dropped / num_tokens
    expected = f'data.packing = "examples" drops {num_dropped:,} of {num_tokens:,} tokens ({fraction:.1%}) '
    assert f"{expected}in rows of 16; --data.packing best-fit keeps them all" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    pretrain(tiny_corpus, config=config, out=tmp_path / "run")
    pretrain(tiny_corpus, config=config.override({"data.packing": "best-fit"}), out=tmp_path / "other")
    assert "drops" not in capsys.readouterr().err


def test_evaluate_passes_once_over_validation_set(whole_run, validation_corpus):
    figures = evaluate(whole_run, validation_corpus)
    validation = contents(validation_corpus / "holdout", "examples", 16, seed=SEED)
    # Each token that the packing keeps counts once, plus two or three special tokens per example.
    assert figures["rows"] == validation.rows
    assert figures["tokens"] - validation.tokens in range(2 * validation.rows, 3 * validation.rows)
    assert figures == evaluate(whole_run, validation_corpus)
    assert 0 < figures["discriminator_auc"] < 1
    assert figures == evaluate(checkpoint_folder.latest(whole_run), validation_corpus / "holdout")


@pytest.mark.process
def test_padded_table_trains_resumes_and_exports(validation_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("electra_fast.training.parallel_step.choose_num_processes", lambda *_: 2)
    size = Corpus(validation_corpus).vocab_size + 6
    few = {"model.vocab_size": str(size), "train.steps": "2", "train.eval_every": "0"}
    pretrain(validation_corpus, config=tiny_config(**few), out=tmp_path / "run")
    export(tmp_path / "run", out=tmp_path / "hf")
    import_(tmp_path / "hf", out=tmp_path / "again")
    pretrain(validation_corpus, config=tiny_config(**few | {"model.vocab_size": "0"}), out=tmp_path / "again")
    table = read_model(tmp_path / "again").generator_head.bias
    assert len(table) == size and table[:-6].all() and not table[-6:].any()
    few["model.vocab_size"] = str(size - 7)
    with pytest.raises(ValueError, match=f"model.vocab_size = {size - 7}: must be at least {size - 6}, the size of"):
        pretrain(validation_corpus, config=tiny_config(**few), out=tmp_path / "smaller")


def test_bf16_auc_in_training_matches_evaluate(validation_corpus, tmp_path):
    """All logits are close to the logit of the class frequencies, too close for bf16 to distinguish."""
    config = tiny_config("modern", **{"train.steps": "8", "data.packing": "best-fit", "train.precision": "bf16"})
    pretrain(validation_corpus, config=config, out=tmp_path / "run")
    model = read_model(tmp_path / "run")
    with torch.no_grad():
        model.discriminator_head.classifier.weight.mul_(1e-3)
        model.discriminator_head.classifier.bias.fill_(-2.0)
    checkpoint.save(tmp_path / "run", model, None, TrainState(step=8), keep=1)
    validation = Corpus(validation_corpus).holdout
    figures = evaluate_model(model, validation, model.config, ComputeConfig("sdpa", torch.bfloat16))
    expected = evaluate(tmp_path / "run", validation_corpus)
    assert expected["discriminator_auc"] > 0.55
    assert figures["discriminator_auc"] == pytest.approx(expected["discriminator_auc"], abs=0.01)


def test_nan_reported_and_not_saved(validation_corpus, tmp_path):
    hot = {"optimizer.learning_rate": "1e30", "optimizer.warmup_steps": "0", "train.checkpoint_every": "1"}
    with pytest.raises(TrainingFailed, match=r"became nan or infinite in steps \d+-\d+; step-\d+ is the last good"):
        pretrain(validation_corpus, config=tiny_config(**hot), out=tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())
