"""Regression: a value for a text or a pair of texts from its [CLS].

Training and prediction compute standardized values in single precision and convert units in double precision.

Shapes: n examples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from electra_fast.errors import InputError
from electra_fast.finetuning.batches import TrainingSet
from electra_fast.finetuning.config import FinetuneSection
from electra_fast.finetuning.readers import glue, own_data
from electra_fast.finetuning.report.sections import Section, draw_values, errors_section, example_row, first_rows
from electra_fast.finetuning.task import Answers, Prediction, Scores, Settings, Split, Task
from electra_fast.finetuning.tasks.classification import Array, SequenceType, correlation, sequence_form
from electra_fast.finetuning.tasks.task_type import REMEDY, finite

if TYPE_CHECKING:
    from torch import Tensor

# Predictions with a smaller deviation, as a fraction of the targets' scale, count as constant.
COLLAPSED_DEVIATION = 0.01
# Largest spacing of single-precision numbers around the targets' mean, as a fraction of their deviation.
MAX_STEP = 0.001


class Regression(SequenceType):
    """A value per example, trained as (value - task.shift) / task.scale; targets are float64 [n]."""

    read = staticmethod(partial(own_data.read, "regression"))
    hf = sequence_form("regression")
    has_classes = False
    output_names = ("value",)

    def losses(self, outputs_nC: Tensor, targets: Tensor) -> Tensor:
        return (outputs_nC.squeeze(1) - targets.float()).square()

    def divergences(self, outputs_nC: Tensor, answers_nC: Tensor, temperature: float) -> Tensor:
        """Returns the squared error with respect to the teacher's standardized value."""
        return (outputs_nC - answers_nC).square().squeeze(1)

    def _loss_targets(self, task: Task, targets: Array, weights_C: Array | None) -> tuple[Array, Array]:
        return ((targets - task.shift) / task.scale).astype(np.float32), np.ones(len(targets))

    def _in_units(self, task: Task, outputs: Array) -> Array:
        return self.in_units(task, outputs)[:, 0]

    def in_units(self, task: Task, outputs: Any) -> NDArray[np.float64]:
        return np.asarray(outputs, np.float64) * task.scale + task.shift

    def metrics(self, task: Task, targets: Array, outputs: ArrayLike) -> dict[str, float]:
        """Returns both correlations, and for a user's data the mean absolute error."""
        from scipy.stats import pearsonr, spearmanr

        targets = np.asarray(targets)
        values = finite(outputs)
        result = {
            "spearman": correlation(lambda *pair: spearmanr(*pair).statistic, targets, values),
            "pearson": correlation(lambda *pair: pearsonr(*pair).statistic, targets, values),
        }
        if task.name not in glue.TASKS:
            result["mean_absolute_error"] = float(np.abs(targets - values).mean())
        return result

    def majority_outputs(self, task: Task, targets: Array, count: int) -> NDArray[np.float64]:
        return np.full(count, targets.mean())

    def golds(self, task: Task, split: Split) -> list[float | None]:
        return [None if np.isnan(value) else float(value) for value in split.gold]

    def sections(self, task: Task, split: Split, answers: Answers) -> Iterator[Section]:
        gold = np.asarray(split.gold, np.float64)
        values = self._outputs_of_answers(task, answers)
        residuals = values - gold
        variance = float(gold.var())
        quantiles = (0, 5, 25, 50, 75, 95, 100)
        content = {
            "mean_absolute_error": float(np.abs(residuals).mean()),
            "root_mean_square_error": float(np.sqrt(np.square(residuals).mean())),
            "r2": 1 - float(np.square(residuals).mean()) / variance if variance else None,
            "mean": float(residuals.mean()),
        } | {f"quantile_{percent}": float(np.percentile(residuals, percent)) for percent in quantiles}
        draw = partial(draw_values, gold=gold, values=values)
        text = "Predicted minus gold values, in the units of the data."
        yield Section("residuals", content, "Residuals", text, draw)
        yield errors_section(
            example_row(split, row) | {"gold": gold[row].item(), "value": values[row].item()}
            for row in first_rows(np.flatnonzero(residuals), -np.abs(residuals[residuals != 0]))
        )

    def _outputs_of_answers(self, task: Task, answers: Answers) -> NDArray[np.float64]:
        return np.array([answer["value"] for answer in answers], np.float64)

    def warning(self, task: Task, outputs: Any) -> str | None:
        """Returns a warning if the model predicts nearly the same value for every example."""
        values = finite(self._in_units(task, outputs))
        if len(values) < 2 or values.std() >= COLLAPSED_DEVIATION * task.scale:
            return None
        return f"all {len(values):,} predictions are about {values.mean():.4g}: {REMEDY}"

    def _row_answers(self, task: Task, rows: NDArray[np.float64], settings: Settings) -> Iterator[Prediction]:
        if (scale := settings.get("scale")) is None:  # a folder without a scale: all digits of fp32
            yield from ({"value": float(f"{row[0]:.9g}")} for row in rows)
            return
        digits = 5 - math.floor(math.log10(scale))  # six digits of the spread
        yield from ({"value": round(float(row[0]), digits)} for row in rows)

    def describe(self, split: Split, training_set: TrainingSet, config: FinetuneSection) -> Iterator[str]:
        yield from super().describe(split, training_set, config)
        mean = split.gold.mean()
        deviation = split.gold.std()
        step = float(np.spacing(np.abs(mean).astype(np.float32)))
        if step > MAX_STEP * deviation:
            yield (
                f"warning: around {mean:.6g}, single precision has a spacing of {step:g}, but the values' deviation is "
                f"only {deviation:.3g}: `predict` is exact, but predictions in `transformers` are not; to use the "
                f"model there, subtract {mean:.0f} from the values"
            )

    def settings(self, config: FinetuneSection, task: Task, scores: Scores) -> dict[str, Any]:
        return {"scale": task.scale}

    def with_units(self, task: Task, state: Mapping[str, Tensor], settings: Settings) -> Task:
        scale = settings.get("scale", 1.0)
        if type(scale) not in (int, float) or not 0 < scale < math.inf:
            raise InputError(f"scale = {scale!r}: must be a number above 0")
        if not state:  # an ONNX model: its outputs are in the data's units
            return task
        return dataclasses.replace(task, scale=float(scale), shift=_stored_bias(state, settings))

    def to_units(self, task: Task, state: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
        """Scales and shifts the last layer; stores its bias in the settings too, since weights are in fp32."""
        weight = state["head.classifier.weight"].double() * task.scale
        bias = state["head.classifier.bias"].double() * task.scale + task.shift
        scaled = {"head.classifier.weight": weight.float(), "head.classifier.bias": bias.float()}
        return {**state, **scaled}, {"shift": float(bias)}

    def from_units(self, task: Task, state: Mapping[str, Tensor], settings: Settings) -> Mapping[str, Tensor]:
        weight = state["head.classifier.weight"].double() / task.scale
        bias = state["head.classifier.bias"].new_tensor([(_stored_bias(state, settings) - task.shift) / task.scale])
        return {**state, "head.classifier.weight": weight.float(), "head.classifier.bias": bias.float()}

    def _predicted(self, task: Task) -> str:
        return "a value"


def _stored_bias(state: Mapping[str, Tensor], settings: Settings) -> float:
    """Returns a folder's bias, in double precision unless the weights have been trained further."""
    bias = float(state["head.classifier.bias"])
    exact = settings.get("shift")
    if exact is None:
        return bias
    if type(exact) not in (int, float):
        raise InputError(f"shift = {exact!r}: must be a number")
    return float(exact) if np.float32(exact) == np.float32(bias) else bias
