"""Tagging tasks from files of all forms: words and tags, spans and their conventions, and unusable files."""

import json
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from task_reading import read as read_task
from task_reading import read_divided, refusal, tagged, words_of

from electra_fast.finetuning.readers.tag_columns import SENTENCE_NAMES
from electra_fast.finetuning.readers.tag_files import iterate_tagging, read_tagged

read = partial(read_task, "tagging")

SENTENCES = ["Frau/O Kim/B-PER in/O Köln/B-LOC", "Kim/B-PER #ai/O ./O"]
DETECTED = "tags read as {} (detected; choose another scheme with --scheme)"


def lines_of(columns, comment="", separator="\t"):
    """Writes `SENTENCES`, each after a comment; `columns` makes a line of a number, a word and a tag."""
    blocks = []
    for sentence in SENTENCES:
        pairs = (pair.split("/") for pair in sentence.split())
        rows = (columns(str(number), *pair) for number, pair in enumerate(pairs, 1))
        blocks.append(comment + "".join(separator.join(row) + "\n" for row in rows))
    return "\n".join(blocks)


def two(_, word, tag):
    return word, tag


def predicted(path, **options):
    """Returns the words of each sentence of a file for prediction, or its text."""
    sentences = list(iterate_tagging(path, **options))
    assert all(words is None or (words.dtype, words.shape[1]) == (np.int64, 2) for _, words in sentences)
    return [text if words is None else [text[a:b] for a, b in words] for text, words in sentences]


