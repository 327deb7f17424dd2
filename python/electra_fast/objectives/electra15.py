"""`electra15`: replaced-token detection whose discriminator learns from 15 % of the tokens only (section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast.model.compute import RngKey
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.losses import NetworkInputs, random_words

_STREAM = 3


@dataclass(frozen=True)
class Electra15Objective(ElectraObjective):
    """As `electra`, with the discriminator's loss over as many tokens of each row as are masked, and their mean.

    `objective.disc_positions` says over which: the masked ones, or ones drawn independently of them. (Drawn among the
    others they would all be originals.)
    """

    name = "electra15"
    denominator = "masked_weight"

    def counted(self, inputs: NetworkInputs, rng_key: RngKey) -> Tensor:
        """The tokens of the discriminator's loss, bool [T]."""
        ids_BL, slots = inputs.masked_ids_BL, inputs.slots
        masked_T = torch.zeros(ids_BL.numel() + 1, dtype=torch.bool, device=ids_BL.device)
        masked_T = masked_T.scatter(0, slots.position_M, slots.weight_M > 0)[:-1]
        if self.config.objective.disc_positions == "masked":
            return masked_T
        column_BL = torch.arange(ids_BL.shape[1], device=ids_BL.device).expand(ids_BL.shape)
        words_BL = random_words(rng_key, column_BL, _STREAM)
        words_BL = torch.where(inputs.valid_T.view(ids_BL.shape), words_BL, 2**32)  # past all that is valid
        rank_BL = words_BL.argsort(dim=1, stable=True).argsort(dim=1)
        return (rank_BL < masked_T.view(ids_BL.shape).sum(1, keepdim=True)).flatten()
