"""Tables from files and pipes of all formats: their rows, and errors for damaged files."""

import csv
import gzip
import io
import json
import lzma
import os
import random
import re
import struct
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_reading import refusal

from electra_fast.finetuning.readers.delimited import Dialect
from electra_fast.finetuning.readers.rows import BadRows, text_of
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.readers.tables import iterate_rows, open_table, refuse_stream
from electra_fast.finetuning.task_data import read_tasks

NO_HEADER = Dialect(no_header=True)


def rows_of(path, columns=(), **options):
    return list(iterate_rows(path, columns, **options))


def read_table(path, columns=(), bad_rows=None, quoting="auto"):
    """Returns a file's table, open until after its last row, and the rows."""
    with open_table(path, quoting=quoting) as table:
        return table, table.load(columns, bad_rows or BadRows())


def column_names(path, quoting="auto"):
    with open_table(path, quoting=quoting) as table:
        return table.names()


def layout_notes(path, quoting="auto"):
    with open_table(path, quoting=quoting) as table:
        [*table.read(())]
        return tuple(table.notes)


@pytest.mark.parametrize(
    ("extension", "place"),
    [("tsv", "line 4"), ("csv", "line 4"), ("jsonl", "line 3"), ("json", "record 3"), ("parquet", "row 3")]
    + [("TSV", "line 4"), ("ndjson", "line 3"), ("feather", "row 3")],
)
def test_all_formats_give_the_same_table(write, extension, place):
    texts = ["plain", "a, b", 'say "hi"', "", "naïve \u2028 text", "last"]
    rows = [{"text": text, "label": str(len(text))} for text in texts]
    path = write(rows, f"data.{extension}")
    table, loaded = read_table(path, ("label", "text"))
    assert (loaded, table.place(2)) == (rows, f"{path}: {place}")
    assert column_names(path) == ("text", "label")


@pytest.mark.parametrize(
    ("name", "content", "quoting", "rows"),
    [
        ("a.txt", "one\n\n two\ttabs \r\n\n", "auto", [(1, "one"), (2, ""), (3, " two\ttabs "), (4, "")]),
        ("a.txt", "__label__a so\n__label__b it  is\n", "auto", [(1, "so", "a"), (2, "it  is", "b")]),
        ("a.txt", "__label__a __label__b\tit\nis\n", "auto", [(1, "it", ["a", "b"]), (2, "is", [])]),
        ("a.txt", "\ufeff__label__a so\nit\n__label__b", "auto", [(1, "so", "a"), (2, "it", ""), (3, "", "b")]),
        ("a.csv", 'a,b\n"a, ""b""\nc",1\n"",2\nd,"3"\n', "auto", [(2, 'a, "b"\nc', "1"), (4, "", "2"), (5, "d", "3")]),
        ("a.tsv", 'a\tb\n"a b"\t1\n', "auto", [(2, '"a b"', "1")]),
        ("a.tsv", 'a\tb\n"a b"\t1\n', "csv", [(2, "a b", "1")]),
        ("a.csv", 'a,b\n"a b",1\n', "none", [(2, '"a b"', "1")]),
        ("a.csv", '"1","so it, is"\n2,b\n', NO_HEADER, [(1, "1", "so it, is"), (2, "2", "b")]),
        ("a.tsv", "text\na\n\nb\n\n", "auto", [(2, "a"), (3, ""), (4, "b")]),  # an empty text
        ("a.csv", "a,b\n\n1,2\n\n\n3,4\n\n", "auto", [(3, "1", "2"), (6, "3", "4")]),
        ("a.tsv", "a\tb\n\n1\t2\n\n\n3\t4\n\n", "auto", [(3, "1", "2"), (6, "3", "4")]),
        ("a.jsonl", '\n \n{"a": "1"}\n\r\n\n{"a": "3"}\n', "auto", [(3, "1"), (6, "3")]),
    ],
)
def test_cells_and_lines_of_text_formats(write, name, content, quoting, rows):
    path = write(content, name)
    assert [(line, *row.values()) for line, row in iterate_rows(path, quoting=quoting)] == rows
    assert any("read in fastText's format" in note for note in layout_notes(path)) == ("__label__" in content)


