"""Reads a user's own files as a tagging task: entities, terms, parts of speech.

`tag_sentences` reads the files' sentences. Whatever scheme the tags of entities follow there, the task's are IOB2.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from electra_fast.errors import InputError
from electra_fast.finetuning import tables
from electra_fast.finetuning.tag_schemes import (
    detect_scheme,
    from_entities,
    is_bare,
    scheme_named,
    split_tag,
    to_entities,
)
from electra_fast.finetuning.tag_sentences import (
    TEXT_COLUMNS,
    WORD_COLUMNS,
    Sentence,
    Words,
    check_single,
    column_sentences,
    joined_words,
    row_sentences,
)
from electra_fast.finetuning.task import Split, Task, TaskData, check_dev_fraction, select

COLUMN_FORMATS = (".conll", ".conllu", ".bio", ".iob", ".iob2", ".bioes")
# Column files in training; texts in prediction.
TEXT_FORMATS = (".txt", ".tsv")
ROW_FORMATS = (".jsonl", ".parquet")
# What every tag of a test file without tags may be.
HIDDEN_TAGS = {"", "_"}
# More labels than this, most of them of a single word, are not labels.
MAX_SPARSE_LABELS = 1000
MAX_NAMED_LABELS = 20


def read_tagging(
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
    scheme: str = "auto",
    dev_fraction: float = 0.1,
    seed: int = 0,
) -> TaskData:
    """Reads the files of a tagging task.

    Column files have a word per line and blank lines between sentences. Rows of .jsonl and .parquet files have a
    list of words and one of tags, or a text and a list of its spans, each `{"start": 0, "end": 5, "label": "PER"}` or
    `[0, 5, "PER"]`, in Unicode code points, the end exclusive.

    Args:
        train: The training sentences.
        dev: The validation sentences; None to set a part of `train` aside.
        test: Sentences to predict, with or without tags.
        text: The column of the words or texts; by default one of `WORD_COLUMNS` or `TEXT_COLUMNS`. Of a column file a
            number from 0, or from the end with -1; by default 0, in .conllu files 1.
        label: Likewise that of the tags or spans; by default one of `TAG_COLUMNS` or `SPAN_COLUMNS`, or -1 and 3.
        labels: The tags, in the order of their numbers if the files have numbers, or the types of entities; empty for
            those of the training file.
        scheme: One of `tag_schemes.SCHEMES` or `ALIASES`; `auto` to find it in the tags of the training file.
        dev_fraction: Share of the training sentences that is set aside, above 0 and below 1.
        seed: Chooses the sentences that are set aside.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A file, a column or a value cannot be used, with the line and the remedy.
    """
    check_dev_fraction(dev_fraction)
    if len(set(labels)) < len(labels):
        raise InputError(f"--labels names a label twice: {', '.join(labels)}")
    notes: list[str] = []
    paths = {name: path for name, path in (("train", train), ("dev", dev), ("test", test)) if path is not None}
    files = {name: _sentences(name, path, text, label, labels, notes) for name, path in paths.items()}
    scheme = _scheme(files["train"], scheme, notes)
    if scheme != "none":
        files = {name: _as_iob2(sentences, scheme, notes) for name, sentences in files.items()}
    task = _task(files["train"], scheme, labels)
    known = "--labels names" if labels else f"{train} has"
    splits = {name: _split(name, sentences, task, known) for name, sentences in files.items()}
    if dev is None:
        splits["train"], splits["dev"] = _set_aside(splits["train"], dev_fraction, seed, notes)
    tests = (splits["test"],) if test is not None else ()
    return TaskData(task=task, train=splits["train"], dev=(splits["dev"],), test=tests, notes=tuple(notes))


def iterate_tagging(path: Path, *, text: tuple[str, ...] = ()) -> Iterator[tuple[str, Words | None]]:
    """Yields each text of a file to predict, and its words or None if they are not given; in a stream.

    Files are read as for training, but a .txt file has a text per line, and a .tsv or .csv file a column of texts.

    Args:
        path: The file.
        text: The column of the words or texts; by default as for training.

    Raises what `read_tagging` does.
    """
    if path.suffix.lower() in COLUMN_FORMATS:
        _check_file(path)
        yield from ((sentence.text, sentence.words) for sentence in column_sentences(path, text, None))
        return
    check_single(text, "--text")
    rows = tables.iterate_rows(path, text)
    first = next(rows)
    column = next((name for name in text or (*WORD_COLUMNS, *TEXT_COLUMNS) if name in first[1]), None)
    if column is None:
        raise InputError(f"{path}: no text column; {tables.there_are(first[1])}; choose with --text")
    for line, row in itertools.chain([first], rows):
        if isinstance(row.get(column), list):
            yield joined_words(path, [line], row[column])
        else:
            yield tables.text_of(path, line, row, column), None


def _check_file(path: Path) -> None:
    formats = (*COLUMN_FORMATS, *TEXT_FORMATS, *ROW_FORMATS)
    if path.suffix.lower() not in formats or path.is_dir():
        raise InputError(f"{path}: cannot be read as tagged text; give a file that ends in {', '.join(formats)}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")


def _sentences(
    name: str, path: Path, text: Sequence[str], label: Sequence[str], labels: Sequence[str], notes: list[str]
) -> list[Sentence]:
    """The sentences with words; those of a test file may all be without tags."""
    _check_file(path)
    is_test = name == "test"
    if path.suffix.lower() in ROW_FORMATS:
        found = list(row_sentences(path, text, label, labels, is_test=is_test))
    else:
        found = list(column_sentences(path, text, label, is_test=is_test))
    sentences = [sentence for sentence in found if len(sentence.words)]
    if not sentences:
        raise InputError(f"{path}: no words; choose the column with --text")
    notes += _notes(sentences, len(found) - len(sentences))
    if is_test and all(set(sentence.tags or ()) <= HIDDEN_TAGS for sentence in sentences):
        return [dataclasses.replace(sentence, tags=None) for sentence in sentences]
    for sentence in sentences:
        if sentence.tags is None or "" in sentence.tags:
            raise InputError(f"{sentence.place((sentence.tags or ['']).index(''))}: no tag; choose with --label")
    return sentences


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


def _scheme(train: Sequence[Sentence], name: str, notes: list[str]) -> str:
    """The scheme that is asked for, or that of the training file's tags."""
    path, has_spans = train[0].path, train[0].has_spans
    if name != "auto":
        scheme = scheme_named(name)
        if has_spans and scheme != "IOB2":
            raise InputError(f"{path}: has spans, which become tags of IOB2; leave --scheme {name} out")
        return scheme
    if has_spans:
        return "IOB2"
    scheme = detect_scheme(sentence.tags or () for sentence in train)
    how = "labels, not entities" if scheme == "none" else scheme
    notes.append(f"{path}: tags read as {how} (found in the tags; choose with --scheme)")
    return scheme


