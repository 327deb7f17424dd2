"""Reads .tsv, .csv, .json, .jsonl, .parquet, .arrow and .txt files, and tables in memory, row by row or whole."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow
import pyarrow.parquet

from electra_fast.errors import InputError
from electra_fast.files.json_files import parse_json
from electra_fast.finetuning.readers.delimited import (
    Dialect,
    Loaded,
    Record,
    load_delimited,
    plain_cells,
    reject_duplicates,
    without_blank_end,
)
from electra_fast.finetuning.readers.memory_table import MemoryTable
from electra_fast.finetuning.readers.rows import (
    BadRows,
    Row,
    abbreviated,
    check_columns,
    check_unicode,
    extension,
    is_stream,
    place,
)
from electra_fast.finetuning.readers.table_folders import Part, folder_parts
from electra_fast.finetuning.readers.text_files import TextFile

FORMATS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".arrow", ".txt")
_SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
_FASTTEXT = "__label__"
_LABELS = re.compile(r"(?:__label__\S+(?:\s+|$))*")
# Rows per batch of a Parquet file.
BATCH_ROWS = 8192


Quoting = Literal["auto", "csv", "none"] | Dialect


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of a file, and the line of each (in files without lines, its number from 1)."""

    path: Path
    rows: list[Row]
    lines: list[int]

    def place(self, row: int) -> str:
        """Returns the place of a row, for messages: `data.tsv: line 7`."""
        return place(self.path, self.lines[row])


@dataclass(kw_only=True)
class OpenTable:
    """A file that is read once, row by row; `open_table` opens it."""

    path: Path
    format: str
    """One of `FORMATS`."""
    columns: tuple[str, ...] | None
    """Names of the columns; None for .jsonl, in which each row has its own."""
    read: Callable[[Sequence[str]], Iterator[Record]]
    """Yields the rows with all or some columns."""
    is_idle: Callable[[], bool] = lambda: False
    """Returns whether the next row of a pipe has not arrived yet."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user on how the file is read."""

    def rows(self, columns: Sequence[str] = (), *, bad_rows: BadRows | None = None) -> Iterator[tuple[int, Row]]:
        """Yields the rows as `iterate_rows` does."""
        if self.columns:
            check_columns(self.path, self.columns, columns, "--text")
        is_empty = True
        for line, row in self.read(columns):
            is_empty = False
            with bad_rows.collect() if bad_rows else contextlib.nullcontext():
                if isinstance(row, InputError):
                    raise row
            if not isinstance(row, InputError):
                yield line, row
            elif bad_rows and bad_rows.number > bad_rows.allowed and is_stream(self.path):
                bad_rows.finish()
        if is_empty:
            raise InputError(f"{self.path}: no rows")


@contextlib.contextmanager
def open_table(path: Path, *, quoting: Quoting = "auto", format: str = "") -> Iterator[OpenTable]:
    """Opens a table in memory or a file, which may be a pipe or `-` for standard input, and reads its header.

    Args:
        path: The file or the table.
        quoting: As in `iterate_rows`.
        format: Read the file as if it had this extension; empty for its own, or for a pipe, what its first line shows.

    Raises as `iterate_rows` does.
    """
    dialect = quoting if isinstance(quoting, Dialect) else Dialect(quoting)
    if isinstance(path, MemoryTable):
        columns, read = _with_fields(_memory(path), dialect.fields)
        yield OpenTable(path=path, format=path.suffix, columns=columns, read=read)
        return
    if path.is_dir():
        yield _open_folder(path, dialect)
        return
    suffix = format or extension(path)
    if suffix in _SPREADSHEETS:
        raise InputError(f"{path}: a spreadsheet; save it as CSV")
    if suffix not in FORMATS and (format or not is_stream(path)):
        raise InputError(f"{path}: unknown extension; it can be {', '.join(FORMATS)}")
    with TextFile(path) as file:
        notes = list[str]()
        if suffix not in FORMATS:
            suffix = _guess_format(file)
            how = "a text per line" if suffix == ".txt" else suffix.removeprefix(".")
            notes.append(f"{path}: read as {how}; choose with --format")
        if file.encoding != "UTF-8" and suffix not in (".parquet", ".arrow"):
            notes.append(f"{path}: read as {file.encoding}, by its byte order mark")
        if suffix == ".txt" and _is_fasttext(file):
            notes.append(f"{path}: read as lines of fastText, with __label__NAME before the text")
        is_delimited = suffix in (".tsv", ".csv")
        if dialect.no_header and not is_delimited:
            raise InputError(f"{path}: --no-header is for .tsv and .csv files")
        if is_delimited:
            columns, read = load_delimited(file, suffix, dialect, notes)
        else:
            columns, read = _with_fields(_LOADERS[suffix](file), dialect.fields)
        yield OpenTable(path=path, format=suffix, columns=columns, read=read, is_idle=file.is_idle, notes=notes)


