"""Streams examples from a file, a pipe or standard input, together with the other columns of their rows."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import itertools
import json
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.delimited import Dialect, with_fields
from electra_fast.finetuning.readers.rows import (
    BadRows,
    Row,
    available_columns,
    check_columns,
    columns_note,
    extension,
    is_stream,
    place,
)
from electra_fast.finetuning.readers.tables import FORMATS, OpenTable, Quoting, open_table


class ExampleReader(ABC):
    """Reads the examples of one type of prediction."""

    usual_columns: tuple[tuple[str, ...], ...]
    """Candidates for a table's text columns; the first candidate that the table has is used."""
    formats: tuple[str, ...] = FORMATS
    """Extensions of tables; other files are read by `other_examples`."""
    id_column: str | None = None
    """A column that is copied to the answers."""

    def reads_lines(self, path: Path, text: tuple[str, ...]) -> bool:
        """Returns whether `other_examples` reads a file, although it has a table's extension."""
        return False

    @abstractmethod
    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> Any:
        """Returns an example from the columns of a row; `number` counts from 0. Raises InputError if it is unusable."""

    def reads_row(self, row: Row, columns: tuple[str, ...]) -> bool:
        """Returns whether the rows of a table are examples, given its first row."""
        return bool(columns)

    def other_examples(self, file: Path, text: tuple[str, ...], quoting: Quoting) -> Iterator[Any] | None:
        """Returns the examples of a file that is not a table of examples; None if only tables are supported."""
        return None


@dataclass(frozen=True)
class Source:
    """A file of examples with its reading options.

    Args:
        path: The file; `-` is standard input.
        trained_text: The text columns of the training and validation files, if known.
        num_texts: Texts per example; None if unknown.
        format: Read the file as if it had this extension; `auto` uses the file's extension.
    """

    path: Path
    text: tuple[str, ...] = ()
    trained_text: tuple[tuple[str, ...], ...] = ()
    num_texts: int | None = None
    dialect: Dialect = Dialect()
    format: str = "auto"
    skip_bad_rows: int = 0


@dataclass(frozen=True)
class Examples:
    """Examples with the other columns of their rows.

    Args:
        rows: Pairs of an example and its other columns; raises InputError if too many rows are unusable.
        is_idle: Returns whether the next example has not arrived yet.
        notes: Lines for the user; complete after the last example.
    """

    rows: Iterator[tuple[Any, Row]]
    is_idle: Callable[[], bool]
    notes: list[str]


@contextlib.contextmanager
def open_examples(reader: ExampleReader, source: Source) -> Iterator[Examples]:
    """Opens a source. Raises FileNotFoundError, or InputError that names the unusable row, column or value."""
    source = dataclasses.replace(source, dialect=with_fields(source.dialect, (source.text, *source.trained_text)))
    is_table = extension(source.path) in ("", *reader.formats) and not reader.reads_lines(source.path, source.text)
    if source.format == "auto" and not is_table:
        numbers = next(filter(_are_numbers, source.trained_text), ())
        others = reader.other_examples(source.path, source.text or numbers, source.dialect)
        if others is not None:
            yield Examples(((example, {}) for example in others), lambda: False, [])
            return
    format = "" if source.format == "auto" else f".{source.format}"
    with open_table(source.path, quoting=source.dialect, format=format) as table:
        yield Examples(_rows(reader, source, table), table.is_idle, table.notes)


def _rows(reader: ExampleReader, source: Source, table: OpenTable) -> Iterator[tuple[Any, Row]]:
    bad = BadRows(source.skip_bad_rows)
    rows = table.rows(bad_rows=bad)
    first = next(rows, None)
    if first is None:
        bad.finish()
        raise InputError(f"{source.path}: no rows")
    columns = _columns(reader, source, table, first[1])
    if not reader.reads_row(first[1], columns):
        others = _others(reader, source, table, itertools.chain([first], rows), bad)
        yield from ((example, {}) for example in others)
        return
    if source.num_texts not in (None, len(columns)):
        reads = "one text" if source.num_texts == 1 else "a pair of texts"
        names = " and ".join(columns)
        raise InputError(f"{source.path}: {names}: the model reads {reads}; choose the columns with --text")
    if not source.text and not source.trained_text and table.format != ".txt":
        table.notes.append(columns_note(source.path, f"text in {' and '.join(map(repr, columns))}", (), "label"))
    number = 0
    empty = list[int]()
    for line, row in itertools.chain([first], rows):
        example = None
        with bad.collect():
            example = reader.example(source.path, line, row, columns, number)
        if bad.number > bad.allowed:
            if is_stream(source.path):
                break  # for a file, all bad rows are reported at once
        elif example is not None:
            yield example, {name: value for name, value in row.items() if name not in (*columns, reader.id_column)}
            number += 1
            if not any(row[name] and str(row[name]).strip() for name in columns):
                empty.append(line)
    if empty:
        table.notes.append(f"{place(source.path, empty[0])}: the first of {len(empty):,} examples with empty text")
    table.notes += bad.finish()


def _columns(reader: ExampleReader, source: Source, table: OpenTable, first: Row) -> tuple[str, ...]:
    """Returns the text columns: as chosen by the user, as in training, or with the usual names; empty if none match."""
    names = table.columns or tuple(first)
    if source.text:
        if table.columns is not None:
            check_columns(source.path, names, source.text, "--text")
        return source.text
    trained = [] if table.format == ".txt" else source.trained_text
    trained = [columns for columns in trained if not _are_numbers(columns) or set(columns) <= set(names)]
    return next((columns for columns in trained or reader.usual_columns if set(columns) <= set(names)), ())


def _others(
    reader: ExampleReader, source: Source, table: OpenTable, rows: Iterator[tuple[int, Row]], bad: BadRows
) -> Iterator[Any]:
    """Yields the examples of a table whose rows are not examples; reads a pipe to its end first."""
    with tempfile.TemporaryDirectory() as folder:
        path = source.path
        if is_copied := is_stream(path) or source.format != "auto":
            path = Path(folder) / f"copy{table.format if table.format in ('.txt', '.csv') else '.jsonl'}"
        others = reader.other_examples(path, source.text, "auto" if is_copied else source.dialect)
        if others is None:
            trained = " or ".join(" and ".join(map(repr, names)) for names in source.trained_text)
            expected = f" {trained}, as in training" if trained else ""
            _, first = next(rows)
            raise InputError(f"{source.path}: no text column{expected}; {available_columns(first)}; choose with --text")
        if is_copied:
            _write_copy(path, rows)
            table.notes += bad.finish()
        try:
            yield from others
        except InputError as error:
            raise InputError(str(error).replace(str(path), str(source.path))) from None


def _write_copy(path: Path, rows: Iterator[tuple[int, Row]]) -> None:
    """Writes rows as text, CSV or JSON lines, with unchanged line numbers if possible."""
    with path.open("w", encoding="utf-8", newline="") as file:
        cells = csv.writer(file)
        number = 1
        for line, row in rows:
            if path.suffix == ".csv" and number == 1:
                cells.writerow(row)
                number += 1
            file.write("\n" * (line - number))
            if path.suffix == ".csv":
                cells.writerow(row.values())
            else:
                file.write((row["text"] if path.suffix == ".txt" else json.dumps(row, default=str)) + "\n")
            number = max(number, line) + 1


def _are_numbers(columns: tuple[str, ...]) -> bool:
    """Returns whether the column names are numbers, which stand for the columns of a file without a header."""
    return all(re.fullmatch(r"-?[0-9]+", name) for name in columns)
