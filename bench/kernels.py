"""Each operation that has a kernel, against eager PyTorch, torch.compile and published kernels.

    python bench/kernels.py [--results FILE] [--only WORD ...] [--quick] [--device cpu] [--interpret]

Prints a line per implementation as soon as it is measured: median and 5th to 95th percentile of the time
on the device (forward and backward together where the operation has a gradient), peak memory allocated,
and GB/s or TFLOP/s of the minimum traffic or products. An implementation that is not installed or cannot
run gets a line that says why; if one of our kernels fails, the exit code is 1.

Each implementation is captured into a CUDA graph and replayed, as in the training step, so that the
device's work is timed and not Python's. The heads of Liger and cut-cross-entropy synchronize with the
host, which cannot be captured: they are launched call by call, and their lines say "launched". The L2
cache is flushed before each call.

Without a GPU only the references are rehearsed, on tiny shapes; `--interpret` also runs the kernels, in
Triton's interpreter. Those times mean nothing.

The cases are in `lib/kernel_cases.py`; a new one is a function of a few lines.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from lib.kernel_cases import CASES, Case, Function, Setting, Unavailable, compiler, refuse
from lib.results import Results, parse_arguments, reason
from torch import Tensor

OURS = "electra-fast"
# Synchronize with the host in the forward pass; a failed capture breaks the next ones and the random generator.
SYNCHRONIZES = ("Liger", "cut-cross-entropy")


def contenders(case: Case, device: torch.device, with_kernel: bool) -> Iterator[tuple[str, Function]]:
    """All implementations of a case, in the order of the output."""
    if case.kernel is not None:
        yield OURS, case.kernel if with_kernel else partial(refuse, "the kernel needs a GPU, or --interpret")
    yield "eager", case.reference
    yield "torch.compile", torch.compile(case.reference, dynamic=False, backend=compiler(device))
    yield from case.peers.items()


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


def measure(work: Callable[[], None], device: torch.device, repeats: int, captured: bool) -> dict[str, Any]:
    """Milliseconds per call, and peak memory allocated."""
    if device.type != "cuda":
        work()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return {"ms": [1e3 * s for s in seconds], "how": "rehearsed", "allocated_gib": None}
    allocated = _warm_up(work)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    cache = torch.empty(2**28, dtype=torch.int8, device=device)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        cache.zero_()
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return {
        "ms": [start.elapsed_time(end) for start, end in pairs],
        "how": "graph" if captured else "launched",
        "allocated_gib": allocated,
    }


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
        found = measure(work, device, repeats, captured=not name.startswith(SYNCHRONIZES))
    except (Unavailable, ImportError) as error:
        return {"contender": name, "error": str(error)}
    except Exception as error:  # of any kind; only our own fails the run
        return {"contender": name, "error": reason(error), "ok": name != OURS}
    low, *_, high = statistics.quantiles(found["ms"], n=20, method="inclusive")
    median = statistics.median(found["ms"])
    gpu = device.type == "cuda"
    return {
        "contender": name,
        "ms": median,
        "ms_p5": low,
        "ms_p95": high,
        "how": found["how"],
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
    return f"{r['contender']}: {r['ms']:.4f} ms ({r['ms_p5']:.4f} to {r['ms_p95']:.4f}){rate}{memory}, {r['how']}"


def main() -> int:
    """Runs the cases and returns the exit code."""
    parser = argparse.ArgumentParser(description="Time each kernel against its peers.")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these words")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--interpret", action="store_true", help="run kernels in Triton's interpreter")
    options = parse_arguments(parser)
    device, results = options.device, Results(options.results, options.device)
    is_cuda = device.type == "cuda"
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    setting = Setting(device, torch.bfloat16 if is_cuda else torch.float32, options.quick)
    torch.manual_seed(0)
    names = [name for name in CASES if any(word in name for word in options.only)]
    if not names:
        parser.error(f"no case has such a name; the cases are {', '.join(CASES)}")
    for name in names:
        for one in CASES[name](setting):
            for contender, function in contenders(one, device, is_cuda or options.interpret):
                found = result(contender, one, work_of(function, one.inputs), device, options.repeats if is_cuda else 3)
                results.add(f"{name}, {one.shape}: {line(found)}", case=name, shape=one.shape, **found)
                if is_cuda:
                    torch.cuda.empty_cache()
            torch.compiler.reset()
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
