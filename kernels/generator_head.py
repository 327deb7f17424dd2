"""Cross-entropy, samples and argmax of the generator over its table, at the masked positions (Triton).

Contract and reference: `generator_head` in `electra_fast.ops.operations`. This file registers the operation for
autograd and compilers. One of two paths computes it: `generator_head_narrow` (16-bit, E up to 256; bound by the
softmax, so it never stores logits) or `generator_head_chunked` (wider, or fp32; bound by the products, so cuBLAS
computes them).

Shapes: M masked slots, V vocabulary, E embedding, P = V padded to whole tiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels import generator_head_chunked as chunked
from electra_fast.kernels import generator_head_narrow as narrow
from electra_fast.kernels import launch

TILE = 128
NARROW_WIDTHS = (16, 32, 64, 128, 256)
NARROW_DTYPES = (torch.bfloat16, torch.float16)

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _pad_table_kernel(
    table_ptr, bias_ptr, weight_ptr, padded_bias_ptr, vocab_size,
    WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    e = tl.arange(0, BLOCK_E)
    mask = (entry < vocab_size)[:, None] & (e < WIDTH)[None, :]
    row = entry.to(tl.int64)[:, None]
    table = tl.load(table_ptr + row * WIDTH + e[None, :], mask=mask, other=0.0)
    tl.store(weight_ptr + row * PADDED_WIDTH + e[None, :], table.to(weight_ptr.dtype.element_ty),
             mask=(e < PADDED_WIDTH)[None, :])  # fmt: skip
    # Entries past the vocabulary have probability 0.
    bias = tl.load(bias_ptr + entry, mask=entry < vocab_size, other=-float("inf"))
    tl.store(padded_bias_ptr + entry, bias.to(padded_bias_ptr.dtype.element_ty))


def _narrow_width(x_ME: Tensor) -> int | None:
    """The table's padded width on the narrow path, or None on the chunked path."""
    card = launch.card(x_ME.device)
    # AMD's GPUs have 64 KiB of shared memory, but E = 128 needs 98.
    if x_ME.dtype not in NARROW_DTYPES or card.is_rocm or not launch.has_tensor_cores(x_ME.device):
        return None
    # E = 256 needs 193 KiB on Hopper, but 258 of 227 on Blackwell and 161 of 99 on smaller GPUs.
    widths = NARROW_WIDTHS if card.is_hopper else NARROW_WIDTHS[:-1]
    return next((width for width in widths if x_ME.shape[1] <= width), None)


