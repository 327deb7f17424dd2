"""ById of answers to questions by the rules of SQuAD 1.1 and 2.0, in scripts without spaces by those of CMRC 2018.

They equal those of the official evaluation scripts, as fractions instead of percentages. SQuAD compares words. In
contexts written without spaces, CMRC and DRCD take each character of such a script for a word, and the longest common
run for the words in common.
"""

from __future__ import annotations

import itertools
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from electra_fast.errors import InputError
from electra_fast.finetuning.readers.words import UNSPACED, is_unspaced
from electra_fast.finetuning.report.sections import Section, draw_groups
from electra_fast.finetuning.task import Answer, Split

ById = dict[str, float]
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION = {*string.punctuation, "～"}
_ARTICLE = re.compile(r"\b(a|an|the)\b")
# Lengths of answers that are scored together, by the longest of them.
_LENGTHS = {1: "1", 2: "2", 4: "3-4", 9: "5-9", math.inf: "10 or more"}
# First words of questions that are scored by themselves.
_NUM_FIRST_WORDS = 12
_UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


def squad_scores(
    split: Split,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float | None = None,
) -> dict[str, float]:
    """Returns the scores of a split by name, as fractions of its questions.

    Without `null_odds`, these are `exact_match` and `f1` by the rules of SQuAD 1.1. With them, the rules are those of
    2.0: a prediction counts as empty if the odds exceed a threshold. It is `null_threshold`, or by default the best one
    of each score, as the official script reports; then `exact_match_threshold` and `null_threshold`, that of F1, are
    among the scores. At the threshold (of F1), `has_answer_exact_match` and `has_answer_f1` are of the answerable
    questions and `no_answer_accuracy` of the others, if there are any.

    `predictions` are the best answers by id, regardless of their odds. The odds are higher the less answerable a
    question seems; ties are in the mapping's order. Raises InputError for a question without a prediction or odds.
    """
    ids = split.ids
    answers = dict(zip(split.ids, split.gold, strict=True))
    _check_complete("prediction", predictions, ids)
    raw = raw_scores(split, predictions, has_unanswerable=null_odds is not None)
    if null_odds is None:
        return {name: _mean(values.values()) for name, values in raw.items()}

    _check_complete("null odds", null_odds, ids)
    if null_threshold is None:
        exact, exact_threshold = _best_threshold(raw["exact_match"], answers, predictions, null_odds)
        f1, null_threshold = _best_threshold(raw["f1"], answers, predictions, null_odds)
        found = {"exact_match": exact, "f1": f1}
        found |= {"exact_match_threshold": exact_threshold, "null_threshold": null_threshold}
    else:
        found = {name: _mean_at(raw[name], answers, null_odds, null_threshold, ids) for name in raw}
    answerable, others = ([id for id in ids if bool(answers[id]) == wanted] for wanted in (True, False))
    for part, name, own in (
        ("has_answer_exact_match", "exact_match", answerable),
        ("has_answer_f1", "f1", answerable),
        ("no_answer_accuracy", "f1", others),
    ):
        if own:
            found[part] = _mean_at(raw[name], answers, null_odds, null_threshold, own)
    return found


def _mean_at(
    raw: ById,
    answers: Mapping[str, Sequence[Answer]],
    null_odds: Mapping[str, float],
    threshold: float,
    ids: Sequence[str],
) -> float:
    """Returns the mean score if questions with odds above the threshold are left unanswered."""
    return _mean([raw[id] if null_odds[id] <= threshold else float(not answers[id]) for id in ids])


def score_unit(split: Split) -> str:
    """Returns the unit of exact match and F1: `words`, `characters`, or `words and characters` if contexts differ."""
    kinds = {is_unspaced(context) for _, context in split.texts}
    return " and ".join(unit for unit, kind in (("words", False), ("characters", True)) if kind in kinds)


