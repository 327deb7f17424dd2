"""Reads .tsv, .csv, .json, .jsonl, .parquet, .arrow and .txt files, folders of them, and tables in memory.

A folder contains parts as Spark, Hive and Arrow write them, a saved `Dataset`, or a subfolder of texts per class.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.readers.delimited import Dialect, Loaded, Record, load_delimited
from electra_fast.finetuning.readers.rows import BadRows, Row, check_columns, extension, is_stream, place
from electra_fast.finetuning.readers.table_formats import LOADERS, MemoryTable, guess_format, is_fasttext
from electra_fast.finetuning.readers.text_files import TextFile

FORMATS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".arrow", ".txt")
_SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
# part-00000-ab.csv, data.0.parquet, 0.parquet, train-00000-of-00002.parquet; all parts of a table share the prefix.
_PART = re.compile(r"((?:part|data)[-_.]?)[0-9].*|()[0-9]+[-_.].*|(.*-)[0-9]+-of-[0-9]+\..*")
_EXPECTED = (
    f"pass a file that ends in {', '.join(FORMATS)}, or a folder with parts (part-00000.csv, label=a/….csv), a saved "
    "Dataset, or a subfolder of .txt files per class"
)
_NULL = "__HIVE_DEFAULT_PARTITION__"
Quoting = Literal["auto", "csv", "none"] | Dialect


@dataclass(kw_only=True)
class OpenTable:
    """A file that is read once, row by row, as opened by `open_table`."""

    path: Path
    format: str
    """One of `FORMATS`."""
    columns: tuple[str, ...] | None
    """Names of the columns; None for .jsonl, since they vary by row."""
    read: Callable[[Sequence[str]], Iterator[Record]]
    """Yields the rows with all or some columns."""
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Class names of integer labels, by column, if a file of `datasets` has them."""
    is_idle: Callable[[], bool] = lambda: False
    """Returns whether the next row of a pipe has not arrived yet."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user about how the file is read; complete after the last row."""
    lines: list[int] = field(default_factory=list)
    """After `load`: the line of each row, or its number from 1 in files without lines."""

    def rows(self, columns: Sequence[str] = (), *, bad_rows: BadRows | None = None) -> Iterator[tuple[int, Row]]:
        """Yields the rows like `iterate_rows`."""
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

    def names(self) -> tuple[str, ...]:
        """Returns the columns; for .jsonl all keys that occur, nested ones as `outer.inner`.

        Loads .jsonl into memory. Ignores bad rows.
        """
        if self.columns is None:
            records = list(self.read(()))
            self.read = lambda _: iter(records)
            bad = BadRows()
            self.columns = tuple(dict.fromkeys(name for _, row in self.rows(bad_rows=bad) for name in _names(row)))
            if not self.columns:
                bad.finish()
        return self.columns

    def load(self, columns: Sequence[str], bad_rows: BadRows, *, has_others: bool = False) -> list[Row]:
        """Returns all rows with the given columns, or with all columns; a key that a JSON row lacks is None."""
        rows = list[Row]()
        for line, row in self.rows(() if has_others else columns, bad_rows=bad_rows):
            rows.append({name: row.get(name) for name in columns} | (row if has_others else {}))
            self.lines.append(line)
        if not rows:
            bad_rows.finish()
        return rows

    def place(self, row: int) -> str:
        """Returns the place of a loaded row, for messages: `data.tsv: line 7`."""
        return place(self.path, self.lines[row])


def _names(row: Row) -> Iterator[str]:
    for name, value in row.items():
        yield name
        yield from (f"{name}.{key}" for key in value) if isinstance(value, dict) else ()


