"""Rows of a user's files: their values and places in messages, and a collection of bad rows."""

from __future__ import annotations

import base64
import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.delimited import DELIMITERS
from electra_fast.finetuning.readers.text_files import STANDARD_INPUT

Row = dict[str, Any]
T = TypeVar("T")

MAX_SHOWN = 20
_ALIASES = {".ndjson": ".jsonl", ".tab": ".tsv", ".feather": ".arrow"}
_COMPRESSED = (".gz", ".xz", ".zst")


def as_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Returns a name or several names as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


class BadRows:
    """Collects bad rows, in order to report all of them at once and to leave out a limited number.

    A reader wraps the reading of each row in `collect`, keeps the row only if nothing was raised, and calls `finish`
    after the last row.

    Args:
        allowed: Number of rows that may be left out, over all files (`--skip-bad-rows`).
    """

    def __init__(self, allowed: int = 0) -> None:
        self.allowed = allowed
        self.number = 0
        self._shown = list[str]()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Records an InputError from reading a row; its message names the file, line and remedy."""
        try:
            yield
        except InputError as error:
            self.number += 1
            if self.number <= MAX_SHOWN:
                self._shown.append(str(error))

    def add(self, message: str, number: int) -> None:
        self.number += number
        self._shown.append(message)

    def passing(self, items: Iterable[T], check: Callable[[T], None]) -> list[T]:
        passed = []
        for item in items:
            with self.collect():
                check(item)
                passed.append(item)
        return passed

    def finish(self, hint: str = "") -> tuple[str, ...]:
        """Returns a note on the rows that were left out, or none; raises InputError if there are too many bad rows.

        The message lists the first bad rows and ends with `hint`.
        """
        shown = "; ".join(self._shown)
        if self.number > MAX_SHOWN:
            shown += f"; and {self.number - MAX_SHOWN:,} more"
        shown += hint
        if self.number > self.allowed:
            several = f"{self.number:,} bad rows: {shown} (pass --skip-bad-rows {self.number} to skip them)"
            raise InputError(shown if self.number == 1 else several)
        rows = "1 bad row is" if self.number == 1 else f"{self.number:,} bad rows are"
        return (f"{rows} left out: {shown}",) if self.number else ()


def named_rows(numbers: Iterable[int], columns: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Returns the ids of rows (a column `id` of unique values, or else the row numbers) and the other columns."""
    ids = [row.get("id") for row in columns]
    if not ids or not all(isinstance(id, str | int) and str(id).strip() for id in ids) or len(set(ids)) < len(ids):
        return list(map(str, numbers)), list(columns)
    return list(map(str, ids)), [others_of(row, ("id",)) for row in columns]


def others_of(row: Mapping[str, Any], names: Collection[str]) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def with_columns(answer: Row, row: Row) -> Row:
    """Returns the columns of a row followed by an answer; columns named like a field of the answer go into `input`."""
    row = {name: _as_json(value) for name, value in row.items()}
    same = {name: value for name, value in row.items() if name in answer or name == "input"}
    return others_of(row, same) | answer | ({"input": same} if same else {})


def _as_json(value: Any) -> Any:
    """Returns a cell as a JSON value: null for NaN, ISO 8601 for times, base64 for bytes, text for other types."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def extension(path: Path) -> str:
    """Returns a path's extension in lower case, without the suffix of a compression."""
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        suffix = Path(path.stem).suffix.lower()
    return _ALIASES.get(suffix, suffix)


def is_stream(path: Path) -> bool:
    """Returns whether a path is standard input, a pipe or a device."""
    is_device = path.parts[:2] == ("/", "dev")
    return path == STANDARD_INPUT or is_device or (path.exists() and not path.is_file() and not path.is_dir())


@functools.lru_cache(64)
def _is_folder(path: Path) -> bool:
    return path.is_dir()


def place(path: Path, line: int) -> str:
    """Returns the place of a line, row or record for messages."""
    if _is_folder(path):
        return f"{path}: row {line}"
    name = {".parquet": "row", ".arrow": "row", ".json": "record"}.get(extension(path), "line")
    return f"{path}: {name} {line}"


def check_columns(path: Path, available: Iterable[str], wanted: Iterable[str], flag: str) -> None:
    for name in wanted:
        if name not in available:
            raise InputError(f"{path}: no column {name!r}; {available_columns(available)}; choose with {flag}")


def columns_note(path: Path, description: str, text: Collection[str], label: Collection[str]) -> str:
    flags = " and ".join(flag for flag, columns in (("--text", text), ("--label", label)) if not columns)
    return f"{path}: {description}{flags and f'; choose columns with {flags}'}"


