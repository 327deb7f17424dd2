"""What the runs of a task amount to: their entry in results.json, the report, the curves, and lines for the user."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import read_object, read_records
from electra_fast.finetuning.report.report import make_report, write_report
from electra_fast.finetuning.training.job import Job
from electra_fast.finetuning.training.results import RESULT, scores_of
from electra_fast.progress import result_console
from electra_fast.training.plots import plot_finetuning

Results = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class TaskRuns:
    """The jobs of a task: one or one per fold, each trained with `seeds` seeds, and the untrained twin of each."""

    folder: Path
    jobs: Sequence[Job]
    twins: Sequence[Job]
    seeds: int
    has_folds: bool

    @property
    def name(self) -> str:
        return self.jobs[0].task.name

    @property
    def planned(self) -> list[tuple[Job, int]]:
        return [(job, seed) for job in self.jobs for seed in range(self.seeds)] + [(twin, 0) for twin in self.twins]


def summarize(group: TaskRuns, found: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
    """Returns the task's entry in results.json; `found` has the results of `planned`, None for an unfinished run."""
    job, num_runs = group.jobs[0], len(group.jobs) * group.seeds
    runs = [
        ({"fold": number // group.seeds} if group.has_folds else {}) | run
        for number, run in enumerate(found[:num_runs])
        if run is not None
    ]
    twins = [scores_of(run) for run in found[num_runs:] if run is not None]
    scores = [run[job.task.metric] for run in runs]
    by_name = _by_name([scores_of(run) for run in runs])
    across_folds = {}
    if group.has_folds and len(runs) == num_runs:
        across_folds = {
            "means": _means(by_name),
            "deviations": {name: statistics.stdev(each) for name, each in by_name.items()},
        }
    return {
        "metric": job.task.metric,
        "median": statistics.median(scores),
        "medians": {name: statistics.median(each) for name, each in by_name.items()},
        "min": min(scores),
        "max": max(scores),
        **across_folds,
        "majority": _means(_by_name([each.majority for each in group.jobs])),
        **({"untrained": _means(_by_name(twins))} if twins else {}),
        **({"absent_classes": absent} if (absent := _absent(group.jobs)) else {}),
        "runs": [{name: value for name, value in run.items() if name != "splits"} for run in runs],
        "seconds": round(sum(run["seconds"] for run in found if run is not None), 3),
    }


def _absent(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Returns the classes that a split lacks, of folds those that at least one lacks."""
    found: dict[str, dict[str, None]] = {}
    for job in jobs:
        for split, names in job.absent.items():
            found.setdefault(split, {}).update(dict.fromkeys(names))
    return {split: list(names) for split, names in found.items()}


def _by_name(scores: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Returns the scores that all have; a type of entities may be missing from a fold."""
    return {name: [each[name] for each in scores] for name in scores[0] if all(name in each for each in scores)}


def _means(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.mean(each) for name, each in scores.items()}


def draw_curves(group: TaskRuns) -> None:
    from matplotlib.figure import Figure  # takes long, and predictions need none

    logs, chosen = {}, {}
    for job, seed in group.planned:
        folder, name = job.folder / f"seed-{seed}", " ".join(filter(None, (job.part, f"seed {seed}")))
        if records := read_records(folder / "metrics.jsonl"):
            logs[name] = records
            chosen[name] = read_object(folder / RESULT).get("best_step", records[-1]["step"])
    figure, image = Figure((10, 4)), io.BytesIO()
    plot_finetuning(figure, logs, group.jobs[0].selection_metric, chosen)
    figure.savefig(image, dpi=100)
    replace_file(group.folder / "curves.png", image.getvalue())


def median_seed(found: Mapping[str, Any]) -> int:
    """Returns the seed whose score, the mean of its folds', is nearest to the median."""
    scores: dict[int, list[float]] = {}
    for run in found["runs"]:
        scores.setdefault(run["seed"], []).append(run[found["metric"]])
    means = {seed: statistics.mean(own) for seed, own in scores.items()}
    return min(means, key=lambda seed: abs(means[seed] - statistics.median(means.values())))


def report_on(group: TaskRuns, seed: int, found: Mapping[str, Any]) -> dict[str, float]:
    """Writes the report on a seed's predictions of the first validation split or of all folds'; returns its scores."""
    parts = []
    for job in group.jobs:
        dev, *_ = job.data.dev
        text = (job.folder / f"seed-{seed}" / f"predictions.{dev.name}.jsonl").read_text(encoding="utf-8")
        parts.append((dev, [json.loads(line) for line in text.split("\n")[:-1]]))
    train = None if group.has_folds else group.jobs[0].data.train
    baselines = {name: found.get(name, {}) for name in ("majority", "untrained")}
    report = make_report(group.jobs[0].task, parts, train=train, baselines=baselines)
    write_report(group.folder, report)
    return scores_of({name: each["model"] for name, each in report.content["scores"].items()})


def summary_text(group: TaskRuns, found: Mapping[str, Any]) -> str:
    """Returns a line on all runs together; `found` is the entry in results.json."""
    metric = found["metric"]
    besides = [
        f"{name} {found[name][metric]:.4f}" for name in ("majority", "untrained") if metric in found.get(name, ())
    ]
    beside = f" ({', '.join(besides)})" if besides else ""
    centre, runs, together = (
        f"median {metric} {found['median']:.4f}",
        f"{group.seeds} seed{'s' * (group.seeds > 1)}",
        "",
    )
    if group.has_folds:
        centre = f"mean {metric} {found['means'][metric]:.4f} ± {found['deviations'][metric]:.4f}"
        runs = f"{len(group.jobs)} folds" + (f" with {runs} each" if group.seeds > 1 else "")
        together = f"; of all out-of-fold predictions together {found['out_of_fold'][metric]:.4f}"
    spread = f"{found['min']:.4f} to {found['max']:.4f}"
    return f"{group.name}: {centre}{beside} of {runs}, {spread}{together}"


def print_table(results: Results) -> None:
    baselines = [name for name in ("majority", "untrained") if any(found.get(name) for found in results.values())]
    headers = ("task", "metric", "median", "lowest", "highest", *baselines, "runs", "seconds")
    table = Table(*headers, box=None, padding=(0, 1, 0, 0))
    table.columns[0].overflow = "fold"
    for name, found in results.items():
        numbers = (f"{100 * found[key]:.2f}" for key in ("median", "min", "max"))
        besides = (found.get(baseline, {}).get(found["metric"]) for baseline in baselines)
        shown = ("" if score is None else f"{100 * score:.2f}" for score in besides)
        table.add_row(name, found["metric"], *numbers, *shown, str(len(found["runs"])), f"{found['seconds']:.0f}")
    mean = statistics.mean(found["median"] for found in results.values())
    if len(results) > 1:
        table.add_row("mean", "", f"{100 * mean:.2f}")
    result_console().print(table)
