"""The loss scale of fp16: it changes at the right steps, and nothing else changes."""

import shutil

import pytest
import torch
from tiny_run import EXACT, assert_same_run, lines, tiny_config, truncate, weights
from torch import nn

from electra_fast.config.config import OptimizerConfig
from electra_fast.errors import Diverged
from electra_fast.optimizers.optimizer import Optimizer, global_norm
from electra_fast.training import loss_scaling, parallel_step
from electra_fast.training.loss_scaling import INITIAL_SCALE, LossScaler
from electra_fast.training.pretrain import pretrain
from electra_fast.training.run_tensors import split_state

CPU = torch.device("cpu")
# On a CPU, the gradients of weights are fp16 too, so the initial scale is too high.
FP16 = {**EXACT, "train.precision": "fp16"}
GOOD = torch.tensor(1.0)
BAD = torch.tensor(torch.inf)
UNSKIPPED = [False, False]


def assert_same_weights(run, other):
    pairs = zip(weights(run).values(), weights(other).values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_scale_halves_on_overflow_and_grows_back(monkeypatch):
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", 3)
    scaler = LossScaler(CPU)

    def scales(norms):
        return [(float(scaler.adapt(norm)), float(scaler.scale / INITIAL_SCALE)) for norm in norms]

    assert scales([GOOD, BAD, GOOD, GOOD]) == [(0, 1), (1, 0.5), (0, 0.5), (0, 0.5)]
    assert scales([GOOD] * 4) == [(0, 1), (0, 1), (0, 1), (0, 2)]  # after three consecutive good steps
    assert scales([torch.tensor(torch.nan)] * 17)[-1] == (1, 1 / INITIAL_SCALE) and not scaler.has_failed()
    scaler.adapt(BAD)
    assert scaler.has_failed() and float(scaler.scale) == 1
    scales([GOOD] * 100)
    assert float(scaler.scale) == loss_scaling.MAX_SCALE


def test_scaled_training_bitwise_equal_to_unscaled(exact_run, validation_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_step, "loss_scaler", lambda *_: LossScaler(CPU))
    run = tmp_path / "run"
    pretrain(validation_corpus, config=tiny_config(**EXACT), out=run)
    scaling = {"loss_scale": INITIAL_SCALE, "skipped_steps": 0}
    assert lines(run) == [line | scaling for line in lines(exact_run)]
    assert_same_weights(run, exact_run)


@pytest.fixture(scope="module")
def fp16_run(validation_corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("fp16") / "run"
    pretrain(validation_corpus, config=tiny_config(**FP16), out=out)
    return out


def test_overflowing_steps_skipped(fp16_run, exact_run):
    """The other steps train as in fp32, and reported losses are unscaled."""
    records = lines(fp16_run)
    exact = lines(exact_run)
    skipped = [line["skipped_steps"] for line in records]
    assert 0 < sum(skipped) < 8 and records[-1]["loss_scale"] == INITIAL_SCALE / 2 ** sum(skipped)
    assert [line["loss"] for line in records] == pytest.approx([line["loss"] for line in exact], rel=0.03)
    assert records[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=0.01)


def test_resumed_run_restores_scale(fp16_run, validation_corpus, tmp_path):
    run = shutil.copytree(fp16_run, tmp_path / "run")
    truncate(run, 21)
    pretrain(validation_corpus, config=tiny_config(**FP16), out=run)
    assert_same_run(run, fp16_run)


@pytest.mark.slow
def test_ranks_have_equal_scales(fp16_run, server, validation_corpus, tmp_path):
    server.run(2, validation_corpus, tmp_path / "run", **FP16)
    assert lines(tmp_path / "run") == lines(fp16_run)
    assert_same_weights(tmp_path / "run", fp16_run)


def test_split_state_separates_scaler_from_optimizer():
    """Checkpoints of earlier versions also have tensors of a guard against spikes."""
    names = ("exp_avg.x", "loss_scale.scale", "spikes.history")
    optimizer, step = split_state({name: torch.ones(1) for name in names})
    assert (optimizer.keys(), step.keys()) == ({"exp_avg.x"}, {"loss_scale.scale", "spikes.history"})


def test_constant_overflow_ends_run(validation_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_step, "global_norm", lambda _: BAD)
    changes = {"train.precision": "fp16", "train.steps": "17", "train.eval_every": "0", "train.checkpoint_every": "50"}
    with pytest.raises(Diverged, match=r"fp16 even with a loss scale of 1 in steps 17-17 .*; there is no"):
        pretrain(validation_corpus, config=tiny_config(**changes), out=tmp_path / "run")


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_skipped_step_changes_nothing(name):
    rates = {"learning_rate": 0.1, "muon_learning_rate": 0.02}
    config = OptimizerConfig(name=name, bias_correction=True, warmup_steps=0, **rates)
    torch.manual_seed(0)
    initial = {"x.weight": torch.randn(6, 4), "x.bias": torch.randn(5), "x.qkv.weight": torch.randn(12, 4)}
    gradients = [{n: torch.randn_like(p) for n, p in initial.items()} for _ in range(3)]

    def trained(skips):
        named = {n: nn.Parameter(p.clone()) for n, p in initial.items()}
        optimizer = Optimizer(named.items(), config)
        for step, skip in enumerate(skips):
            bad = float("nan") if skip else 0.0
            for n, parameter in named.items():
                parameter.grad = gradients[step][n] * (0 if skip else 1)
            optimizer.set_step_scalars(1.0)
            norm = global_norm(optimizer.gradients().values()) + bad
            before = {n: t.clone() for n, t in {**named, **optimizer.state_dict()}.items() if n != "num_updates"}
            optimizer.step(norm, None if skips is UNSKIPPED else torch.tensor(float(skip)))
            if skip:
                after = {**named, **optimizer.state_dict()}
                assert all(torch.equal(before[n], after[n]) for n in before)
        return {n: p.detach() for n, p in named.items()}

    usual = trained(UNSKIPPED)
    taken = trained([False, False])
    assert all(torch.equal(usual[n], taken[n]) and not torch.equal(usual[n], initial[n]) for n in usual)
    trained([False, True, False])
