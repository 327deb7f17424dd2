"""A run of `pretrain` with its defaults against the same run by all kernels.

    python bench/default_run.py [--preset small] [--steps 600] [--device cpu --quick]

Trains twice on a synthetic corpus, each time by the command line of a user: with kernels, attention and execution
chosen by the run's check on this GPU, and with all kernels unchecked (`--train.kernels triton`). The median steps of
both must agree within 3 %: what the check chooses is never slower. Without a GPU, only shows that both runs work.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lib.results import Results, parse_arguments
from lib.workload import make_corpus

ALLOWED = 1.03
LOG_EVERY = 20


def train(preset: str, corpus: Path, out: Path, steps: int, kernels: str) -> list[dict[str, Any]]:
    keys = {"kernels": kernels, "steps": steps, "log_every": LOG_EVERY if steps > LOG_EVERY else 4}
    flags = [word for name, value in keys.items() for word in (f"--train.{name}", str(value))]
    command = [sys.executable, "-m", "electra_fast", "pretrain", str(corpus), "--preset", preset]
    subprocess.run([*command, "--out", str(out), "--optimizer.warmup_steps", "4", *flags], check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset")
    parser.add_argument("--steps", type=int)
    options = parse_arguments(parser)
    preset, steps = (
        options.preset or ("tiny" if options.quick else "small"),
        options.steps or (8, 600)[not options.quick],
    )
    is_cuda, results = options.device.type == "cuda", Results(options.results, options.device)
    corpus, milliseconds = make_corpus(options.cache, 300 if options.quick else 8000), []
    for kernels in ("auto", "triton" if is_cuda else "reference"):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            lines = train(preset, corpus, Path(folder) / "run", steps, kernels)
            seconds = time.perf_counter() - start
        # The first line has warm-up and capture.
        milliseconds.append(1e3 * statistics.median(line["step_seconds"] for line in lines[1:]))
        speed = statistics.median(line["tokens_per_second"] for line in lines[1:])
        results.add(
            f"pretrain --preset {preset}, kernels {kernels}: {milliseconds[-1]:.2f} ms per step, {speed:,.0f} tokens/s"
            f", loss {lines[-1]['loss']:.3f}; {seconds:.0f} s in all",
            headline=True,
            **{"preset": preset, "kernels": kernels, "step_ms": milliseconds[-1], "tokens_per_second": speed},
        )
    ratio = milliseconds[0] / milliseconds[1]
    is_right = ratio <= ALLOWED or not is_cuda
    results.add(f"pretrain --preset {preset}: {ratio:.3f} times the step by all kernels", ok=is_right, ratio=ratio)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
