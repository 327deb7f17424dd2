"""How good a discriminator becomes, by its size, the tokens that it reads and the text that they come from.

The form is that of Hoffmann et al., 2022 (Training Compute-Optimal Large Language Models), with tokens that count less
the more often they are read, as in Muennighoff et al., 2023 (Scaling Data-Constrained Language Models).
`bench/scaling_law.py` fits the constants to the runs of `bench/data/recipes.jsonl`; `docs/scale.md` says how far they
hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from electra_fast.config.config import ModelConfig


@dataclass(frozen=True)
class ScalingLaw:
    """1 - AUC = floor + size / N**alpha + data / D**beta, for N weights and D tokens, both in millions.

    Args:
        floor: Error of an infinite model after infinite text.
        size: Error of a model of 1 M weights beyond the floor.
        alpha: Exponent of the weights.
        data: Error after 1 M tokens beyond that.
        beta: Exponent of the tokens.
        epochs: Epochs beyond the first that repeated text is worth at most.
    """

    floor: float
    size: float
    alpha: float
    data: float
    beta: float
    epochs: float

    def error(self, weights: float, tokens: float, text: float = math.inf) -> float:
        """Returns the expected 1 - AUC of a model of `weights` after `tokens` of a text of `text` tokens."""
        limit = self.floor + self.size * math.pow(weights / 1e6, -self.alpha)
        return limit + self.data * math.pow(self.fresh(tokens, text) / 1e6, -self.beta)

    def fresh(self, tokens: float, text: float) -> float:
        """Returns the number of tokens read once that teach as much as `tokens` of a text of `text` tokens."""
        repeats = max(0.0, tokens / text - 1)
        return min(tokens, text) + (text * self.epochs * -math.expm1(-repeats / self.epochs) if repeats else 0.0)


LAW = ScalingLaw(floor=0.0001, size=0.1008, alpha=0.1918, data=0.3229, beta=0.7063, epochs=45.44)


def layer_weights(shape: ModelConfig) -> int:
    """Returns the weights of all layers' matrices, which the law calls the size."""
    hidden, matrices = shape.hidden_size, 3 if shape.architecture == "modern" else 2
    return shape.num_layers * hidden * (4 * hidden + matrices * shape.intermediate_size)
