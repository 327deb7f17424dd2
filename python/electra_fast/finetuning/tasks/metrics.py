"""Scores of predictions, as GLUE and scikit-learn define them, and the check for a collapsed model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from electra_fast.errors import Diverged
from electra_fast.finetuning.task import Task

# Predictions that vary by less than this share of the targets' scale are constant in all but name.
COLLAPSED_DEVIATION = 0.01
REMEDY = "try a lower finetune.learning_rate, more finetune.epochs, or another seed"


def scores(task: Task, targets: ArrayLike, outputs: ArrayLike) -> dict[str, float]:
    """All scores of a task by name, `task.metric` among them.

    A correlation with constant predictions, which is undefined, counts as 0.

    Args:
        task: The task.
        targets: The targets of a `Split`.
        outputs: Logits [n, classes], logits [n, labels] (multi-label: yes above 0), or values [n] in the data's units.

    Raises:
        Diverged: An output is not finite.
    """
    targets, outputs = np.asarray(targets), finite(outputs)
    if task.kind == "regression":
        return _regression_scores(task, targets, outputs)
    if task.kind == "multi-label":
        return _multi_label_scores(targets, outputs > 0)
    return _classification_scores(task, targets, outputs.argmax(1))


def majority_outputs(task: Task, targets: NDArray[Any], count: int) -> NDArray[np.float64]:
    """Outputs as for `scores` that always give the most frequent class of training targets, or the mean value."""
    if task.kind == "regression":
        return np.full(count, targets.mean())
    sizes = targets.sum(0) if task.kind == "multi-label" else np.bincount(targets, minlength=len(task.labels))
    outputs = np.full((count, len(task.labels)), -1.0)
    outputs[:, sizes.argmax()] = 1
    return outputs


def scores_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The scores of all splits in a seed's result.json; what is text is about them."""
    about = ("seed", "seconds", "splits")
    return {name: each for name, each in result.items() if name not in about and not isinstance(each, str)}


def score_texts(result: Mapping[str, Any], majority: Mapping[str, float]) -> Iterator[str]:
    """Each score of a result for people, with what the most frequent answer would score."""
    for name, value in scores_of(result).items():
        yield f"{name} {value:.4f}" + (f" (majority {majority[name]:.4f})" if name in majority else "")


def collapse(task: Task, outputs: ArrayLike) -> str | None:
    """A line for the user if the model predicts the same for every example, else None; multi-label tasks give None."""
    outputs = finite(outputs)
    if len(outputs) < 2 or task.kind == "multi-label":
        return None
    if task.kind == "regression":
        if outputs.std() >= COLLAPSED_DEVIATION * task.scale:
            return None
        return f"all {len(outputs):,} predictions are about {outputs.mean():.4g}: {REMEDY}"
    classes = outputs.argmax(1)
    if (classes != classes[0]).any():
        return None
    return f"all {len(outputs):,} predictions are the class {task.labels[classes[0]]!r}: {REMEDY}"


def finite(outputs: ArrayLike) -> NDArray[np.float64]:
    """The outputs as float64; raises Diverged if one is NaN or infinite."""
    values = np.asarray(outputs, dtype=np.float64)
    num_bad = int((~np.isfinite(values.reshape(len(values), -1))).any(1).sum())
    if num_bad:
        raise Diverged(
            f"the model's outputs for {num_bad:,} of {len(values):,} examples are not finite: "
            "try a lower finetune.learning_rate"
        )
    return values


def _classification_scores(task: Task, targets: NDArray[Any], classes: NDArray[np.intp]) -> dict[str, float]:
    result = {"accuracy": float(accuracy_score(targets, classes))}
    if task.name in ("mrpc", "qqp"):
        result["f1"] = float(f1_score(targets, classes, zero_division=0.0))
    if task.name == "classification":
        result["f1_macro"] = float(f1_score(targets, classes, average="macro", zero_division=0.0))
    if task.name in ("cola", "classification"):
        result["matthews"] = _correlation(matthews_corrcoef, targets, classes)
    return result


def _multi_label_scores(targets: NDArray[Any], predicted: NDArray[np.bool_]) -> dict[str, float]:
    truth = targets > 0
    return {
        "f1_micro": float(f1_score(truth, predicted, average="micro", zero_division=0.0)),
        "f1_macro": float(f1_score(truth, predicted, average="macro", zero_division=0.0)),
        "accuracy": float((truth == predicted).all(1).mean()),
    }


def _regression_scores(task: Task, targets: NDArray[Any], values: NDArray[np.float64]) -> dict[str, float]:
    result = {
        "spearman": _correlation(lambda *pair: spearmanr(*pair).statistic, targets, values),
        "pearson": _correlation(lambda *pair: pearsonr(*pair).statistic, targets, values),
    }
    if task.name == "regression":
        result["mean_absolute_error"] = float(np.abs(targets - values).mean())
    return result


def _correlation(function: Callable[..., float], targets: NDArray[Any], values: NDArray[Any]) -> float:
    if len(values) < 2 or np.ptp(targets) == 0 or np.ptp(values) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that are nearly constant
        coefficient = float(function(targets, values))
    return coefficient if np.isfinite(coefficient) else 0.0
