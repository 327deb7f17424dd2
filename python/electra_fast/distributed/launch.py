"""The rank of this process and the number of ranks, from the environment of torchrun or srun.

Does not import torch, so that a wrong launch is reported at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from electra_fast.errors import InputError

MAX_PORT = 2**16 - 1
# Range of the default ports for the rendezvous of a job step.
SLURM_PORTS = range(20_000, 60_000)
# SLURM_MAX_NORMAL_STEP_ID in slurm.h; higher numbers denote the batch script, an interactive shell and the like.
MAX_SLURM_STEP = 0xFFFF_FFF0
_RUN_ID = "TORCHELASTIC_RUN_ID"  # which only torchrun sets
REMEDY = "start the ranks with torchrun or srun, or set WORLD_SIZE=1 to train on one device"


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
    """"torchrun", "srun", "env" if something else set the variables, or empty for a plain start."""
    attempt: int = 0
    """How often torchrun has restarted the ranks of this node; may differ between nodes."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        """Reads the variables of torchrun or, in a job step of several tasks, of srun.

        Torchrun's take precedence, since srun may start torchrun. A batch script or an interactive shell of SLURM is a
        single process for any number of tasks. With `WORLD_SIZE=1`, every process trains a model of its own.

        Args:
            environ: Environment variables; empty ones count as unset. torchrun: RANK, WORLD_SIZE, LOCAL_RANK,
                LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT
                (https://docs.pytorch.org/docs/stable/elastic/run.html). srun: SLURM_STEP_ID, SLURM_STEP_NUM_TASKS,
                SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE, SLURM_STEP_NODELIST and
                SLURM_JOB_ID (https://slurm.schedmd.com/srun.html), and MASTER_ADDR and MASTER_PORT if they are set.

        Raises:
            InputError: One of several ranks has a missing or impossible variable.
        """
        world_size = _integer(environ, "WORLD_SIZE", 1) if environ.get("WORLD_SIZE") else None
        if world_size == 1:
            return cls(launcher="torchrun", attempt=_attempt(environ)) if environ.get(_RUN_ID) else cls()
        if _num_slurm_tasks(environ) > 1 and not environ.get("RANK"):
            return _from_srun(environ, world_size)
        if world_size is not None:
            return _from_torchrun(environ, world_size)
        if environ.get("RANK", "0") not in ("", "0"):
            raise InputError(
                f"RANK = {environ['RANK']} without WORLD_SIZE: set both, or neither to train on one device"
            )
        return cls()


def is_restarted(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether torchrun has restarted this process, or SLURM its job, with the original command."""
    return any(environ.get(name, "") not in ("", "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def _attempt(environ: Mapping[str, str]) -> int:
    return _integer(environ, "TORCHELASTIC_RESTART_COUNT", 0) if environ.get("TORCHELASTIC_RESTART_COUNT") else 0


def _from_torchrun(environ: Mapping[str, str], world_size: int) -> Launch:
    local_world_size = _integer(environ, "LOCAL_WORLD_SIZE", 1, world_size)
    return Launch(
        rank=_integer(environ, "RANK", 0, world_size - 1),
        world_size=world_size,
        local_rank=_integer(environ, "LOCAL_RANK", 0, local_world_size - 1),
        local_world_size=local_world_size,
        address=_text(environ, "MASTER_ADDR"),
        port=_integer(environ, "MASTER_PORT", 1, MAX_PORT),
        launcher="torchrun" if environ.get(_RUN_ID) else "env",
        attempt=_attempt(environ),
    )


def _num_slurm_tasks(environ: Mapping[str, str]) -> int:
    """Returns the number of tasks of the job step in which srun started this process; 0 outside of one.

    A batch script also has SLURM_PROCID, SLURM_LOCALID and SLURM_NODEID (all 0) and the job's SLURM_NTASKS, but no
    SLURM_STEP_ID or, in newer versions of SLURM, one above `MAX_SLURM_STEP`, which may appear as a negative number.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if not _is_whole(step) or int(step) > MAX_SLURM_STEP:
        return 0
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(tasks) if _is_whole(tasks) else 0


def _from_srun(environ: Mapping[str, str], expected_world_size: int | None) -> Launch:
    world_size = _num_slurm_tasks(environ)
    if expected_world_size not in (None, world_size):
        raise InputError(
            f"WORLD_SIZE = {expected_world_size}, but srun has started {world_size} tasks: unset WORLD_SIZE, "
            "or set it to 1 for a separate run in every task"
        )
    tasks_per_node = _tasks_per_node(_text(environ, "SLURM_STEP_TASKS_PER_NODE"))
    local_world_size = tasks_per_node[_integer(environ, "SLURM_NODEID", 0, len(tasks_per_node) - 1)]
    return Launch(
        rank=_integer(environ, "SLURM_PROCID", 0, world_size - 1),
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID", 0, local_world_size - 1),
        local_world_size=local_world_size,
        address=environ.get("MASTER_ADDR") or _first_host(_text(environ, "SLURM_STEP_NODELIST")),
        port=_integer(environ, "MASTER_PORT", 1, MAX_PORT) if environ.get("MASTER_PORT") else _slurm_port(environ),
        launcher="srun",
    )


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Returns a port that is the same for all tasks of a step, and differs for neighboring jobs on the same node."""
    job, step = _integer(environ, "SLURM_JOB_ID", 0), _integer(environ, "SLURM_STEP_ID", 0)
    return SLURM_PORTS[(31 * job + step) % len(SLURM_PORTS)]


def _tasks_per_node(text: str) -> list[int]:
    """Parses the number of tasks on each node of a step: "4(x2),3" is [4, 4, 3]."""
    groups = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group) for group in text.split(",")]
    counts = [int(group[1]) for group in groups if group for _ in range(int(group[2] or 1))]
    if None in groups or not counts:
        raise InputError(f"SLURM_STEP_TASKS_PER_NODE = {text}: not a list such as 4(x2),3; {REMEDY}")
    return counts


def _first_host(text: str) -> str:
    """Returns the first host of a compressed list: "node[007-009,012]-ib,login1" gives "node007-ib"."""
    ranges = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    host = re.match(rf"((?:[^\[\],\s]|{ranges})+)(?:,|$)", text)
    if host is None:
        raise InputError(f"SLURM_STEP_NODELIST = {text}: not a list of hosts; set MASTER_ADDR to the host of rank 0")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", host[1])


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InputError(f"{name} is not set, though this is one of several ranks: {REMEDY}")
    return environ[name]


def _integer(environ: Mapping[str, str], name: str, low: int, high: int | None = None) -> int:
    text = _text(environ, name)
    if not _is_whole(text) or int(text) < low or (high is not None and int(text) > high):
        bounds = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise InputError(f"{name} = {text}: must be a whole number {bounds}; {REMEDY}")
    return int(text)


def _is_whole(text: str) -> bool:
    return text.isascii() and text.isdigit()
