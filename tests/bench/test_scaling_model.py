"""The arithmetic of the expected scaling, against cases by hand, simulations and published measurements."""

import math
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scaling_model as model
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import electra_fast as ef
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.model.compute import ComputeConfig, RngKey
from electra_fast.objectives import objective_of
from electra_fast.optimizers import muon

PAGE = Path(__file__).resolve().parents[2] / "docs/scale.md"
PERFECT = model.Link(float("inf"), 0.0)


def parameters_by_hand(vocabulary, positions, e, d, f, layers, fraction):
    """Two encoders with shared embeddings, biases and norms included."""

    def encoder(d, f):
        projection = (e + 1) * d if e != d else 0
        return projection + layers * (4 * (d + 1) * d + (d + 1) * f + (f + 1) * d + 4 * d)

    g = round(d * fraction)
    embeddings = (vocabulary + positions + 2 + 2) * e
    heads = (d + 1) * d + d + 1 + (g + 1) * e + 2 * e + vocabulary
    return embeddings + encoder(d, f) + encoder(g, round(f * fraction)) + heads


@pytest.mark.parametrize(
    ("preset", "shape"),
    [
        ("small", (128, 256, 1024, 12, 1 / 4)),
        ("base", (768, 768, 3072, 12, 1 / 3)),
        ("large", (1024, 1024, 4096, 24, 1 / 4)),
        ("xlarge", (2048, 2048, 8192, 24, 1 / 4)),
    ],
)
def test_gradients_are_as_large_as_the_model(preset, shape):
    assert model.workload(preset).gradient_bytes == 4 * parameters_by_hand(30_522, 512, *shape)


def test_gradients_of_small_are_those_of_a_model_in_memory():
    config = ef.Config.preset("small", "google").override({"model.vocab_size": "30522"})
    num_bytes = sum(p.numel() * p.element_size() for p in ef.Electra(config).parameters())
    assert model.workload("small").gradient_bytes == num_bytes == 56_784_876


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_a_ring_moves_what_it_is_said_to_move(num_ranks):
    """A ring that is carried out: each step, every rank sends one chunk to the next rank."""
    size = 12 * num_ranks
    values = np.random.default_rng(0).integers(0, 100, (num_ranks, num_ranks, 12))
    total, sent = values.sum(0), np.zeros(num_ranks)
    for phase in ("reduce", "gather"):
        for step in range(num_ranks - 1):
            first = 0 if phase == "reduce" else 1
            chunks = [(rank + first - step) % num_ranks for rank in range(num_ranks)]
            messages = [values[rank, chunk].copy() for rank, chunk in enumerate(chunks)]
            for rank, (chunk, message) in enumerate(zip(chunks, messages, strict=True)):
                target = values[(rank + 1) % num_ranks]
                target[chunk] = target[chunk] + message if phase == "reduce" else message
                sent[rank] += message.size
    assert (values == total).all()
    assert sent == pytest.approx(model.all_reduce_bytes(size, num_ranks))
    seconds = model.ring_all_reduce(size, num_ranks, model.Link(2.0, 0.25))
    assert seconds == pytest.approx(sent[0] / 2 + 2 * (num_ranks - 1) * 0.25)


def test_all_reduces_by_hand():
    num_bytes = 56_784_876
    within = 1.75 * num_bytes / 360e9 + 14 * 1.5e-6
    assert model.all_reduce_seconds(num_bytes, model.Cluster(8)) == pytest.approx(within)
    assert within == pytest.approx(0.297e-3, abs=1e-6)
    # Two nodes: a ring over one eighth of the buffer for each adapter.
    two = within + num_bytes / 8 / 45e9 + 2 * 8e-6
    assert model.all_reduce_seconds(num_bytes, model.Cluster(16)) == pytest.approx(two)
    # 128 nodes: up and down a tree of 7 levels, at 0.8 of the bandwidth.
    many = within + 2 * num_bytes / 8 / 36e9 + 14 * 8e-6
    assert model.all_reduce_seconds(num_bytes, model.Cluster(1024)) == pytest.approx(many)


