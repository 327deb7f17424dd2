"""Forward and backward of a step on a CPU by several processes, each with rows and cores of its own.

OpenMP divides every single operation, and its threads wait for each other thousands of times per step: spinning,
which is ruinous beside any other process, or sleeping, which costs more than small operations take. Threads with rows
of their own share Python's lock and torch's random generator. Processes share nothing but the parameters, their
moments and gradients, and wait for each other three times per step (bench/LOG.md).
"""

from __future__ import annotations

import json
import math
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from electra_fast.config.config import Config
from electra_fast.errors import Interrupted, TrainingFailed
from electra_fast.interruption import SIGNALS, requested_stop
from electra_fast.model.matmul import use_matmul
from electra_fast.optimizers.optimizer import Optimizer, global_norm
from electra_fast.training.allocator import keep_freed_memory
from electra_fast.training.backward import GradientComputation, Work

# Each further process holds some 300 MB and a copy of the gradients.
MAX_PROCESSES = 8
# After so long without an answer, a helper is named; the limits of one that is suspended, and of any other.
_SUSPENDED_SECONDS, _PATIENCE_SECONDS = 3, 60
# Floats in a cache line, at which each shared tensor begins.
_ALIGNMENT = 16
_MAIN = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from electra_fast.training import step_processes as s"


def choose_num_processes(config: Config, device: torch.device) -> int:
    """Among how many processes to divide each micro-batch: as many as there can be, but a divisor of its rows."""
    rows = config.train.batch_size // config.train.accumulate
    return max(n for n in range(1, max_processes(device) + 1) if rows % n == 0)


def max_processes(device: torch.device) -> int:
    """How many processes can share a step: as many as torch's threads, up to `MAX_PROCESSES`.

    1 on devices other than the CPU, and where the system has no anonymous files (they are Linux').
    """
    if device.type != "cpu" or not hasattr(os, "memfd_create"):
        return 1
    return min(MAX_PROCESSES, torch.get_num_threads())


class _Share:
    """One process' share of a step: rows whose gradients it computes, and parameters that it updates.

    Args:
        rank: Which process this is.
        backward: Of the process' rows.
        optimizer: Of the model's parameters, which like its moments move to the shared memory.
        memory: Descriptor of the shared memory.
        num_processes: How many share it.
    """

    def __init__(
        self, rank: int, backward: GradientComputation, optimizer: Optimizer, memory: int, num_processes: int
    ) -> None:
        self.backward, self.optimizer, self._rank = backward, optimizer, rank
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
        # How many rows of a gradient are given, and which; -1: all of them.
        self._rows = [{name: next(rest).view(torch.int32) for name in self._tables} for _ in range(num_processes)]
        optimizer.divide(rank, num_processes)

    def run(self, wait: Callable[[], None]) -> tuple[list[dict[str, Any]], Tensor]:
        """Takes the step for which `backward` and `optimizer` are prepared; calls `wait` where all must have arrived.

        Returns the metric totals of its micro-batches, and the norm of all gradients. Gradients are added in the order
        of the processes, whichever ends first, so that a run repeats to the bit.
        """
        optimizer = self.optimizer
        optimizer.zero_grad()
        totals = self.backward.run()
        gradients, own_names = optimizer.gradients(), optimizer.own_names
        for name in gradients.keys() - own_names:
            self._give(name, gradients[name])
        wait()
        others = [rank for rank in range(len(self._gradients)) if rank != self._rank]
        for name in own_names:
            for rank in others:
                self._add_given(name, rank, gradients[name])
            self._norms[name].copy_(gradients[name].norm())
        wait()
        return totals, optimizer.step(global_norm(self._norms[name] for name in optimizer.parameters))

    def _give(self, name: str, gradient: Tensor) -> None:
        """Copies a gradient, or the rows of it that are not zero, to where the other processes read it."""
        shared, rows = self._gradients[self._rank][name], self.optimizer.gradient_rows.get(name)
        if rows is None:
            shared.copy_(gradient)
        else:
            shared.index_copy_(0, rows, gradient.index_select(0, rows))
        if name in self._tables:
            given = self._rows[self._rank][name]
            given[0] = -1 if rows is None else len(rows)
            if rows is not None:
                given[1 : 1 + len(rows)] = rows

    def _add_given(self, name: str, rank: int, gradient: Tensor) -> None:
        """Adds what another process gave."""
        shared, num_rows = self._gradients[rank][name], -1
        if name in self._tables:
            given = self._rows[rank][name]
            num_rows = int(given[0])
        if num_rows < 0:
            gradient += shared
            self.optimizer.forget_rows(name)
            return
        rows = given[1 : 1 + num_rows].long()
        self.optimizer.add_rows(name, rows, shared.index_select(0, rows))


@dataclass(frozen=True)
class _Task:
    """What a helper needs to know before the first step."""

    work: Work
    rank: int
    num_processes: int
    num_threads: int
    memory: int


