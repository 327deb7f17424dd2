"""Checks a training step on this device: samples, attention backends, losses, and the same bits again.

    python bench/step_numerics.py [--only samples attention eager graph compile objectives] [--device cpu]

Kernels by themselves are `kernel_numerics.py`'s.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lib.results import Results, listed, parse_arguments, reason
from lib.workload import loader, make_corpus, new_step, shape
from torch import Tensor

from electra_fast.model import attention
from electra_fast.model.compute import ComputeConfig, choose_compute
from electra_fast.objectives import OBJECTIVES
from electra_fast.ops import operations as ops

PARTS = ("samples", "attention", "eager", "graph", "compile", "objectives")
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


def check_attention(device: torch.device, compute: ComputeConfig) -> dict[str, Any]:
    """A backend's error against fp64, output and gradients, is no more than twice eager's in its dtype."""
    borders = torch.tensor([0, 1, 60, 128, 130, 256], dtype=torch.int32, device=device)
    ids = torch.repeat_interleave(torch.arange(5, device=device), borders.diff().long()).view(2, 128)
    noise = torch.Generator().manual_seed(1)
    exact = [torch.randn(256, 4, 64, generator=noise, dtype=torch.float64).to(device) for _ in range(4)]

    def outcome(dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        q, k, v, weight = (x.detach().to(dtype, copy=True).requires_grad_() for x in exact)
        out = attend(q, k, v)
        (out * weight).sum().backward()
        return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attention_reference(q, k, v, borders)

    mask = attention.AttentionMask.packed(ids, borders, compute.attention)
    truth = outcome(torch.float64, reference)
    eager = outcome(compute.dtype, reference)
    ours = outcome(compute.dtype, lambda q, k, v: attend(q, k, v, mask, ops.Dropout()))
    ratios = [
        ((a.double() - t).abs().max() / (b.double() - t).abs().max()).item()
        for a, b, t in zip(ours, eager, truth, strict=True)
    ]
    return {"ok": max(ratios) < 2, "error_over_eager": max(ratios)}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: attention.AttentionMask, dropout: ops.Dropout) -> Tensor:
    """`attention.attention`, and the same by the kernel for short rows, which takes all three together."""
    if mask.backend != "short":
        return attention.attention(q, k, v, mask, dropout.probability)
    qkv_TX, options = torch.stack((q, k, v), 1).flatten(1), (None, None, q.shape[1], None, *dropout.arguments)
    out: Tensor = ops.kernels().short_attention(qkv_TX, None, mask.segment_ids_BL, *options)[0]
    return out.view(q.shape)


def check_attention_dropout(device: torch.device, compute: ComputeConfig) -> dict[str, Any]:
    """Values of 1 come out as 1 on average and not everywhere: probabilities fell, the others were scaled up."""
    ids = torch.ones(64, 128, dtype=torch.int32, device=device)
    borders = torch.arange(0, 64 * 128 + 1, 128, dtype=torch.int32, device=device)
    q, k = (torch.randn(64 * 128, 4, 64, device=device).to(compute.dtype) for _ in range(2))
    mask = attention.AttentionMask.packed(ids, borders, compute.attention)
    key = torch.tensor([1, 2, 0], device=device)
    out = attend(q, k, torch.ones_like(q), mask, ops.Dropout(0.3, key)).float()
    mean, spread = out.mean().item(), out.std().item()
    return {"ok": abs(mean - 1) < 0.02 and spread > 0.02, "mean": mean, "spread": spread}


def check_losses(corpus: Path, device: torch.device, execution: str, steps: int) -> dict[str, Any]:
    """Losses of a short run against fp32 on the CPU (same rows, masks, keys), references, eager, and itself."""
    truth = true_losses(corpus, steps)
    found, again = (losses(corpus, device, execution, steps) for _ in range(2))
    gap = max(abs(a - b) / a for a, b in zip(truth, found, strict=True))
    result = {"first": found[0], "last": found[-1], "largest_gap": gap, "same_bits_again": found == again}
    ok = gap < 0.02 and found[-1] < found[0] and found == again
    if execution == "eager":
        with ops.use_impl("reference"):
            references = losses(corpus, device, execution, steps)
        result["largest_gap_to_references"] = max(abs(a - b) / a for a, b in zip(references, found, strict=True))
        ok &= result["largest_gap_to_references"] < 0.02
    if execution == "graph":
        result["equals_eager"] = found == losses(corpus, device, "eager", steps)
        ok &= result["equals_eager"]
    return {"ok": ok, **result}


@functools.cache
def true_losses(corpus: Path, steps: int) -> list[float]:
    """The same run in fp32 on the CPU; it takes longer than the device's, so once for all executions."""
    return losses(corpus, torch.device("cpu"), "eager", steps, ComputeConfig("sdpa", torch.float32))