def test_gathers_go_around_all_gpus():
    assert model.all_gather_seconds(8e6, model.Cluster(1)) == 0
    assert model.all_gather_seconds(8e6, model.Cluster(8)) == pytest.approx(7e6 / 360e9 + 7 * 1.5e-6)
    # 64 nodes: of 511 hops, 63 are over the network; the ring leaves a node by eight adapters.
    slow = model.Cluster(512, network=model.Link(20e9, 8e-6))
    assert model.all_gather_seconds(512e6, slow) == pytest.approx(511e6 / 160e9 + 448 * 1.5e-6 + 63 * 8e-6)


def test_a_tree_is_for_small_messages_and_a_ring_for_large_ones():
    ring, tree = (algorithm for algorithm in (model.ring_all_reduce, model.tree_all_reduce))
    assert tree(48, 128, model.NDR) == pytest.approx(14 * 8e-6, rel=1e-3)
    assert ring(48, 128, model.NDR) == pytest.approx(254 * 8e-6, rel=1e-3)
    assert ring(10e9, 128, model.NDR) < tree(10e9, 128, model.NDR)


def test_published_measurements():
    """Bus bandwidth b of NCCL's all-reduce is 2 (W - 1) / W * size / seconds (nccl-tests, PERFORMANCE.md)."""

    def measured(num_bytes, num_gpus, bandwidth):
        return model.all_reduce_bytes(num_bytes, num_gpus) / (bandwidth * 1e9)

    def expected(num_bytes, num_gpus):
        return model.all_reduce_seconds(num_bytes, model.Cluster(num_gpus))

    # NVIDIA/nccl issue 1469: 16 nodes of H100, 64 MiB in the runs that were not disturbed, and the smallest message.
    assert expected(2**26, 128) == pytest.approx(measured(2**26, 128, 150), rel=0.1)
    assert 62e-6 < expected(8, 128) < 2 * 62e-6
    # Large messages, whose phases overlap: nccl-tests issue 212 (256 MiB on 8 H100) and 283 (512 MiB on 1,984 H200).
    assert 1 < expected(2**28, 8) / measured(2**28, 8, 250 * 1.75) < 1.5
    assert 1 < expected(2**29, 1984) / measured(2**29, 1984, 350) < 2.5
    # NVIDIA/nccl issue 1218: an all-gather of 2 GiB on 256 H100, whose bus bandwidth the model takes for 330 GB/s.
    gather = model.all_gather_seconds(2**31, model.Cluster(256))
    assert 1 < 255 / 256 * 2**31 / gather / 200e9 < 1.7


@pytest.mark.parametrize(("preset", "batch_size"), [*((name, 0) for name in model.PAPER), *model.STRONG_BATCHES])
def test_efficiency_begins_at_one_and_never_rises(preset, batch_size):
    found = [
        model.predict(model.workload(preset), model.Cluster(n), batch_size).efficiency
        for n in model.NUM_GPUS
        if n <= (batch_size or n)
    ]
    assert found[0] == 1 and found == sorted(found, reverse=True) and found[-1] < found[0]


@pytest.mark.parametrize("preset", model.EXPECTED)
def test_perfect_links_scale_perfectly(preset):
    workload = model.workload(preset)
    for num_gpus in model.NUM_GPUS:
        cluster = model.Cluster(num_gpus, PERFECT, PERFECT, host_hop=0.0)
        found = model.predict(workload, cluster)
        assert found.efficiency == 1
        assert found.tokens_per_second == pytest.approx(num_gpus * workload.tokens_per_second)


def test_small_on_eight_gpus():
    assert model.predict(model.workload("small"), model.Cluster(8)).efficiency >= 0.97


