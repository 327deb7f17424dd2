"""The picture of a comparison: its scores with error bars beside the paper's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from electra_fast.reproduction.experiments import Experiment
from electra_fast.training.plots import BLUE, GREEN, GREY, ORANGE

Found = Mapping[str, Any]
"""A row of results.json: `mean`, `sd` and `runs`."""


def draw(path: Path, experiment: Experiment, results: Mapping[str, Any]) -> None:
    """Draws the rows with a score, along their width or one below the other."""
    found = {row["name"]: row for row in results["rows"] if row["mean"] is not None}
    papers = {row["name"]: _published(row["paper"]) for row in results["rows"] if row["paper"] is not None}
    is_double = bool(papers or experiment.published)
    figure = Figure(figsize=(11 if is_double else 7, 4.8), layout="constrained")
    left, *right = figure.subplots(1, 2 if is_double else 1, squeeze=False)[0]
    num_seeds = max((sum("score" in run for run in row["runs"]) for row in results["rows"]), default=0)
    left.set_title(f"Here: {results['preset']}, {results['budget']:.2g} FLOPs, {_seeds(num_seeds)}", fontsize=9)
    for axes in right:
        axes.set_title(f"The paper: {experiment.source}", fontsize=9)
    if experiment.axis:
        _along_width(left, experiment, _lines(experiment, found))
        for row in experiment.rows:
            if not row.width and row.name in found:
                _level(left, row.title, found[row.name])
        for axes in right:
            _along_width(axes, experiment, _published_lines(experiment))
    else:
        for axes, each in zip((left, *right), (found, papers), strict=False):
            _one_below_the_other(axes, experiment, each)
    for axes in (left, *right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(f"{experiment.title}: mean score of {', '.join(results['examples'])}, times 100", fontsize=11)
    figure.savefig(path, dpi=120)


def _published(score: float) -> Found:
    return {"mean": score, "sd": None, "runs": []}


def _published_lines(experiment: Experiment) -> dict[str, dict[int, Found]]:
    lines = experiment.published.items()
    return {group: {width: _published(score) for width, score in points.items()} for group, points in lines}


def _lines(experiment: Experiment, found: Mapping[str, Found]) -> dict[str, dict[int, Found]]:
    """The results by group and width."""
    groups = dict.fromkeys(row.group for row in experiment.rows if row.width)
    return {
        group: {row.width: found[row.name] for row in experiment.rows if row.group == group and row.name in found}
        for group in groups
    }


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds; bars: ± one standard deviation; dots: seeds"


def _one_below_the_other(axes: Axes, experiment: Experiment, found: Mapping[str, Found]) -> None:
    for place, row in enumerate(experiment.rows):
        if row.name not in found:
            axes.text(
                0.02, place, "no number", transform=axes.get_yaxis_transform(), color=GREY, va="center", fontsize=8
            )
            continue
        each = found[row.name]
        scores = _scores(each)
        axes.plot(scores, [place + 0.18] * len(scores), ".", color=GREY, markersize=5)
        axes.errorbar([each["mean"]], [place], xerr=_bars([each]), fmt="o", color=BLUE, capsize=4)
        axes.annotate(
            f"{each['mean']:.1f}", (each["mean"], place), (0, 7), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_yticks(range(len(experiment.rows)), [row.title for row in experiment.rows])
    axes.set_ylim(len(experiment.rows) - 0.5, -0.6)
    axes.margins(x=0.15)
    axes.set_xlabel("score", fontsize=9)
    axes.grid(alpha=0.3, axis="x")


def _along_width(axes: Axes, experiment: Experiment, lines: Mapping[str, Mapping[int, Found]]) -> None:
    # Shifted, so that error bars do not cover each other.
    shifts = [1.015 ** (2 * place - len(lines) + 1) for place in range(len(lines))]
    for (group, points), color, shift in zip(lines.items(), (BLUE, ORANGE), shifts, strict=False):
        widths = [width * shift for width in points]
        means = [each["mean"] for each in points.values()]
        bars = _bars([*points.values()])
        axes.errorbar(widths, means, yerr=bars, fmt="o-", color=color, capsize=4, label=group)
        for width, each in zip(widths, points.values(), strict=True):
            scores = _scores(each)
            axes.plot([width] * len(scores), scores, ".", color=GREY, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({width for points in lines.values() for width in points}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.set_xlabel(experiment.axis, fontsize=9)
    axes.set_ylabel("score", fontsize=9)
    axes.grid(alpha=0.3)


def _level(axes: Axes, title: str, found: Found) -> None:
    """Draws a row without a width as a horizontal line."""
    axes.axhline(found["mean"], color=GREEN, linestyle="--", label=title)
    if found["sd"]:
        axes.axhspan(found["mean"] - found["sd"], found["mean"] + found["sd"], color=GREEN, alpha=0.15, linewidth=0)


def _scores(found: Found) -> list[float]:
    return [run["score"] for run in found["runs"] if "score" in run]


def _bars(found: Sequence[Found]) -> list[float] | None:
    """Lengths of the error bars; None without any."""
    return [one["sd"] or 0.0 for one in found] if any(one["sd"] for one in found) else None
