"""Trains from nothing for a night on this machine, and compares the encoder with others that exist.

    python bench/night.py --texts FILES... --glue GLUE --out FOLDER [--hours 6] [--seeds 5] [--beside NAME=FOLDER ...]

Does what a user would: vocabulary, corpus, the run that `electra-fast plan --hours` proposes, export, and fine-tuning
on every task in GLUE, also of the encoders beside it, which are folders of `transformers`. Without --texts only those
beside are fine-tuned. Prints the table of docs/measurements.md: medians of the seeds. Resumable: what is finished in
FOLDER is not done again, nor is a task of an encoder that is a line of night.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lib.groups import BENCH
from lib.recipe_report import TASKS
from lib.results import commit, markdown, processor

import electra_fast as ef
from electra_fast.files.atomic_files import replace_file

VOCAB_SIZE = 8192
RESULTS = BENCH / "night.jsonl"


def proposed(corpus: Path, hours: float, path: Path) -> ef.Config:
    """Returns the configuration that `plan` proposes for a corpus and time, and keeps the plan in a file."""
    if not path.exists():
        replace_file(path, json.dumps(ef.plan(data=corpus, hours=hours), indent=2))
    proposal = json.loads(path.read_text())["proposal"]
    print(proposal["command"], flush=True)
    return ef.Config.preset(proposal["preset"], proposal["recipe"]).override(proposal["overrides"])


def trained(texts: Iterable[Path], hours: float, out: Path) -> Path:
    """Pre-trains and exports an encoder."""
    vocab, corpus, run = (out / name for name in ("vocab.txt", "shards", "run"))
    if not vocab.exists():
        ef.train_vocab(texts, out=vocab, size=VOCAB_SIZE)
    ef.prepare(texts, vocab=vocab, out=corpus, holdout=0.01)
    ef.pretrain(proposed(corpus, hours, out / "plan.json"), data=corpus, out=run)
    ef.export(run, out / "model", languages=["en"])
    return out / "model" / "discriminator"


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """The medians of encoders with every task, their mean, and in brackets the range of the seeds' means."""
    rows, found = [], dict[str, dict[str, list[float]]]()
    for line in lines:
        found.setdefault(line["encoder"], {})[line["task"]] = line["scores"]
    for encoder, tasks in found.items():
        if tasks.keys() >= TASKS.keys():
            medians = [100 * statistics.median(tasks[task]) for task in TASKS]
            means = [100 * statistics.mean(seed) for seed in zip(*(tasks[task] for task in TASKS), strict=True)]
            spread = f" ({min(means):.1f} to {max(means):.1f})" if len(means) > 1 else ""
            rows.append([encoder, *(f"{each:.1f}" for each in medians), f"{statistics.mean(medians):.1f}{spread}"])
    return markdown(["", *TASKS.values(), "mean"], rows)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", type=Path)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beside", nargs="*", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    encoders = dict[str, str]()
    if options.texts:
        encoders[f"electra-fast, {options.hours:g} h"] = str(trained(options.texts, options.hours, options.out))
    encoders |= dict(each.split("=", 1) for each in options.beside)
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    for name, model in encoders.items():
        for task in TASKS:
            key = {"encoder": name, "task": task, "seeds": options.seeds}
            if any(key.items() <= line.items() for line in lines):
                continue
            out = options.out / "tasks" / name
            found = ef.finetune(task, model=model, data=options.glue, out=out, seeds=options.seeds)[task]
            scores = [run[found["metric"]] for run in found["runs"]]
            line = {**key, "scores": scores, "seconds": found["seconds"], "commit": commit(), "processor": processor()}
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            lines.append(line)
    print(table(lines))


if __name__ == "__main__":
    sys.exit(main())
