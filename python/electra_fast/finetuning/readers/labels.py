"""Reads the cells of label columns as class names: missing labels, spellings of a class, and lists written as text."""

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
# Markers of a missing label in any column: null and empty cells, `-` in SNLI, `-1` in the `datasets` library.
_NO_LABEL = ("", "-", "-1")
# Markers of a missing label in columns of numbers; in other columns they may be classes.
_MISSING = {"nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
_DOUBTFUL = _MISSING | {"?", "--", "–", "—", "unlabeled", "undefined"}
_SEPARATORS = re.compile(r"(?<=\w)[\s_-]+(?=\w)")
_FLAGS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}
# `0 1 0` or `0.3, 0.7` without brackets.
_BARE_LIST = re.compile(r"[01](?:\.[0-9]*)?(?:[\s,;|]+[01](?:\.[0-9]*)?)+")


class NoLabel(Exception):
    """An example has no label; the message is the marker in its cell."""


class LabelReader:
    """Reads the label cells of a row as class names.

    The form of the cells is decided once, from all rows of the training file, by the first rule that applies:

    1. Several columns: each cell is 0 or 1, or false or true.
    2. A separator, or mostly lists (real or written as text): several labels per example. Lists of only 0 and 1 are
       flags, one per label, if one of them repeats a value, or if all are pairs (read as names, every example would
       have both labels). Other lists contain label names.
    3. Otherwise a cell is the name of one class.

    A row with cells of another form is a bad row.

    `values` are the cells of the training file's first label column; `place` returns the place of a row for messages.
    `classes` are the user's classes, if any; they may include `-1`, `-` and the empty string. `mapping` has new names
    of labels; examples whose label gets an empty name are left out.

    Raises InputError if the labels are probabilities or ambiguous lists.
    """

    def __init__(
        self,
        values: Sequence[Any],
        place: Callable[[int], str],
        columns: Sequence[str],
        classes: Sequence[str],
        separator: str,
        mapping: Mapping[str, str],
    ) -> None:
        self._separator = separator
        self._columns = columns
        self._classes = classes
        self.has_lists = bool(separator) or are_lists(values)
        lists = [self._items_of(value) for value in values] if self.has_lists else []
        self.flags = tuple(columns) if len(columns) > 1 else _flag_names(place, lists, classes)
        if self.has_lists:
            _reject_probabilities(place, lists, classes)
        elif not classes:
            _reject_bare_lists(place, values)
        self._form = _form(item for items in lists for item in items) if lists else _form(values)
        self._mapping = {self.canonical(old): self.canonical(new) for old, new in mapping.items()}
        self._canonical_classes = set(map(self.canonical, classes))
        self._unused = set(self._mapping)
        if self.flags and mapping:
            raise InputError("--label-map does not apply to columns or lists of 0 and 1; rename the columns instead")

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
        names = "" if self._classes else "; name them with --labels"
        return f"0 or 1 for each of {len(self.flags)} labels{names}"

    def __call__(self, cells: Sequence[Any], place: str) -> list[str]:
        """Returns the label names in the cells of a row: one name, or any number in a multi-label task.

        Raises NoLabel, or InputError with the row's place.
        """
        if len(self._columns) > 1:
            return self._flagged(cells, place)
        cell = self._parsed(cells[0], place)
        if not self.has_lists:
            return [self._name(cell, place)]
        if not isinstance(cell, list):
            self._name(cell, place)  # null has no label
            raise InputError(f"{place}: label = {abbreviated(cell)}: must be a list, as in other rows")
        if self.flags:
            return self._flagged(cell, place)
        labels = [self._name(item, place) for item in cell if item != ""]
        if self._form == "number" and len({*labels}) < len(labels):
            raise InputError(f"{place}: label = {abbreviated(cell)}: must not repeat a number in a list of labels")
        return labels

    def canonical(self, value: Any) -> str:
        """Returns a label as text: `3` for 3.0, `true` for True, the empty string for null and NaN."""
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

    def check_mapping(self, labels: Iterable[str]) -> None:
        if self._unused:
            message = f"no file has the label {min(self._unused)!r}; available labels: {listed(sorted(labels))}"
            raise InputError(f"--label-map: {message}")

    def _name(self, value: Any, place: str) -> str:
        if isinstance(value, dict | list | bytes):
            raise InputError(f"{place}: label = {abbreviated(value)}: must be text or an integer")
        label = self.canonical(value)
        self._unused.discard(label)
        name = self._mapping.get(label, label)
        if name in _NO_LABEL and name not in self._canonical_classes:
            raise NoLabel(label or (value.strip() if isinstance(value, str) else ""))
        return name

    def _flagged(self, values: Sequence[Any], place: str) -> list[str]:
        if len(values) != len(self.flags):
            expected = f"must be a list of {len(self.flags)} values 0 or 1, as in other rows"
            raise InputError(f"{place}: label = {abbreviated(values)}: {expected}")
        return [name for name, value in zip(self.flags, values, strict=True) if _is_set(value, name, place)]

    def _parsed(self, cell: Any, place: str) -> Any:
        """Returns a cell as a list if it is text that spells a list or contains the separator; else unchanged."""
        if isinstance(cell, str) and self._separator:
            return [part for part in cell.split(self._separator) if part.strip()]
        if not isinstance(cell, str) or not has_brackets(cell):
            return cell
        try:
            value = _parsed_value(cell)
        except ValueError as error:
            if not self.has_lists:
                return cell
            message = f"label = {abbreviated(cell)}: cannot be read as a list ({error})"
            raise InputError(f'{place}: {message}; write it as JSON, such as ["a", "b"]') from None
        if not self.has_lists:
            raise InputError(f"{place}: label = {abbreviated(cell)}: must be text or an integer, as in other rows")
        return value

    def _items_of(self, cell: Any) -> list[Any]:
        """Returns the items of a list; an empty list for other cells and for cells of bad rows."""
        with contextlib.suppress(InputError):
            cell = self._parsed(cell, "")
        return cell if isinstance(cell, list) else []


