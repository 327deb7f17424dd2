"""Tagging: a class for each word of a text, from the word's first piece.

Texts that are longer than the model reads become chunks that overlap; a word counts in the chunk in which it has the
most context, in training as in prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.config.config import ModelConfig
from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.chunks import text_chunks
from electra_fast.finetuning.config import FinetuneConfig
from electra_fast.finetuning.inference import token_predictions
from electra_fast.finetuning.model import TaskModel, TokenClassifier
from electra_fast.finetuning.readers.tables import Quoting, Row, abbreviated, extension, place, text_of
from electra_fast.finetuning.readers.tag_columns import are_columns
from electra_fast.finetuning.readers.tag_files import iterate_tagging
from electra_fast.finetuning.readers.tag_sentences import TEXT_COLUMNS, WORD_COLUMNS, places_of, words_of_text
from electra_fast.finetuning.task import Split, Task
from electra_fast.finetuning.tasks.answers import Answer, tag_answer
from electra_fast.finetuning.tasks.losses import NO_TARGET
from electra_fast.finetuning.tasks.metrics import REMEDY, finite
from electra_fast.finetuning.tasks.tag_scores import tag_scores
from electra_fast.finetuning.tasks.task_type import Features, Method
from electra_fast.finetuning.training.training_set import TrainingSet
from electra_fast.model.compute import ComputeConfig

Ints = NDArray[Any]
# What a line of text hardly has, and one with a word and its tag, or a comment before those, does.
_COLUMNS = re.compile(r"\t|^\S+( \S+)* (O|[BILMESU]-\S+)$|^# |^-DOCSTART-")


@dataclass(frozen=True)
class TagFeatures(Features):
    """The chunks of all texts, and where their words are.

    Args:
        encoded: The chunks.
        places: Where in `encoded.ids` the first piece of each word lies that counts; -1 for a word without pieces,
            such as a control character; int64 [words].
        ends: How many words there are up to the end of each text, int64 [n].
    """

    places: Ints
    ends: Ints

    def by_text(self, values: NDArray[Any]) -> list[NDArray[Any]]:
        """Values of words, [words, ...], as one array per text."""
        return np.split(values, self.ends[:-1])


def tag_features(
    tokenizer: Tokenizer, texts: Sequence[str], words: Sequence[Ints], sequence_length: int, doc_stride: int
) -> TagFeatures:
    """Cuts texts into chunks `[CLS] pieces [SEP]` of at most `sequence_length` tokens and finds the words' pieces.

    Args:
        tokenizer: The model's.
        texts: Texts.
        words: Of each text the first and past-the-last characters of its words, [words, 2].
        sequence_length: Of a chunk.
        doc_stride: Tokens from the start of one chunk to that of the next.
    """
    pieces = tokenizer.encode_with_offsets(texts)
    encoded, places = text_chunks(pieces, tokenizer.special_tokens, sequence_length - 2, doc_stride)
    found = [
        np.append(place, -1)[_first_pieces(own, spans)] for own, place, spans in zip(pieces, places, words, strict=True)
    ]
    ends = np.cumsum([len(each) for each in words])
    return TagFeatures(encoded, np.concatenate([np.zeros(0, np.int64), *found]), ends)


def _first_pieces(pieces: Pieces, words: Ints) -> Ints:
    """Index of the first piece that overlaps each word; -1 where there is none."""
    if not len(pieces.ids):
        return np.full(len(words), -1)
    starts, ends = pieces.offsets[:, 0], np.maximum.accumulate(pieces.offsets[:, 1])
    found = np.minimum(np.searchsorted(ends, words[:, 0], side="right"), len(ends) - 1)
    overlaps = (starts[found] < words[:, 1]) & (ends[found] > words[:, 0])
    return np.where(overlaps, found, -1)


def _text_and_words(number: int, example: Any) -> tuple[str, Ints]:
    """A text and the characters of its words; words that are given are separated by spaces."""
    if isinstance(example, str):
        return example, words_of_text(example)
    if not isinstance(example, (tuple, list)) or not all(isinstance(word, str) and word for word in example):
        raise InputError(f"example {number} is {abbreviated(example)}; it must be a text or a list of words")
    return " ".join(example), places_of(example)


def _continued(task: Task, places: Ints, outputs: NDArray[Any]) -> NDArray[Any]:
    """The logits with those of B- and I- in order where a word shares the piece before: it begins no entity."""
    shared = np.flatnonzero((places[1:] == places[:-1]) & (places[1:] >= 0))[:, None] + 1
    outputs = outputs.copy()
    for begin, label in enumerate(task.labels):
        inside = f"I-{label[2:]}"
        if task.scheme != "none" and label[:2] == "B-" and inside in task.labels:
            columns = np.array([begin, task.labels.index(inside)])
            outputs[shared, columns] = np.sort(outputs[shared, columns], axis=1)
    return outputs


class Tagging(Method):
    """A head on the words' first pieces. Outputs are logits, float32 [words, C]."""

    formats = (".csv", ".jsonl", ".json", ".parquet", ".arrow")
    usual_columns = tuple((name,) for name in (*WORD_COLUMNS, *TEXT_COLUMNS))

    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneConfig) -> TagFeatures:
        """Tokenizes a split."""
        assert split.words is not None
        texts = [text for (text,) in split.texts]
        return tag_features(tokenizer, texts, split.words, config.sequence_length, config.doc_stride)

    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneConfig) -> TrainingSet:
        """All chunks, with a target at the first piece of each word."""
        if config.class_weights != "none":
            raise InputError(f"finetune.class_weights = {config.class_weights!r} is for classification, not tagging")
        features = self.features(tokenizer, split, config)
        assert split.targets is not None
        tags = np.concatenate(split.targets)
        found = features.places >= 0
        if not found.any():
            raise InputError(f"{split.path}: no word has a token; check the columns and the tokenizer")
        targets = np.full(len(features.encoded.ids), NO_TARGET)
        targets[features.places[found][::-1]] = tags[found][::-1]  # of words that share a token, the first counts
        return TrainingSet(features.encoded, targets, (targets != NO_TARGET).astype(np.float64), per_token=True)

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneConfig) -> Iterator[str]:
        """How many words and chunks there are."""
        assert split.words is not None
        num_words, num_targets = sum(map(len, split.words)), int(training_set.weights.sum())
        chunks = f" in {len(training_set.encoded):,} chunks of at most {config.sequence_length} tokens"
        yield f"training words: {num_words:,}{chunks}"
        if num_targets < num_words:
            yield f"training words that have no token or share one with the word before: {num_words - num_targets:,}"

    def model(self, shape: ModelConfig, config: FinetuneConfig, num_outputs: int) -> TaskModel:
        """The network, with parameters of any value."""
        return TokenClassifier(shape, config.head, num_outputs, config.head_dropout)

    def predict(
        self,
        model: TaskModel,
        features: TagFeatures,
        config: FinetuneConfig,
        compute: ComputeConfig,
        before_batch: Callable[[], None] = lambda: None,
    ) -> NDArray[Any]:
        """Logits of the words, float32 [words, C]; zeros, so that the first tag wins, for a word without pieces."""
        outputs = token_predictions(model, features.encoded, compute, before_batch)
        found = features.places >= 0
        return np.where(found[:, None], outputs[features.places], 0)

    def scores(
        self, task: Task, split: Split, features: TagFeatures, outputs: Any, earlier: Mapping[str, Any]
    ) -> dict[str, float]:
        """Precision, recall and F1 of entities as conlleval and seqeval have them, and the words' accuracy."""
        assert split.targets is not None
        chosen = _continued(task, features.places, finite(outputs)).argmax(1)
        return tag_scores(task, list(split.targets), features.by_text(chosen))

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        """Of the most frequent tag."""
        assert train.targets is not None and split.targets is not None
        tag = np.bincount(np.concatenate(train.targets)).argmax()
        return tag_scores(task, list(split.targets), [np.full(len(tags), tag) for tags in split.targets])

    def warning(self, task: Task, outputs: Any) -> str | None:
        """Whether all words have the same tag."""
        tags = np.unique(outputs.argmax(1))
        if len(tags) > 1 or len(outputs) < 2:
            return None
        return f"all {len(outputs):,} words are tagged {task.labels[tags[0]]!r}: {REMEDY}"

    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Examples are texts, or lists of words."""
        found = [_text_and_words(number, example) for number, example in enumerate(examples)]
        texts: list[tuple[str, ...]] = [(text,) for text, _ in found]
        ids = [str(number) for number in range(len(found))]
        words = [words for _, words in found]
        return Split(name="predict", path=Path("predict"), texts=texts, targets=None, ids=ids, words=words)

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> str | list[str]:
        """A text, or the words of a sentence."""
        (column,) = columns
        words = row.get(column)
        if not isinstance(words, list):
            return text_of(path, line, row, column)
        for word in words:
            if not isinstance(word, str) or not word:
                raise InputError(f"{place(path, line)}: {column!r} has {abbreviated(word)}, which is not a word")
        return words

    def reads_lines(self, path: Path, text: tuple[str, ...]) -> bool:
        """Whether a .txt file has a word per line."""
        return extension(path) == ".txt" and are_columns(path, text)

    def reads_row(self, row: Row, columns: tuple[str, ...]) -> bool:
        """Whether it holds a sentence as text or as a list of words, and seems to hold no single word."""
        values = [row.get(name) for name in columns]
        if len(values) == 1 and isinstance(values[0], list):
            return all(isinstance(word, str) for word in values[0])
        has_word = any(re.match("words?$|tokens?$|form$", name, re.IGNORECASE) for name in row)
        has_number = any(name.lower().startswith("sent") for name in row if name not in columns)
        is_line = row.keys() == {"text"} and _COLUMNS.search(str(row["text"])) is not None  # maybe of columns
        return len(values) == 1 and not has_word and not has_number and not is_line

    def other_examples(self, file: Path, text: tuple[str, ...], quoting: Quoting) -> Iterator[Any]:
        """Those of column files and annotation tools."""
        for line, words in iterate_tagging(file, text=text, quoting=quoting):
            yield line if words is None else [line[start:end] for start, end in words]

    def answers(
        self, task: Task, split: Split, features: TagFeatures, outputs: Any, settings: Mapping[str, Any]
    ) -> Iterator[Answer]:
        """The tags of the words, and the spans that they delimit."""
        assert split.words is not None
        logits_by_text = features.by_text(_continued(task, features.places, outputs))
        for (text,), words, logits in zip(split.texts, split.words, logits_by_text, strict=True):
            yield tag_answer(text, words, logits, task.labels, task.scheme)

    def settings(self, config: FinetuneConfig, task: Task, scores: Any) -> dict[str, Any]:
        """How long texts are cut, and whether tags delimit entities."""
        return {"doc_stride": config.doc_stride, "scheme": task.scheme}
