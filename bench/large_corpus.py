"""A corpus larger than memory: the time to its first batch, its throughput and its memory.

    python bench/large_corpus.py [--tokens 21e9] [--runs 3] [--folder FOLDER]

Writes a sparse corpus of zeros (42 GB apparent size, 0.1 GB on disk), which needs `cargo`. Each measurement is a
process of its own: the time from opening the corpus to the first tensors, with the corpus in the page cache (warm) or
not (cold), then the stream over some shuffle windows.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from lib.results import measured_by_child

TREE = Path(__file__).resolve().parent.parent
OPTIONS = {"sequence_length": 128, "batch_size": 512, "prefetch": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=21e9)
    parser.add_argument("--windows", type=int, default=12, help="shuffle windows to read")
    parser.add_argument("--folder", help="where to write; needs 1 GB and a file system with sparse files")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--corpus", type=Path, help="measure this one, print JSON")
    options = parser.parse_args()
    if options.corpus:
        print(json.dumps(measure(options.corpus, options.windows)))
        return
    if shutil.which("cargo") is None:
        print("skipped: writing the corpus needs cargo")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        corpus = Path(folder) / "shards"
        subprocess.run([build("large_corpus"), str(corpus), str(int(options.tokens)), "3200", "1"], check=True)
        files = [path.stat() for path in corpus.iterdir()]
        apparent, used = sum(file.st_size for file in files), sum(512 * file.st_blocks for file in files)
        print(f"{len(files)} files, {apparent / 1e9:.1f} GB apparent size, {used / 1e9:.2f} GB on disk", flush=True)
        for name in ("cold", "warm"):
            runs = []
            for _ in range(options.runs):
                if name == "cold":
                    drop_from_cache(corpus)
                arguments = ["--corpus", str(corpus), "--windows", str(options.windows)]
                runs.append(measured_by_child(__file__, arguments, name))
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            first = [run["first_batch_seconds"] for run in runs]
            print(
                f"{name}: first batch {middle['first_batch_seconds']:.3f} s ({min(first):.3f} to {max(first):.3f}),"
                f" then {middle['mtokens_per_second']:.0f} Mtok/s, {middle['megabytes']:.0f} MB of memory",
                flush=True,
            )


def build(example: str) -> str:
    """Compiles one of the crate's examples with the features of its tests; returns its path."""
    command = ["cargo", "build", "--release", "--locked", "--workspace", "--example", example]
    command += ["--message-format", "json"]
    lines = subprocess.run(command, cwd=TREE, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    programs = [message.get("executable") for message in map(json.loads, lines)]
    return next(program for program in programs if program)


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(corpus: Path, windows: int) -> dict[str, float]:
    import pyarrow as pa
    import torch

    from electra_fast.data.loader import BatchLoader, to_torch

    torch.set_num_threads(1)
    # Lazy loading in torch and pyarrow is not part of the corpus's cost.
    pa.array([1, 2]).to_numpy()
    torch.frombuffer(bytearray(8), dtype=torch.int32).as_strided((1, 2), (2, 1), 0)
    memory, start = anonymous_megabytes(), time.perf_counter()
    loader = BatchLoader(corpus, **OPTIONS)
    to_torch(next(loader))
    first, megabytes = time.perf_counter() - start, anonymous_megabytes() - memory
    start, begun, tokens = time.perf_counter(), loader.state()["group"], 0
    while loader.state()["group"] - begun < windows:
        tokens += to_torch(next(loader))["input_ids"].numel()
    speed = tokens / (time.perf_counter() - start) / 1e6
    return {"first_batch_seconds": first, "mtokens_per_second": speed, "megabytes": megabytes}


def anonymous_megabytes() -> float:
    """Resident memory of this process that is not backed by files."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[1]) / 1e3


if __name__ == "__main__":
    main()
