"""Chunks of questions, training targets and best answers, compared with the published code and with known answers."""

import collections

import numpy as np
import pytest
import squad_reference
from question_texts import SPECIAL, questions, write_vocab
from tokenizers import Tokenizer as Crate
from tokenizers import models, normalizers, pre_tokenizers, trainers

import electra_fast as ef
from electra_fast.errors import InputError
from electra_fast.finetuning.task import Answer
from electra_fast.finetuning.tasks.question_features import (
    FoundAnswer,
    SpanScores,
    question_features,
    search,
    training_targets,
)


@pytest.fixture
def tokenizer(tmp_path):
    return ef.Tokenizer(write_vocab(tmp_path), cased=False)


@pytest.fixture(params=[True, False], ids=["uncased", "cased"])
def either(request, tmp_path):
    return ef.Tokenizer(write_vocab(tmp_path), cased=not request.param)


def features_of(tokenizer, *texts, length=24, stride=8, query=8):
    return question_features(tokenizer, texts, sequence_length=length, doc_stride=stride, max_query_length=query)


def inputs(tokenizer, features):
    encoded = features.encoded
    tokens = [tokenizer.id_to_token(token) for token in encoded.ids]
    return [" ".join(tokens[start:end]) for start, end in zip(encoded.offsets, encoded.offsets[1:], strict=False)]


@pytest.mark.parametrize(
    "length, stride, query, lowercase", [(24, 8, 8, True), (19, 30, 8, True), (64, 16, 4, False), (384, 128, 64, True)]
)
def test_chunks_and_targets_equal_the_published_code(tmp_path, length, stride, query, lowercase):
    tokenizer = ef.Tokenizer(write_vocab(tmp_path), cased=not lowercase)
    counts = collections.Counter()
    library = squad_reference.library_tokenizer(tokenizer)
    samples = questions(24, seed=length)
    texts = [(question, context) for question, context, _ in samples]
    features = features_of(tokenizer, *texts, length=length, stride=stride, query=query)
    targets = training_targets(tokenizer, features, [answers for _, _, answers in samples])
    tokens = inputs(tokenizer, features)
    encoded = features.encoded
    for number, (question, context, answers) in enumerate(samples):
        rows = np.flatnonzero(features.question == number)
        chunks = squad_reference.chunks_of(library, question, context, length, stride, query)
        for row, chunk in zip(rows, chunks, strict=True):
            types = encoded.token_types[encoded.offsets[row] : encoded.offsets[row + 1]]
            pieces = slice(features.first[row], features.first[row] + features.num_pieces[row])
            assert (tokens[row], types.tolist()) == (" ".join(chunk.tokens), chunk.types)
            assert (features.first[row], features.context_start[row]) == (chunk.first, chunk.context_start)
            assert [*map(tuple, features.contexts[number].offsets[pieces].tolist())] == list(chunk.spans.values())
        expected = squad_reference.targets_of(chunks, answers[0] if answers else None)
        assert [*map(tuple, targets[rows].tolist())] == expected
        counts["several chunks"] += len(chunks) > 1
        counts["impossible"] += expected[0][2]
        counts["answerable"] += any(start for start, _, _ in expected)
    assert counts["impossible"] == 6 and counts["answerable"] > 5
    assert counts["several chunks"] > 12 or length > 64


def test_chunks_of_a_known_context(tokenizer):
    texts = ("Who was born?", "The river (1895) in the unbelievable Café of Köln."), ("", "the")
    features = features_of(tokenizer, *texts, length=15, stride=4, query=4)
    assert inputs(tokenizer, features) == [
        "[CLS] who was born ? [SEP] the river ( 18 ##95 ) in the [SEP]",
        "[CLS] who was born ? [SEP] ##95 ) in the un ##bel ##iev ##able [SEP]",
        "[CLS] who was born ? [SEP] un ##bel ##iev ##able cafe of koln . [SEP]",
        "[CLS] [SEP] the [SEP]",
    ]
    assert features.encoded.token_types.tolist() == ([0] * 6 + [1] * 9) * 3 + [0, 0, 1, 1]
    assert features.question.tolist() == [0, 0, 0, 1]
    assert features.first.tolist() == [0, 4, 8, 0]
    assert features.context_start.tolist() == [6, 6, 6, 2]
    assert features.num_pieces.tolist() == [8, 8, 8, 1]
    offsets = features.contexts[0].offsets.tolist()
    pieces = [texts[0][1][start:end] for start, end in offsets]
    assert pieces == "The river ( 18 95 ) in the un bel iev able Café of Köln .".split()


def test_long_questions_are_truncated_and_counted(tokenizer):
    features = features_of(
        tokenizer, ("who when where", "the"), ("who when", "the"), ("who", "the"), length=14, query=2
    )
    assert inputs(tokenizer, features)[:2] == ["[CLS] who when [SEP] the [SEP]"] * 2
    assert features.encoded.num_truncated == 1 and features.encoded.empty == ()


