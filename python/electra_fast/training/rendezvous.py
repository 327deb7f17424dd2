"""Where the ranks of a run find each other: a key-value store on the first one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch's own

from electra_fast.training.launch import Launch

_KEY = "electra-fast"
# How long a try may take to reach a store that may be that of an attempt before.
_TRY_SECONDS = 5.0


class Rendezvous:
    """The first rank's store, to which each rank can make several connections.

    Torchrun has a store of its own, which outlives the ranks: after a restart it still has the keys of those that are
    gone, and new ones would wait for them (pytorch issue 135712). So it only tells where the first rank's store is.

    Args:
        address: Host of the store.
        port: Its port.
        seconds: Longest wait for a connection.
        served: The store, which the first rank has to hold.
    """

    def __init__(self, address: str, port: int, seconds: float, served: Store | None = None) -> None:
        self._address, self._port, self._seconds, self._served = address, port, seconds, served

    @classmethod
    def find(cls, launch: Launch, seconds: float, environment: Mapping[str, str] = os.environ) -> Rendezvous:
        """Makes the store on the first rank, and finds it on the others; RuntimeError if that takes too long."""
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
            place = cls(launch.address, int(agent.get(_KEY)), seconds)
            try:
                _connect(place._address, place._port, _TRY_SECONDS)
                return place
            except RuntimeError:  # a store of the attempt before; the first rank has yet to tell of its own
                if time.monotonic() > end:
                    raise

    def connect(self) -> Store:
        """A connection; one waits for nobody's request on another."""
        return _connect(self._address, self._port, self._seconds)


def _serve(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _connect(address: str, port: int, seconds: float) -> TCPStore:
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=seconds))
