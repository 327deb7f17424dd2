"""Fine-tuning and text embeddings, compared with `transformers`' Trainer and sentence-transformers.

    python bench/finetune_throughput.py [--data GLUE] [--tasks cola sst2] [--model FOLDER] [--rounds 3]

The same encoder, head, examples, batch size, learning rate and dropout for all. Without `--model` the encoder is a
random one of the preset `mini`. The Trainer pads every example to 128 tokens (as `run_glue.py` does by default), to the
longest of its batch, or to the longest of a batch of similar lengths. Each contender has a separate process; the
ratios of a round are compared, since a shared machine drifts. Needs accelerate and sentence-transformers.
"""

import argparse
import functools
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
from electra_fast.data.corpus import write_tokenizer
from electra_fast.files.checkpoint_folder import TrainState
from electra_fast.finetuning import batches
from electra_fast.finetuning.config import recipe_config
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.model_folder import Finetuned, write_finetuned
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.training.job import Job, make_job
from electra_fast.finetuning.training.step import FinetuneStep
from electra_fast.huggingface.encoder import PretrainedEncoder, load_encoder
from electra_fast.huggingface.tokenizer import INPUT_NAMES, copy_tokenizer, special_ids
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
    tokenizer = ef.Tokenizer(vocab)
    config = ef.Config.preset(preset, recipe).override({"model.vocab_size": tokenizer.vocab_size})
    write_tokenizer(folder / "tokenizer", tokenizer, config.model.max_positions)
    (folder / "config.toml").write_text(config.to_toml())
    checkpoint.save(folder, ef.Electra(config), None, TrainState(), keep=1)


def make_data(folder: Path, words: int = 8_192) -> None:
    """Tasks and a vocabulary of made-up words, with sentences as long as in CoLA and SST-2."""
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


def make_inputs(options: argparse.Namespace) -> Path:
    """Sets missing options `vocab` and `model` to synthetic ones; returns the folder of synthetic data."""
    made = options.cache / "finetune" / "made-up"
    make_data(made)
    options.vocab = options.vocab or made / "vocab.txt"
    if options.model is None:
        size = options.vocab.stat().st_size
        options.model = options.cache / "finetune" / f"{options.preset}-{options.recipe}-{size}"
        if not (options.model / "checkpoints").exists():
            make_encoder(options.model, options.vocab, options.recipe, options.preset)
    return made


def add_encoder_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, help="run or Hugging Face folder (a random encoder)")
    parser.add_argument("--vocab", type=Path, help="of the random encoder (made-up words)")
    parser.add_argument("--preset", default="mini", help="of the random encoder (%(default)s)")
    parser.add_argument("--recipe", default="google", help="of the random encoder (%(default)s)")


