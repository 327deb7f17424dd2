"""The objectives by name, and the settings that they and their options require."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from electra_fast.config.file import Scalar, Value, format_value
from electra_fast.errors import InputError

Needs = Mapping[str, tuple[Scalar, ...]]
"""Allowed values by configuration key, the usual one first."""

DISTINCT = ("paper", "bert", "whole-word", "span")
"""The values of `data.masking` that draw no position twice."""
_WHY_DISTINCT = "google draws some positions twice and averages their samples, whose probability is then undefined"


@dataclass(frozen=True)
class ObjectiveSpec:
    """An objective's contract with the configuration; its loss is in `objectives/`, its networks in `model.networks`.

    Args:
        roles: Networks that it trains, in the order in which they are built; the last one is the result.
        needs: Settings that it requires.
        num_stages: Training stages, each at least one step long.
    """

    roles: tuple[str, ...] = ("generator", "discriminator")
    needs: Needs = field(default_factory=dict)
    num_stages: int = 1


OBJECTIVE_SPECS = {
    "electra": ObjectiveSpec(),
    "mlm": ObjectiveSpec(("generator",), {"generator.kind": ("model",)}),
    "electra15": ObjectiveSpec(needs={"data.masking": DISTINCT}),
    "replace-mlm": ObjectiveSpec(("generator", "encoder"), {"data.masking": DISTINCT}),
    "all-tokens-mlm": ObjectiveSpec(("generator", "encoder"), {"data.masking": DISTINCT}),
    "two-stage": ObjectiveSpec(
        needs={
            "data.masking": DISTINCT,
            "generator.kind": ("model",),
            "generator.fraction": (1.0,),
            "generator.num_layers": (0,),
            "generator.embedding_size": (0,),
            "model.tying": ("none",),
        },
        num_stages=2,
    ),
    "adversarial": ObjectiveSpec(
        needs={
            "data.masking": DISTINCT,
            "generator.kind": ("model",),
            "objective.temperature": (1.0,),
            "objective.disallow_correct": (False,),
        }
    ),
}

OPTION_NEEDS: dict[str, tuple[Scalar, Needs]] = {
    "objective.contrastive_weight": (0.0, {"data.masking": DISTINCT, "objective.name": ("electra",)}),
    "objective.generator_first": (
        0,
        {"objective.name": ("electra",), "generator.kind": ("model",), "model.tying": ("none", "embeddings")},
    ),
    "objective.disc_positions": ("masked", {"objective.name": ("electra15",)}),
    "generator.kind": ("model", {"objective.temperature": (1.0,), "objective.disallow_correct": (False,)}),
}
"""Per option, the value that turns it off, and what any other value requires."""


def check_needs(name: str, value: Callable[[str], Value]) -> None:
    """Raises ValueError if an objective or an option lacks a setting that it requires.

    Args:
        name: The objective.
        value: Returns the value of a configuration key.
    """
    _require(f"objective.name = {format_value(name)}", OBJECTIVE_SPECS[name].needs, value)
    for key, (off, needs) in OPTION_NEEDS.items():
        if value(key) != off:
            _require(f"{key} = {format_value(value(key))}", needs, value)


def _require(what: str, needs: Needs, value: Callable[[str], Value]) -> None:
    missing = [
        f"{key} = {' or '.join(map(format_value, allowed))} (it is {format_value(value(key))})"
        for key, allowed in needs.items()
        if value(key) not in allowed
    ]
    if missing:
        why = f"; {_WHY_DISTINCT}" if missing[0].startswith("data.masking") else ""
        raise InputError(f"{what} needs {', '.join(missing)}{why}")
