"""Classification and multi-label classification of a text or a pair of texts from its [CLS]; the base of regression.

Shapes: n examples, C outputs of the head.
"""

from __future__ import annotations

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from electra_fast.config.config import ModelConfig
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import InputError
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import encode
from electra_fast.finetuning.readers import glue, own_data
from electra_fast.finetuning.readers.rows import Row, text_of
from electra_fast.finetuning.report import sections
from electra_fast.finetuning.report.sections import Section
from electra_fast.finetuning.task import NO_CLASS, Answers, Prediction, Scores, Settings, Split, Task, rounded
from electra_fast.finetuning.tasks.classes import choose_thresholds, class_weights, fit_temperature, sigmoid, softmax
from electra_fast.finetuning.tasks.task_type import (
    CLASSIFIER,
    MODERN_HEAD,
    PIPELINE_USAGE,
    RAW_USAGE,
    REMEDY,
    Features,
    HfForm,
    Outputs,
    TeachableType,
    finite,
    named_split,
)

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.finetuning.model import TaskModel

# Descriptions of an example by the number of texts that the model was trained on.
_READS = {None: "one text or two", 1: "one text", 2: "a pair of texts"}
Array = NDArray[Any]


def sequence_form(problem_type: str, usage: str = PIPELINE_USAGE) -> HfForm:
    """Returns the form of a task type that is sequence classification in `transformers`."""
    return HfForm(
        ending="SequenceClassification",
        head_names={
            ("bert", "transformers"): {
                "head.dense.weight": "classifier.dense.weight",
                "head.dense.bias": "classifier.dense.bias",
                "head.classifier.weight": "classifier.out_proj.weight",
                "head.classifier.bias": "classifier.out_proj.bias",
            },
            ("deberta", "transformers"): {
                "head.dense.weight": "pooler.dense.weight",
                "head.dense.bias": "pooler.dense.bias",
                **CLASSIFIER,
            },
            ("modernbert", "transformers"): MODERN_HEAD,
            ("modernbert", "published"): CLASSIFIER,
        },
        problem_type=problem_type,
        pipeline="text-classification",
        options=", truncation=True",
        usage=usage,
        raw_usage=RAW_USAGE.format(index="[:, 0]"),
        converted_head_note=(
            "## Head\n\nThe head was trained as one layer on the hidden state of [CLS]. The class in `transformers` "
            "has another layer and a gelu before it. Since gelu(z) - gelu(-z) = z, two units of that layer represent "
            "each output, and the logits equal the trained head's. To train further, fine-tune the encoder again "
            "instead of this head."
        ),
    )


