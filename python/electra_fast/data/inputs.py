"""What `prepare` and `train_vocab` are given, told apart: files that Rust reads, or documents from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from electra_fast.errors import InputError

Kind = Literal["auto", "files", "documents"]

# More bytes than this are no path on Linux or macOS.
LONGEST_PATH = 4096


def source(inputs: Any, kind: Kind, text_fields: list[str]) -> dict[str, Any]:
    """The argument `files` or `documents` for the Rust side, by the rule in `prepare`'s documentation."""
    if kind not in ("auto", "files", "documents"):
        raise InputError(f"kind is {kind!r}; it can be one of 'auto', 'files', 'documents'")
    _refuse_tables(inputs)
    if isinstance(inputs, str | os.PathLike):
        inputs = [inputs]
    elif not isinstance(inputs, Iterable):
        raise TypeError(f"inputs is {_shown(inputs)}: give a path, a list of paths, or an iterable of str")
    if kind == "documents" or (kind == "auto" and not _are_paths(inputs)):
        return {"documents": _texts(inputs, text_fields)}
    files = [_path(position, path) for position, path in enumerate(inputs)]
    if kind == "auto":
        _refuse_short_texts(inputs)
    return {"files": files}


def _refuse_tables(inputs: Any) -> None:
    """A dictionary of splits, and a data frame, would be iterated over their keys."""
    if isinstance(inputs, Mapping) or getattr(inputs, "ndim", 1) == 2:
        names = [str(name) for name in inputs]
        such = f"; give one of them, such as inputs[{names[0]!r}]" if names else ""
        raise TypeError(f"inputs is a {type(inputs).__name__} of {', '.join(names) or 'nothing'}{such}")


def _are_paths(inputs: Iterable[Any]) -> bool:
    """A list or tuple is of paths unless one of its strings can't be a path."""
    if not isinstance(inputs, list | tuple):
        return False
    return not any(
        isinstance(entry, Mapping) or (isinstance(entry, str) and ("\n" in entry or len(entry) > LONGEST_PATH))
        for entry in inputs
    )


def _path(position: int, entry: Any) -> str:
    if not isinstance(entry, str | os.PathLike):
        raise TypeError(f"inputs[{position}] is {_shown(entry)}: give paths, or text with kind='documents'")
    return os.fspath(entry)


def _refuse_short_texts(inputs: Iterable[Any]) -> None:
    """Documents of one line look like paths: where there is no such file, say how they are told apart."""
    for path in inputs:
        if isinstance(path, str) and not set("*?[") & set(path) and not os.path.exists(path):
            raise FileNotFoundError(f"{path}: not found; for documents instead of paths add kind='documents'")


def _texts(items: Iterable[Any], text_fields: list[str]) -> Iterator[str]:
    for position, item in enumerate(items):
        text = _record_text(position, item, text_fields) if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            raise TypeError(f"document {position} is {_shown(text)}, not a str")
        yield text


def _record_text(position: int, record: Mapping[str, Any], text_fields: list[str]) -> str:
    """The text of a row of a `datasets.Dataset`, as of a record of a `.jsonl`: null counts as empty."""
    texts = []
    for field in text_fields:
        if field not in record:
            there = ", ".join(map(str, record)) or "none"
            raise InputError(f"document {position}: no field {field!r}; there are: {there}; choose with text_field")
        if record[field] is not None:
            texts.append(record[field])
        if not isinstance(record[field], str | None):
            raise TypeError(f"document {position}: field {field!r} is {_shown(record[field])}, not a str")
    return "\n".join(texts)


def _shown(value: object) -> str:
    """A value on one line, cut short, with its type."""
    text = " ".join(repr(value).split())
    return f"{text[:40] + '…' if len(text) > 40 else text} ({type(value).__name__})"