@contextlib.contextmanager
def open_table(path: Path, *, quoting: Quoting = "auto", format: str = "") -> Iterator[OpenTable]:
    """Opens a table in memory or a file, which may be a pipe or `-` for standard input, and reads its header.

    `format` is an extension that overrides the file's. Without both (a pipe), the first line decides.
    Raises the errors of `iterate_rows`.
    """
    dialect = quoting if isinstance(quoting, Dialect) else Dialect(quoting)
    if isinstance(path, MemoryTable):
        yield OpenTable(path=path, format=path.suffix, **_with_fields(path.load(), dialect.fields)._asdict())
        return
    if path.is_dir():
        yield _open_folder(path, dialect)
        return
    suffix = format or extension(path)
    if suffix in _SPREADSHEETS:
        raise InputError(f"{path}: a spreadsheet; save it as CSV")
    if suffix not in FORMATS and (format or not is_stream(path)):
        raise InputError(f"{path}: unknown extension; must be one of {', '.join(FORMATS)}")
    with TextFile(path) as file:
        notes = list[str]()
        if suffix not in FORMATS:
            suffix = guess_format(file)
            description = "a text per line" if suffix == ".txt" else suffix.removeprefix(".")
            notes.append(f"{path}: read as {description}; choose another format with --format")
        if file.encoding != "UTF-8" and suffix not in (".parquet", ".arrow"):
            notes.append(f"{path}: read as {file.encoding}, according to its byte order mark")
        if suffix == ".txt" and is_fasttext(file):
            notes.append(f"{path}: read in fastText's format, with __label__NAME before the text")
        if suffix in (".tsv", ".csv"):
            loaded = load_delimited(file, suffix, dialect, notes)
        elif dialect.no_header:
            raise InputError(f"{path}: --no-header applies to .tsv and .csv files only; remove it")
        else:
            loaded = _with_fields(LOADERS[suffix](file), dialect.fields)
        yield OpenTable(path=path, format=suffix, is_idle=file.is_idle, notes=notes, **loaded._asdict())


@contextlib.contextmanager
def open_tables(paths: Mapping[str, Path], quoting: Quoting) -> Iterator[dict[str, OpenTable]]:
    """Opens the files of several splits like `open_table`; raises InputError for a pipe."""
    with contextlib.ExitStack() as stack:
        for path in paths.values():
            refuse_stream(path)
        yield {name: stack.enter_context(open_table(path, quoting=quoting)) for name, path in paths.items()}


def refuse_stream(path: Path) -> None:
    """Raises InputError for a pipe, which some readers do not support."""
    if is_stream(path):
        raise InputError(f"{path}: a pipe can be read only once; save its content to a file")


def iterate_rows(
    path: Path, columns: Sequence[str] = (), *, quoting: Quoting = "auto", bad_rows: BadRows | None = None
) -> Iterator[tuple[int, Row]]:
    """Yields the line number and a dictionary of each row, in order; only .json files are loaded into memory.

    Values are str, or as stored in .json, .jsonl and .parquet; a .txt file has one column `text` and a row per line. A
    row may have other columns too, and a JSON row may lack some: check values with `text_of`.

    `columns` must be in the header; of a Parquet file only these are read. Empty for all. `quoting` is the `quoting` of
    a `Dialect`, or a `Dialect`. Without `bad_rows`, the error of the first bad row is raised. Raises FileNotFoundError,
    or InputError with the line and a remedy if the file has no rows or cannot be read.
    """
    with open_table(path, quoting=quoting) as table:
        yield from table.rows(columns, bad_rows=bad_rows)


def _with_fields(loaded: Loaded, names: Sequence[str]) -> Loaded:
    """Adds columns for fields of nested objects, which have dotted names."""
    columns = loaded.columns
    read = loaded.read
    parts = {name: name.split(".") for name in names if columns is None or name not in columns}
    parts = {name: keys for name, keys in parts.items() if columns is None or keys[0] in columns}

    def read_fields(wanted: Sequence[str]) -> Iterator[Record]:
        for line, row in read([*dict.fromkeys(parts[name][0] if name in parts else name for name in wanted)]):
            if not isinstance(row, InputError):
                fields = ((name, _field(row, keys)) for name, keys in parts.items() if name not in row)
                row = row | {name: value for name, value in fields if value is not ...}
            yield line, row

    return loaded._replace(columns=columns and (*columns, *parts), read=read_fields) if parts else loaded


