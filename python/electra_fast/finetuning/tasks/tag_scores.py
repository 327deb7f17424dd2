"""Scores of predicted tags, equal to those of seqeval's default mode (entities) and of scikit-learn (labels)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from electra_fast.finetuning.readers.tag_schemes import entities_of
from electra_fast.finetuning.task import Task

Found = set[tuple[int, int, int, str]]
"""Entities as sentence, first word, the word after the last, and type."""


def tag_scores(task: Task, targets: Sequence[NDArray[Any]], predicted: Sequence[NDArray[Any]]) -> dict[str, float]:
    """All scores of a tagging task by name, `task.metric` among them.

    Of entities: `precision`, `recall` and `f1` over all of them, `accuracy` over words, and `f1_TYPE` for each type
    that the targets have; what is 0 / 0 counts as 0. With the scheme `none`: `accuracy` and `f1_macro`.

    Args:
        task: The task; `labels` names the tags.
        targets: The tag ids of each sentence, [words].
        predicted: Likewise, of the same lengths.
    """
    truth, outputs = np.concatenate(targets), np.concatenate(predicted)
    accuracy = {"accuracy": float((truth == outputs).mean())}
    if task.scheme == "none":
        return accuracy | {"f1_macro": float(f1_score(truth, outputs, average="macro", zero_division=0.0))}
    wanted, found = _entities(task.labels, targets), _entities(task.labels, predicted)
    precision, recall, f1 = _precision_recall_f1(wanted, found)
    scores = {"precision": precision, "recall": recall, "f1": f1} | accuracy
    for type_ in sorted({entity[-1] for entity in wanted}):
        scores[f"f1_{type_}"] = _precision_recall_f1(_of_type(wanted, type_), _of_type(found, type_))[-1]
    return scores


def _entities(labels: Sequence[str], sentences: Iterable[NDArray[Any]]) -> Found:
    tags = ([labels[tag] for tag in sentence] for sentence in sentences)
    return {(number, *entity) for number, sentence in enumerate(tags) for entity in entities_of(sentence)}


def _of_type(entities: Found, type_: str) -> Found:
    return {entity for entity in entities if entity[-1] == type_}


def _precision_recall_f1(wanted: Found, found: Found) -> tuple[float, float, float]:
    num_correct = len(wanted & found)
    return (
        num_correct / max(1, len(found)),
        num_correct / max(1, len(wanted)),
        2 * num_correct / max(1, len(wanted) + len(found)),
    )
