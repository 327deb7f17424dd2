"""The memory of a training step, counted on tensors without data."""

import pytest
import torch

import electra_fast as ef
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops.choice import use_impl
from electra_fast.training.memory import StepMemory, _LiveBytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
SHORT = ComputeConfig("short", torch.bfloat16)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counts as a GPU that is not there would")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")


def of_preset(name, recipe, **changes):
    return ef.Config.preset(name, recipe).override({"model.vocab_size": 30522} | changes)


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_equals_the_tensors_that_hooks_see_saved(tiny_corpus, recipe):
    """Real tensors and kernels, in the interpreter."""
    sizes = {"model.vocab_size": ef.Corpus(tiny_corpus).vocab_size, "model.num_layers": 1}
    config, compute = ef.Config.preset("tiny", recipe).override(sizes), ComputeConfig("short", torch.float16)
    batch = ef.to_torch(next(ef.BatchLoader.from_config(config, corpus=tiny_corpus, batch_size=2)))
    model, objective = ef.Electra(config).train(), objective_of(config)
    given = {each.untyped_storage()._cdata for each in (*model.parameters(), *batch.values())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in given:
            saved[storage._cdata] = storage
        return tensor

    with use_impl("kernel"):
        key = RngKey(torch.tensor([0, 0]))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = objective.forward(model, MicroBatch(batch, compute, key, objective.loss_denominators(batch)))
        memory = StepMemory(config, compute, CPU)
        counted = memory.forward(2)[0] + sum(each.nbytes for each in memory._casts.copies)
    assert output.loss.isfinite()
    assert counted == pytest.approx(sum(each.nbytes() for each in saved.values()), rel=0.02)


@pytest.mark.parametrize(
    ("name", "recipe", "attention", "kib"),
    [("small", "google", "short", 110.3), ("base", "google", "varlen", 399.4), ("tiny", "google", "flex", 3.5)],
)
def test_counts_as_on_a_gpu(hopper, name, recipe, attention, kib):
    memory = StepMemory(of_preset(name, recipe), ComputeConfig(attention, torch.bfloat16), CUDA)
    assert memory.bytes_per_token() / 1024 == pytest.approx(kib, rel=0.02)


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_the_estimate_covers_the_backward_pass(recipe):
    """A backward pass on tensors without data needs a device for its threads, so this one is the CPU's."""
    config = of_preset("small", recipe, **{"model.num_layers": 3})
    with use_impl("kernel"):
        memory = StepMemory(config, SHORT, CPU)
        saved, working = memory.forward(64)
        with memory._mode:
            batch, key = memory._batch(64), RngKey(torch.zeros(2, dtype=torch.int64))
            given = (*memory._model.parameters(), *memory._casts.copies, *batch.values())
            for each in memory._model.train().parameters():
                each.grad = torch.empty_like(each)
            objective = objective_of(config)
            denominators = objective.loss_denominators(batch)
            with memory._casts.current(), _LiveBytes(given) as live:
                objective.forward(memory._model, MicroBatch(batch, SHORT, key, denominators)).loss.backward()
        estimate = memory.step(64) - memory._constant() - (1 << 30) - working
    assert saved < live.peak < estimate < 1.1 * live.peak


def test_sharding_divides_what_is_constant(hopper):
    whole, quarter = (
        StepMemory(of_preset("base", "google", **{"train.sharding": "full"}), SHORT, CUDA, size)._constant()
        for size in (1, 4)
    )
    assert 0.3 * whole < quarter < 0.7 * whole
