"""Token + position + type embedding, LayerNorm and dropout in one forward and one backward kernel (Triton).

Contract and reference: `embedding_norm` in `electra_fast.ops.operations`. The fp32 sum of the three rows is
never stored; the backward pass gathers them again. The tables' gradients use no atomics:

- token: `gather_rows.add_rows`, which sorts the ids (most rows get few tokens);
- type: two sums over all tokens, computed with the sums for the norm's weight and bias;
- position: each row gets many tokens, so the gradient is a product with the one-hot matrix of the
  positions, built in registers, over fixed chunks of tokens, and the chunks are added. This costs
  2 T L E FLOPs on tensor cores, a thousandth of a step; a sort alone would need ten launches.

Shapes: T tokens, E embedding, L positions, P programs, C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels import launch
from electra_fast.kernels.dropout import keep_scale, threshold
from electra_fast.kernels.gather_rows import add_rows
from electra_fast.kernels.launch import resident_programs
from electra_fast.kernels.residual_norm import blocks, num_warps

# Resident programs of four warps: 64 registers per thread forward, 96 to 128 backward.
FORWARD_PROGRAMS_PER_SM = 8
BACKWARD_PROGRAMS_PER_SM = 4
ONE_HOT_BLOCKS = {"BLOCK_L": 128, "BLOCK_E": 64, "BLOCK_T": 32}
ONE_HOT_WARPS = 4


@triton.jit
def _sum_embeddings(
    token_ptr, position_ptr, type_ptr, token_id, position_id, type_id, column, mask, WIDTH: tl.constexpr
):  # fmt: skip
    z = tl.load(token_ptr + token_id.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    z += tl.load(position_ptr + position_id.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    return z + tl.load(type_ptr + type_id.to(tl.int64)[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["call_index"])
def _embedding_norm_forward_kernel(
    ids_ptr, positions_ptr, types_ptr, token_ptr, position_ptr, type_ptr, weight_ptr, bias_ptr, key_ptr,
    y_ptr, mean_ptr, rstd_ptr, num_tokens, eps, call_index,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    column_mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    bias = tl.load(bias_ptr + column, mask=column_mask, other=0.0)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        token_mask = token < num_tokens
        mask = token_mask[:, None] & column_mask[None, :]
        token_id = tl.load(ids_ptr + token, mask=token_mask, other=0)
        position_id = tl.load(positions_ptr + token, mask=token_mask, other=0)
        type_id = tl.load(types_ptr + token, mask=token_mask, other=0)
        z = _sum_embeddings(token_ptr, position_ptr, type_ptr, token_id, position_id, type_id, column, mask, WIDTH)
        mean = tl.sum(z, axis=1) / WIDTH
        centered = tl.where(column_mask[None, :], z - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / WIDTH + eps)
        y = centered * rstd[:, None] * weight[None, :] + bias[None, :]
        if THRESHOLD > 0:
            y *= keep_scale(key_ptr, call_index, token, BLOCK_T, BLOCK_D, THRESHOLD)
        tl.store(y_ptr + token[:, None] * WIDTH + column[None, :], y, mask=mask)
        tl.store(mean_ptr + token, mean, mask=token_mask)
        tl.store(rstd_ptr + token, rstd, mask=token_mask)


@triton.jit(do_not_specialize=["call_index"])
def _embedding_norm_backward_kernel(
    dy_ptr, ids_ptr, positions_ptr, types_ptr, token_ptr, position_ptr, type_ptr, weight_ptr, mean_ptr, rstd_ptr,
    key_ptr, dz_ptr, partial_ptr, num_tokens, call_index,
    WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, THRESHOLD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK_D)
    column_mask = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=column_mask, other=0.0)
    dweight = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    all_types = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    type_1 = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = (tile * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
        token_mask = token < num_tokens
        offset = token[:, None] * WIDTH + column[None, :]
        mask = token_mask[:, None] & column_mask[None, :]
        token_id = tl.load(ids_ptr + token, mask=token_mask, other=0)
        position_id = tl.load(positions_ptr + token, mask=token_mask, other=0)
        type_id = tl.load(types_ptr + token, mask=token_mask, other=0)
        dy = tl.load(dy_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        z = _sum_embeddings(token_ptr, position_ptr, type_ptr, token_id, position_id, type_id, column, mask, WIDTH)
        if THRESHOLD > 0:
            dy *= keep_scale(key_ptr, call_index, token, BLOCK_T, BLOCK_D, THRESHOLD)
        # Past the last token, rstd is 0, so every gradient is 0.
        mean = tl.load(mean_ptr + token, mask=token_mask, other=0.0)
        rstd = tl.load(rstd_ptr + token, mask=token_mask, other=0.0)
        normed = (z - mean[:, None]) * rstd[:, None]
        dnormed = dy * weight[None, :]
        mean_dnormed = tl.sum(dnormed, axis=1) / WIDTH
        mean_dnormed_normed = tl.sum(dnormed * normed, axis=1) / WIDTH
        dz = (dnormed - mean_dnormed[:, None] - normed * mean_dnormed_normed[:, None]) * rstd[:, None]
        tl.store(dz_ptr + offset, dz, mask=mask)
        dweight += dy * normed
        dbias += dy
        all_types += dz
        type_1 += tl.where((type_id == 1)[:, None], dz, 0.0)
    partial_ptr += tl.program_id(0) * (4 * WIDTH) + column
    tl.store(partial_ptr, tl.sum(dweight, axis=0), mask=column_mask)
    tl.store(partial_ptr + WIDTH, tl.sum(dbias, axis=0), mask=column_mask)
    tl.store(partial_ptr + 2 * WIDTH, tl.sum(all_types - type_1, axis=0), mask=column_mask)
    tl.store(partial_ptr + 3 * WIDTH, tl.sum(type_1, axis=0), mask=column_mask)


@triton.jit
def _sum_by_position_kernel(
    dz_ptr, positions_ptr, partial_ptr, num_tokens, num_positions, chunk,
    WIDTH: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK_L + tl.arange(0, BLOCK_L)
    column = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(2) * chunk
    total = tl.zeros((BLOCK_L, BLOCK_E), tl.float32)
    for start in range(first, min(first + chunk, num_tokens), BLOCK_T):
        token = start + tl.arange(0, BLOCK_T)
        position_id = tl.load(positions_ptr + token, mask=token < num_tokens, other=-1)
        offset = token.to(tl.int64)[:, None] * WIDTH + column[None, :]
        dz = tl.load(dz_ptr + offset, mask=(token < num_tokens)[:, None] & (column < WIDTH)[None, :], other=0.0)
        one_hot = (position_id[None, :] == position[:, None]).to(tl.float32)
        total = tl.dot(one_hot, dz, total, input_precision=PRECISION)
    offset = (tl.program_id(2).to(tl.int64) * num_positions + position[:, None]) * WIDTH + column[None, :]
    tl.store(partial_ptr + offset, total, mask=(position < num_positions)[:, None] & (column < WIDTH)[None, :])


@torch.library.custom_op("electra_fast::embedding_norm", mutates_args=())
def embedding_norm(
    ids_T: Tensor, positions_T: Tensor, types_T: Tensor, token_VE: Tensor, position_LE: Tensor, type_2E: Tensor,
    weight_E: Tensor, bias_E: Tensor, eps: float, dtype: torch.dtype,
    probability: float, key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dropout(LayerNorm(token + position + type)) [T, E] in `dtype`; mean and 1 / standard deviation, fp32 [T]."""
    num_tokens = ids_T.shape[0]
    tile = blocks(token_VE.shape[1])
    ids_T = ids_T.contiguous()
    positions_T = positions_T.contiguous()
    types_T = types_T.contiguous()
    y_TE = token_VE.new_empty((num_tokens, token_VE.shape[1]), dtype=dtype)
    mean_T = token_VE.new_empty(num_tokens)
    rstd_T = token_VE.new_empty(num_tokens)
    max_programs = resident_programs(ids_T.device, FORWARD_PROGRAMS_PER_SM)
    _embedding_norm_forward_kernel[(min(triton.cdiv(num_tokens, tile["BLOCK_T"]), max_programs),)](
        ids_T, positions_T, types_T, token_VE, position_LE, type_2E, weight_E, bias_E, key, y_TE, mean_T, rstd_T,
        num_tokens, eps, call_index, **tile, THRESHOLD=threshold(probability), num_warps=num_warps(tile["WIDTH"]),
    )  # fmt: skip
    return y_TE, mean_T, rstd_T


