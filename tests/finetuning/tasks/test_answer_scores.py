"""Scores of answers, compared with scores computed by hand and with a second implementation of SQuAD's rules."""

import random
import string
from pathlib import Path

import numpy as np
import pytest

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.words import is_unspaced
from electra_fast.finetuning.task import Answer, Split
from electra_fast.finetuning.tasks.answer_scores import f1, score_unit, squad_scores, units_of, words_of


def split_of(*golds, contexts=()):
    """Returns questions q0, q1, ... with these texts as their answers."""
    targets = np.fromiter([tuple(Answer(text, 0) for text in texts) for texts in golds], dtype=object)
    ids = [f"q{number}" for number in range(len(golds))]
    texts = [("?", context) for context in contexts or ["!"] * len(golds)]
    return Split(name="dev", path=Path("dev.json"), texts=texts, targets=targets, ids=ids)


def by_id(*values):
    return {f"q{number}": value for number, value in enumerate(values)}


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Cat and  the banana theatre", "cat and banana theatre"),  # articles inside words remain
        ("the-cat", "thecat"),  # punctuation is removed before articles
        ("a.n", ""),  # "an" without its period
        ("U.S. $5,000", "us 5000"),
        ("Straße ÉCOLE", "straße école"),  # lower case without folding; accents remain
        ("a，b", "，b"),  # full-width punctuation remains and separates articles
        ("“a” – b", "“ ” – b"),
        ("x\u00a0y\u3000z\u202f", "x y z"),  # all kinds of spaces
    ],
)
def test_normalization(text, normalized):
    assert words_of(text) == normalized.split()


def test_texts_without_words_match_only_in_squad_2():
    assert [f1(words_of("The"), words_of("a."), has_unanswerable=rule) for rule in (True, False)] == [1, 0]


def test_squad_1_question_without_annotation_scores_zero():
    assert squad_scores(split_of(["x"], []), by_id("x", "y")) == {"exact_match": 0.5, "f1": 0.5}


def test_default_threshold_if_no_answer_is_best():
    scores = squad_scores(split_of([], ["red"]), by_id("x", "wrong"), by_id(-5.0, -4.0))
    assert (scores["f1"], scores["null_threshold"]) == (1 / 2, 0.0)
    assert scores["no_answer_accuracy"] == 0  # at 0, although no threshold above -5 reaches the best score


def test_equal_odds_are_answered_in_mapping_order():
    split = split_of(["red"], [])
    predictions = by_id("red", "x")
    first = squad_scores(split, predictions, {"q0": 1.0, "q1": 1.0})
    last = squad_scores(split, predictions, {"q1": 1.0, "q0": 1.0})
    assert (first["f1"], first["null_threshold"]) == (1, 1.0)  # between both questions, which no threshold separates
    assert (last["f1"], last["null_threshold"]) == (1 / 2, 0.0)


def test_missing_predictions_and_odds_are_refused():
    """Predictions for other questions are ignored."""
    split = split_of(["red"], ["blue"], ["x"])
    with pytest.raises(InputError, match=r"^no prediction for 2 of 3 questions \(first: 'q1'\); add them$"):
        squad_scores(split, {"q0": "red", "other": "x"})
    with pytest.raises(InputError, match=r"^no null odds for 1 of 3 questions \(first: 'q2'\); add them$"):
        squad_scores(split, by_id("", "", ""), {"q0": 1.0, "q1": 1.0, "other": 0.0})


