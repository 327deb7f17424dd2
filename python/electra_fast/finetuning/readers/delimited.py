"""Cells of .tsv and .csv files: delimiters, quotes, and errors in single lines."""

from __future__ import annotations

import csv
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.text_files import TextFile

# A row or its error, and its line.
Record = tuple[int, dict[str, Any] | InputError]
# The names of a table's columns, if it has any, and a function that reads all or some columns of its rows.
Loaded = tuple[tuple[str, ...] | None, Callable[[Sequence[str]], Iterator[Record]]]
_Cells = list[str] | InputError
DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}


@dataclass(frozen=True)
class Dialect:
    """Delimiter and quotes of .tsv and .csv files.

    Args:
        quoting: Whether quotes enclose cells; `auto`: in .csv files, and in .tsv files that tabs do not separate.
        delimiter: A character or its name, such as `tab`; empty for that of the extension, or if the header then has a
            single column, the one that it shows.
    """

    quoting: Literal["auto", "csv", "none"] = "auto"
    delimiter: str = ""

    def __post_init__(self) -> None:
        if self.quoting not in ("auto", "csv", "none"):
            raise InputError(f"quoting is {self.quoting!r}; it can be one of 'auto', 'csv', 'none'")
        delimiter = DELIMITERS.get(self.delimiter, self.delimiter.replace("\\t", "\t"))
        if len(delimiter) > 1 or (delimiter and delimiter in '"\r\n'):
            names = ", ".join(DELIMITERS)
            raise InputError(f"--delimiter is {self.delimiter!r}; it can be a character or one of {names}")
        object.__setattr__(self, "delimiter", delimiter)


def reject_duplicates(path: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names; raises InputError if one repeats."""
    repeated = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if repeated is not None:
        raise InputError(f"{path}: two columns are named {repeated!r}; rename one")
    return tuple(names)


def load_delimited(file: TextFile, format: str, dialect: Dialect, notes: list[str]) -> Loaded:
    """Reads the header of a file, and notes a delimiter that differs from the extension's."""
    lines = enumerate(file.lines(), 1)
    line, first = next(((line, text) for line, text in lines if text.strip()), (0, ""))
    delimiter = dialect.delimiter
    if declared := re.fullmatch(r'"?sep=(.)"?\s*', first):  # a line for Excel
        delimiter = delimiter or declared[1]
        line, first = next(lines, (0, ""))
    if not first:
        raise InputError(f"{file.path}: empty; the first line has to name the columns")
    own = "\t" if format == ".tsv" else ","
    delimiter = delimiter or _shown_delimiter(file.path, first, own)
    hint = ""
    if delimiter != own and not dialect.delimiter:
        name = next((name for name, each in DELIMITERS.items() if each == delimiter), repr(delimiter))
        hint = f"{name}s separate the cells, as the first line shows; choose with --delimiter"
        notes.append(f"{file.path}: {hint}")
    is_quoted = dialect.quoting == "csv" or (dialect.quoting == "auto" and (format, delimiter) != (".tsv", "\t"))
    numbered = itertools.chain([(line, first)], lines)
    records: Iterator[tuple[int, _Cells]]
    records = _quoted_cells(file.path, numbered, delimiter) if is_quoted else plain_cells(numbered, delimiter)
    _, header = next(records)
    if isinstance(header, InputError):
        raise header
    header = [name.strip() for name in header]
    while header.count("") > 1 and not header[-1]:  # appended by a spreadsheet; their cells must be empty
        header.pop()
    names = reject_duplicates(file.path, header)
    # In a single column, blank lines are empty texts unless they come last.
    records = without_blank_end(records) if len(names) == 1 else (record for record in records if record[1])
    return names, lambda _: _delimited_rows(file.path, names, records, is_quoted, hint)


def _shown_delimiter(path: Path, header: str, own: str) -> str:
    """Returns the extension's delimiter, or if the header then has one column, the one that gives the most."""
    unquoted = re.sub(r'"(?:[^"]|"")*"', "", header)
    counts = {each: unquoted.count(each) + 1 for each in DELIMITERS.values()}
    most = max(counts.values())
    best = [each for each, count in counts.items() if count == most]
    if most == 1 or (own == "\t" and counts[own] > 1):
        return own
    if len(best) > 1 or (counts[own] > 1 and best != [own]):
        found = " or ".join(name for name, each in DELIMITERS.items() if counts[each] > 1)
        raise InputError(f"{path}: line 1: {found} may separate the cells; choose with --delimiter")
    return best[0]


def _delimited_rows(
    path: Path, names: tuple[str, ...], records: Iterator[tuple[int, _Cells]], is_quoted: bool, hint: str
) -> Iterator[Record]:
    for line, cells in records:
        if isinstance(cells, InputError):
            yield line, cells
        elif len(cells) < len(names) or any(cells[len(names) :]):
            remedy = f"; {hint}" if hint else _quoting_remedy(cells, is_quoted)
            message = f"found {len(cells)} fields, expected {len(names)} as in the header{remedy}"
            yield line, InputError(f"{path}: line {line}: {message}")
        else:
            yield line, dict(zip(names, cells, strict=False))


def _quoting_remedy(cells: list[str], is_quoted: bool) -> str:
    if is_quoted:
        return "; enclose cells that contain the delimiter in quotes"
    return "; if quotes enclose cells, add --quoting csv" if any('"' in cell for cell in cells) else ""


def without_blank_end(records: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
    """Turns records of blank lines into empty cells, unless they come last."""
    blank: list[int] = []
    for line, cells in records:
        if cells:
            yield from ((number, [""]) for number in blank)
            blank.clear()
            yield line, cells
        else:
            blank.append(line)


def plain_cells(lines: Iterator[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the cells of lines in which quotes are text; none for a blank line."""
    for number, line in lines:
        line = line.removesuffix("\n").removesuffix("\r")
        yield number, line.split(delimiter) if line else []


def _quoted_cells(path: Path, lines: Iterator[tuple[int, str]], delimiter: str) -> Iterator[tuple[int, _Cells]]:
    """Yields records by RFC 4180 with the line where each begins; a bad line as its error.

    Raises the error of a bad record of several lines, which may be the rest of the file after an open quote.
    """
    numbers: list[int] = []

    def texts() -> Iterator[str]:
        for number, line in lines:
            numbers.append(number)
            yield line

    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    while True:
        numbers.clear()
        limit = csv.field_size_limit(sys.maxsize)  # global to the module
        try:
            cells: _Cells = next(reader)
        except csv.Error as error:
            cells = _quote_error(path, numbers[0], error)
            if len(numbers) > 1:
                raise cells from None
        except StopIteration:
            return
        finally:
            csv.field_size_limit(limit)
        yield numbers[0], cells


def _quote_error(path: Path, line: int, error: csv.Error) -> InputError:
    if "new-line" in str(error):
        return InputError(f"{path}: line {line}: a carriage return within a cell; enclose the cell in quotes")
    return InputError(
        f"{path}: line {line}: bad quote in the record that begins here ({error}); double the quotes within a quoted "
        "cell and close it, or add --quoting none if quotes are text"
    )
