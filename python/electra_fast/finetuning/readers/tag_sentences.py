"""Sentences of tagging files, read from files with a row per sentence: lists of words, or texts with spans.

`tag_columns` reads files with a word per line; `tag_files` makes splits of both.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.annotations import flat_row, rejected_note, rejected_rows
from electra_fast.finetuning.readers.rows import (
    BadRows,
    Row,
    abbreviated,
    check_columns,
    columns_note,
    others_of,
    place,
    text_of,
    there_are,
)
from electra_fast.finetuning.readers.tables import Quoting, class_names, iterate_rows
from electra_fast.finetuning.readers.tag_spans import (
    Convention,
    SpannedText,
    find_convention,
    placed_spans,
    read_spans,
    tags_of_spans,
)
from electra_fast.finetuning.readers.words import Words, places_of, words_of_text
from electra_fast.finetuning.readers.written_lists import are_lists, parse_list, spells_list

WORD_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("tags", "ner_tags", "labels", "pos_tags")
TEXT_COLUMNS, SPAN_COLUMNS = ("text", "sentence"), ("spans", "entities", "labels", "label", "ents", "annotations")
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
    """The line of each word, or one for all."""
    row: int
    """Number of the sentence in the file, from 0."""
    text: str
    words: Words
    tags: list[str] | None
    """One per word, empty where it is missing; None if the sentence has none."""
    has_spans: bool = False
    """The tags were made from spans, in IOB2."""
    num_cuts: int = 0
    """Number of spans' ends within a word."""
    spanned: SpannedText | None = None
    """Spans that are not yet tags."""
    columns: Row = field(default_factory=dict)
    """The other columns of its row."""

    def place(self, word: int = 0) -> str:
        """Returns the place of a word, for messages."""
        return place(self.path, self.lines[min(word, len(self.lines) - 1)])


def joined_words(path: Path, lines: Sequence[int], words: Sequence[Any]) -> tuple[str, Words]:
    """Joins words with single spaces; returns the text and their places in it.

    Raises InputError naming the line of a word that is empty or not text.
    """
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word:
            found = "empty; remove it and its tag" if word == "" else f"{abbreviated(word)}, not text"
            raise InputError(f"{place(path, lines[min(number, len(lines) - 1)])}: word {number + 1} is {found}")
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
    """Reads the sentences of a .jsonl, .json or .parquet file, except those that an annotator rejected.

    Arguments are those of `read_tagging`. `is_test` says that the file may lack the column of tags or spans, `notes`
    receives lines on what was left out or converted. Raises InputError naming the line that cannot be used.
    """
    rows: list[tuple[int, Row]] = []
    for line, row in iterate_rows(path, quoting=quoting, bad_rows=bad):
        with bad.collect():
            rows.append((line, flat_row(place(path, line), row)))
    if not rows:
        bad.finish()
    chosen = row_columns(path, [row for _, row in rows], text, label, is_test=is_test)
    if not labels:
        labels = class_names(path).get(chosen[1], ())
    rows = _with_lists(path, rows, chosen, bad)
    _check_numbers(path, rows, chosen, labels)
    has_spans = _have_spans(rows, chosen[1])
    target = f", {'spans' if has_spans else 'tags'} in {chosen[1]!r}" if chosen[1] else ""
    notes.append(columns_note(path, f"text or words in {chosen[0]!r}{target}", text, label))
    rejected = rejected_rows([row for _, row in rows], chosen, is_test=is_test)
    notes += rejected_note(path, len(rejected), len(rows))
    found: list[Sentence] = []
    for number, (line, row) in enumerate(rows):
        if number in rejected:
            continue
        with bad.collect():
            found.append(_read_row(path, number, line, row, chosen, labels, has_spans))
    return list(_with_tags(path, found, bad, notes))


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _read_row(
    path: Path, number: int, line: int, row: Row, chosen: tuple[str, str], labels: Sequence[str], has_spans: bool
) -> Sentence:
    """Reads a row. If some row of the file `has_spans`, an empty list means no spans rather than no tags."""
    where, target = place(path, line), row.get(chosen[1])
    if target is None and row.get("answer") == "accept":
        target = []  # Prodigy leaves it out
    content, text, words = row_text(path, line, row, chosen[0])
    is_text = isinstance(content, str)
    tags = None if is_text or has_spans else _tags(where, len(words), target, labels)
    sentence = Sentence(
        path=path,
        lines=[line],
        row=number,
        text=text,
        words=words,
        tags=tags,
        has_spans=is_text or has_spans,
        columns=others_of(row, chosen),
    )
    if target is None or not sentence.has_spans:
        return sentence
    tokens = _token_texts(_items(row.get("tokens"))) if is_text else ()
    return dataclasses.replace(sentence, spanned=SpannedText(content, words, read_spans(where, target), tokens))


