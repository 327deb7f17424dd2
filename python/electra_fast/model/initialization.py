"""The first values of parameters, as functions of a seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def initialize(model: nn.Module, architecture: str, seed: int) -> None:
    """Sets every parameter from a seed: biases 0, norms 1, matrices by the architecture's rule.

    `bert`, as the published code: normal of standard deviation 0.02 truncated at two of them; Glorot
    uniform, TensorFlow's default, where that code names no initializer: the projection E → D and the
    discriminator's classifier. `modern`: tables by the normal; matrices uniform of variance
    1 / (3 inputs), those that write to the residual stream 0, so that every layer starts as the identity.
    """
    random = torch.Generator().manual_seed(seed)
    modern = architecture == "modern"
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # has no values, and torch would import its compiler to draw none
            continue
        with torch.no_grad():
            if parameter.dim() < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)  # nn.Linear draws its biases
            elif modern and name.endswith(("attention_out.weight", "feed_forward_out.weight")):
                parameter.zero_()
            elif modern and ".token" not in name:
                bound = parameter.shape[1] ** -0.5
                parameter.uniform_(-bound, bound, generator=random)
            elif not modern and name.endswith(("projection.weight", "classifier.weight")):
                glorot_uniform_(parameter, random)
            else:
                _truncated_normal(parameter, 0.02, random)


def glorot_uniform_(x: Tensor, random: torch.Generator) -> None:
    """Fills a matrix uniformly with variance 2 / (inputs + outputs)."""
    bound = math.sqrt(6 / sum(x.shape))
    x.uniform_(-bound, bound, generator=random)


def _truncated_normal(x: Tensor, deviation: float, random: torch.Generator) -> None:
    """Fills x from a normal truncated at two standard deviations, by inversion.

    Not `nn.init.trunc_normal_`: torch 2.15 draws otherwise than 2.11, and twelve times slower.
    """
    mass = math.erf(2 / math.sqrt(2))
    x.uniform_(-mass, mass, generator=random).erfinv_().mul_(deviation * math.sqrt(2))
    x.clamp_(-2 * deviation, 2 * deviation)  # a draw at the edge may round beyond it
