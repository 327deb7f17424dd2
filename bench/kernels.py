"""Each operation with a kernel, run with its kernels, in eager PyTorch and with torch.compile.

    python bench/kernels.py [--results FILE] [--only WORD ...] [--quick] [--device cpu]

Prints a line per implementation as soon as it is measured: median and 5th to 95th percentile of the time on the device,
forward and backward together, peak memory allocated, TFLOP/s of the products, and GB/s of the least traffic: arguments
and outputs once per pass, and gradients. If one of our kernels fails, the exit code is 1.

Each implementation is captured into a CUDA graph and replayed, as in the training step, so that Python is not timed.
The L2 cache is flushed before each call. Without a GPU only the references run, on the small sizes of the tests; these
times are meaningless.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from lib.kernel_cases import CASES
from lib.results import Results, parse_arguments, reason
from lib.timing import milliseconds, peak_gib
from torch.utils.flop_counter import FlopCounterMode

from electra_fast.hardware.kernel_check import Call, tensors
from electra_fast.ops.operations import use_choices, use_impl

OURS = "electra-fast"


def contenders(call: Call, device: torch.device) -> Iterator[tuple[str, Callable[[], None]]]:
    """All implementations of a call, in the order of the output; on a CPU compiling C++ would take minutes."""
    is_cuda = device.type == "cuda"
    for kernel in call.kernels if is_cuda else []:

        def ours(kernel: str = kernel) -> None:
            with use_choices({"*": "kernel", call.key: kernel}):
                call.run()

        yield OURS if kernel == "kernel" else f"{OURS}, {kernel}", ours
    compiled = torch.compile(call.function, dynamic=False, backend="inductor" if is_cuda else "eager")
    for name, contender in (("eager", call), ("torch.compile", replace(call, function=compiled))):

        def reference(contender: Call = contender) -> None:
            with use_impl("reference"):
                contender.run()

        yield name, reference


def least_work(call: Call) -> tuple[int, int]:
    """FLOPs of the products, and bytes that must be read or written."""

    def size(inputs: list[torch.Tensor]) -> int:
        return sum(x.numel() * x.element_size() for x in inputs)

    with use_impl("reference"):
        outputs, leaves = call.outputs(None)
        with FlopCounterMode(display=False) as counter:
            call.run()
    inputs = size([*tensors((call.args, call.kwargs))])
    num_bytes = inputs + size(outputs) + (inputs + size(outputs) + size(leaves) if leaves else 0)
    return counter.get_total_flops(), num_bytes


def result(name: str, call: Call, run: Callable[[], None], device: torch.device, repeats: int) -> dict[str, Any]:
    is_cuda = device.type == "cuda"
    try:
        allocated = peak_gib(run) if is_cuda else None
        times = milliseconds(run, device, repeats)
    except Exception as error:  # peers may fail in any way; only our failures fail the run
        is_wrong = name.startswith(OURS) and not isinstance(error, torch.OutOfMemoryError)  # on a smaller card
        return {"contender": name, "error": reason(error), "ok": not is_wrong}
    low, *_, high = statistics.quantiles(times, n=20, method="inclusive")
    measured = {"contender": name, "ms": statistics.median(times), "ms_p5": low, "ms_p95": high}
    num_flops, num_bytes = least_work(call) if is_cuda else (0, 0)
    rates = {"tflops": num_flops / measured["ms"] / 1e9, "gb_per_second": num_bytes / measured["ms"] / 1e6}
    return measured | {"allocated_gib": allocated} | rates


def line(r: dict[str, Any]) -> str:
    if "error" in r:
        return f"{r['contender']}: {r['error']}"
    rate = f", {r['tflops']:.0f} TFLOP/s" if r["tflops"] else ""
    rate += f", {r['gb_per_second']:.0f} GB/s" if r["gb_per_second"] else ""
    memory = "" if r["allocated_gib"] is None else f", {r['allocated_gib']:.2f} GiB"
    return f"{r['contender']}: {r['ms']:.4f} ms ({r['ms_p5']:.4f} to {r['ms_p95']:.4f}){rate}{memory}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time each kernel against its peers.")
    parser.add_argument("--only", nargs="+", default=[""], help="operations whose name contains one of these words")
    parser.add_argument("--repeats", type=int, default=50)
    options = parse_arguments(parser)
    device = options.device
    results = Results(options.results, options.device)
    is_cuda = device.type == "cuda"
    names = [name for name in CASES if any(word in name for word in options.only)]
    if not names:
        parser.error(f"no operation has such a name; they are {', '.join(CASES)}")
    for name in names:
        entry = CASES[name]
        for sizes in [entry.tested[0][1:]] if options.quick else entry.timed:
            call = entry.call(device, torch.bfloat16 if is_cuda else torch.float32, *sizes)
            shape = entry.label(sizes)
            for contender, run in contenders(call, device):
                measured = result(contender, call, run, device, options.repeats if is_cuda else 3)
                results.add(f"{name}, {shape}: {line(measured)}", case=name, shape=shape, **measured)
                if is_cuda:
                    torch.cuda.empty_cache()
            torch.compiler.reset()
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
