"""A run of `pretrain` with its defaults, compared with the same run with all kernels, and killed and resumed.

    python bench/default_run.py [--preset small] [--steps 1500] [--device cpu --quick]

Trains three times on a synthetic corpus, each time with a user's command line: with kernels, attention and execution
chosen by the run's check on this GPU, from a cold cache; killed (SIGKILL) half-way and resumed; and with all kernels
unchecked (`--train.kernels triton`). The losses of the first two must be equal, and the median steps of the first and
the last must agree within 3 %: the choices of the check are never slower. Without a GPU, only shows that the runs work.
"""

import argparse
import json
import os
import signal
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


class Run:
    """A run in a separate folder, with a cache of checked kernels in it."""

    def __init__(self, folder: Path, preset: str, corpus: Path, steps: int, kernels: str) -> None:
        log_every = LOG_EVERY if steps > LOG_EVERY else 2
        keys = {"kernels": kernels, "steps": steps, "log_every": log_every, "checkpoint_every": steps // 4}
        flags = [word for name, value in keys.items() for word in (f"--train.{name}", str(value))]
        self._command = [sys.executable, "-m", "electra_fast", "pretrain", str(corpus), "--preset", preset, *flags]
        self._command += ["--out", str(folder / "run"), "--optimizer.warmup_steps", "4"]
        self._environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
        self._metrics = folder / "run/metrics.jsonl"
        self._log_every = log_every

    def train(self, kill_at: int = 0) -> list[dict[str, Any]]:
        """Trains to the end and returns the lines of its metrics, or kills the run after it has logged a step."""
        process = subprocess.Popen(self._command, env=self._environment)
        while process.poll() is None:
            time.sleep(0.02)
            if kill_at and len(self.lines()) * self._log_every >= kill_at:
                process.send_signal(signal.SIGKILL)
                break
        if process.wait() != (-signal.SIGKILL if kill_at else 0):
            raise RuntimeError(f"pretrain ended with exit code {process.returncode}")
        return self.lines()

    def lines(self) -> list[dict[str, Any]]:
        lines = self._metrics.read_text().splitlines(keepends=True) if self._metrics.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset")
    parser.add_argument("--steps", type=int)
    options = parse_arguments(parser)
    preset = options.preset or ("tiny" if options.quick else "small")
    steps = options.steps
    steps = steps or (16 if options.quick else 1500)
    is_cuda = options.device.type == "cuda"
    results = Results(options.results, options.device)
    corpus = make_corpus(options.cache, 300 if options.quick else 8000)
    milliseconds = []
    losses = []
    for title, kernels in (("auto", "auto"), ("killed", "auto"), ("all", "triton" if is_cuda else "reference")):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            run = Run(Path(folder), preset, corpus, steps, kernels)
            if title == "killed":
                run.train(kill_at=steps // 2)
            lines = run.train()
            seconds = time.perf_counter() - start
        # The first line has warm-up and capture.
        milliseconds.append(1e3 * statistics.median(line["step_seconds"] for line in lines[1:]))
        speed = statistics.median(line["tokens_per_second"] for line in lines[1:])
        losses.append({line["step"]: line["loss"] for line in lines})
        results.add(
            f"pretrain --preset {preset}, kernels {title}: {milliseconds[-1]:.2f} ms per step, {speed:,.0f} tokens/s"
            f", loss {lines[-1]['loss']:.3f}; {seconds:.0f} s in all",
            headline=True,
            **{"preset": preset, "kernels": title, "step_ms": milliseconds[-1], "tokens_per_second": speed},
        )
        if title == "killed":
            results.add(f"pretrain --preset {preset}, killed and resumed: equal losses", ok=losses[0] == losses[1])
    ratio = milliseconds[0] / milliseconds[-1]
    is_right = ratio <= ALLOWED or not is_cuda
    results.add(f"pretrain --preset {preset}: {ratio:.3f} times the step by all kernels", ok=is_right, ratio=ratio)
    return results.exit_code()


if __name__ == "__main__":
    sys.exit(main())
