"""`reproduce`: trains the rows of a comparison of the paper at equal compute, fine-tunes them, and writes a report.

Runs are sequential: all rows with one seed, then all rows with the next. OUT/runs/ROW-seed-K/ has the pre-training in
run/, tasks.json and evaluation.json, or failed.json if training diverged.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from electra_fast.config.config import AUTO, Config
from electra_fast.config.section import present_names
from electra_fast.data.corpus import Corpus
from electra_fast.data.mixture import Mixture
from electra_fast.errors import Diverged, ElectraFastError, InputError, TrainingFailed
from electra_fast.files.atomic_files import foreign_names, remove, replace_file
from electra_fast.files.json_files import json_text, read_object
from electra_fast.finetuning.config import DEFAULT_RECIPE, recipe_config
from electra_fast.finetuning.finetune import finetune
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.training.job import first_difference
from electra_fast.hardware.flops import flops_per_token
from electra_fast.messages import say
from electra_fast.reproduction.experiments import (
    Experiment,
    base_config,
    common_precision,
    make_experiment,
    row_configs,
    training_size,
)
from electra_fast.reproduction.report import Comparison, score, summarize, write_report
from electra_fast.training.corruptor import UNIGRAM, Corruptor
from electra_fast.training.evaluate import SEED, evaluate
from electra_fast.training.plan import measure
from electra_fast.training.pretrain import pretrain
from electra_fast.training.run import exclusive, resolved

IDENTITY = "reproduce.json"
TASKS = "tasks.json"
EVALUATION = "evaluation.json"
FAILED = "failed.json"


def reproduce(
    experiment: str,
    corpus: str | Path,
    *,
    glue: str | Path,
    out: str | Path,
    preset: str = "small",
    recipe: str = "google",
    budget: float | None = None,
    minutes: float | None = None,
    seeds: int = 3,
    task: str | None = None,
    finetune_seeds: int = 1,
    corrupted_by: str | Path = UNIGRAM,
    device: str = AUTO,
    overrides: Mapping[str, object] | None = None,
) -> Comparison:
    """Trains the rows of a comparison at equal compute, with several seeds each, and fine-tunes every run.

    Writes `out/table.md`, `out/results.json` (its content is returned), `out/EXPERIMENT.png`, and the runs in
    `out/runs`. After an interruption, the same call resumes; more seeds add runs.

    Args:
        experiment: `objectives`, `generators`, `tying` or `sizes`.
        corpus: Folder of a corpus with a validation set (`prepare --holdout`).
        glue: Folder that contains the folders of GLUE tasks.
        out: Output folder.
        preset: Size of the model.
        recipe: Recipe of pre-training.
        budget: True model FLOPs of the pre-training of a run; they determine the steps of each row.
        minutes: Instead of `budget`: approximate duration of a pre-training run of the first row on this machine.
        seeds: Runs per row, with the seeds 0, 1, 2, ...
        task: Tasks (see `finetune`); by default all tasks in `glue`.
        finetune_seeds: Fine-tuning runs per task of each run; their median is the score.
        corrupted_by: Source of replacements for the evaluation of every row; see `evaluate`.
        device: The device of all runs; see `pretrain`.
        overrides: Configuration keys of pre-training, and of fine-tuning (`finetune.`).

    Raises:
        ValueError, FileNotFoundError: An argument is wrong; nothing was trained.
        Interrupted: A signal stopped the command; checkpoints were written.
        ElectraFastError: Runs have failed; raised at the end. Runs that diverged are in the report instead.
    """
    _check_amounts(budget=budget, minutes=minutes, seeds=seeds, finetune_seeds=finetune_seeds)
    keys = {name: str(value) for name, value in (overrides or {}).items()}
    pretraining = {name: value for name, value in keys.items() if not name.startswith("finetune.")}
    # Like the paper's, scores are after the last step: selecting the best step would inflate them.
    precision = common_precision(device)
    finetuning = {"finetune.precision": precision, "finetune.select": "last"}
    finetuning |= {name: value for name, value in keys.items() if name not in pretraining}
    text = Corpus(corpus)
    if text.holdout is None:
        raise InputError(f"{corpus}: has no validation set; prepare the text with --holdout 0.01")
    all_tasks = read_tasks(task, glue=Path(glue))
    base = base_config(Config.preset(preset, recipe), text, pretraining, precision)
    comparison = make_experiment(experiment, base, pretraining)
    first = comparison.rows[0].config
    recipe_config(DEFAULT_RECIPE, "", first.model, finetuning)  # raises if a key is wrong
    if budget is not None:
        row_configs(comparison, budget, pretraining)  # raises if it is too small
    corruptor = _corruptor(corrupted_by, text, first.data.sequence_length)
    sizes = {data.task.name: len(data.train.texts) for data in all_tasks}
    tuning = {"glue": glue, "task": list(sizes), "seeds": finetune_seeds, "overrides": finetuning, "device": device}
    evaluation = {"data": corpus, "corrupted_by": corruptor, "mlm_examples": 200, "device": device}
    identity = {
        "experiment": experiment,
        "preset": preset,
        "recipe": recipe,
        "overrides": keys,
        "corpus": text.content_hash,
        "examples": sizes,
        "finetune_seeds": finetune_seeds,
        "corrupted_by": corruptor,
        "asked": {"budget": budget, "minutes": minutes},
    }
    out = Path(out)
    with exclusive(out):
        facts = _resolve_budget(out, identity, first, device)
        configs = row_configs(comparison, facts["budget"], pretraining)
        replace_file(out / IDENTITY, json.dumps(facts, indent=2) + "\n")
        rows = [row.name for row in comparison.rows]
        subject = f"{comparison.title} ({comparison.source})"
        say(f"{out}: {subject}: {len(rows)} rows, seeds: {seeds}, tasks: {', '.join(sizes)}")
        runs = {out / "runs" / f"{row}-seed-{seed}": (row, seed) for seed in range(seeds) for row in rows}
        waiting = [folder for folder in runs if read_result(folder) is None]
        start = time.monotonic()
        failed = []
        for number, folder in enumerate(waiting):
            row, seed = runs[folder]
            config = configs[row].override({"train.seed": seed})
            name = f"{row} seed {seed}"
            size = training_size(config)
            amount = f"{size['steps']:,} steps, {size['tokens'] / 1e6:,.2f} M tokens, {size['flops']:.3e} FLOPs"
            say(f"{name}: {amount}; run {len(runs) - len(waiting) + number + 1} of {len(runs)}")
            try:
                run_row(folder, config, device, tuning, evaluation)
            except (ElectraFastError, OSError) as error:
                failed.append(f"{name}: {error}")
                say(f"warning: {failed[-1]}")
                continue
            seconds = (time.monotonic() - start) / (number + 1) * (len(waiting) - number - 1)
            say(f"{name}: {_outcome(folder)}; all runs: eta {timedelta(seconds=round(seconds))}")
            _report(out, comparison, configs, facts, runs)
        results = _report(out, comparison, configs, facts, runs)
    if failed:
        remedy = f"the finished runs are in {out / 'table.md'}; run again to retry"
        raise ElectraFastError(f"{out}: {len(failed)} of {len(waiting)} runs failed: {'; '.join(failed)}; {remedy}")
    return results


def _check_amounts(*, budget: float | None, minutes: float | None, seeds: int, finetune_seeds: int) -> None:
    if (budget is None) == (minutes is None):
        raise InputError("pass either --budget FLOPS or --minutes M")
    amounts = {"budget": budget, "minutes": minutes, "seeds": seeds, "finetune-seeds": finetune_seeds}
    for name, amount in amounts.items():
        if amount is not None and not 0 < amount < math.inf:
            raise InputError(f"--{name} = {amount:g}: must be above 0")


def _corruptor(corrupted_by: str | Path, corpus: Corpus, sequence_length: int) -> str:
    """Returns the source of replacements for the runs. Raises ValueError if it cannot read rows of this length."""
    if corrupted_by == UNIGRAM:
        return UNIGRAM
    longest = Corruptor.load(Path(corrupted_by), corpus, SEED, torch.device("cpu")).max_positions
    if longest is not None and longest < sequence_length:
        remedy = "lower data.sequence_length, or choose another model for --corrupted-by"
        raise InputError(f"{corrupted_by}: reads {longest} tokens, but the rows have {sequence_length}; {remedy}")
    return os.path.abspath(corrupted_by)


def _resolve_budget(out: Path, identity: Mapping[str, Any], first: Config, device: str = AUTO) -> dict[str, Any]:
    """Returns the identity with the budget: from an earlier call, from the arguments, or from the measured speed.

    Raises ValueError if the earlier call was for another comparison, or if the folder contains other files.
    """
    path = out / IDENTITY
    arguments = identity["asked"]
    if path.exists():
        known = read_object(path)
        if "overrides" in known:
            known["overrides"] = present_names(known["overrides"])
        if difference := first_difference({name: known.get(name) for name in identity}, identity):
            raise InputError(f"{out}: {difference}; use the same value to resume, or choose another --out")
        return known
    if foreign := foreign_names(out):
        raise InputError(f"{out}: contains {foreign[0]}, but no {IDENTITY}; choose an empty folder for --out")
    if arguments["budget"]:
        return {**identity, "budget": arguments["budget"]}
    tokens = first.train.batch_size * first.data.sequence_length
    seconds = measure(resolved(first, Mixture(first.data.corpus)), device).seconds_per_step
    speed = tokens * flops_per_token(first).total / seconds
    return {**identity, "budget": float(f"{60 * speed * arguments['minutes']:.2g}"), "flops_per_second": speed}


def read_result(folder: Path) -> dict[str, Any] | None:
    """Returns the results of a finished run, or None for an unfinished run.

    Raises ValueError for a damaged file.
    """
    if (folder / FAILED).exists():
        return read_object(folder / FAILED)
    if not ((folder / TASKS).exists() and (folder / EVALUATION).exists()):
        return None
    return {"tasks": read_object(folder / TASKS), "evaluation": read_object(folder / EVALUATION)}


def run_row(
    folder: Path, config: Config, device: str, tuning: Mapping[str, Any], evaluation: Mapping[str, Any]
) -> None:
    """Trains, fine-tunes and evaluates; `tuning` and `evaluation` are arguments of `finetune` and `evaluate`."""
    run = folder / "run"
    tasks = folder / "tasks"
    try:
        if not (folder / TASKS).exists():
            if not pretrain(config=config, out=run, device=device).is_finished:
                raise TrainingFailed(f"{run}: train.max_minutes ended the pre-training; run again to resume")
            results = finetune(run, out=tasks, **tuning)
            replace_file(folder / TASKS, json_text(results))
        remove(tasks)  # too large: one model per task and seed
        report = evaluate(run, sequence_length=config.data.sequence_length, **evaluation)
        replace_file(folder / EVALUATION, json_text(report))
    except Diverged as error:
        replace_file(folder / FAILED, json_text({"failed": str(error)}))


def _outcome(folder: Path) -> str:
    result = read_result(folder) or {}
    if "failed" in result:
        return f"failed: {result['failed']}"
    scores = [f"{name} {100 * task['median']:.1f}" for name, task in result["tasks"].items()]
    return f"score {score(result):.2f} ({', '.join(scores)})"


def _report(
    out: Path,
    comparison: Experiment,
    configs: Mapping[str, Config],
    facts: Mapping[str, Any],
    runs: Mapping[Path, tuple[str, int]],
) -> Comparison:
    """Writes the report on the finished runs, and returns its numbers."""
    finished: dict[str, list[dict[str, Any]]] = {row.name: [] for row in comparison.rows}
    for folder, (row, seed) in runs.items():
        if (result := read_result(folder)) is not None:
            finished[row].append({"seed": seed, **result})
    sizes = {name: training_size(config) for name, config in configs.items()}
    results = summarize(comparison, {**facts, "sizes": sizes}, finished)
    write_report(out, comparison, results)
    return results
