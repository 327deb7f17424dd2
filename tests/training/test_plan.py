"""What `plan` says before a run, beside the run."""

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


def told(config, corpus, *, imported=False):
    mixture = planning.Mixture(corpus)
    resolved = planning.resolved(config.override({"data.corpus": str(corpus)}), mixture)
    return " ".join(warnings(resolved, mixture, size(resolved, mixture, 10**6), imported=imported))


def test_counts_are_those_of_the_run(whole_run, validation_corpus):
    config = ef.Config.load(whole_run / "config.toml")
    found = ef.plan(validation_corpus, config=config, tokens_per_second=64)
    checkpoint = checkpoint_folder.latest(whole_run)
    model = ef.load(checkpoint).model
    assert found["parameters"] == sum(found["parameters_by_part"].values())
    assert found["parameters"] == sum(each.numel() for each in model.parameters())
    written = sum(each.stat().st_size for each in checkpoint.rglob("*") if each.is_file())
    assert 0 < written - found["checkpoint_bytes"] < 0.2 * written  # headers, tokenizer, state
    assert found["tokens"] == config.train.steps * 8 * 16
    assert found["epochs"] == found["tokens"] / ef.Corpus(validation_corpus).num_tokens
    evaluated = 3 * 2 * 8 * 16  # three times two batches
    assert found["seconds"] == pytest.approx((found["tokens"] + 2 / 3 * evaluated) / 64)
    assert not found["is_measured"] and found["memory"]["total"] is None


def test_the_first_steps_are_measured(tiny_corpus, monkeypatch, capsys):
    measured = []
    monkeypatch.setattr(planning, "measure", lambda *asked: measured.append(asked) or trial_of(asked[0]))
    command = ["plan", str(tiny_corpus), "--preset", "tiny", "--device", "cpu"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(command) == 0
    same = ef.plan(tiny_corpus, config=ef.Config.preset("tiny"), device="cpu")
    assert capsys.readouterr().out == f"{same}\n" and same == found
    assert found["tokens_per_second"] == 64 * 32 / 0.5
    memory = found["memory"]
    assert memory.pop("total") == 10**9 + found["checkpoint_bytes"] == sum(memory.values())
    assert measured[0][0].model.vocab_size == ef.Corpus(tiny_corpus).vocab_size
    assert [device for _, device in measured] == ["cpu"] * 3


def trial_of(config, seconds=0.5):
    settled = config.override({"train.precision": "fp32", "train.matmul": "default", "train.accumulate": "1"})
    return Trial(settled, "cpu", 2, seconds, None, 10**9, 10**8, False)


@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available() or not Path("/proc/self/smaps_rollup").exists(), reason="a CPU's memory")
def test_dry_run_measures_and_shows_the_first_batch(tiny_corpus, tmp_path, monkeypatch, capfd):
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
        ({"model.vocab_size": "100000"}, "the embedding table is", False),
    ],
)
def test_each_warning_comes_with_its_cause_alone(tiny_corpus, changes, words, imported_too):
    assert words not in told(tiny_config(), tiny_corpus)
    assert words in told(tiny_config(**changes), tiny_corpus)
    assert (words in told(tiny_config(**changes), tiny_corpus, imported=True)) == imported_too


def test_a_trained_model_may_read_its_text_more_often(tiny_corpus):
    """And rates by the rule for beginning are too high for it."""
    config = ef.Config.preset("tiny", "modern")
    per_epoch = ef.Corpus(tiny_corpus).num_tokens / config.train.batch_size / config.data.sequence_length
    for epochs, imported in ((40, False), (100, True)):
        few, many = ({"train.steps": round(per_epoch * epochs * share)} for share in (0.9, 1.1))
        assert "add text" not in told(config.override(few), tiny_corpus, imported=imported)
        assert f"for {epochs} epochs" in told(config.override(many), tiny_corpus, imported=imported)
    by_hand = config.override({"optimizer.muon_learning_rate": "0.001"})
    said = [told(each, tiny_corpus, imported=imported) for each in (config, by_hand) for imported in (False, True)]
    assert ["begin untrained" in each for each in said] == [False, True, False, False]


def test_rates_beyond_the_measured_steps_are_an_extrapolation(tiny_corpus):
    config = ef.Config.preset("tiny", "modern")
    assert "extrapolation" not in told(config, tiny_corpus)
    assert "extrapolation" in told(config.override({"train.steps": "19001"}), tiny_corpus)
    by_hand = config.override({"train.steps": "19001", "optimizer.muon_learning_rate": "0.001"})
    assert "extrapolation" not in told(by_hand, tiny_corpus)
    others = ef.Config.preset("tiny", "google").override({"train.steps": "19001", "optimizer.name": "muon"})
    assert "extrapolation" not in told(others, tiny_corpus)


