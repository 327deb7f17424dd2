"""Lanes: what nodes fetch from an object store, the cost of a corpus of 20 TB, and how well lanes shuffle.

    python bench/lanes.py [bytes] [large] [shuffle] [loss --texts FILE...]

`bytes`: nodes, each a process with a cache of its own, read one epoch's worth of a sparse corpus of zeros from a server
on the loopback, which counts. `large`: a corpus of which each shard is listed thousands of times. Both write the corpus
with `cargo`. `shuffle`: batches of documents that can be told apart by their tokens. `loss`: validation loss of `tiny`
over three seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from instructions import build
from lib.results import measured_by_child

import electra_fast as ef
from electra_fast import _data
from electra_fast.data.loader import BatchLoader

LANES = 64


class Server(ThreadingHTTPServer):
    """Serves `/NODE/FILE` from a folder by ranges and counts bytes and requests per node."""

    daemon_threads, request_queue_size = True, 1_024

    def __init__(self, folder: Path) -> None:
        self.folder, self.bytes, self.requests = folder, Counter[str](), Counter[str]()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, node: int) -> str:
        """The corpus as this node asks for it."""
        return f"http://127.0.0.1:{self.server_port}/{node}"


class Handler(BaseHTTPRequestHandler):  # noqa: D101
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:  # noqa: D102
        self.answer(has_body=False)

    def do_GET(self) -> None:  # noqa: D102
        self.answer(has_body=True)

    def answer(self, *, has_body: bool) -> None:
        """Sends a range of a file, or what the node has been sent so far."""
        server = self.server
        assert isinstance(server, Server)
        _, node, name = self.path.split("/", 2)
        if name == "counts":
            counts = json.dumps([server.bytes[node], server.requests[node]]).encode()
            self.head(200, len(counts))
            self.wfile.write(counts)
            return
        path = server.folder / re.sub(r"-000-\d+\.", "-000.", name)  # all copies of a shard are one file
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, end = (int(asked[1]), min(int(asked[2]) + 1, size)) if asked else (0, size)
        self.head(206 if asked else 200, end - first, f"bytes {first}-{end - 1}/{size}" if asked else None)
        if has_body:
            server.bytes[node] += end - first
            server.requests[node] += 1
            self.wfile.flush()
            with path.open("rb") as file, contextlib.suppress(ConnectionError):  # a loader that ended
                while first < end:
                    first += os.sendfile(self.connection.fileno(), file.fileno(), first, end - first)

    def head(self, status: int, length: int, content_range: str | None = None) -> None:
        """Sends the head of a response."""
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 01 Jan 1970 00:00:00 GMT")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


@contextlib.contextmanager
def corpus(tokens: int, copies: int) -> Iterator[Path]:
    """A sparse corpus of documents of 500 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shards"
        subprocess.run([build("large_corpus"), str(path), str(tokens), "500", str(copies)], check=True)
        yield path


def count_bytes(options: argparse.Namespace) -> None:
    """Bytes that nodes fetch per epoch, after a quarter of the first, when what is fetched ahead has evened out."""
    with corpus(options.shards << 27, 1) as folder:
        sizes = {name: sum(path.stat().st_size for path in folder.glob(f"*.{name}")) for name in ("tokens", "lines")}
        cases = [("best-fit", LANES, (1, 2, 4, 8, 16, 3, 5)), ("best-fit", 1, (1, 4)), ("google", LANES, (1, 4))]
        for packing, lanes, worlds in cases:
            for world in worlds:
                server = Server(folder)
                found: list[dict[str, Any]] = [
                    measured_by_child(
                        __file__, ["--node", server.url(rank), packing, *map(str, (rank, world, lanes))], "node"
                    )
                    for rank in range(world)
                ]
                server.shutdown()
                size = sizes["tokens"] + (sizes["lines"] if packing == "google" else 0)
                shares = [each["bytes"] / size for each in found]
                batches = [sum(parts) % 2**64 for parts in zip(*(each["batches"] for each in found), strict=True)]
                print(
                    f"{packing}, {lanes} lanes, {world} nodes: each at most {max(shares) * world:.3f} / {world} of it, "
                    f"{sum(shares):.3f} in all; {sum(each['requests'] for each in found):,} requests; per node "
                    f"{statistics.median(each['rows_per_second'] for each in found) * 512 / 1e6:.0f} M tokens/s; "
                    f"batches {hash(tuple(batches)) % 2**32:08x}",
                    flush=True,
                )


