"""A fine-tuned model's predictions for tokenized examples, in batches of similar lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from electra_fast.compute import ComputeConfig
from electra_fast.finetuning.batches import EncodedExamples, PackedBatch, pack
from electra_fast.finetuning.inputs import Inputs
from electra_fast.finetuning.model import EncoderWithHead

# Tokens of a batch.
BATCH_TOKENS = 4096


def example_predictions(
    model: EncoderWithHead,
    encoded: EncodedExamples,
    compute: ComputeConfig,
    before_batch: Callable[[], None] = lambda: None,
) -> tuple[NDArray[Any], ...]:
    """What `model.predictions` gives for all examples, in their order, without dropout; [n, ...] each.

    There must be an example. Calls `before_batch` before each batch, which may raise.
    """
    order: list[NDArray[Any]] = []
    found: list[tuple[NDArray[Any], ...]] = []
    for examples, part, tensors in _batches(model, encoded, compute, before_batch):
        order.append(examples[part.examples])
        found.append(tuple(tensor.cpu().numpy() for tensor in tensors))
    back = np.argsort(np.concatenate(order))
    return tuple(np.concatenate(each)[back] for each in zip(*found, strict=True))


def token_predictions(
    model: EncoderWithHead,
    encoded: EncodedExamples,
    compute: ComputeConfig,
    before_batch: Callable[[], None] = lambda: None,
) -> NDArray[Any]:
    """As `example_predictions` for a model whose predictions are those of tokens; [tokens of `encoded.ids`, ...]."""
    outputs: NDArray[Any] | None = None
    for _, part, (tensor,) in _batches(model, encoded, compute, before_batch):
        sources, values = part.sources.ravel(), tensor.cpu().numpy()
        if outputs is None:
            outputs = np.zeros((len(encoded.ids), *values.shape[1:]), values.dtype)
        outputs[sources[sources >= 0]] = values[sources >= 0]
    assert outputs is not None
    return outputs


@torch.no_grad()
def _batches(
    model: EncoderWithHead, encoded: EncodedExamples, compute: ComputeConfig, before_batch: Callable[[], None]
) -> Iterator[tuple[NDArray[Any], PackedBatch, tuple[Tensor, ...]]]:
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    order = np.argsort(encoded.lengths, kind="stable")
    for examples in np.split(order, _cuts(encoded.lengths[order])):
        before_batch()
        for part in pack(encoded, examples, are_alike=True):
            yield examples, part, model.predictions(Inputs.of(part, device), compute)
    model.train(was_training)


def _cuts(lengths: NDArray[Any]) -> NDArray[Any]:
    """Where batches of about `BATCH_TOKENS` end."""
    batch = np.cumsum(lengths) // BATCH_TOKENS
    return np.flatnonzero(np.diff(batch)) + 1
