"""A user's data as a task: columns, classes, several labels, numbers, and the validation set."""

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from task_reading import read as read_task
from task_reading import read_divided, refusal, refused

from electra_fast.finetuning.prediction_input import Source, open_examples
from electra_fast.finetuning.readers import own_data, question_entries, tag_columns, tag_sentences
from electra_fast.finetuning.readers.table_formats import MemoryTable
from electra_fast.finetuning.task import Task
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES

read = partial(read_task, "classification")


def labeled(*labels, **texts):
    return [{"text": f"text {row}", **texts, "label": label} for row, label in enumerate(labels)]


def test_classification_file(write):
    train = write(labeled("pos", "neg", "pos"))
    test = write([{"text": "unseen", "other": "x"}], "test.csv")
    data = read(train, write([{"text": "other", "label": "pos"}], "dev.parquet"), test)
    assert (data.task.name, data.task.kind, data.task.labels) == ("classification", "classification", ("neg", "pos"))
    columns = "text in 'text', label in 'label': one class per example; choose columns with --text and --label"
    assert (data.task.metric, data.notes) == ("accuracy", (f"{train}: {columns}",))
    assert data.train.texts == [("text 0",), ("text 1",), ("text 2",)]
    assert (data.train.targets.dtype, data.train.targets.tolist()) == (np.int64, [1, 0, 1])
    assert (data.train.name, data.train.path, data.train.ids) == ("train", train, ["0", "1", "2"])
    assert [split.name for split in (*data.dev, *data.test)] == ["dev", "test"]
    assert (data.test[0].texts, data.test[0].targets) == ([("unseen",)], None)


@pytest.mark.parametrize(
    ("columns", "texts", "label"),
    [
        ("other text sentence label score", "text", "label"),
        ("sentence labels", "sentence", "labels"),
        ("sentence2 sentence1 gold_label", "sentence1 sentence2", "gold_label"),
        ("premise hypothesis score", "premise hypothesis", "score"),
        ("question1 question2 target", "question1 question2", "target"),
        ("question sentence label", "question sentence", "label"),
    ],
)
def test_default_columns(write, columns, texts, label):
    data = read(write([{name: f"{name} {row}" for name in columns.split()} for row in range(2)]))
    assert data.train.texts[1] == tuple(f"{name} 1" for name in texts.split())
    assert data.task.labels == (f"{label} 0", f"{label} 1")


def test_page_lists_the_names_of_columns():
    page = (Path(__file__).parents[3] / "docs/reference/labeled-data.md").read_text(encoding="utf-8")
    for content, names in {
        "texts": own_data.TEXT_COLUMNS,
        "label": own_data.LABEL_COLUMNS,
        "lists of words": tag_sentences.WORD_COLUMNS,
        "tags of such a list": tag_sentences.TAG_COLUMNS,
        "text with spans": tag_sentences.TEXT_COLUMNS,
        "spans": tag_sentences.SPAN_COLUMNS,
        "a word per row": tag_columns.WORD_NAMES,
        "tag of a word": tag_columns.TAG_NAMES,
        "number of a word's sentence": tag_columns.SENTENCE_NAMES,
        "question": question_entries.QUESTION_COLUMNS,
        "context": question_entries.CONTEXT_COLUMNS,
        "answers": question_entries.ANSWER_COLUMNS,
    }.items():
        listed = [f"`{'` and `'.join([name] if isinstance(name, str) else name)}`" for name in names]
        assert f"\n| {content} | {', '.join(listed)} |\n" in page


@pytest.mark.parametrize("form", ["a.jsonl", "a.json", "a.parquet", "a.feather", list])
def test_dotted_names_are_fields_of_objects(write, form):
    rows = [{"id": n, "review": {"body": f"text {n}", "by": {"stars": n % 2}}} for n in range(8)]
    train = MemoryTable.of("train", rows) if form is list else write(rows, form)
    columns = {"text": "review.body", "label": "review.by.stars"}
    (data,) = read_tasks("classification", files={"train": train, "dev": train}, columns=columns)
    assert (data.task.labels, data.text_columns, data.train.texts[7]) == (("0", "1"), (("review.body",),), ("text 7",))
    source = Source(path=train, trained_text=data.text_columns)
    with open_examples(TASK_TYPES["classification"], source) as opened:
        assert [(*texts, row) for texts, row in opened.rows][7] == ("text 7", rows[7])
    with refused("review.text"):
        read_tasks("classification", files={"train": train}, columns=columns | {"text": "review.text"})


