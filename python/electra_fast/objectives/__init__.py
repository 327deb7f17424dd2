"""The objectives, one frozen class each, and the table of their names.

`objective` has their interface and shared parts.
"""

from __future__ import annotations

from electra_fast.config.config import Config
from electra_fast.objectives import electra, mlm
from electra_fast.objectives.objective import Objective

OBJECTIVES: dict[str, type[Objective]] = {
    "electra": electra.ElectraObjective,
    "mlm": mlm.MaskedLMObjective,
    "electra15": electra.Electra15Objective,
    "replace-mlm": mlm.ReplaceMLMObjective,
    "all-tokens-mlm": mlm.AllTokensMLMObjective,
    "two-stage": electra.TwoStageObjective,
    "adversarial": electra.AdversarialObjective,
}


def objective_of(config: Config) -> Objective:
    return OBJECTIVES[config.objective.name](config)
