"""Reads the content of a report page from the folders of runs."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from electra_fast.errors import ElectraFastError, InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.json_files import parse_json, read_object, read_records

if TYPE_CHECKING:
    from electra_fast.data.mixture import Corpora

# Fields of a record that are an x axis or describe the record.
_NOT_CURVES = {"step", "tokens", "seconds", "rows", "unigram_sequence_length"}
# Logs of a fine-tuning.
_SEEDS = "*/**/seed-*/metrics.jsonl"

Record = dict[str, Any]


@dataclass
class PretrainingRun:
    """The page's content about a pre-training run; `samples` are rows of words, or the reason that there are none."""

    name: str
    config: dict[str, object]
    environment: list[Record]
    evaluations: list[Record]
    warnings: list[Record]
    samples: Any
    curves: Record


@dataclass
class FinetuningRun:
    """The page's content about a fine-tuning; `reports` are the report.json files by folder."""

    name: str
    config: dict[str, object]
    results: Record
    reports: dict[str, Record] = field(default_factory=dict)
    curves: list[Record] = field(default_factory=list)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the runs in a folder, or the folder if it is a run; does not look for runs inside runs."""
    has_config, has_results = ((folder / name).exists() for name in ("config.toml", "results.json"))
    if has_config and (has_results or is_pretraining(folder) or any(folder.glob(_SEEDS))):
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from find_runs(path)


def is_pretraining(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns short names: paths relative to the common parent folder."""
    if len(folders) == 1:
        return {folders[0]: folders[0].name}
    common = os.path.commonpath([folder.parent for folder in folders])
    return {folder: str(folder.relative_to(common)) for folder in folders}


def _environment(path: Path) -> list[Record]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    try:
        records = [parse_json(line) for line in lines if line.strip()]
    except ValueError as error:
        raise InputError(f"{path}: not JSON lines: {error}") from None
    if not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path}: not JSON objects, one per line")
    return records


def _config(path: Path) -> dict[str, object]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def read_pretraining(folder: Path, name: str) -> PretrainingRun:
    from electra_fast.config.config import Config
    from electra_fast.hardware.flops import flops_per_token

    records = read_records(folder / "metrics.jsonl")
    evaluations = read_records(folder / "evaluations.jsonl")
    warnings = [{"message": "", **record} for record in read_records(folder / "warnings.jsonl")]
    config = Config.load(folder / "config.toml")
    flops = flops_per_token(config).total
    step, tokens, seconds = (_axis(folder / "metrics.jsonl", records, name) for name in ("step", "tokens", "seconds"))
    axes = {"step": step, "tokens": tokens, "flops": [flops * record for record in tokens], "seconds": seconds}
    at = {step: _axes_at(axes, step) for step in {record["step"] for record in (*evaluations, *warnings)}}
    curves = {
        "name": name,
        "kind": "pretraining",
        "train": {"x": axes, "y": _columns(records)},
        "validation": {
            "x": {axis: [at[record["step"]][axis] for record in evaluations] for axis in axes},
            "y": _columns(evaluations),
        },
        "warnings": [{**record, "x": at[record["step"]]} for record in warnings],
    }
    return PretrainingRun(
        name=name,
        config=_config(folder / "config.toml"),
        environment=_environment(folder / "environment.jsonl"),
        evaluations=evaluations,
        warnings=warnings,
        samples=_samples(folder, config.data.corpus),
        curves=curves,
    )


def _axis(path: Path, records: Sequence[Record], name: str) -> list[float]:
    values = [_finite(record.get(name)) for record in records]
    for record, value in zip(records, values, strict=True):
        if value is None:
            raise InputError(f"{path}: step {record['step']}: {name} must be a number; repair or remove this line")
    return [record[name] for record in records]


def _axes_at(axes: Mapping[str, Sequence[float]], step: int) -> dict[str, float | None]:
    """Returns the position of a step on every axis, interpolated between the lines of metrics.jsonl."""
    steps = [0, *axes["step"]]
    position: dict[str, float | None] = dict.fromkeys(axes, None) | {"step": step}
    for i, (before, after) in enumerate(pairwise(steps)):
        if before <= step <= after and before < after:
            fraction = (step - before) / (after - before)
            for name in axes.keys() - {"step"}:
                low, high = [0, *axes[name]][i : i + 2]
                position[name] = low + fraction * (high - low)
    return position


def _columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    """Returns the numbers of the records by name; other values become None."""
    names = dict.fromkeys(
        name for record in records for name, value in record.items() if isinstance(value, (int, float))
    )
    return {name: [_finite(record.get(name)) for record in records] for name in names if name not in _NOT_CURVES}


def _finite(value: object) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def _samples(folder: Path, corpora: Corpora) -> Any:
    """Returns rows of validation text with the discriminator's predictions, or the reason that there are none."""
    from electra_fast.data.mixture import Mixture
    from electra_fast.training.evaluate import verdicts

    try:
        checkpoint_folder.latest(folder)
        return verdicts(folder, Mixture(corpora).corpora[0])
    except (ElectraFastError, OSError) as error:
        return str(error)


def read_finetuning(folder: Path, name: str) -> FinetuningRun:
    path = folder / "results.json"
    results = read_object(path) if path.exists() else {}
    for task, result in results.items():
        task_runs = result.get("runs") if isinstance(result, dict) else None
        if not isinstance(task_runs, list) or not all(isinstance(run, dict) for run in task_runs):
            raise InputError(f"{path}: {task} has no list of runs; is this a file of `finetune`?")
    config = _config(folder / "config.toml")
    for path in sorted(folder.glob("*/task.json")):  # settings that depend on the task's data
        settings = {f"finetune.{key}": value for key, value in read_object(path).get("finetune", {}).items()}
        config |= {f"{path.parent.name}: {k}": value for k, value in settings.items() if config.get(k) != value}
    run = FinetuningRun(name, config, results)
    for path in sorted(folder.glob("*/**/report.json")):
        finetuning_report = read_object(path)
        classes = finetuning_report.get("classes") or {}
        if not isinstance(classes, dict) or not all(isinstance(scores, dict) for scores in classes.values()):
            raise InputError(f"{path}: classes must be a table of per-class scores; is this a fine-tuning report?")
        run.reports[str(path.parent.relative_to(folder))] = finetuning_report
    for path in sorted(folder.glob(_SEEDS)):
        records = read_records(path)
        scored = [record for record in records if "loss" not in record]
        losses = [record for record in records if "loss" in record]
        train, validation = (
            {"x": {"step": [record["step"] for record in lines]}, "y": _columns(lines)} for lines in (losses, scored)
        )
        label = f"{name}: {path.parent.relative_to(folder)}"
        run.curves.append(
            {"name": label, "kind": "finetuning", "train": train, "validation": validation, "warnings": []}
        )
    return run
