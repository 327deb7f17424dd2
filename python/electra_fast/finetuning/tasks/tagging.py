"""Tagging: a class for each word of a text, from the word's first token.

Texts longer than the model's input are split into overlapping chunks. Both training and prediction take each word from
the chunk in which it has the most context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.config.config import ModelConfig
from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import Ints, text_chunks
from electra_fast.finetuning.readers.rows import Row, abbreviated, extension, place, text_of
from electra_fast.finetuning.readers.tables import Quoting
from electra_fast.finetuning.readers.tag_columns import SENTENCE_NAMES, WORD_NAMES, are_columns
from electra_fast.finetuning.readers.tag_files import iterate_tagging, read_tagged, read_tagging
from electra_fast.finetuning.readers.tag_sentences import TEXT_COLUMNS, WORD_COLUMNS
from electra_fast.finetuning.readers.words import places_of, words_of_text
from electra_fast.finetuning.report.sections import Section
from electra_fast.finetuning.task import Answers, Prediction, Scores, Settings, Split, Task, rounded
from electra_fast.finetuning.tasks.classes import NO_TARGET, class_weights, fit_temperature, softmax
from electra_fast.finetuning.tasks.entity_scores import tag_scores, tag_sections, tagged_spans
from electra_fast.finetuning.tasks.task_type import (
    CLASSIFIER,
    MODERN_HEAD,
    REMEDY,
    Features,
    HfForm,
    Outputs,
    TeachableType,
    finite,
    named_split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.finetuning.model import TaskModel

# Matches a line with a word and its tag, or a comment before such lines.
_COLUMNS = re.compile(r"\t|^\S+( \S+)* (O|[BILMESU]-\S+)$|^# |^-DOCSTART-")


@dataclass(frozen=True)
class TagFeatures(Features):
    """The chunks of all texts, and the positions of their words.

    Args:
        encoded: The chunks.
        places: Index in `encoded.ids` of each word's first token; -1 for a word without tokens, such as a control
            character; int64 [words].
        ends: Number of words up to the end of each text, int64 [n].
    """

    places: Ints
    ends: Ints

    def by_text(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        return np.split(values, self.ends[:-1])


def _first_pieces(pieces: Pieces, words: Ints) -> Ints:
    """Returns the index of the first token that overlaps each word, or -1."""
    if not len(pieces.ids):
        return np.full(len(words), -1)
    starts = pieces.offsets[:, 0]
    ends = np.maximum.accumulate(pieces.offsets[:, 1])
    nearest = np.minimum(np.searchsorted(ends, words[:, 0], side="right"), len(ends) - 1)
    overlaps = (starts[nearest] < words[:, 1]) & (ends[nearest] > words[:, 0])
    return np.where(overlaps, nearest, -1)


class Tagging(TeachableType):
    """A head on the first token of each word. Outputs are logits, float32 [words, C]."""

    defaults = {"sequence_length": 256}
    read = staticmethod(read_tagging)
    read_labeled = staticmethod(read_tagged)
    num_texts = 1
    onnx_outputs = {"logits": 3}
    hf = HfForm(
        ending="TokenClassification",
        head_names={
            ("bert", "transformers"): CLASSIFIER,
            ("deberta", "transformers"): CLASSIFIER,
            ("modernbert", "transformers"): MODERN_HEAD,
            ("modernbert", "published"): CLASSIFIER,
        },
        pipeline="token-classification",
        entity_options=', aggregation_strategy="first"',
    )
    formats = (".csv", ".jsonl", ".json", ".parquet", ".arrow")
    usual_columns = tuple((name,) for name in (*WORD_COLUMNS, *TEXT_COLUMNS))

    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneSection) -> TagFeatures:
        """Splits texts into chunks `[CLS] tokens [SEP]` of at most `sequence_length`; locates the words in them."""
        assert split.words is not None
        pieces = tokenizer.encode_with_offsets([text for (text,) in split.texts])
        room = config.sequence_length - 2
        encoded, by_piece = text_chunks(pieces, tokenizer.special_tokens, room, config.doc_stride)
        places = [np.zeros(0, np.int64)]
        for text_pieces, indices, words in zip(pieces, by_piece, split.words, strict=True):
            places.append(np.append(indices, -1)[_first_pieces(text_pieces, words)])
        return TagFeatures(encoded, np.concatenate(places), np.cumsum([len(words) for words in split.words]))

    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneSection) -> TrainingSet:
        """Returns all chunks with a target at the first token of each word."""
        features = self.features(tokenizer, split, config)
        tags = np.concatenate(split.gold)
        has_token = features.places >= 0
        if not has_token.any():
            raise InputError(f"{split.path}: no word has a token; check the columns and the tokenizer")
        targets = np.full(len(features.encoded.ids), NO_TARGET)
        targets[features.places[has_token][::-1]] = tags[has_token][::-1]  # the first of words with a shared token
        is_target = targets != NO_TARGET
        by_tag, note = class_weights(config.class_weights, task.labels, targets[is_target], groups=_types(task))
        weights = np.zeros(len(targets))
        weights[is_target] = 1 if by_tag is None else by_tag[targets[is_target]]
        notes = (note,) if note else ()
        return TrainingSet(features.encoded, targets, weights, per_token=True, class_weights=by_tag, notes=notes)

    def taught_outputs(
        self, tokenizer: Tokenizer, split: Split, config: FinetuneSection, teach: Callable[[Split], NDArray[Any]]
    ) -> NDArray[Any]:
        features = self.features(tokenizer, split, config)
        outputs = teach(split)
        has_token = features.places >= 0
        by_token = np.full((len(features.encoded.ids), outputs.shape[1]), np.nan)
        by_token[features.places[has_token][::-1]] = outputs[has_token][::-1]  # as in `training_set`
        return by_token

    def selection_metric(self, task: Task, is_weighted: bool) -> str:
        return "f1_macro" if is_weighted and task.scheme == "none" else task.metric

    def validation_loss(self, task: Task, split: Split, outputs: Any, class_weights: NDArray[Any] | None) -> float:
        tags = np.concatenate(split.gold)
        weights = np.ones(len(tags)) if class_weights is None else class_weights[tags]
        likelihoods = np.take_along_axis(softmax(outputs.astype(np.float64)), tags[:, None], 1)[:, 0]
        return float(-(weights * np.log(likelihoods.clip(1e-300))).sum() / max(weights.sum(), 1e-9))

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneSection) -> Iterator[str]:
        assert split.words is not None
        num_words = sum(map(len, split.words))
        num_targets = int((training_set.targets != NO_TARGET).sum())
        chunks = f" in {len(training_set.encoded):,} chunks of at most {config.sequence_length} tokens"
        yield f"training words: {num_words:,}{chunks}"
        if num_targets < num_words:
            num_lost = num_words - num_targets
            yield f"training words without a token, or with the same token as the previous word: {num_lost:,}"

    def model(self, shape: ModelConfig, config: FinetuneSection, num_outputs: int) -> TaskModel:
        from electra_fast.finetuning.tasks.classifiers import TokenClassifier, softmax_divergence  # imports torch

        divergences = partial(softmax_divergence, temperature=config.teacher_temperature)
        return TokenClassifier(shape, config.head, num_outputs, divergences, config.head_dropout)

    def predict(self, inference: Outputs, features: TagFeatures, config: FinetuneSection) -> NDArray[Any]:
        """Returns logits for each word, float32 [words, C]; zeros for a word without tokens."""
        outputs = inference.by_token(features.encoded)
        has_token = features.places >= 0
        return np.where(has_token[:, None], outputs[features.places], 0)

    def scores(
        self, task: Task, split: Split, features: TagFeatures, outputs: Any, earlier: Scores
    ) -> dict[str, float]:
        """Returns precision, recall and F1 of entities, as in conlleval and seqeval, and the accuracy over words."""
        chosen = _continued(task, features.places, finite(outputs)).argmax(1)
        return tag_scores(task, list(split.gold), features.by_text(chosen))

    def temperature(self, split: Split, outputs: Any) -> float:
        return fit_temperature(outputs, np.concatenate(split.gold))

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        tag = np.bincount(np.concatenate(train.gold)).argmax()
        return tag_scores(task, list(split.gold), [np.full(len(tags), tag) for tags in split.gold])

    def warning(self, task: Task, outputs: Any) -> str | None:
        tags = np.unique(outputs.argmax(1))
        if len(tags) > 1 or len(outputs) < 2:
            return None
        return f"all {len(outputs):,} words are tagged {task.labels[tags[0]]!r}: {REMEDY}"

    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Makes a split of texts or lists of words."""
        texts = [_text_and_words(number, example) for number, example in enumerate(examples)]
        return named_split([(text,) for text, _ in texts], words=[words for _, words in texts])

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> str | list[str]:
        (column,) = columns
        words = row.get(column)
        if not isinstance(words, list):
            return text_of(path, line, row, column)
        for word in words:
            if not isinstance(word, str) or not word:
                raise InputError(f"{place(path, line)}: {column} = {abbreviated(word)}: must be a word")
        return words

    def reads_lines(self, path: Path, text: tuple[str, ...]) -> bool:
        return extension(path) == ".txt" and are_columns(path, text)

    def reads_row(self, row: Row, columns: tuple[str, ...]) -> bool:
        """Returns whether a row contains a sentence (a text or a list of words) and not a single word."""
        values = [row.get(name) for name in columns]
        if len(values) == 1 and isinstance(values[0], list):
            return all(isinstance(word, str) for word in values[0])
        has_word = any(name.lower() in WORD_NAMES for name in row)
        has_number = any(name.lower() in SENTENCE_NAMES for name in row if name not in columns)
        is_line = row.keys() == {"text"} and _COLUMNS.search(str(row["text"])) is not None  # may be a line of columns
        return len(values) == 1 and not has_word and not has_number and not is_line

    def other_examples(self, file: Path, text: tuple[str, ...], quoting: Quoting) -> Iterator[Any]:
        for line, words in iterate_tagging(file, text=text, quoting=quoting):
            yield line if words is None else [line[start:end] for start, end in words]

    def answers(
        self, task: Task, split: Split, features: TagFeatures, outputs: Any, settings: Settings
    ) -> Iterator[Prediction]:
        assert split.words is not None
        logits_by_text = features.by_text(_continued(task, features.places, outputs))
        for (text,), words, logits in zip(split.texts, split.words, logits_by_text, strict=True):
            yield tag_answer(text, words, logits, task.labels, task.scheme)

    def golds(self, task: Task, split: Split) -> list[list[str]]:
        return [[task.labels[tag] for tag in target] for target in split.gold]

    def labeled_rows(self, task: Task, split: Split) -> Iterator[dict[str, Any]]:
        assert split.words is not None
        for (text,), words, tags in zip(split.texts, split.words, self.golds(task, split), strict=True):
            yield {"words": [text[start:end] for start, end in words], "tags": tags}

    def scores_of_answers(self, task: Task, split: Split, answers: Answers) -> dict[str, float]:
        return tag_scores(task, list(split.gold), _tag_ids(task, answers))

    def sections(self, task: Task, split: Split, answers: Answers) -> Iterator[Section]:
        return tag_sections(task, split, _tag_ids(task, answers))

    def label_counts(self, task: Task, split: Split) -> dict[str, int]:
        """Returns the number of entities by type, or of words by tag."""
        if split.targets is None:
            return {}
        sizes = np.bincount(np.concatenate(split.gold), minlength=len(task.labels))
        is_plain = task.scheme == "none"
        counted = zip(task.labels, map(int, sizes), strict=True)
        return {label[0 if is_plain else 2 :]: size for label, size in counted if is_plain or label[:1] == "B"}

    def settings(self, config: FinetuneSection, task: Task, scores: Scores) -> dict[str, Any]:
        return {"doc_stride": config.doc_stride, "scheme": task.scheme}

    def to_transformers(
        self, architecture: str, head: str, state: Mapping[str, Tensor], width: int
    ) -> tuple[str, Mapping[str, Tensor]]:
        """Returns the head unchanged; for Electra and DebertaV2 both values of `finetune.head` are the same layer."""
        return (head if architecture == "modernbert" else "transformers"), state

    def summary(self, task: Task, num_texts: int) -> str:
        return f"Tags each word of a text with one of {', '.join(task.labels)}."


