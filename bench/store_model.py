"""What an epoch of 20 TB from an object store costs, and where its time goes: arithmetic on stated assumptions.

    python bench/store_model.py [--tokens N] [--document-tokens N] [--latency MS]

Every rank plans the rows of the whole batch, so every node fetches every block of the corpus; the ranks of a node share
a cache. Prints the tables of `docs/scale.md` about object stores, with the throughputs of `scaling_model.py`; the
options replace assumptions. How blocks, windows and files are laid out is the data engine's
(crates/electra-data/src/format, loader/shuffle_window.rs); the source of any other assumption stands beside it.

Units: seconds, bytes, tokens; a block is one of 262,144 tokens, a page the 64 KiB that a checksum covers.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from scaling_model import PAPER, Cluster, Columns, predict, table, workload

NUM_NODES = (1, 16, 256)
# The data engine's constants: tokens of a block and around it, blocks of a window, windows in the cache of which some
# are fetched ahead, bytes of a page, requests in flight.
BLOCK_TOKENS, MARGIN, WINDOW_BLOCKS = 262_144, 256, 64
MIN_WINDOWS, WINDOWS_AHEAD = 3, 7
PAGE, IN_FLIGHT = 65_536, 64
DEFAULT_CACHE = 2**34
# An entry of the manifest, for a shard of 2^27 tokens; seconds to open a corpus of this size over HTTP (on two cores).
ENTRY_BYTES, OPENING_SECONDS = 368, 1.2
# To the first byte, "tens of milliseconds" for requests of less than 512 KB; then 85 to 90 MB/s for each request (AWS,
# Best Practices Design Patterns: Optimizing Amazon S3 Performance).
LATENCY, REQUEST_BANDWIDTH = 50e-3, 85e6
# A node: an adapter of 100 Gb/s for storage, one NVMe, XXH3 on one core, packing on one core (measured, see the page).
NETWORK, DISK, CHECKSUMS = 12.5e9, 2e9, 10e9
PACKING = {"best-fit": 5e9, "google": 3e9}
# GET requests per second that S3 promises for a prefix before it divides it.
PREFIX_REQUESTS = 5_500
# List prices in US East: a GET request; a byte to another region. Within the region, bytes are free.
GET_PRICE, REGION_PRICE = 0.0004 / 1000, 0.02e-9


@dataclass(frozen=True)
class Corpus:
    """A corpus in a store, and whether its line lengths are read too: for packing `google` and cuts at lines."""

    lines: bool = False
    num_tokens: float = 1e13
    shard_tokens: int = 2**27
    document_tokens: float = 500.0
    line_tokens: float = 25.0
    line_bytes: float = 1.1

    @property
    def num_shards(self) -> int:
        """Shards."""
        return -int(-self.num_tokens // self.shard_tokens)

    @property
    def num_blocks(self) -> int:
        """Blocks, each of which an epoch reads once."""
        return self.num_shards * round(self.shard_tokens / BLOCK_TOKENS)

    @property
    def bodies(self) -> list[float]:
        """Bytes of each request for a block. A block begins and ends within a page, which is fetched whole."""
        lines = self.line_bytes * (BLOCK_TOKENS + 2 * self.document_tokens) / self.line_tokens
        return [2 * (BLOCK_TOKENS + 2 * MARGIN) + PAGE, *[lines + PAGE] * self.lines]

    @property
    def files(self) -> list[tuple[float, float]]:
        """For each file of a shard that is read, the bytes of its body and of its table of documents."""
        documents = self.shard_tokens / self.document_tokens
        lines = (self.line_bytes * self.shard_tokens / self.line_tokens, 8 * documents)
        return [(2 * self.shard_tokens, 4 * documents), *[lines] * self.lines]

    @property
    def tables(self) -> list[float]:
        """Bytes of each request for what must be known of a shard: documents and checksums, and the lines' header."""
        tails = [documents + PAGE / 2 + 8 * (body + documents) / PAGE for body, documents in self.files]
        return [*tails, *[float(PAGE)] * self.lines]

    @property
    def table_bytes(self) -> float:
        """Tables of all shards."""
        return self.num_shards * sum(self.tables)

    @property
    def num_pages(self) -> float:
        """Pages and tables of checksums of both files of all shards: bits of the cache's state."""
        return self.num_shards * sum(sum(file) / PAGE + 2 for file in replace(self, lines=True).files)


