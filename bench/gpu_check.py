"""One call on a GPU node: are kernels and backends right, does a short run learn, how fast is a step.

    python bench/gpu_check.py [--out FOLDER] [--device cpu] [--quick]

Makes its own corpus, downloads nothing, prints a line for each check and each way to run a step, and
writes `gpu_check.json`, anew after each. Exit code 1 says that something is wrong or failed. Where there
is no GPU it rehearses, as `--device cpu --quick` does: the same code on small shapes, whose speeds mean
nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kernel_numerics
import numpy as np
import torch
from torch import Tensor

import electra_fast as ef
from electra_fast import attention, electra, sampling
from electra_fast.electra import Backend
from electra_fast.environment import choose_backend, environment
from electra_fast.flops import device_peak, flops_per_token
from electra_fast.metrics import summarise
from electra_fast.optim import Optimizer
from electra_fast.step import WARM_UP, StepClock, TrainStep, choose_execution

VOCAB_SIZE = 30_522
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Preset, rows a step, dropout: the paper's 16k tokens, a step that fills the GPU, and the larger models.
SHAPES = [("small", 128, 0.0), ("small", 1024, 0.0), ("small", 1024, 0.1), ("base", 128, 0.0), ("large", 64, 0.0)]
QUICK_SHAPES = [("tiny", 8, 0.0), ("tiny", 8, 0.1)]
# So that the backend `varlen` can serve, and two devices can be compared.
NO_DROPOUT = {"model.dropout": "0", "model.attention_dropout": "0"}


def make_corpus(folder: Path, num_documents: int) -> Path:
    """Documents of Zipf-distributed words, one id each, through the package's own `prepare`."""
    words = [f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL))]
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + words) + "\n")
    draw = random.Random(0)
    ranks = np.random.default_rng(0).zipf(1.2, 700 * num_documents) % len(words)
    documents = iter(
        " ".join(words[rank] for rank in ranks[start : start + draw.randrange(20, 700)])
        for start in range(0, len(ranks), 700)
    )
    ef.prepare(documents, vocab=folder / "vocab.txt", out=folder / "shards", lowercase=False, progress=False)
    return folder / "shards"


def loader(corpus: Path, config: ef.Config) -> ef.BatchLoader:
    """Endless batches of a configuration."""
    data, train = config.data, config.train
    return ef.BatchLoader(
        corpus,
        sequence_length=data.sequence_length,
        batch_size=train.batch_size,
        masking=data.masking,
        mask_prob=data.mask_prob,
    )


def check_sampling(device: torch.device) -> dict[str, Any]:
    """The kernel draws the reference's tokens, but for ties within fp32 rounding, and in their proportions."""
    key = torch.tensor([2**40 + 1, 7], device=device)
    noise = torch.Generator().manual_seed(0)
    logits = (torch.randn(4096, VOCAB_SIZE, generator=noise) * 2).to(device)
    slots = torch.arange(4096, device=device)
    drawn = sampling.sample_categorical(logits, slots, key)
    different = (drawn != sampling.sample_categorical(logits, slots, key)).float().mean().item()
    few = torch.randn(500, generator=noise).to(device).expand(200_000, -1).contiguous()
    counts = torch.bincount(sampling.sample_categorical(few, torch.arange(200_000, device=device), key), minlength=500)
    expected = few[0].double().softmax(-1) * 200_000
    # 499 degrees of freedom: standard deviation of the statistic 31.6.
    score = ((((counts - expected) ** 2 / expected).sum() - 499) / 31.6).item()
    return {"differ": different, "chi_squared_sd": score, "ok": different < 1e-3 and abs(score) < 5}


