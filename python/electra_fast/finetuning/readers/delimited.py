"""Cells of .tsv and .csv files: delimiters, quotes, and errors of single lines."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.text_files import TextFile

# The line of a row, and the row or its error.
Record = tuple[int, dict[str, Any] | InputError]
_Cells = list[str] | InputError
QUOTINGS = ("auto", "csv", "backslash", "none")
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}


class Loaded(NamedTuple):
    """A table whose header has been read."""

    columns: tuple[str, ...] | None
    """None if each row has its own names."""
    read: Callable[[Sequence[str]], Iterator[Record]]
    """Yields the rows with all or some columns."""
    class_names: dict[str, tuple[str, ...]] = {}
    """Class names of integer labels, by column."""


@dataclass(frozen=True)
class Dialect:
    """Delimiter and quotes of .tsv and .csv files.

    Args:
        quoting: `csv`: quotes enclose cells. `backslash`: they do, and a quote within a cell follows a backslash, as
            Spark and MySQL write it. `none`: quotes are text. `auto`: `none` in .tsv files separated by tabs, else
            `csv`.
        delimiter: A character or its name, such as `tab`. If empty, the extension decides, or the header if it would
            then have a single column.
        no_header: The first line is a row; columns are named 0, 1, 2 and so on.
        fields: Fields of nested objects to read as columns in other formats, such as `review.body`.
    """

    quoting: str = "auto"
    delimiter: str = ""
    no_header: bool = False
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.quoting not in QUOTINGS:
            raise InputError(f"quoting = {self.quoting!r}: must be one of {', '.join(QUOTINGS)}")
        delimiter = DELIMITERS.get(self.delimiter, self.delimiter.replace("\\t", "\t"))
        if len(delimiter) > 1 or (delimiter and delimiter in '"\r\n'):
            names = ", ".join(DELIMITERS)
            raise InputError(f"--delimiter = {self.delimiter!r}: must be a character or one of {names}")
        object.__setattr__(self, "delimiter", delimiter)


DIALECT: dict[str, Any] = {"quoting": "auto", "delimiter": "", "no_header": False}
"""The options of a `Dialect` with their defaults."""


def with_fields(dialect: Dialect, columns: Iterable[Iterable[str]]) -> Dialect:
    dotted = dict.fromkeys(name for names in columns for name in names if "." in name)
    return dataclasses.replace(dialect, fields=(*dotted,))


def reject_duplicates(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    repeated = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if repeated is not None:
        raise InputError(f"{path}: two columns are named {repeated!r}; rename one")
    return tuple(names)


def load_delimited(file: TextFile, format: str, dialect: Dialect, notes: list[str]) -> Loaded:
    """Reads the header of a file; adds a note if the delimiter is not the usual one of the extension."""
    lines = enumerate(file.lines(), 1)
    line, first = next(((line, text) for line, text in lines if text.strip()), (0, ""))
    delimiter = dialect.delimiter
    if declared := re.fullmatch(r'"?sep=(.)"?\s*', first):  # a line for Excel
        delimiter = delimiter or declared[1]
        line, first = next(lines, (0, ""))
    if not first:
        raise InputError(f"{file.path}: empty; the first line must name the columns")
    default = "\t" if format == ".tsv" else ","
    delimiter = delimiter or _detected_delimiter(file.path, first, default)
    hint = ""
    if delimiter != default and not dialect.delimiter:
        name = next((name for name, character in DELIMITERS.items() if character == delimiter), repr(delimiter))
        hint = f"the cells of the first line are separated by {name}s; choose another delimiter with --delimiter"
        notes.append(f"{file.path}: {hint}")
    is_text = (format, delimiter) == (".tsv", "\t") if dialect.quoting == "auto" else dialect.quoting == "none"
    numbered: Iterator[tuple[int, str]] = itertools.chain([(line, first)], lines)
    if dialect.quoting == "backslash":
        # \" becomes two quotes; an even number of backslashes escapes backslashes only.
        double = lambda match: "\\" * (len(match[1]) // 2) + '"' * (1 + len(match[1]) % 2)  # noqa: E731
        numbered = ((number, re.sub(r'(\\+)"', double, text)) for number, text in numbered)
    records: Iterator[tuple[int, _Cells]]
    records = plain_cells(numbered, delimiter) if is_text else _quoted_cells(file.path, numbered, delimiter)
    number, header = next(records)
    if isinstance(header, InputError):
        raise header
    if dialect.no_header:
        records = itertools.chain([(number, header)], records)
        header = [*map(str, range(len(header)))]
    header = [name.strip() for name in header]
    while header.count("") > 1 and not header[-1]:  # appended by a spreadsheet; their cells must be empty
        header.pop()
    names = reject_duplicates(file.path, header)
    # In a table of one column, blank lines are empty texts, except at the end of the file.
    records = without_blank_end(records) if len(names) == 1 else (record for record in records if record[1])
    if is_text and dialect.quoting == "auto":
        records = _noting_quotes(file.path, records, notes)
    return Loaded(names, lambda _: _delimited_rows(file.path, names, records, not is_text, hint))


def _noting_quotes(path: Path, records: Iterator[tuple[int, _Cells]], notes: list[str]) -> Iterator[tuple[int, _Cells]]:
    """Yields the records; after the last one, adds a note if every cell with a quote looks like a quoted cell."""
    number = 0
    for record in records:
        for cell in () if isinstance(record[1], InputError) else record[1]:
            if '"' in cell and number >= 0:
                is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")
                number = number + 1 if is_quoted else -1
        yield record
    if number > 0:
        notes.append(
            f"{path}: quotes around {number:,} cells are read as text; if they only enclose cells, add --quoting csv"
        )


def _detected_delimiter(path: Path, header: str, default: str) -> str:
    """Returns the extension's delimiter or, if the header then has one column, the delimiter with most columns."""
    unquoted = re.sub(r'"(?:[^"]|"")*"', "", header)
    counts = {character: unquoted.count(character) + 1 for character in DELIMITERS.values()}
    most = max(counts.values())
    best = [character for character, count in counts.items() if count == most]
    if most == 1 or (default == "\t" and counts[default] > 1):
        return default
    if len(best) > 1 or (counts[default] > 1 and best != [default]):
        candidates = " or ".join(name for name, character in DELIMITERS.items() if counts[character] > 1)
        raise InputError(f"{path}: line 1: the delimiter may be {candidates}; choose it with --delimiter")
    return best[0]


