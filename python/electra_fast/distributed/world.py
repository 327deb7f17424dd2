"""The ranks that train one model, and their collectives.

Host data (loss denominators, stop flags, objects) go through gloo, device tensors through the device's backend: NCCL on
CUDA. A single rank does not communicate.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch's own

from electra_fast.distributed.launch import Launch
from electra_fast.distributed.watchdog import Watchdog
from electra_fast.errors import ElectraFastError, InputError, ReportedElsewhere, TrainingFailed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

# Gloo's timeout as a multiple of the watchdog's, so that the watchdog, whose report is more helpful, acts first.
_PATIENCE = 2
# Longest wait for the rendezvous.
_MEETING_SECONDS = 300.0
# Timeout of a connection to a store that may belong to an earlier attempt.
_TRY_SECONDS = 5.0
# Long waits consist of waits of this length, shorter than any timeout of the watchdog.
_TURN_SECONDS = 0.5
# Key in torchrun's store of the address of the first rank's store.
_KEY = "electra-fast"
# Matches torch's errors about lost ranks; other errors are about this rank.
_LOST = re.compile(r"onnection|closed|reset by peer|[Tt]imed out|[Tt]imeout|Broken pipe|remote|[Ss]ocket|NCCL.*abort")


class Rendezvous:
    """The first rank's store. Each rank can open several connections to it.

    Torchrun's store outlives the ranks: after a restart it still has the keys of lost ranks, and new ranks would wait
    for them (pytorch issue 135712). So it only holds the address of the first rank's store, which that rank keeps as
    `served`. Connecting takes at most `seconds`.
    """

    def __init__(self, address: str, port: int, seconds: float, served: Store | None = None) -> None:
        self._address = address
        self._port = port
        self._seconds = seconds
        self._served = served

    @classmethod
    def find(cls, launch: Launch, seconds: float, environment: Mapping[str, str] = os.environ) -> Rendezvous:
        """Creates the store on the first rank and finds it on the others. Raises RuntimeError after `seconds`."""
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            served = _serve(launch.address, launch.port, seconds) if launch.rank == 0 else None
            return cls(launch.address, launch.port, seconds, served)
        agent = _connect(launch.address, launch.port, seconds)
        if launch.rank == 0:
            served = _serve(launch.address, 0, seconds)
            agent.set(_KEY, str(served.port))
            return cls(launch.address, served.port, seconds, served)
        end = time.monotonic() + seconds
        while True:
            rendezvous = cls(launch.address, int(agent.get(_KEY)), seconds)
            try:
                _connect(rendezvous._address, rendezvous._port, _TRY_SECONDS)
                return rendezvous
            except RuntimeError:  # the address is of an earlier attempt; the first rank has not set the new one yet
                if time.monotonic() > end:
                    raise

    def connect(self) -> Store:
        """Returns a new connection, which does not wait for requests on other connections."""
        return _connect(self._address, self._port, self._seconds)


def _serve(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _connect(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))


class World:
    """One rank of a run; the only one unless created by `join`.

    `node_ranks` are the ranks of this machine, including this one; empty unless all machines have the same number.
    `wait_seconds` is the time that the host has waited for other ranks or the device.
    """

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.wait_seconds = 0.0
        self.node_ranks: list[int] = []
        self._node_group: Any = None
        self._watchdog: Watchdog | None = None

    @classmethod
    @contextlib.contextmanager
    def join(cls, launch: Launch, folder: Path, timeout_seconds: float, *, has_gpu: bool = True) -> Iterator[Self]:
        """Joins the processes of a launcher, all of which must enter this context.

        Ranks that wait too long write their stacks to the run's `folder`. With `has_gpu`, this rank takes a GPU if the
        machine has any.

        Raises TrainingFailed if the ranks do not meet, and later if one is lost.
        """
        world = cls()
        if launch.world_size == 1:
            yield world
            return
        rendezvous = world._meet(launch, timeout_seconds, has_gpu=has_gpu)
        world._watchdog = Watchdog(folder / "stacks", world.rank, rendezvous.connect(), timeout_seconds)
        try:
            world._find_node_ranks()
            yield world
            world.all_gather(torch.zeros(1))  # no rank leaves while others may need the first rank's store
            dist.destroy_process_group()
        finally:
            # After a failure the group is not destroyed, since that would wait for lost ranks.
            world._watchdog.close()

    def _meet(self, launch: Launch, timeout_seconds: float, *, has_gpu: bool) -> Rendezvous:
        self.rank = launch.rank
        self.size = launch.world_size
        backend = "gloo"
        if has_gpu and torch.cuda.is_available():
            torch.cuda.set_device(_device_number(launch))
            backend = "cpu:gloo,cuda:nccl"
        try:
            rendezvous = Rendezvous.find(launch, _MEETING_SECONDS)
            dist.init_process_group(
                backend,
                store=rendezvous.connect(),
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=max(_PATIENCE * timeout_seconds, _MEETING_SECONDS)),
            )
        except (RuntimeError, ValueError) as error:
            raise TrainingFailed(
                f"rank {self.rank}: the {self.size} ranks did not meet at {launch.address}:{launch.port}: "
                f"{_first_line(error)}; start all ranks within {_MEETING_SECONDS / 60:.0f} minutes, on machines that "
                "can connect to this address"
            ) from None
        return rendezvous

    def _find_node_ranks(self) -> None:
        """Creates a group of the ranks of each machine, if all machines have the same number."""
        hosts = self.all_gather_object(socket.gethostname())
        machines = [[rank for rank, host in enumerate(hosts) if host == machine] for machine in dict.fromkeys(hosts)]
        if len({len(ranks) for ranks in machines}) > 1:
            return
        for ranks in machines:
            group = dist.new_group(ranks) if len(machines) > 1 else None  # by all ranks, in the same order
            if self.rank in ranks:
                self.node_ranks = ranks
                self._node_group = group

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def all_gather(self, values: Tensor) -> Tensor:
        """Gathers fp64 host tensors of the same shape from all ranks; [...] → [ranks, ...]."""
        if self.size == 1:
            return values[None]
        gathered = torch.empty(self.size * values.numel(), dtype=values.dtype)
        with self.waiting("the other ranks' flags of a step"):
            dist.all_gather_into_tensor(gathered, values.flatten())
        return gathered.view(self.size, *values.shape)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over the ranks, bitwise equal on all."""
        if self.size > 1:
            with self.waiting("a sum over the ranks"):
                dist.all_reduce(tensor)

    def all_gather_into(self, local: Tensor, out: Tensor) -> None:
        """Concatenates flat tensors of one size in rank order; [n], [ranks * n]."""
        with self.waiting("the other ranks' tensors"):
            dist.all_gather_into_tensor(out, local)

    def all_gather_in_node(self, local: Tensor, out: Tensor) -> None:
        """As `all_gather_into`, among the ranks of this machine; [n], [node_ranks * n]."""
        with self.waiting("the tensors of this machine's ranks"):
            dist.all_gather_into_tensor(out, local, group=self._node_group)

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Sends row r to rank r; returns the rows received, in rank order; [ranks, n] → [ranks, n]."""
        received = torch.empty_like(tensor)
        with self.waiting("the other ranks' tensors"):
            dist.all_to_all_single(received.view(-1), tensor.view(-1))
        return received

    def broadcast(self, tensor: Tensor) -> None:
        if self.size > 1:
            with self.waiting("the first rank's tensors"):
                dist.broadcast(tensor.detach(), 0)

    def all_gather_object(self, local: Any) -> list[Any]:
        """Gathers an object from each rank, in rank order."""
        if self.size == 1:
            return [local]
        gathered: list[Any] = [None] * self.size
        with self.waiting("the other ranks' reports"):
            dist.all_gather_object(gathered, local)
        return gathered

    def from_first(self, work: Callable[[], T]) -> T:
        """Runs a function on the first rank and returns its result on all ranks. An error ends the others silently."""
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

    def from_first_patiently(self, work: Callable[[], T]) -> T:
        """As `from_first`, for work that may take longer than the watchdog's timeout, such as a download."""
        if self.size == 1:
            return work()
        with ThreadPoolExecutor(1, "first") as executor:
            future = executor.submit(work) if self.is_first else None
            while not self.from_first(lambda: not futures.wait([cast(Future[T], future)], _TURN_SECONDS).not_done):
                pass
            return self.from_first(lambda: cast(Future[T], future).result())

    def agree(self, work: Callable[[], T]) -> T:
        """Runs a function on each rank; returns its result, or raises the error of the first rank that failed.

        For work that does not depend on other ranks, such as reading a file.
        """
        result = None
        error = None
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
        from torch.distributed.device_mesh import init_device_mesh  # takes a second

        return init_device_mesh(device_type, (self.size,))

    @contextlib.contextmanager
    def watched(self, event: str) -> Iterator[None]:
        """Watches work in which ranks wait for each other: ends the process if it takes too long.

        Raises TrainingFailed if another rank is lost.
        """
        try:
            with self._watchdog.waiting(event) if self._watchdog else contextlib.nullcontext():
                yield
        except RuntimeError as error:
            if self.size == 1 or not _LOST.search(str(error)):
                raise
            raise TrainingFailed(
                f"rank {self.rank}: lost another rank ({_first_line(error)}); see its log; "
                "start again to resume at the newest checkpoint"
            ) from None

    @contextlib.contextmanager
    def waiting(self, event: str) -> Iterator[None]:
        """Watches a wait without work, and adds its duration to `wait_seconds`."""
        start = time.perf_counter()
        try:
            with self.watched(event):
                yield
        finally:
            self.wait_seconds += time.perf_counter() - start


def _device_number(launch: Launch) -> int:
    """Returns the index of a rank's GPU: its local rank, or 0 if the launcher shows each rank one GPU."""
    num_devices = torch.cuda.device_count()
    if num_devices == 1:
        return 0
    if launch.local_world_size > num_devices:
        raise InputError(
            f"{launch.local_world_size} ranks were started on a machine with {num_devices} GPUs; start one rank per GPU"
        )
    return launch.local_rank


def _first_line(error: Exception) -> str:
    text = re.sub(r"^\[[^\]]*\] ", "", str(error).strip())
    return re.split(r"\.\s|\n", text)[0]
