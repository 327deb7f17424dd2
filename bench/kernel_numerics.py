"""Is every kernel correct on this device? Compares its error against fp64 with eager PyTorch's.

    python bench/kernel_numerics.py [--device cpu]

Runs the cases of `lib/kernel_cases.py`: on their real shapes on a GPU, on tiny ones in Triton's interpreter
on the CPU (in fp32, because the interpreter's bf16 products are wrong).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from lib.kernel_cases import CASES, Case, Function, Setting
from lib.results import Results, listed, parse_arguments, reason
from torch import Tensor

# A kernel's error may be 1.5 times eager PyTorch's, plus rounding of fp32 relative to the largest value.
ALLOWED, ROUNDING = 1.5, 2e-5
# Samples and comparisons may differ where two candidates are nearly equal: in bf16, rounding alone changes 1.6 to
# 2.4 % of them at E = 768 and 1024. Allowed are 1.5 times as many as eager's, plus this fraction.
ALLOWED_DIFFERENT = 1e-3


def checks(device: torch.device) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and outcome of each case whose reference uses no random numbers of its own."""
    is_cuda = device.type == "cuda"
    if not is_cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    setting = Setting(device, torch.bfloat16 if is_cuda else torch.float32, quick=not is_cuda)
    torch.manual_seed(0)
    for name, cases in CASES.items():
        for one in cases(setting):
            if "dropout=0.1" in one.shape:
                continue
            try:
                outcome = check(one)
            except Exception as error:  # go on with the other kernels
                outcome = {"ok": False, "error": reason(error)}
            yield f"{name}, {one.shape}", outcome
            if is_cuda:
                torch.cuda.empty_cache()


def check(case: Case) -> dict[str, Any]:
    """Compares the kernel's outputs and gradients with fp64, and with a second run of itself."""
    wanted, gradients = outcome(case.reference, case.inputs, torch.float64)
    truth = wanted + gradients

    def found_by(function: Function) -> list[Tensor]:
        outputs, gradients = outcome(function, case.inputs)
        # A launcher may return more than the operation does, such as statistics for its backward pass.
        return outputs[: len(wanted)] + gradients

    eager, ours, again = map(found_by, (case.reference, case.kernel, case.kernel))
    ratios, different, excess = [0.0], [0.0], [0.0]
    for exact, theirs, found in zip(truth, eager, ours, strict=True):
        if not exact.is_floating_point():
            shares = [(x != exact).double().mean().item() for x in (found, theirs)]
            different.append(shares[0])
            excess.append(shares[0] - ALLOWED * shares[1])
            continue
        scale = exact.abs().max().item()
        errors = [(x.double() - exact.double()).abs().max().item() for x in (found, theirs)]
        finite = bool(torch.isfinite(found).all())
        ratios.append(errors[0] / (errors[1] + ROUNDING * scale) if finite else float("inf"))
    same_bits = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    right = max(ratios) <= ALLOWED and max(excess) <= ALLOWED_DIFFERENT and same_bits
    return {"ok": right, "error_over_eager": max(ratios), "differ": max(different), "same_bits_again": same_bits}


def outcome(
    function: Function, inputs: tuple[Any, ...], dtype: torch.dtype | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and gradients of a function, on copies of the inputs."""
    copies = [_copy(x, dtype) for x in inputs]
    outputs = function(*copies)
    outputs = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(x, Tensor)]
    leaves = [x for x in copies if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return outputs, []
    first = outputs[0]
    # Its sum is not 0, or a bias' gradient would be nothing but rounding.
    upstream = torch.linspace(-0.5, 1, first.numel(), device=first.device, dtype=torch.float64).view(first.shape)
    gradients = torch.autograd.grad(first, leaves, upstream.to(first.dtype))
    return [x.detach() for x in outputs], list(gradients)


def _copy(x: Any, dtype: torch.dtype | None) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(dtype or x.dtype, copy=True).requires_grad_(x.requires_grad)


def main() -> int:
    """One line per case."""
    options = parse_arguments(argparse.ArgumentParser(description=__doc__.splitlines()[0]))
    results = Results(options.results, options.device)
    for name, found in checks(options.device):
        results.add(f"{name}: {listed(found)}", case=name, **found)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
