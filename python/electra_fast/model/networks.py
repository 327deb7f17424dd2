"""The networks that an objective trains: the shape of each encoder, and its heads.

The model, the FLOP counts, reports and exports read it.
"""

from __future__ import annotations

from dataclasses import dataclass

from electra_fast.config.config import Config, ModelConfig

PARTS = {
    "discriminator": ("embeddings", "discriminator", "discriminator_head"),
    "encoder": ("embeddings", "encoder", "encoder_head"),
    "generator": ("generator_embeddings", "generator", "generator_head"),
}
"""Submodules of `Electra` by role: embeddings, encoder, head. The result of an objective comes before its generator."""


@dataclass(frozen=True)
class Head:
    """A head on an encoder.

    Args:
        kind: A key of a table in `model.HEADS`.
        token_fraction: Fraction of the tokens that it computes for, which sets its cost.
        num_forward: Forward passes per step.
    """

    kind: str
    token_fraction: float = 1.0
    num_forward: int = 1


@dataclass(frozen=True)
class Network:
    """An encoder and its heads.

    Args:
        shape: Sizes of the encoder, and of its embeddings unless they are shared.
        heads: By the attribute of `Electra` that holds each. A head named after its role is exported with it.
        is_trained: False for a network that only runs forward.
    """

    shape: ModelConfig
    heads: dict[str, Head]
    is_trained: bool = True


def corrective_weight(config: Config) -> float:
    """Weight of the corrective loss, which only `electra` has."""
    return config.objective.corrective_weight if config.objective.name == "electra" else 0.0


def networks_of(config: Config, objective: str | None = None) -> dict[str, Network]:
    """The networks by role, in the order in which they are built; the objective's result comes last.

    Args:
        config: The run's configuration.
        objective: One of `config.presets.OBJECTIVE_SPECS`; the configuration's own by default.
    """
    name, mask_prob = objective or config.objective.name, config.data.mask_prob
    masked_lm = Head("masked_lm", mask_prob)
    if name == "mlm":
        return {"generator": Network(config.model, {"generator_head": masked_lm})}
    if name == "replace-mlm":
        return _generator(config, name) | {"encoder": Network(config.model, {"encoder_head": masked_lm})}
    if name == "all-tokens-mlm":
        heads = {"encoder_head": Head("masked_lm"), "copy_head": Head("logit")}
        return _generator(config, name) | {"encoder": Network(config.model, heads)}
    heads = {"discriminator_head": Head("replaced_token")}
    if corrective_weight(config):
        heads["corrective_head"] = masked_lm
    if config.objective.contrastive_weight:
        heads["sentence_head"] = Head("logit")
    return _generator(config, name) | {"discriminator": Network(config.model, heads)}


def _generator(config: Config, objective: str) -> dict[str, Network]:
    """A fraction of the model, or nothing where replacements come from a fixed distribution."""
    if config.generator.kind != "model":
        return {}
    mask_prob = config.data.mask_prob
    heads = {"generator_head": Head("masked_lm", mask_prob)}
    if objective == "adversarial":  # its head runs twice: to sample, and for the likelihood of the samples
        heads["generator_head"] = Head("masked_lm", mask_prob, num_forward=2)
        heads["baseline_head"] = Head("logit", mask_prob)
    return {"generator": Network(config.generator_shape(), heads, is_trained=objective != "two-stage")}
