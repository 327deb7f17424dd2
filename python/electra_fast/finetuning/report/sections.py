"""Sections of a report with their pictures, and the sections for tasks with classes. `report` combines them.

Shapes: n examples, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.finetuning.readers.rows import with_columns
from electra_fast.finetuning.task import Prediction, Split
from electra_fast.training.plots import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_WORST = 50
"""Number of errors that a report lists."""
NUM_BINS = 15
"""Number of bins of equal width for the calibration error (Guo et al., 2017)."""
# Maximum number of named classes in a confusion matrix; with more, a second matrix names the classes with most errors.
MAX_NAMED = 40
_NAME_CHARACTERS = 20

Row = dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Args:
        name: Its key in report.json, and the name of its picture.
        rows: Its content as JSON.
        title: Its title in report.md; without a title, it continues the previous section.
        text: An explanation in report.md.
        draw: Draws its picture on an empty figure.
        shown: The content in report.md, if it differs.
    """

    name: str
    rows: Any
    title: str = ""
    text: str = ""
    draw: Callable[[Figure], None] | None = None
    shown: Any = None


def errors_section(rows: Iterable[Row]) -> Section:
    return Section("errors", list(rows), "Worst errors", "The most confident, or the largest, first.")


def of_classes(labels: Sequence[str], split: Split, answers: Sequence[Prediction]) -> Iterator[Section]:
    """Yields scores by class, confusions, calibration of the predicted class, and the most confident errors."""
    ids = {label: number for number, label in enumerate(labels)}
    gold = np.asarray(split.targets)
    predicted = np.array([ids[answer["label"]] for answer in answers], np.int64)
    confidence = np.array([answer["scores"][answer["label"]] for answer in answers])
    wrong = np.flatnonzero(gold != predicted)
    yield from class_sections(labels, gold, predicted)
    yield _calibration(confidence, gold == predicted)
    yield errors_section(
        example_row(split, row)
        | {"gold": labels[gold[row]], "label": answers[row]["label"], "score": confidence[row].item()}
        | {"gold_score": answers[row]["scores"].get(labels[gold[row]])}
        for row in first_rows(wrong, -confidence[wrong])
    )


def of_labels(labels: Sequence[str], split: Split, answers: Sequence[Prediction]) -> Iterator[Section]:
    """Yields scores by label, confusions, calibration of all labels' probabilities, and the most confident errors."""
    gold_nC = np.asarray(split.targets) > 0
    chosen = [set(answer["labels"]) for answer in answers]
    predicted_nC = np.array([[label in names for label in labels] for names in chosen])
    score_nC = np.array([[answer["scores"][label] for label in labels] for answer in answers])
    confidence_nC = np.where(predicted_nC, score_nC, 1 - score_nC)
    rows, columns = np.nonzero(gold_nC != predicted_nC)
    yield from class_sections(labels, gold_nC, predicted_nC)
    yield _calibration(score_nC.ravel(), gold_nC.ravel())
    yield errors_section(
        example_row(split, rows[error])
        | {"label": labels[columns[error]], "is_gold": bool(gold_nC[rows[error], columns[error]])}
        | {"score": score_nC[rows[error], columns[error]].item()}
        for error in first_rows(np.arange(len(rows)), -confidence_nC[rows, columns])
    )


def first_rows(rows: NDArray[Any], *keys: NDArray[Any]) -> list[int]:
    """Returns the first `NUM_WORST` rows, sorted by the first key, then by the next ones."""
    order = np.lexsort((rows, *reversed(keys)))
    return [int(row) for row in rows[order][:NUM_WORST]]


def example_row(split: Split, row: int) -> Row:
    first, *second = split.texts[row]
    return {"id": split.ids[row], "text": first} | ({"second_text": second[0]} if second else {}) | columns(split, row)


def columns(split: Split, row: int) -> Row:
    return {"columns": with_columns({}, split.columns[row])} if split.columns and split.columns[row] else {}


