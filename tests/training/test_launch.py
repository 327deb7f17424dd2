"""Which rank a process is, from the environments that torchrun and srun give it."""

import os
import subprocess
import sys

import pytest

from electra_fast.errors import InputError
from electra_fast.training.launch import Launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node001",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
# Task 4 of 7, the first on the second of two nodes, with variables of the job that are not the step's.
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[001-008]",
    "SLURM_NTASKS": "32",
    "SLURM_TASKS_PER_NODE": "4(x8)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "1234",
    "SLURM_JOB_NODELIST": "node[001-008]",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def test_torchrun():
    expected = Launch(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        address="node001",
        port=29500,
        launcher="torchrun",
        attempt=2,
    )
    assert Launch.from_environment(TORCHRUN) == expected
    assert Launch.from_environment(without(TORCHRUN, "TORCHELASTIC_RESTART_COUNT")).attempt == 0


def test_variables_set_by_something_else():
    launch = Launch.from_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    assert (launch.launcher, launch.attempt, launch.rank) == ("env", 0, 5)


def test_srun():
    launch = Launch.from_environment(SRUN)
    assert launch == Launch(
        rank=4,
        world_size=7,
        local_rank=0,
        local_world_size=3,
        address="node003",
        port=launch.port,
        launcher="srun",
    )
    assert 20_000 <= launch.port < 60_000


