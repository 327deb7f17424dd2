"""From text to predictions as on a Mac: without Triton and without Linux-only parts of Python and the system.

Simulated by a `sitecustomize`, which every process of the test loads.
"""

import json
import os
import subprocess
import sys

import pytest
from tiny_task import QUICK, write_sst2

pytestmark = [pytest.mark.slow, pytest.mark.process]

# Code that a process runs first.
MAC = """
import os, signal, sys, time, types

sys.platform = "darwin"
sys.modules["_scproxy"] = types.SimpleNamespace(_get_proxies=dict, _get_proxy_settings=dict)  # urllib's, on a Mac
sys.modules["triton"] = None  # an import fails
for module, names in {
    os: "sched_getaffinity sched_setaffinity memfd_create posix_fallocate splice copy_file_range pidfd_open setns",
    time: "CLOCK_BOOTTIME CLOCK_MONOTONIC_RAW",
    signal: "SIGSTKFLT SIGPWR SIGPOLL SIGRTMIN SIGRTMAX",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "no such file on a Mac", arguments[0])


sys.addaudithook(refuse)
stat = os.stat
os.stat = lambda path, *rest, **named: refuse("open", [path]) or stat(path, *rest, **named)
"""


# Commands that run in sequence in one process. Other optional packages fail in this simulation.
PROGRAM = """
import json, sys
from electra_fast import cli
from electra_fast.training import doctor

doctor.EXTRAS = {}
for command in json.loads(sys.argv[1]):
    print(chr(0), cli.main(command), flush=True)
"""


def test_from_text_to_predictions(tmp_path, tiny_text, tiny_vocab):
    text = tmp_path / "text.txt"
    shards = tmp_path / "shards"
    run = tmp_path / "run"
    text.write_text("\n\n".join(tiny_text))
    sst2 = write_sst2(tmp_path / "SST-2")
    tasks = tmp_path / "tasks"
    model = tasks / "sst2/seed-0/model"
    settings = [shards, "--preset", "tiny", "--train.steps", "8", "--train.batch_size", "8"]
    overrides = [word for name, value in QUICK.items() for word in (f"--{name}", value)]
    commands = [
        ["prepare", text, "--vocab", tiny_vocab, "--out", shards, "--holdout", "0.1"],
        ["plan", *settings],
        ["pretrain", *settings, "--out", run, "--train.eval_every", "4", "--train.eval_batches", "2"],
        ["evaluate", run, shards],
        ["finetune", run, "--glue", sst2, "--out", tasks, "--seeds", "1", *overrides],
        ["predict", model, sst2 / "dev.tsv"],
        ["export", run, "--out", tmp_path / "exported"],
        ["doctor", "--preset", "tiny"],
    ]
    (tmp_path / "sitecustomize.py").write_text(MAC)
    paths = filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([list(map(str, command)) for command in commands])],
        env=environment | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    printed = done.stdout.split("\0 0\n")
    assert done.returncode == 0 and len(printed) == len(commands) + 1, done.stdout + done.stderr
    plan = printed[1]
    predictions = printed[5]
    report = printed[7]
    assert "memory          not measured (only on Linux); known parts: " in plan and "measured on this cpu" in plan
    assert len(predictions.splitlines()) == 16 and "label" in json.loads(predictions.splitlines()[0])
    assert (tmp_path / "exported/encoder/model.safetensors").is_file()
    assert report.splitlines()[-1] == "no problems found"