def test_pairs_of_spacy(write):
    pairs = [["Ann met Bob", {"entities": [[0, 3, "PER"]]}], ["so it is", {"cats": {"A": 1.0}}]]
    rows = [{"text": "Ann met Bob", "entities": [[0, 3, "PER"]]}, {"text": "so it is", "cats": {"A": 1.0}}]
    for path in (write(pairs, "a.json"), write(pairs, "a.jsonl"), MemoryTable.of("train", [*map(tuple, pairs)])):
        assert [row for _, row in iterate_rows(path)] == rows


def spark_cell(text):
    escaped = re.sub(r'(\\*)("|$)', lambda match: 2 * match[1] + (match[2] and '\\"'), text)
    return f'"{escaped}"' if re.search(r'["\\,\n]', text) else text


def test_quotes_after_a_backslash(write):
    rng = random.Random(0)
    cells = [
        ["".join(rng.choices('ab \\",n\n', k=rng.randrange(1, 9))).strip() or "a" for _ in "ab"] for _ in range(300)
    ]
    path = write("text,label\n" + "".join(",".join(map(spark_cell, row)) + "\n" for row in cells), "data.csv")
    assert [list(row.values()) for _, row in rows_of(path, quoting="backslash")] == cells


@pytest.mark.parametrize(
    ("cells", "number"),
    [(['"""a"" b"', "c"], 1), (['"a"', '"b ""c"""'], 2), (['"a"', 'b "c"'], 0), (['"a" and "b"'], 0), (['"'], 0)],
)
def test_quotes_around_tsv_cells_are_noted(write, cells, number):
    path = write("text\tlabel\n" + "".join(f"{cell}\t1\n" for cell in cells), "data.tsv")
    note = f"{path}: quotes around {number:,} cells are read as text; if they only enclose cells, add --quoting csv"
    assert list(layout_notes(path)) == [note] * (number > 0)
    assert layout_notes(path, "none") == layout_notes(path, "csv") == ()