@torch.library.custom_op("electra_fast::embedding_norm_backward", mutates_args=())
def embedding_norm_backward(
    dy_TE: Tensor, ids_T: Tensor, positions_T: Tensor, types_T: Tensor,
    token_VE: Tensor, position_LE: Tensor, type_2E: Tensor, weight_E: Tensor, mean_T: Tensor, rstd_T: Tensor,
    probability: float, key: Tensor | None, call_index: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fp32 gradients of each token's embedding sum [T, E], and of weight, bias and the two types [4, E]."""
    num_tokens, width = dy_TE.shape
    dy_TE = dy_TE.contiguous()
    tile = blocks(token_VE.shape[1])
    ids_T = ids_T.contiguous()
    positions_T = positions_T.contiguous()
    types_T = types_T.contiguous()
    num_programs = min(
        triton.cdiv(num_tokens, tile["BLOCK_T"]), resident_programs(ids_T.device, BACKWARD_PROGRAMS_PER_SM)
    )
    dz_TE = token_VE.new_empty((num_tokens, width))
    partial_P4E = token_VE.new_empty((num_programs, 4, width))
    _embedding_norm_backward_kernel[(num_programs,)](
        dy_TE, ids_T, positions_T, types_T, token_VE, position_LE, type_2E, weight_E, mean_T, rstd_T, key,
        dz_TE, partial_P4E, num_tokens, call_index,
        **tile, THRESHOLD=threshold(probability), num_warps=num_warps(width),
    )  # fmt: skip
    return dz_TE, partial_P4E.sum(0)


@torch.library.custom_op("electra_fast::sum_by_position", mutates_args=())
def sum_by_position(dz_TE: Tensor, positions_T: Tensor, num_positions: int, exact: bool) -> Tensor:
    """Sums the rows of dz by position; fp32 [T, E], int [T] → fp32 [L, E].

    Multiplies in fp32 if `exact` or on AMD's GPUs (some lack TF32), otherwise in TF32.
    """
    num_tokens, width = dz_TE.shape
    block = ONE_HOT_BLOCKS
    dz_TE = dz_TE.contiguous()
    positions_T = positions_T.contiguous()
    grid = triton.cdiv(num_positions, block["BLOCK_L"]), triton.cdiv(width, block["BLOCK_E"])
    # Two programs per multiprocessor, each with enough tokens to justify its partial sums.
    num_chunks = max(1, min(resident_programs(dz_TE.device, 2) // (grid[0] * grid[1]), num_tokens // 256))
    chunk = triton.cdiv(triton.cdiv(num_tokens, num_chunks), block["BLOCK_T"]) * block["BLOCK_T"]
    num_chunks = triton.cdiv(num_tokens, chunk)
    partial_CLE = dz_TE.new_empty((num_chunks, num_positions, width))
    in_fp32 = exact or launch.card(dz_TE.device).is_rocm
    _sum_by_position_kernel[(*grid, num_chunks)](
        dz_TE, positions_T, partial_CLE, num_tokens, num_positions, chunk,
        WIDTH=width, **block, PRECISION="ieee" if in_fp32 else "tf32", num_warps=ONE_HOT_WARPS,
    )  # fmt: skip
    return partial_CLE.sum(0)


@embedding_norm.register_fake
def _(ids_T, positions_T, types_T, token_VE, position_LE, type_2E, weight_E, bias_E, eps, dtype, *_):
    rows = token_VE.new_empty(ids_T.shape[0])
    return token_VE.new_empty((ids_T.shape[0], token_VE.shape[1]), dtype=dtype), rows, torch.empty_like(rows)


@embedding_norm_backward.register_fake
def _(dy_TE, ids_T, positions_T, types_T, token_VE, *_):
    return token_VE.new_empty(dy_TE.shape), token_VE.new_empty((4, dy_TE.shape[1]))


@sum_by_position.register_fake
def _(dz_TE, positions_T, num_positions, exact):
    return dz_TE.new_empty((num_positions, dz_TE.shape[1]))


def _save(ctx, inputs, output):
    *tensors, _, _, ctx.dtype, ctx.probability, key, ctx.call_index = inputs  # all tensors except the bias
    ctx.save_for_backward(*tensors, *output[1:], key)
    ctx.set_materialize_grads(False)  # the statistics are not differentiated


def _gradients(ctx, dy_TE, dmean_T, drstd_T):
    *tensors, key = ctx.saved_tensors
    ids_T, positions_T, _, token_VE, position_LE = tensors[:5]
    dz_TE, sums_4E = embedding_norm_backward(dy_TE, *tensors, ctx.probability, key, ctx.call_index)
    dtoken_VE = add_rows(dz_TE, ids_T, token_VE.shape[0])
    # TF32's mantissa has at least as many bits as the mantissa of the 16-bit activations.
    dposition_LE = sum_by_position(dz_TE, positions_T, position_LE.shape[0], ctx.dtype == torch.float32)
    dweight_E = sums_4E[0]
    dbias_E = sums_4E[1]
    return None, None, None, dtoken_VE, dposition_LE, sums_4E[2:], dweight_E, dbias_E, None, None, None, None, None


embedding_norm.register_autograd(_gradients, setup_context=_save)
