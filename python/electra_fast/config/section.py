"""The sections and keys of a configuration, their checks, and their text form: TOML and `--section.key value`.

A `Configuration` is a frozen dataclass of `Section`s, which are frozen dataclasses of `config_key`s. `config` has the
sections of pre-training, `finetuning.config` the section of fine-tuning.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import json
import math
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, get_args, get_origin, get_type_hints

from electra_fast.config.spellings import ANSWERS
from electra_fast.errors import InputError
from electra_fast.files.json_files import check_depth, reason_of

Scalar = bool | int | float | str
Value = Scalar | list[str] | dict[str, float]
"""A key's value: a scalar or, for a key with several values, a list or a table with weights."""

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
# Factors of number suffixes, keyed by the unit at the end of a key's name. Suffixes of bytes and times are lower-case.
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

TYPE_NAMES: dict[type, str] = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
AUTO: Final = "auto"
LOGGERS = ("tensorboard", "wandb", "mlflow")
"""Names of `train.loggers` and `finetune.loggers`."""

REMOVED_KEYS: dict[str, tuple[Scalar, str]] = {
    "train.capture_collectives": (False, "collectives run between CUDA graphs"),
    "train.skip_spikes": (0, "train.stop_on_divergence ends a run that diverges, and fp16 skips steps by itself"),
}
"""Removed keys that older files may still have: the only accepted value, the former default, and the behavior now."""

RENAMED_VALUES: dict[str, dict[str, str]] = {
    "data.masking": {"paper": "tokens", "google": "with-repeats", "bert": "80-10-10"},
    "data.packing": {"google": "examples"},
    "model.architecture": {"modern": "modernbert"},
    "finetune.head": {"google": "published", "hf": "transformers"},
    "finetune.layer_decay_form": {"paper": "plain", "google": "squared"},
}
"""Former values by key. In a file they are read as their present names; elsewhere the error suggests these."""


