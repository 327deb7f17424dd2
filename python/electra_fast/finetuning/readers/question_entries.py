"""Reads questions from files: SQuAD's JSON and similar formats, lists and lines of JSON, and rows of tables."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.labels import Elided, parse_value
from electra_fast.finetuning.readers.rows import (
    BadRows,
    abbreviated,
    available_columns,
    check_columns,
    checked_text,
    code_point,
    extension,
    first_of,
    place,
)
from electra_fast.finetuning.readers.table_formats import json_or_lines
from electra_fast.finetuning.readers.tables import OpenTable, Quoting, open_table, refuse_stream
from electra_fast.finetuning.readers.text_files import TextFile
from electra_fast.finetuning.task import Answer

# Names of fields and columns in order of precedence: SQuAD, then CMRC 2018, MRQA and others.
QUESTION_COLUMNS = ("question", "query_text")
CONTEXT_COLUMNS = ("context", "context_text")
ANSWER_COLUMNS = ("answers", "answer", "answer_text")
# MRQA: the answers as spelled in the context.
DETECTED = "detected_answers"
ID_COLUMNS = ("id", "qid", "query_id", "guid")
OFFSET_COLUMNS = ("answer_start", "answer_end")
# Lists of questions, or of objects with such lists and possibly the context of their questions.
NESTED = ("data", "paragraphs", "qas")
EXPECTED = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'

Fields = Mapping[str, Any]
# A question's place, context and fields, unchecked.
Entry = tuple[str, Any, Fields]
# A JSON object with its file and line, and its place there.
JsonObject = tuple[str, str, Fields]


@dataclass(frozen=True)
class Columns:
    """Possible names of the columns or fields of a question."""

    question: tuple[str, ...] = QUESTION_COLUMNS
    context: tuple[str, ...] = CONTEXT_COLUMNS
    answers: tuple[str, ...] = ANSWER_COLUMNS

    @classmethod
    def chosen(cls, text: tuple[str, ...], label: tuple[str, ...] = ()) -> Columns:
        if text and len(text) != 2:
            raise InputError(f"--text = {','.join(text)}: must be two columns, question and context, got {len(text)}")
        if len(label) > 1:
            raise InputError(f"--label = {','.join(label)}: must be one column, which has the answers")
        return cls(text[:1] or cls.question, text[1:] or cls.context, label or cls.answers)

    def all_names(self) -> tuple[str, ...]:
        others = (*ID_COLUMNS, *OFFSET_COLUMNS, DETECTED, "is_impossible")
        return (*self.question, *self.context, *self.answers, *others)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with checked texts."""

    place: str
    """File, place in the file, and id, for messages."""
    id: str | None
    question: str
    context: str
    fields: Fields


def entries(
    path: Path,
    columns: Columns,
    quoting: Quoting,
    bad: BadRows | None = None,
    notes: list[str] | None = None,
    *,
    needs_answers: bool = False,
    has_others: bool = False,
) -> Iterator[Entry]:
    """Yields the questions of a file; streams rows, unless it `needs_answers`.

    Bad rows are collected in `bad`; without `bad`, the first error is raised. With `has_others`, questions from Parquet
    files have all columns, as from other formats.
    """
    if is_json(path):
        yield from json_entries(json_objects(path), columns)
        return
    if needs_answers:
        refuse_stream(path)
    with open_table(path, quoting=quoting) as table:
        if needs_answers and set(table.names()).isdisjoint((*columns.answers, *NESTED)):
            names = " or ".join(map(repr, columns.answers))
            raise InputError(f"{path}: no column {names}; {available_columns(table.names())}; choose with --label")
        wanted = _parquet_columns(table, columns) if path.suffix.lower() == ".parquet" else ()
        for line, row in table.rows(() if has_others else wanted, bad_rows=bad):
            yield from _walk(place(path, line), "", row, columns)
    if notes is not None:
        notes += table.notes