def units_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation; a character of a script without spaces is one."""
    is_kept = (letter not in _PUNCTUATION and unicodedata.category(letter)[0] != "P" for letter in text.lower())
    return _UNIT.findall("".join(itertools.compress(text.lower(), is_kept)))


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without ASCII punctuation and articles."""
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def f1(predicted: list[str], annotated: list[str], *, has_unanswerable: bool, by_characters: bool = False) -> float:
    """Returns the harmonic mean of precision and recall of words, with repetitions, or of the longest common run.

    Two texts without words match by the rules of SQuAD 2.0 (`has_unanswerable`), but not by those of 1.1.
    """
    if by_characters:
        num_shared = SequenceMatcher(None, predicted, annotated, autojunk=False).find_longest_match().size
    else:
        num_shared = (Counter(predicted) & Counter(annotated)).total()
    if not num_shared:
        return float(has_unanswerable and predicted == annotated == [])
    precision = num_shared / len(predicted)
    recall = num_shared / len(annotated)
    return 2 * precision * recall / (precision + recall)


def _check_complete(what: str, given: Collection[str], ids: Sequence[str]) -> None:
    missing = [id for id in ids if id not in given]
    if missing:
        raise InputError(f"no {what} for {len(missing):,} of {len(ids):,} questions, the first is {missing[0]!r}")


def raw_scores(split: Split, predictions: Mapping[str, str], *, has_unanswerable: bool) -> dict[str, ById]:
    """Returns `exact_match` and `f1` by id, with the best matching annotation.

    The rules are those of SQuAD 2.0 if it `has_unanswerable` questions, else of 1.1; `predictions` are texts by id.
    """
    raw: dict[str, ById] = {"exact_match": {}, "f1": {}}
    for id, own, (_, context) in zip(split.ids, split.gold, split.texts, strict=True):
        by_characters = is_unspaced(context)
        units = units_of if by_characters else words_of
        predicted = units(predictions[id])
        golds = [units(answer.text) for answer in own]
        golds = [gold for gold in golds if gold or not has_unanswerable] or [[]]
        rules = {"has_unanswerable": has_unanswerable, "by_characters": by_characters}
        raw["exact_match"][id] = float(predicted in golds)
        raw["f1"][id] = max(f1(predicted, gold, **rules) for gold in golds)
    return raw


def group_sections(split: Split, raw: Mapping[str, ById]) -> Iterator[Section]:
    """Yields scores by length of the first annotated answer and by first word of the question.

    Lengths count words, or characters in contexts written without spaces. `raw` has the `raw_scores`.
    """
    by_length = dict[str, list[str]]()
    by_word = dict[str, list[str]]()
    first_words = [(question.lower().split() or [""])[0] for question, _ in split.texts]
    common = {word for word, count in Counter(filter(None, first_words)).most_common(_NUM_FIRST_WORDS) if count > 1}
    for id, own, (_, context), word in zip(split.ids, split.gold, split.texts, first_words, strict=True):
        text = own[0].text if own else ""
        size = sum(not letter.isspace() for letter in text) if is_unspaced(context) else len(text.split())
        length = next(name for longest, name in _LENGTHS.items() if size <= longest)
        by_length.setdefault(length if own else "no answer", []).append(id)
        by_word.setdefault(word if word in common else "other", []).append(id)

    def scored(groups: Mapping[str, list[str]], order: Iterable[str]) -> dict[str, Any]:
        return {
            name: {score: _mean([raw[score][id] for id in groups[name]]) for score in ("exact_match", "f1")}
            | {"questions": len(groups[name])}
            for name in order
            if name in groups
        }

    lengths = scored(by_length, (*_LENGTHS.values(), "no answer"))
    text = "In words, or in characters where the context is written without spaces."
    draw = partial(draw_groups, groups=lengths)
    yield Section("answer_lengths", lengths, "By length of the annotated answer", text, draw)
    words = sorted(by_word, key=lambda word: (word == "other", -len(by_word[word]), word))
    yield Section("first_words", scored(by_word, words), "By first word of the question")


def _best_threshold(
    raw: ById, answers: Mapping[str, Sequence[Answer]], predictions: Mapping[str, str], null_odds: Mapping[str, float]
) -> tuple[float, float]:
    """Returns the best mean score, and the odds up to which questions are answered for it.

    As in the official script, the score begins with every question unanswered and changes question by question, even
    among equal odds; only a higher score replaces the threshold, which is 0 at first.
    """
    best = total = float(sum(not own for own in answers.values()))
    threshold = 0.0
    for id in sorted(null_odds, key=null_odds.__getitem__):
        if id in raw:
            total += raw[id] if answers[id] else -bool(predictions[id])
        if total > best:
            best = total
            threshold = null_odds[id]
    return best / len(raw), threshold


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values)