def check_objective(corpus: Path, device: torch.device, name: str, execution: str, steps: int) -> dict[str, Any]:
    """The first loss of an objective against fp32 on the CPU; all against eager ones, and the same bits again.

    Later losses differ by their samples, which in 16 bits are others.
    """
    truth = losses(corpus, torch.device("cpu"), "eager", 1, ComputeConfig("sdpa", torch.float32), name)[0]
    found, again = (losses(corpus, device, execution, steps, objective=name) for _ in range(2))
    gap = abs(found[0] - truth) / truth
    result = {"first": found[0], "last": found[-1], "gap_of_first": gap, "same_bits_again": found == again}
    result["equals_eager"] = found == losses(corpus, device, "eager", steps, objective=name)
    return {"ok": gap < 0.02 and result["same_bits_again"] and result["equals_eager"], **result}


def losses(
    corpus: Path,
    device: torch.device,
    execution: str,
    steps: int,
    compute: ComputeConfig | None = None,
    objective: str = "electra",
) -> list[float]:
    """Each step's loss, of a tiny model without dropout, over both stages where there are two."""
    config = shape("tiny:64", {"data.sequence_length": "64", "train.steps": str(max(2, steps))})
    if objective != "electra":
        config = config.with_objective(objective)
    step, found = new_step(config, device, execution, compute, num_processes=1), []
    for number, rows in zip(range(steps), loader(corpus, config), strict=False):
        step(rows, number)
        found.append(float(step.stage.objective.metrics(step.read_totals())["loss"] or 0))
        step.set_totals({})
    return found


def checks(parts: list[str], device: torch.device, cache: Path, quick: bool) -> Iterator[tuple[str, Check]]:
    """Every check of the parts asked for, by name."""
    compute, corpus = choose_compute(shape("small:8"), device), make_corpus(cache, 300)
    if "samples" in parts:
        num_slots = 20_000 if quick else 200_000
        for width in (128, 768):
            yield f"samples, E={width}", lambda w=width: check_samples(device, compute.dtype, w, num_slots)
    if "attention" in parts:
        for name in ("sdpa",) if quick else attention.ATTENTION_BACKENDS:
            backend = ComputeConfig(name, compute.dtype)
            yield f"attention {name}", lambda b=backend: check_attention(device, b)
            if name in attention.WITH_DROPOUT:
                yield f"attention dropout, {name}", lambda b=backend: check_attention_dropout(device, b)
    if "objectives" in parts:
        execution = "graph" if device.type == "cuda" else "eager"
        for name in OBJECTIVES:
            yield f"{name}, {execution}", lambda n=name: check_objective(corpus, device, n, execution, 12)
    # Compiling for a CPU would take minutes and tell nothing, and graphs it has none.
    for execution in ("eager", "graph", "compile") if device.type == "cuda" else ("eager",):
        if execution in parts:
            yield f"losses, {execution}", lambda e=execution: check_losses(corpus, device, e, 10 if quick else 50)


def main() -> int:
    """One line per check; a missing package is said and is no fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS)
    options = parse_arguments(parser)
    results = Results(options.results, options.device)
    for name, check in checks(options.only, options.device, options.cache, options.quick):
        try:
            found = check()
        except ImportError as error:
            results.add(f"{name}: {reason(error)}")
            continue
        except Exception as error:  # the other checks are to be made all the same
            results.add(f"{name}: {reason(error)}", ok=False)
            continue
        results.add(f"{name}: {listed(found)}", check=name, **found)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