KAGGLE = "Sentence #,Word,POS,Tag\nSentence: 1,Frau,X,O\n{0},Kim,X,B-PER\n{0},in,X,O\n{0},Köln,X,B-LOC\n"
KAGGLE += 'Sentence: 2,Kim,X,B-PER\n{1},#ai,X,O\n{1},"."{2},X,O\n'
CONLLU = ["# text = vámonos no", "1-2 vámonos _ _", "1 vamos ir VERB", "2 nos yo PRON", "2.1 x x X", "3 no no ADV"]
CONLLU = "\n".join(["\t".join(line.split(" ")) if "=" not in line else line for line in CONLLU]) + "\n"
NAMED = "# global.columns = ID FORM UPOS EXTRA:NE\n# newdoc\n1-2\tdel\t_\t_\n"
NAMED += lines_of(lambda number, word, tag: (number, word, "X" + number, tag), "# x\n")
ADA = {"text": "Ada met", "tokens": ["Ada", "met"], "entities": [[0, 3, "P"]], "label": 1}
SPANS = [[4, 7, "Y"]]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        # A word per line.
        ("a.bio", lines_of(two, separator="  "), {}, SENTENCES),
        ("a.iob2", lines_of(two, separator=" x y "), {}, SENTENCES),
        ("a.TSV", lines_of(two), {}, SENTENCES),
        (
            "a.conll",
            "\ufeff-DOCSTART- -X- O O\r\n\r\n#tag x O\r\na\u00a0b\u3000 y B-X\r\n",
            {},
            ["#tag/O a\u00a0b\u3000/B-X"],
        ),
        ("a.conll", "(\rx z B-X\n \n-DOCSTART- -X- O\nc z O\n\n\n", {}, ["(\rx/B-X", "c/O"]),
        ("a.conll", "New York\tB-X\nis \t O\n\t\nx\tO", {}, ["New York/B-X is/O", "x/O"]),
        ("a.conll", "Ann\tB-X\t\nis\tO\t\n", {}, ["Ann/B-X is/O"]),  # a tab may end a line
        ("a.conll", "1 B-X a\n2 O b\n", {"text": ("-1",), "label": ("1",)}, ["a/B-X b/O"]),
        # Words that look like comments.
        ("a.conll", "# O\nA B-X\n", {}, ["#/O A/B-X"]),
        ("a.conll", "A B-X\n# I-X\n", {}, ["A/B-X #/I-X"]),
        ("a.conll", "# #\nA NN\n", {}, ["#/# A/NN"]),
        ("a.conll", "#ai HASHTAG\nA NN\n# NN\n", {}, ["#ai/HASHTAG A/NN #/NN"]),
        ("a.conll", "# x\nA O\n# y z\n# y\nB B-X\n", {}, ["A/O B/B-X"]),
        ("a.conll", "#begin document (a/b); part 000\nA PER\nB O\n#end document\n", {}, ["A/B-PER B/O"]),
        # Columns of numbers and names.
        ("a.tsv", lines_of(lambda *row: (*row, "O"), "#\thttp://example.org\t[2010-07-04]\t\n"), {}, SENTENCES),
        ("a.conllu", CONLLU, {}, ["vamos/VERB nos/PRON no/ADV"]),
        ("a.conllu", CONLLU, {"text": ("2",), "label": ("-3",)}, ["ir/vamos yo/nos no/no"]),
        ("a.conllup", NAMED, {}, SENTENCES),
        (
            "a.txt",
            NAMED,
            {"text": ("form",), "label": ("UPOS",)},
            ["Frau/X1 Kim/X2 in/X3 Köln/X4", "Kim/X1 #ai/X2 ./X3"],
        ),
        # A table with a word per row.
        ("a.csv", KAGGLE.format("", "", ""), {}, SENTENCES),
        ("a.csv", KAGGLE.format("Sentence: 1", "Sentence: 2", ""), {}, SENTENCES),
        ("a.tsv", KAGGLE.format("", "", "").replace('"', "").replace(",", "\t"), {}, SENTENCES),
        ("a.conll", "token\tner\n" + lines_of(two), {}, SENTENCES),
        ("a.conll", "# made by hand\ntoken\tner\n" + lines_of(two), {}, SENTENCES),
        ("a.txt", "word label\n" + lines_of(two, separator=" "), {}, SENTENCES),
        ("a.csv", 'sent,word,tag\n1,Ann,B-X\n1,",O\n2,",O\n', {"quoting": "none"}, ['Ann/B-X "/O', '"/O']),
        ("a.csv", "sent_id,w,t\n1,a,O\n1,b,B-X\n2,c,O\n", {"text": ("w",), "label": ("t",)}, ["a/O b/B-X", "c/O"]),
        # Lists of words take precedence over texts with spans, and chosen columns over both.
        ("a.jsonl", [{"tokens": ["Ada", "met"], "tags": ["B-P", "O"]}], {}, ["Ada/B-P met/O"]),
        ("a.parquet", [{"words": ["Ada", "met"], "ner_tags": ["B-P", "O"]}], {}, ["Ada/B-P met/O"]),
        ("a.jsonl", [ADA], {}, ["Ada/B-P met/O"]),  # a row without tags
        ("a.jsonl", [ADA | {"tags": ["O", "B-X"], "own": SPANS}], {}, ["Ada/O met/B-X"]),
        ("a.jsonl", [ADA | {"own": SPANS}], {"text": ("text",), "label": ("own",)}, ["Ada/O met/B-Y"]),
        ("a.parquet", [{"tokens": ["a", "b"], "tags": [1, 0]}], {"labels": ("O", "B-X")}, ["a/B-X b/O"]),
        ("a.jsonl", [{"tokens": ["a", "b"], "tags": [1, 0]}], {"labels": ("O", "X_B", "X_I")}, ["a/B-X b/O"]),
        # Spans; a word belongs to the first span that covers a part of it.
        ("a.jsonl", [{"text": "Ada Bob.", "spans": [[1, 2, "PER"]]}], {}, ["Ada/B-PER Bob/O ./O"]),
        ("a.jsonl", [{"text": "Ada Bob", "spans": [[0, 5, "PER"]]}], {}, ["Ada/B-PER Bob/I-PER"]),
        ("a.jsonl", [{"text": "Ada Bob", "spans": [[0, 1, "A"], [2, 6, "B"]]}], {}, ["Ada/B-A Bob/B-B"]),
        (
            "a.parquet",
            [{"text": "Ann met Bob", "entities": {"start": [0, 8], "end": [3, 11], "label": ["X", "Y"]}}],
            {},
            ["Ann/B-X met/O Bob/B-Y"],
        ),
        # Spans of words, as in SpERT; the end is inclusive if a span begins where it ends.
        (
            "a.jsonl",
            [{"tokens": ["a", "b", "c"], "entities": [{"start": 0, "end": 2, "type": "X"}]}],
            {},
            ["a/B-X b/I-X c/O"],
        ),
        (
            "a.jsonl",
            [
                {
                    "tokens": ["a", "b", "c"],
                    "entities": [{"start": 0, "end": 1, "type": "X"}, {"start": 2, "end": 2, "type": "X"}],
                }
            ],
            {},
            ["a/B-X b/I-X c/B-X"],
        ),
        # Conversion of tags.
        ("a.conll", "a I-PER\nb I-PER\nc B-PER\nd O\n", {}, ["a/B-PER b/I-PER c/B-PER d/O"]),
        ("a.conll", "a I-PER\nb B-PER\n", {"scheme": "none"}, ["a/I-PER b/B-PER"]),
        ("a.conll", "a x_b\nb x_i\nc y_b\nd out\n", {}, ["a/B-x b/I-x c/B-y d/O"]),
        ("a.conll", "a O\nb B\n", {}, ["a/O b/B-_"]),
        ("a.conll", "the DET\ncat NOUN\n", {}, ["the/DET cat/NOUN"]),
        ("a.conll", "the DET\ncat NOUN\n", {"scheme": "IO"}, ["the/B-DET cat/B-NOUN"]),
    ],
)
def test_words_and_tags(write, name, content, options, expected):
    path = write(content, name)
    data = read(path, test=path, **options)
    assert tagged(data, data.train) == tagged(data, data.dev[0]) == tagged(data, data.test[0]) == expected
    if path.suffix not in (".jsonl", ".parquet"):  # for prediction, these are read as texts if they have both
        options = {key: option for key, option in options.items() if key in ("text", "quoting")}
        assert predicted(path, **options) == words_of(data.train)
    if "example.org" in str(content):
        message = "column 0 numbers the words; words are read from column 1, tags from column 2"
        assert any(message in note for note in data.notes)


