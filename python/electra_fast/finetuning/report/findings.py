"""The parts of a report that depend on the type of task, as functions of gold labels and answers.

Shapes: n examples, C classes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.finetuning.readers.rows import with_columns
from electra_fast.finetuning.readers.tag_schemes import Entity, entities_of
from electra_fast.finetuning.readers.words import is_unspaced
from electra_fast.finetuning.report import pictures
from electra_fast.finetuning.task import Prediction, Split, Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_WORST = 50
"""Errors that a report lists."""
NUM_BINS = 15
"""Bins of equal width for the calibration error (Guo et al., 2017)."""
# Lengths of answers that are scored together, up to and including each; the last has no end.
_LENGTHS = (1, 2, 4, 9)
# First words of questions that are scored by themselves.
_NUM_FIRST_WORDS = 12
_CONTEXT_CHARACTERS = 100

Row = dict[str, Any]


@dataclass(frozen=True)
class Findings:
    """Sections of a report by name: JSON, and the functions that draw their pictures."""

    content: dict[str, Any]
    pictures: dict[str, Callable[[Figure], None]] = field(default_factory=dict)


def classification(task: Task, split: Split, answers: Sequence[Prediction]) -> Findings:
    """Returns scores by class, confusions, calibration of the predicted class, and the surest errors."""
    ids = {label: number for number, label in enumerate(task.labels)}
    gold, predicted = np.asarray(split.targets), np.array([ids[answer["label"]] for answer in answers], np.int64)
    confidence = np.array([answer["scores"][answer["label"]] for answer in answers])
    wrong = np.flatnonzero(gold != predicted)
    errors = [
        _example(split, row)
        | {"gold": task.labels[gold[row]], "label": answers[row]["label"], "score": confidence[row].item()}
        | {"gold_score": answers[row]["scores"].get(task.labels[gold[row]])}
        for row in _first(wrong, -confidence[wrong])
    ]
    counts_CC = _counts(gold, predicted, len(task.labels))
    by_class = _classes(task.labels, counts_CC.diagonal(), counts_CC.sum(1), counts_CC.sum(0))
    confusion = _confusion(task.labels, counts_CC, counts_CC.sum(1))
    return _joined(by_class, confusion, _calibration(confidence, gold == predicted), errors=errors)


def multi_label(task: Task, split: Split, answers: Sequence[Prediction]) -> Findings:
    """Returns scores by label, confusions, calibration of all labels' probabilities, and the surest errors.

    Label A is confused with B in an example that has A and not B if B is predicted and A is not.
    """
    gold_nC = np.asarray(split.targets) > 0
    chosen = [set(answer["labels"]) for answer in answers]
    predicted_nC = np.array([[label in own for label in task.labels] for own in chosen])
    score_nC = np.array([[answer["scores"][label] for label in task.labels] for answer in answers])
    confidence_nC = np.where(predicted_nC, score_nC, 1 - score_nC)
    rows, labels = np.nonzero(gold_nC != predicted_nC)
    errors = [
        _example(split, rows[error])
        | {"label": task.labels[labels[error]], "is_gold": bool(gold_nC[rows[error], labels[error]])}
        | {"score": score_nC[rows[error], labels[error]].item()}
        for error in _first(np.arange(len(rows)), -confidence_nC[rows, labels])
    ]
    counts_CC = (gold_nC & ~predicted_nC).T.astype(np.int64) @ (predicted_nC & ~gold_nC).astype(np.int64)
    correct_C = (gold_nC & predicted_nC).sum(0)
    np.fill_diagonal(counts_CC, correct_C)
    by_class = _classes(task.labels, correct_C, gold_nC.sum(0), predicted_nC.sum(0))
    confusion = _confusion(task.labels, counts_CC, gold_nC.sum(0))
    return _joined(by_class, confusion, _calibration(score_nC.ravel(), gold_nC.ravel()), errors=errors)


def regression(task: Task, split: Split, answers: Sequence[Prediction]) -> Findings:
    """Returns errors in the units of the data, the distribution of the residuals, and the largest ones."""
    gold, values = np.asarray(split.targets, np.float64), np.array([answer["value"] for answer in answers], np.float64)
    residuals = values - gold
    variance, quantiles = float(gold.var()), (0, 5, 25, 50, 75, 95, 100)
    content = {
        "residuals": {
            "mean_absolute_error": float(np.abs(residuals).mean()),
            "root_mean_square_error": float(np.sqrt(np.square(residuals).mean())),
            "r2": 1 - float(np.square(residuals).mean()) / variance if variance else None,
            "mean": float(residuals.mean()),
        }
        | {f"quantile_{each}": float(np.percentile(residuals, each)) for each in quantiles},
        "errors": [
            _example(split, row) | {"gold": gold[row].item(), "value": values[row].item()}
            for row in _first(np.flatnonzero(residuals), -np.abs(residuals[residuals != 0]))
        ],
    }
    return Findings(content, {"residuals": partial(pictures.draw_values, gold=gold, values=values)})


def tagging(task: Task, split: Split, answers: Sequence[Prediction]) -> Findings:
    """Returns scores by entity type or tag, partial matches, confusions of words' tags, and the worst sentences."""
    ids = {label: number for number, label in enumerate(task.labels)}
    assert split.targets is not None and split.words is not None
    predicted = [np.array([ids[tag] for tag in answer["tags"]], np.int64) for answer in answers]
    counts_CC = _counts(np.concatenate(split.targets), np.concatenate(predicted), len(task.labels))
    confusion = _confusion(task.labels, counts_CC, counts_CC.sum(1))
    if task.scheme == "none":
        num_wrong = np.array([(gold != own).sum() for gold, own in zip(split.targets, predicted, strict=True)])
        errors = [
            _example(split, row) | {"wrong_words": int(num_wrong[row])} | _wrong_tags(task, split, predicted, row)
            for row in _first(np.flatnonzero(num_wrong), -num_wrong[num_wrong > 0])
        ]
        by_class = _classes(task.labels, counts_CC.diagonal(), counts_CC.sum(1), counts_CC.sum(0))
        return _joined(by_class, confusion, errors=errors)
    gold = [entities_of([task.labels[tag] for tag in own]) for own in split.targets]
    found = [entities_of(answer["tags"]) for answer in answers]
    differing = [{*own} ^ {*other} for own, other in zip(gold, found, strict=True)]
    num_wrong = np.array(list(map(len, differing)))
    errors = [
        _example(split, row)
        | {"missed": _spans(split, row, differing[row] & {*gold[row]})}
        | {"wrong": _spans(split, row, differing[row] & {*found[row]})}
        for row in _first(np.flatnonzero(num_wrong), -num_wrong[num_wrong > 0])
    ]
    return _joined(_entity_types(gold, found), confusion, errors=errors)


