"""`finetune`: trains every task with every seed from one encoder; results accumulate in DIR/results.json."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.table import Table

from electra_fast.config.section import present_names
from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, recover_all, replace_file
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.config import DEFAULT_RECIPE, FinetuneSection, FinetuningConfig, Precision, recipe_config
from electra_fast.finetuning.readers.glue import copy_submissions
from electra_fast.finetuning.readers.labels import listed
from electra_fast.finetuning.readers.table_formats import file_or_table
from electra_fast.finetuning.task import Task, TaskData
from electra_fast.finetuning.task_data import OPTIONS, read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.task_type import TeachableType
from electra_fast.finetuning.training.job import IDENTITY, TEACHER_KEYS, Job, check_length, first_difference, make_job
from electra_fast.finetuning.training.results import RESULT, read_finished, score_texts
from electra_fast.finetuning.training.seed_run import SeedRun, outdated_splits, rescore
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.finetuning.training.summary import (
    BASELINES,
    TaskRuns,
    draw_curves,
    median_seed,
    report_on,
    summarize,
    summary_text,
    teaching_text,
)
from electra_fast.finetuning.training.teacher import Lesson, Teacher
from electra_fast.finetuning.unlabeled import files_or_tables, read_unlabeled, without_repeats
from electra_fast.huggingface.encoder import load_encoder, untrained
from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.messages import say
from electra_fast.model.compute import choose_device, use_compute
from electra_fast.progress import PIPE_WIDTH, FinetuningProgress
from electra_fast.results import Entries, console_lines
from electra_fast.training.loggers import Callback, Callbacks, require_loggers
from electra_fast.training.run import exclusive

Results = dict[str, dict[str, Any]]


class TaskResult(Entries):
    """The result of a task in results.json.

    It has `metric`, the name of the main score, with its `median`, `min` and `max` over the seeds; `medians` of all
    scores; `majority`, the scores of the majority-class baseline; `runs`, the scores of each seed; and `seconds`. With
    `folds`, also `means` and `deviations` over the folds, and `out_of_fold`, the scores of all validation predictions
    together; with `untrained_twin`, `untrained`. With `teacher`, the scores `teacher` and `alone` (the same network
    trained only on the labels; medians), `gap_closed`, the fraction of their difference in the metric that the student
    gains, and `seconds_per_thousand` texts of `student` and `teacher`.
    """


class FinetuneResults(Entries):
    """The content of results.json for the tasks of a call, a `TaskResult` per task; prints as a table."""

    def lines(self) -> Iterator[str]:
        """Yields the table of medians, in percent."""
        baselines = [name for name in BASELINES if any(result.get(name) for result in self.values())]
        headers = ("task", "metric", "median", "lowest", "highest", *baselines, "runs", "seconds")
        table = Table(*headers, box=None, padding=(0, 1, 0, 0))
        for name, result in self.items():
            numbers = (f"{100 * result[key]:.2f}" for key in ("median", "min", "max"))
            baseline_scores = (result.get(baseline, {}).get(result["metric"]) for baseline in baselines)
            shown = ("" if score is None else f"{100 * score:.2f}" for score in baseline_scores)
            runs = str(len(result["runs"]))
            table.add_row(name, result["metric"], *numbers, *shown, runs, f"{result['seconds']:.0f}")
        if len(self) > 1:
            mean = statistics.mean(result["median"] for result in self.values())
            table.add_row("mean", "", f"{100 * mean:.2f}")
        yield from console_lines(lambda console: console.print(table, markup=False), PIPE_WIDTH)
        yield from (f"{name}: {teaching_text(result)}" for name, result in self.items() if "teacher" in result)


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
    teacher: str | Path | None = None,
    unlabeled: Any = None,
    role: str | None = None,
    overrides: Mapping[str, object] | None = None,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
) -> FinetuneResults:
    """Fine-tunes an encoder on GLUE, on SQuAD or on your own data, once per seed.

    Writes `out/TASK/seed-K/model/` (a Hugging Face folder) with predictions next to it, `out/TASK/report.md` and
    `report.json` about the seed with the median score (or about all folds together), and `out/results.json`. After an
    interruption, the same call resumes at that seed and step. Finished models are scored again if the content of `test`
    has changed or, with `finetune.select = last`, the content of `dev`, which otherwise selects the best step.

    Args:
        model: A run, a checkpoint or a Hugging Face folder.
        out: Output folder.
        task: With `glue`: `cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli`, `rte` or `wnli`, or several of them;
            by default all tasks in the folder. With `squad`: `squad1` or `squad2`; by default the one in the folder.
            With `train`: `classification`, `regression`, `tagging` or `question-answering`.
        glue: The folder of a GLUE task, or a folder that contains the folders of several.
        squad: The folder of the SQuAD files.
        train: Training data: the path or URL of a .tsv, .csv, .jsonl or .parquet file, for tagging also a CoNLL file,
            for question answering also a SQuAD .json file; or a pandas or polars frame, a pyarrow Table, a Hugging Face
            `Dataset`, or a list of dicts.
        dev: Validation data; by default split off from `train`.
        test: Data to predict, and to score if it has labels.
        seeds: Number of seeds; they are 0, 1, 2, ...
        recipe: `fast`, `google` or `paper`; it sets the keys of the configuration by task, encoder and data.
        epochs: Passes over the training data; this and the next four arguments are keys of the configuration.
        lr: Peak learning rate of the head, the key `finetune.learning_rate`.
        batch_size: Examples per step.
        sequence_length: Maximum number of tokens per example, including [CLS] and [SEP].
        precision: Dtype of activations: `auto`, `fp32`, `fp16` or `bf16`.
        device: `auto` (CUDA if there is a GPU), `cpu`, `cuda` or `cuda:N`.
        text: The text column of `train`, or two columns for pairs; by default one of the usual names.
        label: The label column, or several 0/1 columns; by default one of the usual names.
        dev_text: The text columns of `dev`, if they differ.
        dev_label: The label columns of `dev`, if they differ.
        test_text: The text columns of `test`, if they differ.
        test_label: The label columns of `test`, if they differ.
        labels: The classes in the order of their ids; by default the labels in `train`, sorted.
        label_map: New names of labels, as a mapping or `OLD=NEW`; examples with an empty new name are dropped.
        label_separator: Separator of several labels in a cell.
        scheme: For tagging: `IO`, `IOB1`, `IOB2`, `IOBES`, `IOE`, `none`, or `auto` to infer it.
        quoting: Quotes around the cells of .csv and .tsv: `csv`, `backslash`, `none`, or `auto`.
        delimiter: Cell separator; by default inferred from the extension and the first line.
        no_header: The first line is data, and the columns are named 0, 1, 2 and so on.
        skip_bad_rows: Maximum number of unusable rows to skip, over all files.
        dev_fraction: Fraction of `train` to validate on if there is no `dev`.
        group: A column of `train`: a split keeps rows with the same value together. Equal texts always stay together.
        split_seed: Seed of that split.
        folds: K for stratified K-fold cross-validation on `train`, in `out/TASK/fold-K/seed-0/`. By default the model
            of the last step is kept, since a fold must not select the model that it scores.
        untrained_twin: Also train the untrained baseline, from random weights with seed 0, in `out/TASK/untrained/`.
        teacher: A fine-tuned folder of `finetune` or `transformers` with the same classes. The model also learns from
            its outputs (keys `finetune.teacher_weight` and `finetune.teacher_temperature`). For comparison, the same
            network is trained only on the labels, in `out/TASK/alone/`. The teacher's answers are in `out/teacher/`.
        unlabeled: One or several files or tables, like `train`, whose texts are learned only from the teacher's
            answers; an epoch has the labeled and the unlabeled examples, shuffled together.
        role: `discriminator`, `encoder` or `generator`; by default the first of them that the model has.
        overrides: Any keys of the configuration, such as `{"finetune.epochs": 5}`.
        on_log: Called with each training line of metrics.jsonl, with `task` and `seed` added: `{"step", "loss",
            "grad_norm", "learning_rate", "seconds"}`.
        on_evaluation: Called with each evaluation line of metrics.jsonl: `{"step"}` and the validation scores by name.
            An exception in a callback is reported once, and training continues; `StopTraining` stops training after a
            checkpoint and is raised to the caller.
        on_checkpoint: Called when a checkpoint is complete: `{"step", "path"}`.

    Returns:
        A `TaskResult` by task: the content of results.json.

    Raises:
        FileNotFoundError, ValueError: The message names the file, line, value and remedy.
        TrainingFailed: The loss is not finite.
        Interrupted: A signal stopped training, after a checkpoint.
    """
    arguments = locals()
    columns = {name: arguments[name] for name in OPTIONS} | {"seed": split_seed}
    short = {name: arguments[name] for name in FinetuningConfig.SHORT_NAMES if arguments[name] is not None}
    if seeds < 1:
        raise InputError(f"seeds = {seeds}: must be at least 1")
    out = Path(out)
    torch_device = choose_device(device)
    tables = {"train": train, "dev": dev, "test": test}
    files = {name: file_or_table(name, table) for name, table in tables.items() if table is not None}
    settings = FinetuningConfig.values_of([*(overrides or {}).items(), *short.items()])
    if folds is not None and "finetune.patience" not in settings:
        settings.setdefault("finetune.select", "last")  # a fold must not choose the model that it scores
    encoder = load_encoder(model, role)
    common = recipe_config(recipe, "", encoder.shape, settings)
    require_loggers("finetune.loggers", common.finetune.loggers)
    check_length(common.finetune, encoder)  # before large files are read
    folders = {name: Path(arguments[name]) for name in ("glue", "squad") if arguments[name] is not None}
    parts = [columns] if folds is None else _folds(folds, columns, dev)
    teacher_options = ["unlabeled"] if unlabeled is not None else []
    teacher_options += [key for key in settings if key.removeprefix("finetune.") in TEACHER_KEYS]
    if teacher is None and teacher_options:
        raise InputError(f"--{teacher_options[0]}: needs --teacher FOLDER, a fine-tuned model to learn from")
    with contextlib.ExitStack() as copies:
        files = {name: copies.enter_context(local_file(path)) for name, path in files.items()}
        all_data = [data for part in parts for data in read_tasks(task, **folders, files=files, columns=part)]
    lessons: list[Lesson | None] = [None] * len(all_data)
    if teacher is not None:
        teacher_model = Teacher(Path(teacher), out / "teacher", torch_device)
        all_data, lessons = _lessons(teacher_model, all_data, unlabeled, columns)
    if folds is not None:
        _check_classes(all_data[0], folds)
        for line in _bias_warnings(all_data[0].task, common.finetune):
            say(f"warning: {line}")
    with exclusive(out):
        earlier = _earlier_results(out)
        jobs: dict[str, list[Job]] = {}
        alone: list[Job] = []
        for data, lesson in zip(all_data, lessons, strict=True):
            defaults = TASK_TYPES[data.task.kind].defaults
            task_jobs = jobs.setdefault(data.task.name, [])
            labeled = len(data.train.texts)
            num_classes = len(data.task.labels)
            unlabeled_texts = 0 if lesson is None or lesson.unlabeled is None else len(lesson.unlabeled.texts)
            config, alone_config = (
                recipe_config(recipe, data.task.name, encoder.shape, settings, defaults, size, num_classes)
                for size in (labeled + unlabeled_texts, labeled)
            )
            part = "" if folds is None else f"fold-{len(task_jobs)}"
            folder = out / data.task.name / part
            hardware = task_jobs[0].hardware if task_jobs else None
            noted = dataclasses.replace(data, notes=()) if task_jobs else data  # all folds have the same notes
            options: dict[str, Any] = {"part": part, "hardware": hardware, "lesson": lesson}
            task_jobs.append(make_job(noted, config, encoder, folder, torch_device, **options))
            if lesson is not None:
                alone.append(task_jobs[-1].alone(alone_config.finetune))

        blank = untrained(encoder) if untrained_twin else None
        groups = []
        for name, task_jobs in jobs.items():
            baselines = [] if blank is None else [job.untrained_baseline(blank) for job in task_jobs]
            groups.append(TaskRuns(out / name, task_jobs, baselines, seeds, folds is not None, alone))
        # Tasks may differ in `finetune.epochs` and `finetune.both_orders`; a task's values are in its task.json.
        toml = common.to_toml()
        if not (out / "config.toml").exists():  # first, so that the folder of a killed run is recognized
            replace_file(out / "config.toml", toml)
        for group_runs in groups:
            if group_runs.has_folds and (group_runs.folder / IDENTITY).exists():
                raise InputError(f"{group_runs.folder}: was written without --folds; choose another --out")
            for job in (*group_runs.jobs, *group_runs.alone, *group_runs.baselines):
                _check_folder(job)
        replace_file(out / "config.toml", toml)
        results = _train_all(groups, out, earlier, Callbacks(on_log, on_evaluation, on_checkpoint))
    return FinetuneResults({name: TaskResult(result) for name, result in results.items()})


def _lessons(
    teacher: Teacher, all_data: Sequence[TaskData], unlabeled: Any, columns: Mapping[str, Any]
) -> tuple[list[TaskData], list[Lesson | None]]:
    """Returns the data with the teacher's notes, and a lesson per task; raises InputError for unsuitable data."""
    first = all_data[0]
    if not isinstance(TASK_TYPES[first.task.kind], TeachableType):
        raise InputError(f"--teacher: not supported for {first.task.kind}; remove it")
    if len({data.task.name for data in all_data}) > 1:
        raise InputError(f"--teacher {teacher.folder}: is for a single task; choose it with --task")
    extra, notes = read_unlabeled(files_or_tables(unlabeled), first, columns) if unlabeled is not None else (None, [])
    all_noted = list[TaskData]()
    lessons = list[Lesson | None]()
    for data in all_data:
        order = teacher.check(data.task, len(data.train.texts[0]))
        unseen = None
        unseen_notes = list[str]()
        if extra is not None:
            unseen, unseen_notes = without_repeats(extra, data)
        all_noted.append(dataclasses.replace(data, notes=(*data.notes, *teacher.notes, *notes, *unseen_notes)))
        lessons.append(Lesson(teacher, order, unseen if unseen is not None and unseen.texts else None))
    return all_noted, lessons


