"""Configuration as text: TOML files, `--section.key value` on the command line, and what a mistake may have meant."""

from __future__ import annotations

import csv
import difflib
import json
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError

Scalar = bool | int | float | str
Value = Scalar | list[str] | dict[str, float]
"""A key's value: a scalar, or for a key that takes several values also a list or a table with weights."""

TYPE_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file; FileNotFoundError, or ValueError that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: {error}") from None


def format_value(value: Value) -> str:
    """A value as TOML, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(name)} = {each!r}' for name, each in value.items())}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def parse_several(name: str, text: str) -> str | list[str] | dict[str, float]:
    """A value of the command line for a key that takes several: TOML's list or inline table, or a string as it is."""
    if not text.startswith(("[", "{")):
        return text
    try:
        value: list[str] | dict[str, float] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{name} = {text!r}: neither a list nor a table of TOML: {error}") from None
    return value


def parse_value(name: str, text: str, kind: type) -> Scalar:
    """A value of the command line as a key's type; numbers may be fractions (1/3) and have underscores."""
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{name} = {text!r} must be true or false")
        return text.lower() == "true"
    try:
        if kind is int:
            return int(text.replace("_", ""))
        numerator, slash, denominator = text.partition("/")
        return float(numerator) / float(denominator) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        raise InputError(f"{name} = {text!r} must be {TYPE_NAMES[kind]}") from None


def take_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--section.key value` and `--section.key=value` out of the arguments.

    argparse can't: it would read the value of an option that it doesn't know as a positional.
    """
    rest: list[str] = []
    overrides: dict[str, str] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise InputError(f"{name} needs a value")
            value = words.pop(0)
        overrides[name.removeprefix("--")] = value
    return rest, overrides


def comma_separated(text: str) -> tuple[str, ...]:
    """The parts of a list without blanks around them; one that contains a comma is written in double quotes."""
    (record,) = csv.reader([text], skipinitialspace=True)
    return tuple(part.strip() for part in record)


def nearest_keys(argument: str, keys: Sequence[str]) -> list[str]:
    """The keys whose last part is an argument such as `--batch-size` or comes nearest to it."""
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    last_parts = [key.partition(".")[2] for key in keys]
    close = difflib.get_close_matches(name, last_parts, n=1, cutoff=0.7)
    return [key for key, part in zip(keys, last_parts, strict=True) if part in close]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(names)}" if len(names) <= 12 else "; --help lists them"
