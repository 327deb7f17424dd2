"""Inputs of `prepare` other than plain text: saved datasets, Arrow string types, rows and documents from Python."""

import gzip
import io
import json
import random
import re
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.feather import write_feather

import electra_fast as ef
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.prepare import prepare

TEXTS = [f"w{n} w{n + 1}\nw{n + 2}" for n in range(90)]


def texts_of(folder):
    corpus = Corpus(folder)
    return [Tokenizer.of(corpus).decode(ids) for ids in corpus]


def write_stream(path, table, rows=32, open_writer=pa.ipc.new_stream):
    with path.open("wb") as file, open_writer(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def save(folder, texts, num_files=2):
    """A dataset as saved by `datasets`: one stream per file, and two metadata files."""
    folder.mkdir(parents=True)
    names = [f"data-{index:05}-of-{num_files:05}.arrow" for index in range(num_files)]
    size = -(-len(texts) // num_files)
    for index, name in enumerate(names):
        part = texts[index * size : (index + 1) * size]
        write_stream(folder / name, pa.table({"label": list(range(len(part))), "text": pa.array(part, pa.string())}))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "1", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}}))
    return folder


def save_splits(folder, **splits):
    for name, texts in splits.items():
        save(folder / name, texts)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return folder


def test_saved_dataset_is_read_by_its_list_of_files(vocab, tmp_path, capfd):
    saved = save(tmp_path / "saved", TEXTS)
    write_stream(saved / "cache-1234.arrow", pa.table({"text": ["w99"] * 9999}))
    report = prepare([saved], vocab=vocab, out=tmp_path / "out")
    prepare(iter(TEXTS), vocab=vocab, out=tmp_path / "plain", progress=False)
    assert report.content_hash == Corpus(tmp_path / "plain").content_hash
    assert (report.num_files, report.skipped_files, report.skipped_splits) == (2, 1, ())
    said = capfd.readouterr().err
    assert "skipped 1 files with unknown extensions" in said and "bytes" not in said