def questions(
    split: Split, answers: Sequence[Prediction], exact_match: Mapping[str, float], f1: Mapping[str, float]
) -> Findings:
    """Returns scores by length of the first annotated answer and by first word of the question, and the worst answers.

    Lengths count words, or characters in contexts written without spaces. `exact_match` and `f1` are those of each
    question by id.
    """
    assert split.targets is not None
    gold: list[tuple[Any, ...]] = list(split.targets)
    by_length, by_word = dict[str, list[str]](), dict[str, list[str]]()
    texts = [(question.split(), context) for question, context in split.texts]
    counts = Counter(words[0].lower() for words, _ in texts if words)
    common = {word for word, count in counts.most_common(_NUM_FIRST_WORDS) if count > 1}
    for id, own, (words, context) in zip(split.ids, gold, texts, strict=True):
        word = words[0].lower() if words else ""
        by_length.setdefault(_length_range(own[0].text, context) if own else "no answer", []).append(id)
        by_word.setdefault(word if word in common else "other", []).append(id)

    def scored(groups: Mapping[str, list[str]], order: Iterable[str]) -> dict[str, Any]:
        return {
            name: {
                "exact_match": float(np.mean([exact_match[id] for id in groups[name]])),
                "f1": float(np.mean([f1[id] for id in groups[name]])),
                "questions": len(groups[name]),
            }
            for name in order
            if name in groups
        }

    lengths = scored(by_length, (*_length_names(), "no answer"))
    scores = np.array([f1[id] for id in split.ids])
    wrong = np.flatnonzero(scores < 1)
    confidence = np.array([answer["score"] for answer in answers])[wrong]
    errors = [
        _question(split, row, gold[row], answers[row]) | {"f1": scores[row].item()}
        for row in _first(wrong, scores[wrong], -confidence)
    ]
    first_words = scored(by_word, sorted(by_word, key=lambda word: (word == "other", -len(by_word[word]), word)))
    content = {"answer_lengths": lengths, "first_words": first_words, "errors": errors}
    return Findings(content, {"answer_lengths": partial(pictures.draw_groups, groups=lengths)})


