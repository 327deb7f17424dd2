"""Writes the report of a comparison: results.json, table.md and a plot."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from electra_fast.files.atomic_files import replace_file
from electra_fast.reproduction.experiments import Claim, Experiment
from electra_fast.results import Result
from electra_fast.training.plots import BLUE, GREEN, GREY, ORANGE

CONFIDENCE = 0.95
COLUMNS = {"discriminator_auc": "AUC", "mlm_accuracy": "MLM accuracy", "mlm_generator_accuracy": "of its generator"}
"""Columns of the table for results of `evaluate`."""
Run = dict[str, Any]
RowResult = Mapping[str, Any]
"""A row of results.json: `mean`, `sd` and `runs`."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """The result of `reproduce` and content of results.json: the arguments, and the scores of rows and claims."""

    experiment: str
    title: str
    source: str
    preset: str
    recipe: str
    overrides: Mapping[str, str]
    corpus: str
    examples: Mapping[str, int]
    finetune_seeds: int
    corrupted_by: str
    asked: Mapping[str, float | None]
    budget: float
    sizes: Mapping[str, Mapping[str, float]]
    rows: Sequence[RowResult]
    claims: Sequence[Mapping[str, Any]]
    flops_per_second: float | None = None

    def lines(self) -> Iterator[str]:
        """Yields the lines of table.md, which the command prints."""
        yield from table(self).splitlines()


def summarize(experiment: Experiment, facts: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> Comparison:
    """Returns the comparison of finished runs; `facts` are the content of reproduce.json, and `sizes`.

    `runs` has the finished runs of each row: `seed`, and either `failed` or `tasks` and `evaluation`. A score is the
    mean of the tasks' metrics, times 100, like the paper's GLUE score; `sd` is the standard deviation over seeds
    (n - 1), None for fewer than two.
    """
    rows: list[dict[str, Any]] = []
    for row in experiment.rows:
        scored_runs = [run | {"score": score(run)} if "tasks" in run else run for run in runs.get(row.name, ())]
        whole = [run for run in scored_runs if "tasks" in run]
        names = whole[0]["tasks"] if whole else ()
        measured = {name: [run["evaluation"].get(name) for run in whole] for name in COLUMNS}
        rows.append(
            {
                "name": row.name,
                "title": row.title,
                "paper": row.paper,
                **_mean_sd([run["score"] for run in whole]),
                "tasks": {name: _mean_sd([100 * run["tasks"][name]["median"] for run in whole]) for name in names},
                "evaluation": {name: _mean_sd([x for x in xs if x is not None]) for name, xs in measured.items()},
                "runs": scored_runs,
            }
        )
    scores = {row["name"]: [run["score"] for run in row["runs"] if "score" in run] for row in rows}
    values = {name: facts[name] for name in (field.name for field in fields(Comparison)) if name in facts}
    claims = [assess(claim, scores) for claim in experiment.claims]
    return Comparison(title=experiment.title, source=experiment.source, rows=rows, claims=claims, **values)


def score(run: Mapping[str, Any]) -> float:
    """Returns the mean of the tasks' metrics, times 100."""
    mean: float = statistics.mean(task["median"] for task in run["tasks"].values())
    return 100 * mean


def _mean_sd(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.mean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
    }


