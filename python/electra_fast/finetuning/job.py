"""A task made ready for training: its configuration, tokenized examples and weights, which all seeds share."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from electra_fast.attention import choose_attention
from electra_fast.compute import ComputeConfig, choose_precision
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning import batches
from electra_fast.finetuning.batches import EncodedExamples, PackedBatch
from electra_fast.finetuning.config import FinetuneConfig, FinetuningConfig
from electra_fast.finetuning.losses import example_weights
from electra_fast.finetuning.step import FinetuningWork
from electra_fast.finetuning.task import Split, Task, TaskData
from electra_fast.huggingface.encoder import PretrainedEncoder
from electra_fast.training.step_processes import max_processes

# Keys that a session may change: they do not change a result.
FREE_KEYS = {"checkpoint_seconds"}


@dataclass(frozen=True)
class Job:
    """A task, ready to be trained with any seed.

    Args:
        data: The task and its splits.
        config: How it is trained.
        encoder: From what it starts.
        folder: What it leaves, `DIR/TASK`.
        examples: The tokenized training examples.
        targets: Theirs: class ids, rows of 0 and 1, or values shifted and scaled.
        weights: Theirs in the loss.
        splits: The tokenized examples to predict, by the name of their split.
        work: The computation of a step.
        device: Where.
        num_processes: On a CPU, processes that share a step.
    """

    data: TaskData
    config: FinetuneConfig
    encoder: PretrainedEncoder
    folder: Path
    examples: EncodedExamples
    targets: NDArray[Any]
    weights: NDArray[Any]
    splits: dict[str, EncodedExamples]
    work: FinetuningWork
    device: torch.device
    num_processes: int

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.data.task

    @property
    def num_steps(self) -> int:
        """Optimizer steps of a seed."""
        return batches.num_steps(self.config, len(self.examples))

    @property
    def num_tokens(self) -> int:
        """About how many tokens a seed trains on."""
        return math.ceil(len(self.examples.ids) * self.config.epochs)

    def pack(self, chosen: NDArray[Any]) -> list[PackedBatch]:
        """Some training examples, packed for a step."""
        if self.work.captures(self.device):
            config = self.config
            return [batches.pack_static(self.examples, chosen, config.sequence_length, config.batch_size)]
        return batches.pack(self.examples, chosen, self.num_processes)

    def identity(self) -> dict[str, Any]:
        """What decides a seed's result, but for rounding and hardware: a run resumes only where it is the same."""
        settings = dataclasses.asdict(self.config)
        return {
            "task": dataclasses.asdict(self.task) | {"labels": list(self.task.labels)},
            "data": {split.name: _content_hash(split) for split in (self.data.train, *self.data.dev)},
            "encoder": self.encoder.content_hash,
            "finetune": {name: value for name, value in settings.items() if name not in FREE_KEYS},
        }

    def describe(self) -> Iterator[str]:
        """Lines about the data that a user should know before training."""
        yield from self.data.notes
        dev, *_ = self.data.dev
        both = ", each in both orders" if len(self.examples) > len(self.data.train.texts) else ""
        yield (
            f"{self.task.name}: examples: {len(self.data.train.texts):,} to train on{both}, {len(dev.texts):,} to "
            f"validate on; steps per seed: {self.num_steps:,}"
        )
        if self.examples.num_truncated:
            yield (
                f"{self.task.name}: cut at finetune.sequence_length = {self.config.sequence_length} tokens: "
                f"{self.examples.num_truncated:,} of {len(self.examples):,} training examples"
            )


def make_job(
    data: TaskData, config: FinetuningConfig, encoder: PretrainedEncoder, folder: Path, device: torch.device
) -> Job:
    """Checks configuration, encoder and data against each other, and tokenizes the training examples."""
    settings = config.finetune
    if settings.sequence_length > encoder.shape.max_positions:
        raise InputError(
            f"finetune.sequence_length = {settings.sequence_length} is longer than the {encoder.shape.max_positions} "
            "positions of the encoder; lower it"
        )
    train, task = data.train, data.task
    assert train.targets is not None
    texts, targets = train.texts, train.targets
    if settings.both_orders:
        if len(texts[0]) != 2:
            raise InputError(f"finetune.both_orders = true needs pairs of texts; {train.path} has single ones")
        texts, targets = texts + [(second, first) for first, second in texts], np.concatenate((targets, targets))
    tokenizer = Tokenizer(encoder.tokenizer)
    examples = batches.encode(tokenizer, texts, settings.sequence_length)
    if len(examples.empty) == len(examples):
        raise InputError(f"{train.path}: no example has a token of text; check the columns and the tokenizer")
    if task.kind == "regression":
        targets = ((targets - task.shift) / task.scale).astype(np.float32)
    weights = example_weights(task, targets, settings)
    splits = {
        split.name: batches.encode(tokenizer, split.texts, settings.sequence_length)
        for split in (*data.dev, *data.test)
    }
    num_processes = min(max_processes(device), settings.batch_size)
    work = _work(task, settings, encoder, device)
    return Job(data, settings, encoder, folder, examples, targets, weights, splits, work, device, num_processes)


def _work(task: Task, config: FinetuneConfig, encoder: PretrainedEncoder, device: torch.device) -> FinetuningWork:
    dtype = torch.bfloat16 if choose_precision(config.precision, device) == "bf16" else torch.float32
    local_attention = encoder.shape.local_attention
    attention = choose_attention(config.attention, device, dtype, config.attention_dropout, local_attention)
    shape = dataclasses.replace(
        encoder.shape, dropout=config.dropout, attention_dropout=config.attention_dropout, attention="auto"
    )
    if config.execution == "graph" and device.type != "cuda":
        raise InputError(f'finetune.execution = "graph" needs a CUDA device, and this is {device.type}; set "auto"')
    num_outputs = max(1, len(task.labels))
    return FinetuningWork(shape, config, task.kind, num_outputs, ComputeConfig(attention, dtype))


def _content_hash(split: Split) -> str:
    """Identifies texts and targets."""
    digest = hashlib.sha256(str(len(split.texts)).encode())
    for texts in split.texts:
        digest.update("\0".join((*texts, "")).encode("utf-8", "surrogatepass"))
    if split.targets is not None:
        digest.update(split.targets.tobytes())
    return digest.hexdigest()


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first entry in which two identities differ, as text; None where they are equal."""
    for name in sorted(before.keys() | now.keys()):
        was, is_now = before.get(name), now.get(name)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            if found := first_difference(was, is_now, f"{prefix}{name}."):
                return found
        elif was != is_now and prefix == "data.":
            return f"was made with other examples of {name}"
        elif was != is_now and name == "encoder":
            return "was made from another encoder"
        elif was != is_now:
            return f"was made with other settings ({prefix}{name} was {was!r} and is now {is_now!r})"
    return None
