"""Runs groups of measurements one after the other, each in a separate process.

Each command of `gpu.py` is a list of groups. A group that raises, hangs or crashes, for example with an illegal memory
access, loses only its remaining results: its output so far is kept, and the next group starts with a fresh CUDA
context. A group is limited to its `seconds`; there is also a limit for all groups together.

Writes `results.jsonl`, `log.txt` and `summary.txt` (under 12,000 characters). Uses only the standard library, so that
this process holds no GPU memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

BENCH = Path(__file__).resolve().parent.parent
# Corpora and compiled kernels, shared between scripts.
CACHE = Path(tempfile.gettempdir()) / "electra-fast-bench"
MOST_CHARACTERS = 11_500
# Too short for any group: importing torch and compiling the first kernels takes longer.
LEAST_SECONDS = 20.0
TAIL_LINES = 6  # lines in the summary of a group that failed or saved no results


@dataclass(frozen=True)
class Group:
    """A command and its time limit in seconds.

    `command` is a script in this folder with its arguments (`--results`, `--device` and so on are added), or a module
    (`-m pytest …`) or program that is run as is. `expected` is a prediction, printed with the result.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    expected: str = ""


def detect_device() -> str:
    """`cuda` if there is a GPU; checked in a child process, because the check initializes CUDA."""
    code = "import torch; print('cuda' if torch.cuda.is_available() else 'cpu')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def stop_with_summary() -> None:
    """Makes SIGTERM end the groups as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def run(title: str, groups: Sequence[Group], out: Path, cache: Path, seconds: float, shared: Sequence[str]) -> int:
    out.mkdir(parents=True, exist_ok=True)
    results = (out / "results.jsonl").resolve()
    start = time.monotonic()
    results.write_text("")
    outcomes = {group.name: _outcome(group, "not started", 0.0) for group in groups}
    assert len(outcomes) == len(groups), "two groups have one name"
    with (out / "log.txt").open("w") as log:
        for group in groups:
            left = seconds - (time.monotonic() - start)
            if left < min(LEAST_SECONDS, group.seconds):
                outcomes[group.name] = _outcome(group, "skipped: no time left", 0.0)
                continue
            try:
                outcomes[group.name] = _run_group(group, min(left, group.seconds), results, cache, shared, log)
            except KeyboardInterrupt:
                outcomes[group.name] = _outcome(group, "interrupted", time.monotonic() - start)
                break
            with results.open("a") as file:
                file.write(json.dumps(outcomes[group.name]) + "\n")
    text = summary(title, list(outcomes.values()), _read(results), time.monotonic() - start)
    (out / "summary.txt").write_text(text)
    print(text, flush=True)
    return int(any(outcome["outcome"] != "ok" for outcome in outcomes.values()))


def _outcome(group: Group, outcome: str, seconds: float) -> dict[str, Any]:
    expected = {"expected": group.expected} if group.expected else {}
    return {"group": group.name, "outcome": outcome, "seconds": round(seconds, 1), **expected}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _run_group(
    group: Group, seconds: float, results: Path, cache: Path, shared: Sequence[str], log: TextIO
) -> dict[str, Any]:
    name, *arguments = command = list(group.command)
    saves = name.endswith(".py")
    if saves:
        command = [sys.executable, str(BENCH / name), *arguments, "--results", str(results), *shared]
    elif name == "-m":
        command = [sys.executable, *command]
    tail: deque[str] = deque(maxlen=100)
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=_environment(group.name, cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,  # so that a hung group can be killed with its children
    )
    reader = threading.Thread(target=_copy, args=(process.stdout, group.name, tail, log), daemon=True)
    reader.start()
    try:
        process.wait(seconds)
        outcome = _exit_status(process.returncode)
    except subprocess.TimeoutExpired:
        _kill(process, signal.SIGABRT)  # faulthandler prints where it hung
        outcome = f"killed after {seconds:.0f} s"
    finally:
        _kill(process, signal.SIGKILL)
        reader.join(5)  # a compiler's worker may hold the pipe open
    result = _outcome(group, outcome, time.monotonic() - start)
    if outcome != "ok" or not saves:
        result["tail"] = _last_lines(list(tail))
    return result


def _environment(group: str, cache: Path) -> dict[str, str]:
    settings = {
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "ELECTRA_FAST_BENCH_GROUP": group,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # `electra-fast` of this environment
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0"),  # the tests would hide the GPU
        "OMP_WAIT_POLICY": "PASSIVE",  # as the package does when imported before torch
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | settings


def _copy(pipe: TextIO, name: str, tail: deque[str], log: TextIO) -> None:
    with pipe:
        for line in pipe:
            tail.append(line.rstrip()[:160])
            log.write(f"[{name}] {line}")
            log.flush()
            print(f"[{name}] {line}", end="", flush=True)


def _last_lines(lines: list[str]) -> list[str]:
    """The lines that explain a failure or show the result: the last stack trace, or the end of the output."""
    traces = [i for i, line in enumerate(lines) if "(most recent call first)" in line]
    if traces:
        return lines[traces[-1] + 1 :][:TAIL_LINES]
    return [line for line in lines if line][-TAIL_LINES:]


def _kill(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        return


def _exit_status(code: int) -> str:
    if code < 0:
        return f"died of {signal.Signals(-code).name}"
    return "ok" if code == 0 else f"exit code {code}"


def _read(results: Path) -> list[dict[str, Any]]:
    """All complete lines; a process may have died while writing its last one."""
    records = []
    for line in results.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def summary(title: str, outcomes: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], seconds: float) -> str:
    """Each group's outcome, then its lines, wrong ones and headlines first; the longest groups are truncated to fit."""
    cards = dict.fromkeys(record["card"] for record in records if "card" in record)
    num_ok = sum(outcome["outcome"] == "ok" for outcome in outcomes)
    head = [f"== {title} on {' and '.join(cards) or 'nothing that answered'}: ", ""]
    head[0] += f"{num_ok} of {len(outcomes)} groups ok, {seconds:.0f} s"
    for outcome in outcomes:
        expected = f" (expected: {outcome['expected']})" if "expected" in outcome else ""
        head.append(f"{outcome['seconds']:6.0f} s  {outcome['group']}: {outcome['outcome']}{expected}")
        head += [f"          | {line}" for line in outcome.get("tail", [])]
    lines = {outcome["group"]: list(_lines(outcome["group"], records)) for outcome in outcomes}
    left_out = dict.fromkeys(lines, 0)

    def text() -> str:
        parts = ["\n".join(head)]
        for name, printed in lines.items():
            rest = [f"… {left_out[name]} more lines in results.jsonl"] if left_out[name] else []
            parts += ["\n".join([f"-- {name}", *printed, *rest])] if printed else []
        return "\n\n".join(parts) + "\n"

    while len(text()) > MOST_CHARACTERS and any(lines.values()):
        longest = max(lines, key=lambda name: sum(map(len, lines[name])))
        lines[longest].pop()
        left_out[longest] += 1
    return text()[:MOST_CHARACTERS]


def _lines(group: str, records: Sequence[dict[str, Any]]) -> Iterator[str]:
    of_group = [record for record in records if record.get("group") == group and "line" in record]
    yield from (record["line"] for record in sorted(of_group, key=lambda x: (x["ok"], not x.get("headline", False))))
