"""A training step on CUDA tensors without data: devices, dtypes and shapes of the code that runs only on a GPU.

Fake tensors claim to be on a GPU, so kernels and the flash backend are chosen and their registered shapes are used.
Autograd's engine needs a real device; the interpreter tests the backward passes.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from variants import DIFFERENT

import electra_fast as ef
from electra_fast.card import Card
from electra_fast.config.presets import RECIPES
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.model import Inputs
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.hardware.kernel_check import REFERENCE, Checker, Record, Request, matrices
from electra_fast.hardware.kernel_choice import KernelCheck, _encoder_config
from electra_fast.hardware.memory import StepMemory
from electra_fast.kernels import launch
from electra_fast.model import compute as compute_module
from electra_fast.model.compute import ComputeConfig, available_attention, choose_compute, choose_precision
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.ops.operations import choice_key, observe, use_choices, use_impl
from electra_fast.ops.weight_casts import WeightCasts
from electra_fast.optimizers.optimizer import Optimizer

CUDA = torch.device("cuda:0")


def on_cuda(x):
    """Returns a tensor without data, in the active fake mode."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda:0")


pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the real thing runs in the other tests")


@pytest.mark.parametrize(
    ("recipe", "attention", "dropout", "optimizer"),
    [
        ("google", "varlen", 0.1, "lamb"),
        ("google", "sdpa", 0.0, "adamw"),
        ("modern", "short", 0.1, "muon"),
        ("modern", "varlen", 0.0, "adamw"),
        ("deberta", "sdpa", 0.1, "adamw"),
    ],
)
def test_step_stays_on_the_device(tiny_corpus, recipe, attention, dropout, optimizer, monkeypatch):
    changes = {"optimizer.name": optimizer, "model.dropout": dropout, "model.attention_dropout": dropout}
    config = ef.Config.preset("tiny", recipe).override(changes).resolved()
    check_step(tiny_corpus, config, attention, monkeypatch)


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_objective_stays_on_the_device(tiny_corpus, name, monkeypatch):
    check_step(tiny_corpus, ef.Config.preset("tiny", "google").override(DIFFERENT[name]), "short", monkeypatch)


def fused_adamw(parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, *, lr, **_):
    """Checks the requirements of CUDA's kernel, which has no fake form if the learning rate is a tensor."""
    lists = (gradients, exp_avgs, exp_avg_sqs)
    assert not max_exp_avg_sqs and len(steps) == len(parameters)
    for parameter, *rest in zip(parameters, *lists, strict=True):
        assert all(x.shape == parameter.shape and x.stride() == parameter.stride() for x in rest)
    assert all(x.is_cuda and x.dtype == torch.float32 for x in (*parameters, *sum(lists, []), *steps, lr))
    assert lr.dim() == 0 and all(step.dim() == 0 for step in steps)


def move(network):
    """Replaces a network's parameters and buffers by tensors without data."""
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(on_cuda(parameter))
        for name, buffer in module._buffers.items():
            module._buffers[name] = on_cuda(buffer)


def check_step(tiny_corpus, config, attention, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))  # torch's flash attention reads it
    monkeypatch.setattr(launch, "card", lambda _: Card("H200", (9, 0)))
    monkeypatch.setattr(torch, "_fused_adamw_", fused_adamw)
    config = config.override({"model.vocab_size": ef.Corpus(tiny_corpus).vocab_size})
    batch = ef.to_torch(next(ef.BatchLoader(tiny_corpus, sequence_length=32, batch_size=4)))
    network = ef.Electra(config).train()
    with FakeTensorMode():
        move(network)
        batch = {name: on_cuda(tensor) for name, tensor in batch.items()}
        seed_and_step, first_row = (torch.zeros(shape, dtype=torch.int64, device="cuda:0") for shape in (2, ()))
        objective = objective_of(config)
        compute = ComputeConfig(attention, torch.bfloat16)
        key = RngKey(seed_and_step, first_row)
        denominators = objective.loss_denominators(batch)
        output = objective.forward(network, MicroBatch(batch, compute, key, denominators))
        predictions = output.predictions
        assert output.loss.dtype == torch.float32 and denominators["tokens"].dtype == torch.float64
        assert predictions is None or predictions.logits_T.shape == predictions.replaced_T.shape == (4 * 32,)
        predicted = [] if predictions is None else vars(predictions).values()
        for tensor in (output.loss, *output.totals.values(), *predicted, *denominators.values()):
            assert tensor.is_cuda
        for parameter in network.parameters():
            parameter.grad = torch.empty_like(parameter)
        assert Optimizer(network.named_parameters(), config.optimizer).step().is_cuda


