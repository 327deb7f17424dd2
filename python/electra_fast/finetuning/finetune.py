"""`finetune`: trains every task with every seed from one encoder; results accumulate in DIR/results.json."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from electra_fast.config.section import present_names
from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, recover_all, replace_file
from electra_fast.files.json_files import read_object, read_records
from electra_fast.finetuning.config import DEFAULT_RECIPE, FinetuneSection, FinetuningConfig, Precision, recipe_config
from electra_fast.finetuning.readers.glue import copy_submissions
from electra_fast.finetuning.readers.labels import listed
from electra_fast.finetuning.readers.table_formats import file_or_table
from electra_fast.finetuning.report.report import make_report, write_report
from electra_fast.finetuning.task import Task, TaskData
from electra_fast.finetuning.task_data import OPTIONS, read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.training.job import IDENTITY, Job, check_length, first_difference, make_job
from electra_fast.finetuning.training.results import RESULT, read_finished, score_texts, scores_of
from electra_fast.finetuning.training.seed_run import SeedRun, outdated_splits, rescore
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.encoder import load_encoder, untrained
from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.messages import say
from electra_fast.model.compute import choose_device, use_compute
from electra_fast.progress import PIPE_WIDTH, FinetuningProgress
from electra_fast.results import Entries
from electra_fast.training.loggers import Callback, Callbacks, require_loggers
from electra_fast.training.plots import plot_finetuning
from electra_fast.training.run import exclusive

Results = dict[str, dict[str, Any]]


class TaskResult(Entries):
    """The result of a task in results.json.

    `metric`, the name of its main score, of which `median`, `min` and `max` are over the seeds; `medians` of every
    score; `majority`, the scores of the most frequent training answer; `runs`, the scores of each seed; `seconds`. With
    `folds` also the `means` and `deviations` over the folds, and the scores `out_of_fold`, of all validation
    predictions together; with `untrained_twin` the scores `untrained`.
    """


class FinetuneResults(Entries):
    """The content of results.json for the tasks of a call: a `TaskResult` per task; prints as a table."""

    def lines(self) -> Iterator[str]:
        """Yields the table of medians, in percent."""
        baselines = [name for name in ("majority", "untrained") if any(found.get(name) for found in self.values())]
        headers = ("task", "metric", "median", "lowest", "highest", *baselines, "runs", "seconds")
        table = Table(*headers, box=None, padding=(0, 1, 0, 0))
        for name, found in self.items():
            numbers = (f"{100 * found[key]:.2f}" for key in ("median", "min", "max"))
            besides = (found.get(baseline, {}).get(found["metric"]) for baseline in baselines)
            shown = ("" if score is None else f"{100 * score:.2f}" for score in besides)
            table.add_row(name, found["metric"], *numbers, *shown, str(len(found["runs"])), f"{found['seconds']:.0f}")
        if len(self) > 1:
            mean = statistics.mean(found["median"] for found in self.values())
            table.add_row("mean", "", f"{100 * mean:.2f}")
        console = Console(file=io.StringIO(), width=PIPE_WIDTH, markup=False)
        with console.capture() as text:
            console.print(table)
        yield from (line.rstrip() for line in text.get().splitlines())


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


def finetune(
    model: str | Path,
    *,
    out: str | Path,
    task: str | Sequence[str] | None = None,
    glue: str | Path | None = None,
    squad: str | Path | None = None,
    train: Any = None,
    dev: Any = None,
    test: Any = None,
    seeds: int = 1,
    recipe: str = DEFAULT_RECIPE,
    epochs: float | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    precision: Precision | None = None,
    device: str = "auto",
    text: str | Sequence[str] = (),
    label: str | Sequence[str] = (),
    dev_text: str | Sequence[str] = (),
    dev_label: str | Sequence[str] = (),
    test_text: str | Sequence[str] = (),
    test_label: str | Sequence[str] = (),
    labels: str | Sequence[str] = (),
    label_map: str | Sequence[str] | Mapping[str, str] = (),
    label_separator: str = "",
    scheme: str = "auto",
    quoting: str = "auto",
    delimiter: str = "",
    no_header: bool = False,
    skip_bad_rows: int = 0,
    dev_fraction: float = 0.1,
    group: str = "",
    split_seed: int = 0,
    folds: int | None = None,
    untrained_twin: bool = False,
    role: str | None = None,
    overrides: Mapping[str, object] | None = None,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> FinetuneResults:
    """Fine-tunes an encoder on GLUE, on SQuAD or on own data, with seeds 0 to `seeds - 1` each.

    Leaves `out/TASK/seed-K/model/` (a Hugging Face folder), predictions beside it, `out/TASK/report.md` and
    `report.json` on the seed with the median score (or on all folds together), and `out/results.json`. Called again
    after an interruption, it resumes at that seed and step; finished models are scored again if the content of `test`
    has changed, or with `finetune.select = last` that of `dev`, on which the best step depends.

    Args:
        model: A run, a checkpoint or a Hugging Face folder.
        out: Output folder.
        task: Of GLUE `cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli`, `rte` or `wnli`, or several of them, by
            default all that `glue` holds; of SQuAD `squad1` or `squad2`, by default the one that `squad` holds; for
            `train` `classification`, `regression`, `tagging` or `question-answering`.
        glue: A GLUE task's folder, or one that has the folders of several.
        squad: The folder of SQuAD's files.
        train: Own data: the path or URL of a .tsv, .csv, .jsonl or .parquet file, for tagging also of CoNLL columns,
            for questions of SQuAD's .json; or the data: a pandas or polars frame, a pyarrow Table, a `Dataset` of
            Hugging Face, or a list of dicts.
        dev: Own data to validate on; by default a part of `train`.
        test: Own data to predict, and to score if it has labels.
        seeds: Number of seeds.
        recipe: `fast`, `google` or `paper`; it sets the keys of the configuration by task, encoder and data.
        epochs: Passes over the training data; this and the next four are keys of the configuration.
        lr: Peak learning rate of the head, the key `finetune.learning_rate`.
        batch_size: Examples per step.
        sequence_length: Largest number of tokens per example, [CLS] and [SEP] included.
        precision: Dtype of activations: `auto`, `fp32`, `fp16` or `bf16`.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.
        text: The text column of `train`, or two for pairs; by default one of the usual names.
        label: The label column, or several of 0 and 1; by default one of the usual names.
        dev_text: The text columns of `dev`, if they differ.
        dev_label: Its label columns, if they differ.
        test_text: The text columns of `test`, if they differ.
        test_label: Its label columns, if they differ.
        labels: The classes in the order of their ids; by default those in `train`, sorted.
        label_map: New names of labels, as a mapping or `OLD=NEW`; examples whose new name is empty are left out.
        label_separator: What separates several labels in a cell.
        scheme: Of tags: `IO`, `IOB1`, `IOB2`, `IOBES`, `IOE`, `none`, or `auto` to infer it.
        quoting: Quotes around the cells of .csv and .tsv: `csv`, `backslash`, `none`, or `auto`.
        delimiter: Separator of cells; by default by extension and first line.
        no_header: The first line is data, and the columns are named 0, 1, 2 and so on.
        skip_bad_rows: Number of unusable rows that may be left out, over all files.
        dev_fraction: Fraction of `train` to set aside if there is no `dev`.
        group: A column of `train`: rows with the same value stay together when it is split. Equal texts always do.
        split_seed: Seed of that split.
        folds: Cross-validation on own data: validates on each of so many parts of `train`, which is stratified as
            without `dev`, a model trained on the others, in `out/TASK/fold-K/seed-0/`. The last step's model is kept
            unless `overrides` say otherwise, since a fold must not choose the model that it scores.
        untrained_twin: Also train the same network from random weights, with seed 0, in `out/TASK/untrained/`.
        role: `discriminator`, `encoder` or `generator`; by default the first of them that the model has.
        overrides: Any keys of the configuration, `{"finetune.epochs": 5}`.
        on_log: Called with each line of metrics.jsonl about training, `task` and `seed` added: `{"step", "loss",
            "grad_norm", "learning_rate", "seconds"}`.
        on_evaluation: Called likewise with each line about an evaluation: `{"step"}` and the validation scores by
            name. An exception in a callback is reported once and stops nothing; `StopTraining` stops the training and
            passes through, after a checkpoint.
        on_checkpoint: Called likewise when a checkpoint is complete: `{"step", "path"}`.

    Returns:
        A `TaskResult` by task: the content of results.json.

    Raises:
        FileNotFoundError, ValueError: The message names the file, line, value and remedy.
        TrainingFailed: The loss is not finite.
        Interrupted: After a checkpoint.
    """
    given = locals()
    columns = {name: given[name] for name in OPTIONS} | {"seed": split_seed}
    short = {name: given[name] for name in FinetuningConfig.SHORT_NAMES if given[name] is not None}
    if seeds < 1:
        raise InputError(f"seeds = {seeds}: must be at least 1")
    out, place = Path(out), choose_device(device)
    files = {name: file_or_table(name, given[name]) for name in ("train", "dev", "test") if given[name] is not None}
    settings = FinetuningConfig.values_of([*(overrides or {}).items(), *short.items()])
    if folds is not None and "finetune.patience" not in settings:
        settings.setdefault("finetune.select", "last")  # a fold must not choose the model that it scores
    encoder = load_encoder(model, role)
    common = recipe_config(recipe, "", encoder.shape, settings)
    require_loggers("finetune.loggers", common.finetune.loggers)
    check_length(common.finetune, encoder)  # before large files are read
    folders = {name: Path(given[name]) for name in ("glue", "squad") if given[name] is not None}
    parts = [columns] if folds is None else _folds(folds, columns, dev)
    with contextlib.ExitStack() as copies:
        files = {name: copies.enter_context(local_file(path)) for name, path in files.items()}
        all_data = [each for part in parts for each in read_tasks(task, **folders, files=files, columns=part)]
    if folds is not None:
        _check_classes(all_data[0], folds)
        for line in _biases(all_data[0].task, common.finetune):
            say(f"warning: {line}")
    with exclusive(out):
        earlier = _earlier_results(out)
        jobs: dict[str, list[Job]] = {}
        for each in all_data:
            defaults, made = TASK_TYPES[each.task.kind].defaults, jobs.setdefault(each.task.name, [])
            sizes = len(each.train.texts), len(each.task.labels)
            config = recipe_config(recipe, each.task.name, encoder.shape, settings, defaults, *sizes)
            part = "" if folds is None else f"fold-{len(made)}"
            folder, hardware = out / each.task.name / part, made[0].hardware if made else None
            data = dataclasses.replace(each, notes=()) if made else each  # another fold has the same notes
            made.append(make_job(data, config, encoder, folder, place, part=part, hardware=hardware))
        other = untrained(encoder) if untrained_twin else None
        groups = []
        for name, made in jobs.items():
            twins = [] if other is None else [each.twin(other) for each in made]
            groups.append(TaskRuns(out / name, made, twins, seeds, folds is not None))
        # Tasks may differ in `finetune.epochs` and `finetune.both_orders`; each one's own are in its task.json.
        toml = common.to_toml()
        if not (out / "config.toml").exists():  # first: a killed run must leave a folder that is recognized
            replace_file(out / "config.toml", toml)
        for own in groups:
            if own.has_folds and (own.folder / IDENTITY).exists():
                raise InputError(f"{own.folder}: was made without --folds; give another --out")
            for job in (*own.jobs, *own.twins):
                _check_folder(job)
        replace_file(out / "config.toml", toml)
        results = _train_all(groups, out, earlier, Callbacks(on_log, on_evaluation, on_checkpoint))
    return FinetuneResults({name: TaskResult(found) for name, found in results.items()})


def _folds(folds: int, columns: Mapping[str, Any], dev: object) -> list[dict[str, Any]]:
    if folds < 2:
        raise InputError(f"folds = {folds}: must be at least 2")
    if dev is not None or columns.get("dev_fraction", 0.1) != 0.1:
        raise InputError("--folds validates on parts of --train; leave --dev and --dev-fraction out")
    return [{**columns, "folds": (number, folds)} for number in range(folds)]


def _biases(task: Task, config: FinetuneSection) -> Iterator[str]:
    """Yields what is chosen on the examples of a fold that it is then scored on."""
    if config.select == "best":
        yield "each fold's score is a little too high, since it chose the step: give --finetune.select last"
    if config.calibrate:
        yield "each fold's temperature fits the examples that it is scored on: their calibration is too good"
    if task.kind == "multi-label" or task.has_unanswerable:
        what = "threshold of odds" if task.has_unanswerable else "thresholds of labels"
        yield f"each fold's {what} are chosen on the examples that they are scored on: the scores are a little too high"


def _check_classes(data: TaskData, folds: int) -> None:
    counts = (TASK_TYPES[data.task.kind].class_sizes(data.task, split) for split in (data.train, *data.dev))
    sizes = +sum(map(Counter, counts), Counter[str]())
    name = min(sizes, key=lambda name: sizes[name], default="")
    if sizes and sizes[name] < folds:
        raise InputError(
            f"{data.train.path}: --folds {folds} with {sizes[name]} examples of the class {name!r}; lower --folds, or "
            f"leave the class out with --label-map {name}="
        )


def _earlier_results(out: Path) -> Results:
    """Returns the results of other calls; raises InputError for a folder that does not hold a fine-tuning."""
    foreign = _visible(out)
    settings = out / "config.toml"
    if foreign and not (settings.is_file() and settings.read_text(errors="replace").startswith("[finetune]")):
        raise InputError(f"{out}: holds {foreign[0]}, which is not of a fine-tuning; choose another folder for --out")
    if "results.json" not in foreign:
        return {}
    try:
        return read_object(out / "results.json")
    except InputError as error:
        raise InputError(f"{error}; remove it: each seed's folder has its result.json") from None


def _visible(folder: Path) -> list[str]:
    """Returns names in a folder, without hidden and half-written files."""
    return [name for name in foreign_names(folder) if not name.startswith(".")]


def _check_folder(job: Job) -> None:
    """Writes what the results depend on; raises InputError if the folder has results of other settings or data."""
    path, now = job.folder / IDENTITY, json.loads(json.dumps(job.identity()))
    for folder in job.folder.glob("seed-*"):
        recover_all(folder)
    if not path.exists() and job.folder.exists() and _visible(job.folder):
        raise InputError(f"{path}: missing, though there are other files; choose another folder for --out")
    made = [*job.folder.glob(f"seed-*/{RESULT}"), *job.folder.glob("seed-*/checkpoints/step-*")]
    before = read_object(path) if made else {}
    before |= {"hardware": None, "finetune": present_names(before.get("finetune"), "finetune.")}
    if made and (found := first_difference(before, now | {"hardware": None})):
        raise InputError(f"{job.folder}: {found}; give the same to resume, or another --out")
    job.folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(now | {"hardware": job.hardware}, indent=2) + "\n")


def _train_all(groups: Sequence[TaskRuns], out: Path, earlier: Results, callbacks: Callbacks) -> Results:
    results: Results = {}
    num_tokens = sum(job.num_tokens for group in groups for job, _ in group.planned)
    with stop_requests() as stop, FinetuningProgress(num_tokens) as progress:
        for group in groups:
            for line in itertools.chain.from_iterable(job.describe() for job in group.jobs):
                progress.say(line)
            with use_compute(group.jobs[0].work.compute):
                for runs in _runs(group.planned, stop, progress, callbacks):
                    results[group.name] = summarize(group, runs)
                    replace_file(out / "results.json", json.dumps(earlier | results, indent=2) + "\n")
            found = results[group.name]
            seed = median_seed(found)
            draw_curves(group)  # before the report, which shows them
            scores = report_on(group, seed, found)
            if group.has_folds:
                found["out_of_fold"] = scores
                replace_file(out / "results.json", json.dumps(earlier | results, indent=2) + "\n")
            else:
                (job,) = group.jobs
                copy_submissions(out, job.folder, job.data, seed)
            if len(found["runs"]) > 1 or group.twins:
                progress.say(summary_text(group, found))
            progress.say(f"{group.name}: report on seed {seed}: {group.folder / 'report.md'}")
    return results


def _runs(
    planned: Sequence[tuple[Job, int]], stop: StopRequest, progress: FinetuningProgress, callbacks: Callbacks
) -> Iterator[list[dict[str, Any] | None]]:
    """Yields the results, None for an unfinished run: with those of earlier sessions, then again after each run."""
    found = [
        _earlier_run(job, seed, stop, progress) if (job.folder / f"seed-{seed}" / RESULT).exists() else None
        for job, seed in planned
    ]
    if any(found):
        yield found
    if None not in found:
        return
    first, _ = planned[0]
    with closing(FinetuneStep(first.work.model().to(first.device), first.work, first.num_processes)) as step:
        for number, (job, seed) in enumerate(planned):
            if found[number] is None:
                found[number] = _train(SeedRun(job, step, seed), stop, progress, callbacks)
                yield found


def _earlier_run(job: Job, seed: int, stop: StopRequest, progress: FinetuningProgress) -> dict[str, Any]:
    """Returns the result of a seed that an earlier session finished, scored again if data have changed."""
    folder = job.folder / f"seed-{seed}"
    result = read_finished(folder, job.task.metric)
    progress.skip(job.num_tokens)
    outdated, kept = outdated_splits(job, result), "from an earlier session"
    if outdated or result.get("splits", {}).keys() != job.predicted.keys():
        result = rescore(job, folder, result, outdated, stop)
        names = " and ".join(each.name for each in outdated)
        what = f"{names} predicted and scored again, as the data changed" if names else "removed splits are dropped"
        kept = f"the model is {kept}; {what}"
    progress.say(f"{_run_text(job, result)}, {kept}")
    return result


def _train(run: SeedRun, stop: StopRequest, progress: FinetuningProgress, callbacks: Callbacks) -> dict[str, Any]:
    job, name = run.job, f"{run.job.name} seed {run.seed}"
    progress.enter(name)
    for warning in run.warnings:
        progress.warn(f"warning: {warning}")
    if run.state.step:
        progress.say(f"{name}: resumes at step {run.state.step}")
        progress.skip(job.num_tokens * run.state.step // job.num_steps)
    if not run.train(stop, progress, callbacks):
        raise run.interruption(stop)
    progress.skip(job.num_tokens * (job.num_steps - run.state.step) // job.num_steps)
    result = run.finish(stop)
    progress.say(_run_text(job, result))
    progress.warn(f"{name}: warning: {result['warning']}" if "warning" in result else None)
    return result


def _run_text(job: Job, run: Mapping[str, Any]) -> str:
    scores = "  ".join(score_texts(run, job.majority))
    absent = "".join(f"; {split} has no example of {listed(names)}" for split, names in job.absent.items())
    steps = f"step {run['best_step']}" if "best_step" in run else f"all {job.num_steps} steps"
    steps += f" by {run['selected_by']}" if "selected_by" in run else ""
    steps += f", stopped at {run['stopped_step']}" if "stopped_step" in run else ""
    return f"{job.name} seed {run['seed']}: {scores}  ({steps}, {run['seconds']:.0f} s){absent}"


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
    centre, together = f"median {metric} {found['median']:.4f}", ""
    runs = f"{group.seeds} seed{'s' * (group.seeds > 1)}"
    if group.has_folds:
        centre = f"mean {metric} {found['means'][metric]:.4f} ± {found['deviations'][metric]:.4f}"
        runs = f"{len(group.jobs)} folds" + (f" with {runs} each" if group.seeds > 1 else "")
        together = f"; of all out-of-fold predictions together {found['out_of_fold'][metric]:.4f}"
    spread = f"{found['min']:.4f} to {found['max']:.4f}"
    return f"{group.name}: {centre}{beside} of {runs}, {spread}{together}"
