"""Plots of a run: its losses, rates and throughput against the steps, as one PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from electra_fast.errors import InputError
from electra_fast.files.json_files import read_records

# Colors that stay apart for color-blind readers (Okabe and Ito, 2008).
BLUE, ORANGE, GREEN, PURPLE, GREY, BLACK = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999", "#000000"

Record = dict[str, Any]


def plot_metrics(run: Path, picture: Path) -> None:
    """Plots a run's metrics.jsonl, and its evaluations.jsonl where it has one, into a PNG file."""
    records, validation = read_records(run / "metrics.jsonl"), read_records(run / "evaluations.jsonl")
    if not records:
        raise InputError(f"{run / 'metrics.jsonl'}: no line yet; train for at least train.log_every steps")
    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    _lines(axes[0, 0], records, validation, {"generator_loss": BLUE}, "Generator loss (nats per masked token)")
    role = "encoder" if any(record.get("encoder_loss") is not None for record in records) else "discriminator"
    _lines(axes[0, 1], records, validation, {f"{role}_loss": ORANGE}, f"{role.title()} loss (nats per token)")
    rates = {
        "discriminator_recall": ORANGE,
        "discriminator_precision": GREEN,
        "generator_accuracy": BLUE,
        "encoder_accuracy": PURPLE,
    }
    _lines(axes[1, 0], records, [], rates, "Rates")
    aucs = {"discriminator_auc": GREY, "unigram_auc": BLACK}
    _lines(axes[1, 0], validation, [], aucs, "Rates", "o--", suffix=", validation")
    axes[1, 0].set_ylim(0, 1)
    _lines(axes[1, 1], records, [], {"tokens_per_second": GREY}, "Tokens per second")
    axes[1, 1].set_ylim(bottom=0)
    figure.suptitle(f"{run.resolve().name}: {records[-1]['step']:,} steps, {records[-1]['tokens']:,} tokens")
    figure.savefig(picture, dpi=110)


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
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelbottom=True)  # of shared axes only the lowest have labels by default
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
