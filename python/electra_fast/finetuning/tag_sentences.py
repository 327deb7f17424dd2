"""The sentences of tagging files: words in columns, lists of words, or texts with the spans of their entities.

`tag_files` makes splits of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.tables import (
    abbreviated,
    check_columns,
    column_names,
    iterate_cells,
    iterate_rows,
    place,
    text_of,
    there_are,
)
from electra_fast.finetuning.tag_schemes import Entity, from_entities

Words = NDArray[np.int64]
"""The first and past-the-last characters of a text's words, [words, 2]."""

WORD_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("tags", "ner_tags", "labels", "pos_tags")
TEXT_COLUMNS, SPAN_COLUMNS = ("text", "sentence"), ("spans", "entities", "labels", "label")
_PAIRS = (*itertools.product(WORD_COLUMNS, TAG_COLUMNS), *itertools.product(TEXT_COLUMNS, SPAN_COLUMNS))
SPAN_TYPES = ("label", "type", "tag")
EXPECTED_SPAN = '{"start": 0, "end": 5, "label": "PER"} or [0, 5, "PER"]'
# Lines of CoNLL-U that are not words: multiword tokens such as 1-2, and empty nodes such as 1.1.
_NOT_A_WORD = re.compile(r"[0-9]+[-.][0-9]+")
# Chinese characters, as in BERT's basic tokenizer.
_IDEOGRAPH = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002ceaf\U0002f800-\U0002fa1f]"
)
# A word, in the letters of `_CharacterClasses`.
_WORD = re.compile(r"c[mj]*|[wmj]+|rr?[mj]*|[xt](?:j[xt]|[mjt])*")


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """A text with its words and their tags."""

    path: Path
    lines: Sequence[int]
    """The line of each word, or one for all."""
    row: int
    """Which sentence of the file it is, from 0."""
    text: str
    words: Words
    tags: list[str] | None
    """One per word, empty where it is missing; None if the sentence has none."""
    has_spans: bool = False
    """Whether the tags were made of spans, in IOB2."""
    num_cuts: int = 0
    """How many ends of spans are within a word."""

    def place(self, word: int = 0) -> str:
        """Where a word is, for messages."""
        return place(self.path, self.lines[min(word, len(self.lines) - 1)])


def words_of_text(text: str) -> Words:
    """The words of a text as [words, 2] first and past-the-last characters.

    A word is a run of letters, digits, marks and `_`, or a single character of another kind but space. Each Chinese
    character is a word. Marks and invisible characters belong to what precedes them; an emoji sequence is one word.
    """
    spans = [match.span() for match in _WORD.finditer(text.translate(_CLASSES))]
    return np.array(spans, dtype=np.int64).reshape(-1, 2)


class _CharacterClasses(dict[int, str]):
    """What each character is in `_WORD`, by code point; found when it is needed first.

    c: Chinese character, w: other letter or digit, m: mark or invisible, j: zero-width joiner, r: half of a flag,
    t: skin tone, x: other.
    """

    def __missing__(self, code: int) -> str:
        character = chr(code)
        category = unicodedata.category(character)
        if character.isspace():
            found = " "
        elif category[0] == "M" or category == "Cf":
            found = "j" if character == "\u200d" else "m"
        elif character.isalnum() or character == "_":
            found = "c" if _IDEOGRAPH.match(character) else "w"
        elif "\U0001f1e6" <= character <= "\U0001f1ff":
            found = "r"
        else:
            found = "t" if "\U0001f3fb" <= character <= "\U0001f3ff" else "x"
        return self.setdefault(code, found)


_CLASSES = _CharacterClasses()


def joined_words(path: Path, lines: Sequence[int], words: Sequence[Any]) -> tuple[str, Words]:
    """The text that words with single spaces between them make, and their places in it.

    Raises InputError naming the line of one that is empty or not text.
    """
    for number, word in enumerate(words):
        if not isinstance(word, str) or not word:
            found = "empty; remove it and its tag" if word == "" else f"{abbreviated(word)}, not text"
            raise InputError(f"{place(path, lines[min(number, len(lines) - 1)])}: word {number + 1} is {found}")
    return " ".join(words), places_of(words)


def places_of(words: Sequence[str]) -> Words:
    """The places of words in the text that they make with single spaces between them."""
    lengths = np.array([len(word) for word in words], dtype=np.int64)
    ends = np.cumsum(lengths + 1) - 1
    return np.stack((ends - lengths, ends), axis=1)


