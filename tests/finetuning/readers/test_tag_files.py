"""Tagging tasks from files: splits, the inventory of tags, notes, and what cannot be learnt; and texts to predict."""

import numpy as np
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.tag_files import iterate_tagging, read_tagged, read_tagging

LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
TOKENS = [["Ada", "Lovelace", "met", "Babbage"], ["In", "New", "York", "."]]
TAGS = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-LOC", "I-LOC", "O"]]
FOUND = "tags read as {} (found in the tags; choose with --scheme)"


def columns(tokens=TOKENS, tags=TAGS, separator="\t"):
    return "\n".join(
        "".join(f"{token}{separator}{tag}\n" for token, tag in zip(*sentence, strict=True))
        for sentence in zip(tokens, tags, strict=True)
    )


def rows(tags=TAGS):
    return [{"tokens": own, "tags": own_tags} for own, own_tags in zip(TOKENS, tags, strict=True)]


def read(train, dev=None, test=None, **options):
    return read_tagging(train, dev or train, test, **options)


def named(data, split):
    return [[data.task.labels[tag] for tag in target] for target in split.targets]


def words_in(split):
    return [[text[a:b] for a, b in words] for (text,), words in zip(split.texts, split.words, strict=True)]


def message_of(path, *args, **options):
    with pytest.raises(InputError) as caught:
        read(path, *args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "separator"), [("a.conll", "\t"), ("a.bio", "  "), ("a.iob2", " x y "), ("a.TSV", "\t")]
)
def test_words_in_columns(write, name, separator):
    train = write(columns(separator=separator), name)
    data = read(train, test=train)
    task = data.task
    assert (task.name, task.kind, task.labels) == ("tagging", "tagging", LABELS)
    assert (task.metric, task.scheme, data.notes[:-1]) == ("f1", "IOB2", (f"{train}: {FOUND.format('IOB2')}",))
    assert data.notes[-1] == "entities by type to train/validate on: PER 2/2, LOC 1/1"
    assert data.train.texts == [("Ada Lovelace met Babbage",), ("In New York .",)]
    assert words_in(data.train) == TOKENS
    assert (data.train.words[0].dtype, data.train.targets.dtype, data.train.targets[0].dtype) == (np.int64, object, int)
    assert [target.tolist() for target in data.train.targets] == [[3, 4, 0, 3], [0, 1, 2, 0]]
    assert (data.train.name, data.train.path, data.train.ids) == ("train", train, ["0", "1"])
    assert [split.name for split in (*data.dev, *data.test)] == ["dev", "test"]
    assert named(data, data.test[0]) == TAGS


def test_tags_that_are_numbers(write):
    labels = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    ids = [[labels.index(tag) for tag in tags] for tags in TAGS]
    train = write(rows(ids), "train.parquet")
    hidden = write(rows([[-1] * 4, []]), "test.jsonl")
    data = read(train, test=hidden, labels=labels)
    assert (data.task.labels, named(data, data.train), data.test[0].targets) == (labels, TAGS, None)
    assert message_of(train) == "row 1: the tag is the number 1; name the tags by number with --labels O,B-PER,..."


def test_spans(write):
    rows = [{"text": "Ada", "spans": []}, {"text": "Ada Bob.", "spans": [[1, 2, "PER"]]}]
    rows.append({"text": "Ada Bob", "spans": [[0, 5, "PER"]]})
    train = write(rows, "train.jsonl")
    data = read(train, test=write([{"text": "Hi 👍🏽."}], "test.jsonl"))
    assert (data.task.labels, data.task.scheme, data.task.metric) == (("O", "B-PER", "I-PER"), "IOB2", "f1")
    assert words_in(data.train) == [["Ada"], ["Ada", "Bob", "."], ["Ada", "Bob"]]
    assert named(data, data.train) == [["O"], ["B-PER", "O", "O"], ["B-PER", "I-PER"]]
    assert (words_in(data.test[0]), data.test[0].targets) == ([["Hi", "👍🏽", "."]], None)
    note = "the first of 3 ends of spans inside a word; a word belongs to the first entity that has a part of it"
    assert f"{train}: line 2: {note}" in data.notes
    assert message_of(train, scheme="none") == "has spans, which become tags of IOB2; leave --scheme none out"
    dev = write(columns([["a"]], [["I-PER"]]), "dev.conll")
    assert read(train, dev, scheme="BIO").dev[0].targets[0].tolist() == [1]