def _with_lists(
    path: Path, rows: list[tuple[int, Row]], chosen: tuple[str, str], bad: BadRows
) -> list[tuple[int, Row]]:
    """Returns the rows with lists in place of texts.

    What the texts of a column are is decided over all rows: lists as JSON, Python or NumPy writes them, or else words
    or tags between spaces. The text beside spans stays a text.
    """
    text, label = chosen
    are_texts = any(isinstance(row.get(label), str) for _, row in rows)
    for name in (label, text):
        parse = _parse_list if are_lists([row.get(name) for _, row in rows]) else None
        if parse is None and are_texts and not _have_spans(rows, label):
            parse = _split_tags if name == label else _split
        if parse is None:
            continue
        listed: list[tuple[int, Row]] = []
        for line, row in rows:
            with bad.collect():
                cell = row.get(name)
                parsed = parse(place(path, line), name, cell) if isinstance(cell, str) else cell
                listed.append((line, row | {name: parsed}))
        rows = listed
    return rows


def _have_spans(rows: Sequence[tuple[int, Row]], column: str) -> bool:
    return any(isinstance(item, (dict, list)) for _, row in rows for item in _items(row.get(column)))


def _split(where: str, name: str, text: str) -> list[Any]:
    return text.split()


def _split_tags(where: str, name: str, text: str) -> list[Any]:
    parts = text.split()
    return [*map(int, parts)] if all(map(str.isdecimal, parts)) else parts


def _parse_list(where: str, name: str, text: str) -> list[Any] | None:
    try:
        return parse_list(text) if text.strip() else None
    except ValueError as error:
        raise InputError(
            f"{where}: {name!r} is {abbreviated(text)}, which cannot be read as a list ({error})"
        ) from None


def row_text(path: Path, line: int, row: Row, column: str) -> tuple[str | list[str], str, Words]:
    """Returns a row's text or words, the text that these make, and the places of the words in it."""
    value = row.get(column)
    if isinstance(value, str) and value.startswith(("['", '["')) and spells_list(value):  # in a file to predict
        value = parse_list(value)
    if isinstance(value, list):
        given = _token_texts(value)
        return given, *joined_words(path, [line], given)
    text = text_of(path, line, row, column)
    return text, text, words_of_text(text)


def _token_texts(tokens: Sequence[Any]) -> list[Any]:
    """Returns the words of a list of words, or of tokens as spaCy and Prodigy write them."""
    return [token["text"] if isinstance(token, dict) and "text" in token else token for token in tokens]


def _with_tags(path: Path, sentences: Sequence[Sentence], bad: BadRows, notes: list[str]) -> Iterator[Sentence]:
    """Yields the sentences, with tags in place of their spans."""
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
        notes.append(f"{path}: spans count {counted}, as the text shows; they are converted")
    if num_repeated:
        notes.append(f"{path}: {num_repeated:,} spans that repeat another one are left out")


def row_columns(
    path: Path, rows: Sequence[Row], text: Sequence[str], label: Sequence[str], *, is_test: bool
) -> tuple[str, str]:
    """Returns the columns of words or text, and of tags or spans; the latter is empty if a test file has none."""
    available = dict.fromkeys(name for row in rows for name in row)
    for flag, names in (("--text", text), ("--label", label)):
        check_single(names, flag)
        if flag == "--text" or not is_test:
            check_columns(path, available, names, flag)
    texts, targets = text or (*WORD_COLUMNS, *TEXT_COLUMNS), label or (*TAG_COLUMNS, *SPAN_COLUMNS)
    pairs = itertools.product(texts, targets) if text or label else iter(_PAIRS)
    found = next((pair for pair in pairs if len({*pair} & {*available}) == 2), None)
    if found:
        return found
    column = next((name for name in texts if name in available), "")
    if not column or not is_test:
        kind = "label" if column else "text"
        raise InputError(f"{path}: no {kind} column; {there_are(available)}; choose with --{kind}")
    return column, ""


def check_single(names: Sequence[str], flag: str) -> None:
    """Raises InputError if an option names several columns."""
    if len(names) > 1:
        raise InputError(f"{flag} names {len(names)} columns ({', '.join(names)}); tagging reads one")


def _tags(where: str, num_words: int, tags: Any, labels: Sequence[str]) -> list[str] | None:
    if not tags:
        return None
    if not isinstance(tags, list):
        raise InputError(f"{where}: the tags are {abbreviated(tags)}; there must be a list of one per word")
    if len(tags) != num_words:
        raise InputError(f"{where}: {num_words} words, but {len(tags)} tags; there must be one per word")
    return [_tag(where, tag, labels) for tag in tags]


def _check_numbers(path: Path, rows: Sequence[tuple[int, Row]], chosen: tuple[str, str], labels: Sequence[str]) -> None:
    """Raises InputError if tags are numbers without names."""
    for line, row in () if labels else rows:
        tag = next((tag for tag in _items(row.get(chosen[1])) if type(tag) is int and tag != -1), None)
        if tag is not None and isinstance(row.get(chosen[0]), list):
            raise InputError(
                f"{place(path, line)}: the tag is the number {tag}; name the tags by number with --labels O,B-PER,..."
            )


def _tag(where: str, tag: Any, labels: Sequence[str]) -> str:
    """Returns the name of a tag; empty for a missing one, such as -1."""
    if tag is None or tag == -1:
        return ""
    if isinstance(tag, str):
        return tag.strip()
    if type(tag) is not int:
        raise InputError(f"{where}: the tag {abbreviated(tag)} is neither text nor an integer")
    if not 0 <= tag < len(labels):
        raise InputError(f"{where}: the tag is the number {tag}, but --labels names 0 to {len(labels) - 1}")
    return labels[tag]