def test_features_without_questions(tokenizer):
    features = features_of(tokenizer)
    assert len(features.encoded) == len(features.question) == len(features.contexts) == 0
    assert training_targets(tokenizer, features, []).shape == (0, 3)


@pytest.mark.parametrize("context", ["", " \n", "\u200b"])
def test_context_without_tokens_is_refused(tokenizer, context):
    with pytest.raises(InputError, match=r"^question 2: its context has no tokens; remove the question$"):
        features_of(tokenizer, ("who", "the"), ("who", "the"), ("who", context))


def test_sequence_length_must_leave_tokens_for_the_context(tokenizer):
    features_of(tokenizer, ("who", "the"), length=64 + 11, query=64)
    message = "^finetune.sequence_length = 74: must be at least 75 with finetune.max_query_length = 64; raise"
    with pytest.raises(InputError, match=message):
        features_of(tokenizer, ("who", "the"), length=74, query=64)
    with pytest.raises(InputError, match="finetune.sequence_length = 64: must be at least 75"):
        features_of(tokenizer, ("who", "the"), length=64, query=64)


# Sentences with answers: parts of words, several words, repeated, and with characters that normalization changes.
SENTENCES = {
    "2009年に東京へ移り、2009年の秋に最初の個展を開いた。ﾃﾚﾋﾞで㍿が話す。": ["2009年の秋", "2009年", "東京", "ﾚﾋﾞ", "㍿"],
    "北京很大，北京很美，小明在北京住了三年。𠮷野家": ["北京", "三年", "𠮷", "小明在北京"],
    "สมชายเกิดที่เชียงใหม่และย้ายไปกรุงเทพในปี2009": ["เชียงใหม่", "กรุงเทพ", "ปี2009"],
    "서울은 한국의 수도이며, 1950년대에 커졌다.": ["서울", "1950년", "커졌다"],
    "وُلِدَ محمد في القاهرة عام ١٩٥٠م.": ["محمد", "القاهرة", "١٩٥٠", "وُلِدَ"],
    "दिल्ली भारत की राजधानी है, जो यमुना पर है।": ["दिल्ली", "भारत की राजधानी", "यमुना"],
    "Москва\u00a0— столица России; й и И\u0306, İstanbul, straße.": [
        "Москва",
        "столица",
        "й",
        "И\u0306",
        "İstanbul",
        "ß",
    ],
    "A 14-story hotel (1999) in the 1950s: Londoners drank cafe\u0301\u3000and 👩\u200d👧 naïve ﬁsh.  End": [
        *("14", "1999", "1950", "London", "cafe\u0301\u3000and", "👩\u200d👧", "ﬁ", "ﬁsh.  End"),
    ],
}


def crate_of(kind):
    """Returns a tokenizer trained on the sentences."""
    options = {"special_tokens": SPECIAL, "vocab_size": 340, "show_progress": False}
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    model, trainer, normalizer, splitter = {
        "wordpiece": ("WordPiece", trainers.WordPieceTrainer(**options), "BertNormalizer", "BertPreTokenizer"),
        "byte-level BPE": ("BPE", trainers.BpeTrainer(**options, **alphabet), "NFC", "ByteLevel"),
        "BPE": ("BPE", trainers.BpeTrainer(**options), "Lowercase", "Metaspace"),
        "unigram": ("Unigram", trainers.UnigramTrainer(**options, unk_token="[UNK]"), "NFKC", "Metaspace"),
    }[kind]
    crate = Crate(getattr(models, model)() if model == "Unigram" else getattr(models, model)(unk_token="[UNK]"))
    crate.normalizer = getattr(normalizers, normalizer)()
    crate.pre_tokenizer = getattr(pre_tokenizers, splitter)()
    crate.train_from_iterator(SENTENCES, trainer)
    return crate


@pytest.mark.parametrize("kind", ["wordpiece", "byte-level BPE", "BPE", "unigram"])
def test_targets_are_the_pieces_that_overlap_the_answer(tmp_path, kind):
    """Overlaps follow the crate's offsets; a prediction of these pieces has their characters without whitespace."""
    crate = crate_of(kind)
    crate.save(str(tmp_path / "tokenizer.json"))
    tokenizer = ef.Tokenizer(tmp_path / "tokenizer.json")
    texts = [(text[:5], text) for text, parts in SENTENCES.items() for part in parts]
    answers = [Answer(part, text.rindex(part)) for text, parts in SENTENCES.items() for part in parts]
    features = features_of(tokenizer, *texts, length=512, query=64)
    targets = training_targets(tokenizer, features, [(answer,) for answer in answers])
    score_n1 = np.zeros((len(texts), 1))
    scores = SpanScores(targets[:, :1], score_n1, targets[:, 1:2, None], score_n1[..., None], score_n1[:, 0])
    results = [best[0] for best, _ in search(features, scores, max_answer_length=512)]
    pieces = targets[:, :2] - features.context_start[:, None]
    for (_, text), answer, (first, last), best in zip(texts, answers, pieces.tolist(), results, strict=True):
        letters = {answer.start + place for place, letter in enumerate(answer.text) if not letter.isspace()}
        overlaps = [bool(letters.intersection(range(*span))) for span in crate.encode(text).offsets]
        assert (first, last) == (overlaps.index(True), len(overlaps) - 1 - overlaps[::-1].index(True))
        assert best.text == text[best.start : best.end] == best.text.strip() and answer.text in best.text
        assert best.start <= answer.start and best.end >= answer.start + len(answer.text)
    assert sum(best.text == answer.text for best, answer in zip(results, answers, strict=True)) > len(texts) / 2


