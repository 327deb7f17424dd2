"""Configuration as text: TOML, `--section.key value` on the command line, and suggestions for misspelled names."""

from __future__ import annotations

import csv
import difflib
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.files.json_files import check_depth, reason_of

Scalar = bool | int | float | str
Value = Scalar | list[str] | dict[str, float]
"""A key's value: a scalar or, for a key that takes several, a list or a table with weights."""

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
# Factors of a number's suffixes, by the unit that a key's name ends in. Bytes and times are in lower case.
_FACTORS: dict[str, Mapping[str, int | Fraction]] = {
    "count": {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9},
    "bytes": {"b": 1}
    | {
        prefix + end: base**power
        for power, prefix in enumerate("kmgt", start=1)
        for end, base in (("", 1000), ("b", 1000), ("ib", 1024))
    },
    "seconds": _SECONDS,
    "minutes": {suffix: Fraction(seconds, 60) for suffix, seconds in _SECONDS.items()},
}
_EXAMPLES = {"count": "10000 or 10k", "bytes": "200GB or 16GiB", "seconds": "90 or 1.5h", "minutes": "90 or 1h30m"}
# A number and its suffix, matched without backtracking.
_PART = r"([+-]?(?>[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?>[eE][+-]?[0-9]{1,3})?) *([A-Za-z]*+) *"

# Other tools' names for our keys and flags.
_ALIASES = {
    **dict.fromkeys(("lr", "peak_lr", "max_lr"), ("learning_rate",)),
    **dict.fromkeys(("bs", "train_batch_size", "per_device_train_batch_size", "micro_batch_size"), ("batch_size",)),
    **dict.fromkeys(("max_steps", "num_steps", "train_steps", "num_train_steps", "total_steps", "iters"), ("steps",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "max_epochs"), ("epochs", "steps")),
    **dict.fromkeys(("seq_len", "seq_length", "max_seq_len", "max_seq_length", "max_length"), ("sequence_length",)),
    **dict.fromkeys(("fp16", "bf16", "fp32", "amp", "mixed_precision", "dtype"), ("precision",)),
    **dict.fromkeys(("warmup", "warmup_ratio", "num_warmup_steps"), ("warmup_steps", "warmup_fraction")),
    **dict.fromkeys(("gradient_accumulation_steps", "grad_accum"), ("accumulate",)),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clip_val"), ("clip_norm",)),
    **dict.fromkeys(("mlm_probability", "mask_ratio"), ("mask_prob",)),
    **dict.fromkeys(("save_steps", "save_every"), ("checkpoint_every",)),
    **dict.fromkeys(("output_dir", "output", "save_dir"), ("out",)),
    **dict.fromkeys(("data_dir", "dataset", "train_data", "corpus"), ("data",)),
    **dict.fromkeys(("model_name_or_path", "checkpoint"), ("model",)),
    **{
        "wd": ("weight_decay",),
        "eval_steps": ("eval_every",),
        "logging_steps": ("log_every",),
        "vocab_size": ("size",),
    },
}

TYPE_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises FileNotFoundError, or ValueError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    if path.suffix.lower() in (".json", ".yaml", ".yml"):  # YAML that is all comments would be TOML without keys
        raise InputError(f"{path}: configurations are TOML: a section is [train], a key below it steps = 1000")
    try:
        return parse_toml(text)
    except ValueError as error:
        hint = "" if path.suffix == ".toml" else "; configurations are TOML"
        raise InputError(f"{path}: {error}{hint}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError also for deep nesting and for numbers that cannot be printed."""
    try:
        table = tomllib.loads(text)
        repr(table)  # a hexadecimal number may have more digits than Python writes in decimal
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(reason_of(error)) from None
    check_depth(table)
    return table


def format_value(value: Value) -> str:
    """Returns a value as one line of TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(_quoted, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(name)} = {each!r}' for name, each in value.items())}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Returns a basic string of TOML: escapes are as in JSON, except that TOML also requires DEL to be escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_several(name: str, text: str) -> str | list[str] | dict[str, float]:
    """Parses the value of a key that takes several: a TOML list or inline table; other text is a single string."""
    if not text.startswith(("[", "{")):
        return text
    try:
        value: list[str] | dict[str, float] = parse_toml(f"value = {text}")["value"]
    except ValueError as error:
        raise InputError(f"{name} = {text!r}: not a TOML list or table: {error}") from None
    return value


def parse_value(name: str, text: str, kind: type) -> Scalar:
    """Converts a string to a key's type; numbers may have suffixes of the unit that the key's name ends in."""
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{name} = {text!r} must be true or false")
        return text.lower() == "true"
    unit = name.rpartition("_")[2]
    try:
        return parse_number(text, kind, unit if unit in _FACTORS else "count" if kind is int else "")
    except InputError as error:
        raise InputError(f"{name} = {error}") from None


def parse_number(text: str, kind: type, unit: str = "count") -> int | float:
    """Parses a number such as 1e5, 100k, 1_000, 1/3, 200GB (bytes) or 1h30m (minutes, seconds).

    Raises ValueError for suffixes that the unit lacks and for ints that are fractions.
    """
    value, slash, divisor = (part.strip() for part in text.partition("/"))
    try:
        number = _quantity(value, _FACTORS.get(unit, {}))
        if slash and kind is float:
            number /= _quantity(divisor, {})
        if kind is float:
            return float(number)
        if number.denominator == 1 and abs(number) < 2**63 and not slash:
            return int(number)
    except (ValueError, ArithmeticError):
        pass
    examples = f", such as {_EXAMPLES[unit]}" if unit in _EXAMPLES else ""
    what = TYPE_NAMES[kind] if unit in ("", "count") else f"a number of {unit}"
    raise InputError(f"{text!r} must be {what}{examples}")


def _quantity(text: str, factors: Mapping[str, int | Fraction]) -> Fraction:
    """Parses a number with its suffix, or several with suffixes of time, as in 1h30m."""
    parts = re.findall(_PART, text)
    if not re.fullmatch(f"(?>{_PART})+", text) or (len(parts) > 1 and any(each[1] not in _SECONDS for each in parts)):
        raise ValueError(text)
    total = Fraction()
    for number, suffix in parts:
        factor = factors.get(suffix if "K" in factors else suffix.lower()) if suffix else 1
        if factor is None:
            raise ValueError(text)
        total += Fraction(number.replace("_", "")) * factor
    return total


def take_overrides(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Takes `--section.key value` and `--section.key=value` out of the arguments.

    argparse cannot: it reads the value of an unknown option as a positional argument.
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
    """Splits a list at its commas and strips each part; double quotes protect a comma."""
    (record,) = csv.reader([text], skipinitialspace=True)
    return tuple(part.strip() for part in record)


def nearest(argument: str, *known: Iterable[str]) -> list[str]:
    """Returns the known keys and flags that an argument such as `--batch-size`, `--lr` or `--optimizer.lr` may mean."""
    name = _plain(argument.partition("=")[0])
    words: dict[str, list[str]] = {}
    for each in itertools.chain(*known):
        words.setdefault(_plain(each), []).append(each)
    meant = next((each for each in (name, *_ALIASES.get(name, ())) if each in words), None)
    close = [meant] if meant else difflib.get_close_matches(name, words, n=1, cutoff=0.7)
    found = [each for word in close for each in words[word]]
    section = argument.lstrip("-").partition(".")[0]
    return [each for each in found if each.startswith(f"{section}.")] or found


def _plain(name: str) -> str:
    """Returns the last part of a key or flag, spelled as a key."""
    return name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; there are {', '.join(names)}" if len(names) <= 12 else "; --help lists them"
