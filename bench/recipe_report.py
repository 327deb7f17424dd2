"""What `recipes.py` prints, draws and writes of finished runs."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.atomic_files import replace_file

Result = Mapping[str, Any]
CORRUPTORS = ("network", "unigram")
CRITERION = CORRUPTORS[0]
"""The corruptor whose AUC decides."""


@dataclass(frozen=True)
class Point:
    """The runs of one setting with one budget, a seed each."""

    setting: str
    budget: float
    results: Sequence[Result]

    def mean(self, measure: Callable[[Result], float]) -> float:
        """Over the seeds; NaN where there are none."""
        return statistics.mean(map(measure, self.results)) if self.results else math.nan

    @property
    def finished(self) -> Point:
        """Without the runs that diverged."""
        return Point(self.setting, self.budget, [each for each in self.results if "failed" not in each])


def auc(result: Result, corruptor: str = CRITERION) -> float:
    """AUC of a run; that of chance where it diverged."""
    return 0.5 if "failed" in result else float(result["corrupted_by"][corruptor]["discriminator_auc"])


def score(result: Result) -> float:
    """Mean of the fine-tuned model's tasks."""
    return statistics.mean(result["tasks"].values())


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation."""
    return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def columns(results: Sequence[Result]) -> list[str]:
    """Cells of a table, below `HEADER`."""
    good = [each for each in results if "failed" not in each]
    cells = [spread([auc(each, name) for each in results]) for name in CORRUPTORS]
    for name in ("discriminator_loss", "generator_loss"):
        cells.append(spread([each["corrupted_by"][CRITERION][name] for each in good]) if good else "diverged")
    times = [each["seconds"] for each in good if each["seconds"]]
    taken = f"{statistics.mean(times):.0f}" if times else ""
    scores = [score(each) for each in good if "tasks" in each]
    return [*cells, spread(scores) if scores else "", taken, str(len(results))]


HEADER = [
    "AUC, network",
    "AUC, unigram",
    "discriminator's loss",
    "generator's loss",
    "mean of the tasks",
    "seconds",
    "seeds",
]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def crossing(curve: Sequence[tuple[float, float]], value: float) -> tuple[float, str]:
    """Where a curve first reaches a value: cost, and "" or what bounds it.

    Args:
        curve: (cost, measure) in rising order of the cost.
        value: Of the measure.

    Returns:
        The cost, interpolated in its logarithm, and ""; or the first cost and "at most", where the curve begins higher;
        or the last cost and "more than", where it never gets there.
    """
    (cost_before, before), *rest = curve
    if before >= value:
        return cost_before, "at most" if before > value else ""
    for cost, measure in rest:
        if measure >= value:
            share = (value - before) / (measure - before)
            return math.exp(math.log(cost_before) + share * math.log(cost / cost_before)), ""
        cost_before, before = cost, measure
    return cost_before, "more than"


def advantage(
    ours: Sequence[Point], theirs: Sequence[Point], measure: Callable[[Result], float], cost: Callable[[Point], float]
) -> str:
    """By which factor their cost exceeds ours for what they reach with their largest budget."""
    value, their_cost = theirs[-1].mean(measure), cost(theirs[-1])
    our_cost, bound = crossing([(cost(point), point.mean(measure)) for point in ours], value)
    word = {"": "", "at most": "at least ", "more than": "less than "}[bound]
    return f"{word}{their_cost / our_cost:.2f} times as much ({value:.4f})"


def seconds(point: Point) -> float:
    """Mean processor time of its runs; NaN where it was not taken."""
    timed = [each for each in point.finished.results if each["seconds"]]
    return Point(point.setting, point.budget, timed).mean(lambda result: float(result["seconds"]))


def write_comparison(folder: Path, scale: str, curves: Mapping[str, Sequence[Point]]) -> str:
    """Writes recipes-SCALE-BASELINE.json and .png; returns tables and factors as text.

    `curves` has two sides: the baseline first.
    """
    rows = [
        [side, f"{point.budget:.1e}", point.setting, *columns(point.results)]
        for side, curve in curves.items()
        for point in curve
    ]
    text = markdown(["side", "FLOPs", "setting", *HEADER], rows)
    baseline, ours = curves.values()
    path = folder / f"recipes-{scale}-{next(iter(curves))}.json"
    for name in CORRUPTORS:
        for unit, cost in (("FLOPs", lambda point: point.budget), ("seconds", seconds)):
            text += f"\n{unit} that the baseline takes to its last AUC, {name}: "
            text += advantage(ours, baseline, lambda result, name=name: auc(result, name), cost)
    scored = [[p for p in curve if p.results and all("tasks" in r for r in p.results)] for curve in (ours, baseline)]
    if all(scored):
        text += "\nFLOPs that the baseline takes to its last mean of the tasks: "
        text += advantage(*scored, score, lambda point: point.budget)
    record = {
        side: [{"setting": p.setting, "budget": p.budget, "results": p.results} for p in curve]
        for side, curve in curves.items()
    }
    replace_file(path, json.dumps(record, indent=1) + "\n")
    _draw(path.with_suffix(".png"), scale, curves)
    return text


def _draw(path: Path, scale: str, curves: Mapping[str, Sequence[Point]]) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    drawn: list[tuple[str, Callable[[Result], float]]] = [
        (f"AUC on replacements of the {name}", lambda result, name=name: auc(result, name)) for name in CORRUPTORS
    ]
    drawn.append(("generator's loss, nats", lambda result: float(result["corrupted_by"][CRITERION]["generator_loss"])))
    ticks = sorted({point.budget for curve in curves.values() for point in curve})
    for axis, (title, measure) in zip(axes, drawn, strict=True):
        for side, curve in curves.items():
            budgets, points = [point.budget for point in curve], [point.finished for point in curve]
            axis.plot(budgets, [point.mean(measure) for point in points], marker="o", label=side)
            for point in points:
                axis.plot([point.budget] * len(point.results), list(map(measure, point.results)), "_", color="gray")
        axis.set(xscale="log", xlabel="training TFLOP", title=title)
        axis.set_xticks(ticks, [f"{each / 1e12:.3g}" for each in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"{scale}, mean over seeds; gray: each seed")
    figure.savefig(path, dpi=120)
    plt.close(figure)
