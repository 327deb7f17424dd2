"""Curves of a run: losses, accuracies and AUCs by step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

# Colors that color-blind readers can distinguish (Okabe and Ito, 2008).
BLUE = "#0072B2"
ORANGE = "#D55E00"
GREEN = "#009E73"
AMBER = "#E69F00"
GREY = "#999999"
BLACK = "#000000"

_LOSSES = (
    ("generator_loss", BLUE, "Generator loss (nats per masked token)"),
    ("discriminator_loss", ORANGE, "Discriminator loss (nats per token)"),
    ("encoder_loss", GREEN, "Encoder loss (nats per predicted token)"),
)
_ACCURACIES = {"generator_accuracy": BLUE, "encoder_accuracy": GREEN}
_AUCS = {"discriminator_auc": GREY, "unigram_auc": BLACK}

Record = dict[str, Any]


def draw_curves(run: Path) -> None:
    from matplotlib.figure import Figure

    if read_records(run / "metrics.jsonl"):
        figure = Figure(figsize=(12, 4))
        content = BytesIO()
        plot_curves(figure, run)
        # Constants, since computing the layout takes as long as drawing.
        figure.subplots_adjust(left=0.04, right=0.99, bottom=0.12, top=0.85, wspace=0.15)
        figure.savefig(content, format="png", dpi=100)
        replace_file(run / "curves.png", content.getvalue())


def plot_curves(figure: FigureBase, run: Path) -> None:
    """Plots metrics.jsonl and evaluations.jsonl of a run: a panel per loss, and a panel for accuracies and AUCs."""
    records = read_records(run / "metrics.jsonl")
    validation = read_records(run / "evaluations.jsonl")
    # With stages, a loss may be absent from the first or last records.
    present = {name for record in (*records, *validation) for name, value in record.items() if value is not None}
    losses = [loss for loss in _LOSSES if loss[0] in present] or [("loss", BLACK, "Loss")]
    *panels, right = figure.subplots(1, len(losses) + 1, squeeze=False)[0]
    for axes, (name, color, title) in zip(panels, losses, strict=True):
        _lines(axes, records, validation, {name: color}, title)
    accuracies = {name: color for name, color in _ACCURACIES.items() if name in present}
    aucs = {name: color for name, color in _AUCS.items() if name in present}
    title = ", ".join(name for name, curves in (("Accuracy", accuracies), ("AUC", aucs)) if curves)
    _lines(right, records, [], accuracies, title)
    _lines(right, validation, [], aucs, title, "o--", suffix=", validation")
    right.set_ylim(0, 1)
    figure.suptitle(f"{run.resolve().name}: {records[-1]['step']:,} steps, {records[-1]['tokens']:,} tokens")


def plot_finetuning(
    figure: FigureBase, runs: Mapping[str, Sequence[Record]], metric: str, chosen: Mapping[str, int]
) -> None:
    """Plots the losses and validation scores of fine-tuning runs from metrics.jsonl, with each run's chosen step."""
    left, right = figure.subplots(1, 2)
    for (name, records), color in zip(runs.items(), itertools.cycle((BLUE, ORANGE, GREEN, AMBER, GREY, BLACK))):
        for axes, key, style in ((left, "loss", "-"), (right, metric, "o-")):
            points = [(record["step"], record[key]) for record in records if key in record]
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
    if axes.has_data():
        axes.legend(fontsize=8)
