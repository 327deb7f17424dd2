"""Reads a user's own files as a tagging task: entities, terms, parts of speech.

Tags of entities are converted from the files' scheme to IOB2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from electra_fast.errors import InputError
from electra_fast.finetuning.readers import tables
from electra_fast.finetuning.readers.annotations import flat_row
from electra_fast.finetuning.readers.labels import known_rows, listed, truncated
from electra_fast.finetuning.readers.rows import BadRows, named_rows, place
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
from electra_fast.finetuning.readers.validation_split import Fold, group_values, grouped_rows, set_aside, with_all_tags
from electra_fast.finetuning.readers.words import Words
from electra_fast.finetuning.task import Split, Task, TaskData, check_dev_fraction

ROW_FORMATS = (".jsonl", ".json", ".parquet", ".arrow")
# Tags of a test file that hides them.
HIDDEN_TAGS = {"", "_"}
# More labels than this, most of them of a single word, are not labels.
MAX_SPARSE_LABELS = 1000
# A sentence of this many words probably lacks the blank lines between sentences.
MIN_LONG_SENTENCE = 400


def read_tagging(
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    scheme: str = "auto",
    quoting: tables.Quoting = "auto",
    dev_fraction: float = 0.1,
    folds: Fold | None = None,
    group: str = "",
    seed: int = 0,
    skip_bad_rows: int = 0,
) -> TaskData:
    """Reads the files of a tagging task.

    Column files have a word per line and blank lines between sentences, or a column that numbers sentences. Rows of
    .jsonl, .json and .parquet files have a list of words and one of tags, or a text and a list of its spans, each
    `{"start": 0, "end": 5, "label": "PER"}` or `[0, 5, "PER"]`, as doccano, Label Studio and Prodigy export them.

    Args:
        train: The training sentences.
        dev: The validation sentences; None to set a part of `train` aside.
        test: Sentences to predict, with or without tags.
        text: The column of the words or texts; by default one of `WORD_COLUMNS` or `TEXT_COLUMNS`. For a column file,
            a name or a number as for `column_sentences`.
        label: The column of the tags or spans; by default one of `TAG_COLUMNS` or `SPAN_COLUMNS`.
        labels: The tags, in the order of their numbers if the files have numbers, or the types of entities; empty for
            those of the training file.
        scheme: One of `tag_schemes.SCHEMES` or `ALIASES`; `auto` detects it in the tags of the training file.
        quoting: As in `tables.iterate_rows`.
        dev_fraction: Fraction of the training sentences to set aside, above 0 and below 1.
        folds: Set this fold's sentences aside instead.
        group: A column of the training file, if it has rows of sentences: those with the same value are not separated.
            Equal sentences never are.
        seed: Seeds the choice of the sentences to set aside.
        skip_bad_rows: Number of unusable sentences that may be left out.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A file, a column or a value cannot be used, with the line and the remedy.
    """
    check_dev_fraction(dev_fraction)
    if len(set(labels)) < len(labels):
        raise InputError(f"--labels names a label twice: {', '.join(labels)}")
    notes: list[str] = []
    bad = BadRows(skip_bad_rows)
    paths = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    files = {name: _sentences(name, path, text, label, labels, quoting, bad, notes) for name, path in paths.items()}
    try:
        scheme, notation = _scheme(files["train"], scheme, notes)
        if scheme != "none":
            labels = tuple(map(notation.usual, labels))
            files = {name: _as_iob2(sentences, scheme, notation, bad, notes) for name, sentences in files.items()}
        task = _task(files["train"], scheme, labels)
        known = "--labels names" if labels else f"{train} has"
        splits = {name: _split(name, sentences, task, known, bad) for name, sentences in files.items()}
    except InputError:
        bad.finish()  # bad rows may be the reason
        raise
    notes += bad.finish()
    if dev is None:
        whole = splits["train"]
        chosen = grouped_rows(
            whole,
            folds or dev_fraction,
            lambda rest, fraction: with_all_tags(rest, task, max(1, round(len(rest.texts) * fraction)), seed),
            seed,
            group_values(train, group, whole.columns or []),
        )
        splits["train"], splits["dev"] = set_aside(
            whole, chosen, seed, notes if folds is None else [], what="sentences"
        )
    notes += _class_sizes(task, splits["train"], splits["dev"])
    tests = (splits["test"],) if test is not None else ()
    return TaskData(
        task=task, train=splits["train"], dev=(splits["dev"],), test=tests, notes=tuple(dict.fromkeys(notes))
    )


def read_tagged(
    task: Task,
    path: Path,
    trained: tuple[Sequence[tuple[str, ...]], Sequence[tuple[str, ...]]],
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    scheme: str = "auto",
    quoting: tables.Quoting = "auto",
    skip_bad_rows: int = 0,
) -> tuple[Split, list[str]]:
    """Reads tagged sentences of a trained model's task; returns them and notes for the user.

    `trained` are the columns that were chosen in training. Sentences with a tag that the task lacks are bad rows.
    `labels` are the names of tags that are numbers. Other arguments, and what it raises, are those of `read_tagging`.
    """
    bad, notes = BadRows(skip_bad_rows), list[str]()
    text, label = text or next(iter(trained[0]), ()), label or next(iter(trained[1]), ())
    sentences = _sentences("data", path, text, label, labels, quoting, bad, notes)
    if task.scheme != "none":
        scheme, notation = _scheme(sentences, scheme, notes, [split_tag(label)[1] for label in task.labels])
        if scheme == "none":
            raise InputError(f"{path}: tags are labels, but the model's delimit entities; choose --label or --scheme")
        sentences = _as_iob2(sentences, scheme, notation, bad, notes)
    used = [{*map(_name_in(task), sentence.tags or ())} - {""} for sentence in sentences]
    what = "tags" if task.scheme == "none" else "entity types"
    kept = known_rows(path, used, [*dict.fromkeys(filter(None, map(_name_in(task), task.labels)))], bad, what)
    notes += bad.finish()
    if not kept:
        raise InputError(f"{path}: no sentence has only {what} that the model knows; choose the column with --label")
    return _split("data", [sentences[number] for number in kept], task, "", bad), notes


def _name_in(task: Task) -> Callable[[str], str]:
    """Returns a function from a tag to its name for people: the type of an entity, empty for none."""
    return (lambda tag: tag) if task.scheme == "none" else (lambda tag: split_tag(tag)[1])


def iterate_tagging(
    path: Path, *, text: tuple[str, ...] = (), quoting: tables.Quoting = "auto"
) -> Iterator[tuple[str, Words | None]]:
    """Streams each text of a file to predict, and its words, or None if they are not given.

    Files are read as for training, except that a .txt file has a text per line, and a .tsv or .csv file a column of
    texts, unless they look like columns of words and tags.

    Raises as `read_tagging` does.
    """
    if are_columns(path, text, quoting):
        _check_file(path)
        yield from ((sentence.text, sentence.words) for sentence in column_sentences(path, text, None, quoting=quoting))
        return
    check_single(text, "--text")
    rows = ((line, flat_row(place(path, line), row)) for line, row in tables.iterate_rows(path, quoting=quoting))
    first = next(rows)
    column, _ = row_columns(path, [first[1]], text, (), is_test=True)
    for line, row in itertools.chain([first], rows):
        content, joined, words = row_text(path, line, row, column)
        yield joined, None if isinstance(content, str) else words


def _check_file(path: Path) -> None:
    formats = (*COLUMN_FORMATS, *TEXT_FORMATS, ".csv", *ROW_FORMATS)
    if path.suffix.lower() not in formats and not path.is_dir():
        raise InputError(f"{path}: cannot be read as tagged text; give a file that ends in {', '.join(formats)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")


def _sentences(
    name: str,
    path: Path,
    text: Sequence[str],
    label: Sequence[str],
    labels: Sequence[str],
    quoting: tables.Quoting,
    bad: BadRows,
    notes: list[str],
) -> list[Sentence]:
    """Returns the sentences with words; those of a test file may all lack tags."""
    _check_file(path)
    is_test = name == "test"
    options: dict[str, Any] = {"is_test": is_test, "quoting": quoting, "bad": bad, "notes": notes}
    if _has_rows(path, label, quoting):
        found = row_sentences(path, text, label, labels, **options)
    else:
        found = list(column_sentences(path, text, label, **options))
        notes += _long_sentences(found, is_test)
    sentences = [sentence for sentence in found if len(sentence.words)]
    if not sentences:
        bad.finish()
        raise InputError(f"{path}: no words; choose the column with --text")
    notes += _notes(sentences, len(found) - len(sentences))
    if is_test and all(set(sentence.tags or ()) <= HIDDEN_TAGS for sentence in sentences):
        return [dataclasses.replace(sentence, tags=None) for sentence in sentences]
    return _checked(sentences, _check_tags, bad)


def _has_rows(path: Path, label: Sequence[str], quoting: tables.Quoting) -> bool:
    """Returns whether each row is a sentence; in a table its tags are separated by spaces, or written as a list."""
    if path.suffix.lower() not in (".csv", ".tsv"):
        return path.is_dir() or path.suffix.lower() in ROW_FORMATS
    with contextlib.suppress(InputError):  # reported where columns are read
        rows = [row for _, row in itertools.islice(tables.iterate_rows(path, quoting=quoting), 100)]
        cells = [row.get(name) for row in rows for name in label or (*TAG_COLUMNS, *SPAN_COLUMNS)]
        return any(cell and (cell[0] == "[" or len(cell.split()) > 1) for cell in cells)
    return False


def _checked(sentences: Sequence[Sentence], check: Callable[[Sentence], None], bad: BadRows) -> list[Sentence]:
    """Returns the sentences that pass a check; collects what it raises."""
    kept = bad.passing(sentences, check)
    if sentences and not kept:
        bad.allowed = 0  # nothing would be left
        bad.finish()
    return kept


def _check_tags(sentence: Sentence) -> None:
    for word, tag in enumerate(sentence.tags or [""]):
        if not tag:
            raise InputError(f"{sentence.place(word)}: no tag; choose with --label")


def _long_sentences(sentences: Sequence[Sentence], is_test: bool) -> Iterator[str]:
    """Notes long sentences; raises InputError for a file of a single one."""
    long = [sentence for sentence in sentences if len(sentence.words) >= MIN_LONG_SENTENCE]
    if not long:
        return
    remedy = "put a blank line after each sentence, or number sentences in a column named sentence"
    if len(sentences) == 1 and not is_test:
        raise InputError(f"{long[0].path}: a single sentence of {len(long[0].words):,} words; {remedy}")
    yield (
        f"{long[0].place()}: the first of {len(long):,} sentences of {MIN_LONG_SENTENCE} words or more; if they are "
        f"several, {remedy}"
    )


def _notes(sentences: Sequence[Sentence], num_empty: int) -> Iterator[str]:
    if num_empty:
        yield f"{sentences[0].path}: {num_empty:,} sentences without words are left out"
    cut = [sentence for sentence in sentences if sentence.num_cuts]
    if cut:
        num_cuts = sum(sentence.num_cuts for sentence in cut)
        yield (
            f"{cut[0].place()}: the first of {num_cuts:,} ends of spans inside a word; a word belongs to the first "
            "entity that has a part of it"
        )


def _scheme(train: Sequence[Sentence], name: str, notes: list[str], known: Sequence[str] = ()) -> tuple[str, Notation]:
    """Returns the requested scheme, or that of the training file's tags, and their notation.

    `known` are the entity types of a trained model.
    """
    path, has_spans = train[0].path, train[0].has_spans
    scheme = "IOB2" if has_spans else "none"
    if name != "auto":
        scheme = scheme_named(name)
        if has_spans and scheme != "IOB2":
            raise InputError(f"{path}: has spans, which become tags of IOB2; leave --scheme {name} out")
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
    how = "labels, not entities" if scheme == "none" else scheme
    if scheme == "none" and "O" in tags:
        how += ", although some are 'O'"
    if scheme == "IO" and (any(map(is_bare, usual.values())) or not notation.has_places):
        how += " without prefixes, so words of one type in a row are one entity"
    if not notation.has_places:
        how += "".join(f"; {tag!r} is a type" for tag in tags if tag != notation.outside and not is_bare(tag))
    elif scheme != "none" and notation != Notation():
        others = (tag for tag in tags if tag != notation.outside and usual[tag] != tag)
        examples = [tag for tag in (next(others, "O"), notation.outside) if tag != "O"]
        written = [f"{tag!r} for {usual[tag]!r}" for tag in examples]
        how += f", written {' and '.join(written)}"
    if name == "auto" or notation != Notation():
        notes.append(f"{path}: tags read as {how} (found in the tags; choose with --scheme)")
    return scheme, notation


def _check_iobes(path: Path, sentences: Sequence[Sequence[str]], scheme: str) -> None:
    """Raises InputError if tags look like IOBES but are not, for example if S and E are start and end."""
    num_ill_formed = sum(len(to_entities(tags, scheme)[1]) for tags in sentences) if scheme == "IOBES" else 0
    num_inside = sum(tag != "O" for tags in sentences for tag in tags)
    if 3 * num_ill_formed > num_inside:
        raise InputError(
            f"{path}: {num_ill_formed:,} of {num_inside:,} tags of entities are ill-formed in IOBES, whose prefixes "
            "they have; rename them (B begins an entity, E ends it, S is a single word), or choose with --scheme"
        )


def _as_iob2(
    sentences: list[Sentence], scheme: str, notation: Notation, bad: BadRows, notes: list[str]
) -> list[Sentence]:
    """Converts tags to IOB2; notes how many of the file's own are ill-formed."""
    if sentences[0].tags is None:  # in a test file, none has tags
        return sentences
    found = {tag for sentence in sentences for tag in sentence.tags or ()}
    usual = {tag: notation.usual(tag) for tag in found}
    bare = {tag for tag in found if is_bare(usual[tag])}
    if bare and (scheme in ("IOB2", "IOBES", "IOE") or any(tag[:2] == "I-" for tag in usual.values())):
        sentences = _checked(sentences, lambda sentence: _check_places(sentence, scheme, notation, bare), bad)
    converted: list[Sentence] = []
    ill_formed: list[tuple[Sentence, int]] = []
    for sentence in sentences:
        entities, words = to_entities([usual[tag] for tag in sentence.tags or ()], scheme)
        ill_formed += [(sentence, word) for word in words]
        converted.append(dataclasses.replace(sentence, tags=from_entities(entities, len(sentence.words))))
    if ill_formed:
        first, word = ill_formed[0]
        notes.append(
            f"{first.place(word)}: {(first.tags or ())[word]!r} is the first of {len(ill_formed):,} tags that are "
            f"ill-formed in {scheme}; they are read as conlleval reads them"
        )
    if all(set(sentence.tags or ()) == {"O"} for sentence in converted):
        notes.append(f"{sentences[0].path}: has no entity, so its f1 is 0 whatever is predicted")
    return converted