def assess(claim: Claim, scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns a claim's difference, its margin, and whether the scores agree with the claim.

    The margin is half the 95 % confidence interval of Student's t, with the variance pooled over all rows, since three
    seeds per row are too few. A difference within the margin is undecided, and so is a single seed per row.
    """
    pooled = [values for values in scores.values() if len(values) > 1]
    freedom = sum(len(values) - 1 for values in pooled)
    if any(not scores.get(row) for row in claim.weights):
        return {"claim": claim.text, "difference": None, "margin": None, "verdict": "not measured"}
    difference = sum(weight * statistics.mean(scores[row]) for row, weight in claim.weights.items())
    if not freedom:
        return {"claim": claim.text, "difference": difference, "margin": None, "verdict": "undecided"}
    variance = sum((len(values) - 1) * statistics.variance(values) for values in pooled) / freedom
    error = math.sqrt(variance * sum(weight**2 / len(scores[row]) for row, weight in claim.weights.items()))
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    verdict = "agrees" if difference > margin else "disagrees" if difference < -margin else "undecided"
    return {"claim": claim.text, "difference": difference, "margin": margin, "verdict": verdict}


def table(results: Mapping[str, Any]) -> str:
    tasks = list(results["examples"])
    header = ["", "steps", "tokens", *tasks, "mean", "paper", *COLUMNS.values(), "seeds"]
    rows = [[row["title"], *_cells(row, tasks, results["sizes"][row["name"]])] for row in results["rows"]]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, f"| --- {'| ---: ' * (len(header) - 1)}|")
    failures = [(row, run) for row in results["rows"] for run in row["runs"] if "failed" in run]
    notes = "\n".join(f"* {row['title']}, seed {run['seed']}: {run['failed']}" for row, run in failures)
    parts = [
        f"# {results['title']} ({results['source']})",
        f"`{results['preset']}`, recipe `{results['recipe']}`, {results['budget']:.3g} FLOPs of pre-training per run "
        "(true model FLOPs), fine-tuned on each task. Scores times 100: mean over seeds ± standard deviation. "
        f"AUC: on the same replacements for every row (`--corrupted-by {results['corrupted_by']}`). MLM accuracy: "
        "of the model as in Appendix G, and of its generator.",
        "\n".join(lines),
        *([f"Not finished:\n\n{notes}"] if notes else []),
        "Conclusions of the paper, and the difference measured here with its 95 % margin:",
        "\n".join(map(_claim_line, results["claims"])),
    ]
    return "\n\n".join(parts) + "\n"


def write_report(out: Path, experiment: Experiment, results: Comparison) -> None:
    replace_file(out / "results.json", json.dumps(dict(results), indent=2) + "\n")
    replace_file(out / "table.md", table(results))
    _plot(out / f"{experiment.name}.png", experiment, results)


def _cells(row: Mapping[str, Any], tasks: Sequence[str], size: Mapping[str, float]) -> list[str]:
    """Returns the cells of a table row after its title."""
    return [
        f"{size['steps']:,}",
        f"{size['tokens'] / 1e6:,.1f} M",
        *(_mean(row["tasks"].get(name)) for name in tasks),
        _mean(row) + ("" if row["sd"] is None else f" ± {row['sd']:.1f}"),
        "" if row["paper"] is None else f"{row['paper']:.1f}",
        *(_mean(row["evaluation"][name], 3) for name in COLUMNS),
        str(sum("score" in run for run in row["runs"])),
    ]


def _mean(statistic: Mapping[str, float | None] | None, digits: int = 1) -> str:
    return "" if statistic is None or statistic["mean"] is None else f"{statistic['mean']:.{digits}f}"


def _claim_line(result: Mapping[str, Any]) -> str:
    if result["difference"] is None:
        return f"* {result['claim']}: {result['verdict']}"
    margin = "" if result["margin"] is None else f" ± {result['margin']:.1f}"
    return f"* {result['claim']}: {result['difference']:+.1f}{margin}, **{result['verdict']}**"


def _plot(path: Path, experiment: Experiment, results: Mapping[str, Any]) -> None:
    """Plots the scores of rows by width, or in a list."""
    measured = {row["name"]: row for row in results["rows"] if row["mean"] is not None}
    papers = {row["name"]: _published(row["paper"]) for row in results["rows"] if row["paper"] is not None}
    is_double = bool(papers or experiment.published)
    figure = Figure(figsize=(11 if is_double else 7, 4.8), layout="constrained")
    left, *right = figure.subplots(1, 2 if is_double else 1, squeeze=False)[0]
    count = max((len(_scores(row)) for row in results["rows"]), default=0)
    seeds = "one seed" if count == 1 else f"{count} seeds; bars: ± one standard deviation; dots: seeds"
    left.set_title(f"Here: {results['preset']}, {results['budget']:.2g} FLOPs, {seeds}", fontsize=9)
    for axes in right:
        axes.set_title(f"The paper: {experiment.source}", fontsize=9)
    if experiment.axis:
        lines: dict[str, dict[int, RowResult]] = {row.group: {} for row in experiment.rows if row.width}
        for row in experiment.rows:
            if row.name in measured and row.width:
                lines[row.group][row.width] = measured[row.name]
            elif row.name in measured:
                _plot_level(left, row.title, measured[row.name])
        _plot_by_width(left, experiment, lines)
        groups = experiment.published.items()
        published = {group: {width: _published(score) for width, score in points.items()} for group, points in groups}
        for axes in right:
            _plot_by_width(axes, experiment, published)
    else:
        for axes, results_by_row in zip((left, *right), (measured, papers), strict=False):
            _plot_list(axes, experiment, results_by_row)
    for axes in (left, *right):
        axes.grid(alpha=0.3, axis="both" if experiment.axis else "x")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(f"{experiment.title}: mean score of {', '.join(results['examples'])}, times 100", fontsize=11)
    figure.savefig(path, dpi=120)


def _published(paper_score: float) -> RowResult:
    return {"mean": paper_score, "sd": None, "runs": []}


def _scores(row_result: RowResult) -> list[float]:
    return [run["score"] for run in row_result["runs"] if "score" in run]


def _plot_list(axes: Axes, experiment: Experiment, results_by_row: Mapping[str, RowResult]) -> None:
    for place, row in enumerate(experiment.rows):
        if row.name not in results_by_row:
            left = axes.get_yaxis_transform()
            axes.text(0.02, place, "no number", transform=left, color=GREY, va="center", fontsize=8)
            continue
        mean = results_by_row[row.name]["mean"]
        sd = results_by_row[row.name]["sd"]
        scores = _scores(results_by_row[row.name])
        axes.plot(scores, [place + 0.18] * len(scores), ".", color=GREY, markersize=5)
        axes.errorbar([mean], [place], xerr=sd, fmt="o", color=BLUE, capsize=4)
        axes.annotate(f"{mean:.1f}", (mean, place), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(experiment.rows)), [row.title for row in experiment.rows])
    axes.set_ylim(len(experiment.rows) - 0.5, -0.6)
    axes.margins(x=0.15)
    axes.set_xlabel("score", fontsize=9)


def _plot_by_width(axes: Axes, experiment: Experiment, lines: Mapping[str, Mapping[int, RowResult]]) -> None:
    # Shifted so that error bars do not overlap.
    shifts = [1.015 ** (2 * place - len(lines) + 1) for place in range(len(lines))]
    for (group, points), color, shift in zip(lines.items(), (BLUE, ORANGE), shifts, strict=False):
        widths = [width * shift for width in points]
        means = [point["mean"] for point in points.values()]
        bars = [point["sd"] or 0.0 for point in points.values()]
        axes.errorbar(widths, means, yerr=bars if any(bars) else None, fmt="o-", color=color, capsize=4, label=group)
        for width, point in zip(widths, points.values(), strict=True):
            scores = _scores(point)
            axes.plot([width] * len(scores), scores, ".", color=GREY, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({width for points in lines.values() for width in points}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.set_xlabel(experiment.axis, fontsize=9)
    axes.set_ylabel("score", fontsize=9)


def _plot_level(axes: Axes, title: str, row_result: RowResult) -> None:
    """Plots a row without a width as a horizontal line."""
    mean = row_result["mean"]
    axes.axhline(mean, color=GREEN, linestyle="--", label=title)
    if sd := row_result["sd"]:
        axes.axhspan(mean - sd, mean + sd, color=GREEN, alpha=0.15, linewidth=0)