def test_labels_that_are_not_entities(write):
    train = write("the DET\ncat NOUN\n")
    data = read(train)
    task = data.task
    assert (task.labels, task.metric, task.scheme) == (("DET", "NOUN"), "accuracy", "none")
    sizes = "words by tag to train/validate on: DET 1/1, NOUN 1/1"
    assert data.notes == (f"{train}: {FOUND.format('labels, not entities')}", sizes)
    assert read(train, scheme="IO").task.labels == ("O", "B-DET", "I-DET", "B-NOUN", "I-NOUN")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tO\nb\t\n", "line 2: no tag; choose with --label"),
        ("a O\nb O\n", "every word is tagged 'O'; there is nothing to learn; choose with --label"),
        ("a O\nb B-X\nc tag\n", "line 3: the tag 'tag' has no prefix such as B-, unlike others in IOB2"),
        ("a I-X\nb Y\nc O\n", "line 2: the tag 'Y' has no prefix such as B-, unlike others in IO"),
        ("a X_B\nb X_I\nc Y\nd O\n", "line 3: the tag 'Y' has no suffix such as _B, unlike others in IOB2"),
        ("a S-X\nb E-X\nc O\n", "1 of 2 tags of entities are ill-formed in IOBES, whose prefixes they have; rename"),
        ("\n-DOCSTART- O\n", "no words; choose the column with --text"),
        ("".join(f"word{n} tag{n}\n\n" for n in range(1001)), "1,001 different tags of 1,001 words; choose the column"),
        ([{"tokens": ["a"], "tags": None}], "line 1: no tag"),
        ([{"text": "a", "spans": None}], "line 1: no tag"),
        ([{"text": " ", "spans": []}], "no words; choose the column with --text"),
    ],
)
def test_files_with_nothing_to_learn_from(write, content, message):
    assert message_of(write(content, "train.conll" if isinstance(content, str) else "train.jsonl")).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "IOBX"}, "unknown tagging scheme 'IOBX'; did you mean IOB2?"),
        ({"labels": ("O", "O")}, "--labels names a label twice: O, O"),
        ({"labels": ("O", "B-LOC")}, "unknown entity type 'PER'; --labels names: 'LOC'; name all with --labels"),
        ({"dev_fraction": 1.0}, "dev_fraction is 1.0; it must be above 0 and below 1"),
    ],
)
def test_options_that_cannot_be_used(write, options, message):
    assert message in message_of(write(columns()), **options)


