"""Scores of answers to questions as defined by SQuAD 1.1 and 2.0, and by CMRC 2018 for scripts without spaces.

The scores equal the official evaluation scripts' scores, as fractions instead of percentages. SQuAD compares words. For
contexts written without spaces, the rules of CMRC and DRCD count each character of such a script as a word, and the
longest common run as the words in common.
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
# Names of groups of answer lengths by their maximum.
_LENGTHS = {1: "1", 2: "2", 4: "3-4", 9: "5-9", math.inf: "10 or more"}
# Number of first words of questions with separate scores.
_NUM_FIRST_WORDS = 12
_UNIT = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


def squad_scores(
    split: Split,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float | None = None,
) -> dict[str, float]:
    """Returns the scores of a split by name, averaged over its questions.

    Without `null_odds`, these are `exact_match` and `f1` as defined by SQuAD 1.1. With `null_odds`, they are defined by
    SQuAD 2.0: a prediction counts as empty if its odds exceed a threshold. The threshold is `null_threshold`, or by
    default the best one for each score, as in the official script; then the scores include `exact_match_threshold` and
    `null_threshold` (for F1). At the threshold (for F1), `has_answer_exact_match` and `has_answer_f1` average over the
    answerable questions and `no_answer_accuracy` over the others, if any.

    `predictions` are the best answers by id, regardless of their odds. Higher odds mean that a question seems less
    answerable; ties are in the mapping's order. Raises InputError for a question without a prediction or odds.
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
        scores = {"exact_match": exact, "f1": f1}
        scores |= {"exact_match_threshold": exact_threshold, "null_threshold": null_threshold}
    else:
        scores = {name: _mean_at(raw[name], answers, null_odds, null_threshold, ids) for name in raw}
    answerable, others = ([id for id in ids if bool(answers[id]) == wanted] for wanted in (True, False))
    for part, name, part_ids in (
        ("has_answer_exact_match", "exact_match", answerable),
        ("has_answer_f1", "f1", answerable),
        ("no_answer_accuracy", "f1", others),
    ):
        if part_ids:
            scores[part] = _mean_at(raw[name], answers, null_odds, null_threshold, part_ids)
    return scores


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
    """Returns a text's words in lower case, without punctuation; in scripts without spaces, its characters."""
    is_kept = (letter not in _PUNCTUATION and unicodedata.category(letter)[0] != "P" for letter in text.lower())
    return _UNIT.findall("".join(itertools.compress(text.lower(), is_kept)))


def words_of(text: str) -> list[str]:
    """Returns a text's words in lower case, without ASCII punctuation and articles."""
    return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def f1(predicted: list[str], annotated: list[str], *, has_unanswerable: bool, by_characters: bool = False) -> float:
    """Returns the harmonic mean of precision and recall of the words in common or of the longest common run.

    Repeated words count separately. Two texts without words match in SQuAD 2.0 (`has_unanswerable`), but not in 1.1.
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


def _check_complete(kind: str, known: Collection[str], ids: Sequence[str]) -> None:
    missing = [id for id in ids if id not in known]
    if missing:
        raise InputError(f"no {kind} for {len(missing):,} of {len(ids):,} questions (first: {missing[0]!r}); add them")


def raw_scores(split: Split, predictions: Mapping[str, str], *, has_unanswerable: bool) -> dict[str, ById]:
    """Returns `exact_match` and `f1` by id, compared with the best matching annotation.

    The rules are SQuAD 2.0's with `has_unanswerable`, else SQuAD 1.1's; `predictions` are texts by id.
    """
    raw: dict[str, ById] = {"exact_match": {}, "f1": {}}
    for id, annotated, (_, context) in zip(split.ids, split.gold, split.texts, strict=True):
        by_characters = is_unspaced(context)
        units = units_of if by_characters else words_of
        predicted = units(predictions[id])
        golds = [units(answer.text) for answer in annotated]
        golds = [gold for gold in golds if gold or not has_unanswerable] or [[]]
        rules = {"has_unanswerable": has_unanswerable, "by_characters": by_characters}
        raw["exact_match"][id] = float(predicted in golds)
        raw["f1"][id] = max(f1(predicted, gold, **rules) for gold in golds)
    return raw


def group_sections(split: Split, raw: Mapping[str, ById]) -> Iterator[Section]:
    """Yields scores by length of the first annotated answer and by first word of the question.

    Lengths count words, or characters in contexts written without spaces. `raw` are the `raw_scores`.
    """
    by_length = dict[str, list[str]]()
    by_word = dict[str, list[str]]()
    first_words = [(question.lower().split() or [""])[0] for question, _ in split.texts]
    common = {word for word, count in Counter(filter(None, first_words)).most_common(_NUM_FIRST_WORDS) if count > 1}
    for id, annotated, (_, context), word in zip(split.ids, split.gold, split.texts, first_words, strict=True):
        text = annotated[0].text if annotated else ""
        size = sum(not letter.isspace() for letter in text) if is_unspaced(context) else len(text.split())
        length = next(name for longest, name in _LENGTHS.items() if size <= longest)
        by_length.setdefault(length if annotated else "no answer", []).append(id)
        by_word.setdefault(word if word in common else "other", []).append(id)

    def scored(groups: Mapping[str, list[str]], order: Iterable[str]) -> dict[str, Any]:
        return {
            name: {score: _mean([raw[score][id] for id in groups[name]]) for score in ("exact_match", "f1")}
            | {"questions": len(groups[name])}
            for name in order
            if name in groups
        }

    lengths = scored(by_length, (*_LENGTHS.values(), "no answer"))
    text = "In words, or in characters if the context is written without spaces."
    draw = partial(draw_groups, groups=lengths)
    yield Section("answer_lengths", lengths, "By length of the annotated answer", text, draw)
    words = sorted(by_word, key=lambda word: (word == "other", -len(by_word[word]), word))
    yield Section("first_words", scored(by_word, words), "By first word of the question")


def _best_threshold(
    raw: ById, answers: Mapping[str, Sequence[Answer]], predictions: Mapping[str, str], null_odds: Mapping[str, float]
) -> tuple[float, float]:
    """Returns the best mean score, and the largest odds of the questions that are answered for it.

    As in the official script, all questions are unanswered at first, then answered one by one, even among equal odds.
    The threshold is 0 at first and changes only for a higher score.
    """
    best = total = float(sum(not annotated for annotated in answers.values()))
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
