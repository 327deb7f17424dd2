"""Sentences of files with a row per sentence: lists of words, or texts with spans.

`tag_columns` reads files with a word per line; `tag_files` makes splits from both.
"""

from __future__ import annotations

import dataclasses
import itertools
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.labels import are_lists, parse_list, spells_list
from electra_fast.finetuning.readers.rows import (
    BadRows,
    Row,
    abbreviated,
    available_columns,
    check_columns,
    code_point,
    columns_note,
    first_of,
    flat_row,
    others_of,
    place,
    rejected_rows,
    text_of,
)
from electra_fast.finetuning.readers.tables import Quoting, open_table
from electra_fast.finetuning.readers.tag_schemes import Entity, from_entities
from electra_fast.finetuning.readers.words import Words, places_of, words_of_text

WORD_COLUMNS = ("tokens", "words")
TAG_COLUMNS = ("tags", "ner_tags", "labels", "pos_tags")
TEXT_COLUMNS = ("text", "sentence")
SPAN_COLUMNS = ("spans", "entities", "labels", "label", "ents", "annotations")
_PAIRS = (
    *itertools.product(WORD_COLUMNS, TAG_COLUMNS),
    *itertools.product(TEXT_COLUMNS, SPAN_COLUMNS),
    *itertools.product(WORD_COLUMNS, SPAN_COLUMNS),
)


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A text with its words and their tags."""

    path: Path
    lines: Sequence[int]
    """The line of each word, or one line for all."""
    row: int
    """Number of the sentence in the file, from 0."""
    text: str
    words: Words
    tags: list[str] | None
    """One tag per word, empty for a missing one; None for a sentence without tags."""
    has_spans: bool = False
    """Whether the tags were made from spans, in IOB2."""
    num_cuts: int = 0
    """Number of ends of spans inside a word."""
    spanned: SpannedText | None = None
    """Spans not yet converted to tags."""
    columns: Row = field(default_factory=dict)
    """The other columns of its row."""

    def place(self, word: int = 0) -> str:
        return place(self.path, self.lines[min(word, len(self.lines) - 1)])


def joined_words(path: Path, lines: Sequence[int], words: Sequence[Any]) -> tuple[str, Words]:
    """Joins words with single spaces; returns the text and the places of the words in it.

    Raises InputError with the line of a word that is empty or not text.
    """
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word:
            where = place(path, lines[min(number, len(lines) - 1)])
            problem = "must not be empty; remove it and its tag" if word == "" else "must be text"
            raise InputError(f"{where}: word {number + 1} = {abbreviated(word)}: {problem}")
    return " ".join(words), places_of(words)


def row_sentences(
    path: Path,
    text: Sequence[str] = (),
    label: Sequence[str] = (),
    labels: Sequence[str] = (),
    *,
    is_test: bool = False,
    quoting: Quoting = "auto",
    bad: BadRows,
    notes: list[str],
) -> list[Sentence]:
    """Reads the sentences of a .jsonl, .json or .parquet file, without those that an annotator rejected.

    The arguments are the same as in `read_tagging`. With `is_test`, the file may lack the column of tags or spans.
    Adds notes on omitted and converted data to `notes`. Raises InputError with the line that cannot be used.
    """
    rows = dict[int, Row]()
    with open_table(path, quoting=quoting) as table:
        for line, row in table.rows(bad_rows=bad):
            with bad.collect():
                rows[line] = flat_row(place(path, line), row)
    notes += table.notes
    if not rows:
        bad.finish()
    chosen = row_columns(path, [*rows.values()], text, label, is_test=is_test)
    labels = labels or table.class_names.get(chosen[1], ())
    rows = _with_lists(path, rows, chosen, bad)
    for line, row in () if labels else rows.items():
        tag = next((tag for tag in _items(row.get(chosen[1])) if type(tag) is int and tag != -1), None)
        if tag is not None and isinstance(row.get(chosen[0]), list):
            problem = f"tag = {tag}: must be a name; pass names for integer tags with --labels O,B-PER,..."
            raise InputError(f"{place(path, line)}: {problem}")
    has_spans = _have_spans(rows, chosen[1])
    target = f", {'spans' if has_spans else 'tags'} in {chosen[1]!r}" if chosen[1] else ""
    notes.append(columns_note(path, f"text or words in {chosen[0]!r}{target}", text, label))
    rejected = rejected_rows(path, [*rows.values()], chosen, notes, is_test=is_test)
    sentences: list[Sentence] = []
    for number, (line, row) in enumerate(rows.items()):
        if number not in rejected:
            with bad.collect():
                sentences.append(_read_row(path, number, line, row, chosen, labels, has_spans))
    return list(_with_tags(path, sentences, bad, notes))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_row(
    path: Path, number: int, line: int, row: Row, chosen: tuple[str, str], labels: Sequence[str], has_spans: bool
) -> Sentence:
    """Reads a row. If the file `has_spans`, an empty list means no spans instead of missing tags."""
    where = place(path, line)
    target = row.get(chosen[1])
    if target is None and row.get("answer") == "accept":
        target = []  # Prodigy omits empty spans
    content, text, words = row_text(path, line, row, chosen[0])
    is_text = isinstance(content, str)
    has_spans |= is_text
    tokens = _token_texts(_items(row.get("tokens"))) if is_text else ()
    spans = read_spans(where, target) if has_spans and target is not None else None
    return Sentence(
        path=path,
        lines=[line],
        row=number,
        text=text,
        words=words,
        tags=None if has_spans else _tags(where, len(words), target, labels),
        has_spans=has_spans,
        spanned=None if spans is None else SpannedText(content, words, spans, tokens),
        columns=others_of(row, chosen),
    )


def _with_lists(path: Path, rows: dict[int, Row], chosen: tuple[str, str], bad: BadRows) -> dict[int, Row]:
    """Returns the rows with lists in place of texts that contain lists.

    All rows of a column decide its form: lists as written by JSON, Python or NumPy, or else words or tags separated by
    spaces. A text with spans remains a text.
    """
    text, label = chosen
    are_texts = any(isinstance(row.get(label), str) for row in rows.values())
    for name in (label, text):
        are_written = are_lists([row.get(name) for row in rows.values()])
        if not are_written and (not are_texts or _have_spans(rows, label)):
            continue
        parsed = dict[int, Row]()
        for line, row in rows.items():
            with bad.collect():
                cell = row.get(name)
                if isinstance(cell, str) and are_written:
                    cell = _parsed(place(path, line), name, cell)
                elif isinstance(cell, str):
                    cell = cell.split()
                    cell = [*map(int, cell)] if name == label and all(map(str.isdecimal, cell)) else cell
                parsed[line] = row | {name: cell}
        rows = parsed
    return rows


def _have_spans(rows: Mapping[int, Row], column: str) -> bool:
    return any(isinstance(item, (dict, list)) for row in rows.values() for item in _items(row.get(column)))


def _parsed(where: str, name: str, text: str) -> list[Any] | None:
    try:
        return parse_list(text) if text.strip() else None
    except ValueError as error:
        remedy = "write it as JSON"
        raise InputError(
            f"{where}: {name} = {abbreviated(text)}: cannot be read as a list ({error}); {remedy}"
        ) from None


def row_text(path: Path, line: int, row: Row, column: str) -> tuple[str | list[str], str, Words]:
    """Returns a row's text or words, the text (of joined words), and the places of the words in the text."""
    value = row.get(column)
    if isinstance(value, str) and value.startswith(("['", '["')) and spells_list(value):  # in a file for prediction
        value = parse_list(value)
    if isinstance(value, list):
        words = _token_texts(value)
        return words, *joined_words(path, [line], words)
    text = text_of(path, line, row, column)
    return text, text, words_of_text(text)