MISFIT = "line 1: expected words in column"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a O\nb B-X\nc\n", {}, "line 3: 1 columns, but line 1 of the sentence has 2"),
        ("a\tO\n\tO\n", {}, "line 2: word 2 = '': must not be empty"),
        ("a\tO\nb\t\n", {}, "line 2: no tag"),
        (b"a O\nb \xff\n", {}, "line 2: not UTF-8 at byte 6"),
        ("7 Ann B-X\n8 is O\n\n9 Bob B-X\n", {}, "line 1: column 0 has only numbers; choose words with --text"),
        ("# global.columns = ID FORM A B\n1\ta\tO\tO\n", {}, "no label column; available columns: A, B; choose"),
        (NAMED, {"label": ("LEMMA",)}, "no column 'LEMMA'; available columns: ID, FORM, UPOS, EXTRA:NE; choose"),
        ("a O\nb B-X\n", {"text": ("word",)}, "--text = 'word': must be a number from 0, or from the end with -1"),
        ("a O\nb B-X\n", {"label": ("tag",)}, "--label = 'tag': must be a number from 0"),
        ("a O\nb B-X\n", {"text": ("0", "1")}, "--text = 0,1: must be one column for tagging, got 2"),
        ("a O\nb B-X\n", {"text": ("2",)}, f"{MISFIT} 2 and tags in column -1"),
        ("a O\nb B-X\n", {"label": ("-3",)}, f"{MISFIT} 0 and tags in column -3"),
        ("a O\nb B-X\n", {"label": ("0",)}, f"{MISFIT} 0 and tags in column 0"),
        ("# global.columns = ID FORM A\n1\ta\tX\n2\ta\tX\n1\ta\tX\n", {}, "line 4: expected the word number 3, got '1"),
        ("# global.columns = ID FORM A\n1\ta\tX\n3\ta\tX\n", {}, "line 3: expected the word number 2, got '3'"),
        ("# global.columns = ID FORM A\n2\ta\tX\n3\ta\tX\n", {}, "line 2: expected the word number 1, got '2'"),
        ("a O\nb O\n", {}, "every word is tagged 'O'"),
        ("a O\nb B-X\nc tag\n", {}, "line 3: tag = 'tag': must have a prefix such as B- in IOB2"),
        ("a I-X\nb Y\nc O\n", {}, "line 2: tag = 'Y': must have a prefix such as B- in IO"),
        ("a X_B\nb X_I\nc Y\nd O\n", {}, "line 3: tag = 'Y': must have a suffix such as _B in IOB2"),
        ("a S-X\nb E-X\nc O\n", {}, "the prefixes look like IOBES, but 1 of 2 entity tags are ill-formed"),
        ("\n-DOCSTART- O\n", {}, "no words; choose the column with --text"),
        ("".join(f"word{n} tag{n}\n\n" for n in range(1001)), {}, "1,001 different tags of 1,001 words"),
        ("a O\n" * 399 + "b B-X\n", {}, "a single sentence of 400 words"),
        ("a O\nb B-X\n", {"scheme": "IOBX"}, "unknown tagging scheme 'IOBX'; did you mean IOB2?"),
        ("a O\nb B-X\n", {"labels": ("O", "O")}, "--labels = O,O: must not repeat a label"),
        ("a O\nb B-X\n", {"labels": ("O", "B-Y")}, "line 2: unknown entity type 'X'; --labels: 'Y'"),
        ("a O\nb B-X\n", {"dev_fraction": 1.0}, "dev_fraction = 1.0"),
        ("a O\nb NAME\nc B-DAY\n", {}, "line 2: tag = 'NAME': must have a prefix"),  # a type, or a mistake
        ("a O\nb NAME\nc PHONE\nd CITY\ne S-A\nf S-B\n", {}, "the prefixes look like IOBES, but 3 of 5 entity tags"),
        ([{"tokens": ["a", "b"], "tags": ["O"]}], {}, "line 1: expected one tag per word, got 2 words and 1 tags"),
        ([{"text": "a b c", "labels": "O O"}], {}, "line 1: expected one tag per word, got 3 words and 2 tags"),
        ([{"tokens": ["a", ""], "tags": ["O", "O"]}], {}, "line 1: word 2 = '': must not be empty"),
        ([{"tokens": ["a", None], "tags": ["O", "O"]}], {}, "line 1: word 2 = None: must be text"),
        ([{"tokens": ["a"], "tags": 5}], {}, "line 1: tags = 5: must be a list with one tag per word"),
        ([{"tokens": ["a"], "tags": [1.5]}], {}, "line 1: tag = 1.5: must be text or an integer"),
        ([{"tokens": ["a"], "tags": [0]}], {}, "line 1: tag = 0: must be a name; pass names for integer tags with"),
        ([{"tokens": ["a"], "tags": [1]}], {"labels": ("O",)}, "line 1: tag = 1: must be from 0 to 0, as in --labels"),
        ([{"tokens": ["a"], "tags": None}], {}, "line 1: no tag"),
        ([{"tokens": ["a"]}], {}, "no label column; available columns: tokens; choose with --label"),
        ([{"tags": ["a"]}], {}, "no text column; available columns: tags; choose with --text"),
        ([{"text": 5, "spans": []}], {}, "line 1: text = 5: must be text"),
        ([{"text": "a", "spans": 5}], {}, "line 1: spans = 5: must be a list of"),
        ([{"text": "a", "spans": None}], {}, "line 1: no tag"),
        ([{"text": " ", "spans": []}], {}, "no words; choose the column with --text"),
        ([{"text": "Ada", "spans": [[0, 3, "X"]]}], {"scheme": "none"}, "spans are converted to IOB2; remove --scheme"),
        ([ADA], {"text": ("a",)}, "no column 'a'; available columns: text, tokens, entities, label; choose with --t"),
        ([ADA], {"label": ("a",)}, "no column 'a'; available columns: text, tokens, entities, label; choose with"),
        ([ADA], {"text": ("text", "tokens")}, "--text = text,tokens: must be one column"),
        ([ADA], {"text": ("tokens",), "label": ("tokens",)}, "no label column; available columns:"),
    ],
)
def test_unusable_files_and_options_are_refused(write, content, options, message):
    path = write(content)
    assert refusal(read, path, **options).removeprefix(f"{path}: ").startswith(message)


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ("['O' 'B-X']|O O", "line 3: tags = 'O O': cannot be read as a list (it has no brackets)"),
        ("['O' ... 'B-X']|['O' 'O']", "line 2: tags = \"['O' ... 'B-X']\": cannot be read as a list (its mid"),
        ("0 1|0 0", "line 2: tag = 0: must be a name; pass names for integer tags with --labels"),
        ("[0 1]|[0 0]", "line 2: tag = 0: must be a name; pass names for integer tags with --labels"),
        ("[O, B-X]|[O, O]", "line 2: tags = '[O, B-X]': cannot be read as a list (O is not in quotes)"),
    ],
)
def test_unreadable_tags_in_a_cell_are_refused(write, tags, message):
    assert message in refusal(read, write([{"tokens": "['a' 'b']", "tags": cell} for cell in tags.split("|")], "a.csv"))


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
def test_tags_of_a_sentence_in_a_cell(write, words, tags):
    rows = [{"text": text, "labels": cell} for text, cell in zip(words.split("|"), tags.split("|"), strict=True)]
    for name in ("train.csv", "train.parquet", "train.jsonl"):
        data = read(write(rows, name))
        assert tagged(data, data.train) == ["Ann/B-X met/O", "so/O it/O"]


