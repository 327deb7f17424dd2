"""Sentences from lists of words and from spans, the words of texts, and what rows cannot be used."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.rows import BadRows
from electra_fast.finetuning.readers.tag_sentences import row_sentences
from electra_fast.finetuning.readers.words import words_of_text

TOKENS = [["Ada", "Lovelace", "met", "Babbage"], ["In", "New", "York", "."]]
TAGS = [["B-PER", "I-PER", "O", "B-PER"], ["O", "B-LOC", "I-LOC", "O"]]


def sentences_of(path, *args, notes=None, **options):
    bad = BadRows()
    found = row_sentences(path, *args, bad=bad, notes=[] if notes is None else notes, **options)
    bad.finish()
    return found


def read(path, *args, **options):
    """The words and the tags of each sentence."""
    sentences = sentences_of(path, *args, **options)
    assert [sentence.row for sentence in sentences] == list(range(len(sentences)))
    words = [[sentence.text[a:b] for a, b in sentence.words] for sentence in sentences]
    return words, [sentence.tags for sentence in sentences]


def message_of(path, *args, **options):
    with pytest.raises(InputError) as caught:
        read(path, *args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


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


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(("words", "name"), [("tokens", "tags"), ("words", "ner_tags"), ("tokens", "labels")])
def test_lists_of_words(write, suffix, words, name):
    path = write([{words: own, name: tags} for own, tags in zip(TOKENS, TAGS, strict=True)], f"train{suffix}")
    assert read(path) == (TOKENS, TAGS)
    assert read(write([{words: TOKENS[0]}], f"test{suffix}"), is_test=True) == ([TOKENS[0]], [None])


def test_lists_of_words_come_before_texts(write):
    row = {"text": "Ada Lovelace", "tokens": ["Ada", "Lovelace"], "entities": [[0, 3, "PER"]], "label": 1}
    assert read(write([row])) == ([["Ada", "Lovelace"]], [["B-PER", "O"]])  # there are no tags
    path = write([row | {"tags": ["O", "B-X"], "own": [[4, 12, "Y"]]}])
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
    assert message_of(write([row])).startswith(message)


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
    assert message_of(write([{"tokens": ["a"], "tags": ["O"]}]), text, label) == message


def test_tags_that_are_numbers(write):
    path = write([{"tokens": ["a", "b"], "tags": [1, 0]}, {"tokens": ["a", "b"], "tags": [-1, None]}], "train.parquet")
    assert read(path, labels=("O", "B-X"))[1] == [["B-X", "O"], ["", ""]]
    assert message_of(path, labels=("O",)) == "row 1: the tag is the number 1, but --labels names 0 to 0"


def test_spans_and_names_of_tags_in_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    entities = {"start": [0, 8], "end": [3, 11], "label": ["X", "Y"]}  # as `datasets` stores a list of objects
    pq.write_table(pa.Table.from_pylist([{"text": "Ann met Bob", "entities": entities}]), path)
    assert read(path)[1] == [["B-X", "O", "B-Y"]]
    names = {"names": ["O", "B-X"], "_type": "ClassLabel"}
    for feature in ({"feature": names, "_type": "Sequence"}, [names]):
        metadata = {"huggingface": json.dumps({"info": {"features": {"ner_tags": feature}}})}
        table = pa.Table.from_pylist([{"tokens": ["a", "b"], "ner_tags": [1, 0]}]).replace_schema_metadata(metadata)
        pq.write_table(table, path)
        assert read(path)[1] == [["B-X", "O"]]


@pytest.mark.parametrize(
    "span",
    [
        [4, 7, "X"],
        {"start_offset": 4, "end_offset": 7, "label": "X", "id": 1},
        {"startOffset": 4, "endOffset": 7, "label": "X"},
        {"start": 4, "end": 7, "labels": ["X"], "text": "met"},
        {"offset": 4, "length": 3, "category": "X", "surface": "met"},
        {"start": "4", "end": "7", "entity": "X", "value": "met"},
        {"start": 4.0, "end": 7.0, "tag": "X", "label": None},
        {"start": 4, "end": 7, "token_start": 1, "token_end": 1, "label": "X"},
        {"begin": 4, "end": 7, "type": "X"},
        {"start": 4, "end": 7, "hypertextlabels": ["X"]},
    ],
)
@pytest.mark.parametrize("column", ["spans", "entities", "label"])
def test_fields_of_many_tools(write, span, column):
    path = write([{"text": "Ann met Bob", "tokens": ["Ann", "met", "Bob"], column: [[8, 11, "Y"], span, span]}])
    notes = []
    assert read(path, ("text",), notes=notes)[1] == [["O", "B-X", "B-Y"]]
    assert notes[0] == f"{path}: text or words in 'text', spans in {column!r}; choose columns with --label"
    assert notes[1:] == [f"{path}: 1 spans that repeat another one are left out"]


UNITS = {
    "Unicode code points": len,
    "UTF-16 units": lambda text: len(text.encode("utf-16-le")) // 2,
    "UTF-8 bytes": lambda text: len(text.encode()),
}
# Texts with the first and past-the-last characters of their spans.
PLACES = {
    "😀 Änne met Bob in Rom": [(2, 6), (11, 14), (18, 21)],
    "Ärger, sagt Änne 𠮷野": [(12, 16), (17, 19)],
    "Eve saw Rom": [(0, 3), (8, 11)],
}


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("first", "inclusive"), [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize("has_texts", [True, False])
def test_every_convention_is_recognized(write, unit, first, inclusive, has_texts):
    rows = []
    for text, places in PLACES.items():
        spans = []
        for start, end in places:
            numbers = {"start": UNITS[unit](text[:start]) + first, "end": UNITS[unit](text[:end]) + first - inclusive}
            spans.append(numbers | {"label": "X"} | ({"text": text[start:end]} if has_texts else {}))
        rows.append({"text": text, "spans": spans})
    notes, path = [], write(rows)
    words, tags = read(path, notes=notes)
    assert words[1] == ["Ärger", ",", "sagt", "Änne", "𠮷", "野"]
    assert tags == [["O", "B-X", "O", "B-X", "O", "B-X"], ["O", "O", "O", "B-X", "B-X", "I-X"], ["B-X", "O", "B-X"]]
    end = "inclusive" if inclusive else "exclusive"
    counted = f"spans count {unit} from {first}, the end {end}, as the text shows; they are converted"
    is_usual = (unit, first, inclusive) == ("Unicode code points", 0, False)
    assert notes[1:] == ([] if is_usual else [f"{path}: {counted}"])


@pytest.mark.parametrize("has_texts", [True, False])
def test_a_few_spans_after_surrogate_pairs_show_the_unit(write, has_texts):
    """All fit UTF-16 units, and few do not fit code points; texts of spans elsewhere say nothing."""
    plain = [{"start": 0, "end": 3, "label": "X"} | ({"text": "Eve"} if has_texts else {})]
    rows = [{"text": "Eve saw Rom", "spans": plain}] * 30
    rows += [{"text": "😀😀 met Bob", "spans": [{"start": 9, "end": 12, "label": "X"}]}] * 2
    rows += [{"text": "😀😀 Änne Bob so", "spans": [{"start": 10, "end": 13, "label": "X"}]}]
    assert [tags.index("B-X") for tags in read(write(rows))[1]] == [0] * 30 + [3, 3, 3]


def test_spans_of_parts_of_words_stay_in_code_points(write):
    """Endings, as in Hungarian, are no sign of another convention; nor is a single span that does not fit."""
    rows = [{"text": "Pestet 😀 láttam", "spans": [[0, 4, "LOC"]]}] * 9 + [{"text": "Pest", "spans": [[0, 4, "LOC"]]}]
    assert [tags[0] for tags in read(write(rows))[1]] == ["B-LOC"] * 10
    rows = [{"text": "a 😀 Ann", "spans": [[4, 7, "X"]]}, {"text": "Ann", "spans": [[0, 9, "X"]]}]
    expected = "line 2: the span 0 to 9 is empty or outside the text of 3 characters; count"
    assert message_of(write(rows)).startswith(expected)


def test_spans_of_words(write):
    """As in SpERT; the end is inclusive if a span of one word begins where it ends."""
    exclusive = [{"start": 0, "end": 2, "type": "X"}, {"start": 3, "end": 4, "type": "X"}]
    inclusive = [{"start": 0, "end": 1, "type": "X"}, {"start": 3, "end": 3, "type": "X"}]
    for spans in (exclusive, inclusive):
        path = write([{"tokens": TOKENS[0], "entities": spans}, {"tokens": ["so"], "entities": []}])
        assert read(path)[1] == [["B-X", "I-X", "O", "B-X"], ["O"]]


def test_ends_of_spans_within_words_are_counted(write):
    text = " ".join(TOKENS[0])
    spans = [[[1, 5, "A"], [5, 10, "B"], [17, 23, "A"], [23, 24, "B"]], [[0, 1, "A"], [2, 12, "B"]]]
    first, second = sentences_of(write([{"text": text, "spans": own} for own in spans]))
    assert (first.tags, first.num_cuts) == (["B-A", "I-A", "O", "B-A"], 6)
    assert (second.tags, second.num_cuts) == (["B-A", "B-B", "O", "O"], 2)


TOKEN_SPAN = {"start": 0, "end": 3, "label": "X"}
FORM = 'like {"start": 0, "end": 5, "label": "PER"} or [0, 5, "PER"]'


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[20, 25, "X"]], "the span 20 to 25 is empty or outside the text of 24 characters"),
        ([[-1, 3, "X"]], "the span -1 to 3 is empty or outside"),
        ([[3, 3, "X"]], "the span 3 to 3 is empty or outside"),
        ([[4, 12, "X"], [0, 5, "Y"]], "the spans 0 to 5 and 4 to 12 overlap; keep one of them"),
        ([[3, 4, "X"]], "the span 3 to 4 has no word in it; remove it"),
        ([[0, 3]], f"the span [0, 3] is not {FORM}"),
        ([["a", 3, "X"]], "the span ['a', 3, 'X'] is not like"),
        ([[0, 3, ""]], "the span [0, 3, ''] is not like"),
        ([{"start": 0.5, "end": 3, "label": "X"}], "the span {'start': 0.5, 'end': 3, 'label': 'X'} is not like"),
        (["B-PER"], "the span 'B-PER' is not like"),
        (
            [{"start": 13, "end": 16, "text": "Ada", "label": "X"}],
            "the span 13 to 16 is 'met', but its own text is 'Ada'",
        ),
        ([{"start": 0, "length": 3, "end": 8, "label": "X"}], "the span 0 to 8 has the length 3; correct one of them"),
        (
            [TOKEN_SPAN | {"token_start": 1, "token_end": 1}],
            "the span 0 to 3 is 'Ada', but its tokens 1 to 1 are 'Love",
        ),
        ([TOKEN_SPAN | {"token_start": 0, "token_end": 9}], "the span 0 to 3 is 'Ada', but its tokens 0 to 9 are ''"),
        ([{"start": 0, "end": 3, "labels": ["A", "B"]}], "the span {'start': 0, 'end': 3, 'labels': ['A', '… has 2"),
    ],
)
def test_spans_that_cannot_be_used(write, spans, message):
    tokens = [{"text": word} for word in TOKENS[0]]
    good = {"start": 0, "end": 3, "text": "ADA ", "label": "X"}  # case and spaces may differ
    rows = [{"text": " ".join(TOKENS[0]), "tokens": tokens, "spans": own} for own in ([good], spans)]
    assert message_of(write(rows), ("text",)).startswith(f"line 2: {message}")