def _open_folder(folder: Path, dialect: Dialect) -> OpenTable:
    parts = folder_parts(folder, FORMATS)
    first, given = parts[0], tuple(parts[0].columns)
    if first.is_text:
        rows = ((number, _whole_text(part)) for number, part in enumerate(parts, 1))
        note = f"{folder}: {len(parts):,} files, each a text with the name of its folder as label"
        return OpenTable(path=folder, format=".txt", columns=("text", *given), read=lambda _: rows, notes=[note])
    with open_table(first.path, quoting=dialect) as table:
        names, notes = table.columns, table.notes
    if repeated := {*given} & {*(names or ())}:
        raise InputError(f"{first.path}: the column {min(repeated)!r} is in the folder's name too; rename one")

    def read(columns: Sequence[str]) -> Iterator[Record]:
        numbers = itertools.count(1)
        for part in parts:
            with open_table(part.path, quoting=dialect) as table:
                if {*(table.columns or ())} != {*(names or ())} or part.columns.keys() != first.columns.keys():
                    raise InputError(f"{part.path}: has other columns than {first.path}; give parts the same")
                for _, row in table.read([name for name in columns if name not in part.columns]):
                    yield next(numbers), row if isinstance(row, InputError) else row | part.columns

    what = f"{len(parts):,} files read as one table{', ' if given else ''}"
    notes = [*notes, f"{folder}: {what}{' and '.join(map(repr, given))}{' from the names of folders' if given else ''}"]
    columns = None if names is None else (*names, *given)
    return OpenTable(path=folder, format=extension(first.path), columns=columns, read=read, notes=notes)


def _whole_text(part: Part) -> Row:
    with TextFile(part.path) as file:
        return {"text": "".join(file.lines()).strip()} | part.columns


def _with_fields(loaded: Loaded, names: Sequence[str]) -> Loaded:
    """Adds fields of objects in columns, given by dotted names, as columns."""
    columns, read = loaded
    parts = {name: name.split(".") for name in names if columns is None or name not in columns}
    parts = {name: own for name, own in parts.items() if columns is None or own[0] in columns}

    def read_fields(wanted: Sequence[str]) -> Iterator[Record]:
        for line, row in read([*dict.fromkeys(parts[name][0] if name in parts else name for name in wanted)]):
            if not isinstance(row, InputError):
                found = ((name, _field(row, own)) for name, own in parts.items() if name not in row)
                row = row | {name: value for name, value in found if value is not ...}
            yield line, row

    return columns and (*columns, *parts), read_fields if parts else read


def _field(value: Any, names: Sequence[str]) -> Any:
    """Returns a field within objects; `...` if there is none."""
    for name in names:
        value = value.get(name, ...) if isinstance(value, dict) else ...
    return value


def read_table(
    path: Path, columns: Sequence[str], bad_rows: BadRows, *, quoting: Quoting = "auto", has_others: bool = False
) -> Table:
    """Reads the given columns, and the others if asked; a key that a row of JSON lacks is None.

    Raises as `iterate_rows` does.
    """
    rows, lines = list[Row](), list[int]()
    for line, row in iterate_rows(path, () if has_others else columns, quoting=quoting, bad_rows=bad_rows):
        rows.append({name: row.get(name) for name in columns} | (row if has_others else {}))
        lines.append(line)
    if not lines:
        bad_rows.finish()
    return Table(path=path, rows=rows, lines=lines)


