"""A task's runs together: its entry in results.json, its curves, its report, and a line for the user."""

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

# Scores of a task's entry that are not of the model.
BASELINES = ("majority", "untrained", "alone", "teacher")


@dataclass(frozen=True)
class TaskRuns:
    """The jobs of a task: one or one per fold, each trained with `seeds` seeds, and the untrained twin of each.

    With a teacher also the students `alone`, with as many seeds.
    """

    folder: Path
    jobs: Sequence[Job]
    twins: Sequence[Job]
    seeds: int
    has_folds: bool
    alone: Sequence[Job] = ()

    @property
    def name(self) -> str:
        return self.jobs[0].task.name

    @property
    def planned(self) -> list[tuple[Job, int]]:
        seeded = [(job, seed) for job in (*self.jobs, *self.alone) for seed in range(self.seeds)]
        return seeded + [(twin, 0) for twin in self.twins]


def summarize(
    group: TaskRuns, found: Sequence[dict[str, Any] | None], known: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the task's entry in results.json; `found` has the results of `planned`, None for an unfinished run.

    `known` is an earlier entry, whose measurements of time are kept.
    """
    job = group.jobs[0]
    num_runs = len(group.jobs) * group.seeds
    runs = [
        ({"fold": number // group.seeds} if group.has_folds else {}) | run
        for number, run in enumerate(found[:num_runs])
        if run is not None
    ]
    num_alone = len(group.alone) * group.seeds
    alone, twins = (
        [scores_of(run) for run in part if run is not None]
        for part in (found[num_runs : num_runs + num_alone], found[num_runs + num_alone :])
    )
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
        **(_teaching(group, statistics.median(scores), alone, known or {}) if len(alone) == num_alone > 0 else {}),
        **({"absent_classes": absent} if (absent := _absent(group.jobs)) else {}),
        "runs": [{name: value for name, value in run.items() if name != "splits"} for run in runs],
        "seconds": round(sum(run["seconds"] for run in found if run is not None), 3),
    }


def _teaching(
    group: TaskRuns, score: float, alone: Sequence[Mapping[str, float]], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the scores of the students alone and of the teacher, what is gained, and the seconds of predictions."""
    metric = group.jobs[0].task.metric
    (first, *_) = group.jobs
    lesson = first.lesson
    (dev, *_) = first.data.dev
    assert lesson is not None
    own = {name: statistics.median(each) for name, each in _by_name(alone).items()}
    teacher = _means(_by_name([job.teacher_scores() for job in group.jobs]))
    gap = teacher[metric] - own[metric]
    seconds = known.get("seconds_per_thousand")
    content = lesson.teacher.content_hash
    if known.get("teacher_content") != content:
        student = load_finetuned(first.folder / "seed-0" / "model", str(first.device), AUTO)
        seconds = {"student": seconds_per_thousand(student, dev), "teacher": lesson.teacher.seconds(dev)}
    return {
        "alone": own,
        "teacher": teacher,
        "gap_closed": (score - own[metric]) / gap if gap > 0 else None,
        "seconds_per_thousand": seconds,
        "teacher_content": content,
    }


def teaching_text(found: Mapping[str, Any]) -> str:
    seconds = found["seconds_per_thousand"]
    closed = found["gap_closed"]
    share = "the teacher is not better than the student alone" if closed is None else f"{closed:.0%} of the gap closed"
    return f"{share}; 1,000 texts take {seconds['student']:.3g} s, the teacher's {seconds['teacher']:.3g} s"


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
        if not group.has_folds:  # for `export`, which compares on them
            rows = job.task_type.labeled_rows(job.task, dev)
            replace_file(group.folder / DEV_FILE, "".join(map(json_text, rows)))
    train = None if group.has_folds else group.jobs[0].data.train
    baselines = {name: found.get(name, {}) for name in BASELINES}
    teaching = {name: found[name] for name in ("gap_closed", "seconds_per_thousand") if name in found}
    report = make_report(group.jobs[0].task, parts, train=train, baselines=baselines, teaching=teaching)
    write_report(group.folder, report)
    return scores_of({name: each["model"] for name, each in report.content["scores"].items()})


def summary_text(group: TaskRuns, found: Mapping[str, Any]) -> str:
    """Returns a line on all runs together; `found` is the entry in results.json."""
    metric = found["metric"]
    besides = [f"{name} {found[name][metric]:.4f}" for name in BASELINES if metric in found.get(name, ())]
    beside = f" ({', '.join(besides)})" if besides else ""
    centre = f"median {metric} {found['median']:.4f}"
    together = ""
    runs = f"{group.seeds} seed{'s' * (group.seeds > 1)}"
    if group.has_folds:
        centre = f"mean {metric} {found['means'][metric]:.4f} ± {found['deviations'][metric]:.4f}"
        runs = f"{len(group.jobs)} folds" + (f" with {runs} each" if group.seeds > 1 else "")
        together = f"; of all out-of-fold predictions together {found['out_of_fold'][metric]:.4f}"
    spread = f"{found['min']:.4f} to {found['max']:.4f}"
    taught = f"; {teaching_text(found)}" if "teacher" in found else ""
    return f"{group.name}: {centre}{beside} of {runs}, {spread}{together}{taught}"
