"""Every operation of the networks: contract, eager reference, dispatch to kernels.

The reference is the specification; a kernel or backend may change speed, never meaning. Weights are
kept in fp32 and cast here, where they are used, to the dtype of the activations.

Shapes: B rows, L row length, T = B*L tokens of the flat buffer, M masked slots, V vocabulary,
E embedding, D hidden, N heads, H head width, F feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.sampling import philox

ATTENTION_BACKENDS = ("sdpa", "varlen")


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


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels serve this tensor: on CUDA, nowhere else."""
    return x.is_cuda


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; [..., in] → [..., out]."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@dataclass(frozen=True)
class Dropout:
    """What a dropout zeroes: each element with `probability`; the rest is divided by 1 - probability.

    With a key (int64 [3] on the device: seed, step, and the number within the step of the first token
    at hand) the mask is a pure function of key, site, token and column: the same however a step is
    cut into micro-batches, fresh at each replay of a captured graph, drawn again in the backward pass
    and never stored. Every place in the networks has a `site` of its own. Without a key torch's own
    generator draws the mask.
    """

    probability: float = 0.0
    key: Tensor | None = None
    site: int = 0

    def at(self, site: int) -> Dropout:
        """The dropout of another place, `site` places further on."""
        return replace(self, site=self.site + site)


def dropout(x_TD: Tensor, by: Dropout) -> Tensor:
    """Dropout of [T, D], by a key where there is one."""
    if by.probability and by.key is not None and has_kernels(x_TD):
        from electra_fast.kernels import dropout as kernels

        kept: Tensor = kernels.dropout(x_TD, by.probability, by.key, by.site)
        return kept
    return dropout_reference(x_TD, by)


def dropout_reference(x_TD: Tensor, by: Dropout) -> Tensor:
    """`dropout` in plain torch: with a key, four neighbouring columns share one draw of Philox.

    Its counter is (column // 4, token within the step, step, site); 2^16 is added to the site, for the
    sampler has the words 0 and 1 in that place. An element drops if the upper 24 bits of its word are
    below probability * 2^24.
    """
    if not by.probability or by.key is None:
        return F.dropout(x_TD, by.probability)
    (num_tokens, width), (seed, step, first_token) = x_TD.shape, by.key.unbind()
    token_T1 = (torch.arange(num_tokens, device=x_TD.device)[:, None] + first_token) & 0xFFFFFFFF
    quad = torch.arange(-(-width // 4), device=x_TD.device)
    site = torch.full_like(step, by.site + 2**16)
    words = philox((quad, token_T1, step, site), (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    word_TD = torch.stack(words, dim=-1).flatten(1)[:, :width]
    threshold = round(by.probability * 2**24)
    return torch.where(word_TD >> 8 >= threshold, x_TD * (2**24 / (2**24 - threshold)), 0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm over the last dimension; statistics in fp32 whatever x's dtype."""
    if has_kernels(x):
        from electra_fast.kernels import residual_norm as kernels

        normed: Tensor = kernels.layer_norm(x, weight, bias, epsilon)
        return normed
    return layer_norm_reference(x, weight, bias, epsilon)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """`layer_norm` in plain torch."""
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), None if bias is None else bias.to(x.dtype), epsilon)


def residual_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual_TD: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    epsilon: float,
    by: Dropout,
) -> Tensor:
    """LayerNorm(residual + dropout(x @ weight.T + bias)): the end of every post-norm sublayer, [T, F] → [T, D].

    The kernel adds the bias, for then its gradient comes out of the backward pass for nothing.
    """
    if has_kernels(x) and (by.key is not None or not by.probability):
        from electra_fast.kernels import residual_norm as kernels

        h_TD, key = linear(x, weight), by.key if by.probability else None
        normed_TD: Tensor = kernels.residual_norm(
            h_TD, bias, residual_TD, norm_weight, norm_bias, epsilon, by.probability, key, by.site
        )[0]
        return normed_TD
    h_TD = linear(x, weight, bias)
    z_TD = residual_TD + (dropout_reference(h_TD, by) if by.probability else h_TD)
    return layer_norm_reference(z_TD, norm_weight, norm_bias, epsilon)


def embedding_norm(
    ids: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    by: Dropout,
) -> Tensor:
    """dropout(LayerNorm(token + position + type embedding)) in `dtype`.

    `ids` are integers [T] of tokens, positions and types (0 or 1), `tables` fp32 [V, E], [L, E], [2, E].
    """
    if has_kernels(ids[0]) and (by.key is not None or not by.probability):
        from electra_fast.kernels import embedding_norm as kernels

        key = by.key if by.probability else None
        normed_TE: Tensor = kernels.embedding_norm(
            *ids, *tables, norm_weight, norm_bias, epsilon, dtype, by.probability, key, by.site
        )[0]
        return normed_TE
    return embedding_norm_reference(ids, tables, norm_weight, norm_bias, epsilon, dtype, by)


def embedding_norm_reference(
    ids: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    norm_weight: Tensor,
    norm_bias: Tensor,
    epsilon: float,
    dtype: torch.dtype,
    by: Dropout,
) -> Tensor:
    """`embedding_norm` in plain torch."""
    token_TE, position_TE, type_TE = (F.embedding(each, table) for each, table in zip(ids, tables, strict=True))
    x_TE = (token_TE + position_TE + type_TE).to(dtype)
    return dropout_reference(layer_norm_reference(x_TE, norm_weight, norm_bias, epsilon), by)


def bias_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """gelu(x @ weight.T + bias) with the exact (erf) GELU; [T, D] → [T, F]."""
    if has_kernels(x):
        from electra_fast.kernels import bias_gelu as kernels

        activated: Tensor = kernels.bias_gelu(linear(x, weight), bias)
        return activated
    return F.gelu(linear(x, weight, bias))


def geglu(x: Tensor, weight: Tensor) -> Tensor:
    """gelu(a) * b with [a, b] = x @ weight.T; [T, D] → [T, F], weight [2F, D], as in ModernBERT."""
    if has_kernels(x):
        from electra_fast.kernels import bias_gelu as kernels

        gated: Tensor = kernels.geglu(linear(x, weight))
        return gated
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