def _delimited_rows(
    path: Path, names: tuple[str, ...], records: Iterator[tuple[int, _Cells]], is_quoted: bool, hint: str
) -> Iterator[Record]:
    for line, cells in records:
        if isinstance(cells, InputError):
            yield line, cells
        elif len(cells) < len(names) or any(cells[len(names) :]):
            has_quotes = any('"' in cell for cell in cells)
            remedy = f"; {hint}" if hint else "; if quotes enclose cells, add --quoting csv" if has_quotes else ""
            if is_quoted and not hint:
                remedy = "; enclose cells that contain the delimiter in quotes"
            message = f"found {len(cells)} fields, expected {len(names)} as in the header{remedy}"
            yield line, InputError(f"{path}: line {line}: {message}")
        else:
            yield line, dict(zip(names, cells, strict=False))


def without_blank_end(records: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Turns blank lines into empty cells, except at the end of the file."""
    blank: list[int] = []
    for line, cells in records:
        if cells:
            yield from ((number, [""]) for number in blank)
            blank.clear()
            yield line, cells
        else:
            blank.append(line)


def plain_cells(lines: Iterator[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in lines:
        line = line.removesuffix("\n").removesuffix("\r")
        yield number, line.split(delimiter) if line else []


def iterate_cells(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the number and the cells of each line; quotes are text, and blank lines at the end are ignored."""
    with TextFile(path) as file:
        yield from without_blank_end(plain_cells(enumerate(file.lines(), 1), delimiter))


def _quoted_cells(path: Path, lines: Iterator[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, _Cells]]:
    """Yields records as RFC 4180 defines them with their first lines, and an error in place of each bad line.

    Raises the error if a bad record has several lines: after an open quote it may be the rest of the file.
    """
    record: list[tuple[int, str]] = []

    def read() -> Iterator[str]:
        for number, line in lines:
            record.append((number, line))
            yield line

    reader = csv.reader(read(), delimiter=delimiter, strict=True)
    while True:
        record.clear()
        limit = csv.field_size_limit(sys.maxsize)  # global to the module
        try:
            cells: _Cells = next(reader)
        except csv.Error as error:
            cells = _quote_error(path, error, record)
            if len(record) > 1:
                raise cells from None
        except StopIteration:
            return
        finally:
            csv.field_size_limit(limit)
        yield record[0][0], cells


def _quote_error(path: Path, error: csv.Error, record: Sequence[tuple[int, str]]) -> InputError:
    line, _ = record[0]
    if "new-line" in str(error):
        return InputError(f"{path}: line {line}: a carriage return within a cell; enclose the cell in quotes")
    remedy = "double the quotes within a quoted cell and close it, or add --quoting none if quotes are text"
    if any('\\"' in text for _, text in record):
        remedy = 'if \\" is a quote within a cell, as Spark and MySQL write it, add --quoting backslash'
    return InputError(f"{path}: line {line}: bad quote in the record that begins here ({error}); {remedy}")