def test_columns_as_a_list_or_a_single_name(write):
    train = write([{"text": "a", "title": f"t{row}", "label": "x", "topic": "xy"[row % 2]} for row in range(8)])
    for text, label in ((["title", "text"], ["topic"]), (("title", "text"), "topic")):
        (data,) = read_tasks("classification", files={"train": train}, columns={"text": text, "label": label})
        assert ("t0", "a") in (*data.train.texts, *data.dev[0].texts) and data.task.labels == ("x", "y")
        assert data.text_columns == (("title", "text"),)


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ("ab", {"text": ("title",)}, "no column 'title'; available columns: text, a, b, label; choose with --text"),
        ("ab", {"label": ("topic",)}, "no column 'topic'; available columns: text, a, b, label; choose with --label"),
        ("ab", {"label": ("text",)}, "--text and --label name the column 'text' twice"),
        ("ab", {"text": ("a", "b", "label")}, "--text = a,b,label: must be one or two columns, got 3"),
        ("ab", {"dev_label": ("label",)}, "--dev-text and --dev-label need --dev FILE"),
        ("ab", {"dev_fraction": 1.0}, "dev_fraction = 1.0"),
        ("ab", {"labels": ("b", "c")}, "line 1: unknown label 'a'; --labels: 'b', 'c'"),
        ("ab", {"labels": ("a", "b", "a")}, "--labels = a,b,a: must not repeat a label"),
        ("ab", {"label": ("a", "b"), "labels": ("c", "d")}, "the names of several label columns are the labels"),
        ("ab", {"label_map": ("a",)}, "--label-map: 'a': must be OLD=NEW"),
        ("ab", {"label_map": ("a=b", "a=c")}, "--label-map: 'a': occurs twice"),
        ("ab", {"label_map": ("A=b",)}, "--label-map: no file has the label 'A'; available labels: 'a', 'b'"),
        ("ab", {"label_map": ("a=b",)}, "every example has the label 'b'"),
        (["a", None], {}, "every example has the label 'a'"),
        ([1, -1, 1, -1], {}, "every example has the label '1'; there is nothing to learn ("),
        ([[], []], {}, "every example has no label"),
        ([None, "-", -1], {}, "no example has a usable label; choose the column with --label"),
        ([1, {"a": 2}], {}, "line 2: label = {'a': 2}: must be text or an integer"),
        ([1, 2.5], {}, "line 2: label = '2.5': a class cannot be a number with decimals"),
        ([f"id {n}" for n in range(1001)], {}, "1,001 different labels in 1,001 examples"),
        ("12", {"kind": "regression", "labels": ("1", "2")}, "a regression needs one label column"),
        ("12", {"kind": "regression", "label": ("a", "b")}, "a regression needs one label column"),
        ([1, 2, "inf"], {"kind": "regression"}, "line 3: label = 'inf'"),
        ([1, 2, "1_0"], {"kind": "regression"}, "line 3: label = '1_0'"),
        ([1, 2, True], {"kind": "regression"}, "line 3: label = True"),
        ([1, 2, [1]], {"kind": "regression"}, "line 3: label = [1]"),
        (["1,234", "2,000"], {"kind": "regression"}, "2 bad rows: "),
        (["1,234", "2,5", "1.5"], {"kind": "regression"}, "2 bad rows: "),
        (["1,5", "2,5", "x"], {"kind": "regression"}, "line 3: label = 'x': must be a finite number with a"),
        (["1,234,567", "2,5"], {"kind": "regression"}, "2 bad rows: "),
        ([0.1, 0.1], {"kind": "regression"}, "every training value is 0.1"),
        ([1e300, -1e300] * 2, {"kind": "regression"}, "training values from -1e+300 to 1e+300: too large"),
        ([1e14, 1e14 + 1] * 2, {"kind": "regression"}, "training values from 100000000000000 to 100000000000001: too"),
        ([["a"], "b"], {}, "line 2: label = 'b': must be a list, as in other rows"),
        (["a", "b", "['a']"], {}, "line 3: label = \"['a']\": must be text or an integer, as in other rows"),
        (["{'a': 1}", "{'a': 0}"], {}, "2 bad rows: "),
        (["{[1]: 2, 'a': 1}", "['a']"], {}, "line 1: label = \"{[1]: 2, 'a': 1}\": cannot be read"),
        ([[0, 1, 0]] * 3 + [[0, 1]], {}, "line 4: label = [0, 1]: must be a list of 3 values 0 or 1, as in other rows"),
        ([[0, 1]], {"labels": ("x",)}, "line 1: the label is a list of 2 values 0 or 1, but --labels has 1"),
        (["['a' ... 'b']", "['a']"], {}, "line 1: label = \"['a' ... 'b']\": cannot be read as a list (its middle is"),
        (["['a' 'b', 'c']", "['a']"], {}, "line 1: label = \"['a' 'b', 'c']\": cannot be read as a list (its items"),
        (["[a, b]", "['a']"], {}, "line 1: label = '[a, b]': cannot be read as a list (a is not in quotes)"),
        ([[0.3, 0.7], [1.0, 0.0]], {}, "line 1: label = [0.3, 0.7]: soft labels (a probability per class) are not"),
        (["[1. 0.]", "[0.3 0.7]"], {"labels": ("x", "y")}, "line 2: label = [0.3, 0.7]: soft labels"),
        (["0.3;0.7", "0.6;0.4"], {"label_separator": ";"}, "line 1: label = ['0.3', '0.7']: soft labels"),
        (["0 1 0", "1 1 0"], {}, "line 1: label = '0 1 0': may be several labels; pass their separator"),
        ([[4, 5, 4], [3, 5, 4]], {}, "line 1: label = [4, 5, 4]: must not repeat a number"),
        ([[1], [0], [0, 1]], {}, "line 1: label = [1]: ambiguous; pass --labels 0,1 if these are label names"),
    ],
)
def test_unusable_labels_and_options_are_refused(write, labels, options, message):
    train = write(labeled(*labels, a="0", b="1"))
    kind = options.get("kind", "classification")
    options = {name: value for name, value in options.items() if name != "kind"}
    assert refusal(read_divided, kind, train, **options).removeprefix(f"{train}: ").startswith(message)