def _folds(folds: int, columns: Mapping[str, Any], dev: object) -> list[dict[str, Any]]:
    if folds < 2:
        raise InputError(f"folds = {folds}: must be at least 2")
    if dev is not None or columns.get("dev_fraction", 0.1) != 0.1:
        raise InputError("--folds: validates on parts of --train; remove --dev and --dev-fraction")
    return [{**columns, "folds": (number, folds)} for number in range(folds)]


def _bias_warnings(task: Task, config: FinetuneSection) -> Iterator[str]:
    """Yields a warning for each choice that is made on the examples that a fold is scored on."""
    if config.select == "best":
        yield "each fold's score is a little too high, since it selects the step; pass --finetune.select last"
    if config.calibrate:
        yield "each fold's temperature is fitted on the examples that it is scored on: calibration seems too good"
    if task.kind == "multi-label" or task.has_unanswerable:
        thresholds = "odds threshold is" if task.has_unanswerable else "label thresholds are"
        yield f"each fold's {thresholds} chosen on the examples that it is scored on: scores are a little too high"


def _check_classes(data: TaskData, folds: int) -> None:
    counts = (TASK_TYPES[data.task.kind].class_sizes(data.task, split) for split in (data.train, *data.dev))
    sizes = +sum(map(Counter, counts), Counter[str]())
    name = min(sizes, key=lambda name: sizes[name], default="")
    if sizes and sizes[name] < folds:
        raise InputError(
            f"{data.train.path}: only {sizes[name]} examples of the class {name!r} for --folds {folds}; lower --folds, "
            f"or drop the class with --label-map {name}="
        )


