"""Predictions of a fine-tuned model for tokenized examples, in batches of similar lengths."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra_fast.config.config import AUTO
from electra_fast.errors import InputError, is_out_of_memory
from electra_fast.finetuning.batches import PackedBatch, pack
from electra_fast.finetuning.encoding import EncodedExamples
from electra_fast.finetuning.model import EncoderWithHead, Inputs
from electra_fast.hardware.kernel_choice import resolve_encoder
from electra_fast.hardware.settings import faster_precision, shortest_times, times_text
from electra_fast.model.compute import CPU_PRECISIONS, ComputeConfig, choose_precision, resolve_compute, use_compute
from electra_fast.model.matmul import fastest_matmul
from electra_fast.ops.weight_casts import WeightCasts

# Tokens per batch; on a CPU, they fit in the caches.
BATCH_TOKENS = {"cpu": 2048, "cuda": 4096}
# Size of the batch for speed measurements.
_SAMPLE_ROWS = 4
_SAMPLE_LENGTH = 128


@dataclass(frozen=True)
class Inference:
    """A model for inference, without dropout. Calls `before_batch` before each batch; it may raise."""

    model: EncoderWithHead
    compute: ComputeConfig
    before_batch: Callable[[], None] | None = None
    batch_size: int | None = None
    """Examples per batch; None: chosen for the device."""
    casts: WeightCasts | None = None
    """Cached casts of the weights, for a model that is used repeatedly."""

    def __str__(self) -> str:
        parameters = list(self.model.parameters())
        size = sum(parameter.numel() for parameter in parameters) / 1e6
        return f"{size:.2f} M parameters, {str(self.compute.dtype).removeprefix('torch.')} on {parameters[0].device}"

    def by_example(self, encoded: EncodedExamples) -> tuple[NDArray[Any], ...]:
        """Returns `model.predictions` for all examples, in order; [n, ...] each. There must be at least one example."""
        order: list[NDArray[Any]] = []
        batch_outputs: list[tuple[NDArray[Any], ...]] = []
        for examples, part, tensors in self.batches(encoded):
            order.append(examples[part.examples])
            batch_outputs.append(tuple(tensor.cpu().numpy() for tensor in tensors))
        inverse = np.argsort(np.concatenate(order))
        return tuple(np.concatenate(output_batches)[inverse] for output_batches in zip(*batch_outputs, strict=True))

    def by_token(self, encoded: EncodedExamples) -> NDArray[Any]:
        """Returns predictions of a model that predicts per token; [tokens of `encoded.ids`, ...]."""
        outputs: NDArray[Any] | None = None
        for _, part, (tensor,) in self.batches(encoded):
            sources = part.sources.ravel()
            values = tensor.cpu().numpy()
            if outputs is None:
                outputs = np.zeros((len(encoded.ids), *values.shape[1:]), values.dtype)
            outputs[sources[sources >= 0]] = values[sources >= 0]
        assert outputs is not None
        return outputs

    @torch.no_grad()
    def batches(self, encoded: EncodedExamples) -> Iterator[tuple[NDArray[Any], PackedBatch, tuple[Tensor, ...]]]:
        model = self.model
        compute = self.compute
        was_training = model.training
        device = next(model.parameters()).device
        if was_training:
            model.eval()
        order = np.argsort(encoded.lengths, kind="stable")
        ends = np.cumsum(encoded.lengths[order]) // BATCH_TOKENS[device.type]
        if self.batch_size:
            ends = np.arange(len(order)) // self.batch_size
        pending = np.split(order, np.flatnonzero(np.diff(ends)) + 1)[::-1]
        with (self.casts or _casts(model, compute, device)).current():
            while pending:
                if self.before_batch is not None:
                    self.before_batch()
                examples = pending.pop()
                results = []
                try:
                    for part in pack(encoded, examples, are_alike=True, in_one_row=compute.computes_segments(device)):
                        with use_compute(compute):
                            tensors = model.predictions(Inputs.of(part, device), compute)
                        if compute.dtype == torch.float16 and any(tensor.isnan().any() for tensor in tensors):
                            raise InputError('activations exceed 65504, the maximum of fp16; set precision = "fp32"')
                        results.append((examples, part, tensors))
                except (RuntimeError, MemoryError) as error:
                    if len(examples) < 2 or not is_out_of_memory(error):
                        raise
                    # Split this batch and the following ones, which are longer, in half.
                    halves = (np.array_split(batch, 2)[::-1] for batch in (*pending, examples))
                    pending = [half for pair in halves for half in pair if len(half)]
                    results = []
                yield from results
        if was_training:
            model.train()


def _casts(model: EncoderWithHead, compute: ComputeConfig, device: torch.device) -> WeightCasts:
    return WeightCasts(model.encoder, compute.dtype, device.type == "cpu", without_gradient=True)


def choose_inference(model: EncoderWithHead, device: torch.device, precision: str = AUTO) -> tuple[Inference, str]:
    """Returns the settings for inference and a line for the user; on a CPU, chosen by a short measurement."""
    shape = dataclasses.replace(model.shape, attention_dropout=0.0)
    note = ""
    matmul = fastest_matmul(shape, device)
    chosen = choose_precision(precision, device)

    def compute_in(name: str) -> ComputeConfig:
        return resolve_compute(shape, device, name, matmul, AUTO)

    if chosen == AUTO:
        length = min(_SAMPLE_LENGTH, shape.max_positions)
        ids = np.random.default_rng(0).integers(shape.vocab_size, size=_SAMPLE_ROWS * length, dtype=np.int32)
        encoded = EncodedExamples(ids, np.zeros_like(ids), np.arange(_SAMPLE_ROWS + 1) * length, 0, ())

        def run(name: str) -> None:
            collections.deque(Inference(model, compute_in(name)).batches(encoded), maxlen=0)

        seconds = shortest_times({name: partial(run, name) for name in CPU_PRECISIONS})
        chosen = faster_precision(seconds)
        note = f"precision = auto: {chosen} ({len(encoded.ids)} tokens take {times_text(seconds)})"
    rows = (_SAMPLE_LENGTH, BATCH_TOKENS[device.type] // _SAMPLE_LENGTH)
    compute, lines = resolve_encoder(shape, compute_in(chosen), device, *rows)
    return Inference(model, compute, casts=_casts(model, compute, device)), "; ".join(filter(None, [note, *lines]))
