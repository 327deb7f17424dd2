"""Questions from SQuAD's files and from a user's files: forms of answers, omitted and unusable questions."""

import gzip
import json
from functools import partial

import pytest
from task_reading import read as read_task
from task_reading import read_divided, refusal

from electra_fast.finetuning.readers.question_files import iterate_questions, read_squad
from electra_fast.finetuning.task import Answer

CONTEXT = "The sky is blue. Grass is green."
BLUE = Answer("blue", 11)
GREEN = Answer("green", 26)
EXPECTED = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'

read = partial(read_task, "question-answering")


def annotated(text, start):
    return {"text": text, "answer_start": start}


def asked(id, *answers, **more):
    return {"id": id, "question": f"{id}?", "answers": [annotated(*answer) for answer in answers], **more}


def squad(*questions, context=CONTEXT, **more):
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}], **more}


def row(answers, **more):
    return {"question": "?", "context": CONTEXT, "answers": answers, **more}


@pytest.fixture
def write_squad(write):
    def write_files(*questions, name="{}.json", **more):
        for part in ("train", "dev"):
            write(squad(*questions or (asked("a", BLUE),), **more), name.format(part))

    return write_files


def answers_of(split):
    return split.targets.tolist()


def streamed(path, **options):
    return list(iterate_questions(path, **options))


def test_squad_1(write, tmp_path):
    train = write(squad(asked("a", BLUE, ("sky is blue", 4)), asked("b", GREEN), version="1.1"), "train.json")
    write(squad(asked("c", BLUE), version="1.1"), "dev.json")
    write(squad(asked("d"), version="1.1"), "test.json")
    data = read_squad("squad1", tmp_path)
    assert (data.task.name, data.task.kind, data.task.metric) == ("squad1", "question-answering", "f1")
    assert (data.task.has_unanswerable, data.task.labels, data.notes, data.test[0].targets) == (False, (), (), None)
    assert (data.train.name, data.train.path, data.train.ids) == ("train", train, ["a", "b"])
    assert data.train.texts == [("a?", CONTEXT), ("b?", CONTEXT)]
    assert answers_of(data.train) == [(BLUE, Answer("sky is blue", 4)), (GREEN,)]
    assert [(split.name, split.ids) for split in data.dev] == [("dev", ["c"])]
    path = write(squad(asked("a", BLUE), asked("b"), version="1.1"), "dev.json")
    place = f"{path}: data[0].paragraphs[0].qas[1], id 'b'"
    assert refusal(read_squad, "squad1", tmp_path).startswith(f"{place}: no answer, but every question in SQuAD 1.1")


def test_squad_2(write, tmp_path):
    impossible = asked("b", is_impossible=True, plausible_answers=[annotated(*GREEN)])
    write(squad(asked("a", BLUE, is_impossible=False), impossible), "train-v2.0.json")
    dev = write(squad(asked("a", BLUE, is_impossible=False)), "validation-v2.0.json")
    write(squad({"id": "x", "question": "?"}), "test-v2.0.json")
    data = read_squad("squad2", tmp_path)
    assert (data.task.name, data.task.has_unanswerable) == ("squad2", True)
    assert answers_of(data.train) == [(BLUE,), ()]
    assert [(split.name, split.path, answers_of(split)) for split in data.dev] == [("dev", dev, [(BLUE,)])]
    assert [(split.name, split.ids, split.targets) for split in data.test] == [("test", ["x"], None)]


def test_folder_with_both_versions(write_squad, tmp_path):
    write_squad(asked("1, field", BLUE), name="{}-a.json", version="1.1")
    write_squad(asked("2, field", BLUE), name="{}-b-v1.json", version="v2.0")  # the field has precedence
    write_squad(asked("1, name", BLUE, is_impossible=False), name="{}-c-v1.1.json")
    write_squad(asked("2, name", BLUE), name="{}-d-V2.0.json", version="2020 edition")
    write_squad(asked("1, neither", BLUE), name="{}-e.json")
    write_squad(asked("2, impossible", BLUE, is_impossible=False), name="{}-f.json")
    assert read_squad("squad1", tmp_path).dev[0].ids == ["1, field", "1, name", "1, neither"]
    assert read_squad("squad2", tmp_path).train.ids == ["2, field", "2, name", "2, impossible"]


def test_parts_are_joined_in_alphabetical_order(write, write_squad, tmp_path):
    write_squad(asked("c", BLUE))
    for part in "ba":
        write(squad(asked(part, BLUE)), f"train-{part}.json")
    assert read_squad("squad1", tmp_path).train.ids == ["a", "b", "c"]
    again = write(squad(asked("b", BLUE)), "train-d.json")
    place = f"{again}: data[0].paragraphs[0].qas[0], id 'b'"
    assert refusal(read_squad, "squad1", tmp_path).startswith(f"{place}: id = 'b': must be unique")


