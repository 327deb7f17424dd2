"""Gains from adapting an encoder to a domain, measured on a task of the domain.

    python bench/adaptation.py TEXT... --out FOLDER [--domains packages] [--only WAY...] [--seed 1]

Trains `mini` on TEXT, adapts it to each domain of `lib/domains.py` in each way of `WAYS`, as `electra-fast adapt` does,
and fine-tunes it on the domain's task with three seeds, up to the last step, since the validation texts are the score.
Runs one job per core. A finished job is a line of FOLDER/results.jsonl; the same command resumes. Prints the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor, as_completed
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lib import domains
from lib.results import commit, markdown, processor

import electra_fast as ef
from electra_fast.hardware.flops import flops_per_token
from electra_fast.messages import quietly

STEPS = 600
"""Steps of masked language modeling with the same FLOPs as the other ways, if they differ from adapt's choice."""
RATES = ("optimizer.learning_rate", "optimizer.muon_learning_rate")
TASK = {"finetune.sequence_length": 64, "finetune.select": "last", "finetune.evals_per_epoch": 0}
# The text, the objective, and the fraction of the encoder's original learning rates. Without a text, nothing is
# trained; without an objective, `adapt` chooses.
WAYS: dict[str, tuple[str, str, float]] = {
    "as it is": ("", "", 0),
    "adapt": ("text", "", 0),
    "masked language modeling": ("text", "mlm", 1),
    "masked language modeling, half of the rates": ("text", "mlm", 0.5),
    "masked language modeling, a quarter of it general text": ("text and general", "mlm", 1),
    "masked language modeling, the task's texts": ("task", "mlm", 1),
    "replaced-token detection": ("text", "electra", 1),
    "replaced-token detection, half of the rates": ("text", "electra", 0.5),
}


def make_base(texts: list[str], out: Path) -> Path:
    """Trains `mini` on the texts, once."""
    vocab = out / "vocab.txt"
    corpus = out / "corpus"
    run = out / "mini"
    if not vocab.exists():
        ef.vocab(texts, out=vocab, size=8_192, strip_accents=True)
    ef.prepare(texts, vocab=vocab, out=corpus, holdout=0.01)
    ef.pretrain(corpus, config=ef.Config.preset("mini"), out=run)
    return run


def do(name: str, domain: str, options: argparse.Namespace) -> dict[str, Any]:
    """Adapts and evaluates; returns the line of the results."""
    text, objective, share = WAYS[name]
    base = options.out / "mini"
    folder = options.out / domain / f"{name}-{options.seed}".replace(" ", "-")
    source = folder / "run" if text else base
    with quietly():
        if text:
            keys: dict[str, Any] = {"train.seed": options.seed}
            if objective:
                config = ef.Config.load(base / "config.toml")
                rates = vars(config.resolved().optimizer)
                keys |= {key: share * rates[key.partition(".")[2]] for key in RATES}
                mlm = flops_per_token(config.with_objective("mlm"), of_all_tokens=True).total
                cost = flops_per_token(config.with_objective(objective), of_all_tokens=True).total / mlm
                keys |= {"objective.name": objective, "train.steps": round(STEPS / cost)}
            general = options.out / "corpus" if "general" in text else None
            texts = options.out / domain / f"{text.split()[0]}.jsonl"
            ef.adapt(base, texts, out=source, general=general, overrides=keys)
        data = {split: options.out / domain / f"{split}.jsonl" for split in ("train", "dev")}
        results = ef.finetune(source, task="classification", out=folder / "task", seeds=3, overrides=TASK, **data)
    scores = {key: [run[key] for run in results["classification"]["runs"]] for key in ("accuracy", "f1_macro")}
    line = {"domain": domain, "way": name, "seed": options.seed}
    return line | scores | {"commit": commit(), "processor": processor()}


def table(lines: list[dict[str, Any]]) -> str:
    """A row per way and a column per domain: the median over all fine-tunings, and their values per seed."""
    columns = list(dict.fromkeys(line["domain"] for line in lines))
    rows = []
    for way in WAYS:
        cells = []
        for column in columns:
            accuracies = [line["accuracy"] for line in lines if (line["domain"], line["way"]) == (column, way)]
            values = [100 * accuracy for seeds in accuracies for accuracy in seeds]
            shown = ", ".join(f"{x:.1f}" for x in values)
            cells.append(f"**{statistics.median(values):.1f}** ({shown})" if values else "")
        rows += [[way, *cells]] if any(cells) else []
    return markdown(["way", *columns], rows)


def run(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    done = {(line["domain"], line["way"], line["seed"]) for line in lines}
    make_base(options.texts, options.out)
    for domain in options.domains:
        domains.write(domain, options.out / domain)
    ways = dict.fromkeys(way for pattern in options.only for way in WAYS if fnmatch(way, pattern))
    jobs = [(way, name) for way in ways for name in options.domains if (name, way, options.seed) not in done]
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=1) as pool:
        running = [pool.submit(do, *job, options) for job in jobs]
        for finished in as_completed(running):
            if error := finished.exception():
                print(f"a run failed, and the others continue: {error}", flush=True)
                continue
            lines.append(finished.result())
            with results.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
            print(f"{lines[-1]['domain']}: {lines[-1]['way']}: {lines[-1]['accuracy']}", flush=True)
    print(table(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--domains", nargs="+", default=list(domains.DOMAINS), choices=domains.DOMAINS)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of ways, in the order to run")
    parser.add_argument("--seed", type=int, default=0, help="seed of the adaptation")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