def test_tasks_of_entities_and_of_tags(write):
    train = write(lines_of(two), "a.conll")
    data = read(train, test=train)
    task = data.task
    split = data.train
    assert (task.name, task.kind, task.labels) == ("tagging", "tagging", ("O", "B-LOC", "I-LOC", "B-PER", "I-PER"))
    assert (task.metric, task.scheme, data.notes[0]) == ("f1", "IOB2", f"{train}: {DETECTED.format('IOB2')}")
    assert data.notes[-1] == "entities by type, training/validation: PER 2/2, LOC 1/1"
    assert split.texts == [("Frau Kim in Köln",), ("Kim #ai .",)]
    assert (split.words[0].dtype, split.targets.dtype, split.targets[0].dtype) == (np.int64, object, int)
    assert (split.name, split.path, split.ids) == ("train", train, ["0", "1"])
    assert [split.name for split in (*data.dev, *data.test)] == ["dev", "test"]
    train = write("the DET\ncat NOUN\n")
    data = read(train)
    assert (data.task.labels, data.task.metric, data.task.scheme) == (("DET", "NOUN"), "accuracy", "none")
    assert data.notes[0] == f"{train}: {DETECTED.format('labels, not entities')}"
    assert data.notes[1] == "words by tag, training/validation: DET 1/1, NOUN 1/1"