@pytest.mark.parametrize(("name", "folder"), [("squad2", "SQuAD"), ("squad2", "squad-v2.0"), ("squad1", "squadv1")])
def test_usual_names_of_folders(write, write_squad, tmp_path, name, folder):
    write(b"not read", "squadv2/train.json" if name == "squad1" else "SQuAD1.1/train.json")
    write_squad(name=folder + "/{}.json", version=name[-1])
    assert read_squad(name, tmp_path).train.ids == read_squad(name, tmp_path / folder).train.ids == ["a"]
    assert read_squad(name, tmp_path).task.has_unanswerable == (name == "squad2")


def test_missing_files(write_squad, tmp_path):
    def lacks(function, *args):
        return refusal(function, *args, error=FileNotFoundError)

    assert lacks(read_squad, "squad1", tmp_path / "x") == f"{tmp_path / 'x'}: no such folder"
    write_squad()
    message = f"{tmp_path}: no train*.json of squad2 in this folder or in squad/ or squad2/"
    assert lacks(read_squad, "squad2", tmp_path) == message
    (tmp_path / "dev.json").unlink()
    assert lacks(read_squad, "squad1", tmp_path) == f"{tmp_path}: no dev*.json or validation*.json of squad1"
    for path in (tmp_path / "x.json", tmp_path / "x.jsonl"):
        assert lacks(read, path) == lacks(streamed, path) == f"{path}: no such file"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (annotated("blue", 11), [BLUE]),
        ({"text": "is", "start": 23}, [("is", 23)]),
        ({"text": "is"}, [("is", 8)]),
        ({"text": ["is", "blue"], "answer_start": [23, 11]}, [("is", 23), BLUE]),
        ({"text": ["blue", "is"]}, [BLUE, ("is", 8)]),
        ({"text": [], "answer_start": []}, []),
        ({"text": [""], "answer_start": [-1]}, []),
        ([annotated("blue", 11), {"text": "is", "start": 23}, "green"], [BLUE, ("is", 23), GREEN]),
        (["blue", " "], [BLUE]),
        ([], []),
        ("", []),
        (None, []),
        ("is", [("is", 8)]),
        ("BLUE.\nGrass", [("blue. Grass", 11)]),  # as spelled in the context
        (" green", [(" green", 25)]),
    ],
)
def test_forms_of_answers(write, answers, expected):
    data = read(write([row("sky"), row(answers)]))
    assert answers_of(data.train) == [(Answer("sky", 4),), tuple(expected)]
    assert data.task.has_unanswerable == (not expected)


def test_ids_and_texts_are_unchanged(write):
    context = "\u2028 Ä\u00a0b \r\n c "
    rows = [{"question": " ?\t", "context": context, "answers": ["b \r\n c "], "id": id} for id in (None, "x")]
    path = write([*rows, row("blue")])
    data = read(path)
    assert data.train.texts[:2] == [(" ?\t", context)] * 2
    assert answers_of(data.train) == [(Answer("b \r\n c ", 4),)] * 2 + [(BLUE,)]
    assert data.train.ids == [id for id, _, _ in streamed(path)] == ["0", "x", "2"]


def test_options_for_columns_and_quotes(write):
    path = write([row("no", q="?", passage=CONTEXT, gold="blue", question="no", context="no")])
    data = read(path, text=("q", "passage"), label=("gold",))
    assert (data.train.texts, answers_of(data.train)) == ([("?", CONTEXT)], [(BLUE,)])
    assert streamed(path, text=("q", "passage")) == [("0", "?", CONTEXT)]
    path = write(b'question\tcontext\tanswers\n"a ""b""?"\tx y\ty\n', "train.tsv")
    assert read(path).train.texts == [('"a ""b""?"', "x y")]
    assert read(path, quoting="csv").train.texts == [('a "b"?', "x y")]
    assert streamed(path, quoting="csv") == [("0", 'a "b"?', "x y")]


def test_test_file_without_answers(write):
    train = write([row("blue")])
    for content in ({"question": "?", "context": "x"}, row(None)):
        (test,) = read(train, test=write([content], "test.jsonl")).test
        assert (test.name, test.ids, test.targets) == ("test", ["0"], None)
    (test,) = read(train, test=write([row("blue"), row(None)], "test.jsonl")).test
    assert answers_of(test) == [(BLUE,), ()]


