"""The discriminator's input and labels from the generator's samples, in one pass over the rows (Triton).

Runs between the two networks; contract and reference are `ops.corrupt`. Every token looks through the
slots of its row, so nothing is scattered and no program waits for another: B*L*N comparisons are
cheaper than the buffers, and the order, of a scatter-add.

Shapes: B rows, L row length, T = B*L tokens, N slots a row, M = B*N slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
SLOTS = 16  # that a token looks at together
NUM_WARPS = 4


@triton.jit
def _corrupt_kernel(
    masked_ids_ptr, position_ptr, original_ptr, sample_ptr, corrupted_ptr, replaced_ptr, length, num_slots,
    TOKENS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    inside = place < length
    token = row * length + place
    masked_id = tl.load(masked_ids_ptr + token, mask=inside, other=0)

    total = tl.zeros([TOKENS], dtype=tl.int64)
    num_draws = tl.zeros([TOKENS], dtype=tl.int32)
    original = tl.full([TOKENS], -1, dtype=tl.int64)
    for first in range(0, num_slots, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        exists = slot < num_slots
        slot_index = row * num_slots + slot
        position = tl.load(position_ptr + slot_index, mask=exists, other=-1) - row * length
        # An unused slot's position lies behind the whole buffer, so behind the row too.
        drawn_place = tl.where(exists & (position < length), position, -1).to(tl.int32)
        sample = tl.load(sample_ptr + slot_index, mask=exists, other=0)
        slot_original = tl.load(original_ptr + slot_index, mask=exists, other=-1)
        hit = place[:, None] == drawn_place[None, :]
        total += tl.sum(tl.where(hit, sample[None, :], 0), axis=1)
        num_draws += tl.sum(hit.to(tl.int32), axis=1)
        original = tl.maximum(original, tl.max(tl.where(hit, slot_original[None, :], -1), axis=1))

    drawn = num_draws > 0
    # Ids are not negative, so truncation is the floor.
    mean = total // tl.maximum(num_draws, 1)
    corrupted = tl.where(drawn, mean, masked_id)
    tl.store(corrupted_ptr + token, corrupted.to(corrupted_ptr.dtype.element_ty), mask=inside)
    tl.store(replaced_ptr + token, drawn & (mean != original), mask=inside)


@torch.library.custom_op("electra_fast::corrupt", mutates_args=())
def corrupt(masked_ids_BL: Tensor, position_M: Tensor, original_M: Tensor, sample_M: Tensor) -> tuple[Tensor, Tensor]:
    """Corrupted ids [T], of the masked ids' dtype, and labels (bool [T]); slots are int64 [M], row by row."""
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