def test_missing_columns_labels_and_files(write, tmp_path):
    train = write(labeled("a", "b"))
    dev = write([{"text": "x", "score": "a"}], "dev.jsonl")
    other = write([{"body": "x", "class": "y"}], "other.jsonl")
    assert refusal(read, other) == f"{other}: no text column; available columns: body, class; choose with --text"
    message = "available columns: body, class; choose with"
    assert f"no label column; {message} --label" in refusal(read, other, text=("body",))
    assert f"no column 'text'; {message} --test-text" in refusal(read, train, train, other)
    message = "no column 'label'; available columns: text, score; choose with --dev-label"
    assert refusal(read, train, dev) == f"{dev}: {message}"
    refusal(read, train, tmp_path / "none.tsv", error=FileNotFoundError)
    assert "2 examples are too few for a validation set" in refusal(read_divided, "classification", train)
    dev = write(labeled("a", "c"), "dev.jsonl")
    message = f"{dev}: line 2: unknown label 'c'; labels of {train}: 'a', 'b'"
    assert refusal(read, train, dev) == refusal(read, train, train, dev) == message
    assert refusal(read, write(labeled(*range(30))), dev).endswith(
        "'18', '19' and 10 more (pass --skip-bad-rows 2 to skip them)"
    )


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "B", "10", "9"], ("10", "9", "B", "b")),
        (["10", "9", "-2"], ("-2", "9", "10")),
        (["0.0", "1.0", "10.0", "2."], ("0", "1", "2", "10")),
        ([1.0, 0, "1", None], ("0", "1")),
        (["01", "1"], ("01", "1")),
        (["True", "FALSE", True], ("false", "true")),
        (["1.0", 2.0, "v2"], ("1.0", "2", "v2")),
        ([" x ", "x", "y"], ("x", "y")),
        (["[NEG]", "[POS]"], ("[NEG]", "[POS]")),  # brackets alone are part of a name
        (["(a)", "{b}"], ("(a)", "{b}")),
        (["a, b", "c d"], ("a, b", "c d")),
        (["NA", "DE", "FR"], ("DE", "FR", "NA")),
        (["NA", "1", "2", "nan", "1"], ("1", "2")),  # missing among numbers
    ],
)
def test_class_names_and_their_order(write, labels, names):
    assert read(write(labeled(*labels))).task.labels == names


