"""Reads questions about contexts as a task, from SQuAD's files and from a user's files of that format or tables.

Answers that do not occur in their context are left out of training but kept for scoring.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.examples import (
    Fold,
    Parser,
    Trained,
    read_examples,
    validation_rows,
    whole_contexts,
)
from electra_fast.finetuning.readers.question_entries import (
    CHARACTERS,
    Annotation,
    Columns,
    Entry,
    JsonObject,
    Question,
    annotations_of,
    entries,
    is_impossible,
    json_entries,
    json_objects,
    offset_unit,
    place_answer,
    question_of,
)
from electra_fast.finetuning.readers.rows import abbreviated, others_of
from electra_fast.finetuning.readers.tables import Quoting
from electra_fast.finetuning.readers.words import is_unspaced
from electra_fast.finetuning.task import Answer, Split, Task, TaskData, check_dev_fraction, select

# SQuAD's files by split; the first pattern with a match is used.
PATTERNS = {"train": ("train*.json",), "dev": ("dev*.json", "validation*.json"), "test": ("test*.json",)}
# Above this fraction of training questions without an answer in their context, the file is probably broken.
MAX_LOST_FRACTION = 0.05

_Annotated = tuple[Question, tuple[Annotation, ...]]


def read_squad(name: str, folder: Path) -> TaskData:
    """Reads `squad1` or `squad2` from a folder, or from its subfolder `squad`, `squad2`, `SQuAD-v2.0` or similar.

    The files are train*.json, dev*.json or validation*.json, and optionally test*.json; several files of a split are
    joined. The folder may also contain the other version: a file's version is its field `version`, or in its name
    (`v1`, `v2`), or else 2.0 if a question has the field `is_impossible`.

    Raises FileNotFoundError, or InputError with the place and a remedy if a file cannot be used.
    """
    parser = _QuestionParser("auto", 0, "", Columns(), name == "squad2")
    splits = dict[str, Split]()
    for split, parts in _squad_files(name, folder).items():
        questions = json_entries((item for objects in parts.values() for item in objects), parser.names)
        splits[split] = parser.examples(split, next(iter(parts)), questions, has_columns=split != "train")
    parser.notes += parser.bad.finish()
    task = dataclasses.replace(parser.complete(parser.task(splits), splits), name=name)
    test = (splits["test"],) if "test" in splits else ()
    return TaskData(task=task, train=splits["train"], dev=(splits["dev"],), test=test, notes=tuple(parser.notes))


def read_questions(
    train: Path,
    dev: Path | None,
    test: Path | None,
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    quoting: Quoting = "auto",
    dev_fraction: float = 0.1,
    folds: Fold | None = None,
    seed: int = 0,
    skip_bad_rows: int = 0,
) -> TaskData:
    """Reads a user's questions from .json files in SQuAD's format or from .jsonl, .parquet, .tsv or .csv rows.

    A .json file may also be a list or have an object per line. Items and rows are questions, or contexts with `qas` as
    in CMRC 2018 and MRQA (.jsonl.gz). Rows may have a column `id`.

    An answer is a text (its first occurrence in the context counts), or an object with `text` and `answer_start` (or
    `start`), its first character in the context; other units are detected. Several answers are a list, or an object of
    lists as in Hugging Face's `datasets`. A question without an answer is unanswerable.

    `text` are the question and context columns, `label` is the answer column; empty for those in `question_entries`.
    Questions about a context stay in one split. The other arguments and the errors are the same as in `own_data.read`.
    """
    check_dev_fraction(dev_fraction)
    parser = _QuestionParser(quoting, skip_bad_rows, "", Columns.chosen(text, label))
    return read_examples(train, dev, test, parser, dev_fraction=dev_fraction, folds=folds, seed=seed)


def read_answered(
    task: Task,
    path: Path,
    trained: Trained,
    *,
    text: tuple[str, ...] = (),
    label: tuple[str, ...] = (),
    quoting: Quoting = "auto",
    skip_bad_rows: int = 0,
) -> tuple[Split, list[str]]:
    """Reads questions with answers to score a trained model; returns them and notes for the user.

    `trained` are the columns that were chosen in training. The other arguments and the errors are the same as in
    `read_questions`.
    """
    text = text or next(iter(trained[0]), ())
    label = label or next(iter(trained[1]), ())
    parser = _QuestionParser(quoting, skip_bad_rows, "", Columns.chosen(text, label))
    split = parser.read({"data": path})["data"]
    return split, [*parser.notes, *parser.bad.finish(), *_scoring_notes(split)]


def iterate_questions(
    path: Path, *, text: tuple[str, ...] = (), quoting: Quoting = "auto"
) -> Iterator[tuple[str, str, str]]:
    """Yields the id, question and context of each question in a file for `read_questions`; streams rows.

    Without ids in the file, they are the questions' numbers from 0. Raises the errors of `read_questions`.
    """
    columns = Columns.chosen(text)
    seen = set[str]()
    for number, entry in enumerate(entries(path, columns, quoting)):
        question = question_of(entry, columns)
        yield _new_id(number, question, seen), question.question, question.context
    if not seen:
        raise InputError(f"{path}: no questions")


@dataclass
class _QuestionParser(Parser[Split]):
    """Questions about contexts; the validation set consists of `whole_contexts`."""

    names: Columns
    has_unanswerable: bool | None = None
    """None to decide by the questions."""

    def read(self, paths: Mapping[str, Path]) -> dict[str, Split]:
        splits = {}
        for name, path in paths.items():
            has_columns = name != "train" or "dev" not in paths
            options = {"needs_answers": name != "test", "has_others": has_columns}
            questions = entries(path, self.names, self.quoting, self.bad, self.notes, **options)
            splits[name] = self.examples(name, path, questions, has_columns=has_columns)
        return splits

    def examples(self, name: str, path: Path, raw_entries: Iterable[Entry], *, has_columns: bool) -> Split:
        """Returns a split with all annotated answers; the training split only has answers that are in their context.

        Raises InputError if a split other than the test split has no answers.
        """
        questions: dict[str, _Annotated] = {}
        seen = set[str]()
        for number, entry in enumerate(raw_entries):
            with self.bad.collect():
                question = question_of(entry, self.names)
                questions[_new_id(number, question, seen)] = question, annotations_of(question, self.names)
        if not questions:
            self.bad.finish()
            raise InputError(f"{path}: no questions")
        answers: dict[str, tuple[Answer, ...]] = dict.fromkeys(questions, ())
        if any(items for _, items in questions.values()):
            answers = self._placed(path, questions)
            if name == "train":
                answers = self._trainable(path, questions, answers)
        has_answers = any(answers.values())
        if not has_answers and name != "test":
            self.bad.finish()
            raise InputError(f"{path}: no question has an answer; choose the column with --label")
        texts: list[tuple[str, ...]] = [(questions[id][0].question, questions[id][0].context) for id in answers]
        targets = np.fromiter(answers.values(), dtype=object, count=len(answers)) if has_answers else None
        others = [others_of(questions[id][0].fields, self.names.all_names()) for id in answers] if has_columns else None
        return Split(name=name, path=path, texts=texts, targets=targets, ids=list(answers), columns=others)

    def _placed(self, path: Path, questions: Mapping[str, _Annotated]) -> dict[str, tuple[Answer, ...]]:
        """Returns the answers by id with the places of their texts, -1 for none; leaves out bad questions."""
        unit = offset_unit((question.context, item) for question, items in questions.values() for item in items)
        if unit != CHARACTERS:
            self.notes.append(f"{path}: answer_start counts {unit}, judging by the answers; converted to characters")
        answers = dict[str, tuple[Answer, ...]]()
        moved = list[str]()
        for id, (question, items) in questions.items():
            with self.bad.collect():
                if not items and self.has_unanswerable is False:
                    problem = "no answer, but every question in SQuAD 1.1 has an answer; use --task squad2"
                    raise InputError(f"{question.place}: {problem}")
                if not items and is_impossible(question) is False:
                    problem = "is_impossible is false, but the question has no answer; correct one"
                    raise InputError(f"{question.place}: {problem}")
                placed = [place_answer(question.place, question.context, annotation, unit) for annotation in items]
                moved += [id for _, is_moved in placed if is_moved]
                answers[id] = tuple(answer for answer, _ in placed)
        if moved:
            self.notes.append(
                f"{path}: {len(moved):,} answers are not at answer_start but elsewhere in their context (first: "
                f"question {moved[0]!r}); their real places are used"
            )
        return answers

    def _trainable(
        self, path: Path, questions: Mapping[str, _Annotated], answers: Mapping[str, tuple[Answer, ...]]
    ) -> dict[str, tuple[Answer, ...]]:
        """Leaves out answers that are not in their context, and questions that then have no answer."""
        usable = {id: tuple(answer for answer in annotated if answer.start >= 0) for id, annotated in answers.items()}
        lost = {id: None for id, annotated in answers.items() if annotated and not usable[id]}
        num_lost = sum(map(len, answers.values())) - sum(map(len, usable.values()))
        if len(lost) > MAX_LOST_FRACTION * sum(map(bool, answers.values())):
            for id in lost:
                question, (first, *_) = questions[id]
                with self.bad.collect():
                    at = "" if first.start is None else f", at answer_start {first.start} or elsewhere"
                    message = f"the answer {abbreviated(first.text)} is not in its context{at}"
                    raise InputError(f"{question.place}: {message}")
        elif num_lost:
            first_id = next(id for id, annotated in answers.items() if len(annotated) > len(usable[id]))
            self.notes.append(
                f"{path}: {num_lost:,} answers are not in their context, even ignoring case and spacing (first: "
                f"question {first_id!r}); they are left out of training, as are {len(lost):,} of {len(answers):,} "
                "questions without another answer"
            )
        return {id: annotated for id, annotated in usable.items() if id not in lost}

    def task(self, files: dict[str, Split]) -> Task:
        return Task(name="question-answering", kind="question-answering", metric="f1")

    def split(self, name: str, file: Split, task: Task) -> Split:
        return file

    def validation_rows(
        self, whole: Split, share: float | Fold, choose: Callable[[Split, float], NDArray[np.intp]], seed: int
    ) -> NDArray[np.intp]:
        return validation_rows(whole, share, choose)

    def choose(self, whole: Split, task: Task, fraction: float, seed: int) -> NDArray[np.intp]:
        return whole_contexts(_contexts(whole), fraction, seed)

    def described_part(self, whole: Split, chosen: NDArray[np.intp]) -> str:
        if not len(chosen):
            raise InputError(f"{whole.path}: all questions have the same context; pass a validation set with --dev")
        num_dev, num_all = (len({*_contexts(part)}) for part in (select(whole, "dev", chosen), whole))
        return f"{num_dev:,} of {num_all:,} contexts, with {len(chosen):,} of {len(whole.texts):,} questions,"

    def complete(self, task: Task, splits: dict[str, Split]) -> Task:
        self.notes += [note for name in ("dev", "test") if name in splits for note in _scoring_notes(splits[name])]
        annotated = [splits[name].targets for name in ("train", "dev")]
        lack = not all(all(targets) for targets in annotated if targets is not None)
        return dataclasses.replace(task, has_unanswerable=self.has_unanswerable or lack)


def _squad_files(name: str, folder: Path) -> dict[str, dict[Path, list[JsonObject]]]:
    for candidate in _candidates(name, folder):
        files = {split: _parts(name, candidate, patterns) for split, patterns in PATTERNS.items()}
        if files["train"] and not files["dev"]:
            raise FileNotFoundError(f"{candidate}: no {' or '.join(PATTERNS['dev'])} of {name}")
        if files["train"]:
            return {split: parts for split, parts in files.items() if parts}
    raise FileNotFoundError(f"{folder}: no train*.json of {name} in this folder or in squad/ or {name}/")


def held_version(folder: Path) -> str:
    """Returns the version of SQuAD in a folder, `squad1` or `squad2`, by its training files only.

    Raises InputError for both, FileNotFoundError for none.
    """
    names = ("squad1", "squad2")
    held = [name for name in names if any(_parts(name, path, PATTERNS["train"]) for path in _candidates(name, folder))]
    if len(held) == 2:
        raise InputError(f"{folder}: contains squad1 and squad2; choose with --task squad1 or --task squad2")
    if not held:
        raise FileNotFoundError(f"{folder}: no train*.json of SQuAD in this folder or in squad/, squad1/ or squad2/")
    return held[0]


def _candidates(name: str, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder")
    letters = {path: "".join(filter(str.isalnum, path.name.lower())) for path in folder.iterdir() if path.is_dir()}
    return [*(path for path in sorted(letters) if re.fullmatch(f"squad(v?{name[-1]}[01]?)?", letters[path])), folder]


def _parts(name: str, folder: Path, patterns: Sequence[str]) -> dict[Path, list[JsonObject]]:
    for pattern in patterns:
        contents = {path: json_objects(path) for path in sorted(folder.glob(pattern))}
        if parts := {path: objects for path, objects in contents.items() if _version(path, objects) == name}:
            return parts
    return {}


def _version(path: Path, objects: list[JsonObject]) -> str:
    field = re.match(r"v?([12])\b", str(objects[0][2].get("version")), re.IGNORECASE) if objects else None
    if stated := field or re.search("v([12])", path.name, re.IGNORECASE):
        return f"squad{stated[1]}"
    questions = json_entries(objects, Columns())
    return "squad2" if any("is_impossible" in fields for _, _, fields in questions) else "squad1"


def _new_id(number: int, question: Question, seen: set[str]) -> str:
    id = str(number) if question.id is None else question.id
    if id in seen:
        raise InputError(f"{question.place}: id = {id!r}: must be unique")
    seen.add(id)
    return id


def _contexts(split: Split) -> list[str]:
    return [context for _, context in split.texts]


def _scoring_notes(split: Split) -> Iterator[str]:
    """Yields notes if scores compare characters instead of words, and if questions have no answer in their context."""
    if split.targets is None:
        return
    if num_unspaced := sum(is_unspaced(context) for _, context in split.texts):
        yield (
            f"{split.path}: exact match and F1 compare characters, as in CMRC 2018, for contexts written without "
            f"spaces: {num_unspaced:,} of {len(split.texts):,} {split.name} questions"
        )
    if num_lost := sum(bool(answers) and all(answer.start < 0 for answer in answers) for answers in split.targets):
        yield f"{split.path}: {num_lost:,} {split.name} questions have no answer in their context"