def is_json(path: Path) -> bool:
    return extension(path) == ".json" and not path.is_dir()


def json_objects(path: Path) -> list[JsonObject]:
    """Returns the objects of a file that contains an object, a list of objects, or an object per line."""
    with TextFile(path) as file:
        content, lines = json_or_lines(path, "".join(file.lines()), "download the file again")
    if lines is not None:
        rows = dict(lines)
        if bad := next((row for row in rows.values() if isinstance(row, InputError)), None):
            raise bad
        return [(f"{path}: line {line}", "", row) for line, row in rows.items()]  # type: ignore[misc]
    if not isinstance(content, list):
        objects = [(str(path), "", content)]
    else:
        objects = [(str(path), f"[{number}]", item) for number, item in enumerate(content)]
    if not all(isinstance(item, dict) for _, _, item in objects):
        raise InputError(f"{path}: neither a list of objects nor SQuAD's JSON, {EXPECTED}")
    return objects


def json_entries(objects: Iterable[JsonObject], columns: Columns) -> Iterator[Entry]:
    for prefix, where, item in objects:
        yield from _walk(prefix, where, item, columns)


def _walk(prefix: str, where: str, item: Fields, columns: Columns, context: Any = None) -> Iterator[Entry]:
    context = first_of(item, columns.context, context)
    is_question = not set(columns.question).isdisjoint(item)
    key = next((name for name in NESTED if name in item and not is_question), None)
    if key is None:
        if is_question or "header" not in item:  # MRQA's first line
            yield f"{prefix}: {where}" if where else prefix, context, item
        return
    where = f"{where}.{key}" if where else key
    if not isinstance(item[key], list) or not all(isinstance(child, dict) for child in item[key]):
        raise InputError(f"{prefix}: {where} is not a list of objects as in SQuAD's JSON, {EXPECTED}")
    for number, child in enumerate(item[key]):
        yield from _walk(prefix, f"{where}[{number}]", child, columns, context)


def _parquet_columns(table: OpenTable, columns: Columns) -> tuple[str, ...]:
    available = table.names()
    if not set(available).isdisjoint(NESTED):
        return ()
    for names in (columns.question, columns.context):
        if set(available).isdisjoint(names):
            check_columns(table.path, available, names[:1], "--text")
    return tuple(name for name in columns.all_names() if name in available)


def question_of(entry: Entry, columns: Columns) -> Question:
    where, context, fields = entry
    id = first_of(fields, ID_COLUMNS)
    if id is not None:
        if not isinstance(id, str | int):
            raise InputError(f"{where}: id = {abbreviated(id)}: must be text or an integer")
        where = f"{where}, id {id!r}"
        id = str(id)
    if context is None and set(columns.question).isdisjoint(fields):
        names = f"neither {columns.question[0]!r} nor {columns.context[0]!r}; {available_columns(fields)}"
        raise InputError(f"{where}: {names}; choose with --text, or nest objects as in SQuAD: {EXPECTED}")
    question = _text(where, fields, columns.question, first_of(fields, columns.question))
    context = _text(where, fields, columns.context, context)
    if not context.strip():
        raise InputError(f"{where}: the context is empty")
    return Question(place=where, id=id, question=question, context=context, fields=fields)


def _text(where: str, fields: Fields, names: tuple[str, ...], value: Any) -> str:
    return checked_text(where, fields, next((name for name in names if name in fields), names[0]), value)


