"""Reads questions from files: SQuAD's JSON and its relatives, lists and lines of JSON, and rows of tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.answer_places import Annotation
from electra_fast.finetuning.readers.rows import (
    BadRows,
    Row,
    abbreviated,
    check_columns,
    checked_text,
    extension,
    first_of,
    others_of,
    place,
    there_are,
)
from electra_fast.finetuning.readers.tables import Quoting, column_names, iterate_rows, json_rows, parse_text
from electra_fast.finetuning.readers.text_files import TextFile
from electra_fast.finetuning.readers.written_lists import Elided, parse_value

# Names of fields and columns, in order of precedence: SQuAD's, and those of CMRC 2018, MRQA and others.
QUESTION_COLUMNS = ("question", "query_text")
CONTEXT_COLUMNS = ("context", "context_text")
ANSWER_COLUMNS = ("answers", "answer", "answer_text")
# MRQA: the answers as they stand in the context.
DETECTED = "detected_answers"
ID_COLUMNS = ("id", "qid", "query_id", "guid")
OFFSET_COLUMNS = ("answer_start", "answer_end")
# Lists of questions, or of objects that have such lists and maybe the context of their questions.
NESTED = ("data", "paragraphs", "qas")
EXPECTED = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'

Fields = Mapping[str, Any]
# Where a question is, its context, and its fields, all unchecked.
Entry = tuple[str, Any, Fields]
# File and line of a JSON object, its place there, and the object.
JsonObject = tuple[str, str, Fields]


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The names that the parts of a question may have."""

    question: tuple[str, ...] = QUESTION_COLUMNS
    context: tuple[str, ...] = CONTEXT_COLUMNS
    answers: tuple[str, ...] = ANSWER_COLUMNS

    @classmethod
    def chosen(cls, text: tuple[str, ...], label: tuple[str, ...] = ()) -> Columns:
        """Returns the columns of `--text` and `--label`, or the usual ones if these are empty."""
        if text and len(text) != 2:
            given = f"{len(text)} columns ({', '.join(text)})"
            raise InputError(f"--text names {given}; it must be two: question, context")
        if len(label) > 1:
            given = f"{len(label)} columns ({', '.join(label)})"
            raise InputError(f"--label names {given}; choose the one with the answers")
        names = {"question": text[:1], "context": text[1:], "answers": label}
        return cls(**{part: own for part, own in names.items() if own})

    def all_names(self) -> tuple[str, ...]:
        """Returns the names of all fields that are read."""
        others = (*ID_COLUMNS, *OFFSET_COLUMNS, DETECTED, "is_impossible")
        return (*self.question, *self.context, *self.answers, *others)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question with its texts checked."""

    place: str
    """File, place in it, and id, for messages."""
    id: str | None
    question: str
    context: str
    fields: Fields


def entries(
    path: Path, columns: Columns, quoting: Quoting, bad: BadRows | None = None, *, has_others: bool = False
) -> Iterator[Entry]:
    """Yields the questions of a file; streams rows. Bad ones are collected in `bad`, or raised.

    With `has_others`, those of a Parquet file have its other columns too, as those of other files do.
    """
    if is_json(path):
        yield from json_entries(json_objects(path), columns)
        return
    wanted = _parquet_columns(path, columns) if path.suffix.lower() == ".parquet" else ()
    if has_others:
        wanted = ()
    for line, row in iterate_rows(path, wanted, quoting=quoting, bad_rows=bad):
        yield from _walk(place(path, line), "", row, columns)


def check_answer_column(path: Path, columns: Columns, quoting: Quoting) -> None:
    """Raises InputError if a table has no column of answers."""
    if is_json(path):
        return
    available = column_names(path, quoting=quoting)
    if set(available).isdisjoint((*columns.answers, *NESTED)):
        names = " or ".join(map(repr, columns.answers))
        raise InputError(f"{path}: no column {names}; {there_are(available)}; choose with --label")


def is_json(path: Path) -> bool:
    """Returns whether a file is JSON, which is read as a whole."""
    return extension(path) == ".json" and not path.is_dir()


def json_objects(path: Path) -> list[JsonObject]:
    """Returns the objects of a file: one, a list, or one per line."""
    with TextFile(path) as file:
        text = "".join(file.lines())
    try:
        content = parse_text(text)
    except (ValueError, RecursionError) as error:
        if "Extra data" in str(error):
            return list(_objects_in_lines(path, text))
        raise InputError(f"{path}: not JSON: {error}; get the file again") from None
    is_list = isinstance(content, list)
    found = [
        (str(path), f"[{number}]" if is_list else "", each)
        for number, each in enumerate(content if is_list else [content])
    ]
    if not all(isinstance(each, dict) for _, _, each in found):
        raise InputError(f"{path}: neither a list of objects nor SQuAD's JSON, {EXPECTED}")
    return found


def _objects_in_lines(path: Path, text: str) -> Iterator[JsonObject]:
    for line, row in json_rows(path, enumerate(text.split("\n"), 1)):
        if isinstance(row, InputError):
            raise row
        yield f"{path}: line {line}", "", row


def json_entries(objects: Iterable[JsonObject], columns: Columns) -> Iterator[Entry]:
    """Yields the questions of a file's objects."""
    for prefix, where, each in objects:
        yield from _walk(prefix, where, each, columns)


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


def _parquet_columns(path: Path, columns: Columns) -> tuple[str, ...]:
    """Returns the columns to read of a Parquet file."""
    available = column_names(path)
    if not set(available).isdisjoint(NESTED):
        return ()
    for names in (columns.question, columns.context):
        if set(available).isdisjoint(names):
            check_columns(path, available, names[:1], "--text")
    return tuple(name for name in columns.all_names() if name in available)