def config_key(
    default: Scalar,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    takes_several: bool = False,
    or_auto: bool = False,
) -> Any:
    """Declares a configuration key: its default, description and allowed range (`open_low` excludes `low` itself).

    `choices` are the allowed names if the type is not a Literal. A string with `takes_several` may also be a list of
    strings or, without `choices`, a table of weights keyed by string. `or_auto` allows "auto" besides an integer.
    """
    bounds = {"low": low, "high": high, "open_low": open_low}
    metadata = {"doc": doc, "choices": choices, "takes_several": takes_several, "or_auto": or_auto, **bounds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Section:
    """Keys that are checked against their declared type, choices and range."""

    def __init_subclass__(cls) -> None:
        """Adds the keys to the docstring, for `help(config.train)`."""
        lines = [f"{cls.__doc__}\n"]
        for name, field in vars(cls).items():
            if isinstance(field, dataclasses.Field):
                lines.append(f"{name}: {cls.__annotations__[name]} = {field.default!r}")
                lines += textwrap.wrap(field.metadata["doc"], 92, initial_indent="    ", subsequent_indent="    ")
        cls.__doc__ = "\n".join(lines)

    def __post_init__(self) -> None:
        choices = _choices(type(self))
        for field in dataclasses.fields(self):
            name = f"{type(self).__name__.removesuffix('Config').removesuffix('Section').lower()}.{field.name}"
            _check(name, field, getattr(self, field.name), choices.get(field.name))


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Sections by name. Validation raises and never rewrites a value."""

    SHORT_NAMES: ClassVar[Mapping[str, str]] = {}
    """Names without a section for some keys, in `override` and on the command line."""

    @classmethod
    def key_names(cls) -> list[str]:
        """Returns all keys as `section.key`, in order."""
        return list(cls._fields())

    @classmethod
    def describe_key(cls, name: str) -> str:
        """Returns a key's description and choices, for help texts."""
        choices = cls.choices(name)
        return str(cls._fields()[name].metadata["doc"]) + (f" ({', '.join(choices)})" if choices else "")

    @classmethod
    def rule(cls, name: str) -> str:
        """Returns the rule for a default that depends on the task or model; "" for a constant default."""
        return ""

    @classmethod
    def choices(cls, name: str) -> tuple[str, ...] | None:
        """Returns the values that a key may have, or None if they cannot be listed."""
        section, _, key = name.partition(".")
        return _choices(_sections(cls)[section]).get(key)

    @classmethod
    @functools.cache
    def _fields(cls) -> dict[str, dataclasses.Field[Any]]:
        sections = ((name, dataclasses.fields(section)) for name, section in _sections(cls).items())
        return {f"{name}.{field.name}": field for name, fields in sections for field in fields}

    def override(self, changes: Mapping[str, object] | None = None, /, **by_name: object) -> Self:
        """Returns a copy with other values. Strings are parsed as on the command line, such as `"10k"` or `"1/3"`.

        Example:
            config.override({"train.steps": 5000, "generator.fraction": "1/3"})
            config.override(steps=5000, lr=1e-3, mask_prob=0.3)

        Args:
            changes: Values keyed by `section.key`.
            by_name: Values keyed by a key's last part, if only one section has such a key, or by its short name on the
                command line, such as `lr`.

        Raises:
            InputError: A key or value is unknown, or several sections have a key of that name.
        """
        return self._replace(self.values_of([*(changes or {}).items(), *by_name.items()]))

    def _replace(self, values: Mapping[str, Any]) -> Self:
        """Returns a copy with other values keyed by `section.key`, which are parsed and checked."""
        sections: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        changed = {name: dataclasses.replace(getattr(self, name), **keys) for name, keys in sections.items()}
        return dataclasses.replace(self, **changed)

    @classmethod
    def values_of(cls, overrides: Iterable[tuple[str, object]]) -> dict[str, Any]:
        """Returns parsed and checked overrides keyed by `section.key`, from full or short names or last parts."""
        values: dict[str, Any] = {}
        for option, value in overrides:
            keys = [key for key in cls.key_names() if key.endswith(f".{option}")]
            if option not in cls.SHORT_NAMES and len(keys) > 1:
                raise InputError(f"{option} is ambiguous: {' or '.join(keys)}; use the full key")
            name = cls.SHORT_NAMES.get(option, keys[0] if keys else option)
            if isinstance(value, str) and name in cls._fields() and cls._fields()[name].metadata["takes_several"]:
                value = parse_several(name, value)
                if cls.choices(name) and isinstance(value, str):
                    value = list(comma_separated(value)) if value else ""
            if value not in [values.setdefault(name, value)]:
                raise InputError(f"{name} has two values, {values[name]!r} and {value!r}; pass one")
        return cls._checked(values)

    @classmethod
    def values_of_file(cls, table: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a file's `table[section][key]` keyed by `section.key`, parsed and checked."""
        values: dict[str, Any] = {}
        for section, keys in table.items():
            if section not in _sections(cls):
                raise InputError(f"unknown section [{section}]{did_you_mean(section, _sections(cls))}")
            if not isinstance(keys, Mapping):
                raise InputError(f"{section} = {keys!r}: must be a table, [{section}]")
            values |= {f"{section}.{key}": value for key, value in keys.items()}
        return cls._checked(present_names(values))

    @classmethod
    def _checked(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns values with their keys' types, without removed keys. Raises InputError for unknown names."""
        checked = {}
        known = cls._fields()
        for name, value in values.items():
            if name in _sections(cls):
                raise InputError(f"{name} is a section; use a key in it, {name}.KEY")
            if name in known:
                checked[name] = _read(name, known[name], value)
                _check(name, known[name], checked[name], cls.choices(name))
            elif not _is_removed(name, value):
                meant = nearest(name, known)
                section, _, key = name.rpartition(".")
                keys = [field.removeprefix(f"{section}.") for field in known if field.startswith(f"{section}.")]
                hint = f"; did you mean {' or '.join(meant)}?" if meant else did_you_mean(key, keys or known)
                raise InputError(f"unknown key {name}{hint}")
        return checked

    def to_toml(self) -> str:
        """Returns the configuration as TOML with descriptions of the keys; `Config.load` restores it exactly."""
        lines = []
        for section in dataclasses.fields(self):
            lines.append(f"[{section.name}]")
            values = getattr(self, section.name)
            for field in dataclasses.fields(values):
                value = f"{field.name} = {format_value(getattr(values, field.name))}"
                lines.append(f"{value:<32} # {field.metadata['doc']}")
            lines.append("")
        return "\n".join(lines)

    def differences(self, other: Self) -> dict[str, tuple[Value, Value]]:
        """Returns the keys whose values differ: `{"train.steps": (this value, other value)}`."""
        pairs = {name: (self.value(name), other.value(name)) for name in self.key_names()}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    def value(self, name: str) -> Value:
        """Returns the value of `section.key`."""
        section, _, key = name.partition(".")
        value: Value = getattr(getattr(self, section), key)
        return value


_MAX_INT = 2**63 - 1
_type_hints: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)  # slow: evaluates source text


def _sections(configuration: type[Configuration]) -> dict[str, type[Section]]:
    hints = _type_hints(configuration)
    return {field.name: hints[field.name] for field in dataclasses.fields(configuration)}


def _choices(section: type[Section]) -> dict[str, tuple[str, ...]]:
    """Returns the allowed names of keys, from their `choices` or Literal types."""
    hints = _type_hints(section)
    literal = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
    fields = dataclasses.fields(section)
    names = {field.name: field.metadata["choices"] or literal.get(field.name) for field in fields}
    return {name: choices for name, choices in names.items() if choices}


def _is_removed(name: str, value: object) -> bool:
    """Returns whether a key was removed. Raises ValueError if its value is not the former default."""
    if name not in REMOVED_KEYS:
        return False
    default, instead = REMOVED_KEYS[name]
    if value not in (default, format_value(default)):
        raise InputError(f"{name} = {value!r}: this key was removed ({instead}); remove it here, too")
    return True


def present_names(values: Any, section: str = "") -> Any:
    """Returns a file's values with `RENAMED_VALUES` under their present names; other content is not changed."""
    if not isinstance(values, Mapping):
        return values
    return {name: present_name(f"{section}{name}", value) for name, value in values.items()}


def present_name(name: str, value: Any) -> Any:
    """Returns a file's value of `section.key` under its present name."""
    return RENAMED_VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value


def _read(name: str, field: dataclasses.Field[Any], value: Any) -> Any:
    kind = _kind(field)
    if isinstance(value, str):
        if _is_auto(field, value):
            return value
        try:
            return parse_value(name, value, kind)
        except InputError as error:
            raise InputError(f"{error}, or auto") if field.metadata["or_auto"] else error from None
    if kind is float and type(value) is int and abs(value) <= _MAX_INT:
        return float(value)
    return int(value) if kind is int and isinstance(value, float) and value.is_integer() else value


def _kind(field: dataclasses.Field[Any]) -> type:
    return int if field.metadata["or_auto"] else type(field.default)


def _is_auto(field: dataclasses.Field[Any], value: object) -> bool:
    return field.metadata["or_auto"] and value == AUTO


def _check(name: str, field: dataclasses.Field[Any], value: object, choices: tuple[str, ...] | None) -> None:
    expected = _kind(field)
    if field.metadata["takes_several"] and not isinstance(value, str):
        _check_several(name, value)
        if not value and not choices:
            raise InputError(f"{name} = {value!r}: must have at least one entry")
    elif type(value) is not expected and not _is_auto(field, value):
        raise InputError(f"{name} = {value!r}: must be {TYPE_NAMES[expected]}, not {_type_name(value)}")
    _check_text(name, value)
    if (now := present_name(name, value)) is not value:
        raise InputError(f'{name} = "{value}": renamed to "{now}"')
    entries = value if type(value) is list else [value] if value != field.default else []
    if choices and any(entry not in choices for entry in entries):
        several = "among" if field.metadata["takes_several"] else "one of"
        raise InputError(f"{name} = {value!r}: must be {several} {', '.join(choices)}")
    low = field.metadata["low"]
    high = field.metadata["high"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if isinstance(value, int) and value > _MAX_INT:
            high = min(high, _MAX_INT)
        below = value <= low if field.metadata["open_low"] else value < low
        # Bounds first: an integer may be too large to become a float.
        if below or value > high or not math.isfinite(value):
            bound = f"above {low:g}" if field.metadata["open_low"] else f"at least {low:g}"
            upper = f" and at most {high if isinstance(high, int) else format(high, 'g')}" if high < math.inf else ""
            raise InputError(f"{name} = {value!r}: must be {bound}{upper}")


def _check_several(name: str, value: object) -> None:
    """Raises ValueError unless a value is a list of strings or table of numbers."""
    is_list = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
    is_table = isinstance(value, dict) and all(
        type(weight) in (int, float) and abs(weight) <= _MAX_INT for weight in value.values()
    )
    if not (is_list or is_table):
        raise InputError(f"{name} = {value!r}: must be a string, a list of strings, or a table of numbers")


def _check_text(name: str, value: object) -> None:
    """Raises ValueError for strings that neither TOML nor a file name can contain."""
    for text in [value] if isinstance(value, str) else value if isinstance(value, (list, dict)) else ():
        if any(character == "\0" or "\ud800" <= character <= "\udfff" for character in text):
            raise InputError(f"{name} = {value!r}: must not have NUL or invalid UTF-8; rename the file or folder")


def _type_name(value: object) -> str:
    return TYPE_NAMES.get(type(value), type(value).__name__)


def integers_as_floats(section: Section | type[Section], values: Mapping[str, Any]) -> dict[str, Any]:
    """Converts integers to floats for float keys, since TOML may have 1 for 1.0."""
    return {
        key: float(value)
        if type(value) is int and abs(value) <= _MAX_INT and type(getattr(section, key)) is float
        else value
        for key, value in values.items()
    }


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises FileNotFoundError, or ValueError naming the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such configuration file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 at byte {error.start}") from None
    if path.suffix.lower() in (".json", ".yaml", ".yml"):  # YAML of comments alone would be valid TOML
        raise InputError(f"{path}: must be TOML: a section such as [train], below it keys such as steps = 1000")
    try:
        return parse_toml(text)
    except ValueError as error:
        hint = "" if path.suffix == ".toml" else "; must be TOML"
        raise InputError(f"{path}: {error}{hint}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parses TOML. Raises ValueError also for deep nesting and for integers that Python cannot print."""
    try:
        table = tomllib.loads(text)
        repr(table)  # a hexadecimal number may have more decimal digits than Python prints
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
        return f"{{{', '.join(f'{_quoted(name)} = {weight!r}' for name, weight in value.items())}}}"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """Returns a basic string of TOML. Its escapes are JSON's, but TOML also requires an escape for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_several(name: str, text: str) -> str | list[str] | dict[str, float]:
    """Parses the value of a key with `takes_several`: a TOML list or inline table; other text is a single string."""
    if not text.startswith(("[", "{")):
        return text
    try:
        value: list[str] | dict[str, float] = parse_toml(f"value = {text}")["value"]
    except ValueError as error:
        raise InputError(f"{name} = {text!r}: must be a TOML list or table: {error}") from None
    return value


def parse_value(name: str, text: str, kind: type) -> Scalar:
    """Converts a string to a key's type; numbers may have suffixes of the unit at the end of the key's name."""
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise InputError(f"{name} = {text!r}: must be true or false")
        return text.lower() == "true"
    unit = name.rpartition("_")[2]
    try:
        return parse_number(text, kind, unit if unit in _FACTORS else "count" if kind is int else "")
    except InputError as error:
        raise InputError(f"{name} = {error}") from None


def parse_number(text: str, kind: type, unit: str = "count") -> int | float:
    """Parses a number such as 1e5, 100k, 1_000, 1/3, 200GB (bytes) or 1h30m (minutes, seconds).

    Raises ValueError for unknown suffixes of the unit and for an integer with a fraction.
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
    expected = TYPE_NAMES[kind] if unit in ("", "count") else f"a number of {unit}"
    raise InputError(f"{text!r}: must be {expected}{examples}")


def _quantity(text: str, factors: Mapping[str, int | Fraction]) -> Fraction:
    """Parses a number with its suffix, or several numbers with suffixes of time, such as 1h30m."""
    parts = re.findall(_PART, text)
    if not re.fullmatch(f"(?>{_PART})+", text) or (
        len(parts) > 1 and any(suffix not in _SECONDS for _, suffix in parts)
    ):
        raise ValueError(text)
    total = Fraction()
    for number, suffix in parts:
        factor = factors.get(suffix if "K" in factors else suffix.lower()) if suffix else 1
        if factor is None:
            raise ValueError(text)
        total += Fraction(number.replace("_", "")) * factor
    return total


def comma_separated(text: str) -> tuple[str, ...]:
    """Splits a list at its commas and strips each part; double quotes protect a comma."""
    try:
        (record,) = csv.reader([text], skipinitialspace=True)
    except csv.Error:
        raise InputError(f"{text[:80]!r}: must be names separated by commas, on one line") from None
    return tuple(part.strip() for part in record)


def nearest(argument: str, known: Iterable[str]) -> list[str]:
    """Returns the known keys and flags nearest to an argument such as `--batch-size`, `--lr` or `--optimizer.lr`."""
    name = _plain(argument)
    flags = list(known)
    meant = next(filter(None, (named(candidate, argument, flags) for candidate in (name, *ANSWERS.get(name, ())))), [])
    close = [] if meant else difflib.get_close_matches(name, map(_plain, flags), n=1, cutoff=0.7)
    return named(close[0], argument, flags) if close else meant


def named(name: str, argument: str, known: Iterable[str]) -> list[str]:
    """Returns the known keys and flags with a name, preferably in the argument's section or without a section."""
    flags = [flag for flag in known if name in (_plain(flag), flag.lstrip("-"))]
    section = argument.lstrip("-").rpartition(".")[0]
    in_section = [flag for flag in flags if flag.lstrip("-").startswith(f"{section}.")]
    return in_section or [flag for flag in flags if "." not in flag] or flags


def _plain(name: str) -> str:
    """Returns the last part of a key or flag, spelled as a key."""
    return name.lstrip("-").rpartition(".")[2].replace("-", "_").lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; must be one of {', '.join(names)}" if len(names) <= 12 else "; see --help"
