"""Tokenized examples: texts and pairs truncated to a length, or long texts as overlapping chunks.

Chunks are those of the published code (`finetune/qa/qa_tasks.py`). Question answering, tagging and error detection
read them.
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
# Texts that are tokenized together.
_CHUNK = 8192


@dataclass(frozen=True)
class EncodedExamples:
    """Token ids of examples, each `[CLS] text [SEP]` or a pair as the tokenizer joins it.

    Args:
        ids: Token ids of all examples, concatenated, int32.
        token_types: 1 for the second text and its [SEP], unless the tokenizer has 0 there too; else 0; int32.
        offsets: Start of each example in them, and the end of the last; int64 [n + 1].
        num_truncated: Number of examples that were too long.
        empty: Indices of the examples without a token of text.
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
    """Returns the examples of all parts, whose `second_starts` are None."""
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

    In a pair, the longer text loses its last token until both fit; at a tie, the second does, as in the published code.
    (`transformers` may leave one token more of the second instead of the first.) Texts are joined as the tokenizer
    joins them (`Tokenizer.pair_template`), or as BERT's does if that is in another way.
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
            own = [next(parts) for _ in example]
            num_special = 2 if len(own) == 1 else template.num_special
            lengths = _truncated_lengths([len(part) for part in own], max_length - num_special)
            num_truncated += sum(lengths) < sum(map(len, own))
            if not sum(lengths):
                empty.append(index)
            first, *second = (part[:length] for part, length in zip(own, lengths, strict=True))
            pieces: list[Any] = [cls, first, sep]
            if second:
                pieces += [sep * (template.num_separators - 1), *second, sep]
            ids.append(np.concatenate(pieces).astype(np.int32))
            types = np.zeros(len(ids[-1]), np.int32)
            if second:
                types[-1 - lengths[1] :] = template.second_type
            token_types.append(types)
    offsets = np.zeros(len(texts) + 1, np.int64)
    np.cumsum([len(each) for each in ids], out=offsets[1:])
    return EncodedExamples(_joined(ids), _joined(token_types), offsets, num_truncated, tuple(empty))


def _joined(arrays: list[Ints]) -> Ints:
    return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def _truncated_lengths(lengths: list[int], room: int) -> list[int]:
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    first, second = lengths
    if first + second <= room:
        return lengths
    # Taking tokens from the longer one, from the second at a tie, ends here.
    if second <= room // 2:
        return [room - second, second]
    if first <= room - room // 2:
        return [first, room - first]
    return [room - room // 2, room // 2]


def chunk_spans(num_tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Returns start and length of the chunks of `num_tokens` tokens, each of at most `room` tokens.

    A chunk starts `stride` tokens after the one before it, or at its end; the last reaches the end. Without tokens
    there is no chunk. `room` and `stride` are at least 1.
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

    The context is the smaller of the numbers of tokens before and after it in the chunk, plus a hundredth of the
    chunk's length; at a tie, the first chunk is chosen.
    """
    found = np.zeros(num_tokens, np.int64)
    most = np.full(num_tokens, -1.0)
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
    """Returns the chunks `[CLS] tokens [SEP]` of all texts, and the index of each token in `EncodedExamples.ids`.

    A token in several chunks has the index where it has the most context; int64 [tokens] per text.
    """
    ids = [np.zeros(0, np.int32)]
    places = []
    lengths = [0]
    cls, sep = (np.array([special_tokens[name]], np.int32) for name in ("cls", "sep"))
    begin = 0
    for own in pieces:
        spans = chunk_spans(len(own.ids), room, stride)
        # Add to a token's index in the text to get its index in `ids`: one for [CLS], less the tokens before the chunk.
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
