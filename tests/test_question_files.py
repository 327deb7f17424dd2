"""Questions from SQuAD's files and from a user's own: what they hold, what is left out, and what is refused."""

import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.question_files import is_recoverable, iterate_questions, read_questions, read_squad
from electra_fast.finetuning.task import Answer

CONTEXT = "The sky is blue. Grass is green."
BLUE, GREEN = Answer("blue", 11), Answer("green", 26)
EXPECTED = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'
NO_LIST = f"is not a list of objects as in SQuAD's JSON, {EXPECTED}"
NAME_JSONL = "if every line is an object, name it .jsonl"


def annotated(text, start):
    return {"text": text, "answer_start": start}


def asked(id, *answers, **more):
    return {"id": id, "question": f"{id}?", "answers": [annotated(*answer) for answer in answers], **more}


def squad(*questions, context=CONTEXT, **more):
    return {"data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}], **more}


def row(answers, **more):
    return {"question": "?", "context": CONTEXT, "answers": answers, **more}


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(content), path)
        else:
            lines = content if path.suffix == ".jsonl" else [content]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write_file


@pytest.fixture
def write_squad(write):
    def write_files(*questions, name="{}.json", **more):
        for part in ("train", "dev"):
            write(squad(*questions or (asked("a", BLUE),), **more), name.format(part))

    return write_files


def read(train, dev=None, test=None, **options):
    return read_questions(train, dev or train, test, **options)


def answers_of(split):
    return split.targets.tolist()


def message_of(function, *args, kind=InputError, **options):
    with pytest.raises(kind) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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


def test_squad_2(write, tmp_path):
    impossible = asked("b", is_impossible=True, plausible_answers=[annotated(*GREEN)])
    contradictory = asked("c", GREEN, is_impossible=True)
    write(squad(asked("a", BLUE, is_impossible=False), impossible, contradictory), "train-v2.0.json")
    dev = write(squad(asked("a", BLUE, is_impossible=False)), "validation-v2.0.json")
    write(squad({"id": "x", "question": "?"}), "test-v2.0.json")
    data = read_squad("squad2", tmp_path)
    assert (data.task.name, data.task.has_unanswerable) == ("squad2", True)
    assert answers_of(data.train) == [(BLUE,), (), ()]
    assert [(split.name, split.path, answers_of(split)) for split in data.dev] == [("dev", dev, [(BLUE,)])]
    assert [(split.name, split.ids, split.targets) for split in data.test] == [("test", ["x"], None)]


def test_both_versions_side_by_side(write_squad, tmp_path):
    write_squad(asked("1, field", BLUE), name="{}-a.json", version="1.1")
    write_squad(asked("2, field", BLUE), name="{}-b-v1.json", version="v2.0")  # the field counts before the name
    assert read_squad("squad1", tmp_path).train.ids == ["1, field"]
    assert read_squad("squad2", tmp_path).train.ids == ["2, field"]
    write_squad(asked("1, name", BLUE, is_impossible=False), name="{}-c-v1.1.json")
    write_squad(asked("2, name", BLUE), name="{}-d-V2.0.json", version="2020 edition")
    write_squad(asked("1, neither", BLUE), name="{}-e.json")
    write_squad(asked("2, impossible", BLUE, is_impossible=False), name="{}-f.json")
    assert read_squad("squad1", tmp_path).dev[0].ids == ["1, field", "1, name", "1, neither"]
    assert read_squad("squad2", tmp_path).dev[0].ids == ["2, field", "2, name", "2, impossible"]


def test_parts_are_joined_in_the_order_of_their_names(write, write_squad, tmp_path):
    write_squad(asked("c", BLUE))
    for part in "ba":
        write(squad(asked(part, BLUE)), f"train-{part}.json")
    assert read_squad("squad1", tmp_path).train.ids == ["a", "b", "c"]
    again = write(squad(asked("b", BLUE)), "train-d.json")
    place = f"{again}: data[0].paragraphs[0].qas[0], id 'b'"
    message = f"{place}: a second question with the id 'b'; ids have to be unique"
    assert message_of(read_squad, "squad1", tmp_path) == message


@pytest.mark.parametrize(("name", "folder"), [("squad2", "SQuAD"), ("squad2", "squad-v2.0"), ("squad1", "squadv1")])
def test_folders_by_their_usual_names(write, write_squad, tmp_path, name, folder):
    write(b"not read", "squadv2/train.json" if name == "squad1" else "SQuAD1.1/train.json")
    write_squad(name=folder + "/{}.json", version=name[-1])
    assert read_squad(name, tmp_path).train.ids == read_squad(name, tmp_path / folder).train.ids == ["a"]
    assert read_squad(name, tmp_path).task.has_unanswerable == (name == "squad2")


