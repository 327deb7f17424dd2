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


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """max(z, 0) - z*y + log1p(exp(-|z|)) in fp32, elementwise. Reference of the fused discriminator head."""
    z = logits.float()
    return z.clamp(min=0) - z * labels.float() + torch.log1p(torch.exp(-z.abs()))
