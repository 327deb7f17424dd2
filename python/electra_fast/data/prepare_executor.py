"""`prepare` on an executor: the parent divides the work into tasks, each of which builds input groups of the corpus.

Any `concurrent.futures.Executor` will do whose workers see the inputs and the output folder under the same paths.
A task that runs twice, even at the same time, writes the same files, so an executor may repeat tasks as it likes.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, wait
from typing import Any

from electra_fast import _data
from electra_fast.errors import ElectraFastError, ExecutorFailed, InputError
from electra_fast.progress import ReadingProgress

# Small input groups share a task up to so many bytes: some seconds of work for a core.
TASK_BYTES = 64 << 20
# Tasks submitted at a time; each holds the names of its files.
MAX_SUBMITTED = 10_000

# Documents, tokens and bytes of input.
Done = tuple[int, int, int]


def prepare_on(
    executor: Executor, tokenizer: _data.Tokenizer, out: str, bar: ReadingProgress, **arguments: Any
) -> dict[str, Any]:
    """The report of `_data.prepare`, whose keyword arguments it takes; `threads` are per task, 1 by default."""
    if arguments.pop("texts", None) is not None:
        raise InputError("executor needs files as inputs: a stream of documents is read by one process")
    if arguments.pop("partition") is not None:
        raise InputError("give executor or partition, not both: the tasks of an executor make the whole corpus")
    threads = arguments.pop("threads") or 1
    job = _data.PrepareJob(tokenizer, out, **arguments)
    try:
        if groups := job.input_groups():
            _run_tasks(executor, job, groups, threads, bar)
        return job.finish()
    finally:
        job.close()


def _run_tasks(
    executor: Executor, job: _data.PrepareJob, groups: list[tuple[int, int]], threads: int, bar: ReadingProgress
) -> None:
    """Runs all tasks. An error cancels those that have not begun and waits for the others: what they finish counts.

    Ctrl-C and a failure of the executor end it at once.
    """
    settings, total = job.settings(), sum(size for _, size in groups)
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
            documents, tokens, size = documents + done[0], tokens + done[1], size + done[2]
            bar.update(size, total, documents, tokens)
    except BaseException as error:
        running = [future for future in submitted if not future.cancel()]
        if _is_of_executor(error):
            reason = " ".join(f"{type(error).__name__} {error}".split())
            raise ExecutorFailed(f"the executor failed ({reason}); run again: finished work is kept") from error
        if isinstance(error, Exception):
            wait(running)
        raise


def _tasks(groups: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
    """The numbers of consecutive input groups of up to `TASK_BYTES` together."""
    task: list[int] = []
    size = 0
    for number, num_bytes in groups:
        if task and size + num_bytes > TASK_BYTES:
            yield task
            task, size = [], 0
        task.append(number)
        size += num_bytes
    if task:
        yield task


def _prepare_groups(settings: str, groups: list[str], threads: int) -> Done:
    """A task, in any process: builds the input groups that are not finished, and says what they hold."""
    return _data.prepare_input_groups(settings, groups, _tokenizer_of(settings), threads)


@functools.lru_cache(maxsize=1)
def _tokenizer_of(settings: str) -> _data.Tokenizer:
    return _data.job_tokenizer(settings)


def _is_of_executor(error: BaseException) -> bool:
    """Whether the executor failed, not the task: a broken pool, a worker without this package, Dask's own errors."""
    is_known = isinstance(error, CancelledError | ImportError | RuntimeError)
    is_ours = isinstance(error, ElectraFastError)
    return (is_known and not is_ours) or type(error).__module__.startswith("distributed")
