"""What a page shows of a run, read from the run's folder."""

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

# Fields of a record that are an x axis or describe the record itself.
_NOT_CURVES = {"step", "tokens", "seconds", "rows", "unigram_sequence_length"}
# The logs of a fine-tuning.
_SEEDS = "*/**/seed-*/metrics.jsonl"

Record = dict[str, Any]


@dataclass
class PretrainingRun:
    """What a page shows of a pre-training run; `samples` are rows of words, or why there are none."""

    name: str
    config: dict[str, object]
    environment: list[Record]
    evaluations: list[Record]
    warnings: list[Record]
    samples: Any
    curves: Record


@dataclass
class FinetuningRun:
    """What a page shows of a fine-tuning; `reports` are its report.json files by folder."""

    name: str
    config: dict[str, object]
    results: Record
    reports: dict[str, Record] = field(default_factory=dict)
    curves: list[Record] = field(default_factory=list)


def find_runs(folder: Path) -> Iterator[Path]:
    """Yields the runs in a folder, itself included; does not look for runs inside runs."""
    has_config, has_results = ((folder / name).exists() for name in ("config.toml", "results.json"))
    if has_config and (has_results or is_pretraining(folder) or any(folder.glob(_SEEDS))):
        yield folder
        return
    for each in sorted(folder.iterdir()):
        if each.is_dir() and not each.is_symlink():
            yield from find_runs(each)


def is_pretraining(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()


def names_of(folders: Sequence[Path]) -> dict[Path, str]:
    """Returns short names: paths below the folder that contains all of them."""
    if len(folders) == 1:
        return {folders[0]: folders[0].name}
    common = os.path.commonpath([each.parent for each in folders])
    return {each: str(each.relative_to(common)) for each in folders}


def _environment(path: Path) -> list[Record]:
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    try:
        found = [parse_json(line) for line in lines if line.strip()]
    except ValueError as error:
        raise InputError(f"{path}: not JSON lines: {error}") from None
    if not all(isinstance(each, dict) for each in found):
        raise InputError(f"{path}: not JSON objects, one per line")
    return found


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
    warnings = [{"message": "", **each} for each in read_records(folder / "warnings.jsonl")]
    config = Config.load(folder / "config.toml")
    flops = flops_per_token(config).total
    step, tokens, seconds = (_axis(folder / "metrics.jsonl", records, name) for name in ("step", "tokens", "seconds"))
    axes = {"step": step, "tokens": tokens, "flops": [flops * each for each in tokens], "seconds": seconds}
    at = {step: _axes_at(axes, step) for step in {each["step"] for each in (*evaluations, *warnings)}}
    curves = {
        "name": name,
        "kind": "pretraining",
        "train": {"x": axes, "y": _columns(records)},
        "validation": {
            "x": {axis: [at[each["step"]][axis] for each in evaluations] for axis in axes},
            "y": _columns(evaluations),
        },
        "warnings": [{**each, "x": at[each["step"]]} for each in warnings],
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
    values = [_finite(each.get(name)) for each in records]
    for each, value in zip(records, values, strict=True):
        if value is None:
            raise InputError(f"{path}: step {each['step']} has no number of {name}; repair or remove this line")
    return [each[name] for each in records]


def _axes_at(axes: Mapping[str, Sequence[float]], step: int) -> dict[str, float | None]:
    """Returns the place of a step on every axis, interpolated between the lines of metrics.jsonl."""
    steps = [0, *axes["step"]]
    found: dict[str, float | None] = dict.fromkeys(axes, None) | {"step": step}
    for i, (before, after) in enumerate(pairwise(steps)):
        if before <= step <= after and before < after:
            share = (step - before) / (after - before)
            for name in axes.keys() - {"step"}:
                low, high = [0, *axes[name]][i : i + 2]
                found[name] = low + share * (high - low)
    return found


def _columns(records: Sequence[Record]) -> dict[str, list[float | None]]:
    """Returns the numbers of the records by name; what is no finite number becomes None."""
    names = dict.fromkeys(name for each in records for name, value in each.items() if isinstance(value, (int, float)))
    return {name: [_finite(each.get(name)) for each in records] for name in names if name not in _NOT_CURVES}


def _finite(value: object) -> float | None:
    return float(f"{value:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def _samples(folder: Path, corpora: Corpora) -> Any:
    """Returns rows of validation text with the discriminator's verdicts, or one line that says why there are none."""
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
        own = result.get("runs") if isinstance(result, dict) else None
        if not isinstance(own, list) or not all(isinstance(each, dict) for each in own):
            raise InputError(f"{path}: {task} has no list of runs; is it the file of a fine-tuning?")
    config = _config(folder / "config.toml")
    for path in sorted(folder.glob("*/task.json")):  # settings that the task's data decided
        settings = {f"finetune.{key}": value for key, value in read_object(path).get("finetune", {}).items()}
        config |= {f"{path.parent.name}: {k}": value for k, value in settings.items() if config.get(k) != value}
    run = FinetuningRun(name, config, results)
    for path in sorted(folder.glob("*/**/report.json")):
        found = read_object(path)
        classes = found.get("classes") or {}
        if not isinstance(classes, dict) or not all(isinstance(each, dict) for each in classes.values()):
            raise InputError(f"{path}: classes are no table of scores; is it the report of a fine-tuning?")
        run.reports[str(path.parent.relative_to(folder))] = found
    for path in sorted(folder.glob(_SEEDS)):
        records = read_records(path)
        scored = [each for each in records if "loss" not in each]
        losses = [each for each in records if "loss" in each]
        train, validation = (
            {"x": {"step": [each["step"] for each in own]}, "y": _columns(own)} for own in (losses, scored)
        )
        label = f"{name}: {path.parent.relative_to(folder)}"
        run.curves.append(
            {"name": label, "kind": "finetuning", "train": train, "validation": validation, "warnings": []}
        )
    return run
