"""The inputs of `prepare` and `vocab`: files that Rust reads, or documents from Python, and how to read them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from electra_fast import _data
from electra_fast.errors import InputError

Kind = Literal["auto", "files", "documents"]
StrPath = str | os.PathLike[str]
Separator = Literal["blank-line", "file", "line"]
InvalidUtf8 = Literal["error", "replace"]
Format = Literal["auto", "txt", "jsonl", "json", "parquet", "arrow"]

# The longest path on Linux and macOS.
LONGEST_PATH = 4096


def source(inputs: Any, kind: Kind, text_fields: list[str], invalid_utf8: InvalidUtf8) -> dict[str, Any]:
    """The argument `files` or `texts` of the Rust functions, by the rule that `prepare` documents."""
    if kind not in ("auto", "files", "documents"):
        raise InputError(f"kind = {kind!r}: must be one of 'auto', 'files', 'documents'")
    _reject_tables(inputs)
    if isinstance(inputs, str | os.PathLike):
        inputs = [inputs]
    elif not isinstance(inputs, Iterable):
        raise TypeError(f"inputs = {_abbreviated(inputs)}: must be a path, a list of paths, or an iterable of str")
    if kind == "documents" or (kind == "auto" and not _are_paths(inputs)):
        return {"texts": _texts(inputs, text_fields, invalid_utf8)}
    files = [_path(position, entry) for position, entry in enumerate(inputs)]
    if kind == "auto":
        _reject_short_texts(inputs)
    return {"files": files}


def _reject_tables(inputs: Any) -> None:
    """Rejects a dictionary of splits and a data frame: iterating over them would yield keys, not rows."""
    if isinstance(inputs, Mapping) or getattr(inputs, "ndim", 1) == 2:
        names = [str(name) for name in inputs]
        hint = f"; pass one of them, such as inputs[{names[0]!r}]" if names else ""
        raise TypeError(f"inputs is a {type(inputs).__name__} of {', '.join(names) or 'nothing'}{hint}")


def _are_paths(inputs: Iterable[Any]) -> bool:
    """Returns whether inputs are paths: a list or tuple is, unless one of its strings cannot be a path."""
    if not isinstance(inputs, list | tuple):
        return False
    return not any(
        isinstance(entry, Mapping) or (isinstance(entry, str) and ("\n" in entry or len(entry) > LONGEST_PATH))
        for entry in inputs
    )


def _path(position: int, entry: Any) -> str:
    if not isinstance(entry, str | os.PathLike):
        raise TypeError(f"inputs[{position}] = {_abbreviated(entry)}: must be a path; for text, pass kind='documents'")
    return os.fspath(entry)


def _reject_short_texts(inputs: Iterable[Any]) -> None:
    """Rejects missing files with a hint about documents, because one-line documents look like paths."""
    for path in inputs:
        if _data.url_of(os.fspath(path)) is not None:
            continue
        if isinstance(path, str) and not set("*?[") & set(path) and not os.path.exists(path):
            raise FileNotFoundError(f"{path}: not found; to pass documents instead of paths, add kind='documents'")


def _texts(items: Iterable[Any], text_fields: list[str], invalid_utf8: InvalidUtf8) -> Iterator[str]:
    for position, item in enumerate(items):
        text = _record_text(position, item, text_fields) if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            raise TypeError(f"document {position} = {_abbreviated(text)}: must be a str")
        yield text if text.isascii() else _encodable(position, text, invalid_utf8)


def _encodable(position: int, text: str, invalid_utf8: InvalidUtf8) -> str:
    """A text without unpaired surrogates, which `json` reads but no text encoding allows."""
    try:
        text.encode()
    except UnicodeEncodeError:
        if invalid_utf8 == "error":
            raise InputError(
                f"document {position}: unpaired surrogate; fix it, or read it as U+FFFD with invalid_utf8='replace'"
            ) from None
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _record_text(position: int, record: Mapping[str, Any], text_fields: list[str]) -> str:
    """The text of a `datasets.Dataset` row, by the rules for `.jsonl` records: null counts as empty."""
    texts = []
    for field in text_fields:
        try:
            value = _field(record, field)
        except KeyError:
            available = ", ".join(map(str, record)) or "none"
            raise InputError(
                f"document {position}: no field {field!r}; available: {available}; choose one with text"
            ) from None
        if not isinstance(value, str | None):
            raise TypeError(f"document {position}: field {field!r} = {_abbreviated(value)}: must be a str")
        if value is not None:
            texts.append(value)
    return "\n".join(texts)


def _field(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field; dots lead into nested records, and fields of null are None. Raises KeyError."""
    if name in record:
        return record[name]
    for outer, value in record.items():
        if name.startswith(f"{outer}.") and (value is None or isinstance(value, Mapping)):
            return None if value is None else _field(value, name[len(outer) + 1 :])
    raise KeyError(name)


def _abbreviated(value: object) -> str:
    text = " ".join(repr(value).split())
    return f"{text[:40] + '…' if len(text) > 40 else text} ({type(value).__name__})"


def reading_options(
    documents: Separator, text: str, invalid_utf8: InvalidUtf8, format: Format, skip_bad_rows: int
) -> dict[str, Any]:
    return {
        "documents": documents,
        "text_fields": [field.strip() for field in text.split(",") if field.strip()],
        "invalid_utf8": invalid_utf8,
        "format": None if format == "auto" else format,
        "skip_bad_rows": not_negative("skip_bad_rows", skip_bad_rows),
    }


def not_negative(name: str, value: int) -> int:
    if value < 0:
        raise InputError(f"{name} = {value}: must be at least 0")
    return value


def passed_over_warning(report: Mapping[str, Any]) -> str | None:
    """A warning if most of the input's bytes are in files of other kinds, which may be the text itself."""
    if report["skipped_bytes"] <= report["read_bytes"]:
        return None
    share = report["skipped_bytes"] / (report["skipped_bytes"] + report["read_bytes"])
    return (
        f"warning: {share:.0%} of the input's bytes are in {report['skipped_files']:,} skipped files of other kinds "
        f"({', '.join(report['skipped_kinds'])}); to read them, pass their names or --format, for JSON also "
        "--text"
    )


def skipped_lines(count: int, first: Iterable[tuple[str, int, str]], list_file: str | None) -> Iterator[str]:
    more = f"; {list_file} lists all of them" if list_file else ""
    yield f"warning: {count:,} bad rows were skipped{more}"
    yield from (f"  {file}:{line}: {reason}" for file, line, reason in first)