@pytest.mark.parametrize("comment", ["# id 7f\tdomain=de\n", "#\tn-tv.de\t[2005-02]\t\n", "# a\n# b c\n"])
@pytest.mark.parametrize(
    ("suffix", "separator", "filler"), [("conll", "\t", ()), ("txt", " ", "__"), ("tsv", "\t", "__")]
)
def test_comments_are_not_words(write, comment, suffix, separator, filler):
    path = write(lines_of(lambda _, word, tag: (word, *filler, tag), comment, separator), f"train.{suffix}")
    data = read(path)
    first = f"{comment.splitlines()[0].strip()!r} is the first of {2 * comment.count(chr(10))} lines"
    assert f"{path}: line 1: {first} that are read as comments" in data.notes
    assert tagged(data, data.train) == SENTENCES and predicted(path) == words_of(data.train)


@pytest.mark.parametrize("name", ["sentiment", "sentences_total", "sent_at", "Sentence #", "SENT", "sentence_id"])
def test_sentence_numbers_need_an_exact_column_name(write, name):
    path = write(f"word,tag,{name}\na,O,1\nb,B-X,2\n\nc,O,2\n", "a.csv")
    is_number = name.lower() in SENTENCE_NAMES
    words = [["a"], ["b"], ["c"]] if is_number else [["a", "b"], ["c"]]
    data = read(path)
    assert words_of(data.train) == predicted(path) == words
    numbers = f", sentence numbers in {name!r}" if is_number else ""
    assert f"{path}: words in 'word', tags in 'tag'{numbers}; choose columns with --text and --label" in data.notes


