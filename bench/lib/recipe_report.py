"""Tables of the finished runs of `recipes.py`."""

import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lib.results import markdown

Result = Mapping[str, Any]
CORRUPTORS = ("network", "unigram")
CRITERION = CORRUPTORS[0]
"""The source of replacements whose AUC is the criterion."""


@dataclass(frozen=True)
class Point:
    """The runs of a setting with a budget, one per seed."""

    setting: str
    budget: float
    results: Sequence[Result]

    def mean(self, measure: Callable[[Result], float]) -> float:
        return statistics.mean(map(measure, self.results)) if self.results else math.nan


def auc(result: Result, corruptor: str = CRITERION) -> float:
    """AUC of a run: 0.5 if it diverged, NaN without a discriminator."""
    if "failed" in result:
        return 0.5
    value = result["corrupted_by"][corruptor]["discriminator_auc"]
    return math.nan if value is None else float(value)


def merit(result: Result) -> float:
    """The criterion for choosing settings: the AUC, or minus the loss of a masked language model."""
    value = auc(result)
    return -float(result["corrupted_by"][CRITERION]["generator_loss"]) if math.isnan(value) else value


def score(result: Result) -> float:
    """Mean over the tasks in percent; NaN if the run was not fine-tuned."""
    return 100 * statistics.mean(result["tasks"].values()) if "tasks" in result else math.nan


TASKS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "stsb": "STS-B", "rte": "RTE"}
MEASURES: dict[str, Callable[[Result], float]] = {
    "AUC, network": auc,
    "AUC, unigram": lambda result: auc(result, "unigram"),
    "mean of the tasks": score,
}
"""The measures of the comparison."""


def spread(values: Sequence[float]) -> str:
    if not values or any(map(math.isnan, values)):
        return ""
    return f"{statistics.mean(values):.4f}" + (f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else "")


def columns(results: Sequence[Result]) -> list[str]:
    """Cells of a table, below `HEADER`."""
    good = [result for result in results if "failed" not in result]
    cells = [spread([auc(result, name) for result in results]) for name in CORRUPTORS]
    for name in ("discriminator_loss", "generator_loss"):
        losses = [result["corrupted_by"][CRITERION][name] for result in good]
        cells.append("" if None in losses else spread(losses) if good else "diverged")
    times = [result["seconds"] for result in good if result["seconds"]]
    taken = f"{statistics.mean(times):.0f}" if times else ""
    scores = [score(result) for result in good if "tasks" in result]
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
    """Returns the cost at which a curve of (cost, measure) first reaches a value, interpolated in its logarithm.

    With "at most", it starts higher; with "more than", it never reaches the value.
    """
    (cost_before, before), *rest = curve
    if before >= value:
        return cost_before, "at most" if before > value else ""
    for cost, measure in rest:
        if measure >= value:
            share = (value - before) / (measure - before)
            return math.exp(math.log(cost_before) + share * math.log(cost / cost_before)), ""
        cost_before = cost
        before = measure
    return cost_before, "more than"


def hour_table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Scores after an hour and before it, the best first: means over seeds, each the median of three fine-tunings."""
    groups: dict[tuple[bool, str], list[Result]] = {}
    for line in lines:
        if line["result"].get("tasks_of", "").endswith("-3-seeds"):
            groups.setdefault((line["run"]["keys"]["train.steps"] == 1, line["name"]), []).append(line["result"])
    rows = []
    for (is_untrained, name), results in groups.items():
        tokens = "untrained" if is_untrained else f"{results[0]['tokens'] / 1e6:.1f} M"
        scores = [statistics.mean(100 * result["tasks"][task] for result in results) for task in TASKS]
        means = [score(result) for result in results]
        mean = statistics.mean(means)
        spread = f" ({min(means):.1f} to {max(means):.1f})" if len(means) > 1 else ""
        rows.append((is_untrained, -mean, [name, tokens, *(f"{value:.1f}" for value in scores), f"{mean:.1f}{spread}"]))
    return markdown(["", "tokens", *TASKS.values(), "mean"], [row for *_, row in sorted(rows)])


@dataclass(frozen=True)
class Factor:
    """The ratio of a baseline's FLOPs to our FLOPs at equal quality, with the 90 % interval over seeds."""

    times: float
    low: float
    high: float
    bound: str = ""

    def __str__(self) -> str:
        return f"{self.bound}{self.times:.2f} ({self.low:.2f} to {self.high:.2f})"


def factor(ours: Sequence[Point], theirs: Point, measure: Callable[[Result], float]) -> Factor:
    """Compares the FLOPs at which our curve first reaches their mean; the interval is from 1,000 draws of seeds."""
    draw = random.Random(0)

    def drawn(point: Point) -> Point:
        return Point(point.setting, point.budget, draw.choices(point.results, k=len(point.results)))

    def cost(ours: Iterable[Point], value: float) -> tuple[float, str]:
        return crossing([(point.budget, point.mean(measure)) for point in ours], value)

    our_cost, bound = cost(ours, theirs.mean(measure))
    word = {"": "", "at most": "at least ", "more than": "less than "}[bound]
    factors = sorted(theirs.budget / cost(map(drawn, ours), drawn(theirs).mean(measure))[0] for _ in range(1_000))
    return Factor(theirs.budget / our_cost, factors[50], factors[949], word)


def report(curves: Mapping[str, Sequence[Point]]) -> str:
    points = {side: [point for point in curve if point.results] for side, curve in curves.items()}
    rows = [[side, _tflop(point), *columns(point.results)] for side in points for point in points[side]]
    text = markdown(["", "TFLOP", *HEADER], rows)
    rows = []
    for name, measure in MEASURES.items():
        (_, ours), *others = _measured(points, measure).items()
        rows += [
            [name, side, _tflop(point), str(factor(ours, point, measure))]
            for side, theirs in (others if ours else ())
            for point in theirs
        ]
    return text + "\n\n" + markdown(["measure", "", "TFLOP", f"relative to {next(iter(points))}, over seeds"], rows)


def _measured(points: Mapping[str, Sequence[Point]], measure: Callable[[Result], float]) -> dict[str, list[Point]]:
    return {side: [point for point in curve if not math.isnan(point.mean(measure))] for side, curve in points.items()}


def _tflop(point: Point) -> str:
    return f"{point.budget / 1e12:.3g}"