def column_sentences(
    path: Path, text: Sequence[str] = (), label: Sequence[str] | None = (), *, is_test: bool = False
) -> Iterator[Sentence]:
    """Yields the sentences of a file with a word per line, its columns separated by tabs or spaces, in a stream.

    Args:
        path: The file; blank lines separate sentences.
        text: The column of the words, from 0, or from the end with -1; empty for 0, in .conllu files 1.
        label: That of the tags; empty for -1, in .conllu files 3; None to read no tags.
        is_test: Whether the file may lack that column.

    Raises InputError naming the line that cannot be used.
    """
    is_conllu = path.suffix.lower() == ".conllu"
    word = _column_number(text or ("1" if is_conllu else "0",), "--text")
    tag = None if label is None else _column_number(label or ("3" if is_conllu else "-1",), "--label")
    for number, (lines, rows) in enumerate(_sentence_rows(path, is_conllu)):
        width = len(rows[0])
        if number == 0 and is_test and not _are_columns(width, word, tag):
            tag = None
        if not _are_columns(width, word, tag):
            expected = f"words are expected in column {word}{'' if tag is None else f' and tags in column {tag}'}"
            raise InputError(
                f"{place(path, lines[0])}: {width} column{'s' if width > 1 else ''} separated by tabs or spaces, but "
                f"{expected}; choose with --text and --label"
            )
        joined = joined_words(path, lines, [cells[word] for cells in rows])
        tags = None if tag is None else [cells[tag] for cells in rows]
        yield Sentence(path=path, lines=lines, row=number, text=joined[0], words=joined[1], tags=tags)


def _are_columns(width: int, word: int, tag: int | None) -> bool:
    """Whether a line of `width` columns has these, and they differ."""
    chosen = [column for column in (word, tag) if column is not None]
    return len({column % width for column in chosen if -width <= column < width}) == len(chosen)


def _column_number(names: Sequence[str], flag: str) -> int:
    check_single(names, flag)
    if not re.fullmatch(r"-?[0-9]{1,9}", names[0]):
        raise InputError(
            f"{flag} is {names[0]!r}; the columns of this format are numbered from 0, and from the end with -1"
        )
    return int(names[0])


def _sentence_rows(path: Path, is_conllu: bool) -> Iterator[tuple[list[int], list[list[str]]]]:
    """The lines and cells of each sentence."""
    lines: list[int] = []
    rows: list[list[str]] = []
    for line, cells in itertools.chain(_line_cells(path, is_conllu), [(0, [])]):
        if cells and rows and len(cells) != len(rows[0]):
            raise InputError(
                f"{place(path, line)}: {len(cells)} columns, but line {lines[0]} of the sentence has {len(rows[0])}; "
                "every word needs a tag, and a blank line ends a sentence"
            )
        if cells:
            lines.append(line)
            rows.append(cells)
        elif rows:
            yield lines, rows
            lines, rows = [], []


