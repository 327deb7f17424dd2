"""Extractive question answering as in SQuAD: predicts the span of a context that answers a question."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from electra_fast.config.config import ModelConfig
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import Diverged, InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import EncodedExamples, Ints
from electra_fast.finetuning.readers.question_files import iterate_questions, read_answered, read_questions
from electra_fast.finetuning.readers.rows import Row, abbreviated, place, text_of
from electra_fast.finetuning.readers.tables import Quoting
from electra_fast.finetuning.report.sections import Section, columns, errors_section, first_rows
from electra_fast.finetuning.task import Answers, Prediction, Scores, Settings, Split, Task, rounded
from electra_fast.finetuning.tasks.answer_scores import group_sections, raw_scores, score_unit, squad_scores
from electra_fast.finetuning.tasks.question_features import (
    FoundAnswer,
    QuestionFeatures,
    SpanScores,
    best_spans,
    question_features,
    search,
    training_targets,
)
from electra_fast.finetuning.tasks.task_type import MODERN_HEAD, HfForm, Outputs, TaskType, named_split

if TYPE_CHECKING:
    from electra_fast.finetuning.model import TaskModel

# Number of characters of the context that a report shows before and after an answer.
_CONTEXT_CHARACTERS = 100
_READER = {"head.classifier.weight": "qa_outputs.weight", "head.classifier.bias": "qa_outputs.bias"}
# Parameters of the published code's head, which keep our names in a model folder.
_JOINT_HEAD = {
    f"head.{layer}.{part}": f"head.{layer}.{part}"
    for layer in ("start", "end_dense", "end", "answerable_dense", "answerable")
    for part in ("weight", "bias")
}
SETTINGS = ("doc_stride", "max_query_length", "max_answer_length", "n_best_size", "beam_size")


@dataclass(frozen=True)
class Reading:
    """A model's output for a question: the best answers, best first, and the odds that it has no answer."""

    answers: list[FoundAnswer]
    null_odds: float


