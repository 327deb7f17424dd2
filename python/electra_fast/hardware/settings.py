"""Settings that depend on the hardware: chosen and recorded when a run starts, and kept when it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from electra_fast.config.config import AUTO, FREE_KEYS, Config
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.distributed.division import smaller_micro_batches
from electra_fast.distributed.step_processes import choose_num_processes
from electra_fast.errors import InputError
from electra_fast.hardware.flops import flops_per_token
from electra_fast.hardware.kernel_check import TimeSteps
from electra_fast.hardware.kernel_choice import parse_kernels, resolve_kernels
from electra_fast.hardware.memory import choose_accumulate
from electra_fast.model.compute import CPU_PRECISIONS, ComputeConfig, choose_compute, choose_precision
from electra_fast.model.matmul import MatmulMeasurement, choose_matmul, measure_matmul, seconds_of, use_matmul
from electra_fast.model.model import Electra
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey


def choose_execution(requested: str, device: torch.device, sharding: str = "none") -> str:
    """Resolves `auto` to an execution mode; raises ValueError if the requested one is not available."""
    if sharding == "full":
        if requested not in ("auto", "eager"):
            raise InputError(f'train.execution = "{requested}": cannot run with train.sharding = "full"; set "auto"')
        return "eager"
    if requested in ("graph", "branches") and device.type != "cuda":
        raise InputError(f'train.execution = "{requested}": needs a CUDA device, got {device.type}; set "auto"')
    if requested == "auto":
        return "graph" if device.type == "cuda" else "eager"
    return requested


# Rules that resolve each key, in this order, since an attention backend may need 16 bits. They raise ValueError for
# values that cannot run on the device.
_RULES: dict[str, Callable[[Config, torch.device], str]] = {
    "train.matmul": lambda config, device: choose_matmul(config.train.matmul, device),
    "train.precision": lambda config, device: choose_precision(config.train.precision, device),
    "model.attention": lambda config, device: choose_compute(config, device).attention,
    "train.execution": lambda config, device: choose_execution(config.train.execution, device, config.train.sharding),
}
# On a GPU, `resolve_kernels` chooses these keys if kernels are `auto`.
_CHECKED_KEYS = ("model.attention", "train.execution")


def resolve_hardware(
    asked: Config,
    device: torch.device,
    folder: Path,
    recorded_keys: frozenset[str] = frozenset(),
    world_size: int = 1,
    time_steps: TimeSteps | None = None,
) -> tuple[Config, dict[str, str], list[str]]:
    """Returns a run's configuration with every `auto` key resolved, its kernels, and messages to the user.

    A new run gets the best values for the device. On a CPU, this may take a measurement of some seconds. A resumed run
    keeps its recorded values unless they cannot run on this device. Raises ValueError if an explicit value cannot run.

    `asked` has the recorded values; `recorded_keys` are the hardware keys set to `auto` with a value recorded in the
    run. For the other arguments, see `resolve_kernels`.
    """
    config = _without_unavailable(asked, device, recorded_keys)
    lines = []
    if choose_matmul(config.train.matmul, device) == AUTO:
        products = measure_products(config)
        config = config.override({"train.matmul": products.fastest})
        lines.append(f"train.matmul = auto: {products.fastest} ({products})")
    if choose_precision(config.train.precision, device) == AUTO:
        measurement = measure(config)
        config = config.override({"train.precision": measurement.fastest})
        lines.append(f"train.precision = auto: {measurement.fastest} ({measurement})")
    kernels: dict[str, str] = {}
    if device.type == "cpu" and parse_kernels(config.train.kernels)[0] == "triton":
        raise InputError('train.kernels = "triton": needs a GPU, got a CPU; set train.kernels = "auto"')
    is_divisible = config.train.accumulate == AUTO or "train.accumulate" in recorded_keys
    if device.type == "cuda":
        config, kernels, messages = _resolve_gpu(
            config, device, folder, world_size, time_steps, is_divisible=is_divisible
        )
        lines += messages
    elif is_divisible:
        config, _ = with_micro_batches(config, device)
    config = _by_rules(config, device)
    for name, (recorded, chosen) in asked.differences(config).items():
        if name in recorded_keys:
            lines.append(f'{name} = auto: {chosen}, since the recorded "{recorded}" cannot run on this device')
    lines += _advice(config, device, recorded_keys)
    return config, kernels, lines


def resolve_alone(config: Config, device: torch.device, time_steps: TimeSteps) -> tuple[Config, ComputeConfig]:
    """Resolves a configuration for one process without a run's folder. On a CPU, nothing is measured."""
    kernels: dict[str, str] = {}
    if device.type == "cuda":
        is_divisible = config.train.accumulate == AUTO
        config, kernels, _ = _resolve_gpu(config, device, None, 1, time_steps, is_divisible=is_divisible)
    config = _by_rules(config, device)
    return config, replace(choose_compute(config, device), kernels=tuple(kernels.items()))


