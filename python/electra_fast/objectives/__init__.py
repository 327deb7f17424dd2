"""The objectives: one frozen class each, and the table that names them.

`objective` has their interface and the parts that they share.
"""

from __future__ import annotations

from electra_fast.config.config import Config
from electra_fast.objectives.adversarial import AdversarialObjective
from electra_fast.objectives.all_tokens_mlm import AllTokensMLMObjective
from electra_fast.objectives.electra import ElectraObjective
from electra_fast.objectives.electra15 import Electra15Objective
from electra_fast.objectives.mlm import MaskedLMObjective
from electra_fast.objectives.objective import Objective
from electra_fast.objectives.replace_mlm import ReplaceMLMObjective
from electra_fast.objectives.two_stage import TwoStageObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "electra": ElectraObjective,
    "mlm": MaskedLMObjective,
    "electra15": Electra15Objective,
    "replace-mlm": ReplaceMLMObjective,
    "all-tokens-mlm": AllTokensMLMObjective,
    "two-stage": TwoStageObjective,
    "adversarial": AdversarialObjective,
}


def objective_of(config: Config) -> Objective:
    """Returns the objective that `objective.name` names."""
    return OBJECTIVES[config.objective.name](config)
