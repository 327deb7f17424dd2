"""How fast is a pre-training step, beside `transformers`' two Electra models on the same batches.

    python bench/pretrain_throughput.py [--out FOLDER] [--shapes small:128 base:128] [--steps 30] [--rounds 3]
                                        [--device cpu] [--quick]

Prints one table and writes `pretrain_throughput.json`: tokens a second (padding excluded), MFU (true
FLOPs over the device's dense bf16 peak), peak memory, and a step's time (median, 5th to 95th percentile).
Downloads nothing. Without a GPU it rehearses (`--device cpu --quick`) on shapes whose speeds mean nothing.

What is fair: everybody trains the same step (generator, sampling, discriminator, AdamW, clipping; bf16;
no dropout; embeddings shared) on the same stream of batches out of our loader, whose time counts for
everybody, in one process, by turns. Rows are packed with several documents, so that peers waste nothing
on padding, and their models get:
* "block mask": a [B, 1, L, L] mask, so that they compute what we compute;
* "no mask": whole rows, as `run_mlm.py` cuts text. It attends across documents, which is another
  and easier task, but is how these models run fastest.
Peers also get the vocabulary head at masked positions only (their own forward pass computes all),
a sampler without a host sync and the fused AdamW: what somebody who cares would write around them.
Losses tell that all learn; they fall at other rates, for ours warms its learning rate up.
Not counted: `torch.compile`'s first steps and graph capture, which warm-up takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import electra_fast as ef
from electra_fast.environment import choose_backend, environment
from electra_fast.flops import device_peak, flops_per_token
from electra_fast.metrics import summarise
from electra_fast.optim import Optimizer
from electra_fast.step import TrainStep, choose_execution

VOCAB_SIZE = 30_522
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Preset:rows a step. small@128 at 16k and 131k tokens, base@512 at 65k, large@512 at 32k.
SHAPES = ["small:128", "small:1024", "base:128", "large:64"]
QUICK_SHAPES = ["tiny:8"]
NO_DROPOUT = {"model.dropout": "0", "model.attention_dropout": "0"}
WARM_UP = 6  # ours captures after three, and torch's compiler after two

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Runner:
    """Somebody's training step: how to take one on a batch of the loader, where it runs, and its mean loss so far."""

    step: Callable[[Any], None]
    loss: Callable[[], float]
    stream: torch.cuda.Stream | None = None


Build = Callable[[ef.Config, torch.device], Runner]


def ours(config: ef.Config, device: torch.device, execution: str) -> Runner:
    """Steps as `pretrain` takes them."""
    if execution != "eager" and device.type != "cuda":
        raise RuntimeError(f"{execution} needs a GPU")
    model = ef.Electra(config).to(device).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    train_step, numbers = TrainStep(model, optimizer, config, choose_backend(config, device), execution), count()

    def loss() -> float:
        train_step.synchronize()
        return float(summarise(train_step.sums.cpu().numpy()[:-1], config.objective)["loss"] or 0)

    return Runner(lambda rows: train_step(rows, next(numbers)), loss, train_step.stream)


def peer(config: ef.Config, device: torch.device, *, masked: bool, compiled: bool, mode: str = "default") -> Runner:
    """The same step around `transformers`' ElectraForMaskedLM and ElectraForPreTraining."""
    generator, discriminator = (model.to(device) for model in peer_models(config))
    parameters = list(dict.fromkeys([*generator.parameters(), *discriminator.parameters()]))
    assert sum(p.numel() for p in parameters) == sum(p.numel() for p in ef.Electra(config).parameters())
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.epsilon,
        weight_decay=options.weight_decay,
        fused=device.type == "cuda",
    )
    loss_of = partial(peer_loss, generator, discriminator, config, masked=masked)
    if compiled:
        # On the CPU only the tracing is rehearsed: C++ takes minutes to compile.
        loss_of = (
            torch.compile(loss_of, mode=mode) if device.type == "cuda" else torch.compile(loss_of, backend="eager")
        )
    total, num_steps = torch.zeros((), device=device), count()

    def step(rows: Any) -> None:
        # Without `cu_seqlens`, whose shape changes and which they do not read.
        batch = {name: x for name, x in ef.to_torch(rows, device=device).items() if name != "cu_seqlens"}
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        optimizer.step()
        total.add_(loss.detach())
        next(num_steps)

    return Runner(step, lambda: total.item() / next(num_steps))


