"""Curves of a run: losses, accuracies and AUCs by step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.files.json_files import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

# Colors that color-blind readers can distinguish (Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, AMBER, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#999999", "#000000"

Record = dict[str, Any]


def plot_curves(figure: FigureBase, run: Path) -> None:
    """Plots metrics.jsonl and evaluations.jsonl of a run with a generator and a discriminator."""
    records, validation = read_records(run / "metrics.jsonl"), read_records(run / "evaluations.jsonl")
    left, middle, right = figure.subplots(1, 3)
    _lines(left, records, validation, {"generator_loss": BLUE}, "Generator loss (nats per masked token)")
    _lines(middle, records, validation, {"discriminator_loss": ORANGE}, "Discriminator loss (nats per token)")
    title, aucs = "Generator accuracy, discriminator AUC", {"discriminator_auc": GREY, "unigram_auc": BLACK}
    _lines(right, records, [], {"generator_accuracy": BLUE}, title)
    _lines(right, validation, [], aucs, title, "o--", suffix=", validation")
    right.set_ylim(0, 1)
    figure.suptitle(f"{run.resolve().name}: {records[-1]['step']:,} steps, {records[-1]['tokens']:,} tokens")


def plot_finetuning(
    figure: FigureBase, runs: Mapping[str, Sequence[Record]], metric: str, chosen: Mapping[str, int]
) -> None:
    """Plots loss and validation score of fine-tunings by name, from metrics.jsonl; marks the chosen step of each."""
    left, right = figure.subplots(1, 2)
    for (name, records), color in zip(runs.items(), itertools.cycle((BLUE, ORANGE, GREEN, AMBER, GREY, BLACK))):
        for axes, key, style in ((left, "loss", "-"), (right, metric, "o-")):
            points = [(each["step"], each[key]) for each in records if key in each]
            axes.plot([x for x, _ in points], [y for _, y in points], style, color=color, label=name, markersize=4)
        best = [point for point in points if point[0] == chosen.get(name)]
        right.plot([x for x, _ in best], [y for _, y in best], "*", color=color, markersize=13)
    _decorate(left, "Training loss")
    _decorate(right, f"Validation {metric.replace('_', ' ')}, ★ the model kept")


def _lines(
    axes: Axes,
    records: list[Record],
    validation: list[Record],
    colors: dict[str, str],
    title: str,
    style: str = "-",
    suffix: str = "",
) -> None:
    for name, color in colors.items():
        for source, mark, label in ((records, style, suffix), (validation, "o", ", validation")):
            points = [(r["step"], r[name]) for r in source if r.get(name) is not None]
            if points:
                text = name.replace("_", " ") + label
                axes.plot(*zip(*points, strict=True), mark, color=color, label=text, markersize=4)
    _decorate(axes, title)


def _decorate(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
