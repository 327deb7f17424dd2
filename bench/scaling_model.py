"""Expected scaling of data-parallel training from 1 to 1,024 GPUs: arithmetic on stated assumptions, no measurement.

    python bench/scaling_model.py [--nvlink GB/S,US] [--network GB/S,US] [--host-hop US]

Every rank has all weights. A step is a forward and backward pass, one all-reduce of a flat fp32 buffer with all
gradients, and the same update on every rank; nothing overlaps the all-reduce. With `train.sharding = "full"` a rank has
some rows of each weight and gathers a layer while it computes another. The host runs ahead of the device and exchanges
a few numbers with the other hosts for each step. Prints the tables of `docs/scale.md`, which draws the conclusions; the
options replace assumed links by measured ones. The source of an assumption stands beside it.

Units: seconds, bytes, bytes per second. A cluster has W ranks (one per GPU) on N nodes, g to a node.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from statistics import NormalDist
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

import electra_fast as ef
from electra_fast.model.model import BertLayer, ModernLayer
from electra_fast.optimizers.muon import Stack, stacks
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training.division import share
from electra_fast.training.flops import PUBLISHED_VOCABULARY, device_peak, flops_per_token

NUM_GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PAPER = ("small", "base", "large")
# The batches of the paper, and small with eight times as many rows.
STRONG_BATCHES = (("small", 128), ("small", 1024), ("base", 256), ("large", 2048))
# Rows per GPU, tokens per second on one H200, kernel launches. None of it was measured: small and base are predictions
# from the sum of their kernels, large is a target, and xlarge has its FLOPs per second.
EXPECTED = {
    "small": (1024, 131_072 / 49e-3, 1_440),
    "base": (128, 0.50e6, 1_440),
    "large": (64, 0.17e6, 2_880),
    "xlarge": (32, 45e3, 2_880),
}
VOCABULARY = {"model.vocab_size": str(PUBLISHED_VOCABULARY)}

# One H200: copies and bf16 matmuls as measured.
MEMORY_BANDWIDTH, MATMUL_FLOPS = 4.3e12, 790e12
# The shortest kernel of a CUDA graph, its gap included; the host's time for a kernel that is in none.
KERNEL_SECONDS, EAGER_SECONDS = 2e-6, 10e-6
# Flattening, clipping and AdamW by torch._foreach_*: about ten passes over fp32 numbers.
UPDATE_BYTES_PER_PARAMETER = 112
# Newton-Schulz: FLOPs per element and unit of the shorter side, and the share of MATMUL_FLOPS that they reach.
MUON_FLOPS, MUON_EFFICIENCY = 30, 0.5
# A step waits for the copy of a checkpoint to the host only; the write is asynchronous.
SNAPSHOT_BANDWIDTH = 10e9
# fp32 numbers per parameter: weight, gradient, two moments and, unless sharded, a flat buffer with all gradients.
SHARDED_NUMBERS, REPLICATED_NUMBERS = 4, 5
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
    """Until all have `num_bytes`, of which each had an equal part; a reduce-scatter takes as long.

    A ring of all GPUs, since NCCL has no other (NVIDIA/nccl issue 1123), with the hops of its src/graph/tuning.cc.
    """
    node, between = cluster.node, cluster.network
    adapters = cluster.ranks_per_node * between.bandwidth if cluster.num_nodes > 1 else math.inf
    hops = (cluster.num_gpus - cluster.num_nodes) * node.latency + (cluster.num_nodes - 1) * between.latency
    return num_bytes * (1 - 1 / cluster.num_gpus) / min(node.bandwidth, adapters) + hops


def host_exchange_seconds(cluster: Cluster) -> float:
    """gloo's all-gather of a few bytes: a ring of W - 1 hops (gloo/allgather.cc)."""
    return (cluster.num_gpus - 1) * cluster.host_hop


