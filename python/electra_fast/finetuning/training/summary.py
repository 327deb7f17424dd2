"""Summarizes the runs of a task: the entry in results.json, curves, report, and a line for the user."""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.config.config import AUTO
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import json_text, read_object, read_records
from electra_fast.finetuning.loading import load_finetuned
from electra_fast.finetuning.model_folder import DEV_FILE
from electra_fast.finetuning.report.report import make_report, write_report
from electra_fast.finetuning.training.job import Job
from electra_fast.finetuning.training.results import RESULT, scores_of
from electra_fast.finetuning.training.teacher import seconds_per_thousand
from electra_fast.training.plots import plot_finetuning

# Other models in a task's entry, with their scores.
BASELINES = ("majority", "untrained", "alone", "teacher")


@dataclass(frozen=True)
class TaskRuns:
    """The jobs of a task: one, or one per fold, each trained with `seeds` seeds, and their untrained baselines.

    With a teacher, `alone` has the students that learn only from labels, with the same seeds.
    """

    folder: Path
    jobs: Sequence[Job]
    baselines: Sequence[Job]
    seeds: int
    has_folds: bool
    alone: Sequence[Job] = ()

    @property
    def name(self) -> str:
        return self.jobs[0].task.name

    @property
    def planned(self) -> list[tuple[Job, int]]:
        seeded = [(job, seed) for job in (*self.jobs, *self.alone) for seed in range(self.seeds)]
        return seeded + [(baseline, 0) for baseline in self.baselines]


