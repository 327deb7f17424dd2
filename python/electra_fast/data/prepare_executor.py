"""`prepare` on an executor: the parent divides the work into tasks, and each task builds input groups of the corpus.

Works with any `concurrent.futures.Executor` whose workers see inputs and output under the same paths or URLs;
`dask_executor` returns the executor of a Dask scheduler. A task that runs twice, even concurrently, writes the same
files, so an executor may repeat tasks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import queue
import socket
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, wait
from typing import Any

from electra_fast import _data
from electra_fast.errors import ElectraFastError, ExecutorFailed, InputError
from electra_fast.progress import ReadingProgress

# Bytes up to which small input groups share a task: some seconds of work for a core.
TASK_BYTES = 64 << 20
# Maximum number of submitted tasks; each holds the names of its files.
MAX_SUBMITTED = 10_000
# Timeout for reaching a Dask scheduler.
CONNECT_SECONDS = 5
# Processes that are not forks run the caller's script first (the default on macOS, and on Linux since Python 3.14).
_UNGUARDED = 'a script must call this under `if __name__ == "__main__":`, because its worker processes run it too'

# Documents, tokens and bytes of input.
Done = tuple[int, int, int]


def prepare_on(
    executor: Executor, tokenizer: _data.Tokenizer, out: str, bar: ReadingProgress, **arguments: Any
) -> dict[str, Any]:
    """Returns the report of `_data.prepare`; takes the same keyword arguments. `threads` are per task, 1 by default."""
    if arguments.pop("texts", None) is not None:
        raise InputError("executor: needs files as inputs; write the documents to .jsonl first, or remove executor")
    if arguments.pop("partition") is not None:
        raise InputError("executor and partition: cannot be combined; remove one of them")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the check of multiprocessing itself
        raise InputError(_UNGUARDED)
    threads = arguments.pop("threads") or 1
    job = _data.PrepareJob(tokenizer, out, **arguments, progress=bar.update)
    try:
        while groups := job.input_groups():
            _run_tasks(executor, job, groups, threads, bar)
            if not job.next_pass():
                break
        return job.finish()
    finally:
        job.close()


def _run_tasks(
    executor: Executor, job: _data.PrepareJob, groups: list[tuple[int, int]], threads: int, bar: ReadingProgress
) -> None:
    """Runs all tasks. An error cancels tasks that have not started and waits for the others, whose work is kept.

    Ctrl-C and a failure of the executor end it immediately.
    """
    settings = job.settings()
    total = sum(size for _, size in groups)
    tasks = _tasks(groups)
    submitted: set[Future[Done]] = set()
    finished: queue.SimpleQueue[Future[Done]] = queue.SimpleQueue()
    documents = tokens = size = 0
    try:
        while True:
            while len(submitted) < MAX_SUBMITTED and (numbers := next(tasks, None)):
                future = executor.submit(
                    _prepare_groups, settings, [job.input_group(number) for number in numbers], threads
                )
                submitted.add(future)
                future.add_done_callback(finished.put)
            if not submitted:
                return
            future = finished.get()
            submitted.remove(future)
            done = future.result()
            documents = documents + done[0]
            tokens = tokens + done[1]
            size = size + done[2]
            bar.update(size, total, documents, tokens)
    except BaseException as error:
        running = [future for future in submitted if not future.cancel()]
        if _is_of_executor(error):
            reason = " ".join(f"{type(error).__name__} {error}".split())
            is_dead = isinstance(error, BrokenExecutor | ConnectionError | EOFError)  # the pool, or its fork server
            advice = f"; {_UNGUARDED}" if is_dead and not size else ""
            raise ExecutorFailed(f"the executor failed ({reason}); run again: finished work is kept{advice}") from error
        if isinstance(error, Exception):
            wait(running)
        raise


def _tasks(groups: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    task: list[int] = []
    size = 0
    for number, num_bytes in groups:
        if task and size + num_bytes > TASK_BYTES:
            yield task
            task = []
            size = 0
        task.append(number)
        size += num_bytes
    if task:
        yield task


def _prepare_groups(settings: str, groups: list[str], threads: int) -> Done:
    """A task, in any process: builds the unfinished groups among its input groups and returns their counts."""
    return _data.prepare_input_groups(settings, groups, _tokenizer_of(settings), threads)


@functools.lru_cache(maxsize=1)
def _tokenizer_of(settings: str) -> _data.Tokenizer:
    return _data.job_tokenizer(settings)


def _is_of_executor(error: BaseException) -> bool:
    """Returns whether the executor failed, not the task: a broken pool, a worker without this package, a Dask error."""
    is_known = isinstance(error, CancelledError | ImportError | RuntimeError | ConnectionError | EOFError)
    is_ours = isinstance(error, ElectraFastError)
    return (is_known and not is_ours) or type(error).__module__.startswith("distributed")


@contextlib.contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """An executor of the Dask scheduler at `address` (`tcp://host:8786`), which repeats the tasks of dead workers.

    Raises:
        InputError: `distributed` is not installed, or no scheduler responds, or it has no workers.
    """
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ImportError as error:
        raise InputError("--scheduler: needs Dask; pip install distributed") from error
    for name in ("distributed", "distributed.client"):  # its tracebacks would hide the error message
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        # Checked first, because a client that cannot connect does not close cleanly.
        host, port = get_address_host_port(address)
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--scheduler {address}: no Dask scheduler responds ({reason}); check the address") from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise InputError(f"--scheduler {address}: no workers; start some with `dask worker {address}`")
        yield client.get_executor()
