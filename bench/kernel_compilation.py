"""Does every kernel of a step compile for a card, and fit? Prints registers, spills and shared memory.

    python bench/kernel_compilation.py [--targets 75 80 89 90 100 120 gfx942] [--shapes small base:2:google]

Needs ten minutes and no GPU. Takes one step of each shape on the CPU, with every kernel recorded instead of run and
chosen as on that card, and compiles what was recorded with the installed Triton. Exit code 1 if a kernel does not
compile or does not fit. `--quick`: one target and shape.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lib.ahead_of_time import Request, Target, compiled, recorded
from lib.results import Results, parse_arguments
from lib.workload import loader, make_corpus, new_step, shape
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from electra_fast.model.compute import ComputeConfig
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl

TARGETS = ("75", "80", "89", "90", "100", "120", "gfx942")
SHAPES = ("small:2:google", "small:2:modern", "base:2:google", "base:2:modern")
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# One layer has the kernels of all.
FEW = {"train.batch_size": "2", "train.accumulate": "1", "model.num_layers": "1"}


class Zeroed(TorchDispatchMode):
    """Zeroes every allocation, those within our own operators included: indices that no kernel wrote must be valid."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator."""
        if (name := function._schema.name) in OPDEFS:
            with self:
                return OPDEFS[name]._init_fn(*args, **(kwargs or {}))
        out = function(*args, **(kwargs or {}))
        return out.zero_() if name.split("::")[1] in ALLOCATIONS else out


def kernels_of_a_step(text: str, target: Target, options: argparse.Namespace) -> Iterator[Request]:
    """The kernels of one step on this card, each specialization once."""
    config = shape(text, FEW | options.overrides)
    is_short = target == 90 and config.data.sequence_length <= 128
    compute = ComputeConfig("short" if is_short else "sdpa", torch.float16 if target == 75 else torch.bfloat16)
    with use_impl("kernel"):
        step = new_step(config, torch.device("cpu"), "eager", compute, num_processes=1)
        rows = next(loader(make_corpus(options.cache, 300), config))
        with Zeroed():
            requests = recorded(lambda: step(rows, 0), target)
    return iter({repr(request): request for request in requests}.values())


def main() -> int:
    """One line per kernel and target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", help="compute capabilities and AMD architectures")
    parser.add_argument("--shapes", nargs="+", help="preset, or preset:rows:recipe")
    options = parse_arguments(parser, with_overrides=True, for_cpu=True)
    targets = options.targets or (TARGETS[3:4] if options.quick else TARGETS)
    shapes = options.shapes or (SHAPES[:1] if options.quick else SHAPES)
    ops.kernels()
    os.environ["TRITON_INTERPRET"] = "1"  # after the kernels' import: lets `use_impl` choose them, interprets nothing
    results = Results(options.results, torch.device("cpu"), card="any: compiles ahead of time")
    for target in (int(each) if each.isdigit() else each for each in targets):
        seen: set[str] = set()
        for text in shapes:
            for request in kernels_of_a_step(text, target, options):
                if repr(request) not in seen:
                    seen.add(repr(request))
                    report(results, text, target, request)
    return results.exit_code()


def report(results: Results, text: str, target: Target, request: Request) -> None:
    """Compiles a kernel and adds what it uses."""
    title = f"{target} {text} {request[1]}"
    try:
        code = compiled(request, target)
    except Exception as error:  # go on with the other kernels
        results.add(f"{title}: {error!r:.300}", ok=False, target=target, shape=text, kernel=request[1])
        return
    usage = f"{code.registers} registers, {code.spilled_bytes} B spilled, {code.shared_bytes} B shared"
    facts = {"target": target, "shape": text, "kernel": request[1], "spilled_bytes": code.spilled_bytes}
    more = {"registers": code.registers, "shared_bytes": code.shared_bytes, "num_warps": code.num_warps}
    results.add(f"{title}: {usage}", ok=code.fits(), **facts, **more)


if __name__ == "__main__":
    sys.exit(main())
