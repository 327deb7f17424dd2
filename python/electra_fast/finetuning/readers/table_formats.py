"""Formats of tables other than delimited text: lines of text, JSON, Parquet, Arrow, and tables in memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any, NoReturn, Self

import pyarrow
import pyarrow.parquet

from electra_fast.errors import InputError
from electra_fast.files.json_files import parse_json
from electra_fast.finetuning.readers.delimited import Loaded, Record, reject_duplicates
from electra_fast.finetuning.readers.rows import Row, abbreviated, check_unicode, place
from electra_fast.finetuning.readers.text_files import TextFile

_FASTTEXT = "__label__"
_LABELS = re.compile(r"(?:__label__\S+(?:\s+|$))*")
# Rows per batch of a Parquet file.
BATCH_ROWS = 8192


class MemoryTable(PosixPath):
    """A table in memory, accepted by readers in place of a path.

    As a path it is the table's name in messages, such as `train`. It cannot be opened as a file.
    """

    suffix = ".arrow"
    content: pyarrow.Table | list[Any]

    @classmethod
    def of(cls, name: str, data: Any) -> Self:
        """Makes a table from data for which `is_table` holds or from an empty list; else raises InputError."""
        table = cls(name)
        if isinstance(data, (list, tuple)):
            table.content = [_plain(row) for row in data]
            return table
        if isinstance(data, Mapping) or not is_table(data):
            raise _not_a_table(name, data)
        names = getattr(data, "columns", ()) if not hasattr(data, "column_names") else ()  # of a data frame
        reject_duplicates(table, [*map(str, names)])
        try:
            converted = pyarrow.table(_selected(name, data))
        except pyarrow.ArrowException as error:
            if hasattr(data, "itertuples"):  # cells in pandas may be lists of several types
                rows = data.astype(object).where(data.notna(), None).to_dict("records")
                table.content = [_plain(row) for row in rows]
                return table
            reason = " ".join(" ".join(map(str, error.args)).split())
            remedy = "make the values of each column one type"
            raise InputError(f"{name}: cannot be converted to Arrow ({reason}); {remedy}") from None
        except UnicodeEncodeError as error:
            raise InputError(f"{name}: {error.object!r} has an unpaired surrogate, which is not text") from None
        except TypeError:  # a lazy frame or a stream
            raise _not_a_table(name, data) from None
        indices = [column for column in converted.column_names if column.startswith("__index_level_")]  # of pandas
        table.content = converted.drop_columns(indices)
        return table

    def exists(self, **_: Any) -> bool:
        return True

    def is_file(self, **_: Any) -> bool:
        return True

    def is_dir(self, **_: Any) -> bool:
        return False

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self}: a table in memory has no file")

    def load(self) -> Loaded:
        content = self.content
        if isinstance(content, list):
            records = enumerate(_records(self, content), 1)
            return _loaded([_with_text_only(place(self, row), record) for row, record in records])
        batches = lambda columns: content.select(columns).to_batches(BATCH_ROWS)  # noqa: E731
        return _batches(self, "Arrow", content.schema, batches)


def file_or_table(name: str, data: Any) -> Path:
    """Returns the path of a file, or a table in memory."""
    return Path(data) if isinstance(data, (str, os.PathLike)) else MemoryTable.of(name, data)


def is_table(data: Any) -> bool:
    """Returns whether data have columns or are a list that begins with a dictionary."""
    if isinstance(data, (list, tuple)):
        return bool(data) and isinstance(data[0], Mapping)
    return any(hasattr(data, name) for name in ("columns", "column_names", "schema"))


def _not_a_table(name: str, data: Any) -> InputError:
    kinds = "a path, a data frame, a pyarrow Table, one split of a Dataset, or a list of dicts"
    return InputError(f"{name}: {type(data).__name__} is not a table in memory; pass {kinds}")


def _selected(name: str, data: Any) -> Any:
    if not (hasattr(data, "with_format") and hasattr(data, "format")):
        return data
    if data.format["type"] == "custom":
        raise InputError(f"{name}: a Dataset with a transform, which Arrow ignores; apply the transform with map")
    return data.with_format("arrow")[:]  # the selected rows in their order


def _plain(value: Any) -> Any:
    """Returns a value with tuples, sets and arrays converted to lists, as in JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=str)
    return value.tolist() if hasattr(value, "tolist") else value  # NumPy