def tag_answer(text: str, words: NDArray[Any], logits: NDArray[Any], labels: Sequence[str], scheme: str) -> Prediction:
    """Returns the tags of a text's words, and its spans: entities, or all words if tags are plain labels.

    `words` are the start and end (exclusive) of each word in characters, int64 [words, 2]; `logits` are the tags',
    float [words, C]. Returns `{"words": [...], "tags": [...], "scores": [...], "spans": [{"start", "end", "text",
    "label", "score"}, ...]}`; `scores` are the probabilities of the tags, and the score of a span is their mean.
    """
    probabilities = softmax(logits.astype(np.float64))
    chosen = probabilities.argmax(1)
    tags = [labels[tag] for tag in chosen]
    best = probabilities[np.arange(len(tags)), chosen]
    spans = []
    for first, last, label in tagged_spans(tags, scheme):
        start = int(words[first, 0])
        end = int(words[last - 1, 1])
        score = rounded(best[first:last].mean())
        spans.append({"start": start, "end": end, "text": text[start:end], "label": label, "score": score})
    scores = [rounded(score) for score in best]
    return {"words": [text[start:end] for start, end in words], "tags": tags, "scores": scores, "spans": spans}


def _tag_ids(task: Task, answers: Answers) -> list[NDArray[np.int64]]:
    ids = {label: number for number, label in enumerate(task.labels)}
    return [np.array([ids[tag] for tag in answer["tags"]], np.int64) for answer in answers]


