"""Steps on a CPU by several processes: the same training as by one, repeatable to the bit, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_objectives
import torch
from tiny_run import STEPS, assert_same_run, command, tiny_config, truncate

import electra_fast as ef
from electra_fast.data.loader import BatchLoader, HostBatch
from electra_fast.errors import Interrupted, TrainingFailed
from electra_fast.files import checkpoint_folder
from electra_fast.interruption import stop_requests
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.matmul import DEFAULT, ONEDNN, has_onednn
from electra_fast.model.model import DiscriminatorHead
from electra_fast.objectives import objective_of
from electra_fast.optimizers import muon
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training import step_processes
from electra_fast.training.parallel_step import PretrainingWork, create_step
from electra_fast.training.step import Backward
from electra_fast.training.step_processes import choose_num_processes

CPU, COMPUTE = torch.device("cpu"), ComputeConfig("sdpa", torch.float32)
FEW_STEPS = 4


@pytest.fixture
def two_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def configured(corpus, recipe="google", dropout=0.0, **train):
    changes = {"vocab_size": ef.Corpus(corpus).vocab_size, "dropout": dropout, "attention_dropout": dropout}
    config = ef.Config.preset("tiny", recipe).replace({"model": changes})
    train = {"batch_size": 12, "steps": FEW_STEPS} | train
    return config.replace({"train": train, "data": {"sequence_length": 64}}).resolved()


def make_step(config, num_processes, execution="eager"):
    model = ef.Electra(config).train()
    return create_step(
        model, Optimizer(model.named_parameters(), config.optimizer), config, COMPUTE, execution, num_processes
    )


def batches(corpus):
    return BatchLoader(corpus, sequence_length=64, batch_size=12)


def trained(corpus, config, num_processes, outgrow=False):
    step = make_step(config, num_processes)
    for number, rows in zip(range(FEW_STEPS), batches(corpus), strict=False):
        if outgrow and number == 2:
            step.backward.micro_batches.capacity = 0  # as if this batch had more segments than any before it
        step(rows, number)
    step.close()
    return {name: tensor.clone() for name, tensor in step.model.state_dict().items()}, step.read_totals()


def workers_of(process):
    """Process ids of the workers that a process has started; it may have other children."""
    found = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if b"serve_steps" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def worker_of(process):
    """The one worker of a process, whose command appears a moment after its start."""
    while not (found := workers_of(process)):
        time.sleep(0.01)
    (worker,) = found
    return worker


def has_ended(process, seconds=20.0):
    """Whether a process is gone, or a zombie, within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("recipe", "num_processes", "accumulate"), [("google", 2, 1), ("modern", 2, 1), ("modern", 3, 2)]
)
def test_processes_train_as_one(tiny_corpus, recipe, num_processes, accumulate):
    config = configured(tiny_corpus, recipe, accumulate=accumulate)
    weights, totals = trained(tiny_corpus, config, 1)
    found, found_totals = trained(tiny_corpus, config, num_processes)
    assert found_totals == pytest.approx(totals, rel=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_muon_iterates_in_the_precision_of_the_run(tiny_corpus, tmp_path, monkeypatch, precision, dtype):
    original, dtypes = muon.orthogonalize, set()

    def orthogonalize(matrices, dtype):
        dtypes.add(dtype)
        return original(matrices, dtype)

    monkeypatch.setattr(muon, "orthogonalize", orthogonalize)
    config = configured(tiny_corpus, "modern", precision=precision, steps=1, execution="eager")
    ef.pretrain(config, data=tiny_corpus, out=tmp_path / "run")
    assert dtypes == {dtype}
    work = PretrainingWork(
        config, type(objective_of(config)), ComputeConfig("sdpa", dtype), "eager", {}, config.model.vocab_size
    )
    assert work.build_worker(1, 2)[1]._state.matrix_dtype == dtype


@pytest.mark.usefixtures("two_cores")
def test_repeats_to_the_bit_also_with_dropout(tiny_corpus):
    config = configured(tiny_corpus, "modern", dropout=0.1)
    weights, totals = trained(tiny_corpus, config, 2)
    again, again_totals = trained(tiny_corpus, config, 2, outgrow=True)
    assert totals == again_totals
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name]), name
    _, without = trained(tiny_corpus, configured(tiny_corpus, "modern"), 2)
    assert without["generator_loss"] != totals["generator_loss"]


