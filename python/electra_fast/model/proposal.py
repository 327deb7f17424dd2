"""The fixed distribution that takes the place of a generator where `generator.kind` is `uniform` or `unigram`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from electra_fast.config.config import Config
from electra_fast.ops import operations as ops
from electra_fast.ops.sampling import alias_table

if TYPE_CHECKING:
    from electra_fast.model.compute import RngKey


class Proposal(nn.Module):
    """Proposes replacements without looking at the text; has no parameters.

    `uniform`: every entry of the vocabulary, special ones included, as in the published code. `unigram`: in proportion
    to the counts of the training corpus, which `set_counts` takes and checkpoints store.
    """

    table_V2: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        is_uniform, vocab_size = config.generator.kind == "uniform", config.model.vocab_size
        # Computed from numbers, also in a model on the meta device.
        uniform_V = torch.ones(vocab_size, device="cpu")
        table = alias_table(uniform_V) if is_uniform else torch.zeros(vocab_size, 2, dtype=torch.int64)
        self.register_buffer("table_V2", table, persistent=not is_uniform)

    @property
    def has_counts(self) -> bool:
        """True once there is a distribution to sample from."""
        return bool(self.table_V2.any())

    def set_counts(self, counts_V: Tensor) -> None:
        """Makes these counts the distribution: int or float [V] or fewer; entries without a count are not drawn."""
        counts_V = torch.nn.functional.pad(counts_V, (0, len(self.table_V2) - len(counts_V)))
        self.table_V2.copy_(alias_table(counts_V))

    def sample(self, slot_M: Tensor, rng_key: RngKey) -> Tensor:
        """One sample per slot, keyed as the generator's are; int64 [M] → int64 [M]."""
        return ops.sample_alias(self.table_V2, slot_M, rng_key.seed_and_step)