@pytest.mark.parametrize(
    ("labels", "options", "names", "targets"),
    [
        ("ba", {"labels": ("b", "a", "c")}, ("b", "a", "c"), [0, 1]),
        (("0.5", "1.0"), {"labels": ("0.5", "1.0")}, ("0.5", "1.0"), [0, 1]),
        ((-1, 0, 1), {"labels": ("-1", "0", "1")}, ("-1", "0", "1"), [0, 1, 2]),  # -1 is a class
        (("-", "a", "-"), {"labels": ("a", "-")}, ("a", "-"), [1, 0, 1]),
        (("NA", "DE", "FR"), {"label_map": ("NA=",)}, ("DE", "FR"), [0, 1]),
        (([1], [0], [0, 1]), {"labels": ("0", "1")}, ("0", "1"), [[0, 1], [1, 0], [1, 1]]),
        (([1, 0], [0, 1]), {"labels": ("0", "1", "2")}, ("0", "1", "2"), [[1, 1, 0]] * 2),
        (([1, 0], [0, 1]), {"labels": ("x", "y")}, ("x", "y"), [[1, 0], [0, 1]]),
        (("[1]", "[0]"), {"labels": ("spam",)}, ("spam",), [[1], [0]]),
        (("b; a", "", "c;"), {"label_separator": ";"}, ("a", "b", "c"), [[1, 1, 0], [0, 0, 0], [0, 0, 1]]),
    ],
)
def test_options_change_labels(write, labels, options, names, targets):
    data = read(write(labeled(*labels)), **options)
    assert (data.task.labels, data.train.targets.tolist()) == (names, targets)


@pytest.mark.parametrize("marker", [-1, "-1.0", "-", " ", None, float("nan")])
def test_markers_of_missing_labels_are_not_classes(write, marker):
    train = write(labeled(marker, "1", "0", marker, "1"))
    dev = write([{"text": "x", "label": "1"}, {"text": "y", "label": marker}], "dev.csv")
    data = read(train, dev)
    assert (data.task.labels, data.train.targets.tolist(), data.train.ids) == (("0", "1"), [1, 0, 1], ["1", "2", "4"])
    assert (data.dev[0].targets.tolist(), data.dev[0].ids) == ([1], ["0"])
    _, first, second = data.notes
    assert first.startswith(f"{train}: 2 of 5 examples have no label (") and ") and are left out" in first
    assert second.startswith(f"{dev}: 1 of 2 examples have no label (")
    assert ("--labels=-1,0,1" in first) == ("-1" in str(marker))
    assert ("--labels=-1,1" in refusal(read, write(labeled(1, marker, 1)))) == ("-1" in str(marker))


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("marker", [None, "-", "-1"])
def test_labeled_examples_of_a_test_file_are_scored(write, kind, marker):
    train = write(labeled("1", "2"))
    test = write(labeled("2", marker, "1"), "test.jsonl")
    data = read_task(kind, train, train, test)
    (split,) = data.test
    missing = -1 if (kind, marker) == ("regression", "-1") else np.nan  # an ordinary number
    values = split.targets if kind == "regression" else np.array([1, 2, np.nan])[split.targets]
    np.testing.assert_array_equal(values, [2, missing, 1])
    assert len(split.texts) == 3
    assert any(") and are predicted but not scored" in note for note in data.notes) == (missing != -1)
    hidden = write(labeled(marker, marker), "hidden.jsonl")
    assert read_task(kind, train, train, hidden).test[0].targets is None