def iterate_rows(
    path: Path, columns: Sequence[str] = (), *, quoting: Quoting = "auto", bad_rows: BadRows | None = None
) -> Iterator[tuple[int, Row]]:
    """Yields the line number and a dictionary of each row, in order; only .json files are held in memory.

    Values are str, or in .json, .jsonl and .parquet as stored; a .txt file has one column `text`, a row per line. A row
    may have more than the `columns`, and one of JSON fewer: `text_of` checks a value.

    Args:
        path: The file; its extension is its format.
        columns: Names that the header must have, and the only ones read of a Parquet file; empty for all.
        quoting: Whether quotes enclose cells of .tsv and .csv files, or a `Dialect`.
        bad_rows: Collects bad rows; by default the first of them is raised.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: The file has no rows or cannot be read, with the line and the remedy.
    """
    with open_table(path, quoting=quoting) as table:
        yield from table.rows(columns, bad_rows=bad_rows)


def column_names(path: Path, *, quoting: Quoting = "auto") -> tuple[str, ...]:
    """Returns the columns of a file; for a .jsonl file, which is read to its end, all keys that occur, also in objects.

    Ignores bad rows.
    """
    if is_stream(path):
        raise InputError(f"{path}: a pipe can be read only once; save its content to a file")
    with open_table(path, quoting=quoting) as table:
        if table.columns is not None:
            return table.columns
        bad = BadRows()
        names = tuple(dict.fromkeys(name for _, row in table.rows(bad_rows=bad) for name in _names(row)))
        if not names:
            bad.finish()
        return names


def _names(row: Row) -> Iterator[str]:
    """Yields the names of a row's columns, and those of fields within them."""
    for name, value in row.items():
        yield name
        yield from (f"{name}.{each}" for each in value) if isinstance(value, dict) else ()


def layout_notes(path: Path, quoting: Quoting = "auto") -> tuple[str, ...]:
    """Returns lines for the user on how a table is read; nothing for other files."""
    if not path.is_dir() and (extension(path) not in (".tsv", ".csv", ".jsonl", ".txt") or is_stream(path)):
        return ()
    with open_table(path, quoting=quoting) as table:
        if table.format == ".tsv":
            for _ in table.read(()):  # to its end, for a note on quotes
                pass
        return tuple(table.notes)


def class_names(path: Path) -> dict[str, tuple[str, ...]]:
    """Returns the names of numbers, by column, that `datasets` of Hugging Face stores in the metadata of Arrow."""
    schema = _schema(path)
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # none, or of another program
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
        return {column: names for column, feature in features.items() if (names := _names_in(feature))}
    return {}


def _schema(path: Path) -> Any:
    """Returns the schema of a table in memory, or of a Parquet or Arrow file; None for others."""
    if isinstance(path, MemoryTable):
        return getattr(path.content, "schema", None)
    if path.is_dir():
        path = folder_parts(path, FORMATS)[0].path
    reader = {".parquet": _parquet_reader, ".arrow": _arrow_reader}.get(extension(path))
    if reader is None:
        return None
    with TextFile(path) as file:
        return reader(file)[0]


def _names_in(feature: Any) -> tuple[str, ...]:
    """Returns the names of a ClassLabel or of lists of it."""
    while isinstance(feature, (dict, list)) and feature:
        if isinstance(feature, dict) and "names" in feature:
            return tuple(map(str, feature["names"])) if isinstance(feature["names"], list) else ()
        feature = feature[0] if isinstance(feature, list) else feature.get("feature")
    return ()


