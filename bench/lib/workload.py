"""The workload of the scripts that train: a synthetic corpus, cached between scripts, configurations, and steps."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

import electra_fast as ef
from electra_fast.config.presets import DEFAULT_RECIPE
from electra_fast.hardware.settings import resolve_alone
from electra_fast.model.compute import ComputeConfig, choose_compute, use_compute
from electra_fast.optimizers.optimizer import Optimizer
from electra_fast.training.parallel_step import create_step, time_steps
from electra_fast.training.step import TrainStep

VOCAB_SIZE = 30_522
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def make_corpus(cache: Path, num_documents: int, vocab_size: int = VOCAB_SIZE) -> Path:
    """A corpus of documents of 20 to 700 Zipf-distributed words, one token each, made by `prepare`."""
    folder = cache / f"corpus-{num_documents}-{vocab_size}"
    shards = folder / "shards"
    if (shards / "manifest.json").exists():  # `prepare` writes it last
        return shards
    folder.mkdir(parents=True, exist_ok=True)
    words = [f"w{i}" for i in range(vocab_size - len(SPECIAL))]
    (folder / "vocab.txt").write_text("\n".join(SPECIAL + words) + "\n")
    ef.prepare(_documents(words, num_documents), vocab=folder / "vocab.txt", out=shards, cased=True, progress=False)
    return shards


def _documents(words: list[str], num_documents: int) -> Iterator[str]:
    lengths = random.Random(0)
    ranks = iter(np.random.default_rng(0).zipf(1.2, 700 * num_documents) % len(words))
    for _ in range(num_documents):
        yield " ".join(words[next(ranks)] for _ in range(lengths.randrange(20, 700)))


def loader(corpus: Path, config: ef.Config) -> ef.BatchLoader:
    return ef.BatchLoader.from_config(config, corpus=corpus)


def shape(text: str, overrides: dict[str, str] | None = None, recipe: str = DEFAULT_RECIPE) -> ef.Config:
    """The configuration of `preset[:rows[:recipe[:dropout]]]`; missing parts are as in `pretrain`."""
    parts = text.split(":")
    preset, rows, recipe, dropout = (*parts, *("", recipe, "")[len(parts) - 1 :])
    changes = {"model.vocab_size": str(VOCAB_SIZE), "data.packing": "best-fit"}
    changes |= {"train.batch_size": rows} if rows else {}
    changes |= {"model.dropout": dropout, "model.attention_dropout": dropout} if dropout else {}
    return ef.Config.preset(preset, recipe).override(changes | (overrides or {})).resolved()


def new_step(
    config: ef.Config,
    device: torch.device,
    execution: str | None = None,
    compute: ComputeConfig | None = None,
    num_processes: int | None = None,
) -> TrainStep:
    """The training step of a new model on the device.

    Without an execution, as in `pretrain`, whose check chooses kernels, attention and execution on a GPU; with one, all
    operations on a GPU use their kernels. Run the step within `as_chosen`.
    """
    if execution is None:
        config, compute = resolve_alone(config, device, time_steps)
        execution = config.train.execution
    compute = compute or choose_compute(config, device)
    model = ef.Electra(config).to(device).train()
    optimizer = Optimizer(model.named_parameters(), config.optimizer, matrix_dtype=compute.dtype)
    with use_compute(compute):
        return create_step(model, optimizer, config, compute, execution, num_processes)


def as_chosen(step: TrainStep) -> AbstractContextManager[None]:
    return use_compute(step.backward.compute)


def label(config: ef.Config, text: str) -> str:
    """A title such as `google small@128, 131072 tokens per step, without dropout`."""
    preset, _, recipe = (*text.split(":"), "", "")[:3]
    length = config.data.sequence_length
    dropout = config.model.dropout
    title = f"{recipe or DEFAULT_RECIPE} {preset}@{length}, {config.train.batch_size * length} tokens per step"
    return f"{title}, {f'dropout {dropout}' if dropout else 'without dropout'}"
