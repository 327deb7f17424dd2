"""Compares validation examples with training examples: label frequencies, exact and near duplicates."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from electra_fast.finetuning.readers.words import UNSPACED
from electra_fast.finetuning.task import Split

MIN_JACCARD = 0.8
"""Minimum Jaccard index of the words of near duplicates."""
_PUNCTUATION = (
    "!-/:-@\\[-`{-~\u00a1-\u00bf\u2000-\u206f\u3001-\u3003\u3008-\u3020\u3030\uff01-\uff0f\uff1a-\uff20"
    "\uff3b-\uff40\uff5b-\uff65"
)
# In scripts without spaces, each character is a word.
_WORDS = re.compile(rf"[{UNSPACED}]|[^\s{_PUNCTUATION}{UNSPACED}]+")

Example = tuple[str, ...]
Words = frozenset[tuple[int, str]]
"""The words of an example, each with the index of its text."""


@dataclass(frozen=True)
class Duplicate:
    """A validation example that repeats a training example, and the Jaccard index of their words."""

    row: int
    train_row: int
    jaccard: float
    is_exact: bool


def label_shares(train: Mapping[str, int], dev: Mapping[str, int]) -> dict[str, dict[str, float]]:
    """Returns each label's relative frequency in both splits, the largest difference first."""
    shares = [{name: size / max(1, sum(sizes.values())) for name, size in sizes.items()} for sizes in (train, dev)]
    pairs = {name: [fractions.get(name, 0.0) for fractions in shares] for name in dict.fromkeys((*train, *dev))}
    rows = {name: {"train": a, "dev": b, "difference": b - a} for name, (a, b) in pairs.items()}
    return dict(sorted(rows.items(), key=lambda row: -abs(row[1]["difference"])))


def find_duplicates(train: Split, dev: Split) -> list[Duplicate]:
    """Returns the validation examples that repeat a training example, in order, each with the most similar one.

    Exact duplicates are equal in lower case without punctuation and spaces; the words of near duplicates have a Jaccard
    index of at least `MIN_JACCARD`. In pairs of texts, both texts must be duplicates.
    """
    words: dict[str, list[str]] = {}  # cache by text, since contexts of questions repeat
    places: dict[str, int] = {}
    for row, texts in enumerate(train.texts):
        places.setdefault(text_key(texts, words), row)
    duplicates = dict[int, Duplicate]()
    others = dict[int, Words]()
    for row, texts in enumerate(dev.texts):
        if not any(_words(text, words) for text in texts):
            continue
        if (first := places.get(text_key(texts, words))) is not None:
            duplicates[row] = Duplicate(row, first, 1.0, True)
        else:
            others[row] = _set(texts, words)
    duplicates |= _near((_set(texts, words) for texts in train.texts), others)
    return [duplicates[row] for row in sorted(duplicates)]


def _near(train: Iterable[Words], dev: Mapping[int, Words]) -> dict[int, Duplicate]:
    """Returns the near duplicates by row.

    Sets of a and b words with a Jaccard index of t share at least s = ceil(t * max(a, b)) words. If all sets are sorted
    by the same key, their prefixes without the last s - 1 words therefore have a word in common. Sorting words that are
    rare in the validation set first leaves few pairs to compare.
    """
    frequencies = Counter(word for words in dev.values() for word in words)
    rank = {word: place for place, (word, _) in enumerate(sorted(frequencies.items(), key=lambda pair: pair[::-1]))}
    index: dict[tuple[tuple[int, str], int], list[int]] = defaultdict(list)
    for row, words in dev.items():
        for word in sorted(words, key=rank.__getitem__)[: _prefix(len(words))]:
            index[word, len(words)].append(row)
    duplicates: dict[int, Duplicate] = {}
    for train_row, words in enumerate(train):
        shared = [word for word in words if word in rank]
        num_left = _prefix(len(words)) - (len(words) - len(shared))  # words that the validation set lacks come first
        if num_left <= 0:
            continue
        prefix = sorted(shared, key=rank.__getitem__)[:num_left]
        sizes = range(_least(len(words)), int(len(words) / MIN_JACCARD + 1e-9) + 1)
        for row in {row for key in itertools.product(prefix, sizes) if key in index for row in index[key]}:
            jaccard = _jaccard(words, dev[row])
            if jaccard >= MIN_JACCARD and (row not in duplicates or jaccard > duplicates[row].jaccard):
                duplicates[row] = Duplicate(row, train_row, jaccard, False)
    return duplicates


def _least(size: int) -> int:
    """Returns the minimum number of words that a set of `size` words shares with a near duplicate."""
    return math.ceil(MIN_JACCARD * size - 1e-9)


def _prefix(size: int) -> int:
    return size - _least(size) + 1


def _words(text: str, known: dict[str, list[str]]) -> list[str]:
    if text not in known:
        known[text] = _WORDS.findall(text.lower())
    return known[text]


def text_key(texts: Example, known: dict[str, list[str]]) -> str:
    """Returns a key that is equal for exact duplicates; `known` caches the words of texts."""
    return "\n".join("".join(_words(text, known)) for text in texts)


def _set(texts: Example, known: dict[str, list[str]]) -> Words:
    return frozenset((place, word) for place, text in enumerate(texts) for word in _words(text, known))


def _jaccard(one: Words, other: Words) -> float:
    """Returns the Jaccard index of the words; in pairs of texts, the lower index of both."""
    common = one & other
    every = one | other
    jaccard = len(common) / len(every)
    if jaccard < MIN_JACCARD or not any(place for place, _ in every):
        return jaccard
    shared = Counter(place for place, _ in common)
    return min(shared[place] / count for place, count in Counter(place for place, _ in every).items())


def examples(train: Split, dev: Split, duplicates: Sequence[Duplicate]) -> list[dict[str, Any]]:
    return [
        {"id": dev.ids[duplicate.row], "text": " / ".join(dev.texts[duplicate.row])}
        | {"train_id": train.ids[duplicate.train_row], "train_text": " / ".join(train.texts[duplicate.train_row])}
        | {"kind": "exact" if duplicate.is_exact else "near", "jaccard": duplicate.jaccard}
        for duplicate in duplicates
    ]
