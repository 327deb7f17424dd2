"""`reproduce`: trains the rows of one of the paper's comparisons at equal compute, fine-tunes them, and reports."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from electra_fast.child_process import describe_end
from electra_fast.config.config import Config
from electra_fast.data.corpus import Corpus
from electra_fast.errors import ElectraFastError, InputError, Interrupted
from electra_fast.files.atomic_files import foreign_names, replace_file
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.config import DEFAULT_RECIPE, recipe_config
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.training.job import first_difference
from electra_fast.interruption import stop_requests
from electra_fast.progress import RunsProgress
from electra_fast.reproduction.experiments import Experiment, make_experiment
from electra_fast.reproduction.plan import Plan, base_config, common_precision, estimate_seconds, row_configs
from electra_fast.reproduction.report import score, summarize, write_report
from electra_fast.reproduction.row_run import RunSettings, read_result
from electra_fast.reproduction.speed import measure_speed
from electra_fast.reproduction.workers import LOG, Slot, Workers, choose_slots, last_line
from electra_fast.training.corruptor import UNIGRAM, Corruptor
from electra_fast.training.evaluate import SEED
from electra_fast.training.run import exclusive

IDENTITY = "reproduce.json"
Results = dict[str, Any]


def reproduce(
    experiment: str,
    *,
    data: str | Path,
    tasks: str | Path,
    out: str | Path,
    preset: str = "small",
    recipe: str = "google",
    budget: float | None = None,
    minutes: float | None = None,
    seeds: int = 3,
    task: str = "glue",
    finetune_seeds: int = 1,
    corrupted_by: str | Path = UNIGRAM,
    workers: int = 0,
    overrides: Mapping[str, object] | None = None,
) -> Results:
    """Trains the rows of a comparison at equal compute, with several seeds each, and fine-tunes every one.

    Writes `out/table.md`, `out/results.json` (whose content is returned), `out/EXPERIMENT.png`, and the runs in
    `out/runs`. After an interruption, the same call resumes; more seeds add runs.

    Args:
        experiment: `objectives`, `generators`, `tying` or `sizes`.
        data: Corpus with a validation part (`prepare --holdout`).
        tasks: Folder of the GLUE tasks' folders.
        out: Output folder.
        preset: Size of the model.
        recipe: Recipe of pre-training.
        budget: True model FLOPs of a run's pre-training, which determine the steps of each row.
        minutes: Instead of `budget`: approximate duration of a pre-training of the first row on this machine.
        seeds: Runs per row: seeds 0 to `seeds - 1`.
        task: Tasks as for `finetune`; `glue`: all in `tasks`.
        finetune_seeds: Fine-tuning runs per task of each run; their median is the score.
        corrupted_by: Corruptor for the evaluation of every row, as for `evaluate`.
        workers: Concurrent runs; 0: one per GPU, or per core without one.
        overrides: Configuration keys of pre-training, and of fine-tuning (`finetune.`).

    Raises:
        ValueError, FileNotFoundError: An argument is wrong; nothing has been trained.
        Interrupted: A signal asked to stop; checkpoints were written.
        ElectraFastError: At the end, if runs have failed. Runs that diverged are part of the report instead.
    """
    _check_amounts(budget=budget, minutes=minutes, seeds=seeds, finetune_seeds=finetune_seeds)
    keys = {name: str(value) for name, value in (overrides or {}).items()}
    pretraining = {name: value for name, value in keys.items() if not name.startswith("finetune.")}
    finetuning = {name: value for name, value in keys.items() if name not in pretraining}
    # Scores are after the last step, as the paper's: the best of several would be flattered.
    finetuning = {"finetune.precision": common_precision(), "finetune.select": "last"} | finetuning
    corpus, all_tasks = _corpus(Path(data)), read_tasks(task, Path(tasks), {}, {})
    base = base_config(Config.preset(preset, recipe), corpus, pretraining)
    made = make_experiment(experiment, base, pretraining)
    first = made.rows[0].config
    recipe_config(DEFAULT_RECIPE, "", first.model, finetuning)  # raises if a key is wrong
    if budget is not None:
        row_configs(made, budget, pretraining)  # raises if it is too small, before measuring
    corruptor = _corruptor(corrupted_by, corpus, first.data.sequence_length)
    sizes = {each.task.name: len(each.train.texts) for each in all_tasks}
    settings = RunSettings(
        os.path.abspath(data), os.path.abspath(tasks), list(sizes), finetune_seeds, finetuning, corruptor
    )
    identity = {
        "experiment": experiment,
        "preset": preset,
        "recipe": recipe,
        "overrides": keys,
        "corpus": corpus.content_hash,
        "examples": sizes,
        "finetune_seeds": finetune_seeds,
        "corrupted_by": corruptor,
        "asked": {"budget": budget, "minutes": minutes},
    }
    out, slots = Path(out), choose_slots(workers, seeds * len(made.rows))
    with exclusive(out):
        facts = _settle(out, identity, made, slots[0])
        plan = Plan(out, made, row_configs(made, facts["budget"], pretraining), settings, seeds)
        replace_file(out / IDENTITY, json.dumps(facts, indent=2) + "\n")
        waiting = plan.prepare()
        seconds = estimate_seconds(plan, all_tasks, len(waiting), facts["flops_per_second"], len(slots))
        failed = _run(plan, facts, slots, waiting, _opening(plan, corpus, len(waiting), len(slots), seconds))
        results = _report(plan, facts)
    if failed:
        remedy = f"{out / 'table.md'} has what was finished, run again to retry"
        raise ElectraFastError(f"{out}: {len(failed)} of {len(waiting)} runs failed: {'; '.join(failed)}; {remedy}")
    return results


def _check_amounts(*, budget: float | None, minutes: float | None, seeds: int, finetune_seeds: int) -> None:
    if (budget is None) == (minutes is None):
        raise InputError("give one of --budget FLOPS and --minutes M")
    amounts = {"budget": budget, "minutes": minutes, "seeds": seeds, "finetune-seeds": finetune_seeds}
    for name, amount in amounts.items():
        if amount is not None and not 0 < amount < math.inf:
            raise InputError(f"--{name} {amount:g}: must be above 0")


def _corruptor(corrupted_by: str | Path, corpus: Corpus, sequence_length: int) -> str:
    """Returns the corruptor's name for the runs. Raises ValueError if it cannot corrupt rows of this length."""
    if corrupted_by == UNIGRAM:
        return UNIGRAM
    longest = Corruptor.load(Path(corrupted_by), corpus, SEED, torch.device("cpu")).max_positions
    if longest is not None and longest < sequence_length:
        remedy = "lower data.sequence_length, or choose another corruptor"
        raise InputError(f"{corrupted_by}: reads {longest} tokens, and the rows have {sequence_length}; {remedy}")
    return os.path.abspath(corrupted_by)


