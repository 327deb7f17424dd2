"""Spans of annotation tools: their fields, the conventions of their numbers, and what contradicts itself."""

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.tag_sentences import row_sentences
from electra_fast.finetuning.readers.tag_spans import Convention, Span, SpannedText, find_convention, placed_spans
from electra_fast.finetuning.readers.words import words_of_text

TEXTS = ["😀 Änne met Bob in Rom", "Ärger, sagt Änne 𠮷野", "Eve saw Rom"]
PLACES = [[(2, 6), (11, 14), (18, 21)], [(12, 16), (17, 19)], [(0, 3), (8, 11)]]
UNITS = {
    "Unicode code points": lambda text: len(text),
    "UTF-16 units": lambda text: len(text.encode("utf-16-le")) // 2,
    "UTF-8 bytes": lambda text: len(text.encode()),
}


def rows_in(unit, first, inclusive, own_text):
    for text, places in zip(TEXTS, PLACES, strict=True):
        spans = []
        for start, end in places:
            numbers = {"start": UNITS[unit](text[:start]) + first, "end": UNITS[unit](text[:end]) + first - inclusive}
            spans.append(numbers | {"label": "X"} | ({own_text: text[start:end]} if own_text else {}))
        yield {"text": text, "spans": spans}


def found_in(sentence):
    words = sentence.words[[tag != "O" for tag in sentence.tags]]
    return sentence.tags, words.tolist()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("first", "inclusive"), [(0, False), (0, True), (1, True)])
@pytest.mark.parametrize("own_text", ["text", "surface", "value", ""])
def test_every_convention_is_recognized(write_rows, unit, first, inclusive, own_text):
    usual = [
        found_in(each) for each in row_sentences(write_rows(rows_in("Unicode code points", 0, False, ""), "a.jsonl"))
    ]
    notes = []
    path = write_rows(rows_in(unit, first, inclusive, own_text))
    assert [found_in(each) for each in row_sentences(path, notes=notes)] == usual
    end = "inclusive" if inclusive else "exclusive"
    counted = f"spans count {unit} from {first}, the end {end}, as the text shows; they are converted"
    is_usual = (unit, first, inclusive) == ("Unicode code points", 0, False)
    assert notes == ([] if is_usual else [f"{path}: {counted}"])


def test_spans_of_parts_of_words_stay_in_code_points(write_rows):
    """Endings, as in Hungarian, are no sign of another convention; nor is a single span that does not fit."""
    rows = [{"text": "Pestet 😀 láttam", "spans": [[0, 4, "LOC"]]}] * 9 + [{"text": "Pest", "spans": [[0, 4, "LOC"]]}]
    assert [each.tags[0] for each in row_sentences(write_rows(rows))] == ["B-LOC"] * 10
    rows = [{"text": "a 😀 Ann", "spans": [[4, 7, "X"]]}, {"text": "Ann", "spans": [[0, 9, "X"]]}]
    with pytest.raises(InputError, match="line 2: the span 0 to 9 is empty or outside the text of 3 characters; count"):
        row_sentences(write_rows(rows))


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"start": 4, "end": 7, "text": "Bob"}, "the span 4 to 7 is 'met', but its own text is 'Bob'; correct one"),
        ({"start": 0, "length": 3, "end": 8}, "the span 0 to 8 has the length 3; correct one of them"),
        ({"start": 0, "end": 3, "token_start": 1, "token_end": 1}, "is 'Ann', but its tokens 1 to 1 are 'met'"),
        ({"start": 0, "end": 3, "token_start": 0, "token_end": 9}, "is 'Ann', but its tokens 0 to 9 are ''"),
        ({"start": 0, "end": 3, "labels": ["A", "B"]}, "has 2 labels; keep one"),
        ({"start": 0.5, "end": 3}, "is not like"),
    ],
)
def test_spans_that_contradict_themselves(write_rows, span, message):
    tokens = [{"text": word} for word in ("Ann", "met", "Bob")]
    row = {"text": "Ann met Bob", "tokens": tokens, "spans": [span if "labels" in span else span | {"label": "X"}]}
    good = {"text": "Ann met Bob", "tokens": tokens, "spans": [{"start": 0, "end": 3, "text": "ANN ", "label": "X"}]}
    with pytest.raises(InputError) as caught:
        row_sentences(write_rows([good, row]))
    assert message in str(caught.value) and "line 2: " in str(caught.value)


