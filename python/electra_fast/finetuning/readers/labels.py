"""Reads the cells of label columns as names of classes: missing labels, spellings of a class, and written lists."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import json
import math
import re
import unicodedata
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows, abbreviated

MAX_NAMED_LABELS = 20
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))\.0*")
# Signs of a missing label in any column: null and empty cells (""), SNLI's and the `datasets` library's.
_NO_LABEL = ("", "-", "-1")
# Signs of a missing label in columns of numbers; elsewhere they may be classes.
_MISSING = {"nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
_DOUBTFUL = _MISSING | {"?", "--", "–", "—", "unlabeled", "undefined"}
_SEPARATORS = re.compile(r"(?<=\w)[\s_-]+(?=\w)")
_FLAGS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
# `0 1 0` or `0.3, 0.7` without brackets.
_BARE_LIST = re.compile(r"[01](?:\.[0-9]*)?(?:[\s,;|]+[01](?:\.[0-9]*)?)+")


class NoLabel(Exception):
    """An example has no label; the message is the sign for that."""


class LabelReader:
    """Reads the label cells of a row as names of classes.

    What the cells are is decided once, over all rows of the training file, by the first of these that holds:

    1. There are several columns: each has a 0 or 1, or false or true.
    2. There is a separator, or most cells are lists, as such or written as text: several labels. Lists of nothing but 0
       and 1 have one for each label if one of them repeats a value, or all are pairs (as names, every example would
       have both labels). Other lists have the labels' names.
    3. A cell is the name of one class.

    Cells of another form are bad rows.

    `values` are the cells of the training file's first label column, `place` returns the place of a row for messages.
    `given` are the user's classes, if any; `-1`, `-` and the empty string can be among them. `mapping` has labels of
    the files and their new names; empty names leave them out.

    Raises InputError if the labels are probabilities, or lists with two readings.
    """

    def __init__(
        self,
        values: Sequence[Any],
        place: Callable[[int], str],
        columns: Sequence[str],
        given: Sequence[str],
        separator: str,
        mapping: Mapping[str, str],
    ) -> None:
        self._separator = separator
        self._columns = columns
        self._given = given
        self.has_lists = bool(separator) or are_lists(values)
        lists = [self._items_of(value) for value in values] if self.has_lists else []
        self.flags = tuple(columns) if len(columns) > 1 else _flag_names(place, lists, given)
        if self.has_lists:
            _reject_shares(place, lists, given)
        elif not given:
            _reject_bare_lists(place, values)
        self._form = _form(item for items in lists for item in items) if lists else _form(values)
        self._mapping = {self.canonical(old): self.canonical(new) for old, new in mapping.items()}
        self._kept = set(map(self.canonical, given))
        self._unused = set(self._mapping)
        if self.flags and mapping:
            raise InputError("--label-map is not for columns or lists of 0 and 1, whose names are the labels")

    @property
    def is_multi_label(self) -> bool:
        return self.has_lists or bool(self.flags)

    @property
    def described(self) -> str:
        if not self.is_multi_label:
            return "one class per example"
        if len(self._columns) > 1:
            return "0 or 1 in a column per label"
        if not self.flags:
            return f"labels separated by {self._separator!r}" if self._separator else "lists of labels"
        names = "" if self._given else "; name them with --labels"
        return f"0 or 1 for each of {len(self.flags)} labels{names}"

    def __call__(self, cells: Sequence[Any], place: str) -> list[str]:
        """Returns the label names in the cells of a row: one, or in a multi-label task any number.

        Raises NoLabel, or InputError, which begins with the row's place.
        """
        if len(self._columns) > 1:
            return self._flagged(cells, place)
        cell = self._parsed(cells[0], place)
        if not self.has_lists:
            return [self._name(cell, place)]
        if not isinstance(cell, list):
            self._name(cell, place)  # null has no label
            raise InputError(f"{place}: the label is {abbreviated(cell)}, elsewhere it is a list")
        if self.flags:
            return self._flagged(cell, place)
        labels = [self._name(item, place) for item in cell if item != ""]
        if self._form == "number" and len({*labels}) < len(labels):
            raise InputError(f"{place}: the label {abbreviated(cell)} has a number twice, so it does not name labels")
        return labels

    def canonical(self, value: Any) -> str:
        """Returns a label as text: `3` for 3.0, `true` for True, and for null and NaN the empty string."""
        if value is None or value != value:
            return ""
        if isinstance(value, bool):
            return str(value).lower()
        text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
        if self._form == "number" and text.casefold() in _MISSING:
            return ""
        if self._form == "boolean":
            return text.lower()
        whole = _WHOLE.fullmatch(text) if self._form == "number" else None
        return whole[1] if whole else text

    def check_mapping(self, found: Iterable[str]) -> None:
        if self._unused:
            there_are = f"there are: {listed(sorted(found))}"
            raise InputError(f"--label-map: no file has the label {min(self._unused)!r}; {there_are}")

    def _name(self, value: Any, place: str) -> str:
        if isinstance(value, dict | list | bytes):
            raise InputError(f"{place}: the label is {abbreviated(value)}; it must be text or an integer")
        found = self.canonical(value)
        self._unused.discard(found)
        name = self._mapping.get(found, found)
        if name in _NO_LABEL and name not in self._kept:
            raise NoLabel(found or (value.strip() if isinstance(value, str) else ""))
        return name

    def _flagged(self, values: Sequence[Any], place: str) -> list[str]:
        if len(values) != len(self.flags):
            what = f"elsewhere it is a list of {len(self.flags)} times 0 or 1"
            raise InputError(f"{place}: the label is {abbreviated(values)}, {what}")
        return [name for name, value in zip(self.flags, values, strict=True) if _is_set(value, name, place)]

    def _parsed(self, cell: Any, place: str) -> Any:
        """Returns the list that a text spells or that the separator makes; other cells as they are."""
        if isinstance(cell, str) and self._separator:
            return [part for part in cell.split(self._separator) if part.strip()]
        if not isinstance(cell, str) or not has_brackets(cell):
            return cell
        try:
            found = _parsed_value(cell)
        except ValueError as error:
            if not self.has_lists:
                return cell
            what = f"the label {abbreviated(cell)} cannot be read as a list ({error})"
            raise InputError(f'{place}: {what}; write it as JSON, such as ["a", "b"]') from None
        if not self.has_lists:
            raise InputError(f"{place}: the label is {abbreviated(cell)}; it must be text or an integer, as elsewhere")
        return found

    def _items_of(self, cell: Any) -> list[Any]:
        """Returns the items of a list; none of another cell, or of one that will be a bad row."""
        with contextlib.suppress(InputError):
            cell = self._parsed(cell, "")
        return cell if isinstance(cell, list) else []


def is_missing(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and _sign(value) in _MISSING | {"", "-"})


def is_number(value: Any) -> bool:
    """Returns whether a value is a number or text that Python reads as one, without underscores."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return "_" not in str(value)


