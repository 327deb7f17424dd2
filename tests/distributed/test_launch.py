"""The rank of a process, from the environment variables of torchrun."""

import pytest

from electra_fast.distributed.launch import Launch
from electra_fast.errors import InputError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
TORCHRUN |= {"MASTER_ADDR": "node001", "MASTER_PORT": "29500"}
TORCHRUN |= {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}


def without(environment, *names):
    return {name: value for name, value in environment.items() if name not in names}


def test_torchrun():
    ranks = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4}
    expected = Launch(**ranks, address="node001", port=29500, launcher="torchrun", attempt=2)
    assert Launch.from_environment(TORCHRUN) == expected
    assert Launch.from_environment(without(TORCHRUN, "TORCHELASTIC_RESTART_COUNT")).attempt == 0
    launch = Launch.from_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    assert (launch.launcher, launch.attempt, launch.rank) == ("env", 0, 5)
    alone = {**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert Launch.from_environment(alone) == Launch(launcher="torchrun", attempt=2)


PLAIN = {
    "nothing": {},
    "empty values": {"WORLD_SIZE": "", "RANK": ""},
    "a batch script of SLURM": {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "a separate run in each task": {"SLURM_STEP_NUM_TASKS": "8", "WORLD_SIZE": "1"},
    "one process with all variables": {**without(TORCHRUN, "TORCHELASTIC_RUN_ID"), "WORLD_SIZE": "1", "RANK": "0"},
    "a leftover rank 0": {"RANK": "0", "MASTER_ADDR": "node001", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("environment", PLAIN.values(), ids=PLAIN)
def test_single_process(environment):
    assert Launch.from_environment(environment) == Launch()


BAD = {
    "no rank": (without(TORCHRUN, "RANK"), "RANK is not set"),
    "no address": ({**TORCHRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is not set"),
    "srun without torchrun": ({"SLURM_STEP_NUM_TASKS": "8", "RANK": "0"}, "srun has started 8 tasks"),
    "RANK alone": ({"RANK": "1"}, "RANK = 1: WORLD_SIZE is not set"),
    "a rank too high": ({**TORCHRUN, "RANK": "8"}, "RANK = 8: must be a whole number from 0 to 7"),
    "a negative rank": ({**TORCHRUN, "RANK": "-1"}, "RANK = -1: "),
    "underscores": ({**TORCHRUN, "MASTER_PORT": "29_500"}, "MASTER_PORT = 29_500: "),
    "digits of another script": ({**TORCHRUN, "RANK": "٣"}, "RANK = ٣: "),
    "a local rank too high": ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK = 4: .* from 0 to 3"),
    "a node of more than all": ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE = 9: .* from 1 to 8"),
    "no ranks": ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE = 0: .* at least 1"),
    "port 0": ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT = 0: .* from 1 to 65535"),
    "a port too high": ({**TORCHRUN, "MASTER_PORT": "65536"}, "MASTER_PORT = 65536: "),
    "a bad count of restarts": ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT = x: "),
}


@pytest.mark.parametrize("environment, message", BAD.values(), ids=BAD)
def test_invalid_environment_refused(environment, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        Launch.from_environment(environment)
    text = str(error.value)
    assert "\n" not in text and any(remedy in text for remedy in ("start the ranks with", "set ")), text