def _earlier_results(out: Path) -> Results:
    """Returns the results of earlier calls; raises InputError if the folder is not of a fine-tuning."""
    foreign = _visible_names(out)
    settings = out / "config.toml"
    if foreign and not (settings.is_file() and settings.read_text(errors="replace").startswith("[finetune]")):
        raise InputError(f"{out}: contains {foreign[0]} and is not a fine-tuning folder; choose another --out")
    if "results.json" not in foreign:
        return {}
    try:
        return read_object(out / "results.json")
    except InputError as error:
        raise InputError(f"{error}; remove the file: the folder of each seed has a result.json") from None


def _visible_names(folder: Path) -> list[str]:
    """Returns the names in a folder, without hidden and incomplete files."""
    return [name for name in foreign_names(folder) if not name.startswith(".")]


def _check_folder(job: Job) -> None:
    """Writes the job's identity; raises InputError if the folder has results of other settings or data."""
    path = job.folder / IDENTITY
    now = json.loads(json.dumps(job.identity()))
    for folder in job.folder.glob("seed-*"):
        recover_all(folder)
    if not path.exists() and job.folder.exists() and _visible_names(job.folder):
        raise InputError(f"{path}: missing, but the folder has other files; choose another folder for --out")
    files = [*job.folder.glob(f"seed-*/{RESULT}"), *job.folder.glob("seed-*/checkpoints/step-*")]
    before = read_object(path) if files else {}
    before |= {"hardware": None, "finetune": present_names(before.get("finetune"), "finetune.")}
    if files and (difference := first_difference(before, now | {"hardware": None})):
        raise InputError(f"{job.folder}: {difference}; use the same value to resume, or choose another --out")
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
                for runs in _train_planned(group.planned, stop, progress, callbacks):
                    if not any(runs[: len(group.jobs) * group.seeds]):
                        continue  # only comparisons (without a teacher, or untrained) are finished
                    known = results.get(group.name) or earlier.get(group.name) or {}
                    results[group.name] = summarize(group, runs, known)
                    replace_file(out / "results.json", json.dumps(earlier | results, indent=2) + "\n")
            result = results[group.name]
            seed = median_seed(result)
            draw_curves(group)  # before the report, which includes them
            scores = report_on(group, seed, result)
            if group.has_folds:
                result["out_of_fold"] = scores
                replace_file(out / "results.json", json.dumps(earlier | results, indent=2) + "\n")
            else:
                (job,) = group.jobs
                copy_submissions(out, job.folder, job.data, seed)
            if len(result["runs"]) > 1 or group.baselines or group.alone:
                progress.say(summary_text(group, result))
            progress.say(f"{group.name}: report on seed {seed}: {group.folder / 'report.md'}")
    return results


