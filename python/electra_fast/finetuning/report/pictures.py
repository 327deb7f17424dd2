"""The pictures of a report. Each function draws on an empty figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.training.plots import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Classes that are named in a confusion matrix; where there are more, a second matrix names those with most errors.
MAX_NAMED = 40
_NAME_CHARACTERS = 20


def draw_confusion(
    figure: Figure, labels: Sequence[str], counts_CC: NDArray[np.int64], support_C: NDArray[Any]
) -> None:
    """Draws the share of each gold class that was taken for each class; rows are gold classes."""
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
    # Rare confusions show too: the square root of the share is the color.
    axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    if has_names:
        names = [labels[c][:_NAME_CHARACTERS] + ("…" if len(labels[c]) > _NAME_CHARACTERS else "") for c in chosen]
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(range(len(names)), names, fontsize=7, parse_math=False)
        size = 5 if len(chosen) > 20 else 7
        for row, column in zip(*np.nonzero(counts), strict=True):
            color = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=size, color=color)
    axes.set_xlabel("predicted", fontsize=9)
    axes.set_ylabel("gold", fontsize=9)


def draw_calibration(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws a reliability diagram over the number of predictions in each bin."""
    figure.set_size_inches(4.8, 5.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    centers = [(row["from"] + row["to"]) / 2 for row in rows]
    width = 0.95 * (rows[0]["to"] - rows[0]["from"])
    upper.bar(centers, [row["accuracy"] for row in rows], width, color=BLUE, label="accuracy")
    upper.plot((0, 1), (0, 1), "--", color=GREY, label="perfect calibration")
    upper.set_ylabel("share that is right", fontsize=9)
    upper.legend(fontsize=8)
    lower.bar(centers, [row["count"] for row in rows], width, color=GREY)
    lower.set_ylabel("count", fontsize=9)
    lower.set_xlabel("predicted probability", fontsize=9)
    for axes in (upper, lower):
        axes.set_xlim(0, 1)
        axes.grid(alpha=0.3)


def draw_values(figure: Figure, gold: NDArray[np.float64], values: NDArray[np.float64]) -> None:
    """Draws predicted against gold values, and the residuals."""
    figure.set_size_inches(9.6, 4.6)
    left, right = figure.subplots(1, 2)
    ends = (min(gold.min(), values.min()), max(gold.max(), values.max()))
    left.plot(gold, values, ".", color=BLUE, alpha=max(0.1, min(0.8, 300 / len(gold))), markersize=4)
    left.plot(ends, ends, "--", color=GREY)
    left.set_xlabel("gold", fontsize=9)
    left.set_ylabel("predicted", fontsize=9)
    right.hist(values - gold, bins=40, color=BLUE)
    right.set_xlabel("residual (predicted - gold)", fontsize=9)
    right.set_ylabel("count", fontsize=9)
    for axes in (left, right):
        axes.grid(alpha=0.3)


def draw_groups(figure: Figure, groups: Mapping[str, Mapping[str, float]]) -> None:
    """Draws exact match and F1 of groups of questions, named with their numbers."""
    figure.set_size_inches(6.4, 4.0)
    axes, places = figure.subplots(), np.arange(len(groups))
    for shift, name, color in ((-0.2, "exact_match", BLUE), (0.2, "f1", ORANGE)):
        heights = [group[name] for group in groups.values()]
        axes.bar(places + shift, heights, 0.4, color=color, label=name.replace("_", " "))
    axes.set_xticks(places, [f"{name}\n({group['questions']:,})" for name, group in groups.items()], fontsize=8)
    axes.set_xlabel("length of the annotated answer (questions)", fontsize=9)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
