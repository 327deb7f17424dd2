"""gelu(x @ weight.T + bias), and GeGLU's gelu(a) * b, in the epilogue of their matmul, forward and backward (Triton).

These kernels are for narrow inputs (`is_profitable`): memory bounds their matmuls, so another pass over [T, F] would
double the time. cuBLAS and `bias_gelu` compute wider ones. The forward kernel stores the product h, for the backward
pass, and the activation, both from the fp32 accumulator. The backward kernel multiplies the next linear layer's
gradient by its weight and by gelu'(h), so the activation's gradient is never stored. Each program sums the bias
gradient over its tokens; the caller adds the programs.

A program holds its BLOCK_F columns of the weight in shared memory and iterates over blocks of tokens, which are loaded
one iteration ahead. To load both operands of every 128 x 128 tile would read 8 KB per token of `small` from the L2
cache, twice as much as here, and twice the memory traffic of h and y. With 228 KB of shared memory, there are two
variants at D > 128, and a run times both: two programs, one of which uses the tensor cores during the other's epilogue,
without memory to load ahead; or, `pipelined`, one larger program that loads ahead. If D exceeds BLOCK_D, each tile
loops over the rest of D, which is correct but slow.

Shapes: T tokens, D the input's width, F feed-forward, P programs along the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.gelu import gelu, gelu_and_derivative
from electra_fast.kernels.launch import (
    fitting_programs,
    has_tensor_cores,
    is_hopper,
    resident_programs,
    shared_kib,
)

# Derived, not measured: at D = 269 and F = 4 D, the products at 65 % of cuBLAS's 790 TFLOP/s take as long as the memory
# traffic at 4.3 TB/s (H200).
MAX_WIDTH = 256
# Largest shared memory of a program of either kernel, by BLOCK_D from 64 on, plain and gated, as compiled for 8.0, 8.9
# and 12.0. With 228 KB, two programs of D > 128 use 107 KB each, or one uses 213 KB.
SHARED_BYTES = {64: (32768, 40960), 128: (49152, 57344), 256: (81920, 69632)}


@triton.jit
def _tile(num_rows, num_columns, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Offsets from a block's first element, and a mask of the elements that exist."""
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    return row[:, None] * ROW_STRIDE + column[None, :] * COLUMN_STRIDE, mask


