"""What a kind of task needs: how its examples become tokens and targets, its network, its scores and predictions.

One class for each: `classification`, `tagging`, `question_answering`; `methods` has them by kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from electra_fast.config.config import ModelConfig
from electra_fast.data.corpus import Tokenizer
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import json_text
from electra_fast.finetuning.batches import EncodedExamples
from electra_fast.finetuning.config import FinetuneConfig
from electra_fast.finetuning.model import TaskModel
from electra_fast.finetuning.prediction_input import ExampleReader
from electra_fast.finetuning.task import Split, Task
from electra_fast.finetuning.tasks.answers import Answer
from electra_fast.finetuning.training.training_set import TrainingSet
from electra_fast.model.compute import ComputeConfig


@dataclass(frozen=True)
class Features:
    """The tokenized examples of a split. A subclass has what its method needs to read a model's predictions."""

    encoded: EncodedExamples


class Method(ExampleReader):
    """How one kind of task is trained, predicted and scored. `outputs` are what `predict` returned, of any type."""

    prediction_settings: tuple[str, ...] = ()
    """What a user may set of `answers`."""

    @abstractmethod
    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneConfig) -> Features:
        """Tokenizes a split; ValueError where its texts cannot be used."""

    @abstractmethod
    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneConfig) -> TrainingSet:
        """The training examples; ValueError where they cannot be used, or not with this configuration."""

    @abstractmethod
    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneConfig) -> Iterator[str]:
        """Lines about the training examples that a user should know before training."""

    @abstractmethod
    def model(self, shape: ModelConfig, config: FinetuneConfig, num_outputs: int) -> TaskModel:
        """The network, with parameters of any value."""

    @abstractmethod
    def predict(
        self,
        model: TaskModel,
        features: Any,
        config: FinetuneConfig,
        compute: ComputeConfig,
        before_batch: Callable[[], None] = lambda: None,
    ) -> Any:
        """A model's outputs for all examples. Calls `before_batch` before each batch, which may raise."""

    @abstractmethod
    def scores(
        self, task: Task, split: Split, features: Any, outputs: Any, earlier: Mapping[str, Any]
    ) -> dict[str, float]:
        """All scores by name, `task.metric` among them; Diverged where an output is not finite.

        `earlier` are those of the first validation split, once there are any.
        """

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        """What always giving the training examples' most frequent answer scores; empty where there is no such thing."""
        return {}

    def warning(self, task: Task, outputs: Any) -> str | None:
        """A line for the user where the model has learned nothing, else None."""
        return None

    def write_predictions(self, stem: Path, task: Task, split: Split, features: Any, outputs: Any) -> None:
        """Writes the predictions for a split to files that begin with `stem`; here a .jsonl with an answer per line."""
        found = zip(split.ids, self.answers(task, split, features, outputs, {}), strict=True)
        lines = (json_text({"id": example} | answer) for example, answer in found)
        replace_file(stem.with_name(f"{stem.name}.jsonl"), "".join(lines))

    @abstractmethod
    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Examples to predict as a split; ValueError names the first that is none.

        `num_texts` is that of the model, None where it is not known.
        """

    @abstractmethod
    def answers(
        self, task: Task, split: Split, features: Any, outputs: Any, settings: Mapping[str, Any]
    ) -> Iterator[Answer]:
        """One JSON-able object per example. `settings` are those of the model's folder."""

    def labels(self, task: Task) -> tuple[str, ...]:
        """The names of the head's outputs."""
        return task.labels

    def settings(self, config: FinetuneConfig, task: Task, scores: Mapping[str, Any]) -> dict[str, Any]:
        """What prediction needs to know besides the weights, kept in the model's config.json."""
        return {}