def class_sections(labels: Sequence[str], gold: NDArray[Any], predicted: NDArray[Any]) -> Iterator[Section]:
    """Yields scores by class, their averages, and confusions.

    `gold` and `predicted` are class ids, int64 [n], or the presence of labels, bool [n, C].
    """
    from sklearn.metrics import multilabel_confusion_matrix, precision_recall_fscore_support

    ids = np.arange(len(labels))
    names = ("precision", "recall", "f1")
    scores_4C = precision_recall_fscore_support(gold, predicted, labels=ids, zero_division=0.0)
    scores_3C = np.array(scores_4C[:3])
    counts_C22 = multilabel_confusion_matrix(gold, predicted, labels=ids)
    correct_C = counts_C22[:, 1, 1]
    support_C = counts_C22[:, 1].sum(1)
    predicted_C = counts_C22[:, :, 1].sum(1)
    by_class = {
        label: dict(zip(names, scores_3C[:, c].tolist(), strict=True))
        | {"support": int(support_C[c]), "predicted": int(predicted_C[c]), "correct": int(correct_C[c])}
        for c, label in enumerate(labels)
    }
    text = "The lowest F1 first; at equal F1 the most frequent class."
    by_f1 = dict(sorted(by_class.items(), key=lambda row: (row[1]["f1"], -row[1]["support"])))
    yield Section("classes", by_class, "Classes", text, shown=by_f1)

    weights = {"macro": support_C + predicted_C > 0, "weighted": support_C}  # as in scikit-learn without `labels`
    averages = {
        name: dict(zip(names, (scores_3C @ weight / max(1, weight.sum())).tolist(), strict=True))
        for name, weight in weights.items()
    }
    text = "Averages over the classes that are annotated or predicted, and weighted by support:"
    yield Section("averages", averages, text=text)
    yield confusion_section(labels, gold, predicted)


def confusion_section(labels: Sequence[str], gold: NDArray[Any], predicted: NDArray[Any]) -> Section:
    """Returns the counts of examples by gold and predicted class; the arguments are the same as in `class_sections`.

    Label A counts as confused with B in an example with A and without B if B is predicted and A is not.
    """
    from sklearn.metrics import confusion_matrix

    if gold.ndim == 1:
        counts_CC = confusion_matrix(gold, predicted, labels=np.arange(len(labels)))
        support_C = counts_CC.sum(1)
    else:
        counts_CC = (gold & ~predicted).T.astype(np.int64) @ (predicted & ~gold).astype(np.int64)
        np.fill_diagonal(counts_CC, (gold & predicted).sum(0))
        support_C = gold.sum(0)
    others = counts_CC - np.diag(counts_CC.diagonal())
    classes, taken_for = np.nonzero(others)
    order = np.argsort(-others[classes, taken_for], kind="stable")
    rows = [
        {"gold": labels[a], "predicted": labels[b], "count": int(others[a, b])}
        | {"share_of_gold": float(others[a, b] / support_C[a])}
        for a, b in zip(classes[order], taken_for[order], strict=True)
    ]
    draw = partial(draw_confusion, labels=labels, counts_CC=counts_CC, support_C=support_C)
    text = "The most frequent first. The picture shows fractions of each gold class."
    return Section("confusion", rows, "Confusion", text, draw if len(labels) > 1 else None)


def _calibration(confidence: NDArray[Any], is_right: NDArray[Any]) -> Section:
    """Returns the expected calibration error and its bins: [0, 1/15], (1/15, 2/15], ..."""
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    rows = [
        {"from": number / NUM_BINS, "to": (number + 1) / NUM_BINS, "count": int(is_in_bin.sum())}
        | {"confidence": float(confidence[is_in_bin].mean()), "accuracy": float(is_right[is_in_bin].mean())}
        for number in range(NUM_BINS)
        if (is_in_bin := bins == number).any()
    ]
    error = sum(row["count"] * abs(row["confidence"] - row["accuracy"]) for row in rows) / len(confidence)
    text = (
        "The expected calibration error is the mean difference between the predicted probability and the fraction that "
        f"is right, over {NUM_BINS} bins of equal width, weighted by their counts (Guo et al., 2017)."
    )
    content = {"expected_calibration_error": float(error), "bins": rows}
    return Section("calibration", content, "Calibration", text, partial(draw_calibration, rows=rows))


