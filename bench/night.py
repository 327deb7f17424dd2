"""Trains from nothing for a night on this machine, and compares the encoder with others that exist.

    python bench/night.py TEXTS... --glue GLUE --out FOLDER [--hours 6] [--seeds 5] [--beside NAME=FOLDER ...]

Does what a user would: vocabulary, corpus, the run that `electra-fast plan --hours` proposes, export, and fine-tuning
on every task in GLUE, also of the encoders beside it, which are folders of `transformers`. Prints the table of
docs/measurements.md: medians of the seeds. Resumable: what is finished in FOLDER is not done again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from lib.recipe_report import TASKS
from lib.results import markdown

import electra_fast as ef
from electra_fast.files.atomic_files import replace_file

VOCAB_SIZE = 8192


def proposed(corpus: Path, hours: float, path: Path) -> ef.Config:
    """Returns the configuration that `plan` proposes for a corpus and time, and keeps the plan in a file."""
    if not path.exists():
        replace_file(path, json.dumps(ef.plan(data=corpus, hours=hours), indent=2))
    proposal = json.loads(path.read_text())["proposal"]
    print(proposal["command"], flush=True)
    return ef.Config.preset(proposal["preset"], proposal["recipe"]).override(proposal["overrides"])


def row(name: str, results: dict[str, Any]) -> list[str]:
    """An encoder's row of the table: the median of each task and their mean, with the range of the seeds' means."""
    medians = [100 * results[task]["median"] for task in TASKS]
    by_seed = zip(*([run[results[task]["metric"]] for run in results[task]["runs"]] for task in TASKS), strict=True)
    means = [100 * statistics.mean(scores) for scores in by_seed]
    mean = f"{statistics.mean(medians):.1f} ({min(means):.1f} to {max(means):.1f})"
    return [name, *(f"{each:.1f}" for each in medians), mean]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--beside", nargs="*", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    vocab, corpus, run = (options.out / name for name in ("vocab.txt", "shards", "run"))
    if not vocab.exists():
        ef.train_vocab(options.texts, out=vocab, size=VOCAB_SIZE)
    ef.prepare(options.texts, vocab=vocab, out=corpus, holdout=0.01)
    ef.pretrain(proposed(corpus, options.hours, options.out / "plan.json"), data=corpus, out=run)
    ef.export(run, options.out / "model", languages=["en"])
    rows = []
    beside = dict(each.split("=", 1) for each in options.beside)
    for name, model in {"electra-fast": str(options.out / "model" / "discriminator"), **beside}.items():
        tasks = ef.finetune(
            "glue", model=model, data=options.glue, out=options.out / "tasks" / name, seeds=options.seeds
        )
        rows.append(row(name, tasks))
        print(markdown(["", *TASKS.values(), "mean"], rows), flush=True)


if __name__ == "__main__":
    sys.exit(main())