def _check_places(sentence: Sentence, scheme: str, notation: Notation, bare: set[str]) -> None:
    """Raises InputError at a tag without the prefix or suffix that others in the scheme have."""
    for word, tag in enumerate(sentence.tags or ()):
        if tag in bare:
            place = (
                f"suffix such as {notation.separator}B"
                if notation.is_suffix
                else f"prefix such as B{notation.separator}"
            )
            raise InputError(
                f"{sentence.place(word)}: the tag {tag!r} has no {place}, unlike others in {scheme}; "
                "correct it, or choose with --label or --scheme"
            )


def _task(train: Sequence[Sentence], scheme: str, labels: tuple[str, ...]) -> Task:
    """Returns the task with the named tags, else those of the training file, which has IOB2 tags or labels."""
    tags = Counter(tag for sentence in train for tag in sentence.tags or ())
    if len(tags) < 2:
        raise InputError(
            f"{train[0].path}: every word is tagged {min(tags)!r}; there is nothing to learn; choose with --label"
        )
    if scheme != "none":
        types = dict.fromkeys(split_tag(tag)[1] for tag in labels or sorted(tags) if tag != "O")
        labels = ("O", *(f"{prefix}-{type_}" for type_ in types for prefix in "BI"))
        return Task(name="tagging", kind="tagging", labels=labels, metric="f1", scheme="IOB2")
    if len(tags) > MAX_SPARSE_LABELS and len(tags) > tags.total() / 2:
        raise InputError(
            f"{train[0].path}: {len(tags):,} different tags of {tags.total():,} words; choose the column with --label"
        )
    return Task(name="tagging", kind="tagging", labels=labels or tuple(sorted(tags)), metric="accuracy")


