"""Tokenized examples: texts and pairs truncated to a maximum length, or long texts in overlapping chunks.

The chunks are the same as in the published code (`finetune/qa/qa_tasks.py`). Question answering, tagging and error
detection use them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.data.corpus import Pieces, Tokenizer
from electra_fast.data.pair_template import BERT

Ints = NDArray[Any]
# Texts per call of the tokenizer.
_CHUNK = 8192


@dataclass(frozen=True)
class EncodedExamples:
    """Token ids of examples, each `[CLS] text [SEP]` or a pair as the tokenizer joins it.

    Args:
        ids: Token ids of all examples, concatenated, int32.
        token_types: 1 for the second text and its [SEP], unless the tokenizer uses 0 there; otherwise 0; int32.
        offsets: Start of each example in `ids`, and the end of the last one; int64 [n + 1].
        num_truncated: Number of truncated examples.
        empty: Indices of the examples without any text token.
        second_starts: Position in each example at which its second text starts, int64 [n]; None if no model needs it.
    """

    ids: Ints
    token_types: Ints
    offsets: Ints
    num_truncated: int
    empty: tuple[int, ...]
    second_starts: Ints | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)


def join_encoded(parts: Sequence[EncodedExamples]) -> EncodedExamples:
    """Concatenates parts, whose `second_starts` must be None."""
    lengths = np.concatenate([part.lengths for part in parts])
    firsts = np.cumsum([0, *map(len, parts)])
    empty = (int(first) + index for first, part in zip(firsts, parts, strict=False) for index in part.empty)
    return EncodedExamples(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.token_types for part in parts]),
        np.append(0, np.cumsum(lengths)),
        sum(part.num_truncated for part in parts),
        (*empty,),
    )


def encode(tokenizer: Tokenizer, texts: Sequence[tuple[str, ...]], max_length: int) -> EncodedExamples:
    """Tokenizes examples of one or two texts each, truncated to `max_length` tokens.

    In a pair, the last token of the longer text (of the second, if both are equally long) is removed until both fit, as
    in the published code. (`transformers` may keep one more token of the second text and one less of the first.) Pairs
    are joined by the tokenizer's template (`Tokenizer.pair_template`), or by BERT's if it is not supported.
    """
    template = tokenizer.pair_template or BERT
    special = tokenizer.special_tokens
    cls = [special["cls"]]
    sep = [special["sep"]]
    ids: list[Ints] = []
    token_types: list[Ints] = []
    num_truncated = 0
    empty = []
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        parts = iter(tokenizer.encode_batch([text for example in chunk for text in example]))
        for index, example in enumerate(chunk, start):
            example_ids = [next(parts) for _ in example]
            num_special = 2 if len(example_ids) == 1 else template.num_special
            lengths = _truncated_lengths([len(part) for part in example_ids], max_length - num_special)
            num_truncated += sum(lengths) < sum(map(len, example_ids))
            if not sum(lengths):
                empty.append(index)
            first, *second = (part[:length] for part, length in zip(example_ids, lengths, strict=True))
            pieces: list[Any] = [cls, first, sep]
            if second:
                pieces += [sep * (template.num_separators - 1), *second, sep]
            ids.append(np.concatenate(pieces).astype(np.int32))
            types = np.zeros(len(ids[-1]), np.int32)
            if second:
                types[-1 - lengths[1] :] = template.second_type
            token_types.append(types)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(token_ids) for token_ids in ids], out=offsets[1:])
    return EncodedExamples(_concatenate(ids), _concatenate(token_types), offsets, num_truncated, tuple(empty))


def _concatenate(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _truncated_lengths(lengths: list[int], room: int) -> list[int]:
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return lengths
    # The result of removing one token at a time from the longer text, or from the second if both are equally long.
    if second <= room // 2:
        return [room - second, second]
    if first <= room - room // 2:
        return [first, room - first]
    return [room - room // 2, room // 2]


def chunk_spans(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Returns start and length of the chunks of `num_tokens` tokens, each of at most `room` tokens.

    A chunk starts `stride` tokens after the previous one, or at its end if that is earlier. Without tokens there is no
    chunk. `room` and `stride` are at least 1.
    """
    spans = []
    start = 0
    end = 0
    while end < num_tokens:
        end = min(start + room, num_tokens)
        spans.append((start, end - start))
        start += min(room, stride)
    return spans


def max_context(spans: Sequence[tuple[int, int]], num_tokens: int) -> Ints:
    """Returns the index of the chunk in which each token has the most context; int64 [num_tokens].

    The context is the number of tokens before or after the token in the chunk, whichever is smaller, plus a hundredth
    of the chunk's length; among equals, the first chunk is chosen.
    """
    best_chunks = np.zeros(num_tokens, np.int64)
    most = np.full(num_tokens, -1.0)
    for index, (start, length) in enumerate(spans):
        before = np.arange(length)
        context = np.minimum(before, before[::-1]) + 0.01 * length
        window = slice(start, start + length)
        is_more = context > most[window]
        best_chunks[window][is_more] = index
        most[window][is_more] = context[is_more]
    return best_chunks


def text_chunks(
    pieces: Sequence[Pieces], special_tokens: Mapping[str, int], room: int, stride: int
) -> tuple[EncodedExamples, list[Ints]]:
    """Returns the chunks `[CLS] tokens [SEP]` of all texts, and the index of each token in `EncodedExamples.ids`.

    A token in several chunks has its index in the chunk with the most context; int64 [tokens] per text.
    """
    ids = [np.zeros(0, np.int32)]
    places = []
    lengths = [0]
    cls, sep = (np.array([special_tokens[name]], np.int32) for name in ("cls", "sep"))
    begin = 0
    for text_pieces in pieces:
        spans = chunk_spans(len(text_pieces.ids), room, stride)
        # A token's index in `ids` minus its index in the text: 1 for [CLS], minus the tokens before the chunk.
        shifts = []
        for start, length in spans:
            ids += [cls, text_pieces.ids[start : start + length], sep]
            lengths.append(length + 2)
            shifts.append(begin + 1 - start)
            begin += length + 2
        chosen = max_context(spans, len(text_pieces.ids))
        places.append(np.array(shifts, np.int64)[chosen] + np.arange(len(text_pieces.ids)))
    joined = np.concatenate(ids)
    return EncodedExamples(joined, np.zeros_like(joined), np.cumsum(lengths, dtype=np.int64), 0, ()), places