def test_the_papers_batch_on_one_gpu():
    """What is left of a step with few rows agrees with the prediction for 128 rows, 1.6 to 2.0 M tokens per second."""
    found = model.predict(model.workload("small"), model.Cluster(1), 128)
    assert 1.6e6 < found.tokens_per_second < 2.0e6


def test_micro_batches_have_launches_of_their_own():
    large = model.workload("large")
    whole, half = large.compute_seconds(128), large.compute_seconds(64)
    assert whole == pytest.approx(2 * half - large.update_seconds)


def test_the_host_is_the_limit_where_its_ring_is_longer_than_a_step():
    small = model.workload("small")
    found = model.predict(small, model.Cluster(1024), 1024)
    assert found.step_seconds == found.host_seconds == pytest.approx(1e-3 + 1023 * 50e-6)
    quick = model.predict(small, model.Cluster(1024, host_hop=0.0), 1024)
    assert quick.step_seconds == quick.compute_seconds + quick.all_reduce_seconds


@pytest.mark.parametrize("num_ranks", [1, 8, 1024])
def test_the_slowest_of_many_ranks(num_ranks):
    draws = np.random.default_rng(0).normal(1, model.JITTER, (4000, num_ranks))
    assert model.slowest_rank(num_ranks) == pytest.approx(draws.max(1).mean(), abs=0.02 * model.JITTER)


def test_the_best_checkpoint_interval_loses_least():
    assert ef.Config.preset("large").train.checkpoint_every == 5_000  # the interval that the table compares it with
    assert model.seconds_between_failures(16_384) == pytest.approx(54 * 86_400 / 419)
    best = model.best_interval(1024, 0.4)
    least = model.lost_fraction(1024, best, 0.4)
    assert all(least < model.lost_fraction(1024, factor * best, 0.4) for factor in (0.5, 0.9, 1.1, 2))


