"""result.json of a seed: its scores by name, and the checksums of the files that a later session reads again."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.files import checkpoint_folder
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import json_text, read_object

RESULT = "result.json"
CHOSEN = ("best_step", "selected_by", "stopped_step", "temperature")
"""Entries of a result about the model: the step that was chosen, if it was not simply the last, the score that chose it
unless that is the task's, the step of an early stop, and the temperature."""


def result_of(
    seed: int, scored: Mapping[str, Any], warning: str | None, seconds: float, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the content of result.json: what was `CHOSEN`, the scores by name, and what identifies their splits."""
    result: dict[str, Any] = {"seed": seed, **chosen}
    for name, split in scored.items():
        result |= named_scores(name, split["scores"])
    return result | ({"warning": warning} if warning else {}) | {"seconds": seconds, "splits": dict(scored)}


def write_result(folder: Path, result: Mapping[str, Any], *, unfinished: Container[str] | None = None) -> None:
    """Writes result.json, with the checksums of the seed's other files that a later session reads.

    Args:
        folder: The seed's folder.
        result: As from `result_of`.
        unfinished: While a seed is scored again, the splits still to be predicted: files that depend on them change.
    """
    predictions = [path for path in folder.glob("predictions.*") if path.name.split(".")[1] not in (unfinished or ())]
    # Without the model card, which is for people, who may edit it. config.json has settings that follow the scores.
    changing = {"README.md", "config.json"} if unfinished is not None else {"README.md"}
    model = [path for path in (folder / "model").iterdir() if path.name not in changing and path.is_file()]
    replace_file(folder / RESULT, json_text(checkpoint_folder.sealed(result, folder, sorted((*predictions, *model)))))


def read_finished(folder: Path, metric: str) -> dict[str, Any]:
    """Returns the result of a seed that an earlier session finished; raises InputError if its folder is incomplete."""
    remedy = f"remove {folder} to train this seed again"
    try:
        result = read_object(folder / RESULT)
    except InputError as error:
        raise InputError(f"{error}; {remedy}") from None
    checksums = {}  # a version that wrote none left models that are taken as they are
    if {"files", "checksum"} & result.keys():
        result = checkpoint_folder.read_sealed(folder / RESULT, remedy)
        checksums = result.pop("files")
    numbers = [result.get(name) for name in ("seed", "seconds", metric)]
    splits = result.get("splits", {})
    is_whole = all(type(number) in (int, float) for number in numbers) and isinstance(splits, dict)
    is_whole = is_whole and all(
        isinstance(each, dict) and {"content", "scores"} <= each.keys() for each in splits.values()
    )
    if not is_whole or not (folder / "model" / "config.json").exists():
        raise InputError(f"{folder}: not whole (model/ or an entry of {RESULT} is missing); {remedy}")
    checkpoint_folder.verify_files(folder, checksums, remedy)
    return result


def named_scores(split: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Returns a split's scores as a result names them: `accuracy` for `dev`, `accuracy_test` for others."""
    ending = f"_{split}".removeprefix("_dev").replace("-", "_")
    return {f"{name}{ending}": value for name, value in scores.items()}


def scores_of(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scores of all splits in a seed's result."""
    about = ("seed", "seconds", "splits", *CHOSEN)
    return {name: each for name, each in result.items() if name not in about and isinstance(each, int | float)}


def score_texts(result: Mapping[str, Any], majority: Mapping[str, float]) -> Iterator[str]:
    """Yields each score of a result as text, with that of the most frequent answer."""
    for name, value in scores_of(result).items():
        yield f"{name} {value:.4f}" + (f" (majority {majority[name]:.4f})" if name in majority else "")
