"""Rows of annotation tools: which ones an annotator rejected or skipped, and Label Studio's tasks as flat rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.finetuning.tables import Row, Table

# Columns for an annotator's verdict, of Prodigy and Label Studio.
VERDICT_COLUMNS = ("answer", "was_cancelled")
_REJECTED = {"reject", "ignore", "true"}


def is_rejected(row: Row, chosen: Collection[str] = ()) -> bool:
    """Whether a row was rejected, ignored or skipped. Columns that are `chosen` as text or label are no verdict."""
    verdicts = (row.get(name) for name in VERDICT_COLUMNS if name not in chosen)
    return any(str(verdict).lower() in _REJECTED for verdict in verdicts)


def verdict_columns(available: Iterable[str], chosen: Collection[str]) -> tuple[str, ...]:
    """The columns of verdicts that a file has, but for chosen ones."""
    return tuple(name for name in available if name in VERDICT_COLUMNS and name not in chosen)


def without_rejected(table: Table, chosen: Collection[str]) -> tuple[Table, tuple[str, ...]]:
    """The rows that were not rejected, and a note on how many were."""
    rows = [dict(zip(table.columns, values, strict=True)) for values in zip(*table.columns.values(), strict=True)]
    kept = [number for number, row in enumerate(rows) if not is_rejected(row, chosen)]
    columns = {name: [values[row] for row in kept] for name, values in table.columns.items()}
    lines = [table.lines[row] for row in kept]
    return dataclasses.replace(table, columns=columns, lines=lines), rejected_note(table.path, len(rows) - len(kept))


def rejected_note(path: Path, number: int) -> tuple[str, ...]:
    """Says how many rows were left out, if any."""
    return (f"{path}: {number:,} rows that an annotator rejected or skipped are left out",) if number else ()


def flat_row(where: str, row: Row) -> Row:
    """A task of Label Studio as a row of its data with the column `spans`; other rows as they are.

    A task without an annotation counts as cancelled. Raises InputError if its annotations differ.
    """
    annotations = row.get("annotations", row.get("completions"))
    if not isinstance(row.get("data"), dict) or not isinstance(annotations, list):
        return row
    valid = [each for each in annotations if not is_rejected(each)]
    results = [_spans(each) for each in [each for each in valid if each.get("ground_truth")] or valid]
    if any(result != results[0] for result in results):
        raise InputError(f"{where}: {len(results)} annotations differ; keep one, or mark one as ground truth")
    data: Row = row["data"]
    return data | ({"spans": results[0]} if results else {"spans": None, "was_cancelled": True})


def _spans(annotation: dict[str, Any]) -> list[dict[str, Any]]:
    """What an annotation marks in the text, in the order of the text; relations and choices have no place there."""
    values = [item.get("value") for item in annotation.get("result") or []]
    spans = [value for value in values if isinstance(value, dict) and "start" in value]
    return sorted(spans, key=lambda span: (str(span["start"]), str(span.get("end")), str(span.get("labels"))))
