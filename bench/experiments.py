"""Runs the experiments of experiments.toml in order, resumable and at the lowest priority.

    python bench/experiments.py TEXTS... --glue FOLDER --out FOLDER [--max-load SHARE]

or `make experiments`. An experiment is a command that resumes where it was killed and writes its results to a file
beside this script; a finished one is a line of experiments.jsonl. It is paused while OUT/pause exists, for example
during a benchmark, and while processes of normal priority use more than a share of all cores. Prints a line per
change: how many experiments are done and left, and how long these take. If one fails, the next one runs.
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

from lib.results import commit, processor

from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.training.run import exclusive

HERE = Path(__file__).parent
LIST, DONE, PAUSE, STAT = HERE / "experiments.toml", HERE / "experiments.jsonl", "pause", Path("/proc/stat")
POLL_SECONDS = 0.2
# Load is averaged over this time, so that a single test or compilation does not pause an experiment.
LOAD_SECONDS = 30.0
# Runs a script that ends with this process, even if this process is killed.
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
    """Returns the finished experiments, recognized by their command, and those that are left."""
    entries = [Experiment(**each) for each in tomllib.loads(path.read_text())["experiment"]]
    finished = {json.loads(line)["command"] for line in (done.read_text().splitlines() if done.exists() else [])}
    return [e for e in entries if e.command in finished], [e for e in entries if e.command not in finished]


def cpu_times() -> tuple[float, float]:
    """Returns the time that all cores have spent on processes of normal priority, and in total."""
    user, nice, system, *rest = map(float, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return user + system, user + nice + system + sum(rest)


def high_load(share: float) -> Iterator[bool]:
    """Yields True if other processes used more than a share of all cores in the last `LOAD_SECONDS`."""
    before, is_high, since = cpu_times(), False, time.monotonic()
    while True:
        if time.monotonic() - since >= LOAD_SECONDS:
            now, since = cpu_times(), time.monotonic()
            is_high, before = now[0] - before[0] > share * (now[1] - before[1]), now
        yield is_high


def run(command: Sequence[str], pause: Path, max_load: float, stop: StopRequest, log: Path) -> int:
    """Runs a command with pauses; returns its exit code. After a stop request it writes its checkpoints and ends."""
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
            print(f"paused: {why}" if is_paused else "resumed", flush=True)
        try:
            return process.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError  # the loop has no end


def finish(experiment: Experiment) -> None:
    """Records that an experiment has finished."""
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
    parser.add_argument(
        "--max-load",
        type=float,
        default=0.8,
        help="share of all cores used by other processes that pauses; 1: never (default: %(default)s)",
    )
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