def test_processes_draw_other_dropout_masks(tiny_corpus):
    config = configured(tiny_corpus)
    batch = HostBatch.of(next(batches(tiny_corpus)))

    def draws(rank, step):
        backward = Backward(ef.Electra(config), config, COMPUTE, "eager", rank, 2)
        backward.load(batch, step)
        backward.run()
        return torch.default_generator.initial_seed()

    found = [draws(rank, step) for rank in (0, 1) for step in (0, 1)]
    assert len(set(found)) == 4 and draws(1, 1) == found[3]


@pytest.mark.usefixtures("two_cores")
def test_operations_have_one_thread_each(tiny_corpus, monkeypatch):
    """With as many processes as cores; what comes between the steps has all cores."""
    config, seen = configured(tiny_corpus), []

    def note(function):
        return lambda *args: (seen.append(torch.get_num_threads()), function(*args))[1]

    monkeypatch.setattr(DiscriminatorHead, "forward", note(DiscriminatorHead.forward))
    monkeypatch.setattr(Optimizer, "step", note(Optimizer.step))
    trained(tiny_corpus, config, 2)
    assert seen == [1, 1] * FEW_STEPS and torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_cores", "own_processor")
def test_a_run_resumes_to_the_bit(validation_corpus, tmp_path):
    """Moments, counts and shared parameters come back, with bias correction and dropout."""
    changes = {"train.batch_size": "8", "train.accumulate": "1", "train.matmul": ONEDNN if has_onednn() else DEFAULT}
    config = tiny_config("modern", **changes)
    ef.pretrain(config, data=validation_corpus, out=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    truncate(tmp_path / "run", checkpoint_folder.steps(tmp_path / "run")[0])
    assert ef.pretrain(config, data=validation_corpus, out=tmp_path / "run").step == STEPS
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert not workers_of(os.getpid())


def test_a_worker_multiplies_as_its_run(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True})
    task = SimpleNamespace(work=SimpleNamespace(compute=ComputeConfig("sdpa", torch.float32, ONEDNN)))
    monkeypatch.setattr(step_processes, "Connection", lambda _: SimpleNamespace(recv=lambda: task))
    used = []
    monkeypatch.setattr(step_processes, "_serve", lambda *_: used.append(torch.backends.mkldnn.matmul.fp32_precision))
    step_processes.serve_steps(0)
    assert used == ["bf16"]


@pytest.mark.usefixtures("two_cores")
def test_stages_switch_in_all_processes(validation_corpus, tmp_path):
    """A run of two stages, against the same by one process, and resumed after the switch."""
    config = test_objectives.two_stage_config().replace({"model": {"dropout": 0.0, "attention_dropout": 0.0}})
    ef.pretrain(config, data=validation_corpus, out=tmp_path / "two")
    torch.set_num_threads(1)
    ef.pretrain(config, data=validation_corpus, out=tmp_path / "one")
    two, one = (test_objectives.lines(tmp_path / name) for name in ("two", "one"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-3)
    torch.set_num_threads(2)
    shutil.copytree(tmp_path / "two", tmp_path / "run")
    truncate(tmp_path / "run", test_objectives.SWITCH + 3)
    ef.pretrain(config, data=validation_corpus, out=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "two")


@pytest.mark.usefixtures("two_cores")
def test_all_processes_sample_from_the_same_counts(validation_corpus, tmp_path):
    changes = {"generator.kind": "unigram", "model.dropout": "0", "model.attention_dropout": "0"}
    ef.pretrain(tiny_config(**changes), data=validation_corpus, out=tmp_path / "two")
    torch.set_num_threads(1)
    ef.pretrain(tiny_config(**changes), data=validation_corpus, out=tmp_path / "one")
    two, one = (test_objectives.lines(tmp_path / name) for name in ("two", "one"))
    assert [line["replaced_fraction"] for line in two] == [line["replaced_fraction"] for line in one]
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-3)


