"""The time of a training step by kernel, from `torch.profiler`.

    python bench/profile_step.py [--shape small:1024] [--top 40] [--device cpu]

Profiles three replays of the captured step as in `pretrain` (with all kernels if `--train.kernels triton`):
milliseconds and launches per step, the total over kernels (the rest of the step time is gaps), and totals by kind.
Without a GPU, reports the operators' CPU times as a dry run.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from lib.results import Results, parse_arguments
from lib.workload import as_chosen, label, loader, make_corpus, new_step, shape
from torch.profiler import ProfilerActivity, profile

import electra_fast as ef
from electra_fast.hardware.graphs import WARM_UP
from electra_fast.training.step import TrainStep

REPLAYS = 3
# Kinds of kernels by words in their names; the first match counts.
KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "splitk", "xmma", "::mm", "addmm", "bmm")),
    ("copies and fills", ("memcpy", "memset", "copy", "fill")),
    ("torch's own", ("at::", "cub::", "at_cuda", "aten::")),
)
Kernel = tuple[str, float]  # name and microseconds of one launch


def open_step(config: ef.Config, corpus: Path, device: torch.device) -> tuple[TrainStep, Iterator[Any]]:
    """A step after warm-up and, on a GPU, capture."""
    step = new_step(config, device)
    batches = loader(corpus, config)
    with as_chosen(step):
        for number in range(WARM_UP + 3):
            step(next(batches), number)
        step.synchronize()
    return step, batches


def kernels_of_replays(step: TrainStep, batches: Iterator[Any], device: torch.device) -> list[Kernel]:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with as_chosen(step), profile(activities=activities, acc_events=True) as profiler:
        for number in range(REPLAYS):
            step(next(batches), WARM_UP + 3 + number)
        step.synchronize()
    if device.type != "cuda":
        return [(event.name, event.self_cpu_time_total) for event in profiler.events()]
    cuda = torch.autograd.DeviceType.CUDA
    events = [event for event in profiler.events() if event.device_type == cuda and not event.is_user_annotation]
    return [(event.name, event.time_range.elapsed_us()) for event in events]


def table(kernels: Iterable[Kernel], top: int) -> Iterator[str]:
    """The slowest kernels: milliseconds and launches per step."""
    microseconds = Counter[str]()
    count = Counter[str]()
    for name, taken in kernels:
        microseconds[name] += taken
        count[name] += 1
    for name, total in microseconds.most_common(top):
        yield f"{total / 1e3 / REPLAYS:8.3f} ms {count[name] / REPLAYS:5.0f}x {short(name)}"


def short(name: str) -> str:
    """A kernel's name without return type and most of its template arguments."""
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|\(.*\)$", "", name)
    return name if len(name) <= 72 else f"{name[:48]}…{name[-23:]}"


def kind(name: str) -> str:
    """The kind of a kernel, by its name; Triton kernels are named after the functions in `kernels/`."""
    lower = name.lower()
    return next((title for title, words in KINDS if any(word in lower for word in words)), "our kernels and others")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shape", help="preset:rows per step[:recipe[:dropout]]")
    parser.add_argument("--top", type=int, default=40)
    options = parse_arguments(parser, with_overrides=True)
    device = options.device
    results = Results(options.results, options.device)
    text = options.shape or ("tiny:8" if options.quick else "small:1024")
    corpus = make_corpus(options.cache, 300 if options.quick else 8000)
    config = shape(text, {"data.corpus": str(corpus), **options.overrides})
    step, batches = open_step(config, corpus, device)
    title = label(config, text)
    facts = {"shape": text}
    kernels = kernels_of_replays(step, batches, device)
    if not kernels:
        results.add(f"{title}: the profiler saw no kernel", ok=False)
        return results.exit_code()
    kinds = Counter[str]()
    for name, microseconds in kernels:
        kinds[kind(name)] += microseconds / 1e3 / REPLAYS
    sums = ", ".join(f"{name} {ms:.2f}" for name, ms in kinds.most_common())
    captured = ", ".join(f"{capture.seconds:.1f} s" for capture in step.graphs.captures) or "none"
    peak = f"{torch.cuda.max_memory_allocated(device) / 2**30:.2f} GiB" if device.type == "cuda" else "not known"
    results.add(
        f"{title}: {len(kernels) / REPLAYS:.0f} launches, {sum(kinds.values()):.2f} ms in kernels per step "
        f"({sums}); captures: {captured}; peak {peak}",
        headline=True,
        kinds=dict(kinds),
        launches=len(kernels) / REPLAYS,
        **facts,
    )
    for line in table(kernels, options.top):
        results.add(line, **facts)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