class SequenceType(TeachableType):
    """Base class of classification, multi-label classification and regression. Outputs: float32 [n, C]."""

    onnx_outputs = {"logits": 2}
    usual_columns = own_data.TEXT_COLUMNS
    read_labeled = staticmethod(own_data.read_labeled)

    @abstractmethod
    def losses(self, outputs_nC: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each example, fp32 [n]."""

    @abstractmethod
    def divergences(self, outputs_nC: Tensor, answers_nC: Tensor, temperature: float) -> Tensor:
        """Returns the divergence of each example's outputs from a teacher's, fp32 [n]."""

    @abstractmethod
    def metrics(self, task: Task, targets: Array, outputs: ArrayLike) -> dict[str, float]:
        """Returns all scores of labeled examples; an undefined correlation (constant predictions) counts as 0.

        Outputs are logits [n, C], or values [n] in the data's units. Raises Diverged if an output is not finite.
        """

    @abstractmethod
    def majority_outputs(self, task: Task, targets: Array, count: int) -> NDArray[np.float64]:
        """Returns outputs for `metrics` that always predict the most frequent class of `targets` or the mean value."""

    @abstractmethod
    def _outputs_of_answers(self, task: Task, answers: Answers) -> NDArray[np.float64]:
        """Returns outputs for `metrics` that produce these answers."""

    @abstractmethod
    def _row_answers(self, task: Task, rows: NDArray[np.float64], settings: Settings) -> Iterator[Prediction]:
        """Yields a prediction for each row of outputs [n, C]."""

    @abstractmethod
    def _predicted(self, task: Task) -> str:
        """Returns a phrase for the model card: the model's predictions."""

    def _weighted(self, task: Task, targets: Array, config: FinetuneSection) -> tuple[Array | None, str]:
        """Returns the class weights, float64 [C], or None if all are 1, and a note or the empty string."""
        return None, ""

    def _loss_targets(self, task: Task, targets: Array, weights_C: Array | None) -> tuple[Array, Array]:
        """Returns the targets of the loss, and the weight of each example, float64 [n]."""
        return targets, np.ones(len(targets))

    def _in_units(self, task: Task, outputs: Array) -> Array:
        """Returns outputs for `metrics`."""
        return outputs

    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneSection) -> Features:
        return Features(encode(tokenizer, split.texts, config.sequence_length))

    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneSection) -> TrainingSet:
        """Tokenizes all examples; with `finetune.both_orders`, each pair in both orders."""
        split = _in_both_orders(split) if config.both_orders else split
        texts = split.texts
        targets = split.gold
        encoded = encode(tokenizer, texts, config.sequence_length)
        if len(encoded.empty) == len(encoded):
            raise InputError(f"{split.path}: no text has a token; check the columns and the tokenizer")
        by_class, note = self._weighted(task, targets, config)
        targets, weights = self._loss_targets(task, targets, by_class)
        return TrainingSet(encoded, targets, weights, class_weights=by_class, notes=(note,) if note else ())

    def taught_outputs(
        self, tokenizer: Tokenizer, split: Split, config: FinetuneSection, teach: Callable[[Split], Array]
    ) -> Array:
        return teach(_in_both_orders(split) if config.both_orders else split)

    def validation_loss(self, task: Task, split: Split, outputs: Any, class_weights: Array | None) -> float:
        import torch

        targets, outputs = _labeled(split, outputs)
        targets, weights = self._loss_targets(task, targets, class_weights)
        losses = self.losses(torch.from_numpy(outputs), torch.from_numpy(targets)).double().numpy()
        return float((losses * weights).sum() / max(weights.sum(), 1e-9))

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneSection) -> Iterator[str]:
        encoded = training_set.encoded
        if len(encoded) > len(split.texts):
            yield "each training example is read in both orders"
        if encoded.num_truncated:
            yield (
                f"truncated to finetune.sequence_length = {config.sequence_length} tokens: "
                f"{encoded.num_truncated:,} of {len(encoded):,} training examples"
            )

    def model(self, shape: ModelConfig, config: FinetuneSection, num_outputs: int) -> TaskModel:
        from electra_fast.finetuning.tasks.classifiers import SequenceClassifier  # imports torch

        divergences = partial(self.divergences, temperature=config.teacher_temperature)
        return SequenceClassifier(shape, config.head, num_outputs, self.losses, divergences, config.head_dropout)

    def predict(self, inference: Outputs, features: Features, config: FinetuneSection) -> Array:
        (outputs,) = inference.by_example(features.encoded)
        return outputs

    def scores(self, task: Task, split: Split, features: Features, outputs: Any, earlier: Scores) -> dict[str, float]:
        return self.metrics(task, *_labeled(split, self._in_units(task, outputs)))

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        return self.metrics(task, *_labeled(split, self.majority_outputs(task, train.gold, len(split.texts))))

    def scores_of_answers(self, task: Task, split: Split, answers: Answers) -> dict[str, float]:
        return self.metrics(task, *_labeled(split, self._outputs_of_answers(task, answers)))

    def temperature(self, split: Split, outputs: Any) -> float:
        targets, logits = _labeled(split, outputs)
        return fit_temperature(logits, targets)

    def write_predictions(self, stem: Path, task: Task, split: Split, outputs: Any, answers: Answers) -> None:
        """Writes STEM.jsonl, and for GLUE tasks STEM.tsv in the format of the GLUE server."""
        super().write_predictions(stem, task, split, outputs, answers)
        if task.name in glue.TASKS:
            values = finite(self._in_units(task, outputs))
            glue.write_submission(stem.with_name(f"{stem.name}.tsv"), task, split, values)

    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Makes a split of texts or pairs of texts."""
        return named_split([_checked(number, example, num_texts) for number, example in enumerate(examples)])

    def example(self, path: Path, line: int, row: Row, columns: tuple[str, ...], number: int) -> tuple[str, ...]:
        return tuple(text_of(path, line, row, name) for name in columns)

    def answers(
        self, task: Task, split: Split, features: Features, outputs: Any, settings: Settings
    ) -> Iterator[Prediction]:
        """Yields labels with probabilities, or values; the setting `top_k` keeps the k highest probabilities."""
        if settings.get("top_k", 1) < 1:
            raise InputError(f"top_k = {settings['top_k']}: must be at least 1")
        rows = self._in_units(task, outputs).reshape(len(split.texts), -1)
        return self._row_answers(task, rows.astype(np.float64), settings)

    def to_transformers(
        self, architecture: str, head: str, state: Mapping[str, Tensor], width: int
    ) -> tuple[str, Mapping[str, Tensor]]:
        """Converts a raw head, one layer on [CLS], to the head of the `transformers` class.

        The heads of Electra and DebertaV2 are out(gelu(dense(x))). Since gelu(z) - gelu(-z) = z, two units of `dense`
        represent each output. ModernBERT's head has a norm after the activation and cannot represent a raw head. Raises
        InputError if the head of `transformers` is too narrow.
        """
        if architecture == "modernbert" or head != "published":
            return head, state
        import torch

        weight_CD = state["head.classifier.weight"].float()
        bias_C = state["head.classifier.bias"].float()
        num_outputs = len(bias_C)
        if 2 * num_outputs > width:
            raise InputError(
                f"a raw head of {num_outputs} labels needs a width of {2 * num_outputs}, but the head of "
                f'`transformers` has {width}; set finetune.head = "transformers"'
            )
        both = torch.cat((torch.eye(num_outputs), -torch.eye(num_outputs)))
        unused = width - 2 * num_outputs
        return "transformers", {
            **state,
            "head.dense.weight": torch.nn.functional.pad(both @ weight_CD, (0, 0, 0, unused)),
            "head.dense.bias": torch.nn.functional.pad(both @ bias_C, (0, unused)),
            "head.classifier.weight": torch.nn.functional.pad(both.T, (0, unused)),
            "head.classifier.bias": torch.zeros(num_outputs),
        }

    def summary(self, task: Task, num_texts: int) -> str:
        return f"Given {'a pair of texts' if num_texts == 2 else 'a text'}, predicts {self._predicted(task)}."


class Classification(SequenceType):
    """One class per example; targets are class ids, int64 [n]."""

    read = staticmethod(partial(own_data.read, "classification"))
    hf = sequence_form("single_label_classification")
    prediction_settings = ("top_k",)

    def losses(self, outputs_nC: Tensor, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs_nC, targets, reduction="none")

    def divergences(self, outputs_nC: Tensor, answers_nC: Tensor, temperature: float) -> Tensor:
        from electra_fast.finetuning.tasks.classifiers import softmax_divergence

        return softmax_divergence(outputs_nC, answers_nC, temperature)

    def _weighted(self, task: Task, targets: Array, config: FinetuneSection) -> tuple[Array | None, str]:
        return class_weights(config.class_weights, task.labels, targets)

    def _loss_targets(self, task: Task, targets: Array, weights_C: Array | None) -> tuple[Array, Array]:
        return targets, np.ones(len(targets)) if weights_C is None else weights_C[targets]

    def selection_metric(self, task: Task, is_weighted: bool) -> str:
        return "f1_macro" if is_weighted and task.name not in glue.TASKS else task.metric

    def class_sizes(self, task: Task, split: Split) -> dict[str, int]:
        if split.targets is None:
            return {}
        sizes = np.bincount(split.gold[split.gold != NO_CLASS], minlength=len(task.labels))
        return dict(zip(task.labels, map(int, sizes), strict=True))

    def metrics(self, task: Task, targets: Array, outputs: ArrayLike) -> dict[str, float]:
        """Returns accuracy and the metrics that GLUE reports for the task; all metrics for a user's data."""
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef  # slow to import

        classes = finite(outputs).argmax(1)
        result = {"accuracy": float(accuracy_score(targets, classes))}
        if task.name in ("mrpc", "qqp"):
            result["f1"] = float(f1_score(targets, classes, zero_division=0.0))
        if task.name not in glue.TASKS:
            result["f1_macro"] = float(f1_score(targets, classes, average="macro", zero_division=0.0))
        if task.name == "cola" or task.name not in glue.TASKS:
            result["matthews"] = correlation(matthews_corrcoef, targets, classes)
        return result

    def majority_outputs(self, task: Task, targets: Array, count: int) -> NDArray[np.float64]:
        return _outputs_of(task, [[task.labels[np.bincount(targets).argmax()]]] * count)

    def golds(self, task: Task, split: Split) -> list[str | None]:
        return [None if target == NO_CLASS else task.labels[target] for target in split.gold]

    def sections(self, task: Task, split: Split, answers: Answers) -> Iterator[Section]:
        return sections.of_classes(task.labels, split, answers)

    def _outputs_of_answers(self, task: Task, answers: Answers) -> NDArray[np.float64]:
        return _outputs_of(task, [[answer["label"]] for answer in answers])

    def warning(self, task: Task, outputs: Any) -> str | None:
        classes = finite(outputs).argmax(1)
        if len(classes) < 2 or (classes != classes[0]).any():
            return None
        return f"all {len(classes):,} predictions are the class {task.labels[classes[0]]!r}: {REMEDY}"

    def _row_answers(self, task: Task, rows: NDArray[np.float64], settings: Settings) -> Iterator[Prediction]:
        for row in softmax(rows):
            yield {"label": task.labels[int(row.argmax())], "scores": _by_label(task, row, settings)}

    def _predicted(self, task: Task) -> str:
        return f"one of {', '.join(task.labels)}"