def test_missing_labels_of_a_multi_label_task(write):
    assert read(write(labeled(["a"], None, [], ["b", ""], [-1], ["-"]))).train.ids == ["0", "2", "3"]
    rows = [("1", "0"), ("-1", "-1"), ("", "1"), ("0", "1.0")]
    columns = write([{"text": "x", "toxic": one, "rude": two} for one, two in rows], "train.csv")
    data = read(columns, label=("toxic", "rude"))
    assert (data.train.ids, data.train.targets.tolist()) == (["0", "3"], [[1, 0], [0, 1]])


FORMS = [list, str, json.dumps, lambda cell: str(np.array(cell)), lambda cell: repr(np.array(cell, dtype=object))]


@pytest.mark.parametrize("form", FORMS)
def test_lists_make_a_task_multi_label(write, form):
    for name in ("train.jsonl", "train.csv", "train.parquet"):
        data = read(write(labeled(*map(form, (["b", "a"], [], ["c"]))), name))
        assert (data.task.kind, data.task.metric, data.task.labels) == ("multi-label", "f1_micro", ("a", "b", "c"))
        assert data.train.targets.dtype == np.float32
        assert data.train.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
        assert "label in 'label': lists of labels; " in data.notes[0]
    for rows in ([[0, 1, 0], [1, 1, 0]], [[0.0, 1.0], [1.0, 0.0]], [[True, False], [False, True]], [["0", "1"]] * 2):
        train = write(labeled(*map(form, rows)))
        size = len(rows[0])
        data = read(train)
        assert (data.task.kind, data.task.labels) == ("multi-label", ("0", "1", "2")[:size])
        assert data.train.targets.tolist() == [list(map(float, row)) for row in rows]
        assert f"0 or 1 for each of {size} labels; name them with --labels; " in data.notes[0]
        message = refusal(read, train, write(labeled([1]), "dev.jsonl"))
        assert message.endswith(f"line 1: label = [1]: must be a list of {size} values 0 or 1, as in other rows")


def test_several_label_columns_make_a_task_multi_label(write):
    rows = [{"text": "x", "toxic": "1", "rude": "FALSE"}, {"text": "y", "toxic": 0, "rude": True}]
    data = read(write(rows), label=("toxic", "rude"))
    assert (data.task.kind, data.task.labels) == ("multi-label", ("toxic", "rude"))
    assert data.train.targets.tolist() == [[1, 0], [0, 1]]
    wrong = write([*rows, {"text": "z", "toxic": 2, "rude": 0}])
    assert "line 3: toxic = 2:" in refusal(read, wrong, label=("toxic", "rude"))


def test_columns_and_labels_differ_by_file(write):
    train = write([{"premise": "a", "hypo": "b", "label": label} for label in ("contradictory", "neutral")])
    rows = [{"sentence1": "c", "sentence2": "d", "gold_label": label} for label in ("contradiction", "neutral")]
    dev = write(rows, "dev.jsonl")
    test = write(rows, "test.jsonl")
    message = refusal(read, train, dev)
    assert message.startswith(f"{dev}: line 1: unknown label 'contradiction'; labels of {train}: ")
    assert "if it means 'contradictory', add --label-map contradiction=contradictory" in message
    data = read(train, dev, test, label_map=("contradictory=contradiction",))
    assert data.task.labels == ("contradiction", "neutral")
    assert (data.dev[0].texts[0], data.dev[0].targets.tolist()) == (("c", "d"), [0, 1])
    assert data.test[0].targets.tolist() == [0, 1]
    assert f"{dev}: reads gold_label instead of label; choose other columns with --dev-label" in data.notes
    both = write([row | {"premise": "e", "hypothesis": "f", "topic": "neutral"} for row in rows], "both.jsonl")
    options = {"label_map": {"contradictory": "contradiction"}}
    assert "no column 'hypo'" in refusal(read, train, both, **options)
    data = read(train, both, dev_text=("premise", "hypothesis"), dev_label=("topic",), **options)
    assert (data.dev[0].texts[0], data.dev[0].targets.tolist()) == (("e", "f"), [1, 1])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (("Refund", "Refund", "refund", "x"), "'Refund' 2, 'refund' 1; to merge them, add --label-map refund=Refund"),
        (("caf\u00e9", "cafe\u0301", "x"), "--label-map"),
        (("not ok", "not_ok", "x"), "to merge them, add --label-map not_ok=not ok"),
        (("ok", "o\u200bk", "x"), "'ok' 1, 'o\\u200bk' 1;"),
        (("NA", "DE", "FR", "NA"), "'NA' (2 examples) may mark missing labels; if so, omit them with --label-map NA="),
        (("NA", "1", "2", "nan", "1"), "2 of 5 examples have no label ('NA' 1, 'nan' 1;"),
        (("-1.5x", "1.5x") * 2, ""),
        (("A-", "A") * 2, ""),
        (("01", "1") * 2, ""),
    ],
)
def test_suspicious_classes_are_noted(write, labels, message):
    notes = read(write(labeled(*labels))).notes
    assert message in notes[-1] if message else len(notes) == 1


