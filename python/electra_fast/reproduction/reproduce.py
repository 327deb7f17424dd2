"""`reproduce`: trains the rows of one of the paper's comparisons at equal compute, fine-tunes them, and reports.

Runs follow one another: all rows with one seed, then all with the next. OUT/runs/ROW-seed-K/ has the pre-training in
run/, tasks.json and evaluation.json, or failed.json if the training diverged.
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
    """Trains the rows of a comparison at equal compute, with several seeds each, and fine-tunes every one.

    Writes `out/table.md`, `out/results.json` (whose content is returned), `out/EXPERIMENT.png`, and the runs in
    `out/runs`. After an interruption, the same call resumes; more seeds add runs.

    Args:
        experiment: `objectives`, `generators`, `tying` or `sizes`.
        corpus: Folder of a corpus with a validation part (`prepare --holdout`).
        glue: Folder of the GLUE tasks' folders.
        out: Output folder.
        preset: Size of the model.
        recipe: Recipe of pre-training.
        budget: True model FLOPs of a run's pre-training, which determine the steps of each row.
        minutes: Instead of `budget`: approximate duration of a pre-training of the first row on this machine.
        seeds: Runs per row: seeds 0 to `seeds - 1`.
        task: Tasks as for `finetune`; by default all that `glue` holds.
        finetune_seeds: Fine-tuning runs per task of each run; their median is the score.
        corrupted_by: Corruptor for the evaluation of every row, as for `evaluate`.
        device: The device of all runs, as for `pretrain`.
        overrides: Configuration keys of pre-training, and of fine-tuning (`finetune.`).

    Raises:
        ValueError, FileNotFoundError: An argument is wrong; nothing has been trained.
        Interrupted: A signal asked to stop; checkpoints were written.
        ElectraFastError: At the end, if runs have failed. Runs that diverged are part of the report instead.
    """
    _check_amounts(budget=budget, minutes=minutes, seeds=seeds, finetune_seeds=finetune_seeds)
    keys = {name: str(value) for name, value in (overrides or {}).items()}
    pretraining = {name: value for name, value in keys.items() if not name.startswith("finetune.")}
    # Scores are after the last step, as the paper's: the best of several would be flattered.
    precision = common_precision(device)
    finetuning = {"finetune.precision": precision, "finetune.select": "last"}
    finetuning |= {name: value for name, value in keys.items() if name not in pretraining}
    text = Corpus(corpus)
    if text.holdout is None:
        raise InputError(f"{corpus}: has no validation part to evaluate on; prepare the text with --holdout 0.01")
    all_tasks = read_tasks(task, glue=Path(glue))
    base = base_config(Config.preset(preset, recipe), text, pretraining, precision)
    made = make_experiment(experiment, base, pretraining)
    first = made.rows[0].config
    recipe_config(DEFAULT_RECIPE, "", first.model, finetuning)  # raises if a key is wrong
    if budget is not None:
        row_configs(made, budget, pretraining)  # raises if it is too small
    corruptor = _corruptor(corrupted_by, text, first.data.sequence_length)
    sizes = {each.task.name: len(each.train.texts) for each in all_tasks}
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
        facts = _settle(out, identity, first, device)
        configs = row_configs(made, facts["budget"], pretraining)
        replace_file(out / IDENTITY, json.dumps(facts, indent=2) + "\n")
        say(f"{out}: {made.title} ({made.source}): {len(made.rows)} rows, seeds: {seeds}, tasks: {', '.join(sizes)}")
        runs = {
            out / "runs" / f"{row.name}-seed-{seed}": (row.name, seed) for seed in range(seeds) for row in made.rows
        }
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
            _report(out, made, configs, facts, runs)
        results = _report(out, made, configs, facts, runs)
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


def _settle(out: Path, identity: Mapping[str, Any], first: Config, device: str = AUTO) -> dict[str, Any]:
    """Returns the identity with the budget, from an earlier call, given, or by the speed of the first row.

    Raises ValueError if the earlier call was for another comparison, or the folder holds something else.
    """
    path = out / IDENTITY
    asked = identity["asked"]
    if path.exists():
        known = read_object(path)
        if "overrides" in known:
            known["overrides"] = present_names(known["overrides"])
        if found := first_difference({name: known.get(name) for name in identity}, identity):
            raise InputError(f"{out}: {found}; give the same to resume, or another --out")
        return known
    if foreign := foreign_names(out):
        raise InputError(f"{out}: holds {foreign[0]}, but no {IDENTITY}; choose an empty folder for --out")
    if asked["budget"]:
        return {**identity, "budget": asked["budget"]}
    tokens = first.train.batch_size * first.data.sequence_length
    seconds = measure(resolved(first, Mixture(first.data.corpus)), device).seconds_per_step
    speed = tokens * flops_per_token(first).total / seconds
    return {**identity, "budget": float(f"{60 * speed * asked['minutes']:.2g}"), "flops_per_second": speed}


def read_result(folder: Path) -> dict[str, Any] | None:
    """Returns the results of a finished run, None for one that is not finished.

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
            found = finetune(run, out=tasks, **tuning)
            replace_file(folder / TASKS, json_text(found))
        remove(tasks)  # one model per task and seed: too much to keep
        report = evaluate(run, sequence_length=config.data.sequence_length, **evaluation)
        replace_file(folder / EVALUATION, json_text(report))
    except Diverged as error:
        replace_file(folder / FAILED, json_text({"failed": str(error)}))


def _outcome(folder: Path) -> str:
    result = read_result(folder) or {}
    if "failed" in result:
        return f"failed: {result['failed']}"
    scores = [f"{name} {100 * found['median']:.1f}" for name, found in result["tasks"].items()]
    return f"score {score(result):.2f} ({', '.join(scores)})"


def _report(
    out: Path,
    made: Experiment,
    configs: Mapping[str, Config],
    facts: Mapping[str, Any],
    runs: Mapping[Path, tuple[str, int]],
) -> Comparison:
    """Writes the report of what is finished, and returns its numbers."""
    finished: dict[str, list[dict[str, Any]]] = {row.name: [] for row in made.rows}
    for folder, (row, seed) in runs.items():
        if (result := read_result(folder)) is not None:
            finished[row].append({"seed": seed, **result})
    sizes = {name: training_size(config) for name, config in configs.items()}
    results = summarize(made, {**facts, "sizes": sizes}, finished)
    write_report(out, made, results)
    return results