class MultiLabel(SequenceType):
    """Any number of labels per example; targets are 0 and 1, float32 [n, C]."""

    hf = sequence_form(
        "multi_label_classification",
        f"{PIPELINE_USAGE}\n\nA label is predicted above its threshold in config.json, which a pipeline ignores.",
    )
    prediction_settings = ("top_k", "threshold")

    def losses(self, outputs_nC: Tensor, targets: Tensor) -> Tensor:
        """Returns the binary cross-entropy, averaged over labels; a target above 0 is the weight of its label."""
        import torch.nn.functional as F

        has_label = targets > 0
        weight = targets.float().where(has_label, 1.0)
        return F.binary_cross_entropy_with_logits(outputs_nC, has_label.float(), weight, reduction="none").mean(1)

    def divergences(self, outputs_nC: Tensor, answers_nC: Tensor, temperature: float) -> Tensor:
        from electra_fast.finetuning.tasks.classifiers import sigmoid_divergence

        return sigmoid_divergence(outputs_nC, answers_nC, temperature)

    def _weighted(self, task: Task, targets: Array, config: FinetuneSection) -> tuple[Array | None, str]:
        counts = targets.sum(0).astype(np.int64)
        text = config.class_weights
        text = "none" if text == "auto" else text  # label thresholds compensate for rare labels
        balanced = np.maximum(len(targets) - counts, 1) / np.maximum(counts, 1)
        weights, note = class_weights(text, task.labels, np.nonzero(targets)[1], balanced=balanced)
        if weights is not None and not (weights > 0).all():
            raise InputError(f"finetune.class_weights = {text!r}: weights of a multi-label task must be above 0")
        return weights, note

    def _loss_targets(self, task: Task, targets: Array, weights_C: Array | None) -> tuple[Array, Array]:
        weighted = targets if weights_C is None else targets * weights_C
        return weighted.astype(np.float32), np.ones(len(targets))

    def selection_metric(self, task: Task, is_weighted: bool) -> str:
        return "f1_macro" if is_weighted else task.metric

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneSection) -> Iterator[str]:
        yield from super().describe(split, training_set, config)
        yield (
            "each label's threshold is chosen on the validation set, so its scores there are a little too high; "
            "scores named _at_half use thresholds of 0.5"
        )

    def scores(self, task: Task, split: Split, features: Features, outputs: Any, earlier: Scores) -> dict[str, Any]:
        """Returns the `metrics`, also with thresholds of 0.5; for the first split also the label `thresholds`."""
        targets, logits = _labeled(split, outputs)
        at_half = self.metrics(task, targets, logits)
        chosen = dict[str, Any]()
        if not earlier:
            thresholds = choose_thresholds(sigmoid(finite(logits)), targets)
            chosen = {"thresholds": dict(zip(task.labels, thresholds.tolist(), strict=True))}
        scores = self.metrics(task, targets, logits, _thresholds(task, earlier or chosen))
        return scores | {f"{name}_at_half": at_half[name] for name in ("f1_micro", "f1_macro")} | chosen

    def settings(self, config: FinetuneSection, task: Task, scores: Scores) -> dict[str, Any]:
        return {name: scores[name] for name in ("thresholds",) if name in scores}

    def class_sizes(self, task: Task, split: Split) -> dict[str, int]:
        if split.targets is None:
            return {}
        return dict(zip(task.labels, map(int, np.nansum(split.gold, axis=0)), strict=True))

    def metrics(
        self, task: Task, targets: Array, outputs: ArrayLike, thresholds: NDArray[np.float64] | float = 0.5
    ) -> dict[str, float]:
        """Returns F1 over all labels and averaged over labels, and the accuracy of complete sets of labels."""
        from sklearn.metrics import accuracy_score, f1_score

        truth = np.asarray(targets) > 0
        predicted = sigmoid(finite(outputs)) > thresholds
        occurs = (truth | predicted).any(0)  # scikit-learn averages over these labels in a single-label task
        by_label = f1_score(truth, predicted, average=None, zero_division=0.0)[occurs]
        return {
            "f1_micro": float(f1_score(truth, predicted, average="micro", zero_division=0.0)),
            "f1_macro": float(by_label.mean()) if occurs.any() else 0.0,
            "accuracy": float(accuracy_score(truth, predicted)),
        }

    def majority_outputs(self, task: Task, targets: Array, count: int) -> NDArray[np.float64]:
        return _outputs_of(task, [[task.labels[np.nansum(targets, axis=0).argmax()]]] * count)

    def golds(self, task: Task, split: Split) -> list[list[str] | None]:
        rows = (None if np.isnan(row).any() else np.flatnonzero(row) for row in split.gold)
        return [None if row is None else [task.labels[number] for number in row] for row in rows]

    def sections(self, task: Task, split: Split, answers: Answers) -> Iterator[Section]:
        return sections.of_labels(task.labels, split, answers)

    def _outputs_of_answers(self, task: Task, answers: Answers) -> NDArray[np.float64]:
        return _outputs_of(task, [answer["labels"] for answer in answers])

    def _row_answers(self, task: Task, rows: NDArray[np.float64], settings: Settings) -> Iterator[Prediction]:
        thresholds = _thresholds(task, settings)
        for row in sigmoid(rows):
            chosen = [task.labels[number] for number in np.flatnonzero(row > thresholds)]
            yield {"labels": chosen, "scores": _by_label(task, row, settings)}

    def _predicted(self, task: Task) -> str:
        return f"any of {', '.join(task.labels)}"


