"""CPU forms of operations: few passes over memory, few temporaries, no copies of gradients.

Contracts and references are in `operations`. torch.compile traces the references instead and fuses them itself;
only the generator's head stays a single operator.

Shapes: T tokens, M masked slots, V vocabulary, E embedding, D hidden, N heads, H head dimension, F feed-forward;
S segments, K slots of the padded segments or tiles of the sampler, c segments of a group, P their padded length;
J = 2*L - 1 distances of tokens in a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from electra_fast.ops.sampling import TILE, draw_noise, modify_logits, sample_categorical, take_along_rows

# Logits that the generator's head computes at once: large enough for efficient products, small enough for the caches.
CHUNK_BYTES = 8 * 2**20
# Gradients of logits that are multiplied at once.
GROUP_BYTES = 64 * 2**20
# The longest row whose attention weights are stored for the backward pass, since their number grows with its square.
# For longer rows, `scaled_dot_product_attention` computes them again; with dropout, they are always stored.
MAX_ROW = 512
# Scores that attention computes at once, so that they stay in the caches.
SCORES_BYTES = 2**20
# Segments are padded to multiples of this length.
MULTIPLE = 16
# In shorter rows, padded segments save too few scores to pay for their operations.
MIN_ROW = 128


def define_operator(name: str, dispatch_key: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Registers an operator into which torch.compile does not trace; returns its qualified name.

    `torch.library.custom_op` does the same, but its calls import the compiler, which delays the first step by seconds.
    """
    name = f"electra_fast::{name}"
    torch.library.define(name, torch.library.infer_schema(implementation, mutates_args=()))
    torch.library.impl(name, dispatch_key, implementation)
    torch.library.register_fake(name, fake)
    return name


def rotary_qkv(x_TD: Tensor, weight_3DD: Tensor, cos: Tensor, sin: Tensor, num_heads: int) -> Tensor:
    """`ops.rotary_qkv` as one tensor [T, 3D], with the same permutation of dimensions in each query and key head."""
    qkv_TX: Tensor = _RotaryQKV.apply(x_TD, weight_3DD, torch.complex(cos, sin), num_heads)
    return qkv_TX


class _RotaryQKV(torch.autograd.Function):
    """The product with reordered rows of weights, so that a rotation multiplies adjacent pairs as complex numbers.

    Scores are sums over the head's dimensions, so a common order in queries and keys does not change them.
    """

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_3DD: Tensor, cis: Tensor, num_heads: int) -> Tensor:
        weight_3DD = _pair_rows(weight_3DD, num_heads, inverse=False).to(x_TD.dtype)
        ctx.save_for_backward(x_TD, weight_3DD, cis)
        ctx.num_heads = num_heads
        qkv_TD = F.linear(x_TD, weight_3DD)
        _rotate_(qkv_TD, cis, num_heads)
        return qkv_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_3DD, cis = ctx.saved_tensors
        grad_TD = grad_TD.clone()
        _rotate_(grad_TD, cis.conj(), ctx.num_heads)
        return grad_TD @ weight_3DD, _pair_rows((grad_TD.t() @ x_TD).float(), ctx.num_heads, inverse=True), None, None


def _pair_rows(weight_3DD: Tensor, num_heads: int, *, inverse: bool) -> Tensor:
    """Reorders rows of queries and keys within each head: dimensions i and i + H/2 become adjacent, or the inverse."""
    width = weight_3DD.shape[1]
    rows = (2 * num_heads, -1, 2, width) if inverse else (2 * num_heads, 2, -1, width)
    return torch.cat((weight_3DD[: 2 * width].view(rows).transpose(1, 2).reshape(-1, width), weight_3DD[2 * width :]))


