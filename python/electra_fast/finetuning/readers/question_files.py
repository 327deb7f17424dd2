"""Reads questions about contexts as a task: the files of SQuAD, and a user's own in its format or as rows of a table.

Annotated answers that are not in their context are left out of training but kept for scoring.
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

# SQuAD's files by split; a pattern is used if those before it match nothing.
PATTERNS = {"train": ("train*.json",), "dev": ("dev*.json", "validation*.json"), "test": ("test*.json",)}
# If more of the training questions have no answer in their context, the file is probably broken.
MAX_LOST_SHARE = 0.05

_Annotated = tuple[Question, tuple[Annotation, ...]]


def read_squad(name: str, folder: Path) -> TaskData:
    """Reads `squad1` or `squad2` from a folder, or from one in it that is called `squad`, `squad2`, `SQuAD-v2.0` or so.

    The files are train*.json, dev*.json or validation*.json, and possibly test*.json; several of a split are its parts.
    Files of the other version may lie beside them: the version is in a file's field `version`, else in its name
    (`v1`, `v2`), else it is 2.0 if a question has the field `is_impossible`.

    Raises FileNotFoundError, or InputError if a file cannot be used, with the place and the remedy.
    """
    parser = _QuestionParser("auto", 0, "", Columns(), name == "squad2")
    splits = dict[str, Split]()
    for split, parts in _squad_files(name, folder).items():
        found = json_entries((each for objects in parts.values() for each in objects), parser.names)
        splits[split] = parser.examples(split, next(iter(parts)), found, has_columns=split != "train")
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
    """Reads a user's own questions, from .json files like SQuAD's or from .jsonl, .parquet, .tsv or .csv rows.

    A .json file may also be a list or have an object per line. Lists and rows may have questions, or contexts with
    `qas`, as those of CMRC 2018 and MRQA (.jsonl.gz) do. Rows may have a column `id`.

    An answer is a text, whose first occurrence in the context is taken, or an object with `text` and `answer_start` (or
    `start`), its first character in the context; offsets in other units are recognized. Several answers are a list, or
    an object of lists as in the `datasets` of Hugging Face. A question without an answer is unanswerable.

    `text` are the columns of the question and the context, `label` is that of the answers; empty for the usual ones of
    `question_entries`. Whole contexts are set aside. Other arguments, and what it raises, are those of `own_data.read`.
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
    """Reads questions with their answers, to score a trained model; returns them and notes for the user.

    `trained` are the columns that were chosen in training. Other arguments, and what it raises, are those of
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
    """Yields the id, question and context of each question of a file as for `read_questions`; streams rows.

    The id is the question's 0-based number if the file has none. Raises as `read_questions` does.
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
    """Questions about contexts, of which `whole_contexts` are set aside."""

    names: Columns
    has_unanswerable: bool | None = None
    """None where the questions show it."""

    def read(self, paths: Mapping[str, Path]) -> dict[str, Split]:
        splits = {}
        for name, path in paths.items():
            has_columns = name != "train" or "dev" not in paths
            options = {"needs_answers": name != "test", "has_others": has_columns}
            found = entries(path, self.names, self.quoting, self.bad, self.notes, **options)
            splits[name] = self.examples(name, path, found, has_columns=has_columns)
        return splits

    def examples(self, name: str, path: Path, found: Iterable[Entry], *, has_columns: bool) -> Split:
        """Returns a split with all annotated answers, in training only those in their context.

        Only a test split may have none at all.
        """
        questions: dict[str, _Annotated] = {}
        seen = set[str]()
        for number, entry in enumerate(found):
            with self.bad.collect():
                question = question_of(entry, self.names)
                questions[_new_id(number, question, seen)] = question, annotations_of(question, self.names)
        if not questions:
            self.bad.finish()
            raise InputError(f"{path}: no questions")
        answers: dict[str, tuple[Answer, ...]] = dict.fromkeys(questions, ())
        if any(own for _, own in questions.values()):
            answers = self._placed(path, questions)
            if name == "train":
                answers = self._trainable(path, questions, answers)
        has_answers = any(answers.values())
        if not has_answers and name != "test":
            self.bad.finish()
            raise InputError(f"{path}: no question has an answer")
        texts: list[tuple[str, ...]] = [(questions[id][0].question, questions[id][0].context) for id in answers]
        targets = np.fromiter(answers.values(), dtype=object, count=len(answers)) if has_answers else None
        others = [others_of(questions[id][0].fields, self.names.all_names()) for id in answers] if has_columns else None
        return Split(name=name, path=path, texts=texts, targets=targets, ids=list(answers), columns=others)

    def _placed(self, path: Path, questions: Mapping[str, _Annotated]) -> dict[str, tuple[Answer, ...]]:
        """Returns the answers by id at the places of their texts, -1 for none; leaves bad questions out."""
        unit = offset_unit((question.context, each) for question, own in questions.values() for each in own)
        if unit != CHARACTERS:
            self.notes.append(f"{path}: answer_start counts {unit}, as the texts of the answers show; converted")
        answers = dict[str, tuple[Answer, ...]]()
        moved = list[str]()
        for id, (question, own) in questions.items():
            with self.bad.collect():
                if not own and self.has_unanswerable is False:
                    why = "no answer, but in SQuAD 1.1 every question has one; use --task squad2"
                    raise InputError(f"{question.place}: {why}")
                if not own and is_impossible(question) is False:
                    why = "is_impossible is false, but there is no answer; correct one of them"
                    raise InputError(f"{question.place}: {why}")
                found = [place_answer(question.place, question.context, each, unit) for each in own]
                moved += [id for _, is_moved in found if is_moved]
                answers[id] = tuple(answer for answer, _ in found)
        if moved:
            self.notes.append(
                f"{path}: {len(moved):,} answers are elsewhere in their context than at answer_start, the first in "
                f"question {moved[0]!r}: taken where they are"
            )
        return answers

    def _trainable(
        self, path: Path, questions: Mapping[str, _Annotated], answers: Mapping[str, tuple[Answer, ...]]
    ) -> dict[str, tuple[Answer, ...]]:
        """Leaves out the answers that are not in their context, and the questions that have no others."""
        found = {id: tuple(answer for answer in own if answer.start >= 0) for id, own in answers.items()}
        lost = {id: None for id, own in answers.items() if own and not found[id]}
        num_lost = sum(map(len, answers.values())) - sum(map(len, found.values()))
        if len(lost) > MAX_LOST_SHARE * sum(map(bool, answers.values())):
            for id in lost:
                question, (first, *_) = questions[id]
                with self.bad.collect():
                    at = "" if first.start is None else f", at answer_start {first.start} or elsewhere"
                    what = f"the answer {abbreviated(first.text)} is not in its context{at}"
                    raise InputError(f"{question.place}: {what}")
        elif num_lost:
            first_id = next(id for id, own in answers.items() if len(own) > len(found[id]))
            self.notes.append(
                f"{path}: {num_lost:,} answers are not in their context, even in other case or spacing, the first in "
                f"question {first_id!r}: left out of training, and with them {len(lost):,} of {len(answers):,} "
                "questions"
            )
        return {id: own for id, own in found.items() if id not in lost}

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
            raise InputError(f"{whole.path}: all questions have the same context; give a dev split with --dev")
        num_dev, num_all = (len({*_contexts(each)}) for each in (select(whole, "dev", chosen), whole))
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
    raise FileNotFoundError(f"{folder}: no train*.json of {name} there, nor in a folder squad or {name}")


