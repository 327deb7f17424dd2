"""`prepare --scheduler`: an executor of the workers of a Dask scheduler (the extra `dask`)."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from concurrent.futures import Executor

from electra_fast.errors import InputError

# How long to try to reach the scheduler.
CONNECT_SECONDS = 5


@contextlib.contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """An executor of the scheduler at `address` (`tcp://host:8786`), which repeats the tasks of workers that die.

    Raises:
        InputError: `distributed` is not installed, or no scheduler answers, or it has no workers.
    """
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ImportError as error:
        raise InputError("--scheduler needs Dask: pip install distributed") from error
    for name in ("distributed", "distributed.client"):  # its tracebacks would bury our one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        # A client that cannot connect does not close well, so it is not made where nobody listens.
        host, port = get_address_host_port(address)
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"--scheduler {address}: no Dask scheduler answers there ({reason}); check it") from error
    with client:
        if not client.scheduler_info()["workers"]:
            raise InputError(f"--scheduler {address}: it has no workers; start some with `dask worker {address}`")
        yield client.get_executor()
