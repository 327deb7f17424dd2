"""The best answers among candidates, and their texts: by hand, and on generated texts by the published rules."""

import numpy as np
import pytest
import squad_reference
from question_texts import questions, write_vocab

import electra_fast as ef
from electra_fast.finetuning.tasks.question_features import FoundAnswer, SpanScores, question_features, search


def features_of(tokenizer, *texts, length=64, stride=8):
    query = min(length - 11, 8)
    return question_features(tokenizer, texts, sequence_length=length, doc_stride=stride, max_query_length=query)


def answers(tokenizer, context, spans):
    """The answers among candidates (start, end, score) in a context of one chunk."""
    texts = [("who", context)]
    features = features_of(tokenizer, *texts)
    start, end, score = np.array(spans, float).T[:, None]
    places, ends = start.astype(np.int64), end.astype(np.int64)[..., None]
    [(found, _)] = search(features, SpanScores(places, np.zeros_like(score), ends, score[..., None], np.zeros(1)))
    return found


def piece_answer(tokenizer, context, first, last):
    """The answer made of these pieces of a context."""
    place = 3  # after [CLS] who [SEP]
    [found] = answers(tokenizer, context, [(place + first, place + last, 1.0)])
    assert found.text == context[found.start : found.end]
    return found.text


@pytest.fixture(params=[True, False], ids=["uncased", "cased"])
def tokenizer(request, tmp_path):
    return ef.Tokenizer(write_vocab(tmp_path), lowercase=request.param)


@pytest.fixture
def uncased(tmp_path):
    return ef.Tokenizer(write_vocab(tmp_path), lowercase=True)


@pytest.mark.parametrize("n_best, longest, width", [(20, 30, 7), (3, 4, 5), (20, 6, 3)])
def test_generated_questions_as_published(tokenizer, n_best, longest, width):
    """Texts, scores with ties, and probabilities; indices are anywhere in a chunk of 24 tokens, or after it."""
    asked, rng = questions(40, seed=longest), np.random.default_rng(0)
    texts = [(question, context) for question, context, _ in asked]
    features = features_of(tokenizer, *texts, length=24)
    shape = (len(features.question), width, width)
    start = rng.integers(0, 26, shape[:2])
    end = start[..., None] + rng.integers(-2, 8, shape)
    first, second = (rng.integers(0, 40, size).astype(np.float32) / 8 for size in (shape[:2], shape))
    null = rng.standard_normal(shape[0]).astype(np.float32)
    found = search(features, SpanScores(start, first, end, second, null), n_best=n_best, max_answer_length=longest)
    library, empty, full = squad_reference.library_tokenizer(tokenizer), 0, 0
    for number, ((question, context), (ours, null_score)) in enumerate(zip(texts, found, strict=True)):
        numbers = np.flatnonzero(features.question == number)
        chunks = squad_reference.chunks_of(library, question, context, 24, 8, 8)
        candidates = [
            squad_reference.Candidate(chunk, start[row, i], end[row, i, j], first[row, i] + second[row, i, j])
            for row, chunk in zip(numbers, chunks, strict=True)
            for i in range(width)
            for j in range(width)
        ]
        theirs = squad_reference.n_best(context, candidates, n_best, longest)
        assert [(" ".join(each.text.split()), each.score) for each in ours] == [each[:2] for each in theirs]
        assert [each.probability for each in ours] == pytest.approx([chance for _, _, chance in theirs])
        assert all(each.text == context[each.start : each.end] for each in ours)
        assert null_score == null[numbers].min()
        empty, full = empty + (ours[0].text == ""), full + (len(ours) == n_best)
    assert full > 5 and empty < 10


def test_a_text_comes_once_with_its_best_score(uncased):
    found = answers(uncased, "the north, the  north", [(3, 4, 1), (6, 7, 3), (6, 6, 2), (3, 3, 1)])
    assert [(each.text, each.score) for each in found] == [("the  north", 3), ("the", 2)]  # whitespace does not count


def test_without_a_candidate_the_answer_is_empty(uncased):
    assert answers(uncased, "the north", [(0, 0, 5)]) == [FoundAnswer("", 0, 0, 0.0, 1.0)]


@pytest.mark.parametrize(
    "context, first, last, answer",
    [
        ("born (1895-1943).", 2, 3, "1895"),
        ("an unbelievable", 2, 3, "unbel"),  # pieces: a ##n un ##bel ##iev ##able
        ("(café)", 1, 1, "café"),
        ("(cafe\u0301)", 1, 1, "cafe\u0301"),  # the accent is dropped, or the word unknown
        ("in the\u200b, of", 1, 1, "the"),
        ("10\u00a0north", 0, 2, "10\u00a0north"),
        ("(\uac01)", 1, 1, "\uac01"),  # one syllable, three letters once accents are stripped
        ("(☃\u0301) of", 1, 1, "☃\u0301"),
        ("s-bahns", 6, 6, "s"),  # not the first "s", which the published code takes
    ],
)
def test_an_answer_has_the_characters_of_its_pieces(tokenizer, context, first, last, answer):
    assert piece_answer(tokenizer, context, first, last) == answer