def _joined(*parts: Findings, errors: Sequence[Row]) -> Findings:
    content, drawn = dict[str, Any](), dict[str, Callable[[Any], None]]()
    for part in parts:
        content |= part.content
        drawn |= part.pictures
    return Findings(content | {"errors": list(errors)}, drawn)


def _first(rows: NDArray[Any], *keys: NDArray[Any]) -> list[int]:
    """Returns the first rows to list, in the order of the keys, the first of which decides."""
    order = np.lexsort((rows, *reversed(keys)))
    return [int(row) for row in rows[order][:NUM_WORST]]


def _example(split: Split, row: int) -> Row:
    first, *second = split.texts[row]
    return {"id": split.ids[row], "text": first} | ({"second_text": second[0]} if second else {}) | _columns(split, row)


def _columns(split: Split, row: int) -> Row:
    return {"columns": with_columns({}, split.columns[row])} if split.columns and split.columns[row] else {}


def _counts(gold: NDArray[Any], predicted: NDArray[Any], num_classes: int) -> NDArray[np.int64]:
    """Returns the confusion matrix, int64 [C, C], gold classes as rows."""
    counts = np.bincount(gold * num_classes + predicted, minlength=num_classes**2)
    return np.asarray(counts.reshape(num_classes, num_classes), np.int64)


def precision_recall_f1(correct: Any, predicted: Any, support: Any) -> tuple[Any, Any, Any]:
    """Returns the three scores of numbers, or of arrays of them; 0 / 0 counts as 0."""
    return (
        correct / np.maximum(predicted, 1),
        correct / np.maximum(support, 1),
        2 * correct / np.maximum(predicted + support, 1),
    )


def _classes(
    labels: Sequence[str], correct_C: NDArray[Any], support_C: NDArray[Any], predicted_C: NDArray[Any]
) -> Findings:
    scores_3C = np.array(precision_recall_f1(correct_C, predicted_C, support_C))
    names = ("precision", "recall", "f1")
    rows = {
        label: dict(zip(names, scores_3C[:, c].tolist(), strict=True))
        | {"support": int(support_C[c]), "predicted": int(predicted_C[c]), "correct": int(correct_C[c])}
        for c, label in enumerate(labels)
    }
    weights = {"macro": support_C + predicted_C > 0, "weighted": support_C}  # as scikit-learn without `labels`
    averages = {
        name: dict(zip(names, (scores_3C @ each / max(1, each.sum())).tolist(), strict=True))
        for name, each in weights.items()
    }
    return Findings({"classes": rows, "averages": averages})


def _confusion(labels: Sequence[str], counts_CC: NDArray[np.int64], support_C: NDArray[Any]) -> Findings:
    """Returns how often each class was taken for each other one, the most frequent first."""
    others = counts_CC - np.diag(counts_CC.diagonal())
    gold, predicted = np.nonzero(others)
    order = np.argsort(-others[gold, predicted], kind="stable")
    rows = [
        {"gold": labels[a], "predicted": labels[b], "count": int(others[a, b])}
        | {"share_of_gold": float(others[a, b] / support_C[a])}
        for a, b in zip(gold[order], predicted[order], strict=True)
    ]
    draw = partial(pictures.draw_confusion, labels=labels, counts_CC=counts_CC, support_C=support_C)
    return Findings({"confusion": rows}, {"confusion": draw} if len(labels) > 1 else {})


