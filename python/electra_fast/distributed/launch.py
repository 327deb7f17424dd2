"""The rank of this process and the number of ranks, from the environment of torchrun.

Does not import torch, so that a wrong launch is reported at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from electra_fast.errors import InputError

_RUN_ID = "TORCHELASTIC_RUN_ID"  # only torchrun sets it
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
REMEDY = "start the ranks with torchrun, or set WORLD_SIZE=1 to train on one device"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One of the processes that train a model; by default the only one."""

    rank: int = 0
    """Number of this process among all, from 0."""
    world_size: int = 1
    """Processes on all nodes."""
    local_rank: int = 0
    """Number of this process on its node, from 0: the index of its GPU."""
    local_world_size: int = 1
    """Processes on this node."""
    address: str = ""
    """Host of rank 0; empty for a single process."""
    port: int = 0
    """TCP port of the rendezvous on that host; 0 for a single process."""
    launcher: str = ""
    """"torchrun", "env" if something else set the variables, or empty for a plain start."""
    attempt: int = 0
    """Number of times that torchrun has restarted the ranks of this node; may differ between nodes."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """Reads torchrun's variables. With `WORLD_SIZE=1`, every process trains a separate model.

        Args:
            environ: Environment variables; empty ones count as unset: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
                MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT
                (https://docs.pytorch.org/docs/stable/elastic/run.html).

        Raises:
            InputError: One of several ranks has a missing or impossible variable.
        """
        if not environ.get("WORLD_SIZE"):
            tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
            if tasks not in ("", "0", "1"):  # set by srun; a batch script is one task
                raise InputError(f"srun has started {tasks} tasks, and each would train a separate model; {REMEDY}")
            if environ.get("RANK", "0") in ("", "0"):
                return cls()
            raise InputError(
                f"RANK = {environ['RANK']}: WORLD_SIZE is not set; set both, or neither to train on one device"
            )
        world_size = _integer(environ, "WORLD_SIZE", 1)
        launcher = "torchrun" if environ.get(_RUN_ID) else "env"
        attempt = _integer(environ, _RESTARTS, 0) if environ.get(_RESTARTS) else 0
        if world_size == 1:
            return cls(launcher=launcher, attempt=attempt) if launcher == "torchrun" else cls()
        local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1, world_size)
        return cls(
            rank=_integer(environ, "RANK", 0, world_size - 1),
            world_size=world_size,
            local_rank=_integer(environ, "LOCAL_RANK", 0, local_world_size - 1),
            local_world_size=local_world_size,
            address=_text(environ, "MASTER_ADDR"),
            port=_integer(environ, "MASTER_PORT", 1, 2**16 - 1),
            launcher=launcher,
            attempt=attempt,
        )


def is_restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether torchrun has restarted this process, or SLURM its job, with the original command."""
    return any(environ.get(name, "") not in ("", "0") for name in (_RESTARTS, "SLURM_RESTART_COUNT"))


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InputError(f"{name} is not set, but this is one of several ranks; {REMEDY}")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    text = _text(environ, name)
    is_whole = text.isascii() and text.isdigit()
    if not is_whole or int(text) < low or (high is not None and int(text) > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{name} = {text}: must be a whole number {bounds}; {REMEDY}")
    return int(text)
