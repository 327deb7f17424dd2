"""Finds the best answers to questions, by a model's scores of starts and ends in the chunks of a context.

As in the published code (`finetune/qa/qa_metrics.py`), except that an answer's text is always that of its tokens: the
published code takes whole whitespace words if it cannot align normalized characters with the text's, and the first of
equal letters in a word.

Shapes: K starts per chunk, K2 ends per start.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from electra_fast.finetuning.encoding import Ints, max_context
from electra_fast.finetuning.tasks.question_features import Context, QuestionFeatures, stripped_span


class SpanScores(NamedTuple):
    """A model's scores of the best spans in each chunk: tensors of a batch, or arrays of all chunks.

    Indices are positions in the chunk's input. A span's score is the sum of its start's and its end's.
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


@dataclass(frozen=True)
class FoundAnswer:
    """A part of a context.

    Args:
        text: The text.
        start: Its first character.
        end: The character after its last.
        score: Score of its start plus that of its end.
        probability: Softmax of the scores over all answers returned with it.
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
    """Yields the `n_best` answers to each question that differ in text, best first, and the smallest null score.

    An answer has at most `max_answer_length` tokens. If no candidate is valid, the only answer is the empty text.
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
    """Returns first and last tokens of a question's possible answers, and their scores; best first, [candidates]."""
    first, length = features.first[chunks], features.num_pieces[chunks]
    place = features.context_start[chunks, None]
    start, end = scores.start_index[chunks] - place, scores.end_index[chunks] - place[:, None]  # in the chunk
    owner = max_context(list(zip(first.tolist(), length.tolist(), strict=True)), num_pieces)
    piece = np.clip(start + first[:, None], 0, num_pieces - 1)
    # The end may have more context in another chunk.
    is_start = (start >= 0) & (owner[piece] == np.arange(len(first))[:, None])
    size = end - start[..., None] + 1
    is_answer = is_start[..., None] & (size >= 1) & (size <= max_answer_length) & (end < length[:, None, None])
    chunk, start_rank, end_rank = np.nonzero(is_answer)
    sums = scores.start_score[chunks][chunk, start_rank] + scores.end_score[chunks][is_answer]
    order = np.argsort(-sums, kind="stable")
    starts, ends = piece[chunk, start_rank], end[is_answer] + first[chunk]
    return starts[order], ends[order], sums[order]


def _distinct(context: Context, text: str, starts: Ints, ends: Ints, sums: Ints, n_best: int) -> list[FoundAnswer]:
    """Returns the first `n_best` candidates whose texts differ in more than whitespace."""
    found: dict[str, tuple[int, int, float]] = {}
    for start, end, score in zip(starts.tolist(), ends.tolist(), sums.tolist(), strict=True):
        first, last = stripped_span(text, int(context.offsets[start, 0]), int(context.offsets[end, 1]))
        if first < last:  # whitespace is no answer
            found.setdefault(" ".join(text[first:last].split()), (first, last, score))
        if len(found) == n_best:
            break
    if not found:  # the published code answers "empty"
        return [FoundAnswer("", 0, 0, 0.0, 1.0)]
    scores = np.array([score for _, _, score in found.values()])
    weights = np.exp(scores - scores[0])
    pairs = zip(found.values(), (weights / weights.sum()).tolist(), strict=True)
    return [FoundAnswer(text[first:last], first, last, score, share) for (first, last, score), share in pairs]
