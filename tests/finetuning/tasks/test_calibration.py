"""Temperatures and thresholds that are fitted on validation examples."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.metrics import f1_score, log_loss

from electra_fast.finetuning.tasks.calibration import choose_thresholds, fit_temperature
from electra_fast.finetuning.tasks.task_type import softmax

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_the_temperature_of_classes_has_the_lowest_loss(factor):
    logits = RNG.normal(size=(2000, 4)) * 2
    targets = np.array([RNG.choice(4, p=row) for row in softmax(logits)])
    found = fit_temperature((logits * factor).astype(np.float32), targets)
    expected = minimize(lambda t: log_loss(targets, softmax(logits * factor / t[0])), [1.0], bounds=[(0.05, 20)]).x[0]
    assert found == pytest.approx(expected, rel=1e-3) == pytest.approx(factor, rel=0.1)


def test_the_temperature_of_labels_and_of_examples_that_do_not_tell():
    logits = RNG.normal(size=(2000, 3)) * 2
    targets = (RNG.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    assert fit_temperature(logits * 2, targets) == pytest.approx(2, rel=0.1)
    assert fit_temperature(np.eye(3) * 2, np.arange(3)) == 1  # all are right


def test_thresholds_have_the_best_f1():
    targets = RNG.uniform(size=(300, 3)) < (0.3, 0.1, 0.5)
    probabilities = np.clip(0.3 * targets + RNG.uniform(size=targets.shape) * 0.6, 0, 1)
    found = choose_thresholds(probabilities, targets)
    for label in range(3):
        scores = [f1_score(targets[:, label], probabilities[:, label] > cut) for cut in np.linspace(0, 1, 2001)]
        mine = f1_score(targets[:, label], probabilities[:, label] > found[label])
        assert mine == pytest.approx(max(scores)) and mine > scores[1000] + 0.01


def test_rare_labels_share_a_threshold_and_a_clear_one_is_midway():
    targets = np.zeros((100, 2))
    targets[:40, 0] = targets[:9, 1] = 1
    probabilities = np.where(targets, 0.3, 0.1)
    np.testing.assert_allclose(choose_thresholds(probabilities, targets), 0.2)
    probabilities[:, 1] = targets[:, 1]  # too few of its own to choose 0.5
    assert choose_thresholds(probabilities, targets)[1] == pytest.approx(0.2)
    assert choose_thresholds(probabilities[:, 1:], targets[:, 1:]) == [0.5]
    assert choose_thresholds(np.full((20, 1), 0.7), np.ones((20, 1))) == [0.35]  # all have it
