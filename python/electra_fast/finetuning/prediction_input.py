"""Examples to predict, from a file, a pipe or standard input, in a stream, with the columns that pass through."""

from __future__ import annotations

import contextlib
import csv
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
from electra_fast.finetuning.readers.rows import BadRows, Row, check_columns, extension, is_stream, place, there_are
from electra_fast.finetuning.readers.tables import FORMATS, OpenTable, Quoting, open_table


class ExampleReader(ABC):
    """What a kind of prediction takes for an example."""

    usual_columns: tuple[tuple[str, ...], ...]
    """Columns of a table's texts, of which the first that it has count."""
    formats: tuple[str, ...] = FORMATS
    """Of tables; any other file is left to `other_examples`."""
    id_column: str | None = None
    """One that is part of the answers."""

    def reads_lines(self, path: Path, text: tuple[str, ...]) -> bool:
        """Whether the lines of a file with a table's ending are no rows or texts."""
        return False

    @abstractmethod
    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> Any:
        """An example from the columns of a row; `number` counts from 0. ValueError where it cannot be used."""

    def reads_row(self, row: Row, columns: tuple[str, ...]) -> bool:
        """Whether a table that begins with this row has an example in each."""
        return bool(columns)

    def other_examples(self, file: Path, text: tuple[str, ...], quoting: Quoting) -> Iterator[Any] | None:
        """The examples of a file that is no table of them; None if the kind has only tables."""
        return None


@dataclass(frozen=True, kw_only=True)
class Source:
    """What to predict, and how it is read.

    Args:
        path: The file; `-` is standard input.
        text: The text columns, if they are chosen.
        trained_text: Those of the files that it was trained and scored on, as far as they are known.
        num_texts: How many there have to be; None if that is not known.
        quoting: As for `tables.iterate_rows`.
        format: The extension that the file should have; empty for its own.
        skip_bad_rows: How many rows that cannot be used may be left out.
    """

    path: Path
    text: tuple[str, ...] = ()
    trained_text: tuple[tuple[str, ...], ...] = ()
    num_texts: int | None = None
    quoting: Quoting = "auto"
    format: str = ""
    skip_bad_rows: int = 0


@dataclass(frozen=True)
class Examples:
    """Examples with the columns of their rows that are not part of them.

    Args:
        rows: The pairs of both; they end with an InputError after more bad rows than are allowed.
        is_idle: Whether the next one would have to be waited for.
        notes: Lines that the user should see; complete after the last example.
    """

    rows: Iterator[tuple[Any, Row]]
    is_idle: Callable[[], bool]
    notes: list[str]


@contextlib.contextmanager
def open_examples(reader: ExampleReader, source: Source) -> Iterator[Examples]:
    """Opens what is to be predicted. Raises FileNotFoundError, or InputError naming what cannot be used."""
    is_table = extension(source.path) in ("", *reader.formats) and not reader.reads_lines(source.path, source.text)
    if not source.format and not is_table:
        numbers = next(filter(_are_numbers, source.trained_text), ())
        others = reader.other_examples(source.path, source.text or numbers, source.quoting)
        if others is not None:
            yield Examples(((example, {}) for example in others), lambda: False, [])
            return
    with open_table(source.path, quoting=source.quoting, format=source.format) as table:
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
        raise InputError(f"{source.path}: {names}: this model reads {reads}; choose the columns with --text")
    number, empty = 0, list[int]()
    for line, row in itertools.chain([first], rows):
        example = None
        with bad.collect():
            example = reader.example(source.path, line, row, columns, number)
        if bad.number > bad.allowed:
            if is_stream(source.path):
                break  # of a file, all that is wrong is said at once
        elif example is not None:
            yield example, {name: value for name, value in row.items() if name not in (*columns, reader.id_column)}
            number += 1
            if not any(row[name] and str(row[name]).strip() for name in columns):
                empty.append(line)
    if empty:
        table.notes.append(f"{place(source.path, empty[0])}: the first of {len(empty):,} examples with empty text")
    table.notes += bad.finish()


def _columns(reader: ExampleReader, source: Source, table: OpenTable, first: Row) -> tuple[str, ...]:
    """The columns of the texts: those that are chosen, those of training, or the usual ones; empty if it has none."""
    names = table.columns or tuple(first)
    if source.text:
        if table.columns is not None:
            check_columns(source.path, names, source.text, "--text")
        return source.text
    trained = [] if table.format == ".txt" else [each for each in source.trained_text if not _are_numbers(each)]
    return next((columns for columns in trained or reader.usual_columns if set(columns) <= set(names)), ())


def _others(
    reader: ExampleReader, source: Source, table: OpenTable, rows: Iterator[tuple[int, Row]], bad: BadRows
) -> Iterator[Any]:
    """The examples of a table whose rows are none; a pipe is read to its end for that."""
    with tempfile.TemporaryDirectory() as folder:
        path = source.path
        if is_copied := is_stream(path) or source.format != "":
            path = Path(folder) / f"copy{table.format if table.format in ('.txt', '.csv') else '.jsonl'}"
        others = reader.other_examples(path, source.text, "auto" if is_copied else source.quoting)
        if others is None:
            raise _no_columns(source, next(rows)[1])
        if is_copied:
            _write_copy(path, rows)
            table.notes += bad.finish()
        try:
            yield from others
        except InputError as error:
            raise InputError(str(error).replace(str(path), str(source.path))) from None


def _write_copy(path: Path, rows: Iterator[tuple[int, Row]]) -> None:
    """Writes rows as text, CSV or JSON lines, each at its own line where that is possible."""
    with path.open("w", encoding="utf-8", newline="") as file:
        cells, number = csv.writer(file), 1
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


def _no_columns(source: Source, first: Row) -> InputError:
    trained = " or ".join(" and ".join(map(repr, names)) for names in source.trained_text)
    wanted = f" {trained}, as in training" if trained else ""
    return InputError(f"{source.path}: no text column{wanted}; {there_are(first)}; choose with --text")


def _are_numbers(columns: tuple[str, ...]) -> bool:
    """Whether they are those of a file without a header."""
    return all(re.fullmatch(r"-?[0-9]+", name) for name in columns)
