"""Fine-tuning compared with the Trainer of `transformers`, and prediction compared with its pipeline.

    python bench/finetune_throughput.py [--data GLUE] [--tasks cola sst2] [--model FOLDER] [--rounds 3]
    python bench/finetune_throughput.py --data GLUE --model FOLDER --scores 3   # whole trainings: the same scores?

The same encoder, head, examples, batch size, learning rate and dropout for all. Without `--model` the encoder is a
random one of the preset `mini`. The Trainer pads every example to 128 tokens (as `run_glue.py` does by default), to the
longest of its batch, or that with examples of similar lengths in a batch. `--scores N` trains N seeds of each to the
end, with one learning rate for all layers as the Trainer has, and prints their scores too. Each contender has a process
of its own; rounds alternate, and the ratios of a round are compared, since a shared machine drifts. Needs
`pip install accelerate`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lib.results import Results, measured_by_child, parse_arguments, processor

import electra_fast as ef
from electra_fast import checkpoint
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.finetuning import batches
from electra_fast.finetuning.config import recipe_config
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.model_folder import Finetuned, write_finetuned
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.training.job import Job, make_job
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.encoder import load_encoder
from electra_fast.huggingface.tokenizer import INPUT_NAMES, copy_tokenizer, special_ids, write_tokenizer
from electra_fast.model.compute import choose_device
from electra_fast.model.matmul import use_matmul
from electra_fast.optimizers.optimizer import lr_scale

WARM_UP = 8
MAX_LENGTH = 128
TRAINERS = {
    "Trainer, padded to 128": {"padding": "max_length"},
    "Trainer, padded to the longest": {"padding": "longest"},
    "Trainer, grouped by length": {"padding": "longest", "sampling": "group_by_length"},
}


def make_encoder(folder: Path, vocab: Path, recipe: str, preset: str) -> None:
    """A random run at step 0."""
    tokenizer = ef.Tokenizer(vocab)
    config = ef.Config.preset(preset, recipe).replace({"model": {"vocab_size": tokenizer.vocab_size}})
    write_tokenizer(folder / "tokenizer", tokenizer, config.model.max_positions)
    (folder / "config.toml").write_text(config.to_toml())
    checkpoint.save(folder, ef.Electra(config), None, TrainState(), keep=1)


def make_data(folder: Path, words: int = 8_192) -> None:
    """Tasks and a vocabulary of made-up words, with sentences as long as those of CoLA and SST-2."""
    names = [f"w{i}" for i in range(words - 5)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *names]) + "\n")
    random = np.random.default_rng(0)
    for task, mean in (("CoLA", 9), ("SST-2", 11)):
        (folder / task).mkdir(exist_ok=True)
        for split, count in (("train", 4_000), ("dev", 800)):
            lengths = random.gamma(2.5, mean / 2.5, count).clip(2, 60).astype(int)
            texts = (" ".join(names[i] for i in random.zipf(1.2, length) % len(names)) for length in lengths)
            lines = (f"x\t{i % 2}\t\t{t}\n" if task == "CoLA" else f"{t}\t{i % 2}\n" for i, t in enumerate(texts))
            (folder / task / f"{split}.tsv").write_text("".join(lines))


def make_tasks(options: argparse.Namespace, task: str) -> tuple[Job, Path]:
    """The job of a task, and the folder of its untrained model."""
    overrides = {"finetune.head": "hf"} | options.overrides
    encoder = load_encoder(options.model)
    data = glue.read(task, options.data)
    job = make_job(data, recipe_config("fast", task, encoder.shape, overrides), encoder, Path(), choose_device())
    folder = options.cache / "finetune" / f"{task}-{encoder.content_hash[:12]}"
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        model = job.work.model()
        model.load_encoder(encoder.state)
        model.initialize_head(0)
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
        copy_tokenizer(encoder.tokenizer, folder, INPUT_NAMES[job.work.shape.architecture])
        labels = data.task.labels or ("value",)
        finetuned = Finetuned(job.work.shape, job.config.head, data.task.kind, labels, MAX_LENGTH, None, state)
        write_finetuned(folder, finetuned, special_ids(folder), job.config.head_dropout)
    return job, folder


def timed_steps(ends: list[float], num_tokens: int) -> dict[str, float]:
    """Mean seconds per step after the warm-up, and tokens of text per step."""
    seconds = np.diff(ends)[WARM_UP - 1 :]
    return {"seconds": float(np.mean(seconds)), "tokens": num_tokens / len(ends)}


def train_ours(job: Job, steps: int, seed: int) -> dict[str, float]:
    """Our step, with its packing; `steps` 0: all, and the score."""
    model = job.work.model().to(job.device)
    model.load_encoder(job.encoder.state)
    model.initialize_head(0)
    step = FinetuneStep(model, job.work, job.num_processes)
    order, ends, num_tokens = batches.training_order(job.config, len(job.examples), seed), [], 0
    taken = order[: steps or len(order)]
    for number, chosen in enumerate(taken):
        chosen = chosen[chosen >= 0]
        parts = job.pack(chosen)
        batch = job.training_set.batch(parts, chosen, job.config.loss_reduction, seed)
        loss, _ = step(batch, number, lr_scale(job.config, number, len(order)))
        num_tokens += sum(part.num_tokens for part in parts)
        if number == len(taken) - 1 or job.device.type == "cpu":
            loss.item()
        ends.append(time.perf_counter())
    step.close()
    found = timed_steps(ends, num_tokens)
    if steps:
        return found
    features = job.splits[job.data.dev[0].name]
    return found | {"score": score(job, job.task_type.predict(model, features, job.config, job.work.compute))}


def score(job: Job, outputs: Any) -> float:
    """The task's metric on its validation examples."""
    dev = job.data.dev[0]
    return job.task_type.scores(job.task, dev, job.splits[dev.name], outputs, {})[job.task.metric]


