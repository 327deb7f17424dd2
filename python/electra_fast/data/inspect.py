"""Inspects a corpus: counts, fractions, and one packed and masked row as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from electra_fast import _data
from electra_fast.config.config import Config, DataConfig
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.mixture import Mixture
from electra_fast.data.prepare_report import contents
from electra_fast.messages import printable
from electra_fast.results import Result, table_lines


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Result):
    """Statistics of a corpus and of its rows of a given length, and one of these rows as text.

    `rows` and `tokens_per_row` refer to packing `best-fit`. For each packing, there are the rows of an epoch, the
    tokens kept and dropped, and the fraction of positions that are not padding. The row has a line per segment, and
    masked positions as `[MASK]` followed by the original.
    """

    content_hash: str
    documents: int
    tokens: int
    tokens_per_document: float
    bytes_per_token: float
    vocab_size: int
    unknown_share: float
    """[UNK] per token, measured like `tokens_per_word` on at most 2^24 evenly spaced tokens."""
    tokens_per_word: float | None
    """None for a tokenizer that does not mark words."""
    held_out_documents: int
    held_out_tokens: int
    sequence_length: int
    rows: int
    tokens_per_row: float
    best_fit_rows: int
    best_fit_tokens_kept: int
    best_fit_tokens_dropped: int
    best_fit_fill: float
    examples_rows: int
    examples_tokens_kept: int
    examples_tokens_dropped: int
    examples_fill: float
    row: str

    def lines(self) -> Iterator[str]:
        yield from table_lines({name: value for name, value in self.items() if name != "row"})
        yield from self.row.split("\n")


def inspect(
    corpus: str | Path,
    *,
    sequence_length: int = DataConfig.sequence_length,
    masking: str = DataConfig.masking,
    mask_prob: float = DataConfig.mask_prob,
    packing: str = DataConfig.packing,
    cut_at: str = DataConfig.cut_at,
    seed: int = 0,
) -> Inspection:
    """Summarizes a corpus and its validation set, and shows one of its packed, masked rows as text.

    Args:
        corpus: Folder or URL of a corpus.
        sequence_length: Tokens per row, including special tokens.
        masking: Masking of the row, as in `BatchLoader`.
        mask_prob: Fraction of the row's tokens to mask.
        packing: Packing of documents into rows, as in `BatchLoader`.
        cut_at: Positions at which a document may be cut, as in `BatchLoader`.
        seed: Selects the row.

    Raises:
        FileNotFoundError: The corpus does not exist.
        ValueError: As in `BatchLoader`.
    """
    options: dict[str, Any] = {"masking": masking, "mask_prob": mask_prob, "packing": packing, "cut_at": cut_at}
    loader = BatchLoader(corpus, sequence_length=sequence_length, batch_size=1, seed=seed, epochs=1, **options)
    opened = Corpus(corpus)
    validation = Corpus(opened.holdout) if opened.holdout else None
    coverage = opened.coverage()
    num_tokens = opened.num_tokens
    packings: dict[str, Any] = {}
    for name in _data.PACKINGS:
        rows = contents(corpus, name, sequence_length)
        prefix = name.replace("-", "_")
        packings |= {f"{prefix}_rows": rows.rows, f"{prefix}_fill": rows.fill}
        packings |= {f"{prefix}_tokens_kept": rows.tokens, f"{prefix}_tokens_dropped": num_tokens - rows.tokens}
    return Inspection(
        content_hash=opened.content_hash,
        documents=len(opened),
        tokens=num_tokens,
        tokens_per_document=num_tokens / max(1, len(opened)),
        bytes_per_token=opened.bytes_per_token,
        vocab_size=opened.vocab_size,
        unknown_share=coverage.unknown_share,
        tokens_per_word=coverage.tokens_per_word,
        held_out_documents=len(validation or ()),
        held_out_tokens=validation.num_tokens if validation else 0,
        sequence_length=sequence_length,
        rows=packings["best_fit_rows"],
        tokens_per_row=num_tokens / max(1, packings["best_fit_rows"]),
        row=next(_texts_of(to_torch(next(loader)), Tokenizer.of(opened))),
        **packings,
    )


def rows_as_text(config: Config, num_rows: int) -> Iterator[str]:
    """Yields lines of a run's first rows: one segment per line, masked positions as [MASK](original)."""
    tokenizer = Tokenizer.of(Mixture(config.data.corpus).corpora[0])
    batch = next(BatchLoader.from_config(config, batch_size=num_rows, num_threads=1, prefetch=1))
    for number, text in enumerate(_texts_of(to_torch(batch), tokenizer)):
        yield f"row {number}:"
        yield from text.split("\n")


def _texts_of(batch: Mapping[str, torch.Tensor], tokenizer: Tokenizer) -> Iterator[str]:
    columns = ("input_ids", "segment_ids", "masked_positions", "masked_ids", "masked_weights")
    for ids, segments, *slots in zip(*(batch[name].tolist() for name in columns), strict=True):
        originals = {position: token_id for position, token_id, weight in zip(*slots, strict=True) if weight}
        text = ""
        for position, token_id in enumerate(ids[: segments.index(0) if 0 in segments else None]):
            token = printable(tokenizer.id_to_token(token_id))
            original = originals.get(position)
            text += token if original is None else f"{token}({printable(tokenizer.id_to_token(original))})"
            text += "\n" if token == "[SEP]" else " "
        yield text.rstrip()
