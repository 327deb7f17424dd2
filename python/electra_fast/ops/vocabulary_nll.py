"""Cross-entropy of every token over the vocabulary, without logits [T, V] in memory.

For objectives that learn from all tokens. The CPU form of `ops.generator_head` computes its gradients in the forward
pass, from weights that are known there. Here the upstream gradient of each token is known only in the backward pass,
which therefore recomputes the logits block by block, and their softmax from each token's maximum and sum of
exponentials. (The logsumexp would suffice, but its rounding at the magnitude of the logits increases the errors of the
gradients by half.)

Shapes: T tokens, V vocabulary, E embedding; m tokens and v vocabulary entries of one block of logits, p = v padded to
K whole tiles; S blocks that cover the vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from electra_fast.ops.cpu_ops import define_operator
from electra_fast.ops.fused import kernels
from electra_fast.ops.operations import operation, uses_kernels
from electra_fast.ops.sampling import take_along_rows

# Tokens and vocabulary entries (whole tiles) per block of logits. On a CPU, 8 MB in fp32, which stay in the caches
# through all passes over a block; on a GPU (without the kernels), 128 MB, for few launches. Blocks also split the
# vocabulary, so that more tokens fit, since the gradient of the table is read and written once per block of tokens.
BLOCK_SHAPE = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
# The argmax is searched only in the tile of the maximum, because on a CPU `amax` is vectorized and `argmax` is not.
TILE = 128


@operation
def vocabulary_nll(x_TE: Tensor, table_VE: Tensor, bias_V: Tensor, target_T: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(x @ table.T + bias)[target] for each token.

    Args:
        x_TE: The input of the product with the table.
        table_VE: The embedding table, fp32; cast to x's dtype, as is the bias.
        bias_V: The output bias, fp32.
        target_T: The tokens, int64, 0 <= target < V, including rows that the loss does not use.

    Returns:
        nll_T (fp32, or fp64 if x is fp64; differentiable once in x, table and bias), and is_argmax_T (bool), True
        where the target has the largest logit (the first among equal logits).
    """
    if uses_kernels(x_TE, "vocabulary_nll"):
        # Without a seed, the kernel samples nothing and does not read the slots; the targets are placeholders.
        nll_T, _, is_argmax_T = kernels().generator_head(x_TE, table_VE, bias_V, target_T, target_T, None, 1.0, False)
    else:
        nll_T, is_argmax_T, *_ = torch.ops.electra_fast.vocabulary_nll(x_TE, table_VE, bias_V, target_T)
    return nll_T, is_argmax_T


