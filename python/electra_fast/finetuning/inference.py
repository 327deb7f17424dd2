"""A fine-tuned model's outputs for tokenized examples, in batches of similar lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from electra_fast.compute import ComputeConfig
from electra_fast.finetuning.batches import EncodedExamples, pack
from electra_fast.finetuning.model import SequenceClassifier
from electra_fast.finetuning.step import Inputs

# Tokens of a batch.
BATCH_TOKENS = 4096


@torch.no_grad()
def model_outputs(
    model: SequenceClassifier,
    encoded: EncodedExamples,
    compute: ComputeConfig,
    before_batch: Callable[[], None] = lambda: None,
) -> NDArray[Any]:
    """The model's outputs for all examples, in their order, without dropout; float32 [n, C].

    Calls `before_batch` before each batch, which may raise.
    """
    was_training, device = model.training, next(model.parameters()).device
    model.eval()
    outputs: list[NDArray[Any]] = []
    order = np.argsort(encoded.lengths, kind="stable")
    for examples in np.split(order, _cuts(encoded.lengths[order])):
        before_batch()
        for part in pack(encoded, examples):
            found = Inputs.of(part, device).forward(model, compute).cpu().numpy()
            outputs.append(found[np.argsort(part.examples)])
    model.train(was_training)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return np.concatenate(outputs)[back] if outputs else np.zeros((0, model.num_outputs), np.float32)


def _cuts(lengths: NDArray[Any]) -> NDArray[Any]:
    """Where batches of about `BATCH_TOKENS` end."""
    batch = np.cumsum(lengths) // BATCH_TOKENS
    return np.flatnonzero(np.diff(batch)) + 1
