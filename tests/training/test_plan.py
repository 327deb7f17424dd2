"""The output of `plan`, compared with the run that follows it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import tiny_config

import electra_fast as ef
from electra_fast import cli
from electra_fast.files import checkpoint_folder
from electra_fast.hardware.flops import flops_per_token
from electra_fast.hardware.memory import StepMemory
from electra_fast.model.compute import ComputeConfig
from electra_fast.training import plan as planning
from electra_fast.training.forecast import MAX_EPOCHS, ScalingLaw, layer_weights, size, warnings
from electra_fast.training.plan import Trial, _extrapolate


def advice(config, corpus, *, imported=False):
    mixture = planning.Mixture(corpus)
    resolved = planning.resolved(config.override({"data.corpus": str(corpus)}), mixture)
    return " ".join(warnings(resolved, mixture, size(resolved, mixture, 10**6), imported=imported))


def test_counts_match_run(whole_run, validation_corpus):
    config = ef.Config.load(whole_run / "config.toml")
    result = ef.plan(validation_corpus, config=config, tokens_per_second=64)
    checkpoint = checkpoint_folder.latest(whole_run)
    model = ef.load(checkpoint).model
    assert result["parameters"] == sum(result["parameters_by_part"].values())
    assert result["parameters"] == sum(item.numel() for item in model.parameters())
    written = sum(item.stat().st_size for item in checkpoint.rglob("*") if item.is_file())
    assert 0 < written - result["checkpoint_bytes"] < 0.2 * written  # headers, tokenizer, state
    assert result["tokens"] == config.train.steps * 8 * 16
    assert result["epochs"] == result["tokens"] / ef.Corpus(validation_corpus).num_tokens
    evaluated = 3 * 2 * 8 * 16  # three times two batches
    assert result["seconds"] == pytest.approx((result["tokens"] + 2 / 3 * evaluated) / 64)
    assert not result["is_measured"] and result["memory"]["total"] is None


def test_first_steps_measured(tiny_corpus, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(planning, "measure", lambda *asked: measured.append(asked) or trial_of(asked[0]))
    command = ["plan", str(tiny_corpus), "--preset", "tiny", "--device", "cpu"]
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert cli.main(command) == 0
    same = ef.plan(tiny_corpus, config=ef.Config.preset("tiny"), device="cpu")
    assert capsys.readouterr().out == f"{same}\n" and same == result
    assert result["tokens_per_second"] == 64 * 32 / 0.5
    memory = result["memory"]
    assert memory.pop("total") == 10**9 + result["checkpoint_bytes"] == sum(memory.values())
    assert measured[0][0].model.vocab_size == ef.Corpus(tiny_corpus).vocab_size
    assert [device for _, device in measured] == ["cpu"] * 3


def trial_of(config, seconds=0.5):
    settled = config.override({"train.precision": "fp32", "train.matmul": "default", "train.accumulate": "1"})
    return Trial(settled, "cpu", 2, seconds, None, 10**9, 10**8, False)


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available() or not Path("/proc/self/smaps_rollup").exists(), reason="a CPU's memory")
def test_dry_run_measures_and_shows_first_batch(tiny_corpus, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = ["pretrain", str(tiny_corpus), "--preset", "tiny", "--train.precision", "fp32", "--dry-run"]
    assert cli.main([*command, "--out", "run"]) == 0
    out = capfd.readouterr().out
    for part in ("[optimizer]", "muon_learning_rate = 0.0112", "tokens/s, measured on this cpu", "row 1:", "[MASK]("):
        assert part in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "words", "imported_too"),
    [
        ({"train.steps": "100000"}, "or lower train.steps (to ", True),
        ({"optimizer.warmup_steps": "240"}, "lower optimizer.warmup_steps", True),
        ({"generator.fraction": "1.0"}, "lower generator.fraction", False),
        ({"data.sequence_length": "4096", "model.max_positions": "4096"}, "lower data.sequence_length", True),
        ({"model.vocab_size": "100000"}, "the embedding table has", False),
    ],
)
def test_each_warning_has_one_cause(tiny_corpus, changes, words, imported_too):
    assert words not in advice(tiny_config(), tiny_corpus)
    assert words in advice(tiny_config(**changes), tiny_corpus)
    assert (words in advice(tiny_config(**changes), tiny_corpus, imported=True)) == imported_too


def test_imported_model_may_read_text_more_often(tiny_corpus):
    """And the learning rates of the rule for untrained models are too high for it."""
    config = ef.Config.preset("tiny", "modern")
    per_epoch = ef.Corpus(tiny_corpus).num_tokens / config.train.batch_size / config.data.sequence_length
    for epochs, imported in ((40, False), (100, True)):
        few, many = ({"train.steps": round(per_epoch * epochs * factor)} for factor in (0.9, 1.1))
        assert "add text" not in advice(config.override(few), tiny_corpus, imported=imported)
        assert f"for {epochs} epochs" in advice(config.override(many), tiny_corpus, imported=imported)
    by_hand = config.override({"optimizer.muon_learning_rate": "0.001"})
    texts = [advice(changed, tiny_corpus, imported=imported) for changed in (config, by_hand) for imported in (0, 1)]
    assert ["for untrained models" in text for text in texts] == [False, True, False, False]


def test_warning_beyond_tested_steps_of_rule(tiny_corpus):
    config = ef.Config.preset("tiny", "modern")
    assert "in shorter runs" not in advice(config, tiny_corpus)
    assert "in shorter runs" in advice(config.override({"train.steps": "19001"}), tiny_corpus)
    by_hand = config.override({"train.steps": "19001", "optimizer.muon_learning_rate": "0.001"})
    assert "compare learning rates in shorter runs" not in advice(by_hand, tiny_corpus)
    others = ef.Config.preset("tiny", "google").override({"train.steps": "19001", "optimizer.name": "muon"})
    assert "compare learning rates in shorter runs" not in advice(others, tiny_corpus)


@pytest.mark.parametrize(("flops", "preset"), [(1e10, "tiny"), (5e11, "mini"), (1e13, "small"), (1e15, "base")])
def test_hours_use_scaling_law(tiny_corpus, monkeypatch, flops, preset):
    def measure(config, device):
        assert device == "cpu"
        per_step = flops_per_token(config).total * config.train.batch_size * config.data.sequence_length
        return trial_of(config, per_step / flops)

    monkeypatch.setattr(planning, "measure", measure)
    with monkeypatch.context() as patch:
        patch.setattr(planning, "MAX_EPOCHS", 10**9)
        patch.setattr(planning, "LAW", replace(planning.LAW, epochs=1e9))
        result = ef.plan(tiny_corpus, hours=1, recipe="google", device="cpu")
    proposal = result["proposal"]
    assert proposal["preset"] == preset and " in recipe google" in proposal["assumed"]
    start = f"electra-fast pretrain {tiny_corpus} --preset {preset} --recipe google --device cpu "
    assert proposal["command"].startswith(start)
    assert result["seconds"] <= 3600 and result["learning_rates"].keys() == {"learning_rate"}
    result = ef.plan(tiny_corpus, hours=1, device="cpu")
    assert result["proposal"]["preset"] == "tiny" and result["epochs"] <= MAX_EPOCHS  # limited by the text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "1", "--preset", "mini"], "chooses preset and keys"),
        (["--device", "cpu"], "only used for a measurement"),
        (["--hours", "1"], "corpus"),
        (["--tokens-per-second", "0"], "above 0"),
        (["--gpu-memory", "0"], "above 0"),
        (["--gpus", "2"], "needs gpu_memory"),
        (["--gpu-memory", "24", "--train.precision", "fp32"], "16-bit"),
        (["--preset", "base", "--gpu-memory", "24", "--model.attention", "short"], "remove train.precision"),
        (["--gpus", "3", "--gpu-memory", "24", "--train.reduce", "exact"], "needs 1, 2 or 4 ranks"),
    ],
)
def test_invalid_options_refused(options, message, capsys):
    assert cli.main(["plan", *options]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match='recipe = "google": needs hours'):
        ef.plan(recipe="google")


def test_large_steps_extrapolated_linearly():
    assert _extrapolate([2, 4], [1.0, 1.5], 12) == 3.5
    assert _extrapolate([2, 4], [1.5, 1.0], 12) == 1.0  # more rows never take less time
    assert _extrapolate([8], [2.0], 4) == 2.0


def test_gpu_memory_estimates_run_on_other_machine(monkeypatch):
    config = ef.Config.preset("tiny").override(vocab_size=30522, batch_size=64, precision="bf16")
    compute = ComputeConfig("varlen", torch.bfloat16, kernels=(("*", "kernel"),))
    needed = StepMemory(config, compute, torch.device("cpu"), 4).step(4)
    result = ef.plan(config=config, gpu_memory=needed / 0.9 / 2**30 + 1e-6, gpus=4)
    assert result["memory"]["total"] == needed == sum(result["memory"].values()) - needed
    assert result["micro_batch_rows"] == 4  # 4 micro-batches on each of 4 GPUs
    assert "accumulate = 4" in result["config"] and "micro-batch" not in " ".join(result["warnings"])
    warning = ef.plan(config=config, gpu_memory=0.5)["warnings"][-1]
    assert "a micro-batch of 1 row of 128 tokens needs about 1." in warning and "choose a smaller model" in warning


EXAMPLE = ScalingLaw(floor=0.1, size=0.02, alpha=0.5, data=0.4, beta=1.0, epochs=10.0)


def test_error_follows_power_laws():
    assert EXAMPLE.error(4e6, 2e6) == pytest.approx(0.1 + 0.02 / 2 + 0.4 / 2)
    assert EXAMPLE.error(1e15, 1e15) == pytest.approx(EXAMPLE.floor, abs=1e-4)


def test_repeated_text_loses_value():
    assert EXAMPLE.fresh(5e6, math.inf) == EXAMPLE.fresh(5e6, 5e6) == 5e6
    assert EXAMPLE.fresh(5e6, 4e6) == pytest.approx(4e6 + 40e6 * (1 - math.exp(-0.025)))
    assert EXAMPLE.fresh(1e12, 4e6) == pytest.approx(4e6 * (1 + EXAMPLE.epochs))
    assert EXAMPLE.error(1e6, 5e6, 4e6) > EXAMPLE.error(1e6, 5e6)


@pytest.mark.parametrize("recipe", ["modern", "google"])
def test_size_counts_layer_matrices(recipe):
    config = ef.Config.preset("tiny", recipe).override({"model.vocab_size": "100"})
    named = ef.Electra(config).named_parameters()
    matrices = [matrix for name, matrix in named if name.startswith("discriminator.layers.") and matrix.ndim == 2]
    assert layer_weights(config.model) == sum(matrix.numel() for matrix in matrices)
