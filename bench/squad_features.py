"""Compares the chunks, targets and answers of question answering with the rules of the published code.

    python bench/squad_features.py --data FOLDER --vocab VOCAB [--questions 200]

FOLDER has files in SQuAD's format, VOCAB is a `vocab.txt`. Questions of each file go through the package and through
`squad_transcription.py`, which has the published rules one by one: input ids and token types, the places of pieces in
the text, which chunk has most context, training targets, and the ranked answers among random candidates. Prints how
many were compared and the first difference; exits with 1 if there is any.

Answers are compared in lower case, without accents and whitespace. Of equal parts of a word the published code returns
the first ("S" for the last letter of "S-Bahns"), ours the one that the model chose; `spelling` counts them.
"""

import argparse
import collections
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import squad_transcription as transcription

from electra_fast.data.corpus import Tokenizer
from electra_fast.finetuning.answer_search import SpanScores, search
from electra_fast.finetuning.chunks import max_context
from electra_fast.finetuning.question_features import QuestionFeatures, question_features, training_targets
from electra_fast.finetuning.task import Answer

SETTINGS = {"sequence_length": 384, "doc_stride": 128, "max_query_length": 64}
# Candidates for the start, and for the end of each; longest answer; more answers than there are candidates.
WIDTH, LONGEST, COUNT = 8, 30, 100_000
# Differences that are meant.
EXPECTED = "spelling"

Question = tuple[str, str, tuple[Answer, ...]]


def main() -> int:
    """Compares every file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder of .json files")
    parser.add_argument("--vocab", type=Path, help="a vocab.txt")
    parser.add_argument("--questions", type=int, default=200, help="questions per file, from all over it; 0: all")
    arguments = parser.parse_args()
    if arguments.data is None or arguments.vocab is None:
        print("no --data or no --vocab given: nothing compared")
        return 0
    is_different = False
    for path in sorted(arguments.data.glob("*.json")):
        questions = list(questions_of(json.loads(path.read_text(encoding="utf-8"))))
        count = arguments.questions or len(questions)
        questions = questions[:: max(1, len(questions) // count)][:count]
        print(f"{path.name}, {arguments.vocab.name}: {len(questions):,} questions", flush=True)
        is_different |= report(Tokenizer(arguments.vocab), questions)
    return int(is_different)


def questions_of(content: Any) -> Iterator[Question]:
    """Question, context and answers."""
    for paragraph in (paragraph for article in content["data"] for paragraph in article["paragraphs"]):
        for each in paragraph["qas"]:
            answers = tuple(Answer(answer["text"], answer["answer_start"]) for answer in each["answers"])
            yield each["question"], paragraph["context"], answers


def report(tokenizer: Tokenizer, questions: list[Question]) -> bool:
    """Prints a line per kind of result, with the first difference; returns whether there is any."""
    compared, different, first = collections.Counter[str](), collections.Counter[str](), {}
    for kind, question, ours, theirs in comparisons(tokenizer, questions, **SETTINGS):
        compared[kind] += 1
        if ours != theirs:
            different[kind] += 1
            first.setdefault(kind, f"\n    question {question}: {ours!r}, published {theirs!r}")
    for kind, number in compared.items():
        print(f"  {kind}: {number:,} compared, {different[kind]:,} different{first.get(kind, '')}", flush=True)
    return bool(different.keys() - {EXPECTED})


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
            yield EXPECTED, number, "".join(answer.text.split()), "".join(theirs.split())


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


if __name__ == "__main__":
    sys.exit(main())
