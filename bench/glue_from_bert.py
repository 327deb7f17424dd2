"""Fine-tuning from a BERT: scores and seconds here and with the Trainer of `transformers`.

    python bench/glue_from_bert.py --model BERT --glue GLUE --out FOLDER [--tasks mrpc rte] [--seeds 3]

Both start from the same folder of `transformers` and train on the same examples with the same rates, schedule, batches,
dropout, precision and number of epochs. Each has its own head: `ElectraClassificationHead`, new, and that of the
folder's class, for BERT the pre-trained pooler and a new layer. Finished trainings are lines of FOLDER/results.jsonl,
and the same command resumes, ours within a training too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lib.results import Results, markdown, measured_by_child, parse_arguments, processor
from lib.task_data import cut_glue

import electra_fast as ef
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.task import Split
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.training.allocator import keep_freed_memory

CONTENDERS = ("ours", "Trainer")
MAX_LENGTH = 128
SETTINGS = ("learning_rate", "batch_size", "epochs", "warmup_fraction", "weight_decay", "precision")


def data_folder(options: argparse.Namespace, task: str) -> Path:
    """A task's folder without test examples, and with the first `--examples` of training."""
    return cut_glue(options.out / "data", options.glue, task, options.examples)


def recipe(options: argparse.Namespace) -> dict[str, Any]:
    """What identifies a training, besides contender, task and seed."""
    return {name: getattr(options, name) for name in (*SETTINGS, "examples")} | {"model": str(options.model.resolve())}


def train_ours(options: argparse.Namespace, task: str, seed: int) -> dict[str, float]:
    """`ef.finetune` as the Trainer does it: all layers have one rate, and the last step is kept."""
    overrides = {f"finetune.{key}": getattr(options, key) for key in SETTINGS}
    overrides |= {"finetune.select": "last", "finetune.evals_per_epoch": 0, "finetune.layer_decay": 1}
    overrides |= {"finetune.epsilon": 1e-8, "finetune.sequence_length": MAX_LENGTH}
    out = options.out / "ours"
    data = data_folder(options, task)
    found = ef.finetune(task, model=options.model, data=data, out=out, seeds=seed + 1, overrides=overrides)[task]
    return {"score": found["runs"][seed][found["metric"]], "seconds": found["runs"][seed]["seconds"]}


def train_theirs(options: argparse.Namespace, task: str, seed: int) -> dict[str, float]:
    """The Trainer, with every batch padded to its longest example; memory is allocated as in our own training."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    torch.ones(1 << 22).sin()  # threads that begin after the next call would share one arena of memory
    keep_freed_memory()
    set_seed(seed)
    data, tokenizer = glue.read(task, data_folder(options, task)), AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=max(1, len(data.task.labels)))
    arguments = TrainingArguments(
        str(options.out / "Trainer"),
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        warmup_steps=options.warmup_fraction,
        num_train_epochs=options.epochs,
        seed=seed,
        use_cpu=options.device.type == "cpu",
        bf16=options.precision == "bf16",
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )

    def rows(split: Split) -> list[dict[str, Any]]:
        assert split.targets is not None
        encoded = tokenizer(*map(list, zip(*split.texts, strict=True)), truncation=True, max_length=MAX_LENGTH)
        return [
            {name: values[i] for name, values in encoded.items()} | {"labels": target}
            for i, target in enumerate(split.targets.tolist())
        ]

    trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), rows(data.train))
    dev, start = data.dev[0], time.perf_counter()
    trainer.train()
    outputs = trainer.predict(rows(dev)).predictions
    seconds = time.perf_counter() - start
    if not data.task.labels:
        outputs = outputs[:, 0]
    scores = TASK_TYPES[data.task.kind].metrics(data.task, dev.targets, outputs)
    return {"score": scores[data.task.metric], "seconds": seconds}


def finished(options: argparse.Namespace) -> dict[tuple[str, str, int], dict[str, Any]]:
    """The trainings of this recipe in results.jsonl."""
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    records = [record for record in map(json.loads, lines) if record["recipe"] == recipe(options)]
    return {(each["contender"], each["task"], each["seed"]): each for each in records}


def table(options: argparse.Namespace) -> Iterator[list[str]]:
    """A row per task, of medians."""
    found = finished(options)
    for task in options.tasks:
        medians = {}
        for contender in CONTENDERS:
            runs = [found[contender, task, seed] for seed in range(options.seeds)]
            medians[contender] = [statistics.median(run[key] for run in runs) for key in ("score", "seconds")]
        (ours, seconds), (theirs, their_seconds) = medians.values()
        ratio = f"{their_seconds / seconds:.2f}"
        yield [task, f"{100 * ours:.2f}", f"{100 * theirs:.2f}", f"{seconds:.0f}", f"{their_seconds:.0f}", ratio]


def main() -> None:
    """All tasks and seeds, both contenders in turn, each training in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of transformers")
    parser.add_argument("--glue", type=Path, required=True, help="folder of GLUE tasks")
    parser.add_argument("--out", type=Path, required=True, help="folder for models and results")
    parser.add_argument("--tasks", nargs="+", default=["cola", "mrpc", "rte", "stsb"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--warmup-fraction", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--examples", type=int, default=0, help="train on the first N; 0: all")
    parser.add_argument("--cell", nargs=3, metavar=("CONTENDER", "TASK", "SEED"), help="train one, print JSON")
    options = parse_arguments(parser, for_cpu=not torch.cuda.is_available())
    options.out.mkdir(parents=True, exist_ok=True)
    options.results = options.results or options.out / "results.jsonl"
    if options.cell:
        contender, task, seed = options.cell
        print(json.dumps({"ours": train_ours, "Trainer": train_theirs}[contender](options, task, int(seed))))
        return
    results = Results(options.results, options.device, processor() if options.device.type == "cpu" else None)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in recipe(options).items()]
    arguments += [f"--glue={options.glue}", f"--out={options.out}"]
    cells = [(name, task, seed) for task in options.tasks for seed in range(options.seeds) for name in CONTENDERS]
    for contender, task, seed in cells:
        if (contender, task, seed) in finished(options):
            continue
        cell = ["--cell", contender, task, str(seed)]
        found = measured_by_child(__file__, [*arguments, *cell], " ".join(cell[1:]))
        line = f"{task:5} seed {seed} {contender:8} {100 * found['score']:6.2f}  {found['seconds']:6.0f} s"
        results.add(line, contender=contender, task=task, seed=seed, recipe=recipe(options), **found)
    header = ["task", "ours", "Trainer", "our seconds", "Trainer's", "ratio"]
    print(markdown(header, list(table(options))))


if __name__ == "__main__":
    main()
