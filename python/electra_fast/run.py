"""A run's folder: made new, or reopened where the same run left off; anything else is refused."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from electra_fast import _data, checkpoint
from electra_fast.attention import adds_in_any_order, choose_attention
from electra_fast.config import Config
from electra_fast.corpus import Corpus, Tokenizer
from electra_fast.electra import Backend
from electra_fast.huggingface_tokenizer import check_vocabulary, run_tokenizer, write_tokenizer

# Keys that may change between a run's sessions: where things lie, how steps run, how often something is written.
FREE_KEYS = {
    "data.corpus",
    "train.out",
    "train.execution",
    "train.log_every",
    "train.eval_every",
    "train.eval_batches",
    "train.checkpoint_every",
    "train.keep_checkpoints",
}
# What an imported model (a run at step 0) fixes; the rest is chosen when its training starts.
IMPORTED_SECTIONS = ("model.", "generator.")


@dataclass(frozen=True)
class Run:
    """An open run: its folder, resolved configuration, and the checkpoint to go on from, if any."""

    folder: Path
    config: Config
    checkpoint: Path | None
    state: dict[str, Any] | None


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds a folder's lock; ValueError when another process trains there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file; --out (train.out) needs a folder for the run")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is training in this folder") from None
        yield


def open_run(config: Config, corpus: Corpus) -> Run:
    """Makes the folder `train.out`, or reopens it at its newest checkpoint.

    Raises ValueError where the folder holds something else, a run of another configuration, or one
    of another corpus.
    """
    folder = Path(config.train.out)
    config = _with_vocabulary(config, corpus)
    saved = folder / "config.toml"
    if not saved.exists():
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name != ".lock")
        if foreign:
            raise ValueError(f"{folder}: holds {foreign[0]} but no run (config.toml); choose an empty folder for --out")
        _write_new(folder, config, corpus)
        return Run(folder, config, None, None)
    checkpoint.remove_unfinished(folder)
    if not checkpoint.steps(folder):
        # Stopped before its first checkpoint: nothing to keep, so begin again.
        _write_new(folder, config, corpus)
        return Run(folder, config, None, None)
    directory = checkpoint.latest(folder)
    check_vocabulary(run_tokenizer(folder), corpus)
    state = checkpoint.read_state(directory)
    _refuse_another(folder, Config.load(saved), config, is_import="loader" not in state)
    if "corpus" in state and state["corpus"] != corpus.content_hash:
        raise ValueError(
            f"{directory}: trained on the corpus with content hash {state['corpus']}, and {config.data.corpus} has "
            f"{corpus.content_hash}; give the same corpus, or another --out"
        )
    checkpoint.write_atomically(saved, config.to_toml())
    return Run(folder, config, directory, state)


def _with_vocabulary(config: Config, corpus: Corpus) -> Config:
    if config.model.vocab_size not in (0, corpus.vocab_size):
        raise ValueError(
            f"model.vocab_size = {config.model.vocab_size}, but the corpus was prepared with {corpus.vocab_size} "
            "entries; leave the key out, or prepare with the model's vocabulary"
        )
    return replace(config, model=replace(config.model, vocab_size=corpus.vocab_size))


def _write_new(folder: Path, config: Config, corpus: Corpus) -> None:
    write_tokenizer(folder / "tokenizer", Tokenizer.of(corpus), max_length=config.model.max_positions)
    checkpoint.write_atomically(folder / "config.toml", config.to_toml())


def _refuse_another(folder: Path, saved: Config, config: Config, is_import: bool) -> None:
    for name, (was, now) in saved.differences(config).items():
        if name in FREE_KEYS or (is_import and not name.startswith(IMPORTED_SECTIONS)):
            continue
        raise ValueError(
            f"{folder}: this run was started with {name} = {was!r}, now it is {now!r}; "
            "leave it as it was to go on, or give another --out"
        )


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
    repeatable = f"but for {backend.attention}'s gradient" if adds_in_any_order(backend.attention) else "to the bit"
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