def draw_confusion(
    figure: Figure, labels: Sequence[str], counts_CC: NDArray[np.int64], support_C: NDArray[Any]
) -> None:
    """Draws the fraction of each gold class that was predicted as each class; rows are gold classes."""
    num_errors = counts_CC.sum(0) + counts_CC.sum(1) - 2 * counts_CC.diagonal()
    is_large = len(labels) > MAX_NAMED
    size = 9 if is_large else max(4.5, 2.5 + 0.22 * len(labels))
    figure.set_size_inches(2 * size if is_large else size, size)
    axes = figure.subplots(1, 2 if is_large else 1, squeeze=False)[0]
    if not is_large:
        _matrix(axes[0], labels, counts_CC, support_C, np.arange(len(labels)))
        return
    by_support = np.argsort(-support_C, kind="stable")
    _matrix(axes[0], labels, counts_CC, support_C, by_support, has_names=False)
    axes[0].set_title(f"all {len(labels):,} classes, the most frequent first", fontsize=10)
    worst = np.sort(np.argsort(-num_errors, kind="stable")[:MAX_NAMED])
    _matrix(axes[1], labels, counts_CC, support_C, worst)
    axes[1].set_title(f"the {MAX_NAMED} classes with most errors", fontsize=10)


def _matrix(
    axes: Axes,
    labels: Sequence[str],
    counts_CC: NDArray[np.int64],
    support_C: NDArray[Any],
    chosen: NDArray[Any],
    has_names: bool = True,
) -> None:
    from matplotlib.colors import PowerNorm

    counts = counts_CC[np.ix_(chosen, chosen)]
    shares = counts / np.maximum(support_C[chosen, None], 1)
    # The square root of the fraction is the color, so that rare confusions are visible.
    axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    if has_names:
        names = [labels[c][:_NAME_CHARACTERS] + ("…" if len(labels[c]) > _NAME_CHARACTERS else "") for c in chosen]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(len(names)), names, fontsize=7, parse_math=False)
        size = 5 if len(chosen) > 20 else 7
        for row, column in zip(*np.nonzero(counts), strict=True):
            color = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=size, color=color)
    axes.set(xlabel="predicted", ylabel="gold")


def draw_calibration(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws a reliability diagram, and below it the number of predictions per bin."""
    figure.set_size_inches(4.8, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    centers = [(row["from"] + row["to"]) / 2 for row in rows]
    width = 0.95 * (rows[0]["to"] - rows[0]["from"])
    upper.bar(centers, [row["accuracy"] for row in rows], width, color=BLUE, label="accuracy")
    upper.plot((0, 1), (0, 1), "--", color=GREY, label="perfect calibration")
    upper.set(ylabel="fraction that is right")
    upper.legend()
    lower.bar(centers, [row["count"] for row in rows], width, color=GREY)
    lower.set(xlabel="predicted probability", ylabel="count", xlim=(0, 1))  # for both axes
    for axes in (upper, lower):
        axes.grid(alpha=0.3)


def draw_values(figure: Figure, gold: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    """Draws predicted against gold values, and the residuals."""
    figure.set_size_inches(9.6, 4.6)
    left, right = figure.subplots(1, 2)
    ends = (min(gold.min(), values.min()), max(gold.max(), values.max()))
    left.plot(gold, values, ".", color=BLUE, alpha=max(0.1, min(0.8, 300 / len(gold))), markersize=4)
    left.plot(ends, ends, "--", color=GREY)
    left.set(xlabel="gold", ylabel="predicted")
    right.hist(values - gold, bins=40, color=BLUE)
    right.set(xlabel="residual (predicted - gold)", ylabel="count")
    for axes in (left, right):
        axes.grid(alpha=0.3)


def draw_groups(figure: Figure, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draws exact match and F1 of groups of questions, labeled with their sizes."""
    figure.set_size_inches(6.4, 4.0)
    axes = figure.subplots()
    places = np.arange(len(groups))
    for shift, name, color in ((-0.2, "exact_match", BLUE), (0.2, "f1", ORANGE)):
        heights = [group[name] for group in groups.values()]
        axes.bar(places + shift, heights, 0.4, color=color, label=name.replace("_", " "))
    axes.set_xticks(places, [f"{name}\n({group['questions']:,})" for name, group in groups.items()], fontsize=8)
    axes.set(xlabel="length of the annotated answer (questions)", ylim=(0, 1))
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