def test_long_cells_do_not_change_the_csv_modules_limit(write):
    limit = csv.field_size_limit()
    text = "x" * 300_000
    rows = iterate_rows(write("text\n" + f'"{text}"\n' * 3, "data.csv"))
    assert next(rows)[1]["text"] == text
    assert csv.field_size_limit() == limit
    assert len(list(rows)) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "", "empty"),
        ("a.txt", "", "no rows"),
        ("a.txt", "__label__a so\nit __label__b\n", "line 2: a label after the text"),
        ("a.json", "", "no rows"),
        ("a.json", '[{"a": 1},]', "not JSON: Expecting value: line 1 column 11"),
        ("a.json", '[["x", 1]]', "record 1: not a JSON object: ['x', 1]"),
        ("a.json", "3", "must be a list of objects, got 3"),
        ("a.json", '{"train": [{"a": 1}], "dev": [{"a": 2}]}', "several lists of records (train, dev); write"),
        ("a.json", '{"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}}', "its keys may be rows or columns"),
        ("a.tsv", "a\tb\ta\n1\t2\t3\n", "two columns are named 'a'"),
        ("a.tsv", "a\tb\n1\t2\n1\n", "line 3: found 1 fields, expected 2"),
        ("a.csv", "a,b;c\n1,2;3\n", "line 1: the delimiter may be comma or semicolon; choose it with --delim"),
        ("a.csv", "a;b\n1;2\n3\n", "line 3: found 1 fields, expected 2 as in the header; the cells of the first line"),
        ("a.csv", "a,b\n1\r2,3\n", "line 2: a carriage return within a cell"),
        ("a.csv", "PK\x03\x04", "not text but a spreadsheet or another zip archive"),
        ("a.tsv", 'a\tb\n"1\t1"\t2\n', "line 2: found 3 fields, expected 2 as in the header; if quotes enclose cells"),
        ("a.csv", "a,b\n1,2,3\n", "line 2: found 3 fields, expected 2 as in the header; enclose cells"),
        ("a.csv", 'a,b\n1,2\n"3\n4",5\n6,"7\n8,9\n', "line 5: bad quote in the record that begins here (unexpected en"),
        ("a.csv", 'a,b\n1,2\n"x"y,5\n', "line 3: bad quote in the record that begins here"),
        ("a.csv", 'text,label\n"a \\"b\\", c",1\n', "line 2: bad quote in the record that begins here"),
        ("a.tsv", b"a\tb\nx\ty\nz\xff\t1\n", "line 3: not UTF-8 at byte 9"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16-le"), "line 1: NUL bytes, as in UTF-16"),
        ("a.tsv", "a\tb\n1\t2\n".encode("utf-16")[:-1], "line 2: not UTF-16-LE at byte 16"),
        ("a.tsv.zst", b"\x28\xb5\x2f\xfd\0\xa8\x41\0\0a\tb\n1\t2\n", "its zstd window is over 128 MiB"),
        ("a.tsv.gz", gzip.compress(b"a" * 99, mtime=0)[:-9], "damaged gzip (Compressed file ended before"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "line 2: not a JSON object: [1]"),
        ("a.jsonl", '[{"a": 1}]\n', "line 1: not a JSON object: [{'a': 1}]; rename the file to .json if it is a list"),
        ("a.jsonl", '{"a": 1\n', "line 1: not a JSON object: Expecting ',' delimiter"),
        ("a.jsonl", '{"a": "\\ud800"}\n', "line 1: not a JSON object: unpaired surrogate"),
        ("a.jsonl", "[" * 100_000, "line 1: not a JSON object: maximum recursion depth"),
        ("a.parquet", b"PAR1 but nothing else", "cannot be read as Parquet ("),
        ("a.xlsx", "x", "a spreadsheet; save it as CSV"),
        ("a.doc", "x", "unknown extension; must be one of .tsv, .csv, .jsonl, .json, .parquet, .arrow, .txt"),
    ],
)
def test_damaged_files_are_refused(write, name, content, message):
    path = write(content, name)
    text = refusal(rows_of, path)
    assert text.startswith(f"{path}: {message}")
    assert ("add --quoting backslash" in text) == (b'\\"' in path.read_bytes())


