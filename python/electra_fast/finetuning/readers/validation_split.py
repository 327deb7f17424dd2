"""Sets a part of the training examples aside for validation, where a user gives no validation file.

The choosers return rows of the training split. Each is a function of the examples, the fraction and the seed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.task import Split, Task, select

Fold = tuple[int, int]
"""A fold's number, from 0, and the number of folds."""


def validation_rows(
    whole: Split, share: float | Fold, choose: Callable[[Split, float], NDArray[np.intp]]
) -> NDArray[np.intp]:
    """Returns the rows to validate on: a fraction of all, or those of a fold; each row is in one fold.

    `choose` returns the positions of a fraction of the examples. Raises InputError for a fold without examples.
    """
    if isinstance(share, float):
        return choose(whole, share)
    number, num_folds = share
    rest = np.arange(len(whole.texts))
    for each in range(num_folds - 1):
        chosen = choose(select(whole, whole.name, rest), 1 / (num_folds - each))
        if not 0 < len(chosen) < len(rest):
            raise InputError(f"{whole.path}: too few examples or contexts for {num_folds} folds")
        if each == number:
            return rest[chosen]
        rest = np.delete(rest, chosen)
    return rest


def set_aside(
    train: Split,
    chosen: NDArray[np.intp],
    seed: int,
    notes: list[str],
    *,
    what: str = "examples",
    part: str = "",
    too_few: str = "",
) -> tuple[Split, Split]:
    """Returns the training split without the `chosen` rows, and these as the dev split; raises InputError for none.

    Notes which `part` of the examples, which are called `what`, was chosen; `too_few` says why there is none.
    """
    num_rows, num_dev = len(train.texts), len(chosen)
    if not num_dev:
        reason = too_few or f"{num_rows} {what} are too few to set a dev split aside; give one with --dev"
        raise InputError(f"{train.path}: {reason}")
    is_dev = np.zeros(num_rows, dtype=bool)
    is_dev[chosen] = True
    part = part or f"{num_dev:,} of {num_rows:,} {what}"
    notes.append(f"{train.path}: {part} are set aside as the dev split (seed {seed}); give your own with --dev")
    return select(train, "train", np.flatnonzero(~is_dev)), select(train, "dev", np.flatnonzero(is_dev))


def stratified(groups: NDArray[np.int64], num_wanted: int, seed: int) -> NDArray[np.intp]:
    """Chooses rows from every group of two or more in proportion to its size, one at least and never all of it."""
    order = np.random.default_rng(seed).permutation(len(groups))
    shuffled = groups[order]
    sizes = np.bincount(groups)
    rank = np.empty(len(groups), dtype=np.int64)  # within the group, in shuffled order
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    rank[np.argsort(shuffled, kind="stable")] = np.arange(len(groups)) - starts
    share = (rank + 0.5) / sizes[shuffled]
    share[rank == 0] = 0
    share[rank == sizes[shuffled] - 1] = np.inf
    num_chosen = min(max(num_wanted, int((sizes > 1).sum())), int(np.isfinite(share).sum()))
    return order[np.argsort(share, kind="stable")[:num_chosen]]


def covering(has_label: NDArray[np.bool_], num_wanted: int, seed: int) -> NDArray[np.intp]:
    """Chooses rows such that every label of two or more is among them and among the others, where that is possible."""
    order = np.random.default_rng(seed).permutation(len(has_label))
    left, chosen = has_label.sum(0), dict[int, None]()

    def choose(rows: NDArray[np.intp], number: int) -> None:
        for row in rows:
            if len(chosen) >= number or len(chosen) == len(order) - 1:
                return
            if int(row) not in chosen and (left[has_label[row]] > 1).all():
                chosen[int(row)] = None
                left[has_label[row]] -= 1

    for label in np.argsort(left, kind="stable"):
        if not has_label[list(chosen), label].any():
            choose(order[has_label[order, label]], len(chosen) + 1)
    choose(order, num_wanted)
    return np.array(list(chosen), dtype=np.intp)


def with_all_tags(train: Split, task: Task, num_wanted: int, seed: int) -> NDArray[np.intp]:
    """Chooses sentences such that every tag keeps one for training, and where it has another, one for validation."""
    assert train.targets is not None  # only a test file may lack tags
    num_rows = len(train.texts)
    tags = [set(target.tolist()) for target in train.targets]
    left = Counter(itertools.chain.from_iterable(tags))
    chosen: dict[int, None] = {}
    order = np.random.default_rng(seed).permutation(num_rows).tolist()
    lacking = {number for number, label in enumerate(task.labels) if task.scheme == "none" or label[:1] == "B"}
    for is_any_wanted in (False, True):  # first what the validation split lacks
        for row in order:
            is_wanted = len(chosen) < num_wanted if is_any_wanted else not lacking.isdisjoint(tags[row])
            if is_wanted and row not in chosen and all(left[tag] > 1 for tag in tags[row]):
                left.subtract(tags[row])
                lacking -= tags[row]
                chosen[row] = None
    return np.array(list(chosen), dtype=np.intp)


def whole_contexts(contexts: Sequence[str], fraction: float, seed: int) -> NDArray[np.intp]:
    """Chooses all questions of some contexts."""
    distinct = list(dict.fromkeys(contexts))
    num_dev = min(max(1, round(len(distinct) * fraction)), len(distinct) - 1)
    chosen = {distinct[number] for number in np.random.default_rng(seed).permutation(len(distinct))[:num_dev]}
    return np.flatnonzero([context in chosen for context in contexts])