CARDS = {"H100": (9, 0), "A100": (8, 0), "L4": (8, 9), "T4": (7, 5)}
GRID = [(recipe, card, {}) for recipe in RECIPES for card in CARDS]
GRID += [("modern", "H100", {"model.attention": name}) for name in ("varlen", "sdpa")]
GRID += [(recipe, "H100", {"data.sequence_length": "512", "model.max_positions": "512"}) for recipe in RECIPES]
GRID += [("modern", "H100", {"model.local_attention": "16"})]
GRID += [("modern", "H100", {"model.dropout": "0.1", "model.attention_dropout": "0.1"})]
GRID += [("google", "H100", changes) for changes in DIFFERENT.values()]


class FinishedCheck(Checker):
    """Reports every kernel as right and faster than its reference; `expected` has calls outside of fused sublayers."""

    def __init__(self, *args):
        super().__init__(*args)
        self.expected = Counter()
        self.depth = 0
        self.compares_shapes = False

    def _observe(self, name, function, args, kwargs):
        is_fused = name.endswith("feed_forward") or (name == "attention" and args[3].backend == "short")
        if not self.depth and name != "linear":
            self.expected[key_of(name, args)] += 1
        self.depth += is_fused
        try:
            return super()._observe(name, function, args, kwargs)
        finally:
            self.depth -= is_fused

    def _compare(self, key, reference, calls):
        """Also compares kernels, the reference and fp32, but only forward, since autograd's engine needs a device."""
        if self.compares_shapes:
            of_reference = self.results(reference)
            assert [x[0] for x in self.results(reference, dtype=torch.float32)] == [x[0] for x in of_reference]
            assert all(self.results(call, {"*": "kernel", key: name}) == of_reference for name, call in calls.items())
        times = {REFERENCE: 2.0, "sdpa": 1.9, "fused": 1.9, "pipelined": 1.9, "apart": 1.9}
        for name in (REFERENCE, *calls):
            self.report(Record(key, name, times.get(name, 1.0)))

    @staticmethod
    def results(call, choices=None, dtype=None):
        with observe(None), use_impl(None if choices else "reference"), use_choices(choices or {}):
            outputs = call.outputs(dtype)[0]
        return [(x.shape, None if dtype else x.dtype, x.requires_grad, x.device) for x in outputs]


def key_of(name, args):
    return choice_key(name, next(matrices(args), None))