def annotations_of(question: Question, columns: Columns) -> tuple[Annotation, ...]:
    """Returns the answers that are not empty; raises InputError if they contradict `is_impossible`."""
    where = question.place
    fields = question.fields
    is_detected = columns.answers == ANSWER_COLUMNS and DETECTED in fields
    value = fields[DETECTED] if is_detected else first_of(fields, columns.answers)
    items = list(_items(where, _structure(where, value)))
    if not isinstance(value, dict | list) and len(items) == 1:
        items = [{name: fields.get(name) for name in OFFSET_COLUMNS} | items[0]]
    if is_detected:
        known = {item["text"] for item in items if isinstance(item.get("text"), str)}
        items += [{"text": text} for text in fields.get("answers") or () if text not in known]
    annotations = tuple(annotation for item in items if (annotation := _annotation(where, item)).text.strip())
    if annotations and is_impossible(question):
        answer = abbreviated(annotations[0].text)
        raise InputError(f"{where}: is_impossible is true, but the question has the answer {answer}; correct one")
    return annotations


def is_impossible(question: Question) -> bool | None:
    value = question.fields.get("is_impossible")
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": None, "none": None}
    if (name := str(value).lower()) not in known:
        raise InputError(f"{question.place}: is_impossible = {abbreviated(value)}: must be true or false")
    return known[name]


