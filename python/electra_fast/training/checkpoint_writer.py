"""Checkpoints written while the training goes on: copied to host memory at once, then to disk by a thread.

The training waits for the copy, and for an earlier write that has not ended. `checkpoint` has what is written: it
comes from the copies, so the trainer may change model, moments and state as soon as `save` has returned.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from electra_fast import checkpoint
from electra_fast.config.config import Config
from electra_fast.files.checkpoint_folder import TrainState


class CheckpointWriter:
    """Writes a run's checkpoints in order, one at a time, in a thread for which the interpreter's exit waits.

    It holds a copy of all tensors in host memory, page-locked where they come from a GPU.

    `num_written` and `write_seconds` count the writes that have ended, failed ones with their seconds only;
    `last_write_seconds` is of the last. `blocked_seconds` is how long callers spent in `save`, `wait` and `close`.

    Args:
        run: The run's folder.
        keep: How many checkpoints to keep.
    """

    def __init__(self, run: Path, keep: int) -> None:
        self._run, self._keep = run, keep
        self.num_written = 0
        self.write_seconds, self.last_write_seconds, self.blocked_seconds = 0.0, 0.0, 0.0
        # Not a `Thread` of its own, whose `join` takes a running thread for a stopped one when a signal interrupts it
        # (Python 3.9 to 3.12): the exit would not wait for the write.
        self._executor = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        # Where to copy the next checkpoint's model and optimizer; a write owns its buffers until it has ended, so that
        # no interrupt can let them be overwritten before.
        self._buffers: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})

    def save(
        self, config: Config, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], state: TrainState
    ) -> None:
        """Copies all that makes the checkpoint of `state.step` and starts to write it.

        Waits for an earlier write first and raises what that failed with; nothing new is started then.

        Args:
            config: Of the model.
            tensors: What `checkpoint.stored` returns, on any device.
            optimizer: Its state dictionary, on any device.
            state: Copied with all that it refers to.
        """
        with self._blocked():
            self._finish()
            buffers, self._buffers = self._buffers, ({}, {})
            copies = _copy_to_host(tensors, buffers[0]), _copy_to_host(optimizer, buffers[1])
            for device in {tensor.device for tensor in (*tensors.values(), *optimizer.values()) if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            self._pending = self._executor.submit(self._run_write, config, copies, copy.deepcopy(state))

    def check(self) -> None:
        """Raises, once, what a write that has ended failed with: OSError naming the checkpoint; never waits."""
        if self._pending is not None and self._pending.done():
            self._finish()

    def wait(self) -> None:
        """Waits for the write in progress and raises what it failed with."""
        with self._blocked():
            self._finish()

    def wait_up_to(self, seconds: float) -> bool:
        """As `wait`, but no longer than so many seconds; tells whether no write is in progress."""
        with self._blocked():
            if self._pending is not None:
                futures.wait([self._pending], seconds)
            self.check()
        return self._pending is None

    def close(self) -> None:
        """As `wait`; there can be no `save` afterwards. Interrupted while waiting, it leaves the write to end."""
        try:
            self.wait()
        finally:
            self._executor.shutdown(wait=False)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            if self._pending.done():  # or else a signal interrupted the wait
                self._pending = None

    def _run_write(
        self, config: Config, copies: tuple[dict[str, Tensor], dict[str, Tensor]], state: TrainState
    ) -> None:
        start = time.perf_counter()
        try:
            checkpoint.write(self._run, config, *copies, state, self._keep)
            self.num_written += 1
        finally:
            self.last_write_seconds = time.perf_counter() - start
            self.write_seconds += self.last_write_seconds
            self._buffers = copies

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_seconds += time.perf_counter() - start


def _copy_to_host(tensors: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies into the buffers of the same names, or into new ones where those don't fit.

    Copies from a GPU have only been started; they are complete when the current stream is.
    """
    copies = {}
    for name, tensor in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copies[name] = buffer.copy_(tensor.detach(), non_blocking=True)
    return copies
