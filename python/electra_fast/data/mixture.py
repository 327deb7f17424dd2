"""One corpus, or several that are trained on together: their names, weights, and combined properties.

Sits between the configuration's `data.corpus` and the loader, which reads the corpora in proportion to their weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast import _data
from electra_fast.config.section import Configuration, present_name
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.errors import InputError

Corpora = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, float]
"""A folder; folders as "FOLDER:WEIGHT", or without weights; or weights by folder. A folder may be a URL."""

Weighted = list[tuple[str, float | None]]


def weighted_folders(corpora: Corpora) -> Weighted:
    """The folders and their weights, None where there is none. A single folder may contain colons."""
    if isinstance(corpora, (str, os.PathLike)):
        return [(os.fspath(corpora), None)]
    if isinstance(corpora, Mapping):
        return [(os.fspath(folder), _weight(folder, weight)) for folder, weight in corpora.items()]
    entries = [_divided(os.fspath(entry)) for entry in corpora]
    return [(folder, float(weight) if weight else None) for folder, weight in entries]


def absolute(corpora: Corpora) -> str | list[str] | dict[str, float]:
    """The same with absolute paths, so that a resumed run finds them from anywhere; URLs stay unchanged."""
    if isinstance(corpora, Configuration):
        raise InputError("the first argument is the corpus; give the configuration with config=")
    if isinstance(corpora, (str, os.PathLike)):
        return _absolute(os.fspath(corpora))
    if isinstance(corpora, Mapping):
        return {_absolute(os.fspath(folder)): weight for folder, weight in corpora.items()}
    entries = [_divided(os.fspath(entry)) for entry in corpora]
    return [f"{_absolute(folder)}:{weight}" if weight else _absolute(folder) for folder, weight in entries]


def missing_folder(corpora: Corpora) -> str | None:
    folders = (folder for folder, _ in weighted_folders(corpora))
    return next((folder for folder in folders if _data.url_of(folder) is None and not Path(folder).exists()), None)


class Mixture:
    """The corpora of a run, often only one; each gives rows in proportion to its weight.

    Args:
        corpora: A corpus's folder; or several as a list of "FOLDER:WEIGHT" or a mapping from folder to weight.
            Without any weight, rows are in proportion to the corpora's tokens.

    Raises:
        FileNotFoundError: There is no corpus in one of the folders; the message names it.
        ValueError: The corpora have different vocabularies, two are the same, a weight is not a number above 0 or is
            missing, or a file is damaged.
    """

    def __init__(self, corpora: Corpora) -> None:
        entries = weighted_folders(corpora)
        self.folders = [folder for folder, _ in entries]
        self.corpora = [Corpus(folder) for folder in self.folders]
        # A corpus alone has no share to compute; the loader says whether it can be read.
        self.weights = [1] if isinstance(corpora, (str, os.PathLike)) else _data.mixture_weights(entries)
        self.shares = [weight / sum(self.weights) for weight in self.weights]  # of the rows
        self.is_single = len(self.corpora) == 1
        self.vocab_size = self.corpora[0].vocab_size
        self.num_tokens = sum(corpus.num_tokens for corpus in self.corpora)

    def __str__(self) -> str:
        return ", ".join(self.folders)

    @property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.of(self.corpora[0])

    @property
    def content_hash(self) -> str:
        """Identifies the corpora and their weights: the hash of one corpus, "HASH:WEIGHT HASH:WEIGHT" of several."""
        if self.is_single:
            return self.corpora[0].content_hash
        return " ".join(
            f"{corpus.content_hash}:{weight}" for corpus, weight in zip(self.corpora, self.weights, strict=True)
        )

    @property
    def holdout(self) -> Corpora | None:
        """The validation corpora (`prepare --holdout`) of those corpora that have one.

        Without weights: a pass reads each once, and any part of a pass has tokens of each in proportion.
        """
        if self.is_single:
            return self.corpora[0].holdout
        folders = [corpus.holdout for corpus in self.corpora if corpus.holdout is not None]
        opened = [(Corpus(folder), folder) for folder in folders]
        # By content, because two corpora may have the same validation part; one without text is left out.
        found = {corpus.content_hash: folder for corpus, folder in opened if corpus.num_tokens}
        return list(found.values()) or None

    def token_counts(self, cache: tuple[str, int] | None = None) -> NDArray[np.int64] | NDArray[np.float64]:
        """Expected number of occurrences of each id in as many tokens as the corpora have: shape [vocab_size].

        The int64 counts of a single corpus. For several, fp64, each corpus scaled to its share of the tokens; without
        weights, this is the sum of the counts. Reads all tokens; `cache` is that of `Corpus.token_counts`, for all.
        """
        if cache is not None:
            cache = cache[0], cache[1] // len(self.corpora)
        if self.is_single:
            return self.corpora[0].token_counts(cache)
        expected = np.zeros(self.vocab_size)
        for share, corpus in zip(self.shares, self.corpora, strict=True):
            expected += share * self.num_tokens / corpus.num_tokens * corpus.token_counts(cache)
        return expected

    def names(self) -> list[str]:
        """Short names: the last part of each folder's path where these differ, else the folders."""
        last = [Path(folder).name for folder in self.folders]
        return last if max(Counter(last).values()) == 1 else self.folders


