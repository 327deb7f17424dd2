"""A training step on CUDA tensors without data: devices, dtypes and shapes of the code that only runs on a GPU.

Fake tensors claim to be on a GPU, so kernels and the flash backend are chosen and their registered shapes
are used. Autograd's engine needs a real device; the backward passes are tested in the interpreter.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from variants import DIFFERENT

import electra_fast as ef
from electra_fast.card import Card
from electra_fast.kernels import launch
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.optimizers.optimizer import Optimizer


def on_cuda(x):
    """A tensor without data, in the fake mode that is active."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing runs in the other tests")


@pytest.mark.parametrize(
    ("recipe", "attention", "dropout", "optimizer"),
    [
        ("google", "varlen", 0.1, "lamb"),
        ("google", "sdpa", 0.0, "adamw"),
        ("modern", "short", 0.1, "muon"),
        ("modern", "varlen", 0.0, "adamw"),
    ],
)
def test_a_step_stays_on_the_device(tiny_corpus, recipe, attention, dropout, optimizer, monkeypatch):
    changes = {"optimizer": {"name": optimizer}, "model": {"dropout": dropout, "attention_dropout": dropout}}
    config = ef.Config.preset("tiny", recipe).replace(changes).resolved()
    check_step(tiny_corpus, config, attention, monkeypatch)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_step_of_every_objective_stays_on_the_device(tiny_corpus, name, monkeypatch):
    check_step(tiny_corpus, ef.Config.preset("tiny", "google").override(DIFFERENT[name]), "short", monkeypatch)


def fused_adamw(parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, *, lr, **_):
    """The requirements of CUDA's kernel, which has no fake form where the learning rate is a tensor."""
    lists = (gradients, exp_avgs, exp_avg_sqs)
    assert not max_exp_avg_sqs and len(steps) == len(parameters)
    for parameter, *rest in zip(parameters, *lists, strict=True):
        assert all(x.shape == parameter.shape and x.stride() == parameter.stride() for x in rest)
    assert all(x.is_cuda and x.dtype == torch.float32 for x in (*parameters, *sum(lists, []), *steps, lr))
    assert lr.dim() == 0 and all(step.dim() == 0 for step in steps)


def check_step(tiny_corpus, config, attention, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # asked by torch's flash attention
    monkeypatch.setattr(launch, "card", lambda _: Card("H200", (9, 0)))
    monkeypatch.setattr(torch, "_fused_adamw_", fused_adamw)
    config = config.replace({"model": {"vocab_size": ef.Corpus(tiny_corpus).vocab_size}})
    batch = ef.to_torch(next(ef.BatchLoader(tiny_corpus, sequence_length=32, batch_size=4)))
    network = ef.Electra(config).train()
    with FakeTensorMode():
        for module in network.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(on_cuda(parameter))
            for name, buffer in module._buffers.items():
                module._buffers[name] = on_cuda(buffer)
        batch = {name: on_cuda(tensor) for name, tensor in batch.items()}
        seed_and_step, first_row = (torch.zeros(shape, dtype=torch.int64, device="cuda:0") for shape in (2, ()))
        objective, compute = objective_of(config), ComputeConfig(attention, torch.bfloat16)
        key = RngKey(seed_and_step, first_row)
        denominators = objective.loss_denominators(batch)
        output = objective.forward(network, MicroBatch(batch, compute, key, denominators))
        found = output.predictions
        assert output.loss.dtype == torch.float32 and denominators["tokens"].dtype == torch.float64
        assert found is None or found.logits_T.shape == found.replaced_T.shape == (4 * 32,)
        predicted = [] if found is None else vars(found).values()
        for tensor in (output.loss, *output.totals.values(), *predicted, *denominators.values()):
            assert tensor.is_cuda
        for parameter in network.parameters():
            parameter.grad = torch.empty_like(parameter)
        assert Optimizer(network.named_parameters(), config.optimizer).step().is_cuda
