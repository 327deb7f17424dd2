"""`doctor`: the software and hardware of this machine, the features that work and their speed, for a bug report."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from electra_fast.card import card_of, missing_for_triton
from electra_fast.child_process import describe_end, python_command
from electra_fast.config.config import AUTO, Config, config_of
from electra_fast.data.corpus import Corpus
from electra_fast.data.loader import BatchLoader
from electra_fast.data.prepare import prepare, vocab
from electra_fast.errors import InputError
from electra_fast.hardware.kernel_check import CALLS, REFERENCE, STEP, Record
from electra_fast.hardware.kernel_choice import FILE, cache_folder, read_records, resolve_kernels, version_or_none
from electra_fast.hardware.settings import before_kernels, with_micro_batches
from electra_fast.model.compute import choose_device
from electra_fast.results import Result
from electra_fast.training.parallel_step import time_steps

PACKAGES = ("torch", "triton", "numpy", "pyarrow", "tokenizers")
# Optional packages, each with a program that fails if the package does not work.
EXTRAS = {
    "transformers": "import transformers",
    "onnxscript": "import onnxscript",
    "onnxruntime": "import onnxruntime",
    "xformers": "import sys; from electra_fast.model import attention; sys.exit(attention.failure_of_xformers())",
    "flash-attn-4": "import sys; from electra_fast.model.flash_attention_4 import failure; sys.exit(failure())",
    "distributed": "import distributed",
}
EXTRA_SECONDS = 180
# The text of a measurement is repeated up to this size.
TEXT_BYTES = 16 << 20
MIN_FREE_DISK = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True, eq=False, repr=False)
class DoctorReport(Result):
    """The result of `doctor`, by section. Each of the `problems` is a sentence with a remedy."""

    software: Mapping[str, str]
    machine: Mapping[str, str]
    gpus: Sequence[Mapping[str, str]]
    extras: Mapping[str, str]
    cache: Mapping[str, str]
    data_engine: Mapping[str, str]
    problems: Sequence[str]
    kernels: Mapping[str, Any] | None = None
    """The check on a GPU; None on a CPU."""

    def lines(self) -> Iterator[str]:
        yield ", ".join(f"{name} {version}" for name, version in self.software.items())
        yield ", ".join(self.machine.values())
        for index, gpu in enumerate(self.gpus):
            yield f"GPU {index}: {gpu['name']}, {gpu['architecture']}, driver {gpu['driver']}, {gpu['memory']}"
        if not self.gpus:
            yield "no GPU: training and prediction run on the processor"
        yield "extras: " + "; ".join(f"{name} {outcome}" for name, outcome in self.extras.items())
        yield "cache: " + ", ".join(self.cache.values())
        yield "data engine: " + ", ".join(f"{name} {speed}" for name, speed in self.data_engine.items())
        if self.kernels is not None:
            yield from _kernel_lines(self.kernels)
        for problem in self.problems:
            yield f"problem: {problem}"
        yield "no problems found" if not self.problems else f"{len(self.problems)} problem(s)"


def doctor(config: Config | str | os.PathLike[str] | None = None, *, device: str = AUTO) -> DoctorReport:
    """Checks this machine: versions, GPUs, optional packages, kernels, speed.

    Args:
        config: The run whose kernels are checked, on a GPU, or its TOML file; its corpus is ignored. `Config()` by
            default.
        device: The device of the run, with the values of `pretrain`.
    """
    config = config_of(config)
    target = choose_device(device)
    problems: list[str] = []
    gpus = _gpus(problems)
    extras = _extras(problems)
    cache = _cache(problems)
    kernels = None
    with tempfile.TemporaryDirectory() as folder:
        shards = Path(folder) / "shards"
        data_engine = _data_engine(shards, config)
        if target.type == "cuda":
            try:
                kernels = _kernels(config, target, shards, Path(folder) / "run", problems)
            except InputError as error:  # such as a model that does not fit
                problems.append(str(error))
    return DoctorReport(_software(), _machine(), gpus, extras, cache, data_engine, problems, kernels)


def _software() -> dict[str, str]:
    versions = {"electra-fast": version_or_none("electra-fast"), "python": platform.python_version()}
    versions |= {name: version_or_none(name) for name in PACKAGES}
    return versions | {"torch": torch.__version__, "cuda": torch.version.hip or torch.version.cuda or "none"}


def _machine() -> dict[str, str]:
    pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    processor = f"{platform.machine()}, {num_cores} cores"
    if platform.machine() == "x86_64":
        features = [name for name, has in torch.cpu.get_capabilities().items() if has is True and "avx512" in name]
        processor += ", AVX-512" if features else ", no AVX-512"
    return {
        "system": platform.platform(),
        "processor": processor,
        "memory": f"{pages * size / GIB:.0f} GiB",
    }


def _gpus(problems: list[str]) -> list[dict[str, str]]:
    driver = _driver()
    if not torch.cuda.is_available():
        if driver:
            problems.append(
                f"there is a GPU (driver {driver}), but torch {torch.__version__} does not find it; install a torch "
                "for this driver's CUDA, or check CUDA_VISIBLE_DEVICES"
            )
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        card = card_of(device)
        free, total = torch.cuda.mem_get_info(device)
        if missing := missing_for_triton(card):
            problems.append(f"no kernels on {card.name}: {missing}")
        gpus.append(
            {
                "name": card.name,
                "architecture": f"{card.architecture or 'unknown'} ({'.'.join(map(str, card.capability))})",
                "driver": driver or "unknown",
                "memory": f"{free / GIB:.1f} of {total / GIB:.1f} GiB free",
            }
        )
    return gpus


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        process = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20)
        if process.returncode == 0:
            return process.stdout.split("\n")[0].strip()
    return ""


def _extras(problems: list[str]) -> dict[str, str]:
    with ThreadPoolExecutor() as pool:
        outcomes = dict(zip(EXTRAS, pool.map(_load, EXTRAS, EXTRAS.values()), strict=True))
    for name, outcome in outcomes.items():
        if "fails" in outcome:
            problems.append(f"{name} is installed, but {outcome}; reinstall it, or remove it")
    return outcomes


def _load(package: str, program: str) -> str:
    version = version_or_none(package)
    if version == "none":
        return "not installed"
    try:
        done = subprocess.run(
            python_command(program), capture_output=True, text=True, errors="replace", timeout=EXTRA_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"{version} fails to load: no answer after {EXTRA_SECONDS} s"
    if done.returncode == 0:
        return f"{version} loads"
    return f"{version} fails to load: {describe_end(done.returncode, done.stderr)}"


def _cache(problems: list[str]) -> dict[str, str]:
    folder = cache_folder().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        problems.append(f"{folder}: {error.strerror}; set XDG_CACHE_HOME to a writable folder")
        return {"folder": str(folder), "state": str(error.strerror)}
    if free < MIN_FREE_DISK:
        problems.append(f"{folder}: only {free / GIB:.1f} GiB are free; set XDG_CACHE_HOME to a folder on another disk")
    return {"folder": str(folder), "file system": _file_system(folder), "space": f"{free / GIB:.0f} GiB free"}


def _file_system(folder: Path) -> str:
    """Returns the type of the file system of a folder."""
    with contextlib.suppress(OSError):
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        path = folder.resolve()
        fitting = [(len(point), kind) for _, point, kind, *_ in mounts if path.is_relative_to(point)]
        return max(fitting, default=(0, "unknown"))[1]
    return "unknown"


def _data_engine(shards: Path, config: Config) -> dict[str, str]:
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode(errors="ignore")
    source = shards.parent / "text.txt"
    words = shards.parent / "vocab.txt"
    with contextlib.redirect_stderr(io.StringIO()):
        source.write_bytes(text)
        vocab([str(source)], out=words, size=4096)
        source.write_bytes((text + b"\n\n") * (TEXT_BYTES // len(text)))
        start = time.perf_counter()
        prepare([str(source)], vocab=words, out=shards, cased=False, strip_accents=False)
        prepared = time.perf_counter() - start
    loader = BatchLoader.from_config(config, corpus=str(shards), batch_size=64, epochs=1)
    start = time.perf_counter()
    num_tokens = Corpus(shards).num_tokens
    num_rows = sum(batch.num_rows for batch in loader)
    loaded = num_rows * config.data.sequence_length / (time.perf_counter() - start)
    return {
        "prepare": f"{num_tokens / prepared / 1e6:.1f} M tokens/s, {source.stat().st_size / prepared / 1e6:.0f} MB/s",
        "loader": f"{loaded / 1e6:.0f} M tokens/s by {config.data.num_threads} thread(s)",
    }


def _kernels(config: Config, device: torch.device, shards: Path, run: Path, problems: list[str]) -> dict[str, Any]:
    """Checks kernels, attention backends and executions for a configuration, ignoring earlier results."""
    keys = {"data.corpus": str(shards), "model.vocab_size": config.model.vocab_size or 30_522, "train.kernels": "auto"}
    config = config.override(keys).resolved()
    config, memory = with_micro_batches(config, device)
    settled, _, lines = resolve_kernels(
        before_kernels(config, device), device, run, time_steps=time_steps, is_fresh=True
    )
    problems += [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
    return {
        "summary": lines[0],
        "memory": memory,
        "attention": settled.model.attention,
        "execution": settled.train.execution,
        "dropout": settled.model.dropout,
        "records": [
            dataclasses.asdict(record) for record in read_records(run / FILE) if record.implementation != CALLS
        ],
    }


def _kernel_lines(kernels: Mapping[str, Any]) -> Iterator[str]:
    yield from filter(None, [kernels["memory"]])
    dropout = f"dropout {kernels['dropout']}" if kernels["dropout"] else "without dropout"
    yield f"{kernels['summary']}; attention {kernels['attention']}, execution {kernels['execution']}, {dropout}"
    by_operation: dict[str, list[Record]] = {}
    for table in kernels["records"]:
        by_operation.setdefault(table["operation"], []).append(Record(**table))
    for operation, records in by_operation.items():
        ran = [record for record in records if record.milliseconds is not None]
        times = [f"{record.implementation} {record.milliseconds:.3g} ms" for record in ran]
        wrong = [f"{record.implementation} wrong" for record in records if record.problem]
        errors = [record.error for record in ran if record.implementation != REFERENCE and operation != STEP]
        error = f"; error {max(errors):.2f} of the allowed" if errors else ""
        yield f"  {operation:<28} {', '.join(times + wrong)}{error}"