def peer_models(config: ef.Config) -> tuple[nn.Module, nn.Module]:
    """Generator and discriminator of a configuration, their embeddings shared."""
    from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

    def shaped(shape: Any) -> ElectraConfig:
        return ElectraConfig(
            vocab_size=shape.vocab_size,
            embedding_size=shape.embedding_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_positions,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",
        )

    generator = ElectraForMaskedLM(shaped(config.generator_shape()))
    discriminator = ElectraForPreTraining(shaped(config.model))
    discriminator.electra.embeddings = generator.electra.embeddings
    return generator.train(), discriminator.train()


def peer_loss(generator: Any, discriminator: Any, config: ef.Config, batch: Batch, masked: bool) -> Tensor:
    """ELECTRA's loss from the models' public parts."""
    ids, positions = batch["input_ids"].long(), batch["masked_positions"].long()
    original, weight = batch["masked_ids"].long(), batch["masked_weights"]
    segments = batch["segment_ids"]
    inputs = {
        "attention_mask": (segments[:, None, :, None] == segments[:, None, None, :]) if masked else None,
        "token_type_ids": batch["token_type_ids"].long(),
        "position_ids": batch["position_ids"].long(),
    }
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = generator.electra(ids, **inputs).last_hidden_state
        chosen = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = generator.generator_lm_head(generator.generator_predictions(chosen)).float()
        nll = F.cross_entropy(logits.flatten(0, 1), original.flatten(), reduction="none")
        generator_loss = (nll * weight.flatten()).sum() / weight.sum().clamp(min=1)
        with torch.no_grad():
            odds = logits.softmax(-1)
            sample = (odds / torch.empty_like(odds).exponential_()).argmax(-1)
            seen = ids.gather(1, positions)  # unused slots put back what they find
            corrupted = ids.scatter(1, positions, torch.where(weight > 0, sample, seen))
            replaced = corrupted != ids.scatter(1, positions, torch.where(weight > 0, original, seen))
            valid = (segments > 0).float()
        scores = discriminator(corrupted, **inputs).logits.float()
    each = F.binary_cross_entropy_with_logits(scores, replaced.float(), reduction="none")
    discriminator_loss = (each * valid).sum() / valid.sum().clamp(min=1)
    return config.objective.gen_weight * generator_loss + config.objective.disc_weight * discriminator_loss


# Who takes part, by name.
CONTENDERS: dict[str, Build] = {
    "electra-fast, graph": partial(ours, execution="graph"),
    "electra-fast, compile": partial(ours, execution="compile"),
    "electra-fast, eager": partial(ours, execution="eager"),
    "transformers, eager, block mask": partial(peer, masked=True, compiled=False),
    "transformers, eager, no mask": partial(peer, masked=False, compiled=False),
    "transformers, compiled, block mask": partial(peer, masked=True, compiled=True),
    "transformers, compiled, no mask": partial(peer, masked=False, compiled=True),
    "transformers, compiled with graphs, no mask": partial(peer, masked=False, compiled=True, mode="reduce-overhead"),
}


@dataclass
class Contender:
    """A runner, its stream of batches, and what was measured so far."""

    name: str
    runner: Runner
    batches: Iterator[Any]
    peak_bytes: int = 0
    num_tokens: int = 0
    seconds: list[float] = field(default_factory=list)


def loader(corpus: Path, config: ef.Config) -> Iterator[Any]:
    """Endless batches, the same for everybody."""
    data = config.data
    return ef.BatchLoader(
        corpus,
        sequence_length=data.sequence_length,
        batch_size=config.train.batch_size,
        masking=data.masking,
        mask_prob=data.mask_prob,
    )


def run(contender: Contender, num_steps: int, device: torch.device) -> None:
    """Takes steps without waiting between them, and adds their times: event to event on a GPU."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize()
    marks: list[Any] = []

    def mark() -> None:
        if is_cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record(contender.runner.stream or torch.cuda.current_stream())
        else:
            marks.append(time.perf_counter())

    mark()
    for _ in range(num_steps):
        rows = next(contender.batches)
        contender.runner.step(rows)
        contender.num_tokens += int((ef.to_torch(rows)["segment_ids"] > 0).sum())
        mark()
    if is_cuda:
        torch.cuda.synchronize()
    pairs = zip(marks, marks[1:], strict=False)
    contender.seconds += [a.elapsed_time(b) / 1e3 if is_cuda else b - a for a, b in pairs]


def prepare(name: str, build: Build, config: ef.Config, corpus: Path, device: torch.device) -> Contender:
    """Builds and warms up; the peak memory is this contender's own, whatever else lies on the device."""
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    contender = Contender(name, build(config, device), loader(corpus, config))
    run(contender, WARM_UP, device)
    if device.type == "cuda":
        contender.peak_bytes = torch.cuda.max_memory_allocated() - before
    contender.seconds, contender.num_tokens = [], 0
    return contender


