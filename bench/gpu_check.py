"""One call on a GPU node: are kernels and backends right, does a short run learn, how fast is a step.

    python bench/gpu_check.py [--out FOLDER] [--device cpu] [--quick]

Makes its own corpus, downloads nothing, prints one table and writes `gpu_check.json`. Exit code 1
says that a number is wrong. Where there is no GPU it rehearses, as `--device cpu --quick` does: the same
code on small shapes, whose speeds mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import electra_fast as ef
from electra_fast import attention, electra, sampling
from electra_fast.electra import Backend, Noise
from electra_fast.flops import device_peak, flops_per_token
from electra_fast.optim import Optimizer
from electra_fast.run import choose_backend, environment

VOCAB_SIZE = 30_522
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Preset, rows a step: the paper's 16k tokens, a step that fills the GPU, and the larger models.
SHAPES = [("small", 128), ("small", 1024), ("base", 128), ("large", 64)]
QUICK_SHAPES = [("tiny", 8)]
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


def batches(corpus: Path, config: ef.Config, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Endless batches of a configuration, on the device."""
    data, train = config.data, config.train
    loader = ef.BatchLoader(
        corpus,
        sequence_length=data.sequence_length,
        batch_size=train.batch_size,
        masking=data.masking,
        mask_prob=data.mask_prob,
    )
    return (ef.to_torch(rows, device=device) for rows in loader)


def check_sampling(device: torch.device) -> dict[str, Any]:
    """The kernel draws the reference's tokens, but for ties within fp32 rounding, and in their proportions."""
    key = torch.tensor([2**40 + 1, 7], device=device)
    noise = torch.Generator().manual_seed(0)
    logits = (torch.randn(4096, VOCAB_SIZE, generator=noise) * 2).to(device)
    slots = torch.arange(4096, device=device)
    drawn = sampling.sample_categorical(logits, slots, key)
    different = (drawn != sampling.sample_categorical_reference(logits, slots, key)).float().mean().item()
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


def check_training(corpus: Path, device: torch.device, steps: int) -> dict[str, Any]:
    """Losses of a short run on the device beside fp32 on the CPU: the same rows, masks and noise keys."""
    changes = {"model.vocab_size": str(VOCAB_SIZE), "data.sequence_length": "64"}
    base = ef.Config.preset("tiny", "google").override(NO_DROPOUT | changes)
    runs = []
    for where in (torch.device("cpu"), device):
        backend = choose_backend(base, where) if where.type == "cuda" else Backend("sdpa", torch.float32)
        model = ef.Electra(base).to(where)
        optimizer = Optimizer(model.named_parameters(), base.optimizer)
        losses = []
        for step, batch in zip(range(steps), batches(corpus, base, where), strict=False):
            losses.append(train_step(model, optimizer, batch, backend, step).item())
        runs.append(losses)
    gap = max(abs(a - b) / a for a, b in zip(*runs, strict=True))
    return {"first": runs[1][0], "last": runs[1][-1], "largest_gap": gap, "ok": gap < 0.02 and runs[1][-1] < runs[1][0]}


def train_step(
    model: ef.Electra, optimizer: Optimizer, batch: dict[str, Tensor], backend: Backend, step: int
) -> Tensor:
    """One step as `pretrain` takes it."""
    device = batch["input_ids"].device
    optimizer.zero_grad()
    noise = Noise(torch.tensor([0, step], device=device))
    output = electra.forward(model, batch, backend, noise, electra.count(batch))
    output.loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step(1.0)
    return output.loss.detach()


def throughput(corpus: Path, device: torch.device, preset: str, rows: int, steps: int) -> dict[str, Any]:
    """Tokens a second (padding excluded), MFU, peak memory and step time of the whole step, loader included."""
    config = ef.Config.preset(preset, "google").override({"model.vocab_size": str(VOCAB_SIZE), **NO_DROPOUT})
    config = config.replace({"train": {"batch_size": rows}})
    backend = choose_backend(config, device)
    model = ef.Electra(config).to(device)
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    stream = batches(corpus, config, device)
    seconds, tokens = [], 0.0
    for step in range(steps + 3):
        start = time.perf_counter()
        batch = next(stream)
        train_step(model, optimizer, batch, backend, step)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if step >= 3:  # the first ones compile and allocate
            seconds.append(time.perf_counter() - start)
            tokens += (batch["segment_ids"] > 0).sum().item()
    speed = tokens / sum(seconds)
    peak = device_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        "shape": f"{preset}@{config.data.sequence_length}",
        "rows": rows,
        "attention": backend.attention,
        "tokens_per_second": speed,
        "mfu": speed * flops_per_token(config).total / peak if peak else None,
        "step_ms": statistics.median(seconds) * 1e3,
        "step_ms_worst": max(seconds) * 1e3,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
    }


def main() -> int:
    """Checks, then times; the table goes to standard output."""
    parser = argparse.ArgumentParser(description="Check and time electra-fast on a GPU.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("."), help="where gpu_check.json goes")
    parser.add_argument("--quick", action="store_true", help="small shapes, few steps; always so without a GPU")
    options = parser.parse_args()
    options.quick |= not torch.cuda.is_available()
    device = torch.device(options.device)
    config = ef.Config.preset("small").override({"model.attention_dropout": "0"})
    backend = choose_backend(config, device)
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder), 300 if options.quick else 8000)
        result: dict[str, Any] = {
            "environment": environment(device, backend),
            "checks": {
                "sampling": check_sampling(device),
                "attention sdpa": check_attention(device, Backend("sdpa", backend.dtype)),
                f"attention {backend.attention}": check_attention(device, backend),
                "training": check_training(corpus, device, 10 if options.quick else 50),
            },
            "throughput": [],
        }
        for name, check in result["checks"].items():
            print(f"{'ok   ' if check['ok'] else 'WRONG'} {name}: {check}")
        for preset, rows in QUICK_SHAPES if options.quick else SHAPES:
            torch.cuda.empty_cache()
            row = throughput(corpus, device, preset, rows, 3 if options.quick else 30)
            result["throughput"].append(row)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(check["ok"] for check in result["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
