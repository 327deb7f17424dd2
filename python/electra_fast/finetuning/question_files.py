"""Reads questions about contexts: the files of SQuAD, and a user's own as SQuAD-like .json or as rows of a table.

Annotated answers that are not in their context are left out of training and kept for scoring.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.chunks import word_at, words_of
from electra_fast.finetuning.tables import (
    Quoting,
    abbreviated,
    check_columns,
    column_names,
    iterate_rows,
    place,
    text_of,
    there_are,
)
from electra_fast.finetuning.task import Answer, Split, Task, TaskData, check_dev_fraction, select

TEXT_COLUMNS = ("question", "context")
ANSWER_COLUMNS = ("answers", "answer")
# SQuAD's files by split. A pattern counts if those before it match nothing.
PATTERNS = {"train": ("train*.json",), "dev": ("dev*.json", "validation*.json"), "test": ("test*.json",)}
EXPECTED = '{"data": [{"paragraphs": [{"context": …, "qas": [{"id": …, "question": …, "answers": …}]}]}]}'


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A question as its file holds it, with its texts checked."""

    place: str
    """File, place in it, and id, for messages."""
    id: str | None
    question: str
    context: str
    answers: Any


def read_squad(name: Literal["squad1", "squad2"], folder: Path) -> TaskData:
    """Reads SQuAD 1.1 or 2.0 from a folder, or from one in it that is called `squad`, `squad2`, `SQuAD-v2.0` or so.

    The files are train*.json, dev*.json or validation*.json, and possibly test*.json; several of a split are its parts.
    Files of the other version may lie beside them: the version is in a file's field `version`, else in its name
    (`v1`, `v2`), else it is 2.0 if a question has the field `is_impossible`.

    Raises:
        FileNotFoundError: The folder, its training files or its dev files are missing.
        InputError: A file cannot be used, with the place and the remedy.
    """
    splits = {}
    for split, parts in _squad_files(name, folder).items():
        questions = (question for path, content in parts.items() for question in _squad_questions(path, content))
        splits[split] = _split(split, next(iter(parts)), questions, has_unanswerable=name == "squad2")
    return _task_data(name, splits, [])


def read_questions(
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    quoting: Quoting = "auto",
    dev_fraction: float = 0.1,
    seed: int = 0,
) -> TaskData:
    """Reads a user's own questions, from .json files like SQuAD's or from .jsonl, .parquet, .tsv or .csv rows.

    Rows may have a column `id`. An answer is a text, whose first occurrence in the context counts, or an object with
    `text` and `answer_start` (or `start`), its first character in the context. Several answers are a list, or an object
    of lists as in the `datasets` of Hugging Face. A question without an answer is unanswerable.

    Args:
        train: The training questions.
        dev: The validation questions; None to set some contexts of `train` aside, with all their questions.
        test: Questions to answer, with or without answers.
        text: The columns of the question and the context; empty for `TEXT_COLUMNS`.
        label: The column of the answers; empty for the first of `ANSWER_COLUMNS` that a file has.
        quoting: As in `tables.iterate_rows`.
        dev_fraction: Share of the contexts that is set aside, above 0 and below 1.
        seed: Chooses the contexts that are set aside.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: A file, a column or a value cannot be used, with the place and the remedy.
    """
    check_dev_fraction(dev_fraction)
    if len(label) > 1:
        raise InputError(f"--label names {len(label)} columns ({', '.join(label)}); choose the one with the answers")
    splits: dict[str, Split] = {}
    for name, path in (("train", train), ("dev", dev), ("test", test)):
        if path is not None:
            answers = "" if _is_json(path) else _answer_column(name, path, label, quoting)
            splits[name] = _split(name, path, _file_questions(path, text, answers, quoting))
    notes: list[str] = []
    if dev is None:
        splits["train"], splits["dev"] = _set_aside(splits["train"], dev_fraction, seed, notes)
    return _task_data("question-answering", splits, notes)


