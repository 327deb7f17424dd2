"""Entities as spans of texts: field names of tools, conventions of offsets, and the words of a text."""

from functools import partial

import numpy as np
import pytest
from task_reading import read as read_task
from task_reading import read_divided, refusal, tagged

from electra_fast.finetuning.readers.words import words_of_text

read = partial(read_task, "tagging")

TEXT = "Ada Lovelace met Babbage"
TOKENS = [{"text": word} for word in TEXT.split()]
SPAN = {"start": 0, "end": 3, "label": "X"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([[20, 25, "X"]], "the span 20 to 25 is empty or outside the text of 24 characters"),
        ([[-1, 3, "X"]], "the span -1 to 3 is empty or outside"),
        ([[3, 3, "X"]], "the span 3 to 3 is empty or outside"),
        ([[4, 12, "X"], [0, 5, "Y"]], "the spans 0 to 5 and 4 to 12 overlap"),
        ([[3, 4, "X"]], "the span 3 to 4 contains no word"),
        ([[0, 3]], 'span = [0, 3]: must be like {"start": 0, "end": 5, "label": "PER"} or [0, 5, "PER"]'),
        ([["a", 3, "X"]], "span = ['a', 3, 'X']: must be like"),
        ([[0, 3, ""]], "span = [0, 3, '']: must be like"),
        ([SPAN | {"start": 0.5}], "span = {'start': 0.5, 'end': 3, 'label': 'X'}: must be like"),
        (["B-PER"], "span = 'B-PER': must be like"),
        ([SPAN | {"text": "met"}], "the span 0 to 3 is 'Ada', but its text is 'met'"),
        ([SPAN | {"length": 3, "end": 8}], "the span 0 to 8 has the length 3"),
        ([SPAN | {"token_start": 1, "token_end": 1}], "the span 0 to 3 is 'Ada', but its tokens 1 to 1"),
        ([SPAN | {"token_start": 0, "token_end": 9}], "the span 0 to 3 is 'Ada', but its tokens 0 to 9"),
        ([{"start": 0, "end": 3, "labels": ["A", "B"]}], "the span {'start': 0, 'end': 3, 'labels': ['A"),
    ],
)
def test_unusable_spans_are_refused(write, wrong, message):
    good = SPAN | {"text": "ADA "}  # case and spaces may differ
    path = write([{"text": TEXT, "tokens": TOKENS, "spans": spans} for spans in ([good], wrong)])
    assert refusal(read_divided, "tagging", path, text=("text",)).startswith(f"{path}: line 2: {message}")


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
def test_field_names_of_tools(write, span):
    for column in ("spans", "entities", "label"):
        row = {"text": "Ann met Bob", "tokens": ["Ann", "met", "Bob"], column: [[8, 11, "Y"], span, span]}
        path = write([row])
        data = read(path, text=("text",))
        assert tagged(data, data.train) == ["Ann/O met/B-X Bob/B-Y"]
        columns = f"{path}: text or words in 'text', spans in {column!r}; choose columns with --label"
        assert data.notes[:2] == (columns, f"{path}: 1 duplicate spans are left out")


UNITS = {
    "Unicode code points": len,
    "UTF-16 units": lambda text: len(text.encode("utf-16-le")) // 2,
    "UTF-8 bytes": lambda text: len(text.encode()),
}
# Texts with the start and end (exclusive) of their spans.
PLACES = {
    "😀 Änne met Bob in Rom": [(2, 6), (11, 14), (18, 21)],
    "Ärger, sagt Änne 𠮷野": [(12, 16), (17, 19)],
    "Eve saw Rom": [(0, 3), (8, 11)],
}
PLACED = [
    "😀/O Änne/B-X met/O Bob/B-X in/O Rom/B-X",
    "Ärger/O ,/O sagt/O Änne/B-X 𠮷/B-X 野/I-X",
    "Eve/B-X saw/O Rom/B-X",
]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("first", "inclusive"), [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize("has_texts", [True, False])
def test_conventions_of_spans_are_detected(write, unit, first, inclusive, has_texts):
    rows = []
    for text, places in PLACES.items():
        spans = []
        for start, end in places:
            numbers = {"start": UNITS[unit](text[:start]) + first, "end": UNITS[unit](text[:end]) + first - inclusive}
            spans.append(numbers | {"label": "X"} | ({"text": text[start:end]} if has_texts else {}))
        rows.append({"text": text, "spans": spans})
    path = write(rows)
    data = read(path)
    assert tagged(data, data.train) == PLACED
    end = "inclusive" if inclusive else "exclusive"
    counted = f"spans count {unit} from {first}, the end {end}, judging by the texts; they are converted"
    is_usual = (unit, first, inclusive) == ("Unicode code points", 0, False)
    assert (f"{path}: {counted}" in data.notes) == (not is_usual)


def first_words(path):
    """Returns the index of the first word of an entity in each sentence."""
    data = read(path)
    return [[data.task.labels[tag] for tag in target].index("B-X") for target in data.train.targets]


def test_convention_of_ambiguous_spans(write):
    """All spans fit UTF-16 units, few do not fit code points. Word endings, as in Hungarian, decide nothing."""
    for has_texts in (True, False):  # span texts in other rows decide nothing
        plain = [SPAN | ({"text": "Eve"} if has_texts else {})]
        rows = [{"text": "Eve saw Rom", "spans": plain}] * 30
        rows += [{"text": "😀😀 met Bob", "spans": [{"start": 9, "end": 12, "label": "X"}]}] * 2
        rows += [{"text": "😀😀 Änne Bob so", "spans": [{"start": 10, "end": 13, "label": "X"}]}]
        assert first_words(write(rows)) == [0] * 30 + [3, 3, 3]
    rows = [{"text": "Pestet 😀 láttam", "spans": [[0, 4, "X"]]}] * 9 + [{"text": "Pest", "spans": [[0, 4, "X"]]}]
    assert first_words(write(rows)) == [0] * 10
    for count, is_converted in ((2, False), (3, True)):  # ends within words
        path = write([{"text": "Anna met", "spans": [[0, 3, "X"]]}] * count)
        assert any("the end inclusive, judging" in note for note in read(path).notes) == is_converted
    rows = [{"text": "a 😀 Ann", "spans": [[4, 7, "X"]]}, {"text": "Ann", "spans": [[0, 9, "X"]]}]
    assert "line 2: the span 0 to 9 is empty or outside the text of 3 characters" in refusal(read, write(rows))


def test_ends_of_spans_inside_words_are_noted(write):
    path = write([{"text": TEXT, "spans": [[1, 5, "A"], [5, 10, "B"], [17, 23, "A"], [23, 24, "B"]]}])
    data = read(path)
    assert tagged(data, data.train) == ["Ada/B-A Lovelace/I-A met/O Babbage/B-A"]
    assert any(note.startswith(f"{path}: line 1: the first of 6 ends of spans inside a word") for note in data.notes)


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
    spans = words_of_text(text)
    assert ([text[a:b] for a, b in spans], spans.dtype, spans.shape) == (words, np.int64, (len(words), 2))


def test_words_cover_all_characters_except_spaces():
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