def _types(task: Task) -> dict[str, list[int]]:
    """Returns the tag ids of each entity type."""
    tags: dict[str, list[int]] = {}
    for number, label in enumerate(task.labels if task.scheme != "none" else ()):
        if label != "O":
            tags.setdefault(label[2:], []).append(number)
    return tags


def _text_and_words(number: int, example: Any) -> tuple[str, Ints]:
    """Returns a text and the places of its words; a list of words is joined with spaces."""
    if isinstance(example, str):
        return example, words_of_text(example)
    if not isinstance(example, (tuple, list)) or not all(isinstance(word, str) and word for word in example):
        raise InputError(f"example {number} = {abbreviated(example)}: must be a text or a list of words")
    return " ".join(example), places_of(example)


def _continued(task: Task, places: Ints, outputs: NDArray[Any]) -> NDArray[Any]:
    """Returns logits in which no word that shares a token with the previous word begins an entity.

    For such a word, the larger of the logits of B- and I- becomes the logit of I-.
    """
    shared = np.flatnonzero((places[1:] == places[:-1]) & (places[1:] >= 0))[:, None] + 1
    outputs = outputs.copy()
    for begin, label in enumerate(task.labels):
        inside = f"I-{label[2:]}"
        if task.scheme != "none" and label[:2] == "B-" and inside in task.labels:
            columns = np.array([begin, task.labels.index(inside)])
            outputs[shared, columns] = np.sort(outputs[shared, columns], axis=1)
    return outputs