def _calibration(confidence: NDArray[Any], is_right: NDArray[Any]) -> Findings:
    """Returns the expected calibration error and its bins: (0, 1/15], (1/15, 2/15], ..., with 0 in the first."""
    bins = np.clip(np.ceil(confidence * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
    rows = [
        {"from": number / NUM_BINS, "to": (number + 1) / NUM_BINS, "count": int(own.sum())}
        | {"confidence": float(confidence[own].mean()), "accuracy": float(is_right[own].mean())}
        for number in range(NUM_BINS)
        if (own := bins == number).any()
    ]
    error = sum(row["count"] * abs(row["confidence"] - row["accuracy"]) for row in rows) / len(confidence)
    content = {"expected_calibration_error": float(error), "bins": rows}
    return Findings({"calibration": content}, {"calibration": partial(pictures.draw_calibration, rows=rows)})


def _entity_types(gold: Sequence[Sequence[Entity]], found: Sequence[Sequence[Entity]]) -> Findings:
    """Returns scores by entity type, and matches as SemEval-2013 task 9 and nervaluate define them.

    `strict` wants span and type, `exact` the span, `type` an overlap and the type, `partial` an overlap, which counts
    half unless the spans are equal. An annotated entity has at most one partner among the predicted ones, and each of
    these at most one; those without are missed and spurious. Outcomes by type are those of `strict`.
    """
    matches = {scheme: Counter[str]() for scheme in _PREFERENCES}
    outcomes, types = dict[str, Counter[str]](), Counter[tuple[str, str]]()
    predicted, spurious = Counter[str](), Counter[str]()
    for own, others in zip(gold, found, strict=True):
        for scheme, preference in _PREFERENCES.items():
            partners = _partners(own, others, preference)
            for entity, partner in partners:
                matches[scheme][_match(scheme, entity, partner)] += 1
            if scheme != "strict":
                continue
            for entity, partner in partners:
                if partner is not None:
                    predicted[partner[2]] += 1
                if entity is None:
                    assert partner is not None
                    spurious[partner[2]] += 1
                else:
                    outcomes.setdefault(entity[2], Counter())[_outcome(entity, partner)] += 1
                if entity and partner and entity[:2] == partner[:2] and entity[2] != partner[2]:
                    types[entity[2], partner[2]] += 1
    rows = {}
    for name in sorted(outcomes.keys() | predicted.keys()):
        counts = outcomes.get(name, Counter())
        precision, recall, f1 = precision_recall_f1(counts["correct"], predicted[name], counts.total())
        rows[name] = {"precision": float(precision), "recall": float(recall), "f1": float(f1)}
        rows[name] |= {"support": counts.total(), "predicted": predicted[name]}
        rows[name] |= {each: counts[each] for each in ("correct", "wrong_span", "wrong_type", "wrong_both", "missed")}
        rows[name]["spurious"] = spurious[name]
    confused = [{"gold": a, "predicted": b, "count": count} for (a, b), count in types.most_common()]
    schemes = {scheme: _matching(counts) for scheme, counts in matches.items()}
    return Findings({"entity_types": rows, "matching": schemes, "type_confusion": confused})


# Which of the annotated entities that a predicted one overlaps is its partner: the lowest, of equal ones the first.
_PREFERENCES: dict[str, Callable[[Entity, Entity], tuple[float, ...]]] = {
    "strict": lambda gold, own: (gold != own,),
    "exact": lambda gold, own: (gold[:2] != own[:2],),
    "partial": lambda gold, own: (gold[:2] != own[:2],),
    "type": lambda gold, own: (1,) if gold[2] != own[2] else (0, abs(gold[0] - own[0]) + abs(gold[1] - own[1])),
}


def _partners(
    gold: Sequence[Entity], found: Sequence[Entity], preference: Callable[[Entity, Entity], tuple[float, ...]]
) -> list[tuple[Entity | None, Entity | None]]:
    """Returns the annotated and the predicted entities in pairs, None for no partner."""
    left, pairs = list(gold), list[tuple[Entity | None, Entity | None]]()
    for own in found:
        overlapping = [each for each in left if each[0] < own[1] and own[0] < each[1]]
        partner = min(overlapping, key=lambda each: preference(each, own), default=None)
        if partner is not None:
            left.remove(partner)
        pairs.append((partner, own))
    return pairs + [(entity, None) for entity in left]


def _match(scheme: str, gold: Entity | None, own: Entity | None) -> str:
    """Returns how a scheme counts a pair."""
    if gold is None or own is None:
        return "spurious" if gold is None else "missed"
    is_span, is_type = gold[:2] == own[:2], gold[2] == own[2]
    if scheme == "partial":
        return "correct" if is_span else "partial"
    is_right = {"strict": is_span and is_type, "exact": is_span, "type": is_type}[scheme]
    return "correct" if is_right else "incorrect"


def _outcome(gold: Entity, own: Entity | None) -> str:
    """Returns what became of an annotated entity, given its partner."""
    if own is None:
        return "missed"
    is_span, is_type = gold[:2] == own[:2], gold[2] == own[2]
    return ("correct" if is_type else "wrong_type") if is_span else ("wrong_span" if is_type else "wrong_both")


def _matching(counts: Counter[str]) -> Row:
    names = ("correct", "incorrect", "partial", "missed", "spurious")
    correct = counts["correct"] + counts["partial"] / 2
    num_predicted, num_gold = counts.total() - counts["missed"], counts.total() - counts["spurious"]
    scores = precision_recall_f1(correct, num_predicted, num_gold)
    return dict(zip(("precision", "recall", "f1"), map(float, scores), strict=True)) | {
        name: counts[name] for name in names
    }


def _spans(split: Split, row: int, entities: Iterable[Entity]) -> list[Row]:
    assert split.words is not None
    text, words = split.texts[row][0], split.words[row]
    return [{"label": type_, "text": text[words[a, 0] : words[b - 1, 1]]} for a, b, type_ in sorted(entities)]


def _wrong_tags(task: Task, split: Split, predicted: Sequence[NDArray[Any]], row: int) -> Row:
    """Returns the wrong words of a sentence with their tags, as annotated and as predicted."""
    assert split.targets is not None
    wrong = np.flatnonzero(split.targets[row] != predicted[row])
    gold, own = (
        _spans(split, row, [(word, word + 1, task.labels[tags[word]]) for word in wrong.tolist()])
        for tags in (split.targets[row], predicted[row])
    )
    return {"missed": gold, "wrong": own}


def _length_names() -> list[str]:
    starts = [1, *(end + 1 for end in _LENGTHS)]
    ranges = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, _LENGTHS, strict=False)]
    return [*ranges, f"{starts[-1]} or more"]


def _length_range(text: str, context: str) -> str:
    length = sum(not letter.isspace() for letter in text) if is_unspaced(context) else len(text.split())
    return _length_names()[int(np.searchsorted(_LENGTHS, length))]


def _question(split: Split, row: int, gold: Sequence[Any], answer: Prediction) -> Row:
    """Returns a question with its answers, and the context around the annotated one, else around the predicted one."""
    question, context = split.texts[row]
    starts = itertools.chain((each.start for each in gold if each.start >= 0), (answer["start"] or 0,))
    start = max(0, next(starts) - _CONTEXT_CHARACTERS)
    end = start + 2 * _CONTEXT_CHARACTERS + len(gold[0].text if gold else answer["answer"])
    cut = ("…" if start else "") + context[start:end] + ("…" if end < len(context) else "")
    return {
        "id": split.ids[row],
        "text": question,
        "gold": list(dict.fromkeys(each.text for each in gold)),
        "answer": answer["answer"],
        "score": answer["score"],
        "context": cut,
    } | _columns(split, row)