def iterate_cells(path: Path, delimiter: str = "\t") -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and cells of each line, the header included; blank lines at the end are ignored."""
    with TextFile(path) as file:
        yield from without_blank_end(plain_cells(enumerate(file.lines(), 1), delimiter))


def _guess_format(file: TextFile) -> str:
    """Returns the format of a stream without an extension, by its first line."""
    magic = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
    if found := next((format for start, format in magic.items() if file.head.startswith(start)), None):
        return found
    text = file.head.decode(file.encoding, "ignore").lstrip("\ufeff \t\r\n")
    with contextlib.suppress(InputError):
        _parse_object(text.partition("\n")[0])
        return ".jsonl"
    return ".json" if re.match(r'\{\s*("|$)|\[\s*([{"\[]|$)', text) else ".txt"


def _text(file: TextFile) -> Loaded:
    lines = ((line, text.removesuffix("\n").removesuffix("\r")) for line, text in enumerate(file.lines(), 1))
    if _is_fasttext(file):
        return ("text", "label"), lambda _: _fasttext(file, lines)
    return ("text",), lambda _: ((line, {"text": text}) for line, text in lines)


def _is_fasttext(file: TextFile) -> bool:
    return file.head.decode(file.encoding, "ignore").lstrip("\ufeff").startswith(_FASTTEXT)


def _fasttext(file: TextFile, lines: Iterable[tuple[int, str]]) -> Iterator[Record]:
    """Yields text and label of `__label__a text`; a list of labels if some line of the file has several."""
    has_several = False
    if file.is_regular:
        with TextFile(file.path) as again:
            has_several = any(len(_LABELS.match(line)[0].split()) > 1 for line in again.lines())  # type: ignore[index]
    for number, line in lines:
        found = _LABELS.match(line)
        assert found is not None  # as it may be empty
        names = [name.removeprefix(_FASTTEXT) for name in found[0].split()]
        text = line[found.end() :]
        if _FASTTEXT in text:
            yield number, InputError(f"{file.path}: line {number}: a label after the text; put it before")
        else:
            yield number, {"text": text, "label": names if has_several else "".join(names)}


def _json_lines(file: TextFile) -> Loaded:
    return None, lambda _: json_rows(file.path, enumerate(file.lines(), 1))


def json_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Record]:
    """Yields the object in each line that is not blank, or its error."""
    for line, text in lines:
        if text.strip():
            try:
                yield line, _parse_object(text)
            except InputError as error:
                is_json = text.lstrip().startswith("[") or text.strip() == "{"
                remedy = "; a list, or an object of several lines, ends in .json" if is_json else ""
                yield line, InputError(f"{path}: line {line}: {error}{remedy}")


def _parse_object(text: str) -> Row:
    try:
        row = parse_text(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a JSON object: {error}") from None
    return _row(row)


def _row(value: Any) -> Row:
    """Returns an object, or spaCy's pair of a text and an object; raises InputError for another value."""
    if isinstance(value, list) and [*map(type, value)] == [str, dict]:
        value = value[1] | {"text": value[0]}
    if not isinstance(value, dict):
        raise InputError(f"not a JSON object: {abbreviated(value)}")
    return value


def parse_text(text: str) -> Any:
    """Parses JSON; raises ValueError also for half of a surrogate pair, which is not text."""
    content = json.loads(text)
    if "\\u" in text:
        check_unicode("", json.dumps(content, ensure_ascii=False))
    return content


def _json(file: TextFile) -> Loaded:
    """Reads a whole file: JSON, or an object per line."""
    path, text = file.path, "".join(file.lines())
    try:
        records = _records(path, parse_text(text) if text.strip() else [])
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        if "Extra data" not in str(error):
            raise InputError(f"{path}: not JSON: {error}; correct it there") from None
        records = [row for _, row in json_rows(path, enumerate(text.split("\n"), 1))]
    return _loaded(records)


def _loaded(records: list[Row | InputError]) -> Loaded:
    names = dict.fromkeys(name for row in records if not isinstance(row, InputError) for name in row)
    return tuple(names) or None, lambda _: enumerate(records, 1)


def _records(path: Path, content: Any) -> list[Row | InputError]:
    """Returns the rows of a list of records, of an object that has one such list, or of columns as pandas writes."""
    if isinstance(content, dict):
        content = _records_of_object(path, content)
    if not isinstance(content, list):
        raise InputError(f"{path}: not a table but {abbreviated(content)}; it must be a list of objects")
    rows: list[Row | InputError] = []
    for number, row in enumerate(content, 1):
        try:
            rows.append(_row(row))
        except InputError as error:
            rows.append(InputError(f"{place(path, number)}: {error}"))
    return rows


