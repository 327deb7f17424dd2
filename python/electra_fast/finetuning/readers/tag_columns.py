"""Sentences of files with a word per line: CoNLL's columns, CoNLL-U, and tables with a column that numbers sentences.

The first lines of a file decide which lines are comments and which columns are read.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.delimited import iterate_cells
from electra_fast.finetuning.readers.rows import BadRows, Row, available_columns, check_columns, columns_note, place
from electra_fast.finetuning.readers.tables import Quoting, open_table
from electra_fast.finetuning.readers.tag_schemes import is_bare, split_tag
from electra_fast.finetuning.readers.tag_sentences import TEXT_COLUMNS, Sentence, check_single, joined_words

COLUMN_FORMATS = (".conll", ".conllu", ".conllup", ".bio", ".iob", ".iob2", ".bioes", ".ner")
# Column files in training; in prediction files of texts, unless their lines look like columns.
TEXT_FORMATS = (".txt", ".tsv")
WORD_NAMES = ("word", "words", "token", "tokens", "form")
TAG_NAMES = ("tag", "tags", "label", "labels", "ner", "ner_tag", "ner_tags", "ne", "bio", "iob", "entity", "pos")
SENTENCE_NAMES = (
    *("sentence", "sentence #", "sentence_id", "sentence_idx", "sentence_index", "sentence_no", "sentence_num"),
    *("sentence_number", "sent", "sent_id", "sent_idx", "sent_index", "sent_no", "sent_num"),
)
_CONLLU = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_GLOBAL_COLUMNS = re.compile(r"#\s*global\.columns\s*=\s*(.*)")
# Lines that are not words: multiword tokens such as 1-2, and empty nodes such as 1.1.
_NOT_A_WORD = re.compile(r"[0-9]+[-.][0-9]+")
# Comments even with as many cells as words. `#word` is a hashtag, unlike `# word`.
_COMMENT = re.compile(r"#(begin|end) document\b")
# Number of sentences from which prediction infers the layout; training uses the whole file.
_SAMPLE = 1000


class _Line(NamedTuple):
    number: int
    text: str
    cells: list[str]


_Block = list[_Line]
"""The lines between two blank lines."""


@dataclass(frozen=True, kw_only=True)
class _Layout:
    width: int
    """Number of cells in most lines of words."""
    word: int
    tag: int | None
    sentence: int | None
    """The column that numbers the sentences, if any."""
    has_ids: bool
    """Whether column 0 numbers the words of a sentence."""
    types: frozenset[str]
    """Types or tags in the lines that are certainly words."""

    def is_comment(self, line: _Line, is_first: bool) -> bool:
        """Returns whether a line is a comment. A line that begins with # may be a word if it has a word's cells.

        Then `#word` is a hashtag, and `# word` is a word if other words have its tag too.
        """
        if not line.text.startswith("#"):
            return self.has_ids and bool(_NOT_A_WORD.fullmatch(line.cells[0]))
        if self.has_ids or _COMMENT.match(line.text):
            return True
        is_hashtag = bool(line.text[1:2].strip())
        if len(line.cells) != self.width:
            return is_first or not is_hashtag
        tag = line.cells[self.tag if self.tag is not None else -1]
        return not (is_hashtag or self.width == 1 or tag in ("#", "O") or split_tag(tag)[1] in self.types)


def column_sentences(
    path: Path,
    text: Sequence[str] = (),
    label: Sequence[str] | None = (),
    *,
    is_test: bool = False,
    quoting: Quoting = "auto",
    bad: BadRows | None = None,
    notes: list[str] | None = None,
) -> Iterator[Sentence]:
    """Yields the sentences of a file with a word per line and columns separated by tabs or spaces, or of a .csv file.

    Sentences are separated by blank lines, or numbered in a column of `SENTENCE_NAMES`. Columns have names in .conllu
    files, after a comment `# global.columns = ...`, and if the first line is a header.

    `text` is the word column: a name, or a number from 0, or from the end with -1. Empty: one of `WORD_NAMES`, or else
    column 0, or 1 if column 0 numbers the words. `label` is the tag column, which a test file may lack. Empty: one of
    `TAG_NAMES`, or else the last column, or column 3 in .conllu files. None: stream words without tags. Without `bad`,
    the error of the first bad sentence is raised.
    """
    notes = [] if notes is None else notes
    collect: Any = contextlib.nullcontext if bad is None else bad.collect
    with contextlib.ExitStack() as stack:
        if path.suffix.lower() == ".csv":
            table = stack.enter_context(open_table(path, quoting=quoting))
            notes += table.notes
            names = list(table.names())
            blocks = _table_blocks(table.rows(bad_rows=bad))
        else:
            names, blocks = _named_blocks(path, text, label or ())
        sample = list(itertools.islice(blocks, _SAMPLE) if label is None else blocks)
        if not sample:
            return
        layout = _layout(path, names, sample, text, label, is_test, notes)
        comments: list[_Line] = []
        words = _split_by_id(_words(itertools.chain(sample, blocks), layout, comments), layout.sentence)
        for number, lines in enumerate(words):
            with collect():
                yield _sentence(path, number, lines, layout)
    if comments and not layout.has_ids:
        first = f"{comments[0].text.strip()!r} is the first of {len(comments):,} lines that are read as comments"
        notes.append(f"{place(path, comments[0].number)}: {first}")


def are_columns(path: Path, text: Sequence[str], quoting: Quoting = "auto") -> bool:
    """Returns whether a file for prediction has a word per line, as in training, and not a text per line or row."""
    suffix = path.suffix.lower()
    if suffix in COLUMN_FORMATS or not path.is_file():
        return suffix in COLUMN_FORMATS
    if suffix == ".csv":
        with open_table(path, quoting=quoting) as table:
            return _is_word_table(table.names(), text)
    if suffix not in TEXT_FORMATS:
        return False
    blocks = list(itertools.islice(_blocks(path), _SAMPLE))
    lines = [line for block in blocks for line in block if not line.text.startswith("#")]
    if not lines or len({len(line.cells) for line in lines}) > 1 or len(lines[0].cells) < 2:
        return False
    if _is_word_table(lines[0].cells, text) or any(map(_is_number, text)):
        return True
    if suffix == ".tsv" and not {*lines[0].cells}.isdisjoint(text or TEXT_COLUMNS):
        return False
    columns = list(zip(*(line.cells for line in lines), strict=True))[1:]
    has_tags = any("O" in column and not all(map(is_bare, {*column} - {"O"})) for column in columns)
    return has_tags or (len(lines) >= 10 and 3 * len({*columns[-1]}) <= len(lines))


def _is_word_table(names: Sequence[str], text: Sequence[str]) -> bool:
    """Returns whether a table with these columns has a word per row, and not a text."""
    word = next((name for name in names if name in text or (not text and name.lower() in WORD_NAMES)), None)
    sentence = _sentence_column(names)
    return word is not None and (word.lower() in WORD_NAMES or sentence not in (None, names.index(word)))


def _sentence_column(names: Sequence[str]) -> int | None:
    return next((column for column, name in enumerate(names) if name.lower() in SENTENCE_NAMES), None)


def _named_blocks(path: Path, text: Sequence[str], label: Sequence[str]) -> tuple[list[str], Iterator[_Block]]:
    blocks = _blocks(path)
    first = next(blocks, [])
    rest = itertools.chain([first] if first else [], blocks)
    if named := next(filter(None, (_GLOBAL_COLUMNS.match(line.text) for line in first)), None):
        return named[1].split(), rest
    if path.suffix.lower() == ".conllu":
        return list(_CONLLU), rest
    line = next((line for line in first if not line.text.startswith("#")), None)
    header = line.cells if line else []
    names = {name.lower() for name in header}
    is_named = bool(names & {*WORD_NAMES}) and bool(names & {*TAG_NAMES})
    if is_named or any(name in header and not _is_number(name) for name in (*text, *label)):
        others = [other for other in first if other is not line]
        return header, itertools.chain([others] if others else [], blocks)
    return [], rest


def _blocks(path: Path) -> Iterator[_Block]:
    block: _Block = []
    for number, (text,) in iterate_cells(path, "\n"):
        cells = [cell.strip(" ") for cell in text.split("\t")] if "\t" in text else [*filter(None, text.split(" "))]
        if any(cells) and not text.startswith("-DOCSTART-"):
            block.append(_Line(number, text, cells))
        elif block:
            yield block
            block = []
    if block:
        yield block


def _table_blocks(rows: Iterator[tuple[int, Row]]) -> Iterator[_Block]:
    """Yields the rows of a .csv file in blocks, separated by skipped line numbers or rows of empty cells."""
    block: _Block = []
    for number, row in rows:
        if block and (number > block[-1].number + 1 or not any(row.values())):
            yield block
            block = []
        if any(row.values()):
            block.append(_Line(number, "", list(row.values())))
    if block:
        yield block


def _layout(
    path: Path,
    names: Sequence[str],
    sample: Sequence[_Block],
    text: Sequence[str],
    label: Sequence[str] | None,
    is_test: bool,
    notes: list[str],
) -> _Layout:
    lines = [line for block in sample for line in block if not line.text.startswith("#")] or sample[0]
    width = Counter(len(line.cells) for line in lines).most_common(1)[0][0]
    full = [line for line in lines if len(line.cells) == width]
    columns = [[line.cells[column] for line in full] for column in range(width)]
    has_ids = _is_conllu(names) or (not names and width > 2 and [*text] != ["0"] and _has_word_numbers(sample))
    word = _column(path, text, names, WORD_NAMES, 1 if has_ids else 0, "--text")
    numbered = word if has_ids else None
    tag = None if label is None else _tag_column(path, label, names, columns, numbered, is_test=is_test)
    if is_test and not _are_columns(width, word, tag):
        tag = None
    if not _are_columns(width, word, tag):
        raise InputError(_misfit(path, full[0], word, tag))
    if not text and width > 2 and all(map(str.isdecimal, columns[word])):
        raise InputError(f"{place(path, full[0].number)}: column {word} has only numbers; choose words with --text")
    if has_ids and not names and not text:
        chosen = "" if tag is None else f", tags from column {tag % width}"
        notes.append(
            f"{path}: column 0 numbers the words; words are read from column {word}{chosen} of 0 to {width - 1}; "
            "choose other columns with --text and --label"
        )
    types = frozenset(split_tag(cell)[1] for cell in columns[-1 if tag is None else tag]) - {""}
    sentence = _sentence_column(names)
    if names:
        numbers = {"words": word, "tags": tag, "sentence numbers": sentence}
        read = [f"{content} in {names[column]!r}" for content, column in numbers.items() if column is not None]
        notes.append(columns_note(path, ", ".join(read), text, label or ()))
    return _Layout(width=width, word=word, tag=tag, sentence=sentence, has_ids=has_ids, types=types)


def _has_word_numbers(sample: Sequence[_Block]) -> bool:
    """Returns whether the first cells of most blocks are 1, 2, 3 and so on."""
    firsts = [[line.cells[0] for line in block if not line.text.startswith("#")] for block in sample]
    counted = [cells == [str(number) for number in _numbers(cells)] for cells in firsts if cells]
    return 2 * sum(counted) > len(counted) and any(len(cells) > 1 for cells in firsts)


def _numbers(cells: Sequence[str]) -> range:
    first = 0 if cells[0] == "0" else 1
    return range(first, first + len(cells))


def _tag_column(
    path: Path,
    chosen: Sequence[str],
    names: Sequence[str],
    columns: Sequence[Sequence[str]],
    numbered_word: int | None,
    *,
    is_test: bool,
) -> int | None:
    """Returns the tag column.

    Without names it is the last column that is not empty, since lines may end with a tab. In files that number their
    words it is the first column of entities, since GermEval has outer entities first. In .conllup files it is the
    column that CoNLL-U lacks, or else the parts of speech.
    """
    has_usual = not {*map(str.lower, names)}.isdisjoint(TAG_NAMES)
    if chosen or has_usual or (names and not _is_conllu(names) and not is_test):
        return _column(path, chosen, names, TAG_NAMES, -1, "--label")
    if not names:
        last = next((column for column in range(-1, -len(columns), -1) if any(columns[column])), -1)
        after = () if numbered_word is None else range(numbered_word + 1, len(columns))
        return next((column for column in after if "O" in columns[column]), last)
    if not _is_conllu(names):
        return None
    candidates = [name for name in names if name not in _CONLLU] or [name for name in names if name == "UPOS"]
    if len(candidates) != 1:
        raise InputError(f"{path}: no label column; {available_columns(candidates or names)}; choose with --label")
    return names.index(candidates[0])


def _column(
    path: Path, chosen: Sequence[str], names: Sequence[str], usual: Sequence[str], number: int, flag: str
) -> int:
    """Returns the number of the chosen column, or of one with a usual name, or else `number`."""
    check_single(chosen, flag)
    lower = [name.lower() for name in names]
    if not chosen:
        column = next((lower.index(name) for name in usual if name in lower), None)
        if column is None and names and not _is_conllu(names):
            raise InputError(f"{path}: no {flag[2:]} column; {available_columns(names)}; choose with {flag}")
        return number if column is None else column
    name = chosen[0]
    if name in names or name.lower() in lower:
        return names.index(name) if name in names else lower.index(name.lower())
    if names and not _is_number(name):
        check_columns(path, names, chosen, flag)
    if not _is_number(name):
        expected = "must be a number from 0, or from the end with -1, since the columns of this file have no names"
        raise InputError(f"{flag} = {name!r}: {expected}")
    return int(name)


def _is_conllu(names: Sequence[str]) -> bool:
    return [*names[:2]] == ["ID", "FORM"]


def _is_number(name: str) -> bool:
    return re.fullmatch(r"-?[0-9]{1,9}", name) is not None


def _are_columns(width: int, word: int, tag: int | None) -> bool:
    chosen = [column for column in (word, tag) if column is not None]
    return len({column % width for column in chosen if -width <= column < width}) == len(chosen)


def _misfit(path: Path, line: _Line, word: int, tag: int | None) -> str:
    width = len(line.cells)
    expected = f"expected words in column {word}{'' if tag is None else f' and tags in column {tag}'}"
    return (
        f"{place(path, line.number)}: {expected}, got {width} column{'s' if width > 1 else ''} separated by tabs or "
        "spaces; choose columns with --text and --label"
    )


def _words(blocks: Iterator[_Block], layout: _Layout, comments: list[_Line]) -> Iterator[_Block]:
    for block in blocks:
        words: _Block = []
        for line in block:
            (comments if layout.is_comment(line, not words) else words).append(line)
        if words:
            yield words


def _split_by_id(blocks: Iterator[_Block], column: int | None) -> Iterator[_Block]:
    """Yields the lines of each sentence. In a column of sentence numbers, an empty cell repeats the cell above."""
    for block in blocks:
        if column is None:
            yield block
            continue
        current = ""
        keys = [current := line.cells[column] or current for line in block if len(line.cells) > column]
        if len(keys) < len(block):
            yield block  # a line is too short, which is an error
            continue
        for _, group in itertools.groupby(zip(keys, block, strict=True), key=lambda pair: pair[0]):
            yield [line for _, line in group]


def _sentence(path: Path, number: int, lines: _Block, layout: _Layout) -> Sentence:
    first = lines[0]
    for line in lines:
        if len(line.cells) != len(first.cells):
            raise InputError(
                f"{place(path, line.number)}: {len(line.cells)} columns, but line {first.number} of the sentence has "
                f"{len(first.cells)}; tag every word, end sentences with a blank line and begin comments with #"
            )
    if not _are_columns(len(first.cells), layout.word, layout.tag):
        raise InputError(_misfit(path, first, layout.word, layout.tag))
    for expected, line in zip(_numbers([line.cells[0] for line in lines]), lines, strict=True):
        if layout.has_ids and line.cells[0] != str(expected):
            raise InputError(
                f"{place(path, line.number)}: expected the word number {expected}, got {line.cells[0]!r}; add the "
                "missing line, or a blank line between sentences"
            )
    numbers = [line.number for line in lines]
    joined = joined_words(path, numbers, [line.cells[layout.word] for line in lines])
    tags = None if layout.tag is None else [line.cells[layout.tag] for line in lines]
    return Sentence(path=path, lines=numbers, row=number, text=joined[0], words=joined[1], tags=tags)
