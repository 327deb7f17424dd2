"""How many tokens a second reach torch tensors: shuffled, packed, masked, from a prepared corpus.

    python bench/loader_throughput.py CORPUS [--cores 1 2] [--lengths 128 512]

Prints one line a setting: the median of several runs with their spread, in million tokens a second
(padding counted: see the fill). The process pins itself to the given number of cores; the page cache
is warm.
"""

import argparse
import os
import statistics
import time

import torch

from electra_fast.data import BatchLoader, to_torch


def main() -> None:
    """Measure each row length on each number of cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", help="a folder made by `electra-fast prepare`")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--masking", default="google")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a run")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    available = sorted(os.sched_getaffinity(0))
    for cores in arguments.cores:
        os.sched_setaffinity(0, available[:cores])
        for length in arguments.lengths:
            rates = [rate(arguments, cores, length) for _ in range(arguments.runs)]
            spread = f"{min(rates):.0f} to {max(rates):.0f}"
            print(f"L={length} cores={cores}: {statistics.median(rates):.0f} Mtok/s ({spread})", flush=True)
            print(f"  fill {fill(arguments, length):.2%}, first batch after", end=" ")
            print(f"{first_batch(arguments, length) * 1e3:.0f} ms", flush=True)


def rate(arguments: argparse.Namespace, cores: int, length: int) -> float:
    """Million tokens a second over one run, after a warm-up of 20 batches."""
    loader = open_loader(arguments, cores, length)
    for _ in range(20):
        to_torch(next(loader))
    tokens, start = 0, time.perf_counter()
    while time.perf_counter() - start < arguments.seconds:
        tokens += to_torch(next(loader))["input_ids"].numel()
    return tokens / (time.perf_counter() - start) / 1e6


def fill(arguments: argparse.Namespace, length: int) -> float:
    """Share of positions that are not padding, over the first hundred batches."""
    loader = open_loader(arguments, 1, length)
    filled = [(to_torch(next(loader))["segment_ids"] > 0).float().mean().item() for _ in range(100)]
    return statistics.mean(filled)


def first_batch(arguments: argparse.Namespace, length: int) -> float:
    """Seconds from the folder's name to the first tensors."""
    start = time.perf_counter()
    to_torch(next(open_loader(arguments, 1, length)))
    return time.perf_counter() - start


def open_loader(arguments: argparse.Namespace, threads: int, length: int) -> BatchLoader:
    """Return a shuffled, endless loader."""
    return BatchLoader(
        arguments.corpus,
        sequence_length=length,
        batch_size=arguments.batch_tokens // length,
        masking=arguments.masking,
        num_threads=threads,
    )


if __name__ == "__main__":
    main()