def _structure(where: str, value: Any) -> Any:
    """Parses a cell of JSON or as printed by Python or NumPy; returns other values unchanged."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        parsed = parse_value(value)
    except Elided as error:
        raise InputError(f"{where}: answers = {abbreviated(value)}: cannot be read ({error}); write JSON") from None
    except ValueError:
        return value
    items = parsed if isinstance(parsed, list) else [parsed]
    are_answers = all(isinstance(item, str) or (isinstance(item, dict) and "text" in item) for item in items)
    return parsed if are_answers else value


def _items(where: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yields unchecked answers from a text, an object, a list of texts or objects, or an object of lists."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts = value["text"]
        names = (*OFFSET_COLUMNS, "start", "end", "char_spans")
        lists = {name: value[name] for name in names if value.get(name) is not None}
        for name, column in lists.items():
            if not isinstance(column, list) or len(column) != len(texts):
                expected = f"must be a list of {len(texts)} items, as many as in text"
                raise InputError(f"{where}: {name} = {abbreviated(column)}: {expected}")
        for number, text in enumerate(texts):
            yield {"text": text} | {name: column[number] for name, column in lists.items()}
    else:
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            yield item if isinstance(item, dict) else {"text": item}


def _annotation(where: str, item: Fields) -> Annotation:
    text = item.get("text")
    if not isinstance(text, str):
        shown = "null" if text is None else abbreviated(text)
        raise InputError(f"{where}: text of an answer = {shown}: must be text")
    item = _first_span(item.get("char_spans")) or item
    start, end, length = (
        _integer(where, names[0], first_of(item, names))
        for names in (("answer_start", "start"), ("answer_end", "end"), ("answer_length", "length"))
    )
    if end is None and start is not None and length is not None:
        end = start + length
    return Annotation(text, start, end)


def _first_span(spans: Any) -> Fields:
    """Returns the first of MRQA's spans, which are pairs or, in Hugging Face's `datasets`, objects."""
    if isinstance(spans, list) and spans and isinstance(spans[0], list) and len(spans[0]) == 2:
        return dict(zip(OFFSET_COLUMNS, spans[0], strict=True))
    first = spans[0] if isinstance(spans, list) and spans else spans
    pairs = first.items() if isinstance(first, dict) else ()
    return {name: field[0] if isinstance(field, list) and field else field for name, field in pairs}


def _integer(where: str, name: str, value: Any) -> int | None:
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\.0)?\s*", value):
        value = float(value)
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise InputError(f"{where}: {name} = {abbreviated(value)}: must be an integer")
    return int(value)


CHARACTERS = "characters"


class Annotation(NamedTuple):
    """An answer as written in its file."""

    text: str
    start: int | None = None
    """Its first character, in the unit of the file."""
    end: int | None = None
    """Its end, inclusive or exclusive."""


def offset_unit(annotations: Iterable[tuple[str, Annotation]]) -> str:
    """Returns the unit (a key of `_UNITS`) in which most offsets fit their texts; at a tie the first.

    `annotations` are pairs of a context and an annotation.
    """
    pairs = [(context, annotation) for context, annotation in annotations if annotation.start is not None]
    if all(_start(context, annotation, CHARACTERS) is not None for context, annotation in pairs):
        return CHARACTERS
    return max(_UNITS, key=lambda unit: sum(_start(*pair, unit) is not None for pair in pairs))


def place_answer(where: str, context: str, annotation: Annotation, unit: str) -> tuple[Answer, bool]:
    """Returns the answer, and whether its place differs from its offset in `unit`s.

    Without an offset, the answer is the first occurrence of its text. If the offset has another text, the answer is the
    only occurrence, or the nearest one if it overlaps the annotation. Case, whitespace and forms of characters (NFKD)
    may differ. Without an occurrence, the start is -1. Raises InputError if the annotation's end contradicts its text.
    """
    text = annotation.text
    for candidate in dict.fromkeys((unit, CHARACTERS)):
        if (start := _start(context, annotation, candidate)) is not None:
            if annotation.end is not None:
                _check_end(where, context, annotation, start, annotation.end, candidate)
            return Answer(text, start), False
    spans = _occurrences(context, text)
    if annotation.start is None:
        spans = spans[:1]
    elif len(spans) > 1:
        near = annotation.start if (start := _UNITS[unit](context, annotation.start)) is None else start
        nearest = min(spans, key=lambda span: abs(span[0] - near))
        spans = [nearest] if abs(nearest[0] - near) <= len(text) else []
    if not spans:
        return Answer(text, -1), False
    return Answer(context[slice(*spans[0])], spans[0][0]), annotation.start is not None


def _start(context: str, annotation: Annotation, unit: str) -> int | None:
    if annotation.start is None or annotation.start < 0:
        return None
    start = _UNITS[unit](context, annotation.start)
    return start if start is not None and start >= 0 and context.startswith(annotation.text, start) else None


def _check_end(where: str, context: str, annotation: Annotation, start: int, end: int, unit: str) -> None:
    """Checks the end, which may be inclusive or exclusive and may include whitespace that the text lacks."""
    ends = (_UNITS[unit](context, end) for end in (end, end + 1))
    if not any(end is not None and context[start:end].strip() == annotation.text.strip() for end in ends):
        raise InputError(
            f"{where}: the answer {annotation.text[:40]!r} at answer_start = {annotation.start} does not end at "
            f"{end}; correct its text or its end"
        )


def _with_carriage_returns(context: str, offset: int) -> int:
    for line_end in re.finditer("\r\n", context):
        offset += line_end.start() < offset
    return offset


# Functions that convert an offset in a unit to a character. Among units that fit equally well, the first is used.
_UNITS: dict[str, Callable[[str, int], int | None]] = {
    CHARACTERS: lambda context, offset: offset,
    "UTF-16 code units": lambda context, offset: code_point(context, "utf-16-le", offset),
    "UTF-8 bytes": lambda context, offset: code_point(context, "utf-8", offset),
    "characters from 1": lambda context, offset: offset - 1,
    "CR LF as one character": _with_carriage_returns,
}


def _occurrences(context: str, text: str) -> list[tuple[int, int]]:
    """Returns all occurrences of a text, or else all occurrences after folding."""
    spans = [match.span() for match in re.finditer(re.escape(text), context)]
    folded = _fold(text)
    if spans or not folded or folded not in _fold(context):
        return spans
    letters = [(letter, place) for place, character in enumerate(context) for letter in _fold(character) or " "]
    pairs = [pair for pair, before in zip(letters, [(" ", 0), *letters], strict=False) if pair[0] + before[0] != "  "]
    matches = re.finditer(re.escape(folded), "".join(letter for letter, _ in pairs))
    return [(pairs[match.start()][1], pairs[match.end() - 1][1] + 1) for match in matches]


def _fold(text: str) -> str:
    """Returns a text decomposed (NFKD), without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKD", text).casefold().split())
