"""Each operation that has a kernel, against eager PyTorch and torch.compile.

    python bench/kernels.py [--results FILE] [--only WORD ...] [--quick] [--device cpu]

Prints a line per implementation as soon as it is measured: median and 5th to 95th percentile of the time on the device
(forward and backward together where the operation has a gradient), peak memory allocated, and GB/s or TFLOP/s of the
minimum traffic or products. If one of our kernels fails, the exit code is 1.

Each implementation is captured into a CUDA graph and replayed, as in the training step, so that the device's work is
timed and not Python's. The L2 cache is flushed before each call. Without a GPU only the references are rehearsed, on
tiny shapes, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lib.kernel_cases import CASES, Case, Function, Setting
from lib.results import Results, parse_arguments, reason
from torch import Tensor

OURS = "electra-fast"


def contenders(case: Case, device: torch.device) -> Iterator[tuple[str, Function]]:
    """All implementations of a case, in the order of the output; on a CPU compiling C++ would take minutes."""
    if device.type == "cuda":
        yield OURS, case.kernel
    yield "eager", case.reference
    backend = "inductor" if device.type == "cuda" else "eager"
    yield "torch.compile", torch.compile(case.reference, dynamic=False, backend=backend)


def work_of(function: Function, inputs: tuple[Any, ...]) -> Callable[[], None]:
    """One call, with gradients of the inputs that require them."""
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    ones: dict[torch.Size, Tensor] = {}

    def call() -> None:
        out = function(*inputs)
        if not leaves:
            return
        out = out[0] if isinstance(out, tuple) else out
        if out.shape not in ones:
            ones[out.shape] = torch.ones_like(out)
        torch.autograd.grad(out, leaves, ones[out.shape], allow_unused=True)

    return call


def measure(work: Callable[[], None], device: torch.device, repeats: int) -> dict[str, Any]:
    """Milliseconds per call, and peak memory allocated."""
    if device.type != "cuda":
        work()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return {"ms": [1e3 * s for s in seconds], "allocated_gib": None}
    allocated = _warm_up(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    cache = torch.empty(2**28, dtype=torch.int8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        cache.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return {"ms": [start.elapsed_time(end) for start, end in pairs], "allocated_gib": allocated}


def _warm_up(work: Callable[[], None]) -> float:
    """Calls on a side stream, as capture requires; returns the last call's peak memory in GiB."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def result(name: str, case: Case, work: Callable[[], None], device: torch.device, repeats: int) -> dict[str, Any]:
    """One result: times and rates, or why there are none."""
    try:
        found = measure(work, device, repeats)
    except Exception as error:  # of any kind; only our own fails the run
        is_wrong = name == OURS and not isinstance(error, torch.OutOfMemoryError)  # of a smaller card
        return {"contender": name, "error": reason(error), "ok": not is_wrong}
    low, *_, high = statistics.quantiles(found["ms"], n=20, method="inclusive")
    median = statistics.median(found["ms"])
    gpu = device.type == "cuda"
    return {
        "contender": name,
        "ms": median,
        "ms_p5": low,
        "ms_p95": high,
        "allocated_gib": found["allocated_gib"],
        "tflops": case.num_flops / median / 1e9 if gpu and case.num_flops else None,
        "gb_per_second": case.num_bytes / median / 1e6 if gpu and case.num_bytes else None,
    }


def line(r: dict[str, Any]) -> str:
    """The printed line of a result."""
    if "error" in r:
        return f"{r['contender']}: {r['error']}"
    rate = f", {r['tflops']:.0f} TFLOP/s" if r["tflops"] else ""
    rate += f", {r['gb_per_second']:.0f} GB/s" if r["gb_per_second"] else ""
    memory = "" if r["allocated_gib"] is None else f", {r['allocated_gib']:.2f} GiB"
    return f"{r['contender']}: {r['ms']:.4f} ms ({r['ms_p5']:.4f} to {r['ms_p95']:.4f}){rate}{memory}"


def main() -> int:
    """Runs the cases and returns the exit code."""
    parser = argparse.ArgumentParser(description="Time each kernel against its peers.")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these words")
    parser.add_argument("--repeats", type=int, default=50)
    options = parse_arguments(parser)
    device, results = options.device, Results(options.results, options.device)
    is_cuda = device.type == "cuda"
    setting = Setting(device, torch.bfloat16 if is_cuda else torch.float32, options.quick)
    torch.manual_seed(0)
    names = [name for name in CASES if any(word in name for word in options.only)]
    if not names:
        parser.error(f"no case has such a name; the cases are {', '.join(CASES)}")
    for name in names:
        for one in CASES[name](setting):
            for contender, function in contenders(one, device):
                found = result(contender, one, work_of(function, one.inputs), device, options.repeats if is_cuda else 3)
                results.add(f"{name}, {one.shape}: {line(found)}", case=name, shape=one.shape, **found)
                if is_cuda:
                    torch.cuda.empty_cache()
            torch.compiler.reset()
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
