"""Folders that hold one table: parts as Spark, Hive and Arrow write them, a saved `Dataset`, or a folder per class."""

from __future__ import annotations

import contextlib
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object
from electra_fast.finetuning.readers.rows import extension

# part-00000-ab.csv, data.0.parquet, 0.parquet, train-00000-of-00002.parquet; what stands before the number is the same.
_PART = re.compile(r"((?:part|data)[-_.]?)[0-9].*|()[0-9]+[-_.].*|(.*-)[0-9]+-of-[0-9]+\..*")
_EXPECTED = (
    "give a file that ends in {}, or a folder of parts (part-00000.csv, label=a/….csv), of a saved Dataset, or with a "
    "subfolder of .txt files per class"
)
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class Part:
    """A file of a folder, and the columns that its place in the folder gives."""

    path: Path
    columns: dict[str, str | None]
    is_text: bool = False
    """The whole file is the text of one row."""


def folder_parts(folder: Path, formats: tuple[str, ...]) -> list[Part]:
    """Returns the parts of the table in a folder, in order; raises InputError if it holds something else.

    Files whose names begin with `.` or `_`, and empty ones, are left out.
    """
    if (folder / "state.json").is_file():  # Dataset.save_to_disk
        with contextlib.suppress(KeyError, TypeError):
            return [Part(folder / each["filename"], {}) for each in read_object(folder / "state.json")["_data_files"]]
    if (folder / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise InputError(f"{folder}: a DatasetDict of the splits {splits}; give one, such as {folder / 'train'}")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if not any(name[0] in "._" for name in path.relative_to(folder).parts)]
    places = {path: path.relative_to(folder).parts[:-1] for path in files}
    if files and all(len(names) == 1 and "=" not in names[0] for names in places.values()):
        if all(path.suffix.lower() == ".txt" for path in files):
            return [Part(path, {"label": names[0]}, is_text=True) for path, names in places.items()]
    if not files or not all("=" in name for names in places.values() for name in names):
        raise InputError(f"{folder}: a folder; {_EXPECTED.format(', '.join(formats))}")
    if not all(map(any, places.values())):  # plain files, which may be of several tables
        found = [_PART.fullmatch(path.name) for path in files]
        if not all(found) or len({each.group(each.lastindex or 1) for each in found if each}) > 1:
            raise InputError(f"{folder}: a folder of other files than parts; {_EXPECTED.format(', '.join(formats))}")
    if len({extension(path) for path in files}) > 1:
        raise InputError(f"{folder}: a folder of files of several formats; {_EXPECTED.format(', '.join(formats))}")
    return [Part(path, dict(map(_partition, names))) for path, names in places.items()]


def _partition(name: str) -> tuple[str, str | None]:
    column, _, value = name.partition("=")
    return column, None if value == _NULL else urllib.parse.unquote(value)
