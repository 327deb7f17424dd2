"""Compares chunks, targets and answers of question answering with the published rules of `squad_transcription.py`.

Answers are compared in lower case, without accents and whitespace. Of equal parts of a word the published code returns
the first ("S" for the last letter of "S-Bahns"), ours the one that the model chose: kind `spelling`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import squad_transcription as transcription

from electra_fast.data.corpus import Tokenizer
from electra_fast.finetuning.encoding import max_context
from electra_fast.finetuning.task import Answer
from electra_fast.finetuning.tasks.answer_search import SpanScores, search
from electra_fast.finetuning.tasks.question_features import QuestionFeatures, question_features, training_targets

# Candidates for the start, and for the end of each; longest answer; more answers than there are candidates.
WIDTH, LONGEST, COUNT = 8, 30, 100_000

Question = tuple[str, str, tuple[Answer, ...]]


def comparisons(
    tokenizer: Tokenizer, questions: list[Question], *, sequence_length: int, doc_stride: int, max_query_length: int
) -> Iterator[tuple[str, int, Any, Any]]:
    """Kind, question, our result and that of the transcription."""
    texts = [(question, context) for question, context, _ in questions]
    sizes = {"sequence_length": sequence_length, "doc_stride": doc_stride, "max_query_length": max_query_length}
    features = question_features(tokenizer, texts, **sizes)
    targets = training_targets(tokenizer, features, [answers for _, _, answers in questions])
    scores = random_scores(features)
    found = search(features, texts, scores, n_best=COUNT, max_answer_length=LONGEST)
    entries = [tokenizer.id_to_token(entry) for entry in range(tokenizer.vocab_size)]
    slow = transcription.WordPiece(frozenset(entries), bool(tokenizer.options["lowercase"]))
    for number, (question, context, answers) in enumerate(questions):
        numbers = np.flatnonzero(features.question == number)
        chunks = transcription.chunks_of(slow, question, context, *sizes.values())
        yield "chunks", number, len(numbers), len(chunks)
        for kind, ours, theirs in of_chunks(features, entries, numbers, chunks):
            yield kind, number, ours, theirs
        expected = transcription.targets_of(slow, chunks, context, answers[0][:2] if answers else None)
        yield "targets", number, [tuple(each) for each in targets[numbers].tolist()], expected
        best, null = next(found)
        yield "null scores", number, null, float(scores.null_score[numbers].min())
        proposed = list(candidates(scores, numbers, chunks))
        published = {score: text for text, score, _ in transcription.n_best(slow, context, proposed, COUNT, LONGEST)}
        yield "answers", number, distinct(slow, (each.text for each in best)), distinct(slow, published.values())
        for answer in best:
            theirs = published.get(answer.score, answer.text)
            yield "spelling", number, "".join(answer.text.split()), "".join(theirs.split())


def distinct(tokenizer: transcription.WordPiece, texts: Iterable[str]) -> list[str]:
    """Texts as the vocabulary spells them, each once, in order."""
    spelled = ("".join(letter for token in tokenizer.basic(text) for letter, _ in token) for text in texts)
    return list(dict.fromkeys(spelled))


def of_chunks(
    features: QuestionFeatures, entries: list[str], numbers: Any, chunks: list[Any]
) -> Iterator[tuple[str, Any, Any]]:
    """What the model reads, and where it stands in the context."""
    encoded, offsets = features.encoded, features.contexts[features.question[numbers[0]]].offsets
    spans = list(zip(features.first[numbers].tolist(), features.num_pieces[numbers].tolist(), strict=True))
    owners = max_context(spans, len(offsets))
    for index, (number, chunk) in enumerate(zip(numbers, chunks, strict=True)):
        place = slice(encoded.offsets[number], encoded.offsets[number + 1])
        yield "tokens", [entries[entry] for entry in encoded.ids[place]], chunk.tokens
        yield "token types", encoded.token_types[place].tolist(), chunk.types
        yield "places", (spans[index][0], int(features.context_start[number])), (chunk.first, chunk.context_start)
        inside = slice(spans[index][0], sum(spans[index]))
        yield "characters", [tuple(each) for each in offsets[inside].tolist()], list(chunk.spans.values())
        yield "most context", (owners[inside] == index).tolist(), list(chunk.has_most_context.values())


def random_scores(features: QuestionFeatures) -> SpanScores:
    """Candidates of which most are valid, with scores of which no two are equal."""
    rng, num_chunks = np.random.default_rng(0), len(features.question)
    shape = (num_chunks, WIDTH, WIDTH)
    lengths = features.encoded.lengths[:, None]
    start = (rng.random(shape[:2]) * lengths).astype(np.int64)
    end = np.clip(start[..., None] + rng.geometric(0.2, shape) - 2, 0, lengths[..., None] - 1)
    scores = rng.permutation(num_chunks * WIDTH * WIDTH).reshape(shape).astype(np.float32)
    return SpanScores(start, np.zeros(shape[:2], np.float32), end, scores, rng.random(num_chunks, np.float32))


def candidates(scores: SpanScores, numbers: Any, chunks: list[Any]) -> Iterator[transcription.Candidate]:
    """A question's candidates, in order."""
    for number, chunk in zip(numbers, chunks, strict=True):
        for rank, start in enumerate(scores.start_index[number].tolist()):
            ends = zip(scores.end_index[number, rank].tolist(), scores.end_score[number, rank].tolist(), strict=True)
            for end, score in ends:
                yield transcription.Candidate(chunk, start, end, score)
