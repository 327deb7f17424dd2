"""A step on tensors at fixed addresses: equal to a step in plain torch, and without synchronization with the host."""

import itertools
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from variants import DIFFERENT, VARIANTS

import electra_fast as ef
from electra_fast.data.loader import BatchLoader, HostBatch, MicroBatches, to_torch
from electra_fast.hardware.kernel_check import STEP, Checker, Request
from electra_fast.hardware.settings import choose_execution
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.optimizers.optimizer import Optimizer, lr_scale
from electra_fast.training.parallel_step import create_step, time_steps
from electra_fast.training.step import GRAD_NORM, SKIPPED
from electra_fast.training.timing import StepTimer

COMPUTE = ComputeConfig("sdpa", torch.float32)
STEPS = 4


@pytest.fixture
def config(tiny_corpus):
    changes = {"model.vocab_size": str(ef.Corpus(tiny_corpus).vocab_size), "model.num_layers": "2"}
    config = ef.Config.preset("tiny", "google").override(changes)
    return config.override({"train.batch_size": 8, "train.steps": STEPS, "data.sequence_length": 64})


def open_loader(corpus, config):
    return BatchLoader(corpus, sequence_length=config.data.sequence_length, batch_size=config.train.batch_size)


def trained(corpus, config, execution="eager"):
    """Returns weights and metric totals after some steps."""
    model = ef.Electra(config).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    step = create_step(model, optimizer, config, COMPUTE, execution)
    for number, rows in zip(range(STEPS), open_loader(corpus, config), strict=False):
        step(rows, number)
    return model.state_dict(), step.read_totals()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_equals_step_in_plain_torch(tiny_corpus, config, accumulate):
    config = config.override({"train.accumulate": accumulate})
    model = ef.Electra(config).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    objective = objective_of(config)
    size = 8 // accumulate
    totals = dict.fromkeys((*objective.metric_totals, GRAD_NORM, SKIPPED), 0.0)
    for number, rows in zip(range(STEPS), open_loader(tiny_corpus, config), strict=False):
        whole = to_torch(rows)
        torch.manual_seed((config.train.seed * 0x9E3779B97F4A7C15 + number) % 2**63)
        optimizer.zero_grad()
        for i in range(accumulate):
            batch = {name: tensor[i * size : (i + 1) * size] for name, tensor in whole.items()}
            key = RngKey(torch.tensor([config.train.seed, number]), i * size)
            denominators = objective.loss_denominators(whole)
            output = objective.forward(model, MicroBatch(batch | {"cu_seqlens": None}, COMPUTE, key, denominators))
            output.loss.backward()
            for name, total in output.totals.items():
                totals[name] += total.item()
        optimizer.set_step_scalars(lr_scale(config.optimizer, number, STEPS))
        totals[GRAD_NORM] += optimizer.step().item()
    weights, totals_of_steps = trained(tiny_corpus, config)
    assert totals_of_steps == totals
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("recipe", ["google", "modern"])
def test_ordinary_step_stays_in_few_files(tiny_corpus, tmp_path, monkeypatch, recipe):
    """Counts the files of the package whose functions a step of `pretrain` calls, and the changes between files.

    The step is on a CPU, from one batch to the next, and no event is due after it.
    """
    files = []
    batches = itertools.count(1)
    next_batch = BatchLoader.__next__

    def record(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(Path(ef.__file__).parent)):
            files.append(frame.f_code.co_filename)

    def recording_the_12th_step(loader):
        sys.setprofile(None)
        batch = next_batch(loader)
        if next(batches) == 12:
            sys.setprofile(record)
        return batch

    monkeypatch.setattr(BatchLoader, "__next__", recording_the_12th_step)
    train = {"steps": 20, "batch_size": 16, "log_every": 100, "precision": "fp32", "matmul": "default"}
    config = ef.Config.preset("tiny", recipe).override(train, sequence_length=64)
    ef.pretrain(tiny_corpus, config=config, out=tmp_path / "run")
    num_changes = sum(before != after for before, after in itertools.pairwise(files))
    assert 5 < len(set(files)) <= 15 and 100 < num_changes <= 170