def test_bad_rows_are_reported_together_or_skipped(write):
    train = write([*labeled("a", "b", {"x": 1}), {"text": None, "label": "a"}])
    dev = write(labeled("a", "c", "b"), "dev.jsonl")
    message = refusal(read, train, dev)
    places = (f"{train}: line 3: label", f"{train}: line 4: text = null", f"{dev}: line 2: unknown label 'c'")
    assert message.startswith("3 bad rows: ") and all(place in message for place in places)
    assert refusal(read, train, dev, skip_bad_rows=2) == message
    data = read(train, dev, skip_bad_rows=3)
    assert (data.train.ids, data.dev[0].ids) == (["0", "1"], ["0", "2"])
    assert data.notes[1].startswith("3 bad rows are left out: ")
    message = refusal(read_divided, "classification", write(labeled(*[{}] * 25), "all.jsonl"))
    assert message.startswith("25 bad rows: ")
    assert message.endswith("; and 5 more (pass --skip-bad-rows 25 to skip them)")
    unknown = write(labeled("c"), "unknown.jsonl")
    assert "no example has a usable label" in refusal(read, train, unknown, skip_bad_rows=4)


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_regression_is_standardized_with_training_values(write, name):
    train = write([{"text": "t", "score": value} for value in (-1, "", "nan", 2.5, "4")], name)
    data = read_task("regression", train)
    assert (data.task.name, data.task.kind, data.task.metric) == ("regression", "regression", "spearman")
    assert (data.train.targets.dtype, data.train.targets.tolist()) == (np.float64, [-1, 2.5, 4])
    assert (data.task.shift, data.task.scale) == (pytest.approx(5.5 / 3), pytest.approx(np.std([-1, 2.5, 4])))
    assert "2 of 5 examples have no label (empty or null 1, 'nan' 1;" in data.notes[1]
    divided = read_divided("regression", train)
    assert divided.task.shift == divided.train.targets.mean()


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        (["3,00", "4,5", "-1", ""], [3, 4.5, -1]),
        (["1,234", "0,5", "12"], [1.234, 0.5, 12]),
        (["1,234", "1234,5"], [1.234, 1234.5]),
    ],
)
def test_decimal_commas_are_read_if_unambiguous(write, labels, values):
    train = write(labeled(*labels))
    data = read_task("regression", train)
    assert data.train.targets.tolist() == values
    assert "label in 'label': one number per example, with decimal commas; " in data.notes[0]
    assert own_data.read_labeled(data.task, train, ((), ()))[0].targets.tolist() == values
    assert "dev.jsonl: line 1: label = '2.5'" in refusal(
        read_task, "regression", train, write(labeled("2.5"), "dev.jsonl")
    )


def test_validation_set_is_stratified_by_class(write):
    train = write(labeled(*["common"] * 160, *["rare"] * 38, *["once"] * 2))
    data, again, other = (read_divided("classification", train, seed=seed) for seed in (3, 3, 4))
    (dev,) = data.dev
    assert data.notes[1:] == (
        f"{train}: 20 of 200 examples become the validation set (seed 3); pass another one with --dev",
    )
    assert np.bincount(dev.targets, minlength=3).tolist() == [15, 1, 4]
    assert sorted(data.train.ids + dev.ids, key=int) == [str(row) for row in range(200)]
    assert dev.texts == [(f"text {row}",) for row in dev.ids]
    assert again.dev[0].ids == dev.ids != other.dev[0].ids
    train = write(labeled(*"aabbbcdddddd"))
    for fraction, size in {0.01: 3, 0.5: 6, 0.99: 8}.items():  # every class of two is in both splits
        data = read_divided("classification", train, dev_fraction=fraction)
        assert set(data.train.targets.tolist()) == {0, 1, 2, 3} and set(data.dev[0].targets.tolist()) == {0, 1, 3}
        assert len(data.dev[0].texts) == size


