"""One or several corpora of a run: their names, weights, and combined properties.

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
    """The folders and their weights, or None without a weight. A single folder may contain colons."""
    if isinstance(corpora, (str, os.PathLike)):
        return [(os.fspath(corpora), None)]
    if isinstance(corpora, Mapping):
        return [(os.fspath(folder), _weight(folder, weight)) for folder, weight in corpora.items()]
    entries = [_divided(os.fspath(entry)) for entry in corpora]
    return [(folder, float(weight) if weight else None) for folder, weight in entries]


def absolute(corpora: Corpora) -> str | list[str] | dict[str, float]:
    """The same corpora with absolute paths, so that a resumed run finds them from anywhere; URLs stay unchanged."""
    if isinstance(corpora, Configuration):
        raise InputError("the first argument is the corpus; pass the configuration as config=")
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
    """The corpora of a run, often only one; each supplies rows in proportion to its weight.

    Args:
        corpora: Folder of a corpus; or several folders as a list of "FOLDER:WEIGHT" or a mapping from folder to weight.
            Without weights, rows are in proportion to the corpora's tokens.

    Raises:
        FileNotFoundError: One of the folders has no corpus; the message names it.
        ValueError: The corpora have different vocabularies, two are the same, a weight is not a number above 0 or is
            missing, or a file is damaged.
    """

    def __init__(self, corpora: Corpora) -> None:
        entries = weighted_folders(corpora)
        self.folders = [folder for folder, _ in entries]
        self.corpora = [Corpus(folder) for folder in self.folders]
        # A single corpus needs no weight; the loader reports whether it can be read.
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
        """Identifies the corpora and their weights: the hash of one corpus, "HASH:WEIGHT HASH:WEIGHT" for several."""
        if self.is_single:
            return self.corpora[0].content_hash
        return " ".join(
            f"{corpus.content_hash}:{weight}" for corpus, weight in zip(self.corpora, self.weights, strict=True)
        )

    @property
    def holdout(self) -> Corpora | None:
        """The validation sets (`prepare --holdout`) of the corpora that have one.

        Without weights: a pass reads each of them once, and any part of a pass has their tokens in proportion.
        """
        if self.is_single:
            return self.corpora[0].holdout
        folders = [corpus.holdout for corpus in self.corpora if corpus.holdout is not None]
        opened = [(Corpus(folder), folder) for folder in folders]
        # By content, because two corpora may have the same validation set; empty ones are skipped.
        by_content = {corpus.content_hash: folder for corpus, folder in opened if corpus.num_tokens}
        return list(by_content.values()) or None

    def token_counts(self, cache: tuple[str, int] | None = None) -> NDArray[np.int64] | NDArray[np.float64]:
        """Expected number of occurrences of each id in the whole mixture: shape [vocab_size].

        Returns int64 counts for a single corpus. For several, fp64, each corpus scaled to its fraction of the tokens;
        without weights, the sum of the counts. Reads all tokens; `cache` works as in `Corpus.token_counts`, in total.
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
        """Short names: the last part of each folder's path if these differ, else the folders."""
        last = [Path(folder).name for folder in self.folders]
        return last if max(Counter(last).values()) == 1 else self.folders


# Fields of a loader's state: everything that determines its rows, and its position in a corpus.
_STREAM = {"seed": int, "options": str}
_PLACE = {"corpus": str, "epoch": int, "group": int, "row": int}
_LANES = {"corpus": str, "lanes": list}


def resumed_state(fresh: dict[str, Any], saved: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns the initial state of a loader whose rows differ from a saved state's, and a message about it.

    A corpus in both starts its next epoch. But with equal seeds and options, the corpora of two mixtures keep
    their order, so they continue at their positions and only their weights change.
    """
    before = {member["corpus"]: member for member in _members(saved)}
    same = ("seed", "options")
    continues = "corpora" in fresh and "corpora" in saved and all(fresh[name] == saved[name] for name in same)

    def begin(member: dict[str, Any]) -> dict[str, Any]:
        known = before.get(member["corpus"])
        if known is None:
            return member
        lanes = known.get("lanes")  # epoch, group, row and turns of each
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
        return state, "the weights of the corpora changed; existing corpora continue from their current position"
    return state, "this change alters the rows, so the data order restarts with a new epoch"


def with_present_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a loader's state with the current names of masking and packing; older releases had others."""
    words = [word.partition("=") for word in str(state.get("options")).split(" ")]
    options = " ".join(f"{name}{equals}{present_name(f'data.{name}', value)}" for name, equals, value in words)
    return {**state, "options": options} if "options" in state else dict(state)


def stream_of(state: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns everything that the rows of a loader depend on, from its state."""
    corpora = [(member["corpus"], member.get("weight")) for member in _members(state)]
    return state["seed"], state["options"], corpora


def _members(state: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    members: Any = state.get("corpora", [state])
    if not isinstance(members, list) or not all(isinstance(member, dict) for member in members):
        raise InputError("checkpoint: loader.corpora must be a list of objects")
    kinds_of = [_LANES if "lanes" in member else _PLACE for member in members]
    for table, kinds in ((state, _STREAM), *zip(members, kinds_of, strict=True)):
        for name, kind in kinds.items():
            if not isinstance(table.get(name), kind):
                raise InputError(f"checkpoint: loader.{name} is missing or has the wrong type")
        for lane in table.get("lanes", ()):
            if not (lane is None or isinstance(lane, list) and [type(number) for number in lane] == [int] * 4):
                raise InputError("checkpoint: loader.lanes must have four integers per lane")
    checked: Iterable[Mapping[str, Any]] = members
    return checked


def _divided(entry: str) -> tuple[str, str]:
    """Folder and weight of an entry "FOLDER:WEIGHT"; an existing folder with that whole name has no weight."""
    folder, _, weight = entry.rpartition(":")
    try:
        float(weight)
    except ValueError:
        return entry, ""
    return (folder, weight) if folder and not Path(entry).exists() else (entry, "")


def _weight(folder: str, weight: object) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise InputError(f"{folder}: weight = {weight!r}: must be a number above 0")
    return float(weight)


def _absolute(folder: str) -> str:
    if folder.endswith(".toml"):
        raise InputError(f"{folder}: must be the folder of a corpus; pass a configuration with --config (config=)")
    return _data.url_of(folder) or (os.path.abspath(folder) if folder else "")