@pytest.mark.parametrize(("flops", "preset"), [(1e10, "tiny"), (5e11, "mini"), (1e13, "small"), (1e15, "base")])
def test_hours_choose_by_the_scaling_law(tiny_corpus, monkeypatch, flops, preset):
    def measure(config, device):
        assert device == "cpu"
        per_step = flops_per_token(config).total * config.train.batch_size * config.data.sequence_length
        return trial_of(config, per_step / flops)

    monkeypatch.setattr(planning, "measure", measure)
    with monkeypatch.context() as patch:
        patch.setattr(planning, "MAX_EPOCHS", 10**9)
        patch.setattr(planning, "LAW", replace(planning.LAW, epochs=1e9))
        found = ef.plan(tiny_corpus, hours=1, recipe="google", device="cpu")
    proposal = found["proposal"]
    assert proposal["preset"] == preset and " in recipe google as in modern" in proposal["assumed"]
    start = f"electra-fast pretrain {tiny_corpus} --preset {preset} --recipe google --device cpu "
    assert proposal["command"].startswith(start)
    assert found["seconds"] <= 3600 and found["learning_rates"].keys() == {"learning_rate"}
    found = ef.plan(tiny_corpus, hours=1, device="cpu")
    assert found["proposal"]["preset"] == "tiny" and found["epochs"] <= MAX_EPOCHS  # for want of text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hours", "1", "--preset", "mini"], "proposes preset and keys"),
        (["--device", "cpu"], "is for a measurement"),
        (["--hours", "1"], "corpus"),
        (["--tokens-per-second", "0"], "above 0"),
        (["--gpu-memory", "0"], "above 0"),
        (["--gpus", "2"], "needs gpu_memory"),
        (["--gpu-memory", "24", "--train.precision", "fp32"], "16-bit"),
        (["--preset", "base", "--gpu-memory", "24", "--model.attention", "short"], "leave out"),
        (["--gpus", "3", "--gpu-memory", "24", "--train.reduce", "exact"], "needs 1, 2 or 4 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused(options, message, capsys):
    assert cli.main(["plan", *options]) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="that of a proposal, with hours"):
        ef.plan(recipe="google")


def test_large_steps_continue_on_a_line():
    assert _extrapolate([2, 4], [1.0, 1.5], 12) == 3.5
    assert _extrapolate([2, 4], [1.5, 1.0], 12) == 1.0  # noise: more rows never take less
    assert _extrapolate([8], [2.0], 4) == 2.0


def test_memory_of_gpus_elsewhere_is_that_of_a_run_there(monkeypatch):
    config = ef.Config.preset("tiny").override(vocab_size=30522, batch_size=64, precision="bf16")
    compute = ComputeConfig("varlen", torch.bfloat16, kernels=(("*", "kernel"),))
    needed = StepMemory(config, compute, torch.device("cpu"), 4).step(4)
    found = ef.plan(config=config, gpu_memory=needed / 0.9 / 2**30 + 1e-6, gpus=4)
    assert found["memory"]["total"] == needed == sum(found["memory"].values()) - needed
    assert found["micro_batch_rows"] == 4  # 4 micro-batches on each of 4 GPUs
    assert "accumulate = 4" in found["config"] and "micro-batch" not in " ".join(found["warnings"])
    warning = ef.plan(config=config, gpu_memory=0.5)["warnings"][-1]
    assert "a micro-batch of 1 row of 128 tokens needs about 1." in warning and "choose a smaller model" in warning


EXAMPLE = ScalingLaw(floor=0.1, size=0.02, alpha=0.5, data=0.4, beta=1.0, epochs=10.0)


def test_the_error_falls_by_powers_of_weights_and_tokens():
    assert EXAMPLE.error(4e6, 2e6) == pytest.approx(0.1 + 0.02 / 2 + 0.4 / 2)
    assert EXAMPLE.error(1e15, 1e15) == pytest.approx(EXAMPLE.floor, abs=1e-4)


def test_repeated_text_is_worth_less_and_less():
    assert EXAMPLE.fresh(5e6, math.inf) == EXAMPLE.fresh(5e6, 5e6) == 5e6
    assert EXAMPLE.fresh(5e6, 4e6) == pytest.approx(4e6 + 40e6 * (1 - math.exp(-0.025)))
    assert EXAMPLE.fresh(1e12, 4e6) == pytest.approx(4e6 * (1 + EXAMPLE.epochs))
    assert EXAMPLE.error(1e6, 5e6, 4e6) > EXAMPLE.error(1e6, 5e6)


@pytest.mark.parametrize("recipe", ["modern", "google"])
def test_the_size_is_that_of_the_layers_matrices(recipe):
    config = ef.Config.preset("tiny", recipe).override({"model.vocab_size": "100"})
    named = ef.Electra(config).named_parameters()
    matrices = [each for name, each in named if name.startswith("discriminator.layers.") and each.ndim == 2]
    assert layer_weights(config.model) == sum(each.numel() for each in matrices)
