"""Scores of entities and of words with a class each, and the sections of a report on them.

An entity is a tuple of its first word, its end (exclusive) and its type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.finetuning.readers.tag_schemes import Entity, entities_of
from electra_fast.finetuning.report.sections import (
    Row,
    Section,
    class_sections,
    confusion_section,
    errors_section,
    example_row,
    first_rows,
)
from electra_fast.finetuning.task import Split, Task


def tag_scores(task: Task, targets: Sequence[NDArray[Any]], predicted: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Returns all scores of a tagging task by name, as in seqeval's default mode (entities) or scikit-learn (labels).

    For entities: `precision`, `recall` and `f1` over all entities, `accuracy` over words, and `f1_TYPE` for each type
    in the targets; 0 / 0 counts as 0. With the scheme `none`: `accuracy` and `f1_macro`.

    `targets` and `predicted` are the tag ids of each sentence, [words].
    """
    truth = np.concatenate(targets)
    outputs = np.concatenate(predicted)
    accuracy = {"accuracy": float((truth == outputs).mean())}
    if task.scheme == "none":
        from sklearn.metrics import f1_score  # slow to import and not needed for predictions

        return accuracy | {"f1_macro": float(f1_score(truth, outputs, average="macro", zero_division=0.0))}
    gold = Counter[str]()
    sizes = Counter[str]()
    correct = Counter[str]()
    for annotated, output in zip(_entities(task, targets), _entities(task, predicted), strict=True):
        for counter, entities in ((gold, annotated), (sizes, output), (correct, {*annotated} & {*output})):
            counter.update(type_ for _, _, type_ in entities)
    scores = precision_recall_f1(correct.total(), sizes.total(), gold.total()) | accuracy
    return scores | {
        f"f1_{type_}": precision_recall_f1(correct[type_], sizes[type_], gold[type_])["f1"] for type_ in sorted(gold)
    }


def tagged_spans(tags: Sequence[str], scheme: str) -> list[Entity]:
    """Returns the entities of a sentence or, with the scheme `none`, each word with its tag."""
    return entities_of(tags) if scheme != "none" else [(at, at + 1, tag) for at, tag in enumerate(tags)]


def _entities(task: Task, sentences: Iterable[NDArray[Any]]) -> list[list[Entity]]:
    return [tagged_spans([task.labels[tag] for tag in sentence], task.scheme) for sentence in sentences]


def precision_recall_f1(correct: float, predicted: int, support: int) -> dict[str, float]:
    """Returns the three scores by name; 0 / 0 counts as 0."""
    return {
        "precision": correct / max(predicted, 1),
        "recall": correct / max(support, 1),
        "f1": 2 * correct / max(predicted + support, 1),
    }