def measure(shape: str, corpus: Path, device: torch.device, steps: int, rounds: int) -> list[dict[str, Any]]:
    """All contenders on one shape, by turns."""
    preset, rows = shape.split(":")
    config = ef.Config.preset(preset, "google").override({"model.vocab_size": str(VOCAB_SIZE), **NO_DROPOUT})
    config = config.replace({"train": {"batch_size": int(rows)}})
    label = f"{preset}@{config.data.sequence_length}, {int(rows) * config.data.sequence_length} tokens a step"
    contenders, results = [], []
    for name, build in CONTENDERS.items():
        try:
            contenders.append(prepare(name, build, config, corpus, device))
        except (ImportError, RuntimeError) as error:  # not installed, out of memory, not compilable
            results.append({"shape": label, "step": name, "error": str(error).splitlines()[0]})
    for _ in range(rounds):
        for contender in contenders:
            run(contender, steps, device)
    peak = device_peak(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops = flops_per_token(config).total
    return [{"shape": label, **row(contender, flops, peak)} for contender in contenders] + results


def row(contender: Contender, flops: float, peak: float | None) -> dict[str, Any]:
    """What is reported of a contender."""
    speed = contender.num_tokens / sum(contender.seconds)
    low, *_, high = statistics.quantiles(contender.seconds, n=20, method="inclusive")
    return {
        "step": contender.name,
        "tokens_per_second": speed,
        "mfu": speed * flops / peak if peak else None,
        "peak_gib": contender.peak_bytes / 2**30 if contender.peak_bytes else None,
        "step_ms": statistics.median(contender.seconds) * 1e3,
        "step_ms_p5": low * 1e3,
        "step_ms_p95": high * 1e3,
        "mean_loss": contender.runner.loss(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| step | tokens/s | MFU | peak GiB | step ms (p5 to p95) | mean loss |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        if "error" in r:
            lines.append(f"| {r['step']} | {r['error']} | | | | |")
            continue
        mfu = f"{r['mfu']:.1%}" if r["mfu"] else "–"
        memory = f"{r['peak_gib']:.1f}" if r["peak_gib"] else "–"
        times = f"{r['step_ms']:.2f} ({r['step_ms_p5']:.2f} to {r['step_ms_p95']:.2f})"
        lines.append(
            f"| {r['step']} | {r['tokens_per_second']:,.0f} | {mfu} | {memory} | {times} | {r['mean_loss']:.1f} |"
        )
    return "\n".join(lines)


def make_corpus(folder: Path, num_documents: int) -> Path:
    """Documents of Zipf-distributed words, one id each, through the package's own `prepare`."""
    words = [f"w{i}" for i in range(VOCAB_SIZE - len(SPECIAL))]
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + words) + "\n")
    lengths = random.Random(0)
    ranks = iter(np.random.default_rng(0).zipf(1.2, 700 * num_documents) % len(words))
    documents = (" ".join(words[next(ranks)] for _ in range(lengths.randrange(20, 700))) for _ in range(num_documents))
    ef.prepare(documents, vocab=folder / "vocab.txt", out=folder / "shards", lowercase=False, progress=False)
    return folder / "shards"


def main() -> int:
    """Measures shape after shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("."), help="where pretrain_throughput.json goes")
    parser.add_argument("--shapes", nargs="+", help="preset:rows a step")
    parser.add_argument("--steps", type=int, default=30, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, few steps; always so without a GPU")
    options = parser.parse_args()
    options.quick |= not torch.cuda.is_available()
    steps, rounds = (3, 2) if options.quick else (options.steps, options.rounds)
    device = torch.device(options.device)
    if device.type != "cuda":
        print("A rehearsal without a GPU: the speeds below mean nothing.")
    config = ef.Config.preset("small", "google").override(NO_DROPOUT)
    facts = environment(device, choose_backend(config, device), choose_execution("auto", device))
    result: dict[str, Any] = {"environment": facts, "rehearsal": device.type != "cuda", "throughput": []}
    print(", ".join(f"{name} {value}" for name, value in result["environment"].items()))
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder), 300 if options.quick else 8000)
        for shape in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
            rows = measure(shape, corpus, device, steps, rounds)
            result["throughput"] += rows
            print(f"\n{rows[0]['shape']}\n\n{table(rows)}", flush=True)
            torch.compiler.reset()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "pretrain_throughput.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
