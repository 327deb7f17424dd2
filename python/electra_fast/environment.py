"""What a run computes with: device, attention backend, dtype, and the versions that it reports."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from electra_fast import _data
from electra_fast.attention import choose_attention, is_deterministic
from electra_fast.config import Config
from electra_fast.electra import Backend


def choose_device() -> torch.device:
    """CUDA where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_backend(config: Config, device: torch.device) -> Backend:
    """Activation dtype and attention backend of `train.precision` and `model.attention`."""
    precision = config.train.precision
    if precision == "auto":
        precision = "bf16" if _has_bf16(device) else "fp32"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Backend(choose_attention(config.model.attention, device, dtype, config.model.attention_dropout), dtype)


def _has_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def environment(device: torch.device, backend: Backend, execution: str) -> dict[str, str]:
    """Versions, device, backends: what a run says it used."""
    cuda = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    repeatable = "to the bit" if is_deterministic(backend.attention) else f"but for {backend.attention}'s gradient"
    return {
        "electra-fast": _data.VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version_or_none("triton"),
        "device": cuda or f"cpu, {torch.get_num_threads()} threads",
        "attention": backend.attention,
        "activations": str(backend.dtype).removeprefix("torch."),
        "execution": execution,
        "kernels": "triton" if device.type == "cuda" else "references",
        "repeatable": repeatable,
    }


def record_environment(folder: Path, facts: dict[str, str]) -> None:
    """Appends what this session of a run used to `environment.jsonl`, and says it on standard error."""
    with (folder / "environment.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**facts, "process": os.getpid()}) + "\n")
    print(", ".join(f"{name} {value}" for name, value in facts.items()), file=sys.stderr)


def _version_or_none(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