def train_theirs(
    job: Job, folder: Path, steps: int, seed: int, padding: str, sampling: str = "random"
) -> dict[str, float]:
    """The Trainer with its defaults, on the same tokenized examples; `steps` 0: all, and the score."""
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    tokenizer = AutoTokenizer.from_pretrained(folder)
    collate = DataCollatorWithPadding(tokenizer, padding=padding, max_length=MAX_LENGTH)
    ends: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
            ends.append(time.perf_counter())

    def collate_and_count(rows: list[dict[str, Any]]) -> Any:
        tokens.append(sum(len(row["input_ids"]) for row in rows))
        return collate(rows)

    config = job.config
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=config.batch_size,
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
            warmup_steps=config.warmup_fraction,
            max_steps=steps or job.num_steps,
            seed=seed,
            per_device_eval_batch_size=config.batch_size,
            train_sampling_strategy=sampling,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=job.device.type == "cpu",
            bf16=job.device.type == "cuda",
        )
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        targets = job.training_set.targets.tolist()
        rows = [row | {"labels": y} for row, y in zip(rows_of(job, job.examples), targets, strict=True)]
        trainer = Trainer(model, arguments, collate_and_count, rows, callbacks=[Clock()])
        trainer.train()
        found = timed_steps(ends, sum(tokens[: len(ends)]))  # the next batch may have been collated already
        if steps:
            return found
        trainer.args.train_sampling_strategy = "random"  # by length it would order the predictions by length, too
        outputs = trainer.predict(list(rows_of(job, job.splits[job.data.dev[0].name].encoded))).predictions
    return found | {"score": score(job, outputs)}


def rows_of(job: Job, examples: EncodedExamples) -> Iterator[dict[str, Any]]:
    """Tokenized examples as the Trainer takes them."""
    has_types = job.work.shape.architecture == "bert"
    for i in range(len(examples)):
        place = slice(examples.offsets[i], examples.offsets[i + 1])
        row = {"input_ids": examples.ids[place].tolist()}
        yield row | ({"token_type_ids": examples.token_types[place].tolist()} if has_types else {})