def test_missing_and_unknown_files_are_refused(write, tmp_path):
    for call in (read, predicted):
        assert "missing.conll: no such file" in refusal(call, tmp_path / "missing.conll", error=FileNotFoundError)
    message = "unknown extension for tagged text; must be one of .conll, .conllu, "
    assert message in refusal(read, write("a", "train.xml"))
    assert "a folder of files that are not parts of a table" in refusal(read, tmp_path)


def test_tags_unknown_in_training(write):
    other = write("x O\ny B-ORG\n", "other.conll")
    train = write(lines_of(two))
    unknown = f"{other}: line 2: unknown entity type 'ORG'; tags in {train}: 'LOC', 'PER'; list all with --labels"
    assert refusal(read, train, other) == refusal(read, train, train, other)
    assert refusal(read, train, other).startswith(unknown)
    data = read(train, other, other, labels=("PER", "LOC", "ORG"))
    assert data.task.labels == ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-ORG", "I-ORG")
    train = write("a DET\nb NOUN\n")
    other = write("a DET\nb X\n", "other.conll")
    assert refusal(read, train, other).startswith(f"{other}: line 2: unknown tag 'X'; tags in {train}: 'DET', 'NOUN'")
    assert read(train, other, labels=("X", "NOUN", "DET")).task.labels == ("X", "NOUN", "DET")


def test_notes_on_schemes_and_types(write):
    train = write("a I-PER\nb I-PER\nc B-PER\nd O\n")
    dev = write("a B-PER\n\nb O\nc I-PER\n", "dev.conll")
    data = read(train, dev)
    assert tagged(data, data.dev[0]) == ["a/B-PER", "b/O c/B-PER"]
    ill_formed = "tags that are ill-formed in {}; they are read as in conlleval"
    first = f"{dev}: line 1: 'B-PER' is the first of 1 {ill_formed.format('IOB1')}"
    assert data.notes[:-1] == (f"{train}: {DETECTED.format('IOB1')}", first)
    first = f"{train}: line 1: 'I-PER' is the first of 1 {ill_formed.format('IOB2')}"
    assert read(train, scheme="bio").notes[0] == first
    train = write("a x_b\nb x_i\nc y_b\nd out\n")
    dev = write("a x_b\n", "dev.conll")
    notes = read(train, dev).notes
    written = "IOB2, written 'x_b' for 'B-x' and 'out' for 'O'"
    assert notes[0] == f"{train}: {DETECTED.format(written)}"
    assert notes[-1] == f"{dev}: the validation set has no y, so the score does not include them"
    notes = read(write("a B-Per\nb B-PER\nc O\n")).notes
    assert notes[-1].endswith("'PER' and 'Per' differ only in case or spaces")
    assert "although some are 'O'" in read(write("a DET\nb X\n" * 9 + "c O\n")).notes[0]
    long = write("a O\nb B-X\n\n" * 2 + "a O\n" * 399 + "b B-X\n")
    assert any("line 7: the first of 1 sentences of 400 words" in note for note in read(long).notes)


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
        ("O PER", "auto", ("PER",)),
    ],
)
def test_types_that_look_like_prefixed_tags(write, tags, scheme, types):
    path = write("".join(f"w {tag}\n" for tag in tags.split()))
    data = read(path, scheme=scheme)
    assert tuple(label[2:] for label in data.task.labels[1::2]) == types
    split, _ = read_tagged(data.task, path, ((), ()), scheme=scheme)
    assert split.targets[0].tolist() == data.train.targets[0].tolist()


