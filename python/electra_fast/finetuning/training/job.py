"""A task ready for training: configuration, tokenized examples and the encoder's weights, shared by all seeds."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from electra_fast.config.config import AUTO
from electra_fast.config.section import format_value
from electra_fast.data.corpus import Tokenizer
from electra_fast.distributed.step_processes import max_processes
from electra_fast.errors import InputError
from electra_fast.files.json_files import read_object
from electra_fast.finetuning import batches
from electra_fast.finetuning.batches import PackedBatch, TrainingSet
from electra_fast.finetuning.config import FinetuneSection, FinetuningConfig
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.inference import Inference
from electra_fast.finetuning.model import TaskModel
from electra_fast.finetuning.task import Split, Task, TaskData
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.finetuning.tasks.task_type import Features, TaskType
from electra_fast.finetuning.training.step import FinetuningWork, TaskBackward
from electra_fast.finetuning.training.teacher import Lesson
from electra_fast.hardware.kernel_choice import resolve_encoder
from electra_fast.hardware.settings import faster_precision, shortest_times, threads_of, times_text
from electra_fast.huggingface.encoder import PretrainedEncoder
from electra_fast.model.compute import CPU_PRECISIONS, DTYPES, choose_precision, resolve_compute, use_compute
from electra_fast.model.matmul import DEFAULT, ONEDNN, choose_matmul, measure_matmul

# Keys that may change between sessions, because they affect at most the rounding of a result.
FREE_KEYS = {"checkpoint_seconds", "loggers", "matmul"}
# Keys that matter only with a teacher; they are in `Lesson.identity`.
TEACHER_KEYS = {"teacher_weight", "teacher_temperature"}
# File in a task's folder that records everything that its results depend on.
IDENTITY = "task.json"
MAX_NAMED_CLASSES = 20
# Maximum number of tokens of a timed pass: half a second for an encoder of base size.
MAX_MEASURED_TOKENS = 1024


@dataclass(frozen=True)
class Job:
    """A task, ready for training with any seed.

    Args:
        folder: Output folder, `DIR/TASK` or a folder in it.
        splits: The tokenized examples to predict, by the name of their split.
        num_processes: Processes that share a step on a CPU.
        notes: Choices made by measurement, for the user.
        part: The folder below `DIR/TASK`: of a fold, of the untrained baseline, or of a student without a teacher.
        labeled: The labeled training examples, without a teacher's answers.
        lesson: The lesson of the teacher, if there is one.
    """

    data: TaskData
    config: FinetuneSection
    encoder: PretrainedEncoder
    folder: Path
    training_set: TrainingSet
    splits: dict[str, Features]
    work: FinetuningWork
    device: torch.device
    num_processes: int
    notes: tuple[str, ...] = ()
    part: str = ""
    labeled: TrainingSet | None = None
    lesson: Lesson | None = None

    @property
    def task(self) -> Task:
        return self.data.task

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.task.name, self.part)))

    @property
    def task_type(self) -> TaskType:
        return TASK_TYPES[self.task.kind]

    @property
    def examples(self) -> EncodedExamples:
        return self.training_set.encoded

    @property
    def scored_splits(self) -> tuple[Split, ...]:
        return (*self.data.dev, *self.data.test)

    @property
    def selection_metric(self) -> str:
        return self.task_type.selection_metric(self.task, self.training_set.class_weights is not None)

    @property
    def num_steps(self) -> int:
        return batches.num_steps(self.config, len(self.examples))

    @functools.cached_property
    def evaluation_steps(self) -> frozenset[int]:
        return batches.evaluation_steps(self.config, len(self.examples))

    @property
    def evaluation_tokens(self) -> int:
        """Cost of an evaluation in training tokens: a third of its tokens, since there is no backward pass."""
        return sum(len(self.splits[split.name].encoded.ids) for split in self.data.dev) // 3

    @property
    def num_tokens(self) -> int:
        """Approximate cost of a seed with its evaluations, in training tokens."""
        num_trained = math.ceil(len(self.examples.ids) * self.config.epochs)
        return num_trained + self.evaluation_tokens * len(self.evaluation_steps)

    def pack(self, chosen: NDArray[Any]) -> list[PackedBatch]:
        if self.work.captures(self.device):
            config = self.config
            return [batches.pack_static(self.examples, chosen, config.sequence_length, config.batch_size)]
        in_one_row = self.work.compute.computes_segments(self.device)
        return batches.pack(self.examples, chosen, self.num_processes, in_one_row=in_one_row)

    def predict(self, model: TaskModel, split: Split, before_batch: Callable[[], None] | None = None) -> Any:
        """Returns the model's outputs for a split; `before_batch` may raise."""
        inference = Inference(model, self.work.compute, before_batch)
        return self.task_type.predict(inference, self.splits[split.name], self.config)

    def teacher_scores(self) -> dict[str, float]:
        """Returns the teacher's scores, with the names of a result."""
        scores = dict[str, float]()
        first = dict[str, Any]()
        assert self.lesson is not None
        for split in self.scored_splits:
            if split.targets is not None:
                answers = np.nan_to_num(self.lesson.answers(self.task, split))
                split_scores = self.task_type.scores(self.task, split, self.splits[split.name], answers, first)
                first = first or split_scores
                scores = scores | named_scores(split.name, split_scores)
        return {name: value for name, value in scores.items() if isinstance(value, float)}

    def untrained_baseline(self, untrained: PretrainedEncoder) -> Job:
        """Returns the same job with an untrained encoder of the same shape."""
        part = "/".join(filter(None, (self.part, "untrained")))
        return dataclasses.replace(self, encoder=untrained, folder=self.folder / "untrained", part=part)

    def alone(self, config: FinetuneSection) -> Job:
        """Returns the job of a student that learns only from the labels."""
        assert self.labeled is not None
        part = "/".join(filter(None, (self.part, "alone")))
        work = dataclasses.replace(self.work, config=config)
        changes: dict[str, Any] = {"config": config, "work": work, "training_set": self.labeled, "lesson": None}
        return dataclasses.replace(self, folder=self.folder / "alone", part=part, **changes)

    def identity(self) -> dict[str, Any]:
        """Returns everything but hardware that a seed's model depends on; a resumed job must have the same identity."""
        settings = dataclasses.asdict(self.config)
        dev, *_ = self.data.dev
        chosen_by = {dev.name: self.predicted[dev.name]} if self.config.select == "best" else {}
        return {
            "task": dataclasses.asdict(self.task) | {"labels": list(self.task.labels)},
            "data": {"train": _content_hash(self.data.train)} | chosen_by,
            "encoder": self.encoder.content_hash,
            "finetune": {name: value for name, value in settings.items() if name not in FREE_KEYS | TEACHER_KEYS},
            "tokens": hashlib.sha256(self.examples.ids.tobytes()).hexdigest(),
            **({} if self.lesson is None else {"teacher": self.lesson.identity(self.config)}),
        }

    @property
    def hardware(self) -> dict[str, str]:
        """The settings chosen for the device; a resumed job keeps them."""
        dtype = self.work.compute.dtype
        matmul = self.work.compute.matmul
        precision = next(name for name, torch_dtype in DTYPES.items() if torch_dtype == dtype)
        return {"device": self.device.type, "precision": precision, "matmul": matmul}

    @functools.cached_property
    def predicted(self) -> dict[str, str]:
        """Content hash of each split to predict, independent of its path."""
        return {split.name: _content_hash(split, "\0".join(split.ids)) for split in self.scored_splits}

    @functools.cached_property
    def majority(self) -> dict[str, float]:
        """The scores of the majority-class baseline, with the names of a result."""
        scores: dict[str, float] = {}
        for split in self.scored_splits:
            if split.targets is not None:
                scores |= named_scores(split.name, self.task_type.majority(self.task, self.data.train, split))
        return scores

    @functools.cached_property
    def absent(self) -> dict[str, list[str]]:
        absent_names: dict[str, list[str]] = {}
        for split in (self.data.train, *self.scored_splits):
            if names := [name for name, size in self.task_type.class_sizes(self.task, split).items() if not size]:
                absent_names[split.name] = names
        return absent_names

    def describe(self) -> Iterator[str]:
        yield from self.data.notes
        yield from (f"{self.name}: {line}" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield from self.notes
        dev, *_ = self.data.dev
        extra = None if self.lesson is None else self.lesson.unlabeled
        unlabeled = "" if extra is None else f" with labels and {len(extra.texts):,} without"
        yield (
            f"examples: {len(self.data.train.texts):,} to train on{unlabeled}, {len(dev.texts):,} to validate on; "
            f"steps per seed: {self.num_steps:,}"
        )
        for split in (self.data.train, *self.scored_splits):
            if sizes := self.task_type.class_sizes(self.task, split):
                yield f"examples per class, {split.name}: {_sizes_text(sizes)}"
        trained = self.encoder.trained_length or self.encoder.shape.max_positions
        if num_longer := int((self.examples.lengths > trained).sum()):
            yield (
                f"warning: {num_longer:,} of {len(self.examples.lengths):,} training examples are longer "
                f"than the {trained} tokens per row of the encoder's pre-training; lower "
                "finetune.sequence_length, or continue pre-training on longer rows"
            )
        yield from self.task_type.describe(self.data.train, self.labeled or self.training_set, self.config)
        yield from self.training_set.notes


def make_job(
    data: TaskData,
    config: FinetuningConfig,
    encoder: PretrainedEncoder,
    folder: Path,
    device: torch.device,
    *,
    part: str = "",
    hardware: Mapping[str, str] | None = None,
    lesson: Lesson | None = None,
) -> Job:
    """Checks configuration, encoder and data, tokenizes the examples, and computes a teacher's answers.

    `hardware` has another job's settings for the device; by default, an earlier session's, or measured ones.
    """
    settings = config.finetune
    check_length(settings, encoder)
    task = data.task
    task_type = TASK_TYPES[data.task.kind]
    for key, unused in {"class_weights": "none", "calibrate": False}.items():
        if getattr(settings, key) != unused and not task_type.has_classes:
            value = format_value(getattr(settings, key))
            raise InputError(f"finetune.{key} = {value}: needs classes, which {task.name} does not have; remove it")
    tokenizer = Tokenizer(encoder.tokenizer)
    labeled = examples = task_type.training_set(tokenizer, task, data.train, settings)
    if lesson is not None:
        examples = lesson.training_set(labeled, tokenizer, task, data.train, settings)
    splits = {split.name: task_type.features(tokenizer, split, settings) for split in (*data.dev, *data.test)}
    chosen = hardware or _recorded_hardware(folder, device)
    work = _make_work(task, settings, encoder, device, chosen)
    is_alone = work.compute.dtype == torch.float16  # loss scaling needs the whole gradient in one process
    processes = 1 if is_alone else min(max_processes(device), settings.batch_size)
    compute, notes = resolve_encoder(work.shape, work.compute, device, settings.sequence_length, settings.batch_size)
    work = work.computing(kernels=compute.kernels)
    job = Job(
        data, settings, encoder, folder, examples, splits, work, device, processes, tuple(notes), part, labeled, lesson
    )
    return job if chosen else _with_measured_settings(job)


def _recorded_hardware(folder: Path, device: torch.device) -> dict[str, str]:
    """Returns the settings of an earlier session on this type of device; older versions used fp32 on a CPU."""
    path = folder / IDENTITY
    if not path.exists():
        return {}
    hardware = read_object(path).get("hardware", {"device": "cpu", "precision": "fp32", "matmul": DEFAULT})
    if not isinstance(hardware, dict) or hardware.get("device") != device.type:
        return {}
    return (
        hardware if hardware.get("precision") in tuple(DTYPES) and hardware.get("matmul") in (DEFAULT, ONEDNN) else {}
    )


def _with_measured_settings(job: Job) -> Job:
    """Returns the job with the fp32 matrix library and then the precision that are faster on its first examples."""
    settings = job.config
    notes = list(job.notes)
    work = job.work
    with threads_of(job.num_processes):
        if choose_matmul(settings.matmul, job.device) == AUTO:
            num_tokens = int(job.examples.lengths[: settings.batch_size].sum())
            products = measure_matmul(work.shape, num_tokens // job.num_processes)
            work = work.computing(matmul=products.fastest)
            notes.append(f"finetune.matmul = auto: {products.fastest} ({products})")
        if choose_precision(settings.precision, job.device) == AUTO:
            seconds = _seconds_by_precision(job, work)
            precision = faster_precision(seconds)
            work = work.computing(dtype=DTYPES[precision])
            notes.append(f"finetune.precision = auto: {precision} (a part of a step takes {times_text(seconds)})")
    return dataclasses.replace(job, work=work, notes=tuple(notes))


def _seconds_by_precision(job: Job, work: FinetuningWork) -> dict[str, float]:
    """Times the forward and backward pass of one process over its part of the first step, by precision."""
    lengths = job.examples.lengths[: job.config.batch_size]
    enough = np.searchsorted(lengths.cumsum(), MAX_MEASURED_TOKENS * job.num_processes)
    examples = np.arange(max(1, min(len(lengths), int(enough))))
    parts = job.pack(examples)
    batch = job.training_set.batch(parts, examples, job.config.loss_reduction, 0)
    with torch.random.fork_rng(devices=[]), use_compute(work.compute):
        model = work.model()
        model.load_encoder(job.encoder.state)
        model.initialize_head(0)
        passes = {}
        for name in CPU_PRECISIONS:
            backward = TaskBackward(model, dataclasses.replace(work.compute, dtype=DTYPES[name]))
            backward.load(batch, 0)
            passes[name] = backward.run
        return shortest_times(passes)


def check_length(config: FinetuneSection, encoder: PretrainedEncoder) -> None:
    if config.sequence_length > encoder.shape.max_positions:
        raise InputError(
            f"finetune.sequence_length = {config.sequence_length}: must be at most the {encoder.shape.max_positions} "
            "positions of the encoder"
        )


def _make_work(
    task: Task, config: FinetuneSection, encoder: PretrainedEncoder, device: torch.device, recorded: Mapping[str, str]
) -> FinetuningWork:
    """Returns a step's computation. Settings that need a measurement are as recorded, or fp32 and the default."""
    shape = dataclasses.replace(
        encoder.shape, dropout=config.dropout, attention_dropout=config.attention_dropout, attention="auto"
    )
    precision = choose_precision(config.precision, device)
    matmul = choose_matmul(config.matmul, device)
    precision = recorded.get("precision", AUTO) if precision == AUTO else precision
    matmul = recorded.get("matmul", AUTO) if matmul == AUTO else matmul
    if config.execution == "graph" and device.type != "cuda":
        raise InputError(f'finetune.execution = "graph": needs a CUDA device (device is {device.type}); set "auto"')
    compute = resolve_compute(shape, device, precision, matmul, config.attention)
    num_outputs = len(TASK_TYPES[task.kind].output_names or task.labels)
    return FinetuningWork(shape, config, task.kind, num_outputs, compute)


def _sizes_text(sizes: Mapping[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:MAX_NAMED_CLASSES]
    shown = [name for name in sizes if name in largest]
    more = [size for name, size in sizes.items() if name not in largest]
    rest = f", and {len(more):,} more classes of {min(more):,} to {max(more):,}" if more else ""
    return ", ".join(f"{name!r} {sizes[name]:,}" for name in shown) + rest


def _content_hash(split: Split, more: str = "") -> str:
    """Returns a hash of texts, words and targets."""
    digest = hashlib.sha256(f"{len(split.texts)}{more}".encode("utf-8", "surrogatepass"))
    for texts in split.texts:
        digest.update("\0".join((*texts, "")).encode("utf-8", "surrogatepass"))
    for words in split.words or ():
        digest.update(words.tobytes())
    if split.targets is not None:
        targets = split.targets
        is_nested = targets.dtype == object
        digest.update(repr([list(target) for target in targets]).encode() if is_nested else targets.tobytes())
    return digest.hexdigest()


def named_scores(split: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Returns a split's scores with the names of a result: `accuracy` for `dev`, `accuracy_test` for `test`."""
    ending = f"_{split}".removeprefix("_dev").replace("-", "_")
    return {f"{name}{ending}": value for name, value in scores.items()}


def first_difference(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> str | None:
    """Describes the first entry that differs between two identities; None if they are equal."""
    for name in sorted(before.keys() | now.keys()):
        was = before.get(name)
        is_now = now.get(name)
        if isinstance(was, Mapping) and isinstance(is_now, Mapping):
            if difference := first_difference(was, is_now, f"{prefix}{name}."):
                return difference
        elif was != is_now and name == "teacher":
            return f"was trained with{'' if was else 'out'} a teacher"
        elif was != is_now and prefix == "teacher." and name in ("content", "unlabeled"):
            return f"was trained with {'another teacher' if name == 'content' else 'other unlabeled examples'}"
        elif was != is_now and prefix == "data.":
            return f"was trained with other examples of {name}"
        elif was != is_now and name == "encoder":
            return "was trained from another encoder"
        elif was != is_now and name == "tokens":
            return "was trained with another tokenizer"
        elif was != is_now:
            return f"was trained with other settings ({prefix}{name} was {was!r} and is now {is_now!r})"
    return None
