"""Steps on a CPU by several processes: the same training as by one, bitwise repeatable, with no leftover processes."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks import wait_for
from tiny_run import STEPS, assert_same_run, lines, tiny_config, truncate
from variants import VARIANTS

import electra_fast as ef
from electra_fast.data.loader import BatchLoader, HostBatch
from electra_fast.distributed import step_processes
from electra_fast.distributed.step_processes import choose_num_processes
from electra_fast.errors import Interrupted, TrainingFailed
from electra_fast.files import checkpoint_folder
from electra_fast.interruption import stop_requests
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.heads import DiscriminatorHead
from electra_fast.model.matmul import DEFAULT, ONEDNN, has_onednn
from electra_fast.objectives import objective_of
from electra_fast.optimizers import rules
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training.parallel_step import PretrainingWork, create_step
from electra_fast.training.step import Backward

CPU = torch.device("cpu")
COMPUTE = ComputeConfig("sdpa", torch.float32)
FEW_STEPS = 4


@pytest.fixture
def two_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def configured(corpus, recipe="google", **train):
    changes = {"vocab_size": ef.Corpus(corpus).vocab_size, "dropout": 0.0, "attention_dropout": 0.0}
    config = ef.Config.preset("tiny", recipe).override(changes)
    return config.override({"batch_size": 12, "steps": FEW_STEPS, "sequence_length": 64} | train).resolved()


def make_step(config, num_processes, execution="eager"):
    model = ef.Electra(config).train()
    if model.proposal is not None:
        model.proposal.set_counts(torch.arange(config.model.vocab_size) % 7)
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
    """Returns the ids of the workers among the children of a process."""
    workers = []
    for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            if b"serve_steps" in Path(f"/proc/{child}/cmdline").read_bytes():
                workers.append(int(child))
    return workers


def worker_of(process):
    """Returns the only worker of a process, once its command is visible."""
    while not (workers := workers_of(process)):
        time.sleep(0.01)
    (worker,) = workers
    return worker


def has_ended(process, seconds=20.0):
    """Returns whether a process ends, or becomes a zombie, within some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.process