def tag_sections(task: Task, split: Split, predicted: Sequence[NDArray[Any]]) -> Iterator[Section]:
    """Yields scores by entity type or tag, partial matches, confusions of word tags, and the worst sentences."""
    words = (np.concatenate(split.gold), np.concatenate(predicted))
    is_plain = task.scheme == "none"
    gold = _entities(task, split.gold)
    predicted_entities = _entities(task, predicted)
    if is_plain:
        yield from class_sections(task.labels, *words)
    else:
        yield from _entity_sections(gold, predicted_entities)
        yield confusion_section(task.labels, *words)
    differing = [{*annotated} ^ {*other} for annotated, other in zip(gold, predicted_entities, strict=True)]
    num_wrong = np.array(list(map(len, differing)))
    yield errors_section(
        example_row(split, row)
        | ({"wrong_words": len(differing[row]) // 2} if is_plain else {})
        | {"missed": _spans(split, row, differing[row] & {*gold[row]})}
        | {"wrong": _spans(split, row, differing[row] & {*predicted_entities[row]})}
        for row in first_rows(np.flatnonzero(num_wrong), -num_wrong[num_wrong > 0])
    )


def _entity_sections(gold: Sequence[Sequence[Entity]], output: Sequence[Sequence[Entity]]) -> Iterator[Section]:
    """Yields scores by entity type, and matches as defined by SemEval-2013 task 9 and nervaluate.

    Annotated and predicted entities are matched one to one; entities without a partner are missed or spurious. Outcomes
    by type use the pairs of `strict`.
    """
    pairs = {
        scheme: [pair for sentence in zip(gold, output, strict=True) for pair in _partners(*sentence, preference)]
        for scheme, preference in _PREFERENCES.items()
    }
    strict = pairs["strict"]
    annotated = [(entity, partner) for entity, partner in strict if entity]
    support = Counter(entity[2] for entity, _ in annotated)
    outcomes = Counter((entity[2], _outcome(entity, partner)) for entity, partner in annotated)
    matched = ((entity, partner) for entity, partner in annotated if partner)
    other_types = [(entity[2], partner[2]) for entity, partner in matched if _outcome(entity, partner) == "wrong_type"]
    predicted = Counter(partner[2] for _, partner in strict if partner)
    spurious = Counter(partner[2] for entity, partner in strict if partner and not entity)
    names = ("correct", "wrong_span", "wrong_type", "wrong_both", "missed")
    rows = {
        type_: precision_recall_f1(outcomes[type_, "correct"], predicted[type_], support[type_])
        | {"support": support[type_], "predicted": predicted[type_]}
        | {name: outcomes[type_, name] for name in names}
        | {"spurious": spurious[type_]}
        for type_ in sorted(support | predicted)
    }
    text = (
        "Precision, recall and F1 require the exact span and type. Other annotated entities (support) overlap an "
        "entity predicted with their type (wrong_span), have its span but not its type (wrong_type), overlap one with "
        "another type (wrong_both), or none (missed). Predicted entities that overlap no annotated one are spurious."
    )
    yield Section("entity_types", rows, "Entity types", text)
    matches = {scheme: _matching(Counter(_match(scheme, *pair) for pair in pairs[scheme])) for scheme in pairs}
    text = (
        "As defined by SemEval-2013 task 9 and nervaluate: strict requires span and type, exact the span, type an "
        "overlap and the type, partial an overlap, which counts half unless the spans are equal."
    )
    yield Section("matching", matches, "Partial matches", text)
    counted = [{"gold": a, "predicted": b, "count": count} for (a, b), count in Counter(other_types).most_common()]
    yield Section("type_confusion", counted, text="Entities predicted with another type:")


# Keys for the partner of a predicted entity among overlapping annotated entities: the minimum, at a tie the first.
_PREFERENCES: dict[str, Callable[[Entity, Entity], tuple[float, ...]]] = {
    "strict": lambda a, b: (a != b,),
    "exact": lambda a, b: (a[:2] != b[:2],),
    "partial": lambda a, b: (a[:2] != b[:2],),
    "type": lambda a, b: (1,) if a[2] != b[2] else (0, abs(a[0] - b[0]) + abs(a[1] - b[1])),
}


def _partners(
    gold: Sequence[Entity], predicted: Sequence[Entity], preference: Callable[[Entity, Entity], tuple[float, ...]]
) -> list[tuple[Entity | None, Entity | None]]:
    """Returns pairs of an annotated and a predicted entity; None in place of a missing partner."""
    left = list(gold)
    pairs = list[tuple[Entity | None, Entity | None]]()
    for candidate in predicted:
        overlapping = [entity for entity in left if entity[0] < candidate[1] and candidate[0] < entity[1]]
        partner = min(overlapping, key=lambda entity: preference(entity, candidate), default=None)
        if partner is not None:
            left.remove(partner)
        pairs.append((partner, candidate))
    return pairs + [(entity, None) for entity in left]


def _match(scheme: str, gold: Entity | None, predicted: Entity | None) -> str:
    """Returns the category of a pair in a matching scheme."""
    if gold is None or predicted is None:
        return "spurious" if gold is None else "missed"
    is_span = gold[:2] == predicted[:2]
    is_type = gold[2] == predicted[2]
    if scheme == "partial":
        return "correct" if is_span else "partial"
    is_right = {"strict": is_span and is_type, "exact": is_span, "type": is_type}[scheme]
    return "correct" if is_right else "incorrect"


def _outcome(gold: Entity, predicted: Entity | None) -> str:
    """Returns the outcome of an annotated entity, given its partner."""
    if predicted is None:
        return "missed"
    is_span = gold[:2] == predicted[:2]
    is_type = gold[2] == predicted[2]
    return ("correct" if is_type else "wrong_type") if is_span else ("wrong_span" if is_type else "wrong_both")


def _matching(counts: Counter[str]) -> Row:
    correct = counts["correct"] + counts["partial"] / 2
    num_predicted = counts.total() - counts["missed"]
    num_gold = counts.total() - counts["spurious"]
    names = ("correct", "incorrect", "partial", "missed", "spurious")
    return precision_recall_f1(correct, num_predicted, num_gold) | {name: counts[name] for name in names}


def _spans(split: Split, row: int, entities: Iterable[Entity]) -> list[Row]:
    assert split.words is not None
    text = split.texts[row][0]
    words = split.words[row]
    return [{"label": type_, "text": text[words[a, 0] : words[b - 1, 1]]} for a, b, type_ in sorted(entities)]