class NoSynchronization(TorchDispatchMode):
    """Fails if an operation reads from the device, has a shape that depends on values, or creates a constant."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        banned = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "bincount")
        assert not any(word in name for word in banned), f"{name} can't be captured"
        return func(*args, **(kwargs or {}))


OPTIMIZERS = {name: {"optimizer.name": name} for name in ("lamb", "muon")}


@pytest.mark.parametrize("name", [*DIFFERENT, *OPTIMIZERS])
def test_step_is_capturable(tiny_corpus, config, name):
    config = config.override((DIFFERENT | OPTIMIZERS)[name])
    model = ef.Electra(config)
    optimizer = Optimizer(model.named_parameters(), config.optimizer)
    step = create_step(model, optimizer, config, COMPUTE)
    rows = open_loader(tiny_corpus, config)
    step(next(rows), STEPS - 2)  # in the second of two stages; the first has steps of `mlm`
    tensors = [*model.parameters(), optimizer._state.scalars]
    tensors += [*optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
    tensors += [tensor for part in step.backward.micro_batches.parts for tensor in part.values()]
    places = [tensor.data_ptr() for tensor in tensors]
    with NoSynchronization():
        step.run()
    step(next(rows), STEPS - 1)
    assert [tensor.data_ptr() for tensor in tensors] == places


def assert_captured_in_time(step, since):
    """Asserts a capture three steps after each of `since`, or four if the second batch has more segments."""
    captures = [capture.step for capture in step.graphs.captures]
    assert len(captures) == len(since)
    assert all(capture - begin in (3, 4) for capture, begin in zip(captures, since, strict=True)), captures


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on CUDA only")
@pytest.mark.parametrize("name", VARIANTS)
def test_graphs_equal_eager_steps(tiny_corpus, config, name):
    """Each of two stages has a separate graph."""
    config = config.override(VARIANTS[name]).override({"train.steps": 16})
    totals = []
    for execution in ("eager", "graph"):
        model = ef.Electra(config).to("cuda")
        optimizer = Optimizer(model.named_parameters(), config.optimizer)
        step = create_step(model, optimizer, config, COMPUTE, execution)
        for number, rows in zip(range(16), open_loader(tiny_corpus, config), strict=False):
            step(rows, number)
        totals.append(step.read_totals())
        stages = [0, 8] if name == "two-stage" else [0]
        assert_captured_in_time(step, stages if execution == "graph" else [])
    assert totals[0] == totals[1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are captured on CUDA only")
def test_graph_recaptured_when_batch_outgrows_it(tiny_corpus, config):
    config = config.override({"train.steps": 12, "model.dropout": 0.1, "model.attention_dropout": 0.0})
    totals = []
    for execution in ("eager", "graph"):
        model = ef.Electra(config).to("cuda").train()
        optimizer = Optimizer(model.named_parameters(), config.optimizer)
        step = create_step(model, optimizer, config, COMPUTE, execution)
        for number, rows in zip(range(12), open_loader(tiny_corpus, config), strict=False):
            if number == 6:
                step.backward.micro_batches.capacity = 0  # as if this batch had more segments than any before it
            step(rows, number)
        step.synchronize()
        totals.append(step.read_totals())
        assert_captured_in_time(step, [0, 6] if execution == "graph" else [])
    assert totals[0] == totals[1]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "all-tokens-mlm" else pytest.mark.slow)
        for name in DIFFERENT
        if name != "electra"
    ],
)
def test_compiles_without_graph_break(tiny_corpus, config, monkeypatch, name):
    """`fullgraph` fails at the first operation that torch.compile cannot trace. The backend runs eager code."""
    torch.compiler.reset()  # other tests compile the same function
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: real(f, backend="aot_eager", **options))
    changes = {"model.dropout": "0", "model.attention_dropout": "0", "train.accumulate": "4", "model.num_layers": "1"}
    config = config.override(DIFFERENT[name] | changes)
    with torch._dynamo.config.patch(recompile_limit=1):  # one graph serves all micro-batches of a stage
        compiled, totals = trained(tiny_corpus, config, "compile")
    eager, expected = trained(tiny_corpus, config)
    assert totals == pytest.approx(expected, rel=1e-4, abs=1e-3)
    for name in eager:
        torch.testing.assert_close(compiled[name], eager[name], rtol=1e-3, atol=1e-4)


THIRDS = [range(0, 4), range(4, 8), range(8, 12)]


def test_micro_batches_partition_batch(corpus):
    """Each part holds its rows and their segments. Addresses stay the same until tensors must grow."""
    loader = BatchLoader(corpus, sequence_length=32, batch_size=12)
    parts = MicroBatches(torch.device("cpu"), THIRDS)
    places = None
    versions = set()
    for rows in itertools.islice(loader, 60):
        parts.load(HostBatch.of(rows))
        whole = to_torch(rows)
        for i, part in enumerate(parts.parts):
            for name in part.keys() - {"cu_seqlens"}:
                assert torch.equal(part[name], whole[name][4 * i : 4 * i + 4]), name
            ends = part["cu_seqlens"]
            assert ends[0] == 0 and ends[-1] == 4 * 32 and (ends.diff() >= 0).all()
            segments = whole["segment_ids"][4 * i : 4 * i + 4].flatten().numpy()
            starts = np.flatnonzero(np.diff(segments, prepend=-1) | (np.arange(128) % 32 == 0))
            assert ends.unique().tolist() == [*starts.tolist(), 128]
        now = [tensor.data_ptr() for part in parts.parts for tensor in part.values()]
        assert now == places or parts.version not in versions
        versions.add(parts.version)
        places = now
    assert parts.version == max(versions) < 10


def test_wrong_number_of_rows_refused(corpus):
    loader = BatchLoader(corpus, sequence_length=32, batch_size=10)
    with pytest.raises(ValueError, match="the batch has 10 rows, expected 12"):
        MicroBatches(torch.device("cpu"), THIRDS).load(HostBatch.of(next(loader)))


def test_unavailable_execution_refused():
    assert choose_execution("auto", torch.device("cpu")) == "eager"
    assert choose_execution("auto", torch.device("cuda")) == "graph"
    with pytest.raises(ValueError, match='train.execution = "graph": needs a CUDA device'):
        choose_execution("graph", torch.device("cpu"))


def test_timer_excludes_pauses(tiny_corpus, config):
    model = ef.Electra(config)
    step = create_step(model, Optimizer(model.named_parameters(), config.optimizer), config, COMPUTE)
    timer = StepTimer(step)
    loader = open_loader(tiny_corpus, config)
    assert timer.take_step_times() is None
    seconds = 0.0
    for num_steps in (1, 2):
        timer.start()
        for _ in range(num_steps):
            time.sleep(0.01)
            step(next(loader), 0)
        seconds += timer.stop()
        time.sleep(0.2)  # an evaluation, say
    times = timer.take_step_times()
    assert 0.01 <= times.median <= times.longest <= seconds and times.median + times.longest <= seconds
    assert timer.take_step_times() is None


def test_check_times_whole_steps(tiny_corpus, config):
    """The request for the separate process includes the function that times steps."""
    config = config.override({"data.corpus": str(tiny_corpus)})
    messages = []
    compute = replace(COMPUTE, kernels=(("*", "reference"),))
    request = Request("steps", config, type(objective_of(config)), "cpu", compute, 2, ("eager",), time_steps=time_steps)
    request = pickle.loads(pickle.dumps(request))
    assert request.time_steps is time_steps
    Checker(request, messages.append).answer()
    attempt, record = messages
    assert attempt == (STEP, "eager") and record.is_right and record.milliseconds > 0
    first, second = (time_steps(config, compute, "eager", torch.device("cpu"), 2) for _ in range(2))
    assert len(first[0]) == 2 and first[1] == second[1] and GRAD_NORM in first[1]
