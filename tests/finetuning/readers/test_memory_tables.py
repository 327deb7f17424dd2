"""A Dataset, data frames, Arrow tables and lists of dicts hold the same examples as a file of their rows."""

import numpy as np
import pyarrow as pa
import pytest
from tiny_task import QUICK, sentences

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning.readers.memory_table import MemoryTable
from electra_fast.finetuning.task_data import read_tasks

NAMES = ["never", "zero", "many"]
TAGS = ["O", "B-X", "I-X"]
CONTEXT = "the answer is forty two and nothing else"


def rows_of(task, count=24):
    for number, (text, label) in enumerate(sentences(count)):
        words = text.split()
        yield {
            "classification": {"text": text, "label": 1 + label},
            "multi-label": {"text": text, "labels": [[1], [1, 2], [], [0]][number % 4]},
            "regression": {"text": text, "score": len(text) / 7},
            "tagging": {"tokens": words, "ner_tags": [1, 2] + [0] * (len(words) - 2)},
            "question-answering": {
                "question": text,
                "context": f"{CONTEXT} {number % 6}",
                "answers": {"text": ["forty two"][: number % 5], "answer_start": [14][: number % 5]},
            },
        }[task]


@pytest.fixture(scope="module")
def datasets():
    import datasets  # takes long, and every worker collects these tests

    return datasets


@pytest.fixture(scope="module")
def pandas():
    import pandas

    return pandas


def features_of(task, datasets):
    text, number = datasets.Value("string"), datasets.Value("float64")
    label, tag = datasets.ClassLabel(names=NAMES), datasets.ClassLabel(names=TAGS)
    return {
        "classification": {"text": text, "label": label},
        "multi-label": {"text": text, "labels": datasets.List(label)},
        "regression": {"text": text, "score": number},
        "tagging": {"tokens": datasets.List(text), "ner_tags": datasets.List(tag)},
    }.get(task)


def named(value, names):
    return [named(each, names) for each in value] if isinstance(value, list) else names[value]


def assert_same(found, expected):
    assert found.task == expected.task and found.text_columns == expected.text_columns
    for name in ("train", "dev"):
        mine, theirs = (data.train if name == "train" else data.dev[0] for data in (found, expected))
        assert mine.texts == theirs.texts and mine.ids == theirs.ids
        assert [np.array(each).tolist() for each in mine.targets] == [
            np.array(each).tolist() for each in theirs.targets
        ]


class Frame:
    """What a polars frame offers: Arrow's interface, with texts as views."""

    def __init__(self, table):
        views = [pa.field(each.name, pa.string_view()) if each.type == pa.string() else each for each in table.schema]
        self.table, self.columns = table.cast(pa.schema(views)), table.column_names

    def __arrow_c_stream__(self, requested_schema=None):
        return self.table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("task", ["classification", "multi-label", "regression", "tagging", "question-answering"])
