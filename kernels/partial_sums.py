"""Sums over the programs of two kernels, in one launch (Triton).

A kernel that sums vectors over tokens writes one row per program. Each sublayer's backward pass has two such kernels,
whose rows differ in number and width. Rows are added in a fixed order, so that results are bitwise reproducible.

Shapes: P and Q programs, X and Y columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements per program and iteration, enough to sum all rows in a few iterations; columns, 128 bytes or more of a row.
TILE = 8192
MIN_COLUMNS = 32
MAX_COLUMNS = 256
NUM_WARPS = 8


@triton.jit
def _sum_columns(partial_ptr, sum_ptr, block, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < num_columns
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_rows, ROWS):
        offset = (first + row).to(tl.int64)[:, None] * num_columns + column[None, :]
        total += tl.load(partial_ptr + offset, mask=(first + row < num_rows)[:, None] & is_column[None, :], other=0.0)
    tl.store(sum_ptr + column, tl.sum(total, axis=0), mask=is_column)


@triton.jit
def _partial_sums_kernel(
    first_ptr, second_ptr, sum_ptr, num_first_rows, num_second_rows, num_first_columns, num_second_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    num_first_blocks = tl.cdiv(num_first_columns, COLUMNS)
    if block < num_first_blocks:
        _sum_columns(first_ptr, sum_ptr, block, num_first_rows, num_first_columns, ROWS, COLUMNS)
    else:
        _sum_columns(second_ptr, sum_ptr + num_first_columns, block - num_first_blocks, num_second_rows,
                     num_second_columns, ROWS, COLUMNS)  # fmt: skip


@torch.library.custom_op("electra_fast::partial_sums", mutates_args=())
def partial_sums(first_PX: Tensor, second_QY: Tensor) -> Tensor:
    """The sums over the rows of both tensors; contiguous fp32 [P, X], [Q, Y] → fp32 [X + Y]."""
    num_first_rows, width = first_PX.shape
    num_second_rows, second_width = second_QY.shape
    sums = first_PX.new_empty(width + second_width)
    # About 256 programs if there are enough columns.
    columns = min(max(triton.next_power_of_2(sums.numel() // 256), MIN_COLUMNS), MAX_COLUMNS)
    _partial_sums_kernel[(triton.cdiv(width, columns) + triton.cdiv(second_width, columns),)](
        first_PX, second_QY, sums, num_first_rows, num_second_rows, width, second_width,
        ROWS=TILE // columns, COLUMNS=columns, num_warps=NUM_WARPS,
    )  # fmt: skip
    return sums


@partial_sums.register_fake
def _(first_PX, second_QY):
    return first_PX.new_empty(first_PX.shape[1] + second_QY.shape[1])
