"""Loader throughput: shuffled, packed and masked torch tensors from a prepared corpus, in tokens per second.

    python bench/loader_throughput.py [CORPUS] [--cores 1 2] [--lengths 128 512]

Prints one line per setting: the median and range of several runs, in million tokens per second
(including padding; see the fill) of wall-clock time and of CPU time over all threads, which is the
same on an idle machine with one core and fairer on a busy one. The process pins itself to the given
number of cores; the page cache is warm. Without CORPUS it makes one of random words.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

import electra_fast
from electra_fast.data.loader import BatchLoader, to_torch


def main() -> None:
    """Measures each row length on each number of cores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="?", help="a folder written by `electra-fast prepare`")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--masking", default="google")
    parser.add_argument("--packing", default="best-fit")
    parser.add_argument("--cut-at", default="token")
    parser.add_argument("--batch-tokens", type=int, default=65_536)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a run")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments.corpus = arguments.corpus or random_corpus(Path(folder), num_tokens=4_000_000)
        available = sorted(os.sched_getaffinity(0))
        for cores in arguments.cores:
            os.sched_setaffinity(0, available[:cores])
            for length in arguments.lengths:
                report(arguments, cores, length)


def report(arguments: argparse.Namespace, cores: int, length: int) -> None:
    """Prints the results of one setting."""
    runs = [rates(arguments, cores, length) for _ in range(arguments.runs)]
    clock, processor = zip(*runs, strict=True)
    print(
        f"L={length} cores={cores}: {statistics.median(clock):.0f} Mtok/s"
        f" ({min(clock):.0f} to {max(clock):.0f}),"
        f" {statistics.median(processor):.0f} Mtok per CPU second"
        f" ({min(processor):.0f} to {max(processor):.0f}),"
        f" fill {fill(arguments, length):.2%},"
        f" first batch after {first_batch(arguments, length) * 1e3:.0f} ms",
        flush=True,
    )


def rates(arguments: argparse.Namespace, cores: int, length: int) -> tuple[float, float]:
    """Million tokens per wall-clock and CPU second, over one run after 20 batches of warm-up."""
    loader = open_loader(arguments, cores, length)
    for _ in range(20):
        to_torch(next(loader))
    tokens, start, processor = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - start < arguments.seconds:
        tokens += to_torch(next(loader))["input_ids"].numel()
    seconds = time.perf_counter() - start, time.process_time() - processor
    return tokens / seconds[0] / 1e6, tokens / seconds[1] / 1e6


def fill(arguments: argparse.Namespace, length: int) -> float:
    """Fraction of positions that are not padding, over the first hundred batches."""
    loader = open_loader(arguments, 1, length)
    filled = [(to_torch(next(loader))["segment_ids"] > 0).float().mean().item() for _ in range(100)]
    return statistics.mean(filled)


def first_batch(arguments: argparse.Namespace, length: int) -> float:
    """Seconds from opening the folder to the first tensors."""
    start = time.perf_counter()
    to_torch(next(open_loader(arguments, 1, length)))
    return time.perf_counter() - start


def open_loader(arguments: argparse.Namespace, threads: int, length: int) -> BatchLoader:
    """A shuffled, endless loader."""
    return BatchLoader(
        arguments.corpus,
        sequence_length=length,
        batch_size=arguments.batch_tokens // length,
        masking=arguments.masking,
        packing=arguments.packing,
        cut_at=arguments.cut_at,
        num_threads=threads,
    )


def random_corpus(folder: Path, num_tokens: int) -> str:
    """Prepares documents of random words, with log-normal lengths like an encyclopedia's."""
    rng, left = random.Random(0), num_tokens
    words = [f"w{number}" for number in range(30_000)]
    vocab, text = folder / "vocab.txt", folder / "text.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    with text.open("w") as file:
        while left > 0:
            length = min(left, 1 + int(rng.lognormvariate(6.2, 1.1)))
            file.write(" ".join(rng.choices(words, k=length)) + "\n\n")
            left -= length
    electra_fast.prepare([str(text)], vocab=str(vocab), out=str(folder / "shards"))
    return str(folder / "shards")


if __name__ == "__main__":
    main()
