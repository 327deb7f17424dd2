"""The rendezvous of a run's ranks: a key-value store on the first rank."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch's own

from electra_fast.training.launch import Launch

_KEY = "electra-fast"
# Timeout of a connection to a store that may belong to an earlier attempt.
_TRY_SECONDS = 5.0


class Rendezvous:
    """The first rank's store, to which each rank can make several connections.

    Torchrun's own store outlives the ranks: after a restart it still has the keys of lost ranks, for which new ones
    would wait (pytorch issue 135712). So it only holds the address of the first rank's store.

    Args:
        address: Host of the store.
        port: Port of the store.
        seconds: Longest wait for a connection.
        served: The store itself, kept by the first rank.
    """

    def __init__(self, address: str, port: int, seconds: float, served: Store | None = None) -> None:
        self._address, self._port, self._seconds, self._served = address, port, seconds, served

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
            except RuntimeError:  # the store of an earlier attempt; the first rank has not yet set its own
                if time.monotonic() > end:
                    raise

    def connect(self) -> Store:
        """Returns a new connection, which does not wait for requests on others."""
        return _connect(self._address, self._port, self._seconds)


def _serve(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _connect(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
