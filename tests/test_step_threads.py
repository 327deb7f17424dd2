"""Steps on a CPU by several threads: the same training as by one, repeatable to the bit."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import electra_fast as ef
from electra_fast.compute import ComputeConfig
from electra_fast.data.loader import BatchLoader
from electra_fast.training.optim import Optimizer
from electra_fast.training.step import TrainStep
from electra_fast.training.step_threads import choose_num_threads

CPU, COMPUTE = torch.device("cpu"), ComputeConfig("sdpa", torch.float32)
STEPS = 4


@pytest.fixture
def two_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def configured(corpus, recipe="google", **train):
    changes = {"vocab_size": ef.Corpus(corpus).vocab_size, "dropout": 0.0, "attention_dropout": 0.0}
    config = ef.Config.preset("tiny", recipe).replace({"model": changes})
    return config.replace({"train": {"batch_size": 12, "steps": STEPS} | train, "data": {"sequence_length": 64}})


def trained(corpus, config, num_threads, execution="eager", outgrow=False):
    model = ef.Electra(config).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    step = TrainStep(model, optimizer, config, COMPUTE, execution, num_threads)
    loader = BatchLoader(corpus, sequence_length=64, batch_size=12)
    for number, rows in zip(range(STEPS), loader, strict=False):
        if outgrow and number == 2:
            step.micro_batches.capacity = 0  # as if this batch had more segments than any before it
        step(rows, number)
    return model.state_dict(), step.read_totals(), step


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("recipe", ["google", "modern"])
@pytest.mark.parametrize(("num_threads", "accumulate"), [(2, 1), (3, 2)])
def test_threads_train_as_one(tiny_corpus, recipe, num_threads, accumulate):
    config = configured(tiny_corpus, recipe, accumulate=accumulate)
    weights, totals, _ = trained(tiny_corpus, config, 1)
    found, found_totals, _ = trained(tiny_corpus, config, num_threads)
    again, again_totals, _ = trained(tiny_corpus, config, num_threads)
    assert found_totals == pytest.approx(totals, rel=1e-4)
    assert found_totals == again_totals
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
        assert torch.equal(found[name], again[name]), name


@pytest.mark.usefixtures("two_cores")
def test_operations_have_one_thread_each_and_the_update_all(tiny_corpus, monkeypatch):
    config, seen = configured(tiny_corpus), []
    forward, update = ef.Electra.replaced_logits, Optimizer.step

    def note(what, function):
        return lambda *args: (seen.append((what, torch.get_num_threads())), function(*args))[1]

    monkeypatch.setattr(ef.Electra, "replaced_logits", note("forward", forward))
    monkeypatch.setattr(Optimizer, "step", note("update", update))
    trained(tiny_corpus, config, 2)
    assert sorted(set(seen)) == [("forward", 1), ("update", 2)]


@pytest.mark.usefixtures("two_cores")
def test_frozen_parameters_have_no_gradient(tiny_corpus):
    config = configured(tiny_corpus)
    model = ef.Electra(config).train()
    model.generator.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    step = TrainStep(model, Optimizer(model.named_parameters(), config.optimizer), config, COMPUTE, "eager", 2)
    step(next(BatchLoader(tiny_corpus, sequence_length=64, batch_size=12)), 3)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed and not any(name.startswith("generator.") for name in changed)


@pytest.mark.usefixtures("two_cores")
def test_an_error_in_a_thread_is_raised(tiny_corpus, monkeypatch):
    def fail(*_):
        raise ValueError("from a thread")

    monkeypatch.setattr(ef.Electra, "replaced_logits", fail)
    with pytest.raises(ValueError, match="from a thread"):
        trained(tiny_corpus, configured(tiny_corpus), 2)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_cores")
def test_compiles_once_for_all_threads_and_batches(tiny_corpus, monkeypatch):
    """One compilation serves both threads, both micro-batches, and a batch with more segments than any before it."""
    torch.compiler.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options))
    config = configured(tiny_corpus, accumulate=2)
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled, totals, step = trained(tiny_corpus, config, 2, "compile", outgrow=True)
    assert [(compilation.step, compilation.seconds > 0) for compilation in step.compilations] == [(0, True)]
    eager, expected, _ = trained(tiny_corpus, config, 1)
    assert totals == pytest.approx(expected, rel=1e-4, abs=1e-3)
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name], rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("two_cores")
def test_as_many_threads_as_torch_uses_that_divide_the_rows(monkeypatch):
    config = ef.Config.preset("tiny", "modern")
    assert choose_num_threads(config, CPU) == 2
    assert choose_num_threads(config, torch.device("cuda")) == 1
    assert choose_num_threads(config.replace({"train": {"batch_size": 15}}), CPU) == 1
    assert choose_num_threads(config.replace({"train": {"batch_size": 4, "accumulate": 4}}), CPU) == 1
    assert choose_num_threads(ef.Config.preset("tiny", "google"), CPU) == 1  # has dropout
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert choose_num_threads(config, CPU) == 8


@pytest.mark.usefixtures("two_cores")
def test_a_run_says_that_dropout_keeps_threads_from_sharing_a_step(tiny_corpus, tmp_path, capsys):
    config = ef.Config.preset("tiny", "google").replace({"train": {"steps": 1, "eval_every": 0, "precision": "fp32"}})
    ef.pretrain(config, data=tiny_corpus, out=tmp_path / "with")
    assert "--model.dropout 0 --model.attention_dropout 0" in capsys.readouterr().err
    ef.pretrain(
        config.replace({"model": {"dropout": 0.0, "attention_dropout": 0.0}}), data=tiny_corpus, out=tmp_path / "no"
    )
    assert "with dropout" not in capsys.readouterr().err


PAGE_FAULTS = """
import resource, torch
from electra_fast.training.allocator import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        tensors = [torch.ones(10_000_000) for _ in range(3)]  # above 32 MB, which glibc always returns
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
first = faults()
keep_freed_memory()
print(first, min(faults() for _ in range(4)))  # the heap grows at first
"""


@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc")
def test_freed_memory_is_kept(tmp_path):
    """In a process of its own, since the setting lasts; without huge pages, which need fewer faults anyway."""
    environment = {"PATH": "", "THP_MEM_ALLOC_ENABLE": "0", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PAGE_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    before, after = map(int, done.stdout.split())
    assert before > 10_000 and after < before / 20
