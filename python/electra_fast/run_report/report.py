"""Writes the page about runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from electra_fast.errors import InputError
from electra_fast.files.atomic_files import replace_file
from electra_fast.run_report.page import page
from electra_fast.run_report.runs import find_runs, is_pretraining, names_of, read_finetuning, read_pretraining


def report(runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> None:
    """Writes one self-contained HTML page about runs.

    Args:
        runs: Folders of pre-training runs, folders of fine-tunings, or folders that contain such; one or several.
        out: The page to write.

    Raises:
        InputError: If a folder contains no run, a file of a run is damaged, or `out` is a folder.
        FileNotFoundError: If a folder does not exist.
    """
    given = [Path(each) for each in ([runs] if isinstance(runs, (str, os.PathLike)) else runs)]
    if Path(out).is_dir():
        raise InputError(f"{out}: is a folder; --out needs a file")
    if not given:
        raise InputError("report: no run is given")
    folders: dict[Path, Path] = {}
    for folder in given:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        found = list(find_runs(folder))
        if not found:
            raise InputError(
                f"{folder}: contains no run: neither metrics.jsonl and config.toml of a pre-training "
                "nor TASK/seed-K/metrics.jsonl and config.toml of a fine-tuning"
            )
        folders |= {each.resolve(): each for each in found}
    names = names_of(list(folders))
    pretrainings = [read_pretraining(each, names[each]) for each in folders if is_pretraining(each)]
    finetunings = [read_finetuning(each, names[each]) for each in folders if not is_pretraining(each)]
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    replace_file(Path(out), page(pretrainings, finetunings))
