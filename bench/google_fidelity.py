"""Compares the statistics of `packing = "google"` with those of the published example builder.

    python bench/google_fidelity.py [CORPUS] [--seeds 8]

The published statistics were measured with the published code (google-research/electra, commit 8a46635)
on the first 1,500 articles of the English Wikipedia of May 2015, one line per paragraph and a blank line
after each article, tokenized with the uncased vocabulary: 68,114 lines, 4,837,794 tokens. CORPUS is
that text, prepared; without it the script does nothing, and on another corpus the comparison is
meaningless. Exits with 1 if a statistic is more than four standard deviations (of one run) from the
published one.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator

import torch

import electra_fast
from electra_fast.data.loader import BatchLoader, to_torch

NUM_TOKENS = 4_837_794
MOST_DEVIATIONS = 4.0
# Row length → statistic → (mean over 8 seeds, standard deviation of one run or None if not recorded,
# rounding error of the mean).
PUBLISHED: dict[int, dict[str, tuple[float, float | None, float]]] = {
    128: {
        "examples": (27_059, 18, 0.5),
        "tokens kept": (0.6429, 0.0003, 5e-5),
        "one segment only": (0.482, 0.002, 5e-4),
        "length with specials": (117.47, 0.04, 5e-3),
        "exactly L": (0.879, 0.001, 5e-4),
        "fill": (0.918, None, 5e-4),
        "segment 1 tokens": (85.5, None, 0.05),
        "segment 2 tokens": (29.4, None, 0.05),
    },
    512: {
        "examples": (10_807, 19, 0.5),
        "tokens kept": (0.8815, 0.0007, 5e-5),
        "one segment only": (0.311, 0.002, 5e-4),
        "length with specials": (397.3, 0.6, 0.05),
        "exactly L": (0.701, 0.002, 5e-4),
        "fill": (0.776, None, 5e-4),
        "segment 1 tokens": (235.8, None, 0.05),
        "segment 2 tokens": (158.9, None, 0.05),
    },
}


def main() -> None:
    """Prints a table per row length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="?", help="a folder written by `electra-fast prepare`")
    parser.add_argument("--seeds", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.corpus is None:
        print("no CORPUS given: nothing compared")
        return
    torch.set_num_threads(1)
    num_tokens = electra_fast.Corpus(arguments.corpus).num_tokens
    if abs(num_tokens - NUM_TOKENS) > 10:
        print(f"CORPUS has {num_tokens:,} tokens, not {NUM_TOKENS:,}: it is other text", file=sys.stderr)
    worst = 0.0
    for length, published in PUBLISHED.items():
        runs = [statistics_of(arguments.corpus, length, seed, num_tokens) for seed in range(arguments.seeds)]
        print(f"L={length}, {arguments.seeds} seeds       published           measured              deviation")
        for name, (mean, deviation, rounding) in published.items():
            values = [run[name] for run in runs]
            spread = deviation or statistics.stdev(values)
            off = max(0.0, abs(statistics.mean(values) - mean) - rounding) / spread
            worst = max(worst, off)
            before = f"{mean:.6g}" + (f" ± {deviation:g}" if deviation else "")
            now = f"{statistics.mean(values):.6g} ± {statistics.stdev(values):.2g}"
            print(f"  {name:<21} {before:<19} {now:<21} {off:.1f} sd")
    sys.exit(worst > MOST_DEVIATIONS)


def statistics_of(corpus: str, length: int, seed: int, num_tokens: int) -> dict[str, float]:
    """Statistics of the first epoch of a seed, from its batches."""
    parts = list(examples(corpus, length, seed))
    used, first, second = (torch.cat(part).double() for part in zip(*parts, strict=True))
    return {
        "examples": len(used),
        "tokens kept": float((first + second).sum()) / num_tokens,
        "one segment only": float((second == 0).double().mean()),
        "length with specials": float(used.mean()),
        "exactly L": float((used == length).double().mean()),
        "fill": float(used.mean()) / length,
        "segment 1 tokens": float(first.mean()),
        "segment 2 tokens": float(second.mean()),
    }


def examples(corpus: str, length: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each batch, the rows' lengths with special tokens and the numbers of tokens in segments 1 and 2."""
    loader = BatchLoader(
        corpus, sequence_length=length, batch_size=65_536 // length, seed=seed, packing="google", epochs=1
    )
    for batch in loader:
        tensors = to_torch(batch)
        used, typed = (tensors["segment_ids"] > 0).sum(1), tensors["token_type_ids"].sum(1)
        second = (typed - 1).clamp(min=0)  # without its [SEP]
        yield used, used - typed - 2, second


if __name__ == "__main__":
    main()
