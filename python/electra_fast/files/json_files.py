"""JSON files: single objects, and logs with one record per line; a resumed run truncates its logs to its step."""

from __future__ import annotations

import codecs
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from electra_fast.errors import InputError
from electra_fast.files.atomic_files import errors_named, replace_file
from electra_fast.messages import UNSAFE

# Our files are less than half as deep, and Python's recursion limit is 1,000.
_MAX_DEPTH = 100

T = TypeVar("T")


def check_depth(content: Any) -> None:
    level = [content]
    for _ in range(_MAX_DEPTH):
        nested = [value for value in level if isinstance(value, (dict, list))]
        level = [child for value in nested for child in (value.values() if isinstance(value, dict) else value)]
        if not level:
            return
    raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")


def reason_of(error: ValueError | RecursionError) -> str:
    """Returns the reason why Python fails to parse valid JSON or TOML."""
    return "nested too deeply" if isinstance(error, RecursionError) else "an integer of thousands of digits"


def parse_json(text: str | bytes) -> Any:
    try:
        content = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(reason_of(error)) from None
    check_depth(content)
    return content


def read_optional(path: Path) -> dict[str, Any]:
    """Returns the object in a file, or an empty one if the file does not exist."""
    return read_object(path) if path.is_file() else {}


def read_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except ValueError as error:  # includes UnicodeDecodeError
        raise InputError(f"{path}: not a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: not a JSON object")
    return content


def record_of(kind: type[T], table: Any, place: str) -> T:
    """Makes a dataclass from an object that `asdict` returned; absent fields get their defaults.

    Raises ValueError with `place` and the field if a value has another type than the field.
    """
    if not isinstance(table, dict):
        raise InputError(f"{place}: not an object")
    values = {}
    for name, hint in get_type_hints(kind).items():
        if name not in table:
            continue
        value = table[name]
        where = f"{place}: {name}"
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            values[name] = record_of(hint, value, where)
        elif _is_of(value, hint):
            values[name] = value
        else:
            raise InputError(f"{where} = {str(value)[:50]!r}: must have the type {getattr(hint, '__name__', hint)}")
    return kind(**values)


def _is_of(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    if getattr(hint, "__origin__", None) is dict:
        return isinstance(value, dict) and all(_is_of(entry, get_args(hint)[1]) for entry in value.values())
    if options := get_args(hint):
        return any(_is_of(value, option) for option in options)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def json_text(content: Mapping[str, Any], encoding: str | None = "utf-8") -> str:
    """Returns an object as a line of JSON with escapes only for terminal control characters.

    JSON is UTF-8, so for a stream in another encoding all non-ASCII characters are escaped, too.
    """
    text = json.dumps(content, default=dict, ensure_ascii=codecs.lookup(encoding or "utf-8").name != "utf-8")
    return UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text) + "\n"


def write_object(path: Path, content: Mapping[str, Any]) -> None:
    with errors_named(path):
        path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


class JsonLines:
    """A log with one JSON object with a `step` per line; flushed after every line, truncated on resume."""

    def __init__(self, path: Path, last_step: int) -> None:
        """Opens for appending, after dropping records past `last_step` and an incomplete last line.

        If another line is not a record, raises ValueError with the line's number and drops nothing.
        """
        lines = [line for line, record in _complete_lines(path) if record["step"] <= last_step]
        replace_file(path, b"".join(lines))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        with errors_named(self._path):
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *error: object) -> None:
        with errors_named(self._path):
            self._file.close()


def read_records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a `JsonLines` file, if it exists. Raises ValueError with the number of a damaged line."""
    return [record for _, record in _complete_lines(path)]


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yields the complete lines of a log with their records; a kill may leave an incomplete line."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n") and line.strip():
            yield line, _record(path, number, line)


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise InputError(f"{path}: line {number}: must be JSON ({error}); repair or remove this line") from None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise InputError(f"{path}: line {number}: must be an object with an integer step; repair or remove this line")
    for name, value in record.items():
        if isinstance(value, (str, bool, list)) and name != "message":  # the text of a warning
            raise InputError(f"{path}: line {number}: {name} must be a number; repair or remove this line")
    return record