def _vocabulary_nll_impl(
    x_TE: Tensor, table_VE: Tensor, bias_V: Tensor, target_T: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns (nll, is_argmax, largest logit, sum of exponentials relative to it)."""
    nll_T, is_argmax_T, max_T, sum_T = outputs = _empty_outputs(x_TE)
    table_VE = table_VE.to(x_TE.dtype)
    bias_V = bias_V.to(x_TE.dtype)
    token_blocks, entry_blocks, buffer = _blocks(x_TE, table_VE)
    for rows in token_blocks:
        statistics = []
        for entries in entry_blocks:
            logits_mp = _padded_view(buffer, rows, entries)
            logits_mv = logits_mp[:, : entries.stop - entries.start]
            logits_mp[:, logits_mv.shape[1] :] = -math.inf  # padding has probability 0
            _linear(x_TE[rows], table_VE[entries], bias_V[entries], out=logits_mv)
            target_logit_m = _target_logit(logits_mv, target_T[rows], entries)
            max_m, sum_m, argmax_m = _reduce_(logits_mp)
            statistics.append((max_m, sum_m, argmax_m + entries.start, target_logit_m))
        max_mS, sum_mS, argmax_mS, target_logit_mS = (torch.stack(parts, 1) for parts in zip(*statistics, strict=True))
        best_m = max_mS.argmax(1)
        max_T[rows] = max_m = take_along_rows(max_mS, best_m)
        sum_T[rows] = sum_m = (sum_mS * (max_mS - max_m[:, None]).exp()).sum(1)
        nll_T[rows] = sum_m.log() + (max_m - target_logit_mS.amax(1))
        is_argmax_T[rows] = take_along_rows(argmax_mS, best_m) == target_T[rows]
    return outputs


def _vocabulary_nll_backward_impl(
    grad_T: Tensor, x_TE: Tensor, table_VE: Tensor, bias_V: Tensor, target_T: Tensor, max_T: Tensor, sum_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x (in its dtype), table and bias (in the logits' dtype) from the gradient of nll.

    The logits of a block become exponentials, then gradients, in one buffer.
    """
    x_grad_TE, table_grad_VE, bias_grad_V = gradients = _empty_gradients(x_TE, table_VE)
    table_grad_VE.zero_()
    bias_grad_V.zero_()
    table_VE = table_VE.to(x_TE.dtype)
    bias_V = bias_V.to(x_TE.dtype)
    token_blocks, entry_blocks, buffer = _blocks(x_TE, table_VE)
    for rows in token_blocks:
        x_mE = x_TE[rows]
        grad_m1 = grad_T[rows, None]
        x_grad_mE = torch.zeros_like(x_mE, dtype=max_T.dtype)
        for entries in entry_blocks:
            logits_mv = _padded_view(buffer, rows, entries)[:, : entries.stop - entries.start]
            _linear(x_mE, table_VE[entries], bias_V[entries], out=logits_mv)
            logits_mv.sub_(max_T[rows, None]).exp_().mul_(grad_m1 / sum_T[rows, None])
            index_m1, is_inside_m1 = _index_in(entries, target_T[rows, None])
            logits_mv.scatter_add_(1, index_m1, torch.where(is_inside_m1, -grad_m1, 0.0))
            logits_grad_mv = logits_mv.to(x_mE.dtype)
            _add_product_(x_grad_mE, logits_grad_mv, table_VE[entries])
            _add_product_(table_grad_VE[entries], logits_grad_mv.t(), x_mE)
            bias_grad_V[entries] += logits_mv.sum(0)
        x_grad_TE[rows] = x_grad_mE
    return gradients


def _logits_dtype(x_TE: Tensor) -> torch.dtype:
    return torch.promote_types(x_TE.dtype, torch.float32)


def _empty_outputs(x_TE: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nll_T, max_T, sum_T = (x_TE.new_empty(x_TE.shape[0], dtype=_logits_dtype(x_TE)) for _ in range(3))
    return nll_T, x_TE.new_empty(x_TE.shape[0], dtype=torch.bool), max_T, sum_T


def _empty_gradients(x_TE: Tensor, table_VE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _logits_dtype(x_TE)
    table_grad_VE = x_TE.new_empty(table_VE.shape, dtype=dtype)
    return x_TE.new_empty(x_TE.shape), table_grad_VE, x_TE.new_empty(table_VE.shape[0], dtype=dtype)


def _blocks(x_TE: Tensor, table_VE: Tensor) -> tuple[list[slice], list[slice], Tensor]:
    """Returns blocks of tokens, blocks of the vocabulary, and a buffer for the logits of one pair of blocks."""
    max_tokens, max_entries = BLOCK_SHAPE["cuda" if x_TE.is_cuda else "cpu"]
    tokens = _slices(x_TE.shape[0], max_tokens)
    entries = _slices(table_VE.shape[0], max_entries)
    size = min(x_TE.shape[0], max_tokens) * min(_padded(table_VE.shape[0]), max_entries)
    return tokens, entries, x_TE.new_empty(size, dtype=_logits_dtype(x_TE))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _padded(num_entries: int) -> int:
    return -(-num_entries // TILE) * TILE


def _padded_view(buffer: Tensor, rows: slice, entries: slice) -> Tensor:
    """Returns the start of the buffer as [m, p]."""
    num_rows = rows.stop - rows.start
    num_columns = _padded(entries.stop - entries.start)
    return buffer[: num_rows * num_columns].view(num_rows, num_columns)


def _linear(x_mE: Tensor, table_vE: Tensor, bias_v: Tensor, out: Tensor) -> None:
    """Writes logits in the dtype of `out`; on a CPU, a product and an in-place addition are faster than `addmm`."""
    if x_mE.dtype == out.dtype:
        torch.mm(x_mE, table_vE.t(), out=out).add_(bias_v)
    else:
        out.copy_(F.linear(x_mE, table_vE, bias_v))


def _index_in(entries: slice, target: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each target's index within these entries (arbitrary if it is not one of them), and if it is one."""
    index = target - entries.start
    index_in_range = index.clamp(0, entries.stop - entries.start - 1)
    return index_in_range, index == index_in_range


def _target_logit(logits_mv: Tensor, target_m: Tensor, entries: slice) -> Tensor:
    """Returns the targets' logits, or -inf for targets that are not among these entries."""
    index_m, is_inside_m = _index_in(entries, target_m)
    return torch.where(is_inside_m, take_along_rows(logits_mv, index_m), -math.inf)


def _reduce_(logits_mp: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (maximum, sum of exponentials relative to it, index of the first maximum) of each row.

    Replaces the logits by exponentials.
    """
    tiles_mKt = logits_mp.view(logits_mp.shape[0], -1, TILE)
    max_mK = tiles_mKt.amax(2)
    tile_m = max_mK.argmax(1)
    argmax_m = tile_m * TILE + take_along_rows(tiles_mKt, tile_m).argmax(1)
    # Finite even if every entry of a block has a bias of -inf, since -inf minus -inf would be NaN.
    max_m = take_along_rows(max_mK, tile_m).clamp_min(torch.finfo(logits_mp.dtype).min)
    return max_m, logits_mp.sub_(max_m[:, None]).exp_().sum(1), argmax_m


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to `total`, in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[2:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_T: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_T is None:
        return (None,) * 4
    return (*torch.ops.electra_fast.vocabulary_nll_backward(grad_T, *ctx.saved_tensors), None)


_KEY = "CompositeExplicitAutograd"
_NAME = define_operator("vocabulary_nll", _KEY, _vocabulary_nll_impl, lambda x_TE, *_: _empty_outputs(x_TE))
torch.library.register_autograd(_NAME, _backward, setup_context=_setup_context)
define_operator(
    "vocabulary_nll_backward",
    _KEY,
    _vocabulary_nll_backward_impl,
    lambda _, x_TE, table_VE, *others: _empty_gradients(x_TE, table_VE),
)