def _field(row: Row, names: Sequence[str]) -> object:
    """Returns a field of nested objects; `...` if it does not exist."""
    value: object = row
    for name in names:
        value = value.get(name, ...) if isinstance(value, dict) else ...
    return value


class _Part(NamedTuple):
    """A file of a folder, with the columns that its subfolders define."""

    path: Path
    columns: dict[str, str | None]
    is_text: bool = False
    """The file is the text of one row."""


def _open_folder(folder: Path, dialect: Dialect) -> OpenTable:
    parts = _folder_parts(folder)
    first = parts[0]
    folder_columns = tuple(parts[0].columns)
    if first.is_text:

        def texts(_: Sequence[str]) -> Iterator[Record]:
            for number, part in enumerate(parts, 1):
                with TextFile(part.path) as file:
                    yield number, {"text": "".join(file.lines()).strip()} | part.columns

        note = f"{folder}: {len(parts):,} files, each a text labeled with the name of its folder"
        return OpenTable(path=folder, format=".txt", columns=("text", *folder_columns), read=texts, notes=[note])
    with open_table(first.path, quoting=dialect) as table:
        names = table.columns
        notes = table.notes
        class_names = table.class_names
    if repeated := {*folder_columns} & {*(names or ())}:
        raise InputError(f"{first.path}: the column {min(repeated)!r} is also in the folder's name; rename one")

    def read(columns: Sequence[str]) -> Iterator[Record]:
        numbers = itertools.count(1)
        for part in parts:
            with open_table(part.path, quoting=dialect) as table:
                if {*(table.columns or ())} != {*(names or ())} or part.columns.keys() != first.columns.keys():
                    raise InputError(f"{part.path}: has other columns than {first.path}; all parts must have the same")
                for _, row in table.read([name for name in columns if name not in part.columns]):
                    yield next(numbers), row if isinstance(row, InputError) else row | part.columns

    description = f"{len(parts):,} files read as one table"
    if folder_columns:
        description += f", {' and '.join(map(repr, folder_columns))} from the names of folders"
    notes = [*notes, f"{folder}: {description}"]
    columns = None if names is None else (*names, *folder_columns)
    format = extension(first.path)
    return OpenTable(path=folder, format=format, columns=columns, read=read, class_names=class_names, notes=notes)


def _folder_parts(folder: Path) -> list[_Part]:
    """Returns the parts of the table in a folder, in order; raises InputError if the folder contains other files.

    Ignores empty files and names that begin with `.` or `_`.
    """
    if (folder / "state.json").is_file():  # Dataset.save_to_disk
        with contextlib.suppress(KeyError, TypeError):
            return [_Part(folder / part["filename"], {}) for part in read_object(folder / "state.json")["_data_files"]]
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise InputError(f"{folder}: a DatasetDict of the splits {splits}; pass one split, such as {folder / 'train'}")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if not any(name[0] in "._" for name in path.relative_to(folder).parts)]
    places = {path: path.relative_to(folder).parts[:-1] for path in files}
    if files and all(len(names) == 1 and "=" not in names[0] for names in places.values()):
        if all(path.suffix.lower() == ".txt" for path in files):
            return [_Part(path, {"label": names[0]}, is_text=True) for path, names in places.items()]
    if not files or not all("=" in name for names in places.values() for name in names):
        raise InputError(f"{folder}: a folder without a table; {_EXPECTED}")
    if not all(map(any, places.values())):  # files in the folder itself may belong to several tables
        matches = [_PART.fullmatch(path.name) for path in files]
        if not all(matches) or len({part.group(part.lastindex or 1) for part in matches if part}) > 1:
            raise InputError(f"{folder}: a folder of files that are not parts of a table; {_EXPECTED}")
    if len({extension(path) for path in files}) > 1:
        raise InputError(f"{folder}: a folder of files of several formats; {_EXPECTED}")
    return [_Part(path, dict(map(_partition, names))) for path, names in places.items()]


def _partition(name: str) -> tuple[str, str | None]:
    column, _, value = name.partition("=")
    return column, None if value == _NULL else urllib.parse.unquote(value)
