"""A fine-tuning step: forward and backward pass over packed examples, in one or several processes, and the update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from electra_fast.config.config import ModelConfig
from electra_fast.data.loader import to_device
from electra_fast.distributed.step_processes import GradientComputation, StepProcesses, Work, keep_freed_memory
from electra_fast.finetuning.batches import StepBatch, TrainingBatch
from electra_fast.finetuning.config import FinetuneSection, lr_factors
from electra_fast.finetuning.model import Inputs, TaskModel, TeachableModel
from electra_fast.finetuning.tasks import TASK_TYPES
from electra_fast.hardware.graphs import GraphRunner
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives.objective import RngKey, seed_generator
from electra_fast.ops.weight_casts import WeightCasts
from electra_fast.optimizers.optimizer import Optimizer, global_norm
from electra_fast.training.loss_scaling import discard, loss_scaler
from electra_fast.training.run_tensors import split_state


@dataclass(frozen=True)
class TrainingInputs:
    """`Inputs` with targets, weights, a teacher's answers, and the seed and number of the step, int64 [2]."""

    inputs: Inputs
    targets: Tensor
    weights: Tensor
    seed_and_step: Tensor
    answers: Tensor | None = None

    @classmethod
    def of(cls, batch: TrainingBatch, seed: int, step: int, device: torch.device) -> Self:
        """Copies a batch to the device, asynchronously on CUDA."""
        answers = () if batch.answers is None else (batch.answers,)
        arrays = (batch.targets, batch.weights, np.array([seed, step]), *answers)
        return cls(Inputs.of(batch.packed, device), *(to_device(torch.from_numpy(array), device) for array in arrays))

    def copy_(self, other: Self) -> None:
        for target, source in zip(self._tensors(), other._tensors(), strict=True):
            target.copy_(source)

    def _tensors(self) -> tuple[Tensor, ...]:
        answers = () if self.answers is None else (self.answers,)
        return *self.inputs.tensors, self.targets, self.weights, self.seed_and_step, *answers


class TaskBackward(GradientComputation):
    """Computes the gradients of a step's examples, or of the part of the process with this rank.

    The model is on its device, in training mode. `loss_scale`, if set, multiplies all gradients.
    """

    model: TaskModel
    loss_scale: Tensor | None = None

    def __init__(self, model: TaskModel, compute: ComputeConfig, rank: int = 0) -> None:
        self.model = model
        self._compute = compute
        self._rank = rank
        self._device = next(model.parameters()).device
        self._casts = WeightCasts(model.encoder, compute.dtype)  # heads compute in fp32
        self.batch: TrainingInputs | None = None

    def load(self, batch: StepBatch, step: int) -> None:
        """Copies this process's part to the device; for a small batch, it may be empty."""
        self.batch = None
        if self._rank < len(batch.parts):
            self.batch = TrainingInputs.of(batch.parts[self._rank], batch.seed, step, self._device)
        seed_generator(self._device, batch.seed, self._rank, step)

    def run(self) -> list[dict[str, Tensor]]:
        """Accumulates gradients; returns the summed loss. Never synchronizes with the host."""
        batch = self.batch
        if batch is None:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            return [{"loss": torch.zeros((), device=self._device)}]
        key = RngKey(batch.seed_and_step).dropout_key(0)
        with self._casts.current():
            if batch.answers is None:
                losses = self.model.losses(batch.inputs, batch.targets, self._compute, key)
            else:
                assert isinstance(self.model, TeachableModel)
                losses = self.model.taught_losses(batch.inputs, batch.targets, batch.answers, self._compute, key)
            loss = (losses * batch.weights).sum()
            loss.backward(self.loss_scale)
        return [{"loss": loss.detach()}]


@dataclass(frozen=True)
class FinetuningWork(Work):
    """Everything that determines the steps of a fine-tuning, except parameter values."""

    shape: ModelConfig
    config: FinetuneSection
    kind: str
    num_outputs: int
    compute: ComputeConfig

    def computing(self, **changes: Any) -> FinetuningWork:
        return replace(self, compute=replace(self.compute, **changes))

    def model(self) -> TaskModel:
        return TASK_TYPES[self.kind].model(self.shape, self.config, self.num_outputs).train()

    def captures(self, device: torch.device) -> bool:
        return device.type == "cuda" and self.config.execution != "eager"

    def optimizer(self, model: TaskModel) -> Optimizer:
        names = [name for name, _ in model.named_parameters()]
        factors = lr_factors(names, self.shape.num_layers, self.config)
        return Optimizer(model.named_parameters(), self.config.optimizer(), factors)

    def build_worker(self, rank: int, num_processes: int) -> tuple[TaskBackward, Optimizer]:
        model = self.model()
        return TaskBackward(model, self.compute, rank), self.optimizer(model)