@dataclass(frozen=True)
class Workload:
    """A model in recipe `google`, and what one GPU is expected to do with it; see EXPECTED.

    `groups` are the shapes of what FSDP gathers in one piece: first the parameters outside layers, then each layer's.
    """

    name: str
    length: int
    flops_per_token: float
    groups: Sequence[Sequence[Sequence[int]]]
    rows_per_gpu: int
    tokens_per_second: float
    num_kernels: int

    def shards(self, num_ranks: int) -> list[int]:
        """fp32 bytes of each group on each rank: as many rows of each parameter, the last ones padding."""
        return [4 * sum(-(-rows // num_ranks) * math.prod(row) for rows, *row in group) for group in self.groups]

    @property
    def gradient_bytes(self) -> int:
        """What a step's all-reduce sums up, in fp32."""
        return sum(self.shards(1))

    @property
    def update_seconds(self) -> float:
        """Clipping and update of all parameters."""
        return self.gradient_bytes / 4 * UPDATE_BYTES_PER_PARAMETER / MEMORY_BANDWIDTH

    def gathered_bytes(self) -> int:
        """Most at one time: the rest and its gradients, two layers, gradients of one, and a message each way."""
        rest, *layers = self.shards(1)
        return 2 * rest + 5 * max(layers)

    def compute_seconds(self, num_rows: float) -> float:
        """A step of one rank with so many rows, without communication."""
        launches = self.num_kernels * KERNEL_SECONDS
        micro_batch = self.rows_per_gpu * self.length / self.tokens_per_second
        row_seconds = (micro_batch - launches - self.update_seconds) / self.rows_per_gpu
        return math.ceil(num_rows / self.rows_per_gpu) * launches + num_rows * row_seconds + self.update_seconds


@lru_cache
def workload(preset: str) -> Workload:
    """A preset with the published vocabulary, as it is expected to train."""
    config = ef.Config.preset(preset, "google").override(VOCABULARY)
    with FakeTensorMode():  # only shapes are needed
        model = ef.Electra(config)
    groups = [list(module.parameters()) for module in model.modules() if isinstance(module, BertLayer | ModernLayer)]
    inside = {parameter for group in groups for parameter in group}
    groups.insert(0, [parameter for parameter in model.parameters() if parameter not in inside])
    shapes = [[tuple(parameter.shape) for parameter in group] for group in groups]
    return Workload(preset, config.data.sequence_length, flops_per_token(config).total, shapes, *EXPECTED[preset])


@dataclass(frozen=True)
class Prediction:
    """A step on a cluster; `efficiency` is throughput per GPU relative to one GPU."""

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
    return Prediction(compute, all_reduce, host, step, rate, efficiency)


def sharded_total(groups: Sequence[float]) -> float:
    """Over a sharded step: layers are gathered for each pass, the rest once, and all gradients reduce-scattered."""
    return 2 * groups[0] + 3 * sum(groups[1:])


def predict_sharded(model: Workload, cluster: Cluster) -> tuple[float, float, float]:
    """A sharded step of `rows_per_gpu`: its messages, and the whole if all layers' messages are hidden, or none."""
    messages = [all_gather_seconds(n * cluster.num_gpus, cluster) for n in model.shards(cluster.num_gpus)]
    total, exposed, update = sharded_total(messages), 2 * messages[0], model.update_seconds / cluster.num_gpus
    host = model.num_kernels * EAGER_SECONDS + host_exchange_seconds(cluster)
    # Every message is also copied: read and written, on the GPU.
    compute = model.compute_seconds(model.rows_per_gpu) - model.update_seconds
    compute += 2 * sharded_total(model.shards(1)) / MEMORY_BANDWIDTH
    best, worst = max(compute, total - exposed) + exposed + update, compute + total + update
    return total, max(best, host), max(worst, host)


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


@lru_cache
def muon_stacks(preset: str) -> list[Stack]:
    """The matrices that Muon updates in recipe `modern`, by shape."""
    config = ef.Config.preset(preset, "modern").override(VOCABULARY)
    with FakeTensorMode():
        optimizer = Optimizer(ef.Electra(config).named_parameters(), config.optimizer)
    names = optimizer.exp_avg.keys() - optimizer.exp_avg_sq.keys()
    return stacks({name: parameter for name, parameter in optimizer.parameters.items() if name in names})


def muon_group(preset: str, num_groups: int) -> tuple[int, int]:
    """The most FLOPs and elements of a group of matrices; each group has an equal share of each stack."""
    totals = []
    for group in range(num_groups):
        sizes = [(len(share(s.num_matrices, group, num_groups)) * math.prod(s.shape), s) for s in muon_stacks(preset)]
        totals.append((sum(MUON_FLOPS * min(s.shape) * size for size, s in sizes), sum(size for size, _ in sizes)))
    flops, numel = map(max, zip(*totals, strict=True))
    return flops, numel


def muon_seconds(preset: str, ranks: Cluster) -> float:
    """Each rank orthogonalizes a group of the matrices, padded to the longest, and gathers all in bf16."""
    flops, numel = muon_group(preset, ranks.num_gpus)
    return flops / (MUON_EFFICIENCY * MATMUL_FLOPS) + all_gather_seconds(2 * ranks.num_gpus * numel, ranks)


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
    models, large = [workload(name) for name in EXPECTED], workload("large")
    clusters = [replace(base, num_gpus=n) for n in NUM_GPUS]
    pairs = [(m, replace(base, num_gpus=n)) for m in models[1:] for n in (8, 64, 512)]
    peak, pause = device_peak("NVIDIA H200") or math.nan, 3 * large.gradient_bytes / SNAPSHOT_BANDWIDTH
    gpus: Columns = [("GPUs", lambda c: f"{c.num_gpus:,}")]
    weak = [(f"{p}: all-reduce, efficiency, tokens/s", partial(scaling, p, 0)) for p in PAPER]
    strong = [(f"{p}, {n:,} rows: step, speed-up, efficiency", partial(scaling, p, n)) for p, n in STRONG_BATCHES]

    gpu: Columns = [
        ("preset", lambda m: f"{m.name}@{m.length}"),
        ("parameters", lambda m: f"{m.gradient_bytes // 4:,}"),
        ("rows", lambda m: f"{m.rows_per_gpu:,}"),
        ("tokens/s", lambda m: f"{m.tokens_per_second / 1e6:.3g} M"),
        ("MFU", lambda m: f"{m.tokens_per_second * m.flops_per_token / peak:.0%}"),
        ("step", lambda m: ms(m.compute_seconds(m.rows_per_gpu))),
        ("of it launches", lambda m: ms(m.num_kernels * KERNEL_SECONDS)),
        ("of it update", lambda m: ms(m.update_seconds)),
    ]
    traffic: Columns = [
        ("preset", lambda x: x[0].name),
        ("GPUs", lambda x: str(x[1].num_gpus)),
        ("memory: replicated", lambda x: mb(REPLICATED_NUMBERS * x[0].gradient_bytes)),
        ("sharded", lambda x: mb(SHARDED_NUMBERS * sum(x[0].shards(x[1].num_gpus)) + x[0].gathered_bytes())),
        ("sent: replicated", lambda x: mb(all_reduce_bytes(x[0].gradient_bytes, x[1].num_gpus))),
        ("sharded", lambda x: mb((x[1].num_gpus - 1) * sharded_total(x[0].shards(x[1].num_gpus)))),
        ("messages: replicated", lambda x: ms(all_reduce_seconds(x[0].gradient_bytes, x[1]))),
        ("sharded", lambda x: ms(predict_sharded(*x)[0])),
        ("step: replicated", lambda x: ms(predict(*x).step_seconds)),
        ("sharded", lambda x: " to ".join(map(ms, predict_sharded(*x)[1:]))),
    ]
    failures: Columns = [
        ("slowest rank", lambda c: f"+{slowest_rank(c.num_gpus) - 1:.1%}"),
        ("between failures", lambda c: f"{seconds_between_failures(c.num_gpus) / 3600:,.0f} h"),
        ("best interval", lambda c: f"{best_interval(c.num_gpus, pause) / 60:.1f} min"),
        ("time lost", lambda c: f"{lost_fraction(c.num_gpus, best_interval(c.num_gpus, pause), pause):.2%}"),
        ("every 5,000 steps", lambda c: f"{5000 * predict(large, c).step_seconds / 60:.1f} min"),
        ("time lost", lambda c: f"{lost_fraction(c.num_gpus, 5000 * predict(large, c).step_seconds, pause):.2%}"),
    ]
    muon: Columns = [
        ("preset, recipe modern", str),
        ("parameters of matrices", lambda name: f"{muon_group(name, 1)[1]:,}"),
        ("on every rank", lambda name: ms(muon_seconds(name, base))),
        ("divided in a node of 8", lambda name: ms(muon_seconds(name, clusters[3]))),
        ("padding", lambda name: f"{8 * muon_group(name, 8)[1] / muon_group(name, 1)[1] - 1:.1%}"),
        ("if divided over 1,024", lambda name: ms(muon_seconds(name, clusters[-1]))),
    ]
    return {
        "One GPU": table(gpu, models),
        "What a step moves": table(traffic, pairs),
        "Weak scaling": table([*gpus, *weak], clusters),
        "Strong scaling": table([*gpus, *strong], clusters),
        "Failures": table([*gpus, *failures], clusters[3:]),
        "Muon": table(muon, EXPECTED),
    }


def link(text: str) -> Link:
    """A link from `GB/s,us`."""
    bandwidth, latency = map(float, text.split(","))
    return Link(bandwidth * 1e9, latency / 1e6)


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvlink", type=link, default=NVLINK, metavar="GB/S,US", help="bus bandwidth, hop in a node")
    parser.add_argument("--network", type=link, default=NDR, metavar="GB/S,US", help="the same of a GPU's adapter")
    parser.add_argument("--host-hop", type=float, default=50.0, metavar="US", help="between the processes of two ranks")
    options = parser.parse_args()
    base = Cluster(1, options.nvlink, options.network, options.host_hop / 1e6)
    print("\n\n".join(f"{title}\n\n{rows}" for title, rows in tables(base).items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
