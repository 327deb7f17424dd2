"""Samples from a fixed distribution with the alias method, in one pass over the slots (Triton).

Replaces the generator head if the proposal distribution does not depend on the input. Contract:
`sample_alias` in `electra_fast.ops.operations`; table and reference: `electra_fast.ops.sampling`.

Shapes: M masked slots, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from electra_fast.kernels.rng import philox4

SLOTS = 256
NUM_WARPS = 4


@triton.jit
def _sample_alias_kernel(
    table_ptr, slot_ptr, seed_and_step_ptr, sample_ptr, num_slots, vocab_size, SLOTS: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    mask = m < num_slots
    slot = tl.load(slot_ptr + m, mask=mask, other=0)
    seed = tl.load(seed_and_step_ptr)
    step = tl.load(seed_and_step_ptr + 1)
    word, coin, _, _ = philox4(seed, step, slot, 0, 2)
    # 2^32 * V is below 2^63. Threads past the last slot also read a valid entry of the table.
    entry = (word.to(tl.uint32).to(tl.int64) * vocab_size) >> 32
    # Two loads from one 32-byte sector. A single load of 16 bytes would be split through shared memory.
    threshold = tl.load(table_ptr + 2 * entry)
    alias = tl.load(table_ptr + 2 * entry + 1)
    sample = tl.where(coin.to(tl.uint32).to(tl.int64) < threshold, entry, alias)
    tl.store(sample_ptr + m, sample, mask=mask)


@torch.library.custom_op("electra_fast::sample_alias", mutates_args=())
def sample_alias(table_V2: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    """int64 [V, 2], [M] and [2] → one sample per slot, int64 [M]."""
    sample_M = torch.empty(slot_M.shape, dtype=torch.int64, device=slot_M.device)
    num_slots = slot_M.shape[0]
    if num_slots == 0:
        return sample_M
    _sample_alias_kernel[(triton.cdiv(num_slots, SLOTS),)](
        table_V2.contiguous(), slot_M.contiguous(), seed_and_step.contiguous(), sample_M, num_slots,
        table_V2.shape[0], SLOTS=SLOTS, num_warps=NUM_WARPS,
    )  # fmt: skip
    return sample_M


@sample_alias.register_fake
def _(table_V2: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    return slot_M.new_empty(slot_M.shape, dtype=torch.int64)