def test_missing_files(write, write_squad, tmp_path):
    missing = tmp_path / "x"
    assert message_of(read_squad, "squad1", missing, kind=FileNotFoundError) == f"{missing}: no such folder"
    write_squad()
    message = f"{tmp_path}: no train*.json of squad2 there, nor in a folder squad or squad2"
    assert message_of(read_squad, "squad2", tmp_path, kind=FileNotFoundError) == message
    (tmp_path / "dev.json").unlink()
    message = f"{tmp_path}: no dev*.json or validation*.json of squad1"
    assert message_of(read_squad, "squad1", tmp_path, kind=FileNotFoundError) == message
    for path in (tmp_path / "x.json", tmp_path / "x.jsonl"):
        assert message_of(read, path, kind=FileNotFoundError) == f"{path}: no such file"
        assert message_of(streamed, path, kind=FileNotFoundError) == f"{path}: no such file"


@pytest.mark.parametrize("bad", [asked("b"), asked("b", BLUE, is_impossible=True)])
@pytest.mark.parametrize("part", ["train", "dev"])
def test_in_squad_1_every_question_has_an_answer(write, write_squad, tmp_path, bad, part):
    write_squad(version="1.1")
    path = write(squad(asked("a", BLUE), bad, version="1.1"), f"{part}.json")
    place = f"{path}: data[0].paragraphs[0].qas[1], id 'b'"
    message = f"{place}: no answer, but in SQuAD 1.1 every question has one; use --task squad2"
    assert message_of(read_squad, "squad1", tmp_path) == message


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
        ("BLUE.\nGrass", [("blue. Grass", 11)]),  # as the context has it
        (" green", [(" green", 25)]),
    ],
)
def test_forms_of_answers(write, answers, expected):
    data = read(write([row("sky"), row(answers)]))
    assert answers_of(data.train) == [(Answer("sky", 4),), tuple(expected)]
    assert data.task.has_unanswerable == (not expected)


@pytest.mark.parametrize("name", ["train.tsv", "train.csv", "train.jsonl", "train.parquet", "train.json"])
def test_every_format_has_the_same_questions(write, name):
    if name.endswith("v"):
        lines = ("context", "id", "answer", "question"), (CONTEXT, "7", "blue", "7?"), (CONTEXT, "8", "", "8?")
        content = "".join(("," if name.endswith(".csv") else "\t").join(line) + "\r\n" for line in lines)
        path = write(content.encode("utf-8-sig"), name)
    elif name == "train.json":
        path = write(json.dumps(squad(asked(7, BLUE), asked(8))).encode("utf-8-sig"), name)
    else:
        answers = {"text": ["blue"], "answer_start": [11]}, {"text": [], "answer_start": []}
        path = write([row(own, id=id, question=f"{id}?") for id, own in zip((7, 8), answers, strict=True)], name)
    data = read(path)
    assert (data.train.texts, answers_of(data.train)) == ([("7?", CONTEXT), ("8?", CONTEXT)], [(BLUE,), ()])
    assert (data.train.ids, data.task.name, data.notes) == (["7", "8"], "question-answering", ())
    assert streamed(path) == [("7", "7?", CONTEXT), ("8", "8?", CONTEXT)]


def test_ids(write):
    rows = write([row("blue", id=None), row("blue", id="x"), row("blue")])
    questions = write(squad({"question": "?", "answers": ["blue"]}, asked("x", BLUE), asked(None, BLUE)), "train.json")
    for path in (rows, questions):
        assert read(path).train.ids == [id for id, _, _ in streamed(path)] == ["0", "x", "2"]


def test_texts_are_left_as_they_are(write):
    context = "\u2028 Ä\u00a0b \r\n c "
    data = read(write([{"question": " ?\t", "context": context, "answers": ["b \r\n c "]}]))
    assert (data.train.texts, answers_of(data.train)) == ([(" ?\t", context)], [(Answer("b \r\n c ", 4),)])


def test_columns_and_quotes_as_asked(write):
    path = write([row("no", q="?", passage=CONTEXT, gold="blue", question="no", context="no")])
    data = read(path, text=("q", "passage"), label=("gold",))
    assert (data.train.texts, answers_of(data.train)) == ([("?", CONTEXT)], [(BLUE,)])
    assert streamed(path, text=("q", "passage")) == [("0", "?", CONTEXT)]
    path = write(b'question\tcontext\tanswers\n"a ""b""?"\tx y\ty\n', "train.tsv")
    assert read(path).train.texts == [('"a ""b""?"', "x y")]
    assert read(path, quoting="csv").train.texts == [('a "b"?', "x y")]
    assert streamed(path, quoting="csv") == [("0", 'a "b"?', "x y")]


