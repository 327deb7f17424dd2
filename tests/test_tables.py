"""Tables from .tsv, .csv, .jsonl, .parquet and .txt files: what they hold, and where they are damaged."""

import csv
import itertools
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.tables import column_names, iterate_rows, read_table, text_of

TEXTS = ["plain", "a, b", 'say "hi"', "", "naïve \u2028 text", "last"]
LABELS = ["0", "1", "1", "0", "1", "0"]


@pytest.fixture
def write(tmp_path):
    def write_file(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def message_of(call):
    """The one-line message of an InputError."""
    with pytest.raises(InputError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rows_of(path, columns=(), **options):
    return list(iterate_rows(path, columns, **options))


def write_table(path):
    """The texts and labels above, in the format of the extension."""
    rows = list(zip(TEXTS, LABELS, strict=True))
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": TEXTS, "label": LABELS, "other": [[1]] * len(TEXTS)}), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows))
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    else:
        path.write_text("".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *rows]), encoding="utf-8")
    return path


@pytest.mark.parametrize("extension", ["tsv", "csv", "jsonl", "parquet", "TSV"])
def test_every_format_holds_the_same_table(tmp_path, extension):
    path = write_table(tmp_path / f"data.{extension}")
    table = read_table(path, ("label", "text"))
    assert table.columns == {"label": LABELS, "text": TEXTS}
    first = 1 if extension in ("jsonl", "parquet") else 2
    assert table.lines == list(range(first, first + len(TEXTS)))
    assert table.place(2) == f"{path}: {'row' if extension == 'parquet' else 'line'} {first + 2}"
    assert set(column_names(path)) >= {"text", "label"}


def test_lines_of_a_text_file_are_rows(write):
    path = write("data.txt", "one\n\n two\ttabs \r\n\n")
    assert rows_of(path) == [(1, {"text": "one"}), (2, {"text": ""}), (3, {"text": " two\ttabs "}), (4, {"text": ""})]
    assert column_names(path) == ("text",)
    assert "no column 'body'; there are: text" in message_of(lambda: rows_of(path, ["body"]))


@pytest.mark.parametrize("extension", ["tsv", "csv"])
def test_byte_order_mark_crlf_and_blank_end(write, extension):
    content = "\ufefftext,label\r\nné,1\r\nb,2\r\n\r\n\n".replace(",", "\t" if extension == "tsv" else ",")
    path = write(f"data.{extension}", content)
    assert rows_of(path) == [(2, {"text": "né", "label": "1"}), (3, {"text": "b", "label": "2"})]


def test_quoted_cells_may_hold_anything(write):
    path = write("data.csv", 'text,label\n"a, ""b""\nc",1\n"",2\nd,"3"\n')
    assert [(line, *row.values()) for line, row in iterate_rows(path)] == [
        (2, 'a, "b"\nc', "1"),
        (4, "", "2"),
        (5, "d", "3"),
    ]


@pytest.mark.parametrize(
    ("name", "quoting", "text"),
    [
        ("data.tsv", "auto", '"a b"'),
        ("data.tsv", "csv", "a b"),
        ("data.csv", "auto", "a b"),
        ("data.csv", "none", '"a b"'),
    ],
)
def test_quoting_follows_the_extension_or_the_option(write, name, quoting, text):
    delimiter = "\t" if name.endswith("tsv") else ","
    path = write(name, f'text{delimiter}label\n"a b"{delimiter}1\n')
    assert rows_of(path, quoting=quoting) == [(2, {"text": text, "label": "1"})]


def test_long_cells_leave_the_field_limit_of_the_csv_module_alone(write):
    limit, text = csv.field_size_limit(), "x" * 300_000
    path = write("data.csv", "text\n" + f'"{text}"\n' * 3)
    rows = iterate_rows(path)
    assert next(rows)[1]["text"] == text
    assert csv.field_size_limit() == limit
    assert len(list(rows)) == 2


def test_blank_lines_in_one_column_are_empty_texts(write):
    assert rows_of(write("data.tsv", "text\na\n\nb\n\n")) == [(2, {"text": "a"}), (3, {"text": ""}), (4, {"text": "b"})]


