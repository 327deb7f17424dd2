"""A corpus behind a web server compared with the same on disk: first batch, throughput, requests, memory.

    python bench/remote_corpus.py [--tokens 50e9] [--latency 30] [--folder FOLDER]

Writes a sparse corpus of zeros (100 GB apparent size, 0.2 GB on disk), which needs `cargo`, and serves it from a
child process on the loopback, each answer delayed by the latency of a store in the same region. Each measurement runs
in a new process with an empty cache: the time from opening the corpus to the first tensors, then the stream over some
shuffle windows, with a small cache and with a large one. This machine serves itself, which a store would not ask of it.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from instructions import build

OPTIONS = {"sequence_length": 128, "batch_size": 512, "prefetch": 8}


def main() -> None:
    """Writes the corpus, serves it, measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=50e9)
    parser.add_argument("--latency", type=float, default=30.0, help="milliseconds before each answer")
    parser.add_argument("--windows", type=int, default=12, help="shuffle windows to read")
    parser.add_argument("--folder", help="where to write; needs 1 GB and a file system with sparse files")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        kind, *rest = arguments.child
        if kind == "serve":
            serve(Path(rest[0]), arguments.latency / 1e3)
        else:
            measure(rest, arguments.windows)
        return
    if shutil.which("cargo") is None:
        print("skipped: writing the corpus needs cargo")
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        corpus = Path(folder) / "shards"
        write(corpus, int(arguments.tokens))
        command = [sys.executable, __file__, "--latency", str(arguments.latency), "--child", "serve", str(corpus)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            for name, place, cache in (("on disk", str(corpus), 0), ("200 MB", url, 200e6), ("16 GB", url, 16e9)):
                report(name, place, int(cache), folder, arguments)
        finally:
            server.kill()


def write(corpus: Path, num_tokens: int) -> None:
    """Writes the sparse corpus, with documents of 3,200 tokens, and prints its size."""
    subprocess.run([build("large_corpus"), str(corpus), str(num_tokens), "3200"], check=True)
    files = [path.stat() for path in corpus.iterdir()]
    apparent, used = sum(file.st_size for file in files), sum(512 * file.st_blocks for file in files)
    print(f"{len(files)} files, {apparent / 1e9:.1f} GB apparent size, {used / 1e9:.2f} GB on disk", flush=True)


def report(name: str, place: str, cache_bytes: int, folder: str, arguments: argparse.Namespace) -> None:
    """Prints the medians of several processes."""
    results = []
    for number in range(arguments.runs):
        cache = f"{folder}/cache-{cache_bytes}-{number}"
        command = [sys.executable, __file__, "--windows", str(arguments.windows)]
        command += ["--child", "measure", place, str(cache_bytes), cache]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    middle = {key: statistics.median(result[key] for result in results) for key in results[0]}
    spread = [result["first_batch_seconds"] for result in results]
    print(
        f"{name}: first batch {middle['first_batch_seconds']:.2f} s ({min(spread):.2f} to {max(spread):.2f}),"
        f" then {middle['mtokens_per_second']:.0f} Mtok/s, {middle['requests_per_window']:.0f} requests and"
        f" {middle['bytes_per_window'] / 1e6:.0f} MB per window of 16.8 M tokens,"
        f" {middle['disk_bytes'] / 1e6:.0f} MB of cache, {middle['megabytes']:.0f} MB of memory",
        flush=True,
    )


def measure(arguments: list[str], windows: int) -> None:
    """One measurement, in its own process."""
    import torch

    from electra_fast.data.loader import BatchLoader, to_torch

    place, cache_bytes, cache = arguments
    torch.set_num_threads(1)
    warm_up()
    remote = {"cache_dir": cache, "cache_bytes": int(cache_bytes)} if int(cache_bytes) else {}
    memory, start = anonymous_megabytes(), time.perf_counter()
    loader = BatchLoader(place, **OPTIONS, **remote)
    to_torch(next(loader))
    first = time.perf_counter() - start
    before, tokens, disk = counts(place), 0, 0
    start, begun = time.perf_counter(), loader.state()["group"]
    while (done := loader.state()["group"] - begun) < windows:
        tokens += to_torch(next(loader))["input_ids"].numel()
        if remote and tokens % (100 * 512 * 128) == 0:
            disk = max(disk, disk_bytes(Path(cache)))
    seconds, after = time.perf_counter() - start, counts(place)
    result = {
        "first_batch_seconds": first,
        "mtokens_per_second": tokens / seconds / 1e6,
        "requests_per_window": (after[0] - before[0]) / done,
        "bytes_per_window": (after[1] - before[1]) / done,
        "disk_bytes": disk,
        "megabytes": anonymous_megabytes() - memory,
    }
    print(json.dumps(result))


def warm_up() -> None:
    """Triggers lazy loading in torch and pyarrow, which is not part of the corpus's cost."""
    import pyarrow as pa
    import torch

    pa.array([1, 2]).to_numpy()
    torch.frombuffer(bytearray(8), dtype=torch.int32).as_strided((1, 2), (2, 1), 0)


def anonymous_megabytes() -> float:
    """Resident memory of this process that is not backed by files."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)[1]) / 1e3


def disk_bytes(folder: Path) -> int:
    """Space that the cached files take."""
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def counts(place: str) -> tuple[int, int]:
    """Requests and bytes that the server has answered."""
    import urllib.request

    if not place.startswith("http"):
        return 0, 0
    with urllib.request.urlopen(f"{place}/counts") as answer:
        requests, num_bytes = json.load(answer)
    return requests, num_bytes


def serve(folder: Path, latency: float) -> None:
    """Serves the files of a folder by ranges, each answer after the latency, and counts."""
    lock, counted = threading.Lock(), [0, 0]

    class Handler(BaseHTTPRequestHandler):
        """Serves ranges."""

        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            """Answers with a range of a file, or with the counts."""
            name = self.path.rpartition("/")[2]
            if name == "counts":
                body = json.dumps(counted).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            time.sleep(latency)
            with (folder / name).open("rb") as file:
                total = os.fstat(file.fileno()).st_size
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                start, end = (int(wanted[1]), int(wanted[2]) + 1) if wanted else (0, total)
                self.send_response(206 if wanted else 200)
                if wanted:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{total}")
                self.send_header("Content-Length", str(end - start))
                self.end_headers()
                self.wfile.flush()
                sent = start
                while sent < end:
                    sent += os.sendfile(self.connection.fileno(), file.fileno(), sent, end - sent)
            with lock:
                counted[0] += 1
                counted[1] += end - start

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    ThreadingHTTPServer.request_queue_size = 256  # connections that arrive at once; others would wait for a second
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_port}/shards", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
