"""Whole training steps with kernels have the losses, totals and weights of the references."""

import pytest
import torch
from comparison import DEVICE
from variants import DIFFERENT

import electra_fast as ef
from electra_fast.model.compute import ComputeConfig
from electra_fast.ops.operations import use_impl
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training.parallel_step import create_step


def trained(corpus, config, attention="sdpa"):
    """Returns weights and totals at the end of the run."""
    model = ef.Electra(config).to(DEVICE).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    step = create_step(model, optimizer, config, ComputeConfig(attention, torch.float32), "eager", num_processes=1)
    loader = ef.BatchLoader(corpus, sequence_length=32, batch_size=4)
    for number, rows in zip(range(config.train.steps), loader, strict=False):
        step(rows, number)
    for parameter in model.parameters():  # as torch's fused AdamW requires on CUDA
        assert parameter.grad is None or parameter.grad.stride() == parameter.stride()
    return model.state_dict(), step.read_totals()


@pytest.fixture
def config(tiny_corpus):
    sizes = {"num_layers": 1, "hidden_size": 32, "embedding_size": 16, "num_heads": 2, "intermediate_size": 64}
    model = {"vocab_size": ef.Corpus(tiny_corpus).vocab_size, "dropout": 0.0, "attention_dropout": 0.0, **sizes}
    config = ef.Config.preset("tiny", "google").override({f"model.{name}": value for name, value in model.items()})
    return config.override({"train.batch_size": 4, "train.accumulate": 2, "train.steps": 1, "generator.fraction": 1.0})


MORE = {"electra": {"objective.temperature": "1.5", "objective.disallow_correct": "true"}}


# The objective with two stages has the operations of the others.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "electra" else pytest.mark.slow)
        for name in DIFFERENT
        if name != "two-stage"
    ],
)
def test_equals_references(tiny_corpus, config, name):
    check(tiny_corpus, config.override(DIFFERENT[name] | MORE.get(name, {})))


def check(corpus, config, attention="sdpa"):
    with use_impl("reference"):
        weights, totals = trained(corpus, config)
    with use_impl("kernel"):
        by_kernels, their_totals = trained(corpus, config, attention)
    # Counts are equal unless there is a tie in a sample; losses and norms differ by rounding.
    assert their_totals == pytest.approx(totals, rel=1e-4, abs=1e-3)
    assert totals["grad_norm"] > 0
    for name, weight in weights.items():
        torch.testing.assert_close(
            by_kernels[name], weight, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="compares in fp32, which this backend has not on a GPU")
def test_short_attention_equals_its_reference(tiny_corpus, config):
    """With two networks and without dropout, whose keys only kernels have on a CPU."""
    check(tiny_corpus, config.override({"model.architecture": "modernbert"}), "short")
