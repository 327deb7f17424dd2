"""Every operation of the networks: contract, eager reference, dispatch to kernels.

The reference is the specification; a kernel or backend may change speed, never meaning. Weights are
kept in fp32 and cast here, where they are used, to the dtype of the activations.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, M masked slots, V vocabulary,
E embedding, D hidden, N heads, H head width, F feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.sampling import sample_categorical_reference

ATTENTION_BACKENDS = ("sdpa", "varlen")


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels serve this tensor: on CUDA, nowhere else."""
    return x.is_cuda


@dataclass(frozen=True)
class Segments:
    """How a flat buffer of T = B*L tokens divides into attention segments.

    A token attends to the tokens of its own segment only. `mask_B1LL` (bool, True = attend) serves
    the backend `sdpa`, `cu_seqlens` (int32, [S+1], segment borders in the flat buffer, padding
    tails being segments of their own) the backend `varlen`.
    """

    num_rows: int
    length: int
    mask_B1LL: Tensor | None = None
    cu_seqlens: Tensor | None = None

    @classmethod
    def packed(cls, segment_ids_BL: Tensor, cu_seqlens: Tensor, backend: str) -> Segments:
        """Segments of packed rows: equal ids within a row attend to each other (0 = padding, likewise)."""
        num_rows, length = segment_ids_BL.shape
        if backend == "varlen":
            return cls(num_rows, length, cu_seqlens=cu_seqlens)
        mask_BLL = segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]
        return cls(num_rows, length, mask_B1LL=mask_BLL[:, None])

    @classmethod
    def padded(cls, num_rows: int, length: int, attention_mask_BL: Tensor | None) -> Segments:
        """One segment a row whose padding (0 in the mask) nobody attends to, as in `transformers`."""
        if attention_mask_BL is None:
            return cls(num_rows, length)
        return cls(num_rows, length, mask_B1LL=attention_mask_BL.bool()[:, None, None, :].expand(-1, 1, length, -1))


def choose_attention(requested: str, device: torch.device, dtype: torch.dtype, dropout: float) -> str:
    """Resolves `auto` to a backend's name; raises ValueError where the requested one can't serve.

    `varlen` (torch.nn.attention.varlen, flash attention over ragged segments) wants CUDA and 16-bit
    activations, and has no dropout. `sdpa` runs everywhere.
    """
    lacks = None
    if device.type != "cuda":
        lacks = f"a CUDA device, and this is {device.type}"
    elif dtype not in (torch.bfloat16, torch.float16):
        lacks = f"16-bit activations, and these are {dtype}; set train.precision = bf16"
    elif dropout > 0:
        lacks = "model.attention_dropout = 0.0"
    if requested == "varlen" and lacks:
        raise ValueError(f'model.attention = "varlen" needs {lacks}; or set model.attention = "sdpa"')
    if requested == "auto":
        return "sdpa" if lacks else "varlen"
    return requested


def attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float = 0.0) -> Tensor:
    """Softmax attention within segments, scale 1/sqrt(H); [T, N, H] each → [T, N, H]."""
    if segments.cu_seqlens is not None:
        return _varlen_attention(q_TNH, k_TNH, v_TNH, segments, dropout)
    num_tokens, num_heads, head_width = q_TNH.shape

    def rows(x_TNH: Tensor) -> Tensor:
        return x_TNH.view(segments.num_rows, segments.length, num_heads, head_width).transpose(1, 2)

    out_BNLH = F.scaled_dot_product_attention(
        rows(q_TNH), rows(k_TNH), rows(v_TNH), attn_mask=segments.mask_B1LL, dropout_p=dropout
    )
    return out_BNLH.transpose(1, 2).reshape(num_tokens, num_heads, head_width)


def _varlen_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, segments: Segments, dropout: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imported here: it loads flash attention

    if dropout > 0:
        raise ValueError('attention backend "varlen" has no dropout; set model.attention_dropout = 0.0')
    borders = segments.cu_seqlens
    assert borders is not None
    # A constant bound instead of the batch's longest segment: no sync with the device.
    out = varlen_attn(q_TNH, k_TNH, v_TNH, borders, borders, segments.length, segments.length)
    assert isinstance(out, Tensor)
    return out


def attention_reference(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`attention` written out, one segment after the other: what every backend must equal."""
    out_TNH = torch.zeros_like(q_TNH)
    scale = q_TNH.shape[-1] ** -0.5
    borders = cu_seqlens.tolist()
    for start, end in zip(borders, borders[1:], strict=False):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
        out_TNH[start:end] = ((q @ k.transpose(1, 2) * scale).softmax(-1) @ v).transpose(0, 1)
    return out_TNH


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
    """-log softmax(logits)[target] in fp32; [M, V], [M] → [M]."""
    return F.cross_entropy(logits_MV.float(), target_M.long(), reduction="none")


def generator_head(
    x_ME: Tensor,
    table_VE: Tensor,
    bias_V: Tensor,
    original_M: Tensor,
    slot_M: Tensor,
    seed_and_step: Tensor | None,
    temperature: float = 1.0,
    disallow_correct: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The generator's logits over its table, x @ table.T + bias, and all that is wanted of them.

    Args:
        x_ME: activations, after whatever the head does before the table.
        table_VE: the embedding table (fp32), cast to x's dtype; so is the bias.
        bias_V: the output bias (fp32).
        original_M: the true tokens, int64.
        slot_M: global numbers of the masked slots within the step, int64: the keys of the noise.
        seed_and_step: int64 [2] on x's device; None where no sample is wanted.
        temperature: of the samples; the cross-entropy is at 1.
        disallow_correct: whether samples avoid the true token.

    Returns:
        nll_M (fp32, differentiable in x, table and bias), sample_M (int64, None without a seed) of
        `sampling`, and correct_M (bool), whether the likeliest token is the true one.
    """
    arguments = (x_ME, table_VE, bias_V, original_M, slot_M, seed_and_step, temperature, disallow_correct)
    if has_kernels(x_ME):
        from electra_fast.kernels import generator_head as kernels  # imported here: of no use without a GPU

        return kernels.generator_head(*arguments)
    return generator_head_reference(*arguments)


def generator_head_reference(
    x_ME: Tensor,
    table_VE: Tensor,
    bias_V: Tensor,
    original_M: Tensor,
    slot_M: Tensor,
    seed_and_step: Tensor | None,
    temperature: float = 1.0,
    disallow_correct: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """`generator_head` in plain torch: the kernels' specification."""
    logits_MV = linear(x_ME, table_VE, bias_V)
    nll_M = masked_cross_entropy(logits_MV, original_M)
    logits_MV = logits_MV.detach()
    correct_M = logits_MV.argmax(-1) == original_M
    if seed_and_step is None:
        return nll_M, None, correct_M
    if temperature != 1.0:
        logits_MV = logits_MV.float() / temperature
    if disallow_correct:
        # As the published code: the true token's logit less 1000.
        penalty = torch.full_like(original_M, -1000, dtype=logits_MV.dtype)[:, None]
        logits_MV = logits_MV.scatter_add(1, original_M[:, None], penalty)
    return nll_M, sample_categorical_reference(logits_MV, slot_M, seed_and_step), correct_M


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """max(z, 0) - z*y + log1p(exp(-|z|)) in fp32, elementwise. Reference of the fused discriminator head."""
    z = logits.float()
    return z.clamp(min=0) - z * labels.float() + torch.log1p(torch.exp(-z.abs()))
