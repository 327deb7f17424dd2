"""From sums to what is reported: `metrics.jsonl`'s keys, rank metrics, and warnings in plain words."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from electra_fast.config import ObjectiveConfig
from electra_fast.electra import SUMS

Number = float | int | None


def summarise(sums: npt.NDArray[np.float64], objective: ObjectiveConfig) -> dict[str, Number]:
    """Means of an interval from `electra.SUMS`; the discriminator's are None under `mlm`, 0/0 is 0."""
    total = dict(zip(SUMS, map(float, sums), strict=True))

    def ratio(numerator: str, denominator: str) -> float:
        return total[numerator] / total[denominator] if total[denominator] else 0.0

    generator_loss = ratio("generator_loss", "masked_weight")
    summary: dict[str, Number] = {
        "loss": objective.gen_weight * generator_loss,
        "generator_loss": generator_loss,
        "discriminator_loss": None,
        "generator_accuracy": ratio("generator_correct", "masked_weight"),
        "discriminator_accuracy": None,
        "discriminator_precision": None,
        "discriminator_recall": None,
        "replaced_fraction": None,
    }
    if objective.name == "mlm":
        return summary
    discriminator_loss = ratio("discriminator_loss", "tokens")
    return summary | {
        "loss": objective.gen_weight * generator_loss + objective.disc_weight * discriminator_loss,
        "discriminator_loss": discriminator_loss,
        "discriminator_accuracy": ratio("discriminator_correct", "tokens"),
        "discriminator_precision": ratio("true_positives", "predicted_positives"),
        "discriminator_recall": ratio("true_positives", "replaced"),
        "replaced_fraction": ratio("replaced", "tokens"),
    }


def area_under_curve(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_]) -> float | None:
    """Area under the ROC curve of the discriminator's logits; None where only one class occurs."""
    from sklearn.metrics import roc_auc_score  # imported here: a second that only evaluation needs

    if labels.all() or not labels.any():
        return None
    return float(roc_auc_score(labels, logits))


def warning(summary: Mapping[str, Number]) -> str | None:
    """What a person should know about an interval, in one line, or None. Not called before warmup is over."""
    replaced, recall = summary["replaced_fraction"], summary["discriminator_recall"]
    loss, accuracy = summary["discriminator_loss"], summary["discriminator_accuracy"]
    if replaced is None or recall is None or loss is None or accuracy is None:
        return None
    if replaced < 0.01:
        return (
            f"the generator is nearly always right: only {replaced:.1%} of the tokens are replaced, which teaches the "
            "discriminator little; use a smaller generator.fraction or a higher objective.temperature"
        )
    majority = -(replaced * math.log(replaced) + (1 - replaced) * math.log1p(-replaced))
    if loss > 1.02 * majority:
        return (
            f"the discriminator has collapsed: loss {loss:.4f} is worse than always answering the class shares "
            f"({majority:.4f}); lower optimizer.learning_rate or use a smaller generator.fraction"
        )
    if recall == 0:
        return f"the discriminator calls every token original (loss {loss:.4f}, class shares alone {majority:.4f})"
    return None


class JsonLines:
    """A file of one JSON object a line, flushed as written and cut back to a step on resume."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Opens for appending after dropping every line past `last_step` and any half-written line.

        ValueError names the first other line that is no record, and nothing is dropped.
        """
        self.path = path
        kept = [line for line, record in _complete_lines(path) if record["step"] <= last_step]
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one object."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a file that `JsonLines` wrote; none where it is missing. ValueError names a damaged line."""
    return [record for _, record in _complete_lines(path)]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines that a kill did not cut in half, each with its object."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n") and line.strip():
            yield line, _record(path, number, line)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: line {number}: not JSON ({error}); repair or remove this line") from None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise ValueError(f"{path}: line {number}: not an object with an integer step; repair or remove this line")
    return record
