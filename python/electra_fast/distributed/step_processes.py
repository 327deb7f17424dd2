"""A CPU step shared by several processes. Each has its rows and cores.

OpenMP divides every operation, and its threads wait for each other thousands of times per step. They either spin, which
is slow if other processes use the same cores, or sleep, which takes longer than a small operation. If each thread had
its rows instead, all would share Python's lock and torch's random generator. Processes share only parameters, moments
and gradients, and wait for each other three times per step (bench/LOG.md).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import tempfile
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from electra_fast.child_process import describe_end, lacked_memory, python_command
from electra_fast.config.config import Config
from electra_fast.errors import Interrupted, TrainingFailed
from electra_fast.interruption import SIGNALS, requested_stop
from electra_fast.messages import say
from electra_fast.model.compute import ComputeConfig, use_compute
from electra_fast.optimizers.optimizer import Optimizer, global_norm

# Each worker process needs about 300 MB and a copy of the gradients.
MAX_PROCESSES = 8
# Seconds without an answer before a worker is reported: a suspended one, and any other.
_SUSPENDED_SECONDS = 3
_PATIENCE_SECONDS = 60
# Floats per cache line. Each shared tensor starts at a multiple of it.
_ALIGNMENT = 16
# Parameters of mallopt(3).
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


class GradientComputation(ABC):
    """Computes one process's part of a step's gradients.

    `model` has the parameters; `is_compiled` is true if the forward pass is compiled.
    """

    model: nn.Module
    is_compiled: bool = False

    @abstractmethod
    def load(self, batch: Any, step: int) -> None:
        """Prepares a step's batch, the same on all processes, for `run`."""

    @abstractmethod
    def run(self) -> list[dict[str, Tensor]]:
        """Adds this process's part to the parameters' gradients; returns metric totals."""

    def enter(self, step: int) -> bool:
        """Prepares for a step. Returns whether it trains other parameters than the previous step."""
        return False


class Work(ABC):
    """Describes the steps of a run to worker processes, without tensors."""

    compute: ComputeConfig

    @abstractmethod
    def build_worker(self, rank: int, num_processes: int) -> tuple[GradientComputation, Optimizer]:
        """Returns a worker's gradient computation and optimizer, of a model whose parameters do not matter yet."""


def choose_num_processes(config: Config, device: torch.device) -> int:
    """Returns the number of processes per micro-batch: the largest that divides its rows."""
    rows = config.train.batch_size // config.train.num_micro_batches
    return max(n for n in range(1, max_processes(device) + 1) if rows % n == 0)


def max_processes(device: torch.device) -> int:
    """Returns the number of processes that can share a step: the number of torch's threads, up to `MAX_PROCESSES`.

    It is 1 on devices other than the CPU, and on systems without anonymous files. Linux has them.
    """
    if device.type != "cpu" or not hasattr(os, "memfd_create"):
        return 1
    return min(MAX_PROCESSES, torch.get_num_threads())


class _Worker:
    """One process's part of a step: the rows whose gradients it computes, and the parameters that it updates.

    The model's parameters and the optimizer's moments move to shared memory. `memory` is its file descriptor.
    """

    def __init__(
        self, rank: int, backward: GradientComputation, optimizer: Optimizer, memory: int, num_processes: int
    ) -> None:
        self.backward = backward
        self.optimizer = optimizer
        self._rank = rank
        self._parameters = dict(backward.model.named_parameters())
        shared = [*self._parameters.values(), *optimizer.exp_avg.values(), *optimizer.exp_avg_sq.values()]
        gradients = [*self._parameters.values()] * num_processes
        norms = [torch.zeros(())] * len(self._parameters)
        self._tables = {name: p for name, p in self._parameters.items() if p.dim() == 2}
        rows = [torch.zeros(1 + len(table)) for table in self._tables.values()] * num_processes
        views = _views(memory, [*shared, *gradients, *norms, *rows])
        for tensor, view in zip(shared, views, strict=False):
            if rank == 0:
                view.copy_(tensor.detach())
            tensor.data = view
        rest = iter(views[len(shared) :])
        self._gradients = [{name: next(rest) for name in self._parameters} for _ in range(num_processes)]
        self._norms = {name: next(rest) for name in self._parameters}
        # The number of published rows of a gradient, and their indices; -1: all rows.
        self._rows = [{name: next(rest).view(torch.int32) for name in self._tables} for _ in range(num_processes)]
        optimizer.divide(rank, num_processes)

    def run(self, wait: Callable[[], None]) -> tuple[list[dict[str, Any]], Tensor]:
        """Runs the step that `backward` and `optimizer` were prepared for, and calls `wait` as a barrier.

        Returns the metric totals of its micro-batches, and the norm of all gradients. Gradients are added in rank
        order, so results are deterministic.
        """
        optimizer = self.optimizer
        optimizer.zero_grad()
        totals = self.backward.run()
        gradients = optimizer.gradients()
        own_names = optimizer.own_names
        for name in gradients.keys() - own_names:
            self._publish(name, gradients[name])
        wait()
        others = [rank for rank in range(len(self._gradients)) if rank != self._rank]
        for name in own_names:
            for rank in others:
                self._add_published(name, rank, gradients[name])
            self._norms[name].copy_(optimizer.nonzero(name, gradients[name]).norm())
        wait()
        return totals, optimizer.step(global_norm(self._norms[name] for name in optimizer.parameters))

    def _publish(self, name: str, gradient: Tensor) -> None:
        """Copies a gradient, or its nonzero rows, to shared memory."""
        shared = self._gradients[self._rank][name]
        rows = self.optimizer.gradient_rows.get(name)
        if rows is None:
            shared.copy_(gradient)
        else:
            shared.index_copy_(0, rows, gradient.index_select(0, rows))
        if name in self._tables:
            published = self._rows[self._rank][name]
            published[0] = -1 if rows is None else len(rows)
            if rows is not None:
                published[1 : 1 + len(rows)] = rows

    def _add_published(self, name: str, rank: int, gradient: Tensor) -> None:
        """Adds the gradient of another process."""
        shared = self._gradients[rank][name]
        num_rows = -1
        if name in self._tables:
            published = self._rows[rank][name]
            num_rows = int(published[0])
        if num_rows < 0:
            gradient += shared
            self.optimizer.forget_rows(name)
            return
        rows = published[1 : 1 + num_rows].long()
        self.optimizer.add_rows(name, rows, shared.index_select(0, rows))


