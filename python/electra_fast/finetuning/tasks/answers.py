"""A model's outputs as a person or a program reads them: labels with probabilities, values, or spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.finetuning.readers.tag_schemes import entities_of

Answer = dict[str, Any]


def answers(kind: str, labels: Sequence[str], outputs: NDArray[Any]) -> Iterator[Answer]:
    """One JSON-able object per row of `outputs`, float [n, C].

    `classification`: `label` and the softmax probabilities as `scores` by label. `multi-label`: the `labels` of a
    probability above one half, and all as `scores`. `regression`: `value`.
    """
    rows = outputs.astype(np.float64)
    if kind == "regression":
        yield from ({"value": rounded(row[0])} for row in rows)
    elif kind == "classification":
        for row in _softmax(rows):
            yield {"label": labels[int(row.argmax())], "scores": _scores(labels, row)}
    else:
        for row in 1 / (1 + np.exp(-np.clip(rows, -700, 700))):
            chosen = [label for label, score in zip(labels, row, strict=True) if score > 0.5]
            yield {"labels": chosen, "scores": _scores(labels, row)}


def tag_answer(text: str, words: NDArray[Any], logits: NDArray[Any], labels: Sequence[str], scheme: str) -> Answer:
    """The tags of a text's words, and its spans: entities, or where tags are labels by themselves all words.

    Args:
        text: The text.
        words: First and past-the-last characters of its words, int64 [words, 2].
        logits: Of the tags, float [words, C].
        labels: The tags' names.
        scheme: Of the tags, as `Task.scheme`.

    Returns:
        `{"words": [...], "tags": [...], "spans": [{"start", "end", "text", "label", "score"}, ...]}`; a span's score is
        the mean probability of its words' tags.
    """
    probabilities = _softmax(logits.astype(np.float64))
    chosen = probabilities.argmax(1)
    tags = [labels[tag] for tag in chosen]
    best = probabilities[np.arange(len(tags)), chosen]
    entities = entities_of(tags) if scheme != "none" else [(at, at + 1, tag) for at, tag in enumerate(tags)]
    spans = []
    for first, last, label in entities:
        start, end = int(words[first, 0]), int(words[last - 1, 1])
        score = rounded(best[first:last].mean())
        spans.append({"start": start, "end": end, "text": text[start:end], "label": label, "score": score})
    return {"words": [text[start:end] for start, end in words], "tags": tags, "spans": spans}


def _softmax(rows: NDArray[Any]) -> NDArray[Any]:
    exponentials = np.exp(rows - rows.max(axis=1, keepdims=True))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def _scores(labels: Sequence[str], row: NDArray[Any]) -> dict[str, float]:
    return {label: rounded(score) for label, score in zip(labels, row, strict=True)}


def rounded(value: float) -> float:
    """Six significant digits: what fp32 gives on any device."""
    return float(f"{value:.6g}")
