"""`finetune`: trains every task with every seed from one encoder; results accumulate in DIR/results.json."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from electra_fast.errors import InputError
from electra_fast.files.atomic_files import foreign_names, recover_all, replace_file
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.config import DEFAULT_RECIPE, recipe_config
from electra_fast.finetuning.readers.glue import copy_submissions
from electra_fast.finetuning.readers.labels import listed
from electra_fast.finetuning.readers.memory_table import MemoryTable
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.training.job import IDENTITY, Job, check_length, first_difference, make_job
from electra_fast.finetuning.training.results import RESULT, read_finished, score_texts, scores_of
from electra_fast.finetuning.training.seed_run import SeedRun, outdated_splits, rescore
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.model.compute import choose_device, use_compute
from electra_fast.progress import FinetuningProgress
from electra_fast.training.run import exclusive

Results = dict[str, dict[str, Any]]


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
    **columns: Any,
) -> Results:
    """Fine-tunes an encoder on GLUE tasks or on own data, with seeds 0 to `seeds - 1` each.

    Leaves `out/TASK/seed-K/model/` (a Hugging Face folder), predictions beside it, and `out/results.json`, whose
    content is returned: `{task: {"metric": name, "median": x, "medians": {every score: x}, "min": x, "max": x,
    "majority": {score: x}, "runs": [...], "seconds": x}}`; `majority` has the scores of the most frequent training
    answer. Called again after an interruption, it resumes at that seed and step; finished models are scored again if
    the content of `dev` or `test` has changed.

    Args:
        task: A GLUE task (`cola`, `sst2`, `mrpc`, `stsb`, `qqp`, `mnli`, `qnli`, `rte`, `wnli`), several of them,
            `glue` for all those in `data`, `squad1`, `squad2`, or on own data `classification`, `regression`, `tagging`
            or `question-answering`.
        model: A run, a checkpoint or a Hugging Face folder.
        out: Output folder.
        data: A GLUE task's folder, one that has the tasks' folders, or SQuAD's.
        train: Own data: the path of a .tsv, .csv, .jsonl or .parquet file, for tagging also of CoNLL columns, for
            questions of SQuAD's .json; or the data: a pandas or polars frame, a pyarrow Table, a `Dataset` of Hugging
            Face, or a list of dicts.
        dev: Own data to validate on; by default a part of `train`.
        test: Own data to predict, and to score if it has labels.
        seeds: Number of seeds.
        recipe: `fast`, `google` or `paper`.
        overrides: Keys of the configuration as on the command line, `{"finetune.epochs": 5}`.
        role: `discriminator`, `encoder` or `generator`; by default the first of them that the model has.
        columns: Keyword arguments of the reader of own data: `text`, `label`, `dev_fraction`, `seed`, and of some
            `labels`, `label_map`, `label_separator`, `quoting`, `delimiter`, `skip_bad_rows`, `scheme`
            (`own_data.read`, `tag_files.read_tagging`, `question_files.read_questions`).

    Raises FileNotFoundError, or ValueError naming the file, line, value and remedy; TrainingFailed if the loss is not
    finite; Interrupted after a checkpoint.
    """
    if seeds < 1:
        raise InputError(f"seeds = {seeds}: must be at least 1")
    out, device = Path(out), choose_device()
    given = (("train", train), ("dev", dev), ("test", test))
    files = {name: _file(name, each) for name, each in given if each is not None}
    settings = {name: str(value) for name, value in (overrides or {}).items()}
    encoder = load_encoder(model, role)
    check_length(recipe_config(recipe, "", encoder.shape, settings).finetune, encoder)  # before large files are read
    all_data = read_tasks(task, Path(data) if data is not None else None, files, columns)
    with exclusive(out):
        earlier = _earlier_results(out)
        jobs = []
        for each in all_data:
            defaults = TASK_TYPES[each.task.kind].defaults
            config = recipe_config(recipe, each.task.name, encoder.shape, settings, defaults)
            jobs.append(make_job(each, config, encoder, out / each.task.name, device))
        # Tasks may differ in `finetune.epochs` and `finetune.both_orders`; each one's own are in its task.json.
        text = recipe_config(recipe, "", encoder.shape, settings).to_toml()
        if not (out / "config.toml").exists():  # first: a killed run must leave a folder that is recognized
            replace_file(out / "config.toml", text)
        for job in jobs:
            _check_folder(job)
        replace_file(out / "config.toml", text)
        return _train_all(jobs, seeds, out, earlier)


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


def _train_all(jobs: Sequence[Job], seeds: int, out: Path, earlier: Results) -> Results:
    results: Results = {}
    with stop_requests() as stop, FinetuningProgress(sum(job.num_tokens for job in jobs) * seeds) as progress:
        for job in jobs:
            for line in job.describe():
                progress.say(line)
            with use_compute(job.work.compute):
                for runs in _runs(job, seeds, stop, progress):
                    results[job.task.name] = _summary(job, runs)
                    replace_file(out / "results.json", json.dumps(earlier | results, indent=2) + "\n")
            if seeds > 1:
                progress.say(_summary_text(job, results[job.task.name]))
            copy_submissions(out, job.folder, job.data, _median_seed(job, results[job.task.name]))
    return results


def _runs(job: Job, seeds: int, stop: StopRequest, progress: FinetuningProgress) -> Iterator[list[dict[str, Any]]]:
    """Yields the results of the finished seeds: those of earlier sessions, then again after each seed."""
    runs: dict[int, dict[str, Any]] = {}
    for seed in range(seeds):
        folder = job.folder / f"seed-{seed}"
        if (folder / RESULT).exists():
            runs[seed] = _earlier_run(job, folder, stop, progress)
    if runs:
        yield list(runs.values())
    if len(runs) == seeds:
        return
    model = job.work.model().to(job.device)
    with closing(FinetuneStep(model, job.work, job.num_processes)) as step:
        for seed in range(seeds):
            if seed not in runs:
                runs[seed] = _train(SeedRun(job, step, seed), stop, progress)
                yield [runs[each] for each in sorted(runs)]


def _earlier_run(job: Job, folder: Path, stop: StopRequest, progress: FinetuningProgress) -> dict[str, Any]:
    """Returns the result of a seed that an earlier session finished, scored again if data have changed."""
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


def _train(run: SeedRun, stop: StopRequest, progress: FinetuningProgress) -> dict[str, Any]:
    job, name = run.job, f"{run.job.task.name} seed {run.seed}"
    progress.enter(name)
    for warning in run.warnings:
        progress.warn(f"warning: {warning}")
    if run.state.step:
        progress.say(f"{name}: resumes at step {run.state.step}")
        progress.skip(job.num_tokens * run.state.step // job.num_steps)
    if not run.train(stop, progress):
        raise run.interruption(stop)
    result = run.finish(stop)
    progress.say(_run_text(job, result))
    progress.warn(f"{name}: {result['warning']}" if "warning" in result else None)
    return result


def _run_text(job: Job, run: Mapping[str, Any]) -> str:
    scores = "  ".join(score_texts(run, job.majority))
    absent = "".join(f"; {split} has no example of {listed(names)}" for split, names in job.absent.items())
    return f"{job.task.name} seed {run['seed']}: {scores}  ({run['seconds']:.0f} s){absent}"


def _summary(job: Job, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    scores = [run[job.task.metric] for run in runs]
    return {
        "metric": job.task.metric,
        "median": statistics.median(scores),
        "medians": {name: statistics.median(run[name] for run in runs) for name in scores_of(runs[0])},
        "min": min(scores),
        "max": max(scores),
        "majority": job.majority,
        **({"absent_classes": job.absent} if job.absent else {}),
        "runs": [{name: value for name, value in run.items() if name != "splits"} for run in runs],
        "seconds": round(sum(run["seconds"] for run in runs), 3),
    }


def _median_seed(job: Job, found: Mapping[str, Any]) -> int:
    """Returns the seed whose score is nearest to the median."""
    run = min(found["runs"], key=lambda run: abs(run[job.task.metric] - found["median"]))
    return int(run["seed"])


def _summary_text(job: Job, found: Mapping[str, Any]) -> str:
    majority = f" (majority {job.majority[found['metric']]:.4f})" if found["metric"] in job.majority else ""
    return (
        f"{job.task.name}: median {found['metric']} {found['median']:.4f}{majority} of {len(found['runs'])} seeds, "
        f"{found['min']:.4f} to {found['max']:.4f}"
    )


def print_table(results: Results) -> None:
    """Prints a row per task and their mean."""
    table = Table("task", "metric", "median", "lowest", "highest", "majority", "seeds", "seconds")
    table.columns[0].no_wrap = True
    for name, found in results.items():
        numbers = (f"{100 * found[key]:.2f}" for key in ("median", "min", "max"))
        majority = found["majority"].get(found["metric"])
        shown = "" if majority is None else f"{100 * majority:.2f}"
        table.add_row(name, found["metric"], *numbers, shown, str(len(found["runs"])), f"{found['seconds']:.0f}")
    mean = statistics.mean(found["median"] for found in results.values())
    if len(results) > 1:
        table.add_row("mean", "", f"{100 * mean:.2f}", "", "", "", "", "")
    Console(markup=False).print(table)