def test_damaged_columns_are_refused(write):
    """Without a check, Arrow offsets beyond the text cause a segmentation fault."""
    batch = pa.record_batch([["abc", "def"]], ["text"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    content = sink.getvalue().to_pybytes()
    offsets, far = (struct.pack("<3i", 0, 3, end) for end in (6, 1 << 30))
    assert offsets in content
    path = write(content.replace(offsets, far), "a.arrow")
    assert refusal(rows_of, path).startswith(f"{path}: cannot be read as Arrow (Column 0: ")
    path = write([{"label": 1}], "a.parquet")
    path.write_bytes(path.read_bytes().replace(b"label", b"l\xeebel"))
    assert refusal(rows_of, path).startswith(f"{path}: cannot be read as Parquet")


def folder_of(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            pq.write_table(pa.Table.from_pylist(content), path)
        else:
            path.write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "rows"),
    [
        (
            {
                "part-0-x.csv": "text,n\na,1\n",
                "part-1-y.csv": "text,n\nb,2\n",
                "part-2.csv": "",
                "_SUCCESS": "",
                ".c": "",
            },
            [{"text": "a", "n": "1"}, {"text": "b", "n": "2"}],
        ),
        (
            {"label=a%20b/0.parquet": [{"text": "x"}], "label=__HIVE_DEFAULT_PARTITION__/0.parquet": [{"text": "y"}]},
            [{"text": "y", "label": None}, {"text": "x", "label": "a b"}],
        ),
        ({"day=1/label=a/x.jsonl": '{"text": "x"}\n'}, [{"text": "x", "day": "1", "label": "a"}]),
        ({"d-00000-of-00002.tsv": "text\nx\n", "d-00001-of-00002.tsv": "text\ny\n"}, [{"text": "x"}, {"text": "y"}]),
        (
            {"neg/1.txt": "so\nit\n", "pos/a.txt": "is"},
            [{"text": "so\nit", "label": "neg"}, {"text": "is", "label": "pos"}],
        ),
    ],
)
def test_folders_of_parts_are_a_table(tmp_path, files, rows):
    path = folder_of(tmp_path / "data.csv", files)
    assert rows_of(path) == [*enumerate(rows, 1)]
    names = [*rows[0]]
    assert [row["text"] for _, row in rows_of(path, ["text"])] == [row["text"] for row in rows]
    assert column_names(path) == tuple(names) and len(layout_notes(path)) == 1
    assert read_table(path, names)[0].place(0) == f"{path}: row 1"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.csv": "text\na\n", "test.csv": "text\nb\n"}, "data: a folder of files that are not parts of"),
        ({"train-0-of-1.csv": "text\na\n", "test-0-of-1.csv": "text\nb\n"}, "data: a folder of files that are not"),
        ({"part-0.csv": "text\na\n", "part-1.csv": "body\nb\n"}, "part-1.csv: has other columns than"),
        ({"part-0.csv": "text\na\n", "part-1.tsv": "text\nb\n"}, "data: a folder of files of several formats"),
        ({"part-0.csv": "text\na\n", "part-1.csv": 'text\n"b\n'}, "part-1.csv: line 2: bad quote in the record"),
        ({"text=a/0.csv": "text\na\n"}, "0.csv: the column 'text' is also in the folder's name"),
        ({"text=a/0.csv": "n\na\n", "label=b/0.csv": "n\na\n"}, "0.csv: has other columns than"),
        ({"dataset_dict.json": "{}", "train/x.arrow": "x", "dev/x.arrow": "x"}, "a DatasetDict of the splits dev, tr"),
        ({"x.pdf": "x"}, "data: a folder of files that are not parts of a table"),
        ({"a/b/x.txt": "x"}, "data: a folder without a table; pass a file that ends in .tsv, .csv, .jsonl, .json"),
    ],
)
def test_other_folders_are_refused(tmp_path, files, message):
    assert message in refusal(rows_of, folder_of(tmp_path / "data", files))


def test_missing_columns_and_invalid_options(write, tmp_path):
    refusal(rows_of, tmp_path / "none.tsv", error=FileNotFoundError)
    hint = "(if the first line is data, add --no-header and choose columns by number)"
    for content, name, quoting, message in (
        ("", "a.csv", "double", "quoting = 'double': must be one of auto, csv, backslash, none"),
        ("one\n", "a.txt", "auto", "no column 'body'; available columns: text; choose with --text"),
        ([{"0": "a"}], "a.jsonl", NO_HEADER, "--no-header applies to .tsv and .csv files only"),
        ("1,so it is\n", "a.csv", "auto", f"no column 'body'; available columns: 1, so it is {hint}; choose"),
        ("text;n\nx\n", "a.csv", Dialect("none", "pipe"), "a single column; if this is several, pass --delimiter"),
        ('"text"|"n"\nx\n', "a.tsv", Dialect("none", "pipe"), "if quotes enclose cells, add --quoting csv"),
    ):
        assert message in refusal(rows_of, write(content, name), ["body"], quoting=quoting)
    for delimiter in ("ab", '"', "\n"):
        assert "must be a character or one of comma, semicolon" in refusal(Dialect, delimiter=delimiter)


