"""Spans of entities as annotation tools write them: their fields, their unit of counting, and the words they cover.

The spans of a file share a convention, inferred from the whole file: most tools count Unicode code points, tools in
JavaScript and Java UTF-16 units, others bytes; and the end may be the last character rather than the one after it.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.annotations import code_point
from electra_fast.finetuning.readers.rows import abbreviated, first_of
from electra_fast.finetuning.readers.tag_schemes import Entity, from_entities
from electra_fast.finetuning.readers.words import Words

Unit = Literal["code points", "UTF-16 units", "UTF-8 bytes"]
EXPECTED_SPAN = '{"start": 0, "end": 5, "label": "PER"} or [0, 5, "PER"]'
_STARTS = ("start", "start_offset", "startOffset", "start_char", "begin", "offset")
_ENDS = ("end", "end_offset", "endOffset", "end_char")
_LABELS = (
    *("label", "labels", "type", "tag", "entity_type", "entity_group", "entity", "category", "class"),
    *("hypertextlabels", "paragraphlabels"),  # of Label Studio
)
_TEXTS = ("text", "surface", "surface_form", "mention", "value", "word", "string")
# Spans are read in another convention for splitting words only if at least this many do in the usual one.
_MIN_MISFITS = 3


@dataclass(frozen=True, kw_only=True)
class Span:
    """An entity as a file has it; `text` is None where the file does not repeat it."""

    start: int
    end: int
    label: str
    text: str | None = None
    tokens: tuple[int, int] | None = None
    """The first and the last token, where the file has them too."""


class SpannedText(NamedTuple):
    """A text with its spans, or the words that spans count."""

    text: str | Sequence[str]
    words: Words
    spans: Sequence[Span]
    tokens: Sequence[str] = ()
    """The tool's own."""

    def part(self, start: int, end: int) -> str:
        """Returns the text of a span; words are joined with spaces."""
        return self.text[start:end] if isinstance(self.text, str) else " ".join(self.text[start:end])


@dataclass(frozen=True)
class Convention:
    """The unit and origin in which a file's spans are counted."""

    unit: Unit = "code points"
    first: int = 0
    """The number of the first unit."""
    inclusive: bool = False
    """The end is the last rather than the one after it."""

    def described(self, text: str | Sequence[str]) -> str:
        """Describes the convention for a text, or for words."""
        unit = f"{'Unicode ' if self.unit == 'code points' else ''}{self.unit}" if isinstance(text, str) else "words"
        return f"{unit} from {self.first}, the end {'inclusive' if self.inclusive else 'exclusive'}"

    def place(self, text: str | Sequence[str], span: Span) -> tuple[int, int] | None:
        """Returns a span's code points or words; None if it is empty, not in the text or splits a character."""
        start, end = span.start - self.first, span.end - self.first + self.inclusive
        if isinstance(text, str) and self.unit != "code points" and not text.isascii():
            encoding = "utf-16-le" if self.unit == "UTF-16 units" else "utf-8"
            first, last = (code_point(text, encoding, offset) for offset in (start, end))
            if first is None or last is None:
                return None
            start, end = first, last
        return (start, end) if 0 <= start < end <= len(text) else None


_CONVENTIONS = tuple(
    Convention(unit, first, inclusive)
    for first, inclusive in ((0, False), (0, True), (1, True))
    for unit in get_args(Unit)
)


def find_convention(rows: Iterable[SpannedText]) -> Convention:
    """Returns the convention that most of a file's spans fit, the usual one at a tie.

    A span fits if its own text is there. Spans without a text must lie in the row's text; if some do not, or at least
    `_MIN_MISFITS` split words, another convention is taken under which every span begins and ends where words do.
    """
    pairs = [(row, span) for row in rows for span in row.spans]
    has_texts = any(span.text is not None for _, span in pairs)
    usual = best = Convention()
    misfits = sum(not _fits(row, span, usual) for row, span in pairs)
    if not misfits:
        has_texts = False  # if some have, they are where all conventions find them
        misfits = sum(not _fits_words(row, span, usual) for row, span in pairs)
        if misfits < _MIN_MISFITS:
            return usual
    for convention in _CONVENTIONS if misfits else ():
        found = sum(not _fits_words(row, span, convention) for row, span in pairs)
        if found < misfits and (has_texts or not found):
            best, misfits = convention, found
    return best


def _fits(row: SpannedText, span: Span, convention: Convention) -> bool:
    place = convention.place(row.text, span)
    return place is not None and (span.text is None or _is_same(row.part(*place), span.text))


def _fits_words(row: SpannedText, span: Span, convention: Convention) -> bool:
    """Like `_fits`; a span without a text of its own must also begin and end with words."""
    place = convention.place(row.text, span)
    if place is None or span.text is not None or not isinstance(row.text, str):
        return _fits(row, span, convention)
    return place[0] in row.words[:, 0] and place[1] in row.words[:, 1]


def _is_same(found: str, expected: str) -> bool:
    """Returns whether two texts are the same except for case, white space and Unicode composition."""
    return _plain(found) == _plain(expected)


def _plain(text: str) -> str:
    # Label Studio writes newlines as two characters.
    return "".join(unicodedata.normalize("NFC", text.replace("\\n", " ")).casefold().split())


