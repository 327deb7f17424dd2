"""Reads the cells of label columns as names of classes: missing labels, and spellings of the same class."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows, abbreviated, literal
from electra_fast.finetuning.readers.tables import Table

MAX_NAMED_LABELS = 20
INTEGER = re.compile(r"[+-]?[0-9]{1,18}")
_WHOLE = re.compile(r"([+-]?(?:0|[1-9][0-9]{0,17}))\.0*")
# Signs of a missing label in any column: null and empty cells (""), SNLI's and the `datasets` library's.
_NO_LABEL = ("", "-", "-1")
# Signs of a missing label in columns of numbers; elsewhere they may be classes.
_MISSING = {"nan", "na", "n/a", "#n/a", "<na>", "null", "none"}
_DOUBTFUL = _MISSING | {"?", "--", "–", "—", "unlabeled", "undefined"}
_SEPARATORS = re.compile(r"(?<=\w)[\s_-]+(?=\w)")


class NoLabel(Exception):
    """An example has no label; the message is the sign for that."""


class LabelReader:
    """Reads the label cells of a row as names of classes.

    A classification is multi-label if its cells are lists (in text files, as JSON or Python writes them), if there is
    a separator, or if there are several columns of 0/1 or true/false, or one with a list of those per row.

    Args:
        train: The training file, whose cells decide how all files are read.
        columns: Its label columns.
        given: The user's classes, if any; `-1`, `-` and the empty string can be among them.
        separator: Separator of the labels in a cell; empty for one label per cell.
        mapping: Labels of the files and their new names; empty names leave them out.
    """

    def __init__(
        self, train: Table, columns: Sequence[str], given: Sequence[str], separator: str, mapping: Mapping[str, str]
    ) -> None:
        values = [row[columns[0]] for row in train.rows]
        self._separator, self._are_texts = separator, not separator and _are_written_lists(values)
        self.are_lists = self._are_texts or any(isinstance(value, list) for value in values)
        lists = [cell for cell in map(self._parsed, values) if isinstance(cell, list)]
        self.is_multi_hot = len(columns) == 1 and _are_multi_hot(lists)
        self.flags = tuple(columns) if len(columns) > 1 else ()
        if self.is_multi_hot:
            self.flags = _flag_names(train, len(lists[0]), given)
        self.is_multi_label = self.are_lists or bool(separator) or bool(self.flags)
        self._form = _form(self._items(values))
        self._mapping = {self.canonical(old): self.canonical(new) for old, new in mapping.items()}
        self._kept = set(map(self.canonical, given))
        self._unused = set(self._mapping)
        if self.flags and mapping:
            raise InputError("--label-map is not for columns or lists of 0 and 1, whose names are the labels")

    def __call__(self, cells: Sequence[Any], place: str) -> list[str]:
        """Returns the label names in the cells of a row: one, or in a multi-label task any number.

        Raises NoLabel, or InputError, which begins with the row's place.
        """
        if self.flags:
            return self._flagged(cells, place)
        cell = self._parsed(cells[0])
        if isinstance(cell, str) and self._separator:
            cell = [part for part in cell.split(self._separator) if part.strip()]
        elif self.are_lists and not isinstance(cell, list):
            self._name(cell, place)  # null has no label
            raise InputError(f"{place}: the label is {abbreviated(cell)}, elsewhere it is a list")
        if isinstance(cell, list) and self.is_multi_label:
            return [self._name(item, place) for item in cell if item != ""]
        return [self._name(cell, place)]

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
        """Raises InputError, after all files are read, if none has a label to be renamed."""
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

    def _flagged(self, cells: Sequence[Any], place: str) -> list[str]:
        if self.is_multi_hot:
            cells = self._parsed(cells[0])
            if cells is None or cells == "":
                raise NoLabel("")
            if not isinstance(cells, list) or len(cells) != len(self.flags):
                what = f"elsewhere it is a list of {len(self.flags)} times 0 or 1"
                raise InputError(f"{place}: the label is {abbreviated(cells)}, {what}")
        return [name for name, value in zip(self.flags, cells, strict=True) if _is_set(value, name, place)]

    def _parsed(self, cell: Any) -> Any:
        return literal(cell) if self._are_texts and isinstance(cell, str) and cell.strip() else cell

    def _items(self, cells: Iterable[Any]) -> Iterator[Any]:
        for cell in map(self._parsed, cells):
            if isinstance(cell, list):
                yield from cell
            elif isinstance(cell, str) and self._separator:
                yield from cell.split(self._separator)
            else:
                yield cell


def is_missing(value: Any) -> bool:
    """Returns whether a cell of a column of numbers is missing."""
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
    """Lists labels for messages, truncated."""
    return truncated([repr(label) for label in labels])


def truncated(names: Sequence[str]) -> str:
    """Lists the first names, and says how many more there are."""
    more = f" and {len(names) - MAX_NAMED_LABELS:,} more" if len(names) > MAX_NAMED_LABELS else ""
    return ", ".join(names[:MAX_NAMED_LABELS]) + more


def near_label(unknown: str, classes: Iterable[str]) -> str:
    """Returns the end of an error about an unknown label: the class that it may mean."""
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
    """Yields notes on classes that look alike or may mean that there is no label, given their counts."""
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
    """Returns a key that is equal for names that look the same."""
    visible = "".join(letter for letter in name if unicodedata.category(letter) != "Cf")
    return _SEPARATORS.sub("", unicodedata.normalize("NFKC", visible).casefold().strip())


def _sign(text: str) -> str:
    return text.strip().casefold()


def _form(values: Iterable[Any]) -> Literal["number", "boolean", "text"]:
    """Returns the form of all labels, apart from missing ones."""
    forms = {_form_of(value) for value in values if not is_missing(value)}
    return forms.pop() if len(forms) == 1 else "text"


def _form_of(value: Any) -> Literal["number", "boolean", "text"]:
    if isinstance(value, bool) or _sign(str(value)) in ("true", "false"):
        return "boolean"
    return "number" if is_number(value) else "text"


def _is_set(value: Any, column: str, place: str) -> bool:
    text = _sign(str(value))
    if text in ("1", "true", "1.0"):
        return True
    if text in ("0", "false", "0.0"):
        return False
    if is_missing(value) or text in ("-1", "-1.0"):
        raise NoLabel("" if is_missing(value) else "-1")
    raise InputError(f"{place}: {column!r} is {abbreviated(value)}; it must be 0, 1, true or false")


def _are_multi_hot(lists: Sequence[list[Any]]) -> bool:
    """Returns whether lists have a 0 or 1 for each label, rather than the labels: then values repeat."""
    return (
        len({len(cell) for cell in lists}) == 1
        and all(isinstance(item, int | float) and item in (0, 1) for cell in lists for item in cell)
        and any(len(set(cell)) < len(cell) for cell in lists)
    )


def _flag_names(train: Table, number: int, given: Sequence[str]) -> tuple[str, ...]:
    if given and len(given) != number:
        raise InputError(f"{train.place(0)}: the label is a list of {number} times 0 or 1; --labels names {len(given)}")
    return tuple(given) or tuple(map(str, range(number)))


def _are_written_lists(values: Sequence[Any]) -> bool:
    """Returns whether the cells are lists as text, as in a table that pandas wrote."""
    texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
    if not texts or not all(text[0] == "[" and text[-1] == "]" for text in texts):
        return False
    return all(isinstance(literal(text), list) for text in texts)
