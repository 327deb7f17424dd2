"""The report of a comparison: results.json, table.md and a picture."""

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
RULER = {"discriminator_auc": "AUC", "mlm_accuracy": "MLM accuracy", "mlm_generator_accuracy": "of the generator"}
"""Figures of `evaluate` in the table: their columns."""
Run = dict[str, Any]
Found = Mapping[str, Any]
"""A row of results.json: `mean`, `sd` and `runs`."""


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Result):
    """The result of `reproduce`, the content of results.json: what was asked, and scores of rows and claims."""

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
    rows: Sequence[Found]
    claims: Sequence[Mapping[str, Any]]
    flops_per_second: float | None = None

    def lines(self) -> Iterator[str]:
        """Yields what the command prints: table.md."""
        yield from table(self).splitlines()


def summarize(experiment: Experiment, facts: Mapping[str, Any], runs: Mapping[str, Sequence[Run]]) -> Comparison:
    """Returns the comparison of finished runs; `facts` are those of reproduce.json, and `sizes`.

    `runs` has the finished runs of each row: `seed`, and `failed` or `tasks` and `evaluation`. A score is the mean of
    the tasks' metrics, times 100, as the paper's GLUE score; `sd` is the standard deviation over seeds (n - 1), None
    below two.
    """
    rows: list[dict[str, Any]] = []
    for row in experiment.rows:
        own = [run | {"score": score(run)} if "tasks" in run else run for run in runs.get(row.name, ())]
        whole = [run for run in own if "tasks" in run]
        names = whole[0]["tasks"] if whole else ()
        measured = {name: [run["evaluation"].get(name) for run in whole] for name in RULER}
        rows.append(
            {
                "name": row.name,
                "title": row.title,
                "paper": row.paper,
                **_mean_sd([run["score"] for run in whole]),
                "tasks": {name: _mean_sd([100 * run["tasks"][name]["median"] for run in whole]) for name in names},
                "evaluation": {name: _mean_sd([x for x in found if x is not None]) for name, found in measured.items()},
                "runs": own,
            }
        )
    scores = {row["name"]: [run["score"] for run in row["runs"] if "score" in run] for row in rows}
    found = {name: facts[name] for name in (each.name for each in fields(Comparison)) if name in facts}
    claims = [judge(claim, scores) for claim in experiment.claims]
    return Comparison(title=experiment.title, source=experiment.source, rows=rows, claims=claims, **found)


def score(run: Mapping[str, Any]) -> float:
    """The mean over tasks of their metrics, times 100."""
    mean: float = statistics.mean(task["median"] for task in run["tasks"].values())
    return 100 * mean


