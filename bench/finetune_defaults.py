"""The defaults of fine-tuning, measured: how many steps, which rate and which class weights, by the number of examples.

    python bench/finetune_defaults.py --encoders FOLDER… --glue GLUE --work FOLDER [--results FILE] [--plan rates]

Fine-tunes each encoder on tasks cut to their first examples and appends a line per training to FILE; finished lines
are not repeated. GLUE's tasks are joined by `tickets`, 40 unequal classes of messy short texts in five languages: the
descriptions of Debian's packages, by section, with typing errors, markup and shouting. Of a Debian mirror, WORK must
have `Translation-en.xz`, `Translation-de.bz2` and likewise fr, it, es (`dists/bookworm/main/i18n`), and `Packages.xz`
(`dists/bookworm/main/binary-amd64`).
"""

from __future__ import annotations

import argparse
import bz2
import itertools
import json
import lzma
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lib.results import processor
from lib.task_data import cut_glue, stanzas

import electra_fast as ef

LANGUAGES = ("en", "de", "fr", "it", "es")
NUM_CLASSES, NUM_DEV = 40, 2_000
SETTINGS = ("learning_rate", "class_weights", "select")
"""What a plan varies beside the steps, which become epochs."""


def packages_of(path: Path) -> Iterator[dict[str, str]]:
    """The fields of each package in a list of a Debian mirror."""
    return stanzas((bz2 if path.suffix == ".bz2" else lzma).open(path, "rt", encoding="utf-8").read())


def messy(text: str, dice: random.Random) -> str:
    """A text as people send it: some shout, mistype, forward, or paste markup."""
    if dice.random() < 0.1:
        text = text.upper()
    if dice.random() < 0.4:
        text = "".join(dice.choice(("", each * 2)) if dice.random() < 0.04 else each for each in text)
    if dice.random() < 0.1:
        text = f"<p>{text.replace(' ', '&nbsp;', 3)}</p>"
    return dice.choice(("", "", "", "Re: ", "FWD: Fwd: ", f"[#{dice.randrange(10**6)}] ")) + text


def tickets(work: Path) -> list[tuple[str, str]]:
    """Pairs of a class and a text, a package each in one language, in a random but fixed order."""
    packages = packages_of(work / "Packages.xz")
    section = {each["Package"]: each["Section"].rpartition("/")[2] for each in packages if "Section" in each}
    texts: dict[str, list[str]] = {}
    for language in LANGUAGES:
        for each in packages_of(*work.glob(f"Translation-{language}.*")):
            title, *lines = each.get(f"Description-{language}", "").split("\n")
            body = " ".join(line.strip() for line in lines if line.strip() != ".")
            if title:
                texts.setdefault(each["Package"], []).append(f"{title}. {body}"[:120])
    dice = random.Random(0)
    named = [name for name in sorted(texts) if name in section]
    common = {name for name, _ in Counter(section[name] for name in named).most_common(NUM_CLASSES)}
    pairs = [(section[name], messy(dice.choice(texts[name]), dice)) for name in named if section[name] in common]
    dice.shuffle(pairs)
    return pairs


def write_tickets(work: Path, examples: int) -> tuple[Path, Path]:
    """Writes tickets as JSON lines, once; returns the files to train and to validate on."""
    train, dev = work / f"tickets-{examples}.jsonl", work / "tickets-dev.jsonl"
    if not train.exists():
        pairs = tickets(work)
        for path, chosen in ((dev, pairs[:NUM_DEV]), (train, pairs[NUM_DEV : NUM_DEV + examples])):
            lines = (json.dumps({"text": text, "label": label}, ensure_ascii=False) for label, text in chosen)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return train, dev


