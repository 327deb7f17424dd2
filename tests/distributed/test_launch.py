"""Which rank a process is, from the environments that torchrun and srun give it."""

import pytest

from electra_fast.distributed.launch import Launch
from electra_fast.errors import InputError

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
    assert Launch.from_environment({**SRUN, **TORCHRUN}) == expected  # srun has started torchrun
    assert Launch.from_environment(without(TORCHRUN, "TORCHELASTIC_RESTART_COUNT")).attempt == 0
    launch = Launch.from_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    assert (launch.launcher, launch.attempt, launch.rank) == ("env", 0, 5)
    alone = {**SRUN, **TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launch.from_environment(alone) == Launch(launcher="torchrun", attempt=2)


def test_srun():
    launch = Launch.from_environment(SRUN)
    expected = {"rank": 4, "world_size": 7, "local_rank": 0, "local_world_size": 3, "address": "node003"}
    assert launch == Launch(**expected, port=launch.port, launcher="srun")
    # Scripts for other programs export these, and leave the rank to srun.
    exported = without(SRUN, "SLURM_STEP_NODELIST") | {"MASTER_ADDR": "head", "MASTER_PORT": "4000", "WORLD_SIZE": "7"}
    assert Launch.from_environment(exported) == Launch(**expected | {"address": "head"}, port=4000, launcher="srun")


PLAIN = {
    "nothing": {},
    "empty values": {"WORLD_SIZE": "", "RANK": "", "SLURM_STEP_ID": ""},
    "one process with all variables": {**without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "WORLD_SIZE": "1", "RANK": "0"},
    "a rank 0 that someone has left over": {"RANK": "0", "MASTER_ADDR": "node001", "MASTER_PORT": "29500"},
    "a batch script": BATCH_SCRIPT,
    "a batch script of a newer SLURM": {**BATCH_SCRIPT, "SLURM_STEP_ID": "-5"},
    "the same, without a sign": {**BATCH_SCRIPT, "SLURM_STEP_ID": "4294967291", "SLURM_STEP_NUM_TASKS": "8"},
    "an interactive step": {**SRUN, "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    "a step whose tasks are runs of their own": {**SRUN, "WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("environment", PLAIN.values(), ids=PLAIN)
def test_a_single_process(environment):
    assert Launch.from_environment(environment) == Launch()


def test_the_first_host_of_a_list():
    for nodes, first in {
        "node1,node2": "node1",
        "node[001-003,007],login1": "node001",
        "login1,node[001-003]": "login1",
        "rack[02-03]-node[10,20]-ib": "rack02-node10-ib",
        "gpu-a100-[08-11].cluster.example": "gpu-a100-08.cluster.example",
        "[10-12]": "10",
        "n[0-1],bad[": "n0",
    }.items():
        assert Launch.from_environment({**SRUN, "SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize("text, counts", [("7", [7]), ("4,3", [4, 3]), ("1,2(x3),1", [1, 2, 2, 2, 1])])
def test_tasks_per_node(text, counts):
    nodes = [{**SRUN, "SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)} for node in range(len(counts))]
    assert [Launch.from_environment(node).local_world_size for node in nodes] == counts
    with pytest.raises(InputError, match=f"SLURM_NODEID = {len(counts)}: "):
        Launch.from_environment({**nodes[0], "SLURM_NODEID": str(len(counts))})


def test_ports_of_job_steps():
    steps = [(job, step) for job in range(1_000, 1_100) for step in range(20)] + [(4_294_000_000, 1)]
    jobs = [{**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job, step in steps]
    ports = {Launch.from_environment(job).port for job in jobs}
    assert len(ports) == len(steps) and all(20_000 <= port < 60_000 for port in ports)


BAD = {
    "no rank": (without(TORCHRUN, "RANK"), "RANK is not set"),
    "no address": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set"),
    "WORLD_SIZE in a batch script": ({**BATCH_SCRIPT, "WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set"),
    "RANK alone": ({"RANK": "1"}, "RANK = 1 without WORLD_SIZE"),
    "a rank too high": ({**TORCHRUN, "RANK": "8"}, "RANK = 8: must be a whole number from 0 to 7"),
    "a negative rank": ({**TORCHRUN, "RANK": "-1"}, "RANK = -1: "),
    "underscores": ({**TORCHRUN, "MASTER_PORT": "29_500"}, "MASTER_PORT = 29_500: "),
    "digits of another script": ({**TORCHRUN, "RANK": "٣"}, "RANK = ٣: "),
    "a local rank too high": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK = 4: .* from 0 to 3"),
    "a node of more than all": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9: .* from 1 to 8"),
    "no ranks": ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE = 0: .* at least 1"),
    "port 0": ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT = 0: .* from 1 to 65535"),
    "a port too high": ({**SRUN, "MASTER_PORT": "65536"}, "MASTER_PORT = 65536: "),
    "a bad count of restarts": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT = x: "),
    "no task": (without(SRUN, "SLURM_PROCID"), "SLURM_PROCID is not set"),
    "a task too high": ({**SRUN, "SLURM_PROCID": "7"}, "SLURM_PROCID = 7: .* from 0 to 6"),
    "a local task too high": ({**SRUN, "SLURM_LOCALID": "3"}, "SLURM_LOCALID = 3: .* from 0 to 2"),
    "bad tasks per node": ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "4,x3"}, "SLURM_STEP_TASKS_PER_NODE = 4,x3: "),
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
