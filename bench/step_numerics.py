"""Checks a training step on this device: samples, losses, and the same bits again.

    python bench/step_numerics.py [--only samples eager graph compile] [--device cpu]

`electra-fast doctor` checks single kernels; attention backends and the other objectives have tests that also run on a
GPU (`gpu.py`).
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lib.results import Results, listed, parse_arguments, reason
from lib.workload import loader, make_corpus, new_step, shape

from electra_fast.model.compute import ComputeConfig, choose_compute
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl

PARTS = ("samples", "eager", "graph", "compile")
Check = Callable[[], dict[str, Any]]


def check_samples(device: torch.device, dtype: torch.dtype, width: int, num_slots: int) -> dict[str, Any]:
    """The samples of `ops.generator_head`, which training uses, follow the softmax of the logits (chi-squared).

    With x = 0 the logits are the bias, the same in all slots. Widths up to 256 and above take two ways.
    """
    noise = torch.Generator().manual_seed(0)
    table = torch.randn(500, width, generator=noise).to(device)
    bias = torch.randn(500, generator=noise).bfloat16().float().to(device)  # exact in the dtype of any path
    slots = torch.arange(num_slots, device=device)
    x = torch.zeros(num_slots, width, device=device, dtype=dtype)
    key = torch.tensor([2**40 + 1, 7], device=device)
    with torch.no_grad():
        sample = ops.generator_head(x, table, bias, slots % 500, torch.ones_like(slots).float(), slots, key)[1]
    assert sample is not None
    expected = bias.double().softmax(-1) * num_slots
    # 499 degrees of freedom: standard deviation of the statistic 31.6.
    counts = torch.bincount(sample, minlength=500)
    score = ((((counts - expected) ** 2 / expected).sum() - 499) / 31.6).item()
    return {"ok": abs(score) < 5, "standard_deviations": score}


def check_losses(corpus: Path, device: torch.device, execution: str, steps: int) -> dict[str, Any]:
    """Losses of a short run against fp32 on the CPU (same rows, masks, keys), references, eager, and itself."""
    truth = true_losses(corpus, steps)
    run_losses, again = (losses(corpus, device, execution, steps) for _ in range(2))
    gap = max(abs(a - b) / a for a, b in zip(truth, run_losses, strict=True))
    result = {
        "first": run_losses[0],
        "last": run_losses[-1],
        "largest_gap": gap,
        "same_bits_again": run_losses == again,
    }
    ok = gap < 0.02 and run_losses[-1] < run_losses[0] and run_losses == again
    if execution == "eager":
        with use_impl("reference"):
            references = losses(corpus, device, execution, steps)
        result["largest_gap_to_references"] = max(abs(a - b) / a for a, b in zip(references, run_losses, strict=True))
        ok &= result["largest_gap_to_references"] < 0.02
    if execution == "graph":
        result["equals_eager"] = run_losses == losses(corpus, device, "eager", steps)
        ok &= result["equals_eager"]
    return {"ok": ok, **result}


@functools.cache
def true_losses(corpus: Path, steps: int) -> list[float]:
    """The same run in fp32 on the CPU; it takes longer than the device's, so once for all executions."""
    return losses(corpus, torch.device("cpu"), "eager", steps, ComputeConfig("sdpa", torch.float32))


def losses(
    corpus: Path,
    device: torch.device,
    execution: str,
    steps: int,
    compute: ComputeConfig | None = None,
) -> list[float]:
    config = shape("tiny:64:google:0", {"data.sequence_length": "64", "train.steps": str(max(2, steps))})
    step = new_step(config, device, execution, compute, num_processes=1)
    step_losses = []
    for number, rows in zip(range(steps), loader(corpus, config), strict=False):
        step(rows, number)
        step_losses.append(float(step.stage.objective.metrics(step.read_totals())["loss"] or 0))
        step.set_totals({})
    return step_losses


def checks(parts: list[str], device: torch.device, cache: Path, quick: bool) -> Iterator[tuple[str, Check]]:
    dtype = choose_compute(shape("small:8"), device).dtype
    corpus = make_corpus(cache, 300)
    if "samples" in parts:
        num_slots = 20_000 if quick else 200_000
        for width in (128, 768):
            yield f"samples, E={width}", lambda w=width: check_samples(device, dtype, w, num_slots)
    # Compiling for a CPU would take minutes without a result, and a CPU has no graphs.
    for execution in ("eager", "graph", "compile") if device.type == "cuda" else ("eager",):
        if execution in parts:
            yield f"losses, {execution}", lambda e=execution: check_losses(corpus, device, e, 10 if quick else 50)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    options = parse_arguments(parser)
    results = Results(options.results, options.device)
    for name, check in checks(options.only, options.device, options.cache, options.quick):
        try:
            result = check()
        except ImportError as error:
            results.add(f"{name}: {reason(error)}")
            continue
        except Exception as error:  # the other checks are to be made all the same
            results.add(f"{name}: {reason(error)}", ok=False)
            continue
        results.add(f"{name}: {listed(result)}", check=name, **result)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