def plan(name: str) -> Iterator[dict[str, Any]]:
    """The trainings of a plan, the most telling first."""
    sizes = [(1_000, 300), (1_000, 100), (300, 300), (300, 100), (100, 300), (100, 100)]
    sizes += [(3_000, 300), (1_000, 1_000), (3_000, 1_000)]
    tasks = {"sizes": ("tickets", "sst2"), "more": ("mrpc", "stsb", "cola")}
    for (examples, steps), task in itertools.product(sizes, tasks.get(name, ())):
        for rate in (3e-4, 1e-4) if (examples, steps) == sizes[0] else (3e-4,):
            yield {"task": task, "examples": examples, "steps": steps, "learning_rate": rate}
    longest = {"task": "tickets", "examples": 3_000, "steps": 1_000, "learning_rate": 3e-4}
    if name == "defaults":
        yield {"task": "tickets", "examples": 3_000, "defaults": True}
        yield from (longest | {"class_weights": weights, "select": "best"} for weights in ("balanced", "none"))
    if name == "rates":  # by the encoder's width
        for rate, task in itertools.product((1e-3, 3e-4, 3e-3), ("tickets", "sst2")):
            yield {"task": task, "examples": 3_000, "learning_rate": rate, "defaults": True, "seeds": 3}
    if name == "long":  # for narrow encoders, whose steps take little time
        settings = {"learning_rate": 1e-3, "class_weights": "auto", "select": "best", "seeds": 3}
        for steps in (2_820, 846):
            yield longest | settings | {"steps": steps}
    if name == "short":  # for encoders whose steps take long
        for rate, task in itertools.product((1e-3, 3e-4, 3e-3), ("sst2", "tickets")):
            yield {"task": task, "examples": 1_000, "steps": 300, "learning_rate": rate, "seeds": 3}
    if name == "weights":
        for examples, steps in ((1_000, 300), (3_000, 300), (1_000, 1_000)):
            for weights in ({}, {"class_weights": "balanced"}):
                yield longest | {"examples": examples, "steps": steps} | weights


def train(case: dict[str, Any], encoder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Scores of a training with each seed."""
    task, examples = case["task"], case["examples"]
    settings: dict[str, Any] = {f"finetune.{name}": case[name] for name in SETTINGS if name in case}
    if "defaults" not in case:
        settings = {"finetune.class_weights": "none", "finetune.select": "last"} | settings
    if settings.get("finetune.select") == "last":
        settings["finetune.evals_per_epoch"] = 0
    out = options.work / "out"
    shutil.rmtree(out, ignore_errors=True)
    data: dict[str, Any]
    if task == "tickets":
        paths = write_tickets(options.work, examples)
        data = dict(zip(("train", "dev"), paths, strict=True)) | {"task": "classification"}
        settings["finetune.sequence_length"] = 48
        data["skip_bad_rows"] = NUM_DEV  # of classes that the first examples lack
    else:
        data = {"data": cut_glue(options.work, options.glue, task, examples), "task": task}
    num_examples = min(examples, {"mrpc": 3_668, "stsb": 5_749}.get(task, examples))
    if "steps" in case:
        settings["finetune.epochs"] = case["steps"] / -(-num_examples // 32)
    found = ef.finetune(**data, model=encoder, out=out, seeds=case.get("seeds", 1), overrides=settings)
    (result,) = found.values()
    return [{name: value for name, value in run.items() if name != "splits"} for run in result["runs"]]


def main() -> None:
    """Trains what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", type=Path, nargs="+", required=True)
    parser.add_argument("--glue", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("finetune_defaults.jsonl"))
    parser.add_argument("--plan", nargs="+", default=["sizes", "defaults", "weights", "more"])
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    finished = (
        [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    )
    known = [line["case"] for line in finished]
    for case in (case for name in options.plan for case in plan(name)):
        for encoder in options.encoders:
            case_of = case | {"encoder": encoder.name}
            if case_of in known:
                continue
            started = time.monotonic()
            result = train(case, encoder, options)
            line = {"case": case_of, "result": result, "seconds": round(time.monotonic() - started, 1)}
            with options.results.open("a") as file:
                file.write(json.dumps(line | {"processor": processor()}) + "\n")
            print(case_of, result, flush=True)


if __name__ == "__main__":
    main()