def test_test_files_without_tags(write):
    train = write(lines_of(two))
    hidden = {"a\nb\n\nc d\n": "conll", "a _\nb _\n": "conll", "a\t\nb\t\n": "conll", "a\nb\n": "bio"}
    for content, suffix in hidden.items():
        for label in ((), ("1",), ("-1",)):
            (test,) = read(train, test=write(content, f"test.{suffix}"), label=label).test
            assert (test.targets, words_of(test)[0]) == (None, ["a", "b"])
    for rows in (
        [{"text": "Hi 👍🏽."}],
        [{"tokens": ["Hi", "👍🏽", "."]}],
        [{"tokens": ["Hi", "👍🏽", "."], "tags": [-1] * 3}],
    ):
        (test,) = read(train, test=write(rows, "test.jsonl")).test
        assert (test.targets, words_of(test)) == (None, [["Hi", "👍🏽", "."]])
    test = write("a _\nb O\n", "test.conll")
    assert refusal(read, train, train, test).startswith(f"{test}: line 1: tag = '_': must have a prefix")
    test = write("a O b O\n\nb\n", "test.conll")
    assert refusal(read, train, train, test, label=("1",)).startswith(f"{test}: line 3: expected words in column 0")
    empty = write("a O\n", "test.conll")
    assert f"{empty}: contains no entity, so every model's F1 on it is 0" in read(train, test=empty).notes


def test_empty_and_bad_sentences_are_left_out(write):
    train = write([{"tokens": ["a"], "tags": ["B-X"]}, {"tokens": [], "tags": []}, {"tokens": ["b"], "tags": ["O"]}])
    data = read(train)
    assert (data.train.ids, tagged(data, data.train)) == (["0", "2"], ["a/B-X", "b/O"])
    assert f"{train}: 1 sentences without words are left out" in data.notes
    path = write("a O\nb B-X\n\nc O\nd\n\ne O\n\nf Y\n\ng O\nh B-X\n\ni\n")
    message = refusal(read_divided, "tagging", path)
    assert message.startswith("3 bad rows:") and all(f"{path}: line {line}: " in message for line in (5, 9, 14))
    data = read_divided("tagging", path, skip_bad_rows=3)
    assert sorted(text for split in (data.train, *data.dev) for (text,) in split.texts) == ["a b", "e", "g h"]
    assert any(note.startswith("3 bad rows are left out:") for note in data.notes)


