"""Asynchronous checkpoints: copied to host memory immediately, then written to disk in a thread.

Training waits only for the copy and for an unfinished earlier write. After `save` returns, the trainer may change
model, moments and state.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from electra_fast import checkpoint
from electra_fast.config.config import Config
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.training.mirror import Mirror


class CheckpointWriter:
    """Writes a run's checkpoints one at a time in a thread. At exit, the interpreter waits for the thread.

    It holds a copy of all tensors in host memory, pinned if they come from a GPU.

    `num_written` is the number of successful writes, `last_write_seconds` the duration of the last one, and
    `blocked_seconds` the time that callers spent in `save`, `wait_up_to` and `close`. `mirror` gets each complete
    checkpoint.
    """

    def __init__(self, run: Path, keep: int, mirror: Mirror | None = None) -> None:
        self._run = run
        self._keep = keep
        self._mirror = mirror
        self.num_written = 0
        self.last_write_seconds = 0.0
        self.blocked_seconds = 0.0
        self._written: list[int] = []
        # Not a `Thread`: in Python 3.9 to 3.12, a signal that interrupts `join` makes a running thread look stopped,
        # and the interpreter would not wait for the write at exit.
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        # Buffers for the next checkpoint's model and optimizer. A write owns its buffers until it ends, so that no
        # interrupt can cause them to be overwritten early.
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def save(
        self, config: Config, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: TrainState
    ) -> None:
        """Copies the checkpoint of `state.step` and starts to write it.

        First waits for an earlier write. If that failed, raises its error and writes nothing. `tensors` comes from
        `checkpoint.stored`, `optimizer` has the optimizer's tensors; both on any device. The state is copied deeply.
        """
        with self._blocked():
            self._finish()
            buffers = self._buffers
            self._buffers = ({}, {})
            copies = _copy_to_host(tensors, buffers[0]), _copy_to_host(optimizer, buffers[1])
            for device in {tensor.device for tensor in (*tensors.values(), *optimizer.values()) if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            self._pending = self._executor.submit(self._run_write, config, copies, copy.deepcopy(state))

    def check(self) -> None:
        """Raises the error of a failed write once, an OSError with the checkpoint's name; never waits."""
        if self._pending is not None and self._pending.done():
            self._finish()

    def take_written(self) -> list[int]:
        written = self._written
        self._written = []
        return written

    def wait_up_to(self, seconds: float) -> bool:
        """Waits up to `seconds` for the write in progress, then does `check`. Returns whether all writes have ended."""
        with self._blocked():
            if self._pending is not None:
                futures.wait([self._pending], seconds)
            self.check()
        return self._pending is None

    def close(self) -> None:
        """Waits for the write in progress and raises its error. `save` must not be called afterwards.

        If the wait is interrupted, the write still finishes.
        """
        try:
            with self._blocked():
                self._finish()
        finally:
            self._executor.shutdown(wait=False)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, value: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as error:
            if value is None:
                raise
            value.add_note(str(error))

    def _finish(self) -> None:
        if self._pending is None:
            return
        try:
            self._pending.result()
        finally:
            if self._pending.done():  # otherwise a signal interrupted the wait
                self._pending = None

    def _run_write(
        self, config: Config, copies: tuple[dict[str, Tensor], dict[str, Tensor]], state: TrainState
    ) -> None:
        start = time.perf_counter()
        try:
            checkpoint.write(self._run, config, *copies, state, self._keep)
            self.num_written += 1
            self._written.append(state.step)
            if self._mirror is not None:
                self._mirror.add(state.step, state.best_step)
        finally:
            self.last_write_seconds = time.perf_counter() - start
            self._buffers = copies

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_seconds += time.perf_counter() - start


def _copy_to_host(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies tensors into the buffers with their names, or into new buffers if these do not fit.

    Copies from a GPU are asynchronous, on the current stream.
    """
    copies = {}
    for name, tensor in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
    return copies
