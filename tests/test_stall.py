"""The alarm for a discriminator that learns nothing while its generator improves, and the AUC that it reads."""

import pytest
from tiny_run import lines, tiny_config

from electra_fast.data.corpus import Corpus
from electra_fast.training.evaluate import evaluate
from electra_fast.training.pretrain import pretrain
from electra_fast.training.stall import stall_warning


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
def test_when_it_warns(losses, aucs, stalls):
    warning = stall_warning(evaluations(losses, aucs))
    assert (warning is not None) == stalls
    if stalls:
        assert "stalled since step" in warning and f"to {losses[-1]:.3f}" in warning


def test_a_discriminator_without_a_loss_stalls(validation_corpus, tmp_path, capfd):
    """And the AUC of an evaluation is that of `evaluate`, on the same text."""
    changes = {"objective.disc_weight": "0", "model.tying": "none", "optimizer.learning_rate": "5e-3"}
    changes |= {"train.steps": "80", "train.eval_every": "20", "train.eval_batches": "0", "model.dropout": "0"}
    pretrain(tiny_config(**changes), data=validation_corpus, out=tmp_path / "run")
    assert "step 80: warning: the discriminator has stalled since step 20" in " ".join(capfd.readouterr().err.split())
    found = lines(tmp_path / "run", "evaluations.jsonl")[-1]
    fixed = evaluate(
        tmp_path / "run",
        Corpus(validation_corpus).holdout,
        sequence_length=16,
        batch_size=8,
        corrupted_by="unigram",
        mlm_examples=0,
    )
    assert found["unigram_auc"] == fixed["discriminator_auc"]
    assert found["unigram_auc"] != found["discriminator_auc"]


@pytest.mark.parametrize("objective", ["mlm", "replace-mlm"])
def test_objectives_without_a_discriminator_have_none(validation_corpus, tmp_path, objective):
    changes = {"objective.name": objective, "train.steps": "2", "train.eval_every": "2", "data.masking": "paper"}
    changes["optimizer.warmup_steps"] = "1"
    pretrain(tiny_config(**changes), data=validation_corpus, out=tmp_path / "run")
    assert "unigram_auc" not in lines(tmp_path / "run", "evaluations.jsonl")[-1]
