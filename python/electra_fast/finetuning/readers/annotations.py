"""Rows of annotation tools: those that an annotator rejected or skipped, and Label Studio's tasks as flat rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import Row

# Columns for an annotator's verdict, of Prodigy and Label Studio.
VERDICT_COLUMNS = ("answer", "was_cancelled")
_ANSWERS = (None, "accept", "reject", "ignore")


def rejected_rows(rows: Sequence[Row], chosen: Collection[str], *, is_test: bool = False) -> set[int]:
    """Returns the rows that were rejected, ignored or skipped; none of a test file in which all were.

    Columns `chosen` as text or label are not verdicts.
    """
    answers = [None if "answer" in chosen else row.get("answer") for row in rows]
    if not all(answer in _ANSWERS for answer in answers):
        answers = []  # to a question
    found = {number for number, answer in enumerate(answers) if answer in _ANSWERS[2:]}
    if "was_cancelled" not in chosen:
        found |= {number for number, row in enumerate(rows) if _is_true(row.get("was_cancelled"))}
    return set() if is_test and len(found) == len(rows) else found


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def verdict_columns(available: Iterable[str], chosen: Collection[str]) -> tuple[str, ...]:
    """Returns a file's columns of verdicts, except chosen ones."""
    return tuple(name for name in available if name in VERDICT_COLUMNS and name not in chosen)


def code_point(text: str, encoding: str, offset: int) -> int | None:
    """Returns the character that begins at an offset in units of `utf-16-le` or `utf-8`; None if none does."""
    position = 2 * offset if encoding == "utf-16-le" else offset
    try:
        encoded = text.encode(encoding)
        return len(encoded[:position].decode(encoding)) if 0 <= position <= len(encoded) else None
    except UnicodeError:  # in the middle of a character
        return None


def rejected_note(path: Path, number: int, total: int) -> tuple[str, ...]:
    """Returns a note on how many rows are left out, if any; raises InputError if none is left."""
    if 0 < number == total:
        raise InputError(f"{path}: an annotator rejected or skipped every row; accept some")
    note = f"{path}: {number:,} of {total:,} rows are left out, which an annotator rejected or skipped"
    return (note,) if number else ()


def flat_row(where: str, row: Row) -> Row:
    """Returns a task of Label Studio as a row of its data with the column `spans`; other rows as they are.

    A task without an annotation counts as cancelled. Raises InputError if its annotations differ.
    """
    annotations = row.get("annotations", row.get("completions"))
    if not isinstance(row.get("data"), dict) or not isinstance(annotations, list):
        return row
    valid = [each for each in annotations if not _is_true(each.get("was_cancelled"))]
    results = [_spans(each) for each in [each for each in valid if each.get("ground_truth")] or valid]
    if any(result != results[0] for result in results):
        raise InputError(f"{where}: {len(results)} annotations differ; keep one, or mark one as ground truth")
    data: Row = row["data"]
    return data | ({"spans": results[0]} if results else {"spans": None, "was_cancelled": True})


def _spans(annotation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns an annotation's spans in the order of the text, without relations and choices."""
    values = [item.get("value") for item in annotation.get("result") or []]
    spans = [value for value in values if isinstance(value, dict) and "start" in value]
    return sorted(spans, key=lambda span: (str(span["start"]), str(span.get("end")), str(span.get("labels"))))
