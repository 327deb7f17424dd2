"""Reads .tsv, .csv, .jsonl, .parquet and .txt files row by row, or whole as named columns with line numbers.

`glue` reads cells, `own_data` reads tables, and prediction streams rows.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import pyarrow
import pyarrow.parquet

from electra_fast.errors import InputError

Quoting = Literal["auto", "csv", "none"]
Row = dict[str, Any]

DELIMITERS = {".tsv": "\t", ".csv": ","}
FORMATS = (".tsv", ".csv", ".jsonl", ".parquet", ".txt")
# Records per change of the csv module's field limit, and rows per batch of a Parquet file.
BATCH_RECORDS, BATCH_ROWS = 1024, 8192


@dataclass(frozen=True, kw_only=True)
class Table:
    """Columns of a file; `lines` says where each row begins (in Parquet files: the row's number, from 1)."""

    path: Path
    columns: dict[str, list[Any]]
    lines: list[int]

    def place(self, row: int) -> str:
        """Where the row is, for messages: `data.tsv: line 7`."""
        return place(self.path, self.lines[row])


def place(path: Path, line: int) -> str:
    """Names a line for messages, or a row of a Parquet file."""
    return f"{path}: {'row' if path.suffix.lower() == '.parquet' else 'line'} {line}"


def read_table(path: Path, columns: Sequence[str], *, quoting: Quoting = "auto", flag: str = "--text") -> Table:
    """Reads the given columns; a key that a .jsonl line lacks is None. Errors are those of `iterate_rows`."""
    lines: list[int] = []
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for line, row in iterate_rows(path, columns, quoting=quoting, flag=flag):
        lines.append(line)
        for name, column in values.items():
            column.append(row.get(name))
    return Table(path=path, columns=values, lines=lines)


def iterate_rows(
    path: Path, columns: Sequence[str] = (), *, quoting: Quoting = "auto", flag: str = "--text"
) -> Iterator[tuple[int, Row]]:
    """Yields the line number and a dictionary of each row, in order, holding one batch in memory at most.

    Values are str, or in .jsonl and .parquet what the file holds; a .txt file has one column `text`, a row per line.
    A row may hold more than the `columns`, and in .jsonl less: `text_of` checks a value.

    Args:
        path: The file; its extension is its format.
        columns: Names that the header must have, and all that is read of a Parquet file; empty for every column.
        quoting: Whether quotes enclose cells of .tsv and .csv files; `auto`: in .csv only.
        flag: The option that chose the columns, for messages.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: The file has no rows or cannot be read, with the line and the remedy.
    """
    format = _format(path, quoting)
    rows: Iterator[tuple[int, Row]]
    if format == ".parquet":
        rows = _parquet_rows(path, columns, flag)
    elif format == ".jsonl":
        rows = _json_rows(path)
    elif format == ".txt":
        check_columns(path, ("text",), columns, flag)
        rows = ((line, {"text": text}) for line, text in _lines(path))
    else:
        rows = _delimited_rows(path, columns, quoting, flag)
    first = next(rows, None)
    if first is None:
        raise InputError(f"{path}: no rows")
    yield first
    yield from rows


def column_names(path: Path, *, quoting: Quoting = "auto") -> tuple[str, ...]:
    """The columns of a file; of a .jsonl file, which is read to its end for that, all keys that occur."""
    format = _format(path, quoting)
    if format == ".parquet":
        return tuple(_open_parquet(path).schema_arrow.names)
    if format == ".jsonl":
        return tuple(dict.fromkeys(name for _, row in _json_rows(path) for name in row))
    return ("text",) if format == ".txt" else _header(path, _cells(path, quoting))


def check_columns(path: Path, available: Iterable[str], wanted: Iterable[str], flag: str) -> None:
    """Raises InputError if the file lacks one of the wanted columns, naming those that it has."""
    for name in wanted:
        if name not in available:
            raise InputError(f"{path}: no column {name!r}; {there_are(available)}; choose with {flag}")


def there_are(names: Iterable[str]) -> str:
    """For an error about a missing column: those that there are, and why they may not be what the user expects."""
    names = tuple(names)
    listed = f"there are: {', '.join(names)}"
    if len(names) == 1 and any(delimiter in names[0] for delimiter in ",;\t"):
        return f"{listed} (a single column: commas separate the cells of a .csv file, tabs those of a .tsv file)"
    if names and all(len(name) > 1 and name[0] == name[-1] == '"' for name in names):
        return f"{listed} (if quotes enclose cells, add --quoting csv)"
    return listed


def text_of(path: Path, line: int, row: Row, column: str, *, flag: str = "--text") -> str:
    """The text in a column of a row; raises InputError naming the line if it is missing, null or not text."""
    value = row.get(column)
    if isinstance(value, str):
        return value
    if column not in row:
        raise InputError(f"{place(path, line)}: no {column!r}; {there_are(row)}; choose with {flag}")
    raise InputError(f"{place(path, line)}: {column!r} is {'null' if value is None else abbreviated(value)}, not text")


def abbreviated(value: object) -> str:
    """A value on one line, truncated."""
    text = " ".join(repr(value).split())
    return text[:40] + "…" if len(text) > 40 else text


def iterate_cells(path: Path, delimiter: str = "\t", *, quoted: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and cells of each record, the header included; blank lines at the end are ignored."""
    records = _quoted_cells(path, delimiter) if quoted else _plain_cells(path, delimiter)
    blank: list[int] = []
    for line, cells in records:
        if not cells:
            blank.append(line)
            continue
        if blank:
            yield from ((number, [""]) for number in blank)
            blank.clear()
        yield line, cells


def _format(path: Path, quoting: str) -> str:
    if quoting not in ("auto", "csv", "none"):
        raise InputError(f"quoting is {quoting!r}; it can be one of 'auto', 'csv', 'none'")
    if path.is_dir():
        raise InputError(f"{path}: a folder; give a file that ends in {', '.join(FORMATS)}")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"{path}: unknown extension; it can be {', '.join(FORMATS)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    return path.suffix.lower()


def _cells(path: Path, quoting: Quoting) -> Iterator[tuple[int, list[str]]]:
    suffix = path.suffix.lower()
    return iterate_cells(path, DELIMITERS[suffix], quoted=_is_quoted(path, quoting))


def _is_quoted(path: Path, quoting: Quoting) -> bool:
    return quoting == "csv" or (quoting == "auto" and path.suffix.lower() == ".csv")


def _header(path: Path, records: Iterator[tuple[int, list[str]]]) -> tuple[str, ...]:
    _, names = next(records, (0, []))
    if not names:
        raise InputError(f"{path}: empty; the first line has to name the columns")
    _reject_duplicates(path, names)
    return tuple(names)


def _reject_duplicates(path: Path, names: Sequence[str]) -> None:
    repeated = next((name for position, name in enumerate(names) if name in names[:position]), None)
    if repeated is not None:
        raise InputError(f"{path}: two columns are named {repeated!r}; rename one")


def _delimited_rows(path: Path, columns: Sequence[str], quoting: Quoting, flag: str) -> Iterator[tuple[int, Row]]:
    records = _cells(path, quoting)
    names = _header(path, records)
    check_columns(path, names, columns, flag)
    for line, cells in records:
        if len(cells) != len(names):
            remedy = _quoting_remedy(cells, _is_quoted(path, quoting))
            raise InputError(
                f"{place(path, line)}: found {len(cells)} fields, expected {len(names)} as in the header{remedy}"
            )
        yield line, dict(zip(names, cells, strict=True))


def _quoting_remedy(cells: list[str], is_quoted: bool) -> str:
    if is_quoted:
        return "; enclose cells that contain the delimiter in quotes"
    return "; if quotes enclose cells, add --quoting csv" if any('"' in cell for cell in cells) else ""


@contextlib.contextmanager
def _open_text(path: Path, newline: str) -> Iterator[TextIO]:
    """Opens a UTF-8 file with or without a byte order mark; what is not UTF-8 becomes an InputError."""
    try:
        with path.open(encoding="utf-8-sig", newline=newline) as file:
            yield file
    except UnicodeDecodeError:
        raise InputError(_first_invalid_byte(path)) from None


def _first_invalid_byte(path: Path) -> str:
    """The decoder counts within its buffer, so the place is looked up again."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"{path}: line {number}: not UTF-8 at byte {offset + error.start:,}; convert the file to UTF-8"
            offset += len(line)
    return f"{path}: not UTF-8; convert the file to UTF-8"


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines end at LF or CRLF only: texts may hold a lone CR and Unicode's line separators."""
    with _open_text(path, "\n") as file:
        for number, line in enumerate(file, 1):
            yield number, line.removesuffix("\n").removesuffix("\r")


def _plain_cells(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in _lines(path):
        yield number, line.split(delimiter) if line else []


def _quoted_cells(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """RFC 4180; a record's line is the one where it begins."""
    with _open_text(path, "") as file:
        records = _numbered_records(path, csv.reader(file, delimiter=delimiter, strict=True))
        while batch := _read_batch(records):
            yield from batch


def _read_batch(records: Iterator[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """The limit on a cell's length is global to the csv module, so it is lifted only while records are read."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return list(itertools.islice(records, BATCH_RECORDS))
    finally:
        csv.field_size_limit(limit)


def _numbered_records(path: Path, reader: Any) -> Iterator[tuple[int, list[str]]]:
    start = 1
    try:
        for cells in reader:
            yield start, cells
            start = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}: line {start}: bad quote in the record that begins here ({error}); double the quotes within "
            "a quoted cell and close it, or add --quoting none if quotes are text"
        ) from None


def _json_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for line, (text,) in iterate_cells(path, "\n"):
        try:
            row = json.loads(text)
            if "\\u" in text:
                json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is not text
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: line {line}: not a JSON object: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}: line {line}: not a JSON object: {abbreviated(row)}")
        yield line, row


def _open_parquet(path: Path) -> Any:
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise _damaged(path, error) from None
    _reject_duplicates(path, file.schema_arrow.names)
    return file


def _parquet_rows(path: Path, columns: Sequence[str], flag: str) -> Iterator[tuple[int, Row]]:
    file = _open_parquet(path)
    check_columns(path, file.schema_arrow.names, columns, flag)
    try:
        batches = file.iter_batches(BATCH_ROWS, columns=list(columns) or None)
        yield from enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1)
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: a string that is not UTF-8
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: cannot be read as Parquet ({' '.join(str(error).split())}); get the file again")
