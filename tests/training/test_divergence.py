"""Diverged runs end before they overwrite good checkpoints, healthy runs do not; going back to a checkpoint."""

import contextlib
import json
import math
import random
import shutil
from dataclasses import asdict

import pytest
import torch
from in_process import run as cli
from tiny_run import TINY, assert_same_run, lines, tiny_config
from variants import VARIANTS

from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.errors import Diverged
from electra_fast.files import checkpoint_folder
from electra_fast.files.checkpoint_folder import LossHistory, TrainState
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives import OBJECTIVES, objective_of
from electra_fast.training.diagnostics import has_exploded, lost_learning, recovery_advice
from electra_fast.training.evaluate import evaluate_model
from electra_fast.training.pretrain import pretrain


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("google", name) for name in (*OBJECTIVES, "corrective", "contrastive", "unigram")] + [("modern", "electra")],
)
def test_untrained_loss_near_uniform_predictions(recipe, name, validation_corpus):
    """And a run counts as exploded only far above this loss, whatever metrics may be negative."""
    changes = {"objective.corrective_weight": "0"} if "electra" not in name else {}
    vocab_size = Corpus(validation_corpus).vocab_size
    config = tiny_config(recipe, **(changes | VARIANTS[name] | {"model.vocab_size": str(vocab_size)}))
    model = Electra(config)
    compute = ComputeConfig("sdpa", torch.float32)
    if model.proposal is not None and config.generator.kind == "unigram":
        model.proposal.set_counts(torch.ones(vocab_size))
    for objective in {stage.objective for stage in objective_of(config).stages()}:
        metrics = evaluate_model(model, validation_corpus, config, compute, 1, objective)
        answers = objective.uniform_metrics()
        uniform = objective.comparable_loss(answers)
        assert 0.8 * uniform < objective.comparable_loss(metrics) < 1.35 * uniform
        for key in objective.lowered_losses:
            assert not metrics.get(key) or 0.8 * answers[key] < metrics[key] < 1.35 * answers[key]
        assert not has_exploded(objective, metrics)
        losses = {key: 4 * value for key, value in metrics.items() if key.endswith("loss") and value is not None}
        assert has_exploded(objective, metrics | losses) and has_exploded(
            objective, metrics | dict.fromkeys(losses, math.nan)
        )


def first_loss(losses, window=100, name="electra"):
    """Returns the step at which `lost_learning` reports the losses of generator and discriminator, or None."""
    config = Config.preset("small", "paper").override({"model.vocab_size": 30_522})
    objective = objective_of(config.with_objective(name))
    history = LossHistory()
    for step in range(window, 3000, window):
        metrics = dict(zip(("generator_loss", "discriminator_loss"), losses(step), strict=True))
        if lost_learning(history, objective, metrics, window):
            return step
        history = LossHistory(**json.loads(json.dumps(asdict(history))))  # as after a resume
    return None


def after(step, before, then):
    return lambda now: before if now <= step else then


LEARNED = (2.5, 0.15)
LOST = (7.2, 0.41)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (after(1000, LEARNED, LOST), 1200),
        (after(1000, LEARNED, LEARNED), None),
        (after(1000, LEARNED, (2.4, 0.41)), None),  # the generator learns, and the discriminator falls behind
        (after(1000, LEARNED, (7.2, 0.16)), None),
        (after(1000, (6.5, 0.35), (7.2, 0.41)), None),  # there was little to lose
        (lambda step: LOST if 1000 < step <= 1100 else LEARNED, None),  # it recovers
    ],
)
def test_lost_learning_detected(losses, expected):
    assert first_loss(losses) == expected
    draw = random.Random(0)
    noisy = lambda step: [value * math.exp(draw.gauss(0, 0.4)) for value in losses(step)]  # noqa: E731
    close = first_loss(noisy, window=1)  # a line for each step, with the noise of a tiny batch
    assert (close is None) == (expected is None) and (close is None or abs(close - expected) <= 100)


def test_adversarial_generator_never_counts_as_lost():
    assert first_loss(after(1000, LEARNED, LOST), name="adversarial") is None


DIVERGES = {"optimizer.learning_rate": "5", "train.steps": "48"}


def test_exploded_run_keeps_checkpoints_and_goes_back(whole_run, validation_corpus, tmp_path):
    out = shutil.copytree(whole_run, tmp_path / "run")
    before = {path.name for path in (out / "checkpoints").iterdir()}
    flags = [f"--{name}={value}" for name, value in (TINY | DIVERGES).items()]
    command = ["pretrain", validation_corpus, "--preset", "tiny", "--recipe", "google", "--out", out, *flags]
    for _ in range(2):  # with the same result when repeated
        done = cli(*command, "--allow-changes")
        assert done.returncode == 2 and {path.name for path in (out / "checkpoints").iterdir()} == before
    (stderr,) = [line for line in done.stderr.splitlines() if "error" in line]
    loss = min(line["loss"] for line in lines(out, "evaluations.jsonl"))
    assert "the loss rose to" in stderr and f"step-24 is the best checkpoint (validation loss {loss:.4g})" in stderr
    assert f"electra-fast pretrain --out {out} --from-step 24 --optimizer.learning_rate 0.001" in stderr
    words = stderr.split("electra-fast ")[-1].split()
    done = cli(*words)
    assert done.returncode == 0 and "finished" in done.stderr
    assert Config.load(out / "config.toml").optimizer.learning_rate == 1e-3
    assert lines(out)[-1]["loss"] < 1.1 * loss


