"""Locates annotated answers in their contexts.

Tools count offsets in different units; the answers' texts show which. `offset_unit` finds the unit of a file, and
`place_answer` the characters of an answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import NamedTuple

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.annotations import code_point
from electra_fast.finetuning.task import Answer

CHARACTERS = "characters"


class Annotation(NamedTuple):
    """An answer as its file has it."""

    text: str
    start: int | None = None
    """Its first character, in whatever unit the file counts."""
    end: int | None = None
    """Its last character or the one after it."""


def offset_unit(annotations: Iterable[tuple[str, Annotation]]) -> str:
    """Returns the unit, a key of `_UNITS`, in which most offsets fit their texts: characters unless another fits more.

    `annotations` are pairs of context and annotation.
    """
    given = [(context, annotation) for context, annotation in annotations if annotation.start is not None]
    if all(_start(context, annotation, CHARACTERS) is not None for context, annotation in given):
        return CHARACTERS
    return max(_UNITS, key=lambda unit: sum(_start(*pair, unit) is not None for pair in given))


def place_answer(where: str, context: str, annotation: Annotation, unit: str) -> tuple[Answer, bool]:
    """Returns the answer, and whether it is elsewhere than at its offset in `unit`s.

    Without an offset it is the first occurrence. If another text is at the offset, it is the only occurrence, or the
    nearest if that overlaps the annotation. Case, whitespace and forms of characters (NFKD) may differ. The start is -1
    if there is none.

    Raises:
        InputError: The annotation's end is not that of its text; the message begins with `where`.
    """
    text = annotation.text
    for each in dict.fromkeys((unit, CHARACTERS)):
        if (start := _start(context, annotation, each)) is not None:
            _check_end(where, context, annotation, start, each)
            return Answer(text, start), False
    found = _occurrences(context, text)
    if annotation.start is None:
        found = found[:1]
    elif len(found) > 1:
        near = annotation.start if (start := _UNITS[unit](context, annotation.start)) is None else start
        nearest = min(found, key=lambda span: abs(span[0] - near))
        found = [nearest] if abs(nearest[0] - near) <= len(text) else []
    if not found:
        return Answer(text, -1), False
    return Answer(context[slice(*found[0])], found[0][0]), annotation.start is not None


def _start(context: str, annotation: Annotation, unit: str) -> int | None:
    """Returns the character at which an annotation starts, if its text is there."""
    if annotation.start is None or annotation.start < 0:
        return None
    start = _UNITS[unit](context, annotation.start)
    return start if start is not None and start >= 0 and context.startswith(annotation.text, start) else None


def _check_end(where: str, context: str, annotation: Annotation, start: int, unit: str) -> None:
    """Checks the end, which may be inclusive or exclusive, and include whitespace that the text lacks."""
    if annotation.end is None:
        return
    ends = (_UNITS[unit](context, end) for end in (annotation.end, annotation.end + 1))
    if not any(end is not None and context[start:end].strip() == annotation.text.strip() for end in ends):
        raise InputError(
            f"{where}: the answer {annotation.text[:40]!r} at answer_start {annotation.start} does not end at "
            f"{annotation.end}; correct its text or its end"
        )


def _with_carriage_returns(context: str, offset: int) -> int:
    for line_end in re.finditer("\r\n", context):
        offset += line_end.start() < offset
    return offset


# Convert an offset in a unit to a character. Among units that fit equally well, the first is taken.
_UNITS: dict[str, Callable[[str, int], int | None]] = {
    CHARACTERS: lambda context, offset: offset,
    "UTF-16 code units": lambda context, offset: code_point(context, "utf-16-le", offset),
    "UTF-8 bytes": lambda context, offset: code_point(context, "utf-8", offset),
    "characters from 1": lambda context, offset: offset - 1,
    "CR LF as one character": _with_carriage_returns,
}


def _occurrences(context: str, text: str) -> list[tuple[int, int]]:
    """Returns all occurrences of a text; if there are none as written, those that are equal when folded."""
    found = [match.span() for match in re.finditer(re.escape(text), context)]
    folded = _fold(text)
    if found or not folded or folded not in _fold(context):
        return found
    letters = [(letter, place) for place, each in enumerate(context) for letter in _fold(each) or " "]
    kept = [pair for pair, before in zip(letters, [(" ", 0), *letters], strict=False) if pair[0] + before[0] != "  "]
    matches = re.finditer(re.escape(folded), "".join(letter for letter, _ in kept))
    return [(kept[match.start()][1], kept[match.end() - 1][1] + 1) for match in matches]


def _fold(text: str) -> str:
    """Decomposed, without case, with single spaces."""
    return " ".join(unicodedata.normalize("NFKD", text).casefold().split())