@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize(
    ("recipe", "generator", "num_processes", "accumulate"),
    [("google", "unigram", 2, 1), ("modern", "model", 3, 2), ("deberta", "model", 2, 1)],
)
def test_processes_match_single_process(tiny_corpus, monkeypatch, recipe, generator, num_processes, accumulate):
    """Within a step, operations have one thread; between steps, they have all cores."""
    config = configured(tiny_corpus, recipe, accumulate=accumulate)
    seen = []
    config = config.override({"generator.kind": generator, "objective.corrective_weight": 0.0})

    def note(function):
        return lambda *args: (seen.append(torch.get_num_threads()), function(*args))[1]

    weights, totals = trained(tiny_corpus, config, 1)
    monkeypatch.setattr(DiscriminatorHead, "forward", note(DiscriminatorHead.forward))
    monkeypatch.setattr(Optimizer, "step", note(Optimizer.step))
    shared_weights, shared_totals = trained(tiny_corpus, config, num_processes, outgrow=True)
    assert set(seen) == {1} and torch.get_num_threads() == 2
    assert shared_totals == pytest.approx(totals, rel=1e-4)
    for name, tensor in weights.items():
        torch.testing.assert_close(shared_weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_muon_uses_precision_of_run(tiny_corpus, tmp_path, monkeypatch):
    original = rules.orthogonalize
    dtypes = set()

    def orthogonalize(matrices, dtype):
        dtypes.add(dtype)
        return original(matrices, dtype)

    monkeypatch.setattr(rules, "orthogonalize", orthogonalize)
    config = configured(tiny_corpus, "modern", precision="bf16", steps=1, execution="eager")
    ef.pretrain(tiny_corpus, config=config, out=tmp_path / "run")
    assert dtypes == {torch.bfloat16}
    compute = ComputeConfig("sdpa", torch.bfloat16)
    work = PretrainingWork(config, type(objective_of(config)), compute, "eager", {}, config.model.vocab_size)
    assert work.build_worker(1, 2)[1]._state.matrix_dtype == torch.bfloat16


def test_processes_draw_different_dropout_masks(tiny_corpus):
    config = configured(tiny_corpus)
    seeds = []
    batch = HostBatch.of(next(batches(tiny_corpus)))
    for rank, step in ((0, 0), (0, 1), (1, 0), (1, 1), (1, 1)):
        backward = Backward(ef.Electra(config), config, COMPUTE, "eager", rank, 2)
        backward.load(batch, step)
        backward.run()
        seeds.append(torch.default_generator.initial_seed())
    assert len(set(seeds)) == 4 and seeds[3] == seeds[4]


def test_worker_uses_matmul_of_run(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bw": True})
    task = SimpleNamespace(work=SimpleNamespace(compute=ComputeConfig("sdpa", torch.float32, ONEDNN)))
    monkeypatch.setattr(step_processes, "Connection", lambda _: SimpleNamespace(recv=lambda: task))
    used = []
    monkeypatch.setattr(step_processes, "_serve", lambda *_: used.append(torch.backends.mkldnn.matmul.fp32_precision))
    step_processes.serve_steps(0)
    assert used == ["bf16"]


@pytest.mark.process
@pytest.mark.usefixtures("two_cores", "own_processor")
def test_stages_switch_in_all_processes(validation_corpus, tmp_path):
    """A run of two stages, compared with the same run by one process, and resumed after the switch."""
    changes = VARIANTS["two-stage"] | {"train.matmul": ONEDNN if has_onednn() else DEFAULT}
    changes |= {"objective.corrective_weight": "0", "train.keep_checkpoints": "9"}
    changes |= {"model.dropout": "0", "model.attention_dropout": "0"}
    config = tiny_config("modern", **changes)
    ef.pretrain(validation_corpus, config=config, out=tmp_path / "two")
    torch.set_num_threads(1)
    ef.pretrain(validation_corpus, config=config, out=tmp_path / "one")
    two, one = (lines(tmp_path / name) for name in ("two", "one"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-3)
    torch.set_num_threads(2)
    shutil.copytree(tmp_path / "two", tmp_path / "run")
    truncate(tmp_path / "run", STEPS // 2 + 3)
    ef.pretrain(validation_corpus, config=config, out=tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "two")
    assert not workers_of(os.getpid())


@pytest.mark.process
@pytest.mark.usefixtures("two_cores", "hostile_folder")
def test_worker_error_raised(tiny_corpus):
    step = make_step(configured(tiny_corpus), 2)
    rows = next(batches(tiny_corpus))
    step(rows, 0)
    batch = HostBatch.of(rows)
    step.processes.start(batch._replace(values=batch.values[:10], num_rows=7), 1, 1.0)
    with pytest.raises(RuntimeError, match=r"a worker process failed:\n(.*\n)*.*7 rows, expected 12"):
        step.run()
    assert torch.get_num_threads() == 2 and not workers_of(os.getpid())


@pytest.mark.process
@pytest.mark.usefixtures("two_cores")
def test_killed_worker_ends_run_with_remedy(tiny_corpus):
    step = make_step(configured(tiny_corpus), 2)
    loader = batches(tiny_corpus)
    step(next(loader), 0)
    worker = worker_of(os.getpid())
    os.kill(worker, signal.SIGTERM)  # blocked, so a scheduler that signals every process gets a checkpoint
    step(next(loader), 1)
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(TrainingFailed, match=r"ended \(killed by SIGKILL, .* memory .*\); set OMP_NUM.*; then run"):
        step(next(loader), 2)
    assert not workers_of(os.getpid())


@pytest.fixture
def started(server, tiny_corpus, tmp_path):
    """Yields a run by two processes in a separate process group, after its first checkpoint, and its worker."""
    changes = {"train.steps": "5000", "train.eval_every": "0"}
    ranks = server.start(1, tiny_corpus, tmp_path / "run", {"OMP_NUM_THREADS": "2"}, **changes)
    wait_for(lambda: (tmp_path / "run").exists() and checkpoint_folder.steps(tmp_path / "run"))
    return ranks[0], worker_of(ranks[0].pid)


@pytest.mark.slow
def test_workers_end_with_killed_run(started):
    run, worker = started
    run.kill()
    assert has_ended(worker) and run.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_signal_to_all_processes_writes_checkpoint(started):
    """Ctrl-C in a terminal does this, and schedulers."""
    run, worker = started
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait() == 128 + signal.SIGINT and "checkpoint written; run again to resume" in run.output()
    assert "Traceback" not in run.output() and has_ended(worker)


@pytest.mark.slow
def test_suspended_worker_reported(started):
    run, worker = started
    os.kill(worker, signal.SIGSTOP)
    wait_for(lambda: f"worker process {worker} is suspended, and the run waits for it" in run.output())
    run.kill(signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM and has_ended(worker)
    assert f"worker process {worker} is suspended: the step cannot be finished, so no checkpoint" in run.output()
    assert "Traceback" not in run.output() and "run again to resume from the last one" in run.output().splitlines()[-1]


@pytest.mark.process
@pytest.mark.usefixtures("two_cores")
def test_suspended_worker_does_not_block_send(tiny_corpus, monkeypatch):
    """Otherwise the run would hang in `send` until the worker continues."""
    step = make_step(configured(tiny_corpus), 2)
    worker = worker_of(os.getpid())
    os.kill(worker, signal.SIGSTOP)
    with stop_requests() as stop, pytest.raises(Interrupted, match=f"worker process {worker} is suspended"):
        stop.signal = signal.SIGTERM
        step.processes.start(bytes(10_000_000), 0, 1.0)
    step.close()


@pytest.mark.usefixtures("two_cores")
def test_number_of_processes_divides_rows(monkeypatch):
    config = ef.Config.preset("tiny", "google")
    assert choose_num_processes(config, CPU) == 2
    assert choose_num_processes(config, torch.device("cuda")) == 1
    assert choose_num_processes(config.override({"train.batch_size": 15}), CPU) == 1
    assert choose_num_processes(config.override({"train.batch_size": 4, "train.accumulate": 4}), CPU) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert choose_num_processes(config, CPU) == 8
    monkeypatch.delattr(os, "memfd_create")
    assert choose_num_processes(config, CPU) == 1


PAGE_FAULTS = """
import resource
from electra_fast.distributed.step_processes import keep_freed_memory
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        buffers = [b"x" * 40_000_000 for _ in range(3)]  # above 32 MB, which glibc always returns
        del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
first = faults()
keep_freed_memory()
print(first, min(faults() for _ in range(4)))  # the heap grows at first
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="settings of glibc")
def test_freed_memory_stays_in_process(tmp_path):
    """In a separate process, since the setting cannot be reverted."""
    environment = {"PATH": "", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", PAGE_FAULTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=tmp_path)
    before, after = map(int, done.stdout.split())
    assert before > 10_000 and after < before / 20
