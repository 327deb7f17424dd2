"""`finetune`: trains every task with every seed from one encoder; results accumulate in DIR/results.json."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from electra_fast.data.object_store import local_file
from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, recover_all, replace_file
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.config import DEFAULT_RECIPE, FinetuneSection, recipe_config
from electra_fast.finetuning.readers.glue import copy_submissions
from electra_fast.finetuning.readers.labels import listed
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.summary import (
    Results,
    TaskRuns,
    draw_curves,
    median_seed,
    report_on,
    summarize,
    summary_text,
)
from electra_fast.finetuning.task import Task, TaskData
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.training.job import IDENTITY, Job, check_length, first_difference, make_job
from electra_fast.finetuning.training.results import RESULT, read_finished, score_texts
from electra_fast.finetuning.training.seed_run import SeedRun, outdated_splits, rescore
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.encoder import load_encoder, untrained
from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.messages import say
from electra_fast.model.compute import choose_device, use_compute
from electra_fast.progress import FinetuningProgress
from electra_fast.training.loggers import Callback, Callbacks, require_loggers
from electra_fast.training.run import exclusive


def finetune(
    task: str | Sequence[str],
    *,
    model: str | Path,
    out: str | Path,
    data: str | Path | None = None,
    train: Any = None,
    dev: Any = None,
    test: Any = None,
    seeds: int = 1,
    recipe: str = DEFAULT_RECIPE,
    overrides: Mapping[str, object] | None = None,
    role: str | None = None,
    folds: int | None = None,
    untrained_twin: bool = False,
    on_log: Callback | None = None,
    on_evaluation: Callback | None = None,
    on_checkpoint: Callback | None = None,
    **columns: Any,
) -> Results:
    """Fine-tunes an encoder on GLUE tasks or on own data, with seeds 0 to `seeds - 1` each.

    Leaves `out/TASK/seed-K/model/` (a Hugging Face folder), predictions beside it, `out/TASK/report.md` and
    `report.json` on the seed with the median score (or on all folds together), and `out/results.json`, whose content is
    returned: `{task: {"metric": name, "median": x, "medians": {every score: x}, "min": x, "max": x,
    "majority": {score: x}, "runs": [...], "seconds": x}}`; `majority` has the scores of the most frequent training
    answer. Called again after an interruption, it resumes at that seed and step; finished models are scored again if
    the content of `test` has changed, or with `finetune.select = last` that of `dev`, on which the best step depends.

    Args:
        task: A GLUE task (`cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli`, `rte`, `wnli`), several of them,
            `glue` for all those in `data`, `squad1`, `squad2`, or on own data `classification`, `regression`, `tagging`
            or `question-answering`.
        model: A run, a checkpoint or a Hugging Face folder.
        out: Output folder.
        data: A GLUE task's folder, one that has the tasks' folders, or SQuAD's.
        train: Own data: the path or URL of a .tsv, .csv, .jsonl or .parquet file, for tagging also of CoNLL columns,
            for questions of SQuAD's .json; or the data: a pandas or polars frame, a pyarrow Table, a `Dataset` of
            Hugging Face, or a list of dicts.
        dev: Own data to validate on; by default a part of `train`.
        test: Own data to predict, and to score if it has labels.
        seeds: Number of seeds.
        recipe: `fast`, `google` or `paper`.
        overrides: Keys of the configuration as on the command line, `{"finetune.epochs": 5}`.
        role: `discriminator`, `encoder` or `generator`; by default the first of them that the model has.
        folds: Cross-validation on own data: validates on each of so many parts of `train`, which is stratified as
            without `dev`, a model trained on the others, in `out/TASK/fold-K/seed-0/`. The last step's model is kept
            unless `overrides` say otherwise, since a fold must not choose the model that it scores. Adds
            `{"means": {score: x}, "deviations": {score: x}, "out_of_fold": {score: x}}` to the results: over the
            folds, and of all validation predictions together.
        untrained_twin: Also train the same network from random weights, with seed 0, in `out/TASK/untrained/`, and add
            its scores to the results as `untrained`.
        on_log: Called with each line of metrics.jsonl about training, `task` and `seed` added: `{"step", "loss",
            "grad_norm", "learning_rate", "seconds"}`.
        on_evaluation: Called likewise with each line about an evaluation: `{"step"}` and the validation scores by
            name. An exception in a callback is reported once and stops nothing; `StopTraining` stops the training and
            passes through, after a checkpoint.
        on_checkpoint: Called likewise when a checkpoint is complete: `{"step", "path"}`.
        columns: Keyword arguments of the reader of own data: `text`, `label`, `dev_fraction`, `seed`, and of some
            `group`, `labels`, `label_map`, `label_separator`, `quoting`, `delimiter`, `no_header`, `skip_bad_rows`,
            `scheme` (`own_data.read`, `tag_files.read_tagging`, `question_files.read_questions`).

    Raises FileNotFoundError, or ValueError naming the file, line, value and remedy; TrainingFailed if the loss is not
    finite; Interrupted after a checkpoint.
    """
    if seeds < 1:
        raise InputError(f"seeds = {seeds}: must be at least 1")
    out, device = Path(out), choose_device()
    given = (("train", train), ("dev", dev), ("test", test))
    files = {name: _file(name, each) for name, each in given if each is not None}
    settings = {name: str(value) for name, value in (overrides or {}).items()}
    if folds is not None and "finetune.patience" not in settings:
        settings.setdefault("finetune.select", "last")  # a fold must not choose the model that it scores
    encoder = load_encoder(model, role)
    common = recipe_config(recipe, "", encoder.shape, settings).finetune
    require_loggers("finetune.loggers", common.loggers)
    check_length(common, encoder)  # before large files are read
    folder = Path(data) if data is not None else None
    parts = [columns] if folds is None else _folds(folds, columns, dev)
    with contextlib.ExitStack() as copies:
        files = {name: copies.enter_context(local_file(path)) for name, path in files.items()}
        all_data = [each for part in parts for each in read_tasks(task, folder, files, part)]
    if folds is not None:
        _check_classes(all_data[0], folds)
        for line in _biases(all_data[0].task, common):
            say(f"warning: {line}")
    with exclusive(out):
        earlier = _earlier_results(out)
        jobs: dict[str, list[Job]] = {}
        for each in all_data:
            defaults, made = TASK_TYPES[each.task.kind].defaults, jobs.setdefault(each.task.name, [])
            sizes = len(each.train.texts), len(each.task.labels)
            config = recipe_config(recipe, each.task.name, encoder.shape, settings, defaults, *sizes)
            part = "" if folds is None else f"fold-{len(made)}"
            hardware, data_once = None, each
            if made:  # another fold
                hardware, data_once = made[0].hardware, dataclasses.replace(each, notes=())
            made.append(
                make_job(data_once, config, encoder, out / each.task.name / part, device, part=part, hardware=hardware)
            )
        other = untrained(encoder) if untrained_twin else None
        groups = [
            TaskRuns(
                out / name, made, [each.twin(other) for each in made if other is not None], seeds, folds is not None
            )
            for name, made in jobs.items()
        ]
        # Tasks may differ in `finetune.epochs` and `finetune.both_orders`; each one's own are in its task.json.
        text = recipe_config(recipe, "", encoder.shape, settings).to_toml()
        if not (out / "config.toml").exists():  # first: a killed run must leave a folder that is recognized
            replace_file(out / "config.toml", text)
        for group in groups:
            if group.has_folds and (group.folder / IDENTITY).exists():
                raise InputError(f"{group.folder}: was made without --folds; give another --out")
            for job in (*group.jobs, *group.twins):
                _check_folder(job)
        replace_file(out / "config.toml", text)
        return _train_all(groups, out, earlier, Callbacks(on_log, on_evaluation, on_checkpoint))


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


def _file(name: str, data: Any) -> Path:
    return Path(data) if isinstance(data, (str, os.PathLike)) else MemoryTable.of(name, data)


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
    if made and (found := first_difference(read_object(path) | {"hardware": None}, now | {"hardware": None})):
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
