"""The memory of a training step, counted on tensors without data."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import electra_fast as ef
from electra_fast.card import Card
from electra_fast.hardware import memory
from electra_fast.hardware.memory import StepMemory, _LiveBytes, choose_accumulate
from electra_fast.kernels import launch
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops.operations import use_impl
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.optimizers.rules import RULES

CPU = torch.device("cpu")
CUDA = torch.device("cuda:0")
SHORT = ComputeConfig("short", torch.bfloat16)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="estimates for a GPU that is missing")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # asked by torch's flash attention
    monkeypatch.setattr(launch, "card", lambda _: Card("NVIDIA H100", (9, 0)))


def of_preset(name, recipe, **changes):
    return ef.Config.preset(name, recipe).override({"model.vocab_size": 30522} | changes)


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_saved_bytes_match_hooks(tiny_corpus, recipe):
    """The hooks see real tensors, of kernels in the interpreter."""
    sizes = {"model.vocab_size": ef.Corpus(tiny_corpus).vocab_size, "model.num_layers": 1}
    config = ef.Config.preset("tiny", recipe).override(sizes)
    compute = ComputeConfig("short", torch.float16)
    batch = ef.to_torch(next(ef.BatchLoader.from_config(config, corpus=tiny_corpus, batch_size=2)))
    model = ef.Electra(config).train()
    objective = objective_of(config)
    existing = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *batch.values())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in existing:
            saved[storage._cdata] = storage
        return tensor

    with use_impl("kernel"):
        key = RngKey(torch.tensor([0, 0]))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = objective.forward(model, MicroBatch(batch, compute, key, objective.loss_denominators(batch)))
        step = StepMemory(config, compute, CPU)
        counted = step.forward(2)[0] + sum(cast.nbytes for cast in step._casts.copies)
    assert output.loss.isfinite()
    assert counted == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.02)


@pytest.mark.parametrize(
    ("name", "recipe", "attention", "kib"),
    [("small", "google", "short", 110.3), ("base", "google", "varlen", 399.4), ("tiny", "google", "flex", 3.5)],
)
def test_counts_match_measurements_on_gpu(hopper, name, recipe, attention, kib):
    step = StepMemory(of_preset(name, recipe), ComputeConfig(attention, torch.bfloat16), CUDA)
    assert step.bytes_per_token() / 1024 == pytest.approx(kib, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "flex"])
def test_base_deberta_fits_16_gib(hopper, attention):
    config = of_preset("base", "deberta", **{"model.vocab_size": 128100, "train.batch_size": 256})
    memory = StepMemory(config, ComputeConfig(attention, torch.bfloat16), CUDA)
    accumulate, num_rows, does_fit = memory.min_micro_batches(15 << 30)
    assert does_fit and num_rows * accumulate == 256


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_estimate_covers_backward_pass(recipe):
    """Runs on the CPU, since a backward pass on tensors without data needs a device for its threads."""
    config = of_preset("small", recipe, **{"model.num_layers": 3})
    with use_impl("kernel"):
        step = StepMemory(config, SHORT, CPU)
        saved, working = step.forward(64)
        with step._mode:
            batch = step._batch(64)
            key = RngKey(torch.zeros(2, dtype=torch.int64))
            existing = (*step._model.parameters(), *step._casts.copies, *batch.values())
            for parameter in step._model.train().parameters():
                parameter.grad = torch.empty_like(parameter)
            objective = objective_of(config)
            denominators = objective.loss_denominators(batch)
            with step._casts.current(), _LiveBytes(existing) as live:
                objective.forward(step._model, MicroBatch(batch, SHORT, key, denominators)).loss.backward()
        estimate = step.parts(64)["activations"] - working
    assert saved < live.peak < estimate < 1.1 * live.peak


@pytest.mark.parametrize("rule", RULES)
def test_update_bytes_of_each_rule(rule):
    config = of_preset("small", "modern", **{"optimizer.name": rule, "model.vocab_size": "8192"}).resolved()
    with FakeTensorMode():
        model = ef.Electra(config)
        optimizer = Optimizer(model.named_parameters(), config.optimizer)
        optimizer.set_step_scalars(1.0)
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        moments = (*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values())
        with _LiveBytes((*parameters, *(parameter.grad for parameter in parameters), *moments)) as live:
            optimizer.step()
    assert live.peak / sum(parameter.numel() for parameter in parameters) < RULES[rule].update_bytes + 0.01


def test_sharding_divides_constant_memory(hopper):
    config = of_preset("base", "google", **{"train.sharding": "full"})
    varlen = ComputeConfig("varlen", torch.bfloat16)
    whole, quarter = (StepMemory(config, varlen, CUDA, size).parts(1) for size in (1, 4))
    whole, quarter = (sum(parts[name] for name in ("parameters", "gradients", "moments")) for parts in (whole, quarter))
    assert 0.3 * whole < quarter < 0.7 * whole


class TestAccumulate:
    @pytest.fixture
    def fits(self, hopper, monkeypatch):
        """Returns a function that sets the free memory to the memory of a step with some rows."""

        def set_free(config, num_rows, world_size=1):
            needed = StepMemory(config, SHORT, CUDA, world_size).step(num_rows)
            monkeypatch.setattr(memory, "free_bytes", lambda _: needed / 0.9 + 1)

        return set_free

    def test_largest_fitting_micro_batch_chosen(self, fits):
        config = of_preset("tiny", "google", **{"train.batch_size": "64"})
        fits(config, 16)
        accumulate, line = choose_accumulate(config, SHORT, CUDA)
        assert accumulate == 4
        assert line.startswith("train.accumulate = auto: 4 micro-batches of 16 rows, about 1.")
        assert choose_accumulate(config.override({"train.accumulate": "8"}), SHORT, CUDA)[0] == 8
        fits(config, 16, 3)
        assert choose_accumulate(config, SHORT, CUDA, 3)[0] == 2  # of 11 rows; 22 do not fit
        assert choose_accumulate(config, SHORT, CPU) == (1, "")

    def test_too_large_single_row_refused(self, fits):
        config = of_preset("tiny", "google", **{"train.batch_size": "64"})
        fits(config, 1)
        assert choose_accumulate(config, SHORT, CUDA)[0] == 64
        fits(config, 0)
        with pytest.raises(ef.InputError, match=r"1 row of 128 tokens needs about 1.* GiB .*; choose a smaller model"):
            choose_accumulate(config, SHORT, CUDA)
