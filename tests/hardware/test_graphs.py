"""The bookkeeping of CUDA graphs, with stand-ins for torch's."""

import contextlib

import pytest
import torch

from electra_fast.hardware.graphs import WARM_UP, GraphRunner
from electra_fast.objectives.objective import seed_generator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="stands in for a GPU")


class Graph:
    def replay(self):
        pass


class Generator:
    seed = None

    def manual_seed(self, seed):
        self.seed = seed


def test_graphs_share_memory_pool(monkeypatch):
    """After `drop` there is a new pool, since torch frees a pool with its last graph."""
    pools = []
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    monkeypatch.setattr(torch.cuda, "graph", lambda _, pool, **__: pools.append(pool) or contextlib.nullcontext())
    runner = GraphRunner(torch.device("cuda:0"), captures=True)

    def run():
        runner.outside(lambda: None)  # divides a run into two graphs

    for key in 8 * "ab":
        runner.run(run, key=key)
    assert pools == [0] * 4
    runner.drop("a test")
    for _ in range(WARM_UP + 1):
        runner.run(run)
    assert pools == [0] * 4 + [1] * 2


def test_only_given_gpu_is_seeded(monkeypatch):
    generators = [Generator(), Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    seed_generator(torch.device("cpu"), 3, 2, 1)
    expected = torch.initial_seed()
    state = torch.get_rng_state()
    seed_generator(torch.device("cuda", 1), 3, 2, 1)
    assert [generator.seed for generator in generators] == [None, expected]
    seed_generator(torch.device("cuda"), 7, 2, 1)
    assert generators[0].seed not in (None, expected) and generators[1].seed == expected
    assert torch.equal(torch.get_rng_state(), state)
