"""Class weights, and temperatures and thresholds fitted on validation examples."""

import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.metrics import f1_score, log_loss

from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.readers import own_data
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.classes import choose_thresholds, class_weights, fit_temperature, softmax

LABELS = ("a", "b", "c")
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("text", "counts", "expected", "reason"),
    [
        ("balanced", [70, 29, 1], [1 / 2.1, 1 / 0.87, 1 / 0.03], "balanced; weights from 0.476 ('a') to 33.3 ('c')"),
        ("balanced", [30, 10, 0], [20 / 30, 20 / 10, 20], "balanced; weights from 0.667 ('a') to 2 ('b')"),
        ("balanced", [5, 5, 5], None, "balanced; weights from 1 ('a') to 1 ('a')"),
        ("auto", [50, 46, 4], None, "none, since no class is rare"),
        ("auto", [95, 5, 0], None, "none, since no class is rare"),  # 'c' has no training example
        ("auto", [60, 57, 3], [2 / 3, 40 / 57, 10], "'c' has 3 training examples, under a tenth of the average 40"),
    ],
)
def test_weights_from_class_counts(text, counts, expected, reason):
    weights, note = class_weights(text, LABELS, np.repeat(range(3), counts))
    assert (weights is None) if expected is None else weights.tolist() == pytest.approx(expected)
    assert reason in note


def test_explicit_weights_and_groups():
    targets = np.repeat(range(3), [5, 1, 1])
    groups = {"bc": [1, 2]}
    assert class_weights("bc=3,b=2", LABELS, targets, groups=groups)[0].tolist() == [1, 2, 3]
    for text, message in (
        ("d=1", "'d=1' must be LABEL=WEIGHT with one of a, b, c"),
        ("a=-1", "at least 0"),
        ("x", "auto"),
        ("a=0,b=0,c=0", "no training example has a weight above 0"),
    ):
        with pytest.raises(InputError, match=message):
            class_weights(text, LABELS, targets)


def test_class_weights_are_applied_to_examples(tiny_vocab):
    rows = [{"text": f"value {number}", "label": "ab"[number == 0]} for number in range(30)]
    tables = {name: MemoryTable.of(name, rows) for name in ("train", "dev")}
    kind = TASK_TYPES["classification"]
    config = FinetuneSection(class_weights="auto")
    data = own_data.read("classification", *tables.values(), None)
    training_set = kind.training_set(Tokenizer(tiny_vocab), data.task, data.train, config)
    np.testing.assert_allclose(training_set.weights, [10] + [15 / 29] * 29)
    assert "'b' has 1 training examples" in training_set.notes[0]


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_temperature_of_classes_minimizes_the_loss(factor):
    logits = RNG.normal(size=(2000, 4)) * 2
    targets = np.array([RNG.choice(4, p=row) for row in softmax(logits)])
    temperature = fit_temperature((logits * factor).astype(np.float32), targets)
    expected = minimize(lambda t: log_loss(targets, softmax(logits * factor / t[0])), [1.0], bounds=[(0.05, 20)]).x[0]
    assert temperature == pytest.approx(expected, rel=1e-3) == pytest.approx(factor, rel=0.1)


def test_temperature_of_labels_and_of_perfect_predictions():
    logits = RNG.normal(size=(2000, 3)) * 2
    targets = (RNG.uniform(size=logits.shape) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    assert fit_temperature(logits * 2, targets) == pytest.approx(2, rel=0.1)
    assert fit_temperature(np.eye(3) * 2, np.arange(3)) == 1  # all are right


def test_thresholds_have_nearly_the_best_f1():
    targets = RNG.uniform(size=(3000, 3)) < (0.3, 0.1, 0.5)
    probabilities = 0.15 * targets + RNG.uniform(size=targets.shape) * 0.3
    thresholds = choose_thresholds(probabilities, targets)
    for label in range(3):
        scores = [f1_score(targets[:, label], probabilities[:, label] > cut) for cut in np.linspace(0, 1, 201)]
        score = f1_score(targets[:, label], probabilities[:, label] > thresholds[label])
        assert score == pytest.approx(max(scores), abs=0.01) and score > scores[100] + 0.1


def test_thresholds_are_pulled_towards_a_shared_threshold():
    targets = np.zeros((100, 2))
    targets[:60, 0] = 1
    probabilities = np.where(targets, 0.3, 0.1)  # separated by 0.2
    shared = 1 / (1 + 4 ** (60 / 90))  # the logit of 0.2, with weights of 60 and 30 (for 0.5)
    assert choose_thresholds(probabilities, targets) == pytest.approx(
        [1 / (1 + 4 ** (60 / 90 + 30 / 90 * 60 / 90)), shared]
    )
    assert choose_thresholds(np.full((20, 1), 0.7), np.ones((20, 1)))[0] < 0.5  # all examples have the label
    assert choose_thresholds(np.full((20, 1), 0.7), np.zeros((20, 1))) == [0.5]
