"""The discriminator's input and labels from the generator's samples, in one pass over the rows (Triton).

Runs between the two networks. Contract and reference: `corrupt` in `electra_fast.ops.operations`. Every token compares
its position with all slots of its row: the B*L*N comparisons are cheaper than the buffers and the fixed order that a
deterministic scatter-add would need.

Shapes: B rows, L row length, T = B*L tokens, N slots per row, M = B*N slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
SLOTS = 16  # compared per iteration
NUM_WARPS = 4


@triton.jit
def _corrupt_kernel(
    masked_ids_ptr, position_ptr, original_ptr, sample_ptr, corrupted_ptr, replaced_ptr, length, num_slots,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    mask = column < length
    token = row * length + column
    masked_id = tl.load(masked_ids_ptr + token, mask=mask, other=0)

    total = tl.zeros([TOKENS], dtype=tl.int64)
    num_draws = tl.zeros([TOKENS], dtype=tl.int32)
    original = tl.full([TOKENS], -1, dtype=tl.int64)
    for first in range(0, num_slots, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        exists = slot < num_slots
        slot_index = row * num_slots + slot
        position = tl.load(position_ptr + slot_index, mask=exists, other=-1) - row * length
        # The position of an unused slot is past the end of the buffer, so also past the row's end.
        slot_column = tl.where(exists & (position < length), position, -1).to(tl.int32)
        sample = tl.load(sample_ptr + slot_index, mask=exists, other=0)
        slot_original = tl.load(original_ptr + slot_index, mask=exists, other=-1)
        hit = column[:, None] == slot_column[None, :]
        total += tl.sum(tl.where(hit, sample[None, :], 0), axis=1)
        num_draws += tl.sum(hit.to(tl.int32), axis=1)
        original = tl.maximum(original, tl.max(tl.where(hit, slot_original[None, :], -1), axis=1))

    drawn = num_draws > 0
    # Ids are non-negative, so truncating division is the floor.
    mean = total // tl.maximum(num_draws, 1)
    corrupted = tl.where(drawn, mean, masked_id)
    tl.store(corrupted_ptr + token, corrupted.to(corrupted_ptr.dtype.element_ty), mask=mask)
    tl.store(replaced_ptr + token, drawn & (mean != original), mask=mask)


@torch.library.custom_op("electra_fast::corrupt", mutates_args=())
def corrupt(masked_ids_BL: Tensor, position_M: Tensor, original_M: Tensor, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    """int [B, L] and int64 [M] slots in row order → corrupted ids [T] in the masked ids' dtype, labels bool [T]."""
    num_rows, length = masked_ids_BL.shape
    corrupted_T = torch.empty(num_rows * length, dtype=masked_ids_BL.dtype, device=masked_ids_BL.device)
    replaced_T = torch.empty(num_rows * length, dtype=torch.bool, device=masked_ids_BL.device)
    if corrupted_T.numel() == 0:
        return corrupted_T, replaced_T
    num_slots = position_M.shape[0] // num_rows
    _corrupt_kernel[(num_rows, triton.cdiv(length, TOKENS))](
        masked_ids_BL.contiguous(), position_M.contiguous(), original_M.contiguous(), sample_M.contiguous(),
        corrupted_T, replaced_T, length, num_slots,
        TOKENS=TOKENS, SLOTS=SLOTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return corrupted_T, replaced_T


@corrupt.register_fake
def _(masked_ids_BL: Tensor, position_M: Tensor, original_M: Tensor, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens = masked_ids_BL.shape[0] * masked_ids_BL.shape[1]
    return masked_ids_BL.new_empty(num_tokens), masked_ids_BL.new_empty(num_tokens, dtype=torch.bool)