def test_questions_are_streamed(write):
    questions = iterate_questions(write('{"question": "?", "context": "x"}\nnot JSON\n', "train.jsonl"))
    assert next(questions) == ("0", "?", "x")
    assert "line 2: not a JSON object" in refusal(next, questions)


def test_validation_set_has_whole_contexts(write):
    path = write([row("blue", id=id, context=f"{id % 20} {CONTEXT}") for id in range(60)])
    data, other = (read_divided("question-answering", path, dev_fraction=0.25, seed=seed) for seed in (3, 4))
    train, dev = ({context for _, context in split.texts} for split in (data.train, data.dev[0]))
    assert (len(train), len(dev), train & dev) == (15, 5, set())
    assert sorted(map(int, data.train.ids + data.dev[0].ids)) == list(range(60))
    (note,) = data.notes
    assert note.startswith(f"{path}: 5 of 20 contexts, with 15 of 60 questions, become the validation set (seed 3)")
    assert other.dev[0].ids != data.dev[0].ids
    for fraction, num_dev in ((0.001, 1), (0.999, 19)):  # neither split is empty
        data = read_divided("question-answering", path, dev_fraction=fraction)
        assert len(data.dev[0].ids) == 3 * num_dev


def test_answers_outside_their_context_are_not_trained(write):
    wrong = annotated("red", 4)
    right = annotated(*GREEN)
    answers = {"a": [wrong, right], "b": [wrong, wrong], "c": "red", "d": None}
    path = write([row("blue", id=id) for id in range(40)] + [row(items, id=id) for id, items in answers.items()])
    data = read(path, test=path)
    assert data.notes[0].startswith(
        f"{path}: 4 answers are not in their context, even ignoring case and spacing (first: "
    )
    assert "(first: question 'a')" in data.notes[0] and "2 of 44 questions" in data.notes[0]
    lost = (f"{path}: 2 {name} questions have no answer in their context" for name in ("dev", "test"))
    assert data.notes[1:] == (*lost,)
    assert (data.train.ids[-2:], answers_of(data.train)[-2:]) == (["a", "d"], [(GREEN,), ()])
    wrong = Answer("red", -1)
    for split in (*data.dev, *data.test):
        assert answers_of(split)[-4:] == [(wrong, GREEN), (wrong, wrong), (wrong,), ()]


def test_file_with_many_lost_answers_is_refused(write):
    good = write([row("blue")], "good.jsonl")
    path = write([row("blue")] * 20 + [row(annotated("red", 3)), row(["a rose", "red"])])
    message = refusal(read, path, good)
    assert message.startswith(f"2 bad rows: {path}: line 21: the answer 'red' is not in its context, at answer_start 3")
    assert f"; {path}: line 22: the answer 'a rose' is not in its context" in message
    data = read(path, good, skip_bad_rows=2)
    assert (len(data.train.ids), data.task.has_unanswerable) == (20, False)
    assert data.notes[0].startswith("2 bad rows are left out: ")