class FinetuneStep:
    """Trains a model on one batch per call, with one CUDA graph per batch shape.

    The model is on its device, in training mode. On a CPU, several processes may share each batch.
    """

    def __init__(self, model: TaskModel, work: FinetuningWork, num_processes: int = 1) -> None:
        device = next(model.parameters()).device
        if device.type == "cpu":
            keep_freed_memory()
        self.model = model
        self.optimizer = work.optimizer(model)
        self._backward = TaskBackward(model, work.compute)
        self.scaler = loss_scaler(work.compute, device)
        self._backward.loss_scale = None if self.scaler is None else self.scaler.scale
        self._processes: StepProcesses | None = None
        if num_processes > 1:
            self._processes = StepProcesses(self._backward, self.optimizer, work, num_processes)
        self._graphs: GraphRunner[tuple[Tensor, Tensor]] = GraphRunner(device, work.captures(device))
        self._static_batches: dict[tuple[torch.Size, bool], TrainingInputs] = {}

    def __call__(self, batch: StepBatch, step: int, lr_scale: float) -> tuple[Tensor, Tensor]:
        """Takes step `step` (from 0) at `lr_scale` times the peak learning rate; returns loss and gradient norm."""
        if self._processes is not None:
            self._processes.start(batch, step, lr_scale)
        self._backward.load(batch, step)
        self.optimizer.set_step_scalars(lr_scale)
        with self._graphs.on_stream():
            loss, norm = self._graphs.run(self.run, step, self._use_static_batch())
            # The next replay of any graph may overwrite the output tensors of this graph.
            loss = loss.clone()
            norm = norm.clone()
        self._graphs.join()
        return loss, norm

    def _use_static_batch(self) -> tuple[torch.Size, bool] | None:
        """Copies the batch into the static batch of its graph; returns the graph's key.

        The key has the shape of the batch and whether it has a teacher's answers.
        """
        batch = self._backward.batch
        if not self._graphs.captures_graphs or batch is None:
            return None
        shape = batch.inputs.columns_5RL.shape, batch.answers is not None
        static = self._static_batches.setdefault(shape, batch)
        if static is not batch:
            static.copy_(batch)
        self._backward.batch = static
        return shape

    def run(self) -> tuple[Tensor, Tensor]:
        """Runs forward pass, backward pass and update on the loaded batch. A graph captures all of this."""
        if self._processes is None:
            self.optimizer.zero_grad()
            totals = self._backward.run()
            norm = self._update()
        else:
            totals, norm = self._processes.run()
        return sum((total["loss"] for total in totals), torch.zeros((), device=norm.device)), norm

    def _update(self) -> Tensor:
        """Clips and updates; returns the gradient norm, or 0 if fp16 gradients overflow and the update is skipped."""
        if self.scaler is None:
            return self.optimizer.step()
        gradients = list(self.optimizer.gradients().values())
        self.scaler.unscale(gradients)
        norm = global_norm(gradients)
        skipped = self.scaler.adapt(norm)
        discard(gradients, skipped)
        self.optimizer.step(norm, skipped)
        return torch.where(skipped > 0, 0.0, norm)

    def reset(self) -> None:
        self.optimizer.reset()
        if self.scaler is not None:
            self.scaler.reset()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors of optimizer and loss scaler by name, for a checkpoint; does not copy them."""
        return self.optimizer.state_dict() | ({} if self.scaler is None else self.scaler.state_dict())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores a `state_dict`, which may be of another precision. Raises ValueError for another model's."""
        optimizer_state, scaling = split_state(state)
        self.optimizer.load_state_dict(optimizer_state)
        for name, tensor in ({} if self.scaler is None else self.scaler.state_dict()).items():
            tensor.copy_(scaling.get(name, tensor))

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
