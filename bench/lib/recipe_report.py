"""Tables and pictures of the finished runs of `recipes.py`."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.results import markdown

Result = Mapping[str, Any]
CORRUPTORS = ("network", "unigram")
CRITERION = CORRUPTORS[0]
"""The corruptor whose AUC decides."""


@dataclass(frozen=True)
class Point:
    """The runs of a setting with a budget, one per seed."""

    setting: str
    budget: float
    results: Sequence[Result]

    def mean(self, measure: Callable[[Result], float]) -> float:
        """Mean over the seeds; NaN without any."""
        return statistics.mean(map(measure, self.results)) if self.results else math.nan


def auc(result: Result, corruptor: str = CRITERION) -> float:
    """AUC of a run: 0.5 if it diverged, NaN without a discriminator."""
    if "failed" in result:
        return 0.5
    found = result["corrupted_by"][corruptor]["discriminator_auc"]
    return math.nan if found is None else float(found)


def merit(result: Result) -> float:
    """Measure by which settings are chosen: the AUC, or minus the loss of a masked language model."""
    found = auc(result)
    return -float(result["corrupted_by"][CRITERION]["generator_loss"]) if math.isnan(found) else found


def score(result: Result) -> float:
    """Mean over the tasks in percent; NaN if the run was not fine-tuned."""
    return 100 * statistics.mean(result["tasks"].values()) if "tasks" in result else math.nan


TASKS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE"}
MEASURES: dict[str, Callable[[Result], float]] = {
    "AUC, network": auc,
    "AUC, unigram": lambda result: auc(result, "unigram"),
    "mean of the tasks": score,
}
"""The measures that curves are drawn of."""


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation; empty without values."""
    if not values or any(map(math.isnan, values)):
        return ""
    return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def columns(results: Sequence[Result]) -> list[str]:
    """Cells of a table, below `HEADER`."""
    good = [each for each in results if "failed" not in each]
    cells = [spread([auc(each, name) for each in results]) for name in CORRUPTORS]
    for name in ("discriminator_loss", "generator_loss"):
        losses = [each["corrupted_by"][CRITERION][name] for each in good]
        cells.append("" if None in losses else spread(losses) if good else "diverged")
    times = [each["seconds"] for each in good if each["seconds"]]
    taken = f"{statistics.mean(times):.0f}" if times else ""
    scores = [score(each) for each in good if "tasks" in each]
    return [*cells, spread(scores), taken, str(len(results))]


HEADER = [
    "AUC, network",
    "AUC, unigram",
    "discriminator's loss",
    "generator's loss",
    "mean of the tasks",
    "seconds",
    "seeds",
]


def crossing(curve: Sequence[tuple[float, float]], value: float) -> tuple[float, str]:
    """Finds where a curve first reaches a value.

    Args:
        curve: (cost, measure) in rising order of the cost.
        value: Value of the measure.

    Returns:
        The cost, interpolated in its logarithm, and ""; the first cost and "at most" if the curve starts higher; the
        last cost and "more than" if it never reaches the value.
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


def hour_table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Scores after an hour and before it, the best first: means over seeds, each the median of three fine-tunings."""
    found: dict[tuple[bool, str], list[Result]] = {}
    for line in lines:
        if line["result"].get("tasks_of", "").endswith("-3-seeds"):
            found.setdefault((line["run"]["keys"]["train.steps"] == 1, line["name"]), []).append(line["result"])
    rows = []
    for (is_untrained, name), results in found.items():
        tokens = "untrained" if is_untrained else f"{results[0]['tokens'] / 1e6:.1f} M"
        scores = [statistics.mean(100 * each["tasks"][task] for each in results) for task in TASKS]
        means = [score(each) for each in results]
        mean, spread = statistics.mean(means), f" ({min(means):.1f} to {max(means):.1f})" if len(means) > 1 else ""
        rows.append((is_untrained, -mean, [name, tokens, *(f"{each:.1f}" for each in scores), f"{mean:.1f}{spread}"]))
    return markdown(["", "tokens", *TASKS.values(), "mean"], [row for *_, row in sorted(rows)])


@dataclass(frozen=True)
class Factor:
    """A baseline's FLOPs divided by ours at equal quality, with the 90 % interval over seeds."""

    times: float
    low: float
    high: float
    bound: str = ""

    def __str__(self) -> str:
        return f"{self.bound}{self.times:.2f} ({self.low:.2f} to {self.high:.2f})"


