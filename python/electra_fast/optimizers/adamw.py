"""AdamW, with bias correction or, as in the published code of BERT and ELECTRA, without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from electra_fast.optimizers.rule import UpdateRule


class AdamW(UpdateRule):
    """AdamW by torch's fused operator, in one pass over memory instead of ten."""

    update_bytes = 0

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Updates all parameters; norms and biases without weight decay."""
        state, config = self.state, self.state.config
        groups: dict[tuple[float, float], list[str]] = {}
        for name in gradients:
            is_decayed, lr_factor = state.parameters[name].dim() > 1, state.lr_factors.get(name, 1.0)
            if name in state.rows and state.skipped is None:
                self._update_rows(name, gradients[name])
            else:
                groups.setdefault((config.weight_decay if is_decayed else 0.0, lr_factor), []).append(name)
        for (weight_decay, lr_factor), names in groups.items():
            tensors = (state.parameters, gradients, state.exp_avg, state.exp_avg_sq)
            self._fused([[each[name] for name in names] for each in tensors], weight_decay, lr_factor)

    def _update_rows(self, name: str, gradient: Tensor) -> None:
        """Updates the rows of a table that have moments; the others decay: the same bits in a third of the traffic."""
        state, rows, lr_factor = self.state, self.state.rows[name], self.state.lr_factor(name)
        tensors: list[Tensor] = [state.parameters[name], state.exp_avg[name], state.exp_avg_sq[name]]
        if state.config.weight_decay:
            tensors[0].mul_(1 - float(-state.scalars[0] * lr_factor) * state.config.weight_decay)
        parameter, exp_avg, exp_avg_sq = parts = [tensor.index_select(0, rows) for tensor in tensors]
        self._fused([[parameter], [gradient.index_select(0, rows)], [exp_avg], [exp_avg_sq]], 0.0, lr_factor)
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.index_copy_(0, rows, part)

    def _fused(self, tensors: Sequence[list[Tensor]], weight_decay: float, lr_factor: float) -> None:
        """Updates parameters, given with their gradients, first and second moments."""
        state, config = self.state, self.state.config
        parameters, gradients, exp_avgs, exp_avg_sqs = tensors
        torch._fused_adamw_(
            parameters,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            [],
            [state.scalars[4]] * len(parameters),
            lr=-state.scalars[0] * lr_factor,
            beta1=config.beta1,
            beta2=config.beta2,
            weight_decay=weight_decay,
            eps=config.epsilon,
            amsgrad=False,
            maximize=False,
            found_inf=state.skipped,
        )
