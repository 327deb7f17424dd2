"""The interface of a task type for training, prediction and model folders.

`tasks.TASK_TYPES` lists the implementations. Other modules call the task type's methods and never compare its name.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from electra_fast.config.config import ModelConfig
from electra_fast.config.section import Scalar
from electra_fast.data.corpus import Tokenizer
from electra_fast.errors import Diverged
from electra_fast.files.atomic_files import replace_file
from electra_fast.files.json_files import json_text
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.encoding import EncodedExamples, Ints
from electra_fast.finetuning.prediction_input import ExampleReader
from electra_fast.finetuning.readers.rows import check_unicode, with_columns
from electra_fast.finetuning.report.sections import Section
from electra_fast.finetuning.task import Answers, Prediction, Scores, Settings, Split, Task, TaskData

if TYPE_CHECKING:
    from torch import Tensor

    from electra_fast.finetuning.model import TaskModel

REMEDY = "try a lower finetune.learning_rate, more finetune.epochs, or another seed"
HeadNames = Mapping[str, str]
"""Maps our names of a head's parameters to the names in `transformers`."""

CLASSIFIER: HeadNames = {"head.classifier.weight": "classifier.weight", "head.classifier.bias": "classifier.bias"}
MODERN_HEAD: HeadNames = {
    "head.dense.weight": "head.dense.weight",
    "head.norm.weight": "head.norm.weight",
    **CLASSIFIER,
}
PIPELINE_USAGE = """\
```python
from transformers import pipeline
predict = pipeline("{pipeline}", "path/to/this/folder"{options})
```

or `{class_name}.from_pretrained`, or {command}."""
RAW_USAGE = """\
; in `transformers`:

```python
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer
tokenizer, model = (c.from_pretrained("path/to/this/folder") for c in (AutoTokenizer, AutoModel))
tensors = load_file("path/to/this/folder/model.safetensors")
hidden = model(**tokenizer(["a text"], return_tensors="pt")).last_hidden_state{index}
logits = hidden @ tensors["classifier.weight"].T + tensors["classifier.bias"]
```"""


@dataclass(frozen=True, kw_only=True)
class HfForm:
    """The form of a task type's model folders in `transformers`, and the text of their model card."""

    ending: str
    """The end of the class name: `SequenceClassification`."""
    head_names: Mapping[tuple[str, str], HeadNames]
    """The head's tensors by architecture and `finetune.head`."""
    problem_type: str | None = None
    """`problem_type` in config.json, if several task types share a class."""
    pipeline: str
    options: str = ""
    """Additional arguments of the pipeline, as Python code."""
    entity_options: str = ""
    """Additional arguments if tags delimit entities."""
    usage: str = PIPELINE_USAGE
    """Section on use: a format string of `pipeline`, `options`, `class_name` and the `command` that predicts a file."""
    raw_usage: str = RAW_USAGE.format(index="")
    """Use of a head without a class in `transformers`; continues a sentence."""
    converted_head_note: str = ""
    """Section for a head that `to_transformers` has converted."""


@dataclass(frozen=True)
class Features:
    """The tokenized examples of a split. Subclasses add data for interpreting a model's outputs."""

    encoded: EncodedExamples


class Outputs(Protocol):
    """A model's outputs for tokenized examples; implemented by `inference.Inference` and `onnx_model.OnnxInference`."""

    def by_example(self, encoded: EncodedExamples) -> tuple[NDArray[Any], ...]:
        """Returns `TaskModel.predictions` for one or more examples, in order; [n, ...] each."""

    def by_token(self, encoded: EncodedExamples) -> NDArray[Any]:
        """Returns the outputs of all tokens of `encoded.ids`, [tokens, ...]."""


