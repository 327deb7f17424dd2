"""Lists in cells of text, as JSON, Python, NumPy, pandas and PyTorch write them."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Sequence
from typing import Any

_TOKEN = re.compile(r"""[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[^\s\[\](){},:='"]+|\S""", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,4000}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CALL = r"(?:[A-Za-z_]\w*\.)?(?:array|tensor)\("
_BRACKETED = re.compile(rf"\[.*\]|\(.*,.*\)|\{{.*\}}|{_CALL}.*\)", re.DOTALL)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None, "nan": math.nan, "<na>": None}


class Elided(ValueError):
    """A list is not whole, as NumPy prints long ones."""


def are_lists(cells: Sequence[Any]) -> bool:
    """Returns whether most cells of a column, apart from empty ones, are lists or texts that spell or resemble one.

    `[NEG]` alone is a name; `[NEG, POS]` without quotes resembles a list.
    """
    cells = [cell for cell in cells if cell is not None and cell == cell and cell != ""]
    kinds = [isinstance(cell, list) or (isinstance(cell, str) and _resembles_list(cell)) for cell in cells]
    return 2 * sum(kinds) >= max(1, len(cells))


def _resembles_list(text: str) -> bool:
    has_several = text.strip()[:1] == "[" and bool(re.search(r"[,;\s]|\.\.", text.strip()[1:-1].strip()))
    return has_brackets(text) and (has_several or spells_list(text))


def has_brackets(text: str) -> bool:
    return _BRACKETED.fullmatch(text.strip()) is not None


def spells_list(text: str) -> bool:
    try:
        parse_list(text)
    except ValueError:
        return False
    return True


def parse_list(text: str) -> list[Any]:
    value = parse_value(text)
    if not isinstance(value, list):
        raise ValueError("it is not a list")
    return value


def parse_value(text: str) -> Any:
    """Returns the list or object that a text spells, with nan for NaN; raises ValueError for any other text.

    Commas separate the items of a list, or spaces as NumPy prints them, but not both.
    """
    if not has_brackets(text):
        raise ValueError("it has no brackets")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        tokens = [*_TOKEN.findall(text), ""]
    try:
        value, end = _value(tokens, 0)
    except (IndexError, RecursionError):
        raise ValueError("a bracket is open") from None
    except TypeError:  # a list as a key
        raise ValueError("it is not a list") from None
    if tokens[end]:
        raise ValueError(f"{tokens[end][:40]!r} follows its end")
    return value


def _value(tokens: Sequence[str], start: int) -> tuple[Any, int]:
    token = tokens[start]
    if token in _CLOSING:
        return _items(tokens, start + 1, _CLOSING[token])
    if tokens[start + 1] == "(" and re.fullmatch(r"[A-Za-z_][\w.]*", token):  # array([...], dtype=object), np.str_('a')
        items, end = _items(tokens, start + 2, ")")
        if len(items) != 1:
            raise ValueError(f"{token}() has {len(items)} arguments")
        return items[0], end
    return _constant(token), start + 1


def _items(tokens: Sequence[str], at: int, closing: str) -> tuple[Any, int]:
    """Returns the items up to a closing bracket, without named arguments: a list, or an object if they have keys."""
    items: list[Any] = []
    keys: list[Any] = []
    separators = set[str]()
    while tokens[at] != closing:
        if items:
            separators.add("," if tokens[at] == "," else " ")
            at += tokens[at] == ","
            if tokens[at] == closing:
                break
        if tokens[at + 1] == "=":  # dtype=object
            at += 3
            continue
        item, at = _value(tokens, at)
        if tokens[at] == ":":
            keys.append(item)
            item, at = _value(tokens, at + 1)
        items.append(item)
    if len(separators) > 1:
        raise ValueError("commas separate some of its items, and spaces others")
    if keys and (len(keys) != len(items) or closing != "}"):
        raise ValueError("some of its items have keys")
    return (dict(zip(keys, items, strict=True)) if keys or (closing == "}" and not items) else items), at + 1


def _constant(token: str) -> Any:
    if token == "..." or token == "…":
        raise Elided("its middle is left out")
    if token.lower() in _CONSTANTS:
        return _CONSTANTS[token.lower()]
    if token.lower() in ("np.true_", "np.false_"):
        return token.lower() == "np.true_"
    if _NUMBER.fullmatch(token):
        return float(token) if {*token} & {*".eE"} else int(token)
    if token[0] in "'\"" and "\\" not in token:
        return token[1:-1]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of an escape that Python lacks
            return ast.literal_eval(token)
    except (ValueError, SyntaxError):
        raise ValueError(f"{' '.join(token.split())[:40]} is not in quotes") from None
