"""The time of a training step by kernel, from `torch.profiler`.

    python bench/profile_step.py [--shape small:1024] [--of graph|eager] [--top 40] [--device cpu]

`--of graph` (default) profiles three replays of the captured step: milliseconds and launches per step, the
total over kernels (the rest of the step time is gaps), and totals by kind.
`--of eager` runs one step operator by operator and counts the bytes of each operator's tensors to get
GB/s per kernel: arguments are read once, results written once, tensors modified in place both.
A lookup counts its whole table, so its GB/s are too high. Only one profile per process: CUPTI may record
nothing when started a second time. Without a GPU, reports the operators' CPU times as a dry run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lib.results import Results, parse_arguments
from lib.workload import label, loader, make_corpus, new_step, shape
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import electra_fast as ef
from electra_fast.training.graphs import WARM_UP
from electra_fast.training.step import TrainStep

REPLAYS = 3
MARK = "bench traffic "
# Kinds of kernels by words in their names; the first match counts.
KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma", "::mm", "addmm", "bmm")),
    ("copies and fills", ("memcpy", "memset", "copy", "fill")),
    ("torch's own", ("at::", "cub::", "at_cuda", "aten::")),
)


@dataclass(frozen=True)
class Kernel:
    """One launch: kernel name, microseconds, and bytes moved by its operator (0: unknown)."""

    name: str
    microseconds: float
    num_bytes: int = 0


class Traffic(TorchDispatchMode):
    """Marks each operator for the profiler and counts the bytes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operator inside a range that carries its number."""
        number = len(self.num_bytes)
        self.num_bytes.append(0)
        with record_function(f"{MARK}{number}"):
            out = function(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        arguments = zip(function._schema.arguments, args, strict=False)
        changed = _tensors([value for argument, value in arguments if argument.is_write])
        given_storages = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in _tensors(out) if x.untyped_storage().data_ptr() not in given_storages]
        self.num_bytes[number] = sum(map(_size, [*given, *changed, *made]))
        return out


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _size(x: Tensor) -> int:
    """Bytes of a tensor in memory; expanded dimensions count once."""
    count = x.element_size()
    for length, stride in zip(x.shape, x.stride(), strict=True):
        count *= length if stride else 1
    return count


def open_step(config: ef.Config, corpus: Path, device: torch.device, execution: str) -> tuple[TrainStep, Iterator[Any]]:
    """A step after warm-up and, for `graph`, capture."""
    step, batches = new_step(config, device, execution), loader(corpus, config)
    for number in range(WARM_UP + 3):
        step(next(batches), number)
    step.synchronize()
    return step, batches


def kernels_of_replays(step: TrainStep, batches: Iterator[Any], device: torch.device) -> list[Kernel]:
    """All launches of a few steps."""
    with profile(activities=_activities(device), acc_events=True) as profiler:
        for number in range(REPLAYS):
            step(next(batches), WARM_UP + 3 + number)
        step.synchronize()
    if device.type != "cuda":
        return [Kernel(event.name, event.self_cpu_time_total) for event in profiler.events()]
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.events() if event.device_type == cuda and not event.is_user_annotation]
    return [Kernel(event.name, event.time_range.elapsed_us()) for event in events]


def kernels_with_traffic(step: TrainStep, batches: Iterator[Any], device: torch.device) -> list[Kernel]:
    """All launches of one step; an operator's bytes are assigned to its longest kernel."""
    traffic = Traffic()
    with profile(activities=_activities(device), acc_events=True) as profiler, traffic:
        step(next(batches), WARM_UP + 3)
        step.synchronize()
    launched: defaultdict[int, list[Kernel]] = defaultdict(list)
    for event in profiler.events():
        number = _mark(event)
        if number is None:
            continue
        if device.type == "cuda":
            launched[number] += [Kernel(kernel.name, kernel.duration) for kernel in event.kernels]
        elif not event.name.startswith(MARK):
            launched[number].append(Kernel(event.name, event.self_cpu_time_total))
    found = []
    for number, kernels in launched.items():
        longest = max(kernels, key=lambda kernel: kernel.microseconds, default=None)
        for kernel in kernels:
            num_bytes = traffic.num_bytes[number] if kernel is longest else 0
            found.append(Kernel(kernel.name, kernel.microseconds, num_bytes))
    return found


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def _mark(event: Any) -> int | None:
    """The number of the innermost range around a profiled event."""
    while event is not None:
        if event.name.startswith(MARK):
            return int(event.name.removeprefix(MARK))
        event = event.cpu_parent
    return None


def table(kernels: Iterable[Kernel], steps: int, top: int) -> Iterator[str]:
    """The slowest kernels: milliseconds and launches per step, and GB/s."""
    micros, count, num_bytes, counted = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for kernel in kernels:
        micros[kernel.name] += kernel.microseconds
        count[kernel.name] += 1
        if kernel.num_bytes:
            num_bytes[kernel.name] += kernel.num_bytes
            counted[kernel.name] += kernel.microseconds
    for name, total in micros.most_common(top):
        rate = f"{num_bytes[name] / counted[name] / 1e3:6.1f} GB/s" if counted[name] else ""
        yield f"{total / 1e3 / steps:8.3f} ms {count[name] / steps:5.0f}x {rate} {short(name)}"


def short(name: str) -> str:
    """A kernel's name without return type and most of its template arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|\(.*\)$", "", name)
    return name if len(name) <= 72 else f"{name[:48]}…{name[-23:]}"


def kind(name: str) -> str:
    """The kind of a kernel, by its name; Triton kernels are named after the functions in `kernels/`."""
    lower = name.lower()
    return next((title for title, words in KINDS if any(word in lower for word in words)), "our kernels and others")


def main() -> int:
    """Prints a step's totals by kind, then its kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", help="preset:rows per step, or preset:rows:recipe")
    parser.add_argument("--of", choices=["graph", "eager"], default="graph")
    parser.add_argument("--top", type=int, default=40)
    options = parse_arguments(parser, with_overrides=True)
    device, results = options.device, Results(options.results, options.device)
    text = options.shape or ("tiny:8" if options.quick else "small:1024")
    config = shape(text, options.overrides)
    corpus = make_corpus(options.cache, 300 if options.quick else 8000)
    execution = options.of if device.type == "cuda" else "eager"
    step, batches = open_step(config, corpus, device, execution)
    title, facts = f"{label(config, text)}, {options.of}", {"shape": text, "of": options.of}
    if options.of == "graph":
        kernels, steps = kernels_of_replays(step, batches, device), REPLAYS
    else:
        kernels, steps = kernels_with_traffic(step, batches, device), 1
    if not kernels:
        results.add(f"{title}: the profiler saw no kernel", ok=False)
        return results.exit_code()
    kinds = Counter[str]()
    for kernel in kernels:
        kinds[kind(kernel.name)] += kernel.microseconds / 1e3 / steps
    sums = ", ".join(f"{name} {ms:.2f}" for name, ms in kinds.most_common())
    captured = ", ".join(f"{capture.seconds:.1f} s" for capture in step.graphs.captures) or "none"
    results.add(
        f"{title}: {len(kernels) / steps:.0f} launches, {sum(kinds.values()):.2f} ms in kernels per step "
        f"({sums}); captures: {captured}; peak {_peak_gib(device)}",
        headline=True,
        kinds=dict(kinds),
        launches=len(kernels) / steps,
        **facts,
    )
    for line in table(kernels, steps, options.top):
        results.add(line, **facts)
    return results.exit_code()


def _peak_gib(device: torch.device) -> str:
    return f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB" if device.type == "cuda" else "not known"


if __name__ == "__main__":
    sys.exit(main())
