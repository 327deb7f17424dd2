"""Linear layers and norms, with fp32 weights whatever the dtype of the activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from electra_fast.config.config import ModelConfig
from electra_fast.ops import operations as ops
from electra_fast.ops.linear import linear
from electra_fast.ops.operations import Dropout


class Norm(nn.Module):
    """LayerNorm; without bias in the `modern` architecture."""

    def __init__(self, width: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if config.architecture == "bert" else None
        self.eps = config.eps

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def after_residual(self, linear: Linear, x_TF: Tensor, residual_TD: Tensor, dropout: Dropout) -> Tensor:
        """LayerNorm(residual + dropout(linear(x)))."""
        weights = (linear.weight, linear.bias, residual_TD, self.weight, self.bias)
        return ops.residual_norm(x_TF, *weights, self.eps, dropout)


class Linear(nn.Linear):
    """A linear layer whose fp32 weights are cast to the activations' dtype where they are used."""

    def reset_parameters(self) -> None:
        """Leaves the weights to `initialize`, and the global random state alone."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)
