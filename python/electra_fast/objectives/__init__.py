"""What a model is trained to do: one frozen class per objective, and the table that names them.

`objective` has the contract, `losses` the pieces that objectives share. A configuration asks its objective without
torch being loaded, so these modules import torch only inside the methods that compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import Objective

if TYPE_CHECKING:
    from electra_fast.config import Config

OBJECTIVES: dict[str, type[Objective]] = {
    "electra": ElectraObjective,
    "mlm": MaskedLMObjective,
}


def objective_of(config: Config) -> Objective:
    """The objective that `objective.name` names."""
    return OBJECTIVES[config.objective.name](config)
