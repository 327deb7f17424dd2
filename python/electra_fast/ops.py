"""Every operation of the networks but attention: contract, eager reference, dispatch to kernels.

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

from electra_fast.kernels import gather_rows as row_kernels
from electra_fast.sampling import philox, sample_categorical

# What `discriminator_loss` counts, in this order, all over valid tokens.
COUNTS = ("discriminator_correct", "true_positives", "predicted_positives", "replaced", "tokens")


def has_kernels(x: Tensor) -> bool:
    """Whether Triton kernels serve this tensor: on CUDA, nowhere else."""
    return x.is_cuda


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; [..., in] → [..., out]."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def gather_rows(x_RD: Tensor, index_M: Tensor) -> Tensor:
    """x[index], of tables and at masked slots; its gradient adds in a fixed order. [R, D], [M] → [M, D]."""
    taken_MD: Tensor = row_kernels.gather_rows(x_RD, index_M)
    return taken_MD


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
    token_TE, position_TE, type_TE = (gather_rows(table, each) for each, table in zip(ids, tables, strict=True))
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
    """-log softmax(logits)[target] in fp32; [M, V], [M] → [M]."""
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
    """The discriminator's head without norm: dense, gelu, one logit per token; [T, D] → fp32 [T].

    With kernels the dense layer's bias, the GELU and the classifier are one pass, in fp32.
    """
    if has_kernels(x_TD):
        from electra_fast.kernels import discriminator_head

        logits_T: Tensor = discriminator_head.gelu_logit(linear(x_TD, dense_weight), dense_bias, weight_1D, bias_1)
        return logits_T
    return token_logits(bias_gelu(x_TD, dense_weight, dense_bias), weight_1D, bias_1)


def token_logits(x_TD: Tensor, weight_1D: Tensor, bias_1: Tensor) -> Tensor:
    """The discriminator's classifier, in fp32 whatever x's dtype; [T, D] → fp32 [T].

    Early in training logits differ by less than bf16 resolves: rounded, most of them would tie.
    """
    return F.linear(x_TD.float(), weight_1D, bias_1).squeeze(-1)


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
    return nll_M, sample_categorical(logits_MV, slot_M, seed_and_step), correct_M


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """max(z, 0) - z*y + log1p(exp(-|z|)) in fp32, elementwise."""
    z = logits.float()
    return z.clamp(min=0) - z * labels.float() + torch.log1p(torch.exp(-z.abs()))