def _token_texts(tokens: Sequence[Any]) -> list[Any]:
    return [token["text"] if isinstance(token, dict) and "text" in token else token for token in tokens]


def _with_tags(path: Path, sentences: Sequence[Sentence], bad: BadRows, notes: list[str]) -> Iterator[Sentence]:
    spanned = [sentence.spanned for sentence in sentences if sentence.spanned]
    convention = find_convention(spanned)
    num_repeated = 0
    for sentence in sentences:
        if sentence.spanned is None:
            yield sentence
            continue
        with bad.collect():
            spans, repeated = placed_spans(sentence.place(), sentence.spanned, convention)
            tags, num_cuts = tags_of_spans(sentence.place(), sentence.spanned, spans)
            num_repeated += repeated
            sentence = dataclasses.replace(sentence, tags=tags, num_cuts=num_cuts, spanned=None)
        if sentence.tags is not None:
            yield sentence
    if convention != Convention():
        counted = convention.described(spanned[0].text)
        notes.append(f"{path}: spans count {counted}, judging by the texts; they are converted")
    if num_repeated:
        notes.append(f"{path}: {num_repeated:,} duplicate spans are left out")


def row_columns(
    path: Path, rows: Sequence[Row], text: Sequence[str], label: Sequence[str], *, is_test: bool
) -> tuple[str, str]:
    """Returns the column of words or texts and the column of tags or spans; the latter is empty if a test has none."""
    available = dict.fromkeys(name for row in rows for name in row)
    for flag, names in (("--text", text), ("--label", label)):
        check_single(names, flag)
        if flag == "--text" or not is_test:
            check_columns(path, available, names, flag)
    texts = text or (*WORD_COLUMNS, *TEXT_COLUMNS)
    targets = label or (*TAG_COLUMNS, *SPAN_COLUMNS)
    pairs = itertools.product(texts, targets) if text or label else iter(_PAIRS)
    if columns := next((pair for pair in pairs if len({*pair} & {*available}) == 2), None):
        return columns
    column = next((name for name in texts if name in available), "")
    if not column or not is_test:
        kind = "label" if column else "text"
        raise InputError(f"{path}: no {kind} column; {available_columns(available)}; choose with --{kind}")
    return column, ""


