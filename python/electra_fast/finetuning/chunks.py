"""Texts longer than the model reads, as overlapping chunks.

As in the published code (`finetune/qa/qa_tasks.py`). Used for question answering, tagging and error detection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.data.corpus import Pieces
from electra_fast.finetuning.batches import EncodedExamples

Ints = NDArray[Any]


def chunk_spans(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Start and length of the chunks of `num_tokens` tokens, each of at most `room` tokens.

    A chunk starts `stride` tokens after the one before it, at most where that one ends; the last reaches the end.
    Without tokens there is no chunk. `room` and `stride` are at least 1.
    """
    spans = []
    start, end = 0, 0
    while end < num_tokens:
        end = min(start + room, num_tokens)
        spans.append((start, end - start))
        start += min(room, stride)
    return spans


def max_context(spans: Sequence[tuple[int, int]], num_tokens: int) -> Ints:
    """Index of the chunk in which each token has the most context; int64 [num_tokens].

    The context is the smaller of the numbers of tokens before and after it in the chunk, plus a hundredth of the
    chunk's length; of equal ones the first chunk's counts.
    """
    found, most = np.zeros(num_tokens, np.int64), np.full(num_tokens, -1.0)
    for index, (start, length) in enumerate(spans):
        before = np.arange(length)
        context = np.minimum(before, before[::-1]) + 0.01 * length
        window = slice(start, start + length)
        is_more = context > most[window]
        found[window][is_more] = index
        most[window][is_more] = context[is_more]
    return found


def text_chunks(
    pieces: Sequence[Pieces], special_tokens: Mapping[str, int], room: int, stride: int
) -> tuple[EncodedExamples, list[Ints]]:
    """The chunks `[CLS] pieces [SEP]` of all texts, and where each piece lies in `EncodedExamples.ids`.

    Of a piece that is in several chunks the place is that where it has the most context; int64 [tokens] for each text.
    """
    ids, places, lengths = [np.zeros(0, np.int32)], [], [0]
    cls, sep = (np.array([special_tokens[name]], np.int32) for name in ("cls", "sep"))
    begin = 0
    for own in pieces:
        spans = chunk_spans(len(own.ids), room, stride)
        # What to add to a piece's index to get its place: a place for [CLS], less the pieces before the chunk.
        shifts = []
        for start, length in spans:
            ids += [cls, own.ids[start : start + length], sep]
            lengths.append(length + 2)
            shifts.append(begin + 1 - start)
            begin += length + 2
        chosen = max_context(spans, len(own.ids))
        places.append(np.array(shifts, np.int64)[chosen] + np.arange(len(own.ids)))
    joined = np.concatenate(ids)
    return EncodedExamples(joined, np.zeros_like(joined), np.cumsum(lengths, dtype=np.int64), 0, ()), places