def _split(name: str, sentences: Sequence[Sentence], task: Task, known: str, bad: BadRows) -> Split:
    ids = {tag: number for number, tag in enumerate(task.labels)}

    def check(sentence: Sentence) -> None:
        for word, tag in enumerate(sentence.tags or ()):
            if tag not in ids:
                raise InputError(f"{sentence.place(word)}: {_unknown(tag, task, known)}")

    sentences = _checked(sentences, check, bad)
    targets = [np.array([ids[tag] for tag in sentence.tags or ()], dtype=np.int64) for sentence in sentences]
    names, columns = named_rows((sentence.row for sentence in sentences), [sentence.columns for sentence in sentences])
    return Split(
        name=name,
        path=sentences[0].path,
        texts=[(sentence.text,) for sentence in sentences],
        targets=None if sentences[0].tags is None else np.fromiter(targets, dtype=object, count=len(targets)),
        ids=names,
        words=[sentence.words for sentence in sentences],
        columns=columns,
    )


def _unknown(tag: str, task: Task, known: str) -> str:
    names: Sequence[str] = task.labels
    if task.scheme != "none":
        tag, names = split_tag(tag)[1], [split_tag(label)[1] for label in task.labels[1::2]]
    kind = "tag" if task.scheme == "none" else "entity type"
    return f"unknown {kind} {tag!r}; {known}: {listed(names)}; name all with --labels, or remove it"


