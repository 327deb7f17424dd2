"""A contender of `cpu_step.py` in a separate process: `main` runs in that process, `Worker` is its handle.

Each contender has its own threads, allocator, compiled code and version of the package, and sleeps while another one
runs. Requests and answers are lines of JSON on standard input and output; output of libraries goes to standard error.
The first request describes the contender, the next ones are numbers of steps, and `null` requests the final
measurements. The answer to an exception is `{"error": …}`; it ends the process, as does the end of the input.

Other versions of the package run this script too, so it uses only their common interface.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import electra_fast as ef
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.matmul import fastest_matmul, use_matmul
from lib.contenders import Build, Runner, ours, peer, run
from lib.groups import BENCH
from lib.results import reason
from lib.workload import loader

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Warm-up ends when a step takes nearly as long as the one before: those that compile take far longer.
SETTLED = 1.5
LEAST_WARM_UP = 2
MOST_WARM_UP = 6


def own(config: ef.Config, device: torch.device, execution: str, precision: str | None = None) -> Runner:
    """Our step with one attention backend, so that all versions compute the same, and the measured matmul library."""
    compute = ComputeConfig("sdpa", DTYPES[precision or config.train.precision])
    compute = replace(compute, matmul=fastest_matmul(config.model, device))
    runner = ours(config, device, execution, compute)

    def step(rows: Any) -> None:
        with use_matmul(compute.matmul):
            runner.step(rows)

    return replace(runner, step=step)


def other(config: ef.Config, device: torch.device, precision: str | None = None, **options: Any) -> Runner:
    """The step of `transformers` in our precision, or under autocast in another."""
    return peer(config, device, dtype=DTYPES[precision or config.train.precision], **options)


EAGER = "electra-fast, eager"
CONTENDERS: dict[str, Build] = {
    EAGER: partial(own, execution="eager"),
    "electra-fast, eager, bf16": partial(own, execution="eager", precision="bf16"),
    "electra-fast, compile": partial(own, execution="compile"),
    "transformers, eager, block mask": partial(other, masked=True),
    "transformers, eager, no mask": partial(other, masked=False),
    "transformers, eager, no mask, bf16": partial(other, masked=False, precision="bf16"),
    "transformers, compiled, block mask": partial(other, masked=True, compile_with={}),
    "transformers, compiled, no mask": partial(other, masked=False, compile_with={}),
}


class Worker:
    """The handle on a contender's process, which has warmed up; `close` ends it.

    Keys of `config` that the package in the process does not have are listed in `unknown`. `package` is the folder that
    contains its `electra_fast/`; None: as in this process.
    """

    def __init__(
        self, name: str, config: ef.Config, corpus: Path, cache: Path, turn_seconds: float, package: Path | None
    ) -> None:
        keys = {key: _get(config, key) for key in ef.Config.key_names()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lib.cpu_worker"],
            cwd=BENCH,
            env=_environment(cache, package),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            answer = self._ask({"contender": name, "config": keys, "corpus": str(corpus.resolve())})
        except BaseException:
            self.close()
            raise
        self.unknown: list[str] = answer["unknown"]
        self.warm_up_seconds: float = answer["warm_up_seconds"]
        self.steps_per_turn = max(1, round(turn_seconds / answer["step_seconds"]))
        self.turns: list[dict[str, float]] = []

    @property
    def speeds(self) -> list[float]:
        return [turn["tokens"] / turn["seconds"] for turn in self.turns]

    def median_ms(self, name: str) -> float:
        """Median over the turns of a step's milliseconds: `seconds` on the clock, `cpu_seconds` of all threads."""
        return 1e3 * statistics.median(turn[name] for turn in self.turns) / self.steps_per_turn

    def take_turn(self) -> None:
        self.turns.append(self._ask(self.steps_per_turn))

    def facts(self) -> dict[str, float]:
        """Mean loss of all steps and peak memory in GiB."""
        return self._ask(None)

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a request that the process did not live to read
            self.process.stdin.close()

    def _ask(self, request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with exit code {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def _get(config: ef.Config, key: str) -> str:
    value = config.value(key)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _environment(cache: Path, package: Path | None) -> dict[str, str]:
    """Sleeping threads for all, as our package sets if it is imported before torch; shared caches of compiled code."""
    variables = {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(cache.resolve() / "inductor"),
    }
    if package is not None:
        paths = [str(package.resolve()), *filter(None, [variables.get("PYTHONPATH")])]
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def warm_up(runner: Runner, batches: Iterator[Any]) -> float:
    """Runs steps until they take equally long; returns the last one's seconds."""
    seconds: list[float] = []
    while len(seconds) < LEAST_WARM_UP or (len(seconds) < MOST_WARM_UP and seconds[-2] > SETTLED * seconds[-1]):
        seconds += run(runner, batches, 1, CPU).seconds
    return seconds[-1]


def serve(requests: TextIO, answers: TextIO) -> None:

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    first = json.loads(requests.readline())
    start = time.perf_counter()
    known = {key: text for key, text in first["config"].items() if key in ef.Config.key_names()}
    config = ef.Config().override(known)
    torch.manual_seed(0)
    runner = CONTENDERS[first["contender"]](config, CPU)
    batches = loader(Path(first["corpus"]), config)
    answer(
        unknown=sorted(first["config"].keys() - known.keys()),
        step_seconds=warm_up(runner, batches),
        warm_up_seconds=time.perf_counter() - start,
    )
    for line in requests:
        number = json.loads(line)
        if number is None:
            answer(mean_loss=runner.loss(), peak_gib=sum(map(peak_gib, processes())))
        else:
            start = sum(map(cpu_seconds, processes()))
            times = run(runner, batches, number, CPU)
            used = sum(map(cpu_seconds, processes())) - start
            answer(seconds=sum(times.seconds), cpu_seconds=used, tokens=times.num_tokens)


def processes() -> list[str]:
    """Ids of this process and of the children that share its steps."""
    me = str(os.getpid())
    return [me, *Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def cpu_seconds(process: str) -> float:
    after_name = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def peak_gib(process: str) -> float:
    """Peak memory of a process, shared pages included."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 2**20


def main() -> int:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        serve(sys.stdin, answers)
    except Exception as error:  # not installed, not compilable: the caller reports it
        answers.write(json.dumps({"error": reason(error)}) + "\n")
        answers.flush()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