class TaskType(ExampleReader):
    """Reads, trains, scores, predicts and stores tasks of a type. `outputs` are the results of `predict`."""

    defaults: ClassVar[Mapping[str, Scalar]] = {}
    """Values of `[finetune]` keys that differ from the general defaults, in all recipes."""
    read: ClassVar[Callable[..., TaskData] | None] = None
    """Reads a user's files: `train`, `dev` and `test` (the latter two may be None), then keyword arguments."""
    read_labeled: ClassVar[Callable[..., tuple[Split, list[str]]]]
    """Reads a file to score a trained model: the task, the path, the text and label columns of training, then keyword
    arguments. Returns the split and notes for the user."""
    num_texts: ClassVar[int | None] = None
    """Number of texts per example; None if a model's training data decides."""
    has_classes: ClassVar[bool] = True
    """Whether it predicts class probabilities, which may have weights and be calibrated."""
    output_names: ClassVar[tuple[str, ...]] = ()
    """Names of the head's outputs; empty if they are the task's labels."""
    prediction_settings: ClassVar[tuple[str, ...]] = ()
    """Settings of `answers` that a user can choose."""
    onnx_outputs: ClassVar[Mapping[str, int]]
    """The number of dimensions of each output of an ONNX model, by name."""
    hf: ClassVar[HfForm]

    @abstractmethod
    def features(self, tokenizer: Tokenizer, split: Split, config: FinetuneSection) -> Features:
        """Tokenizes a split; raises InputError for unusable texts."""

    @abstractmethod
    def training_set(self, tokenizer: Tokenizer, task: Task, split: Split, config: FinetuneSection) -> TrainingSet:
        """Tokenizes the training examples; raises InputError if they cannot be used with this configuration."""

    @abstractmethod
    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneSection) -> Iterator[str]:
        """Yields notes about the training examples, which are shown before training."""

    def class_sizes(self, task: Task, split: Split) -> dict[str, int]:
        """Returns the number of examples per class; empty without classes or labels."""
        return {}

    @abstractmethod
    def model(self, shape: ModelConfig, config: FinetuneSection, num_outputs: int) -> TaskModel:
        """Builds the network with arbitrary parameters."""

    @abstractmethod
    def predict(self, inference: Outputs, features: Any, config: FinetuneSection) -> Any:
        """Returns a model's outputs for all examples."""

    def of_onnx(
        self, outputs: Sequence[NDArray[Any]], encoded: EncodedExamples, examples: Ints, config: FinetuneSection
    ) -> tuple[NDArray[Any], ...]:
        """Returns `TaskModel.predictions` from the padded `onnx_outputs` of a batch; outputs per token: [n, W, ...]."""
        return tuple(outputs)

    @abstractmethod
    def scores(self, task: Task, split: Split, features: Any, outputs: Any, earlier: Scores) -> dict[str, float]:
        """Returns all scores by name, including `task.metric`; raises Diverged if an output is not finite.

        `earlier` are the scores of the first validation split, once they are known.
        """

    def selection_metric(self, task: Task, is_weighted: bool) -> str:
        """Returns the name of the score that selects the best step; `is_weighted`: the loss has class weights."""
        return task.metric

    def validation_loss(self, task: Task, split: Split, outputs: Any, class_weights: NDArray[Any] | None) -> float:
        """Returns the loss on a validation split, weighted as in training; it decides between steps of equal score."""
        return 0.0

    def temperature(self, split: Split, outputs: Any) -> float:
        """Returns the temperature of the logits that is best for a validation split."""
        return 1.0

    def majority(self, task: Task, train: Split, split: Split) -> dict[str, float]:
        """Returns the scores of always predicting the most frequent training answer; empty if that is undefined."""
        return {}

    def warning(self, task: Task, outputs: Any) -> str | None:
        """Returns a warning if the model has learned nothing, else None."""
        return None

    def write_predictions(self, stem: Path, task: Task, split: Split, outputs: Any, answers: Answers) -> None:
        """Writes a split's predictions to STEM.jsonl; some types write other files that begin with `stem` too."""
        replace_file(stem.with_name(f"{stem.name}.jsonl"), self.prediction_lines(task, split, answers))

    def prediction_lines(self, task: Task, split: Split, answers: Answers) -> str:
        """Returns a line of JSON per example.

        It has the columns of the example's row, `id`, the answer's fields and, if the split has labels, `gold`. Columns
        with the name of another field are in `input`.
        """
        golds = [{}] * len(answers) if split.targets is None else [{"gold": gold} for gold in self.golds(task, split)]
        rows = zip(split.ids, answers, golds, split.columns or [{}] * len(answers), strict=True)
        return "".join(json_text(with_columns({"id": id} | answer | gold, row)) for id, answer, gold, row in rows)

    @abstractmethod
    def golds(self, task: Task, split: Split) -> list[Any]:
        """Returns each example's label as JSON, for a split with labels; None for an example without a label."""

    def labeled_rows(self, task: Task, split: Split) -> Iterator[dict[str, Any]]:
        """Yields labeled examples as rows for `read_labeled`, with the usual columns."""
        for texts, gold in zip(split.texts, self.golds(task, split), strict=True):
            columns = ("text",) if len(texts) == 1 else ("sentence1", "sentence2")
            yield {**dict(zip(columns, texts, strict=True)), "label": gold}

    @abstractmethod
    def scores_of_answers(self, task: Task, split: Split, answers: Answers) -> dict[str, float]:
        """Returns the scores of answers (as yielded by `answers`) to labeled examples."""

    @abstractmethod
    def sections(self, task: Task, split: Split, answers: Answers) -> Iterator[Section]:
        """Yields the type's sections of a report on labeled examples, with `errors` as the last one."""

    def label_counts(self, task: Task, split: Split) -> dict[str, int]:
        """Returns the number of occurrences of each label; empty without labels."""
        return self.class_sizes(task, split)

    @abstractmethod
    def split(self, examples: Sequence[Any], num_texts: int | None) -> Split:
        """Makes a split of examples for prediction; raises InputError naming the first invalid example.

        `num_texts` is the model's number of texts per example, None if unknown.
        """

    @abstractmethod
    def answers(
        self, task: Task, split: Split, features: Any, outputs: Any, settings: Settings
    ) -> Iterator[Prediction]:
        """Yields a JSON object for each example. `settings` are the settings in the model's folder."""

    def settings(self, config: FinetuneSection, task: Task, scores: Scores) -> dict[str, Any]:
        """Returns settings for prediction, which are stored in the model's config.json."""
        return {}

    def to_units(self, task: Task, state: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Returns a trained model's parameters with outputs in the data's units, and settings for prediction."""
        return state, {}

    def from_units(self, task: Task, state: Mapping[str, Tensor], settings: Settings) -> Mapping[str, Tensor]:
        """Inverts `to_units`; `settings` are the settings in the model's folder."""
        return state

    def with_units(self, task: Task, state: Mapping[str, Tensor], settings: Settings) -> Task:
        """Returns a folder's task with the units that `from_units` converts to."""
        return task

    def in_units(self, task: Task, outputs: Any) -> Any:
        """Returns outputs in the data's units."""
        return outputs

    def to_transformers(
        self, architecture: str, head: str, state: Mapping[str, Tensor], width: int
    ) -> tuple[str, Mapping[str, Tensor]]:
        """Returns `finetune.head` and parameters, converted to the class of `transformers` if it computes the same."""
        return head, state

    @abstractmethod
    def summary(self, task: Task, num_texts: int) -> str:
        """Returns a description of a model of this type for the model card."""


class TeachableType(TaskType):
    """A task type that can learn from a teacher; its network is a `TeachableModel`."""

    @abstractmethod
    def taught_outputs(
        self, tokenizer: Tokenizer, split: Split, config: FinetuneSection, teach: Callable[[Split], NDArray[Any]]
    ) -> NDArray[Any]:
        """Returns a teacher's outputs for each target or token of `training_set`; NaN if there is no output.

        `teach` returns the outputs for a split in the student's units and order: [n, C] or [words, C].
        """


def finite(outputs: ArrayLike) -> NDArray[np.float64]:
    """Returns the outputs as float64; raises Diverged if an output is NaN or infinite."""
    values = np.asarray(outputs, dtype=np.float64)
    num_bad = int((~np.isfinite(values.reshape(len(values), -1))).any(1).sum())
    if num_bad:
        raise Diverged(
            f"the model's outputs for {num_bad:,} of {len(values):,} examples are not finite: "
            "try a lower finetune.learning_rate"
        )
    return values


def named_split(
    texts: list[tuple[str, ...]], ids: list[str] | None = None, words: list[NDArray[np.int64]] | None = None
) -> Split:
    """Returns a split of examples for prediction; by default ids are their numbers. Raises InputError for non-text."""
    for number, text in enumerate(map("".join, texts)):
        check_unicode(f"example {number}: ", text)
    ids = [str(number) for number in range(len(texts))] if ids is None else ids
    return Split(name="predict", path=Path("predict"), texts=texts, targets=None, ids=ids, words=words)