def _records_of_object(path: Path, content: Row) -> list[Any]:
    values = list(content.values())
    lists = [name for name, value in content.items() if isinstance(value, list) and value]
    tables = [name for name in lists if all(isinstance(row, dict) for row in content[name])]
    if {"columns", "data"} <= content.keys() and not tables:  # pandas' orient="split"
        return [dict(zip(content["columns"], row, strict=False)) for row in content["data"]]
    if len(lists) == len(values) > len(tables) and len({len(value) for value in values}) == 1:
        return [dict(zip(content, row, strict=True)) for row in zip(*values, strict=True)]
    if len(tables) == 1:
        return list(content[tables[0]])
    if tables:
        raise InputError(f"{path}: has several lists of records, {', '.join(tables)}; give each a file of its own")
    keys = [value.keys() for value in values if isinstance(value, dict)]
    if not keys or len(keys) < len(values):
        return [content]
    if all(map(str.isdigit, content)):  # pandas' orient="index"
        return values
    if all(each == keys[0] for each in keys) and all(map(str.isdigit, keys[0])):  # and "columns"
        return [{name: content[name][row] for name in content} for row in keys[0]]
    raise InputError(f"{path}: may hold rows or columns by name; write a list of objects, as orient='records' does")


def _parquet(file: TextFile) -> Loaded:
    schema, source = _parquet_reader(file)
    batches = lambda columns: source.iter_batches(BATCH_ROWS, columns=columns or None)  # noqa: E731
    return _batches(file.path, "Parquet", schema.names, batches)


def _parquet_reader(file: TextFile) -> tuple[Any, Any]:
    """Returns schema and content."""
    with _damage(file.path, "Parquet"):
        source = pyarrow.parquet.ParquetFile(file.path if file.has_own_bytes else io.BytesIO(file.content()))
        return source.schema_arrow, source


def _arrow(file: TextFile) -> Loaded:
    schema, batches = _arrow_reader(file)
    names = schema.names
    return _batches(file.path, "Arrow", names, lambda columns: (batch.select(columns or names) for batch in batches))


def _arrow_reader(file: TextFile) -> tuple[Any, Iterator[Any]]:
    """Returns schema and batches of Arrow's file format (Feather), or its stream format, which `datasets` saves."""
    with _damage(file.path, "Arrow"):
        source: Any = pyarrow.memory_map(str(file.path)) if file.has_own_bytes else io.BytesIO(file.content())
        if file.head.startswith(b"ARROW1"):
            reader = pyarrow.ipc.open_file(source)
            return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
        reader = pyarrow.ipc.open_stream(source)
        return reader.schema, iter(reader)


def _memory(table: MemoryTable) -> Loaded:
    content = table.content
    if isinstance(content, list):
        return _loaded([_text_row(place(table, row), each) for row, each in enumerate(_records(table, content), 1)])
    names = content.column_names
    return _batches(table, "Arrow", names, lambda columns: content.select(columns or names).to_batches(BATCH_ROWS))


def _text_row(where: str, row: Row | InputError) -> Row | InputError:
    try:
        check_unicode(
            f"{where}: ", "" if isinstance(row, InputError) else json.dumps(row, ensure_ascii=False, default=str)
        )
    except InputError as error:
        return error
    return row


def _batches(path: Path, format: str, names: list[str], batches: Callable[[list[str]], Iterable[Any]]) -> Loaded:
    def read(columns: Sequence[str]) -> Iterator[Record]:
        with _damage(path, format):
            rows = (_to_microseconds(batch).to_pylist() for batch in batches(list(columns)))
            yield from enumerate(itertools.chain.from_iterable(rows), 1)

    return reject_duplicates(path, names), read


def _to_microseconds(batch: Any) -> Any:
    """Converts nanoseconds, which Python's times lack, to microseconds."""
    table = pyarrow.Table.from_batches([batch])
    table.validate(full=True)  # offsets of a damaged file may point anywhere, and reading does not check them
    for number, column in enumerate(table.schema):
        if getattr(column.type, "unit", None) == "ns":
            if pyarrow.types.is_timestamp(column.type):
                coarse = pyarrow.timestamp("us", column.type.tz)
            else:
                coarse = pyarrow.duration("us") if pyarrow.types.is_duration(column.type) else pyarrow.time64("us")
            table = table.set_column(number, column.name, table.column(number).cast(coarse, safe=False))
    return table


@contextlib.contextmanager
def _damage(path: Path, format: str) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text or a name that is not UTF-8
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: cannot be read as {format} ({reason}); get the file again") from None


_LOADERS: dict[str, Callable[[TextFile], Loaded]] = {
    ".txt": _text,
    ".jsonl": _json_lines,
    ".json": _json,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