def iterate_questions(
    path: Path, *, text: tuple[str, ...] = (), quoting: Quoting = "auto"
) -> Iterator[tuple[str, str, str]]:
    """Yields the id, question and context of each question of a file as for `read_questions`; streams rows.

    The id is the question's 0-based number if the file has none. Raises as `read_questions` does.
    """
    for id, question in _identified(path, _file_questions(path, text, "", quoting)):
        yield id, question.question, question.context


def is_recoverable(context: str, answer: Answer) -> bool:
    """Whether the words at an answer's place contain its text, ignoring case and amounts of whitespace.

    The published code trains on such answers only. Words are those of `chunks.words_of`.
    """
    if answer.start < 0:
        return False
    words = words_of(context)
    first, last = word_at(words, [answer.start, answer.start + len(answer.text) - 1])
    found = " ".join(context[start:end] for start, end in words[first : last + 1])
    return " ".join(answer.text.split()).lower() in found.lower()


def _squad_files(name: str, folder: Path) -> dict[str, dict[Path, Any]]:
    """The files of each split with their contents, from the first folder that has training files of the version."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    subfolders = [path for path in sorted(folder.iterdir()) if path.is_dir() and _is_folder_of(name, path)]
    for candidate in (*subfolders, folder):
        files = {split: _parts(name, candidate, patterns) for split, patterns in PATTERNS.items()}
        if files["train"] and not files["dev"]:
            raise FileNotFoundError(f"{candidate}: no {' or '.join(PATTERNS['dev'])} of {name}")
        if files["train"]:
            return {split: parts for split, parts in files.items() if parts}
    raise FileNotFoundError(f"{folder}: no train*.json of {name} there, nor in a folder squad or {name}")


def _is_folder_of(name: str, folder: Path) -> bool:
    letters = "".join(filter(str.isalnum, folder.name.lower()))
    return re.fullmatch(f"squad(v?{name[-1]}[01]?)?", letters) is not None


def _parts(name: str, folder: Path, patterns: Sequence[str]) -> dict[Path, Any]:
    for pattern in patterns:
        contents = {path: _read_json(path) for path in sorted(folder.glob(pattern))}
        if parts := {path: content for path, content in contents.items() if _version(path, content) == name}:
            return parts
    return {}


def _version(path: Path, content: dict[str, Any]) -> str:
    field = re.match(r"v?([12])\b", str(content.get("version")), re.IGNORECASE)
    if stated := field or re.search("v([12])", path.name, re.IGNORECASE):
        return f"squad{stated[1]}"
    return "squad2" if any("is_impossible" in entry for _, _, entry in _entries(path, content)) else "squad1"


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None
    except (ValueError, RecursionError) as error:
        remedy = "if every line is an object, name it .jsonl" if "Extra data" in str(error) else "get the file again"
        raise InputError(f"{path}: not JSON: {error}; {remedy}") from None
    if not isinstance(content, dict) or "data" not in content:
        raise InputError(f"{path}: not SQuAD's JSON, {EXPECTED}; if every line is an object, name it .jsonl")
    return content


def _entries(path: Path, content: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The place, context and object of each question."""
    for a, article in enumerate(_objects(path, content, "data", "")):
        for p, paragraph in enumerate(_objects(path, article, "paragraphs", f"data[{a}].")):
            where = f"data[{a}].paragraphs[{p}]."
            for q, entry in enumerate(_objects(path, paragraph, "qas", where)):
                yield f"{path}: {where}qas[{q}]", paragraph.get("context"), entry


