"""Prints the tables of MANY_GPUS.md, which has the formulas and sources: projections, not measurements.

python bench/scale.py
"""

import math

# Bytes per second and seconds per hop: NVLink in a node of 8, InfiniBand per GPU; the hop between processes over TCP.
NVLINK = (360e9, 1.5e-6)
NETWORK = (45e9, 8e-6)
HOST_HOP = 50e-6
HOST_WORK = 1e-3
# Parameters, layers, hidden size, tokens per step and per second on one H200.
MODELS = {
    "small": (14_196_219, 12, 256, 1024 * 128, 3.70e6),
    "base": (119_386_427, 12, 768, 128 * 512, 0.543e6),
    "large": (354_655_291, 24, 1024, 64 * 512, 0.181e6),
}
GPU_FAILURE_SECONDS = 16_384 * 54 * 86_400 / 419
RESTART = 600
PAUSE = 0.4

# 20 TB in an object store: tokens, tokens per shard, block, document and line, bytes per page.
TOKENS = 1e13
SHARD = 2**27
BLOCK = 262_144
DOCUMENT = 500
LINE = 25
PAGE = 65_536
SHARDS = math.ceil(TOKENS / SHARD)
BLOCKS = SHARDS * SHARD // BLOCK
LATENCY = 50e-3
REQUEST_BANDWIDTH = 85e6
CHECKSUMS = 10e9
GET_PRICE = 0.4e-6
PACKING = {"best-fit": 5e9, "examples": 3e9}


def ring(num_bytes: float, ranks: int, link: tuple[float, float]) -> float:
    """Seconds of an all-reduce around a ring."""
    return 2 * (ranks - 1) * (num_bytes / ranks / link[0] + link[1])


def all_reduce(num_bytes: float, gpus: int) -> float:
    """Seconds within nodes, then between them, by ring or tree, with an eighth of the bytes per adapter."""
    seconds = ring(num_bytes, min(gpus, 8), NVLINK)
    nodes = gpus // 8
    if nodes < 2:
        return seconds
    tree = 2 * num_bytes / 8 / (0.8 * NETWORK[0]) + 2 * math.ceil(math.log2(nodes)) * NETWORK[1]
    return seconds + min(ring(num_bytes / 8, nodes, NETWORK), tree)


def weak(preset: str, gpus: int) -> str:
    """All-reduce, efficiency and tokens per second with the same rows on each GPU."""
    parameters, _, _, tokens, speed = MODELS[preset]
    message = all_reduce(4 * parameters, gpus)
    host = HOST_WORK + (gpus - 1) * HOST_HOP
    step = max(tokens / speed + message, host)
    limit = "†" if step == host else ""
    return f"{message * 1e3:.1f} ms, {tokens / speed / step:.1%}{limit}, {gpus * tokens / step / 1e6:,.1f} M"