PLAIN = {
    "nothing": {},
    "empty values": {"WORLD_SIZE": "", "RANK": "", "SLURM_STEP_ID": ""},
    "WORLD_SIZE alone": {"WORLD_SIZE": "1"},
    "one process with all variables": {**without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "WORLD_SIZE": "1", "RANK": "0"},
    "a rank 0 that someone has left over": {"RANK": "0"},
    "an address without ranks": {"MASTER_ADDR": "node001", "MASTER_PORT": "29500"},
    "a batch script": BATCH_SCRIPT,
    "a batch script of a newer SLURM": {**BATCH_SCRIPT, "SLURM_STEP_ID": "-5"},
    "the same, without a sign": {**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "8"},
    "a script submitted from a job step": {**SRUN, **BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291"},
    "an allocation without a step": {"SLURM_JOB_ID": "1234", "SLURM_NTASKS": "8"},
    "an interactive step": {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "a step of one task": {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "a step whose tasks are runs of their own": {**SRUN, "WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("environment", PLAIN.values(), ids=PLAIN)
def test_a_single_process(environment):
    assert Launch.from_environment(environment) == Launch()


def test_torchrun_of_a_single_process():
    environment = {**SRUN, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launch.from_environment(environment) == Launch(launcher="torchrun", attempt=2)


def test_torchrun_started_by_srun():
    assert Launch.from_environment({**SRUN, **TORCHRUN}) == Launch.from_environment(TORCHRUN)


def test_world_size_in_a_job_step():
    """Scripts for other programs export it together with MASTER_ADDR, and leave the rank to srun."""
    exported = {**SRUN, "WORLD_SIZE": "7", "MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    launch = Launch.from_environment(exported)
    assert (launch.launcher, launch.rank, launch.address, launch.port) == ("srun", 4, "head", 4000)


# The first host of SLURM_STEP_NODELIST.
HOSTS = {
    "node1": "node1",
    "node1,node2": "node1",
    "node[001-003,007],login1": "node001",
    "node[009-010]": "node009",
    "node[7,9-12]": "node7",
    "login1,node[001-003]": "login1",
    "a[1-2]b[3-4]": "a1b3",
    "rack[02-03]-node[10,20]-ib": "rack02-node10-ib",
    "gpu-a100-[08-11].cluster.example": "gpu-a100-08.cluster.example",
    "[10-12]": "10",
    "n[0-1],bad[": "n0",
}


@pytest.mark.parametrize("nodes, first", HOSTS.items(), ids=HOSTS)
def test_the_first_host_of_a_list(nodes, first):
    assert Launch.from_environment({**SRUN, "SLURM_STEP_NODELIST": nodes}).address == first


# SLURM_STEP_TASKS_PER_NODE: what it means on each node.
TASKS = {"7": [7], "4,3": [4, 3], "2(x3),1": [2, 2, 2, 1], "1,2(x3)": [1, 2, 2, 2], "1,2,1(x3),1": [1, 2, 1, 1, 1, 1]}


@pytest.mark.parametrize("text, counts", TASKS.items(), ids=TASKS)
def test_tasks_per_node(text, counts):
    nodes = [{**SRUN, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)} for node in range(len(counts))]
    assert [Launch.from_environment(node).local_world_size for node in nodes] == counts
    with pytest.raises(InputError, match=f"SLURM_NODEID = {len(counts)}: "):
        Launch.from_environment({**nodes[0], "SLURM_NODEID": str(len(counts))})


def test_ports_of_job_steps():
    steps = [(job, step) for job in range(1_000, 1_100) for step in range(20)] + [(4_294_000_000, 1)]
    ports = {
        port
        for job, step in steps
        for port in [Launch.from_environment({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port]
    }
    assert len(ports) == len(steps)
    assert all(20_000 <= port < 60_000 for port in ports)


BAD = {
    "no rank": (without(TORCHRUN, "RANK"), "RANK is not set"),
    "no local rank": (without(TORCHRUN, "LOCAL_RANK"), "LOCAL_RANK is not set"),
    "no local size": (without(TORCHRUN, "LOCAL_WORLD_SIZE"), "LOCAL_WORLD_SIZE is not set"),
    "no address": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    "no port": (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not set"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set"),
    "WORLD_SIZE in a batch script": ({**BATCH_SCRIPT, "WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set"),
    "RANK alone": ({"RANK": "1"}, "RANK = 1 without WORLD_SIZE"),
    "a rank too high": ({**TORCHRUN, "RANK": "8"}, "RANK = 8: must be a whole number from 0 to 7"),
    "a negative rank": ({**TORCHRUN, "RANK": "-1"}, "RANK = -1: "),
    "a fraction": ({**TORCHRUN, "RANK": "1.0"}, "RANK = 1.0: "),
    "underscores": ({**TORCHRUN, "MASTER_PORT": "29_500"}, "MASTER_PORT = 29_500: "),
    "a local rank too high": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK = 4: .* from 0 to 3"),
    "a node of more than all": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9: .* from 1 to 8"),
    "no ranks": ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE = 0: .* at least 1"),
    "not a number": ({"WORLD_SIZE": "many"}, "WORLD_SIZE = many: "),
    "port 0": ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT = 0: .* from 1 to 65535"),
    "a port too high": ({**SRUN, "MASTER_PORT": "65536"}, "MASTER_PORT = 65536: "),
    "a bad count of restarts": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT = x: "),
    "no task": (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is not set"),
    "a task too high": ({**SRUN, "SLURM_PROCID": "7"}, "SLURM_PROCID = 7: .* from 0 to 6"),
    "no local task": (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID is not set"),
    "a local task too high": ({**SRUN, "SLURM_LOCALID": "3"}, "SLURM_LOCALID = 3: .* from 0 to 2"),
    "no node": (without(SRUN, "SLURM_NODEID"), "SLURM_NODEID is not set"),
    "no tasks per node": (without(SRUN, "SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE is not set"),
    "bad tasks per node": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,x3"}, "SLURM_STEP_TASKS_PER_NODE = 4,x3: "),
    "no nodes": (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_NODELIST is not set"),
    "an open bracket": ({**SRUN, "SLURM_STEP_NODELIST": "node[1-2"}, r"SLURM_STEP_NODELIST = node\[1-2: "),
    "an empty bracket": ({**SRUN, "SLURM_STEP_NODELIST": "node[]"}, r"SLURM_STEP_NODELIST = node\[\]: "),
    "a file of hosts": ({**SRUN, "SLURM_STEP_NODELIST": "node1 node2"}, "SLURM_STEP_NODELIST = node1 node2: "),
    "another size": ({**SRUN, "WORLD_SIZE": "8"}, "WORLD_SIZE = 8, but srun has started 7 tasks"),
    "no job": (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
}


@pytest.mark.parametrize("environment, message", BAD.values(), ids=BAD)
def test_what_cannot_be(environment, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        Launch.from_environment(environment)
    said = str(error.value)
    assert "\n" not in said and any(remedy in said for remedy in ("start the ranks with", "set ")), said


def test_an_address_needs_no_list_of_nodes():
    launch = Launch.from_environment({**without(SRUN, "SLURM_STEP_NODELIST"), "MASTER_ADDR": "head"})
    assert launch.address == "head"


@pytest.mark.parametrize("environment", [TORCHRUN, SRUN], ids=["torchrun", "srun"])
def test_the_environment_for_torch_says_the_same(environment):
    launch = Launch.from_environment(environment)
    given = launch.to_environment()
    assert set(given) == {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    again = Launch.from_environment(given)
    assert again == Launch(**{**vars(launch), "launcher": "env", "attempt": 0})


def test_it_reads_the_environment_of_this_process(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    assert Launch.from_environment() == Launch()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment().rank == 5


def test_torch_is_not_imported():
    program = (
        "import sys; from electra_fast.training.launch import Launch; Launch.from_environment({});"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")