def check_single(names: Sequence[str], flag: str) -> None:
    if len(names) > 1:
        raise InputError(f"{flag} = {','.join(names)}: must be one column for tagging, got {len(names)}")


def _tags(where: str, num_words: int, tags: Any, labels: Sequence[str]) -> list[str] | None:
    if not tags:
        return None
    if not isinstance(tags, list):
        raise InputError(f"{where}: tags = {abbreviated(tags)}: must be a list with one tag per word")
    if len(tags) != num_words:
        raise InputError(f"{where}: expected one tag per word, got {num_words} words and {len(tags)} tags")
    return [_tag(where, tag, labels) for tag in tags]


def _tag(where: str, tag: Any, labels: Sequence[str]) -> str:
    """Returns the name of a tag; empty for a missing tag such as -1."""
    if tag is None or tag == -1:
        return ""
    if isinstance(tag, str):
        return tag.strip()
    if type(tag) is not int:
        raise InputError(f"{where}: tag = {abbreviated(tag)}: must be text or an integer")
    if not 0 <= tag < len(labels):
        raise InputError(f"{where}: tag = {tag}: must be from 0 to {len(labels) - 1}, as in --labels")
    return labels[tag]


Unit = Literal["code points", "UTF-16 units", "UTF-8 bytes"]
EXPECTED_SPAN = '{"start": 0, "end": 5, "label": "PER"} or [0, 5, "PER"]'
_STARTS = ("start", "start_offset", "startOffset", "start_char", "begin", "offset")
_ENDS = ("end", "end_offset", "endOffset", "end_char")
_LABELS = (
    *("label", "labels", "type", "tag", "entity_type", "entity_group", "entity", "category", "class"),
    *("hypertextlabels", "paragraphlabels"),  # Label Studio
)
_TEXTS = ("text", "surface", "surface_form", "mention", "value", "word", "string")
# Another convention is considered for spans that split words only if at least this number of spans do.
_MIN_MISFITS = 3


@dataclass(frozen=True, kw_only=True)
class Span:
    """An entity as written in a file."""

    start: int
    end: int
    label: str
    text: str | None = None
    tokens: tuple[int, int] | None = None
    """The first and the last token, if the file has them."""


class SpannedText(NamedTuple):
    """A text with its spans, or a list of words whose spans count words."""

    text: str | Sequence[str]
    words: Words
    spans: Sequence[Span]
    tokens: Sequence[str] = ()
    """The annotation tool's tokens."""

    def part(self, start: int, end: int) -> str:
        return self.text[start:end] if isinstance(self.text, str) else " ".join(self.text[start:end])


