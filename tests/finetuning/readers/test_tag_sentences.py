"""Sentences from columns, lists of words and spans, the words of texts, and where a file cannot be used."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.tag_columns import column_sentences
from electra_fast.finetuning.readers.tag_sentences import row_sentences
from electra_fast.finetuning.readers.words import words_of_text

TOKENS = [["Ada", "Lovelace", "met", "Babbage"], ["In", "New", "York", "."]]
TAGS = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-LOC", "I-LOC", "O"]]
SPANS = [[(0, 12, "PER"), (17, 24, "PER")], [(3, 11, "LOC")]]


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="train.conll"):
        path = tmp_path / name
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in content))
        elif path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(content), path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def read(path, text=(), label=(), labels=(), **options):
    """The words and the tags of each sentence."""
    if path.suffix in (".jsonl", ".parquet"):
        sentences = list(row_sentences(path, text, label, labels, **options))
    else:
        sentences = list(column_sentences(path, text, label, **options))
    assert [sentence.row for sentence in sentences] == list(range(len(sentences)))
    words = [[sentence.text[a:b] for a, b in sentence.words] for sentence in sentences]
    return words, [sentence.tags for sentence in sentences]


def message_of(path, *args, **options):
    with pytest.raises(InputError) as caught:
        read(path, *args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def span_row(*spans, text="Ada Lovelace met Babbage"):
    return [{"text": text, "spans": list(spans)}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Dr. O'Neil, co-op!!", ["Dr", ".", "O", "'", "Neil", ",", "co", "-", "op", "!", "!"]),
        ("a_b\u00a0x2\u3000½ \t\r\n", ["a_b", "x2", "½"]),
        ("e\u0301te\u0301 नमस्ते שָׁלוֹם", ["e\u0301te\u0301", "नमस्ते", "שָׁלוֹם"]),
        ("\u200fعالم\u200f می\u200cخواهم", ["\u200fعالم\u200f", "می\u200cخواهم"]),
        ("北京Tower東\ufe00", ["北", "京", "Tower", "東\ufe00"]),
        ("カナ한국어 𠮷", ["カ", "ナ", "한국어", "𠮷"]),
        ("ที่นี่ใน", ["ที่", "นี่", "ใ", "น"]),
        ("👩‍👩‍👧❤️‍🔥👍🏽😀😀", ["👩‍👩‍👧", "❤️‍🔥", "👍🏽", "😀", "😀"]),
        ("🇩🇪🇫🇷🏴󠁧󠁢󠁥󠁮󠁧󠁿1️⃣ #️⃣", ["🇩🇪", "🇫🇷", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "1️⃣", "#️⃣"]),
        ("x👍y \u0301", ["x", "👍", "y", "\u0301"]),
        (" \n", []),
        ("", []),
    ],
)
def test_words_of_a_text(text, words):
    found = words_of_text(text)
    assert ([text[a:b] for a, b in found], found.dtype, found.shape) == (words, np.int64, (len(words), 2))


def test_words_hold_every_character_but_space():
    rng = np.random.default_rng(0)
    for _ in range(300):
        codes = rng.integers(rng.choice([0x80, 0x3100, 0x20000]), size=30)
        text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        words = words_of_text(text)
        assert (words[1:, 0] >= words[:-1, 1]).all() and (words[:, 0] < words[:, 1]).all()
        inside = np.zeros(len(text), bool)
        for start, end in words:
            inside[start:end] = True
        assert inside.tolist() == [not character.isspace() for character in text]


def test_what_columns_may_hold(write):
    lines = ["\ufeff-DOCSTART- -X- O O", "", "#tag x O", "a\u00a0b\u3000 y B-X", " ", "-DOCSTART- -X- O", "(\rx z I-X"]
    path = write("\r\n".join([*lines, "", "", ""]))
    assert read(path) == ([["#tag", "a\u00a0b\u3000"], ["(\rx"]], [["O", "B-X"], ["I-X"]])
    assert [sentence.lines for sentence in column_sentences(path)] == [[3, 4], [7]]
    path = write("New York\tB-X\nis \t O\n\t\nx\tO")
    assert read(path) == ([["New York", "is"], ["x"]], [["B-X", "O"], ["O"]])


def test_conllu(write):
    lines = ["1-2 vámonos _ _", "1 vamos ir VERB", "2 nos yo PRON", "2.1 x x X", "3 no no ADV"]
    sentence = "\n".join(["# text = vámonos no", *(line.replace(" ", "\t") for line in lines), ""])
    path = write(sentence + "\n" + sentence, "train.conllu")
    assert read(path) == ([["vamos", "nos", "no"]] * 2, [["VERB", "PRON", "ADV"]] * 2)
    assert read(path, ("2",), ("-3",)) == ([["ir", "yo", "no"]] * 2, [["vamos", "nos", "no"]] * 2)


def test_chosen_columns(write):
    path = write("1 B-X a\n2 O b\n")
    assert read(path, ("-1",), ("1",)) == ([["a", "b"]], [["B-X", "O"]])
    assert read(path, ("1",), None) == ([["B-X", "O"]], [None])


@pytest.mark.parametrize("label", ["-1", "1", "3"])
def test_test_files_may_lack_the_column_of_tags(write, label):
    assert read(write("a\nb\n\nc d\n"), (), (label,), is_test=True) == ([["a", "b"], ["c"]], [None, None])
    assert message_of(write("a O b O\n\nb\n"), (), (label,), is_test=True).startswith("line 3: 1 column separated")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a O\nb B-X\nc\n", "line 3: 1 columns, but line 1 of the sentence has 2; every word needs a tag"),
        (
            "a O\n\nb\n",
            "line 3: 1 column separated by tabs or spaces, but words are expected in column 0 and tags in column -1; "
            "choose with --text and --label",
        ),
        ("a\tO\n\tO\n", "line 2: word 2 is empty; remove it and its tag"),
        (b"a O\nb \xff\n", "line 2: not UTF-8 at byte 6; convert the file to UTF-8"),
    ],
)
def test_columns_that_cannot_be_used(write, content, message):
    assert message_of(write(content)).startswith(message)


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        (("word",), (), "--text is 'word'; the columns of this format are numbered from 0, and from the end with -1"),
        ((), ("tag",), "--label is 'tag'; the columns of this format"),
        (("0", "1"), (), "--text names 2 columns (0, 1); tagging reads one"),
        (("2",), (), "line 1: 2 columns separated by tabs or spaces, but words are expected in column 2 and tags in "),
        ((), ("-3",), "line 1: 2 columns separated by tabs or spaces, but words are expected in column 0 and tags in "),
        ((), ("0",), "line 1: 2 columns separated by tabs or spaces, but words are expected in column 0 and tags in "),
        (("2",), None, "line 1: 2 columns separated by tabs or spaces, but words are expected in column 2; choose"),
    ],
)
def test_column_numbers_that_cannot_be_used(write, text, label, message):
    assert message_of(write("a O\nb B-X\n"), text, label).startswith(message)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("words", ["tokens", "words"])
@pytest.mark.parametrize("name", ["tags", "ner_tags", "labels", "pos_tags"])
def test_lists_of_words(write, suffix, words, name):
    path = write([{words: own, name: tags} for own, tags in zip(TOKENS, TAGS, strict=True)], f"train{suffix}")
    assert read(path) == (TOKENS, TAGS)
    assert read(write([{words: TOKENS[0]}], f"test{suffix}"), is_test=True) == ([TOKENS[0]], [None])


def test_lists_of_words_come_before_texts(write):
    row = {"text": "Ada Lovelace", "tokens": ["Ada", "Lovelace"], "entities": [[0, 3, "PER"]], "label": 1}
    assert read(write([row], "train.jsonl")) == ([["Ada", "Lovelace"]], [["B-PER", "O"]])  # there are no tags
    path = write([row | {"tags": ["O", "B-X"], "own": [[4, 12, "Y"]]}], "train.jsonl")
    assert read(path)[1] == read(path, (), ("tags",))[1] == [["O", "B-X"]]
    assert read(path, ("text",), ("own",))[1] == [["O", "B-Y"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": ["a", "b"], "tags": ["O"]}, "line 1: 2 words, but 1 tags; there must be one per word"),
        ({"text": "a b c", "labels": "O O"}, "line 1: 3 words, but 2 tags; there must be one per word"),
        ({"tokens": ["a", ""], "tags": ["O", "O"]}, "line 1: word 2 is empty; remove it and its tag"),
        ({"tokens": ["a", None], "tags": ["O", "O"]}, "line 1: word 2 is None, not text"),
        ({"tokens": ["a"], "tags": 5}, "line 1: the tags are 5; there must be a list of one per word"),
        ({"tokens": ["a"], "tags": [1.5]}, "line 1: the tag 1.5 is neither text nor an integer"),
        ({"tokens": ["a"], "tags": [0]}, "line 1: the tag is the number 0; name the tags by number with --labels O,"),
        ({"tokens": ["a"]}, "no label column; there are: tokens; choose with --label"),
        ({"tags": ["a"]}, "no text column; there are: tags; choose with --text"),
        ({"text": 5, "spans": []}, "line 1: 'text' is 5, not text"),
        ({"text": "a", "spans": 5}, "line 1: the spans are 5; there must be a list of"),
    ],
)
def test_rows_that_cannot_be_used(write, row, message):
    assert message_of(write([row], "train.jsonl")).startswith(message)


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        (("a",), (), "no column 'a'; there are: tokens, tags; choose with --text"),
        ((), ("a",), "no column 'a'; there are: tokens, tags; choose with --label"),
        (("tokens", "tags"), (), "--text names 2 columns (tokens, tags); tagging reads one"),
        (("tokens",), ("tokens",), "no label column; there are: tokens, tags; choose with --label"),
    ],
)
def test_chosen_columns_of_rows_that_cannot_be_used(write, text, label, message):
    assert message_of(write([{"tokens": ["a"], "tags": ["O"]}], "train.jsonl"), text, label) == message


def test_tags_that_are_numbers(write):
    path = write([{"tokens": ["a", "b"], "tags": [1, 0]}, {"tokens": ["a", "b"], "tags": [-1, None]}], "train.parquet")
    assert read(path, labels=("O", "B-X"))[1] == [["B-X", "O"], ["", ""]]
    assert message_of(path, labels=("O",)) == "row 1: the tag is the number 1, but --labels names 0 to 0"


@pytest.mark.parametrize("name", ["spans", "entities", "labels", "label"])
@pytest.mark.parametrize(
    "form",
    [
        list,
        lambda span: dict(zip(("start", "end", "label"), span, strict=True)),
        lambda span: dict(zip(("start", "end", "type"), span, strict=True)) | {"label": None},
        lambda span: dict(zip(("start", "end", "tag"), span, strict=True)),
    ],
)
def test_spans(write, name, form):
    texts = [" ".join(tokens) for tokens in TOKENS]
    content = [
        {"text": text, name: [form(span) for span in reversed(spans)]} for text, spans in zip(texts, SPANS, strict=True)
    ]
    assert read(write(content, "train.jsonl")) == (TOKENS, TAGS)
    if form is not list:
        assert read(write(content, "train.parquet")) == (TOKENS, TAGS)


@pytest.mark.parametrize(
    ("text", "start", "end", "tags"),
    [
        ("👩‍👩‍👧 loves Ada 👍🏽", 12, 15, ["O", "O", "B-X", "O"]),  # code points, not UTF-16
        ("🇩🇪🇫🇷 Ada", 2, 4, ["O", "B-X", "O"]),
        ("גר שָׁלוֹם בחיפה", 3, 10, ["O", "B-X", "O"]),
        ("e\u0301te\u0301 nai\u0308ve", 6, 12, ["O", "B-X"]),
        ("我住在北京市。", 3, 6, ["O", "O", "O", "B-X", "I-X", "I-X", "O"]),
        ("東京タワーで", 2, 5, ["O", "O", "B-X", "I-X", "I-X", "O"]),
        ("ไปหาแอนที่", 4, 7, ["O", "O", "O", "O", "B-X", "I-X", "I-X", "O"]),
    ],
)
def test_spans_in_many_scripts(write, text, start, end, tags):
    (sentence,) = row_sentences(write(span_row([start, end, "X"], text=text), "train.jsonl"), (), (), ())
    assert (sentence.tags, sentence.num_cuts, sentence.has_spans) == (tags, 0, True)
    inside = sentence.words[[tag != "O" for tag in tags]]
    assert (inside[0, 0], inside[-1, 1]) == (start, end)


def test_ends_of_spans_within_words_are_counted(write):
    rows = [*span_row([1, 5, "A"], [5, 10, "B"], [17, 23, "A"], [23, 24, "B"]), *span_row([0, 1, "A"], [2, 12, "B"])]
    first, second = row_sentences(write(rows, "train.jsonl"), (), (), ())
    assert (first.tags, first.num_cuts) == (["B-A", "I-A", "O", "B-A"], 6)
    assert (second.tags, second.num_cuts) == (["B-A", "B-B", "O", "O"], 2)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[20, 25, "X"]], "the span 20 to 25 is empty or outside the text of 24 characters"),
        ([[-1, 3, "X"]], "the span -1 to 3 is empty or outside"),
        ([[3, 3, "X"]], "the span 3 to 3 is empty or outside"),
        ([[4, 12, "X"], [0, 5, "Y"]], "the spans 0 to 5 and 4 to 12 overlap; keep one of them"),
        ([[3, 4, "X"]], "the span 3 to 4 has no word in it; remove it"),
        ([[0, 3]], 'the span [0, 3] is not like {"start": 0, "end": 5, "label": "PER"} or [0, 5, "PER"]'),
        ([["a", 3, "X"]], "the span ['a', 3, 'X'] is not like"),
        ([[0, 3, ""]], "the span [0, 3, ''] is not like"),
        ([{"start": 0, "label": "X"}], "the span {'start': 0, 'label': 'X'} is not like"),
        (["B-PER"], "the span 'B-PER' is not like"),
    ],
)
def test_spans_that_cannot_be_used(write, spans, message):
    assert message_of(write(span_row(*spans), "train.jsonl")).startswith(f"line 1: {message}")
