"""The discriminator's verdicts on the words of corrupted validation text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.errors import InputError
from electra_fast.huggingface.export import load
from electra_fast.model.compute import ComputeConfig
from electra_fast.objectives import objective_of
from electra_fast.objectives.objective import MicroBatch, RngKey
from electra_fast.training.evaluate import SEED

NUM_SENTENCES = 6


@dataclass(frozen=True)
class Word:
    """A word after corruption by the generator, with the discriminator's probability that it was replaced."""

    text: str
    original: str
    is_replaced: bool
    probability: float

    @property
    def verdict(self) -> str:
        """`original`, `doubtful` or `replaced`."""
        return "replaced" if self.probability > 0.5 else "doubtful" if self.probability > 0.25 else "original"


@torch.no_grad()
def verdicts(run: Path, corpus: Corpus) -> list[list[Word]]:
    """Returns validation rows as the generator corrupted them, with the discriminator's verdict on each word.

    Raises InputError if the newest checkpoint has no discriminator, or the corpus no validation split or another
    vocabulary.
    """
    model = load(run)
    config = model.config
    validation, tokenizer = corpus.holdout, Tokenizer.of(corpus)
    if validation is None:
        raise InputError("the corpus has no validation split (`electra-fast prepare --holdout`)")
    if corpus.vocab_size != config.model.vocab_size:
        raise InputError(f"the corpus has {corpus.vocab_size} vocabulary entries, the run {config.model.vocab_size}")
    loader = BatchLoader.from_config(config, corpus=validation, batch_size=NUM_SENTENCES, seed=SEED, epochs=1)
    batch, objective = to_torch(next(loader)), objective_of(config)
    key, denominators = RngKey(torch.tensor([SEED, 0])), objective.loss_denominators(batch)
    output = objective.forward(model, MicroBatch(batch, ComputeConfig("sdpa", torch.float32), key, denominators))
    predictions = output.predictions
    if predictions is None:
        raise InputError(f"objective.name = {config.objective.name} has no discriminator")
    shape = batch["input_ids"].shape
    original = batch["input_ids"].long().scatter(1, batch["masked_positions"].long(), batch["masked_ids"].long())
    replaced_prob_T = predictions.logits_T.sigmoid()
    columns = (original, predictions.corrupted_ids_T, predictions.replaced_T, replaced_prob_T, batch["segment_ids"])
    rows = zip(*(column.view(shape).tolist() for column in columns), strict=True)
    return [_words(tokenizer, *row) for row in rows]


def _words(
    tokenizer: Tokenizer,
    original: list[int],
    corrupted: list[int],
    replaced: list[bool],
    probability: list[float],
    segments: list[int],
) -> list[Word]:
    """One row with its pieces joined into words; a word's probability is the maximum over its pieces."""
    special = set(tokenizer.special_tokens.values())
    words: list[Word] = []
    for i, token_id in enumerate(corrupted):
        if not segments[i] or original[i] in special:
            continue
        piece, original_piece = tokenizer.id_to_token(token_id), tokenizer.id_to_token(original[i])
        if not original_piece.startswith("##"):
            words.append(Word(piece, original_piece, replaced[i], probability[i]))
        elif words:  # otherwise the row starts inside a word
            words[-1] = Word(
                words[-1].text + piece.removeprefix("##"),
                words[-1].original + original_piece.removeprefix("##"),
                words[-1].is_replaced or replaced[i],
                max(words[-1].probability, probability[i]),
            )
    return words
