"""The ranks that train one model: who they are and what they tell each other.

Messages of the host (loss denominators, stop flags, objects) go through gloo, tensors of the device through the
device's own backend: NCCL on CUDA. A rank that is alone tells nobody anything.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from electra_fast.errors import ElectraFastError, InputError, ReportedElsewhere, TrainingFailed
from electra_fast.training.launch import Launch
from electra_fast.training.rendezvous import Rendezvous
from electra_fast.training.watchdog import Watchdog

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# Gloo's own limit is longer than the watchdog's, which tells more.
_PATIENCE = 2
# Longest wait for the ranks to come.
_MEETING_SECONDS = 300.0
# What torch says when a rank does not answer; other errors are this rank's own.
_LOST = re.compile(r"onnection|closed|reset by peer|[Tt]imed out|[Tt]imeout|Broken pipe|remote|[Ss]ocket|NCCL.*abort")


class World:
    """One rank among those of a run; alone unless it is made by `join`.

    `node_ranks` are the ranks of this machine, this one included; none unless each machine has as many. `wait_seconds`
    is the time that the host has waited for other ranks, or for the device.
    """

    rank, size = 0, 1

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self.node_ranks: list[int] = []
        self._node_group: Any = None
        self._watchdog: Watchdog | None = None

    @classmethod
    @contextlib.contextmanager
    def join(cls, launch: Launch, folder: Path, timeout_seconds: float) -> Iterator[Self]:
        """The world of the processes that a launcher has started; each must enter.

        Args:
            launch: Which rank this is, and where to meet.
            folder: Of the run; stacks go there if a rank waits too long.
            timeout_seconds: Longest wait for another rank.

        Raises TrainingFailed where the ranks do not meet, and later where one of them is gone.
        """
        world = cls()
        if launch.world_size == 1:
            yield world
            return
        place = world._meet(launch, timeout_seconds)
        world._watchdog = Watchdog(folder / "stacks", world.rank, place.connect(), timeout_seconds)
        try:
            world._find_node_ranks()
            yield world
            world.all_gather(torch.zeros(1))  # nobody leaves while another may still ask the first rank's store
            dist.destroy_process_group()
        finally:
            # After a failure the group is left as it is: to destroy it would wait for ranks that are gone.
            world._watchdog.close()

    def _meet(self, launch: Launch, timeout_seconds: float) -> Rendezvous:
        self.rank, self.size = launch.rank, launch.world_size
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(_device_number(launch))
            backend = "cpu:gloo,cuda:nccl"
        try:
            place = Rendezvous.find(launch, _MEETING_SECONDS)
            dist.init_process_group(
                backend,
                store=place.connect(),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=max(_PATIENCE * timeout_seconds, _MEETING_SECONDS)),
            )
        except (RuntimeError, ValueError) as error:
            raise TrainingFailed(
                f"rank {self.rank}: the {self.size} ranks did not meet at {launch.address}:{launch.port}: "
                f"{_first_line(error)}"
            ) from None
        return place

    def _find_node_ranks(self) -> None:
        """Makes a group of the ranks of each machine, if all have as many."""
        hosts = self.all_gather_object(socket.gethostname())
        machines = [[rank for rank, host in enumerate(hosts) if host == each] for each in dict.fromkeys(hosts)]
        if len({len(ranks) for ranks in machines}) > 1:
            return
        for ranks in machines:
            group = dist.new_group(ranks) if len(machines) > 1 else None  # by all ranks, in the same order
            if self.rank in ranks:
                self.node_ranks, self._node_group = ranks, group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and reports."""
        return self.rank == 0

    def all_gather(self, values: Tensor) -> Tensor:
        """What every rank tells: fp64 on the host, the same shape on each; [...] → [ranks, ...]."""
        if self.size == 1:
            return values[None]
        found = torch.empty(self.size * values.numel(), dtype=values.dtype)
        with self.waiting("the other ranks' news of a step"):
            dist.all_gather_into_tensor(found, values.flatten())
        return found.view(self.size, *values.shape)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over the ranks, the same bits on each."""
        if self.size > 1:
            with self.waiting("a sum over the ranks"):
                dist.all_reduce(tensor)

    def all_gather_into(self, own: Tensor, out: Tensor) -> None:
        """Concatenates flat tensors of one size in the order of the ranks; [n], [ranks * n]."""
        with self.waiting("the other ranks' tensors"):
            dist.all_gather_into_tensor(out, own)

    def all_gather_in_node(self, own: Tensor, out: Tensor) -> None:
        """`all_gather_into` from the ranks of this machine alone; [n], [node_ranks * n]."""
        with self.waiting("the tensors of this machine's ranks"):
            dist.all_gather_into_tensor(out, own, group=self._node_group)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends row r to rank r; the rows that the ranks have for this one, in their order; [ranks, n] → [ranks, n]."""
        found = torch.empty_like(tensor)
        with self.waiting("the other ranks' tensors"):
            dist.all_to_all_single(found.view(-1), tensor.view(-1))
        return found

    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a tensor by that of the first rank."""
        if self.size > 1:
            with self.waiting("the first rank's tensors"):
                dist.broadcast(tensor.detach(), 0)

    def all_gather_object(self, own: Any) -> list[Any]:
        """An object of each rank, in their order."""
        if self.size == 1:
            return [own]
        found: list[Any] = [None] * self.size
        with self.waiting("the other ranks' reports"):
            dist.all_gather_object(found, own)
        return found

    def from_first(self, work: Callable[[], T]) -> T:
        """What a function returns on the first rank; an error there ends the others too, without a word."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, False]
        if self.is_first:
            try:
                outcome = [work(), False]
            except (ElectraFastError, OSError):
                self._broadcast_object([None, True])
                raise
        outcome = self._broadcast_object(outcome)
        if outcome[1]:
            raise ReportedElsewhere
        result: T = outcome[0]
        return result

    def agree(self, work: Callable[[], T]) -> T:
        """What a function returns on this rank, if none of them fails; the first rank reports what failed.

        For work that does not depend on other ranks, such as reading a file that each must see.
        """
        result, error = None, None
        try:
            result = work()
        except (ElectraFastError, OSError) as caught:
            error = caught
        errors = self.all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
        if not any(errors):
            return result  # type: ignore[return-value]  # work returned it
        if error is not None and not any(errors[: self.rank]):
            raise error
        raise ReportedElsewhere

    def _broadcast_object(self, content: list[Any]) -> list[Any]:
        with self.waiting("the first rank's preparations"):
            dist.broadcast_object_list(content, 0, device=torch.device("cpu"))
        return content

    def mesh(self, device_type: str) -> DeviceMesh:
        """All ranks in one dimension, for FSDP."""
        from torch.distributed.device_mesh import init_device_mesh  # here, because it takes a second

        return init_device_mesh(device_type, (self.size,))

    @contextlib.contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Around work in which ranks wait for each other: ends the process if it takes too long.

        Raises TrainingFailed where another rank is gone.
        """
        try:
            with self._watchdog.waiting(what) if self._watchdog else contextlib.nullcontext():
                yield
        except RuntimeError as error:
            if self.size == 1 or not _LOST.search(str(error)):
                raise
            raise TrainingFailed(
                f"rank {self.rank}: lost another rank ({_first_line(error)}); see its log; "
                "start again to resume at the newest checkpoint"
            ) from None

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """`watched` work that is nothing but a wait."""
        start = time.perf_counter()
        try:
            with self.watched(what):
                yield
        finally:
            self.wait_seconds += time.perf_counter() - start


def _device_number(launch: Launch) -> int:
    """The GPU of a rank: its own number, unless the launcher lets each rank see its own alone."""
    num_devices = torch.cuda.device_count()
    if num_devices == 1:
        return 0
    if launch.local_world_size > num_devices:
        raise InputError(
            f"{launch.local_world_size} ranks on a machine with {num_devices} GPUs; start one rank per GPU"
        )
    return launch.local_rank


def _first_line(error: Exception) -> str:
    """The first sentence of one of torch's errors, without the place in its sources."""
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).strip())
    return re.split(r"\.\s|\n", text)[0]
