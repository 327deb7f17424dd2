"""How the GPU scripts report: a line for people at once, and a JSON object per line that names the card."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from groups import CACHE

import electra_fast as ef


def parse_arguments(parser: argparse.ArgumentParser, with_overrides: bool = False) -> argparse.Namespace:
    """Adds what all these scripts take, and reads the command line; without a GPU everything is a rehearsal.

    `with_overrides` takes `--section.key value` of the configuration too, as the dictionary `overrides`.
    """
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--results", type=Path, help="append a JSON object per result to this file")
    parser.add_argument("--cache", type=Path, default=CACHE, help="corpora that scripts share")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, few steps; always so on a CPU")
    options, rest = parser.parse_known_args()
    if rest and not with_overrides:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if len(rest) % 2 or any("." not in key for key in rest[::2]):
        parser.error(f"cannot read {' '.join(rest)}: overrides are written --section.key value")
    options.overrides = dict(zip((key.removeprefix("--") for key in rest[::2]), rest[1::2], strict=True))
    options.device = torch.device(options.device)
    options.quick |= options.device.type != "cuda"
    return options


class Results:
    """Prints and saves each result as it is known, so that what fails later costs nothing of it.

    Every saved object has `card`, versions, `group` (of `groups.py`), the printed `line`, and `ok`.
    """

    def __init__(self, path: Path | None, device: torch.device) -> None:
        self.path, self.num_wrong = path, 0
        is_cuda = device.type == "cuda"
        self.facts = {
            "card": torch.cuda.get_device_name(device) if is_cuda else "cpu: a rehearsal, speeds mean nothing",
            "torch": torch.__version__,
            "electra_fast": ef.__version__,
            "group": os.environ.get("ELECTRA_FAST_BENCH_GROUP"),
        }

    def add(self, line: str, *, ok: bool = True, **figures: Any) -> None:
        """One result; `ok = False`: something is wrong, or failed; `headline = True`: comes first in a summary."""
        self.num_wrong += not ok
        line = line if ok else f"WRONG {line}"
        print(line, flush=True)
        if self.path is not None:
            record = {**self.facts, "time": round(time.time(), 1), "ok": ok, "line": line, **figures}
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def exit_code(self) -> int:
        """1 if any result was wrong."""
        return int(self.num_wrong > 0)


def listed(found: Mapping[str, Any]) -> str:
    """Figures of a check by name; `ok` is said by the line's beginning."""
    pairs = ((name, f"{x:.3g}" if isinstance(x, float) else x) for name, x in found.items() if name != "ok")
    return ", ".join(f"{name} {text}" for name, text in pairs)


def reason(error: BaseException) -> str:
    """An exception in a line."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:300]
