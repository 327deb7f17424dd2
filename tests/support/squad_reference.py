"""Question answering by the rules of the published code (google-research/electra, `finetune/qa`), in plain Python.

Chunk by chunk and candidate by candidate, on the tokens of the `tokenizers` library. Two rules are the package's: the
target is the pieces that overlap the annotation, and an answer has the characters of its pieces.
"""

import json
import unicodedata
from dataclasses import dataclass
from math import exp

import tokenizers


def library_tokenizer(tokenizer):
    """The same rules and vocabulary, with special tokens in a text read as text."""
    rules = json.loads(tokenizer.to_json()) | {"added_tokens": [], "post_processor": None}
    return tokenizers.Tokenizer.from_str(json.dumps(rules))


def chunk_spans(num_tokens, room, stride):
    """Start and length of each chunk."""
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
    """The chunk in which a piece has the most context on its poorer side."""
    best = None
    most = None
    for index, (start, length) in enumerate(spans):
        end = start + length - 1
        if start <= position <= end:
            context = min(position - start, end - position) + 0.01 * length
            if most is None or context > most:
                best = index
                most = context
    return best


@dataclass(frozen=True)
class Chunk:
    """What the model reads. Dictionaries are by position in the input, of pieces of the context only."""

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
    found = []
    for index, (first, length) in enumerate(spans):
        inside = range(first, first + length)
        found.append(
            Chunk(
                ["[CLS]", *asked, "[SEP]", *encoding.tokens[first : first + length], "[SEP]"],
                [0] * place + [1] * (length + 1),
                first,
                place,
                {place + i - first: offsets[i] for i in inside},
                {place + i - first: owners[i] == index for i in inside},
            )
        )
    return found


def with_marks(context, span, spans):
    """A piece's characters, with the marks and letters after it that are in none."""
    start, end = span
    while unicodedata.category(context[end : end + 1] or " ")[0] in "ML" and not any(a <= end < b for a, b in spans):
        end += 1
    return start, end


def targets_of(chunks, answer):
    """Start, end and impossibility of an answer (text, start) or None, in each chunk."""
    if answer is None:
        return [(0, 0, 1)] * len(chunks)
    letters = {answer[1] + place for place, letter in enumerate(answer[0]) if not letter.isspace()}
    found = []
    pieces = set()
    for chunk in chunks:
        inside = {i for i, span in chunk.spans.items() if letters.intersection(range(*span))}
        found.append(inside)
        pieces |= {i - chunk.context_start + chunk.first for i in inside}
    return [(min(inside), max(inside), 0) if len(inside) == len(pieces) > 0 else (0, 0, 0) for inside in found]


@dataclass(frozen=True)
class Candidate:
    """A start and an end that the model proposes, as positions in a chunk's input, with the sum of their scores."""

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
    """Distinct texts with their scores and probabilities, the best first. Candidates come by chunk, start and end."""
    valid = [candidate for candidate in candidates if is_answer(candidate, max_answer_length)]
    found = {}
    for each in sorted(valid, key=lambda candidate: candidate.score, reverse=True):
        if len(found) < count:
            text = context[each.chunk.spans[each.start][0] : each.chunk.spans[each.end][1]]
            found.setdefault(" ".join(text.split()), each.score)
    found = found or {"": 0.0}
    weights = [exp(score - max(found.values())) for score in found.values()]
    return [(*each, weight / sum(weights)) for each, weight in zip(found.items(), weights, strict=True)]
