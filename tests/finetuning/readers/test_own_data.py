"""A user's own data as a task: columns, classes, several labels, numbers, and what is set aside."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import feather

from electra_fast.errors import InputError
from electra_fast.finetuning.prediction_input import Source, open_examples
from electra_fast.finetuning.readers import own_data, question_entries, tag_columns, tag_sentences
from electra_fast.finetuning.readers.memory_table import MemoryTable
from electra_fast.finetuning.task_data import read_tasks
from electra_fast.finetuning.tasks import TASK_TYPES


def labeled(*labels, **texts):
    return [{"text": f"text {row}", **texts, "label": label} for row, label in enumerate(labels)]


def read(train, dev=None, test=None, kind="classification", **options):
    return own_data.read(kind, train, dev or train, test, **options)


def set_aside(train, kind="classification", **options):
    return own_data.read(kind, train, None, None, **options)


def notes_of(*args, **options):
    """The notes after the one on the columns."""
    return list(read(*args, **options).notes)[1:]


def message_of(train, dev=None, test=None, kind="classification", **options):
    with pytest.raises(InputError) as caught:
        own_data.read(kind, train, dev, test, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_classification(write):
    train = write(labeled("pos", "neg", "pos"))
    test = write([{"text": "unseen", "other": "x"}], "test.csv")
    dev = write([{"text": "other", "label": "pos"}], "dev.parquet")
    data = read(train, dev, test)
    assert (data.task.name, data.task.kind, data.task.labels) == ("classification", "classification", ("neg", "pos"))
    columns = "text in 'text', label in 'label': one class per example; choose columns with --text and --label"
    assert (data.task.metric, data.notes) == ("accuracy", (f"{train}: {columns}",))
    assert data.train.texts == [("text 0",), ("text 1",), ("text 2",)]
    assert (data.train.targets.dtype, data.train.targets.tolist()) == (np.int64, [1, 0, 1])
    assert (data.train.name, data.train.path, data.train.ids) == ("train", train, ["0", "1", "2"])
    assert [split.name for split in (*data.dev, *data.test)] == ["dev", "test"]
    assert (data.test[0].texts, data.test[0].targets) == ([("unseen",)], None)


@pytest.mark.parametrize(
    ("columns", "texts", "labels"),
    [
        ("other text sentence label score", ["text"], "label"),
        ("sentence labels", ["sentence"], "labels"),
        ("sentence2 sentence1 gold_label", ["sentence1", "sentence2"], "gold_label"),
        ("premise hypothesis score", ["premise", "hypothesis"], "score"),
        ("question1 question2 target", ["question1", "question2"], "target"),
        ("question sentence label", ["question", "sentence"], "label"),
    ],
)
def test_default_columns(write, columns, texts, labels):
    data = read(write([{name: f"{name} {row}" for name in columns.split()} for row in range(2)]))
    assert data.train.texts == [tuple(f"{name} {row}" for name in texts) for row in range(2)]
    assert data.task.labels == (f"{labels} 0", f"{labels} 1")


def test_the_page_lists_the_names_of_columns():
    page = (Path(__file__).parents[3] / "docs/fine-tuning.md").read_text(encoding="utf-8")
    for what, names in {
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
        assert f"\n| {what} | {', '.join(listed)} |\n" in page


def test_named_columns(write):
    train = write([{"text": "a", "title": "t", "label": "x", "topic": topic} for topic in "ab"])
    data = read(train, text=("title", "text"), label=("topic",))
    assert (data.train.texts[0], data.task.labels) == (("t", "a"), ("a", "b"))


@pytest.mark.parametrize("form", ["a.jsonl", "a.json", "a.parquet", "a.feather", list, pa.Table.from_pylist])
def test_fields_of_objects_are_columns_by_dotted_names(write, tmp_path, form):
    rows = [{"id": n, "review": {"body": f"text {n}", "by": {"stars": n % 2}}} for n in range(8)]
    if callable(form):
        train = MemoryTable.of("train", form(rows))
    elif form == "a.feather":
        feather.write_feather(pa.Table.from_pylist(rows), train := tmp_path / form)
    else:
        train = write(rows, form)
    columns = {"text": "review.body", "label": "review.by.stars"}
    (data,) = read_tasks("classification", None, {"train": train, "dev": train}, columns)
    assert (data.task.labels, data.text_columns, data.train.texts[7]) == (("0", "1"), (("review.body",),), ("text 7",))
    source = Source(path=train, trained_text=data.text_columns)
    with open_examples(TASK_TYPES["classification"], source) as opened:
        assert [(*texts, row) for texts, row in opened.rows][7] == ("text 7", rows[7])
    with pytest.raises(InputError, match=r"row 1|line 1|record 1|no column 'review\.text'"):
        read_tasks("classification", None, {"train": train}, columns | {"text": "review.text"})


def test_columns_may_be_a_list_or_a_single_name(write):
    train = write([{"text": "a", "title": f"t{row}", "topic": "xy"[row % 2]} for row in range(8)])
    data, again = (
        read_tasks("classification", None, {"train": train}, {"text": text, "label": label})[0]
        for text, label in ((["title", "text"], ["topic"]), (("title", "text"), "topic"))
    )
    assert data.train.texts == again.train.texts and ("t0", "a") in (*data.train.texts, *data.dev[0].texts)
    assert data.text_columns == again.text_columns == (("title", "text"),)


NUMBERS = "a regression has one label column of numbers"


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ("ab", {"text": ("title",)}, "no column 'title'; there are: text, a, b, label; choose with --text"),
        ("ab", {"label": ("topic",)}, "no column 'topic'; there are: text, a, b, label; choose with --label"),
        ("ab", {"label": ("text",)}, "the column 'text' is chosen twice by --text and --label"),
        ("ab", {"text": ("a", "b", "label")}, "--text names 3 columns (a, b, label); it can be one or two"),
        ("ab", {"dev_label": ("label",)}, "--dev-text and --dev-label need --dev FILE"),
        ("ab", {"dev_fraction": 1.0}, "dev_fraction is 1.0; it must be above 0 and below 1"),
        ("ab", {"labels": ("b", "c")}, "line 1: unknown label 'a'; --labels names: 'b', 'c'"),
        ("ab", {"labels": ("a", "b", "a")}, "--labels names a label twice: a, b, a"),
        ("ab", {"label": ("a", "b"), "labels": ("c", "d")}, "with several label columns, their names are the labels"),
        ("ab", {"label_map": ("a",)}, "--label-map: 'a' must be OLD=NEW"),
        ("ab", {"label_map": ("a=b", "a=c")}, "--label-map: 'a' is there twice"),
        ("ab", {"label_map": ("A=b",)}, "--label-map: no file has the label 'A'; there are: 'a', 'b'"),
        ("ab", {"label_map": ("a=b",)}, "'b' in every example; there is nothing to learn"),
        (["a", None], {}, "'a' in every example; there is nothing to learn ("),
        ([1, -1, 1, -1], {}, "'1' in every example; there is nothing to learn ("),
        ([[], []], {}, "no label in every example; there is nothing to learn"),
        ([None, "-", -1], {}, "no example has a label that can be used; choose the column with --label"),
        ([1, {"a": 2}], {}, "line 2: the label is {'a': 2}; it must be text or an integer"),
        ([1, 2.5], {}, "line 2: the label '2.5' is a number with decimals; predict numbers with --task regression, "),
        ([f"id {n}" for n in range(1001)], {}, "1,001 different labels in 1,001 examples; predict numbers with --task"),
        ("ab", {}, "2 examples are too few to set a dev split aside; give one with --dev"),
        ("12", {"kind": "regression", "labels": ("1", "2")}, NUMBERS),
        ("12", {"kind": "regression", "label": ("a", "b")}, NUMBERS),
        ([1, 2, "inf"], {"kind": "regression"}, "line 3: the label is 'inf'; it must be a finite number"),
        ([1, 2, "1_0"], {"kind": "regression"}, "line 3: the label is '1_0'; it must be a finite number"),
        ([1, 2, True], {"kind": "regression"}, "line 3: the label is True; it must be a finite number"),
        ([1, 2, [1]], {"kind": "regression"}, "line 3: the label is [1]; it must be a finite number"),
        ([0.1, 0.1], {"kind": "regression"}, "every training value is 0.1; there is nothing to learn from it"),
        ([1e300, -1e300] * 2, {"kind": "regression"}, "training values from -1e+300 to 1e+300 are too large"),
        ([1e14, 1e14 + 1] * 2, {"kind": "regression"}, "training values from 100000000000000 to 100000000000001 are"),
    ],
)
def test_what_cannot_be_used(write, labels, options, message):
    train = write(labeled(*labels, a="0", b="1"))
    assert message_of(train, **options).removeprefix(f"{train}: ").startswith(message)


def test_missing_columns_are_named_with_those_there_are(write):
    train = write([{"body": "a", "class": "x"}])
    assert message_of(train) == f"{train}: no text column; there are: body, class; choose with --text"
    message = f"{train}: no label column; there are: body, class; choose with --label"
    assert message_of(train, text=("body",)) == message


def test_what_dev_or_test_lack(write, tmp_path):
    train = write(labeled("a", "b"))
    scored, other = write([{"text": "x", "score": "a"}], "dev.jsonl"), write([{"body": "x"}], "test.jsonl")
    message = f"{scored}: no column 'label'; there are: text, score; choose with --dev-label"
    assert message_of(train, scored) == message
    message = f"{other}: no column 'text'; there are: body; choose with --test-text"
    assert message_of(train, train, other) == message
    with pytest.raises(FileNotFoundError, match=r"none\.tsv: no such file$"):
        read(train, tmp_path / "none.tsv")


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
    ],
)
def test_names_and_order_of_classes(write, labels, names):
    assert read(write(labeled(*labels))).task.labels == names


def test_given_labels_keep_their_order(write):
    train = write(labeled("b", "a"))
    data = read(train, labels=("b", "a", "c"))
    assert (data.task.labels, data.train.targets.tolist()) == (("b", "a", "c"), [0, 1])
    assert read(write(labeled("0.5", "1.0")), labels=("0.5", "1.0")).task.labels == ("0.5", "1.0")


def test_a_label_that_training_lacks_is_an_error(write):
    train, other = write(labeled("a", "b")), write(labeled("a", "c"), "other.jsonl")
    message = f"{other}: line 2: unknown label 'c'; {train} has: 'a', 'b'"
    assert message_of(train, other) == message_of(train, train, other) == message
    other = write(labeled(99), "other.jsonl")
    assert message_of(write(labeled(*range(30))), other).endswith("'18', '19' and 10 more")


@pytest.mark.parametrize("sign", [-1, "-1", "-1.0", "-", " ", None, float("nan")])
def test_what_says_that_there_is_no_label_is_no_class(write, sign):
    train = write(labeled(sign, "1", "0", sign, "1"))
    dev = write([{"text": "x", "label": "1"}, {"text": "y", "label": sign}], "dev.csv")
    data = read(train, dev)
    assert (data.task.labels, data.train.targets.tolist(), data.train.ids) == (("0", "1"), [1, 0, 1], ["1", "2", "4"])
    assert (data.dev[0].targets.tolist(), data.dev[0].ids) == ([1], ["0"])
    _, first, second = data.notes
    assert first.startswith(f"{train}: 2 of 5 examples have no label (") and "): left out" in first
    assert second.startswith(f"{dev}: 1 of 2 examples have no label (")
    assert ("--labels=-1,0,1" in first) == ("-1" in str(sign))


@pytest.mark.parametrize("labels, given", [((-1, 0, 1), ("-1", "0", "1")), (("-", "a", "-"), ("a", "-"))])
def test_signs_that_are_named_are_classes(write, labels, given):
    data = read(write(labeled(*labels)), labels=given)
    assert data.task.labels == given
    assert [given[target] for target in data.train.targets] == list(map(str, labels))


def test_a_single_class_besides_minus_one_is_asked_about(write):
    assert "--labels=-1,1" in message_of(write(labeled(1, -1, 1, -1)))


def test_words_for_nothing_are_classes_with_a_doubt_and_missing_among_numbers(write):
    (note,) = notes_of(write(labeled("NA", "DE", "FR", "NA")))
    assert "'NA', 2 examples, may mean that there is no label; --label-map NA= leaves them out" in note
    train = write(labeled("NA", "1", "2", "nan", "1"))
    assert read(train).task.labels == ("1", "2")
    assert "2 of 5 examples have no label ('NA' 1, 'nan' 1;" in notes_of(train)[0]
    assert read(write(labeled("NA", "DE", "FR")), label_map=("NA=",)).task.labels == ("DE", "FR")


@pytest.mark.parametrize("kind", ["classification", "regression"])
@pytest.mark.parametrize("sign", [None, "-", "-1"])
def test_a_test_file_is_scored_where_it_has_labels(write, kind, sign):
    train, test = write(labeled("1", "2")), write(labeled("2", sign, "1"), "test.jsonl")
    data = read(train, train, test, kind=kind)
    (split,) = data.test
    missing = -1 if (kind, sign) == ("regression", "-1") else np.nan  # a number like others
    values = split.targets if kind == "regression" else np.array([1, 2, np.nan])[split.targets]
    np.testing.assert_array_equal(values, [2, missing, 1])
    assert len(split.texts) == 3
    assert any("): predicted and not scored" in note for note in data.notes) == (missing != -1)
    hidden = write(labeled(sign, sign), "hidden.jsonl")
    assert read(train, train, hidden, kind=kind).test[0].targets is None


def test_several_labels_without_a_label(write):
    lists = read(write(labeled(["a"], None, [], ["b", ""], [-1], ["-"])))
    assert lists.train.ids == ["0", "2", "3"]
    rows = [("1", "0"), ("-1", "-1"), ("", "1"), ("0", "1.0")]
    columns = write([{"text": "x", "toxic": one, "rude": two} for one, two in rows], "train.csv")
    data = read(columns, label=("toxic", "rude"))
    assert (data.train.ids, data.train.targets.tolist()) == (["0", "3"], [[1, 0], [0, 1]])


FORMS = [list, str, json.dumps, lambda cell: str(np.array(cell)), lambda cell: repr(np.array(cell, dtype=object))]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["train.jsonl", "train.csv", "train.parquet"])
def test_lists_of_names_are_several_labels(write, form, name):
    data = read(write(labeled(*map(form, (["b", "a"], [], ["c"]))), name))
    assert (data.task.kind, data.task.metric, data.task.labels) == ("multi-label", "f1_micro", ("a", "b", "c"))
    assert data.train.targets.dtype == np.float32
    assert data.train.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1]]
    assert "label in 'label': lists of labels; " in data.notes[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, 0], [1, 1, 0], [0, 0, 0]],
        [[0.0, 1.0], [1.0, 0.0]],
        [[True, False], [False, True]],
        [["0", "1"], ["1", "0"]],
    ],
)
def test_lists_of_zeros_and_ones_are_a_value_for_each_label(write, form, rows):
    train, names = write(labeled(*map(form, rows))), ("x", "y", "z")[: len(rows[0])]
    data = read(train)
    assert (data.task.kind, data.task.labels) == ("multi-label", ("0", "1", "2")[: len(names)])
    assert data.train.targets.tolist() == [list(map(float, row)) for row in rows]
    assert f"0 or 1 for each of {len(names)} labels; name them with --labels; " in data.notes[0]
    assert read(train, labels=names).task.labels == names
    assert "--labels names 1" in message_of(train, labels=("x",))
    message = message_of(train, write(labeled([1]), "dev.jsonl"))
    assert message.endswith(f"line 1: the label is [1], elsewhere it is a list of {len(names)} times 0 or 1")


def test_lists_with_two_readings_are_asked_about(write):
    train = write(labeled([1], [0], [0, 1]))
    both = "may name labels or have a 0 or 1 for each; choose with --labels 0,1 or with --labels and the names of all"
    assert f"line 1: the label [1] {both}" in message_of(train)
    assert read(train, labels=("0", "1")).train.targets.tolist() == [[0, 1], [1, 0], [1, 1]]
    assert read(write(labeled([1, 0], [0, 1])), labels=("0", "1", "2")).train.targets.tolist() == [[1, 1, 0]] * 2
    data = read(write(labeled("[1]", "[0]")), labels=("spam",))
    assert (data.task.labels, data.train.targets.tolist()) == (("spam",), [[1], [0]])


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([["a"], "b"], {}, "line 2: the label is 'b', elsewhere it is a list"),
        (["a", "b", "['a']"], {}, "line 3: the label is \"['a']\"; it must be text or an integer, as elsewhere"),
        (["{'a': 1}", "{'a': 0}"], {}, "2 bad rows: "),
        (["{[1]: 2, 'a': 1}", "['a']"], {}, "line 1: the label \"{[1]: 2, 'a': 1}\" cannot be read as a list"),
        ([[0, 1, 0]] * 3 + [[0, 1]], {}, "line 4: the label is [0, 1], elsewhere it is a list of 3 times 0 or 1"),
        (["['a' ... 'b']", "['a']"], {}, "line 1: the label \"['a' ... 'b']\" cannot be read as a list (its middle is"),
        (
            ["['a' 'b', 'c']", "['a']"],
            {},
            "line 1: the label \"['a' 'b', 'c']\" cannot be read as a list (commas separate",
        ),
        (
            ["[a, b]", "['a']"],
            {},
            "line 1: the label '[a, b]' cannot be read as a list (a is not in quotes); write it as",
        ),
        ([[0.3, 0.7], [1.0, 0.0]], {}, "line 1: the label [0.3, 0.7] has numbers with decimals; soft labels"),
        (["[1. 0.]", "[0.3 0.7]"], {"labels": ("x", "y")}, "line 2: the label [0.3, 0.7] has numbers with decimals"),
        (
            ["0.3;0.7", "0.6;0.4"],
            {"label_separator": ";"},
            "line 1: the label ['0.3', '0.7'] has numbers with decimals",
        ),
        (["0 1 0", "1 1 0"], {}, "line 1: the label '0 1 0' may be several; choose with --label-separator ' '"),
        ([[4, 5, 4], [3, 5, 4]], {}, "line 1: the label [4, 5, 4] has a number twice, so it does not name labels"),
    ],
)
def test_label_cells_that_do_not_fit_their_column(write, labels, options, message):
    train = write(labeled(*labels))
    assert message_of(train, **options).removeprefix(f"{train}: ").startswith(message)


@pytest.mark.parametrize("labels", [("[NEG]", "[POS]"), ("(a)", "{b}"), ("0-1", "1,5"), ("a, b", "c d")])
def test_brackets_alone_are_part_of_a_name(write, labels):
    assert read(write(labeled(*labels))).task.labels == labels


def pairs_of(first, second, label, names):
    return [dict(zip(names, (first, second, name), strict=True)) for name in label]


def test_columns_and_labels_that_differ_by_file(write):
    train = write(pairs_of("a", "b", ("contradictory", "neutral"), ("premise", "hypo", "label")))
    rows = pairs_of("c", "d", ("contradiction", "neutral"), ("sentence1", "sentence2", "gold_label"))
    dev, test = write(rows, "dev.jsonl"), write(rows, "test.jsonl")
    message = message_of(train, dev)
    assert message.startswith(f"{dev}: line 1: unknown label 'contradiction'; {train} has: ")
    assert message.endswith("if it means 'contradictory', add --label-map contradiction=contradictory")
    data = read(train, dev, test, label_map=("contradictory=contradiction",))
    assert data.task.labels == ("contradiction", "neutral")
    assert (data.dev[0].texts[0], data.dev[0].targets.tolist()) == (("c", "d"), [0, 1])
    assert data.test[0].targets.tolist() == [0, 1]
    assert f"{dev}: reads the columns gold_label instead of label; choose others with --dev-label" in data.notes
    both = write([row | {"premise": "e", "hypothesis": "f", "topic": "neutral"} for row in rows], "both.jsonl")
    options = {"label_map": {"contradictory": "contradiction"}}
    assert "no column 'hypo'" in message_of(train, both, **options)
    data = read(train, both, dev_text=("premise", "hypothesis"), dev_label=("topic",), **options)
    assert (data.dev[0].texts[0], data.dev[0].targets.tolist()) == (("e", "f"), [1, 1])


@pytest.mark.parametrize(
    ("one", "two"), [("Refund", "refund"), ("caf\u00e9", "cafe\u0301"), ("not ok", "not_ok"), ("ok", "o\u200bk")]
)
def test_classes_that_look_alike_are_named_with_their_sizes(write, one, two):
    (note,) = notes_of(write(labeled(one, one, two, "other")))
    assert f"{one!r} 2, {two!r} 1; --label-map {two}={one} joins them" in note


@pytest.mark.parametrize("labels", [("-1.5x", "1.5x"), ("A-", "A"), ("01", "1"), ("C++", "C")])
def test_classes_that_differ_do_not_look_alike(write, labels):
    assert notes_of(write(labeled(*labels, *labels))) == []


def test_all_bad_rows_are_named_at_once_and_may_be_skipped(write):
    train = write([*labeled("a", "b", {"x": 1}), {"text": None, "label": "a"}])
    dev = write(labeled("a", "c", "b"), "dev.jsonl")
    message = message_of(train, dev)
    places = (f"{train}: line 3: the label", f"{train}: line 4: 'text' is null", f"{dev}: line 2: unknown label 'c'")
    assert message.startswith("3 bad rows: ") and all(place in message for place in places)
    assert message_of(train, dev, skip_bad_rows=2) == message
    data = read(train, dev, skip_bad_rows=3)
    assert (data.train.ids, data.dev[0].ids) == (["0", "1"], ["0", "2"])
    assert data.notes[1].startswith("3 bad rows are left out: ")
    message = message_of(write(labeled(*[{}] * 25), "all.jsonl"))
    assert message.startswith("25 bad rows: ") and message.endswith("; and 5 more (--skip-bad-rows leaves rows out)")
    unknown = write(labeled("c"), "unknown.jsonl")
    assert "no example has a label that can be used" in message_of(train, unknown, skip_bad_rows=4)


@pytest.mark.parametrize("seed", range(2))
def test_several_labels_that_occur_twice_are_in_both_splits(write, seed):
    rng = random.Random(seed)
    names = [f"l{number}" for number in range(12) for _ in range(number + 1)]
    rows = [rng.sample(names, rng.choice((0, 1, 1, 2))) for _ in range(60)] + [["once"]]
    data = set_aside(write(labeled(*rows)), seed=seed)
    in_train, in_dev = (split.targets.sum(0) for split in (data.train, data.dev[0]))
    total = in_train + in_dev
    assert (in_train >= 1).all() and len(data.dev[0].texts) < 15
    alone = np.array([[name] in rows for name in data.task.labels])  # some row holds nothing else
    assert (in_dev[alone & (total > 1)] >= 1).all()


def test_a_separator_makes_several_labels(write):
    data = read(write(labeled("b; a", "", "c;", "b")), label_separator=";")
    assert (data.task.kind, data.task.labels) == ("multi-label", ("a", "b", "c"))
    assert data.train.targets.tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0]]


def test_several_label_columns(write):
    rows = [{"text": "x", "toxic": "1", "rude": "FALSE"}, {"text": "y", "toxic": 0, "rude": True}]
    train = write(rows)
    data = read(train, label=("toxic", "rude"))
    assert (data.task.kind, data.task.labels) == ("multi-label", ("toxic", "rude"))
    assert data.train.targets.tolist() == [[1, 0], [0, 1]]
    wrong = write([*rows, {"text": "z", "toxic": 2, "rude": 0}], "wrong.jsonl")
    message = message_of(wrong, label=("toxic", "rude"))
    assert message == f"{wrong}: line 3: 'toxic' is 2; it must be 0, 1, true or false"


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl"])
def test_a_regression_is_standardized_by_its_training_values(write, name):
    train = write([{"text": "t", "score": value} for value in (-1, "", "nan", 2.5, "4")], name)
    data = read(train, kind="regression")
    assert (data.task.name, data.task.kind, data.task.metric) == ("regression", "regression", "spearman")
    assert (data.train.targets.dtype, data.train.targets.tolist()) == (np.float64, [-1, 2.5, 4])
    assert (data.task.shift, data.task.scale) == (pytest.approx(5.5 / 3), pytest.approx(np.std([-1, 2.5, 4])))
    assert "2 of 5 examples have no label (empty or null 1, 'nan' 1;" in data.notes[1]
    aside = set_aside(train, "regression")
    assert aside.task.shift == aside.train.targets.mean()


@pytest.mark.parametrize(
    ("labels", "values"),
    [
        (["3,00", "4,5", "-1", ""], [3, 4.5, -1]),
        (["1,234", "0,5", "12"], [1.234, 0.5, 12]),
        (["1,234", "1234,5"], [1.234, 1234.5]),
        (
            ["1,234", "2,000"],
            "line 1: the label is '1,234'; it must be a finite number with a decimal point and no marks",
        ),
        (["1,234", "2,5", "1.5"], "line 1: the label is '1,234'; it must be a finite number with a decimal point"),
        (
            ["1,5", "2,5", "x"],
            "line 3: the label is 'x'; it must be a finite number with a decimal comma, as elsewhere",
        ),
        (["1,234,567", "2,5"], "line 1: the label is '1,234,567'; it must be a finite number with a decimal point"),
    ],
)
def test_decimal_commas_are_read_if_no_label_can_be_otherwise(write, labels, values):
    train = write(labeled(*labels))
    if isinstance(values, str):
        assert values in message_of(train, kind="regression")
        return
    data = read(train, kind="regression")
    assert data.train.targets.tolist() == values
    assert "label in 'label': one number per example, with decimal commas; " in data.notes[0]
    assert own_data.read_labeled(data.task, train, ((), ()))[0].targets.tolist() == values
    wrong = write(labeled("2.5"), "dev.jsonl")
    assert "dev.jsonl: line 1: the label is '2.5'" in message_of(train, wrong, kind="regression")


def test_a_dev_split_is_set_aside_by_class(write):
    labels = ["common"] * 160 + ["rare"] * 38 + ["once"] * 2
    train = write(labeled(*labels))
    data = set_aside(train, seed=3)
    (dev,) = data.dev
    assert data.notes[1:] == (
        f"{train}: 20 of 200 examples are set aside as the dev split (seed 3); give your own with --dev",
    )
    assert np.bincount(dev.targets, minlength=3).tolist() == [15, 1, 4]
    assert sorted(data.train.ids + dev.ids, key=int) == [str(row) for row in range(200)]
    assert dev.texts == [(f"text {row}",) for row in dev.ids]
    again, other = (set_aside(train, seed=seed) for seed in (3, 4))
    assert again.dev[0].ids == dev.ids != other.dev[0].ids


@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_every_class_of_two_is_in_both_splits(write, fraction):
    data = set_aside(write(labeled(*"aabbbcdddddd")), dev_fraction=fraction)
    assert set(data.train.targets.tolist()) == {0, 1, 2, 3} and set(data.dev[0].targets.tolist()) == {0, 1, 3}
    assert len(data.dev[0].texts) == {0.01: 3, 0.5: 6, 0.99: 8}[fraction]


def test_texts_in_both_splits_are_counted(write):
    train, dev = write(labeled("a", "b")), write(labeled("a", "b", "a"), "dev.jsonl")
    (data,) = read_tasks("classification", None, {"train": train, "dev": dev}, {})
    assert data.notes[1:] == (f"{dev}: 2 of 3 dev examples have a text that is in the training split",)
    (data,) = read_tasks("classification", None, {"train": dev, "dev": train}, {})
    assert data.notes[1].startswith(
        f"{train}: all 2 dev examples have a text that is in the training split, so a score"
    )


def test_empty_texts_are_kept_with_a_note(write):
    rows = [
        {"sentence1": first, "sentence2": " ", "label": label}
        for first, label in zip(("x", " ", ""), "aba", strict=True)
    ]
    train = write(rows)
    data = read(train)
    assert data.notes[1] == f"{train}: line 2: the first of 2 examples with empty text"
    assert len(data.train.texts) == 3
    empty = write(rows[1:], "empty.jsonl")
    assert message_of(empty) == f"{empty}: every text is empty in 'sentence1' and 'sentence2'; choose with --text"


def test_quoting_is_passed_on(write, tmp_path):
    train = tmp_path / "train.tsv"
    train.write_text('text\tlabel\n"a\tb"\tx\nc\ty\n')
    assert "add --quoting csv" in message_of(train)
    assert read(train, quoting="csv").train.texts == [("a\tb",), ("c",)]
    train.write_text("x\tso it is now\ny\tnot so\n")
    assert "add --no-header if that is data, and choose columns by number); choose with --text" in message_of(train)
    (data,) = read_tasks(
        "classification", None, {"train": train, "dev": train}, {"text": "1", "label": "0", "no_header": True}
    )
    assert (data.task.labels, data.train.texts, data.text_columns[0]) == (
        ("x", "y"),
        [("so it is now",), ("not so",)],
        ("1",),
    )