def summarize(
    group: TaskRuns, results: Sequence[dict[str, Any] | None], known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the task's entry in results.json; `results` has one result per run in `planned`, or None.

    `known` is an earlier entry; its measurements of time are kept.
    """
    job = group.jobs[0]
    num_runs = len(group.jobs) * group.seeds
    runs = [
        ({"fold": number // group.seeds} if group.has_folds else {}) | run
        for number, run in enumerate(results[:num_runs])
        if run is not None
    ]
    num_alone = len(group.alone) * group.seeds
    alone, untrained = (
        [scores_of(run) for run in part if run is not None]
        for part in (results[num_runs : num_runs + num_alone], results[num_runs + num_alone :])
    )
    scores = [run[job.task.metric] for run in runs]
    by_name = _by_name([scores_of(run) for run in runs])
    across_folds = {}
    if group.has_folds and len(runs) == num_runs:
        across_folds = {
            "means": _means(by_name),
            "deviations": {name: statistics.stdev(values) for name, values in by_name.items()},
        }
    return {
        "metric": job.task.metric,
        "median": statistics.median(scores),
        "medians": {name: statistics.median(values) for name, values in by_name.items()},
        "min": min(scores),
        "max": max(scores),
        **across_folds,
        "majority": _means(_by_name([job.majority for job in group.jobs])),
        **({"untrained": _means(_by_name(untrained))} if untrained else {}),
        **(_teaching(group, statistics.median(scores), alone, known or {}) if len(alone) == num_alone > 0 else {}),
        **({"absent_classes": absent} if (absent := _absent(group.jobs)) else {}),
        "runs": [{name: value for name, value in run.items() if name != "splits"} for run in runs],
        "seconds": round(sum(run["seconds"] for run in results if run is not None), 3),
    }


def _teaching(
    group: TaskRuns, score: float, alone: Sequence[Mapping[str, float]], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns scores of teacher and students without a teacher, the closed gap, and the seconds of predictions."""
    metric = group.jobs[0].task.metric
    (first, *_) = group.jobs
    lesson = first.lesson
    (dev, *_) = first.data.dev
    assert lesson is not None
    alone_medians = {name: statistics.median(values) for name, values in _by_name(alone).items()}
    teacher = _means(_by_name([job.teacher_scores() for job in group.jobs]))
    gap = teacher[metric] - alone_medians[metric]
    seconds = known.get("seconds_per_thousand")
    content = lesson.teacher.content_hash
    if known.get("teacher_content") != content:
        student = load_finetuned(first.folder / "seed-0" / "model", str(first.device), AUTO)
        seconds = {"student": seconds_per_thousand(student, dev), "teacher": lesson.teacher.seconds(dev)}
    return {
        "alone": alone_medians,
        "teacher": teacher,
        "gap_closed": (score - alone_medians[metric]) / gap if gap > 0 else None,
        "seconds_per_thousand": seconds,
        "teacher_content": content,
    }


def teaching_text(entry: Mapping[str, Any]) -> str:
    seconds = entry["seconds_per_thousand"]
    closed = entry["gap_closed"]
    gain = "the teacher is no better than the student alone" if closed is None else f"{closed:.0%} of the gap closed"
    return f"{gain}; 1,000 texts take {seconds['student']:.3g} s, with the teacher {seconds['teacher']:.3g} s"


def _absent(jobs: Sequence[Job]) -> dict[str, list[str]]:
    """Returns the classes that each split lacks, in any fold."""
    absent_by_split: dict[str, dict[str, None]] = {}
    for job in jobs:
        for split, names in job.absent.items():
            absent_by_split.setdefault(split, {}).update(dict.fromkeys(names))
    return {split: list(names) for split, names in absent_by_split.items()}


def _by_name(scores: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Returns the values of the scores that all entries have; a fold may lack an entity type."""
    return {name: [entry[name] for entry in scores] for name in scores[0] if all(name in entry for entry in scores)}


def _means(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.mean(values) for name, values in scores.items()}


def draw_curves(group: TaskRuns) -> None:
    from matplotlib.figure import Figure  # a slow import

    logs = {}
    chosen = {}
    for job, seed in group.planned:
        folder = job.folder / f"seed-{seed}"
        name = " ".join(filter(None, (job.part, f"seed {seed}")))
        if records := read_records(folder / "metrics.jsonl"):
            logs[name] = records
            chosen[name] = read_object(folder / RESULT).get("best_step", records[-1]["step"])
    figure = Figure((10, 4))
    image = io.BytesIO()
    plot_finetuning(figure, logs, group.jobs[0].selection_metric, chosen)
    figure.savefig(image, dpi=100)
    replace_file(group.folder / "curves.png", image.getvalue())


def median_seed(entry: Mapping[str, Any]) -> int:
    """Returns the seed whose score, averaged over folds, is nearest to the median."""
    scores: dict[int, list[float]] = {}
    for run in entry["runs"]:
        scores.setdefault(run["seed"], []).append(run[entry["metric"]])
    means = {seed: statistics.mean(seed_scores) for seed, seed_scores in scores.items()}
    return min(means, key=lambda seed: abs(means[seed] - statistics.median(means.values())))


def report_on(group: TaskRuns, seed: int, entry: Mapping[str, Any]) -> dict[str, float]:
    """Writes the report on a seed's predictions for the first validation split, of all folds; returns the scores."""
    parts = []
    for job in group.jobs:
        dev, *_ = job.data.dev
        text = (job.folder / f"seed-{seed}" / f"predictions.{dev.name}.jsonl").read_text(encoding="utf-8")
        parts.append((dev, [json.loads(line) for line in text.split("\n")[:-1]]))
        if not group.has_folds:  # examples for the comparison of `export`
            rows = job.task_type.labeled_rows(job.task, dev)
            replace_file(group.folder / DEV_FILE, "".join(map(json_text, rows)))
    train = None if group.has_folds else group.jobs[0].data.train
    baselines = {name: entry.get(name, {}) for name in BASELINES}
    teaching = {name: entry[name] for name in ("gap_closed", "seconds_per_thousand") if name in entry}
    report = make_report(group.jobs[0].task, parts, train=train, baselines=baselines, teaching=teaching)
    write_report(group.folder, report)
    return scores_of({name: values["model"] for name, values in report.content["scores"].items()})


def summary_text(group: TaskRuns, entry: Mapping[str, Any]) -> str:
    """Returns a line about all runs; `entry` is the task's entry in results.json."""
    metric = entry["metric"]
    baselines = [f"{name} {entry[name][metric]:.4f}" for name in BASELINES if metric in entry.get(name, ())]
    comparison = f" ({', '.join(baselines)})" if baselines else ""
    centre = f"median {metric} {entry['median']:.4f}"
    together = ""
    runs = f"{group.seeds} seed{'s' * (group.seeds > 1)}"
    if group.has_folds:
        centre = f"mean {metric} {entry['means'][metric]:.4f} ± {entry['deviations'][metric]:.4f}"
        runs = f"{len(group.jobs)} folds" + (f" with {runs} each" if group.seeds > 1 else "")
        together = f"; all out-of-fold predictions together {entry['out_of_fold'][metric]:.4f}"
    spread = f"{entry['min']:.4f} to {entry['max']:.4f}"
    taught = f"; {teaching_text(entry)}" if "teacher" in entry else ""
    return f"{group.name}: {centre}{comparison} of {runs}, {spread}{together}{taught}"
