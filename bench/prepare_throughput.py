"""Time of `prepare` from files to a finished corpus, compared with tokenization alone.

    python bench/prepare_throughput.py [--text FILE] [--vocab VOCAB.TXT] [--runs 5] [--cores 1 2]

The text (documents separated by blank lines; synthetic without --text) is written in each format that
`prepare` reads. Results are the median of several runs, pinned to the cores, with a warm page cache:
wall-clock and CPU seconds, and their ratio to those of tokenization alone. The tokenizer has the whole
text in memory and a cache warmed on other text, as in the middle of a long run.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenize_throughput import synthetic_text, trained_vocab

import electra_fast
from electra_fast.data.corpus import Tokenizer


def main() -> None:
    """Writes the text in each format, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text, documents separated by blank lines")
    parser.add_argument("--vocab", type=Path, help="an uncased vocab.txt (default: one trained on other text)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocab = arguments.vocab or trained_vocab(folder / "vocab.txt", lowercase=True)
        text = arguments.text.read_text(encoding="utf-8") if arguments.text else synthetic(40_000_000)
        documents = [document for document in text.split("\n\n") if document.strip()]
        size = sum(len(document.encode()) for document in documents)
        files = list(written(documents, folder))
        for cores in arguments.cores:
            os.sched_setaffinity(0, available[:cores])
            print(f"\n{len(documents)} documents, {size / 1e6:.0f} MB, {cores} core(s)\n")
            print("| work | wall clock | CPU | MB/s | wall clock / tokenization | CPU / tokenization |")
            print("| --- | --- | --- | --- | --- | --- |", flush=True)
            alone = report(
                "tokenization alone", lambda cores=cores: tokenize(vocab, documents, cores), arguments.runs, size
            )
            for path in files:
                report(path.name, lambda path=path: prepare(path, vocab, folder), arguments.runs, size, alone)


def synthetic(size: int) -> str:
    """Documents of synthetic words."""
    import random

    return "\n\n".join(synthetic_text(random.Random(seed), 4_000) for seed in range(size // 4_000))


def written(documents: list[str], folder: Path) -> Iterator[Path]:
    """The documents in four file formats."""
    text, lines, table = folder / "text.txt", folder / "text.jsonl", folder / "text.parquet"
    text.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    lines.write_text("".join(json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents))
    pq.write_table(pa.table({"text": documents}), table, compression="zstd", row_group_size=1000)
    subprocess.run(["zstd", "-q", "-k", str(lines)], check=True)
    yield from (text, lines, folder / "text.jsonl.zst", table)


def tokenize(vocab: Path, documents: list[str], cores: int) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a child process with one thread per core."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ["RAYON_NUM_THREADS"] = str(cores)
        tokenizer = Tokenizer(vocab, lowercase=True)
        tokenizer.encode_batch(["to start the threads"] * 1000)
        found = timed(lambda: tokenizer.encode_batch(documents))
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        clock, processor = json.load(pipe)
    os.wait()
    return clock, processor


def prepare(path: Path, vocab: Path, folder: Path) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    out = folder / "shards"
    found = timed(lambda: electra_fast.prepare([path], vocab=vocab, lowercase=True, out=out, progress=False))
    subprocess.run(["rm", "-r", str(out)], check=True)
    return found


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds."""
    start, processor = time.perf_counter(), time.process_time()
    result = work()
    seconds = time.perf_counter() - start, time.process_time() - processor
    del result
    return seconds


def report(
    name: str,
    work: Callable[[], tuple[float, float]],
    runs: int,
    size: int,
    alone: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Prints a line; returns the medians."""
    clock, processor = (sorted(values) for values in zip(*(work() for _ in range(runs)), strict=True))
    medians = statistics.median(clock), statistics.median(processor)
    ratios = [f"{seconds / base:.2f}" for seconds, base in zip(medians, alone or medians, strict=True)]
    spread = f"{medians[0]:.3f} s ({clock[0]:.3f} to {clock[-1]:.3f})"
    print(
        f"| {name} | {spread} | {medians[1]:.3f} s | {size / medians[0] / 1e6:.0f} | {' | '.join(ratios)} |", flush=True
    )
    return medians


if __name__ == "__main__":
    main()