@dataclass(frozen=True)
class Reading:
    """A node that reads a corpus through a cache of so many bytes, which holds less than the corpus."""

    corpus: Corpus
    cache: float
    latency: float = LATENCY

    @property
    def packing(self) -> str:
        """The packing that reads this."""
        return "google" if self.corpus.lines else "best-fit"

    @property
    def kept(self) -> float:
        """The share of the tables that stays in the cache: tokens give way first."""
        windows = (MIN_WINDOWS + WINDOWS_AHEAD) * WINDOW_BLOCKS * sum(self.corpus.bodies)
        return min(1.0, max(0.0, self.cache - windows) / self.corpus.table_bytes)

    @property
    def table_fetches(self) -> float:
        """How often an epoch fetches the tables of a shard: once what stays, the rest with every block."""
        return self.kept * self.corpus.num_shards + (1 - self.kept) * self.corpus.num_blocks

    def epoch(self, part: str) -> float:
        """Of an epoch, `requests` or `bytes` of one node."""
        weigh = len if part == "requests" else sum
        return self.corpus.num_blocks * weigh(self.corpus.bodies) + self.table_fetches * weigh(self.corpus.tables)

    @property
    def bytes_per_token(self) -> float:
        """What a node fetches and writes to its disk for each token of the stream."""
        return self.epoch("bytes") / (self.corpus.num_blocks * BLOCK_TOKENS)

    def request_seconds(self, requests: list[float]) -> float:
        """One such request per block of a window, 64 at a time."""
        return WINDOW_BLOCKS / IN_FLIGHT * sum(self.latency + size / REQUEST_BANDWIDTH for size in requests)

    def window(self) -> dict[str, float]:
        """Seconds of a window in the thread that plans it: tables, then blocks, then packing."""
        tokens = WINDOW_BLOCKS * BLOCK_TOKENS
        again = WINDOW_BLOCKS * sum(self.corpus.tables)  # what is unpinned is verified on its next use
        return {
            "requests": (1 - self.kept) * self.request_seconds(self.corpus.tables)
            + self.request_seconds(self.corpus.bodies),
            "checksums": (self.bytes_per_token * tokens + again) / CHECKSUMS,
            "packing": tokens / PACKING[self.packing],
        }

    def limits(self) -> dict[str, float]:
        """Tokens per second of the global stream that one node can follow, for each reason."""
        plan = WINDOW_BLOCKS * BLOCK_TOKENS / sum(self.window().values())
        return {"requests": plan, "disk": DISK / self.bytes_per_token, "network": NETWORK / self.bytes_per_token}

    def first_batch(self) -> float:
        """Seconds from opening to the first window: manifest, tables, blocks."""
        manifest = self.latency + self.corpus.num_shards * ENTRY_BYTES / REQUEST_BANDWIDTH
        return manifest + OPENING_SECONDS + self.request_seconds([*self.corpus.tables, *self.corpus.bodies])


@dataclass(frozen=True)
class Run:
    """A preset on nodes of eight GPUs that read a corpus."""

    preset: str
    num_nodes: int
    reading: Reading

    @property
    def wanted(self) -> float:
        """Tokens per second of all GPUs (weak scaling)."""
        return predict(workload(self.preset), Cluster(8 * self.num_nodes)).tokens_per_second

    @property
    def rate(self) -> float:
        """Tokens per second that they get: every node has to follow the whole stream."""
        return min(self.wanted, *self.reading.limits().values())

    def requests(self) -> float:
        """Requests per second of a node to keep all GPUs busy."""
        return self.wanted * self.reading.epoch("requests") / self.reading.corpus.num_tokens

    def epoch(self, rate: float) -> str:
        """How long an epoch takes."""
        hours = self.reading.corpus.num_tokens / rate / 3_600
        return f"{hours:,.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"


