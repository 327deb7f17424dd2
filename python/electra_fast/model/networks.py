"""The networks that an objective trains: the shape of each encoder, and its heads.

The model, the counts of FLOPs, reports and exports read this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from electra_fast.config.config import Config, ModelConfig
from electra_fast.config.presets import OBJECTIVE_SPECS, Head

PARTS = {
    "discriminator": ("embeddings", "discriminator", "discriminator_head"),
    "encoder": ("embeddings", "encoder", "encoder_head"),
    "generator": ("generator_embeddings", "generator", "generator_head"),
}
"""Submodules of `Electra` by role: embeddings, encoder, head; an objective's result comes before its generator."""


@dataclass(frozen=True)
class Network:
    """An encoder and its heads.

    Args:
        shape: Sizes of the encoder, and of its embeddings unless they are shared.
        heads: Heads by their attribute in `Electra`.
        is_trained: False for a network that only runs forward.
    """

    shape: ModelConfig
    heads: dict[str, Head]
    is_trained: bool = True


def networks_of(config: Config, objective: str | None = None) -> dict[str, Network]:
    """Returns the networks by role, in the order in which they are built; the objective's result comes last.

    There is no generator if replacements come from a fixed distribution.

    Args:
        config: The run's configuration.
        objective: One of `OBJECTIVE_SPECS`; by default the configuration's.
    """
    spec = OBJECTIVE_SPECS[objective or config.objective.name]
    networks = {}
    for role, heads in spec.networks.items():
        is_result = role == spec.roles[-1]
        if is_result or config.generator.kind == "model":
            shape = config.model if is_result else config.generator_shape()
            present = {at: head for at, head in heads.items() if not head.weight or vars(config.objective)[head.weight]}
            networks[role] = Network(shape, present, is_trained=is_result or spec.num_stages == 1)
    return networks
