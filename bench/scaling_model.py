"""Expected scaling of data-parallel training from 1 to 1,024 GPUs: arithmetic on stated assumptions, no measurement.

    python bench/scaling_model.py [--json] [--nvlink GB/S,US] [--network GB/S,US] [--host-hop US]

Every rank has all weights. A step is a forward and backward pass, one all-reduce of a flat fp32 buffer with all
gradients, and the same update on every rank; nothing overlaps the all-reduce. The host runs ahead of the device and
exchanges a few numbers with the other hosts for each step. Prints the tables of `docs/scale.md`, which draws the
conclusions; the options replace assumed links by measured ones. The source of an assumption stands beside it.

Units: seconds, bytes, bytes per second. A cluster has W ranks (one per GPU) on N nodes, g to a node.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

import electra_fast as ef
from electra_fast.training.flops import PUBLISHED_VOCABULARY, device_peak, flops_per_token
from electra_fast.training.optim import Optimizer

NUM_GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# The batches of the paper, and small with eight times as many rows.
STRONG_BATCHES = (("small", 128), ("small", 1024), ("base", 256), ("large", 2048))
# Rows per GPU, tokens per second on one H200, kernel launches. None of it was measured: small and base are predictions
# from the sum of their kernels, large is a target.
EXPECTED = {"small": (1024, 131_072 / 49e-3, 1_440), "base": (128, 0.50e6, 1_440), "large": (64, 0.17e6, 2_880)}
VOCABULARY = {"model.vocab_size": str(PUBLISHED_VOCABULARY)}

# One H200: copies and bf16 matmuls as measured.
MEMORY_BANDWIDTH, MATMUL_FLOPS = 4.3e12, 790e12
# The shortest kernel of a CUDA graph, its gap included.
KERNEL_SECONDS = 2e-6
# Flattening, clipping and AdamW by torch._foreach_*: about ten passes over fp32 numbers.
UPDATE_BYTES_PER_PARAMETER = 112
# Newton-Schulz: FLOPs per element and unit of the shorter side, and the share of MATMUL_FLOPS that they reach.
MUON_FLOPS, MUON_EFFICIENCY = 30, 0.5
# Every rank packs the rows of the whole batch: tokens per second and core with rows of 128 and `packing = "google"`,
# measured on two shared CPU cores (best-fit: 5e9).
PLANNED_TOKENS = 3e9
TOKEN_BYTES, CHECKSUM_BLOCK_BYTES = 2.01, 64 * 1024
# A step waits for the copy of a checkpoint to the host only; the write is asynchronous.
SNAPSHOT_BANDWIDTH, READ_BANDWIDTH, TCP_BANDWIDTH = 10e9, 1.5e9, 1.25e9
# Llama 3 (Dubey et al., 2024, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100.
FAILURE_SECONDS_PER_GPU = 16_384 * 54 * 86_400 / 419
# From a failure to the next step: noticing it, new processes and connections, the checkpoint, a capture.
RESTART_SECONDS = 600.0
# Standard deviation of one rank's step, as a share of its mean.
JITTER = 0.01
# A tree has log2 instead of linearly many hops, and reaches less of the bandwidth than a ring.
TREE_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Link:
    """What a GPU gets of a link in a collective: bus bandwidth, and the latency of a hop."""

    bandwidth: float
    latency: float


# NVLink 4 has 450 GB/s each way. NCCL's rings reach 370, and NVLink SHARP a bus bandwidth of 480 on the largest
# messages (NVIDIA/nccl-tests issues 212, 290).
NVLINK = Link(360e9, 1.5e-6)
# 400 Gb/s InfiniBand for each GPU: 50 GB/s, of which 46 to 48 are usual (NVIDIA/nccl-tests issue 290). The smallest
# all-reduce on 16 nodes takes 62 us (NVIDIA/nccl issue 1469), which is 5 us per hop of a tree.
NDR = Link(45e9, 8e-6)


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs with a network adapter each, and hosts that exchange numbers over TCP (gloo).

    `host_hop` is from process to process: TCP and the wake-up of two threads. Published: 200 and 350 us for the
    smallest all-reduce of two, which is two hops and the call (meta-pytorch/torchft pull 199, pytorch/gloo issue 158).
    `host_work` is what else the host does for a step: batch, copies, launches of two graphs.
    """

    num_gpus: int
    node: Link = NVLINK
    network: Link = NDR
    host_hop: float = 50e-6
    host_work: float = 1e-3
    gpus_per_node: int = 8

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or (self.num_gpus > self.gpus_per_node and self.num_gpus % self.gpus_per_node):
            raise ValueError(f"{self.num_gpus} GPUs are not whole nodes of {self.gpus_per_node}")

    @property
    def num_nodes(self) -> int:
        """Nodes (N)."""
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def ranks_per_node(self) -> int:
        """Ranks of a node (g)."""
        return min(self.num_gpus, self.gpus_per_node)