def predict(job: Job, folder: Path, contender: str) -> dict[str, float]:
    """From text to answers."""
    texts = [example if len(example) == 2 else example[0] for example in job.data.dev[0].texts]
    texts = (texts * (1 + 1500 // len(texts)))[:1500]
    if contender == "pipeline":
        from transformers import pipeline

        classify = pipeline("text-classification", str(folder), device=job.device, batch_size=32)
        given: Any = [{"text": t[0], "text_pair": t[1]} if isinstance(t, tuple) else t for t in texts]
        run: Callable[[Any], Any] = lambda rows: classify(rows, truncation=True, max_length=MAX_LENGTH)  # noqa: E731
    else:
        given, run = texts, ef.load_finetuned(folder).predict
    run(given[:64])
    start = time.perf_counter()
    run(given)
    seconds = time.perf_counter() - start
    lengths = job.splits[job.data.dev[0].name].encoded.lengths
    return {"seconds": seconds, "tokens": len(given) * float(lengths.mean())}


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One contender on one task, in this process."""
    task, contender = options.contender
    job, folder = make_tasks(options, task)
    if contender == "ours":
        with use_matmul(job.work.compute.matmul):
            return train_ours(job, options.steps, options.seed)
    if contender in TRAINERS:
        return train_theirs(job, folder, options.steps, options.seed, **TRAINERS[contender])
    return predict(job, folder, contender)


def child(options: argparse.Namespace, task: str, contender: str, seed: int = 0) -> dict[str, float]:
    """`measure` in a process of its own."""
    arguments = ["--contender", task, contender, "--data", str(options.data)]
    arguments += ["--model", str(options.model), "--steps", str(options.steps), "--cache", str(options.cache)]
    arguments += ["--seed", str(seed)]
    arguments += [word for name, value in options.overrides.items() for word in (f"--{name}", value)]
    return measured_by_child(__file__, arguments, f"{task}, {contender}")


def compare(options: argparse.Namespace, results: Results, task: str, contenders: list[str], what: str) -> None:
    """Rounds of all contenders, and a line for each with the median of its ratios to ours.

    Times are per token of text, since the batches of a few steps are not equally long: sampling by length begins with
    the longest.
    """
    rounds = [{name: child(options, task, name, seed) for name in contenders} for seed in range(options.rounds)]
    times = [{name: found["seconds"] / found["tokens"] for name, found in each.items()} for each in rounds]
    for name in contenders:
        speed = statistics.median(1 / each[name] for each in times)
        ratio = statistics.median(each[name] / each[contenders[0]] for each in times)
        line = f"{what} {task:5} {name:32} {speed:8,.0f} tokens/s  {ratio:5.2f} times our time"
        scores = [each[name]["score"] for each in rounds if "score" in each[name]]
        line += "  scores " + ", ".join(f"{each:.4f}" for each in scores) if scores else ""
        found = {"tokens_per_second": speed, "ratio": ratio, "rounds": len(rounds), "scores": scores}
        results.add(line, task=task, contender=name, **found)


def main() -> None:
    """All tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of GLUE tasks (made-up sentences)")
    parser.add_argument("--tasks", nargs="+", default=["cola", "sst2"])
    parser.add_argument("--model", type=Path, help="run or Hugging Face folder (a random encoder)")
    parser.add_argument("--vocab", type=Path, help="of the random encoder (made-up words)")
    parser.add_argument("--preset", default="mini", help="of the random encoder (%(default)s)")
    parser.add_argument("--recipe", default="google", help="of the random encoder (%(default)s)")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scores", type=int, default=0, metavar="N", help="train N seeds to the end, print scores")
    parser.add_argument("--seed", type=int, default=0, help="of --contender")
    parser.add_argument("--contender", nargs=2, metavar=("TASK", "NAME"), help="measure one, print JSON")
    options = parse_arguments(parser, with_overrides=True, for_cpu=not torch.cuda.is_available())
    if options.contender:
        print(json.dumps(measure(options)))
        return
    if options.quick:
        options.preset, options.steps, options.rounds = "tiny", WARM_UP + 2, 1
    if options.data is None or (options.model is None and options.vocab is None):
        made = options.cache / "finetune" / "made-up"
        make_data(made)
        options.data, options.vocab = options.data or made, options.vocab or made / "vocab.txt"
    if options.model is None:
        options.model = options.cache / "finetune" / f"{options.preset}-{options.recipe}"
        if not (options.model / "checkpoints").exists():
            make_encoder(options.model, options.vocab, options.recipe, options.preset)
    results = Results(options.results, options.device, processor() if options.device.type == "cpu" else None)
    if options.scores:
        options.steps, options.rounds = 0, options.scores
        options.overrides.setdefault("finetune.layer_decay", "1.0")
    trainers = list(TRAINERS)[1:] if options.scores else list(TRAINERS)  # padding to 128 changes nothing but the time
    for task in options.tasks:
        compare(options, results, task, ["ours", *trainers], "training  ")
        if not options.scores:
            compare(options, results, task, ["predict", "pipeline"], "prediction")


if __name__ == "__main__":
    main()
