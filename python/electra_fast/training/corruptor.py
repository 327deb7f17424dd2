"""A fixed source of replacements for all models of a comparison, so that they read the same corrupted text.

Its samples depend only on the seed, the row's number in the loader's stream and the masked text.

Shapes: B rows, L row length, T = B*L flat tokens, N mask slots per row, M = B*N slots, V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from electra_fast.data.corpus import Corpus
from electra_fast.data.mixture import Mixture
from electra_fast.errors import InputError
from electra_fast.huggingface.folder import read_model
from electra_fast.huggingface.source import tokenizer_folder
from electra_fast.huggingface.tokenizer import check_vocabulary
from electra_fast.model.compute import ComputeConfig
from electra_fast.model.model import Electra
from electra_fast.objectives.objective import MicroBatch, RngKey, read_inputs
from electra_fast.ops import operations as ops
from electra_fast.ops.operations import use_impl
from electra_fast.ops.sampling import alias_table, philox

UNIGRAM = "unigram"
"""The name of the source that samples from the token counts of the corpus."""
UNIGRAM_LENGTH = 128
"""Default number of tokens per row with `UNIGRAM`."""
# Last word of Philox's counter; `objective.random_words` lists the others.
_STREAM = 5
# Slots whose logits are in memory at the same time: in fp64, 256 slots with 30,000 logits are 61 MB.
_CHUNK = 256
_MASK32 = 0xFFFFFFFF

# A sample must not depend on batch size, threads or device, but floating-point sums do. In fp64 they differ by 1e-16,
# which changes one sample in about 10^10 slots; fp32 would change samples in every long evaluation. Only the reference
# operations compute in fp64.
_COMPUTE = ComputeConfig("sdpa", torch.float64)


@dataclass(frozen=True)
class Corruptor:
    """Replaces masked tokens by samples, at temperature 1, of a generator network or of a fixed distribution.

    Args:
        generator: A model with a generator, or the `sampling.alias_table` of the distribution, int64 [V, 2].
        vocab_size: Size of the corpus's vocabulary, which bounds the samples.
        sequence_length: Default number of tokens per row.
        seed: Seed of the samples.
    """

    generator: Electra | Tensor
    vocab_size: int
    sequence_length: int
    seed: int

    @classmethod
    def unigram(cls, corpus: Corpus | Mixture, seed: int, device: torch.device) -> Self:
        """Samples in proportion to the token counts of a corpus or a mixture, which it reads."""
        table_V2 = alias_table(torch.from_numpy(corpus.token_counts())).to(device)
        return cls(table_V2, corpus.vocab_size, UNIGRAM_LENGTH, seed)

    @classmethod
    def load(cls, source: Path, corpus: Corpus, seed: int, device: torch.device) -> Self:
        """Loads the generator of a run, checkpoint or Hugging Face folder: a network or a fixed distribution.

        Raises FileNotFoundError if there is no model, and ValueError with the folder's name if it has no generator or
        a vocabulary that differs from the corpus's.
        """
        model = read_model(source).to(device)
        _check_vocabulary(source, model, corpus)
        shape = model.config.model
        data = model.config.data
        generator = _generator(source, model, corpus.vocab_size)
        return cls(generator, corpus.vocab_size, min(data.sequence_length, shape.max_positions), seed)

    @property
    def max_positions(self) -> int | None:
        """Length of the longest row that the generator can read, in tokens; None without a limit."""
        return None if isinstance(self.generator, Tensor) else max_positions(self.generator)

    @torch.no_grad()
    def sample(self, batch: Mapping[str, Tensor], first_row: int) -> Tensor:
        """Returns a sample for each mask slot of a batch. Samples in unused slots are meaningless.

        Args:
            batch: Tensors of `data.loader.to_torch`, masked at distinct positions.
            first_row: Number of the batch's first row in the loader's stream.

        Returns:
            int64 [B, N].
        """
        num_rows, slots_per_row = batch["masked_ids"].shape
        device = batch["masked_ids"].device
        seed_and_step = torch.tensor([self.seed, 0], device=device)
        number_M = torch.arange(num_rows * slots_per_row, device=device) + first_row * slots_per_row
        with use_impl("reference"):
            if isinstance(self.generator, Tensor):
                sample_M = ops.sample_alias(self.generator, number_M, seed_and_step)
            else:
                sample_M = self._sample_network(self.generator, batch, number_M, seed_and_step)
        return sample_M.view(num_rows, slots_per_row)

    def _sample_network(
        self, model: Electra, batch: Mapping[str, Tensor], number_M: Tensor, seed_and_step: Tensor
    ) -> Tensor:
        parts = zip(torch.split(masked_states(model, batch), _CHUNK), torch.split(number_M, _CHUNK), strict=True)
        samples = []
        for hidden_MD, number in parts:
            logits_MV = model.generator_head(hidden_MD, model.generator_embeddings.table)
            samples.append(sample_softmax(logits_MV[:, : self.vocab_size], number, seed_and_step))
        return torch.cat(samples)


@torch.no_grad()
def masked_states(model: Electra, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the generator's last hidden states at the mask slots, fp64 [M, D]; use with `use_impl("reference")`."""
    rng_key = RngKey(torch.zeros(2, dtype=torch.int64, device=batch["masked_ids"].device))  # unused
    inputs = read_inputs(model, MicroBatch(batch, _COMPUTE, rng_key))
    ids_T = inputs.masked_ids_BL.flatten()
    slots = inputs.slots.places
    return model.hidden("generator", ids_T, *inputs.context, slots=slots)


