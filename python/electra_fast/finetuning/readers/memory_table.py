"""Tables in memory: data frames, Arrow tables, a `Dataset` of Hugging Face, and lists of dictionaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PosixPath
from typing import Any, NoReturn, Self

import pyarrow

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.delimited import reject_duplicates


class MemoryTable(PosixPath):
    """A table in memory, which readers take in place of a file's path.

    As a path it is the name in messages, such as `train`; no file can be opened by it.
    """

    suffix = ".arrow"
    content: pyarrow.Table | list[Any]

    @classmethod
    def of(cls, name: str, data: Any) -> Self:
        """Takes whatever `is_table`, or an empty list; raises InputError for anything else."""
        table = cls(name)
        if isinstance(data, (list, tuple)):
            table.content = [_plain(row) for row in data]
            return table
        if isinstance(data, Mapping) or not is_table(data):
            raise _not_a_table(name, data)
        names = getattr(data, "columns", ()) if not hasattr(data, "column_names") else ()  # of a frame
        reject_duplicates(table, [*map(str, names)])
        try:
            found = pyarrow.table(_selected(name, data))
        except pyarrow.ArrowException as error:
            if hasattr(data, "itertuples"):  # of pandas, whose cells may be lists of several types
                table.content = [
                    _plain(row) for row in data.astype(object).where(data.notna(), None).to_dict("records")
                ]
                return table
            reason = " ".join(" ".join(map(str, error.args)).split())
            remedy = "give each column values of one type"
            raise InputError(f"{name}: cannot be read through Arrow ({reason}); {remedy}") from None
        except UnicodeEncodeError as error:
            raise InputError(f"{name}: {error.object!r} has half of a surrogate pair, which is not text") from None
        except TypeError:  # of a lazy frame or a stream
            raise _not_a_table(name, data) from None
        indices = [each for each in found.column_names if each.startswith("__index_level_")]  # of pandas
        table.content = found.drop_columns(indices)
        return table

    def exists(self, **_: Any) -> bool:
        """Returns that the table exists."""
        return True

    def is_file(self, **_: Any) -> bool:
        """Returns that the table is one file."""
        return True

    def is_dir(self, **_: Any) -> bool:
        """Returns that the table is no folder."""
        return False

    def __fspath__(self) -> NoReturn:
        raise TypeError(f"{self}: a table in memory has no file")


def is_table(data: Any) -> bool:
    """Returns whether data have columns, or are a list that begins with a dictionary, rather than single values."""
    if isinstance(data, (list, tuple)):
        return bool(data) and isinstance(data[0], Mapping)
    return any(hasattr(data, name) for name in ("columns", "column_names", "schema"))


def _not_a_table(name: str, data: Any) -> InputError:
    kinds = "a path, a data frame, a pyarrow Table, one split of a Dataset, or a list of dicts"
    return InputError(f"{name}: {type(data).__name__} is not a table in memory; give {kinds}")


def _selected(name: str, data: Any) -> Any:
    """Returns the rows that a `Dataset` selects from its table, in its order; other data as they are."""
    if not (hasattr(data, "with_format") and hasattr(data, "format")):
        return data
    if data.format["type"] == "custom":
        raise InputError(f"{name}: a Dataset with a transform, which Arrow does not see; apply it with map")
    return data.with_format("arrow")[:]


def _plain(value: Any) -> Any:
    """Returns a value as JSON would hold it: lists for tuples, sets and arrays."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(_plain, value), key=str)
    return value.tolist() if hasattr(value, "tolist") else value  # of NumPy
