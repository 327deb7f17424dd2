"""Masked language modeling as in Appendix G of the paper: the discriminator scores the generator's candidates.

Each example is a text with one masked token. With D the discriminator's probability of "original" for a candidate x in
its context c, p_G the generator's probability, and a = (1 - p) / p unmasked tokens per masked one,

    p_data(x | c) = D p_G / (a (1 - D) + p_G),

and the prediction is the candidate with the largest p_data. p_G is the distribution that training samples from, at the
objective's temperature. If it excludes the original token (`disallow_correct`), the formula does not hold.

Shapes: C candidates, n tokens of a text, V vocabulary, D hidden.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.mixture import Corpora
from electra_fast.messages import say
from electra_fast.model.attention import AttentionMask
from electra_fast.model.model import Electra
from electra_fast.objectives.objective import Number
from electra_fast.progress import LINE_SECONDS

NUM_CANDIDATES = 100
"""Number of the generator's most likely tokens that the discriminator scores in the paper."""
# Rows per batch, which does not affect their contents.
_BATCH = 32
# Makes the masking `tokens`, which rounds up, mask one token per row.
_ONE_TOKEN = 1e-6


@dataclass(frozen=True)
class Example:
    """A text with one masked token.

    Args:
        ids_n: The generator's input, int32, with [MASK] at the position.
        types_n: Token types, int32.
        position: Position of the masked token.
        target: The original token.
    """

    ids_n: Tensor
    types_n: Tensor
    position: int
    target: int


def mlm_accuracy(
    model: Electra,
    corpora: Corpora,
    *,
    sequence_length: int,
    seed: int,
    num_examples: int,
    num_candidates: int = NUM_CANDIDATES,
) -> dict[str, Number]:
    """Measures how often a model in evaluation mode predicts a masked token correctly, in the first rows of corpora.

    There are at most `num_examples` examples, which depend only on the corpora, the sequence length and the seed. The
    context is the masked token's segment of its row. The discriminator scores `num_candidates` tokens.

    Returns:
        `mlm_accuracy`, `mlm_recall_at_100` (the true token is a candidate), `mlm_generator_accuracy` (the first
        candidate is correct; None if it is the model's prediction), and `mlm_examples`, the number of examples. All
        None, with 0 examples, for models other than a generator with or without a discriminator, and for a
        discriminator that never saw the original token as a sample (`objective.disallow_correct`).
    """
    networks = model.networks.keys()
    examples: list[Example] = []
    is_covered = networks == {"generator"} or not model.config.objective.disallow_correct
    if networks in ({"generator", "discriminator"}, {"generator"}) and is_covered:
        rows = _examples(corpora, sequence_length, seed)
        examples = list(itertools.islice(rows, num_examples))
    counts = _count(model, examples, num_candidates)
    rates: list[Number] = [count / len(examples) if examples else None for count in counts]
    return {
        "mlm_accuracy": rates[0],
        "mlm_recall_at_100": rates[1],
        "mlm_generator_accuracy": rates[2] if "discriminator" in networks else None,
        "mlm_examples": len(examples),
    }


@torch.no_grad()
def predict(model: Electra, example: Example, num_candidates: int) -> tuple[list[int], int]:
    """Returns the generator's most likely tokens in descending order, and the whole model's prediction."""
    device = next(model.parameters()).device
    hidden_1nD, _ = _hidden(model, "generator", example.ids_n[None].to(device), example)
    logits_V = model.generator_head(hidden_1nD[:, example.position], model.generator_embeddings.table)[0]
    log_p_V = F.log_softmax(logits_V.double(), dim=-1)
    log_p_C, candidates_C = log_p_V.topk(min(num_candidates, len(log_p_V)))
    if "discriminator" not in model.networks:
        return candidates_C.tolist(), int(candidates_C[0])
    ids_Cn = example.ids_n.to(device).repeat(len(candidates_C), 1)
    ids_Cn[:, example.position] = candidates_C.to(ids_Cn.dtype)
    hidden_CnD, positions_T = _hidden(model, "discriminator", ids_Cn, example)
    logits_T = model.discriminator_head(hidden_CnD.flatten(0, 1), positions_T)
    logits_C = logits_T.view(ids_Cn.shape)[:, example.position]
    log_p_C = F.log_softmax(logits_V.double() / model.config.objective.temperature, dim=-1)[candidates_C]
    scores_C = log_odds(log_p_C, logits_C.double(), model.config.data.mask_prob)
    return candidates_C.tolist(), int(candidates_C[scores_C.argmax()])


def log_odds(log_p_C: Tensor, logits_C: Tensor, mask_prob: float) -> Tensor:
    """Returns the logit of the candidates' p_data; fp64 [C] twice → fp64 [C].

    Our logits z are positive for "replaced", so D = 1 / (1 + exp z). Appendix G's D p / (a (1 - D) + p) then equals
    1 / (1 + exp(z) (a + p) / p). Its logit does not round to ties if the discriminator is certain.
    """
    unmasked_per_masked = (1 - mask_prob) / mask_prob
    return log_p_C - torch.log(unmasked_per_masked + log_p_C.exp()) - logits_C


def _count(model: Electra, examples: list[Example], num_candidates: int) -> list[int]:
    """Counts how often the prediction, any candidate and the first candidate are correct."""
    counts = [0, 0, 0]
    start = time.monotonic()
    last_line = start
    for number, example in enumerate(examples):
        candidates, prediction = predict(model, example, num_candidates)
        right = (prediction == example.target, example.target in candidates, candidates[0] == example.target)
        counts = [count + is_right for count, is_right in zip(counts, right, strict=True)]
        if (now := time.monotonic()) - last_line >= LINE_SECONDS:
            last_line = now
            done = number + 1
            eta = timedelta(seconds=round((now - start) / done * (len(examples) - done)))
            say(f"masked language modeling: {done}/{len(examples)} examples, eta {eta}")
    return counts


def _examples(corpora: Corpora, sequence_length: int, seed: int) -> Iterator[Example]:
    """Yields one example per row with a maskable token, for one pass."""
    loader = BatchLoader(
        corpora,
        sequence_length=sequence_length,
        batch_size=_BATCH,
        seed=seed,
        masking="tokens",
        mask_prob=_ONE_TOKEN,
        packing="best-fit",
        epochs=1,
    )
    for rows in loader:
        batch = to_torch(rows)
        for row in (batch["masked_weights"][:, 0] > 0).nonzero()[:, 0].tolist():
            column = int(batch["masked_positions"][row, 0])
            segments_L = batch["segment_ids"][row]
            inside_n = (segments_L == segments_L[column]).nonzero()[:, 0]
            yield Example(
                ids_n=batch["input_ids"][row, inside_n],
                types_n=batch["token_type_ids"][row, inside_n],
                position=column - int(inside_n[0]),
                target=int(batch["masked_ids"][row, 0]),
            )


def _hidden(model: Electra, role: str, ids_Bn: Tensor, example: Example) -> tuple[Tensor, Tensor]:
    """Returns the hidden states of an example's texts, fp32 [B, n, D], and the positions of all tokens, [B * n]."""
    num_rows, length = ids_Bn.shape
    window = model.config.model.local_attention
    mask = AttentionMask.padded(num_rows, length, torch.ones_like(ids_Bn) if window else None, window)
    positions_T = torch.arange(length, device=ids_Bn.device).repeat(num_rows)
    types_T = example.types_n.to(ids_Bn.device).repeat(num_rows)
    hidden_TD = model.hidden(role, ids_Bn.flatten(), positions_T, types_T, mask, torch.float32)
    return hidden_TD.view(num_rows, length, -1), positions_T