@triton.jit
def _load(ptr, num_rows, num_columns, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
          ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    offset, mask = _tile(num_rows, num_columns, ROW_STRIDE, COLUMN_STRIDE, ROWS, COLUMNS)
    return tl.load(ptr + offset, mask=mask, other=0.0)


@triton.jit
def _product(x, weight, x_ptr, weight_ptr, num_rows, num_columns,
             D: tl.constexpr, D_STRIDE: tl.constexpr, F_STRIDE: tl.constexpr,
             BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
             STAGES: tl.constexpr):  # fmt: skip
    """x @ weight, fp32 [BLOCK_T, BLOCK_F], from the blocks of the first BLOCK_D and pointers to them."""
    product = tl.dot(x, weight, input_precision="ieee")
    for d in tl.range(BLOCK_D, D, BLOCK_D, num_stages=STAGES):
        x = _load(x_ptr + d, num_rows, D - d, D, 1, BLOCK_T, BLOCK_D)
        weight = _load(weight_ptr + d * D_STRIDE, D - d, num_columns, D_STRIDE, F_STRIDE, BLOCK_D, BLOCK_F)
        product = tl.dot(x, weight, product, input_precision="ieee")
    return product


@triton.jit
def _matmul_gelu_forward_kernel(
    x_ptr, weight_ptr, bias_ptr, h_ptr, y_ptr, num_tokens, GATED: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    H_STRIDE: tl.constexpr = 2 * F if GATED else F
    column = (tl.program_id(0) * BLOCK_F).to(tl.int64)
    num_columns = BLOCK_F if F % BLOCK_F == 0 else F - column
    weight_ptr += column * D
    weight = _load(weight_ptr, D, num_columns, 1, D, BLOCK_D, BLOCK_F)
    if GATED:
        gate_weight_ptr = weight_ptr + F * D
        gate_weight = _load(gate_weight_ptr, D, num_columns, 1, D, BLOCK_D, BLOCK_F)
    if bias_ptr is not None:
        bias = _load(bias_ptr + column, 1, num_columns, 0, 1, 1, BLOCK_F)
    for token in tl.range(tl.program_id(1) * BLOCK_T, num_tokens, tl.num_programs(1) * BLOCK_T, num_stages=STAGES):
        num_rows = num_tokens - token
        row = tl.cast(token, tl.int64)
        x_row = x_ptr + row * D
        h_start = h_ptr + row * H_STRIDE + column
        x = _load(x_row, num_rows, D, D, 1, BLOCK_T, BLOCK_D)
        h = _product(x, weight, x_row, weight_ptr, num_rows, num_columns, D, 1, D,
                     BLOCK_T, BLOCK_D, BLOCK_F, STAGES)  # fmt: skip
        if bias_ptr is not None:
            h += bias
        h_offset, mask = _tile(num_rows, num_columns, H_STRIDE, 1, BLOCK_T, BLOCK_F)
        tl.store(h_start + h_offset, h, mask=mask)
        y = gelu(h)
        if GATED:
            gate = _product(x, gate_weight, x_row, gate_weight_ptr, num_rows, num_columns, D, 1, D,
                            BLOCK_T, BLOCK_D, BLOCK_F, STAGES)  # fmt: skip
            tl.store(h_start + F + h_offset, gate, mask=mask)
            y *= gate
        y_offset, mask = _tile(num_rows, num_columns, F, 1, BLOCK_T, BLOCK_F)
        tl.store(y_ptr + row * F + column + y_offset, y, mask=mask)


@triton.jit
def _matmul_gelu_backward_kernel(
    dz_ptr, weight_ptr, h_ptr, dh_ptr, partial_ptr, num_tokens, GATED: tl.constexpr,
    D: tl.constexpr, F: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    H_STRIDE: tl.constexpr = 2 * F if GATED else F
    column = (tl.program_id(0) * BLOCK_F).to(tl.int64)
    num_columns = BLOCK_F if F % BLOCK_F == 0 else F - column
    weight_ptr += column
    weight = _load(weight_ptr, D, num_columns, F, 1, BLOCK_D, BLOCK_F)
    if partial_ptr is not None:
        dbias = tl.zeros((BLOCK_T, BLOCK_F), tl.float32)
    for token in tl.range(tl.program_id(1) * BLOCK_T, num_tokens, tl.num_programs(1) * BLOCK_T, num_stages=STAGES):
        num_rows = num_tokens - token
        row = tl.cast(token, tl.int64)
        dz_row = dz_ptr + row * D
        start = row * H_STRIDE + column
        offset, mask = _tile(num_rows, num_columns, H_STRIDE, 1, BLOCK_T, BLOCK_F)
        h = tl.load(h_ptr + start + offset, mask=mask, other=0.0)
        if GATED:
            gate = tl.load(h_ptr + start + F + offset, mask=mask, other=0.0)
        dz = _load(dz_row, num_rows, D, D, 1, BLOCK_T, BLOCK_D)
        # Before the product, because the registers cannot hold its accumulators and these intermediates at once.
        activated, derivative = gelu_and_derivative(h.to(tl.float32))
        dy = _product(dz, weight, dz_row, weight_ptr, num_rows, num_columns, D, F, 1,
                      BLOCK_T, BLOCK_D, BLOCK_F, STAGES)  # fmt: skip
        dh = dy * derivative
        if GATED:
            dh *= gate.to(tl.float32)
            tl.store(dh_ptr + start + F + offset, dy * activated, mask=mask)
        tl.store(dh_ptr + start + offset, dh, mask=mask)
        if partial_ptr is not None:
            dbias += dh
    if partial_ptr is not None:
        f = tl.arange(0, BLOCK_F)
        partial_ptr += tl.program_id(1).to(tl.int64) * F + column
        tl.store(partial_ptr + f, tl.sum(dbias, axis=0), mask=f < num_columns)


def is_profitable(x_TD: Tensor) -> bool:
    """Returns whether the fusion is faster for inputs of x's width on its device."""
    return x_TD.shape[1] <= MAX_WIDTH and has_tensor_cores(x_TD.device)


def pipelines(x_TD: Tensor) -> bool:
    """Returns whether there is a separate `pipelined` tiling for x's width and device."""
    return x_TD.shape[1] > 128 and x_TD.element_size() == 2 and shared_kib(x_TD.device) > 200 and is_profitable(x_TD)


def tiling(
    x_TD: Tensor, gated: bool = False, pipelined: bool = False, is_forward: bool = False
) -> tuple[dict[str, int], int]:
    """Block sizes and compile options at x's width, and the number of such programs that fit on a multiprocessor.

    GeGLU has two weights or two gradients per block.
    """
    width = x_TD.shape[1]
    device = x_TD.device
    if x_TD.element_size() > 2:  # no tensor cores, so operands are in registers
        return {"BLOCK_T": 64, "BLOCK_D": 32, "BLOCK_F": 32, "STAGES": 2, "num_warps": 4}, 2
    columns = min(MAX_WIDTH, max(16, triton.next_power_of_2(width)))
    tile = {"BLOCK_T": 64, "BLOCK_D": columns, "BLOCK_F": 64, "STAGES": 2, "num_warps": 4}
    if width > 128 and pipelined:
        # With more columns, fewer blocks read x from the L2 cache; on other GPUs, 256 columns do not fit, or spill.
        is_wide = is_forward and not gated and is_hopper(device)
        return {**tile, "BLOCK_F": 256 if is_wide else 128, "num_warps": 8}, 1
    if width > 128 and not 64 < shared_kib(device) < 200:  # with AMD's 64 KB, the tiles below would spill
        return {**tile, "BLOCK_F": 64 if gated else 128, "STAGES": 1}, 2 if shared_kib(device) > 64 else 1
    if width > 128:
        tile.update(BLOCK_F=32 if gated else 64, num_warps=8)
    fitting = fitting_programs(device, SHARED_BYTES[max(64, columns)][gated])
    return tile, min(3 if width <= 128 else 2, fitting)


def _launch(
    x_TD: Tensor, width: int, gated: bool, pipelined: bool, is_forward: bool = False
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid (column blocks, programs along the tokens) and constants; column blocks of the same tokens are adjacent."""
    tile, fitting = tiling(x_TD, gated, pipelined, is_forward)
    column_blocks = triton.cdiv(width, tile["BLOCK_F"])
    along_tokens = max(1, resident_programs(x_TD.device, fitting) // column_blocks)
    grid = column_blocks, min(triton.cdiv(x_TD.shape[0], tile["BLOCK_T"]), along_tokens)
    return grid, {"D": x_TD.shape[1], "F": width, "GATED": gated, **tile}


@torch.library.custom_op("electra_fast::matmul_gelu", mutates_args=())
def matmul_gelu(
    x_TD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, pipelined: bool = False
) -> tuple[Tensor, Tensor]:
    """h = x @ weight.T + bias and gelu(h); [T, D], [F, D] in x's dtype, fp32 [F] → two [T, F] in x's dtype."""
    num_tokens = x_TD.shape[0]
    width = weight_FD.shape[0]
    h_TF, y_TF = (x_TD.new_empty((num_tokens, width)) for _ in range(2))
    grid, constants = _launch(x_TD, width, False, pipelined, is_forward=True)
    _matmul_gelu_forward_kernel[grid](
        x_TD.contiguous(), weight_FD.contiguous(), bias_F, h_TF, y_TF, num_tokens, **constants
    )
    return h_TF, y_TF


@torch.library.custom_op("electra_fast::matmul_gelu_backward", mutates_args=())
def matmul_gelu_backward(
    dz_TD: Tensor, weight_DF: Tensor, h_TF: Tensor, pipelined: bool = False
) -> tuple[Tensor, Tensor]:
    """(dz @ weight) * gelu'(h) for z = gelu(h) @ weight.T, and partial sums over tokens; → [T, F], fp32 [P, F]."""
    num_tokens, width = h_TF.shape
    h_TF = h_TF.contiguous()
    grid, constants = _launch(dz_TD, width, False, pipelined)
    dh_TF = torch.empty_like(h_TF)
    partial_PF = h_TF.new_empty((grid[1], width), dtype=torch.float32)
    _matmul_gelu_backward_kernel[grid](
        dz_TD.contiguous(), weight_DF.contiguous(), h_TF, dh_TF, partial_PF, num_tokens, **constants
    )
    return dh_TF, partial_PF


@torch.library.custom_op("electra_fast::matmul_geglu", mutates_args=())
def matmul_geglu(x_TD: Tensor, weight_2FD: Tensor, pipelined: bool = False) -> tuple[Tensor, Tensor]:
    """h = [a, b] = x @ weight.T and gelu(a) * b; [T, D], [2F, D] in x's dtype → [T, 2F], [T, F]."""
    num_tokens = x_TD.shape[0]
    width = weight_2FD.shape[0] // 2
    h_T2F, y_TF = (x_TD.new_empty((num_tokens, columns)) for columns in (2 * width, width))
    grid, constants = _launch(x_TD, width, True, pipelined, is_forward=True)
    _matmul_gelu_forward_kernel[grid](
        x_TD.contiguous(), weight_2FD.contiguous(), None, h_T2F, y_TF, num_tokens, **constants
    )
    return h_T2F, y_TF


@torch.library.custom_op("electra_fast::matmul_geglu_backward", mutates_args=())
def matmul_geglu_backward(dz_TD: Tensor, weight_DF: Tensor, h_T2F: Tensor, pipelined: bool = False) -> Tensor:
    """Gradient of h for z = (gelu(a) * b) @ weight.T; [T, D], [D, F], [T, 2F] → [T, 2F]."""
    h_T2F = h_T2F.contiguous()
    dh_T2F = torch.empty_like(h_T2F)
    grid, constants = _launch(dz_TD, weight_DF.shape[1], True, pipelined)
    _matmul_gelu_backward_kernel[grid](
        dz_TD.contiguous(), weight_DF.contiguous(), h_T2F, dh_T2F, None, dz_TD.shape[0], **constants
    )
    return dh_T2F


@matmul_gelu.register_fake
def _(x_TD, weight_FD, bias_F, pipelined=False):
    h_TF = x_TD.new_empty((x_TD.shape[0], weight_FD.shape[0]))
    return h_TF, torch.empty_like(h_TF)


@matmul_gelu_backward.register_fake
def _(dz_TD, weight_DF, h_TF, pipelined=False):
    grid, _ = _launch(dz_TD, h_TF.shape[1], False, pipelined)
    return h_TF.new_empty(h_TF.shape), h_TF.new_empty((grid[1], h_TF.shape[1]), dtype=torch.float32)


@matmul_geglu.register_fake
def _(x_TD, weight_2FD, pipelined=False):
    num_tokens = x_TD.shape[0]
    columns = weight_2FD.shape[0]
    return x_TD.new_empty((num_tokens, columns)), x_TD.new_empty((num_tokens, columns // 2))


@matmul_geglu_backward.register_fake
def _(dz_TD, weight_DF, h_T2F, pipelined=False):
    return h_T2F.new_empty(h_T2F.shape)