def test_advice_lowers_learning_rates_to_rule(tmp_path):
    """If the learning rate is a hundred times too high, half of it would diverge again."""
    config = Config.preset("tiny", "modern").override({"train.steps": "2500", "optimizer.learning_rate": "0.4"})
    advice = recovery_advice(tmp_path, TrainState(), config.resolved())
    assert advice == "there is no checkpoint yet; start again with --optimizer.learning_rate 0.004 or a longer warmup"
    advice = recovery_advice(tmp_path, TrainState(), Config.preset("tiny", "modern").resolved())
    assert "--optimizer.learning_rate 0.002 --optimizer.muon_learning_rate 0.0056" in advice
    advice = recovery_advice(tmp_path, TrainState(), Config.preset("tiny", "google"))
    assert "--optimizer.learning_rate 0.00025 or" in advice


@pytest.mark.parametrize(("rate", "ends"), [pytest.param("0.03", False, marks=pytest.mark.slow), ("5", True)])
def test_early_explosion_without_warmup_tolerated(validation_corpus, tmp_path, rate, ends):
    """Adam without bias correction overshoots and recovers. Checkpoints saved before that do not count as good."""
    changes = {"optimizer.learning_rate": rate, "optimizer.warmup_steps": "0", "train.steps": "120"}
    config = tiny_config(**changes, **{"train.checkpoint_every": "20", "train.eval_every": "0", "train.log_every": "2"})
    with pytest.raises(Diverged) if ends else contextlib.nullcontext():
        pretrain(validation_corpus, config=config, out=tmp_path / "run")
    assert max(line["loss"] for line in lines(tmp_path / "run")[:10]) > 83  # twice the loss of uniform predictions
    state = checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / "run"))
    assert state.step == (100 if ends else 120)
    assert state.best_step is None if ends else state.best_step > 20  # the exact step differs between processors


def test_diverged_run_continues_without_stop_on_divergence(whole_run, validation_corpus, tmp_path):
    out = shutil.copytree(whole_run, tmp_path / "run")
    config = tiny_config(**DIVERGES, **{"train.stop_on_divergence": "false", "train.keep_checkpoints": "1"})
    assert pretrain(validation_corpus, config=config, out=out, allow_changes=True).is_finished
    assert checkpoint_folder.steps(out) == [24, 48]  # the best is still there


class TestGoingBack:
    @pytest.fixture
    def out(self, whole_run, tmp_path):
        return shutil.copytree(whole_run, tmp_path / "run")

    def test_equals_run_stopped_at_that_step(self, whole_run, out):
        """Later steps have no effect, even if the run is killed before the first new checkpoint."""
        more = {"train.steps": 27, "train.keep_checkpoints": 9, "optimizer.beta1": 0.5}
        flags = [f"--{name}={value}" for name, value in more.items()]
        assert cli("pretrain", "--out", out, *flags, "--allow-changes").returncode == 0
        assert checkpoint_folder.steps(out) == [21, 24, 27] and (out / "changes.jsonl").read_text()
        again = ("pretrain", "--out", out, "--train.steps", 24)
        done = cli(*again, "--from-step", "step-21", "--train.max_minutes", 1e-9)
        assert done.returncode == 75 and "checkpoint written at step 22 of 24" in done.stderr
        assert "step-27: renamed to left-step-27" in done.stderr
        assert cli(*again, "--train.max_minutes", 0).returncode == 0
        assert_same_run(out, whole_run)
        assert (out / "changes.jsonl").read_text() == "" and checkpoint_folder.steps(out) == [21, 22, 24]

    def test_other_keys_need_allow_changes(self, out):
        other = ("pretrain", "--out", out, "--from-step", "21", "--optimizer.beta1", 0.5)
        before = sorted(out.rglob("*"))
        done = cli(*other)
        assert done.returncode == 2 and "optimizer.beta1 = 0.5, but this run was started with 0.9" in done.stderr
        assert sorted(out.rglob("*")) == before  # and no checkpoint has been renamed
        assert cli(*other, "--allow-changes").returncode == 0
        record = json.loads((out / "changes.jsonl").read_text())
        assert (record["step"], record["changes"]) == (21, {"optimizer.beta1": [0.9, 0.5]})

    def test_restart_does_not_go_back_again(self, out, monkeypatch):
        for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
            with monkeypatch.context() as patch:
                patch.setenv(variable, "1")
                assert cli("pretrain", "--out", out, "--from-step", "step-3").returncode == 0
        assert checkpoint_folder.steps(out) == [21, 24]

    def test_missing_or_damaged_checkpoint_refused(self, out, validation_corpus, tmp_path):
        for flag, message in (
            ("step-20", "no checkpoint step-20; available: step-21, step-24"),
            ("best", "'best': must"),
        ):
            done = cli("pretrain", "--out", out, "--from-step", flag)
            assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
        with pytest.raises(FileNotFoundError, match="no checkpoint step-3; available: none"):
            pretrain(validation_corpus, config=tiny_config(), out=tmp_path / "new", from_step=3)
        (out / "checkpoints/step-21/model.safetensors").write_bytes(b"")
        with pytest.raises(ValueError, match=r"step-21/model.safetensors: damaged"):
            pretrain(validation_corpus, config=tiny_config(), out=out, from_step=21)
        assert checkpoint_folder.steps(out) == [21, 24]