def _train_planned(
    planned: Sequence[tuple[Job, int]], stop: StopRequest, progress: FinetuningProgress, callbacks: Callbacks
) -> Iterator[list[dict[str, Any] | None]]:
    """Yields the results so far, None for an unfinished run: of earlier sessions, then again after each run."""
    results = [
        _earlier_run(job, seed, stop, progress) if (job.folder / f"seed-{seed}" / RESULT).exists() else None
        for job, seed in planned
    ]
    if any(results):
        yield results
    if None not in results:
        return
    first, _ = planned[0]
    with closing(FinetuneStep(first.work.model().to(first.device), first.work, first.num_processes)) as step:
        for number, (job, seed) in enumerate(planned):
            if results[number] is None:
                results[number] = _train(SeedRun(job, step, seed), stop, progress, callbacks)
                yield results


def _earlier_run(job: Job, seed: int, stop: StopRequest, progress: FinetuningProgress) -> dict[str, Any]:
    """Returns the result of a seed that an earlier session finished; scores it again if data have changed."""
    folder = job.folder / f"seed-{seed}"
    result = read_finished(folder, job.task.metric)
    progress.skip(job.num_tokens)
    outdated = outdated_splits(job, result)
    origin = "from an earlier session"
    if outdated or result.get("splits", {}).keys() != job.predicted.keys():
        result = rescore(job, folder, result, outdated, stop)
        names = " and ".join(split.name for split in outdated)
        change = f"{names} predicted and scored again, as the data changed" if names else "removed splits are dropped"
        origin = f"model {origin}; {change}"
    progress.say(f"{_run_text(job, result)}, {origin}")
    return result


def _train(run: SeedRun, stop: StopRequest, progress: FinetuningProgress, callbacks: Callbacks) -> dict[str, Any]:
    job = run.job
    name = f"{run.job.name} seed {run.seed}"
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
    absent = "".join(f"; {split} has no examples of {listed(names)}" for split, names in job.absent.items())
    steps = f"step {run['best_step']}" if "best_step" in run else f"all {job.num_steps} steps"
    steps += f" by {run['selected_by']}" if "selected_by" in run else ""
    steps += f", stopped at {run['stopped_step']}" if "stopped_step" in run else ""
    return f"{job.name} seed {run['seed']}: {scores}  ({steps}, {run['seconds']:.0f} s){absent}"
