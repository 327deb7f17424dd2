"""Results of the scripts that train: a printed line each, and a line of JSON that includes the card."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import electra_fast as ef
from lib.groups import CACHE

if TYPE_CHECKING:
    import torch

DRY_RUN = "cpu: dry run, speeds are meaningless"


def parse_arguments(
    parser: argparse.ArgumentParser, with_overrides: bool = False, for_cpu: bool = False
) -> argparse.Namespace:
    """Adds the options that these scripts share and parses the command line; without a GPU it is a dry run.

    `with_overrides` takes `--section.key value` of the configuration too, as the dictionary `overrides`.
    With `for_cpu` the script measures the CPU: there is no `--device`, and only `--quick` makes a dry run.
    """
    import torch

    if for_cpu:
        parser.set_defaults(device="cpu")
    else:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, help="append a JSON object per result to this file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for corpora shared by the scripts")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, few steps; without a GPU always on if the script is for one"
    )
    options, rest = parser.parse_known_args()
    if rest and not with_overrides:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if len(rest) % 2 or any("." not in key for key in rest[::2]):
        parser.error(f"cannot read {' '.join(rest)}: overrides are written --section.key value")
    options.overrides = dict(zip((key.removeprefix("--") for key in rest[::2]), rest[1::2], strict=True))
    options.device = torch.device(options.device)
    options.quick |= options.device.type != "cuda" and not for_cpu
    return options


class Results:
    """Prints and saves each result immediately, so that a later failure cannot lose it.

    Every saved object has `card`, versions, `group` (from `groups.py`), the printed `line`, and `ok`.
    """

    def __init__(self, path: Path | None, device: torch.device, card: str | None = None) -> None:
        import torch

        self.path = path
        self.num_wrong = 0
        is_cuda = device.type == "cuda"
        self.facts = {
            "card": card or (torch.cuda.get_device_name(device) if is_cuda else DRY_RUN),
            "torch": torch.__version__,
            "electra_fast": ef.__version__,
            "group": os.environ.get("ELECTRA_FAST_BENCH_GROUP"),
        }

    def add(self, line: str, *, ok: bool = True, **metrics: Any) -> None:
        """Adds a result; `ok = False`: wrong or failed; `headline = True`: listed first in the summary."""
        self.num_wrong += not ok
        line = line if ok else f"WRONG {line}"
        print(line, flush=True)
        if self.path is not None:
            record = {**self.facts, "time": round(time.time(), 1), "ok": ok, "line": line, **metrics}
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def exit_code(self) -> int:
        return int(self.num_wrong > 0)


def measured_by_child(script: str, arguments: list[str], name: str) -> dict[str, float]:
    """The object in the last line of a script, which runs in a separate process with `transformers` silenced."""
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "true"}
    process = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment)
    if process.returncode:
        raise SystemExit(f"{name}: {process.stderr}")
    result: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return result


def listed(values: Mapping[str, Any]) -> str:
    """The metrics of a check, without `ok`, which is at the start of the line."""
    pairs = ((name, f"{x:.3g}" if isinstance(x, float) else x) for name, x in values.items() if name != "ok")
    return ", ".join(f"{name} {text}" for name, text in pairs)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reason(error: BaseException) -> str:
    """An exception on one line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]


def installed(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of this script's checkout; empty outside a checkout."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
