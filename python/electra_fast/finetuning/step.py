"""A step of fine-tuning: forward and backward over packed examples, by one process or several, and the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra_fast.attention import AttentionMask, Queries
from electra_fast.compute import ComputeConfig, RngKey
from electra_fast.config import ModelConfig
from electra_fast.finetuning.batches import PackedBatch
from electra_fast.finetuning.config import FinetuneConfig
from electra_fast.finetuning.losses import losses
from electra_fast.finetuning.model import SequenceClassifier
from electra_fast.finetuning.optimization import lr_factors
from electra_fast.training.allocator import keep_freed_memory
from electra_fast.training.backward import GradientComputation, Work
from electra_fast.training.optim import Optimizer
from electra_fast.training.step_processes import StepProcesses


@dataclass(frozen=True)
class TrainingBatch:
    """The examples of a step, or of one process' part of it: their tokens, targets, and weights in the loss."""

    packed: PackedBatch
    targets: NDArray[Any]
    weights: NDArray[Any]


@dataclass(frozen=True)
class StepBatch:
    """A step's examples in one part per process, and the seed that with the step's number decides the dropout masks."""

    parts: list[TrainingBatch]
    seed: int

    @classmethod
    def of(cls, parts: Sequence[PackedBatch], targets: NDArray[Any], weights: NDArray[Any], seed: int) -> Self:
        """Gives each part its share of the batch's targets and weights."""
        return cls([TrainingBatch(part, targets[part.examples], weights[part.examples]) for part in parts], seed)


def forward(
    model: SequenceClassifier, batch: PackedBatch, compute: ComputeConfig, dropout_key: Tensor | None = None
) -> Tensor:
    """The model's outputs for a packed batch, in the order of `batch.examples`; fp32 [n, C]."""
    device = next(model.parameters()).device
    columns = np.stack((batch.input_ids, batch.token_type_ids, batch.position_ids, batch.segment_ids))
    ids, types, positions, segments = _to_device(columns, device).unbind()
    mask = AttentionMask.packed(
        segments, _to_device(batch.cu_seqlens, device), compute.attention, model.shape.local_attention
    )
    queries = _first_tokens(segments, positions, _to_device(batch.first_tokens, device), model.shape)
    outputs: Tensor = model(
        ids.flatten(), types.flatten(), positions.flatten(), queries, mask, compute.dtype, dropout_key
    )
    return outputs


def _first_tokens(segments_RL: Tensor, positions_RL: Tensor, first_n: Tensor, shape: ModelConfig) -> Queries:
    """The [CLS] of each example, which attends to its segment, or in a local layer to the beginning of that."""
    row_R1 = torch.arange(len(segments_RL), device=first_n.device)[:, None]
    segment_T = (row_R1 * segments_RL.shape[1] + segments_RL).flatten()  # a row has fewer segments than tokens
    if shape.is_local(shape.num_layers - 1):
        segment_T = segment_T.where(positions_RL.flatten() <= shape.local_attention // 2, -1)
    return Queries(first_n, segment_T[first_n][:, None] == segment_T)


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class ClassifierBackward(GradientComputation):
    """The gradients of a step's examples, or of one process' part of them.

    Args:
        model: On its device, in training mode.
        kind: Of the task.
        compute: Attention backend and activation dtype.
        rank: Which process this is.
    """

    model: SequenceClassifier

    def __init__(self, model: SequenceClassifier, kind: str, compute: ComputeConfig, rank: int = 0) -> None:
        self.model, self._kind, self._compute, self._rank = model, kind, compute, rank
        self._device = next(model.parameters()).device
        self._batch: TrainingBatch | None = None
        self._seed, self._step = 0, 0

    def load(self, batch: StepBatch, step: int) -> None:
        """Takes this process' part, which a small batch may not have."""
        self._batch = batch.parts[self._rank] if self._rank < len(batch.parts) else None
        self._seed, self._step = batch.seed, step
        # As in pre-training: torch's own generator is keyed by the step, so a resumed run draws the same from it.
        seed = (self._seed * 0x9E3779B97F4A7C15 + self._rank * 0xD1B54A32D192ED03 + step) % 2**63
        torch.manual_seed(seed) if self._device.type == "cuda" else torch.default_generator.manual_seed(seed)

    def run(self) -> list[dict[str, Tensor]]:
        """Adds the gradients; returns the total of the loss."""
        if self._batch is None:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return [{"loss": torch.zeros((), device=self._device)}]
        key = RngKey(torch.tensor([self._seed, self._step], device=self._device)).dropout_key(0)
        outputs = forward(self.model, self._batch.packed, self._compute, key)
        targets = _to_device(self._batch.targets, self._device)
        weights = _to_device(self._batch.weights, self._device)
        loss = (losses(self._kind, outputs, targets) * weights).sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return [{"loss": loss.detach()}]


@dataclass(frozen=True)
class FinetuningWork(Work):
    """The steps of one fine-tuning: all that decides them but the values of the parameters."""

    shape: ModelConfig
    config: FinetuneConfig
    kind: str
    num_outputs: int
    compute: ComputeConfig

    def model(self) -> SequenceClassifier:
        """A model with parameters of any value, in training mode."""
        config = self.config
        return SequenceClassifier(self.shape, config.head, self.num_outputs, config.head_dropout).train()

    def optimizer(self, model: SequenceClassifier) -> Optimizer:
        """AdamW with the learning rates of the layers."""
        names = [name for name, _ in model.named_parameters()]
        factors = lr_factors(names, self.shape.num_layers, self.config)
        return Optimizer(model.named_parameters(), self.config.optimizer(), factors)

    def share(self, rank: int, num_processes: int) -> tuple[ClassifierBackward, Optimizer]:
        """The gradients of the process' part."""
        model = self.model()
        return ClassifierBackward(model, self.kind, self.compute, rank), self.optimizer(model)


class FinetuneStep:
    """Trains a model on one batch per call.

    Args:
        model: On its device, in training mode.
        work: Of which it is a model.
        num_processes: On a CPU, processes that share each batch.
    """

    def __init__(self, model: SequenceClassifier, work: FinetuningWork, num_processes: int = 1) -> None:
        if next(model.parameters()).device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.optimizer = work.optimizer(model)
        self._backward = ClassifierBackward(model, work.kind, work.compute)
        self._processes: StepProcesses | None = None
        if num_processes > 1:
            self._processes = StepProcesses(self._backward, self.optimizer, work, num_processes)

    def __call__(self, batch: StepBatch, step: int, lr_scale: float) -> tuple[Tensor, Tensor]:
        """Takes the step with this number (0-based), at a fraction of the peak rate; returns loss and gradient norm."""
        if self._processes is not None:
            self._processes.start(batch, step, lr_scale)
        self._backward.load(batch, step)
        self.optimizer.set_step_scalars(lr_scale)
        if self._processes is None:
            self.optimizer.zero_grad()
            totals, norm = self._backward.run(), self.optimizer.step()
        else:
            totals, norm = self._processes.run()
        return sum((each["loss"] for each in totals), torch.zeros((), device=norm.device)), norm

    def close(self) -> None:
        """Ends the processes that help."""
        if self._processes is not None:
            self._processes.close()