def _mean_sd(values: Sequence[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.mean(values) if values else None,
        "sd": statistics.stdev(values) if len(values) > 1 else None,
    }


def judge(claim: Claim, scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Returns a claim's difference, its margin, and whether the scores agree with the claim.

    The margin is half the 95 % confidence interval by Student's t, with the variance pooled over all rows, since three
    seeds of a row are too few. A difference within the margin is undecided, and so is one seed per row.
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
    header = ["", "steps", "tokens", *tasks, "mean", "paper", *RULER.values(), "seeds"]
    rows = [[row["title"], *_cells(row, tasks, results["sizes"][row["name"]])] for row in results["rows"]]
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, f"| --- {'| ---: ' * (len(header) - 1)}|")
    failures = [(row, run) for row in results["rows"] for run in row["runs"] if "failed" in run]
    notes = "\n".join(f"* {row['title']}, seed {run['seed']}: {run['failed']}" for row, run in failures)
    parts = [
        f"# {results['title']} ({results['source']})",
        f"`{results['preset']}`, recipe `{results['recipe']}`, {results['budget']:.3g} FLOPs of pre-training per run "
        "(true model FLOPs), fine-tuned on each task. Scores times 100: mean over seeds ± standard deviation. "
        f"AUC: against the same fakes for every row (`--corrupted-by {results['corrupted_by']}`). MLM accuracy: by "
        "Appendix G, beside that of the generator alone.",
        "\n".join(lines),
        *([f"Not finished:\n\n{notes}"] if notes else []),
        "What the paper concludes, and the difference measured here with its 95 % margin:",
        "\n".join(map(_claim_line, results["claims"])),
    ]
    return "\n\n".join(parts) + "\n"


def write_report(out: Path, experiment: Experiment, results: Comparison) -> None:
    replace_file(out / "results.json", json.dumps(dict(results), indent=2) + "\n")
    replace_file(out / "table.md", table(results))
    _draw(out / f"{experiment.name}.png", experiment, results)


def _cells(row: Mapping[str, Any], tasks: Sequence[str], size: Mapping[str, float]) -> list[str]:
    """A row of the table after its title."""
    return [
        f"{size['steps']:,}",
        f"{size['tokens'] / 1e6:,.1f} M",
        *(_mean(row["tasks"].get(name)) for name in tasks),
        _mean(row) + ("" if row["sd"] is None else f" ± {row['sd']:.1f}"),
        "" if row["paper"] is None else f"{row['paper']:.1f}",
        *(_mean(row["evaluation"][name], 3) for name in RULER),
        str(sum("score" in run for run in row["runs"])),
    ]


def _mean(found: Mapping[str, float | None] | None, digits: int = 1) -> str:
    return "" if found is None or found["mean"] is None else f"{found['mean']:.{digits}f}"


def _claim_line(found: Mapping[str, Any]) -> str:
    if found["difference"] is None:
        return f"* {found['claim']}: {found['verdict']}"
    margin = "" if found["margin"] is None else f" ± {found['margin']:.1f}"
    return f"* {found['claim']}: {found['difference']:+.1f}{margin}, **{found['verdict']}**"


def _draw(path: Path, experiment: Experiment, results: Mapping[str, Any]) -> None:
    """Draws the rows with a score, along their width or one below the other."""
    found = {row["name"]: row for row in results["rows"] if row["mean"] is not None}
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
        lines: dict[str, dict[int, Found]] = {row.group: {} for row in experiment.rows if row.width}
        for row in experiment.rows:
            if row.name in found and row.width:
                lines[row.group][row.width] = found[row.name]
            elif row.name in found:
                _level(left, row.title, found[row.name])
        _along_width(left, experiment, lines)
        groups = experiment.published.items()
        published = {group: {width: _published(score) for width, score in points.items()} for group, points in groups}
        for axes in right:
            _along_width(axes, experiment, published)
    else:
        for axes, each in zip((left, *right), (found, papers), strict=False):
            _one_below_the_other(axes, experiment, each)
    for axes in (left, *right):
        axes.grid(alpha=0.3, axis="both" if experiment.axis else "x")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(f"{experiment.title}: mean score of {', '.join(results['examples'])}, times 100", fontsize=11)
    figure.savefig(path, dpi=120)


def _published(score: float) -> Found:
    return {"mean": score, "sd": None, "runs": []}


def _scores(found: Found) -> list[float]:
    return [run["score"] for run in found["runs"] if "score" in run]


def _one_below_the_other(axes: Axes, experiment: Experiment, found: Mapping[str, Found]) -> None:
    for place, row in enumerate(experiment.rows):
        if row.name not in found:
            left = axes.get_yaxis_transform()
            axes.text(0.02, place, "no number", transform=left, color=GREY, va="center", fontsize=8)
            continue
        mean = found[row.name]["mean"]
        sd = found[row.name]["sd"]
        scores = _scores(found[row.name])
        axes.plot(scores, [place + 0.18] * len(scores), ".", color=GREY, markersize=5)
        axes.errorbar([mean], [place], xerr=sd, fmt="o", color=BLUE, capsize=4)
        axes.annotate(f"{mean:.1f}", (mean, place), (0, 7), textcoords="offset points", ha="center", fontsize=8)
    axes.set_yticks(range(len(experiment.rows)), [row.title for row in experiment.rows])
    axes.set_ylim(len(experiment.rows) - 0.5, -0.6)
    axes.margins(x=0.15)
    axes.set_xlabel("score", fontsize=9)


def _along_width(axes: Axes, experiment: Experiment, lines: Mapping[str, Mapping[int, Found]]) -> None:
    # Shifted, so that error bars do not cover each other.
    shifts = [1.015 ** (2 * place - len(lines) + 1) for place in range(len(lines))]
    for (group, points), color, shift in zip(lines.items(), (BLUE, ORANGE), shifts, strict=False):
        widths = [width * shift for width in points]
        means = [each["mean"] for each in points.values()]
        bars = [each["sd"] or 0.0 for each in points.values()]
        axes.errorbar(widths, means, yerr=bars if any(bars) else None, fmt="o-", color=color, capsize=4, label=group)
        for width, each in zip(widths, points.values(), strict=True):
            scores = _scores(each)
            axes.plot([width] * len(scores), scores, ".", color=GREY, markersize=5)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({width for points in lines.values() for width in points}))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.set_xlabel(experiment.axis, fontsize=9)
    axes.set_ylabel("score", fontsize=9)


def _level(axes: Axes, title: str, found: Found) -> None:
    """Draws a row without a width as a horizontal line."""
    axes.axhline(found["mean"], color=GREEN, linestyle="--", label=title)
    if found["sd"]:
        axes.axhspan(found["mean"] - found["sd"], found["mean"] + found["sd"], color=GREEN, alpha=0.15, linewidth=0)