def parse_mapping(given: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Parses `--label-map OLD=NEW,...`; raises InputError naming what is not of this form."""
    if isinstance(given, Mapping):
        return dict(given)
    mapping: dict[str, str] = {}
    for pair in given:
        old, equals, new = (part.strip() for part in pair.partition("="))
        if not equals or old in mapping:
            what = "is there twice" if equals else "must be OLD=NEW (OLD= leaves the examples out)"
            raise InputError(f"--label-map: {old if equals else pair!r} {what}")
        mapping[old] = new
    return mapping


def left_out(signs: Mapping[str, int]) -> str:
    """Lists the signs of missing labels and their counts, for notes: `'-1' 3, empty 1`."""
    return ", ".join(f"{repr(sign) if sign else 'empty or null'} {count:,}" for sign, count in signs.items())


def listed(labels: Iterable[str]) -> str:
    return truncated([repr(label) for label in labels])


def truncated(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED_LABELS:,} more" if len(names) > MAX_NAMED_LABELS else ""
    return ", ".join(names[:MAX_NAMED_LABELS]) + more


def near_label(unknown: str, classes: Iterable[str]) -> str:
    by_key = {_looks(name): name for name in reversed(tuple(classes))}
    close = difflib.get_close_matches(_looks(unknown), by_key, n=1, cutoff=1.0 if is_number(unknown) else 0.6)
    return f"; if it means {by_key[close[0]]!r}, add --label-map {unknown}={by_key[close[0]]}" if close else ""


def known_rows(
    path: Path, found: Sequence[Collection[str]], known: Collection[str], bad: BadRows, what: str = "labels"
) -> list[int]:
    """Returns the rows of which a trained model knows all labels; the others are bad rows, with one message for all."""
    unknown = Counter(name for own in found for name in own if name not in known)
    kept = [row for row, own in enumerate(found) if all(name in known for name in own)]
    if unknown:
        counts = truncated([f"{name!r} {count:,}" for name, count in unknown.most_common()])
        hint = near_label(next(iter(unknown)), known) if what == "labels" else ""
        message = f"{path}: {what} that the model does not know: {counts}; it knows {listed(known)}{hint}"
        bad.add(message, len(found) - len(kept))
    return kept


def doubts(counts: Mapping[str, int]) -> Iterator[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        groups[_looks(name)].append(name)
    for names in groups.values():
        if len(names) > 1:
            sizes = ", ".join(f"{name!r} {counts[name]:,}" for name in names)
            join = f"--label-map {names[1]}={names[0]} joins them"
            yield f"classes that differ only in case, spaces or form: {sizes}; {join}"
    for name in (name for name in counts if _sign(name) in _DOUBTFUL):
        yield (
            f"the class {name!r}, {counts[name]:,} examples, may mean that there is no label; "
            f"--label-map {name}= leaves them out"
        )


def _looks(name: str) -> str:
    visible = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", visible).casefold().strip())


def _sign(text: str) -> str:
    return text.strip().casefold()


def _form(values: Iterable[Any]) -> Literal["number", "boolean", "text"]:
    forms = {_form_of(value) for value in values if not is_missing(value)}
    return forms.pop() if len(forms) == 1 else "text"


def _form_of(value: Any) -> Literal["number", "boolean", "text"]:
    if isinstance(value, bool) or _sign(str(value)) in ("true", "false"):
        return "boolean"
    return "number" if is_number(value) else "text"


def _is_set(value: Any, column: str, place: str) -> bool:
    text = _sign(str(value))
    if text in _FLAGS:
        return _FLAGS[text]
    if is_missing(value) or text in ("-1", "-1.0"):
        raise NoLabel("" if is_missing(value) else "-1")
    raise InputError(f"{place}: {column!r} is {abbreviated(value)}; it must be 0, 1, true or false")


def _flag_names(place: Callable[[int], str], lists: Sequence[list[Any]], given: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels for which lists have a 0 or 1 each; none for lists of names.

    Raises InputError if both are possible and `given` does not decide.
    """
    texts = {str(item).strip().lower() for cell in lists for item in cell if not is_missing(item)} - {"-1", "-1.0"}
    if not texts or not texts <= _FLAGS.keys():
        return ()
    sizes = Counter(len(cell) for cell in lists if cell)
    size = sizes.most_common(1)[0][0]
    are_pairs = sizes.keys() == {2}
    repeat = any(len({*map(str, cell)}) < len(cell) for cell in lists)
    are_given = {text.removesuffix(".0") for text in texts} <= {*map(str.lower, given)}
    if given and len(given) == size and (are_pairs or repeat or not are_given):
        return tuple(given)
    if given and are_given and not repeat:
        return ()
    if given:
        what = f"the label is a list of {size} times 0 or 1; --labels names {len(given)}"
        raise InputError(f"{place(0)}: {what}")
    if repeat or are_pairs:
        return tuple(map(str, range(size)))
    first = next(row for row, cell in enumerate(lists) if cell)
    names = ",".join(sorted({text.removesuffix(".0") for text in texts}))
    raise InputError(
        f"{place(first)}: the label {abbreviated(lists[first])} may name labels or have a 0 or 1 for each; "
        f"choose with --labels {names} or with --labels and the names of all labels"
    )


def _reject_shares(place: Callable[[int], str], lists: Sequence[list[Any]], given: Sequence[str]) -> None:
    items = {str(item).strip() for cell in lists for item in cell if not is_missing(item)} - {*given}
    if all(map(is_number, items)) and (shares := {item for item in items if not float(item).is_integer()}):
        row = next(row for row, cell in enumerate(lists) if not shares.isdisjoint(map(str, cell)))
        raise InputError(
            f"{place(row)}: the label {abbreviated(lists[row])} has numbers with decimals; soft labels (a "
            "probability per class) are not supported, so write the most probable class"
        )


def _reject_bare_lists(place: Callable[[int], str], values: Sequence[Any]) -> None:
    """Raises InputError if single labels look like lists of 0 and 1 or of shares without brackets."""
    cells = {row: value for row, value in enumerate(values) if not is_missing(value)}
    if cells and all(isinstance(cell, str) and _BARE_LIST.fullmatch(cell.strip()) for cell in cells.values()):
        row, cell = next(iter(cells.items()))
        raise InputError(
            f"{place(row)}: the label {cell!r} may be several; choose with --label-separator ' ' (or what "
            "separates them), or name the classes with --labels"
        )


_TOKEN = re.compile(r"""[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[^\s\[\](){},:='"]+|\S""", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,4000}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CALL = r"(?:[A-Za-z_]\w*\.)?(?:array|tensor)\("
_BRACKETED = re.compile(rf"\[.*\]|\(.*,.*\)|\{{.*\}}|{_CALL}.*\)", re.DOTALL)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None, "nan": math.nan, "<na>": None}


# Lists in cells of text, as JSON, Python, NumPy, pandas and PyTorch write them.


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


# The same lists occur in many cells of labels.
_parsed_value = functools.lru_cache(4096)(parse_value)
