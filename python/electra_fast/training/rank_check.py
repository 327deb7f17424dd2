"""Whether the ranks still train the same model, and which of them is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def fingerprint(model: nn.Module) -> int:
    """64 bits of the values of all parameters; another value of any single one changes them.

    An exact sum of the values' bit patterns, each parameter's times an odd number of its own.
    """
    sums: list[Tensor] = [_bits(p).sum(dtype=torch.int64) * (2 * i + 1) for i, p in enumerate(model.parameters())]
    return int(torch.stack(sums).sum())


def _bits(parameter: Tensor) -> Tensor:
    return parameter.detach().contiguous().view(torch.int32)


def odd_ranks(fingerprints: Sequence[int]) -> str:
    """Which ranks differ, as a sentence; empty if none does."""
    counts = Counter(fingerprints)
    if len(counts) == 1:
        return ""
    (most, number), *_ = counts.most_common()
    odd = [str(rank) for rank, found in enumerate(fingerprints) if found != most]
    if 2 * number <= len(fingerprints):
        return (
            f"ranks {', '.join(map(str, range(len(fingerprints))))} have different parameters, and no majority agrees"
        )
    whose = f"rank {odd[0]}'s" if len(odd) == 1 else f"ranks {', '.join(odd)}'s"
    return f"{whose} parameters differ from those of the other ranks"


def slowest(seconds: Sequence[float]) -> tuple[int, float]:
    """The rank that has spent the most seconds, and these."""
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    return rank, seconds[rank]