def test_a_test_file_may_lack_answers(write):
    train = write([row("blue")])
    for content in ({"question": "?", "context": "x"}, row(None)):
        (test,) = read(train, test=write([content], "test.jsonl")).test
        assert (test.name, test.ids, test.targets) == ("test", ["0"], None)
    (test,) = read(train, test=write([row("blue"), row(None)], "test.jsonl")).test
    assert answers_of(test) == [(BLUE,), ()]


def test_questions_are_read_in_a_stream(write):
    questions = iterate_questions(write(b'{"question": "?", "context": "x"}\nnot JSON\n'))
    assert next(questions) == ("0", "?", "x")
    assert "line 2: not a JSON object" in message_of(next, questions)


def test_whole_contexts_are_set_aside(write):
    path = write([row("blue", id=id, context=f"{id % 20} {CONTEXT}") for id in range(60)])
    data, again, other = (read_questions(path, None, None, dev_fraction=0.25, seed=seed) for seed in (3, 3, 4))
    train, dev = ({context for _, context in split.texts} for split in (data.train, data.dev[0]))
    assert (len(train), len(dev), train & dev) == (15, 5, set())
    assert sorted(map(int, data.train.ids + data.dev[0].ids)) == list(range(60))
    note = f"{path}: 5 of 20 contexts, with 15 of 60 questions, are set aside as the dev split (seed 3); "
    assert data.notes == (note + "give your own with --dev",)
    assert (again.dev[0].ids == data.dev[0].ids, other.dev[0].ids == data.dev[0].ids) == (True, False)
    for fraction, num_dev in ((0.001, 1), (0.999, 19)):  # neither split is empty
        assert len(read_questions(path, None, None, dev_fraction=fraction).dev[0].ids) == 3 * num_dev


def test_answers_that_are_not_in_the_text(write):
    wrong, right = annotated("blue", 4), annotated(*GREEN)
    answers = {"a": [right], "b": [wrong, right], "c": [wrong, wrong], "d": "red", "e": None}
    path = write([row(own, id=id) for id, own in answers.items()])
    data = read(path, test=path)
    note = (
        f"{path}: 4 answers are not in the text at the given place, even after collapsing whitespace and ignoring "
        "case, the first in question 'b': left out of training, and with them 2 of 5 questions"
    )
    assert data.notes == (note,)
    assert (data.train.ids, answers_of(data.train)) == (["a", "b", "e"], [(GREEN,), (GREEN,), ()])
    wrong = Answer("blue", 4)
    for split in (*data.dev, *data.test):
        assert answers_of(split) == [(GREEN,), (wrong, GREEN), (wrong, wrong), (Answer("red", -1),), ()]
    assert not read(write([row("blue"), row("red")])).task.has_unanswerable


@pytest.mark.parametrize(
    ("context", "text", "start", "expected"),
    [
        ("a blue sky", "blue", 2, True),
        ("a blue sky", "BLUE \t SKY", 0, True),
        ("a blue sky", "lu", 4, True),  # anywhere in the words
        ("one blue sky", "blue", 0, False),
        ("a blue sky high", "blue", 7, False),
        ("a blue sky", "sky", 6, True),  # whitespace belongs to the word before it
        ("a blue sky", "a", -1, False),
        ("a\u202fblue\r\n\tsky", "a blue sky", 0, True),
        ("blue\u00a0sky", "blue\u00a0sky", 0, False),  # in the context part of a word, in the answer whitespace
        ("  sky", " sky", 0, True),  # whitespace at the beginning belongs to the first word
        ("ÉCOLE", "école", 0, True),
    ],
)
def test_recoverable_answers(context, text, start, expected):
    assert is_recoverable(context, Answer(text, start)) == expected


def test_recoverable_answers_as_stated():
    word, rng, seen = re.compile("[^ \t\r\n\u202f]+"), random.Random(1), []
    for _ in range(2000):
        context = "a" + "".join(rng.choices("abAB \t\u202f\u00a0", k=12))
        start = rng.randrange(13)
        text = context[start : rng.randint(start + 1, 13)].swapcase()
        place = min(max(start + rng.randint(-2, 2), 0), 13 - len(text))
        first, last = (len(word.findall(context[:end])) - 1 for end in (place + 1, place + len(text)))
        words = " ".join(word.findall(context)[first : last + 1])
        seen.append(" ".join(text.split()).lower() in words.lower())
        assert is_recoverable(context, Answer(text, place)) == seen[-1]
    assert 200 < sum(seen) < 1800


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"data": [', "not JSON: Expecting value: line 1 column 11 (char 10); get the file again"),
        (b'{"question": 1}\n{}\n', f"not JSON: Extra data: line 2 column 1 (char 16); {NAME_JSONL}"),
        ({"question": "?", "context": "x"}, f"not SQuAD's JSON, {EXPECTED}; {NAME_JSONL}"),
        ([row("blue")], f"not SQuAD's JSON, {EXPECTED}; {NAME_JSONL}"),
        ({"data": {"x": []}}, f"data {NO_LIST}"),
        ({"data": [{}]}, f"data[0].paragraphs {NO_LIST}"),
        ({"data": [{"paragraphs": [{}]}]}, f"data[0].paragraphs[0].qas {NO_LIST}"),
        ({"data": []}, "no questions"),
        (squad(asked("a"), context=" \n\u00a0"), "data[0].paragraphs[0].qas[0], id 'a': the context is empty"),
        (squad({"question": 5}), "data[0].paragraphs[0].qas[0]: the question is 5; it has to be text"),
        (squad({"id": 1}), "data[0].paragraphs[0].qas[0], id 1: the question is missing; it has to be text"),
    ],
)
def test_json_unlike_squad(write, content, message):
    path = write(content, "train.json")
    assert message_of(read, path) == message_of(streamed, path) == f"{path}: {message}"