def _line_cells(path: Path, is_conllu: bool) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that has a word; none for one that ends a sentence."""
    for line, (text,) in iterate_cells(path, "\n"):
        cells = [cell.strip(" ") for cell in text.split("\t")] if "\t" in text else list(filter(None, text.split(" ")))
        if not any(cells) or text.startswith("-DOCSTART-"):
            yield line, []
        elif not (is_conllu and (text.startswith("#") or _NOT_A_WORD.fullmatch(cells[0]))):
            yield line, cells


def row_sentences(
    path: Path, text: Sequence[str], label: Sequence[str], labels: Sequence[str], *, is_test: bool = False
) -> Iterator[Sentence]:
    """Yields the sentences of the rows of a .jsonl or .parquet file, in a stream.

    Args:
        path: The file.
        text: The column of the lists of words or of the texts; empty for a usual one.
        label: The column of the lists of tags or of the spans; empty for a usual one.
        labels: The names of tags that are numbers.
        is_test: Whether the file may lack the column of the tags or spans.

    Raises InputError naming the line that cannot be used.
    """
    text_column, label_column = _row_columns(path, text, label, is_test)
    columns = (text_column, label_column) if label_column else (text_column,)
    for number, (line, row) in enumerate(iterate_rows(path, columns)):
        value, target = row.get(text_column), row.get(label_column)
        if isinstance(value, list):
            joined, tags = joined_words(path, [line], value), _tags(place(path, line), len(value), target, labels)
            yield Sentence(path=path, lines=[line], row=number, text=joined[0], words=joined[1], tags=tags)
        else:
            yield _with_spans(path, line, number, text_of(path, line, row, text_column), target)


def _row_columns(path: Path, text: Sequence[str], label: Sequence[str], is_test: bool) -> tuple[str, str]:
    """The columns of words or text, and of tags or spans; the second is empty if a test file has none."""
    available = column_names(path)
    for flag, names in (("--text", text), ("--label", label)):
        check_single(names, flag)
        if flag == "--text" or not is_test:
            check_columns(path, available, names, flag)
    texts, targets = text or (*WORD_COLUMNS, *TEXT_COLUMNS), label or (*TAG_COLUMNS, *SPAN_COLUMNS)
    pairs = itertools.product(texts, targets) if text or label else iter(_PAIRS)
    found = next((pair for pair in pairs if len(set(pair) & set(available)) == 2), None)
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
        raise InputError(f"{where}: the tags are {abbreviated(tags)}; there has to be a list of one per word")
    if len(tags) != num_words:
        raise InputError(f"{where}: {num_words} words, but {len(tags)} tags; there has to be one per word")
    return [_tag(where, tag, labels) for tag in tags]


def _tag(where: str, tag: Any, labels: Sequence[str]) -> str:
    """The name of a tag; empty for one that is missing, of which -1 is a sign."""
    if tag is None or tag == -1:
        return ""
    if isinstance(tag, str):
        return tag
    if type(tag) is not int:
        raise InputError(f"{where}: the tag {abbreviated(tag)} is neither text nor an integer")
    if not labels:
        raise InputError(f"{where}: the tag is the number {tag}; name the tags by number with --labels O,B-PER,...")
    if not 0 <= tag < len(labels):
        raise InputError(f"{where}: the tag is the number {tag}, but --labels names 0 to {len(labels) - 1}")
    return labels[tag]


def _with_spans(path: Path, line: int, number: int, text: str, items: Any) -> Sentence:
    where, words = place(path, line), words_of_text(text)
    sentence = Sentence(path=path, lines=[line], row=number, text=text, words=words, tags=None, has_spans=True)
    if items is None:
        return sentence
    if not isinstance(items, list):
        raise InputError(f"{where}: the spans are {abbreviated(items)}; there has to be a list of {EXPECTED_SPAN}")
    spans = sorted(_span(where, item, len(text)) for item in items)
    for (first, end, _), (start, last, _) in itertools.pairwise(spans):
        if start < end:
            raise InputError(f"{where}: the spans {first} to {end} and {start} to {last} overlap; keep one of them")
    entities, num_cuts = _entities(where, words, spans)
    tags = from_entities(entities, len(words))
    return dataclasses.replace(sentence, tags=tags, num_cuts=num_cuts)


def _span(where: str, item: Any, length: int) -> tuple[int, int, str]:
    values = item
    if isinstance(item, dict):
        types = [item[name] for name in SPAN_TYPES if item.get(name)]
        values = [item.get("start"), item.get("end"), *types[:1]]
    if not isinstance(values, list) or [type(value) for value in values] != [int, int, str] or not values[2]:
        raise InputError(f"{where}: the span {abbreviated(item)} is not like {EXPECTED_SPAN}")
    start, end, type_ = values
    if not 0 <= start < end <= length:
        raise InputError(
            f"{where}: the span {start} to {end} is empty or outside the text of {length} characters; count Unicode "
            "code points from 0, the end exclusive"
        )
    return start, end, type_


def _entities(where: str, words: Words, spans: Sequence[tuple[int, int, str]]) -> tuple[list[Entity], int]:
    """Spans of characters as entities of all words that they overlap, and how many of their ends are within a word.

    A word in two spans belongs to the first.
    """
    entities: list[Entity] = []
    num_cuts = past = 0
    for start, end, type_ in spans:
        first = int(np.searchsorted(words[:, 1], start, side="right"))
        last = int(np.searchsorted(words[:, 0], end, side="left"))
        if first == last:
            raise InputError(f"{where}: the span {start} to {end} has no word in it; remove it")
        num_cuts += int(words[first, 0] < start) + int(words[last - 1, 1] > end)
        if max(first, past) < last:
            entities.append((max(first, past), last, type_))
        past = last
    return entities, num_cuts