def zstd(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def random_cell(rng):
    return "".join(rng.choices("aé日,;|\t\"' \n😀", k=rng.randrange(8)))


@pytest.mark.parametrize(
    ("end", "delimiter", "encoding"),
    [("\n", "|", "utf-8"), ("\r\n", ",", "utf-8-sig"), ("\r\n", "\t", "utf-16"), ("\r", ";", "utf-32")],
)
def test_files_from_the_csv_module_need_no_options(tmp_path, delimiter, encoding, end):
    rng = random.Random(f"{delimiter} {encoding} {end}")
    rows = [[random_cell(rng).replace("\n", " " if end == "\r" else "\n") for _ in range(3)] for _ in range(50)]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator=end).writerows([("text", "a b", "c"), *rows])
    for name, packed in {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}.items():
        path = tmp_path / f"data.csv{name}"
        path.write_bytes(packed(text.getvalue().encode(encoding)))
        assert [list(row.values()) for _, row in iterate_rows(path)] == rows
        notes = " ".join(layout_notes(path))
        is_named = encoding in ("utf-16", "utf-32")
        assert ("are separated by" in notes, "read as UTF-" in notes) == (delimiter != ",", is_named)


@pytest.mark.parametrize(
    ("name", "header", "quoting", "expected"),
    [
        ("a.csv", "text;label", Dialect(), ["text", "label"]),
        ("a.csv", '"text; or so","label"', Dialect(), ["text; or so", "label"]),
        ("a.csv", '"text, or so";"label"', Dialect(), ["text, or so", "label"]),
        ("a.tsv", "text, or so\tlabel", Dialect(), ["text, or so", "label"]),
        ("a.tsv", "text,label", Dialect(), ["text", "label"]),
        ("a.csv", "a (x|y);b;c", Dialect(), ["a (x|y)", "b", "c"]),
        ("a.csv", "text", Dialect(), ["text"]),
        ("a.csv", "a,b;c", Dialect(delimiter=";"), ["a,b", "c"]),
        ("a.csv", "a,b;c", Dialect(delimiter="comma"), ["a", "b;c"]),
        ("a.csv", "a^b", Dialect(delimiter="^"), ["a", "b"]),
        ("a.csv", "a\tb,c", Dialect(delimiter="\\t"), ["a", "b,c"]),
        ("a.csv", "sep=;\r\na,b;c", Dialect(), ["a,b", "c"]),
        ("a.csv", "\n \na,b", Dialect(), ["a", "b"]),
        ("a.csv", ",text,label", Dialect(), ["", "text", "label"]),
        ("a.csv", "text;label;;;", Dialect(), ["text", "label", ""]),
        ("a.csv", " text , label", Dialect(), ["text", "label"]),
        ("a.csv", "1,so it is", NO_HEADER, ["0", "1"]),
    ],
)
def test_column_names_of_delimited_files(write, name, header, quoting, expected):
    assert column_names(write(header + "\n", name), quoting=quoting) == tuple(expected)


def test_delimiter_applies_to_all_files_of_a_task(write):
    texts = {"train": "x,1", "dev": "x,2"}
    files = {name: write(f"body,a;label\n{text};p\ny,2;n\n", f"{name}.csv") for name, text in texts.items()}
    (data,) = read_tasks("classification", files=files, columns={"text": "body,a", "delimiter": "semicolon"})
    assert [split.texts for split in (data.train, *data.dev)] == [[(text,), ("y,2",)] for text in texts.values()]
    assert data.text_columns == (("body,a",),)
    files = {name: write(f"body;label\n{text};p\ny;n\n", f"{name}.csv") for name, text in texts.items()}
    (data,) = read_tasks("classification", files=files, columns={"text": "body"})
    assert "dev.csv: the cells of the first line are separated by semicolons" in data.notes[1]


@pytest.mark.parametrize(
    "content",
    [
        [{"a": "x", "b": 1}, {"a": "y", "b": None}],
        {"version": 1, "data": [{"a": "x", "b": 1}, {"a": "y", "b": None}]},
        {"a": ["x", "y"], "b": [1, None]},
        '{"a": "x", "b": 1}\n\n{"a": "y", "b": null}\n',
    ],
)
def test_usual_shapes_of_json(write, content):
    path = write(content if isinstance(content, str) else json.dumps(content, indent=1), "data.json")
    assert rows_of(path, ["a"]) == [(1, {"a": "x", "b": 1}), (2, {"a": "y", "b": None})]