def test_largest_groups_are_assigned_first(write):
    rows = [{"text": f"text {row}", "label": row, "source": source} for row, source in enumerate("aaabbbcccc")]
    assert len(read_divided("regression", write(rows), dev_fraction=0.5, group="source").dev[0].texts) == 4


@pytest.mark.parametrize("labels", [("0", "1"), ("neg", "pos")])
def test_integers_with_class_names_are_read_as_in_training(labels):
    features = {"label": {"names": ["neg", "pos"], "_type": "ClassLabel"}}
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"text": ["a", "b"], "label": [0, 1]}).replace_schema_metadata(metadata)
    task = Task(name="classification", kind="classification", labels=labels, metric="accuracy")
    split, _ = own_data.read_labeled(task, MemoryTable.of("data", table), ((), ()))
    assert split.targets.tolist() == [0, 1]


def test_multi_label_model_is_scored_on_single_labels(write):
    task = Task(name="classification", kind="multi-label", labels=("a", "b"), metric="f1_micro")
    split, _ = own_data.read_labeled(task, write(labeled("b", "a")), ((), ()))
    assert split.targets.tolist() == [[0, 1], [1, 0]]


@pytest.mark.parametrize("seed", range(2))
def test_labels_that_occur_twice_are_in_both_splits(write, seed):
    rng = random.Random(seed)
    names = [f"l{number}" for number in range(12) for _ in range(number + 1)]
    rows = [rng.sample(names, rng.choice((0, 1, 1, 2))) for _ in range(60)] + [["once"]]
    data = read_divided("classification", write(labeled(*rows)), seed=seed)
    in_train, in_dev = (split.targets.sum(0) for split in (data.train, data.dev[0]))
    assert (in_train >= 1).all() and len(data.dev[0].texts) < 15
    alone = np.array([[name] in rows for name in data.task.labels])  # labels that are alone in some row
    assert (in_dev[alone & (in_train + in_dev > 1)] >= 1).all()


def test_texts_in_both_splits_are_noted(write):
    train = write(labeled("a", "b"))
    dev = write(labeled("a", "b", "a"), "dev.jsonl")
    for first, second, message in (
        (train, dev, "2 of 3 validation examples"),
        (dev, train, "all 2 validation examples"),
    ):
        (data,) = read_tasks("classification", files={"train": first, "dev": second})
        assert data.notes[1].startswith(f"{second}: the texts of {message} are in the training split")


def test_empty_texts_are_kept_with_a_note(write):
    rows = [
        {"sentence1": first, "sentence2": " ", "label": label} for first, label in (("x", "a"), (" ", "b"), ("", "a"))
    ]
    train = write(rows)
    data = read(train)
    assert data.notes[1] == f"{train}: line 2: the first of 2 examples with empty text"
    assert len(data.train.texts) == 3
    assert "every text in 'sentence1' and 'sentence2' is empty" in refusal(read, write(rows[1:]))


def test_quoting_and_missing_header_are_options(write):
    train = write('text\tlabel\n"a\tb"\tx\nc\ty\n', "train.tsv")
    assert "add --quoting csv" in refusal(read, train)
    assert read(train, quoting="csv").train.texts == [("a\tb",), ("c",)]
    train = write("x\tso it is now\ny\tnot so\n", "train.tsv")
    assert "if the first line is data, add --no-header and choose columns by number" in refusal(read, train)
    options = {"text": "1", "label": "0", "no_header": True}
    (data,) = read_tasks("classification", files={"train": train, "dev": train}, columns=options)
    assert (data.task.labels, data.text_columns[0]) == (("x", "y"), ("1",))
    assert data.train.texts == [("so it is now",), ("not so",)]