def _resolve_gpu(
    config: Config,
    device: torch.device,
    folder: Path | None,
    world_size: int,
    time_steps: TimeSteps | None,
    *,
    is_divisible: bool,
) -> tuple[Config, dict[str, str], list[str]]:
    """Chooses kernels, attention backend and execution, and the number of micro-batches if it may be chosen.

    The first estimate of memory assumes kernels. If references need more, or if a timed step runs out of memory, the
    number of micro-batches grows and everything is checked again.
    """
    requested = config.train.accumulate
    if is_divisible:
        config, _ = with_micro_batches(config, device, world_size)
    while True:
        settled, kernels, messages = resolve_kernels(
            before_kernels(config, device), device, folder, world_size, time_steps
        )
        if not is_divisible:
            return settled, kernels, messages
        _, *smaller = smaller_micro_batches(settled.train, world_size)
        if smaller and any("out of memory" in message for message in messages):
            settled = settled.override({"train.accumulate": smaller[0]})
        settled, line = with_micro_batches(settled, device, world_size, tuple(kernels.items()))
        chosen = settled.train.accumulate
        if chosen == config.train.accumulate:
            return settled, kernels, messages + ([line] if chosen != requested else [])
        config = config.override({"train.accumulate": chosen})


def with_micro_batches(
    config: Config, device: torch.device, world_size: int = 1, kernels: tuple[tuple[str, str], ...] = ()
) -> tuple[Config, str]:
    """Returns the configuration with the fewest micro-batches that fit, at least the current number, and a message."""
    compute = replace(choose_compute(config, device), kernels=kernels)
    accumulate, line = choose_accumulate(config, compute, device, world_size)
    return config.override({"train.accumulate": accumulate}), line


def before_kernels(config: Config, device: torch.device) -> Config:
    """Resolves `auto` for all keys that do not depend on a check of kernels."""
    return _by_rules(config, device, [name for name in _RULES if name not in _CHECKED_KEYS])


def _by_rules(config: Config, device: torch.device, names: Iterable[str] = ()) -> Config:
    """Resolves `auto` for some keys, or for all, if no measurement is needed."""
    for name in names or _RULES:
        config = config.override({name: _RULES[name](config, device)})
    return config


def _without_unavailable(config: Config, device: torch.device, recorded_keys: frozenset[str]) -> Config:
    """Returns the configuration with `auto` for recorded values that cannot run on this device."""
    for name, rule in _RULES.items():
        try:
            rule(config, device)
        except InputError:
            if name not in recorded_keys:
                raise
            config = config.override({name: AUTO})
    return config


def _advice(config: Config, device: torch.device, recorded_keys: frozenset[str]) -> list[str]:
    """Returns a line about recorded values that a new run on this device would choose differently."""
    fresh = _by_rules(config.override(dict.fromkeys(recorded_keys, AUTO)), device)
    measured = _CHECKED_KEYS if device.type == "cuda" and config.train.kernels.startswith(AUTO) else ()
    differing = config.differences(fresh).items()
    others = {name: new for name, (_, new) in differing if new != AUTO and name not in measured}
    if not others:
        return []
    recorded = ", ".join(f"{name} = {config.value(name)}" for name in others)
    options = " ".join(f"--{name} {value}" for name, value in others.items())
    permission = "" if others.keys() <= FREE_KEYS else " --allow-changes"
    return [f"{recorded}: kept as recorded in this run; a new run on this device would use {options}{permission}"]


