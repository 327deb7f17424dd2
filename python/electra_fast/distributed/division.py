"""The division of a step's rows among ranks, into groups whose gradients are summed, and into micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from electra_fast.config.config import TrainConfig
from electra_fast.errors import InputError

NUM_EXACT_GROUPS = 4
"""Number of groups per step under `train.reduce = "exact"`; the number of ranks must divide it."""


def nth_part(total: int, part: int, num_parts: int) -> range:
    """Returns one of `num_parts` parts of `range(total)`, divided as `BatchLoader` divides the rows of a batch."""
    return range(part * total // num_parts, (part + 1) * total // num_parts)


def num_groups(train: TrainConfig, world_size: int) -> int:
    """Returns the number of groups on all ranks."""
    return NUM_EXACT_GROUPS if train.reduce == "exact" else world_size


def rows_per_micro_batch(train: TrainConfig, world_size: int = 1) -> int:
    """Returns the rows of a rank's largest micro-batch."""
    return math.ceil(math.ceil(train.batch_size / num_groups(train, world_size)) / train.num_micro_batches)


def smaller_micro_batches(train: TrainConfig, world_size: int = 1) -> dict[int, int]:
    """Returns values of `train.accumulate`, from the current one upwards, with their rows per micro-batch.

    Values that give the same number of rows as a smaller one are left out. The last gives one row, if the ranks permit.
    """
    max_count = train.batch_size // (world_size if train.sharding == "full" else 1)
    values = (n for n in range(train.num_micro_batches, max_count + 1) if train.batch_size % n == 0)
    rows = {n: rows_per_micro_batch(replace(train, accumulate=n), world_size) for n in values}
    return {n: rows[n] for n in rows if not any(rows[m] == rows[n] for m in rows if m < n)}


@dataclass(frozen=True)
class Division:
    """One rank's part of a step.

    Args:
        rows: Its rows, numbered within the step.
        groups: The micro-batches of each of its groups, as nonempty ranges of rows.
        local_groups: Indices of its groups.
        num_groups: Number of groups on all ranks.
    """

    rows: range
    groups: tuple[tuple[range, ...], ...]
    local_groups: range
    num_groups: int

    @classmethod
    def of(cls, train: TrainConfig, rank: int = 0, world_size: int = 1, num_processes: int = 1) -> Division:
        """Divides a step according to `train.reduce` and `train.accumulate`.

        `fast` has one group per rank. With `exact`, groups and the sums within them are the same for any number of
        ranks. `num_processes` processes of a rank share each micro-batch. Raises ValueError if the number of ranks does
        not divide the number of groups.
        """
        count = num_groups(train, world_size)
        if count % world_size:
            raise InputError(
                f'train.reduce = "exact": needs 1, 2 or 4 ranks, got {world_size}; set train.reduce = "fast"'
            )
        if train.sharding == "full" and train.batch_size < world_size * train.num_micro_batches:
            raise InputError(
                f"train.batch_size = {train.batch_size}: must be at least {world_size * train.num_micro_batches} with "
                f'train.sharding = "full", a row per rank and micro-batch; raise it, or lower train.accumulate'
            )
        local = nth_part(count, rank, world_size)
        return cls(
            rows=nth_part(train.batch_size, rank, world_size),
            groups=tuple(
                _micro_batches(nth_part(train.batch_size, group, count), train.num_micro_batches * num_processes)
                for group in local
            ),
            local_groups=local,
            num_groups=count,
        )


def _micro_batches(rows: range, count: int) -> tuple[range, ...]:
    parts = (rows[part.start : part.stop] for part in (nth_part(len(rows), i, count) for i in range(count)))
    return tuple(part for part in parts if part)