def is_missing(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, str) and _marker(value) in _MISSING | {"", "-"})


def is_number(value: Any) -> bool:
    """Returns whether a value is a number, or text that Python reads as a number, without underscores."""
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return "_" not in str(value)


def parse_mapping(pairs: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """Parses `--label-map OLD=NEW,...`; raises InputError naming a malformed pair."""
    if isinstance(pairs, Mapping):
        return dict(pairs)
    mapping: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = (part.strip() for part in pair.partition("="))
        if not equals or old in mapping:
            problem = "occurs twice" if equals else "must be OLD=NEW, or OLD= to leave its examples out"
            raise InputError(f"--label-map: {old if equals else pair!r}: {problem}")
        mapping[old] = new
    return mapping


def left_out(markers: Mapping[str, int]) -> str:
    """Lists the markers of missing labels with their counts, for notes: `'-1' 3, empty or null 1`."""
    return ", ".join(f"{repr(marker) if marker else 'empty or null'} {count:,}" for marker, count in markers.items())


def listed(labels: Iterable[str]) -> str:
    return truncated([repr(label) for label in labels])


def truncated(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED_LABELS:,} more" if len(names) > MAX_NAMED_LABELS else ""
    return ", ".join(names[:MAX_NAMED_LABELS]) + more


def near_label(unknown: str, classes: Iterable[str]) -> str:
    by_key = {_normalized(name): name for name in reversed(tuple(classes))}
    close = difflib.get_close_matches(_normalized(unknown), by_key, n=1, cutoff=1.0 if is_number(unknown) else 0.6)
    return f"; if it means {by_key[close[0]]!r}, add --label-map {unknown}={by_key[close[0]]}" if close else ""


def known_rows(
    path: Path, labels: Sequence[Collection[str]], known: Collection[str], bad: BadRows, unit: str = "labels"
) -> list[int]:
    """Returns the rows with labels that a trained model knows; the others are bad rows with one message for all."""
    unknown = Counter(name for names in labels for name in names if name not in known)
    rows = [row for row, names in enumerate(labels) if all(name in known for name in names)]
    if unknown:
        counts = truncated([f"{name!r} {count:,}" for name, count in unknown.most_common()])
        hint = near_label(next(iter(unknown)), known) if unit == "labels" else ""
        message = f"{path}: {unit} unknown to the model: {counts}; known: {listed(known)}{hint}"
        bad.add(message, len(labels) - len(rows))
    return rows


def doubts(counts: Mapping[str, int]) -> Iterator[str]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in sorted(counts, key=lambda name: (-counts[name], name)):
        groups[_normalized(name)].append(name)
    for names in groups.values():
        if len(names) > 1:
            sizes = ", ".join(f"{name!r} {counts[name]:,}" for name in names)
            remedy = f"to merge them, add --label-map {names[1]}={names[0]}"
            yield f"classes that differ only in case, spaces or Unicode form: {sizes}; {remedy}"
    for name in (name for name in counts if _marker(name) in _DOUBTFUL):
        size = f"{name!r} ({counts[name]:,} examples)"
        yield f"the class {size} may mark missing labels; if so, omit them with --label-map {name}="


def _normalized(name: str) -> str:
    visible = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", visible).casefold().strip())


def _marker(text: str) -> str:
    return text.strip().casefold()


def _form(values: Iterable[Any]) -> Literal["number", "boolean", "text"]:
    forms = {_form_of(value) for value in values if not is_missing(value)}
    return forms.pop() if len(forms) == 1 else "text"


def _form_of(value: Any) -> Literal["number", "boolean", "text"]:
    if isinstance(value, bool) or _marker(str(value)) in ("true", "false"):
        return "boolean"
    return "number" if is_number(value) else "text"


def _is_set(value: Any, column: str, place: str) -> bool:
    text = _marker(str(value))
    if text in _FLAGS:
        return _FLAGS[text]
    if is_missing(value) or text in ("-1", "-1.0"):
        raise NoLabel("" if is_missing(value) else "-1")
    raise InputError(f"{place}: {column} = {abbreviated(value)}: must be 0, 1, true or false")


def _flag_names(place: Callable[[int], str], lists: Sequence[list[Any]], classes: Sequence[str]) -> tuple[str, ...]:
    """Returns the labels if lists have a 0 or 1 per label; an empty tuple if lists contain label names.

    Raises InputError if both are possible and the user's classes do not decide.
    """
    texts = {str(item).strip().lower() for cell in lists for item in cell if not is_missing(item)} - {"-1", "-1.0"}
    if not texts or not texts <= _FLAGS.keys():
        return ()
    sizes = Counter(len(cell) for cell in lists if cell)
    size = sizes.most_common(1)[0][0]
    are_pairs = sizes.keys() == {2}
    repeat = any(len({*map(str, cell)}) < len(cell) for cell in lists)
    are_names = {text.removesuffix(".0") for text in texts} <= {*map(str.lower, classes)}
    if classes and len(classes) == size and (are_pairs or repeat or not are_names):
        return tuple(classes)
    if classes and are_names and not repeat:
        return ()
    if classes:
        message = f"the label is a list of {size} values 0 or 1, but --labels has {len(classes)} names"
        raise InputError(f"{place(0)}: {message}")
    if repeat or are_pairs:
        return tuple(map(str, range(size)))
    first = next(row for row, cell in enumerate(lists) if cell)
    names = ",".join(sorted({text.removesuffix(".0") for text in texts}))
    raise InputError(
        f"{place(first)}: label = {abbreviated(lists[first])}: ambiguous; pass --labels {names} if these are label "
        "names, or --labels with the names of all labels if it has a 0 or 1 per label"
    )


def _reject_probabilities(place: Callable[[int], str], lists: Sequence[list[Any]], classes: Sequence[str]) -> None:
    items = {str(item).strip() for cell in lists for item in cell if not is_missing(item)} - {*classes}
    if all(map(is_number, items)) and (shares := {item for item in items if not float(item).is_integer()}):
        row = next(row for row, cell in enumerate(lists) if not shares.isdisjoint(map(str, cell)))
        raise InputError(
            f"{place(row)}: label = {abbreviated(lists[row])}: soft labels (a probability per class) are not "
            "supported; write the most probable class"
        )


def _reject_bare_lists(place: Callable[[int], str], values: Sequence[Any]) -> None:
    """Raises InputError if single labels look like lists of flags or probabilities without brackets."""
    cells = {row: value for row, value in enumerate(values) if not is_missing(value)}
    if cells and all(isinstance(cell, str) and _BARE_LIST.fullmatch(cell.strip()) for cell in cells.values()):
        row, cell = next(iter(cells.items()))
        raise InputError(
            f"{place(row)}: label = {cell!r}: may be several labels; pass their separator (--label-separator ' '), "
            "or name the classes with --labels"
        )


_TOKEN = re.compile(r"""[bru]{0,2}(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|[^\s\[\](){},:='"]+|\S""", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,4000}(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CALL = r"(?:[A-Za-z_]\w*\.)?(?:array|tensor)\("
_BRACKETED = re.compile(rf"\[.*\]|\(.*,.*\)|\{{.*\}}|{_CALL}.*\)", re.DOTALL)
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None, "nan": math.nan, "<na>": None}


# Lists written as text by JSON, Python, NumPy, pandas and PyTorch.


class Elided(ValueError):
    """A list is abbreviated with `...`, as NumPy prints long ones."""


def are_lists(cells: Sequence[Any]) -> bool:
    """Returns whether most cells of a column, ignoring empty ones, are lists or texts that spell or resemble a list.

    `[NEG]` is a name; `[NEG, POS]` resembles a list without quotes.
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
    """Returns the list or object that a text spells; raises ValueError for any other text.

    Items are separated by commas, or by spaces as NumPy prints them, but not by both.
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
        raise ValueError("a bracket is not closed") from None
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
    """Returns the items before a closing bracket, without named arguments, as a list, or with keys as an object."""
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
        raise ValueError("its items are separated by both commas and spaces")
    if keys and (len(keys) != len(items) or closing != "}"):
        raise ValueError("only some of its items have keys")
    return (dict(zip(keys, items, strict=True)) if keys or (closing == "}" and not items) else items), at + 1


def _constant(token: str) -> Any:
    if token == "..." or token == "…":
        raise Elided("its middle is abbreviated")
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
            warnings.simplefilter("error")  # for invalid escape sequences
            return ast.literal_eval(token)
    except (ValueError, SyntaxError):
        raise ValueError(f"{' '.join(token.split())[:40]} is not in quotes") from None


# Cells of a label column repeat the same few lists.
_parsed_value = functools.lru_cache(4096)(parse_value)