@pytest.mark.usefixtures("two_cores")
def test_an_error_in_a_worker_is_raised(tiny_corpus):
    step, rows = make_step(configured(tiny_corpus), 2), next(batches(tiny_corpus))
    step(rows, 0)
    batch = HostBatch.of(rows)
    step.processes.start(batch._replace(values=batch.values[:10], num_rows=7), 1, 1.0)
    with pytest.raises(RuntimeError, match=r"a worker process failed:\n(.*\n)*.*7 rows, where a step has 12"):
        step.run()
    assert torch.get_num_threads() == 2 and not workers_of(os.getpid())


@pytest.mark.usefixtures("two_cores")
def test_a_killed_worker_ends_the_run_with_a_remedy(tiny_corpus):
    step, loader = make_step(configured(tiny_corpus), 2), batches(tiny_corpus)
    step(next(loader), 0)
    worker = worker_of(os.getpid())
    os.kill(worker, signal.SIGTERM)  # blocked: a scheduler that asks every process to stop gets a checkpoint
    step(next(loader), 1)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(TrainingFailed, match=r"was killed by SIGKILL; if it ran out of memory, use .*; run again"):
        step(next(loader), 2)
    assert not workers_of(os.getpid())


@pytest.mark.usefixtures("two_cores")
def test_workers_end_with_the_step(tiny_corpus):
    step = make_step(configured(tiny_corpus), 2)
    worker = worker_of(os.getpid())
    del step
    assert has_ended(worker)


def started(corpus, out, **changes):
    """A run by two processes in a process group of its own, when it has taken steps; and its worker."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    run = subprocess.Popen(
        command(corpus, out, **{"train.steps": "5000"} | changes),
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not checkpoint_folder.steps(out) if out.exists() else True:
        assert run.poll() is None, run.stderr.read()
        time.sleep(0.05)
    worker = worker_of(run.pid)
    return run, worker


def test_workers_end_with_a_killed_run(tiny_corpus, tmp_path):
    run, worker = started(tiny_corpus, tmp_path / "run")
    run.kill()
    assert has_ended(worker)
    run.communicate()


def test_a_signal_to_all_processes_ends_in_a_checkpoint(tiny_corpus, tmp_path):
    """As a terminal's Ctrl-C does, or a scheduler."""
    run, worker = started(tiny_corpus, tmp_path / "run")
    os.killpg(run.pid, signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGINT and "checkpoint written; run again to resume" in said
    assert "Traceback" not in said and has_ended(worker)


def test_a_suspended_worker_is_named_and_a_signal_ends_the_run(tiny_corpus, tmp_path):
    run, worker = started(tiny_corpus, tmp_path / "run")
    os.kill(worker, signal.SIGSTOP)
    warning = f"worker process {worker} is suspended, and the run waits for it"
    assert any(warning in line for line in run.stderr)
    run.terminate()
    _, said = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM and has_ended(worker)
    assert f"worker process {worker} is suspended: the step cannot be finished, so no checkpoint" in said
    assert "Traceback" not in said and "run again to resume from the last one" in said.splitlines()[-1]


@pytest.mark.usefixtures("two_cores")
def test_a_suspended_worker_takes_no_batch_however_large(tiny_corpus, monkeypatch):
    """It would block the run where it sends, until the worker goes on."""
    step = make_step(configured(tiny_corpus), 2)
    worker = worker_of(os.getpid())
    os.kill(worker, signal.SIGSTOP)
    with stop_requests() as stop, pytest.raises(Interrupted, match=f"worker process {worker} is suspended"):
        stop.signal = signal.SIGTERM
        step.processes.start(bytes(10_000_000), 0, 1.0)
    step.close()


@pytest.mark.usefixtures("two_cores")
def test_as_many_processes_as_torch_has_threads_that_divide_the_rows(monkeypatch):
    config = ef.Config.preset("tiny", "google")
    assert choose_num_processes(config, CPU) == 2
    assert choose_num_processes(config, torch.device("cuda")) == 1
    assert choose_num_processes(config.replace({"train": {"batch_size": 15}}), CPU) == 1
    assert choose_num_processes(config.replace({"train": {"batch_size": 4, "accumulate": 4}}), CPU) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert choose_num_processes(config, CPU) == 8
    monkeypatch.delattr(os, "memfd_create")
    assert choose_num_processes(config, CPU) == 1
