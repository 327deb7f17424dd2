"""`Predictor`: predictions of a fine-tuned model. `FinetunedModel` and `OnnxModel` derive from it.

This module does not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from electra_fast.errors import InputError
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.model_folder import SETTINGS_KEY, Finetuned
from electra_fast.finetuning.prediction_input import Source, open_examples
from electra_fast.finetuning.readers.labels import truncated
from electra_fast.finetuning.readers.rows import as_names
from electra_fast.finetuning.readers.table_formats import MemoryTable, is_table
from electra_fast.finetuning.task import Prediction, Split, Task
from electra_fast.finetuning.task_data import refuse
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.huggingface.source import open_tokenizer


class Predictor:
    """A fine-tuned model; subclasses set `_inference`, a dataclass with the methods of `Outputs`."""

    note = ""
    """A line for the user, shown before the first answer."""
    _inference: Any

    def __init__(self, folder: Path, finetuned: Finetuned) -> None:
        _, self.tokenizer = open_tokenizer(folder, finetuned.shape.vocab_size)
        self.kind = finetuned.kind
        self.labels = finetuned.labels
        self.num_texts = finetuned.num_texts
        self.text_columns = finetuned.text_columns
        self.label_columns = finetuned.label_columns
        self.task_type = TASK_TYPES[finetuned.kind]
        self._settings = {name: value for name, value in finetuned.settings.items() if name != "n_best"}
        # Without a recorded scheme, tags delimit entities if one looks like B-PER.
        scheme = "IOB2" if any(label[1:2] == "-" for label in finetuned.labels) else "none"
        task = Task(
            name=finetuned.kind,
            kind=finetuned.kind,
            labels=finetuned.labels,
            metric="",
            scheme=str(self._settings.get("scheme", scheme)),
            has_unanswerable=self._settings.get("null_threshold") is not None,
        )
        try:
            self.task = self.task_type.with_units(task, finetuned.state, self._settings)
        except InputError as error:
            raise InputError(f"config.json: {SETTINGS_KEY}: {error}") from None
        self._config = _prediction_config(finetuned)

    def __repr__(self) -> str:
        labels = f", {len(self.labels)} labels: {truncated(self.labels)}" if self.labels else ""
        return f"{type(self).__name__}: {self.kind}{labels}, {self._inference}"

    def predict(
        self,
        examples: Iterable[Any],
        *,
        text: str | Sequence[str] = (),
        top_k: int | None = None,
        threshold: float | None = None,
        n_best: int | None = None,
        null_threshold: float | None = None,
    ) -> list[Prediction]:
        """Returns one answer per example, in order.

        Examples are as described below, or rows: a data frame, a pyarrow Table, a `Dataset`, or a list of dicts.

        Classification and regression: examples are texts or pairs of texts. Answers are `{"label": name, "scores":
        {name: probability}}` for classes, `{"labels": [...], "scores": {...}}` for multi-label classification, and
        `{"value": x}` for regression.

        Tagging: examples are texts or lists of words. Answers are `{"words": [...], "tags": [...], "scores": [...],
        "spans": [{"start", "end", "text", "label", "score"}, ...]}`: a tag per word with its probability, and the
        entities with their character offsets.

        Question answering: examples are pairs of a question and a context, or rows. Answers are `{"id", "answer",
        "start", "end", "score", "null_odds"}`; `answer` is empty if `null_odds` exceeds `null_threshold`.

        Args:
            examples: The examples.
            text: The text columns of rows; by default the columns of training, or the usual names.
            top_k: For classification: the number of labels in `scores`, best first; by default all.
            threshold: For multi-label classification: the probability above which a label is predicted; by default
                each label has a threshold in the model.
            n_best: For question answering: the number of answers to list in `n_best`.
            null_threshold: For question answering: the threshold of `null_odds`; by default the model's.
        """
        settings = self._chosen(top_k=top_k, threshold=threshold, n_best=n_best, null_threshold=null_threshold)
        split = self._split(examples, text)
        return self.predict_split(split, **settings) if split.texts else []

    def predict_split(self, split: Split, batch_size: int | None = None, **settings: Any) -> list[Prediction]:
        """Returns one answer per example of a split."""
        features = self.task_type.features(self.tokenizer, split, self._config)
        inference = dataclasses.replace(self._inference, batch_size=batch_size)
        outputs = self.task_type.predict(inference, features, self._config)
        return list(self.task_type.answers(self.task, split, features, outputs, self._settings | settings))

    def _chosen(self, **settings: float | None) -> dict[str, Any]:
        """Returns the settings that are not None; raises InputError for a setting of another kind of task."""
        chosen = {name: value for name, value in settings.items() if value is not None}
        refuse(chosen, self.task_type.prediction_settings, f"not for {self.kind}")
        return chosen

    def outputs(self, examples: Iterable[Any], *, text: str | Sequence[str] = ()) -> Any:
        """Returns logits, float32 [n, labels], or [words, labels] for tagging; values, float64 [n, 1]; or readings.

        For `examples` and `text`, see `predict`.
        """
        split = self._split(examples, text)
        if not split.texts:
            return np.zeros((0, len(self.labels)), np.float32)
        return self.outputs_of(split)

    def outputs_of(self, split: Split) -> Any:
        """Returns the outputs for a split with at least one example."""
        features = self.task_type.features(self.tokenizer, split, self._config)
        return self.task_type.in_units(self.task, self.task_type.predict(self._inference, features, self._config))

    def source(self, path: Path, text: str | Sequence[str] = (), **options: Any) -> Source:
        """Returns the source for the examples of a file or a table."""
        return Source(path, as_names(text), self.text_columns, self.num_texts or self.task_type.num_texts, **options)

    def _split(self, examples: Any, text: str | Sequence[str]) -> Split:
        if isinstance(examples, (str, bytes, Mapping)):
            raise InputError("predict takes a list of examples; put a single example into a list")
        examples = examples if is_table(examples) else list(examples)
        if is_table(examples):
            table = MemoryTable.of("examples", examples)
            with open_examples(self.task_type, self.source(table, text)) as opened:
                examples = [example for example, _ in opened.rows] if len(table.content) else []
        elif text:
            raise InputError(f"text = {text!r}: names columns, but the examples are not rows of a table; remove it")
        return self.task_type.split(examples, self.num_texts)


def _prediction_config(finetuned: Finetuned) -> FinetuneSection:
    """Returns the configuration for prediction; raises InputError if the folder's settings are invalid."""
    names = {key.name for key in dataclasses.fields(FinetuneSection)}
    settings = {name: value for name, value in finetuned.settings.items() if name in names}
    thresholds = finetuned.settings.get("thresholds", {})
    threshold = finetuned.settings.get("null_threshold")
    if not isinstance(thresholds, dict) or not all(type(value) in (int, float) for value in thresholds.values()):
        raise InputError(f"config.json: {SETTINGS_KEY}: thresholds = {thresholds!r}: must be numbers by label")
    if threshold is not None and type(threshold) not in (int, float):
        raise InputError(f"config.json: {SETTINGS_KEY}: null_threshold = {threshold!r}: must be a number")
    try:
        return FinetuneSection(
            head=cast(Any, finetuned.head), head_dropout=0.0, sequence_length=finetuned.sequence_length, **settings
        )
    except (InputError, TypeError) as error:
        raise InputError(f"config.json: {SETTINGS_KEY}: {error}") from None