def test_validation_set_has_all_tags(write):
    train = write("".join(f"Ada B-PER\n{n} O\n\nin O\nRom{n} B-LOC\n\n" for n in range(20)) + "x B-RARE\n")
    data, again, other = (read_divided("tagging", train, dev_fraction=0.25, seed=seed) for seed in (3, 3, 4))
    assert (len(data.train.texts), len(data.dev[0].texts)) == (31, 10)
    assert sorted(map(int, data.train.ids + data.dev[0].ids)) == list(range(41))
    assert "40" in data.train.ids and data.dev[0].ids == again.dev[0].ids != other.dev[0].ids
    message = f"{train}: 10 of 41 sentences become the validation set (seed 3); pass another one with --dev"
    assert message in data.notes and "RARE 1/0" in data.notes[-2]
    assert data.notes[-1] == f"{train}: the validation set has no RARE, so the score does not include them"
    data = read_divided("tagging", train, dev_fraction=0.99)
    tags = {data.task.labels[tag] for target in data.train.targets for tag in target}
    assert tags == {"O", "B-LOC", "B-PER", "B-RARE"}
    few = write("".join(f"Ada B-PER\n{n} O\n\nin O\nRom{n} B-LOC\n\n" for n in range(2)))
    assert len(read_divided("tagging", few, dev_fraction=0.1).dev[0].texts) == 2  # both types
    few = write("Ada B-PER\n\nin O\nRom B-LOC\n")
    assert "2 sentences are too few for a validation set" in refusal(read_divided, "tagging", few)


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        ("a.bio", "x\ny\n\nz", {}, [["x", "y"], ["z"]]),
        ("a.bio", "#\n#ai\nA\n", {}, [["#", "#ai", "A"]]),
        ("a.conll", "1 B-X a\n2 O b\n", {"text": ("1",)}, [["B-X", "O"]]),
        ("a.csv", "sent_id,w\n1,a\n1,b\n2,c\n", {"text": ("w",)}, [["a", "b"], ["c"]]),
        ("a.txt", "Ada met\n\nB.\n", {}, ["Ada met", "", "B."]),
        ("a.txt", "New York\nIs O\n", {}, ["New York", "Is O"]),  # not columns
        ("a.txt", "Ann met Bob\nBob ran\n", {}, ["Ann met Bob", "Bob ran"]),
        ("a.tsv", "id\ttext\tlabel\n" + "1\tAda met\tO\n" * 20, {}, ["Ada met"] * 20),
        ("a.csv", "id,sentence\n1,Ada met\n", {}, ["Ada met"]),
        ("a.jsonl", [{"words": ["Ada", "is"]}, {"words": []}], {}, [["Ada", "is"], []]),
        ("a.jsonl", [{"text": "Ada met", "label": 1}], {}, ["Ada met"]),
        ("a.jsonl", [{"text": "a", "title": "b"}], {"text": ("title",)}, ["b"]),
        ("a.jsonl", [{"text": "a", "parts": ["c", "d"]}], {"text": ("parts",)}, [["c", "d"]]),
        ("a.jsonl", [{"text": "a", "title": "b"}], {"text": ("x",)}, "no column 'x'; available columns: text, title"),
        ("a.jsonl", [{"text": "a", "title": "b"}], {"text": ("text", "title")}, "--text = text,title: must be"),
        ("a.jsonl", [{"tokens": ["a"]}, {"tokens": None}], {}, "line 2: tokens = null: must be text"),
        ("a.conll", "a O\nb B-X\n", {"text": ("2",)}, "line 1: expected words in column 2, got 2 columns"),
    ],
)
def test_files_for_prediction(write, name, content, options, expected):
    path = write(content, name)
    if isinstance(expected, str):
        assert expected in refusal(predicted, path, **options)
    else:
        assert predicted(path, **options) == expected


def test_prediction_streams_sentences(write):
    stream = iterate_tagging(write("a O\n\nb O\nc\n"))
    assert next(stream)[0] == "a"
    assert "line 4: 1 columns" in refusal(next, stream)


def test_names_of_tags_in_parquet(tmp_path):
    names = {"names": ["O", "B-X"], "_type": "ClassLabel"}
    for feature in ({"feature": names, "_type": "Sequence"}, [names]):
        metadata = {"huggingface": json.dumps({"info": {"features": {"ner_tags": feature}}})}
        table = pa.Table.from_pylist([{"tokens": ["a", "b"], "ner_tags": [1, 0]}]).replace_schema_metadata(metadata)
        pq.write_table(table, tmp_path / "a.parquet")
        data = read(tmp_path / "a.parquet")
        assert tagged(data, data.train) == ["a/B-X b/O"]
