"""Choice of the library for fp32 matrix products on a CPU: torch's default, or oneDNN, which every torch contains.

By default, torch computes fp32 products with MKL, which uses AVX-512 only on Intel processors: on an AMD EPYC, oneDNN
is more than twice as fast (bench/LOG.md). torch has no switch for this. However, it sends all fp32 products to oneDNN
if `torch.backends.mkldnn.matmul.fp32_precision` permits rounding of the factors to bf16, and oneDNN rounds only if that
is faster, which is the case with AMX. Without AMX, its products have full precision. "onednn" is therefore rejected on
processors with AMX, and never chosen if a measurement detects rounded factors.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from electra_fast.config.config import AUTO, ModelConfig
from electra_fast.errors import InputError
from electra_fast.messages import say

DEFAULT = "default"
ONEDNN = "onednn"
KINDS = ("forward", "input gradient", "weight gradient")
# Least speedup of oneDNN; without it, measurements of equally fast libraries would choose at random.
MIN_SPEEDUP = 1.2
# Largest difference of two fp32 products, relative to the largest element; factors rounded to bf16 exceed 2^-13.
MAX_DIFFERENCE = 2.0**-16
# Limit of FLOPs per measured product: a few milliseconds on one core.
MAX_FLOPS = 2e8
REPETITIONS = 3

_MKLDNN: Any = torch.backends.mkldnn
_lock = threading.Lock()
_num_users = 0
_precision_before = "none"
# The process that computed first (0: none yet), and its forks that have computed.
first_process = 0
_forks: set[int] = set()


def allow_forks() -> None:
    """Switches to one thread in a fork of a process that has computed.

    Such a fork lacks OpenMP's threads, so an operation that waits for them would never end.
    """
    global first_process
    first_process = first_process or os.getpid()
    if os.getpid() == first_process or torch.get_num_threads() == 1:
        return
    torch.set_num_threads(1)
    if os.getpid() not in _forks:
        _forks.add(os.getpid())
        say("this process was forked after its parent had computed, so it uses one thread; fork earlier to use more")


@contextmanager
def use_matmul(name: str) -> Iterator[None]:
    """Computes all fp32 products of this process on the CPU with "default" or "onednn" within the context.

    Contexts of several threads may overlap. Raises InputError if the processor does not support "onednn".
    """
    allow_forks()
    require_matmul(name)
    if name != ONEDNN:
        yield
        return
    _count_users(1)
    try:
        yield
    finally:
        _count_users(-1)


def require_matmul(name: str) -> None:
    """Raises InputError if this processor cannot compute fp32 products with the library `name`."""
    if name == ONEDNN and not has_onednn():
        raise InputError(
            'matmul = "onednn": requires AVX-512 without AMX, because oneDNN rounds to bf16 with AMX; set "default"'
        )


def has_onednn() -> bool:
    """Returns whether torch can send fp32 products to oneDNN and oneDNN computes them in fp32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(_MKLDNN.is_available() and capabilities.get("avx512_bw") and not capabilities.get("amx_tile"))


def _count_users(change: int) -> None:
    global _num_users, _precision_before
    with _lock:
        if not _num_users:
            _precision_before = _MKLDNN.matmul.fp32_precision
        _num_users += change
        _MKLDNN.matmul.fp32_precision = "bf16" if _num_users else _precision_before


def choose_matmul(requested: str, device: torch.device) -> str:
    """Resolves `auto` to "default" if there is no alternative; otherwise `auto` stays, for a measurement.

    Raises InputError if the device does not support "onednn".
    """
    if requested == AUTO:
        return AUTO if device.type == "cpu" and has_onednn() else DEFAULT
    if requested == ONEDNN and device.type != "cpu":
        raise InputError(f'matmul = "onednn": requires a CPU, not {device.type}; set "auto"')
    require_matmul(requested)
    return requested


@dataclass(frozen=True)
class MatmulMeasurement:
    """Seconds of an encoder's products by library and kind, and the difference between the two libraries' results."""

    seconds: Mapping[str, Mapping[str, float]]
    difference: float

    @property
    def fastest(self) -> str:
        """oneDNN if all products together are clearly faster with it and equal up to fp32 rounding."""
        if self.difference > MAX_DIFFERENCE:
            return DEFAULT
        default, onednn = (sum(self.seconds[name].values()) for name in (DEFAULT, ONEDNN))
        return ONEDNN if default > MIN_SPEEDUP * onednn else DEFAULT

    def __str__(self) -> str:
        if self.difference > MAX_DIFFERENCE:
            return f"oneDNN's fp32 products differ by {self.difference:.1e} from torch's default"
        default = self.seconds[DEFAULT]
        onednn = self.seconds[ONEDNN]
        ratios = ", ".join(f"{kind} {default[kind] / onednn[kind]:.2f}" for kind in KINDS)
        return f"time of fp32 products with torch's default, relative to oneDNN: {ratios}"


def measure_matmul(shape: ModelConfig, num_tokens: int) -> MatmulMeasurement:
    """Times the three products of an encoder's linear layers with both libraries and torch's current threads.

    Takes a fraction of a second, because products of large layers have fewer than `num_tokens` tokens.
    """
    seconds = {name: dict.fromkeys(KINDS, 0.0) for name in (DEFAULT, ONEDNN)}
    difference = 0.0
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in _layers(shape):
        tokens = max(1, min(num_tokens, int(MAX_FLOPS / (2 * inputs * outputs))))
        sizes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        x, weight, dy = (torch.randn(size, generator=generator) for size in sizes)
        for kind, product in zip(KINDS, _products(x, weight, dy), strict=True):
            results = []
            for name in (DEFAULT, ONEDNN):
                with use_matmul(name):
                    results.append(product())
                    seconds[name][kind] += min(seconds_of(product) for _ in range(REPETITIONS))
            default, onednn = results
            difference = max(difference, float((default - onednn).abs().max() / default.abs().max()))
    return MatmulMeasurement(seconds, difference)


@cache
def fastest_matmul(shape: ModelConfig, device: torch.device) -> str:
    """Returns the faster library for an encoder on this device, measured once per process and not recorded."""
    return DEFAULT if choose_matmul(AUTO, device) == DEFAULT else measure_matmul(shape, 512).fastest


def _layers(shape: ModelConfig) -> list[tuple[int, int]]:
    """Returns (inputs, outputs) of a layer's four linear layers."""
    hidden = shape.hidden_size
    inner = shape.intermediate_size
    into = 2 * inner if shape.architecture == "modernbert" else inner
    return [(hidden, 3 * hidden), (hidden, hidden), (hidden, into), (inner, hidden)]


def _products(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Callable[[], Tensor], ...]:
    return lambda: x @ weight.T, lambda: dy @ weight, lambda: dy.T @ x


def seconds_of(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