def _class_sizes(task: Task, train: Split, dev: Split) -> Iterator[str]:
    """Yields the number of entities or words of each class in the splits, and classes that hardly differ."""
    sizes = [np.bincount(np.concatenate(split.targets), minlength=len(task.labels)) for split in (train, dev)]  # type: ignore[arg-type]
    numbers = [number for number, label in enumerate(task.labels) if task.scheme == "none" or label[:1] == "B"]
    names = {number: task.labels[number][0 if task.scheme == "none" else 2 :] for number in numbers}
    numbers.sort(key=lambda number: -sizes[0][number])
    shown = [f"{names[number]} {sizes[0][number]:,}/{sizes[1][number]:,}" for number in numbers]
    kind = "words by tag" if task.scheme == "none" else "entities by type"
    yield f"{kind} to train/validate on: {truncated(shown)}"
    lacking = [names[number] for number in numbers if sizes[0][number] and not sizes[1][number]]
    if lacking:
        yield f"{dev.path}: none to validate {truncated(lacking)} on, so the score leaves them out"
    alike = itertools.groupby(sorted(names.values(), key=_folded), key=_folded)
    for group in (list(each) for _, each in alike):
        if len(group) > 1:
            yield f"{train.path}: {' and '.join(map(repr, group))} differ only in case or spaces"


def _folded(name: str) -> str:
    return "".join(name.split()).casefold()