def _as_iob2(sentences: list[Sentence], scheme: str, notes: list[str]) -> list[Sentence]:
    """The sentences with IOB2 tags; notes how many of the file's own are ill-formed."""
    converted: list[Sentence] = []
    ill_formed: list[tuple[Sentence, int]] = []
    for sentence in sentences:
        if sentence.tags is None:  # in a test file, none has tags
            return sentences
        if scheme in ("IOB2", "IOBES"):
            _check_prefixes(sentence, sentence.tags, scheme)
        entities, words = to_entities(sentence.tags, scheme)
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


def _check_prefixes(sentence: Sentence, tags: Sequence[str], scheme: str) -> None:
    for word, tag in enumerate(tags):
        if is_bare(tag):
            raise InputError(
                f"{sentence.place(word)}: the tag {tag!r} has no prefix such as B-, unlike others in {scheme}; correct "
                "it, or choose with --label or --scheme"
            )


def _task(train: Sequence[Sentence], scheme: str, labels: tuple[str, ...]) -> Task:
    """The task with the tags that are named, else those of the training file, which has IOB2 tags or labels."""
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


def _split(name: str, sentences: Sequence[Sentence], task: Task, known: str) -> Split:
    ids = {tag: number for number, tag in enumerate(task.labels)}
    targets = []
    for sentence in sentences:
        tags = sentence.tags or ()
        unknown = next((word for word, tag in enumerate(tags) if tag not in ids), None)
        if unknown is not None:
            raise InputError(f"{sentence.place(unknown)}: {_unknown(tags[unknown], task, known)}")
        targets.append(np.array([ids[tag] for tag in tags], dtype=np.int64))
    return Split(
        name=name,
        path=sentences[0].path,
        texts=[(sentence.text,) for sentence in sentences],
        targets=None if sentences[0].tags is None else np.fromiter(targets, dtype=object, count=len(targets)),
        ids=[str(sentence.row) for sentence in sentences],
        words=[sentence.words for sentence in sentences],
    )


def _unknown(tag: str, task: Task, known: str) -> str:
    names: Sequence[str] = task.labels
    if task.scheme != "none":
        tag, names = split_tag(tag)[1], [split_tag(label)[1] for label in task.labels[1::2]]
    listed = ", ".join(map(repr, names[:MAX_NAMED_LABELS]))
    more = f" and {len(names) - MAX_NAMED_LABELS:,} more" if len(names) > MAX_NAMED_LABELS else ""
    kind = "tag" if task.scheme == "none" else "entity type"
    return f"unknown {kind} {tag!r}; {known}: {listed}{more}; name all with --labels, or remove it"


def _set_aside(train: Split, fraction: float, seed: int, notes: list[str]) -> tuple[Split, Split]:
    """A training and a dev split; every tag keeps a sentence for training."""
    assert train.targets is not None  # only a test file may lack tags
    num_rows = len(train.texts)
    tags = [set(target.tolist()) for target in train.targets]
    left = Counter(itertools.chain.from_iterable(tags))
    is_dev = np.zeros(num_rows, dtype=bool)
    num_missing = max(1, round(num_rows * fraction))
    for row in np.random.default_rng(seed).permutation(num_rows).tolist():
        if num_missing and all(left[tag] > 1 for tag in tags[row]):
            left.subtract(tags[row])
            is_dev[row] = True
            num_missing -= 1
    if not is_dev.any():
        raise InputError(
            f"{train.path}: {num_rows} sentences are too few to set a dev split aside; give one with --dev"
        )
    notes.append(
        f"{train.path}: {is_dev.sum():,} of {num_rows:,} sentences are set aside as the dev split (seed {seed}); give "
        "your own with --dev"
    )
    return select(train, "train", np.flatnonzero(~is_dev)), select(train, "dev", np.flatnonzero(is_dev))