@pytest.mark.parametrize(
    ("name", "content", "quoting", "message"),
    [
        ("a.tsv", "", "auto", "empty; the first line has to name the columns"),
        ("a.csv", "\ufeff", "auto", "empty; the first line"),
        ("a.tsv", "text\tlabel\n\n", "auto", "no rows"),
        ("a.txt", "", "auto", "no rows"),
        ("a.jsonl", "\n", "auto", "no rows"),
        ("a.tsv", "a\tb\ta\n1\t2\t3\n", "auto", "two columns are named 'a'; rename one"),
        ("a.tsv", "a\tb\n1\t2\n1\n", "auto", "line 3: found 1 fields, expected 2 as in the header"),
        ("a.tsv", "a\tb\n\n1\t2\n", "auto", "line 2: found 1 fields, expected 2 as in the header"),
        (
            "a.tsv",
            'a\tb\n"1\t1"\t2\n',
            "auto",
            "line 2: found 3 fields, expected 2 as in the header; if quotes enclose cells, add --quoting csv",
        ),
        (
            "a.csv",
            "a,b\n1,2,3\n",
            "auto",
            "line 2: found 3 fields, expected 2 as in the header; enclose cells that contain the delimiter in quotes",
        ),
        (
            "a.csv",
            'a,b\n1,2\n"3\n4",5\n6,"7\n8,9\n',
            "auto",
            "line 5: bad quote in the record that begins here (unexpected end of data); "
            "double the quotes within a quoted cell and close it, or add --quoting none if quotes are text",
        ),
        ("a.csv", 'a,b\n1,2\n"x"y,5\n', "auto", "line 3: bad quote in the record that begins here"),
        ("a.tsv", b"a\tb\nx\ty\nz\xff\t1\n", "auto", "line 3: not UTF-8 at byte 9; convert the file to UTF-8"),
        ("a.csv", "a,b\n1,2\n".encode("utf-16"), "auto", "line 1: not UTF-8 at byte 0; convert"),
        ("a.jsonl", '{"a": 1}\n[1]\n', "auto", "line 2: not a JSON object: [1]"),
        ("a.jsonl", '{"a": 1}\n\n{"a": 2}\n', "auto", "line 2: not a JSON object: Expecting value"),
        ("a.jsonl", '{"a": 1\n', "auto", "line 1: not a JSON object: Expecting ',' delimiter"),
        ("a.jsonl", '{"a": "\\ud800"}\n', "auto", "line 1: not a JSON object: 'utf-8' codec can't encode"),
        ("a.jsonl", "[" * 100_000, "auto", "line 1: not a JSON object: maximum recursion depth"),
        ("a.parquet", b"PAR1 but nothing else", "auto", "cannot be read as Parquet ("),
        ("a.xlsx", "x", "auto", "unknown extension; it can be .tsv, .csv, .jsonl, .parquet, .txt"),
    ],
)
def test_damage_is_named_in_one_line(write, name, content, quoting, message):
    path = write(name, content)
    assert message_of(lambda: rows_of(path, quoting=quoting)).startswith(f"{path}: {message}")


def test_a_folder_and_a_missing_file(tmp_path):
    assert message_of(lambda: rows_of(tmp_path)) == (
        f"{tmp_path}: a folder; give a file that ends in .tsv, .csv, .jsonl, .parquet, .txt"
    )
    with pytest.raises(FileNotFoundError, match=r"none\.tsv: no such file$"):
        rows_of(tmp_path / "none.tsv")
    assert "quoting is 'double'" in message_of(lambda: rows_of(tmp_path / "none.tsv", quoting="double"))


@pytest.mark.parametrize("name", ["data.tsv", "data.csv", "data.parquet"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, name):
    path = write_table(tmp_path / name)
    there = "text, label, other" if name.endswith("parquet") else "text, label"
    message = f"{path}: no column 'body'; there are: {there}; choose with --label"
    assert message_of(lambda: rows_of(path, ["body"], flag="--label")) == message


@pytest.mark.parametrize(
    ("name", "header", "hint"),
    [
        ("a.csv", "text;label", "a single column: commas separate the cells of a .csv file, tabs those of a .tsv file"),
        ("a.tsv", "text,label", "a single column: commas separate the cells of a .csv file, tabs those of a .tsv file"),
        ("a.tsv", '"text"\t"label"', "if quotes enclose cells, add --quoting csv"),
    ],
)
def test_a_missing_column_may_be_due_to_the_delimiter(write, name, header, hint):
    path = write(name, f"{header}\nx\n")
    there = ", ".join(header.split("\t"))
    expected = f"{path}: no column 'text'; there are: {there} ({hint}); choose with --text"
    assert message_of(lambda: rows_of(path, ["text"])) == expected


def test_a_json_line_may_lack_what_is_not_used(write):
    path = write("data.jsonl", '{"a": "x", "b": 1}\n{"c": null, "b": 2}\n')
    assert column_names(path) == ("a", "b", "c")
    assert read_table(path, ("b",)).columns == {"b": [1, 2]}
    assert read_table(path, ("a",)).columns == {"a": ["x", None]}
    (_, row), (line, other) = iterate_rows(path)
    assert text_of(path, 1, row, "a") == "x"
    for column, message in {
        "a": "no 'a'; there are: c, b; choose with --text",
        "b": "'b' is 2, not text",
        "c": "'c' is null, not text",
    }.items():
        assert message_of(lambda c=column: text_of(path, line, other, c)) == f"{path}: line 2: {message}"


def test_rows_come_before_the_damage_behind_them(write):
    path = write("data.tsv", "a\tb\n" + "1\t2\n" * 3 + "broken\n")
    assert len(list(itertools.islice(iterate_rows(path), 3))) == 3


def test_a_cut_parquet_file_is_an_error(tmp_path):
    path = write_table(tmp_path / "data.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    assert "cannot be read as Parquet" in message_of(lambda: column_names(path))