@pytest.mark.parametrize(
    "span",
    [
        {"start_offset": 4, "end_offset": 7, "label": "X", "id": 1},
        {"startOffset": 4, "endOffset": 7, "label": "X"},
        {"start": 4, "end": 7, "labels": ["X"], "text": "met"},
        {"offset": 4, "length": 3, "category": "X", "text": "met"},
        {"start": "4", "end": "7", "entity": "X", "value": "met"},
        {"start": 4.0, "end": 7.0, "tag": "X"},
        {"start": 4, "end": 7, "token_start": 1, "token_end": 1, "label": "X"},
        {"begin": 4, "end": 7, "type": "X"},
        {"start": 4, "end": 7, "hypertextlabels": ["X"]},
    ],
)
def test_fields_of_many_tools(write_rows, span):
    path = write_rows([{"text": "Ann met Bob", "tokens": ["Ann", "met", "Bob"], "entities": [span, span]}])
    notes = []
    (sentence,) = row_sentences(path, ("text",), notes=notes)
    assert sentence.tags == ["O", "B-X", "O"]
    assert notes == [f"{path}: 1 spans that repeat another one are left out"]


def test_spans_of_words(write_rows):
    """As in SpERT; the end is inclusive if a span of one word begins where it ends."""
    tokens = ["Ann", "Lee", "met", "Bob"]
    exclusive = [{"start": 0, "end": 2, "type": "X"}, {"start": 3, "end": 4, "type": "X"}]
    inclusive = [{"start": 0, "end": 1, "type": "X"}, {"start": 3, "end": 3, "type": "X"}]
    for spans in (exclusive, inclusive):
        path = write_rows([{"tokens": tokens, "entities": spans}, {"tokens": ["so"], "entities": []}])
        assert [each.tags for each in row_sentences(path)] == [["B-X", "I-X", "O", "B-X"], ["O"]]


def test_spans_and_names_of_tags_in_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    entities = {"start": [0, 8], "end": [3, 11], "label": ["X", "Y"]}
    pq.write_table(pa.Table.from_pylist([{"text": "Ann met Bob", "entities": entities}]), path)
    assert row_sentences(path)[0].tags == ["B-X", "O", "B-Y"]
    feature = {"feature": {"names": ["O", "B-X"], "_type": "ClassLabel"}, "_type": "Sequence"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"ner_tags": feature}}})}
    table = pa.Table.from_pylist([{"tokens": ["a", "b"], "ner_tags": [1, 0]}]).replace_schema_metadata(metadata)
    pq.write_table(table, path)
    assert row_sentences(path)[0].tags == ["B-X", "O"]


def test_any_text_and_unit():
    """Random places in random texts of one to four bytes per character, each with its own text."""
    rng = random.Random(0)
    for unit, measure in UNITS.items():
        rows, expected = [], []
        for _ in range(30):
            text = "".join(rng.choices("aé€😀 b", k=12)) + "é😀"
            start = rng.randrange(11)
            end = rng.randrange(start + 1, 13)
            if not text[start:end].strip():
                continue
            numbers = {"start": measure(text[:start]), "end": measure(text[:end])}
            rows.append(SpannedText(text, words_of_text(text), [Span(**numbers, label="X", text=text[start:end])]))
            expected.append((start, end))
        convention = find_convention(rows)
        assert convention == Convention(unit.removeprefix("Unicode "))
        for row, place in zip(rows, expected, strict=True):
            ((span,), _) = placed_spans("here", row, convention)
            assert (span.start, span.end) == place