def test_saved_dataset_without_a_file_or_train_split_is_refused(vocab, tmp_path):
    saved = save(tmp_path / "in/saved", TEXTS)
    (saved / "data-00001-of-00002.arrow").unlink()
    splits = save_splits(tmp_path / "splits", a=["w1"], b=["w2"])
    broken = save(tmp_path / "broken", TEXTS)
    indexed = save(tmp_path / "indexed", TEXTS)
    (broken / "state.json").write_text('{"_data_files": 3}')
    (indexed / "state.json").write_text('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}')
    lost = r"state\.json: lists .*data-00001-of-00002\.arrow, which is missing"
    for folder, message in (
        (saved, lost),
        (saved.parent, lost),
        (broken, r"state\.json: not written by `save_to_disk` .*; download the whole folder again"),
        (indexed, r"state\.json: the dataset selects rows by an index; .*flatten_indices"),
        (splits, r"dataset_dict\.json: no split train; pass one of a, b as"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare([folder], vocab=vocab, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_only_train_split_of_a_saved_dataset_is_read(vocab, tmp_path, capfd):
    saved = save_splits(tmp_path / "saved", test=["w1"], train=["w2", "w3"], validation=["w4"])
    report = prepare([saved], vocab=vocab, out=tmp_path / "train")
    assert texts_of(tmp_path / "train") == ["w2", "w3"]
    assert report.skipped_splits == ("test", "validation")
    only = save_splits(tmp_path / "only", all=TEXTS)
    assert prepare(only, vocab=vocab, out=tmp_path / "all", progress=False).num_documents == len(TEXTS)
    assert (
        "only split train of saved datasets was read, not test, validation; pass their folders"
        in capfd.readouterr().err
    )
    prepare([saved / "test", saved / "validation"], vocab=vocab, out=tmp_path / "others", progress=False)
    assert texts_of(tmp_path / "others") == ["w1", "w4"]


def json_lines(texts):
    return "".join(json.dumps({"id": float("nan"), "text": text}) + "\n" for text in texts).encode()


def feather(texts):
    sink = io.BytesIO()
    write_feather(pa.table({"text": texts}), sink, compression="lz4")
    return sink.getvalue()


def long_window(data):
    """A zstd frame with a window of 2 GiB and one uncompressed block."""
    return b"\x28\xb5\x2f\xfd\0\xa8" + (len(data) << 3 | 1).to_bytes(3, "little") + data


FOLDERS = {
    "c4": {
        "README.txt": b"w0\n",
        "c4-train.00000-of-00002.json.gz": gzip.compress(json_lines(TEXTS[:40])),
        "c4-train.00001-of-00002.json.gz": gzip.compress(json_lines(TEXTS[40:])),
        "dataset_infos.json": b'{"default": {"features": {"text": {"dtype": "string"}}}}',
    },
    "spark": {
        "_SUCCESS": b"",
        "._SUCCESS.crc": b"crc",
        "label=0/part-00000-a.c000.json": json_lines(TEXTS[:40]),
        "label=0/.part-00000-a.c000.json.crc": b"crc",
        "label=1/part-00000-a.c000.json": json_lines(TEXTS[40:]),
        "_delta_log/00000.json": b'{"commitInfo": {}}\n{"add": {}}\n',
    },
    "others": {
        "a.ndjson": json_lines(TEXTS[:20]),
        "b.feather": feather(TEXTS[20:40]),
        "c.json": json.dumps([{"text": text, "n": 10**400} for text in TEXTS[40:60]], indent=1).encode(),
        "d.json": b"".join(json.dumps({"text": text}, indent=1).encode() for text in TEXTS[60:80]),
        "e.txt.zst": long_window("\n\n".join(TEXTS[80:]).encode()),
    },
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_of_another_tool_is_read_completely(vocab, tmp_path, capfd, name):
    for path, content in FOLDERS[name].items():
        path = tmp_path / "in" / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    report = prepare(tmp_path / "in", vocab=vocab, out=tmp_path / "out")
    readme = ["w0"] if name == "c4" else []
    prepare(iter(readme + TEXTS), vocab=vocab, out=tmp_path / "plain", progress=False)
    assert report.content_hash == Corpus(tmp_path / "plain").content_hash
    assert report.skipped_files == (name == "c4") and "warning" not in capfd.readouterr().err


def test_mostly_skipped_folder_is_a_warning(vocab, tmp_path, capfd):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "README.txt").write_text("w1 w2\n")
    (folder / "reviews.csv.gz").write_bytes(gzip.compress(json_lines(TEXTS)))
    prepare(folder, vocab=vocab, out=tmp_path / "out")
    ef.vocab(folder, out=tmp_path / "v/vocab.txt", size=100, min_frequency=1)
    said = capfd.readouterr().err
    assert len(re.findall(r"warning: \d\d% of the input's bytes are in 1 skipped files .* \(\.csv\.gz\)", said)) == 2
    with pytest.raises(ValueError, match=r"line 1: no text field \"text\"; available: review.body, review.title"):
        (folder / "b.json").write_text(json.dumps({"review": {"body": "w1", "title": "w2"}}) + "\n")
        prepare(folder / "b.json", vocab=vocab, out=tmp_path / "none", progress=False)
    with pytest.raises(ValueError, match=r"No files matched .*\(found 1 of other kinds or \.json without the text"):
        prepare(str(folder / "*.json"), vocab=vocab, out=tmp_path / "none", text="title", progress=False)


NESTED = [{"review": {"body": text, "by": {"name": "w1"}}, "n": 1} for text in TEXTS] + [{"review": None, "n": 2}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow", "a.feather", "memory"])
def test_dots_lead_into_objects_and_structs(vocab, tmp_path, name):
    path = tmp_path / name
    table = pa.Table.from_pylist(NESTED)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix in (".arrow", ".feather"):
        write_stream(path, table, open_writer=pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file)
    else:
        path.write_text(json.dumps(NESTED) if path.suffix == ".json" else "\n".join(map(json.dumps, NESTED)))
    options = {"vocab": vocab, "progress": False}
    inputs = NESTED if name == "memory" else path
    report = prepare(inputs, out=tmp_path / "out", text="review.by.name, review.body", **options)
    prepare((f"w1\n{text}" for text in TEXTS), out=tmp_path / "plain", **options)
    assert report.content_hash == Corpus(tmp_path / "plain").content_hash and report.empty_documents == 1
    error = "document 0: no field" if name == "memory" else "available: (n, )?review.body, review.by"
    with pytest.raises(ValueError, match=error):
        prepare(inputs, out=tmp_path / "none", text="review.text", **options)


NUMBERS = "0 -1.5 1e999 -1E+400 NaN Infinity -Infinity 01 1. .5 +1 -NaN 1NaN nan --1 1e true null tru".split()
NUMBERS.append("9" * 400)
STRINGS = ["w1 ", "NaN", "é", "\ufffd", "\x7f", "\u2028", r"\n", r"\"", r"\\", r"\u00e9", r"\q", r"\u12"]
SURROGATES = [r"\ud83d", r"\uDE00", r"\ud83d\ude00"]


def random_json(rng, depth=0):
    """Mostly JSON, with values that only Python's `json` accepts, and invalid ones."""

    def text():
        pieces = rng.choices(STRINGS + 2 * SURROGATES, [9] * 10 + [1] * 2 + [4] * 6, k=rng.randint(0, 3))
        return '"' + "".join(pieces) + '"'

    kind = rng.randint(0, 9)
    if kind < 2 and depth:
        return rng.choice(NUMBERS[:7] * 8 + NUMBERS)
    if kind < 7 and depth:
        return text()
    blank = rng.choice(["", " ", "\t"])
    if kind == 7 and depth < 3 and depth:
        return "[" + f"{blank},".join(random_json(rng, depth + 1) for _ in range(rng.randint(0, 2))) + "]"
    names = ['"text"', r'"\u0074ext"', '"a"', '"a.b"', '"b"', text()]
    keys = rng.choices(names, [6, 1, 3, 1, 3, 1], k=rng.randint(0, 4))
    return "{" + ",".join(f"{key}{blank}:{random_json(rng, depth + (depth < 3 or 1))}" for key in keys) + "}"


def python_text(line, field, replaced):
    """The text of a record according to Python's `json`, or None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    for key in [field] if isinstance(record, dict) and field in record else field.split("."):
        if record is None:
            return ""
        if not isinstance(record, dict) or key not in record:
            return None
        record = record[key]
    text = "" if record is None else record
    if not isinstance(text, str):
        return None
    replacement = re.sub("[\ud800-\udfff]", "\ufffd", text)
    return replacement if replaced or replacement == text else None


@pytest.mark.slow
@pytest.mark.parametrize("field", ["text", "a.b"])
@pytest.mark.parametrize("invalid_utf8", ["error", "replace"])
def test_json_is_read_like_python(vocab, tmp_path, field, invalid_utf8):
    rng = random.Random(field + invalid_utf8)
    lines = [random_json(rng) for _ in range(5_000)]
    texts = [python_text(line, field, invalid_utf8 == "replace") for line in lines]
    good = [line for line, text in zip(lines, texts, strict=True) if text is not None]
    options = {"vocab": vocab, "progress": False}
    reading = options | {"text": field, "invalid_utf8": invalid_utf8}
    prepare((text for text in texts if text), out=tmp_path / "plain", **options)
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    report = prepare(tmp_path / "a.jsonl", out=tmp_path / "lines", skip_bad_rows=5_000, **reading)
    listed = (tmp_path / "lines/skipped.jsonl").read_bytes().splitlines()
    skipped = [json.loads(record)["line"] for record in listed]
    assert skipped == [number for number, text in enumerate(texts, 1) if text is None] and 500 < len(skipped) < 4_900
    assert report.content_hash == Corpus(tmp_path / "plain").content_hash
    (tmp_path / "a.json").write_text("[" + ",\n".join(good) + "]", encoding="utf-8")
    for name, inputs in {"list": tmp_path / "a.json", "memory": map(json.loads, good)}.items():
        report = prepare(inputs, out=tmp_path / name, **reading)
        assert report.content_hash == Corpus(tmp_path / "plain").content_hash


def test_columns_are_joined_with_line_ends_and_nulls_are_counted(vocab, tmp_path):
    titles = ["w1", None, "w2", None]
    bodies = ["w3 w4", "w5", None, None]
    table = pa.table({"body": pa.array(bodies, pa.string_view()), "n": [1, 2, 3, 4], "title": titles})
    write_stream(tmp_path / "a.arrow", table)
    options = {"vocab": vocab, "progress": False}
    report = prepare([tmp_path / "a.arrow"], out=tmp_path / "out", text="title,body", **options)
    assert (report.num_documents, report.empty_documents) == (3, 1)
    prepare(iter(["w1\nw3 w4", "w5", "w2"]), out=tmp_path / "plain", **options)
    assert report.content_hash == Corpus(tmp_path / "plain").content_hash
    dictionary = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0], pa.int32()), pa.array(["w1", None]))
    nothing = pa.DictionaryArray.from_arrays(pa.array([None, None], pa.int32()), pa.array([], pa.string()))
    for name, array in {"b": dictionary, "c": nothing}.items():
        write_stream(tmp_path / f"{name}.arrow", pa.table({"text": array}))
    report = prepare([tmp_path / "b.arrow", tmp_path / "c.arrow"], out=tmp_path / "nulls", **options)
    assert (report.num_documents, report.empty_documents) == (2, 4)


def test_long_dictionary_batch_takes_linear_time(vocab, tmp_path):
    """Quadratic work would take minutes."""
    array = pa.array(["w1", "w2"] * 150_000).dictionary_encode()
    write_stream(tmp_path / "a.arrow", pa.table({"text": array}), rows=len(array))
    report = prepare([tmp_path / "a.arrow"], vocab=vocab, out=tmp_path / "out", progress=False)
    assert report.num_documents == 300_000


@pytest.mark.parametrize("open_writer", [pa.ipc.new_stream, pytest.param(pa.ipc.new_file, marks=pytest.mark.slow)])
def test_truncated_arrow_file_loses_no_row_silently(vocab, tmp_path, open_writer):
    whole = tmp_path / "whole.arrow"
    cut = tmp_path / "cut.arrow"
    write_stream(whole, pa.table({"text": TEXTS[:6]}), rows=2, open_writer=open_writer)
    data = whole.read_bytes()
    complete = data.rindex(b"\xff\xff\xff\xff\0\0\0\0") + 8  # the end marker is followed by the file's index
    for length in range(0, complete, 8):
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.arrow: cannot be read as Arrow .*download the file again"):
            prepare([cut], vocab=vocab, out=tmp_path / "out", progress=False)
    cut.write_bytes(data[:complete])
    assert prepare([cut], vocab=vocab, out=tmp_path / "out", progress=False).num_documents == 6


@pytest.mark.parametrize("is_dictionary", [False, True])
@pytest.mark.parametrize(("codec", "open_writer"), [("lz4", pa.ipc.new_stream), ("zstd", pa.ipc.new_file)])
def test_compressed_batch_cannot_fill_the_memory(vocab, tmp_path, codec, open_writer, is_dictionary):
    """Each buffer begins with its decompressed length, which is trusted up to a bound."""
    array = pa.array(["w1 w2 " * 500])
    array = array.dictionary_encode() if is_dictionary else array
    table = pa.table({"text": array})
    path = tmp_path / "a.arrow"
    with open_writer(path, table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
        writer.write_table(table)
    assert prepare([path], vocab=vocab, out=tmp_path / "out", progress=False).num_documents == 1
    sound = path.read_bytes()
    for length, message in ((2**30 + 3000, "a compressed batch of .* decompresses to 107374"), (3001, "length")):
        path.write_bytes(sound.replace((3000).to_bytes(8, "little"), length.to_bytes(8, "little")))
        assert path.read_bytes() != sound
        with pytest.raises(ValueError, match=rf"a\.arrow: cannot be read as Arrow .*{message}"):
            prepare([path], vocab=vocab, out=tmp_path / "out2", progress=False)


PEAK = r"""
import re, sys
sys.path[:0] = sys.argv[4].split(":")
from electra_fast import _data
report = _data.prepare(_data.Tokenizer(sys.argv[2]), sys.argv[3], files=[sys.argv[1]], text_fields=["text"], threads=1)
print(report["num_documents"], int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) >> 10)
"""


@pytest.mark.process
@pytest.mark.parametrize("use_dictionary", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_rows_of_a_parquet_file(vocab, tmp_path, use_dictionary):
    """With a dictionary, a file of about 100 bytes has 150 rows of 1 MB."""
    table = pa.table({"text": ["w1 w2" + " " * 1_000_000] * 150})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=use_dictionary, write_batch_size=1)
    command = [sys.executable, "-c", PEAK, tmp_path / "a.parquet", vocab, tmp_path / "out", ":".join(sys.path)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    documents, peak = map(int, output.split())
    assert documents == 150 and peak < 130


class Rows:
    """Like a `datasets.Dataset`: neither a list nor a mapping; iterates over rows."""

    def __init__(self, *rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Frame(Rows):
    """Like a data frame: iterates over column names."""

    ndim = 2


def test_rows_of_a_dataset_are_read(vocab, tmp_path):
    dataset = Rows({"text": "w1", "title": "w2"}, {"text": None, "title": "w3"}, {"text": "w4\nw5", "title": "w6"})
    for name, rows in (("dataset", dataset), ("list", list(dataset))):
        prepare(rows, vocab=vocab, out=tmp_path / name, text="title,text", progress=False)
        assert texts_of(tmp_path / name) == ["w2 w1", "w3", "w6 w4 w5"]
    (tmp_path / "vocab.txt").touch()
    with pytest.raises(ValueError, match="vocab.txt: exists, and it would be read together with the tokenizer.json"):
        ef.vocab(dataset, out=tmp_path / "words.txt", size=60, min_frequency=1, progress=False)
    ef.vocab(dataset, out=tmp_path / "words" / "words.txt", size=60, min_frequency=1, progress=False)
    assert "w1" in (tmp_path / "words" / "words.txt").read_text().split()


def test_list_has_paths_unless_a_string_cannot_be_a_path(vocab, tmp_path):
    (tmp_path / "a.txt").write_text("w1")
    longest = "w2 " * 1366
    for number, inputs in enumerate([["w1", "w2\nw3"], ("w1", longest), "w1\nw2"]):
        prepare(inputs, vocab=vocab, out=tmp_path / str(number), progress=False)
    assert [len(Corpus(tmp_path / str(number))) for number in range(3)] == [2, 2, 1]
    for inputs in (["w1 w2", "w3"], [str(tmp_path / "a.txt"), "w3"], "w3"):
        with pytest.raises(FileNotFoundError, match=r"^w\d.*: not found; to pass documents .* add kind='documents'$"):
            prepare(inputs, vocab=vocab, out=tmp_path / "none", progress=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ({"train": [], "test": []}, "auto", r"^inputs is a dict of train, test; pass one .*inputs\['train'\]$"),
        (Frame("text", "label"), "auto", r"^inputs is a Frame of text, label; pass one of them"),
        ({"train": []}, "documents", r"^inputs is a dict of train; pass one"),
        (None, "auto", r"^inputs = None \(NoneType\): must be a path"),
        (iter(["w1", 5]), "auto", r"^document 1 = 5 \(int\): must be a str$"),
        (["w1\n", None], "auto", r"^document 1 = None \(NoneType\): must be a str$"),
        (["a.txt", 5], "auto", r"^inputs\[1\] = 5 \(int\): must be a path; for text, pass kind='documents'$"),
        (iter([{"text": ["w2"]}]), "auto", r"^document 0: field 'text' = \['w2'\] \(list\): must be a str$"),
    ],
)
def test_other_types_than_text_are_reported(vocab, tmp_path, inputs, kind, message):
    with pytest.raises(TypeError, match=message):
        prepare(inputs, vocab=vocab, out=tmp_path / "out", kind=kind, progress=False)
    assert not (tmp_path / "out/manifest.json").exists()


def test_row_with_unusable_text_is_reported(vocab, tmp_path):
    half = r"^document 1: unpaired surrogate; .* with invalid_utf8='replace'$"
    for inputs, message in (
        (Rows({"body": "w1", "id": 1}), r"^document 0: no field 'text'; available: body, id; choose one with text$"),
        (Rows({"text": "w1"}, {"text": "w2\ud83d"}), half),
        (iter(["w1", "\ude00\ud83d"]), half),
    ):
        with pytest.raises(ValueError, match=message):
            prepare(inputs, vocab=vocab, out=tmp_path / "out", progress=False)