def nodes_fed(reading: Reading, preset: str) -> float:
    """How many nodes train before the store holds them up."""
    return min(reading.limits().values()) / Run(preset, 1, reading).wanted


def readings(base: Corpus, latency: float = LATENCY) -> list[Reading]:
    """Both packings, with a cache for all tables and the default one."""
    lines = replace(base, lines=True)
    pairs = ((base, 1e11), (base, DEFAULT_CACHE), (lines, 3e11), (lines, DEFAULT_CACHE))
    return [Reading(corpus, cache, latency) for corpus, cache in pairs]


def dollars(price: float, reading: Reading, part: str) -> str:
    """What an epoch costs on 1, 16 and 256 nodes."""
    return ", ".join(f"${n * price * reading.epoch(part):,.0f}" for n in NUM_NODES)


def size(num_bytes: float) -> str:
    """Bytes in a unit that fits."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.1f} {name}"
    return f"{num_bytes / 1e6:,.0f} MB"


def tables(found: list[Reading]) -> dict[str, str]:
    """The tables of docs/scale.md by title."""
    setting: Columns = [("packing", lambda r: r.packing), ("cache", lambda r: size(r.cache))]
    epoch: Columns = [
        ("tables kept", lambda r: f"{r.kept:.0%}"),
        ("requests per node", lambda r: f"{r.epoch('requests') / 1e6:,.1f} M"),
        ("bytes per node", lambda r: size(r.epoch("bytes"))),
        ("of 16, 256 nodes", lambda r: ", ".join(size(n * r.epoch("bytes")) for n in NUM_NODES[1:])),
        ("GETs of 1, 16, 256 nodes", lambda r: dollars(GET_PRICE, r, "requests")),
        ("to another region", lambda r: dollars(REGION_PRICE, r, "bytes")),
    ]
    window: Columns = [
        *(
            (f"{name} per window", lambda r, name=name: f"{r.window()[name] * 1e3:,.1f} ms")
            for name in found[0].window()
        ),
        ("a node follows", lambda r: f"{r.limits()['requests'] / 1e6:,.0f} M tokens/s"),
        ("its disk", lambda r: f"{r.limits()['disk'] / 1e6:,.0f} M"),
        ("its network", lambda r: f"{r.limits()['network'] / 1e6:,.0f} M"),
        ("enough for nodes: small, base, large", lambda r: ", ".join(f"{nodes_fed(r, p):,.0f}" for p in PAPER)),
    ]
    runs = [Run(preset, n, found[0]) for preset in PAPER for n in NUM_NODES]
    time: Columns = [
        ("preset", lambda x: x.preset),
        ("nodes", lambda x: str(x.num_nodes)),
        ("GPUs take", lambda x: f"{x.wanted / 1e6:,.1f} M tokens/s"),
        ("per node", lambda x: f"{size(x.wanted * x.reading.bytes_per_token)}/s, {x.requests():,.0f} requests/s"),
        ("all nodes", lambda x: f"{x.num_nodes * x.requests():,.0f} requests/s"),
        ("epoch by the GPUs", lambda x: x.epoch(x.wanted)),
        ("from the store", lambda x: x.epoch(x.rate)),
        ("GPUs busy", lambda x: f"{x.rate / x.wanted:.0%}"),
    ]
    return {
        "An epoch": table([*setting, *epoch], found),
        "A window": table([*setting, *window], found),
        "Where the time goes": table(time, runs),
    }


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=float, default=1e13, metavar="N", help="tokens of the corpus")
    parser.add_argument("--document-tokens", type=float, default=500.0, metavar="N", help="tokens of a document")
    parser.add_argument("--latency", type=float, default=50.0, metavar="MS", help="to the first byte of an answer")
    options = parser.parse_args()
    corpus = Corpus(num_tokens=options.tokens, document_tokens=options.document_tokens)
    found = readings(corpus, options.latency / 1e3)
    print("\n\n".join(f"{title}\n\n{rows}" for title, rows in tables(found).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
