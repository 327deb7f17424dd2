"""What a run reports about its environment: versions, device, backends."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from electra_fast import _data
from electra_fast.files.atomic_files import errors_named
from electra_fast.messages import say
from electra_fast.model.attention import is_deterministic
from electra_fast.model.compute import ComputeConfig


def environment(device: torch.device, compute: ComputeConfig, execution: str, num_ranks: int = 1) -> dict[str, str]:
    """Versions, device and backends by name."""
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    repeatable = "to the bit" if is_deterministic(compute.attention) else f"but for {compute.attention}'s gradient"
    return {
        "electra-fast": _data.VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_or_none("triton"),
        "device": cuda or f"cpu, {torch.get_num_threads()} threads",
        "ranks": str(num_ranks),
        "attention": compute.attention,
        "matmul": compute.matmul,
        "activations": str(compute.dtype).removeprefix("torch."),
        "execution": execution,
        "kernels": "triton" if device.type == "cuda" else "references",
        "repeatable": repeatable,
    }


def record_environment(folder: Path, facts: dict[str, str]) -> None:
    """Appends the environment of this session to `environment.jsonl`, and prints it on standard error."""
    path = folder / "environment.jsonl"
    with errors_named(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "process": os.getpid()}) + "\n")
    say(", ".join(f"{name} {value}" for name, value in facts.items()))


def _version_or_none(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