def answers(tokenizer, context, spans):
    """Returns the answers among candidates (start, end, score) in a context of one chunk."""
    features = features_of(tokenizer, ("who", context), length=64)
    start, end, score = np.array(spans, float).T[:, None]
    places = start.astype(np.int64)
    ends = end.astype(np.int64)[..., None]
    [(best, _)] = search(features, SpanScores(places, np.zeros_like(score), ends, score[..., None], np.zeros(1)))
    return best


def piece_answer(tokenizer, context, first, last):
    """Returns the answer that consists of these pieces of a context."""
    place = 3  # after [CLS] who [SEP]
    [answer] = answers(tokenizer, context, [(place + first, place + last, 1.0)])
    assert answer.text == context[answer.start : answer.end]
    return answer.text


@pytest.mark.parametrize("n_best, longest, width", [(20, 30, 7), (3, 4, 5), (20, 6, 3)])
def test_search_equals_the_published_code(either, n_best, longest, width):
    """Compares texts, scores with ties, and probabilities; indices are inside or after a chunk of 24 tokens."""
    samples = questions(40, seed=longest)
    rng = np.random.default_rng(0)
    texts = [(question, context) for question, context, _ in samples]
    features = features_of(either, *texts)
    shape = (len(features.question), width, width)
    start = rng.integers(0, 26, shape[:2])
    end = start[..., None] + rng.integers(-2, 8, shape)
    first, second = (rng.integers(0, 40, size).astype(np.float32) / 8 for size in (shape[:2], shape))
    null = rng.standard_normal(shape[0]).astype(np.float32)
    results = search(features, SpanScores(start, first, end, second, null), n_best=n_best, max_answer_length=longest)
    library = squad_reference.library_tokenizer(either)
    empty = 0
    full = 0
    for number, ((question, context), (best, null_score)) in enumerate(zip(texts, results, strict=True)):
        numbers = np.flatnonzero(features.question == number)
        chunks = squad_reference.chunks_of(library, question, context, 24, 8, 8)
        candidates = [
            squad_reference.Candidate(chunk, start[row, i], end[row, i, j], first[row, i] + second[row, i, j])
            for row, chunk in zip(numbers, chunks, strict=True)
            for i in range(width)
            for j in range(width)
        ]
        expected = squad_reference.n_best(context, candidates, n_best, longest)
        pairs = [(" ".join(answer.text.split()), answer.score) for answer in best]
        assert pairs == [candidate[:2] for candidate in expected]
        assert [answer.probability for answer in best] == pytest.approx([chance for _, _, chance in expected])
        assert all(answer.text == context[answer.start : answer.end] for answer in best)
        assert null_score == null[numbers].min()
        empty = empty + (best[0].text == "")
        full = full + (len(best) == n_best)
    assert full > 5 and empty < 10


def test_answers_have_distinct_texts(tokenizer):
    best = answers(tokenizer, "the north, the  north", [(3, 4, 1), (6, 7, 3), (6, 6, 2), (3, 3, 1)])
    assert [(answer.text, answer.score) for answer in best] == [("the  north", 3), ("the", 2)]  # ignoring whitespace


def test_answer_without_candidates_is_empty(tokenizer):
    assert answers(tokenizer, "the north", [(0, 0, 5)]) == [FoundAnswer("", 0, 0, 0.0, 1.0)]


@pytest.mark.parametrize(
    "context, first, last, answer",
    [
        ("born (1895-1943).", 2, 3, "1895"),
        ("an unbelievable", 2, 3, "unbel"),  # a ##n un ##bel ##iev ##able
        ("(café)", 1, 1, "café"),
        ("(cafe\u0301)", 1, 1, "cafe\u0301"),  # the accent is removed, or the word is unknown
        ("in the\u200b, of", 1, 1, "the"),
        ("10\u00a0north", 0, 2, "10\u00a0north"),
        ("(\uac01)", 1, 1, "\uac01"),  # one syllable; three letters after accents are stripped
        ("(☃\u0301) of", 1, 1, "☃\u0301"),
        ("s-bahns", 6, 6, "s"),  # the published code takes the first "s"
    ],
)
def test_answer_has_the_characters_of_its_pieces(either, context, first, last, answer):
    assert piece_answer(either, context, first, last) == answer
