"""Every operation of the networks but attention: contract, eager reference, dispatch to kernels.

The reference is the specification; a kernel or backend may change speed, never meaning. Weights are
kept in fp32 and cast here, where they are used, to the dtype of the activations.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, M masked slots, V vocabulary,
E embedding, D hidden, N heads, H head width, F feed-forward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# What `discriminator_loss` counts, in this order, all over valid tokens.
COUNTS = ("discriminator_correct", "true_positives", "predicted_positives", "replaced", "tokens")


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels serve this tensor: on CUDA, nowhere else."""
    return x.is_cuda


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; [..., in] → [..., out]."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension; statistics in fp32 whatever x's dtype."""
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), None if bias is None else bias.to(x.dtype), epsilon)


def residual_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dropout: float
) -> Tensor:
    """LayerNorm(residual + dropout(x)): the end of every post-norm sublayer."""
    return layer_norm(residual + F.dropout(x, dropout) if dropout else residual + x, weight, bias, epsilon)


def bias_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x @ weight.T + bias) with the exact (erf) GELU."""
    return F.gelu(linear(x, weight, bias))


def geglu(x: Tensor, weight: Tensor) -> Tensor:
    """gelu(a) * b with [a, b] = x @ weight.T; weight [2F, D], as in ModernBERT."""
    activated, gate = linear(x, weight).chunk(2, dim=-1)
    return F.gelu(activated) * gate


def rotary_angles(position_ids_T: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, 1, H] in fp32 of the rotary angles (Su et al., 2021; half-split pairs)."""
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device=position_ids_T.device) / head_width
    angles = position_ids_T[:, None].float() * (theta**-exponents)
    angles_T1H = torch.cat((angles, angles), dim=-1)[:, None, :]
    return angles_T1H.cos(), angles_T1H.sin()


def rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Applies rotary positions in fp32."""
    x = x_TNH.float()
    first, second = x.chunk(2, dim=-1)
    return (x * cos_T1H + torch.cat((-second, first), dim=-1) * sin_T1H).to(x_TNH.dtype)


def masked_cross_entropy(logits_MV: Tensor, target_M: Tensor) -> Tensor:
    """-log softmax(logits)[target] in fp32; [M, V], [M] → [M]. Reference of the fused generator head."""
    return F.cross_entropy(logits_MV.float(), target_M.long(), reduction="none")


def corrupt(masked_ids_BL: Tensor, position_M: Tensor, original_M: Tensor, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    """The discriminator's input and labels: originals with the samples scattered in, and where they differ.

    Where a position was drawn more than once its samples become floor(mean), an arbitrary token, as
    in the published code (`scatter_update`). A sample that equals the original counts as original.

    Args:
        masked_ids_BL: the generator's input, integers.
        position_M: where each slot lies in the flat buffer, int64; T for an unused one. Slots come
            row by row, the same number for each row, and lie in their own row.
        original_M: the token that each slot masks, int64.
        sample_M: the token that the generator drew there, int64.

    Returns:
        corrupted ids, [T] in the masked ids' dtype, and bool [T], whether a token was replaced.
    """
    if has_kernels(masked_ids_BL):
        from electra_fast.kernels import corrupt  # imported here: Triton is of no use without a GPU

        pair: tuple[Tensor, Tensor] = corrupt.corrupt(masked_ids_BL, position_M, original_M, sample_M)
        return pair
    return corrupt_reference(masked_ids_BL, position_M, original_M, sample_M)


def corrupt_reference(
    masked_ids_BL: Tensor, position_M: Tensor, original_M: Tensor, sample_M: Tensor
) -> tuple[Tensor, Tensor]:
    """`corrupt` in plain torch: unused slots write to a spare place behind the buffer."""
    num_tokens = masked_ids_BL.numel()
    spare = torch.zeros(num_tokens + 1, dtype=torch.int64, device=masked_ids_BL.device)
    original_T = spare.clone()
    original_T[:num_tokens] = masked_ids_BL.flatten()
    original_T = original_T.scatter(0, position_M, original_M)[:num_tokens]
    total_T = spare.index_add(0, position_M, sample_M)[:num_tokens]
    draws_T = spare.index_add(0, position_M, torch.ones_like(sample_M))[:num_tokens]
    corrupted_T = torch.where(draws_T > 0, total_T // draws_T.clamp(min=1), original_T)
    return corrupted_T.to(masked_ids_BL.dtype), corrupted_T != original_T


def replaced_logits(
    x_TD: Tensor, dense_weight: Tensor, dense_bias: Tensor, weight_1D: Tensor, bias_1: Tensor
) -> Tensor:
    """The discriminator's head without norm: dense, gelu, one logit a token; [T, D] → fp32 [T].

    With kernels the dense layer's bias, the GELU and the classifier are one pass, in fp32.
    """
    if has_kernels(x_TD):
        from electra_fast.kernels import discriminator_head

        logits_T: Tensor = discriminator_head.gelu_logit(linear(x_TD, dense_weight), dense_bias, weight_1D, bias_1)
        return logits_T
    return linear(bias_gelu(x_TD, dense_weight, dense_bias), weight_1D, bias_1).squeeze(-1).float()


def discriminator_loss(logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    """Binary cross-entropy summed over valid tokens, and what was right; positive = "replaced".

    Returns the sum (fp32 scalar) and int64 [5], the `COUNTS`.
    """
    if has_kernels(logits_T):
        from electra_fast.kernels import discriminator_head

        pair: tuple[Tensor, Tensor] = discriminator_head.discriminator_loss(logits_T, replaced_T, valid_T)
        return pair
    return discriminator_loss_reference(logits_T, replaced_T, valid_T)


def discriminator_loss_reference(logits_T: Tensor, replaced_T: Tensor, valid_T: Tensor) -> tuple[Tensor, Tensor]:
    """`discriminator_loss` in plain torch."""
    loss = (binary_cross_entropy(logits_T, replaced_T) * valid_T).sum()
    predicted_T, replaced_T = (logits_T.detach() > 0) & valid_T, replaced_T & valid_T
    correct_T = (predicted_T == replaced_T) & valid_T
    return loss, torch.stack([x.sum() for x in (correct_T, predicted_T & replaced_T, predicted_T, replaced_T, valid_T)])


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """max(z, 0) - z*y + log1p(exp(-|z|)) in fp32, elementwise."""
    z = logits.float()
    return z.clamp(min=0) - z * labels.float() + torch.log1p(torch.exp(-z.abs()))
