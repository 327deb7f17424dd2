"""`prepare` on executors: the same corpus as from one process, even if workers die."""

import os
import pickle
import re
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import in_process
import pytest
from killed_worker import kill_first, kill_this_process
from prepare_programs import contents
from ranks import free_port

from electra_fast.data import prepare_executor
from electra_fast.data.corpus import Corpus, verify
from electra_fast.data.prepare import prepare
from electra_fast.data.prepare_executor import dask_executor
from electra_fast.errors import ExecutorFailed, InputError

GROUPS = 6


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of files of one input group each: 4 MiB, mostly blank lines."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(GROUPS):
        documents = "\n\n".join(f"w{number} w{n}" for n in range(100))
        (folder / f"{number}.txt").write_text(documents + "\n" * (4 << 20))
    return folder


@pytest.fixture(scope="module")
def whole(text, vocab, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    prepare([text], vocab=vocab, out=out, holdout=0.1, progress=False)
    return out


@pytest.fixture(autouse=True)
def group_per_task(monkeypatch):
    monkeypatch.setattr(prepare_executor, "TASK_BYTES", 1)


def processes(workers=2):
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"))


class Repeating(Executor):
    """Runs each task twice at the same time, as if a worker had been declared dead."""

    def __init__(self):
        self.pool = ThreadPoolExecutor(4)
        self.again = []

    def submit(self, task, /, *arguments):
        self.again.append(self.pool.submit(task, *arguments))
        return self.pool.submit(task, *arguments)

    def shutdown(self, *args, **kwargs):
        """Waits for the repeated tasks too, and raises their errors."""
        self.pool.shutdown()
        for future in self.again:
            future.result()


class Immediate(Executor):
    """Runs tasks when they are submitted; `before` is called with the number of each."""

    def __init__(self, before=lambda task: None):
        self.before = before
        self.tasks = 0

    def submit(self, task, /, *arguments):
        future = Future()
        try:
            self.tasks += 1
            self.before(self.tasks)
            future.set_result(task(*pickle.loads(pickle.dumps(arguments))))
        except BaseException as error:
            future.set_exception(error)
        return future


@pytest.mark.parametrize("make", [pytest.param(processes, marks=pytest.mark.slow), Repeating, Immediate])
def test_corpus_does_not_depend_on_the_executor(text, vocab, whole, tmp_path, make):
    out = tmp_path / "out"
    with make() as executor:
        report = prepare([text], vocab=vocab, out=out, holdout=0.1, executor=executor, progress=False)
    assert report.complete and report.num_input_groups == GROUPS and contents(out) == contents(whole)
    again = prepare([text], vocab=vocab, out=out, holdout=0.1, executor=Immediate(), progress=False)
    assert again.already_complete and again.content_hash == report.content_hash


def test_small_input_groups_share_a_task(text, vocab, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_executor, "TASK_BYTES", 10 << 20)
    monkeypatch.setattr(prepare_executor, "MAX_SUBMITTED", 1)
    executor = Immediate()
    prepare([text], vocab=vocab, out=tmp_path / "out", holdout=0.1, executor=executor, progress=False)
    assert executor.tasks == GROUPS / 2 and contents(tmp_path / "out") == contents(whole)


def test_failed_run_is_resumed(text, vocab, whole, tmp_path):
    def fail_third(task):
        if task == 3:
            raise OSError("no space left")

    arguments = {"vocab": vocab, "out": tmp_path / "out", "holdout": 0.1, "progress": False}
    with pytest.raises(OSError, match="no space left"):
        prepare([text], executor=Immediate(fail_third), **arguments)
    executor = Immediate()
    prepare([text], executor=executor, **arguments)
    assert executor.tasks == 1 and contents(tmp_path / "out") == contents(whole)


@pytest.mark.process
def test_bad_group_is_one_line(vocab, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n' + "\n" * (4 << 20))
    (tmp_path / "b.jsonl").write_text('\n\n{"text": 5}\n')
    arguments = {"vocab": vocab, "out": tmp_path / "out", "progress": False}
    with processes(1) as executor, pytest.raises(InputError, match="b.jsonl: line 3: .*is a number") as caught:
        prepare([tmp_path], executor=executor, **arguments)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out/parts").glob("input-group-*.json")), "the good input group is kept"
    assert not list((tmp_path / "out").glob(".lock*"))
    report = prepare([tmp_path], executor=Immediate(), skip_bad_rows=1, **arguments)
    assert report.complete and report.skipped_rows == 1


def test_skipped_rows_are_counted_over_all_tasks_and_streams_are_refused(vocab, tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"text": "w1"}\n{\n' + "\n" * (4 << 20))
    arguments = {"vocab": vocab, "executor": Immediate(), "progress": False}
    with pytest.raises(InputError, match="2 bad rows were skipped so far, but --skip-bad-rows allows 1"):
        prepare([tmp_path], out=tmp_path / "few", skip_bad_rows=1, **arguments)
    assert prepare([tmp_path], out=tmp_path / "out", skip_bad_rows=2, **arguments).skipped_rows == 2
    with pytest.raises(InputError, match="executor: needs files as inputs"):
        prepare(iter(["w1"]), out=tmp_path / "none", **arguments)
    with pytest.raises(InputError, match="executor and partition: cannot be combined"):
        prepare([tmp_path], out=tmp_path / "none", partition="1/2", **arguments)
    assert not (tmp_path / "none").exists()


@pytest.mark.process
def test_killed_pool_asks_to_run_again(text, vocab, whole, tmp_path):
    class Killed(Executor):
        """A pool whose worker is killed at the third task."""

        def __init__(self):
            self.pool = processes(1)
            self.tasks = 0

        def submit(self, task, /, *arguments):
            self.tasks += 1
            return self.pool.submit(kill_this_process) if self.tasks == 3 else self.pool.submit(task, *arguments)

    arguments = {"vocab": vocab, "out": tmp_path / "out", "holdout": 0.1, "progress": False}
    with pytest.raises(ExecutorFailed, match=r"the executor failed \(Broken.* run again") as caught:
        prepare([text], executor=Killed(), **arguments)
    assert "\n" not in str(caught.value) and len(list((tmp_path / "out/parts").glob("input-group-*.json"))) == 2
    prepare([text], **arguments)
    assert contents(tmp_path / "out") == contents(whole)


SCRIPT = """
import multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import electra_fast as ef

def main():
    text, vocab, out, method = sys.argv[1:]
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as executor:
        ef.prepare([text], vocab=vocab, out=out, executor=executor, progress=False)

"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_guarded_script_works_with_every_start_method(text, vocab, tmp_path, method):
    unguarded = tmp_path / "unguarded.py"
    guarded = tmp_path / "guarded.py"
    unguarded.write_text(SCRIPT + "main()")
    guarded.write_text(SCRIPT + "if __name__ == '__main__':\n    main()")
    command = [str(text), str(vocab), str(tmp_path / "out"), method]
    if method != "fork":
        done = subprocess.run([sys.executable, str(unguarded), *command], capture_output=True, text=True, check=False)
        assert "ExecutorFailed: the executor failed (" in done.stderr.splitlines()[-1]
        assert done.stderr.count('a script must call this under `if __name__ == "__main__":`, because its') >= 2
    subprocess.run([sys.executable, str(guarded), *command], check=True)
    assert Corpus(tmp_path / "out").num_tokens > 0


def test_ctrl_c_cancels_waiting_tasks(text, vocab, whole, tmp_path):
    class Slow(Executor):
        """Runs the first task, and interrupts the parent while all others wait."""

        def __init__(self):
            self.waiting = []

        def submit(self, task, /, *arguments):
            future = Future()
            if self.waiting or list((tmp_path / "out/parts").glob("input-group-*.json")):
                self.waiting.append(future)
            else:
                future.set_result(task(*arguments))
            if len(self.waiting) == GROUPS - 1:
                signal.raise_signal(signal.SIGINT)
            return future

    arguments = {"vocab": vocab, "out": tmp_path / "out", "holdout": 0.1, "progress": False}
    executor = Slow()
    with pytest.raises(KeyboardInterrupt):
        prepare([text], executor=executor, **arguments)
    assert sum(future.cancelled() for future in executor.waiting) >= GROUPS - 2
    prepare([text], **arguments)
    assert contents(tmp_path / "out") == contents(whole)


# --- Dask ---------------------------------------------------------------------------------------


# Workers import the functions of a test.
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def cluster(tmp_path):
    """A scheduler with two workers, in separate processes; returns the address and the workers."""
    address = f"tcp://127.0.0.1:{free_port()}"
    log = (tmp_path / "dask.log").open("w")
    options = {"stdout": log, "stderr": log, "cwd": tmp_path, "env": ENVIRONMENT}
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", address, "--no-dashboard"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", address, "--no-nanny", "--nthreads", "1"]
    worker += ["--no-dashboard", "--host", "127.0.0.1", "--local-directory", str(tmp_path / "dask")]
    started = [subprocess.Popen(scheduler, **options)]
    try:
        started += [subprocess.Popen(worker, **options) for _ in range(2)]
        wait_for_workers(address, started)
        yield address, started[1:]
    finally:
        for process in started:
            process.kill()
            process.wait()
        log.close()


def wait_for_workers(address, started):
    from distributed import Client

    with Client(address, timeout=60, set_as_default=False) as client:
        client.wait_for_workers(2, timeout=60)
    assert all(process.poll() is None for process in started)


@pytest.mark.slow
def test_dask_finishes_after_a_worker_is_killed(text, vocab, whole, tmp_path, cluster):
    """Afterwards, the command line works on the same scheduler."""
    address, (victim, _) = cluster

    class Killing(Executor):
        """Dask's executor; kills a worker in the middle of a task."""

        def __init__(self, executor):
            self.executor = executor
            self.submitted = 0

        def submit(self, task, /, *arguments):
            self.submitted += 1
            before = (kill_first, victim.pid) if self.submitted == 3 else ()
            return self.executor.submit(*before, task, *arguments)

    with dask_executor(address) as executor:
        out = tmp_path / "out"
        report = prepare([text], vocab=vocab, out=out, holdout=0.1, executor=Killing(executor), progress=False)
    assert victim.wait(timeout=30) == -signal.SIGKILL
    assert report.complete and report.content_hash == Corpus(whole).content_hash and verify(out)
    assert contents(out) == contents(whole)
    command = [sys.executable, "-m", "electra_fast", "prepare", text, "--vocab", vocab, "--out", tmp_path / "again"]
    command += ["--holdout", "0.1", "--scheduler", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and contents(tmp_path / "again") == contents(whole)


@pytest.mark.slow
def test_missing_scheduler_is_one_line(text, vocab, tmp_path, monkeypatch):
    arguments = ("prepare", text, "--vocab", vocab, "--out", tmp_path / "out", "--scheduler")
    with monkeypatch.context() as patch:  # no client is created, which would retry forever
        patch.setattr("distributed.Client", lambda *_, **__: pytest.fail("a client was made"))
        done = in_process.run(*arguments, f"tcp://127.0.0.1:{free_port()}")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"electra-fast: error: --scheduler tcp:\S+ no Dask scheduler responds .*\n", done.stderr)
    done = in_process.run(*arguments, "nonsense://x")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = in_process.run(*arguments, "tcp://127.0.0.1:1")
    assert done.stderr == "electra-fast: error: --scheduler: needs Dask; pip install distributed\n"
