"""`electra15`: replaced-token detection with a discriminator that learns from only 15% of the tokens (section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.objective import NetworkInputs, RngKey, random_words

_STREAM = 3


@dataclass(frozen=True)
class Electra15Objective(ElectraObjective):
    """`electra` with the discriminator's loss averaged over as many tokens of each row as are masked.

    `objective.disc_positions` selects the masked tokens, or tokens drawn independently of them. (Tokens drawn only from
    the unmasked ones would all be original.)
    """

    name = "electra15"
    denominator = "masked_weight"

    def counted(self, inputs: NetworkInputs, rng_key: RngKey) -> Tensor:
        """The mask of the discriminator's loss; bool [T]."""
        ids_BL, slots = inputs.masked_ids_BL, inputs.slots
        masked_T = torch.zeros(ids_BL.numel() + 1, dtype=torch.bool, device=ids_BL.device)
        masked_T = masked_T.scatter(0, slots.position_M, slots.weight_M > 0)[:-1]
        if self.config.objective.disc_positions == "masked":
            return masked_T
        column_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(ids_BL.shape)
        words_BL = random_words(rng_key, column_BL, _STREAM)
        words_BL = torch.where(inputs.valid_T.view(ids_BL.shape), words_BL, 2**32)  # sorts after every valid token
        rank_BL = words_BL.argsort(dim=1, stable=True).argsort(dim=1)
        return (rank_BL < masked_T.view(ids_BL.shape).sum(1, keepdim=True)).flatten()