class Traffic(TorchDispatchMode):
    """Calls and bytes of the collectives of this rank, each counted as the part of it that a rank holds."""

    def __init__(self):
        super().__init__()
        self.calls, self.num_bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("c10d::")
        if "allgather" in name or "reduce_scatter" in name:
            self.calls[name] += 1
            self.num_bytes[name] += min(each.nbytes for each in args[:2])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_ranks():
    """Makes this process rank 0 of several that do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def init(world_size):
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        return torch.distributed.init_device_mesh("cpu", (world_size,))

    yield init
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [8, 24])  # rows of 24 ranks are padded
def test_sharding_moves_and_holds_what_it_is_said_to(fake_ranks, monkeypatch, tiny_corpus, num_ranks):
    from electra_fast.optimizers.shards import Shards
    from electra_fast.training.sharding import shard_model

    monkeypatch.setitem(model.EXPECTED, "tiny", (1, 1.0, 1))
    expected, mesh = model.workload("tiny"), fake_ranks(num_ranks)
    config = ef.Config.preset("tiny", "google").override(model.VOCABULARY)
    root = shard_model(ef.Electra(config), mesh)
    shards, objective = Shards(root.model), objective_of(config)
    assert sum(parameter.nbytes for parameter in shards.parameters.values()) == sum(expected.shards(num_ranks))

    batch = to_torch(next(iter(BatchLoader.from_config(config, corpus=tiny_corpus))))
    key, forward = RngKey(torch.tensor([0, 0]), torch.tensor(0)), root.run(objective.forward)
    with Traffic() as traffic:
        output = forward(
            root.model, batch, ComputeConfig("sdpa", torch.float32), key, objective.loss_denominators(batch)
        )
        output.loss.backward()
    assert sum(traffic.num_bytes.values()) == model.sharded_total(expected.shards(num_ranks))
    assert traffic.calls == {"_allgather_base_": 1 + 2 * 4, "_reduce_scatter_base_": 1 + 4}  # of four layers


def test_sharded_steps_by_hand():
    large = model.workload("large")
    rest, *layers = large.shards(8)
    assert len(layers) == 48 and large.gathered_bytes() == 2 * large.shards(1)[0] + 20 * (12 * 1024**2 + 13 * 1024)
    total, best, worst = model.predict_sharded(large, model.Cluster(8))
    sent = 7 * (2 * rest + 3 * sum(layers))
    assert total == pytest.approx(sent / 360e9 + 146 * 7 * 1.5e-6)
    compute = large.compute_seconds(64) - 7 / 8 * large.update_seconds
    assert worst == pytest.approx(compute + total + 8 / 7 * 2 * sent / 4.3e12)
    assert worst - best == pytest.approx(total - 2 * (7 * rest / 360e9 + 7 * 1.5e-6))
    # Where the messages of the layers take longest, nothing is gained by hiding the rest behind them.
    slow = replace(model.Cluster(8), node=model.Link(1e9, 0.0))
    assert model.predict_sharded(large, slow)[1] == pytest.approx(sent / 1e9 + large.update_seconds / 8)


@pytest.mark.parametrize("num_groups", [1, 8, 100])
def test_groups_of_matrices_are_those_of_the_optimizer(num_groups):
    stacks, found = model.muon_stacks("base"), []
    shapes = {stack.shape for stack in stacks}
    assert (768, 768) in shapes and (2048, 768) in shapes and not any(30_522 in shape for shape in shapes)

    def gather(own, out):
        found.extend((own.numel(), out.numel()))

    if num_groups > 1:
        with model.FakeTensorMode():
            division = muon.MatrixDivision(num_groups, range(1), gather)
            muon.Orthogonalization(stacks, division, torch.device("cpu"), torch.float32).exchange()
        numel = model.muon_group("base", num_groups)[1]
        assert found == [numel, num_groups * numel]
    else:
        assert model.muon_group("base", 1)[1] == sum(stack.num_matrices * math.prod(stack.shape) for stack in stacks)


def test_muon_is_divided_in_a_node_only():
    for preset in model.EXPECTED:
        alone, node, everything = (model.muon_seconds(preset, model.Cluster(n)) for n in (1, 8, 1024))
        # Of `small`, nearly half of the time in a node is latency.
        assert node < 0.6 * alone and everything > 5 * node
    flops = sum(30 * min(s.shape) * math.prod(s.shape) * s.num_matrices for s in model.muon_stacks("large"))
    assert model.muon_seconds("large", model.Cluster(1)) == pytest.approx(flops / 395e12)


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", *arguments])
    assert model.main() == 0
    return capsys.readouterr().out


def test_the_page_has_the_tables_that_are_printed(monkeypatch, capsys):
    text, printed = PAGE.read_text(encoding="utf-8"), run(monkeypatch, capsys)
    tables = model.tables(model.Cluster(1))
    for title, table in tables.items():
        assert table in text, f"docs/scale.md: {title} is not what bench/scaling_model.py prints"
        assert f"{title}\n\n{table}" in printed
    rows = [line for line in text.splitlines() if line.startswith("| 1,024 |")]
    assert len(rows) == sum("\n| 1,024 |" in table for table in tables.values())  # no older copy is left


def numbers_in_the_text():
    def predict(preset, num_gpus, batch_size=0):
        return model.predict(model.workload(preset), model.Cluster(num_gpus), batch_size)

    def cost(preset, num_gpus):
        return 100 * (1 - predict(preset, num_gpus).efficiency)

    def seconds(preset, num_gpus):
        train = ef.Config.preset(preset).train
        tokens = train.steps * train.batch_size * model.workload(preset).length
        return tokens / predict(preset, num_gpus).tokens_per_second

    small, large, xlarge = (model.workload(name) for name in ("small", "large", "xlarge"))
    most, node = model.Cluster(1024), model.Cluster(8)
    costs = f"costs {cost('small', 8):.1f} % (`small`) to {cost('large', 8):.1f} % (`large`) on 8 GPUs and"
    yield f"{costs} {max(cost(name, 1024) for name in model.PAPER):.0f} % at most on 1,024."
    yield f"| `large`: {cost('large', 8):.1f} % on 8 GPUs, {cost('large', 1024):.0f} % on 1,024 |"
    bandwidth = 255 / 256 * 2**31 / model.all_gather_seconds(2**31, model.Cluster(256))
    yield f"for 2 GiB on 256 GPUs, the model has {round(bandwidth / 1e9, -1):.0f} GB/s"
    yield f"(nccl 1469: {model.all_reduce_bytes(2**26, 128) / 150e6:.2f} ms,"
    # Sharding.
    yield f"10 us of the host per kernel, {large.num_kernels * model.EAGER_SECONDS * 1e3:.0f} ms per step of `large`"
    held, divided = 5 * xlarge.gradient_bytes, 4 * sum(xlarge.shards(8)) + xlarge.gathered_bytes()
    during = held + 2 * xlarge.gradient_bytes
    yield f"{held / 1e9:.0f} GB, {during / 1e9:.0f} during the update, are much of an 80 GB GPU"
    yield f"on 8 GPUs, {divided / 1e9:.1f} GB are left"
    yield f"Each rank starts with all weights, though: {xlarge.gradient_bytes / 1e9:.1f} GB for `xlarge`."
    saved = 5 * large.gradient_bytes - 4 * sum(large.shards(512)) - large.gathered_bytes()
    yield f"it saves at most {saved / 1e9:.1f} GB"
    rings, hops = 3 * len(xlarge.groups[1:]) + 2, model.all_gather_seconds(0, model.Cluster(512)) * 1e3
    yield f"{rings} rings with {hops:.2f} ms of hops each are {rings * hops:.0f} ms per step"
    yield f"all_gather_perf -b 4K -e 4K # {hops:.2f} ms on 64 nodes of 8"
    # Batches.
    rows = 8 * small.rows_per_gpu
    yield f"{rows * 128 / 1e6:.2f} M tokens per step, {rows // 128} times the paper's batch"
    yield f"GPUs on {8 * rows * 128 / 1e6:.1f} M, the size to which LAMB took BERT's batch ({8 * rows:,} rows of 128;"
    times = (
        f"`small` {seconds('small', 8) / 60:.0f} minutes on 8 GPUs, `base` {seconds('base', 64) / 60:.0f} minutes on 64"
    )
    yield f"{times}, and `large` {seconds('large', 64) / 3600:.1f} hours on 64."
    launches, update = small.num_kernels * model.KERNEL_SECONDS, small.update_seconds
    step = predict("small", 1, 128).step_seconds
    parts = f"{launches * 1e3:.1f} ms of launches and {update * 1e3:.1f} ms of update in its {step * 1e3:.0f} ms"
    yield f"`small` with 128 rows has {parts} on one GPU"
    # What breaks next.
    yield f"before the first graph ({model.all_reduce_seconds(48, most) * 1e3:.2f} ms on 1,024 GPUs)"
    assert predict("large", 512, 2048).step_seconds == pytest.approx(5 * large.update_seconds, rel=0.1)
    yield f"replicated Adam: {large.update_seconds * 1e3:.1f} ms for `large`, the same on any number of GPUs, a fifth"
    yield f"with W numbers each, {8 * 1024**3 / 1e9:.1f} GB in all"
    yield f"which is {46 * 60 / 8**2:.0f} and {20 * 60 / 8**2:.0f} s on 1,024"
    yield f"the usual limit is 1,024 | {(1024 - 13) // 3 // 10 * 10} GPUs |"
    yield f"| {100 * model.slowest_rank(1024) - 100:.0f} % on 1,024 GPUs at 1 % jitter |"
    # The hosts.
    yield f"{predict('small', 1024).tokens_per_second / 3e9:.2f} cores per rank for `small` on 1,024 GPUs"
    yield f"A node of 8 GPUs needs {predict('small', 8).tokens_per_second * 2.01 / 1e6:.0f} MB/s of rows"
    rows_per_block = 65_536 / (2.01 * 128)
    yield f"its {rows_per_block:.0f} rows go to all ranks"
    yield f"128 nodes together would read it {128 * (1 - (1 - 1 / 128) ** rows_per_block):.0f} times"
    yield f"A corpus of 33 G tokens has {33 * 2.01:.0f} GB."
    yield f"Full shards have {2**27 / 1e6:.0f} M tokens, so 33 G tokens are {33e9 / 2**27:.0f} shards"
    assert 246 * 2 * 1024 == pytest.approx(5e5, rel=0.01)  # half a million calls
    yield f"150,000 shards ({150_000 * 2**27 / 1e12:.0f} T tokens)"
    # Failures and checkpoints.
    yield f"one in {model.FAILURE_SECONDS_PER_GPU / 86_400 / 365.25:.1f} years per GPU"
    yield f"stops training for {3 * large.gradient_bytes / model.SNAPSHOT_BANDWIDTH:.1f} s"
    stored, larger = 3 * large.gradient_bytes / 1e9, 3 * xlarge.gradient_bytes / 1e9
    yield f"`large` has {stored:.1f} GB: {stored / 1.5:.1f} s to read and verify at 1.5 GB/s, {stored / 45:.1f} s to"
    yield f"the {larger:.1f} GB of `xlarge` take {larger / 45:.1f} s through"
    # Muon.
    gathered, numel = 1024 * model.muon_group("base", 1024)[1], model.muon_group("base", 1)[1]
    yield f"the gather would have {gathered / numel:.0f} times the size of the matrices of `base`"
    yield f"for `xlarge`, {4 * model.muon_group('xlarge', 1)[1] / 8 / 1e9:.2f} GB each way per GPU of 8"
    parameters = [k * math.prod(s.shape) for s in model.muon_stacks("xlarge") for k in s.num_blocks]
    assert len(parameters) < 512 / 2
    largest = 4 * max(parameters)
    yield f"most have none, and the largest, {largest / 1e6:.0f} MB, takes {largest / 45e6:.1f} ms each way"
    # How to check.
    yield f"NVIDIA/nccl-tests: {model.all_reduce_seconds(56_784_876, node) * 1e3:.2f} ms in a node"
    faster = 8 * predict("small", 8).efficiency
    yield f"should rise {faster:.2f} times, or {faster / model.slowest_rank(8):.2f} times with 1 % jitter."


def test_the_numbers_in_the_text():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert [number for number in numbers_in_the_text() if number not in text] == []


def test_the_conclusions_in_the_text():
    def step(preset, num_gpus, batch_size=0):
        return model.predict(model.workload(preset), model.Cluster(num_gpus), batch_size).step_seconds

    assert step("small", 64, 128) > 0.9 * step("small", 8, 128)
    assert step("base", 128, 256) > 0.7 * step("base", 32, 256)
    assert step("large", 1024, 2048) > step("large", 512, 2048)
    exchange = {n: 1e-3 + model.host_exchange_seconds(model.Cluster(n)) for n in (56, 64, 976, 984)}
    assert exchange[56] < 4e-3 < exchange[64] and exchange[976] < 50e-3 < exchange[984]
    for num_gpus in (8, 64):
        assert model.predict_sharded(model.workload("xlarge"), model.Cluster(num_gpus))[2] < step("xlarge", num_gpus)
    for preset in ("large", "xlarge"):
        assert model.predict_sharded(model.workload(preset), model.Cluster(512))[2] > 1.2 * step(preset, 512)


def test_links_of_ones_own(monkeypatch, capsys):
    printed = run(monkeypatch, capsys, "--nvlink", "720,0.75", "--network", "90,4", "--host-hop", "10")
    own = model.Cluster(1, model.Link(720e9, 0.75e-6), model.Link(90e9, 4e-6), 10e-6)
    tables = model.tables(own)
    assert all(table in printed for table in tables.values())
    assert all(tables[title] != table for title, table in model.tables(model.Cluster(1)).items() if title != "One GPU")