@dataclass(frozen=True)
class _Task:
    """The first message to a worker process."""

    work: Work
    rank: int
    num_processes: int
    num_threads: int
    memory: int


class StepProcesses:
    """Worker processes that share steps with the calling process.

    They end with this object, with `close`, or with the calling process, however that ends. The model's parameters and
    the optimizer's moments move to shared memory, so all processes see values that are copied to them. `backward`
    computes the gradients of the calling process, the first; `work` describes the steps to the others.
    """

    def __init__(self, backward: GradientComputation, optimizer: Optimizer, work: Work, num_processes: int) -> None:
        self._num_cores = torch.get_num_threads()
        self._num_threads = max(1, self._num_cores // num_processes)
        assert hasattr(os, "memfd_create")  # see max_processes
        memory = os.memfd_create("electra-fast")
        self._worker = _Worker(0, backward, optimizer, memory, num_processes)
        self._processes: list[tuple[subprocess.Popen[bytes], _Link]] = []
        self.close = weakref.finalize(self, _end, self._processes)
        try:
            for rank in range(1, num_processes):
                process, link = _start(memory)
                self._processes.append((process, link))
                link.send(_Task(work, rank, num_processes, self._num_threads, memory))
            self._receive()  # all are ready
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    @property
    def pids(self) -> list[str]:
        return [str(process.pid) for process, _ in self._processes]

    def start(self, batch: Any, step: int, lr_scale: float) -> None:
        optimizer = self._worker.optimizer
        self._send((batch, step, lr_scale, optimizer.num_updates, optimizer.num_loads))

    def run(self) -> tuple[list[dict[str, Any]], Tensor]:
        """Runs the calling process's part of the step. Its batch and the optimizer's scalars must be set already.

        Returns the metric totals of all micro-batches and the gradients' norm. Raises TrainingFailed if a worker has
        died, and Interrupted if a stop is requested while a worker does not answer.
        """
        try:
            torch.set_num_threads(self._num_threads)
            totals, norm = self._worker.run(self._wait)
            for worker_totals in self._receive():
                totals += worker_totals
        except BaseException:
            self.close()  # a late answer of a worker must not be read as the answer to a later step
            raise
        finally:
            torch.set_num_threads(self._num_cores)
        return totals, norm

    def _wait(self) -> None:
        self._receive()
        self._send(None)

    def _receive(self) -> list[Any]:
        """Receives an answer of each worker. Raises TrainingFailed or RuntimeError if one has failed."""
        answers = []
        for process, connection in self._processes:
            try:
                answers.append(connection.recv())
            except (EOFError, OSError):
                raise _death(process, connection) from None
            if isinstance(answers[-1], str):
                raise RuntimeError(f"a worker process failed:\n{answers[-1]}")
        return answers

    def _send(self, message: object) -> None:
        for process, connection in self._processes:
            try:
                connection.send(message)
            except OSError:
                raise _death(process, connection) from None


def _views(memory: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns tensors of the same shapes in consecutive memory, each aligned to a cache line."""
    sizes = [math.ceil(tensor.numel() / _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    os.ftruncate(memory, 4 * sum(sizes))
    flat = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32)
    parts = torch.split(flat, sizes)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class _Link(Connection):
    """The run's end of the connection to a worker. Never waits forever, even if the worker is suspended."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def _send(self, buf: Any, write: object = None) -> None:
        super()._send(buf, lambda handle, data: self._when(select.POLLOUT, os.write, data))  # type: ignore[misc]

    def _recv(self, size: int, read: object = None) -> Any:
        return super()._recv(size, lambda handle, count: self._when(select.POLLIN, os.read, count))  # type: ignore[misc]

    def _when(self, event: int, call: Callable[[int, Any], Any], argument: Any) -> Any:
        while True:
            try:
                return call(self.fileno(), argument)
            except BlockingIOError:
                self._wait(event)

    def _wait(self, event: int) -> None:
        """Waits until the connection is readable or writable. Raises Interrupted if that delays a requested stop."""
        poll = select.poll()
        seconds = 0
        is_reported = False
        poll.register(self.fileno(), event)
        while not poll.poll(1000):
            seconds += 1
            is_suspended = _is_suspended(self.process.pid)
            limit = _SUSPENDED_SECONDS if is_suspended else _PATIENCE_SECONDS
            who = f"worker process {self.process.pid}"
            why = "is suspended" if is_suspended else f"has not answered for {seconds} s"
            if (number := requested_stop()) and (is_suspended or seconds >= limit):
                lost = "the step cannot be finished, so no checkpoint was written"
                raise Interrupted(number, f"interrupted; {who} {why}: {lost}; run again to resume from the last one")
            if seconds >= limit and not is_reported:
                is_reported = True
                remedy = f"`kill -CONT {self.process.pid}` resumes it"
                if not is_suspended:
                    remedy = f"if it never answers, `kill -9 {self.process.pid}` ends the run, which you can resume"
                say(f"warning: {who} {why}, and the run waits for it; {remedy}")


def _is_suspended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"  # proc(5), field 3
    except OSError:
        return False


def _start(memory: int) -> tuple[subprocess.Popen[bytes], _Link]:
    """Starts a worker, without forking, since torch cannot compute in a fork after it has computed gradients."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = _Link(ours.detach())
    link.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the link
    # Stop signals stay blocked in workers: the run handles them and ends its workers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process = link.process = subprocess.Popen(
            python_command(
                f"from electra_fast.distributed import step_processes as s; s.serve_steps({theirs.fileno()})"
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=link.errors,
            pass_fds=(theirs.fileno(), memory),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, link


def _death(process: subprocess.Popen[bytes], link: _Link) -> TrainingFailed:
    code = process.wait()
    link.errors.seek(0)
    errors = link.errors.read().decode(errors="replace")
    remedy = ""
    if lacked_memory(code, errors):
        remedy = "set OMP_NUM_THREADS=1 to train in one process, or raise train.accumulate; then "
    return TrainingFailed(f"a worker process ended ({describe_end(code, errors)}); {remedy}run again to resume")


def _end(processes: list[tuple[subprocess.Popen[bytes], _Link]]) -> None:
    for process, connection in processes:
        connection.close()
        connection.errors.close()
        process.kill()  # it has no state worth keeping
        process.wait()


def serve_steps(descriptor: int) -> None:
    connection = Connection(descriptor)
    try:
        task: _Task = connection.recv()
        with use_compute(task.work.compute):
            _serve(connection, task)
    except (EOFError, ConnectionError):
        return  # the calling process has ended
    except BaseException:
        connection.send(traceback.format_exc())


def _serve(connection: Connection, task: _Task) -> None:
    def wait() -> None:
        connection.send(None)
        connection.recv()

    torch.set_num_threads(task.num_threads)
    keep_freed_memory()
    backward, optimizer = task.work.build_worker(task.rank, task.num_processes)
    worker = _Worker(task.rank, backward, optimizer, task.memory, task.num_processes)
    connection.send(None)
    while True:
        batch, step, lr_scale, num_updates, num_loads = connection.recv()
        if backward.enter(step):
            optimizer.choose_parameters()
        optimizer.num_updates = num_updates
        optimizer.follow_loads(num_loads)
        optimizer.set_step_scalars(lr_scale)
        backward.load(batch, step)
        totals, _ = worker.run(wait)
        connection.send([{name: total.item() for name, total in step_totals.items()} for step_totals in totals])


def keep_freed_memory() -> None:
    """Lets this process reuse the memory that it frees.

    A step allocates and frees buffers of many megabytes. By default glibc returns them to the system, and the next
    step faults in every page again, which takes a quarter of its time (bench/LOG.md). All threads use the main arena,
    since other arenas never grow beyond 64 MB. Does nothing if the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)
    mallopt(_M_TRIM_THRESHOLD, -1)
    if not mallopt(_M_MMAP_THRESHOLD, 2**30):
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)  # the maximum of older versions