def test_tables_in_memory_are_read_as_a_file_of_their_rows(task, datasets, pandas, tmp_path):
    features = features_of(task, datasets)
    whole = datasets.Dataset.from_list([*rows_of(task)], features=features and datasets.Features(features))
    dataset = whole.shuffle(seed=1).select(range(2, 22)).filter(lambda row: row != whole[0])
    dataset.to_parquet(tmp_path / "rows.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    reader = {"multi-label": "classification"}.get(task, task)
    expected = read_tasks(reader, None, {"train": tmp_path / "rows.parquet"}, {})
    if task == "classification":
        assert expected[0].task.labels == ("zero", "many")  # in the order of their numbers, without one that is absent
    column, names = list(dataset.features)[-1], {"tagging": TAGS}.get(task, NAMES)
    rows = dataset.to_list()
    if task in ("classification", "multi-label", "tagging"):
        rows = [row | {column: named(row[column], names)} for row in rows]
    more = {"labels": tuple(expected[0].task.labels)} if task in ("classification", "multi-label") else {}
    frame = pandas.DataFrame(rows, index=np.arange(len(rows)) * 2)
    table = pa.table({"unused": [1] * (len(rows) + 1)} | {name: [None] * 1 + list(frame[name]) for name in frame})
    for data, options in (
        (dataset, {}),
        (frame, more),
        (table.slice(1), more),
        (Frame(table.slice(1)), more),
        ([{name: tuple(each) if isinstance(each, list) else each for name, each in row.items()} for row in rows], more),
    ):
        found = read_tasks(reader, None, {"train": MemoryTable.of("train", data)}, options)
        assert_same(found[0], expected[0])
    assert_same(read_tasks(reader, None, {"train": tmp_path / "saved"}, {})[0], expected[0])


def test_a_frame_is_trained_on_resumed_and_predicted(datasets, pandas, encoder_folder, tmp_path):
    frame = pandas.DataFrame(sentences(40), columns=["body", "label"])
    out, options = tmp_path / "out", {"text": "body", "model": encoder_folder, "overrides": QUICK, "dev": frame[:8]}
    first = ef.finetune("classification", train=frame, out=out, **options)
    again = ef.finetune("classification", train=frame.to_dict("records"), test=frame[:3], out=out, **options)
    assert again["classification"]["runs"][0]["accuracy"] == first["classification"]["runs"][0]["accuracy"]
    assert first["classification"]["runs"][0]["warning"].startswith("dev: all 8 dev examples have a text that is in")
    model = ef.load_finetuned(out / "classification/seed-0/model", precision="fp32")
    expected = model.predict(frame["body"])
    for examples in (frame, pa.table(frame[["body"]]), datasets.Dataset.from_pandas(frame), frame.to_dict("records")):
        assert model.predict(examples) == expected
    renamed = frame.rename(columns={"body": "other"})
    np.testing.assert_array_equal(model.outputs(renamed, text="other"), model.outputs(frame))
    assert model.predict(frame[:0]) == []
    for examples, message in (
        (renamed, "examples: no text column 'body', as in training; there are: other, label; choose with --text"),
        ([{"body": "a"}, {"body": 3}], "examples: row 2: 'body' is 3, not text"),
        ([{"body": "a"}, {"body": "\ud83d"}], "examples: row 2: half of a surrogate pair, which is not text"),
        (["a", "b \ud83d"], "example 1: half of a surrogate pair, which is not text"),
    ):
        with pytest.raises(InputError, match=message):
            model.predict(examples)
    with pytest.raises(InputError, match="not rows of a table"):
        model.predict(["a text"], text="body")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda datasets, _: datasets.DatasetDict(), "train: DatasetDict is not a table.* one split of a Dataset"),
        (lambda datasets, _: rows(datasets).to_iterable_dataset(), "IterableDataset is not a table in memory"),
        (lambda datasets, _: rows(datasets).with_transform(dict), "a Dataset with a transform.*apply it with map"),
        (
            lambda _, pandas: pandas.DataFrame({"text": ["a", 1], "label": ["x", "y"]}),
            "train: row 2: 'text' is 1, not text",
        ),
        (lambda _, pandas: pandas.DataFrame([["a", 1, 2]], columns=["text", "n", "n"]), "two columns are named 'n'"),
        (lambda _, pandas: pandas.DataFrame([["a", 1, 2]], columns=["text", 3, "3"]), "two columns are named '3'"),
        (
            lambda _, pandas: pandas.DataFrame({"text": pandas.Series(["a \udc00"], dtype=object)}),
            r"train: 'a \\udc00' has half of a surrogate pair, which is not text",
        ),
        (lambda *_: [], "train: no rows"),
        (lambda *_: [{"text": "a", "label": 1}, 3], "train: row 2: not a JSON object: 3"),
        (lambda *_: [{"text": "a"}], "train: no label column; there are: text; choose with --label"),
    ],
)
def test_what_is_no_table_is_refused(datasets, pandas, encoder_folder, tmp_path, make, message):
    data = make(datasets, pandas)
    with pytest.raises(InputError, match=message):
        ef.finetune("classification", train=data, model=encoder_folder, out=tmp_path / "out")


def test_a_frame_of_spans_in_lists(pandas):
    rows = [{"text": "Ann met Bob", "spans": [[0, 3, "X"]], "n": None}, {"text": "so it is", "spans": [], "n": 1.0}]
    table = MemoryTable.of("train", pandas.DataFrame(rows))
    (data,) = read_tasks("tagging", None, {"train": table, "dev": table}, {})
    assert [target.tolist() for target in data.train.targets] == [[1, 0, 0], [0, 0, 0]]
    assert data.train.columns == [{"n": None}, {"n": 1.0}]


def rows(datasets):
    return datasets.Dataset.from_dict({"text": ["a"]})


def test_a_table_in_memory_opens_no_file_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    table = MemoryTable.of("train", [{"text": f"a {number}", "label": "bd"[number % 2]} for number in range(8)])
    assert len(read_tasks("classification", None, {"train": table}, {})[0].train.texts) == 6
    with pytest.raises(TypeError):
        open(table)