@dataclass(frozen=True)
class Convention:
    """The unit and origin in which a file's spans are counted."""

    unit: Unit = "code points"
    first: int = 0
    """The number of the first unit."""
    inclusive: bool = False
    """Whether the end is the last unit instead of the unit after it."""

    def described(self, text: str | Sequence[str]) -> str:
        unit = f"{'Unicode ' if self.unit == 'code points' else ''}{self.unit}" if isinstance(text, str) else "words"
        return f"{unit} from {self.first}, the end {'inclusive' if self.inclusive else 'exclusive'}"

    def place(self, text: str | Sequence[str], span: Span) -> tuple[int, int] | None:
        """Returns a span in code points or words; None if it is empty, outside the text or splits a character."""
        start = span.start - self.first
        end = span.end - self.first + self.inclusive
        if isinstance(text, str) and self.unit != "code points" and not text.isascii():
            encoding = "utf-16-le" if self.unit == "UTF-16 units" else "utf-8"
            first, last = (code_point(text, encoding, offset) for offset in (start, end))
            if first is None or last is None:
                return None
            start = first
            end = last
        return (start, end) if 0 <= start < end <= len(text) else None


_CONVENTIONS = tuple(
    Convention(unit, first, inclusive)
    for first, inclusive in ((0, False), (0, True), (1, True))
    for unit in get_args(Unit)
)


def find_convention(rows: Iterable[SpannedText]) -> Convention:
    """Returns the convention that most of a file's spans fit, at a tie the usual one.

    A span with a text fits if the text is at its place. A span without a text must be inside the row's text; if some
    are not, or at least `_MIN_MISFITS` of them split words, the result is a convention in which every span begins and
    ends where words do.
    """
    pairs = [(row, span) for row in rows for span in row.spans]
    has_texts = any(span.text is not None for _, span in pairs)
    usual = best = Convention()
    misfits = sum(not _fits(row, span, usual) for row, span in pairs)
    if not misfits:
        has_texts = False  # span texts are found in the usual convention, so they decide nothing
        misfits = sum(not _fits(row, span, usual, at_words=True) for row, span in pairs)
        if misfits < _MIN_MISFITS:
            return usual
    for convention in _CONVENTIONS:
        count = sum(not _fits(row, span, convention, at_words=True) for row, span in pairs)
        if count < misfits and (has_texts or not count):
            best = convention
            misfits = count
    return best


def _fits(row: SpannedText, span: Span, convention: Convention, *, at_words: bool = False) -> bool:
    """Returns whether a span is inside the row's text and has its text or, with `at_words`, splits no words."""
    place = convention.place(row.text, span)
    if place is None:
        return False
    if span.text is not None:
        return _plain(row.part(*place)) == _plain(span.text)
    if not at_words or not isinstance(row.text, str):
        return True
    return place[0] in row.words[:, 0] and place[1] in row.words[:, 1]


def _plain(text: str) -> str:
    """Returns a text without case, whitespace and Unicode composition. Label Studio writes newlines as backslash n."""
    return "".join(unicodedata.normalize("NFC", text.replace("\\n", " ")).casefold().split())


def read_spans(where: str, items: Any) -> list[Span]:
    """Reads the spans of a row: a list, or an object of lists as in `datasets`; raises InputError for other forms."""
    if isinstance(items, dict) and all(isinstance(column, list) for column in items.values()):
        items = [dict(zip(items, values, strict=False)) for values in zip(*items.values(), strict=False)]
    if not isinstance(items, list):
        raise InputError(f"{where}: spans = {abbreviated(items)}: must be a list of {EXPECTED_SPAN}")
    return [_read_span(where, item) for item in items]


