"""AdamW, with bias correction or, as in the published code of BERT and ELECTRA, without."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from electra_fast.optimizers.rule import UpdateRule


class AdamW(UpdateRule):
    """AdamW by torch's fused operator, in one pass over memory instead of ten."""

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Updates all parameters; norms and biases without weight decay."""
        state, config = self.state, self.state.config
        groups: dict[tuple[bool, float], list[str]] = {}
        for name in gradients:
            groups.setdefault((state.parameters[name].dim() > 1, state.lr_factors.get(name, 1.0)), []).append(name)
        for (is_decayed, lr_factor), names in groups.items():
            torch._fused_adamw_(
                [state.parameters[name] for name in names],
                [gradients[name] for name in names],
                [state.exp_avg[name] for name in names],
                [state.exp_avg_sq[name] for name in names],
                [],
                [state.scalars[4]] * len(names),
                lr=-state.scalars[0] * lr_factor,
                beta1=config.beta1,
                beta2=config.beta2,
                weight_decay=config.weight_decay if is_decayed else 0.0,
                eps=config.epsilon,
                amsgrad=False,
                maximize=False,
                found_inf=state.skipped,
            )