def _corpus(data: Path) -> Corpus:
    corpus = Corpus(data)
    if corpus.holdout is None:
        raise InputError(f"{data}: has no validation part to evaluate on; prepare the text with --holdout 0.01")
    return corpus


def _settle(out: Path, identity: Mapping[str, Any], made: Experiment, slot: Slot) -> dict[str, Any]:
    """Returns the identity with speed and budget, from an earlier call or measured.

    Raises ValueError if the earlier call was for another comparison, or the folder holds something else.
    """
    path, asked = out / IDENTITY, identity["asked"]
    if path.exists():
        known = read_object(path)
        if found := first_difference({name: known.get(name) for name in identity}, identity):
            raise InputError(f"{out}: {found}; give the same to resume, or another --out")
        return known
    if foreign := foreign_names(out):
        raise InputError(f"{out}: holds {foreign[0]}, but no {IDENTITY}; choose an empty folder for --out")
    speed = measure_speed(made.rows[0].config, slot)
    budget = asked["budget"] or float(f"{60 * speed * asked['minutes']:.2g}")
    return {**identity, "budget": budget, "flops_per_second": speed}


def _opening(plan: Plan, corpus: Corpus, num_waiting: int, num_slots: int, seconds: float) -> list[str]:
    """Lines for the user before the first run."""
    made, num_runs = plan.experiment, len(plan.runs())
    lines = [
        f"{plan.out}: {made.title} ({made.source}): {len(made.rows)} rows, seeds per row: {plan.seeds}, "
        f"fine-tuned on {', '.join(plan.settings.tasks)}",
        *plan.describe(corpus),
    ]
    if num_waiting:
        what = f"{num_waiting} of {num_runs} runs are left and" if num_waiting < num_runs else f"{num_runs} runs"
        lines.append(f"{what} take about {timedelta(seconds=round(seconds))}, {num_slots} at a time")
    return lines


def _run(
    plan: Plan, facts: Mapping[str, Any], slots: Sequence[Slot], folders: Sequence[Path], opening: Sequence[str]
) -> list[str]:
    """Runs everything, reporting after each run; returns a message per failed run. Raises Interrupted on a signal."""
    failed, runs, seconds = [], plan.runs(), []
    with (
        stop_requests() as stop,
        RunsProgress(len(runs), len(runs) - len(folders)) as progress,
        closing(Workers(slots)) as workers,
    ):
        for line in opening:
            progress.say(line)
        for ended in workers.run(folders, stop):
            if progress.is_live:
                progress.show([f"{folder.name}: {last_line(folder) or 'starts'}" for folder in workers.folders])
            if ended is None:
                continue
            seconds.append(ended.seconds)
            row, seed = runs[ended.folder]
            name, result = f"{row.name} seed {seed}", read_result(ended.folder)
            if result is None:
                why = describe_end(ended.code, last_line(ended.folder))
                failed.append(f"{name}: {why} ({ended.folder / LOG})")
                progress.warn(failed[-1])
            else:
                progress.finish(f"{name}: {_outcome(result)}", statistics.mean(seconds) / len(slots))
                _report(plan, facts)
    if stop:
        raise Interrupted(stop.signal, f"{plan.out}: interrupted; checkpoints written, run again to resume")
    return failed


def _outcome(result: Mapping[str, Any]) -> str:
    if "failed" in result:
        return f"failed: {result['failed']}"
    scores = [f"{name} {100 * found['median']:.1f}" for name, found in result["tasks"].items()]
    return f"score {score(result):.2f} ({', '.join(scores)})"


def _report(plan: Plan, facts: Mapping[str, Any]) -> Results:
    results = summarize(plan.experiment, {**facts, "sizes": plan.sizes()}, plan.finished())
    write_report(plan.out, plan.experiment, results)
    return results