def _read_span(where: str, item: Any) -> Span:
    fields = item
    if isinstance(item, list):
        fields = dict(zip(("start", "end", "label"), item, strict=False)) if len(item) == 3 else {}
    if not isinstance(fields, dict):
        raise InputError(f"{where}: span = {abbreviated(item)}: must be like {EXPECTED_SPAN}")
    start, end, length = (_whole(first_of(fields, names)) for names in (_STARTS, _ENDS, ("length",)))
    if end is None and start is not None and length is not None:
        end = start + length
    if start is None or end is None or not (label := _label(where, item, fields)):
        raise InputError(f"{where}: span = {abbreviated(item)}: must be like {EXPECTED_SPAN}")
    if length is not None and length not in (end - start, end - start + 1):
        raise InputError(f"{where}: the span {start} to {end} has the length {length}; correct one of them")
    text = next((fields[name] for name in _TEXTS if isinstance(fields.get(name), str)), None)
    first, last = (_whole(fields.get(name)) for name in ("token_start", "token_end"))
    tokens = None if first is None or last is None else (first, last)
    return Span(start=start, end=end, label=label, text=text, tokens=tokens)


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole or type(value) is int else None


def _label(where: str, item: Any, fields: dict[str, Any]) -> str:
    labels = next((fields[name] for name in _LABELS if fields.get(name)), "")
    labels = labels if isinstance(labels, list) else [labels]
    if len(labels) > 1:
        raise InputError(f"{where}: the span {abbreviated(item)} has {len(labels)} labels; keep one")
    return labels[0].strip() if isinstance(labels[0], str) else ""


def placed_spans(where: str, row: SpannedText, convention: Convention) -> tuple[list[Span], int]:
    """Returns the spans of a row in code points or words, sorted and unique, and the number of duplicates.

    Raises InputError if a span is outside the text, differs from its text, or overlaps another span.
    """
    places = [_placed(where, row, span, convention) for span in row.spans]
    unique = [span for _, span in sorted({(span.start, span.end, span.label): span for span in places}.items())]
    for before, after in itertools.pairwise(unique):
        if after.start < before.end:
            overlap = f"{before.start} to {before.end} and {after.start} to {after.end}"
            raise InputError(f"{where}: the spans {overlap} overlap; keep one of them")
    return unique, len(places) - len(unique)


def _placed(where: str, row: SpannedText, span: Span, convention: Convention) -> Span:
    here = f"{where}: the span {span.start} to {span.end}"
    place = convention.place(row.text, span)
    if place is None:
        size = f"{len(row.text):,} {'characters' if isinstance(row.text, str) else 'words'}"
        counted = convention.described(row.text)
        raise InputError(f"{here} is empty or outside the text of {size}; spans must count {counted}")
    content = row.part(*place)
    if span.text is not None and _plain(content) != _plain(span.text):
        expected = abbreviated(span.text)
        raise InputError(f"{here} is {abbreviated(content)}, but its text is {expected}; correct one of them")
    if span.tokens is not None and row.tokens:
        first, last = span.tokens
        tokens = row.tokens[first : last + 1] if 0 <= first <= last < len(row.tokens) else [""]
        if not tokens[0] or not content.startswith(tokens[0]) or not content.endswith(tokens[-1]):
            expected = f"tokens {first} to {last} are {abbreviated(' '.join(tokens))}"
            raise InputError(f"{here} is {abbreviated(content)}, but its {expected}; correct one of them")
    return Span(start=place[0], end=place[1], label=span.label)


def tags_of_spans(where: str, row: SpannedText, spans: Sequence[Span]) -> tuple[list[str], int]:
    """Returns the IOB2 tags of all words, and the number of ends of spans inside a word.

    A word in two spans belongs to the first span.
    """
    words = row.words
    if not isinstance(row.text, str):
        return from_entities([(span.start, span.end, span.label) for span in spans], len(words)), 0
    entities: list[Entity] = []
    num_cuts = 0
    past = 0
    for span in spans:
        first = int(np.searchsorted(words[:, 1], span.start, side="right"))
        last = int(np.searchsorted(words[:, 0], span.end, side="left"))
        if first == last:
            raise InputError(f"{where}: the span {span.start} to {span.end} contains no word; remove it")
        num_cuts += int(words[first, 0] < span.start) + int(words[last - 1, 1] > span.end)
        if max(first, past) < last:
            entities.append((max(first, past), last, span.label))
        past = last
    return from_entities(entities, len(words)), num_cuts