def question_of(entry: Entry, columns: Columns) -> Question:
    """Returns a question with its texts checked; raises InputError with the place and the remedy."""
    where, context, fields = entry
    id = first_of(fields, ID_COLUMNS)
    if id is not None:
        if not isinstance(id, str | int):
            raise InputError(f"{where}: the id is {abbreviated(id)}; it must be text or an integer")
        id, where = str(id), f"{where}, id {id!r}"
    if context is None and set(columns.question).isdisjoint(fields):
        names = f"no {columns.question[0]!r} and no {columns.context[0]!r}; {there_are(fields)}"
        raise InputError(f"{where}: {names}; choose with --text, or nest them as SQuAD does: {EXPECTED}")
    question = _text(where, fields, columns.question, first_of(fields, columns.question))
    context = _text(where, fields, columns.context, context)
    if not context.strip():
        raise InputError(f"{where}: the context is empty")
    return Question(place=where, id=id, question=question, context=context, fields=fields)


def _text(where: str, fields: Fields, names: tuple[str, ...], value: Any) -> str:
    return checked_text(where, fields, next((name for name in names if name in fields), names[0]), value)


def annotations_of(question: Question, columns: Columns) -> tuple[Annotation, ...]:
    """Returns the answers except empty ones; raises InputError if they contradict `is_impossible`."""
    where, fields = question.place, question.fields
    is_detected = columns.answers == ANSWER_COLUMNS and DETECTED in fields
    value = fields[DETECTED] if is_detected else first_of(fields, columns.answers)
    items = list(_items(where, _structure(where, value)))
    if not isinstance(value, dict | list) and len(items) == 1:
        items = [{name: fields.get(name) for name in OFFSET_COLUMNS} | items[0]]
    if is_detected:
        known = {item["text"] for item in items if isinstance(item.get("text"), str)}
        items += [{"text": text} for text in fields.get("answers") or () if text not in known]
    found = tuple(annotation for item in items if (annotation := _annotation(where, item)).text.strip())
    if found and is_impossible(question):
        raise InputError(
            f"{where}: is_impossible is true, but there is the answer {abbreviated(found[0].text)}; correct one of them"
        )
    return found


def other_fields(question: Question, columns: Columns) -> Row:
    """Returns the fields of a question that are not read."""
    return others_of(question.fields, columns.all_names())


def is_impossible(question: Question) -> bool | None:
    """Returns the field `is_impossible`; None if it is missing."""
    value = question.fields.get("is_impossible")
    known = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False, "": None, "none": None}
    if (name := str(value).lower()) not in known:
        raise InputError(f"{question.place}: is_impossible is {abbreviated(value)}; it must be true or false")
    return known[name]


def _structure(where: str, value: Any) -> Any:
    """Parses a cell that is JSON, or printed by Python or NumPy; returns other values as they are."""
    if not isinstance(value, str) or value.strip()[:1] not in ("{", "["):
        return value
    try:
        found = parse_value(value)
    except Elided as error:
        raise InputError(f"{where}: the answers {abbreviated(value)} cannot be read ({error})") from None
    except ValueError:
        return value
    items = found if isinstance(found, list) else [found]
    return (
        found if all(isinstance(item, str) or (isinstance(item, dict) and "text" in item) for item in items) else value
    )


def _items(where: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yields unchecked answers, from a text, an object, a list of these, or an object of lists."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts = value["text"]
        names = (*OFFSET_COLUMNS, "start", "end", "char_spans")
        lists = {name: value[name] for name in names if value.get(name) is not None}
        for name, each in lists.items():
            if not isinstance(each, list) or len(each) != len(texts):
                remedy = f"it must be a list of {len(texts)}, as text is"
                raise InputError(f"{where}: {name} is {abbreviated(each)}; {remedy}")
        for number, text in enumerate(texts):
            yield {"text": text} | {name: each[number] for name, each in lists.items()}
    else:
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            yield item if isinstance(item, dict) else {"text": item}


def _annotation(where: str, item: Fields) -> Annotation:
    text = item.get("text")
    if not isinstance(text, str):
        found = "missing" if text is None else abbreviated(text)
        raise InputError(f"{where}: the text of an answer is {found}; it must be text")
    item = _first_span(item.get("char_spans")) or item
    start, end, length = (
        _integer(where, names[0], first_of(item, names))
        for names in (("answer_start", "start"), ("answer_end", "end"), ("answer_length", "length"))
    )
    if end is None and start is not None and length is not None:
        end = start + length
    return Annotation(text, start, end)


def _first_span(spans: Any) -> Fields:
    """Returns start and end of the first of MRQA's spans: pairs or, in the `datasets` of Hugging Face, objects."""
    if isinstance(spans, list) and spans and isinstance(spans[0], list) and len(spans[0]) == 2:
        return dict(zip(OFFSET_COLUMNS, spans[0], strict=True))
    first = spans[0] if isinstance(spans, list) and spans else spans
    pairs = first.items() if isinstance(first, dict) else ()
    return {name: each[0] if isinstance(each, list) and each else each for name, each in pairs}


def _integer(where: str, name: str, value: Any) -> int | None:
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str) and re.fullmatch(r"\s*-?\d+(\.0)?\s*", value):
        value = float(value)
    if isinstance(value, bool) or not (isinstance(value, int) or (isinstance(value, float) and value.is_integer())):
        raise InputError(f"{where}: {name} is {abbreviated(value)}; it must be an integer")
    return int(value)