# Fields of a loader's state: what all its rows depend on, and its position in a corpus.
_STREAM = {"seed": int, "options": str}
_PLACE = {"corpus": str, "epoch": int, "group": int, "row": int}
_LANES = {"corpus": str, "lanes": list}


def resumed_state(fresh: dict[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the initial state of a loader whose rows differ from those of a saved state, and a message about it.

    A corpus that both have starts its next epoch. But with equal seeds and options, the corpora of two mixtures keep
    their order, so they continue at their positions and only their shares change.
    """
    before = {member["corpus"]: member for member in _members(saved)}
    same = ("seed", "options")
    continues = "corpora" in fresh and "corpora" in saved and all(fresh[name] == saved[name] for name in same)

    def begin(member: dict[str, Any]) -> dict[str, Any]:
        known = before.get(member["corpus"])
        if known is None:
            return member
        lanes = known.get("lanes")  # each of them epoch, group, row and turns
        if continues:
            if lanes is not None:
                return member | {"lanes": [[*lane[:3], 0] for lane in lanes]}
            return member | {name: known[name] for name in ("epoch", "group", "row")}
        epoch = known["epoch"] if lanes is None else max(lane[0] for lane in lanes)
        if "lanes" in member:
            return member | {"lanes": [[epoch + 1, 0, 0, 0]] * len(member["lanes"])}
        return member | {"epoch": epoch + 1}

    if "corpora" in fresh:
        state = fresh | {"corpora": [begin(member) for member in fresh["corpora"]]}
    else:
        state = begin(fresh)
    if continues:
        return state, "the corpora have other shares from here on; those that were there before go on where they were"
    return state, "the change makes other rows of the corpus: their order starts anew, with another epoch"


def with_present_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a loader's state, in which older releases called masking and packing by other names."""
    words = [word.partition("=") for word in str(state.get("options")).split(" ")]
    options = " ".join(f"{name}{equals}{present_name(f'data.{name}', value)}" for name, equals, value in words)
    return {**state, "options": options} if "options" in state else dict(state)


def stream_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns everything that the rows of a loader depend on, from its state."""
    corpora = [(member["corpus"], member.get("weight")) for member in _members(state)]
    return state["seed"], state["options"], corpora


def _members(state: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    members: Any = state.get("corpora", [state])
    if not isinstance(members, list) or not all(isinstance(each, dict) for each in members):
        raise InputError("a checkpoint's state: loader.corpora is not a list of objects")
    kinds_of = [_LANES if "lanes" in member else _PLACE for member in members]
    for table, kinds in ((state, _STREAM), *zip(members, kinds_of, strict=True)):
        for name, kind in kinds.items():
            if not isinstance(table.get(name), kind):
                raise InputError(f"a checkpoint's state: {name} of its loader is missing or not of its type")
        for lane in table.get("lanes", ()):
            if not (lane is None or isinstance(lane, list) and [type(number) for number in lane] == [int] * 4):
                raise InputError("a checkpoint's state: a lane of its loader is not four integers")
    found: Iterable[Mapping[str, Any]] = members
    return found


def _divided(entry: str) -> tuple[str, str]:
    """Folder and weight of an entry "FOLDER:WEIGHT"; an existing folder of that whole name has no weight."""
    folder, _, weight = entry.rpartition(":")
    try:
        float(weight)
    except ValueError:
        return entry, ""
    return (folder, weight) if folder and not Path(entry).exists() else (entry, "")


def _weight(folder: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise InputError(f"{folder}: weight {weight!r}: must be a number above 0")
    return float(weight)


def _absolute(folder: str) -> str:
    if folder.endswith(".toml"):
        raise InputError(f"{folder}: a configuration is given with --config (config=), and a corpus is a folder")
    return _data.url_of(folder) or (os.path.abspath(folder) if folder else "")
