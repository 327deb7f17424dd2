"""Time and memory until the first batch of a larger-than-memory corpus.

    python bench/large_corpus.py [--tokens 21e9] [--folder FOLDER]

Writes a sparse corpus of zeros in the crate's own formats (169 M rows of 128; 42 GB apparent size,
about 0.1 GB on disk), which needs `cargo`, and removes it afterwards. Each measurement runs in a new
process: the time from opening the folder to the first tensors with a warm page cache, the same with a
cold one, the time to count the rows, and the time to resume from a state in the middle; and the growth
of anonymous memory, which excludes the page cache.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from instructions import build

MEAN_DOCUMENT = 3200


def main() -> None:
    """Writes the corpus, measures, removes it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=21e9)
    parser.add_argument("--folder", help="where to write; needs 0.2 GB and a file system with sparse files")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "CORPUS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child[0], arguments.child[1])))
    elif shutil.which("cargo") is None:
        print("skipped: writing the corpus needs cargo")
    else:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            corpus = Path(folder) / "shards"
            write(corpus, int(arguments.tokens))
            for what in ("first batch, warm", "first batch, cold", "num_rows", "resume in the middle"):
                report(what, corpus, arguments.runs)


def write(corpus: Path, num_tokens: int) -> None:
    """Writes the sparse corpus and prints its size."""
    subprocess.run([build("large_corpus"), str(corpus), str(num_tokens), str(MEAN_DOCUMENT)], check=True)
    files = [path.stat() for path in corpus.iterdir()]
    apparent, used = sum(file.st_size for file in files), sum(512 * file.st_blocks for file in files)
    print(f"{len(files)} files, {apparent / 1e9:.1f} GB apparent size, {used / 1e9:.2f} GB on disk", flush=True)


def report(what: str, corpus: Path, runs: int) -> None:
    """Prints the median of several processes."""
    results = []
    for _ in range(runs):
        command = [sys.executable, __file__, "--child", what, str(corpus)]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    clock, processor = ([result[key] for result in results] for key in ("seconds", "processor_seconds"))
    megabytes = [result["anonymous_megabytes"] for result in results]
    print(
        f"{what}: {statistics.median(clock):.3f} s ({min(clock):.3f} to {max(clock):.3f}),"
        f" {statistics.median(processor):.3f} s of CPU time,"
        f" {max(megabytes):.0f} MB above the page cache, rows {results[0]['rows']:,}",
        flush=True,
    )


def measure(what: str, corpus: str) -> dict[str, float]:
    """One measurement, in its own process."""
    import torch

    from electra_fast.data.loader import BatchLoader, to_torch

    torch.set_num_threads(1)
    warm_up()
    if what == "first batch, cold":
        drop_pages(Path(corpus))
    memory, start, processor = anonymous_megabytes(), time.perf_counter(), time.process_time()
    loader = BatchLoader(corpus, sequence_length=128, batch_size=512)
    if what == "num_rows":
        rows = loader.num_rows
    else:
        if what == "resume in the middle":
            loader.restore(loader.state() | {"epoch": 3, "group": 600, "row": 1000})
        rows = len(to_torch(next(loader))["input_ids"])
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    if what != "num_rows":
        for _ in range(400):  # past the first shuffle window, so that all plans, buffers and bitmaps are allocated
            to_torch(next(loader))
    growth = anonymous_megabytes() - memory
    return {"seconds": seconds, "processor_seconds": processor, "anonymous_megabytes": growth, "rows": rows}


def warm_up() -> None:
    """Triggers lazy loading in torch and pyarrow, which is not part of the corpus's cost."""
    import pyarrow as pa
    import torch

    pa.array([1, 2]).to_numpy()
    torch.frombuffer(bytearray(8), dtype=torch.int32).as_strided((1, 2), (2, 1), 0)


def drop_pages(corpus: Path) -> None:
    """Drops the files' pages from the page cache; holes are not on disk, but tables and headers are."""
    for path in corpus.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def anonymous_megabytes() -> float:
    """Resident memory of this process that is not backed by files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise OSError("/proc/self/status has no RssAnon")


if __name__ == "__main__":
    main()
