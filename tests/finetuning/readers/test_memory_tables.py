"""A Dataset, data frames, Arrow tables and lists of dicts are read like a file of their rows."""

import numpy as np
import pandas
import pyarrow as pa
import pytest
from task_reading import refused
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.task_data import read_tasks

NAMES = ["never", "zero", "many"]
TAGS = ["O", "B-X", "I-X"]
CONTEXT = "the answer is forty two and nothing else"
TASKS = ["classification", "multi-label", "regression", "tagging", "question-answering"]


def rows_of(task, count=24):
    for number, (text, label) in enumerate(sentences(count)):
        words = text.split()
        answers = {"text": ["forty two"][: number % 5], "answer_start": [14][: number % 5]}
        yield {
            "classification": {"text": text, "label": 1 + label},
            "multi-label": {"text": text, "labels": [[1], [1, 2], [], [0]][number % 4]},
            "regression": {"text": text, "score": len(text) / 7},
            "tagging": {"tokens": words, "ner_tags": [1, 2] + [0] * (len(words) - 2)},
            "question-answering": {"question": text, "context": f"{CONTEXT} {number % 6}", "answers": answers},
        }[task]


def features_of(task, datasets):
    text = datasets.Value("string")
    number = datasets.Value("float64")
    label = datasets.ClassLabel(names=NAMES)
    tag = datasets.ClassLabel(names=TAGS)
    return {
        "classification": {"text": text, "label": label},
        "multi-label": {"text": text, "labels": datasets.List(label)},
        "regression": {"text": text, "score": number},
        "tagging": {"tokens": datasets.List(text), "ner_tags": datasets.List(tag)},
    }.get(task)


def named(value, names):
    return [named(item, names) for item in value] if isinstance(value, list) else names[value]


def read(task, data, **options):
    reader = "classification" if task == "multi-label" else task
    return read_tasks(reader, files={"train": data}, columns=options)[0]


def assert_same(data, expected):
    assert data.task == expected.task and data.text_columns == expected.text_columns
    for split, expected_split in ((data.train, expected.train), (data.dev[0], expected.dev[0])):
        assert split.texts == expected_split.texts and split.ids == expected_split.ids
        for target, expected_target in zip(split.targets, expected_split.targets, strict=True):
            np.testing.assert_array_equal(np.array(target), np.array(expected_target))


class Frame:
    """Has the interface of a polars frame: Arrow's, with texts as views."""

    def __init__(self, table):
        view = pa.string_view()
        views = [pa.field(field.name, view) if field.type == pa.string() else field for field in table.schema]
        self.table = table.cast(pa.schema(views))
        self.columns = table.column_names

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("task", TASKS)
def test_table_in_memory_is_read_like_a_file(task, write):
    rows = [*rows_of(task)]
    if task == "tagging":  # only a Dataset and its files have class names for integers
        rows = [row | {"ner_tags": named(row["ner_tags"], TAGS)} for row in rows]
    expected = read(task, write(rows, "rows.parquet"))
    frame = pandas.DataFrame(rows, index=np.arange(len(rows)) * 2)
    table = pa.table({"unused": [1] * (len(rows) + 1)} | {name: [None, *frame[name]] for name in frame}).slice(1)
    tuples = [{name: tuple(cell) if isinstance(cell, list) else cell for name, cell in row.items()} for row in rows]
    for data in (frame, table, Frame(table), tuples):
        assert_same(read(task, MemoryTable.of("train", data)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_dataset_is_read_like_its_files(task, tmp_path):
    import datasets

    features = features_of(task, datasets)
    whole = datasets.Dataset.from_list([*rows_of(task)], features=features and datasets.Features(features))
    dataset = whole.shuffle(seed=1).select(range(2, 22)).filter(lambda row: row != whole[0])
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    expected = read(task, tmp_path / "rows.parquet")
    if task == "classification":
        assert expected.task.labels == ("zero", "many")  # in the order of their numbers, without the absent one
    assert_same(read(task, MemoryTable.of("train", dataset)), expected)
    assert_same(read(task, tmp_path / "saved"), expected)
    if task in ("classification", "multi-label", "tagging"):
        column = list(dataset.features)[-1]
        names = TAGS if task == "tagging" else NAMES
        rows = [row | {column: named(row[column], names)} for row in dataset.to_list()]
        labels = {} if task == "tagging" else {"labels": tuple(expected.task.labels)}
        assert_same(read(task, MemoryTable.of("train", rows), **labels), expected)


@pytest.mark.slow
def test_dataset_without_a_table_is_refused():
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["a"]})
    for data, message in (
        (datasets.DatasetDict(), "train: DatasetDict is not a table"),
        (rows.to_iterable_dataset(), "IterableDataset is not a table in memory"),
        (rows.with_transform(dict), "a Dataset with a transform"),
    ):
        with refused(message):
            read("classification", MemoryTable.of("train", data))