def sample_softmax(logits_MV: Tensor, slot_M: Tensor, seed_and_step: Tensor) -> Tensor:
    """Samples softmax(logits) per slot by inverting the CDF in fp64 at 64 random bits; [M, V] → int64 [M].

    Training uses `sampling.sample_categorical`, in fp32. It takes logarithms of random numbers, and their last bits
    differ between devices. Here the uniform number is computed exactly, from the first two words of Philox for the
    counter (0, slot, step, 5).
    """
    seed, step = seed_and_step.unbind()
    counter = (torch.zeros_like(step), slot_M, step, torch.full_like(step, _STREAM))
    high_M, low_M, *_ = philox(counter, (seed & _MASK32, (seed >> 32) & _MASK32))
    uniform_M1 = ((high_M.double() + (low_M.double() + 0.5) * 2.0**-32) * 2.0**-32)[:, None]
    cumulative_MV = logits_MV.double().softmax(-1).cumsum(-1)
    # The first entry whose cumulative sum reaches the threshold, so its probability is never 0.
    return (cumulative_MV < uniform_M1 * cumulative_MV[:, -1:]).sum(-1)


def corrupted_rows(batch: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the text of a batch with `sampled_ids` in place of masks, without padding: B tensors of int32 [≤ L]."""
    ids_BL = batch["input_ids"].clone()
    is_used_BN = batch["masked_weights"] > 0
    row_M = is_used_BN.nonzero()[:, 0]
    ids_BL[row_M, batch["masked_positions"][is_used_BN].long()] = batch["sampled_ids"][is_used_BN].to(ids_BL.dtype)
    return [ids_L[segments_L > 0] for ids_L, segments_L in zip(ids_BL, batch["segment_ids"], strict=True)]


def max_positions(model: Electra) -> int | None:
    """Returns the longest row that a model can read, in tokens; None for rotary positions, which have no limit."""
    return None if model.config.model.architecture == "modernbert" else model.config.model.max_positions


def _check_vocabulary(source: Path, model: Electra, corpus: Corpus) -> None:
    try:
        check_vocabulary(tokenizer_folder(source, model.config.model.vocab_size), corpus)
    except InputError as error:
        raise InputError(f"{source}: cannot corrupt this text: {error}") from None


def _generator(source: Path, model: Electra, vocab_size: int) -> Electra | Tensor:
    if "generator" in model.networks:
        return model
    if model.proposal is None:
        present = " and ".join(model.networks)
        raise InputError(f"{source}: has only the {present}, which cannot corrupt text; pass a folder with a generator")
    if not model.proposal.has_counts:
        raise InputError(
            f"{source}: a unigram generator's token counts are not exported; pass the run or one of its checkpoints"
        )
    table_V2 = model.proposal.table_V2
    if model.config.generator.kind == "uniform":  # the model's table may be larger than the vocabulary
        return alias_table(torch.ones(vocab_size)).to(table_V2.device)
    return table_V2
