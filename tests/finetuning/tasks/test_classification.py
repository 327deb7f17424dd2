"""Scores of fine-tuned models, compared with scores computed by hand; warnings about collapsed models."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from electra_fast.errors import TrainingFailed
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.task import Split, Task
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.classification import Classification, MultiLabel
from electra_fast.finetuning.tasks.regression import Regression

EMPTY = EncodedExamples(np.zeros(0, int), np.zeros(0, int), np.zeros(3, int), 0, ())
TARGETS = np.array([0, 0, 1, 1, 1, 0])
CLASSES = np.array([0, 1, 1, 1, 0, 0])  # 2 of each right, 1 of each wrong


def task_of(name, kind="classification", metric="accuracy", labels=("0", "1"), scale=1.0):
    return Task(name=name, kind=kind, labels=labels, metric=metric, scale=scale)


def scores(task, targets, outputs):
    return TASK_TYPES[task.kind].metrics(task, targets, outputs)


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


@pytest.mark.parametrize(
    ("kind", "labels", "train", "dev", "expected"),
    [
        ("classification", "abc", [0, 1, 1, 2], [1, 1, 0, 1], {"accuracy": 3 / 4, "f1_macro": 3 / 7, "matthews": 0}),
        ("multi-label", "ab", [[1, 0], [1, 1]], [[1, 0], [0, 1]], {"accuracy": 1 / 2, "f1_micro": 1 / 2}),
        ("regression", "", [1.0, 2, 6], [4.0, 1], {"mean_absolute_error": 3 / 2, "spearman": 0, "pearson": 0}),
    ],
)
def test_majority_baseline_uses_training_labels(kind, labels, train, dev, expected):
    task = task_of("own", kind, labels=tuple(labels))
    dtype = {"regression": float, "multi-label": "f4"}.get(kind, int)
    splits = [
        Split(name="", path=Path(), texts=[("x",)] * len(values), targets=np.array(values, dtype), ids=[])
        for values in (train, dev)
    ]
    baseline = TASK_TYPES[kind].majority(task, *splits)
    assert {name: baseline[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "metric", "targets", "outputs"),
    [
        ("classification", "accuracy", np.array([0, -1, 1]), [[1, 0], [5, 5], [0, 1]]),
        ("multi-label", "f1_micro", np.array([[0, 1], [np.nan] * 2, [1, 0]], np.float32), [[-1, 1], [5, 5], [1, -1]]),
        ("regression", "pearson", np.array([0, np.nan, 1.0]), [[0], [5], [1]]),
    ],
)
def test_unlabeled_examples_are_not_scored(kind, metric, targets, outputs):
    texts = [("x",)] * 3
    ids = ["0", "1", "2"]
    split = Split(name="test", path=Path("test"), texts=texts, targets=targets, ids=ids)
    task = task_of("classification", kind, metric)
    assert TASK_TYPES[kind].scores(task, split, None, np.array(outputs, float), {})[metric] == 1


def test_multi_label_scores_by_hand():
    task = task_of("classification", "multi-label", "f1_micro", tuple("abc"))
    targets = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0]], dtype=np.float32)
    # 2 right, 1 too many, 1 missing; a logit of 0 is not predicted
    outputs = np.array([[2.0, -1, -1], [1, -1, 3], [-1, -2, 0]])
    expected = {"f1_micro": 2 * 2 / (2 * 2 + 1 + 1), "f1_macro": 1 / 3, "accuracy": 2 / 3}
    assert scores(task, targets, outputs) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "more"), [("stsb", {}), ("regression", {"mean_absolute_error": 6 / 4})])
def test_regression_scores_by_hand(name, more):
    task = task_of(name, "regression", "spearman", ())
    expected = {"spearman": 0.8, "pearson": 10 / (5 * 26) ** 0.5} | more
    assert scores(task, np.array([1.0, 2, 3, 4]), np.array([1.0, 4, 3, 8])) == pytest.approx(expected)


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


def test_f1_without_predictions_is_zero():
    """With two classes, F1 is computed for class 1."""
    assert scores(task_of("mrpc"), np.zeros(3, dtype=int), logits([0, 0, 0])) == {"accuracy": 1.0, "f1": 0.0}
    task = task_of("classification", "multi-label", "f1_micro", ("a", "b"))
    assert scores(task, np.zeros((2, 2)), -np.ones((2, 2))) == {"f1_micro": 0.0, "f1_macro": 0.0, "accuracy": 1.0}


def test_nonfinite_outputs_raise():
    outputs = logits(CLASSES)
    outputs[3, 1] = np.nan
    with pytest.raises(TrainingFailed, match=r"^the model's outputs for 1 of 6 examples are not finite: .*rate$"):
        scores(task_of("cola"), TARGETS, outputs)
    with pytest.raises(TrainingFailed, match="1 of 2 examples"):
        scores(task_of("stsb", "regression"), np.zeros(2), np.array([1.0, np.inf]))


def test_collapsed_classifier_is_reported():
    task = task_of("rte", labels=("yes", "no"))
    assert Classification().warning(task, logits([1, 1, 1])).startswith("all 3 predictions are the class 'no': try a l")
    assert Classification().warning(task, logits([1, 0, 1])) is None
    assert Classification().warning(task, logits([1])) is None
    assert MultiLabel().warning(task_of("classification", "multi-label"), -np.ones((3, 2))) is None


def test_collapsed_regression_is_reported():
    task = task_of("stsb", "regression", "spearman", (), scale=5.0)
    outputs = np.array([[2.51], [2.5], [2.52]]) / task.scale
    assert Regression().warning(task, outputs).startswith("all 3 predictions are about 2.51: try a lower")
    assert Regression().warning(task, np.array([[0.4], [0.5], [0.6]])) is None


@pytest.mark.parametrize(("mean", "has_warning"), [(1e6, True), (1e3, False)])
def test_values_too_close_for_single_precision_are_reported(mean, has_warning):
    """Around a million, the spacing is 1/16, more than a thousandth of the deviation."""
    values = mean + np.array([-32.0, 32])
    split = Split(name="train", path=Path(), texts=[("x",)] * 2, targets=values, ids=["0", "1"])
    lines = [*Regression().describe(split, TrainingSet(EMPTY, values, np.ones(2)), FinetuneSection())]
    assert any("single precision has a spacing of 0.0625" in line for line in lines) == has_warning


def test_units_of_values_are_stored_exactly():
    task = replace(task_of("regression", "regression", scale=4.0), shift=1e8)
    method = Regression()
    state = {"head.classifier.weight": torch.tensor([[0.5]]), "head.classifier.bias": torch.tensor([0.25])}
    stored, settings = method.to_units(task, state)
    assert stored["head.classifier.weight"].item() == 2 and settings == {"shift": 1e8 + 1}  # 1e8 in fp32
    stored_task = method.with_units(replace(task, scale=1.0, shift=0.0), stored, settings | {"scale": 4.0})
    assert (stored_task.scale, stored_task.shift) == (4.0, 1e8 + 1)
    for target, bias in ((task, 0.25), (stored_task, 0.0)):
        loaded = method.from_units(target, stored, settings)
        assert [tensor.item() for tensor in loaded.values()] == [0.5, bias]
    assert method.in_units(stored_task, [[0.5]]).item() == 1e8 + 3


def test_first_split_chooses_label_thresholds():
    targets = np.tile(np.eye(2, dtype=np.float32), (300, 1))
    split = Split(name="dev", path=Path(), texts=[("x",)] * 600, targets=targets, ids=[])
    task = task_of("classification", "multi-label", "f1_micro")
    outputs = 2.0 * targets - 4  # all below 0.5
    first = MultiLabel().scores(task, split, None, outputs, {})
    assert (first["f1_micro"], first["f1_micro_at_half"]) == (1, 0) and max(first["thresholds"].values()) < 0.2
    second = MultiLabel().scores(task, split, None, outputs, {"thresholds": {"0": 0.4, "1": 0.1}})
    assert second["f1_macro"] == 0.5 and "thresholds" not in second
