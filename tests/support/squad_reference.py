"""Question answering with the rules of the published code (google-research/electra, `finetune/qa`), in plain Python.

It works on single chunks and candidates, with the tokens of the `tokenizers` library. Two rules are the package's: the
target is all pieces that overlap the annotation, and an answer has the characters of its pieces.
"""

import json
import unicodedata
from dataclasses import dataclass
from math import exp

import tokenizers


def library_tokenizer(tokenizer):
    """Returns a tokenizer with the same rules and vocabulary that reads special tokens in a text as text."""
    rules = json.loads(tokenizer.to_json()) | {"added_tokens": [], "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(rules))


def chunk_spans(num_tokens, room, stride):
    """Returns start and length of each chunk."""
    spans = []
    start = 0
    while start < num_tokens:
        length = min(num_tokens - start, room)
        spans.append((start, length))
        if start + length == num_tokens:
            break
        start += min(length, stride)
    return spans


def chunk_of_most_context(spans, position):
    """Returns the chunk that has the most context on the shorter side of a piece."""
    best = None
    max_context = None
    for index, (start, length) in enumerate(spans):
        end = start + length - 1
        if start <= position <= end:
            context = min(position - start, end - position) + 0.01 * length
            if max_context is None or context > max_context:
                best = index
                max_context = context
    return best


@dataclass(frozen=True)
class Chunk:
    """The model's input. The keys of the dictionaries are positions in the input, of pieces of the context only."""

    tokens: list[str]
    types: list[int]
    first: int
    context_start: int
    spans: dict[int, tuple[int, int]]
    has_most_context: dict[int, bool]


def chunks_of(library, question, context, sequence_length, doc_stride, max_query_length):
    asked = library.encode(question).tokens[:max_query_length]
    encoding = library.encode(context)
    offsets = [with_marks(context, span, encoding.offsets) for span in encoding.offsets]
    spans = chunk_spans(len(offsets), sequence_length - len(asked) - 3, doc_stride)
    owners = [chunk_of_most_context(spans, position) for position in range(len(offsets))]
    place = len(asked) + 2
    chunks = []
    for index, (first, length) in enumerate(spans):
        inside = range(first, first + length)
        chunks.append(
            Chunk(
                ["[CLS]", *asked, "[SEP]", *encoding.tokens[first : first + length], "[SEP]"],
                [0] * place + [1] * (length + 1),
                first,
                place,
                {place + i - first: offsets[i] for i in inside},
                {place + i - first: owners[i] == index for i in inside},
            )
        )
    return chunks


def with_marks(context, span, spans):
    """Returns a piece's characters, with the marks and letters after it that belong to no piece."""
    start, end = span
    while unicodedata.category(context[end : end + 1] or " ")[0] in "ML" and not any(a <= end < b for a, b in spans):
        end += 1
    return start, end


def targets_of(chunks, answer):
    """Returns start, end and impossibility of an answer (text, start) or None, in each chunk."""
    if answer is None:
        return [(0, 0, 1)] * len(chunks)
    letters = {answer[1] + place for place, letter in enumerate(answer[0]) if not letter.isspace()}
    parts = []
    pieces = set()
    for chunk in chunks:
        inside = {i for i, span in chunk.spans.items() if letters.intersection(range(*span))}
        parts.append(inside)
        pieces |= {i - chunk.context_start + chunk.first for i in inside}
    return [(min(part), max(part), 0) if len(part) == len(pieces) > 0 else (0, 0, 0) for part in parts]


@dataclass(frozen=True)
class Candidate:
    """A start and an end from the model, as positions in a chunk's input, with the sum of their scores."""

    chunk: Chunk
    start: int
    end: int
    score: float


def is_answer(candidate, max_answer_length):
    chunk = candidate.chunk
    start = candidate.start
    end = candidate.end
    if start not in chunk.spans or end not in chunk.spans:
        return False
    return chunk.has_most_context[start] and start <= end < start + max_answer_length


def n_best(context, candidates, count, max_answer_length):
    """Returns distinct texts with scores and probabilities, the best first. Candidates are sorted by position."""
    valid = [candidate for candidate in candidates if is_answer(candidate, max_answer_length)]
    scores = {}
    for candidate in sorted(valid, key=lambda candidate: candidate.score, reverse=True):
        if len(scores) < count:
            text = context[candidate.chunk.spans[candidate.start][0] : candidate.chunk.spans[candidate.end][1]]
            scores.setdefault(" ".join(text.split()), candidate.score)
    scores = scores or {"": 0.0}
    weights = [exp(score - max(scores.values())) for score in scores.values()]
    return [(text, score, weight / sum(weights)) for (text, score), weight in zip(scores.items(), weights, strict=True)]