def test_files_that_are_not_there_or_of_another_kind(write, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing.conll: no such file"):
        read(tmp_path / "missing.conll")
    with pytest.raises(FileNotFoundError, match="missing.conll: no such file"):
        next(iterate_tagging(tmp_path / "missing.conll"))
    message = message_of(write("a", "train.xml"))
    assert message.startswith("cannot be read as tagged text; give a file that ends in .conll, .conllu, ")
    assert message_of(tmp_path).startswith("a folder of other files than parts; give a file that ends in .tsv, ")


def test_tags_that_training_lacks(write):
    other, train = write("x O\ny B-ORG\n", "other.conll"), write(columns())
    unknown = (
        f"{other}: line 2: unknown entity type 'ORG'; {train} has: 'LOC', 'PER'; name all with --labels, or remove"
    )
    assert message_of(train, other) == message_of(train, train, other) == f"{unknown} it"
    data = read(train, other, other, labels=("PER", "LOC", "ORG"))
    assert data.task.labels == ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
    train, other = write("a DET\nb NOUN\n"), write("a DET\nb X\n", "other.conll")
    assert message_of(train, other).startswith(f"{other}: line 2: unknown tag 'X'; {train} has: 'DET', 'NOUN'; name")
    assert read(train, other, labels=("X", "NOUN", "DET")).task.labels == ("X", "NOUN", "DET")


def test_every_scheme_becomes_iob2(write):
    content = "a I-PER\nb I-PER\nc B-PER\nd O\n"
    train, dev = write(content), write("a B-PER\n\nb O\nc I-PER\n", "dev.conll")
    data = read(train, dev)
    assert named(data, data.train) == [["B-PER", "I-PER", "B-PER", "O"]]
    assert named(data, data.dev[0]) == [["B-PER"], ["O", "B-PER"]]
    ill_formed = "tags that are ill-formed in {}; they are read as conlleval reads them"
    first = f"{dev}: line 1: 'B-PER' is the first of 1 {ill_formed.format('IOB1')}"
    assert data.notes[:-1] == (f"{train}: {FOUND.format('IOB1')}", first)
    data = read(train, train, scheme="bio")
    assert data.notes[0] == f"{train}: line 1: 'I-PER' is the first of 1 {ill_formed.format('IOB2')}"
    data = read(train, scheme="none")
    assert (data.task.labels, data.task.scheme) == (("B-PER", "I-PER", "O"), "none")


def test_other_notations_are_converted_and_said(write):
    train, dev = write("a x_b\nb x_i\nc y_b\nd out\n"), write("a x_b\n", "dev.conll")
    data = read(train, dev)
    assert data.task.labels == ("O", "B-x", "I-x", "B-y", "I-y")
    assert named(data, data.train) == [["B-x", "I-x", "B-y", "O"]]
    written = "IOB2, written 'x_b' for 'B-x' and 'out' for 'O'"
    assert data.notes[0] == f"{train}: {FOUND.format(written)}"
    assert data.notes[-1] == f"{dev}: none to validate y on, so the score leaves them out"
    numbers = write([{"tokens": ["a", "b"], "tags": [1, 0]}], "train.jsonl")
    assert read(numbers, labels=("O", "X_B", "X_I")).task.labels == ("O", "B-X", "I-X")
    alike = read(write("a B-Per\nb B-PER\nc O\n"))
    assert alike.notes[-1].endswith("'PER' and 'Per' differ only in case or spaces")
    assert "although some are 'O'" in read(write("a DET\nb X\n" * 9 + "c O\n")).notes[0]


@pytest.mark.parametrize(
    ("words", "tags"),
    [
        ("Ann met|so it", "B-X O|O O"),
        ("['Ann', 'met']|['so', 'it']", "['B-X', 'O']|['O', 'O']"),
        ("['Ann' 'met']|['so'\n 'it']", "['B-X' 'O']|array(['O', 'O'], dtype=object)"),
        ("Ann met|so it", '["B-X", "O"]|["O", "O"]'),
        ("Ann met|so it", '[[0, 3, "X"]]|[]'),
        ("Ann met|so it", "[{'start': 0, 'end': 3, 'label': 'X'}]|[]"),
    ],
)
@pytest.mark.parametrize("name", ["train.csv", "train.parquet", "train.jsonl"])
def test_tags_of_a_sentence_in_a_cell(write, words, tags, name):
    rows = [{"text": text, "labels": own} for text, own in zip(words.split("|"), tags.split("|"), strict=True)]
    data = read(write(rows, name))
    assert words_in(data.train) == [["Ann", "met"], ["so", "it"]]
    assert named(data, data.train) == [["B-X", "O"], ["O", "O"]]


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ("['O' 'B-X']|O O", "line 3: 'tags' is 'O O', which cannot be read as a list (it has no brackets)"),
        (
            "['O' ... 'B-X']|['O' 'O']",
            "line 2: 'tags' is \"['O' ... 'B-X']\", which cannot be read as a list (its middle",
        ),
        ("0 1|0 0", "line 2: the tag is the number 0; name the tags by number with --labels O,B-PER,..."),
        ("[0 1]|[0 0]", "line 2: the tag is the number 0; name the tags by number with --labels O,B-PER,..."),
        ("[O, B-X]|[O, O]", "line 2: 'tags' is '[O, B-X]', which cannot be read as a list (O is not in quotes)"),
    ],
)
def test_tags_in_a_cell_that_are_not_read_whole(write, tags, message):
    rows = [{"tokens": "['a' 'b']", "tags": own} for own in tags.split("|")]
    assert message in message_of(write(rows, "train.csv"))


@pytest.mark.parametrize(
    ("tags", "scheme", "types"),
    [
        ("O NAME PHONE E-MAIL", "auto", ("E-MAIL", "NAME", "PHONE")),
        ("O NAME PHONE CITY E-MAIL S-CODE", "auto", ("CITY", "E-MAIL", "NAME", "PHONE", "S-CODE")),
        ("O NAME E-MAIL", "auto", ("E-MAIL", "NAME")),
        ("O NAME PHONE B-DAY", "auto", ("B-DAY", "NAME", "PHONE")),
        ("O NAME E-MAIL", "IO", ("E-MAIL", "NAME")),
        ("OTHER OTHER NAME PHONE E-MAIL", "auto", ("E-MAIL", "NAME", "PHONE")),
        ("O NAME B-DAY", "IO", ("B-DAY", "NAME")),
        ("O B-NAME I-NAME B-E-MAIL", "auto", ("E-MAIL", "NAME")),
    ],
)
def test_types_that_look_like_a_place_and_a_type(write, tags, scheme, types):
    path = write("".join(f"w {tag}\n" for tag in tags.split()))
    data = read(path, scheme=scheme)
    assert tuple(label[2:] for label in data.task.labels[1::2]) == types
    split, _ = read_tagged(data.task, path, ((), ()), scheme=scheme)
    assert split.targets[0].tolist() == data.train.targets[0].tolist()


@pytest.mark.parametrize("tags", ["O NAME B-DAY", "O NAME PHONE CITY S-A S-B", "O MAIL NAME E-MAIL"])
def test_types_that_may_be_a_slip_are_asked_about(write, tags):
    assert "--scheme" in message_of(write("".join(f"w {tag}\n" for tag in tags.split())))


