"""Measures the FLOPs per second of training on a configuration's corpus, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from electra_fast.child_process import describe_end, python_command
from electra_fast.config.config import AUTO, Config
from electra_fast.data.loader import BatchLoader
from electra_fast.errors import TrainingFailed
from electra_fast.model.compute import choose_device, use_compute
from electra_fast.model.matmul import fastest_matmul
from electra_fast.model.model import Electra
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.reproduction.workers import Slot
from electra_fast.training.flops import flops_per_token
from electra_fast.training.hardware import settle_alone
from electra_fast.training.parallel_step import create_step

# The first steps compile kernels, capture graphs and fill the allocator.
_WARMUP_STEPS = 5
_SECONDS = 3.0


def measure_speed(config: Config, slot: Slot) -> float:
    """Measures the FLOPs per second of training steps in a slot."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_text(config.to_toml(), encoding="utf-8")
        command = python_command("from electra_fast.reproduction.speed import main; main(sys.argv[1])", str(path))
        environment = {**os.environ, **slot.environment}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=environment)
    if done.returncode:
        why = describe_end(done.returncode, done.stderr)
        raise TrainingFailed(f"a few steps of {config.objective.name} failed ({why})")
    return float(done.stdout)


def flops_per_second(config: Config) -> float:
    """Returns the true model FLOPs per second of training steps, measured for a few seconds."""
    device = choose_device()
    config, compute = settle_alone(config.resolved(), device)
    if config.train.matmul == AUTO:
        compute = replace(compute, matmul=fastest_matmul(config.model, device))
    model = Electra(config).to(device)
    optimizer = Optimizer(model.named_parameters(), config.optimizer, matrix_dtype=compute.dtype)
    loader, num_steps = BatchLoader.from_config(config), 0
    with use_compute(compute):
        step = create_step(model, optimizer, config, compute, config.train.execution)
        start = time.perf_counter()
        while num_steps <= _WARMUP_STEPS or time.perf_counter() - start < _SECONDS:
            step(next(loader), num_steps)
            num_steps += 1
            if num_steps == _WARMUP_STEPS:
                step.read_totals()  # waits for the device
                start = time.perf_counter()
        step.read_totals()
    seconds = time.perf_counter() - start
    step.close()
    tokens = (num_steps - _WARMUP_STEPS) * config.train.batch_size * config.data.sequence_length
    return tokens * flops_per_token(config).total / seconds


def main(path: str) -> None:
    """Prints the FLOPs per second of a configuration."""
    print(flops_per_second(Config.load(Path(path))))
