"""Scores of tags by hand, and against seqeval and scikit-learn."""

import random
import warnings

import numpy as np
import pytest
from seqeval import metrics as seqeval_metrics
from sklearn import metrics as sklearn_metrics

from electra_fast.finetuning.task import Task
from electra_fast.finetuning.tasks.tagging import tag_scores

IOB2 = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def task_of(labels, scheme="IOB2", metric="f1"):
    return Task(name="tagging", kind="tagging", labels=labels, metric=metric, scheme=scheme)


def ids_of(labels, *sentences):
    return [np.array([labels.index(tag) for tag in sentence.split()]) for sentence in sentences]


def seqeval_scores(truth, predicted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {
            "precision": seqeval_metrics.precision_score(truth, predicted, zero_division=0),
            "recall": seqeval_metrics.recall_score(truth, predicted, zero_division=0),
            "f1": seqeval_metrics.f1_score(truth, predicted, zero_division=0),
            "accuracy": seqeval_metrics.accuracy_score(truth, predicted),
        }
        report = seqeval_metrics.classification_report(truth, predicted, zero_division=0, output_dict=True)
    types = {name: row for name, row in report.items() if not name.endswith("avg") and row["support"]}
    return found | {f"f1_{name}": row["f1-score"] for name, row in types.items()}


def test_entities_by_hand():
    targets = ids_of(IOB2, "B-PER I-PER O B-LOC", "B-LOC O")
    predicted = ids_of(IOB2, "B-PER I-PER O B-PER", "I-LOC I-LOC")  # one right, one of another type, one too long
    assert tag_scores(task_of(IOB2), targets, predicted) == pytest.approx(
        {"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3, "accuracy": 3 / 6, "f1_LOC": 0, "f1_PER": 2 / 3}
    )


def test_entities_end_with_their_sentence():
    targets, predicted = ids_of(IOB2, "B-PER I-PER"), ids_of(IOB2, "B-PER", "I-PER")
    assert tag_scores(task_of(IOB2), targets, targets)["f1"] == 1
    assert tag_scores(task_of(IOB2), ids_of(IOB2, "B-PER", "B-PER"), predicted)["f1"] == 1


def test_nothing_found_and_nothing_there():
    nothing, something = ids_of(IOB2, "O O"), ids_of(IOB2, "B-PER O")
    zeros = {"precision": 0, "recall": 0, "f1": 0}
    assert tag_scores(task_of(IOB2), nothing, nothing) == zeros | {"accuracy": 1}
    assert tag_scores(task_of(IOB2), nothing, something) == zeros | {"accuracy": 0.5}
    assert tag_scores(task_of(IOB2), something, nothing) == zeros | {"accuracy": 0.5, "f1_PER": 0}


@pytest.mark.parametrize("prefixes", ["BI", "BIES"])
def test_entities_as_seqeval_scores_them(prefixes):
    rng = random.Random(prefixes)
    labels = ("O", *(f"{prefix}-{type_}" for type_ in "XYZ" for prefix in prefixes))
    for _ in range(30):
        truth = [rng.choices(labels, k=rng.randint(1, 10)) for _ in range(rng.randint(1, 20))]
        predicted = [[tag if rng.random() < 0.7 else rng.choice(labels) for tag in sentence] for sentence in truth]
        ids = [ids_of(labels, *map(" ".join, sentences)) for sentences in (truth, predicted)]
        # A split's targets are an array of arrays.
        targets = np.fromiter(ids[0], dtype=object, count=len(ids[0]))
        found = tag_scores(task_of(labels), targets, ids[1])
        assert found == pytest.approx(seqeval_scores(truth, predicted), rel=1e-12)
        assert all(type(value) is float for value in found.values())


def test_labels_as_scikit_learn_scores_them():
    rng = np.random.default_rng(0)
    targets = [rng.integers(4, size=rng.integers(1, 9)) for _ in range(50)]
    predicted = [np.where(rng.random(len(each)) < 0.6, each, rng.integers(5, size=len(each))) for each in targets]
    found = tag_scores(task_of(tuple("ABCDE"), "none", "accuracy"), targets, predicted)
    truth, outputs = np.concatenate(targets), np.concatenate(predicted)
    assert found == {
        "accuracy": pytest.approx(sklearn_metrics.accuracy_score(truth, outputs)),
        "f1_macro": pytest.approx(sklearn_metrics.f1_score(truth, outputs, average="macro", zero_division=0)),
    }