def _with_text_only(where: str, row: Row | InputError) -> Row | InputError:
    try:
        if not isinstance(row, InputError):
            check_unicode(f"{where}: ", json.dumps(row, ensure_ascii=False, default=str))
    except InputError as error:
        return error
    return row


def guess_format(file: TextFile) -> str:
    """Returns the format of a stream without an extension, guessed from its first line."""
    magic = {b"PAR1": ".parquet", b"ARROW1": ".arrow"}
    if suffix := next((format for start, format in magic.items() if file.head.startswith(start)), None):
        return suffix
    text = file.head.decode(file.encoding, "ignore").lstrip("\ufeff \t\r\n")
    with contextlib.suppress(InputError):
        _parse_object(text.partition("\n")[0])
        return ".jsonl"
    return ".json" if re.match(r'\{\s*("|$)|\[\s*([{"\[]|$)', text) else ".txt"


def _load_text(file: TextFile) -> Loaded:
    lines = ((line, text.removesuffix("\n").removesuffix("\r")) for line, text in enumerate(file.lines(), 1))
    if is_fasttext(file):
        return Loaded(("text", "label"), lambda _: _fasttext(file, lines))
    return Loaded(("text",), lambda _: ((line, {"text": text}) for line, text in lines))


def is_fasttext(file: TextFile) -> bool:
    return file.head.decode(file.encoding, "ignore").lstrip("\ufeff").startswith(_FASTTEXT)


def _fasttext(file: TextFile, lines: Iterable[tuple[int, str]]) -> Iterator[Record]:
    """Yields the text and label of lines `__label__a text`; lists of labels if any line has several."""
    has_several = False
    if file.is_regular:
        with TextFile(file.path) as again:
            has_several = any(len(_LABELS.match(line)[0].split()) > 1 for line in again.lines())  # type: ignore[index]
    for number, line in lines:
        match = _LABELS.match(line)
        assert match is not None  # the pattern matches the empty string
        names = [name.removeprefix(_FASTTEXT) for name in match[0].split()]
        text = line[match.end() :]
        if _FASTTEXT in text:
            yield number, InputError(f"{file.path}: line {number}: a label after the text; move it before the text")
        else:
            yield number, {"text": text, "label": names if has_several else "".join(names)}


def json_rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[Record]:
    """Yields the object or the error of each line that is not blank."""
    for line, text in lines:
        if text.strip():
            try:
                yield line, _parse_object(text)
            except InputError as error:
                is_json = text.lstrip().startswith("[") or text.strip() == "{"
                remedy = "; rename the file to .json if it is a list or has objects of several lines" if is_json else ""
                yield line, InputError(f"{path}: line {line}: {error}{remedy}")


def _parse_object(text: str) -> Row:
    try:
        row = parse_text(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"not a JSON object: {error}") from None
    return _row(row)


def _row(value: Any) -> Row:
    """Returns an object, also from spaCy's pair of a text and an object; raises InputError for other values."""
    if isinstance(value, list) and [*map(type, value)] == [str, dict]:
        value = value[1] | {"text": value[0]}
    if not isinstance(value, dict):
        raise InputError(f"not a JSON object: {abbreviated(value)}")
    return value


def parse_text(text: str) -> Any:
    """Parses JSON; raises ValueError, also for an unpaired surrogate, which is not text."""
    content = json.loads(text)
    if "\\u" in text:
        check_unicode("", json.dumps(content, ensure_ascii=False))
    return content


def _load_json(file: TextFile) -> Loaded:
    text = "".join(file.lines())
    content, lines = json_or_lines(file.path, text, "correct it there") if text.strip() else ([], None)
    return _loaded(_records(file.path, content) if lines is None else [row for _, row in lines])


def json_or_lines(path: Path, text: str, remedy: str) -> tuple[Any, Iterator[Record] | None]:
    """Returns the JSON value of a text, or if it has an object per line, the records of `json_rows`."""
    try:
        return parse_text(text), None
    except (ValueError, RecursionError) as error:
        if "Extra data" not in str(error):
            raise InputError(f"{path}: not JSON: {error}; {remedy}") from None
    return None, json_rows(path, enumerate(text.split("\n"), 1))