def factor(ours: Sequence[Point], theirs: Point, measure: Callable[[Result], float]) -> Factor:
    """Compares FLOPs where our curve first reaches their mean; the interval is by 1,000 draws of the seeds."""
    draw = random.Random(0)

    def drawn(point: Point) -> Point:
        return Point(point.setting, point.budget, draw.choices(point.results, k=len(point.results)))

    def cost(ours: Iterable[Point], value: float) -> tuple[float, str]:
        return crossing([(point.budget, point.mean(measure)) for point in ours], value)

    our_cost, bound = cost(ours, theirs.mean(measure))
    word = {"": "", "at most": "at least ", "more than": "less than "}[bound]
    found = sorted(theirs.budget / cost(map(drawn, ours), drawn(theirs).mean(measure))[0] for _ in range(1_000))
    return Factor(theirs.budget / our_cost, found[50], found[949], word)


def report(path: Path, title: str, curves: Mapping[str, Sequence[Point]]) -> str:
    """Draws curves, each with rising budgets; returns their table and the factors relative to the first."""
    points = {side: [point for point in curve if point.results] for side, curve in curves.items()}
    rows = [[side, _tflop(point), *columns(point.results)] for side in points for point in points[side]]
    text = markdown(["", "TFLOP", *HEADER], rows)
    measured = {name: _measured(points, measure) for name, measure in MEASURES.items()}
    factors = [
        (name, side, point, factor(ours, point, MEASURES[name]))
        for name, ((_, ours), *others) in ((name, sides.items()) for name, sides in measured.items())
        for side, theirs in (others if ours else ())
        for point in theirs
    ]
    rows = [[name, side, _tflop(point), str(found)] for name, side, point, found in factors]
    text += "\n\n" + markdown(["measure", "", "TFLOP", f"times those of {next(iter(points))}, by seeds"], rows)
    if any(len(curve) > 1 for curve in points.values()):
        _draw(path, title, measured, factors)
    return text


def _measured(points: Mapping[str, Sequence[Point]], measure: Callable[[Result], float]) -> dict[str, list[Point]]:
    """The points whose runs all have the measure."""
    return {side: [point for point in curve if not math.isnan(point.mean(measure))] for side, curve in points.items()}


def _tflop(point: Point) -> str:
    return f"{point.budget / 1e12:.3g}"


def _draw(
    path: Path,
    title: str,
    measured: Mapping[str, Mapping[str, Sequence[Point]]],
    factors: Sequence[tuple[str, str, Point, Factor]],
) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    drawn = {name: sides for name, sides in measured.items() if any(sides.values())}
    width = len(drawn) + bool(factors)
    figure, (axes,) = plt.subplots(1, width, figsize=(4.5 * width, 4), layout="constrained", squeeze=False)
    for axis, (name, sides) in zip(axes, drawn.items(), strict=False):
        for side, curve in sides.items():
            budgets, means = [point.budget for point in curve], [point.mean(MEASURES[name]) for point in curve]
            axis.plot(budgets, means, marker="o", label=side)
            for point in curve:
                axis.plot([point.budget] * len(point.results), [*map(MEASURES[name], point.results)], "_", color="gray")
        axis.set(title=name)
    axes[0].legend()
    for place, key in enumerate(dict.fromkeys((name, side) for name, side, _, _ in factors)):
        found = [(point.budget * 1.04**place, each) for name, side, point, each in factors if (name, side) == key]
        budgets, times = [budget for budget, _ in found], [each.times for _, each in found]
        margins = [[t - min(t, f.low), max(t, f.high) - t] for t, (_, f) in zip(times, found, strict=True)]
        marker = "^" if found[-1][1].bound else "o"  # an arrow: at least so many
        axes[-1].errorbar(budgets, times, list(zip(*margins, strict=True)), marker=marker, label=f"{key[1]}, {key[0]}")
    if factors:
        axes[-1].set(title=f"times the FLOPs of {next(iter(measured[factors[0][0]]))}")
        axes[-1].axhline(1, color="gray", linewidth=0.8)
        axes[-1].legend(fontsize="x-small")
    ticks = sorted({point.budget for sides in drawn.values() for curve in sides.values() for point in curve})
    for axis in axes:
        axis.set(xscale="log", xlabel="training TFLOP")
        axis.set_xticks(ticks, [f"{each / 1e12:.3g}" for each in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.suptitle(f"{title}, mean over seeds; gray: each seed")
    figure.savefig(path, dpi=120)
    plt.close(figure)
