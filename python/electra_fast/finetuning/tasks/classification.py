"""Classification and regression of a text or a pair of texts: the method of GLUE's tasks and the like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from electra_fast.config.config import ModelConfig
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning import batches
from electra_fast.finetuning.config import FinetuneConfig
from electra_fast.finetuning.inference import example_predictions
from electra_fast.finetuning.model import SequenceClassifier, TaskModel
from electra_fast.finetuning.readers import glue
from electra_fast.finetuning.readers.own_data import TEXT_COLUMNS
from electra_fast.finetuning.readers.submission import write_submission
from electra_fast.finetuning.readers.tables import Row, text_of
from electra_fast.finetuning.task import NO_CLASS, Kind, Split, Task
from electra_fast.finetuning.tasks import metrics
from electra_fast.finetuning.tasks.answers import Answer, answers
from electra_fast.finetuning.tasks.losses import example_weights
from electra_fast.finetuning.tasks.task_type import Features, Method
from electra_fast.finetuning.training.training_set import TrainingSet
from electra_fast.model.compute import ComputeConfig

# What an example is, by how many texts the model was trained on.
_READS = {None: "one text or two", 1: "one text", 2: "a pair of texts"}


class Classification(Method):
    """A head on [CLS]; examples are cut at `finetune.sequence_length`. Outputs are logits or values, float32 [n, C].

    Args:
        kind: `classification`, `multi-label` or `regression`.
    """

    usual_columns = TEXT_COLUMNS

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind

    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneConfig) -> Features:
        """Tokenizes a split."""
        return Features(batches.encode(tokenizer, split.texts, config.sequence_length))

    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneConfig) -> TrainingSet:
        """All examples; with `finetune.both_orders` each pair in both orders."""
        texts, targets = split.texts, split.targets
        assert targets is not None
        if config.both_orders:
            if len(texts[0]) != 2:
                raise InputError(f"finetune.both_orders = true needs pairs of texts; {split.path} has single ones")
            texts, targets = texts + [(second, first) for first, second in texts], np.concatenate((targets, targets))
        encoded = batches.encode(tokenizer, texts, config.sequence_length)
        if len(encoded.empty) == len(encoded):
            raise InputError(f"{split.path}: no example has a token of text; check the columns and the tokenizer")
        if task.kind == "regression":
            targets = ((targets - task.shift) / task.scale).astype(np.float32)
        return TrainingSet(encoded, targets, example_weights(task, targets, config))

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneConfig) -> Iterator[str]:
        """How many examples are cut."""
        encoded = training_set.encoded
        if len(encoded) > len(split.texts):
            yield "each training example in both orders"
        if encoded.num_truncated:
            yield (
                f"cut at finetune.sequence_length = {config.sequence_length} tokens: "
                f"{encoded.num_truncated:,} of {len(encoded):,} training examples"
            )

    def model(self, shape: ModelConfig, config: FinetuneConfig, num_outputs: int) -> TaskModel:
        """The network, with parameters of any value."""
        return SequenceClassifier(shape, config.head, num_outputs, self.kind, config.head_dropout)

    def labels(self, task: Task) -> tuple[str, ...]:
        """The classes; `value` for regression."""
        return task.labels or ("value",)

    def predict(
        self,
        model: TaskModel,
        features: Features,
        config: FinetuneConfig,
        compute: ComputeConfig,
        before_batch: Callable[[], None] = lambda: None,
    ) -> NDArray[Any]:
        """Logits or values, float32 [n, C]."""
        (outputs,) = example_predictions(model, features.encoded, compute, before_batch)
        return outputs

    def scores(
        self, task: Task, split: Split, features: Features, outputs: Any, earlier: Mapping[str, Any]
    ) -> dict[str, float]:
        """As `metrics.scores`, of the examples that have a label."""
        return _scores(task, split, _in_units(task, outputs))

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        """Of the most frequent class, of the most frequent label alone, or of the mean."""
        assert train.targets is not None
        return _scores(task, split, metrics.majority_outputs(task, train.targets, len(split.texts)))

    def warning(self, task: Task, outputs: Any) -> str | None:
        """Whether the model predicts the same for every example."""
        return metrics.collapse(task, _in_units(task, outputs))

    def write_predictions(self, stem: Path, task: Task, split: Split, features: Features, outputs: Any) -> None:
        """STEM.tsv for the GLUE server, or STEM.jsonl with an answer per example."""
        if task.name in glue.TASKS:
            write_submission(stem.with_name(f"{stem.name}.tsv"), task, split, _in_units(task, outputs))
        else:
            super().write_predictions(stem, task, split, features, outputs)

    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Examples are texts, or pairs of texts."""
        texts = [_checked(number, example, num_texts) for number, example in enumerate(examples)]
        ids = [str(number) for number in range(len(texts))]
        return Split(name="predict", path=Path("predict"), texts=texts, targets=None, ids=ids)

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> tuple[str, ...]:
        """The texts."""
        return tuple(text_of(path, line, row, name) for name in columns)

    def answers(
        self, task: Task, split: Split, features: Features, outputs: Any, settings: Mapping[str, Any]
    ) -> Iterator[Answer]:
        """As `answers.answers`."""
        outputs = _in_units(task, outputs)
        return answers(task.kind, task.labels, outputs.reshape(len(split.texts), -1))


def _scores(task: Task, split: Split, outputs: NDArray[Any]) -> dict[str, float]:
    targets = split.targets
    assert targets is not None
    is_class = targets.dtype.kind == "i"
    is_known = targets != NO_CLASS if is_class else ~np.isnan(targets.reshape(len(targets), -1)).any(1)
    return metrics.scores(task, targets[is_known], outputs[is_known])


def _checked(number: int, example: object, num_texts: int | None) -> tuple[str, ...]:
    texts = (example,) if isinstance(example, str) else example
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"example {number} is {example!r}; it must be a text or a pair of texts")
    if len(texts) not in ((1, 2) if num_texts is None else (num_texts,)):
        raise InputError(f"example {number} has {len(texts)} texts, but this model reads {_READS[num_texts]}")
    return tuple(texts)


def _in_units(task: Task, outputs: NDArray[Any]) -> NDArray[Any]:
    """Logits as they are, values [n] in the units of the data."""
    return outputs[:, 0] * task.scale + task.shift if task.kind == "regression" else outputs
