"""Reads a user's files as a tagging task: entities, terms, parts of speech.

Entity tags are converted from the files' scheme to IOB2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.examples import Columns, Fold, Parser, Trained, read_examples, with_all_tags
from electra_fast.finetuning.readers.labels import known_rows, listed, truncated
from electra_fast.finetuning.readers.rows import flat_row, named_rows, place
from electra_fast.finetuning.readers.tables import Quoting, iterate_rows, refuse_stream
from electra_fast.finetuning.readers.tag_columns import COLUMN_FORMATS, TEXT_FORMATS, are_columns, column_sentences
from electra_fast.finetuning.readers.tag_schemes import (
    Notation,
    are_types,
    detect_notation,
    detect_scheme,
    from_entities,
    is_bare,
    scheme_named,
    split_tag,
    to_entities,
)
from electra_fast.finetuning.readers.tag_sentences import (
    SPAN_COLUMNS,
    TAG_COLUMNS,
    Sentence,
    check_single,
    row_columns,
    row_sentences,
    row_text,
)
from electra_fast.finetuning.readers.words import Words
from electra_fast.finetuning.task import Split, Task, TaskData, check_dev_fraction

ROW_FORMATS = (".jsonl", ".json", ".parquet", ".arrow")
# Tags in test files whose tags are hidden.
HIDDEN_TAGS = {"", "_"}
# More tags than this with under two words each, on average, are an error: the column does not contain tags.
MAX_SPARSE_LABELS = 1000
# A sentence of at least this length probably lacks blank lines between sentences.
MIN_LONG_SENTENCE = 400


def read_tagging(
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: Columns = (),
    label: Columns = (),
    labels: tuple[str, ...] = (),
    scheme: str = "auto",
    quoting: Quoting = "auto",
    dev_fraction: float = 0.1,
    folds: Fold | None = None,
    group: str = "",
    seed: int = 0,
    skip_bad_rows: int = 0,
) -> TaskData:
    """Reads the files of a tagging task: a word per line, or rows of lists of words and tags or of a text and spans.

    `text` is the column of words or texts, by default one of `WORD_COLUMNS` or `TEXT_COLUMNS`; `label` is the column of
    tags or spans, by default one of `TAG_COLUMNS` or `SPAN_COLUMNS`. For files with a word per line see
    `column_sentences`. `labels` are the tags, in the order of their ids if the files have integers, or the entity
    types; empty for the tags of the training file. `scheme` is one of `tag_schemes.SCHEMES` or `ALIASES`, or `auto` to
    detect it from the training file's tags. `group` is a column of files with a row per sentence.

    The other arguments are the same as in `own_data.read`. Raises the errors of `read_examples`.
    """
    check_dev_fraction(dev_fraction)
    if len(set(labels)) < len(labels):
        raise InputError(f"--labels = {','.join(labels)}: must not repeat a label")
    parser = _TagParser(quoting, skip_bad_rows, group, text, label, labels, scheme)
    return read_examples(train, dev, test, parser, dev_fraction=dev_fraction, folds=folds, seed=seed)


def read_tagged(
    task: Task,
    path: Path,
    trained: Trained,
    *,
    text: Columns = (),
    label: Columns = (),
    labels: tuple[str, ...] = (),
    scheme: str = "auto",
    quoting: Quoting = "auto",
    skip_bad_rows: int = 0,
) -> tuple[Split, list[str]]:
    """Reads tagged sentences for a trained model's task; returns them and notes for the user.

    `trained` are the columns that were chosen in training. Sentences with a tag that the task lacks are bad rows.
    `labels` are names for integer tags. The other arguments and the errors are the same as in `read_tagging`.
    """
    text = text or next(iter(trained[0]), ())
    label = label or next(iter(trained[1]), ())
    parser = _TagParser(quoting, skip_bad_rows, "", text, label, labels, scheme)
    sentences = parser.read({"data": path})["data"]
    is_plain = task.scheme == "none"
    unit = "tags" if is_plain else "entity types"

    def name(tag: str) -> str:
        return tag if is_plain else split_tag(tag)[1]

    if not is_plain:
        scheme_name, notation = parser.scheme(sentences, [*map(name, task.labels)])
        if scheme_name == "none":
            problem = "the tags have no prefixes such as B-, but the model predicts entities"
            raise InputError(f"{path}: {problem}; choose another column with --label, or set --scheme")
        sentences = parser.as_iob2(sentences, scheme_name, notation)
    used = [{*map(name, sentence.tags or ())} - {""} for sentence in sentences]
    known = [*dict.fromkeys(filter(None, map(name, task.labels)))]
    rows = known_rows(path, used, known, parser.bad, unit)
    notes = [*parser.notes, *parser.bad.finish()]
    if not rows:
        raise InputError(f"{path}: every sentence has {unit} unknown to the model; choose the column with --label")
    return parser.split("data", [sentences[number] for number in rows], task), notes


def iterate_tagging(path: Path, *, text: Columns = (), quoting: Quoting = "auto") -> Iterator[tuple[str, Words | None]]:
    """Streams the texts of a file for prediction with their words, or None if the file does not have words.

    Files are read as in training, but unless they look like columns of words and tags, a .txt file has a text per line
    and a .tsv or .csv file has a column of texts.

    Raises the errors of `read_tagging`.
    """
    if are_columns(path, text, quoting):
        _check_file(path)
        yield from ((sentence.text, sentence.words) for sentence in column_sentences(path, text, None, quoting=quoting))
        return
    check_single(text, "--text")
    rows = ((line, flat_row(place(path, line), row)) for line, row in iterate_rows(path, quoting=quoting))
    first = next(rows)
    column, _ = row_columns(path, [first[1]], text, (), is_test=True)
    for line, row in itertools.chain([first], rows):
        content, joined, words = row_text(path, line, row, column)
        yield joined, None if isinstance(content, str) else words


def _check_file(path: Path) -> None:
    formats = (*COLUMN_FORMATS, *TEXT_FORMATS, ".csv", *ROW_FORMATS)
    if path.suffix.lower() not in formats and not path.is_dir():
        raise InputError(f"{path}: unknown extension for tagged text; must be one of {', '.join(formats)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")


@dataclass
class _TagParser(Parser[list[Sentence]]):
    """Sentences whose words have tags."""

    unit = "sentences"
    text: Columns
    label: Columns
    labels: tuple[str, ...]
    chosen_scheme: str
    known: str = field(default="", init=False)
    """Start of a list of the known tags."""

    def read(self, paths: Mapping[str, Path]) -> dict[str, list[Sentence]]:
        return {name: self._sentences(path, is_test=name == "test") for name, path in paths.items()}

    def task(self, files: dict[str, list[Sentence]]) -> Task:
        train = files["train"]
        labels = self.labels
        self.known = "--labels" if labels else f"tags in {train[0].path}"
        scheme, notation = self.scheme(train)
        if scheme != "none":
            labels = tuple(map(notation.usual, labels))
            files |= {name: self.as_iob2(sentences, scheme, notation) for name, sentences in files.items()}
        tags = Counter(tag for sentence in files["train"] for tag in sentence.tags or ())
        path = train[0].path
        if len(tags) < 2:
            problem = f"every word is tagged {min(tags)!r}; there is nothing to learn"
            raise InputError(f"{path}: {problem}; choose another column with --label")
        if scheme != "none":
            types = dict.fromkeys(split_tag(tag)[1] for tag in labels or sorted(tags) if tag != "O")
            labels = ("O", *(f"{prefix}-{type_}" for type_ in types for prefix in "BI"))
            return Task(name="tagging", kind="tagging", labels=labels, metric="f1", scheme="IOB2")
        if len(tags) > MAX_SPARSE_LABELS and len(tags) > tags.total() / 2:
            problem = f"{len(tags):,} different tags of {tags.total():,} words"
            raise InputError(f"{path}: {problem}; choose another column with --label")
        return Task(name="tagging", kind="tagging", labels=labels or tuple(sorted(tags)), metric="accuracy")

    def split(self, name: str, file: list[Sentence], task: Task) -> Split:
        ids = {tag: number for number, tag in enumerate(task.labels)}

        def check(sentence: Sentence) -> None:
            for word, tag in enumerate(sentence.tags or ()):
                if tag not in ids:
                    kind = "tag"
                    names = task.labels
                    if task.scheme != "none":
                        kind = "entity type"
                        names = tuple(split_tag(label)[1] for label in task.labels[1::2])
                        tag = split_tag(tag)[1]
                    problem = f"unknown {kind} {tag!r}; {self.known}: {listed(names)}"
                    raise InputError(f"{sentence.place(word)}: {problem}; list all with --labels, or remove it")

        sentences = self._passing(file, check)
        targets = [np.array([ids[tag] for tag in sentence.tags or ()], dtype=np.int64) for sentence in sentences]
        rows = (sentence.row for sentence in sentences)
        names, columns = named_rows(rows, [sentence.columns for sentence in sentences])
        return Split(
            name=name,
            path=sentences[0].path,
            texts=[(sentence.text,) for sentence in sentences],
            targets=None if sentences[0].tags is None else np.fromiter(targets, dtype=object, count=len(targets)),
            ids=names,
            words=[sentence.words for sentence in sentences],
            columns=columns,
        )

    def choose(self, whole: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
        return with_all_tags(whole, task, max(1, round(len(whole.texts) * fraction)), seed)

    def complete(self, task: Task, splits: dict[str, Split]) -> Task:
        self.notes += _class_sizes(task, splits["train"], splits["dev"])
        return task

    def _sentences(self, path: Path, *, is_test: bool) -> list[Sentence]:
        """Returns the sentences that have words; in a test file all of them may lack tags."""
        _check_file(path)
        options: dict[str, Any] = {"is_test": is_test, "quoting": self.quoting, "bad": self.bad, "notes": self.notes}
        if self._has_rows(path):
            all_sentences = row_sentences(path, self.text, self.label, self.labels, **options)
        else:
            all_sentences = list(column_sentences(path, self.text, self.label, **options))
            self.notes += _long_sentences(all_sentences, is_test)
        sentences = [sentence for sentence in all_sentences if len(sentence.words)]
        if not sentences:
            self.bad.finish()
            raise InputError(f"{path}: no words; choose the column with --text")
        if num_empty := len(all_sentences) - len(sentences):
            self.notes.append(f"{path}: {num_empty:,} sentences without words are left out")
        if cut := [sentence for sentence in sentences if sentence.num_cuts]:
            first = f"the first of {sum(sentence.num_cuts for sentence in cut):,} ends of spans inside a word"
            rule = "a word belongs to the first entity that covers a part of it"
            self.notes.append(f"{cut[0].place()}: {first}; {rule}")
        if is_test and all(set(sentence.tags or ()) <= HIDDEN_TAGS for sentence in sentences):
            return [dataclasses.replace(sentence, tags=None) for sentence in sentences]
        return self._passing(sentences, _check_tags)

    def _has_rows(self, path: Path) -> bool:
        """Returns whether a row is a sentence; in .csv and .tsv files its tags are separated by spaces or a list."""
        if path.suffix.lower() not in (".csv", ".tsv"):
            return path.is_dir() or path.suffix.lower() in ROW_FORMATS
        refuse_stream(path)
        with contextlib.suppress(InputError):  # reported when the columns are read
            rows = [row for _, row in itertools.islice(iterate_rows(path, quoting=self.quoting), 100)]
            cells = [row.get(name) for row in rows for name in self.label or (*TAG_COLUMNS, *SPAN_COLUMNS)]
            return any(cell and (cell[0] == "[" or len(cell.split()) > 1) for cell in cells)
        return False

    def _passing(self, sentences: Sequence[Sentence], check: Callable[[Sentence], None]) -> list[Sentence]:
        passed = self.bad.passing(sentences, check)
        if sentences and not passed:
            self.bad.allowed = 0  # no sentence would be left
            self.bad.finish()
        return passed

    def scheme(self, train: Sequence[Sentence], known: Sequence[str] = ()) -> tuple[str, Notation]:
        """Returns the scheme, requested or detected in the training file's tags, and the notation of the tags.

        `known` are the entity types of a trained model.
        """
        path = train[0].path
        has_spans = train[0].has_spans
        name = self.chosen_scheme
        scheme = "IOB2" if has_spans else "none"
        if name != "auto":
            scheme = scheme_named(name)
            if has_spans and scheme != "IOB2":
                raise InputError(f"{path}: spans are converted to IOB2; remove --scheme {name}")
        if has_spans or name == "none":
            return scheme, Notation()
        tags = Counter(tag for sentence in train for tag in sentence.tags or ())
        notation = detect_notation(tags)
        has_bare = any(map(is_bare, tags.keys() - {notation.outside})) and not any(tag.startswith("I-") for tag in tags)
        if notation == Notation(outside=notation.outside):
            is_plain = are_types(tags, notation.outside, known) or (scheme == "IO" and has_bare)
            notation = dataclasses.replace(notation, has_places=not is_plain)
        usual = {tag: notation.usual(tag) for tag in tags}
        if name == "auto":
            converted = [[usual[tag] for tag in sentence.tags or ()] for sentence in train]
            scheme = detect_scheme(converted)
            _check_iobes(path, converted, scheme)
        if name == "auto" or notation != Notation():
            description = _described(scheme, notation, usual)
            self.notes.append(f"{path}: tags read as {description} (detected; choose another scheme with --scheme)")
        return scheme, notation

    def as_iob2(self, sentences: list[Sentence], scheme: str, notation: Notation) -> list[Sentence]:
        """Converts tags to IOB2; adds a note with the number of ill-formed tags in the file."""
        if sentences[0].tags is None:  # no sentence of a test file has tags
            return sentences
        tags = {tag for sentence in sentences for tag in sentence.tags or ()}
        usual = {tag: notation.usual(tag) for tag in tags}
        bare = {tag for tag in usual if is_bare(usual[tag])}

        def check(sentence: Sentence) -> None:
            for word, tag in enumerate(sentence.tags or ()):
                if tag in bare:
                    kind, form = ("suffix", "{}B") if notation.is_suffix else ("prefix", "B{}")
                    problem = f"must have a {kind} such as {form.format(notation.separator)} in {scheme}"
                    remedy = "correct it, or choose with --label or --scheme"
                    raise InputError(f"{sentence.place(word)}: tag = {tag!r}: {problem}; {remedy}")

        if bare and (scheme in ("IOB2", "IOBES", "IOE") or any(tag[:2] == "I-" for tag in usual.values())):
            sentences = self._passing(sentences, check)
        converted: list[Sentence] = []
        ill_formed: list[tuple[Sentence, int]] = []
        for sentence in sentences:
            entities, words = to_entities([usual[tag] for tag in sentence.tags or ()], scheme)
            ill_formed += [(sentence, word) for word in words]
            converted.append(dataclasses.replace(sentence, tags=from_entities(entities, len(sentence.words))))
        if ill_formed:
            first, word = ill_formed[0]
            self.notes.append(
                f"{first.place(word)}: {(first.tags or ())[word]!r} is the first of {len(ill_formed):,} tags that are "
                f"ill-formed in {scheme}; they are read as in conlleval"
            )
        if all(set(sentence.tags or ()) == {"O"} for sentence in converted):
            self.notes.append(f"{sentences[0].path}: contains no entity, so every model's F1 on it is 0")
        return converted


def _check_tags(sentence: Sentence) -> None:
    for word, tag in enumerate(sentence.tags or [""]):
        if not tag:
            raise InputError(f"{sentence.place(word)}: no tag; choose the column with --label")


def _long_sentences(sentences: Sequence[Sentence], is_test: bool) -> Iterator[str]:
    long = [sentence for sentence in sentences if len(sentence.words) >= MIN_LONG_SENTENCE]
    remedy = "put a blank line after each sentence, or number sentences in a column named sentence"
    if long and len(sentences) == 1 and not is_test:
        raise InputError(f"{long[0].path}: a single sentence of {len(long[0].words):,} words; {remedy}")
    if long:
        first = f"the first of {len(long):,} sentences of {MIN_LONG_SENTENCE} words or more"
        yield f"{long[0].place()}: {first}; if these are several sentences each, {remedy}"


def _described(scheme: str, notation: Notation, usual: Mapping[str, str]) -> str:
    """Describes how the tags, the keys of `usual`, are read."""
    text = "labels, not entities" if scheme == "none" else scheme
    if scheme == "none" and "O" in usual:
        text += ", although some are 'O'"
    if scheme == "IO" and (any(map(is_bare, usual.values())) or not notation.has_places):
        text += " without prefixes, so consecutive words of one type are one entity"
    if not notation.has_places:
        text += "".join(f"; {tag!r} is a type" for tag in usual if tag != notation.outside and not is_bare(tag))
    elif scheme != "none" and notation != Notation():
        others = (tag for tag in usual if tag != notation.outside and usual[tag] != tag)
        examples = [tag for tag in (next(others, "O"), notation.outside) if tag != "O"]
        text += f", written {' and '.join(f'{tag!r} for {usual[tag]!r}' for tag in examples)}"
    return text


def _check_iobes(path: Path, sentences: Sequence[Sequence[str]], scheme: str) -> None:
    """Raises InputError if tags have the prefixes of IOBES but not its form, such as S and E for start and end."""
    num_ill_formed = sum(len(to_entities(tags, scheme)[1]) for tags in sentences) if scheme == "IOBES" else 0
    num_inside = sum(tag != "O" for tags in sentences for tag in tags)
    if 3 * num_ill_formed > num_inside:
        raise InputError(
            f"{path}: the prefixes look like IOBES, but {num_ill_formed:,} of {num_inside:,} entity tags are "
            "ill-formed in it; rename them (B begins an entity, E ends it, S is a single word), or pass --scheme"
        )


def _class_sizes(task: Task, train: Split, dev: Split) -> Iterator[str]:
    """Yields notes on the number of entities or words per class in the splits, and on classes that hardly differ."""
    sizes = [np.bincount(np.concatenate(split.targets), minlength=len(task.labels)) for split in (train, dev)]  # type: ignore[arg-type]
    kind, start = ("words by tag", 0) if task.scheme == "none" else ("entities by type", 2)
    names = {number: label[start:] for number, label in enumerate(task.labels) if not start or label[:1] == "B"}
    numbers = sorted(names, key=lambda number: -sizes[0][number])
    shown = [f"{names[number]} {sizes[0][number]:,}/{sizes[1][number]:,}" for number in numbers]
    yield f"{kind}, training/validation: {truncated(shown)}"
    lacking = [names[number] for number in numbers if sizes[0][number] and not sizes[1][number]]
    if lacking:
        yield f"{dev.path}: the validation set has no {truncated(lacking)}, so the score does not include them"
    for _, alike in itertools.groupby(sorted(names.values(), key=_folded), key=_folded):
        if len(group := [*alike]) > 1:
            yield f"{train.path}: {' and '.join(map(repr, group))} differ only in case or spaces"


def _folded(name: str) -> str:
    return "".join(name.split()).casefold()
