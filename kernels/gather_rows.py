"""Rows of a matrix by index, with a gradient that always adds in the same order (torch's own operators).

Registered as one operator each way, so that torch.compile leaves it whole: inductor would decompose the
gradient of an embedding, or of indexing, into atomic additions, whose last bits change from run to run.
`embedding_dense_backward` sorts the indices instead.

Shapes: R rows of the matrix, D columns, M rows taken.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("electra_fast::gather_rows", mutates_args=())
def gather_rows(x_RD: Tensor, index_M: Tensor) -> Tensor:
    """x[index]; any float [R, D], integers [M] below R → [M, D]."""
    return x_RD.index_select(0, index_M)


@torch.library.custom_op("electra_fast::add_rows", mutates_args=())
def add_rows(dy_MD: Tensor, index_M: Tensor, num_rows: int) -> Tensor:
    """Zeros [R, D] with row m of dy added to row index[m]: the gradient of `gather_rows`."""
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
