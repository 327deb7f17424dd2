"""Tokenized questions with the chunks of their contexts, annotated answers in chunks, and a search for answers.

Chunks equal the published code's (`finetune/qa/qa_tasks.py`). That code looks up answers among whitespace words; here
the tokens of an answer are those that overlap its characters, in any script. The search equals `qa_metrics.py`, except
that an answer's text is always the text of its tokens: the published code takes whole whitespace words if it cannot
align normalized characters with the text, and the first of equal letters in a word.

Shapes: K starts per chunk, K2 ends per start.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.data.pair_template import BERT
from electra_fast.errors import InputError
from electra_fast.finetuning.encoding import EncodedExamples, Ints, chunk_spans, max_context
from electra_fast.finetuning.task import Answer
from electra_fast.finetuning.tasks.task_type import Features

# Added to the logits of tokens that cannot be an answer, as in the published code; the logit of padding.
DISALLOWED = -1000.0
NOTHING = -10_000.0
# Minimum number of context tokens in a full chunk after the longest question.
_LEAST_ROOM = 8
# Number of contexts that are tokenized together.
_BATCH = 1024


@dataclass(frozen=True)
class Context:
    """A tokenized context.

    Args:
        ids: Token ids, int32 [tokens].
        offsets: Start and end (exclusive) of each token in characters, without surrounding whitespace, but with
            subsequent marks and letters that normalization drops or merges into the token; equal for a token of
            whitespace. int32 [tokens, 2].
    """

    ids: Ints
    offsets: Ints


@dataclass(frozen=True)
class QuestionFeatures(Features):
    """The chunks of all questions, in order.

    Args:
        encoded: Each chunk as `[CLS] question [SEP] chunk [SEP]`; `num_truncated` counts questions.
        question: Index of each chunk's question, ascending, int64 [chunks].
        first: Piece of the context at which each chunk begins, int64 [chunks].
        context_start: Position of the piece `first` in the chunk's input, int64 [chunks].
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
            f"finetune.sequence_length = {sequence_length}: must be at least {sequence_length - room + _LEAST_ROOM} "
            f"with finetune.max_query_length = {max_query_length}; raise it, or lower finetune.max_query_length"
        )
    contexts = _contexts(tokenizer, texts, names or [str(number) for number in range(len(texts))])
    questions = tokenizer.encode_batch([question for question, _ in texts])
    special = tokenizer.special_tokens
    cls = np.array([special["cls"]], np.int32)
    sep = np.array([special["sep"]], np.int32)
    ids = [np.zeros(0, np.int32)]
    chunks = []
    for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        head = np.concatenate((cls, question[:max_query_length], *[sep] * template.num_separators))
        for first, length in chunk_spans(len(context.ids), sequence_length - len(head) - 1, doc_stride):
            ids += [head, context.ids[first : first + length], sep]
            chunks.append((number, first, len(head), length + 1))
    chunks_n4 = np.array(chunks, np.int64).reshape(-1, 4)
    owners, firsts, context_starts, _ = chunks_n4.T
    num_truncated = sum(len(question) > max_query_length for question in questions)
    types = np.repeat(np.tile(np.array([0, template.second_type], np.int32), len(owners)), chunks_n4[:, 2:].flatten())
    offsets = np.append(0, chunks_n4[:, 2:].sum(axis=1).cumsum())
    encoded = EncodedExamples(np.concatenate(ids), types, offsets, num_truncated, (), context_starts)
    return QuestionFeatures(encoded, owners, firsts, context_starts, contexts, texts)


def _contexts(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Context]:
    distinct = list(dict.fromkeys(context for _, context in texts))
    pieces: list[Pieces] = []
    for start in range(0, len(distinct), _BATCH):
        pieces += tokenizer.encode_with_offsets(distinct[start : start + _BATCH])
    by_text = dict(zip(distinct, pieces, strict=True))
    for name, (_, context) in zip(names, texts, strict=True):
        if not (context.strip() and len(by_text[context].ids)):
            raise InputError(f"question {name}: its context has no tokens; remove the question")
    context_of = {text: Context(pieces_.ids, _visible(text, pieces_.offsets)) for text, pieces_ in by_text.items()}
    return [context_of[context] for _, context in texts]


