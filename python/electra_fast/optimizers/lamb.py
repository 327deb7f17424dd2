"""LAMB (You et al., 2020), with a trust ratio per matrix of the published layout.

Shapes: K blocks of a parameter, X elements of one block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from electra_fast.optimizers.muon import num_blocks
from electra_fast.optimizers.rule import UpdateRule


class Lamb(UpdateRule):
    """Adam's update, scaled to each matrix's norm."""

    update_bytes = 8  # denominators and updates

    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Updates all parameters; norms and biases without weight decay or trust ratio."""
        state, config = self.state, self.state.config
        names, grads = list(gradients), list(gradients.values())
        parameters: list[Tensor] = [state.parameters[name] for name in names]
        exp_avgs = [state.exp_avg[name] for name in names]
        exp_avg_sqs = [state.exp_avg_sq[name] for name in names]
        state.update_exp_avg(gradients, config.beta1)
        beta2 = config.beta2 if state.skipped is None else torch.where(state.skipped > 0, 1.0, config.beta2)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - config.beta2)

        denominators = torch._foreach_sqrt(exp_avg_sqs)
        if config.bias_correction:
            torch._foreach_mul_(denominators, state.scalars[3])
        torch._foreach_add_(denominators, config.epsilon)
        updates = torch._foreach_div(exp_avgs, denominators)
        if config.bias_correction:
            torch._foreach_mul_(updates, state.scalars[2])
        matrices = [i for i, parameter in enumerate(parameters) if parameter.dim() > 1]
        if matrices:
            weights = [parameters[i] for i in matrices]
            torch._foreach_add_([updates[i] for i in matrices], weights, alpha=config.weight_decay)
        self._apply_trust_ratios({names[i]: (parameters[i], updates[i]) for i in matrices})
        torch._foreach_mul_(updates, state.negative_lr())
        if state.lr_factors:
            torch._foreach_mul_(updates, [state.lr_factor(name) for name in names])
        torch._foreach_add_(parameters, updates)

    def _apply_trust_ratios(self, matrices: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Multiplies each block's update by its trust ratio; parameter and update by name."""
        shards = self.state.shards
        if shards is None:
            for name, (parameter, update) in matrices.items():
                blocks_KX = update.view(num_blocks(name), -1)
                sizes, lengths = (x.view(blocks_KX.shape).norm(dim=1, keepdim=True) for x in (parameter, update))
                blocks_KX.mul_(_trust_ratios(sizes, lengths))
            return
        parameters, updates = (
            [piece for name, pair in matrices.items() for piece in shards.blocks(name, pair[i], num_blocks(name))]
            for i in range(2)
        )
        sizes, lengths = shards.norms([*parameters, *updates]).chunk(2)
        torch._foreach_mul_(updates, list(_trust_ratios(sizes, lengths).unbind()))


def _trust_ratios(sizes: Tensor, lengths: Tensor) -> Tensor:
    """Returns |parameter| / |update| from both norms; 1 where either is 0."""
    return torch.where((sizes > 0) & (lengths > 0), sizes / lengths, torch.ones_like(sizes))