def _rotate_(qkv_TD: Tensor, cis: Tensor, num_heads: int) -> None:
    """Multiplies the pairs of queries and keys by cis, [T, 1, H/2], in place and in fp32."""
    qk_TD = qkv_TD[:, : qkv_TD.shape[1] // 3 * 2]
    pairs = qk_TD.float().view(qkv_TD.shape[0], 2 * num_heads, -1, 2)
    torch.view_as_complex(pairs).mul_(cis)
    if qkv_TD.dtype != torch.float32:
        qk_TD.copy_(pairs.view(qk_TD.shape))


def unkeyed_dropout(x: Tensor, probability: float) -> Tensor:
    """`ops.dropout` without a key, with a mask from `_dropout_mask`."""
    return x * _dropout_mask(x, probability)


def _dropout_mask(like: Tensor, probability: float) -> Tensor:
    """Returns 0 with a probability rounded to 2^-16, else the factor that preserves the mean; shaped like `like`.

    Each element uses 16 bits of torch's generator, whereas `F.dropout` draws a double. Integer arithmetic is
    vectorized, comparisons are not; a factor of 16 bits is treated as an integer too.
    """
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    num_dropped = round(probability * 2**16)
    first_kept = num_dropped - 2**15
    bits = words.view(torch.int16)[: like.numel()].view(like.shape).clamp_(first_kept - 1, first_kept)
    mask = bits.sub_(first_kept - 1)
    factor = 2**16 / (2**16 - num_dropped)
    if like.dtype.itemsize == 2:
        return mask.mul_(torch.tensor(factor, dtype=like.dtype).view(torch.int16).item()).view(like.dtype)
    return mask.to(like.dtype).mul_(factor)


def self_attention(
    qkv_TX: Tensor,
    bias_B1LL: Tensor | None,
    num_rows: int,
    num_heads: int,
    dropout: float = 0.0,
    relative: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Softmax attention within rows of equal length, with dropout of the weights; [T, 3D] → [T, D].

    `bias_B1LL`, in qkv's dtype, is added to the scores: a large negative number masks a pair of tokens.
    `relative` has keys and queries of relative positions, [N, J, H] each (`RelativePositions.by_distance`); their
    scores with the contents are added too.
    """
    out_TD: Tensor = _SelfAttention.apply(qkv_TX, bias_B1LL, num_rows, num_heads, dropout, *(relative or (None, None)))
    return out_TD


class _SelfAttention(torch.autograd.Function):
    """Batched products of whole rows, in chunks that fit into the caches.

    `scaled_dot_product_attention` multiplies in small blocks. For rows of up to 512 tokens it is no faster with MKL in
    fp32, and 1.4 to 15 times slower with oneDNN (bench/LOG.md). It has no fast form with dropout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv_TX: Tensor,
        bias_B1LL: Tensor | None,
        num_rows: int,
        num_heads: int,
        dropout: float,
        keys_NJH: Tensor | None,
        queries_NJH: Tensor | None,
    ) -> Tensor:
        length = qkv_TX.shape[0] // num_rows
        width = qkv_TX.shape[1] // 3
        out_TD = qkv_TX.new_empty(len(qkv_TX), width)
        weights_BNLL = qkv_TX.new_empty(num_rows, num_heads, length, length)
        drop_BNLL = _dropout_mask(weights_BNLL, dropout) if dropout else None
        num_terms = 1 if keys_NJH is None else 3
        out_BLNH = out_TD.view(num_rows, length, num_heads, -1)
        scale = (num_terms * width // num_heads) ** -0.5
        for rows, (q, k, v) in _row_chunks(qkv_TX, num_rows, num_heads):
            weights = weights_BNLL[rows].flatten(0, 1)
            scores = torch.empty_like(weights)
            if bias_B1LL is not None:
                scores.view(-1, num_heads, length, length).copy_(bias_B1LL[rows])
            scores.baddbmm_(q, k.mT, beta=0 if bias_B1LL is None else 1, alpha=scale)
            if keys_NJH is not None and queries_NJH is not None:
                scores_NcLL = scores.view(-1, num_heads, length, length).transpose(0, 1)
                of_keys = _by_head(q, num_heads) @ keys_NJH.mT
                of_queries = _by_head(k, num_heads) @ queries_NJH.mT
                scores_NcLL.add_(pairs(of_keys.unflatten(1, (-1, length))), alpha=scale)
                scores_NcLL.add_(pairs(of_queries.unflatten(1, (-1, length))).mT, alpha=scale)
            torch.softmax(scores, -1, out=weights)
            if drop_BNLL is not None:
                weights = weights * drop_BNLL[rows].flatten(0, 1)
            out_BLNH[rows].copy_(_by_token(weights @ v, num_heads))
        ctx.save_for_backward(qkv_TX, weights_BNLL, drop_BNLL, keys_NJH, queries_NJH)
        ctx.num_rows = num_rows
        ctx.num_heads = num_heads
        ctx.scale = scale
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TX, weights_BNLL, drop_BNLL, *relative = ctx.saved_tensors
        num_rows = ctx.num_rows
        num_heads = ctx.num_heads
        scale = ctx.scale
        grad_TX = torch.empty_like(qkv_TX)
        grad_BL3NH = grad_TX.view(num_rows, -1, 3, num_heads, grad_TD.shape[1] // num_heads)
        grad_BNLH = grad_TD.view(num_rows, -1, num_heads, grad_BL3NH.shape[-1]).transpose(1, 2)
        precision = torch.promote_types(qkv_TX.dtype, torch.float32)
        sums = [tensor if tensor is None else torch.zeros_like(tensor, dtype=precision) for tensor in relative]
        for rows, (q, k, v) in _row_chunks(qkv_TX, num_rows, num_heads):
            weights = weights_BNLL[rows].flatten(0, 1)
            grad = grad_BNLH[rows].flatten(0, 1)
            dropped = weights
            grad_weights = grad @ v.mT
            if drop_BNLL is not None:
                drop = drop_BNLL[rows].flatten(0, 1)
                dropped = weights * drop
                grad_weights.mul_(drop)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(scale)
            grads = (grad_scores @ k, grad_scores.mT @ q, dropped.mT @ grad)
            for x, grad_x, positions, total, of_pairs in zip(
                (q, k), grads[:2], relative, sums, (grad_scores, grad_scores.mT), strict=True
            ):
                if total is not None:
                    _add_gradients_of_positions(grad_x, total, of_pairs, x, positions)
            for out, tensor in zip(grad_BL3NH[rows].unbind(2), grads, strict=True):
                out.copy_(_by_token(tensor, num_heads))
        grad_relative = (tensor if tensor is None else tensor.to(qkv_TX.dtype) for tensor in sums)
        return grad_TX, None, None, None, None, *grad_relative


def _row_chunks(qkv_TX: Tensor, num_rows: int, num_heads: int) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Yields chunks of rows, with their queries, keys and values, [c*N, L, H] each."""
    length = qkv_TX.shape[0] // num_rows
    qkv_3BNLH = qkv_TX.view(num_rows, length, 3, num_heads, -1).permute(2, 0, 3, 1, 4)
    chunk = max(1, SCORES_BYTES // (num_heads * length * length * qkv_TX.element_size()))
    for start in range(0, num_rows, chunk):
        rows = slice(start, start + chunk)
        yield rows, tuple(part[rows].flatten(0, 1) for part in qkv_3BNLH)


def _by_token(x: Tensor, num_heads: int) -> Tensor:
    """[c*N, L, H] → [c, L, N, H], a view."""
    return x.view(-1, num_heads, *x.shape[1:]).transpose(1, 2)


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """[c*N, L, ...] → [N, c*L, ...]."""
    return x.view(-1, num_heads, *x.shape[1:]).transpose(0, 1).flatten(1, 2)


def pairs(scores_J: Tensor) -> Tensor:
    """Returns the scores of pairs of tokens from scores by distance; contiguous [..., L, J] → [..., L, L], a view.

    Column j - i + L - 1 of token i has its pair with token j. Each row of the square therefore begins one element
    earlier than the row before it: without the first L - 1 elements, at multiples of J - 1.
    """
    length, num_distances = scores_J.shape[-2:]
    if length == 1:
        return scores_J
    flat = scores_J.view(*scores_J.shape[:-2], -1)[..., length - 1 : length - 1 + length * (num_distances - 1)]
    return flat.view(*flat.shape[:-1], length, num_distances - 1)[..., :length]


def _add_gradients_of_positions(
    grad_x: Tensor, total_NJH: Tensor, grad_pairs: Tensor, x: Tensor, positions_NJH: Tensor
) -> None:
    """Adds the gradients of scores x @ positions.T, computed from the pairs' gradients, to `grad_x` and `total_NJH`.

    Shapes: x is [c*N, L, H]; its tokens are the rows of the pairs, [c*N, L, L].
    """
    num_heads, num_distances, _ = positions_NJH.shape
    x_NKH = _by_head(x, len(positions_NJH))
    grad_NKJ = x.new_zeros(num_heads, x_NKH.shape[1], num_distances)
    pairs_NcLL = pairs(grad_NKJ.unflatten(1, (-1, x.shape[1])))
    pairs_NcLL.copy_(grad_pairs.unflatten(0, (-1, num_heads)).transpose(0, 1))
    total_NJH.add_(grad_NKJ.mT @ x_NKH)
    grad_cNLH = (grad_NKJ @ positions_NJH).unflatten(1, pairs_NcLL.shape[1:3]).transpose(0, 1)
    grad_x.unflatten(0, (-1, num_heads)).add_(grad_cNLH)


def masking_bias(attends: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a bias of scores; it is finite, since a row with all scores -inf would become NaN."""
    return torch.zeros(attends.shape, dtype=dtype, device=attends.device).masked_fill_(~attends, torch.finfo(dtype).min)


# Attention within segments of different lengths. A packed row of several segments has a score for each pair of its
# tokens, and a mask then removes most of these. Here, segments of similar lengths are padded to one length and computed
# together as separate rows, with at most half the scores and dropout masks (bench/LOG.md).


class SegmentGroup(NamedTuple):
    """Segments that are padded to one length: their number, slots (c * P), and bias ([c, 1, 1 or P, P]; None: 0)."""

    num_segments: int
    num_slots: int
    bias: Tensor | None

    @property
    def length(self) -> int:
        """The padded length P."""
        return self.num_slots // self.num_segments


@dataclass(frozen=True)
class SegmentLayout:
    """The places of a flat buffer's tokens in padded segments.

    Args:
        groups: The groups, in the order of their slots.
        token_K: The token in each slot; in padding, the last token of its segment.
        slot_T: The slot of each token; 0 for tokens outside of segments.
        padding: The slots of padding.
        outside: The tokens outside of segments.
    """

    groups: tuple[SegmentGroup, ...]
    token_K: Tensor
    slot_T: Tensor
    padding: Tensor
    outside: Tensor

    @property
    def longest(self) -> int:
        """The largest padded length."""
        return self.groups[-1].length


def segment_layout(segment_ids: Tensor, cu_seqlens: Tensor, window: int | None, dtype: torch.dtype) -> SegmentLayout:
    """Returns the layout of the segments with these offsets, except segments of padding, whose id is 0.

    With a `window`, token i attends to token j if |i - j| <= window.
    """
    offsets = cu_seqlens.numpy().astype(np.int64)
    ids_T = segment_ids.numpy().ravel()
    starts = offsets[:-1]
    lengths = np.diff(offsets)
    is_text = (lengths > 0) & (ids_T[np.minimum(starts, len(ids_T) - 1)] > 0)
    starts = starts[is_text]
    lengths = lengths[is_text]
    padded = -(-lengths // MULTIPLE) * MULTIPLE
    groups = []
    tokens = []
    valid = []
    for length in np.unique(padded):
        chosen = padded == length
        position_P = np.arange(length)
        length_c1 = lengths[chosen, None]
        is_token_cP = position_P < length_c1
        attends_cPP = is_token_cP[:, None, None, :]
        if window is not None:
            attends_cPP = attends_cPP & (np.abs(position_P[:, None] - position_P) <= window)
        bias = None if attends_cPP.all() else masking_bias(torch.from_numpy(attends_cPP), dtype)
        groups.append(SegmentGroup(len(length_c1), is_token_cP.size, bias))
        tokens.append((starts[chosen, None] + np.minimum(position_P, length_c1 - 1)).ravel())
        valid.append(is_token_cP.ravel())
    token_K = np.concatenate(tokens)
    is_token_K = np.concatenate(valid)
    slot_T = np.zeros(len(ids_T), np.int64)
    slot_T[token_K[is_token_K]] = np.flatnonzero(is_token_K)
    outside = np.flatnonzero(ids_T == 0)
    padding = np.flatnonzero(~is_token_K)
    return SegmentLayout(tuple(groups), *map(torch.from_numpy, (token_K, slot_T, padding, outside)))


def segment_attention(
    qkv_TX: Tensor,
    layout: SegmentLayout,
    num_heads: int,
    dropout: float = 0.0,
    relative: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`self_attention` within segments; [T, 3D] → [T, D]. The result is arbitrary for tokens outside of segments.

    `relative` is for rows of `layout.longest` tokens.
    """
    qkv_KX: Tensor = _Rearranged.apply(qkv_TX, layout.token_K, layout.slot_T, layout.outside)
    parts = zip(torch.split(qkv_KX, [group.num_slots for group in layout.groups]), layout.groups, strict=True)
    mixed = []
    for qkv, group in parts:
        excess = layout.longest - group.length
        cropped = relative and (relative[0][:, excess : -excess or None], relative[1][:, excess : -excess or None])
        mixed.append(self_attention(qkv, group.bias, group.num_segments, num_heads, dropout, cropped))
    mixed_KD = torch.cat(mixed)
    mixed_TD: Tensor = _Rearranged.apply(mixed_KD, layout.slot_T, layout.token_K, layout.padding)
    return mixed_TD


class _Rearranged(torch.autograd.Function):
    """x[source], with a gradient that is gathered instead of summed.

    `place` is the row of the output for each row of x. Rows without one, `missing`, get no gradient. Additional copies
    of a row contribute none, because the outputs of padding are not read.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, place: Tensor, missing: Tensor) -> Tensor:
        ctx.save_for_backward(place, missing)
        return x.index_select(0, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        place, missing = ctx.saved_tensors
        return grad.index_select(0, place).index_fill_(0, missing, 0), None, None, None


def geglu(x_TD: Tensor, weight: Tensor) -> Tensor:
    out_TF: Tensor = _GeGLU.apply(F.linear(x_TD, weight.to(x_TD.dtype)))
    return out_TF


class _GeGLU(torch.autograd.Function):
    """gelu(a) * b for [a, b]; both gradients are written to one buffer."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        activated, gate = h.chunk(2, dim=-1)
        gelu_TF = F.gelu(activated)
        ctx.save_for_backward(h, gelu_TF)
        return gelu_TF * gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        h, gelu_TF = ctx.saved_tensors
        activated, gate = h.chunk(2, dim=-1)
        grad = torch.empty_like(h)
        grad_activated, grad_gate = grad.chunk(2, dim=-1)
        torch.mul(grad_TF, gelu_TF, out=grad_gate)
        torch.mul(grad_TF, gate, out=grad_activated)
        torch.ops.aten.gelu_backward.grad_input(grad_activated, activated, grad_input=grad_activated)
        return grad


def _generator_head_impl(
    x_ME: Tensor, table_VE: Tensor, bias_V: Tensor, target_M: Tensor, weight_M: Tensor, slot_M: Tensor,
    seed_and_step: Tensor | None, temperature: float, disallow_correct: bool, with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (loss, sample, correct, gradients of the loss in x, table and bias) in one pass over the rows.

    The logits of a chunk of rows become exponentials, then probabilities, then gradients in place. The gradients of a
    group of chunks are multiplied at once, since each product reads and writes the whole gradient of the table.
    """
    outputs = _empty_outputs(x_ME, table_VE, seed_and_step, with_gradient)
    loss = outputs[0].zero_()
    sample_M = outputs[1]
    correct_M = outputs[2]
    num_rows, _ = x_ME.shape
    vocab_size = table_VE.shape[0]
    num_tiles = -(-table_VE.shape[0] // TILE)
    # Entries past the vocabulary fill the last tile and have probability 0.
    padding = num_tiles * TILE - vocab_size
    table_PE = F.pad(table_VE.to(x_ME.dtype), (0, 0, 0, padding))
    bias_P = F.pad(bias_V, (0, padding), value=-math.inf)
    bytes_per_row = x_ME.element_size() * num_tiles * TILE
    chunk_rows = max(1, min(num_rows, CHUNK_BYTES // (4 * num_tiles * TILE)))
    group_rows = max(chunk_rows, min(num_rows, GROUP_BYTES // bytes_per_row)) if with_gradient else chunk_rows
    grad_gP = x_ME.new_empty(group_rows, num_tiles * TILE)
    buffer_cP = x_ME.new_empty((chunk_rows, num_tiles * TILE), dtype=torch.float32)
    for group, chunks in _groups(num_rows, group_rows, chunk_rows):
        for rows in chunks:
            own_cP = grad_gP[rows.start - group.start : rows.stop - group.start]
            logits_cP = own_cP if x_ME.dtype == torch.float32 else buffer_cP[: len(own_cP)]
            tiles = logits_cP.view(-1, num_tiles, TILE)
            logits = logits_cP[:, :vocab_size]
            _linear(x_ME[rows], table_PE, bias_P, out=logits_cP)
            target_M1 = target_M[rows, None]
            weight_M1 = weight_M[rows, None]
            target_logit_M1 = logits.gather(1, target_M1)
            max_MK = tiles.amax(-1)
            best_tile_M = max_MK.argmax(-1)
            correct_M[rows] = best_tile_M * TILE + take_along_rows(tiles, best_tile_M).argmax(-1) == target_M[rows]
            as_is = temperature == 1.0 and not disallow_correct
            if seed_and_step is not None and not as_is:
                modified_MV = modify_logits(logits, target_M[rows], temperature, disallow_correct)
                sample_M[rows] = sample_categorical(modified_MV, slot_M[rows], seed_and_step)
            tiles.sub_(max_MK[:, :, None]).exp_()
            lse_MK = max_MK + tiles.sum(-1).log()
            if seed_and_step is not None and as_is:
                noise = draw_noise(num_tiles, slot_M[rows], seed_and_step)
                tile_M = noise.choose_tile(lse_MK)
                sample_M[rows] = tile_M * TILE + noise.choose_within_tile(take_along_rows(tiles, tile_M))
            lse_M1 = lse_MK.logsumexp(-1, keepdim=True)
            loss += ((lse_M1 - target_logit_M1) * weight_M1).sum()
            if with_gradient:
                tiles.mul_((weight_M1 * (max_MK - lse_M1).exp())[:, :, None])
                logits.scatter_add_(1, target_M1, -weight_M1)
                _add(outputs[5], logits.sum(0), is_first=rows.start == 0)
                if own_cP.dtype != torch.float32:
                    own_cP.copy_(logits_cP)
        if with_gradient:
            _add_gradients(outputs[3][group], outputs[4], grad_gP[: group.stop - group.start], x_ME, table_PE, group)
    return outputs


def _groups(num_rows: int, group_rows: int, chunk_rows: int) -> Iterator[tuple[slice, list[slice]]]:
    for start in range(0, num_rows, group_rows):
        stop = min(start + group_rows, num_rows)
        chunks = [slice(first, min(first + chunk_rows, stop)) for first in range(start, stop, chunk_rows)]
        yield slice(start, stop), chunks


def _empty_outputs(
    x_ME: Tensor, table_VE: Tensor, seed_and_step: Tensor | None, with_gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows = x_ME.shape[0]
    vocab_size, width = table_VE.shape
    return (
        x_ME.new_empty((), dtype=torch.float32),
        x_ME.new_empty(0 if seed_and_step is None else num_rows, dtype=torch.int64),
        x_ME.new_empty(num_rows, dtype=torch.bool),
        x_ME.new_empty(x_ME.shape if with_gradient else (0,)),
        x_ME.new_empty((vocab_size, width) if with_gradient else (0,), dtype=torch.float32),
        x_ME.new_empty(vocab_size if with_gradient else 0, dtype=torch.float32),
    )


def _linear(x_ME: Tensor, table_PE: Tensor, bias_P: Tensor, out: Tensor) -> None:
    """Writes fp32 logits; a product and an in-place addition are faster than `addmm`, which copies the bias first."""
    if x_ME.dtype == torch.float32:
        torch.mm(x_ME, table_PE.t(), out=out)
    else:
        out.copy_(x_ME @ table_PE.t())
    out.add_(bias_P)


def _add_gradients(
    x_grad_gE: Tensor, table_grad_VE: Tensor, logits_grad_gP: Tensor, x_ME: Tensor, table_PE: Tensor, group: slice
) -> None:
    """Computes the gradient of x for a group's rows, and adds the group's gradient of the table to `table_grad_VE`."""
    torch.mm(logits_grad_gP, table_PE, out=x_grad_gE)
    grad_VE = logits_grad_gP.t()[: len(table_grad_VE)]
    is_first = group.start == 0
    if x_ME.dtype == torch.float32:
        table_grad_VE.addmm_(grad_VE, x_ME[group], beta=0.0 if is_first else 1.0)
    else:
        _add(table_grad_VE, grad_VE @ x_ME[group], is_first=is_first)


def _add(total: Tensor, term: Tensor, *, is_first: bool) -> None:
    total.copy_(term) if is_first else total.add_(term)


def _generator_head_fake(x_ME: Tensor, table_VE: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, seed_and_step, _, _, with_gradient = others
    return _empty_outputs(x_ME, table_VE, seed_and_step, with_gradient)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    return (*(grad.to(gradient.dtype) * gradient for gradient in ctx.saved_tensors), *(None,) * 7)


_NAME = define_operator("generator_head_cpu", "cpu", _generator_head_impl, _generator_head_fake)
torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)


def generator_head(
    x_ME: Tensor, table_VE: Tensor, bias_V: Tensor, target_M: Tensor, weight_M: Tensor, slot_M: Tensor,
    seed_and_step: Tensor | None, temperature: float, disallow_correct: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """`ops.generator_head`; the forward pass also computes the gradients if they are needed."""
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_ME, table_VE, bias_V))
    loss, sample_M, correct_M, *_ = torch.ops.electra_fast.generator_head_cpu(
        x_ME, table_VE, bias_V, target_M, weight_M, slot_M, seed_and_step, temperature, disallow_correct, with_gradient
    )
    return loss, None if seed_and_step is None else sample_M, correct_M