def _loaded(records: list[Row | InputError]) -> Loaded:
    names = dict.fromkeys(name for row in records if not isinstance(row, InputError) for name in row)
    return Loaded(tuple(names) or None, lambda _: enumerate(records, 1))


def _records(path: Path, content: Any) -> list[Row | InputError]:
    """Returns the rows of a list of records, of an object with one such list, or of an object of columns."""
    if isinstance(content, dict):
        content = _records_of_object(path, content)
    if not isinstance(content, list):
        raise InputError(f"{path}: must be a list of objects, got {abbreviated(content)}")
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
    if len(lists) == len(values) > len(tables) and len({len(value) for value in values}) == 1:
        return [dict(zip(content, row, strict=True)) for row in zip(*values, strict=True)]
    if len(tables) == 1:
        return list(content[tables[0]])
    if tables:
        raise InputError(f"{path}: several lists of records ({', '.join(tables)}); write each to a separate file")
    if values and all(isinstance(value, dict) for value in values):
        raise InputError(f"{path}: its keys may be rows or columns; write a list of objects (pandas: orient='records')")
    return [content]


def _load_parquet(file: TextFile) -> Loaded:
    with _damage(file.path, "Parquet"):
        source = pyarrow.parquet.ParquetFile(file.path if file.is_plain else io.BytesIO(file.content()))
        schema = source.schema_arrow
    return _batches(file.path, "Parquet", schema, lambda columns: source.iter_batches(BATCH_ROWS, columns=columns))


def _load_arrow(file: TextFile) -> Loaded:
    """Reads Arrow's file format (Feather), or its stream format, used by `datasets`."""
    with _damage(file.path, "Arrow"):
        source: Any = pyarrow.memory_map(str(file.path)) if file.is_plain else io.BytesIO(file.content())
        if file.head.startswith(b"ARROW1"):
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = pyarrow.ipc.open_stream(source)
            batches = iter(reader)
        schema = reader.schema
    return _batches(file.path, "Arrow", schema, lambda columns: (batch.select(columns) for batch in batches))


def _batches(path: Path, format: str, schema: Any, batches: Callable[[list[str]], Iterable[Any]]) -> Loaded:
    def read(columns: Sequence[str]) -> Iterator[Record]:
        with _damage(path, format):
            rows = (_to_microseconds(batch).to_pylist() for batch in batches(list(columns or schema.names)))
            yield from enumerate(itertools.chain.from_iterable(rows), 1)

    return Loaded(reject_duplicates(path, schema.names), read, _class_names(schema))


def _class_names(schema: Any) -> dict[str, tuple[str, ...]]:
    """Returns the class names, by column, that Hugging Face's `datasets` stores in Arrow metadata."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):  # no metadata, or from another program
        features = parse_json(schema.metadata[b"huggingface"])["info"]["features"]
        return {column: names for column, feature in features.items() if (names := _names_in(feature))}
    return {}


def _names_in(feature: Any) -> tuple[str, ...]:
    """Returns the names of a ClassLabel or of nested lists of it."""
    while isinstance(feature, (dict, list)) and feature:
        if isinstance(feature, dict) and "names" in feature:
            return tuple(map(str, feature["names"])) if isinstance(feature["names"], list) else ()
        feature = feature[0] if isinstance(feature, list) else feature.get("feature")
    return ()


def _to_microseconds(batch: Any) -> Any:
    """Converts nanoseconds, which Python's times do not support, to microseconds."""
    table = pyarrow.Table.from_batches([batch])
    table.validate(full=True)  # a damaged file may have invalid offsets, which reading does not check
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
        raise InputError(f"{path}: cannot be read as {format} ({reason}); download the file again") from None


LOADERS: dict[str, Callable[[TextFile], Loaded]] = {
    ".txt": _load_text,
    ".jsonl": lambda file: Loaded(None, lambda _: json_rows(file.path, enumerate(file.lines(), 1))),
    ".json": _load_json,
    ".parquet": _load_parquet,
    ".arrow": _load_arrow,
}
