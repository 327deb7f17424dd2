"""Exact samples from softmax(logits) and from fixed distributions, with a counter-based generator.

For logits, Gumbel-max over the logsumexps of tiles of 128 entries selects a tile, and a uniform number, mapped through
the inverse CDF of the tile, selects the entry. This is exact and needs far fewer random numbers than one per logit.
They depend only on (seed, step, slot, tile), so a slot gets the same sample in any micro-batch, on any rank and with
any backend. Seed and step are in a device tensor, so that every replay of a captured graph reads the current values.
The alias method samples from a fixed distribution, in constant time per slot.

The last word of Philox's counter identifies the use: 0 and 1 for logits, 2 for the alias method, 2^16 and above for
dropout.

Shapes: M masked slots, V vocabulary, K tiles, t entries of one tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from electra_fast.errors import InputError

TILE = 128
_MASK32 = 0xFFFFFFFF
_UNITS = 2**32  # units of probability per row of an alias table
# Philox4x32-10 (Salmon et al., 2011): multipliers and Weyl constants.
_M0 = 0xD2511F53
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words; four broadcast counter words → four words."""
    c0, c1, c2, c3 = counter
    rounds = torch.arange(10, device=key[0].device)
    keys = ((key[0] + rounds * _W0) & _MASK32).unbind(), ((key[1] + rounds * _W1) & _MASK32).unbind()
    for k0, k1 in zip(*keys, strict=True):
        # int64 products wrap modulo 2^64, so their bits equal those bits of the unsigned product.
        product0 = c0 * _M0
        product1 = c2 * _M1
        c0 = ((product1 >> 32) & _MASK32) ^ c1 ^ k0
        c1 = product1 & _MASK32
        c2 = ((product0 >> 32) & _MASK32) ^ c3 ^ k1
        c3 = product0 & _MASK32
    return c0, c1, c2, c3


def _uniform(word: Tensor) -> Tensor:
    """Maps a 32-bit word to fp32 in (0, 1], evenly spaced near 0, where resolution matters."""
    return (word.float() + 0.5) * 2.0**-32


def _exponential(uniform: Tensor) -> Tensor:
    """-log(1 - u) in fp32, from its series where 1 - u would lose precision."""
    series = uniform * (1 + uniform * (0.5 + uniform / 3))
    return torch.where(uniform < 2**-10, series, -torch.log(1 - uniform))