def run_node(url: str, packing: str, rank: int, world: int, lanes: int) -> dict[str, Any]:
    """Reads from 0.25 to 1.25 epochs as a node, with the smallest cache."""
    with tempfile.TemporaryDirectory() as cache:
        shape = {"sequence_length": 512, "batch_size": 1_024, "rank": rank, "world_size": world, "lanes": lanes}
        loader, batches = open_smallest(url, cache, packing=packing, **shape), []
        while loader.passes()[0] < 0.25:
            batch = next(loader)
            if len(batches) < 20:
                batches.append(fingerprint(batch, rank * 1_024 // world))
        before, start, rows = counts(url), time.perf_counter(), 0
        while loader.passes()[0] < 1.25:
            rows += next(loader).num_rows
        seconds, after = time.perf_counter() - start, counts(url)
        return {
            "bytes": after[0] - before[0],
            "requests": after[1] - before[1],
            "rows_per_second": rows / seconds,
            "batches": batches,
        }


def open_smallest(url: str, cache: str, **options: Any) -> BatchLoader:
    """A loader with the smallest cache that it takes."""
    try:
        return BatchLoader(url, cache_dir=cache, cache_bytes=1, **options)
    except ValueError as error:
        least = int(str(error).rsplit(" ", 1)[1])
    return BatchLoader(url, cache_dir=cache, cache_bytes=least, **options)


def counts(url: str) -> list[int]:
    """Bytes and requests of a node so far."""
    with urllib.request.urlopen(f"{url}/counts") as answer:
        found: list[int] = json.load(answer)
    return found


def fingerprint(batch: Any, first: int) -> int:
    """A number of the rows and their places in the whole batch; those of its parts add up to that of the whole."""
    columns = pa.record_batch(batch)
    masked = columns.column("masked_positions")
    values = masked.flatten().to_numpy().reshape(batch.num_rows, -1).astype(np.uint64)
    weights = np.arange(1, values.shape[1] + 1, dtype=np.uint64) ** np.uint64(3)
    places = np.arange(first, first + batch.num_rows, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int(((values @ weights) ** np.uint64(3) * places).sum(dtype=np.uint64))


def count_costs(options: argparse.Namespace) -> None:
    """Opening 150,000 shards, and a rank of a node among 256 with 20 TB."""
    for copies, what in ((150_000, "150,000 shards"), (74_506, "20 TB")):
        with corpus(1 << 27, copies) as folder:
            server = Server(folder)
            size = (folder / "manifest.json").stat().st_size / 1e6
            for place, name in ((str(folder), "disk"), (server.url(0), "server")):
                found = [measured_by_child(__file__, ["--open", place], "open") for _ in range(5)]
                print(
                    f"{what}, manifest of {size:.1f} MB, from {name}: opened in "
                    f"{statistics.median(each['seconds'] for each in found):.3f} s, "
                    f"{statistics.median(each['megabytes'] for each in found):.0f} MB of memory",
                    flush=True,
                )
            server.shutdown()
    with corpus(1 << 27, 74_506) as folder:
        server = Server(folder)
        found = measured_by_child(__file__, ["--rank-of-many", server.url(0)], "rank")
        server.shutdown()
        print(f"rank 800 of 2,048 with 20 TB in 256 lanes: {json.dumps(found)}", flush=True)


def run_rank(url: str) -> dict[str, Any]:
    """Memory and traffic of one rank for 200 batches of 16 rows of its own."""
    before = memory()
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        loader = BatchLoader(
            url, sequence_length=512, batch_size=2_048 * 16, rank=800, world_size=2_048, lanes=256, cache_dir=cache
        )
        next(loader)
        first = time.perf_counter() - start
        for _ in range(200):
            next(loader)
        used = sum(512 * path.stat().st_blocks for path in Path(cache).rglob("*") if path.is_file())
        sent = counts(url)
        return {
            "first batch, s": round(first, 2),
            "memory, MB": round(memory() - before),
            "cache on disk, MB": round(used / 1e6),
            "fetched, MB": round(sent[0] / 1e6),
            "requests": sent[1],
            "epochs": loader.passes()[0],
        }


def open_corpus(place: str) -> dict[str, float]:
    """Seconds and megabytes of opening a corpus."""
    before, start = memory(), time.perf_counter()
    corpus = _data.Corpus(place)
    seconds = time.perf_counter() - start
    assert corpus.num_tokens > 0
    return {"seconds": seconds, "megabytes": memory() - before}


def memory() -> float:
    """Megabytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) / 1e3  # type: ignore[index]


def measure_shuffle(options: argparse.Namespace) -> None:
    """Documents of 100 to 900 tokens, each of which is the document's number: which ones meet in a batch."""
    num_documents, rng = 60_000, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [f"w{number}" for number in range(num_documents)]
        (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
        lengths = rng.integers(100, 900, num_documents)
        texts = (" ".join([word] * length) for word, length in zip(words, lengths, strict=True))
        (folder / "texts.txt").write_text("\n\n".join(texts))
        ef.prepare([folder / "texts.txt"], vocab=folder / "vocab.txt", out=folder / "shards")
        for lanes in (1, 4, 16):
            loader = BatchLoader(folder / "shards", sequence_length=128, batch_size=128, lanes=lanes, seed=1)
            documents = [first_tokens(next(loader)) - 5 for _ in range(int(lengths.sum() // 126 // 128))]
            distances = np.concatenate([np.abs(np.diff(batch)) for batch in documents])
            repeats = [len(batch) - len(set(batch.tolist())) for batch in documents]
            last: dict[int, int] = {}
            gaps = []
            for number, batch in enumerate(documents):
                for document in batch.tolist():
                    gaps.append(number - last.get(document, number))
                    last[document] = number
            between = [gap for gap in gaps if gap > 0]
            rows, _, positions = loader._loader.contents()
            print(
                f"{lanes} lanes: neighbours are {distances.mean() / num_documents:.4f} of the corpus apart (random: "
                f"0.3333), rows whose document another row of the batch has: {np.mean(repeats):.3f} of 128, batches "
                f"between two rows of a document: median {np.median(between):.0f}, spread of a batch's documents: "
                f"{np.mean([batch.std() for batch in documents]) / num_documents:.4f} (random: 0.2887), rows filled to "
                f"{positions / rows / 128:.2%}",
                flush=True,
            )


def first_tokens(batch: Any) -> Any:
    """The most frequent ordinary token of each row's first segment, [rows]."""
    columns = pa.record_batch(batch)
    ids = columns.column("input_ids").flatten().to_numpy().reshape(batch.num_rows, -1)[:, 1:9]
    return np.median(np.where(ids == 4, ids.max(axis=1, keepdims=True), ids), axis=1).astype(int)


def measure_loss(options: argparse.Namespace) -> None:
    """Validation losses of `tiny` in recipe `modern` after 600 steps of 2,048 tokens, with 1 and with 16 lanes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ef.train_vocab(options.texts, size=2_048, out=folder / "vocab.txt")
        ef.prepare(options.texts, vocab=folder / "vocab.txt", out=folder / "shards", holdout=0.005)
        for seed in range(3):
            for lanes in (1, 16):
                out = folder / f"{lanes}-{seed}"
                keys = {"data.lanes": str(lanes), "train.seed": str(seed), "train.steps": "600"}
                keys |= {"train.batch_size": "16", "train.eval_every": "600", "train.eval_batches": "0"}
                ef.pretrain(ef.Config.preset("tiny", "modern").override(keys), data=str(folder / "shards"), out=out)
                last = json.loads((out / "evaluations.jsonl").read_text().splitlines()[-1])
                print(f"seed {seed}, {lanes} lanes: {json.dumps(last)}", flush=True)


PARTS = {"bytes": count_bytes, "large": count_costs, "shuffle": measure_shuffle, "loss": measure_loss}


def main() -> None:
    """Runs the parts that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; by default shuffle")
    parser.add_argument("--shards", type=int, default=4, help="shards of 2^27 tokens for `bytes`")
    parser.add_argument("--texts", nargs="+", help="texts for `loss`")
    parser.add_argument("--node", nargs=5, help="measure as URL PACKING RANK WORLD LANES, print JSON")
    parser.add_argument("--rank-of-many", help="measure with this corpus, print JSON")
    parser.add_argument("--open", help="measure opening this corpus, print JSON")
    options = parser.parse_args()
    if options.node:
        print(json.dumps(run_node(*options.node[:2], *map(int, options.node[2:]))))
    elif options.rank_of_many:
        print(json.dumps(run_rank(options.rank_of_many)))
    elif options.open:
        print(json.dumps(open_corpus(options.open)))
    else:
        for part in options.parts or ["shuffle"]:
            PARTS[part](options)


if __name__ == "__main__":
    main()
