"""Adapts a pre-trained encoder to a domain: replaced-token detection beside masked language modeling at equal FLOPs.

    python bench/domain_adaptation.py --model FOLDER --out FOLDER [--steps 1000] [--seeds 3] [--learning-rate 2e-4]

The domain is software: the descriptions of Debian's packages, one per source package, from the lists of apt
(`apt-get -o Acquire::Languages=en update`). The task is to tell a package's section from its description; texts of its
validation set are in no training. FOLDER is an encoder of `transformers`. Prints, for the encoder as it is and after
each adaptation, the task's accuracy and macro F1, and of text held out the discriminator's AUC on random replacements
and the masked language model's accuracy. Resumes after an interruption; results of other settings in the same --out
are kept and shown.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from lib.results import markdown, processor
from lib.task_data import stanzas

import electra_fast as ef
from electra_fast.training.flops import flops_per_token

LISTS = Path("/var/lib/apt/lists")
SUBJECTS = (
    "admin comm database devel editors electronics fonts games gnome graphics hamradio httpd kde mail math net science "
    "sound tex text utils vcs video web x11"
).split()
NUM_EXAMPLES = 1_000  # of the task's training and validation set each
SETTINGS = {
    "optimizer.name": "adamw",
    "optimizer.schedule": "linear",
    "optimizer.bias_correction": True,
    "data.masking": "bert",
    "data.sequence_length": 128,
    "train.batch_size": 32,
    "train.log_every": 20,
    "train.eval_every": 200,
    "train.eval_batches": 10,
    "train.checkpoint_every": 100,
}
# Half of an average description, in a third of its time.
TASK = {
    "finetune.sequence_length": 64,
    "finetune.epochs": 5,
    "finetune.select": "last",
    "finetune.class_weights": "none",
    "finetune.batch_size": 16,
    "finetune.learning_rate": 3e-4,
}


def fields(path: Path) -> Iterator[dict[str, str]]:
    """The fields of each package in one of apt's lists."""
    text = subprocess.run(["/usr/lib/apt/apt-helper", "cat-file", path], capture_output=True, text=True, check=True)
    return stanzas(text.stdout)


def descriptions() -> Iterator[tuple[str, str]]:
    """Section and description of a package per source package, in a random but fixed order."""
    texts = {}
    for path in LISTS.glob("*_Translation-en*"):
        texts |= {each["Package"]: each["Description-en"] for each in fields(path) if "Description-en" in each}
    packages: dict[str, dict[str, str]] = {}
    for path in sorted(LISTS.glob("*_Packages*")):
        for each in fields(path):
            source = each.get("Source", each.get("Package", "")).partition(" ")[0]
            if each.get("Package") in texts and (source not in packages or each["Package"] == source):
                packages[source] = each
    if not packages:
        raise SystemExit(f"{LISTS}: no descriptions; run apt-get -o Acquire::Languages=en update")
    found = {}
    for _, package in sorted(packages.items()):
        title, *lines = (line.strip() for line in texts[package["Package"]].split("\n"))
        body = "\n".join("" if line == "." else line for line in lines)
        text = f"{title}.\n" + re.sub(r"(?<!\n)\n(?![\n*+-])", " ", body)
        found[text] = package["Section"].rpartition("/")[2]
    pairs = [(section, text) for text, section in found.items()]
    random.Random(0).shuffle(pairs)
    yield from pairs


def write_data(out: Path, model: Path) -> None:
    """Writes the task as train.jsonl and dev.jsonl, and the corpus, both once."""
    if (out / "shards").exists():
        return
    pairs = list(descriptions())
    examples = [pair for pair in pairs if pair[0] in SUBJECTS]
    for name, start in (("dev", 0), ("train", NUM_EXAMPLES)):
        lines = (json.dumps({"text": t, "label": s}) for s, t in examples[start : start + NUM_EXAMPLES])
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    hidden = {text for _, text in examples[:NUM_EXAMPLES]}
    ef.prepare((text for _, text in pairs if text not in hidden), vocab=model, out=out / "shards", holdout=0.01)


def adapt(run: Path, method: str, options: argparse.Namespace) -> None:
    """Trains a run to its end; one of masked language modeling for the FLOPs of the other's steps."""
    if not run.exists():
        ef.import_folder(options.model, run, generator=options.generator if method == "rtd" else None)
    config = ef.Config.load(run / "config.toml").override(SETTINGS | {"optimizer.learning_rate": options.learning_rate})
    steps = options.steps
    if options.generator_first and method == "rtd":
        config = config.override({"objective.generator_first": options.generator_first})
    if method == "mlm":
        other = ef.Config.load(run.parent / name_of("rtd", options) / "config.toml")
        steps = round(steps * flops_per_token(other).total / flops_per_token(config).total)
    ef.pretrain(config.override({"train.steps": steps}), data=options.out / "shards", out=run)


def name_of(method: str, options: argparse.Namespace) -> str:
    """The name of a run, which tells its settings."""
    first = f"-first-{options.generator_first}" if options.generator_first and method == "rtd" else ""
    return f"{method}-{options.steps}-{options.learning_rate:g}{first}"


def measure(name: str, source: Path, options: argparse.Namespace) -> dict[str, object]:
    """The scores of a model: of validation text, unless it has no head, and of the task."""
    found: dict[str, object] = {"name": name, "processor": processor()}
    if name != "as it is":
        report = ef.evaluate(source, options.out / "shards", max_batches=50, sequence_length=128)
        run = ef.Config.load(source / "config.toml")
        tokens = run.train.steps * run.train.batch_size * run.data.sequence_length
        found |= {"tokens": tokens, "FLOPs": tokens * flops_per_token(run).total}
        found |= {key: report.get(key) for key in ("unigram_auc", "generator_loss", "generator_accuracy")}
    paths = {split: options.out / f"{split}.jsonl" for split in ("train", "dev")}
    out = options.out / "tasks" / name
    results = ef.finetune("classification", model=source, out=out, seeds=options.seeds, overrides=TASK, **paths)
    runs = results["classification"]["runs"]
    accuracies = [each["accuracy"] for each in runs]
    return found | {
        "accuracy": mean(accuracies),
        "f1_macro": mean(each["f1_macro"] for each in runs),
        "accuracies": accuracies,
    }


def table(records: Sequence[dict[str, object]]) -> str:
    """The results in Markdown."""
    columns = ("name", "tokens", "FLOPs", "unigram_auc", "generator_accuracy", "accuracy", "f1_macro", "accuracies")
    return markdown(columns, [[shown(each.get(key)) for key in columns] for each in records])


def shown(value: object) -> str:
    """Three digits of each number."""
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Runs what is not finished and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of an encoder of transformers")
    parser.add_argument("--out", type=Path, required=True, help="folder of data, runs and results.jsonl")
    parser.add_argument("--steps", type=int, default=1_000, help="steps of replaced-token detection")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--generator", default="small", help="as for electra-fast import")
    parser.add_argument("--generator-first", type=int, default=0, help="objective.generator_first")
    parser.add_argument("--methods", default="as it is,rtd,mlm", help="which to run, separated by commas")
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out, options.model)
    path = options.out / "results.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for method in options.methods.split(","):
        name = method if method == "as it is" else name_of(method, options)
        if any(each["name"] == name for each in records):
            continue
        source = options.model if method == "as it is" else options.out / name
        if method != "as it is":
            adapt(source, method, options)
        records.append(measure(name, source, options))
        with path.open("a") as file:
            file.write(json.dumps(records[-1]) + "\n")
        print(table(records), flush=True)


if __name__ == "__main__":
    main()
