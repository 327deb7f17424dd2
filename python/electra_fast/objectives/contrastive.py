"""The sentence-level contrastive loss of the paper's Appendix H, which detects changed segments.

Shapes: B rows, L row length, T = B*L flat tokens, M masked slots, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from electra_fast.model.model import Electra
from electra_fast.objectives.objective import NetworkInputs, RngKey, Totals, random_words
from electra_fast.ops import operations as ops

WHOLE = 0.2
"""The probability that a segment is left unchanged."""
_STREAM = 4


def keep_some_whole(inputs: NetworkInputs, sample_M: Tensor, rng_key: RngKey) -> Tensor:
    """Replaces the samples by the original tokens in a fifth of the attention segments; int64 [M].

    The choice depends on seed, step, row within the step and the column of the segment's first token.
    """
    is_whole_T = (random_words(rng_key, _first_column(inputs), _STREAM) < round(WHOLE * 2**32)).flatten()
    return torch.where(inputs.slots.of_tokens(is_whole_T), inputs.slots.target_M, sample_M)


def sentence_loss(
    model: Electra, inputs: NetworkInputs, hidden_TD: Tensor, replaced_T: Tensor
) -> tuple[Tensor, Totals]:
    """Sums the binary cross-entropy of `sentence_head` over all [CLS]; positive: a token of the segment is replaced."""
    first_BL = _first_column(inputs)
    num_rows, length = first_BL.shape
    first_T = (first_BL + torch.arange(num_rows, device=first_BL.device)[:, None] * length).flatten()
    has_replaced_T = torch.zeros_like(first_T).index_add(0, first_T, replaced_T.long()) > 0
    is_cls_T = (inputs.context[0] == 0) & inputs.valid_T
    logits_T = model.sentence_head(hidden_TD)
    loss = (ops.binary_cross_entropy(logits_T, has_replaced_T) * is_cls_T).sum()
    return loss, {
        "contrastive_loss": loss.detach(),
        "segments": is_cls_T.sum(),
        "contrastive_correct": (((logits_T.detach() > 0) == has_replaced_T) & is_cls_T).sum(),
    }


def _first_column(inputs: NetworkInputs) -> Tensor:
    """Returns the column of each token's [CLS], from which its position counts; int64 [B, L]."""
    positions_BL = inputs.context[0].view(inputs.masked_ids_BL.shape).long()
    return torch.arange(positions_BL.shape[1], device=positions_BL.device) - positions_BL