CHOOSE = f"choose with --text, or nest objects as in SQuAD: {EXPECTED}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"data": [', "not JSON: Expecting value: line 1 column 11 (char 10)"),
        (b'{"question": 1}\n5\n', "line 2: not a JSON object: 5"),
        (b'{"question": 1}\n{"a\n', "line 2: not a JSON object: Unterminated string starting at"),
        ([["?", "x"]], f"neither a list of objects nor SQuAD's JSON, {EXPECTED}"),
        ({"questions": []}, f"neither 'question' nor 'context'; available columns: questions; {CHOOSE}"),
        ({"data": [{"paragraphs": [{"qas": 5}]}]}, "data[0].paragraphs[0].qas is not a list of objects"),
        ({"data": []}, "no questions"),
        (b'{"data": "\xff"}', "line 1: not UTF-8 at byte 10"),
        (b'{"data": "\\uD83D"}', "not JSON: unpaired surrogate"),
        (squad(asked("a"), context=" \n\u00a0"), "data[0].paragraphs[0].qas[0], id 'a': the context is empty"),
        (squad({"id": 1}), "data[0].paragraphs[0].qas[0], id 1: no 'question'; available columns: id; choose"),
    ],
)
def test_unusable_json_is_refused(write, content, message):
    good = write([row("blue")])
    path = write(content, "train.json")
    text = refusal(read, good, path)
    assert text.startswith(f"{path}: {message}") and refusal(streamed, path) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": 5}, "question = 5: must be text"),
        ({"context": None}, "context = null: must be text"),
        ({"context": " ", "id": 3}, "the context is empty"),
        ({"id": [1]}, "id = [1]: must be text or an integer"),
        ({"id": "x"}, "id = 'x': must be unique"),
        ({"answers": [annotated("blue", "x")]}, "answer_start = 'x'"),
        ({"answers": [annotated("blue", 11.5)]}, "answer_start = 11.5"),
        ({"answers": [annotated("blue", True)]}, "answer_start = True"),
        ({"answers": [{"answer_start": 1}]}, "text of an answer = null: must be text"),
        ({"answers": 5}, "text of an answer = 5: must be text"),
        ({"answers": annotated(["blue"], [])}, "answer_start = []: must be a list of 1 items"),
        ({"answers": annotated(["blue"], 11)}, "answer_start = 11: must be a list of 1 items"),
        ({"is_impossible": True}, "is_impossible is true, but the question has the answer 'blue'"),
        ({"is_impossible": "false", "answers": []}, "is_impossible is false, but the question has no answer"),
        ({"is_impossible": "maybe"}, "is_impossible = 'maybe'"),
        ({"answers": annotated("blue", 11) | {"answer_end": 19}}, "the answer 'blue' at answer_start = 11 does not"),
        ({"answers": annotated("blue", 11) | {"length": 2}}, "the answer 'blue' at answer_start = 11 does not end at"),
    ],
)
def test_unusable_rows_are_refused_or_skipped(write, change, message):
    good = write([row("blue")], "good.jsonl")
    path = write([row("blue", id="x"), row("blue") | change])
    text = refusal(read, path, good)
    id = f", id {change['id']!r}" if isinstance(change.get("id"), int | str) else ""
    assert text.startswith(f"{path}: line 2{id}: {message}")
    if "answers" not in change and "is_impossible" not in change:
        assert refusal(streamed, path) == text
    data = read(path, good, skip_bad_rows=1)
    assert data.train.ids == ["x"] and data.notes[0] == f"1 bad row is left out: {text}"


def test_unusable_columns_and_options_are_refused(write):
    good = write([row("blue")])
    path = write([{"question": "?", "passage": "x"}], "other.jsonl")
    available = "available columns: question, passage; choose with"
    message = f"{path}: line 1: no 'context'; {available} --text"
    assert refusal(streamed, path) == refusal(read, good, test=path) == message
    message = f"{path}: no column 'answers' or 'answer' or 'answer_text'; {available} --label"
    assert refusal(read, path) == refusal(read, good, dev=path) == message
    assert refusal(read, path, label=("gold",)) == f"{path}: no column 'gold'; {available} --label"
    message = refusal(read, good, text=("question",))
    assert message.startswith("--text = question: must be two columns, question and context, got 1")
    assert message == refusal(streamed, good, text=("question",))
    assert refusal(read, good, label=("a", "b")).startswith("--label = a,b: must be one column")
    assert refusal(read, good, dev_fraction=1).startswith("dev_fraction = 1:")
    assert "all questions have the same context" in refusal(read_divided, "question-answering", good)
    path = write([row(None), row([])], "other.jsonl")
    message = f"{path}: no question has an answer; choose the column with --label"
    assert refusal(read, path) == refusal(read, good, dev=path) == message


QUESTION = {"id": "a", "question": "?", "answers": [annotated(*BLUE)]}
DETECTED = {"qid": "a", "question": "?", "answers": ["blue"]}
DETECTED |= {"detected_answers": [{"text": "blue", "char_spans": [[11, 14]]}]}
CMRC = {"query_id": "a", "query_text": "?", "answers": ["blue"]}
KORQUAD = {"context": CONTEXT, "qas": [{"id": "a", "question": "?", "answer": annotated(*BLUE)}]}
CELL = f"id,question,context,answers\na,?,{CONTEXT},"
SPANS = {"text": ["blue"], "char_spans": [{"start": [11], "end": [14]}]}
PYTHON = "\"{'text': array(['blue'], dtype=object), 'answer_start': array([11])}\""
FILES = {
    "a list of rows": ("x.json", [row("blue", id="a")]),
    "a list of paragraphs": ("x.json", [{"context": CONTEXT, "qas": [QUESTION]}]),
    "one question": ("x.json", row("blue", id="a")),
    "rows in data": ("x.json", {"data": [row("blue", id="a")], "version": 1}),
    "lines": ("x.json", f"{json.dumps(row('blue', id='a'))}\r\n\n"),
    "articles in lines": ("x.jsonl", [squad(QUESTION)["data"][0]]),
    "paragraphs in rows": ("x.parquet", [{"title": "t", "context": CONTEXT, "qas": [QUESTION]}]),
    "CMRC 2018": ("x.json", [{"context_text": CONTEXT, "qas": [CMRC]}]),
    "KorQuAD 2": ("x.json", {"data": [KORQUAD]}),
    "MRQA": (
        "x.jsonl.gz",
        gzip.compress(f'{{"header": {{}}}}\n{json.dumps({"context": CONTEXT, "qas": [DETECTED]})}'.encode()),
    ),
    "MRQA of the hub": ("x.parquet", [row(["blue"], qid="a", detected_answers=SPANS)]),
    "offsets in columns": ("x.jsonl", [row(None, id="a", answer_text="blue", answer_start=11.0, answer_end=15)]),
    "JSON in cells": ("x.csv", CELL + '"[{""text"": ""blue"", ""answer_start"": 11}]"'),
    "Python in cells": ("x.csv", CELL + PYTHON),
    "UTF-16": ("x.json", json.dumps(squad(QUESTION)).encode("utf-16")),
}


