"""The warning about a discriminator that learns nothing while its generator improves, and the AUC behind it."""

import numpy as np
import pytest
from tiny_run import lines, tiny_config

from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.distributed.world import World
from electra_fast.files import checkpoint_folder
from electra_fast.huggingface.export import export, import_
from electra_fast.training import diagnostics, forecast, trainer
from electra_fast.training.diagnostics import stall_warning, verdict
from electra_fast.training.evaluate import evaluate, unigram_entropy
from electra_fast.training.plan import plan
from electra_fast.training.pretrain import pretrain


def evaluations(losses, aucs):
    pairs = enumerate(zip(losses, aucs, strict=True), 1)
    return [{"step": 100 * i, "generator_loss": loss, "unigram_auc": auc} for i, (loss, auc) in pairs]


@pytest.mark.parametrize(
    ("losses", "aucs", "stalls"),
    [
        ((7.0, 6.6, 6.3, 6.1), (0.55, 0.56, 0.55, 0.55), True),
        ((7.0, 6.6, 6.3, 6.1), (0.55, 0.58, 0.61, 0.64), False),  # both learn
        ((6.1, 6.1, 6.1, 6.1), (0.55, 0.55, 0.55, 0.55), False),  # neither does
        ((7.0, 6.6, 6.3), (0.55, 0.55, 0.55), False),  # too early
        ((3.0, 2.9, 2.8, 2.7), (0.97, 0.97, 0.97, 0.97), False),  # nothing left to learn from these replacements
        ((9.0, 7.0, 6.6, 6.3, 6.1), (0.5, 0.7, 0.7, 0.7, 0.7), True),  # it learned before
        ((7.0, 6.6, 6.3, 6.1), (None, None, None, None), False),
        ((None, None, None, None), (0.55, 0.55, 0.55, 0.55), False),
    ],
)
def test_stall_warning(losses, aucs, stalls):
    warning = stall_warning(evaluations(losses, aucs))
    assert (warning is not None) == stalls
    if stalls:
        assert "stalled since step" in warning and f"to {losses[-1]:.3f}" in warning