def check_attention(device: torch.device, backend: Backend) -> dict[str, Any]:
    """A backend's error against fp64, output and gradients, is no more than twice eager's in its dtype."""
    borders = torch.tensor([0, 1, 60, 128, 130, 256], dtype=torch.int32, device=device)
    ids = torch.repeat_interleave(torch.arange(5, device=device), borders.diff().long()).view(2, 128)
    noise = torch.Generator().manual_seed(1)
    exact = [torch.randn(256, 4, 64, generator=noise, dtype=torch.float64).to(device) for _ in range(4)]

    def outcome(dtype: torch.dtype, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
        q, k, v, weight = (x.detach().to(dtype, copy=True).requires_grad_() for x in exact)
        out = attend(q, k, v)
        (out * weight).sum().backward()  # type: ignore[no-untyped-call]  # torch's own
        return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attention_reference(q, k, v, borders)

    segments = attention.Segments.packed(ids, borders, backend.attention)
    truth = outcome(torch.float64, reference)
    eager = outcome(backend.dtype, reference)
    ours = outcome(backend.dtype, lambda q, k, v: attention.attention(q, k, v, segments))
    ratios = [
        ((a.double() - t).abs().max() / (b.double() - t).abs().max()).item()
        for a, b, t in zip(ours, eager, truth, strict=True)
    ]
    return {"error_over_eager": max(ratios), "ok": max(ratios) < 2}


def check_attention_dropout(device: torch.device, backend: Backend) -> dict[str, Any]:
    """Values of 1 come out as 1 on average and not everywhere: probabilities fell, the others were scaled up."""
    ids = torch.ones(64, 128, dtype=torch.int32, device=device)
    borders = torch.arange(0, 64 * 128 + 1, 128, dtype=torch.int32, device=device)
    q, k = (torch.randn(64 * 128, 4, 64, device=device).to(backend.dtype) for _ in range(2))
    segments = attention.Segments.packed(ids, borders, backend.attention)
    out = attention.attention(q, k, torch.ones_like(q), segments, 0.3).float()
    mean, spread = out.mean().item(), out.std().item()
    return {"mean": mean, "spread": spread, "ok": abs(mean - 1) < 0.02 and spread > 0.02}


def check_training(corpus: Path, device: torch.device, steps: int) -> dict[str, Any]:
    """Losses of a short run on the device beside fp32 on the CPU: the same rows, masks and noise keys."""
    truth = losses(corpus, torch.device("cpu"), "eager", steps, Backend("sdpa", torch.float32))
    result: dict[str, Any] = {"ok": True}
    for execution in executions(device):
        found = losses(corpus, device, execution, steps)
        again = losses(corpus, device, execution, steps)
        gap = max(abs(a - b) / a for a, b in zip(truth, found, strict=True))
        result[execution] = {"last": found[-1], "largest_gap": gap, "same_bits_again": found == again, "losses": found}
        result["ok"] &= gap < 0.02 and found[-1] < found[0] and found == again
    if "graph" in result:
        result["graph_equals_eager"] = result["graph"]["losses"] == result["eager"]["losses"]
        result["ok"] &= result["graph_equals_eager"]
    for execution in executions(device):
        del result[execution]["losses"]
    return result


def executions(device: torch.device) -> list[str]:
    """The ways in which a step can run there; compiling for a CPU would take minutes and tell nothing."""
    return ["eager", "graph", "compile"] if device.type == "cuda" else ["eager"]


def losses(
    corpus: Path, device: torch.device, execution: str, steps: int, backend: Backend | None = None
) -> list[float]:
    """Each step's generator plus weighted discriminator loss, of a tiny model without dropout."""
    changes = {"model.vocab_size": str(VOCAB_SIZE), "data.sequence_length": "64"}
    config = ef.Config.preset("tiny", "google").override(NO_DROPOUT | changes)
    step = new_step(config, device, execution, backend)
    found = []
    for number, rows in zip(range(steps), loader(corpus, config), strict=False):
        step(rows, number)
        step.synchronize()
        found.append(float(summarise(step.sums.cpu().numpy()[:-1], config.objective)["loss"] or 0))
        step.sums.zero_()
    return found


def new_step(config: ef.Config, device: torch.device, execution: str, backend: Backend | None = None) -> TrainStep:
    """A new model on the device, and its step."""
    model = ef.Electra(config).to(device).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    return TrainStep(model, optimizer, config, backend or choose_backend(config, device), execution)


def throughput(
    corpus: Path, device: torch.device, shape: tuple[str, int, float], execution: str, steps: int
) -> dict[str, Any]:
    """Tokens a second (padding excluded), MFU, peak memory and step times of whole steps, loader included."""
    preset, rows, dropout = shape
    model = {"vocab_size": VOCAB_SIZE, "dropout": dropout, "attention_dropout": dropout}
    config = ef.Config.preset(preset, "google").replace({"model": model, "train": {"batch_size": rows}})
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step, stream = new_step(config, device, execution), loader(corpus, config)
    clock = StepClock(step)
    for number in range(WARM_UP + 2):  # the first ones compile, allocate and capture
        step(next(stream), number)
    step.synchronize()
    step.sums.zero_()
    clock.start()
    start = time.perf_counter()
    for number in range(steps):
        step(next(stream), WARM_UP + 2 + number)
        clock.tick()
    step.synchronize()
    seconds, times = time.perf_counter() - start, clock.read()
    assert times is not None
    speed = step.sums[electra.SUMS.index("tokens")].item() / seconds
    peak = device_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "shape": f"{preset}@{config.data.sequence_length}",
        "rows": rows,
        "dropout": dropout,
        "execution": execution,
        "attention": step.backend.attention,
        "tokens_per_second": speed,
        "mfu": speed * flops_per_token(config).total / peak if peak else None,
        "step_ms": times.median * 1e3,
        "step_ms_longest": times.longest * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `work` found, or why it failed: one failure must not cost the rest of a GPU's minutes."""
    try:
        return work()
    except Exception as error:
        return {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}


def all_checks(
    corpus: Path, device: torch.device, backend: Backend, quick: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every check, one after the other."""
    yield from kernel_numerics.checks(device)
    yield "sampling", attempt(lambda: check_sampling(device))
    for name in dict.fromkeys(("sdpa", backend.attention, *(("flex",) if device.type == "cuda" else ()))):
        yield f"attention {name}", attempt(lambda name=name: check_attention(device, Backend(name, backend.dtype)))
    yield "attention dropout", attempt(lambda: check_attention_dropout(device, backend))
    yield "training", attempt(lambda: check_training(corpus, device, 10 if quick else 50))


def main() -> int:
    """Checks, then times; each line goes to standard output as it is known."""
    parser = argparse.ArgumentParser(description="Check and time electra-fast on a GPU.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("."), help="where gpu_check.json goes")
    parser.add_argument("--quick", action="store_true", help="small shapes, few steps; always so without a GPU")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing more after so long")
    options = parser.parse_args()
    options.quick |= not torch.cuda.is_available()
    options.out.mkdir(parents=True, exist_ok=True)
    device, start = torch.device(options.device), time.monotonic()
    backend = choose_backend(ef.Config.preset("small").override({"model.attention_dropout": "0"}), device)
    facts = environment(device, backend, choose_execution("auto", device))
    result: dict[str, Any] = {"environment": facts, "checks": {}, "throughput": []}

    def save() -> None:
        (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder), 300 if options.quick else 8000)
        for name, check in all_checks(corpus, device, backend, options.quick):
            result["checks"][name] = check
            print(f"{'ok   ' if check['ok'] else 'WRONG'} {name}: {check}", flush=True)
            save()
        shapes = QUICK_SHAPES if options.quick else SHAPES
        # What compiles takes minutes: last.
        for execution, shape in itertools.product(executions(device), shapes):
            if time.monotonic() - start > 60 * options.minutes:
                print(f"skipped for want of time: {shape}, {execution}")
                continue
            steps = 3 if options.quick else 30
            row = attempt(lambda s=shape, e=execution, n=steps: throughput(corpus, device, s, e, n))
            result["throughput"].append({"preset": shape[0], "execution": execution, **row})
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
            save()
    wrong = [row for row in (*result["checks"].values(), *result["throughput"]) if not row.get("ok", True)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