CPU = torch.device("cpu")
MAX_REPETITIONS = 3
# No repetition starts after this time, which excludes the warm-up.
MAX_SECONDS = 3.0
# Limit of a pass, one to two seconds on two cores. Larger passes use fewer rows.
MAX_FLOPS = 3e11


@dataclass(frozen=True)
class Measurement:
    """Seconds of a forward and backward pass over `num_rows` rows of `length` tokens, by precision."""

    num_rows: int
    length: int
    seconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        return faster_precision(self.seconds)

    def __str__(self) -> str:
        return (
            f"forward and backward passes of {self.num_rows} rows of {self.length} tokens take "
            f"{times_text(self.seconds)}"
        )


def faster_precision(seconds: Mapping[str, float]) -> str:
    return min(seconds, key=lambda precision: seconds[precision])


def times_text(seconds: Mapping[str, float]) -> str:
    """Formats times by precision: `0.2 s in fp32, 0.1 s in bf16`."""
    return ", ".join(f"{duration:.3g} s in {precision}" for precision, duration in seconds.items())


def measure(config: Config) -> Measurement:
    """Times the run's first micro-batch, or part of a large one, on the CPU in each precision.

    Operations get as many threads as in training. The measurement uses a separate model and loader and restores the
    random state, so a run is bitwise equal to a run whose precision was set. Passes run eagerly for any
    `train.execution`. Raises ValueError if the configured attention backend cannot run or the corpus is damaged.
    """
    num_processes = choose_num_processes(config, CPU)
    num_rows = _num_rows(config, num_processes)
    with torch.random.fork_rng(devices=[]), threads_of(num_processes), use_matmul(choose_compute(config, CPU).matmul):
        run_pass = _training_pass(config, num_rows)
        seconds = shortest_times({name: partial(run_pass, name) for name in CPU_PRECISIONS})
    return Measurement(num_rows, config.data.sequence_length, seconds)


def measure_products(config: Config) -> MatmulMeasurement:
    num_processes = choose_num_processes(config, CPU)
    num_rows = config.train.batch_size // config.train.num_micro_batches // num_processes
    with threads_of(num_processes):
        return measure_matmul(config.model, num_rows * config.data.sequence_length)


@contextmanager
def threads_of(num_processes: int) -> Iterator[None]:
    """Gives operations the threads of one of `num_processes` processes that share a step."""
    num_cores = torch.get_num_threads()
    torch.set_num_threads(max(1, num_cores // num_processes))
    try:
        yield
    finally:
        torch.set_num_threads(num_cores)


def shortest_times(passes: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns each function's shortest time in seconds. After a warm-up, all run in turn up to three times."""
    for run_pass in passes.values():
        run_pass()
    start = time.perf_counter()
    rounds = [{name: seconds_of(run_pass) for name, run_pass in passes.items()}]
    while len(rounds) < MAX_REPETITIONS and time.perf_counter() - start < MAX_SECONDS:
        rounds.append({name: seconds_of(run_pass) for name, run_pass in passes.items()})
    return {name: min(times[name] for times in rounds) for name in passes}


def _num_rows(config: Config, num_processes: int) -> int:
    length = config.data.sequence_length
    affordable = int(MAX_FLOPS / (flops_per_token(config).total * length))
    return max(1, min(config.train.batch_size // config.train.num_micro_batches // num_processes, affordable))


def _training_pass(config: Config, num_rows: int) -> Callable[[str], None]:
    loader = BatchLoader.from_config(config, batch_size=num_rows, num_threads=1, prefetch=1)
    batch = to_torch(next(loader))
    stage = max(objective_of(config).stages(), key=lambda candidate: candidate.num_steps)
    model = Electra(config).train()
    for name in stage.frozen:
        model.get_submodule(name).requires_grad_(False)
    denominators = stage.objective.loss_denominators(batch)
    key = RngKey(torch.tensor([config.train.seed, 0]))

    def run_pass(precision: str) -> None:
        compute = choose_compute(config.override({"train.precision": precision}), CPU)
        output = stage.objective.forward(model, MicroBatch(batch, compute, key, denominators))
        output.loss.backward()
        model.zero_grad()

    return run_pass