class QuestionAnswering(TaskType):
    """Extracts an answer from the chunks of a context. Outputs are `Reading`s."""

    defaults = {"sequence_length": 512, "epochs": 2.0, "head_dropout": 0.0}
    read = staticmethod(read_questions)
    read_labeled = staticmethod(read_answered)
    num_texts = 2
    onnx_outputs = {"start_logits": 2, "end_logits": 2}
    hf = HfForm(
        ending="QuestionAnswering",
        head_names={
            ("bert", "transformers"): _READER,
            ("deberta", "transformers"): _READER,
            ("modernbert", "transformers"): MODERN_HEAD,
            ("bert", "published"): _JOINT_HEAD,
            ("deberta", "published"): _JOINT_HEAD,
            ("modernbert", "published"): _JOINT_HEAD,
        },
        pipeline="question-answering",
        usage="{command}, or `{class_name}.from_pretrained`, which outputs logits of an answer's start and end.",
        raw_usage=". The head is the published code's: the end of an answer depends on its start, and a classifier "
        "detects unanswerable questions.",
    )
    has_classes = False
    output_names = ("start", "end")
    prediction_settings = ("n_best", "null_threshold")
    usual_columns = (("question", "context"),)
    id_column = "id"

    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneSection) -> QuestionFeatures:
        texts = [(question, context) for question, context in split.texts]
        try:
            return question_features(
                tokenizer,
                texts,
                sequence_length=config.sequence_length,
                doc_stride=config.doc_stride,
                max_query_length=config.max_query_length,
                names=split.ids,
            )
        except InputError as error:
            raise InputError(f"{split.path}: {error}") from None

    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneSection) -> TrainingSet:
        """Returns all chunks; the targets of a chunk that contains the first answer are its span."""
        features = self.features(tokenizer, split, config)
        targets = training_targets(tokenizer, features, list(split.gold))
        notes = tuple(_answer_lengths(features, targets, config))
        return TrainingSet(features.encoded, targets, np.ones(len(targets)), notes=notes)

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneSection) -> Iterator[str]:
        num_answers = int((training_set.targets[:, 0] > 0).sum())
        yield (
            f"training chunks of at most {config.sequence_length} tokens: {len(training_set.encoded):,}, "
            f"{num_answers:,} of them with an answer"
        )
        if training_set.encoded.num_truncated:
            yield (
                f"truncated to finetune.max_query_length = {config.max_query_length} tokens: "
                f"{training_set.encoded.num_truncated:,} training questions"
            )

    def model(self, shape: ModelConfig, config: FinetuneSection, num_outputs: int) -> TaskModel:
        from electra_fast.finetuning.tasks.span_model import JointReader, TwoLogitReader  # imports torch

        if config.head == "published":
            return JointReader(shape, config.beam_size, config.answerable_weight)
        return TwoLogitReader(shape, config.beam_size, config.head_dropout)

    def of_onnx(
        self, outputs: Sequence[Ints], encoded: EncodedExamples, examples: Ints, config: FinetuneSection
    ) -> SpanScores:
        """Returns the best spans, given the start and end logits of a head of `transformers`."""
        assert encoded.second_starts is not None
        start_nW, end_nW = outputs
        lengths_n = encoded.lengths[examples]
        contexts_n = encoded.second_starts[examples]
        return best_spans(start_nW, end_nW, lengths_n, contexts_n, config.beam_size)

    def predict(self, inference: Outputs, features: QuestionFeatures, config: FinetuneSection) -> list[Reading]:
        scores = SpanScores(*inference.by_example(features.encoded))
        if not (np.isfinite(scores.start_score).all() and np.isfinite(scores.end_score).all()):
            raise Diverged("the model's outputs are not finite: try a lower finetune.learning_rate")
        limits = {"n_best": config.n_best_size, "max_answer_length": config.max_answer_length}
        readings = search(features, scores, **limits)
        if config.head == "published":  # its classifier outputs a logit
            return [Reading(best, null) for best, null in readings]
        return [Reading(best, null - best[0].score) for best, null in readings]

    def scores(
        self, task: Task, split: Split, features: QuestionFeatures, outputs: list[Reading], earlier: Scores
    ) -> dict[str, Any]:
        """Returns the scores as officially defined, and `f1_unit`; the first split decides the odds threshold."""
        odds = _odds(split, outputs) if task.has_unanswerable else None
        scores = squad_scores(split, _texts(split, outputs), odds, earlier.get("null_threshold"))
        return scores | {"f1_unit": score_unit(split)}

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        if not task.has_unanswerable or split.targets is None:
            return {}
        return dict.fromkeys(("exact_match", "f1"), float(np.mean([not answers for answers in split.gold])))

    def write_predictions(self, stem: Path, task: Task, split: Split, outputs: list[Reading], answers: Answers) -> None:
        """Writes STEM.jsonl, and the best texts and the odds of no answer in the format of the official scorer."""
        super().write_predictions(stem, task, split, outputs, answers)
        tables: dict[str, dict[str, Any]] = {"json": _texts(split, outputs)}
        if task.has_unanswerable:
            tables["null_odds.json"] = _odds(split, outputs)
        for ending, table in tables.items():
            replace_file(stem.with_name(f"{stem.name}.{ending}"), json.dumps(table, ensure_ascii=False) + "\n")

    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Makes a split of mappings with `question`, `context` and optionally `id`, or of pairs (question, context)."""
        questions = [_checked(number, example) for number, example in enumerate(examples)]
        ids = [str(question.get("id", number)) for number, question in enumerate(questions)]
        return named_split([(question["question"], question["context"]) for question in questions], ids)

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> Mapping[str, Any]:
        question, context = (text_of(path, line, row, name) for name in columns)
        if not context.strip():
            raise InputError(f"{place(path, line)}: the context is empty")
        name = row.get(self.id_column)
        return {"id": number if name is None else name, "question": question, "context": context}

    def reads_row(self, row: Row, columns: tuple[str, ...]) -> bool:
        return set(columns or ("",)) <= row.keys()

    def other_examples(self, file: Path, text: tuple[str, ...], quoting: Quoting) -> Iterator[Any]:
        for name, question, context in iterate_questions(file, text=text, quoting=quoting):
            yield {"id": name, "question": question, "context": context}

    def answers(
        self, task: Task, split: Split, features: QuestionFeatures, outputs: list[Reading], settings: Settings
    ) -> Iterator[Prediction]:
        """Yields `answer` with its place and probability, and `null_odds`; above their threshold the answer is empty.

        With the setting `n_best`, also yields the n best answers, at most `n_best_size`.
        """
        threshold = settings.get("null_threshold")
        n_best = settings.get("n_best", 1)
        if n_best < 1:
            raise InputError(f"n_best = {n_best}: must be at least 1")
        for name, reading in zip(split.ids, outputs, strict=True):
            best = [_answer(found_answer) for found_answer in reading.answers]
            is_null = threshold is not None and reading.null_odds > threshold
            answer = {"answer": "", "start": None, "end": None, "score": best[0]["score"]} if is_null else best[0]
            more = {"n_best": best[:n_best]} if n_best > 1 else {}
            yield {"id": name} | answer | {"null_odds": rounded(reading.null_odds)} | more

    def golds(self, task: Task, split: Split) -> list[list[Prediction]]:
        """Returns the annotated answers, with their starts if they are in the context."""
        return [
            [{"text": answer.text, "start": answer.start if answer.start >= 0 else None} for answer in answers]
            for answers in split.gold
        ]

    def labeled_rows(self, task: Task, split: Split) -> Iterator[dict[str, Any]]:
        for id, (question, context), answers in zip(split.ids, split.texts, split.gold, strict=True):
            texts = [answer.text for answer in answers]
            starts = [answer.start for answer in answers]
            fields = {"text": texts} if min(starts, default=0) < 0 else {"text": texts, "answer_start": starts}
            yield {"id": id, "question": question, "context": context, "answers": fields}

    def scores_of_answers(self, task: Task, split: Split, answers: Answers) -> dict[str, float]:
        """Returns exact match and F1 of answers to all questions, and to questions with and without an answer."""
        texts = {id: answer["answer"] for id, answer in zip(split.ids, answers, strict=True)}
        return squad_scores(split, texts, dict.fromkeys(texts, 0.0) if _has_unanswerable(task, split) else None, 0.0)

    def sections(self, task: Task, split: Split, answers: Answers) -> Iterator[Section]:
        texts = {id: answer["answer"] for id, answer in zip(split.ids, answers, strict=True)}
        raw = raw_scores(split, texts, has_unanswerable=_has_unanswerable(task, split))
        yield from group_sections(split, raw)
        scores = np.array([raw["f1"][id] for id in split.ids])
        wrong = np.flatnonzero(scores < 1)
        confidence = np.array([answer["score"] for answer in answers])[wrong]
        yield errors_section(
            _error(split, row, answers[row]) | {"f1": scores[row].item()}
            for row in first_rows(wrong, scores[wrong], -confidence)
        )

    def label_counts(self, task: Task, split: Split) -> dict[str, int]:
        if split.targets is None or not task.has_unanswerable:
            return {}
        num_answered = sum(map(bool, split.gold))
        return {"answer": num_answered, "no answer": len(split.gold) - num_answered}

    def settings(self, config: FinetuneSection, task: Task, scores: Scores) -> dict[str, Any]:
        chosen = {name: getattr(config, name) for name in SETTINGS}
        return chosen | {"null_threshold": scores.get("null_threshold")}

    def summary(self, task: Task, num_texts: int) -> str:
        text = "Given a question and a text, finds the part of the text that answers the question"
        return f"{text}, or reports that there is none." if task.has_unanswerable else f"{text}."


def _has_unanswerable(task: Task, split: Split) -> bool:
    return task.has_unanswerable or (split.targets is not None and not all(map(bool, split.targets)))


def _answer_lengths(questions: QuestionFeatures, targets: Ints, config: FinetuneSection) -> Iterator[str]:
    """Yields notes on answers that are too long for a prediction or complete in no chunk."""
    lengths = np.zeros(len(questions.contexts), np.int64)
    np.maximum.at(lengths, questions.question, np.where(targets[:, 0] > 0, targets[:, 1] - targets[:, 0] + 1, 0))
    if num_long := int((lengths > config.max_answer_length).sum()):
        yield (
            f"answers to {num_long:,} training questions are longer than finetune.max_answer_length = "
            f"{config.max_answer_length} tokens (longest: {lengths.max():,}), so they can never be predicted"
        )
    has_answer = np.isin(np.arange(len(lengths)), questions.question[targets[:, 2] == 0])
    if num_nowhere := int((has_answer & (lengths == 0)).sum()):
        yield (
            f"answers to {num_nowhere:,} training questions are complete in no chunk of finetune.sequence_length = "
            f"{config.sequence_length} tokens, so they are not trained; lower finetune.doc_stride to keep more of them"
        )


def _checked(number: int, example: Any) -> Mapping[str, Any]:
    if isinstance(example, (tuple, list)) and len(example) == 2:
        example = {"question": example[0], "context": example[1]}
    if not isinstance(example, Mapping) or not all(
        isinstance(example.get(key), str) for key in ("question", "context")
    ):
        problem = "must be a mapping with question and context, or a pair of both"
        raise InputError(f"example {number} = {abbreviated(example)}: {problem}")
    return example


def _answer(answer: FoundAnswer) -> Prediction:
    is_empty = answer.start == answer.end
    start, end = (None, None) if is_empty else (answer.start, answer.end)
    return {"answer": answer.text, "start": start, "end": end, "score": rounded(answer.probability)}


def _error(split: Split, row: int, answer: Prediction) -> dict[str, Any]:
    """Returns a question with its answers, and the context of the annotated or else the predicted answer."""
    question, context = split.texts[row]
    gold = split.gold[row]
    starts = (*(annotation.start for annotation in gold if annotation.start >= 0), answer["start"] or 0)
    start = max(0, starts[0] - _CONTEXT_CHARACTERS)
    end = start + 2 * _CONTEXT_CHARACTERS + len(gold[0].text if gold else answer["answer"])
    return {
        "id": split.ids[row],
        "text": question,
        "gold": list(dict.fromkeys(annotation.text for annotation in gold)),
        "answer": answer["answer"],
        "score": answer["score"],
        "context": ("…" if start else "") + context[start:end] + ("…" if end < len(context) else ""),
    } | columns(split, row)


def _texts(split: Split, outputs: Sequence[Reading]) -> dict[str, str]:
    return {name: reading.answers[0].text for name, reading in zip(split.ids, outputs, strict=True)}


def _odds(split: Split, outputs: Sequence[Reading]) -> dict[str, float]:
    return {name: reading.null_odds for name, reading in zip(split.ids, outputs, strict=True)}
