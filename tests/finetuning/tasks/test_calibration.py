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


def test_thresholds_have_nearly_the_best_f1():
    targets = RNG.uniform(size=(3000, 3)) < (0.3, 0.1, 0.5)
    probabilities = 0.15 * targets + RNG.uniform(size=targets.shape) * 0.3
    found = choose_thresholds(probabilities, targets)
    for label in range(3):
        scores = [f1_score(targets[:, label], probabilities[:, label] > cut) for cut in np.linspace(0, 1, 201)]
        mine = f1_score(targets[:, label], probabilities[:, label] > found[label])
        assert mine == pytest.approx(max(scores), abs=0.01) and mine > scores[100] + 0.1


def test_a_threshold_is_drawn_towards_that_of_all_labels_and_that_towards_a_half():
    targets = np.zeros((100, 2))
    targets[:60, 0] = 1
    probabilities = np.where(targets, 0.3, 0.1)  # 0.2 tells them apart
    own = 1 / (1 + 4 ** (60 / 90))  # the logit of 0.2, with a weight of 60 beside 30
    assert choose_thresholds(probabilities, targets) == pytest.approx(
        [1 / (1 + 4 ** (60 / 90 + 30 / 90 * 60 / 90)), own]
    )
    assert choose_thresholds(np.full((20, 1), 0.7), np.ones((20, 1)))[0] < 0.5  # all have it
    assert choose_thresholds(np.full((20, 1), 0.7), np.zeros((20, 1))) == [0.5]