def available_columns(names: Iterable[str]) -> str:
    """Lists the columns for an error about a missing one, with a hint if the header looks misread."""
    names = tuple(names)
    listed = f"available columns: {', '.join(names)}"
    if len(names) == 1 and any(delimiter in names[0] for delimiter in DELIMITERS.values()):
        return f"{listed} (a single column; if this is several, pass --delimiter)"
    if names and all(len(name) > 1 and name[0] == name[-1] == '"' for name in names):
        return f"{listed} (if quotes enclose cells, add --quoting csv)"
    is_data = any(name.strip().isdecimal() or len(name.split()) > 3 for name in names)
    if is_data and [*names] != [*map(str, range(len(names)))]:
        return f"{listed} (if the first line is data, add --no-header and choose columns by number)"
    return listed


def text_of(path: Path, line: int, row: Row, column: str) -> str:
    """Returns the text in a column of a row; raises InputError with the line if it is missing, null or not text."""
    value = row.get(column)
    return value if isinstance(value, str) else checked_text(place(path, line), row, column, value)


def checked_text(where: str, row: Mapping[str, Any], column: str, value: Any) -> str:
    """Returns a value of a row or an enclosing object; raises InputError if it is missing, null or not text."""
    if isinstance(value, str):
        return value
    if value is None and column not in row:
        raise InputError(f"{where}: no {column!r}; {available_columns(row)}; choose with --text")
    raise InputError(f"{where}: {column} = {'null' if value is None else abbreviated(value)}: must be text")


def check_unicode(where: str, text: str) -> None:
    """Raises InputError for an unpaired surrogate, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}unpaired surrogate, which is not text") from None


def first_of(fields: Mapping[str, Any], names: Iterable[str], default: Any = None) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), default)


def abbreviated(value: object) -> str:
    text = " ".join(repr(value).split())
    return text[:40] + "…" if len(text) > 40 else text


# Columns in which Prodigy and Label Studio store an annotator's verdict.
VERDICT_COLUMNS = ("answer", "was_cancelled")
_ANSWERS = (None, "accept", "reject", "ignore")


def rejected_rows(
    path: Path, rows: Sequence[Row], chosen: Collection[str], notes: list[str], *, is_test: bool
) -> set[int]:
    """Returns the rows that an annotator rejected, ignored or skipped; adds a note with their number.

    If these are all rows of a test file, returns none. Columns `chosen` as text or label are not verdicts. Raises
    InputError if no row remains.
    """
    answers = [None if "answer" in chosen else row.get("answer") for row in rows]
    if not all(answer in _ANSWERS for answer in answers):
        answers = []  # they answer a question
    rejected = {number for number, answer in enumerate(answers) if answer in _ANSWERS[2:]}
    if "was_cancelled" not in chosen:
        rejected |= {number for number, row in enumerate(rows) if _is_true(row.get("was_cancelled"))}
    if not rejected or (is_test and len(rejected) == len(rows)):
        return set()
    if len(rejected) == len(rows):
        raise InputError(f"{path}: annotators rejected or skipped every row; accept some rows")
    notes.append(f"{path}: {len(rejected):,} of {len(rows):,} rows, rejected or skipped by annotators, are left out")
    return rejected


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def verdict_columns(available: Iterable[str], chosen: Collection[str]) -> tuple[str, ...]:
    """Returns a file's verdict columns, without those chosen as text or label."""
    return tuple(name for name in available if name in VERDICT_COLUMNS and name not in chosen)


def code_point(text: str, encoding: str, offset: int) -> int | None:
    """Returns the index of the character at an offset in units of `utf-16-le` or `utf-8`; None if none begins there."""
    position = 2 * offset if encoding == "utf-16-le" else offset
    try:
        encoded = text.encode(encoding)
        return len(encoded[:position].decode(encoding)) if 0 <= position <= len(encoded) else None
    except UnicodeError:  # in the middle of a character
        return None


def flat_row(where: str, row: Row) -> Row:
    """Returns a Label Studio task as a row of its data with a column `spans`; other rows are unchanged.

    A task without an annotation counts as cancelled. Raises InputError if its annotations differ.
    """
    annotations = row.get("annotations", row.get("completions"))
    if not isinstance(row.get("data"), dict) or not isinstance(annotations, list):
        return row
    valid = [annotation for annotation in annotations if not _is_true(annotation.get("was_cancelled"))]
    truth = [annotation for annotation in valid if annotation.get("ground_truth")]
    results = [_spans(annotation) for annotation in truth or valid]
    if any(result != results[0] for result in results):
        raise InputError(f"{where}: {len(results)} annotations differ; keep one of them, or mark one as ground truth")
    data: Row = row["data"]
    return data | ({"spans": results[0]} if results else {"spans": None, "was_cancelled": True})


def _spans(annotation: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns an annotation's spans in text order, without relations and choices."""
    values = [item.get("value") for item in annotation.get("result") or []]
    spans = [value for value in values if isinstance(value, dict) and "start" in value]
    return sorted(spans, key=lambda span: (str(span["start"]), str(span.get("end")), str(span.get("labels"))))