def test_bad_rows_are_reported_together_or_left_out(write):
    path = write('a,b\n1,2\n3\n4,5,6\n"7"x,8\n9,10,,\n', "data.csv")
    bad = BadRows(2)
    assert read_table(path, ["a"], bad)[1] == [{"a": "1"}, {"a": "9"}]
    message = refusal(bad.finish)
    assert message.startswith("3 bad rows: ") and all(f"line {line}: " in message for line in (3, 4, 5))
    bad.allowed = 3
    assert "3 bad rows are left out" in bad.finish()[0]
    lines = write('{"a": 1}\n[1]\n{"a"\n', "data.jsonl")
    assert read_table(lines, ["a"], BadRows(2))[0].lines == [1]
    assert refusal(column_names, write("x\ny\n", "bad.jsonl")).startswith("2 bad rows: ")
    swallowed = write('a,b\n"1,2\n3,4\n', "open.csv")  # one bad row, or the rest of the file
    assert "line 2: bad quote" in refusal(read_table, swallowed, ["a"], BadRows(9))


@pytest.mark.parametrize(
    ("content", "format", "expected"),
    [
        (b"one\n{two}\n", "", [{"text": "one"}, {"text": "{two}"}]),
        (b'\n{"a": 1}\n{"a": 2}\n', "", [{"a": 1}, {"a": 2}]),
        (b'[{"a": 1},\n{"a": 2}]', "", [{"a": 1}, {"a": 2}]),
        (b'{\n"data": [{"a": 1}]}', "", [{"a": 1}]),
        ("ä\n".encode("utf-16"), "", [{"text": "ä"}]),
        (gzip.compress(b'{"a": 1}\n', mtime=0), "", [{"a": 1}]),
        (b"a;b\n1;2\n", ".csv", [{"a": "1", "b": "2"}]),
    ],
)
def test_format_of_a_pipe_is_detected(content, format, expected):
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb") as pipe:
        thread = threading.Thread(target=lambda: (pipe.write(content), pipe.close()))
        thread.start()
        with open_table(Path(f"/dev/fd/{reading}"), format=format) as table:
            assert [row for _, row in table.rows()] == expected
        thread.join()
        assert "a pipe can be read only once" in refusal(refuse_stream, Path(f"/dev/fd/{reading}"))


def test_pipe_is_idle_after_its_last_line():
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb", 0) as pipe:
        pipe.write(b'{"a": 1}\n{"a": 2}\n{"a"')
        with open_table(Path(f"/dev/fd/{reading}")) as table:
            rows = table.rows()
            states = [(next(rows)[1]["a"], table.is_idle()) for _ in range(2)]
            pipe.write(b": 3}\n")
            assert (*states, table.is_idle(), next(rows)[1]) == ((1, False), (2, True), False, {"a": 3})


def test_units_of_times(tmp_path):
    units = {"when": pa.timestamp("ns", "UTC"), "day": pa.date32(), "clock": pa.time64("ns"), "long": pa.duration("ns")}
    pq.write_table(pa.table({name: pa.array([1001], kind) for name, kind in units.items()}), tmp_path / "a.parquet")
    ((_, row),) = rows_of(tmp_path / "a.parquet")
    times = ["1970-01-01 00:00:00.000001+00:00", "1972-09-28", "00:00:00.000001", "0:00:00.000001"]
    assert [*map(str, row.values())] == times


def test_json_lines_may_lack_unused_keys(write):
    path = write('{"a": "x", "b": 1}\n{"c": null, "b": 2}\n', "data.jsonl")
    assert column_names(path) == ("a", "b", "c")
    assert read_table(path, ("b",))[1] == [{"b": 1}, {"b": 2}]
    assert read_table(path, ("a",))[1] == [{"a": "x"}, {"a": None}]
    (_, row), (line, other) = iterate_rows(path)
    assert text_of(path, 1, row, "a") == "x"
    for column, message in {"a": "no 'a'; available columns: c, b", "b": "b = 2: must be", "c": "c = null"}.items():
        assert refusal(text_of, path, line, other, column).startswith(f"{path}: line 2: {message}")
