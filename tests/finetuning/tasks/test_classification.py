"""Scores of fine-tuned models against hand-computed values and against scikit-learn and SciPy."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sklearn_metrics
from sklearn.dummy import DummyClassifier

from electra_fast.errors import TrainingFailed
from electra_fast.finetuning.task import Split, Task
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.classification import Classification, MultiLabel
from electra_fast.finetuning.tasks.regression import Regression

TARGETS = np.array([0, 0, 1, 1, 1, 0])
CLASSES = np.array([0, 1, 1, 1, 0, 0])  # 2 of each right, 1 of each wrong


def task_of(name, kind="classification", metric="accuracy", labels=("0", "1"), scale=1.0):
    return Task(name=name, kind=kind, labels=labels, metric=metric, scale=scale)


def scores(task, targets, outputs):
    return TASK_TYPES[task.kind].metrics(task, targets, outputs)


def majority_outputs(task, targets, count):
    return TASK_TYPES[task.kind].majority_outputs(task, targets, count)


def logits(classes, num_classes=2):
    return np.eye(num_classes)[classes] * 3 - 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cola", {"accuracy": 2 / 3, "matthews": 1 / 3}),
        ("mrpc", {"accuracy": 2 / 3, "f1": 2 / 3}),
        ("sst2", {"accuracy": 2 / 3}),
        ("classification", {"accuracy": 2 / 3, "f1_macro": 2 / 3, "matthews": 1 / 3}),
    ],
)
def test_classification_scores_by_hand(name, expected):
    assert scores(task_of(name), TARGETS, logits(CLASSES)) == pytest.approx(expected)


def test_the_majority_scores_as_scikit_learns_dummies():
    rng = np.random.default_rng(0)
    train, dev = rng.choice(4, size=50, p=(0.2, 0.5, 0.2, 0.1)), rng.integers(4, size=30)
    task = task_of("classification", labels=tuple("abcd"))
    found = scores(task, dev, majority_outputs(task, train, len(dev)))
    dummy = DummyClassifier(strategy="most_frequent").fit(train[:, None], train).predict(dev[:, None])
    assert found["accuracy"] == pytest.approx(sklearn_metrics.accuracy_score(dev, dummy))
    assert found["f1_macro"] == pytest.approx(sklearn_metrics.f1_score(dev, dummy, average="macro"))
    task = task_of("regression", "regression", "spearman", ())
    found = scores(task, dev, majority_outputs(task, train, len(dev)))
    assert found["mean_absolute_error"] == pytest.approx(np.abs(dev - train.mean()).mean()) and not found["spearman"]


@pytest.mark.parametrize(
    ("kind", "metric", "targets", "outputs"),
    [
        ("classification", "accuracy", np.array([0, -1, 1]), [[1, 0], [5, 5], [0, 1]]),
        ("multi-label", "f1_micro", np.array([[0, 1], [np.nan] * 2, [1, 0]], np.float32), [[-1, 1], [5, 5], [1, -1]]),
        ("regression", "pearson", np.array([0, np.nan, 1.0]), [[0], [5], [1]]),
    ],
)
def test_examples_without_a_label_do_not_count(kind, metric, targets, outputs):
    texts, ids = [("x",)] * 3, ["0", "1", "2"]
    split = Split(name="test", path=Path("test"), texts=texts, targets=targets, ids=ids)
    task = task_of("classification", kind, metric)
    assert TASK_TYPES[kind].scores(task, split, None, np.array(outputs, float), {})[metric] == 1


def test_many_classes_as_in_scikit_learn():
    rng = np.random.default_rng(1)
    targets, outputs = rng.integers(5, size=200), rng.normal(size=(200, 5))
    result = scores(task_of("classification", labels=tuple("abcde")), targets, outputs)
    classes = outputs.argmax(1)
    assert result["f1_macro"] == pytest.approx(sklearn_metrics.f1_score(targets, classes, average="macro"))
    assert result["matthews"] == pytest.approx(sklearn_metrics.matthews_corrcoef(targets, classes))


def test_multi_label_scores_by_hand():
    task = task_of("classification", "multi-label", "f1_micro", tuple("abc"))
    targets = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=np.float32)
    outputs = np.array([[2.0, -1, -1], [1, -1, 3], [-1, -2, 0]])  # 2 right, 1 too many, 1 missing; 0 counts as no
    expected = {"f1_micro": 2 * 2 / (2 * 2 + 1 + 1), "f1_macro": 1 / 3, "accuracy": 2 / 3}
    assert scores(task, targets, outputs) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "more"), [("stsb", set()), ("regression", {"mean_absolute_error"})])
def test_regression_scores_as_in_scipy(name, more):
    rng = np.random.default_rng(2)
    targets = rng.uniform(0, 5, size=50)
    values = targets + rng.normal(size=50)
    result = scores(task_of(name, "regression", "spearman", ()), targets, values)
    assert result.keys() == {"spearman", "pearson"} | more
    assert result["spearman"] == pytest.approx(stats.spearmanr(targets, values).statistic)
    assert result["pearson"] == pytest.approx(np.corrcoef(targets, values)[0, 1])
    if more:
        assert result["mean_absolute_error"] == pytest.approx(np.abs(targets - values).mean())


@pytest.mark.parametrize("constant", ["targets", "outputs"])
@pytest.mark.parametrize("name", ["classification", "regression"])
def test_undefined_correlations_are_zero(name, constant):
    targets = np.zeros(6, dtype=int) if constant == "targets" else TARGETS
    classes = np.zeros(6, dtype=int) if constant == "outputs" else CLASSES
    result = scores(task_of(name, name), targets, classes * 1.5 if name == "regression" else logits(classes))
    assert {result[key] for key in ("matthews", "spearman", "pearson") if key in result} == {0.0}
    for values in ([3.0], [3.0, 3.0 + 1e-15, 3.0]):  # too few or nearly equal: no warning
        result = scores(task_of("stsb", "regression"), np.arange(len(values)), np.array(values))
        assert all(-1 <= score <= 1 for score in result.values())


def test_nothing_predicted_gives_f1_zero():
    """F1 of a task with two classes is that of class 1."""
    assert scores(task_of("mrpc"), np.zeros(3, dtype=int), logits([0, 0, 0])) == {"accuracy": 1.0, "f1": 0.0}
    task = task_of("classification", "multi-label", "f1_micro", ("a", "b"))
    assert scores(task, np.zeros((2, 2)), -np.ones((2, 2))) == {"f1_micro": 0.0, "f1_macro": 0.0, "accuracy": 1.0}


def test_outputs_that_are_no_numbers_fail():
    outputs = logits(CLASSES)
    outputs[3, 1] = np.nan
    with pytest.raises(TrainingFailed, match=r"^the model's outputs for 1 of 6 examples are not finite: .*rate$"):
        scores(task_of("cola"), TARGETS, outputs)
    with pytest.raises(TrainingFailed, match="1 of 2 examples"):
        scores(task_of("stsb", "regression"), np.zeros(2), np.array([1.0, np.inf]))


def test_a_collapsed_classifier_is_named():
    task = task_of("rte", labels=("yes", "no"))
    assert Classification().warning(task, logits([1, 1, 1])).startswith("all 3 predictions are the class 'no': try a l")
    assert Classification().warning(task, logits([1, 0, 1])) is None
    assert Classification().warning(task, logits([1])) is None
    assert MultiLabel().warning(task_of("classification", "multi-label"), -np.ones((3, 2))) is None


def test_a_collapsed_regression_is_named():
    task = task_of("stsb", "regression", "spearman", (), scale=5.0)
    outputs = np.array([[2.51], [2.5], [2.52]]) / task.scale
    assert Regression().warning(task, outputs).startswith("all 3 predictions are about 2.51: try a lower")
    assert Regression().warning(task, np.array([[0.4], [0.5], [0.6]])) is None