def _visible(text: str, offsets: Ints) -> Ints:
    """Converts offsets of the tokenizer to the offsets of a `Context`."""
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
    """Returns a span without whitespace at its ends; empty if it only contains whitespace."""
    part = text[first:end].lstrip()
    return end - len(part), end - len(part) + len(part.rstrip())


def training_targets(tokenizer: Tokenizer, features: QuestionFeatures, answers: Sequence[tuple[Answer, ...]]) -> Ints:
    """Returns start and end of the first answer in each chunk, and whether it is unanswerable; int64 [chunks, 3].

    Start and end are 0, the position of [CLS], if the chunk does not contain the complete answer. A chunk is
    unanswerable only if its question has no answer.
    """
    spans = np.full((len(answers), 2), -1)
    for number, (context, annotated) in enumerate(zip(features.contexts, answers, strict=True)):
        if annotated:
            spans[number] = _answer_pieces(context, annotated[0])
    is_impossible = spans[features.question, 0] < 0
    start, end = (spans[features.question] - features.first[:, None]).T
    is_inside = (start >= 0) & (start <= end) & (end < features.num_pieces)
    positions = [np.where(is_inside, features.context_start + piece, 0) for piece in (start, end)]
    return np.stack([*positions, is_impossible], axis=1)


def _answer_pieces(context: Context, answer: Answer) -> tuple[int, int]:
    """Returns the first and last token that overlap an answer without its outer whitespace; 0 and -1 if none do."""
    start, stop = stripped_span(answer.text, 0, len(answer.text))
    first, end = context.offsets.T
    overlapping = np.flatnonzero((first < answer.start + stop) & (end > answer.start + start) & (first < end))
    return (int(overlapping[0]), int(overlapping[-1])) if len(overlapping) else (0, -1)


class SpanScores(NamedTuple):
    """A model's scores of the best spans in each chunk: tensors of a batch, or arrays of all chunks.

    Indices are positions in the chunk's input. A span's score is the sum of its start score and its end score.
    """

    start_index: Any
    """Candidates for the first piece of an answer, int64 [chunks, K]."""
    start_score: Any
    """float32 [chunks, K]."""
    end_index: Any
    """For each start, candidates for the last piece, int64 [chunks, K, K2]."""
    end_score: Any
    """float32 [chunks, K, K2]."""
    null_score: Any
    """Score of no answer, float32 [chunks]."""


def best_spans(start_nW: Ints, end_nW: Ints, lengths_n: Ints, contexts_n: Ints, beam_size: int) -> SpanScores:
    """Returns the spans that `span_model.TwoLogitReader` finds in chunks, given logits of starts and ends.

    Args:
        start_nW: Logits of starts, fp32, with any values on padding.
        end_nW: Logits of ends, likewise.
        lengths_n: Number of tokens of each chunk.
        contexts_n: Position of the context in each chunk.
        beam_size: Number of starts and of ends.
    """
    position_W = np.arange(start_nW.shape[1])
    is_allowed_nW = (position_W >= contexts_n[:, None]) | (position_W == 0)
    penalty_nW = np.where(is_allowed_nW, np.float32(0), np.float32(DISALLOWED))
    is_token_nW = position_W < lengths_n[:, None]
    missing = max(0, beam_size - len(position_W))

    def best(logits_nW: Ints) -> tuple[Ints, Ints]:
        grid_nW = np.where(is_token_nW, logits_nW + penalty_nW, np.float32(NOTHING))
        grid_nW = np.pad(grid_nW, ((0, 0), (0, missing)), constant_values=NOTHING)
        index_nK = np.argsort(-grid_nW, axis=1, kind="stable")[:, :beam_size]
        return index_nK, np.take_along_axis(grid_nW, index_nK, 1)

    starts = best(start_nW)
    ends = best(end_nW)
    every = (len(lengths_n), beam_size, beam_size)
    end_index, end_score = (np.broadcast_to(grid[:, None], every) for grid in ends)
    return SpanScores(*starts, end_index, end_score, start_nW[:, 0] + end_nW[:, 0])