def _in_both_orders(split: Split) -> Split:
    if len(split.texts[0]) != 2:
        raise InputError(f"finetune.both_orders = true: needs pairs of texts, but {split.path} has single texts")
    texts = split.texts + [(second, first) for first, second in split.texts]
    targets = None if split.targets is None else np.concatenate((split.targets, split.targets))
    return dataclasses.replace(split, texts=texts, targets=targets, ids=2 * split.ids, columns=None)


def _outputs_of(task: Task, chosen: Sequence[Sequence[str]]) -> NDArray[np.float64]:
    """Returns logits that choose the given labels of each example."""
    ids = {label: number for number, label in enumerate(task.labels)}
    outputs = np.full((len(chosen), len(task.labels)), -1.0)
    for row, labels in enumerate(chosen):
        outputs[row, [ids[label] for label in labels]] = 1
    return outputs


def _by_label(task: Task, row: Array, settings: Settings) -> dict[str, float]:
    """Returns the probabilities by label, in the order of the labels or, with `top_k`, highest first."""
    order = np.argsort(-row, kind="stable")[: settings["top_k"]] if "top_k" in settings else np.arange(len(row))
    return {task.labels[number]: rounded(row[number]) for number in order}


def _thresholds(task: Task, settings: Settings) -> NDArray[np.float64]:
    """Returns the probabilities above which labels are predicted, [C]: the user's, the model's, or 0.5."""
    chosen = settings.get("threshold")
    if chosen is not None and not 0 <= chosen <= 1:
        raise InputError(f"threshold = {chosen}: must be a probability from 0 to 1")
    defaults = settings.get("thresholds", {})
    return np.array([defaults.get(label, 0.5) if chosen is None else chosen for label in task.labels])


def _labeled(split: Split, outputs: Array) -> tuple[Array, Array]:
    """Returns the targets and outputs of the examples that have a label."""
    targets = split.gold
    is_class = targets.dtype.kind == "i"
    is_known = targets != NO_CLASS if is_class else ~np.isnan(targets.reshape(len(targets), -1)).any(1)
    return targets[is_known], outputs[is_known]


def correlation(function: Callable[..., float], targets: Array, values: Array) -> float:
    """Returns a correlation coefficient of two arrays, 0 if it is undefined."""
    if len(values) < 2 or np.ptp(targets) == 0 or np.ptp(values) == 0:
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nearly constant values
        coefficient = float(function(targets, values))
    return coefficient if np.isfinite(coefficient) else 0.0


def _checked(number: int, example: object, num_texts: int | None) -> tuple[str, ...]:
    texts = (example,) if isinstance(example, str) else example
    if not isinstance(texts, (tuple, list)) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"example {number} = {example!r}: must be a text or a pair of texts")
    if len(texts) not in ((1, 2) if num_texts is None else (num_texts,)):
        raise InputError(f"example {number}: expected {_READS[num_texts]} for this model, got {len(texts)} texts")
    return tuple(texts)