def _empty_padded(x_ME: Tensor, table_VE: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialized weight (in x's dtype) and bias, padded as the path requires."""
    vocab_size, width = table_VE.shape
    narrow_width = _narrow_width(x_ME)
    num_entries = (vocab_size + TILE - 1) // TILE * TILE
    bias_dtype = torch.float32 if narrow_width else x_ME.dtype
    return x_ME.new_empty((num_entries, narrow_width or width)), x_ME.new_empty(num_entries, dtype=bias_dtype)


def _pad_table(x_ME: Tensor, table_VE: Tensor, bias_V: Tensor) -> tuple[Tensor, Tensor]:
    weight, bias = _empty_padded(x_ME, table_VE)
    block_e = triton.next_power_of_2(weight.shape[1])
    block_v = min(TILE, max(1, 4096 // block_e))
    _pad_table_kernel[(weight.shape[0] // block_v,)](
        table_VE.contiguous(), bias_V, weight, bias, table_VE.shape[0],
        WIDTH=table_VE.shape[1], PADDED_WIDTH=weight.shape[1], BLOCK_E=block_e, BLOCK_V=block_v,
    )  # fmt: skip
    return weight, bias


@torch.library.custom_op("electra_fast::generator_head", mutates_args=())
def _generator_head(
    x_ME: Tensor, table_VE: Tensor, bias_V: Tensor, target_M: Tensor, slot_M: Tensor, seed_and_step: Tensor | None,
    temperature: float, disallow_correct: bool, with_gradient: bool,
) -> Outputs:  # fmt: skip
    """(nll, sample, correct, logsumexp, the path's saved tensors, padded weight, padded bias)."""
    kernels = narrow if _narrow_width(x_ME) else chunked
    weight, bias = _pad_table(x_ME, table_VE, bias_V)
    nll_M, sample_M, correct_M, lse_M, saved = kernels.forward(
        x_ME.contiguous(), weight, bias, target_M.contiguous(), slot_M.contiguous(), seed_and_step,
        temperature, disallow_correct, with_gradient,
    )  # fmt: skip
    return nll_M, sample_M, correct_M, lse_M, saved, weight, bias


@_generator_head.register_fake
def _(x_ME, table_VE, bias_V, target_M, slot_M, seed_and_step, temperature, disallow_correct, with_gradient):
    num_rows = x_ME.shape[0]
    nll_M, lse_M = (x_ME.new_empty(num_rows, dtype=torch.float32) for _ in range(2))
    sample_M = x_ME.new_empty(0 if seed_and_step is None else num_rows, dtype=torch.int64)
    weight, bias = _empty_padded(x_ME, table_VE)
    if _narrow_width(x_ME):
        saved = x_ME.new_empty(x_ME.shape if with_gradient else (0,), dtype=torch.float32)
    else:
        sizes = (num_rows, weight.shape[0], x_ME.element_size(), launch.memory_bytes(x_ME.device))
        num_saved = chunked.num_saved_rows(*sizes) if with_gradient else 0
        saved = x_ME.new_empty((num_saved, weight.shape[0]))
    return nll_M, sample_M, x_ME.new_empty(num_rows, dtype=torch.bool), lse_M, saved, weight, bias


@torch.library.custom_op("electra_fast::generator_head_backward", mutates_args=())
def _generator_head_backward(
    grad_M: Tensor, x_ME: Tensor, target_M: Tensor, lse_M: Tensor, saved: Tensor, weight: Tensor, bias: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, the table and the bias from the gradient of nll."""
    kernels = narrow if _narrow_width(x_ME) else chunked
    grad_M = grad_M.contiguous()
    x_ME = x_ME.contiguous()
    target_M = target_M.contiguous()
    gradients: tuple[Tensor, Tensor, Tensor] = kernels.backward(
        grad_M, x_ME, weight, bias, target_M, lse_M, saved, vocab_size
    )
    return gradients


@_generator_head_backward.register_fake
def _(grad_M, x_ME, target_M, lse_M, saved, weight, bias, vocab_size):
    table_grad = x_ME.new_empty((vocab_size, x_ME.shape[1]), dtype=torch.float32)
    return x_ME.new_empty(x_ME.shape), table_grad, x_ME.new_empty(vocab_size, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x_ME, table_VE, _, target_M, *_ = inputs
    _, sample_M, correct_M, lse_M, saved, weight, bias = output
    ctx.save_for_backward(x_ME, target_M, lse_M, saved, weight, bias)
    ctx.mark_non_differentiable(sample_M, correct_M, lse_M, saved, weight, bias)
    ctx.set_materialize_grads(False)
    ctx.vocab_size = table_VE.shape[0]
    ctx.with_gradient = inputs[-1]


def _backward(ctx: Any, grad_M: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if grad_M is None:
        return (None,) * 9
    if not ctx.with_gradient:
        raise RuntimeError("generator_head has no gradient, because its forward pass ran with with_gradient=False")
    gradients = torch.ops.electra_fast.generator_head_backward(grad_M, *ctx.saved_tensors, ctx.vocab_size)
    return (*gradients, *(None,) * 6)


_generator_head.register_autograd(_backward, setup_context=_setup_context)


def generator_head(
    x_ME: Tensor, table_VE: Tensor, bias_V: Tensor, target_M: Tensor, slot_M: Tensor, seed_and_step: Tensor | None,
    temperature: float, disallow_correct: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """(nll_M, sample_M or None, correct_M), as in `ops.generator_head_reference`."""
    with_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_ME, table_VE, bias_V))
    nll_M, sample_M, correct_M, *_ = _generator_head(
        x_ME, table_VE, bias_V, target_M, slot_M, seed_and_step, temperature, disallow_correct, with_gradient,
    )  # fmt: skip
    return nll_M, None if seed_and_step is None else sample_M, correct_M