@pytest.mark.parametrize("content", [b'{"data": "\xff"}', b'{"data": "\\uD83D"}'])
def test_json_that_is_not_unicode(write, content):
    path = write(content, "train.json")
    assert message_of(read, path).startswith(f"{path}: not JSON: 'utf-8' codec can't")


OUTSIDE = "the answer 'blue' does not fit into its context of 32 characters at answer_start {}; "
ANSWER_ERRORS = [
    ([annotated("blue", -1)], OUTSIDE.format(-1) + "count Unicode characters from 0"),
    ([annotated("blue", 29)], OUTSIDE.format(29) + "count Unicode characters from 0"),
    ([annotated("blue", "11")], "answer_start is '11'; it has to be an integer"),
    ([annotated("blue", True)], "answer_start is True; it has to be an integer"),
    ([{"answer_start": 1}], "the text of an answer is missing; it has to be text"),
    (5, "the text of an answer is 5; it has to be text"),
    ({"text": ["blue"], "answer_start": []}, "answer_start is []; it has to be a list of 1, as text is"),
    ({"text": ["blue"], "answer_start": 11}, "answer_start is 11; it has to be a list of 1, as text is"),
]


@pytest.mark.parametrize(("answers", "message"), ANSWER_ERRORS)
def test_answers_that_cannot_be_used(write, write_squad, tmp_path, answers, message):
    write_squad(version="1.1")
    path = write(squad(asked("a", BLUE), asked("b") | {"answers": answers}, version="1.1"), "dev.json")
    assert message_of(read_squad, "squad1", tmp_path) == f"{path}: data[0].paragraphs[0].qas[1], id 'b': {message}"
    path = write([row("blue"), row(answers)])
    assert message_of(read, path) == f"{path}: line 2: {message}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": 5}, "line 2: 'question' is 5, not text"),
        ({"context": None}, "line 2: 'context' is null, not text"),
        ({"context": " ", "id": 3}, "line 2, id 3: the context is empty"),
        ({"id": [1]}, "line 2: the id is [1]; it has to be text or an integer"),
        ({"id": 1}, "line 2, id 1: a second question with the id '1'; ids have to be unique"),
    ],
)
def test_rows_that_cannot_be_used(write, change, message):
    path = write([row("blue", id="1"), row("blue") | change])
    assert message_of(read, path) == message_of(streamed, path) == f"{path}: {message}"


def test_columns_that_are_missing(write):
    good, path = write([row("blue")]), write([{"question": "?", "passage": "x"}], "other.jsonl")
    there_are = "there are: question, passage; choose with"
    message = f"{path}: line 1: no 'context'; {there_are} --text"
    assert message_of(streamed, path) == message_of(read, good, test=path) == message
    message = f"{path}: no column answers or answer; {there_are} --label"
    assert message_of(read, path) == message_of(read, good, dev=path) == message
    assert message_of(read, path, label=("gold",)) == f"{path}: no column 'gold'; {there_are} --label"


def test_options_that_cannot_be_used(write):
    path = write([row("blue")])
    message = "--text names 1 columns (question); it has to be two: question, context"
    assert message_of(read, path, text=("question",)) == message_of(streamed, path, text=("question",)) == message
    message = message_of(read, path, label=("a", "b"))
    assert message == "--label names 2 columns (a, b); choose the one with the answers"
    assert message_of(read, path, dev_fraction=1) == "dev_fraction is 1; it has to be above 0 and below 1"
    message = f"{path}: all questions have the same context; give a dev split with --dev"
    assert message_of(read_questions, path, None, None) == message


def test_files_without_answers(write):
    good, path = write([row("blue")], "good.jsonl"), write([row(None), row([])])
    assert message_of(read, path) == message_of(read, good, dev=path) == f"{path}: no question has an answer"
    path = write([row("red"), row(None)])
    assert message_of(read, path) == f"{path}: no training question has an answer that is in its context"
