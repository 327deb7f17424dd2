"""The reading options of `prepare` and `vocab`, validated and translated into the Rust functions' arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal

from electra_fast.errors import InputError

StrPath = str | os.PathLike[str]
Separator = Literal["blank-line", "file", "line"]
InvalidUtf8 = Literal["error", "replace"]
Format = Literal["auto", "text", "jsonl", "parquet", "arrow"]


def reading_options(
    documents: Separator, text_field: str, invalid_utf8: InvalidUtf8, format: Format, skip_bad_records: int
) -> dict[str, Any]:
    """Arguments of the Rust functions that say how to read files."""
    return {
        "documents": documents,
        "text_fields": [field.strip() for field in text_field.split(",") if field.strip()],
        "invalid_utf8": invalid_utf8,
        "format": None if format == "auto" else format,
        "skip_bad_records": not_negative("skip_bad_records", skip_bad_records),
    }


def not_negative(name: str, value: int) -> int:
    """Validates an option that is a count."""
    if value < 0:
        raise InputError(f"{name} is {value}; give 0 or more")
    return value


def skipped_lines(count: int, first: Iterable[tuple[str, int, str]], list_file: str | None) -> str:
    """A warning with the number of bad records, and the first of them, one per line."""
    more = f"; all of them are in {list_file}" if list_file else ""
    lines = [f"warning: {count:,} bad records were skipped{more}"]
    return "\n".join([*lines, *(f"  {file}:{line}: {reason}" for file, line, reason in first)])
