"""Runs the experiments of experiments.toml in order, resumable and at the lowest priority.

    python bench/experiments.py TEXTS... --glue FOLDER --out FOLDER [--blimp FILE --books FILES...]

or `make experiments`. Without minimal pairs and books, experiments that read them are skipped. An experiment is a
command that resumes where it was killed and writes its results to a file in data/ or OUT; a finished one is a line of
data/experiments.jsonl. It is paused while OUT/pause exists, for example during a benchmark. Prints a line per change:
how many experiments are done and left, and how long these take. If one fails, the next one runs.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lib.results import commit, processor

from electra_fast.interruption import StopRequest, stop_requests
from electra_fast.training.run import exclusive

HERE = Path(__file__).parent
LIST = HERE / "experiments.toml"
DONE = HERE / "data/experiments.jsonl"
PAUSE = "pause"
POLL_SECONDS = 0.2
# Runs a script that ends with this process, even if this process is killed.
START = """
import runpy, subprocess, sys
from electra_fast.interruption import stop_with_parent
stop_with_parent()
del sys.argv[0]
if sys.argv[0].endswith(".sh"):
    sys.exit(subprocess.call(["bash", *sys.argv]))
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
    entries = [Experiment(**entry) for entry in tomllib.loads(path.read_text())["experiment"]]
    finished = {json.loads(line)["command"] for line in (done.read_text().splitlines() if done.exists() else [])}
    return [e for e in entries if e.command in finished], [e for e in entries if e.command not in finished]


def run(command: Sequence[str], pause: Path, stop: StopRequest, log: Path) -> int:
    """Runs a command with pauses; returns its exit code. After a stop request it writes its checkpoints and ends."""
    is_paused = False
    with log.open("ab") as file:
        command = [sys.executable, "-c", START, *command]
        process = subprocess.Popen(command, cwd=HERE, stdout=file, stderr=file, process_group=0)

    def send(number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    while True:
        if stop:
            send(signal.SIGTERM)
            send(signal.SIGCONT)
            return process.wait()
        if pause.exists() != is_paused:
            is_paused = not is_paused
            send(signal.SIGSTOP if is_paused else signal.SIGCONT)
            print(f"paused: {pause} exists" if is_paused else "resumed", flush=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(POLL_SECONDS)


def finish(experiment: Experiment) -> None:
    line = {"name": experiment.name, "command": experiment.command}
    line |= {"ended": f"{datetime.now(UTC):%Y-%m-%d %H:%M}", "commit": commit(), "processor": processor()}
    with DONE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("texts", nargs="+", type=os.path.abspath)
    parser.add_argument("--glue", type=os.path.abspath, required=True)
    parser.add_argument("--out", type=os.path.abspath, required=True)
    parser.add_argument("--blimp", type=os.path.abspath, help="BLiMP's pairs: a file, or the folder of its files")
    parser.add_argument("--books", nargs="+", type=os.path.abspath, default=[], help="texts for ten million words")
    options = parser.parse_args()
    os.nice(19)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for scripts of runs/
    words = {"texts": shlex.join(options.texts), "glue": shlex.quote(options.glue), "out": shlex.quote(options.out)}
    words |= {"blimp": shlex.quote(options.blimp or ""), "books": shlex.join(options.books)}
    out = Path(options.out)
    failed: set[str] = set()
    with exclusive(out), stop_requests() as stop:
        while waiting := [
            experiment
            for experiment in read_list()[1]
            if experiment.name not in failed
            and (options.blimp and options.books or "{blimp}" not in experiment.command)
        ]:
            first = waiting[0]
            minutes = sum(experiment.minutes for experiment in waiting)
            counts = f"{len(read_list()[0])} done, 1 running, {len(waiting) - 1} left, together {minutes / 60:.1f} h"
            print(f"{first.name}, about {first.minutes:g} minutes; {counts}", flush=True)
            command = shlex.split(first.command.format(**words))
            code = run(command, out / PAUSE, stop, out / "log.txt")
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