def write_model(
    folder: Path,
    encoder: PretrainedEncoder,
    model: Any,
    kind: str,
    labels: tuple[str, ...],
    length: int,
    head_dropout: float = 0.0,
    **settings: Any,
) -> None:
    """The folder of a model with this encoder and a random head, made if it is missing."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    model.load_encoder(encoder.state)
    model.initialize_head(0)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = INPUT_NAMES[encoder.shape.architecture]
    copy_tokenizer(encoder.tokenizer, folder, names, {"model_max_length": length})
    finetuned = Finetuned(encoder.shape, "transformers", kind, labels, length, None, state, settings)
    write_finetuned(folder, finetuned, special_ids(folder), head_dropout)


def make_tasks(options: argparse.Namespace, task: str) -> tuple[Job, Path]:
    """The job of a task, and the folder of its untrained model."""
    encoder = load_encoder(options.model)
    data = glue.read(task, options.data)
    config = recipe_config("fast", task, encoder.shape, {"finetune.head": "transformers"} | options.overrides)
    job = make_job(data, config, encoder, Path(), choose_device())
    folder = options.cache / "finetune" / f"{task}-{encoder.content_hash[:12]}"
    labels = data.task.labels or ("value",)
    dropout = job.config.head_dropout
    write_model(folder, encoder, job.work.model(), data.task.kind, labels, MAX_LENGTH, dropout)
    return job, folder


def timed_steps(ends: list[float], num_tokens: int) -> dict[str, float]:
    """Mean seconds per step after the warm-up, and tokens of text per step."""
    seconds = np.diff(ends)[WARM_UP - 1 :]
    return {"seconds": float(np.mean(seconds)), "tokens": num_tokens / len(ends)}


def train_ours(job: Job, steps: int) -> dict[str, float]:
    model = job.work.model().to(job.device)
    model.load_encoder(job.encoder.state)
    model.initialize_head(0)
    step = FinetuneStep(model, job.work, job.num_processes)
    order = batches.training_order(job.config, len(job.examples), 0)
    ends = []
    num_tokens = 0
    for number, chosen in enumerate(order[:steps]):
        chosen = chosen[chosen >= 0]
        parts = job.pack(chosen)
        batch = job.training_set.batch(parts, chosen, job.config.loss_reduction, 0)
        loss, _ = step(batch, number, lr_scale(job.config, number, len(order)))
        num_tokens += sum(part.num_tokens for part in parts)
        if number == steps - 1 or job.device.type == "cpu":
            loss.item()
        ends.append(time.perf_counter())
    step.close()
    return timed_steps(ends, num_tokens)


def train_theirs(job: Job, folder: Path, steps: int, padding: str, sampling: str = "random") -> dict[str, float]:
    """The Trainer with its defaults, on the same tokenized examples."""
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
            max_steps=steps,
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
        return timed_steps(ends, sum(tokens[: len(ends)]))  # the next batch may already have been collated


def rows_of(job: Job, examples: EncodedExamples) -> Iterator[dict[str, Any]]:
    has_types = job.work.shape.architecture == "bert"
    for i in range(len(examples)):
        place = slice(examples.offsets[i], examples.offsets[i + 1])
        row = {"input_ids": examples.ids[place].tolist()}
        yield row | ({"token_type_ids": examples.token_types[place].tolist()} if has_types else {})


def encode(job: Job, folder: Path, contender: str) -> dict[str, float]:
    texts = [example if len(example) == 2 else example[0] for example in job.data.dev[0].texts]
    texts = (texts * (1 + 1500 // len(texts)))[:1500]
    run: Callable[[Any], Any] = functools.partial(ef.load(folder).encode, progress=False)
    if contender == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device=str(job.device))
        run = functools.partial(model.encode, show_progress_bar=False)
    run(texts[:64])
    start = time.perf_counter()
    run(texts)
    seconds = time.perf_counter() - start
    lengths = job.splits[job.data.dev[0].name].encoded.lengths
    return {"seconds": seconds, "tokens": len(texts) * float(lengths.mean())}


def measure(options: argparse.Namespace) -> dict[str, float]:
    task, contender = options.contender
    job, folder = make_tasks(options, task)
    if contender == "ours":
        with use_matmul(job.work.compute.matmul):
            return train_ours(job, options.steps)
    if contender in TRAINERS:
        return train_theirs(job, folder, options.steps, **TRAINERS[contender])
    return encode(job, folder, contender)


def child(options: argparse.Namespace, task: str, contender: str) -> dict[str, float]:
    arguments = ["--contender", task, contender, "--data", str(options.data)]
    arguments += ["--model", str(options.model), "--steps", str(options.steps), "--cache", str(options.cache)]
    arguments += [word for name, value in options.overrides.items() for word in (f"--{name}", value)]
    return measured_by_child(__file__, arguments, f"{task}, {contender}")


def compare(options: argparse.Namespace, results: Results, task: str, contenders: list[str], label: str) -> None:
    """Runs rounds of all contenders, and prints a line for each with the median of its ratios to ours.

    Times are per token of text, since the batches of a few steps are not equally long: sampling by length begins with
    the longest.
    """
    rounds = [{name: child(options, task, name) for name in contenders} for _ in range(options.rounds)]
    times = [{name: result["seconds"] / result["tokens"] for name, result in turn.items()} for turn in rounds]
    for name in contenders:
        speed = statistics.median(1 / turn[name] for turn in times)
        ratio = statistics.median(turn[name] / turn[contenders[0]] for turn in times)
        line = f"{label} {task:5} {name:32} {speed:8,.0f} tokens/s  {ratio:5.2f} times our time"
        results.add(line, task=task, contender=name, tokens_per_second=speed, ratio=ratio, rounds=len(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder of GLUE tasks (made-up sentences)")
    parser.add_argument("--tasks", nargs="+", default=["cola", "sst2"])
    add_encoder_options(parser)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", nargs=2, metavar=("TASK", "NAME"), help="measure one, print JSON")
    options = parse_arguments(parser, with_overrides=True, for_cpu=not torch.cuda.is_available())
    if options.contender:
        print(json.dumps(measure(options)))
        return
    if options.quick:
        options.preset = "tiny"
        options.steps = WARM_UP + 2
        options.rounds = 1
    made = make_inputs(options)
    options.data = options.data or made
    results = Results(options.results, options.device, processor() if options.device.type == "cpu" else None)
    for task in options.tasks:
        compare(options, results, task, ["ours", *TRAINERS], "training")
        compare(options, results, task, ["encode", "sentence-transformers"], "vectors ")


if __name__ == "__main__":
    main()
