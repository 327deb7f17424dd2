"""Reported metrics, compared with their definitions."""

import json
import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from electra_fast.config.config import Config
from electra_fast.files.json_files import JsonLines, read_records
from electra_fast.objectives import objective_of
from electra_fast.training.diagnostics import MIN_STEPS, LastingWarning, warning
from electra_fast.training.evaluate import area_under_curve

# 1000 tokens, 100 masked, 80 replaced; 70 predicted as replaced, 49 of them correctly.
TOTALS = {
    "generator_loss": 400.0,
    "masked_weight": 100.0,
    "generator_correct": 20.0,
    "discriminator_loss": 250.0,
    "tokens": 1000.0,
    "discriminator_correct": 948.0,
    "true_positives": 49.0,
    "predicted_positives": 70.0,
    "replaced": 80.0,
}


def metrics(name="electra", **changes):
    config = Config.preset("small", "google", name).override({"model.vocab_size": 30_522})
    return objective_of(config).metrics(TOTALS | changes)


def test_metrics():
    assert metrics() == {
        "loss": 4.0 + 50 * 0.25,
        "generator_loss": 4.0,
        "discriminator_loss": 0.25,
        "generator_accuracy": 0.2,
        "discriminator_accuracy": 0.948,
        "discriminator_precision": 0.7,
        "discriminator_recall": 49 / 80,
        "replaced_fraction": 0.08,
    }
    assert metrics(predicted_positives=0.0, true_positives=0.0)["discriminator_precision"] == 0


def test_area_under_curve_counts_ordered_pairs():
    random = np.random.default_rng(0)
    logits = random.integers(0, 20, 300).astype(np.float32)  # with ties, which count half
    labels = random.random(300) < 0.2
    positive = logits[labels][:, None]
    negative = logits[~labels][None]
    expected = ((positive > negative) + 0.5 * (positive == negative)).mean()
    assert area_under_curve(logits, labels) == pytest.approx(expected, abs=1e-12)
    assert area_under_curve(logits, labels) == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert area_under_curve(logits, np.zeros(300, bool)) is None
    with pytest.raises(ValueError, match="not finite"):
        area_under_curve(np.where(logits == 3, np.nan, logits), labels)


def test_warnings():
    def warning_of(**changes):
        return warning(metrics(**changes)) or ""

    majority = -(0.08 * math.log(0.08) + 0.92 * math.log(0.92))
    assert majority > 0.25 and not warning_of()
    assert "collapsed" in warning_of(discriminator_loss=1000 * majority * 1.1)
    assert "nearly always right" in warning_of(replaced=5.0)
    assert "if unigram_auc also stays at 0.5, lower" in warning_of(true_positives=0.0, predicted_positives=0.0)
    assert warning(metrics("mlm")) is None
    assert not warning_of(replaced=1000.0)  # if only masked tokens count, all may be replaced at first


@pytest.mark.parametrize(
    ("window", "warmup", "bad_from", "first"),
    [(20, 0, 0, 200), (100, 0, 0, 300), (100, 250, 0, 500), (1, 0, 150, 250), (100, 0, 350, 500), (1000, 0, 0, 3000)],
)
def test_warning_needs_two_windows(window, warmup, bad_from, first):
    """Warnings start after the warmup and 100 steps, and must hold in two windows and over 100 steps."""
    warnings = LastingWarning(10**6)
    bad = metrics(true_positives=0.0, predicted_positives=0.0)
    warned = []
    for step in range(window, 5000, window):
        record = (bad if step > bad_from else metrics()) | {"step": step}
        if warnings.take(record, window, max(MIN_STEPS, warmup)):
            warned.append(step)
    assert warned == [first]
    passing = (
        bad | {"step": step} if step // 100 % 2 else metrics() | {"step": step} for step in range(100, 5000, 100)
    )
    assert not any(warnings.take(record, 100, 0) for record in passing)


def test_json_lines_truncated_to_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (10, 20, 30)) + '{"step": 4')
    with JsonLines(path, last_step=20) as log:
        log.write({"step": 30, "loss": 0.1})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 20, 30]
    assert json.loads(path.read_text().splitlines()[-1])["loss"] == 0.1


@pytest.mark.parametrize(
    "garbage",
    [b"garbage", b'{"step": 20', b'{"loss": 1}', b"[1]", b"\xff\x00", b'{"step": "2"}', b'{"step": 2, "loss": "x"}'],
)
def test_malformed_line_reported_without_truncation(tmp_path, garbage):
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 10}\n\n' + garbage + b'\n{"step": 30}\n{"st'
    path.write_bytes(content)
    for read in (read_records, lambda path: JsonLines(path, last_step=30)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl: line 3: .*must be .*; repair or remove this line$"):
            read(path)
        assert path.read_bytes() == content
    path.write_bytes(content.replace(garbage, b""))
    assert read_records(path) == [{"step": 10}, {"step": 30}]
    assert read_records(tmp_path / "none.jsonl") == []
