"""Counts the instructions of the inner loops and fails if they grew; unaffected by machine load.

    python bench/instructions.py [--update] [--tolerance 0.03]

Runs `crates/electra-data/examples/hot_paths.rs` under `valgrind --tool=callgrind` with one and two
units of work, so that fixed costs cancel, and compares instructions per token with
`instructions.json` in this folder. Exits with 1 if they exceed it by more than the tolerance. The counts
depend on the compiler: use the one named in the file, or `--update` on a known good tree. Valgrind has
no AVX-512, so do not build with it (`-C target-cpu=native`).
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
COUNTS = Path(__file__).with_suffix(".json")
# Workloads and their amount in the first run; the second run has twice as much.
WORK = {"tokenize": 16, "load": 4}
# Single counts of tokenization vary by a tenth between runs; the minimum of several does not.
RUNS = 7


def main() -> int:
    """Counts, compares, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help="write the counts instead of comparing")
    parser.add_argument("--tolerance", type=float, default=0.03, help="fraction by which counts may grow")
    arguments = parser.parse_args()
    missing = [tool for tool in ("cargo", "rustc", "valgrind") if shutil.which(tool) is None]
    if missing:
        print(f"skipped: needs {' and '.join(missing)}")
        return 0
    program = build("hot_paths")
    compiler = subprocess.run(["rustc", "--version"], cwd=TREE, check=True, capture_output=True, text=True)
    found = {
        "compiler": compiler.stdout.strip(),
        **{what: min(per_token(program, what) for _ in range(RUNS)) for what in WORK},
    }
    if arguments.update:
        COUNTS.write_text(json.dumps(found, indent=1) + "\n")
        print(f"wrote {COUNTS}: {found}")
        return 0
    return compare(found, json.loads(COUNTS.read_text()), arguments.tolerance)


def build(example: str) -> str:
    """Compiles one of the crate's examples with the features of its tests; returns its path."""
    command = ["cargo", "build", "--release", "--locked", "--workspace", "--example", example]
    command += ["--message-format", "json"]
    lines = subprocess.run(command, cwd=TREE, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    programs = [message.get("executable") for message in map(json.loads, lines)]
    return next(program for program in programs if program)


def per_token(program: str, what: str) -> float:
    """Marginal instructions per token."""
    (once, tokens_once), (twice, tokens_twice) = (run(program, what, n * WORK[what]) for n in (1, 2))
    return round((twice - once) / (tokens_twice - tokens_once), 2)


def run(program: str, what: str, amount: int) -> tuple[int, int]:
    """Instructions and tokens of one run."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", program, what, str(amount)]
        environment = os.environ | {"RAYON_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if collected is None:
        raise ValueError(f"valgrind did not report an instruction count: {done.stderr[-500:]}")
    return int(collected[1]), int(done.stdout)


def compare(found: dict, baseline: dict, tolerance: float) -> int:
    """Prints both counts; returns 1 if one grew by more than the tolerance."""
    if found["compiler"] != baseline["compiler"]:
        print(f"note: counted with {found['compiler']}, baseline from {baseline['compiler']}")
    worse = False
    for what in WORK:
        change = found[what] / baseline[what] - 1
        worse |= change > tolerance
        status = "MORE" if change > tolerance else "less: --update?" if change < -tolerance else "ok"
        print(f"{what}: {found[what]} instructions per token, baseline {baseline[what]} ({change:+.1%}) {status}")
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
