"""Data of fine-tuning that several scripts read: GLUE cut to its first examples, and lists of Debian's packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from electra_fast.finetuning.readers import glue


def cut_glue(folder: Path, source: Path, task: str, examples: int) -> Path:
    """Copies a task's files without test examples, with the first examples of training; 0: all. Returns the copy."""
    target = folder / f"{task}-{examples}"
    target.mkdir(parents=True, exist_ok=True)
    for file in glue.locate(task, source).iterdir():
        if file.suffix == ".tsv" and not file.name.startswith("test") and not (target / file.name).exists():
            lines = file.read_bytes().splitlines(keepends=True)
            is_cut, has_header = examples and file.name.startswith("train"), task != "cola"
            (target / file.name).write_bytes(b"".join(lines[: examples + has_header] if is_cut else lines))
    return target


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """The fields of each package in a list of packages."""
    for stanza in text.split("\n\n"):
        yield dict(re.findall(r"^(\S+): *((?:.*)(?:\n .*)*)", stanza, re.MULTILINE))
