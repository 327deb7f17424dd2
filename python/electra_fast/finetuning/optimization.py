"""The learning rates of fine-tuning by a parameter's depth in the encoder."""

from __future__ import annotations

import re
from collections.abc import Iterable

from electra_fast.finetuning.config import FinetuneConfig

_LAYER = re.compile(r"encoder\.layers\.(\d+)\.")


def lr_factors(names: Iterable[str], num_layers: int, config: FinetuneConfig) -> dict[str, float]:
    """What the learning rate of each parameter is multiplied by: layer_decay to the power of its distance to the head.

    The published code gives embeddings and their projection depth 0, layer i (0-based) depth i + 1, and the head depth
    n + 2 with n the number of layers, so that the exponent n + 2 - depth is 2 in the top layer and n + 2 in the
    embeddings: with n = 12 and a decay of 0.8, 0.64 and 0.044. No layer has depth n + 1, which the code's author calls
    a leftover; in the form `paper` the head takes that depth, and all exponents but its own are one less.

    A modern encoder's first norm counts as embeddings, its last one, whose input is the top layer's, as the top layer.
    """
    head_depth = num_layers + (2 if config.layer_decay_form == "google" else 1)
    factors = {}
    for name in names:
        if match := _LAYER.match(name):
            depth = int(match[1]) + 1
        elif name.startswith("head."):
            depth = head_depth
        else:
            depth = num_layers if name.startswith("encoder.output_norm.") else 0
        factors[name] = config.layer_decay ** (head_depth - depth)
    return factors
