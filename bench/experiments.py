"""Runs the experiments of experiments.toml, in order, beside other work: with the lowest priority, and resumable.

    python bench/experiments.py TEXTS... --glue FOLDER --out FOLDER [--max-load SHARE]

or `make experiments`. An experiment is a command that resumes where it was killed and leaves its results in a file
beside this script; that it has finished is a line of experiments.jsonl. It is paused while OUT/pause exists, as it
should beside a benchmark, and while processes of normal priority use more than a share of all cores. Each change is one
line: how many experiments are done and left, and about how long these take. One that fails does not stop the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from results import commit, processor

from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.training.run import exclusive

HERE = Path(__file__).parent
LIST, DONE, PAUSE, STAT = HERE / "experiments.toml", HERE / "experiments.jsonl", "pause", Path("/proc/stat")
POLL_SECONDS = 0.2
# Of the other processes' load: one test or compilation does not pause an experiment.
LOAD_SECONDS = 30.0
# A script that ends when this process has ended, however that was.
START = """
import runpy, sys
from electra_fast.interruption import stop_with_parent
stop_with_parent()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Experiment:
    """An entry of the list."""

    name: str
    command: str
    tflop: float
    minutes: float


def read_list(path: Path = LIST, done: Path = DONE) -> tuple[list[Experiment], list[Experiment]]:
    """The experiments that are finished, by their command, and those that are left."""
    entries = [Experiment(**each) for each in tomllib.loads(path.read_text())["experiment"]]
    finished = {json.loads(line)["command"] for line in (done.read_text().splitlines() if done.exists() else [])}
    return [e for e in entries if e.command in finished], [e for e in entries if e.command not in finished]


def cpu_times() -> tuple[float, float]:
    """Time that all cores have spent so far on processes of normal priority, and in all."""
    user, nice, system, *rest = map(float, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return user + system, user + nice + system + sum(rest)


def high_load(share: float) -> Iterator[bool]:
    """Whether other processes have used more than a share of all cores in the last `LOAD_SECONDS`."""
    before, is_high, since = cpu_times(), False, time.monotonic()
    while True:
        if time.monotonic() - since >= LOAD_SECONDS:
            now, since = cpu_times(), time.monotonic()
            is_high, before = now[0] - before[0] > share * (now[1] - before[1]), now
        yield is_high


def run(command: Sequence[str], pause: Path, max_load: float, stop: StopRequest, log: Path) -> int:
    """Runs a command with pauses; its exit code. A stop request ends it, with its checkpoints written."""
    is_paused = False
    with log.open("ab") as file:
        command = [sys.executable, "-c", START, *command]
        process = subprocess.Popen(command, cwd=HERE, stdout=file, stderr=file, process_group=0)

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    for is_high in high_load(max_load):
        if stop:
            send(signal.SIGTERM)
            send(signal.SIGCONT)
            return process.wait()
        if (pause.exists() or is_high) != is_paused:
            is_paused = not is_paused
            send(signal.SIGSTOP if is_paused else signal.SIGCONT)
            why = f"{pause} exists" if pause.exists() else "other processes use the cores"
            print(f"paused: {why}" if is_paused else "goes on", flush=True)
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError  # the loop has no end


def finish(experiment: Experiment) -> None:
    """Records that an experiment has finished; how long each of its runs took stands with their results."""
    line = {"name": experiment.name, "command": experiment.command}
    line |= {"ended": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "commit": commit(), "processor": processor()}
    with DONE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", nargs="+", type=os.path.abspath)
    parser.add_argument("--glue", type=os.path.abspath, required=True)
    parser.add_argument("--out", type=os.path.abspath, required=True)
    parser.add_argument("--max-load", type=float, default=0.8, help="of other processes; 1: never pause (%(default)s)")
    options = parser.parse_args()
    os.nice(19)
    words = {"texts": shlex.join(options.texts), "glue": shlex.quote(options.glue), "out": shlex.quote(options.out)}
    out = Path(options.out)
    failed: set[str] = set()
    with exclusive(out), stop_requests() as stop:
        while waiting := [each for each in read_list()[1] if each.name not in failed]:
            first, minutes = waiting[0], sum(each.minutes for each in waiting)
            counts = f"{len(read_list()[0])} done, 1 running, {len(waiting) - 1} left, together {minutes / 60:.1f} h"
            print(f"{first.name}, about {first.minutes:g} minutes; {counts}", flush=True)
            command = shlex.split(first.command.format(**words))
            code = run(command, out / PAUSE, options.max_load, stop, out / "log.txt")
            if stop:
                print(f"{first.name}: stopped; run again to resume")
                return 128 + stop.signal
            if code:
                failed.add(first.name)
                print(f"{first.name}: exit code {code}; its output is in {out / 'log.txt'}; run again to resume")
            else:
                finish(first)
    print(f"{len(read_list()[0])} done" + (f", {len(failed)} failed: {', '.join(sorted(failed))}" if failed else ""))
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
