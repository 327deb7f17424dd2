"""Does every kernel compile for a card, and fit? Prints registers, spills and shared memory.

    python bench/kernel_compilation.py [--targets 75 80 89 90 100 120 gfx942] [--only WORD ...]

Needs minutes and no GPU. Calls the operations of `lib/kernel_cases.py` at the widths that `kernels.py` times, with
every kernel recorded instead of run and chosen as on that card, and compiles what was recorded with the installed
Triton. Exit code 1 if a kernel does not compile or does not fit. `--quick`: one target.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from lib.ahead_of_time import Request, Target, compiled, recorded
from lib.kernel_cases import CASES
from lib.results import Results, parse_arguments

from electra_fast.ops import fused
from electra_fast.ops.operations import use_choices

TARGETS = ("75", "80", "89", "90", "100", "120", "gfx942")
# Tokens, rows or slots: no kernel is specialized for their number.
FEW = 64


def requests_of(name: str, target: Target) -> dict[str, Request]:
    """The kernels of an operation on this card, each specialization once."""
    dtype = torch.float16 if target == 75 else torch.bfloat16
    found = {}
    for _, *widths in CASES[name].timed:
        call = CASES[name].call(torch.device("cpu"), dtype, FEW, *widths)
        for kernel in call.kernels:
            with use_choices({"*": "kernel", call.key: kernel}):
                found |= {repr(request): request for request in recorded(call.run, target)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="+", help="compute capabilities and AMD architectures")
    parser.add_argument("--only", nargs="+", default=[""], help="operations whose name contains one of these words")
    options = parse_arguments(parser, for_cpu=True)
    targets = options.targets or (TARGETS[3:4] if options.quick else TARGETS)
    fused.kernels()
    os.environ["TRITON_INTERPRET"] = "1"  # after the kernels' import: lets choices take them, interprets nothing
    results = Results(options.results, torch.device("cpu"), card="any: compiles ahead of time")
    for target in (int(each) if each.isdigit() else each for each in targets):
        requests: dict[str, tuple[str, Request]] = {}
        for name in (name for name in CASES if any(word in name for word in options.only)):
            requests = {text: (name, request) for text, request in requests_of(name, target).items()} | requests
        for name, request in requests.values():
            report(results, name, target, request)
    return results.exit_code()


def report(results: Results, name: str, target: Target, request: Request) -> None:
    title, facts = f"{target} {name} {request[1]}", {"target": target, "operation": name, "kernel": request[1]}
    try:
        code = compiled(request, target)
    except Exception as error:  # go on with the other kernels
        results.add(f"{title}: {error!r:.300}", ok=False, **facts)
        return
    usage = f"{code.registers} registers, {code.spilled_bytes} B spilled, {code.shared_bytes} B shared"
    facts |= {"spilled_bytes": code.spilled_bytes, "registers": code.registers}
    facts |= {"shared_bytes": code.shared_bytes, "num_warps": code.num_warps}
    results.add(f"{title}: {usage}", ok=code.fits(), **facts)


if __name__ == "__main__":
    sys.exit(main())
