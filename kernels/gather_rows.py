"""Rows of a matrix by index, with a gradient that is summed in a fixed order (torch's own operators).

Registered as custom operators so that torch.compile does not decompose them: inductor turns the
gradient of an embedding, or of indexing, into atomic adds, which are not reproducible.
`embedding_dense_backward` sorts the indices instead.

Shapes: R rows of the matrix, D columns, M gathered rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("electra_fast::gather_rows", mutates_args=())
def gather_rows(x_RD: Tensor, index_M: Tensor) -> Tensor:
    """x[index]; float [R, D], int [M] → [M, D]."""
    return x_RD.index_select(0, index_M)


@torch.library.custom_op("electra_fast::add_rows", mutates_args=())
def add_rows(dy_MD: Tensor, index_M: Tensor, num_rows: int) -> Tensor:
    """Gradient of `gather_rows`: adds row m of dy to row index[m] of zeros; [M, D], [M] → [R, D]."""
    dx_RD: Tensor = torch.ops.aten.embedding_dense_backward(dy_MD.contiguous(), index_M, num_rows, -1, False)
    return dx_RD


@gather_rows.register_fake
def _(x_RD, index_M):
    return x_RD.new_empty((index_M.shape[0], x_RD.shape[1]))


@add_rows.register_fake
def _(dy_MD, index_M, num_rows):
    return dy_MD.new_empty((num_rows, dy_MD.shape[1]))


def _save(ctx, inputs, output):
    x_RD, index_M = inputs
    ctx.num_rows = x_RD.shape[0]
    ctx.save_for_backward(index_M)


def _gradients(ctx, dy_MD):
    return add_rows(dy_MD, *ctx.saved_tensors, ctx.num_rows), None


gather_rows.register_autograd(_gradients, setup_context=_save)