def test_types_without_tags_of_their_own_and_tags_without_types(write):
    assert read(write("a O\nb PER\n")).task.labels == ("O", "B-PER", "I-PER")
    assert read(write("a O\nb B\n")).task.labels == ("O", "B-_", "I-_")


def test_test_files_without_tags(write):
    train = write(columns())
    for content in ("a\nb\n\nc d\n", "a _\nb _\n", "a\t\nb\t\n"):
        data = read(train, test=write(content, "test.conll"))
        assert (data.test[0].targets, words_in(data.test[0])[0]) == (None, ["a", "b"])
    test = write("a _\nb O\n", "test.conll")
    assert message_of(train, train, test).startswith(f"{test}: line 1: the tag '_' has no prefix")
    empty = write("a O\n", "test.conll")
    assert read(train, test=empty).notes[1] == f"{empty}: has no entity, so its f1 is 0 whatever is predicted"


def test_sentences_without_words_are_left_out(write):
    train = write([rows()[0], {"tokens": [], "tags": []}, rows()[1]], "train.jsonl")
    data = read(train)
    assert (data.train.ids, words_in(data.train)) == (["0", "2"], TOKENS)
    assert f"{train}: 1 sentences without words are left out" in data.notes


def test_a_dev_split_is_set_aside(write):
    train = write(columns(TOKENS * 20, TAGS * 20) + "\nx B-RARE\n")
    data = read_tagging(train, None, None, dev_fraction=0.25, seed=3)
    again, other = (read_tagging(train, None, None, dev_fraction=0.25, seed=seed) for seed in (3, 4))
    assert (len(data.train.texts), len(data.dev[0].texts)) == (31, 10)
    assert sorted(map(int, data.train.ids + data.dev[0].ids)) == list(range(41))
    assert "40" in data.train.ids and data.dev[0].ids == again.dev[0].ids != other.dev[0].ids
    message = f"{train}: 10 of 41 sentences are set aside as the dev split (seed 3); give your own with --dev"
    assert message in data.notes and "RARE 1/0" in data.notes[-2]
    assert data.notes[-1] == f"{train}: none to validate RARE on, so the score leaves them out"
    every_tag = {tag for target in read_tagging(train, None, None, dev_fraction=0.99).train.targets for tag in target}
    assert every_tag == set(range(len(data.task.labels))) - {data.task.labels.index("I-RARE")}
    few = write(columns(TOKENS * 2, TAGS * 2))
    assert len(read_tagging(few, None, None, dev_fraction=0.1).dev[0].texts) == 2  # both types
    few = write(columns())
    with pytest.raises(InputError, match="2 sentences are too few to set a dev split aside; give one with --dev"):
        read_tagging(few, None, None)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.bio", "x\ny\n\nz", [("x y", ["x", "y"]), ("z", ["z"])]),
        ("a.txt", "Ada met\n\nB.\n", [("Ada met", None), ("", None), ("B.", None)]),
        ("a.tsv", "id\ttext\n1\tAda met\n", [("Ada met", None)]),
        ("a.jsonl", [{"words": ["Ada", "is"]}, {"words": []}], [("Ada is", ["Ada", "is"]), ("", [])]),
        ("a.jsonl", [{"text": "Ada met", "label": 1}], [("Ada met", None)]),
    ],
)
def test_files_to_predict(write, name, content, expected):
    found = list(iterate_tagging(write(content, name)))
    assert [(text, words if words is None else [text[a:b] for a, b in words]) for text, words in found] == expected
    assert all(words is None or (words.dtype, words.shape[1]) == (np.int64, 2) for _, words in found)


def test_columns_to_predict(write):
    path = write([{"text": "a", "title": "b", "parts": ["c", "d"]}], "a.jsonl")
    assert [text for column in ("title", "parts") for text, _ in iterate_tagging(path, text=(column,))] == ["b", "c d"]
    for options, message in (
        ({"text": ("x",)}, "no column 'x'; there are: text, title, parts; choose with --text"),
        ({"text": ("text", "title")}, "--text names 2 columns"),
    ):
        with pytest.raises(InputError, match=message):
            list(iterate_tagging(path, **options))
    broken = write([{"tokens": ["a"]}, {"tokens": None}], "b.jsonl")
    with pytest.raises(InputError, match="line 2: 'tokens' is null, not text"):
        list(iterate_tagging(broken))


def test_prediction_reads_in_a_stream(write):
    stream = iterate_tagging(write("a O\n\nb O\nc\n"))
    assert next(stream)[0] == "a"
    with pytest.raises(InputError, match="line 4: 1 columns"):
        next(stream)