def wide(x: Tensor) -> Tensor:
    """Casts x to fp32 unless its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def modify_logits(logits_MV: Tensor, target_M: Tensor, temperature: float, disallow_correct: bool) -> Tensor:
    """Returns the logits for sampling: divided by the temperature and, with `disallow_correct`, without the target.

    To exclude the target, 1000 is subtracted from its logit, as in the published code.
    """
    if temperature != 1.0:
        logits_MV = logits_MV.float() / temperature
    if disallow_correct:
        penalty = torch.full_like(target_M, -1000, dtype=logits_MV.dtype)[:, None]
        logits_MV = logits_MV.scatter_add(1, target_M[:, None], penalty)
    return logits_MV


def sample_categorical(logits_MV: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    """Returns one sample of softmax(logits) per row, as in `ops.generator_head`; [M, V] → int64 [M].

    `slot_M` (int64) is the index of each masked slot within the step; `seed_and_step` (int64 [2]) is on
    the device of the logits.
    """
    num_slots, vocab_size = logits_MV.shape
    num_tiles = math.ceil(vocab_size / TILE)
    padding = num_tiles * TILE - vocab_size
    tiles_MKt = torch.nn.functional.pad(logits_MV.detach().float(), (0, padding), value=-math.inf)
    tiles_MKt = tiles_MKt.view(num_slots, num_tiles, TILE)
    noise = draw_noise(num_tiles, slot_M, seed_and_step)
    tile_M = noise.choose_tile(tiles_MKt.logsumexp(-1))
    chosen_Mt = take_along_rows(tiles_MKt, tile_M)
    exp_Mt = (chosen_Mt - chosen_Mt.amax(-1, keepdim=True)).exp()
    return tile_M * TILE + noise.choose_within_tile(exp_Mt)


def take_along_rows(values: Tensor, index_M: Tensor) -> Tensor:
    """Returns one entry of each row along dimension 1; [M, n, ...], int64 [M] → [M, ...]."""
    return values[torch.arange(values.shape[0], device=values.device), index_M]


@dataclass(frozen=True)
class Noise:
    """Random numbers per slot: a Gumbel number per tile, and a uniform number in (0, 1]."""

    gumbel_MK: Tensor
    uniform_M1: Tensor

    def choose_tile(self, lse_MK: Tensor) -> Tensor:
        """Chooses one tile per row by Gumbel-max over the logsumexps of the tiles; [M, K] → int64 [M]."""
        return (lse_MK + self.gumbel_MK).argmax(-1)

    def choose_within_tile(self, exp_Mt: Tensor) -> Tensor:
        """Chooses one entry per row in proportion to its exponential, with the inverse CDF; [M, t] → int64 [M]."""
        # The first entry of positive probability whose cumulative sum reaches the threshold. The sums of a parallel
        # scan may decrease by rounding, so entries of probability 0 are excluded, and the largest sum is the total.
        cumulative_Mt = exp_Mt.cumsum(-1).where(exp_Mt > 0, 0)
        reaches_Mt = cumulative_Mt >= self.uniform_M1 * cumulative_Mt.amax(-1, keepdim=True)
        return reaches_Mt.int().argmax(-1)


def draw_noise(num_tiles: int, slot_M: Tensor, seed_and_step: Tensor) -> Noise:
    """Returns the random numbers of these slots.

    The counter is (q, slot, step, 0) for tiles 4q … 4q + 3, and (0, slot, step, 1) for the uniform number.
    """
    num_quads = -(-num_tiles // 4)
    seed = seed_and_step[0]
    step = seed_and_step[1]
    column = torch.arange(num_quads + 1, device=slot_M.device)
    is_last = (column == num_quads).long()
    counter = (column * (1 - is_last), slot_M[:, None], step, is_last)
    words = philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    word_MK = torch.stack([word[:, :num_quads] for word in words], dim=-1).flatten(1)[:, :num_tiles]
    return Noise(-torch.log(_exponential(_uniform(word_MK))), _uniform(words[0][:, num_quads:]))


def alias_table(weights_V: Tensor) -> Tensor:
    """Returns the table for `sample_alias_reference`, which samples in proportion to `weights_V`, fp64 [V].

    Walker's alias method in Vose's form (1991), in integers: each entry gets its part of V * 2^32 units, rounded, and
    the heaviest entry gets the remainder. Each probability is therefore exact to 2^-32, an entry of weight 0 is never
    sampled, and the same weights give the same table on every machine.

    Returns:
        int64 [V, 2] on the weights' device: the threshold, below which a 32-bit word selects the row's entry (2^32:
        always), and the alias, which is the sample otherwise.

    Raises:
        ValueError: A weight is negative, infinite or not a number, or none is above 0.
    """
    device = weights_V.device
    weights_V = weights_V.double().cpu()
    usable_V = weights_V.isfinite() & (weights_V >= 0)
    if not usable_V.all():
        entry = int(usable_V.int().argmin())
        raise InputError(f"weight of entry {entry} = {weights_V[entry].item()}: must be finite and at least 0")
    if not weights_V.any():
        raise InputError(f"the weights of all {len(weights_V)} entries are 0: at least one must be above 0")
    units = _in_units(weights_V)
    alias = list(range(len(units)))
    light = [entry for entry, count in enumerate(units) if count < _UNITS]
    heavy = [entry for entry, count in enumerate(units) if count > _UNITS]
    while light:  # in integers, the excess of heavy entries over 2^32 exactly equals the deficit of light ones
        entry = light.pop()
        giver = heavy[-1]
        alias[entry] = giver
        units[giver] -= _UNITS - units[entry]
        if units[giver] <= _UNITS:
            heavy.pop()
        if units[giver] < _UNITS:
            light.append(giver)
    return torch.tensor([units, alias], device="cpu").T.contiguous().to(device)


def _in_units(weights_V: Tensor) -> list[int]:
    """Returns the weights as integers that sum to V * 2^32."""
    relative_V = weights_V / weights_V.max()  # the sum of large weights could overflow
    # math.fsum rounds once; the result of torch's sum depends on the number of threads.
    scale = len(weights_V) * _UNITS / math.fsum(relative_V.tolist())
    units_V = (relative_V * scale).round().long()
    units_V[relative_V.argmax()] += len(weights_V) * _UNITS - units_V.sum()
    return units_V.tolist()


def sample_alias_reference(table_V2: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    """Returns one sample per slot from the distribution of an `alias_table`; int64 [V, 2], int64 [M] → int64 [M].

    Slots, seed and step are as in `sample_categorical`. The counter is (0, slot, step, 2). The first word chooses a row
    of the table, each with probability 1 / V to 2^-32 (V < 2^31). The second chooses the row's entry or its alias.
    """
    seed, step = seed_and_step.unbind()
    counter = (torch.zeros_like(step), slot_M, step, torch.full_like(step, 2))
    word_M, coin_M, *_ = philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    entry_M = (word_M * table_V2.shape[0]) >> 32
    threshold_M, alias_M = table_V2[entry_M].unbind(1)
    return torch.where(coin_M < threshold_M, entry_M, alias_M)