def read_spans(where: str, items: Any) -> list[Span]:
    """Reads the spans of a row; raises InputError for another form. `datasets` turns a list of objects into lists."""
    if isinstance(items, dict) and all(isinstance(each, list) for each in items.values()):
        items = [dict(zip(items, values, strict=False)) for values in zip(*items.values(), strict=False)]
    if not isinstance(items, list):
        raise InputError(f"{where}: the spans are {abbreviated(items)}; there must be a list of {EXPECTED_SPAN}")
    return [_read_span(where, item) for item in items]


def _read_span(where: str, item: Any) -> Span:
    fields = item
    if isinstance(item, list):
        fields = dict(zip(("start", "end", "label"), item, strict=False)) if len(item) == 3 else {}
    if not isinstance(fields, dict):
        raise InputError(f"{where}: the span {abbreviated(item)} is not like {EXPECTED_SPAN}")
    start, end, length = (_whole(first_of(fields, names)) for names in (_STARTS, _ENDS, ("length",)))
    if end is None and start is not None and length is not None:
        end = start + length
    if start is None or end is None or not (label := _label(where, item, fields)):
        raise InputError(f"{where}: the span {abbreviated(item)} is not like {EXPECTED_SPAN}")
    if length is not None and length not in (end - start, end - start + 1):
        raise InputError(f"{where}: the span {start} to {end} has the length {length}; correct one of them")
    text = next((fields[name] for name in _TEXTS if isinstance(fields.get(name), str)), None)
    first, last = (_whole(fields.get(name)) for name in ("token_start", "token_end"))
    tokens = None if first is None or last is None else (first, last)
    return Span(start=start, end=end, label=label, text=text, tokens=tokens)


def _whole(value: Any) -> int | None:
    """Returns an integer in any notation, else None."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole or type(value) is int else None


def _label(where: str, item: Any, fields: dict[str, Any]) -> str:
    """Returns the type of a span; empty if it has none."""
    found = next((fields[name] for name in _LABELS if fields.get(name)), "")
    found = found if isinstance(found, list) else [found]
    if len(found) > 1:
        raise InputError(f"{where}: the span {abbreviated(item)} has {len(found)} labels; keep one")
    return found[0].strip() if isinstance(found[0], str) else ""


def placed_spans(where: str, row: SpannedText, convention: Convention) -> tuple[list[Span], int]:
    """Returns the spans of a row in code points or words, sorted and unique, and how many repeat another one.

    Raises InputError if a span is not its own text, is not in the text, or overlaps another one.
    """
    places = [_placed(where, row, span, convention) for span in row.spans]
    unique = [span for _, span in sorted({(span.start, span.end, span.label): span for span in places}.items())]
    for before, after in itertools.pairwise(unique):
        if after.start < before.end:
            overlap = f"{before.start} to {before.end} and {after.start} to {after.end}"
            raise InputError(f"{where}: the spans {overlap} overlap; keep one of them")
    return unique, len(places) - len(unique)


def _placed(where: str, row: SpannedText, span: Span, convention: Convention) -> Span:
    here, place = f"{where}: the span {span.start} to {span.end}", convention.place(row.text, span)
    if place is None:
        size = f"{len(row.text):,} {'characters' if isinstance(row.text, str) else 'words'}"
        counted = convention.described(row.text)
        raise InputError(f"{here} is empty or outside the text of {size}; count {counted}")
    found = row.part(*place)
    if span.text is not None and not _is_same(found, span.text):
        own = abbreviated(span.text)
        raise InputError(f"{here} is {abbreviated(found)}, but its own text is {own}; correct one of them")
    if span.tokens is not None and row.tokens:
        first, last = span.tokens
        tokens = row.tokens[first : last + 1] if 0 <= first <= last < len(row.tokens) else [""]
        if not tokens[0] or not found.startswith(tokens[0]) or not found.endswith(tokens[-1]):
            own = f"tokens {first} to {last} are {abbreviated(' '.join(tokens))}"
            raise InputError(f"{here} is {abbreviated(found)}, but its {own}; correct one of them")
    return Span(start=place[0], end=place[1], label=span.label)


def tags_of_spans(where: str, row: SpannedText, spans: Sequence[Span]) -> tuple[list[str], int]:
    """Returns IOB2 tags of all words, and how many ends of spans are within a word.

    A word in two spans belongs to the first.
    """
    words = row.words
    if not isinstance(row.text, str):
        return from_entities([(span.start, span.end, span.label) for span in spans], len(words)), 0
    entities: list[Entity] = []
    num_cuts = past = 0
    for span in spans:
        first = int(np.searchsorted(words[:, 1], span.start, side="right"))
        last = int(np.searchsorted(words[:, 0], span.end, side="left"))
        if first == last:
            raise InputError(f"{where}: the span {span.start} to {span.end} has no word in it; remove it")
        num_cuts += int(words[first, 0] < span.start) + int(words[last - 1, 1] > span.end)
        if max(first, past) < last:
            entities.append((max(first, past), last, span.label))
        past = last
    return from_entities(entities, len(words)), num_cuts
