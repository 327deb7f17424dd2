"""Whole training steps by kernels: the losses, totals and weights of the references."""

import pytest
import torch

import electra_fast as ef
from electra_fast import electra, ops
from electra_fast.electra import Backend
from electra_fast.optim import Optimizer
from electra_fast.step import TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

STEPS = 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def trained(corpus, config, execution="eager"):
    model = ef.Electra(config).to(DEVICE).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    step = TrainStep(model, optimizer, config, Backend("sdpa", torch.float32), execution)
    loader = ef.BatchLoader(corpus, sequence_length=32, batch_size=4)
    for number, rows in zip(range(STEPS), loader, strict=False):
        step(rows, number)
    step.synchronize()
    return model.state_dict(), step.sums


@pytest.fixture
def config(tiny_corpus):
    sizes = {"num_layers": 1, "hidden_size": 32, "embedding_size": 16, "num_heads": 2, "intermediate_size": 64}
    model = {"vocab_size": ef.Corpus(tiny_corpus).vocab_size, "dropout": 0.0, "attention_dropout": 0.0, **sizes}
    config = ef.Config.preset("tiny", "google").replace({"model": model, "generator": {"fraction": 1.0}})
    return config.replace({"train": {"batch_size": 4, "accumulate": 2, "steps": STEPS}})


@pytest.mark.parametrize("objective", [{}, {"name": "mlm"}, {"temperature": 1.5, "disallow_correct": True}])
def test_equals_the_references(tiny_corpus, config, objective):
    config = config.replace({"objective": objective})
    with ops.use_impl("reference"):
        weights, sums = trained(tiny_corpus, config)
    with ops.use_impl("kernel"):
        by_kernels, their_sums = trained(tiny_corpus, config)
    # Counts are equal unless a sample fell on a tie; losses and norms differ by rounding.
    torch.testing.assert_close(their_sums, sums, rtol=1e-4, atol=1e-3)
    assert their_sums[electra.SUMS.index("generator_loss")] > 0
    for name, weight in weights.items():
        torch.testing.assert_close(
            by_kernels[name], weight, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_is_reproducible(tiny_corpus, config):
    config = config.replace({"model": {"dropout": 0.1}})
    with ops.use_impl("kernel"):
        (weights, sums), (again, sums_again) = (trained(tiny_corpus, config) for _ in range(2))
    assert torch.equal(sums, sums_again)
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