def test_first_steps_never_stall():
    """These are values of a healthy `tiny`, evaluated every 20 steps: its generator first learns token frequencies."""
    losses = (6.947, 6.422, 6.354, 6.328, 6.313)
    aucs = (0.537, 0.538, 0.533, 0.534, 0.537)
    early = [record | {"step": record["step"] // 5} for record in evaluations(losses, aucs)]
    assert not any(stall_warning(early[:end]) for end in range(6))
    later = [record | {"step": 100 + 2 * record["step"]} for record in early]
    assert [end for end in range(6) if stall_warning(later[:end], 141)] == [5]


# Two runs of `tiny` (bench/recipes.py, 4 TFLOPs), the second without the corrective loss; evaluated 20 times.
LEARNS = (
    "6.21 6.18 6.09 5.76 5.46 5.27 5.12 5.00 4.89 4.83 4.76 4.71 4.67 4.63 4.60 4.55 4.52 4.51 4.49 4.48",
    ".546 .535 .536 .547 .641 .735 .751 .794 .805 .812 .826 .832 .838 .837 .839 .844 .845 .848 .850 .851",
)
STALLS = (
    "6.21 6.18 6.08 5.93 5.84 5.74 5.65 5.55 5.41 5.26 5.12 5.04 4.97 4.88 4.83 4.78 4.74 4.71 4.69 4.68",
    ".536 .538 .532 .531 .535 .543 .535 .543 .550 .555 .557 .557 .559 .560 .557 .551 .560 .560 .561 .561",
)


@pytest.mark.parametrize(("run", "alarms"), [(LEARNS, [4]), (STALLS, [4, 5, 7, 13, 14, 15, 16, 17, 18, 20])])
def test_warnings_in_recorded_runs(run, alarms):
    """Until the first run learns something, it looks like the second."""
    records = evaluations(*(map(float, column.split()) for column in run))
    assert [end for end in range(1, 21) if stall_warning(records[:end])] == alarms


def verdict_lines(recipe="google", entropy=None, changes=(), **metrics):
    config = Config.preset("mini", recipe).override({"train.steps": "350", **dict(changes)}).resolved()
    metrics = {"tokens": 50_000, "unigram_auc": None, "discriminator_auc": None, "encoder_loss": None} | metrics
    return verdict(config, metrics, entropy, 700_000, 5_000_000)


@pytest.mark.parametrize(
    ("metrics", "amount", "measured"),
    [
        ({"unigram_auc": 0.50, "discriminator_auc": 0.7}, "nothing", "AUC 0.500 with replacements drawn"),
        ({"unigram_auc": 0.54, "tokens": 500}, "nothing", "AUC 0.540"),  # as likely by chance
        ({"unigram_auc": 0.54}, "little", "AUC 0.540"),
        ({"discriminator_auc": 0.81}, "", "AUC 0.810 with its own generator's"),
        ({"generator_loss": 6.0, "entropy": 6.0}, "nothing", "generator_loss 6.000 (token frequencies alone give 6.0"),
        ({"generator_loss": 6.0, "encoder_loss": 4.0, "entropy": 6.0}, "", "encoder_loss 4.0"),
    ],
)
def test_verdict(metrics, amount, measured):
    first, *others = verdict_lines(**metrics)
    assert measured in first and (f"has learned {amount} yet" in first if amount else "has learned" not in first)
    assert len(others) == bool(amount)


def test_likely_reasons():
    reasons = verdict_lines(unigram_auc=0.5)[1]
    for reason in ("350 steps, 0.70 M tokens", "--steps 3500", "--recipe modern", "0.0005", "5.00 M tokens"):
        assert reason in reasons
    modern = verdict_lines("modern", unigram_auc=0.5)[1]
    assert "--recipe modern" not in modern and "learning rate" not in modern  # it follows the rule
    for name in ("learning_rate", "muon_learning_rate"):
        other = verdict_lines("modern", changes={f"optimizer.{name}": "0.4"}, unigram_auc=0.5)[1]
        assert "learning rates set by hand: start again without" in other


def test_imported_model_gets_no_advice_for_new_runs(whole_run, validation_corpus, tmp_path, capfd, monkeypatch):
    """`plan` and `pretrain` give all of this advice for a new run."""
    for module, name, value in (
        (forecast, "MIN_LARGE_VOCAB", 1),
        (forecast, "MIN_TOKENS_PER_ENTRY", 10**9),
        (forecast, "MAX_TABLE_SHARE", 0.0),
        (forecast, "MOST_UNKNOWN", -1.0),
        (diagnostics, "MIN_STEPS", 0),
        (trainer, "MIN_STEPS", 0),
        (diagnostics, "_GENERATOR_IMPROVES", -9.0),
        (diagnostics, "_DISCRIMINATOR_STAYS", 9.0),
        (diagnostics, "_LITTLE_AUC", 2.0),
    ):
        monkeypatch.setattr(module, name, value)
    import_(whole_run, out=tmp_path / "imported")
    changes = {"train.steps": "5", "train.eval_every": "1", "train.eval_batches": "1", "optimizer.warmup_steps": "1"}
    heard = {}
    for name, config in (("new", tiny_config(**changes)), ("imported", None)):
        pretrain(validation_corpus, config=config, out=tmp_path / name, overrides=changes)
        result = plan(validation_corpus, config=tmp_path / name / "config.toml", tokens_per_second=64)
        heard[name] = [capfd.readouterr().err, str(result)]
        card = (export(tmp_path / name, out=tmp_path / f"{name}-model").out / "discriminator/README.md").read_text()
        assert ("(`unigram_auc`, not a measure of progress)" in card) == (name == "imported")
    new, imported = (" ".join(messages) for messages in heard.values())
    beginning = ("vocab --size", "prepare with", "has stalled", "start again", "--recipe modern", "add text", " yet:")
    assert [phrase for phrase in beginning if phrase not in new] == []
    assert [phrase for phrase in beginning if phrase in imported] == []
    assert all("are [UNK]; train a vocabulary" in messages for messages in heard["imported"])
    assert "little better than untrained: AUC" in imported and "continue with --steps 50" in imported


def test_verdict_on_imported_model_measures_no_gain():
    config = Config.preset("mini", "modern").resolved()
    metrics = {"tokens": 50_000, "unigram_auc": 0.9}
    (new,), (imported,) = (verdict(config, metrics, None, 1, 1, imported=trained) for trained in (False, True))
    assert imported == f"{new}; this does not measure the gain from adapting"


def test_discriminator_without_loss_stalls(validation_corpus, tmp_path, capfd):
    """And the AUC in training is close to `evaluate`'s, whose replacements follow the counts of all tokens."""
    changes = {"objective.disc_weight": "0", "model.tying": "none", "optimizer.learning_rate": "5e-3"}
    changes |= {"train.steps": "250", "train.eval_every": "50", "train.eval_batches": "0", "model.dropout": "0"}
    pretrain(validation_corpus, config=tiny_config(**changes), out=tmp_path / "run")
    stderr = " ".join(capfd.readouterr().err.split())
    assert stderr.count("has stalled") == 1  # not at step 200, compared with step 50
    assert "step 250: warning: the discriminator has stalled since step 100" in stderr
    record = lines(tmp_path / "run", "evaluations.jsonl")[-1]
    fixed = evaluate(
        tmp_path / "run", Corpus(validation_corpus).holdout, sequence_length=16, batch_size=8, corrupted_by="unigram"
    )
    assert record["unigram_auc"] == pytest.approx(fixed["discriminator_auc"], abs=0.03)
    assert record["unigram_auc"] != record["discriminator_auc"]


def test_no_unigram_auc_without_discriminator(validation_corpus, tmp_path, capfd):
    changes = {"objective.name": "replace-mlm", "train.steps": "2", "train.eval_every": "2", "data.masking": "tokens"}
    changes["optimizer.warmup_steps"] = "1"
    pretrain(validation_corpus, config=tiny_config(**changes), out=tmp_path / "run")
    assert "unigram_auc" not in lines(tmp_path / "run", "evaluations.jsonl")[-1]
    assert "the model has learned nothing yet: " in capfd.readouterr().err


def test_verdict_without_evaluations(validation_corpus, tmp_path, capfd):
    """The verdict uses the validation set, if there is one, and does not change the run."""
    for every in ("0", "2"):
        config = tiny_config(**{"train.steps": "4", "train.eval_every": every, "train.eval_batches": "10"})
        pretrain(validation_corpus, config=config, out=tmp_path / every)
    stderr = capfd.readouterr().err.splitlines()
    start = "warning: the model has learned"
    first, second = (line for line in stderr if line.startswith(start))
    assert first == second and lines(tmp_path / "0") == lines(tmp_path / "2")
    states = [checkpoint_folder.read_state(checkpoint_folder.latest(tmp_path / every)) for every in ("0", "2")]
    assert [state.best_by for state in states] == ["training", "validation"]
    assert states[0].best_loss == lines(tmp_path / "0")[-1]["loss"]
    assert states[1].best_loss == min(line["loss"] for line in lines(tmp_path / "2", "evaluations.jsonl"))


def test_unigram_entropy_of_masked_tokens(validation_corpus):
    """It is close to the entropy of all tokens, from separate counts."""
    counts = Corpus(validation_corpus).token_counts()
    config = tiny_config(**{"data.packing": "best-fit", "model.vocab_size": str(len(counts))})
    frequencies = counts[counts > 0] / counts.sum()
    expected = -(frequencies * np.log(frequencies)).sum()
    entropy = unigram_entropy(str(validation_corpus), config, 0, World())
    assert entropy == pytest.approx(expected, abs=0.1)