def held_version(folder: Path) -> str:
    """Returns which SQuAD a folder holds, `squad1` or `squad2`; raises InputError for both, FileNotFoundError for none.

    Unlike `read_squad`, it reads no more than the training files.
    """
    names = ("squad1", "squad2")
    held = [name for name in names if any(_parts(name, each, PATTERNS["train"]) for each in _candidates(name, folder))]
    if len(held) == 2:
        raise InputError(f"{folder}: holds both; choose with --task squad1 or --task squad2")
    if not held:
        raise FileNotFoundError(f"{folder}: no train*.json of SQuAD there, nor in a folder squad, squad1 or squad2")
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
    found = json_entries(objects, Columns())
    return "squad2" if any("is_impossible" in fields for _, _, fields in found) else "squad1"


def _new_id(number: int, question: Question, seen: set[str]) -> str:
    id = str(number) if question.id is None else question.id
    if id in seen:
        raise InputError(f"{question.place}: a second question with the id {id!r}; ids must be unique")
    seen.add(id)
    return id


def _contexts(split: Split) -> list[str]:
    return [context for _, context in split.texts]


def _scoring_notes(split: Split) -> Iterator[str]:
    """Notes if scores compare characters rather than words, and questions that cannot be answered."""
    if split.targets is None:
        return
    if num_unspaced := sum(is_unspaced(context) for _, context in split.texts):
        yield (
            f"{split.path}: exact match and F1 compare characters, as CMRC 2018 does, where the context is written "
            f"without spaces: in {num_unspaced:,} of {len(split.texts):,} {split.name} questions"
        )
    if num_lost := sum(bool(own) and all(answer.start < 0 for answer in own) for own in split.targets):
        yield f"{split.path}: {num_lost:,} {split.name} questions have no answer that is in their context"
