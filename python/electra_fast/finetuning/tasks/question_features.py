"""Tokenized questions: each with the chunks of its context, and the position of the answer in a chunk.

Chunks are those of the published code (`finetune/qa/qa_tasks.py`). It looks answers up among whitespace words; here an
answer's tokens are those that overlap its characters, in any script.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.data.pair_template import BERT
from electra_fast.errors import InputError
from electra_fast.finetuning.encoding import EncodedExamples, Ints, chunk_spans
from electra_fast.finetuning.task import Answer
from electra_fast.finetuning.tasks.task_type import Features

# Minimum tokens of context in a full chunk, even after the longest question.
_LEAST_ROOM = 8
# Contexts that are tokenized together.
_BATCH = 1024


@dataclass(frozen=True)
class Context:
    """A tokenized context.

    Args:
        ids: Token ids, int32 [tokens].
        offsets: First and past-the-last character of each token, without surrounding whitespace, and with the marks and
            letters after it that normalization drops or merges into it; equal for a token of whitespace.
            int32 [tokens, 2].
    """

    ids: Ints
    offsets: Ints


@dataclass(frozen=True)
class QuestionFeatures(Features):
    """The chunks of all questions, one after another.

    Args:
        encoded: Each chunk as `[CLS] question [SEP] chunk [SEP]`; `num_truncated` counts questions.
        question: Index of each chunk's question, ascending, int64 [chunks].
        first: Piece of the context at which each chunk begins, int64 [chunks].
        context_start: Position of that piece in the chunk's input, int64 [chunks].
        contexts: The context of each question; questions about the same text share one.
        texts: The questions with their contexts.
    """

    question: Ints
    first: Ints
    context_start: Ints
    contexts: list[Context]
    texts: Sequence[tuple[str, str]]

    @cached_property
    def num_pieces(self) -> Ints:
        return self.encoded.lengths - self.context_start - 1


def question_features(
    tokenizer: Tokenizer,
    texts: Sequence[tuple[str, str]],
    *,
    sequence_length: int,
    doc_stride: int,
    max_query_length: int,
    names: Sequence[str] = (),
) -> QuestionFeatures:
    """Tokenizes pairs of a question and its context; `names` identify questions in error messages.

    Questions are truncated to `max_query_length` tokens. Contexts are split into chunks that fill `sequence_length`;
    each starts `doc_stride` tokens after the previous one.

    Raises:
        InputError: A context has no tokens, or the configuration leaves no room for it.
    """
    template = tokenizer.pair_template or BERT
    room = sequence_length - max_query_length - template.num_special
    if room < _LEAST_ROOM:
        raise InputError(
            f"finetune.sequence_length = {sequence_length} leaves room for {max(room, 0)} tokens of the context after "
            f"a question of finetune.max_query_length = {max_query_length}; make it at least "
            f"{sequence_length - room + _LEAST_ROOM}, or questions shorter"
        )
    contexts = _contexts(tokenizer, texts, names or [str(number) for number in range(len(texts))])
    questions = tokenizer.encode_batch([question for question, _ in texts])
    special = tokenizer.special_tokens
    cls, sep = np.array([special["cls"]], np.int32), np.array([special["sep"]], np.int32)
    ids, chunks = [np.zeros(0, np.int32)], []
    for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        head = np.concatenate((cls, question[:max_query_length], *[sep] * template.num_separators))
        for first, length in chunk_spans(len(context.ids), sequence_length - len(head) - 1, doc_stride):
            ids += [head, context.ids[first : first + length], sep]
            chunks.append((number, first, len(head), length + 1))
    chunks_n4 = np.array(chunks, np.int64).reshape(-1, 4)
    num_truncated = sum(len(question) > max_query_length for question in questions)
    encoded = _encoded(np.concatenate(ids), chunks_n4[:, 2:], num_truncated, template.second_type)
    question, first, context_start, _ = chunks_n4.T
    return QuestionFeatures(encoded, question, first, context_start, contexts, texts)


def _encoded(ids: Ints, lengths_n2: Ints, num_truncated: int, second_type: int) -> EncodedExamples:
    """Returns examples of two segments with these lengths, special tokens included."""
    types = np.repeat(np.tile(np.array([0, second_type], np.int32), len(lengths_n2)), lengths_n2.flatten())
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths_n2.sum(axis=1))))
    return EncodedExamples(ids, types, offsets, num_truncated, (), lengths_n2[:, 0])


def _contexts(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Context]:
    distinct = list(dict.fromkeys(context for _, context in texts))
    pieces: list[Pieces] = []
    for start in range(0, len(distinct), _BATCH):
        pieces += tokenizer.encode_with_offsets(distinct[start : start + _BATCH])
    by_text = dict(zip(distinct, pieces, strict=True))
    for name, (_, context) in zip(names, texts, strict=True):
        if not (context.strip() and len(by_text[context].ids)):
            raise InputError(f"question {name}: its context has no tokens")
    found = {text: Context(each.ids, _visible(text, each.offsets)) for text, each in by_text.items()}
    return [found[context] for _, context in texts]


def _visible(text: str, offsets: Ints) -> Ints:
    """Converts the tokenizer's offsets to those of `Context`."""
    spans = np.array([stripped_span(text, *span) for span in offsets.tolist()], np.int32).reshape(-1, 2)
    first, end = spans.T
    changes = np.zeros(len(text) + 1, np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, end, -1)
    for place in np.flatnonzero(changes.cumsum()[:-1] == 0):
        if unicodedata.category(text[place])[0] in "ML":
            end[(end == place) & (first < end)] = place + 1
    return spans


def stripped_span(text: str, first: int, end: int) -> tuple[int, int]:
    """Returns a span without whitespace at its ends; empty if there is nothing else."""
    part = text[first:end].lstrip()
    return end - len(part), end - len(part) + len(part.rstrip())


def training_targets(tokenizer: Tokenizer, features: QuestionFeatures, answers: Sequence[tuple[Answer, ...]]) -> Ints:
    """Returns start and end of the first answer in each chunk's input, and whether it is impossible; int64 [chunks, 3].

    Both are 0, the position of [CLS], in a chunk without the whole answer. A question without an answer is impossible;
    a chunk without one is not.
    """
    spans = np.full((len(answers), 2), -1)
    for number, (context, own) in enumerate(zip(features.contexts, answers, strict=True)):
        if own:
            spans[number] = _answer_pieces(context, own[0])
    is_impossible = spans[features.question, 0] < 0
    start, end = (spans[features.question] - features.first[:, None]).T
    is_inside = (start >= 0) & (start <= end) & (end < features.num_pieces)
    positions = [np.where(is_inside, features.context_start + piece, 0) for piece in (start, end)]
    return np.stack([*positions, is_impossible], axis=1)


def _answer_pieces(context: Context, answer: Answer) -> tuple[int, int]:
    """Returns the first and last tokens that overlap an answer without its outer whitespace; 0 and -1 if none does."""
    start, stop = stripped_span(answer.text, 0, len(answer.text))
    first, end = context.offsets.T
    found = np.flatnonzero((first < answer.start + stop) & (end > answer.start + start) & (first < end))
    return (int(found[0]), int(found[-1])) if len(found) else (0, -1)
