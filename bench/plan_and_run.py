"""What `electra-fast plan` says about a run's memory and time, beside what the run then takes.

    python bench/plan_and_run.py [--runs tiny mini small:google] [--corpus FOLDER] [--minutes 4]
                                 [--section.key value ...] [--results FILE] [--quick]

Each run is `preset[:recipe]` on the corpus, or on one of Zipf-distributed words; it has as many steps as the plan puts
into the minutes, and five evaluations and checkpoints. Memory is the highest sum, over the run's processes, of what
Linux says is theirs (PSS), five times a second; time is that of the last line of metrics.jsonl, which leaves out
start-up, and that of the whole command. For numbers, run it alone on an idle machine; for a CPU only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.results import Results, markdown, parse_arguments, processor
from lib.workload import make_corpus

HEADER = ["run", "steps", "GiB planned", "GiB", "ratio", "seconds planned", "seconds", "ratio", "whole command"]


def tree_bytes(root: int) -> int:
    """The memory of a process and its descendants; of processes that end meanwhile, none."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(each.parent.name)] = int(each.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    members, total = {root}, 0
    while more := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= more
    for pid in members:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total


def planned(words: list[str]) -> dict[str, Any]:
    """The plan of a command's words."""
    command = [sys.executable, "-m", "electra_fast", "plan", "--json", *words]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def ran(words: list[str], folder: Path) -> tuple[int, float, float]:
    """Runs `pretrain`; returns its peak memory, its seconds by its own log, and those of the command."""
    start, peak = time.monotonic(), 0
    command = [sys.executable, "-m", "electra_fast", "pretrain", "--quiet", *words, "--out", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, tree_bytes(process.pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(process.returncode)
    last = (folder / "metrics.jsonl").read_text().splitlines()[-1]
    return peak, json.loads(last)["seconds"], time.monotonic() - start


def main() -> int:
    """Plans and carries out each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["tiny", "mini", "small"], metavar="PRESET[:RECIPE]")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0)
    options = parse_arguments(parser, with_overrides=True, for_cpu=True)
    if options.quick:
        options.runs, options.minutes = options.runs[:1], 0.05
    corpus = options.corpus or make_corpus(options.cache, 300 if options.quick else 20_000)
    results, rows = Results(options.results, options.device, processor()), []
    for run in options.runs:
        preset, _, recipe = run.partition(":")
        words = ["--preset", preset, "--recipe", recipe or "modern", "--data", str(corpus)]
        words += [word for name, value in options.overrides.items() for word in (f"--{name}", value)]
        measured = planned(words)
        speed = measured["tokens_per_second"]
        steps = max(5, round(60 * options.minutes * speed / measured["tokens_per_step"]))
        own = {"train.steps": steps, "train.eval_every": steps // 5, "train.checkpoint_every": steps // 5}
        words += [word for name, value in own.items() for word in (f"--{name}", str(value))]
        seconds = planned([*words, "--tokens-per-second", str(speed)])["seconds"]
        with tempfile.TemporaryDirectory() as folder:
            peak, took, whole = ran(words, Path(folder) / "run")
        total = measured["memory"]["total"]
        rows.append([run, str(steps), *(f"{each / 2**30:.2f}" for each in (total, peak)), f"{peak / total:.2f}"])
        rows[-1] += [f"{seconds:.0f}", f"{took:.0f}", f"{took / seconds:.2f}", f"{whole:.0f}"]
        results.add(", ".join(f"{name} {value}" for name, value in zip(HEADER, rows[-1], strict=True)))
    print(markdown(HEADER, rows))
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