def sharded(preset: str, gpus: int) -> list[str]:
    """Memory and step, replicated and sharded."""
    parameters, layers, hidden, tokens, speed = MODELS[preset]
    layer = 12 * hidden**2 + 13 * hidden
    inside = layers * (layer + layer // 16)  # the generator's layers are a quarter as wide
    rest = parameters - inside
    compute = tokens / speed
    nodes = math.ceil(gpus / 8)
    hops = (gpus - nodes) * NVLINK[1] + (nodes - 1) * NETWORK[1]
    message = 4 * (2 * rest + 3 * inside) * (1 - 1 / gpus) / NVLINK[0] + (6 * layers + 2) * hops
    memory = 16 * parameters / gpus + 4 * (2 * rest + 5 * layer)
    step = f"{compute * 1e3:.0f} to {(compute + message) * 1e3:.0f} ms"
    replicated = compute + all_reduce(4 * parameters, gpus)
    return [f"{20 * parameters / 1e9:.1f} GB", f"{memory / 1e9:.1f} GB", f"{replicated * 1e3:.0f} ms", step]


def failures(gpus: int) -> list[str]:
    """Time between failures, best interval and share of time lost, by it and by every 5,000 steps of `large`."""
    between = GPU_FAILURE_SECONDS / gpus
    best = math.sqrt(2 * PAUSE * between)
    default = 5_000 * MODELS["large"][3] / MODELS["large"][4]
    lost = [f"{PAUSE / interval + (interval / 2 + RESTART) / between:.2%}" for interval in (best, default)]
    return [f"{between / 3600:,.0f} h", f"{best / 60:.0f} min", *lost]


def store(packing: str, nodes: int, lanes: int) -> list[str]:
    """Requests and bytes of an epoch per node and in all, and the tokens per second that a node follows."""

    def tables_of(body: float, documents: float) -> float:
        return documents + PAGE / 2 + 8 * (body + documents) / PAGE

    # With several lanes blocks begin and end with pages; with one, both edges lie inside a page. A lane reads stretches
    # of four shards, whose tables stay in the cache, and an arc of shards with parts of two more.
    edges = PAGE if lanes == 1 else 0
    share = min(1, max(1 / nodes, 1 / lanes))
    blocks = [2 * BLOCK + edges]
    tables = [tables_of(2 * SHARD, 4 * SHARD / DOCUMENT)]
    pages = 0.0
    if packing == "examples":  # reads a page further, and the lengths of lines: 1.1 bytes each, page by page
        body = 1.1 * SHARD / LINE
        blocks = [2 * BLOCK + PAGE]
        tables = [*tables, tables_of(body, 8 * SHARD / DOCUMENT) + body]
        pages = body / PAGE
    shards = SHARDS * share * (1 if lanes == 1 else 5 / 4)
    requests = BLOCKS * share * len(blocks) + shards * (len(tables) + pages)
    num_bytes = BLOCKS * share * sum(blocks) + shards * sum(tables)
    seconds = sum(LATENCY + size / REQUEST_BANDWIDTH for size in blocks)  # 64 blocks at a time
    seconds += 64 * num_bytes / (BLOCKS * share) / CHECKSUMS + 64 * BLOCK / PACKING[packing]
    return [
        f"{requests / 1e6:.2f} M",
        f"{num_bytes / 1e12:.2f} TB",
        f"{nodes * num_bytes / 1e12:,.1f} TB",
        f"${nodes * requests * GET_PRICE:,.0f}",
        f"{64 * BLOCK / seconds / 1e6:.0f} M tokens/s",
    ]


def table(header: str, rows: list[list[str]]) -> str:
    return "\n".join([header, "| --- " * (header.count("|") - 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def tables() -> list[str]:
    gpus = (8, 64, 256, 1024)
    stored = [("best-fit", 8, 64), ("best-fit", 256, 256), ("best-fit", 256, 64), ("best-fit", 256, 1)]
    stored += [("examples", 8, 64), ("examples", 256, 256)]
    return [
        table(
            "| GPUs | small: all-reduce, efficiency, tokens/s | base | large |",
            [[f"{n:,}", *(weak(name, n) for name in ("small", "base", "large"))] for n in gpus],
        ),
        table(
            "| preset, GPUs | memory: replicated | sharded | step: replicated | sharded |",
            [[f"large, {n}", *sharded("large", n)] for n in (8, 64, 512)],
        ),
        table(
            "| packing, nodes, lanes | requests per node | bytes per node | of all nodes | GETs of all nodes "
            "| a node follows |",
            [[f"{packing}, {nodes}, {lanes}", *store(packing, nodes, lanes)] for packing, nodes, lanes in stored],
        ),
        table(
            "| GPUs | between failures | best interval | time lost | every 5,000 steps |",
            [[f"{n:,}", *failures(n)] for n in gpus],
        ),
    ]


if __name__ == "__main__":
    print(*tables(), sep="\n\n")
