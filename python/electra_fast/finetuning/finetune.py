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
from pathlib import Path
from typing import Any

from rich.console import Console
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
from electra_fast.results import Entries
from electra_fast.training.loggers import Callback, Callbacks, require_loggers
from electra_fast.training.run import exclusive

Results = dict[str, dict[str, Any]]


class TaskResult(Entries):
    """The result of a task in results.json.

    `metric`, the name of its main score, of which `median`, `min` and `max` are over the seeds; `medians` of every
    score; `majority`, the scores of the most frequent training answer; `runs`, the scores of each seed; `seconds`. With
    `folds` also the `means` and `deviations` over the folds, and the scores `out_of_fold`, of all validation
    predictions together; with `untrained_twin` the scores `untrained`. With `teacher` the scores `alone`, of the same
    network trained on the labels alone (medians), and `teacher`, `gap_closed`, the share of their difference in the
    metric that the student gains, and `seconds_per_thousand` texts of `student` and `teacher`.
    """


class FinetuneResults(Entries):
    """The content of results.json for the tasks of a call: a `TaskResult` per task; prints as a table."""

    def lines(self) -> Iterator[str]:
        """Yields the table of medians, in percent."""
        baselines = [name for name in BASELINES if any(found.get(name) for found in self.values())]
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
        yield from (f"{name}: {teaching_text(found)}" for name, found in self.items() if "teacher" in found)


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
        teacher: A fine-tuned folder, of `finetune` or of `transformers`, with the same classes. The model learns from
            its outputs too, `finetune.teacher_weight` and `finetune.teacher_temperature` say how. Also trains it on the
            labels alone, in `out/TASK/alone/`. The teacher's answers are kept in `out/teacher/`.
        unlabeled: One or several files or tables, as for `train`, whose texts are learned from the teacher's answers
            alone; an epoch has the labeled and the unlabeled examples, shuffled together.
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
    out = Path(out)
    place = choose_device(device)
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
    needy = ["unlabeled"] if unlabeled is not None else []
    needy += [key for key in settings if key.removeprefix("finetune.") in TEACHER_KEYS]
    if teacher is None and needy:
        raise InputError(f"--{needy[0]} needs --teacher FOLDER, a fine-tuned model to learn from")
    with contextlib.ExitStack() as copies:
        files = {name: copies.enter_context(local_file(path)) for name, path in files.items()}
        all_data = [each for part in parts for each in read_tasks(task, **folders, files=files, columns=part)]
    lessons: list[Lesson | None] = [None] * len(all_data)
    if teacher is not None:
        all_data, lessons = _lessons(Teacher(Path(teacher), out / "teacher", place), all_data, unlabeled, columns)
    if folds is not None:
        _check_classes(all_data[0], folds)
        for line in _biases(all_data[0].task, common.finetune):
            say(f"warning: {line}")
    with exclusive(out):
        earlier = _earlier_results(out)
        jobs: dict[str, list[Job]] = {}
        alone: list[Job] = []
        for each, lesson in zip(all_data, lessons, strict=True):
            defaults = TASK_TYPES[each.task.kind].defaults
            made = jobs.setdefault(each.task.name, [])
            labeled = len(each.train.texts)
            num_classes = len(each.task.labels)
            unlabeled_texts = 0 if lesson is None or lesson.unlabeled is None else len(lesson.unlabeled.texts)
            config, alone_config = (
                recipe_config(recipe, each.task.name, encoder.shape, settings, defaults, size, num_classes)
                for size in (labeled + unlabeled_texts, labeled)
            )
            part = "" if folds is None else f"fold-{len(made)}"
            folder = out / each.task.name / part
            hardware = made[0].hardware if made else None
            data = dataclasses.replace(each, notes=()) if made else each  # another fold has the same notes
            made.append(make_job(data, config, encoder, folder, place, part=part, hardware=hardware, lesson=lesson))
            if lesson is not None:
                alone.append(made[-1].alone(alone_config.finetune))
        other = untrained(encoder) if untrained_twin else None
        groups = []
        for name, made in jobs.items():
            twins = [] if other is None else [each.twin(other) for each in made]
            groups.append(TaskRuns(out / name, made, twins, seeds, folds is not None, alone))
        # Tasks may differ in `finetune.epochs` and `finetune.both_orders`; each one's own are in its task.json.
        toml = common.to_toml()
        if not (out / "config.toml").exists():  # first: a killed run must leave a folder that is recognized
            replace_file(out / "config.toml", toml)
        for own in groups:
            if own.has_folds and (own.folder / IDENTITY).exists():
                raise InputError(f"{own.folder}: was made without --folds; give another --out")
            for job in (*own.jobs, *own.alone, *own.twins):
                _check_folder(job)
        replace_file(out / "config.toml", toml)
        results = _train_all(groups, out, earlier, Callbacks(on_log, on_evaluation, on_checkpoint))
    return FinetuneResults({name: TaskResult(found) for name, found in results.items()})


def _lessons(
    teacher: Teacher, all_data: Sequence[TaskData], unlabeled: Any, columns: Mapping[str, Any]
) -> tuple[list[TaskData], list[Lesson | None]]:
    """Returns the data with further notes, and what is learned with each; raises InputError if it cannot be."""
    first = all_data[0]
    if not isinstance(TASK_TYPES[first.task.kind], TeachableType):
        raise InputError(f"--teacher is not for {first.task.kind}")
    if len({each.task.name for each in all_data}) > 1:
        raise InputError(f"--teacher {teacher.folder}: is for one task; choose it with --task")
    extra, notes = read_unlabeled(files_or_tables(unlabeled), first, columns) if unlabeled is not None else (None, [])
    found = list[TaskData]()
    lessons = list[Lesson | None]()
    for data in all_data:
        order = teacher.check(data.task, len(data.train.texts[0]))
        own = None
        more = list[str]()
        if extra is not None:
            own, more = without_repeats(extra, data)
        found.append(dataclasses.replace(data, notes=(*data.notes, *teacher.notes, *notes, *more)))
        lessons.append(Lesson(teacher, order, own if own is not None and own.texts else None))
    return found, lessons


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
    path = job.folder / IDENTITY
    now = json.loads(json.dumps(job.identity()))
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
                    if not any(runs[: len(group.jobs) * group.seeds]):
                        continue  # an earlier session's are those of students alone, or of twins
                    known = results.get(group.name) or earlier.get(group.name) or {}
                    results[group.name] = summarize(group, runs, known)
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
            if len(found["runs"]) > 1 or group.twins or group.alone:
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
    outdated = outdated_splits(job, result)
    kept = "from an earlier session"
    if outdated or result.get("splits", {}).keys() != job.predicted.keys():
        result = rescore(job, folder, result, outdated, stop)
        names = " and ".join(each.name for each in outdated)
        what = f"{names} predicted and scored again, as the data changed" if names else "removed splits are dropped"
        kept = f"the model is {kept}; {what}"
    progress.say(f"{_run_text(job, result)}, {kept}")
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
    absent = "".join(f"; {split} has no example of {listed(names)}" for split, names in job.absent.items())
    steps = f"step {run['best_step']}" if "best_step" in run else f"all {job.num_steps} steps"
    steps += f" by {run['selected_by']}" if "selected_by" in run else ""
    steps += f", stopped at {run['stopped_step']}" if "stopped_step" in run else ""
    return f"{job.name} seed {run['seed']}: {scores}  ({steps}, {run['seconds']:.0f} s){absent}"