class StepProcesses:
    """Helpers of the calling process, each of which takes a share of the steps as the calling process does.

    They end with this object, with `close`, or with the calling process, however that ends.

    Args:
        backward: Of the calling process, which is the first. The model's parameters and the optimizer's moments move
            to memory that all processes share: what is copied to them is seen by all.
        optimizer: Of the model's parameters.
        work: Of which the helpers take shares.
        num_processes: At least 2.
    """

    def __init__(self, backward: GradientComputation, optimizer: Optimizer, work: Work, num_processes: int) -> None:
        self._num_cores = torch.get_num_threads()
        self._num_threads = max(1, self._num_cores // num_processes)
        memory = os.memfd_create("electra-fast")
        self._share = _Share(0, backward, optimizer, memory, num_processes)
        self._helpers: list[tuple[subprocess.Popen[bytes], _Link]] = []
        self.close = weakref.finalize(self, _end, self._helpers)
        try:
            for rank in range(1, num_processes):
                process, link = _start(memory)
                self._helpers.append((process, link))
                link.send(_Task(work, rank, num_processes, self._num_threads, memory))
            self._receive()  # all are ready
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def start(self, batch: Any, step: int, lr_scale: float) -> None:
        """Lets the helpers begin with a step, before the optimizer's scalars are set for it."""
        self._send((batch, step, lr_scale, self._share.optimizer.num_updates))

    def run(self) -> tuple[list[dict[str, Any]], Tensor]:
        """The calling process' share of the step, for which its batch and the optimizer's scalars are set by now.

        Returns the metric totals of all micro-batches and the gradients' norm. Raises TrainingFailed where a helper has
        died, and Interrupted at a stop that a helper keeps the step from reaching.
        """
        try:
            torch.set_num_threads(self._num_threads)
            totals, norm = self._share.run(self._wait)
            for each in self._receive():
                totals += each
        except BaseException:
            self.close()  # a helper may be about to answer a question that nobody will ask again
            raise
        finally:
            torch.set_num_threads(self._num_cores)
        return totals, norm

    def _wait(self) -> None:
        self._receive()
        self._send(None)

    def _receive(self) -> list[Any]:
        """An answer of each helper; raises TrainingFailed or RuntimeError where one has none."""
        answers = []
        for process, connection in self._helpers:
            try:
                answers.append(connection.recv())
            except (EOFError, OSError):
                raise _death(process) from None
            if isinstance(answers[-1], str):
                raise RuntimeError(f"a process that helps with the step failed:\n{answers[-1]}")
        return answers

    def _send(self, message: object) -> None:
        for process, connection in self._helpers:
            try:
                connection.send(message)
            except OSError:
                raise _death(process) from None


def _views(memory: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors like these, one after another in the memory, each at the beginning of a cache line."""
    sizes = [math.ceil(tensor.numel() / _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    os.ftruncate(memory, 4 * sum(sizes))
    flat = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.float32)
    parts = torch.split(flat, sizes)
    return [part[: tensor.numel()].view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class _Link(Connection):
    """The run's end of the connection to a helper, which may be suspended: neither end of a message waits for ever."""

    process: subprocess.Popen[bytes]

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
        """Waits until there is something to read, or room to write; Interrupted if that keeps the run from stopping."""
        poll, seconds, is_named = select.poll(), 0, False
        poll.register(self.fileno(), event)
        while not poll.poll(1000):
            seconds += 1
            is_suspended = _is_suspended(self.process.pid)
            limit = _SUSPENDED_SECONDS if is_suspended else _PATIENCE_SECONDS
            who = f"process {self.process.pid}, which helps with the step,"
            why = "is suspended" if is_suspended else f"has not answered for {seconds} s"
            if (number := requested_stop()) and (is_suspended or seconds >= limit):
                lost = "the step cannot be finished, so there is no checkpoint of this moment"
                raise Interrupted(number, f"interrupted; {who} {why}: {lost}; run again to resume from the last one")
            if seconds >= limit and not is_named:
                is_named = True
                remedy = f"; `kill -CONT {self.process.pid}` resumes it" if is_suspended else ""
                print(f"warning: {who} {why}, and the run waits for it{remedy}", file=sys.stderr)


def _is_suspended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"  # proc(5), field 3
    except OSError:
        return False


def _start(memory: int) -> tuple[subprocess.Popen[bytes], _Link]:
    """A helper, not forked, since torch computes nothing in a fork of a process in which it has computed gradients."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = _Link(ours.detach())
    # A stop is between the user and the run, which ends its helpers: signals stay blocked in them.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        process = link.process = subprocess.Popen(
            [sys.executable, "-c", f"{_MAIN}; s.help_with_steps({theirs.fileno()})", json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), memory),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return process, link


def _death(process: subprocess.Popen[bytes]) -> TrainingFailed:
    code = process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return TrainingFailed(
        f"a process that helps with the step {how}; if it ran out of memory, use fewer (OMP_NUM_THREADS=1: none) or a "
        "larger train.accumulate; run again to resume"
    )


def _end(helpers: list[tuple[subprocess.Popen[bytes], _Link]]) -> None:
    for process, connection in helpers:
        connection.close()
        process.kill()  # it holds nothing that is worth keeping
        process.wait()


def help_with_steps(descriptor: int) -> None:
    """The main function of a helper: takes tasks from a connection until it closes."""
    connection = Connection(descriptor)
    try:
        task: _Task = connection.recv()
        with use_matmul(task.work.compute.matmul):
            _help(connection, task)
    except (EOFError, ConnectionError):
        return  # the calling process has ended
    except BaseException:
        connection.send(traceback.format_exc())


def _help(connection: Connection, task: _Task) -> None:
    def wait() -> None:
        connection.send(None)
        connection.recv()

    torch.set_num_threads(task.num_threads)
    keep_freed_memory()
    backward, optimizer = task.work.share(task.rank, task.num_processes)
    share = _Share(task.rank, backward, optimizer, task.memory, task.num_processes)
    connection.send(None)
    while True:
        batch, step, lr_scale, num_updates = connection.recv()
        if backward.enter(step):
            optimizer.choose_parameters()
        optimizer.num_updates = num_updates
        optimizer.set_step_scalars(lr_scale)
        backward.load(batch, step)
        totals, _ = share.run(wait)
        connection.send([{name: total.item() for name, total in each.items()} for each in totals])