def all_reduce_bytes(num_bytes: float, num_ranks: int) -> float:
    """What each rank sends in a ring all-reduce, and as much it receives."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def ring_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds of a reduce-scatter and an all-gather around a ring."""
    return all_reduce_bytes(num_bytes, num_ranks) / link.bandwidth + 2 * (num_ranks - 1) * link.latency


def tree_all_reduce(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Seconds of a pipelined reduction up a double binary tree and the broadcast down it, of more than one rank."""
    return 2 * num_bytes / (TREE_EFFICIENCY * link.bandwidth) + 2 * math.ceil(math.log2(num_ranks)) * link.latency


def all_reduce_seconds(num_bytes: float, cluster: Cluster) -> float:
    """A ring within nodes, then ring or tree between them. NCCL overlaps the two in large messages (half the time)."""
    part = num_bytes / cluster.ranks_per_node
    between = (algorithm(part, cluster.num_nodes, cluster.network) for algorithm in (ring_all_reduce, tree_all_reduce))
    return ring_all_reduce(num_bytes, cluster.ranks_per_node, cluster.node) + min(between)


def all_gather_seconds(num_bytes: float, cluster: Cluster) -> float:
    """Until every rank has `num_bytes`, of which each had an equal part: half of an all-reduce by rings."""
    part = num_bytes / cluster.ranks_per_node
    between = ring_all_reduce(part, cluster.num_nodes, cluster.network)
    return (between + ring_all_reduce(num_bytes, cluster.ranks_per_node, cluster.node)) / 2


def broadcast_seconds(num_bytes: float, cluster: Cluster) -> float:
    """A pipelined broadcast from one GPU to more than one."""
    link = cluster.network if cluster.num_nodes > 1 else cluster.node
    return num_bytes / link.bandwidth + (cluster.num_nodes + cluster.ranks_per_node - 2) * link.latency


def host_exchange_seconds(cluster: Cluster) -> float:
    """gloo's all-gather of a few bytes: a ring of W - 1 hops (gloo/allgather.cc)."""
    return (cluster.num_gpus - 1) * cluster.host_hop


@dataclass(frozen=True)
class Workload:
    """A model in recipe `google`, and what one GPU is expected to do with it; see EXPECTED."""

    name: str
    length: int
    flops_per_token: float
    num_parameters: int
    rows_per_gpu: int
    tokens_per_second: float
    num_kernels: int

    @property
    def gradient_bytes(self) -> int:
        """What a step's all-reduce sums up, in fp32."""
        return 4 * self.num_parameters

    @property
    def checkpoint_bytes(self) -> int:
        """Parameters and two moments in fp32."""
        return 12 * self.num_parameters

    @property
    def update_seconds(self) -> float:
        """Clipping and update of all parameters."""
        return self.num_parameters * UPDATE_BYTES_PER_PARAMETER / MEMORY_BANDWIDTH

    def compute_seconds(self, num_rows: float) -> float:
        """A step of one rank with so many rows, without communication."""
        launches = self.num_kernels * KERNEL_SECONDS
        micro_batch = self.rows_per_gpu * self.length / self.tokens_per_second
        row_seconds = (micro_batch - launches - self.update_seconds) / self.rows_per_gpu
        return math.ceil(num_rows / self.rows_per_gpu) * launches + num_rows * row_seconds + self.update_seconds


@lru_cache
def workload(preset: str) -> Workload:
    """A preset with the published vocabulary, as it is expected to train."""
    config = ef.Config.preset(preset).override(VOCABULARY)
    with FakeTensorMode():  # only shapes are needed
        num_parameters = sum(parameter.numel() for parameter in ef.Electra(config).parameters())
    flops = flops_per_token(config).total
    return Workload(preset, config.data.sequence_length, flops, num_parameters, *EXPECTED[preset])


@dataclass(frozen=True)
class Prediction:
    """A step on a cluster; `efficiency` is throughput per GPU relative to one GPU."""

    num_gpus: int
    compute_seconds: float
    all_reduce_seconds: float
    host_seconds: float
    step_seconds: float
    tokens_per_second: float
    efficiency: float


def predict(model: Workload, cluster: Cluster, batch_size: int = 0) -> Prediction:
    """A step of `batch_size` rows over all GPUs (strong scaling); 0: of `rows_per_gpu` on each (weak scaling)."""
    rows = batch_size / cluster.num_gpus if batch_size else model.rows_per_gpu
    compute, all_reduce = model.compute_seconds(rows), all_reduce_seconds(model.gradient_bytes, cluster)
    host = cluster.host_work + host_exchange_seconds(cluster)
    step, rows_on_one = max(compute + all_reduce, host), batch_size or model.rows_per_gpu
    efficiency = rows / step / (rows_on_one / max(model.compute_seconds(rows_on_one), cluster.host_work))
    rate = rows * model.length * cluster.num_gpus / step
    return Prediction(cluster.num_gpus, compute, all_reduce, host, step, rate, efficiency)


def slowest_rank(num_ranks: int) -> float:
    """Mean of the slowest of so many normally distributed steps of mean 1 (Blom's approximation)."""
    return 1 + JITTER * NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


def seconds_between_failures(num_gpus: int) -> float:
    """Mean time between failures of any of the GPUs and what they depend on."""
    return FAILURE_SECONDS_PER_GPU / num_gpus


def best_interval(num_gpus: int, pause: float) -> float:
    """Young's (1974) interval between checkpoints that each stop training for `pause`."""
    return math.sqrt(2 * pause * seconds_between_failures(num_gpus))


def lost_fraction(num_gpus: int, interval: float, pause: float) -> float:
    """Share of the time that goes to checkpoints, repeated steps and restarts."""
    return pause / interval + (interval / 2 + RESTART_SECONDS) / seconds_between_failures(num_gpus)


def first_epoch_bytes(tokens_per_second: float, num_nodes: int, length: int) -> float:
    """Bytes per second of the blocks that hold the rows of a node, each verified as a whole at first touch."""
    rows_per_block = CHECKSUM_BLOCK_BYTES / (TOKEN_BYTES * length)
    return tokens_per_second * TOKEN_BYTES * (1 - math.pow(1 - 1 / num_nodes, rows_per_block))


@lru_cache
def muon_matrices(preset: str) -> tuple[tuple[int, int], ...]:
    """Shapes of the matrices that Muon updates in recipe `modern`."""
    config = ef.Config.preset(preset, "modern").override(VOCABULARY)
    with FakeTensorMode():
        optimizer = Optimizer(ef.Electra(config).named_parameters(), config.optimizer)
    names = optimizer.exp_avg.keys() - optimizer.exp_avg_sq.keys()
    return tuple((p.shape[0], p.shape[1]) for name, p in optimizer.parameters.items() if name in names)


def muon_seconds(preset: str, ranks: Cluster) -> float:
    """Orthogonalizes the matrices, split evenly over the ranks, and gathers them in bf16."""
    shapes = muon_matrices(preset)
    flops = sum(MUON_FLOPS * min(shape) * math.prod(shape) for shape in shapes) / ranks.num_gpus
    num_bytes = 2 * sum(map(math.prod, shapes))
    return flops / (MUON_EFFICIENCY * MATMUL_FLOPS) + all_gather_seconds(num_bytes, ranks)


Columns = Sequence[tuple[str, Callable[[Any], str]]]


def table(columns: Columns, items: Iterable[object]) -> str:
    """A Markdown table with a row per item and a column per title and function."""
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [[cell(item) for _, cell in columns] for item in items]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{seconds * 1e3:,.{2 if seconds < 1e-2 else 1}f} ms"


def mb(num_bytes: float) -> str:
    """Millions of bytes."""
    return f"{num_bytes / 1e6:,.{1 if num_bytes < 1e8 else 0}f} MB"


def scaling(preset: str, batch_size: int, cluster: Cluster) -> str:
    """A cell of weak scaling (`batch_size` 0) or strong scaling, with a dagger where the host is the limit."""
    if 0 < batch_size < cluster.num_gpus:
        return ""
    found = predict(workload(preset), cluster, batch_size)
    efficiency = f"{found.efficiency:.1%}{'†' if found.step_seconds == found.host_seconds else ''}"
    if batch_size:
        return f"{ms(found.step_seconds)}, {found.efficiency * cluster.num_gpus:.1f}x, {efficiency}"
    return f"{ms(found.all_reduce_seconds)}, {efficiency}, {found.tokens_per_second / 1e6:,.2f} M"


def tables(base: Cluster) -> dict[str, str]:
    """The tables of docs/scale.md by title, for the links of `base`."""
    models = [workload(name) for name in EXPECTED]
    small, _, large = models
    clusters = [replace(base, num_gpus=n) for n in NUM_GPUS]
    one, node, all_nodes = clusters[0], clusters[3], clusters[-1]
    peak, pause = device_peak("NVIDIA H200") or math.nan, large.checkpoint_bytes / SNAPSHOT_BANDWIDTH
    gpus: Columns = [("GPUs", lambda c: f"{c.num_gpus:,}")]
    weak = [(f"{p}: all-reduce, efficiency, tokens/s", partial(scaling, p, 0)) for p in EXPECTED]
    strong = [(f"{p}, {n:,} rows: step, speed-up, efficiency", partial(scaling, p, n)) for p, n in STRONG_BATCHES]
    best, lost = partial(best_interval, pause=pause), partial(lost_fraction, pause=pause)
    rates = {c.num_gpus: predict(small, c).tokens_per_second for c in clusters}

    gpu: Columns = [
        ("preset", lambda m: f"{m.name}@{m.length}"),
        ("rows", lambda m: f"{m.rows_per_gpu:,}"),
        ("tokens/s", lambda m: f"{m.tokens_per_second / 1e6:.2f} M"),
        ("MFU", lambda m: f"{m.tokens_per_second * m.flops_per_token / peak:.0%}"),
        ("step", lambda m: ms(m.compute_seconds(m.rows_per_gpu))),
        ("of it launches", lambda m: ms(m.num_kernels * KERNEL_SECONDS)),
        ("of it update", lambda m: ms(m.update_seconds)),
    ]
    traffic: Columns = [
        ("preset", lambda m: m.name),
        ("parameters", lambda m: f"{m.num_parameters:,}"),
        ("fp32 gradients", lambda m: mb(m.gradient_bytes)),
        ("sent by a GPU: over NVLink", lambda m: mb(all_reduce_bytes(m.gradient_bytes, 8))),
        ("over the network", lambda m: mb(all_reduce_bytes(m.gradient_bytes / 8, all_nodes.num_nodes))),
        ("all-reduce: 8 GPUs", lambda m: ms(all_reduce_seconds(m.gradient_bytes, node))),
        ("1,024 GPUs", lambda m: ms(all_reduce_seconds(m.gradient_bytes, all_nodes))),
        ("in bf16: 8 GPUs", lambda m: ms(all_reduce_seconds(m.gradient_bytes / 2, node))),
        ("1,024 GPUs", lambda m: ms(all_reduce_seconds(m.gradient_bytes / 2, all_nodes))),
    ]
    host: Columns = [
        ("exchange", lambda c: ms(host_exchange_seconds(c))),
        ("gloo sockets per rank", lambda c: f"{c.num_gpus - 1:,}"),
        ("connections", lambda c: f"{c.num_gpus * (c.num_gpus - 1) // 2:,}"),
        ("planning per rank", lambda c: f"{rates[c.num_gpus] / PLANNED_TOKENS:.2f} cores"),
        ("a node needs", lambda c: mb(rates[c.num_gpus] / c.num_nodes * TOKEN_BYTES) + "/s"),
        ("a node reads", lambda c: mb(first_epoch_bytes(rates[c.num_gpus], c.num_nodes, small.length)) + "/s"),
    ]
    failures: Columns = [
        ("slowest rank", lambda c: f"+{slowest_rank(c.num_gpus) - 1:.1%}"),
        ("between failures", lambda c: f"{seconds_between_failures(c.num_gpus) / 3600:,.0f} h"),
        ("best interval", lambda c: f"{best(c.num_gpus) / 60:.1f} min"),
        ("time lost", lambda c: f"{lost(c.num_gpus, best(c.num_gpus)):.2%}"),
        ("every 5,000 steps", lambda c: f"{5000 * predict(large, c).step_seconds / 60:.1f} min"),
        ("time lost", lambda c: f"{lost(c.num_gpus, 5000 * predict(large, c).step_seconds):.2%}"),
    ]
    resuming: Columns = [
        ("preset", lambda m: m.name),
        ("checkpoint", lambda m: mb(m.checkpoint_bytes)),
        ("rank 0 reads and verifies", lambda m: ms(m.checkpoint_bytes / READ_BANDWIDTH)),
        ("broadcast to 8 GPUs", lambda m: ms(broadcast_seconds(m.checkpoint_bytes, node))),
        ("to 1,024 by NCCL", lambda m: ms(broadcast_seconds(m.checkpoint_bytes, all_nodes))),
        # A binomial tree of log2(1,024) levels, each of which passes whole tensors on.
        ("to 1,024 by gloo", lambda m: ms(10 * m.checkpoint_bytes / TCP_BANDWIDTH)),
    ]
    muon: Columns = [
        ("preset, recipe modern", str),
        ("parameters of matrices", lambda name: f"{sum(map(math.prod, muon_matrices(name))):,}"),
        ("on every rank", lambda name: ms(muon_seconds(name, one))),
        ("split over 8 GPUs", lambda name: ms(muon_seconds(name, node))),
        ("split over 1,024", lambda name: ms(muon_seconds(name, all_nodes))),
    ]
    return {
        "One GPU": table(gpu, models),
        "What a step moves": table(traffic, models),
        "Weak scaling": table([*gpus, *weak], clusters),
        "Strong scaling": table([*gpus, *strong], clusters),
        "The host": table([*gpus, *host], clusters[3:]),
        "Failures": table([*gpus, *failures], clusters[3:]),
        "Resuming": table(resuming, models),
        "Muon": table(muon, EXPECTED),
    }


def as_json(base: Cluster) -> str:
    """Every prediction, by preset and batch size (0: weak scaling), as one object."""
    cases, steps = [(preset, 0) for preset in EXPECTED] + list(STRONG_BATCHES), {}
    for preset, rows in cases:
        clusters = [replace(base, num_gpus=n) for n in NUM_GPUS if n <= (rows or n)]
        steps[f"{preset}:{rows}"] = [asdict(predict(workload(preset), cluster, rows)) for cluster in clusters]
    return json.dumps({"measured": False, "links": asdict(base), "steps": steps})


def link(text: str) -> Link:
    """A link from `GB/s,us`."""
    bandwidth, latency = map(float, text.split(","))
    return Link(bandwidth * 1e9, latency / 1e6)


def main() -> int:
    """Prints the tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--nvlink", type=link, default=NVLINK, metavar="GB/S,US", help="bus bandwidth, hop in a node")
    parser.add_argument("--network", type=link, default=NDR, metavar="GB/S,US", help="the same of a GPU's adapter")
    parser.add_argument("--host-hop", type=float, default=50.0, metavar="US", help="between the processes of two ranks")
    options = parser.parse_args()
    base = Cluster(1, options.nvlink, options.network, options.host_hop / 1e6)
    print(as_json(base) if options.json else "\n\n".join(f"{title}\n\n{t}" for title, t in tables(base).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