def test_finetune_and_predict_with_a_frame(encoder_folder, tmp_path):
    frame = pandas.DataFrame(sentences(40), columns=["body", "label"])
    out = tmp_path / "out"
    options = {"text": "body", "model": encoder_folder, "overrides": QUICK, "dev": frame[:8]}
    first = ef.finetune(task="classification", train=frame, out=out, **options)
    again = ef.finetune(task="classification", train=frame.to_dict("records"), test=frame[:3], out=out, **options)
    assert again["classification"]["runs"][0]["accuracy"] == first["classification"]["runs"][0]["accuracy"]
    assert first["classification"]["runs"][0]["warning"].startswith("dev: the texts of all 8 validation")
    model = ef.load(out / "classification/seed-0/model", precision="fp32")
    expected = model.predict(frame["body"])
    for examples in (frame, pa.table(frame[["body"]]), frame.to_dict("records")):
        assert model.predict(examples) == expected
    renamed = frame.rename(columns={"body": "other"})
    np.testing.assert_array_equal(model.outputs(renamed, text="other"), model.outputs(frame))
    assert model.predict(frame[:0]) == []
    for examples, message in (
        (renamed, "examples: no text column 'body', as in training; available columns: other, label; choose"),
        ([{"body": "a"}, {"body": 3}], "examples: row 2: body = 3: must be text"),
        ([{"body": "a"}, {"body": "\ud83d"}], "examples: row 2: unpaired surrogate, which is not text"),
        (["a", "b \ud83d"], "example 1: unpaired surrogate, which is not text"),
    ):
        with refused(message):
            model.predict(examples)
    with refused("not rows of a table"):
        model.predict(["a text"], text="body")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pandas.DataFrame({"text": ["a", 1], "label": ["x", "y"]}), "train: row 2: text = 1: must be text"),
        (lambda: pandas.DataFrame([["a", 1, 2]], columns=["text", "n", "n"]), "two columns are named 'n'"),
        (lambda: pandas.DataFrame([["a", 1, 2]], columns=["text", 3, "3"]), "two columns are named '3'"),
        (lambda: pandas.DataFrame({"text": pandas.Series(["a \udc00"], dtype=object)}), r"'a \udc00' has an unpaired"),
        (list, "train: no rows"),
        (lambda: [{"text": "a", "label": 1}, 3], "train: row 2: not a JSON object: 3"),
        (lambda: [{"text": "a"}], "train: no label column; available columns: text; choose with --label"),
    ],
)
def test_data_without_a_table_is_refused(make, message, encoder_folder, tmp_path):
    with refused(message):
        ef.finetune(encoder_folder, task="classification", train=make(), out=tmp_path / "out")


def test_spans_in_a_frame():
    rows = [{"text": "Ann met Bob", "spans": [[0, 3, "X"]], "n": None}, {"text": "so it is", "spans": [], "n": 1.0}]
    table = MemoryTable.of("train", pandas.DataFrame(rows))
    (data,) = read_tasks("tagging", files={"train": table, "dev": table})
    assert [target.tolist() for target in data.train.targets] == [[1, 0, 0], [0, 0, 0]]
    assert data.train.columns == [{"n": None}, {"n": 1.0}]


def test_table_in_memory_is_not_opened_as_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    table = MemoryTable.of("train", [{"text": f"a {number}", "label": "bd"[number % 2]} for number in range(8)])
    assert len(read("classification", table).train.texts) == 6
    with pytest.raises(TypeError):
        open(table)