def _objects(path: Path, parent: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    value = parent.get(key)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return value
    raise InputError(f"{path}: {where}{key} is not a list of objects as in SQuAD's JSON, {EXPECTED}")


def _squad_questions(path: Path, content: dict[str, Any]) -> Iterator[_Question]:
    for where, context, entry in _entries(path, content):
        answers = None if entry.get("is_impossible") else entry.get("answers")
        yield _question(where, entry.get("id"), entry.get("question"), context, answers)


def _file_questions(path: Path, text: tuple[str, ...], answers: str, quoting: Quoting) -> Iterator[_Question]:
    """The questions of a .json file or of a table; `answers` is the table's column of them, if it has one."""
    if _is_json(path):
        yield from _squad_questions(path, _read_json(path))
        return
    columns = text or TEXT_COLUMNS
    if len(columns) != 2:
        raise InputError(f"--text names {len(text)} columns ({', '.join(text)}); it has to be two: question, context")
    # Of a Parquet file, only the wanted columns are read.
    optional = column_names(path) if path.suffix.lower() == ".parquet" else ()
    wanted = (*columns, *(name for name in ("id", answers) if name in optional))
    for line, row in iterate_rows(path, wanted, quoting=quoting):
        question, context = (text_of(path, line, row, name) for name in columns)
        yield _question(place(path, line), row.get("id"), question, context, row.get(answers))


def _answer_column(name: str, path: Path, label: tuple[str, ...], quoting: Quoting) -> str:
    """The column of a table's answers; empty for a test file without them."""
    available = column_names(path, quoting=quoting)
    column = next((column for column in label or ANSWER_COLUMNS if column in available), "")
    if not column and name != "test":
        check_columns(path, available, label, "--label")
        raise InputError(
            f"{path}: no column {' or '.join(ANSWER_COLUMNS)}; {there_are(available)}; choose with --label"
        )
    return column


def _question(where: str, id: Any, question: Any, context: Any, answers: Any) -> _Question:
    if id is not None:
        if not isinstance(id, str | int):
            raise InputError(f"{where}: the id is {abbreviated(id)}; it has to be text or an integer")
        id, where = str(id), f"{where}, id {id!r}"
    for what, value in (("question", question), ("context", context)):
        if not isinstance(value, str):
            found = "missing" if value is None else abbreviated(value)
            raise InputError(f"{where}: the {what} is {found}; it has to be text")
    if not context.strip():
        raise InputError(f"{where}: the context is empty")
    return _Question(place=where, id=id, question=question, context=context, answers=answers)


def _identified(path: Path, questions: Iterable[_Question]) -> Iterator[tuple[str, _Question]]:
    """The questions with their ids, by default their numbers; raises InputError if ids repeat or there are none."""
    seen: set[str] = set()
    for number, question in enumerate(questions):
        id = str(number) if question.id is None else question.id
        if id in seen:
            raise InputError(f"{question.place}: a second question with the id {id!r}; ids have to be unique")
        seen.add(id)
        yield id, question
    if not seen:
        raise InputError(f"{path}: no questions")


def _split(name: str, path: Path, questions: Iterable[_Question], *, has_unanswerable: bool = True) -> Split:
    """A split with all annotated answers; only a test split may have none at all."""
    ids, own = zip(*_identified(path, questions), strict=True)
    answers = [_answers(question) for question in own]
    has_answers = any(answers)
    if not has_answers and name != "test":
        raise InputError(f"{path}: no question has an answer")
    if has_answers and not has_unanswerable and () in answers:
        where = own[answers.index(())].place
        raise InputError(f"{where}: no answer, but in SQuAD 1.1 every question has one; use --task squad2")
    texts: list[tuple[str, ...]] = [(question.question, question.context) for question in own]
    return Split(name=name, path=path, texts=texts, targets=_array(answers) if has_answers else None, ids=list(ids))


def _array(answers: Sequence[tuple[Answer, ...]]) -> NDArray[Any]:
    return np.fromiter(answers, dtype=object, count=len(answers))


def _answers(question: _Question) -> tuple[Answer, ...]:
    """The answers of a question but for empty ones."""
    pairs = _annotations(question.place, question.answers)
    for text, _ in pairs:
        if not isinstance(text, str):
            found = "missing" if text is None else abbreviated(text)
            raise InputError(f"{question.place}: the text of an answer is {found}; it has to be text")
    return tuple(_answer(question, text, start) for text, start in pairs if text.strip())


def _annotations(where: str, value: Any) -> list[tuple[Any, Any]]:
    """The text and the start of each answer, unchecked."""
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts, starts = value["text"], _start(value)
        if starts is None:
            starts = [None] * len(texts)
        if not isinstance(starts, list) or len(starts) != len(texts):
            raise InputError(
                f"{where}: answer_start is {abbreviated(starts)}; it has to be a list of {len(texts)}, as text is"
            )
        return list(zip(texts, starts, strict=True))
    items = value if isinstance(value, list) else [] if value is None else [value]
    return [(item.get("text"), _start(item)) if isinstance(item, dict) else (item, None) for item in items]


def _start(answer: dict[str, Any]) -> Any:
    return answer.get("answer_start", answer.get("start"))


def _answer(question: _Question, text: str, start: Any) -> Answer:
    where, context = question.place, question.context
    if start is None:
        return _located(context, text)
    if type(start) is not int:
        raise InputError(f"{where}: answer_start is {abbreviated(start)}; it has to be an integer")
    if not 0 <= start <= len(context) - len(text):
        raise InputError(
            f"{where}: the answer {abbreviated(text)} does not fit into its context of {len(context):,} characters at "
            f"answer_start {start}; count Unicode characters from 0"
        )
    return Answer(text, start)


def _located(context: str, text: str) -> Answer:
    """The first place of a text in the context, if need be in other case and spacing; at -1 if there is none."""
    start = context.find(text)
    if start < 0 and (found := re.search(r"\s+".join(map(re.escape, text.split())), context, re.IGNORECASE)):
        return Answer(found[0], found.start())
    return Answer(text, start)


def _task_data(name: str, splits: dict[str, Split], notes: list[str]) -> TaskData:
    train, dev, test = _trainable(splits["train"], notes), splits["dev"], splits.get("test")
    annotated = [split.targets for split in (train, dev) if split.targets is not None]
    has_unanswerable = name == "squad2" or not all(map(all, annotated))
    task = Task(name=name, kind="question-answering", metric="f1", has_unanswerable=has_unanswerable)
    return TaskData(task=task, train=train, dev=(dev,), test=(test,) if test else (), notes=tuple(notes))


def _trainable(train: Split, notes: list[str]) -> Split:
    """Leaves out the answers that are not recoverable, and the questions that have no others."""
    assert train.targets is not None  # only a test split may lack answers
    found = [
        tuple(answer for answer in own if is_recoverable(context, answer))
        for (_, context), own in zip(train.texts, train.targets, strict=True)
    ]
    num_lost = [len(own) - len(left) for own, left in zip(train.targets, found, strict=True)]
    if not any(found):
        raise InputError(f"{train.path}: no training question has an answer that is in its context")
    if not any(num_lost):
        return train
    kept = [row for row, left in enumerate(found) if left or not num_lost[row]]
    notes.append(
        f"{train.path}: {sum(num_lost):,} answers are not in the text at the given place, even after collapsing "
        f"whitespace and ignoring case, the first in question {train.ids[np.flatnonzero(num_lost)[0]]!r}: left out of "
        f"training, and with them {len(found) - len(kept):,} of {len(found):,} questions"
    )
    return select(dataclasses.replace(train, targets=_array(found)), train.name, kept)


def _set_aside(train: Split, fraction: float, seed: int, notes: list[str]) -> tuple[Split, Split]:
    """A training and a dev split without common contexts."""
    contexts = list(dict.fromkeys(context for _, context in train.texts))
    num_dev = min(max(1, round(len(contexts) * fraction)), len(contexts) - 1)
    if num_dev < 1:
        raise InputError(f"{train.path}: all questions have the same context; give a dev split with --dev")
    chosen = {contexts[number] for number in np.random.default_rng(seed).permutation(len(contexts))[:num_dev]}
    is_dev = np.array([context in chosen for _, context in train.texts])
    notes.append(
        f"{train.path}: {num_dev:,} of {len(contexts):,} contexts, with {is_dev.sum():,} of {len(is_dev):,} questions, "
        f"are set aside as the dev split (seed {seed}); give your own with --dev"
    )
    return select(train, "train", np.flatnonzero(~is_dev)), select(train, "dev", np.flatnonzero(is_dev))
