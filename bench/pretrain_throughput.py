"""Throughput of a pre-training step, compared with Electra in `transformers` on the same batches.

    python bench/pretrain_throughput.py [--shapes small:128 base:128:google:0] [--only WORD ...]
                                        [--section.key value ...] [--results FILE] [--device cpu] [--quick]

Prints a line per contender and a table per shape: tokens per second (padding excluded), MFU (exact FLOP/s over the
device's dense bf16 peak), peak memory, and a step's time. Without a GPU (`--device cpu --quick`) it is a dry run.

Ours runs as `pretrain` would, with kernels, attention and execution chosen by a run's check on this GPU,
and also with all kernels. Peers join in recipe `google` without dropout (`small:128:google:0`; its
own is 0.1), and train the same step (generator, sampling, discriminator, AdamW, clipping; bf16; tied
embeddings) on the same stream of batches from our loader, whose time counts for all. One contender is on
the device at a time; ours runs first and last, which shows how much the machine drifts. Rows are packed
with several documents, so peers waste nothing on padding; their models get either
* "block mask": a [B, 1, L, L] mask, so that they compute the same as ours;
* "no mask": whole rows, as `run_mlm.py` cuts text. This attends across documents, a different
  and easier task, but is how these models run fastest.
Peers also get the vocabulary head at masked positions only (their own forward pass computes all
positions), a sampler without a host sync and the fused AdamW, as a careful user would write them.
Compilation and graph capture happen during warm-up and are reported, but not counted.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lib.contenders import Build, Runner, ours, peer, run
from lib.results import Results, markdown, parse_arguments, reason
from lib.workload import label, loader, make_corpus, shape

import electra_fast as ef
from electra_fast.card import device_peak
from electra_fast.hardware.flops import flops_per_token

# Preset:rows per step[:recipe[:dropout]]. small@128 at 16k and 131k tokens, base@512 at 65k, large@512 at 32k.
SHAPES = ["small:128", "small:128:google:0", "small:1024:google:0", "base:128:google:0", "large:64:google:0"]
QUICK_SHAPES = ["tiny:8"]
WARM_UP = 6  # ours captures after three steps, torch.compile after two
SECONDS = 6.0
LEAST_STEPS = 10
MOST_STEPS = 200


def contender(build: Callable[..., Runner], dry: Mapping[str, Any], **options: Any) -> Build:
    """A contender with its options; without a GPU, in a dry run, those in `dry` replace them."""
    return lambda config, device: build(config, device, **(options if device.type == "cuda" else {**options, **dry}))


# A dry run has no graphs, and compiling C++ would take minutes, so peers are only traced.
NOT_COMPILED = {"execution": "eager"}
ONLY_TRACED = {"compile_with": {"backend": "eager"}}

# Contenders by name.
OURS = "electra-fast, as pretrain"
CONTENDERS: dict[str, Build] = {
    OURS: contender(ours, {}),
    "electra-fast, graph": contender(ours, NOT_COMPILED, execution="graph"),
    "electra-fast, compile": contender(ours, NOT_COMPILED, execution="compile"),
    "electra-fast, eager": contender(ours, NOT_COMPILED, execution="eager"),
    "transformers, eager, block mask": contender(peer, {}, masked=True),
    "transformers, eager, no mask": contender(peer, {}, masked=False),
    "transformers, compiled, block mask": contender(peer, ONLY_TRACED, masked=True, compile_with={}),
    "transformers, compiled, no mask": contender(peer, ONLY_TRACED, masked=False, compile_with={}),
    "transformers, compiled with graphs, no mask": contender(
        peer, ONLY_TRACED, masked=False, compile_with={"mode": "reduce-overhead"}
    ),
}


def measure(build: Build, config: ef.Config, corpus: Path, options: argparse.Namespace) -> dict[str, Any]:
    device = options.device
    batches = loader(corpus, config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    start = time.perf_counter()
    runner = build(config, device)
    run(runner, batches, WARM_UP, device)
    warm_up_seconds = time.perf_counter() - start
    fastest = min(run(runner, batches, 3, device).seconds)
    steps = 3 if options.quick else min(MOST_STEPS, max(LEAST_STEPS, int(options.seconds / fastest)))
    times = run(runner, batches, steps, device)
    low, *_, high = statistics.quantiles(times.seconds, n=20, method="inclusive")
    speed = times.num_tokens / sum(times.seconds)
    peak = device_peak(device, "bf16")
    return {
        "tokens_per_second": speed,
        "mfu": speed * flops_per_token(config).total / peak if peak else None,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "step_ms": statistics.median(times.seconds) * 1e3,
        "step_ms_p5": low * 1e3,
        "step_ms_p95": high * 1e3,
        "mean_loss": runner.loss(),
        "warm_up_seconds": warm_up_seconds,
        **runner.facts(),
    }


def columns(result: Mapping[str, Any]) -> list[str]:
    captures = result.get("capture_seconds")
    return [
        f"{result['tokens_per_second']:,.0f}",
        f"{result['mfu']:.1%}" if result["mfu"] else "–",
        f"{result['peak_gib']:.1f}" if result["peak_gib"] else "–",
        f"{result['step_ms']:.2f} ({result['step_ms_p5']:.2f} to {result['step_ms_p95']:.2f})",
        f"{result['mean_loss']:.1f}",
        f"{result['warm_up_seconds']:.0f}" + (f", captures {captures}" if captures else ""),
    ]


HEADER = ["step", "tokens/s", "MFU", "peak GiB", "step ms (p5 to p95)", "mean loss", "warm-up s"]


def chosen(words: list[str], config: ef.Config) -> list[str]:
    """The contenders with one of the words in their names, peers if they support the shape; ours again at the end."""
    has_peers = config.model.architecture == "bert" and not config.model.dropout
    names = [name for name in CONTENDERS if has_peers or name.startswith("electra-fast")]
    names = [name for name in names if any(word in name for word in words)]
    return [*names, OURS] if OURS in names and len(names) > 1 else names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--shapes", nargs="+", help="preset:rows per step[:recipe[:dropout]]")
    parser.add_argument("--only", nargs="+", default=[""], help="contenders whose name has one of these words")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="seconds of timed steps per contender")
    options = parse_arguments(parser, with_overrides=True)
    overrides = options.overrides
    results = Results(options.results, options.device)
    corpus = make_corpus(options.cache, 300 if options.quick else 8000)
    for text in options.shapes or (QUICK_SHAPES if options.quick else SHAPES):
        config = shape(text, {"data.corpus": str(corpus), **overrides})
        title = ", ".join([label(config, text), *(f"{key} {value}" for key, value in overrides.items())])
        rows = []
        for name in chosen(options.only, config):
            try:
                result = measure(CONTENDERS[name], config, corpus, options)
            except Exception as error:  # not installed, out of memory, not compilable: continue with the others
                is_wrong = name.startswith("electra-fast") and not isinstance(error, torch.OutOfMemoryError)
                results.add(f"{title}, {name}: {reason(error)}", ok=not is_wrong)
                rows.append([name, reason(error), *[""] * (len(HEADER) - 2)])
            else:
                units = zip(columns(result), ("tok/s", "MFU", "GiB", "ms", "loss", "s to warm up"), strict=True)
                line = f"{title}, {name}: " + ", ".join(" ".join(pair) for pair in units)
                results.add(line, shape=text, overrides=overrides, step=name, **result)
                rows.append([name, *columns(result)])
            torch.compiler.reset()
            gc.collect()
            if options.device.type == "cuda":
                torch.cuda.empty_cache()
        print(f"\n{title}, {results.facts['card']}\n\n{markdown(HEADER, rows)}\n", flush=True)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
