"""The keys whose `auto` depends on the hardware: chosen when a run starts, recorded in it, and kept when it resumes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from electra_fast.config.config import AUTO, HARDWARE_KEYS, Config
from electra_fast.errors import InputError
from electra_fast.model.compute import choose_compute, choose_precision
from electra_fast.model.matmul import choose_matmul
from electra_fast.training.precision import measure, measure_products
from electra_fast.training.run import FREE_KEYS, Run
from electra_fast.training.step import choose_execution

# How each key's value follows from the configuration, in this order: an attention backend may need 16 bits.
# ValueError where the value cannot run on the device.
_RULES: dict[str, Callable[[Config, torch.device], str]] = {
    "train.matmul": lambda config, device: choose_matmul(config.train.matmul, device),
    "train.precision": lambda config, device: choose_precision(config.train.precision, device),
    "model.attention": lambda config, device: choose_compute(config, device).attention,
    "train.execution": lambda config, device: choose_execution(config.train.execution, device, config.train.sharding),
}


def settle_hardware(run: Run, device: torch.device) -> tuple[Run, list[str]]:
    """The run with a value for every key that was `auto`, recorded in RUN/config.toml, and what to tell the user.

    A new run gets what suits the device; on a CPU that may take a measurement of some seconds. A resumed one keeps
    what it has recorded, unless that cannot run on this device. Raises ValueError where a value that was given, not
    `auto`, cannot run.
    """
    config, lines = _without_impossible(run, device), []
    if choose_matmul(config.train.matmul, device) == AUTO:
        products = measure_products(config)
        config = config.override({"train.matmul": products.fastest})
        lines.append(f"train.matmul = auto: {products.fastest} ({products})")
    if choose_precision(config.train.precision, device) == AUTO:
        measurement = measure(config)
        config = config.override({"train.precision": measurement.fastest})
        lines.append(f"train.precision = auto: {measurement.fastest} ({measurement})")
    config = _by_rules(config, device)
    for name, (recorded, chosen) in run.config.differences(config).items():
        if name in run.kept:
            lines.append(f'{name} = auto: {chosen}, as the "{recorded}" recorded in this run cannot run here')
    lines += _advice(run, config, device)
    return run.settle(config), lines


def _by_rules(config: Config, device: torch.device) -> Config:
    """The configuration with `auto` resolved wherever that takes no measurement."""
    for name, rule in _RULES.items():
        config = config.override({name: rule(config, device)})
    return config


def _without_impossible(run: Run, device: torch.device) -> Config:
    """The run's configuration, with `auto` for kept values that cannot run on this device."""
    config = run.config
    for name in HARDWARE_KEYS:
        try:
            _RULES[name](config, device)
        except InputError:
            if name not in run.kept:
                raise
            config = config.override({name: AUTO})
    return config


def _advice(run: Run, config: Config, device: torch.device) -> list[str]:
    """A line about kept values for which a new run on this device would have others."""
    fresh = _by_rules(config.override(dict.fromkeys(run.kept, AUTO)), device)
    others = {name: new for name, (_, new) in config.differences(fresh).items() if new != AUTO}
    if not others:
        return []
    kept = ", ".join(f"{name} = {config.value(name)}" for name in others)
    options = " ".join(f"--{name} {value}" for name, value in others.items())
    permission = "" if others.keys() <= FREE_KEYS else " --allow-changes"
    return [f"{kept}: recorded in this run, and kept; a new run on this device would have {options}{permission}"]
