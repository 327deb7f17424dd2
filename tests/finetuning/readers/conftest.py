"""A fixture that writes files for the tests of readers."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather


@pytest.fixture
def write(tmp_path):
    """A function that writes text, bytes, or rows in the format of the name's extension."""

    def write_file(content, name=""):
        is_raw = isinstance(content, str | bytes)
        path = tmp_path / (name or ("train.conll" if is_raw else "train.jsonl"))
        path.parent.mkdir(exist_ok=True)
        suffix = path.suffix.lower()
        if is_raw:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        elif suffix in (".parquet", ".feather"):
            (pq.write_table if suffix == ".parquet" else feather.write_feather)(pa.Table.from_pylist(content), path)
        elif suffix == ".json":
            path.write_text(json.dumps(content))
        elif suffix in (".jsonl", ".ndjson"):
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            plain = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None}
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(content[0]), **({} if suffix == ".csv" else plain))
                writer.writeheader()
                writer.writerows(content)
        return path

    return write_file