@dataclass(frozen=True)
class FoundAnswer:
    """A part of a context with the sum of its start score and end score.

    `probability` is the softmax of the scores of all answers to the question.
    """

    text: str
    start: int
    end: int
    score: float
    probability: float


def search(
    features: QuestionFeatures,
    scores: SpanScores,
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
) -> Iterator[tuple[list[FoundAnswer], float]]:
    """Yields the `n_best` answers to each question with distinct texts, best first, and the smallest null score.

    An answer has at most `max_answer_length` tokens. Without a valid candidate, the only answer is the empty text.
    """
    bounds = np.searchsorted(features.question, np.arange(len(features.texts) + 1))
    for number, (_, text) in enumerate(features.texts):
        chunks = slice(*bounds[number : number + 2])
        context = features.contexts[number]
        starts, ends, sums = _candidates(features, scores, chunks, len(context.ids), max_answer_length)
        yield _distinct(context, text, starts, ends, sums, n_best), float(scores.null_score[chunks].min())


def _candidates(
    features: QuestionFeatures, scores: SpanScores, chunks: slice, num_pieces: int, max_answer_length: int
) -> tuple[Ints, Ints, Ints]:
    """Returns first and last tokens of possible answers to a question and their scores, [candidates], best first."""
    first = features.first[chunks]
    length = features.num_pieces[chunks]
    place = features.context_start[chunks, None]
    # Pieces within the chunk.
    start = scores.start_index[chunks] - place
    end = scores.end_index[chunks] - place[:, None]
    owner = max_context(list(zip(first.tolist(), length.tolist(), strict=True)), num_pieces)
    piece = np.clip(start + first[:, None], 0, num_pieces - 1)
    # The end may have more context in another chunk.
    is_start = (start >= 0) & (owner[piece] == np.arange(len(first))[:, None])
    size = end - start[..., None] + 1
    is_answer = is_start[..., None] & (size >= 1) & (size <= max_answer_length) & (end < length[:, None, None])
    chunk, start_rank, end_rank = np.nonzero(is_answer)
    sums = scores.start_score[chunks][chunk, start_rank] + scores.end_score[chunks][is_answer]
    order = np.argsort(-sums, kind="stable")
    starts = piece[chunk, start_rank]
    ends = end[is_answer] + first[chunk]
    return starts[order], ends[order], sums[order]


def _distinct(context: Context, text: str, starts: Ints, ends: Ints, sums: Ints, n_best: int) -> list[FoundAnswer]:
    """Returns the first `n_best` candidates whose texts differ in more than whitespace."""
    spans: dict[str, tuple[int, int, float]] = {}
    for start, end, score in zip(starts.tolist(), ends.tolist(), sums.tolist(), strict=True):
        first, last = stripped_span(text, int(context.offsets[start, 0]), int(context.offsets[end, 1]))
        if first < last:  # whitespace is not an answer
            spans.setdefault(" ".join(text[first:last].split()), (first, last, score))
        if len(spans) == n_best:
            break
    if not spans:  # the published code answers "empty"
        return [FoundAnswer("", 0, 0, 0.0, 1.0)]
    scores = np.array([score for _, _, score in spans.values()])
    weights = np.exp(scores - scores[0])
    pairs = zip(spans.values(), (weights / weights.sum()).tolist(), strict=True)
    return [FoundAnswer(text[first:last], first, last, score, share) for (first, last, score), share in pairs]