@pytest.mark.parametrize("name", FILES)
def test_formats_of_other_tools(write, name):
    file, content = FILES[name]
    path = write(content, file)
    assert streamed(path) == [("a", "?", CONTEXT)]
    data = read(path)
    assert (data.train.ids, data.train.texts, answers_of(data.train)) == (["a"], [("?", CONTEXT)], [(BLUE,)])
    assert data.notes == ()


def test_abbreviated_and_undetected_answers_of_other_tools(write):
    path = write(CELL + "\"{'text': array(['blue', ..., 'red'], dtype=object)}\"", "x.csv")
    assert "cannot be read (its middle is abbreviated)" in refusal(read, path)
    data = read(write([{"header": {}}, {"context": CONTEXT, "qas": [DETECTED | {"answers": ["Blue", "azure"]}]}]))
    assert answers_of(data.dev[0]) == [(BLUE, BLUE, ("azure", -1))]


@pytest.mark.parametrize(
    ("unit", "offset"),
    [
        ("UTF-16 code units", lambda text: len(text.encode("utf-16-le")) // 2),
        ("UTF-8 bytes", lambda text: len(text.encode())),
        ("characters from 1", lambda text: len(text) + 1),
        ("CR LF as one character", lambda text: len(text.replace("\r\n", "\n"))),
    ],
)
@pytest.mark.parametrize("end", [None, 0, -1])
def test_offsets_in_other_units_are_converted(write, unit, offset, end):
    contexts = ["青い空\r\n 青い空 b", "😀 a a a a\r\n a", "plain a a"]
    answers = [Answer("空", 8), Answer("a", 12), Answer("a", 6)]
    rows = []
    for context, (text, start) in zip(contexts, answers, strict=True):
        stated = annotated(text, offset(context[:start]))
        ends = {} if end is None else {"answer_end": offset(context[: start + len(text)]) + end}
        rows.append({"question": "?", "context": context, "answers": [stated | ends]})
    path = write(rows)
    data = read(path, write([row("blue")], "dev.jsonl"))
    assert answers_of(data.train) == [(answer,) for answer in answers]
    assert data.notes == (f"{path}: answer_start counts {unit}, judging by the answers; converted to characters",)


@pytest.mark.parametrize(
    ("context", "text", "start", "expected"),
    [
        (CONTEXT, "green", 20, GREEN),  # the only occurrence
        (CONTEXT, "is", 7, ("is", 8)),  # the nearest occurrence
        (CONTEXT, "is", 15, ("is", -1)),  # ambiguous
        (CONTEXT, "GRASS  is", 16, ("Grass is", 17)),
        ("Im Cafe\u0301\u00a0Rhein", "Café Rhein", 0, ("Cafe\u0301\u00a0Rhein", 3)),
        ("ﾃﾚﾋﾞと㍿", "テレビ", 5, ("ﾃﾚﾋﾞ", 0)),
        (CONTEXT, "blue", -1, BLUE),
        (CONTEXT, "blue", 99, BLUE),
    ],
)
def test_wrong_offsets_of_answers_are_corrected(write, context, text, start, expected):
    path = write([row("blue")] * 30 + [row(annotated(text, start), context=context)])
    data = read(path, write([row("blue")], "dev.jsonl"))
    assert answers_of(data.train)[30:] == ([] if expected[1] < 0 else [(expected,)])
    assert len(data.notes) == 1 and "(first: question '30')" in data.notes[0]
    assert ("left out" if expected[1] < 0 else "their real places are used") in data.notes[0]


def test_scores_of_characters_are_noted(write):
    (note,) = read(write([row("青", context="空は青い。"), row("blue")])).notes
    assert "compare characters, as in CMRC 2018" in note and "1 of 2 dev" in note