def stated_words(text):
    """Returns words by SQuAD's rules, applied character by character and word by word."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    # An article is a run of letters and digits; other characters (“, －, spaces) may be adjacent to it.
    runs = []
    current = ""
    for character in text:
        if character.isalnum() == (current[-1:] or character).isalnum():
            current += character
        else:
            runs = [*runs, current]
            current = character
    runs.append(current)
    return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def stated_scores(prediction, golds, has_unanswerable):
    """Returns exact match and F1 of a question."""
    predicted = stated_words(prediction)
    exact = []
    overlap = []
    annotated = [stated_words(gold) for gold in golds]
    if has_unanswerable:
        annotated = [words for words in annotated if words] or [[]]
    for words in annotated:
        rest = list(words)
        for word in predicted:
            if word in rest:
                rest.remove(word)
        shared = len(words) - len(rest)
        exact.append(predicted == words)
        overlap.append(
            2 * shared / (len(predicted) + len(words)) if shared else has_unanswerable and predicted == words
        )
    return max(exact), max(overlap)


def random_questions(rng, num_questions, least):
    words = ["the", "a", "red", "Red.", "blue", "blue,", "–", "“an”", "x\u00a0y", "!", ""]

    def text():
        return " ".join(rng.choices(words, k=rng.randint(0, 4)))

    golds = [[text() for _ in range(max(least, rng.randint(-2, 3)))] for _ in range(num_questions)]
    return golds, [text() for _ in range(num_questions)]


@pytest.mark.parametrize("seed", range(5))
def test_scores_equal_a_second_implementation(seed):
    golds, predictions = random_questions(random.Random(seed), 40, least=1)
    stated = np.mean([stated_scores(*pair, False) for pair in zip(predictions, golds, strict=True)], axis=0)
    scores = squad_scores(split_of(*golds), by_id(*predictions))
    assert (scores["exact_match"], scores["f1"]) == pytest.approx(tuple(stated))

    rng = random.Random(seed)
    golds, predictions = random_questions(rng, 40, least=0)
    odds = [rng.uniform(-3, 3) for _ in golds]
    scores = squad_scores(split_of(*golds), by_id(*predictions), by_id(*odds))
    has_answer = np.array([bool(texts) for texts in golds])
    for position, name in enumerate(("exact_match", "f1")):
        raw = np.array([stated_scores(*pair, True)[position] for pair in zip(predictions, golds, strict=True)], float)
        # "The" is right for an unanswerable question, but in the search for a threshold only the empty text is.
        answered = np.where(~has_answer, [not text for text in predictions], raw)
        curve = [np.where(np.array(odds) <= t, answered, ~has_answer).mean() for t in [-np.inf, *sorted(odds)]]
        assert scores[name] == pytest.approx(max(curve))
        threshold = scores["null_threshold" if name == "f1" else "exact_match_threshold"]
        best = np.flatnonzero(np.isclose(curve, max(curve)))
        assert threshold in [[0.0, *sorted(odds)][place] for place in best]
        at_threshold = np.where(np.array(odds) <= scores["null_threshold"], raw, ~has_answer)
        assert scores[f"has_answer_{name}"] == pytest.approx(at_threshold[has_answer].mean())
        assert scores["no_answer_accuracy"] == pytest.approx(at_threshold[~has_answer].mean())


def test_chosen_threshold_is_used():
    split = split_of(["red"], [], ["dark blue"], [], ["green"])
    odds = by_id(-2.0, -1.0, 0.5, 1.0, 3.0)
    scores = squad_scores(split, by_id("red", "x", "blue", "", "wrong"), odds, null_threshold=0.5)
    # Scores of questions answered up to 0.5: 1, 0 and 0 (F1 2/3); of unanswered questions: 1 and 0.
    assert scores == pytest.approx(
        {
            "exact_match": 2 / 5,
            "f1": (2 + 2 / 3) / 5,
            "has_answer_exact_match": 1 / 3,
            "has_answer_f1": (1 + 2 / 3) / 3,
            "no_answer_accuracy": 1 / 2,
        }
    )


CHINESE = "小明在北京住了三年。"
ENGLISH = "The Yuan dynasty (Chinese: 元朝) was founded by Kublai Khan in Khanbaliq."


@pytest.mark.parametrize(
    ("prediction", "gold", "exact", "overlap"),
    [
        ("“北京”。", "北京", 1, 1),
        ("京北", "北京", 0, 1 / 2),  # the longest run, not the characters in any order
        ("2009年の秋", "2009年", 0, 2 * 2 / (4 + 2)),  # a number is a word
        ("the IBM公司", "IBM公司", 0, 2 * 3 / 7),  # no articles
        ("เชียงใหม่", "เชียง", 0, 2 * 5 / 14),
        ("。", "北京", 0, 0),
        ("北·京-大 学", "北京大学", 1, 1),  # punctuation and spaces are dropped
        ("IBM 3学", "ibm 学3", 0, 2 * 1 / (3 + 3)),
        ("学学北", "学北学北", 0, 2 * 2 / (3 + 4)),
    ],
)
def test_scores_of_characters_in_scripts_without_spaces(prediction, gold, exact, overlap):
    predicted = units_of(prediction)
    annotated = units_of(gold)
    assert (predicted == annotated) == exact
    assert f1(predicted, annotated, has_unanswerable=False, by_characters=True) == pytest.approx(overlap)


def test_context_decides_the_unit_of_scores():
    split = split_of(["小明"], ["the 元朝"], contexts=[CHINESE, ENGLISH])
    assert squad_scores(split, by_id("小", "元朝")) == pytest.approx({"exact_match": 1 / 2, "f1": (2 / 3 + 1) / 2})
    assert score_unit(split) == "words and characters"
    assert score_unit(split_of([], contexts=[CHINESE])) == "characters"
    for context in (ENGLISH, "서울은 한국의 수도이다.", "", "1999", "Москва и Санкт-Петербург", "القاهرة عاصمة"):
        assert not is_unspaced(context) and score_unit(split_of([], contexts=[context])) == "words"
    split = split_of(["北京"], [], ["。"], contexts=[CHINESE] * 3)
    scores = squad_scores(split, by_id("北京。", "", ""), by_id(0.0, 0.0, 0.0))
    assert scores["f1"] == scores["has_answer_f1"] == scores["no_answer_accuracy"] == 1
    for context in ("カタカナ", "ย้ายไปกรุงเทพในปี2009", "IBM公司与Microsoft公司发布软件", "မြန်မာ", "ភាសាខ្មែរ"):
        assert is_unspaced(context)