class Launches(TorchDispatchMode):
    """Counts the launches of our kernels."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.namespace == "electra_fast"
        return func(*args, **(kwargs or {}))


def pretend(monkeypatch, card):
    gpu = Card(card, CARDS[card])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: gpu.capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(launch, "card", lambda _: gpu)
    monkeypatch.setattr(compute_module, "card_of", lambda _: gpu)


def checked(check, step, config, compute, backends=(), compares_shapes=False):
    """Adds the records of a check of attention backends, or of operations, and returns the calls that it expects."""
    records = []
    subject = "attention" if backends else "operations"
    checker = FinishedCheck(Request(subject, config, None, "cuda:0", compute, 2, tuple(backends)), records.append)
    checker.batch = step._batch(2)
    checker.compares_shapes = compares_shapes
    checker.observe(step._model.train(), on_cuda(torch.zeros(2, dtype=torch.int64)))
    check.records |= {(record.operation, record.implementation): record for record in records}
    return checker.expected


@pytest.mark.parametrize(
    ("recipe", "card", "changes"),
    [pytest.param(*case, marks=() if case[1:] == ("H100", {}) else pytest.mark.slow) for case in GRID],
)
def test_step_makes_the_checked_calls(recipe, card, changes, monkeypatch):
    """Checks the number of each operation's calls, and the kernel of each operation that was faster with one.

    Each recipe runs on each card with its fastest attention; other backends and every operation of the objectives
    run on one. (`flex` and `xformers` do not accept such tensors; they call the same operations as `varlen`.)
    """
    pretend(monkeypatch, card)
    keys = {"model.num_layers": "2" if "model.local_attention" in changes else "1", "model.vocab_size": "300"}
    config = ef.Config.preset("tiny", recipe).override(keys | {"data.corpus": "shards"} | changes)
    config = config.override({"train.precision": choose_precision("auto", CUDA)})
    requested = [config.model.attention] if "model.attention" in changes else available_attention(config, CUDA)
    requested = [name for name in requested if name in ("short", "varlen", "sdpa")]
    check = KernelCheck({})
    step = StepMemory(config, choose_compute(config, CUDA), CUDA)
    with step._mode:
        compares = card == "H100" and not changes
        checked(check, step, config, replace(choose_compute(config, CUDA), attention="sdpa"), requested, compares)
        compute = choose_compute(config.override({"model.attention": check.attention(requested)}), CUDA)
        expected = checked(check, step, config, compute, compares_shapes=compares)
        calls = Counter()
        launched = Counter()
        chosen = check.kernels

        def count(name, function, args, kwargs):
            before = launches.number
            output = function(*args, **kwargs)
            if name != "linear":  # its kernel is torch's
                calls[key_of(name, args)] += 1
                launched[key_of(name, args)] += launches.number > before
            return output

        with use_choices(chosen), Launches() as launches, observe(count):
            casts = WeightCasts(step._model, compute.dtype)
            for stage in objective_of(config).stages():
                batch = step._batch(2)
                key = RngKey(on_cuda(torch.zeros(2, dtype=torch.int64)))
                denominators = stage.objective.loss_denominators(batch)
                stage.objective.forward(step._model, MicroBatch(batch, compute, key, denominators))
    assert len(casts.copies) == sum(isinstance(module, torch.nn.Linear) for module in step._model.modules())
    assert calls == expected and REFERENCE not in chosen.values()
    assert {key: launched[key] for key in calls if key in chosen} == {key: calls[key] for key in calls if key in chosen}


TASKS = [
    ("google", "classification", "published"),
    ("google", "classification", "transformers"),
    ("google", "question-answering", "published"),
    ("modern", "classification", "transformers"),
]
TASKS += [(recipe, "tagging", head) for recipe, head in (("google", "transformers"), ("modern", "published"))]


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize(("recipe", "kind", "head"), TASKS)
def test_fine_tuning_makes_only_checked_calls(recipe, kind, head, attention, monkeypatch):
    """Strictly: another operation would raise an error."""
    pretend(monkeypatch, "H100")
    shape = ef.Config.preset("tiny", recipe).override({"model.num_layers": "2", "model.vocab_size": "300"}).model
    compute = ComputeConfig(attention, torch.bfloat16)
    check = KernelCheck({})
    config = _encoder_config(shape, compute, 64, 2)
    step = StepMemory(config, compute, CUDA)
    model = TASK_TYPES[kind].model(shape, FinetuneSection(head=head, head_dropout=0.1), 3).train()
    with step._mode:
        checked(check, step, config, compute)
        move(model)
        integers = on_cuda(torch.zeros(5, 2, 64, dtype=torch.int32))
        first_n = on_cuda(torch.zeros(4, dtype=torch.int64))
        inputs = Inputs(integers, integers[0, 0, :3], first_n, first_n, 64)
        key = RngKey(on_cuda(torch.zeros(2, dtype=torch.int64))).dropout_key(0)
        with use_choices(check.kernels), Launches() as launches:
            WeightCasts(model.encoder, compute.dtype)
            if kind == "question-answering":
                model.losses(inputs, on_cuda(torch.zeros(4, 3, dtype=torch.int64)), compute, key)
            else:
                model.outputs(inputs, compute, key)
    assert launches.number > 5
