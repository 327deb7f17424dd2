"""Inspects a corpus: counts, rates, and one packed and masked row as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from electra_fast import _data
from electra_fast.config.config import Config, DataConfig
from electra_fast.data.corpus import Corpus, Tokenizer
from electra_fast.data.loader import BatchLoader, to_torch
from electra_fast.data.mixture import Mixture
from electra_fast.data.prepare_report import contents
from electra_fast.messages import printable
from electra_fast.progress import result_console


def inspect(directory: str | Path, *, sequence_length: int = DataConfig.sequence_length) -> dict[str, Any]:
    """Statistics of a corpus and its validation split: documents, tokens, bytes per token, rows of a given length.

    `unknown_share` is [UNK] per token; `tokens_per_word` is `None` for a tokenizer that does not mark words. Both
    are measured on at most 2^24 evenly spaced tokens.

    `rows` and `tokens_per_row` are those of `best-fit`. For each packing, keys with its prefix (`best_fit_`,
    `examples_`) give the number of rows, the tokens kept and dropped, and the share of positions filled.
    """
    corpus = Corpus(directory)
    validation = Corpus(corpus.holdout) if corpus.holdout else None
    coverage = corpus.coverage()
    report = {
        "content_hash": corpus.content_hash,
        "documents": len(corpus),
        "tokens": corpus.num_tokens,
        "tokens_per_document": corpus.num_tokens / max(1, len(corpus)),
        "bytes_per_token": corpus.bytes_per_token,
        "vocab_size": corpus.vocab_size,
        "unknown_share": coverage.unknown_share,
        "tokens_per_word": coverage.tokens_per_word,
        "held_out_documents": len(validation) if validation else 0,
        "held_out_tokens": validation.num_tokens if validation else 0,
        "sequence_length": sequence_length,
    }
    for packing in _data.PACKINGS:
        kept, name = contents(directory, packing, sequence_length), packing.replace("-", "_")
        if packing == "best-fit":
            report |= {"rows": kept.rows, "tokens_per_row": corpus.num_tokens / max(1, kept.rows)}
        report |= {
            f"{name}_rows": kept.rows,
            f"{name}_tokens_kept": kept.tokens,
            f"{name}_tokens_dropped": corpus.num_tokens - kept.tokens,
            f"{name}_fill": kept.fill,
        }
    return report


def show_row(
    directory: str | Path,
    *,
    sequence_length: int,
    masking: str,
    seed: int,
    mask_prob: float = DataConfig.mask_prob,
    packing: str = DataConfig.packing,
    cut_at: str = DataConfig.cut_at,
) -> None:
    """Prints a row: one segment per line, masked positions in color with the original token."""
    corpus = Corpus(directory)
    tokenizer = Tokenizer.of(corpus)
    options: dict[str, Any] = {"masking": masking, "mask_prob": mask_prob, "packing": packing, "cut_at": cut_at}
    loader = BatchLoader(directory, sequence_length=sequence_length, batch_size=1, seed=seed, epochs=1, **options)
    row = {name: tensor.flatten().tolist() for name, tensor in to_torch(next(loader)).items()}
    result_console().print(_text_of(row, tokenizer))


def rows_as_text(config: Config, num_rows: int) -> Iterator[str]:
    """Yields lines of a run's first rows: one segment per line, masked positions as [MASK](original)."""
    tokenizer = Tokenizer.of(Mixture(config.data.corpus).corpora[0])
    loader = BatchLoader.from_config(config, batch_size=num_rows, num_threads=1, prefetch=1)
    batch = to_torch(next(loader))
    names = ("input_ids", "segment_ids", "masked_positions", "masked_ids", "masked_weights")
    for number in range(num_rows):
        yield f"row {number}:"
        text = _text_of({name: batch[name][number].tolist() for name in names}, tokenizer).plain
        yield from text.rstrip().split("\n")


def _text_of(row: Mapping[str, list[Any]], tokenizer: Tokenizer) -> Text:
    slots = zip(row["masked_positions"], row["masked_ids"], row["masked_weights"], strict=True)
    originals = {position: token_id for position, token_id, weight in slots if weight}
    text = Text()
    for position, token_id in enumerate(row["input_ids"]):
        if not row["segment_ids"][position]:
            break
        token = printable(tokenizer.id_to_token(token_id))
        if position in originals:
            text.append(token, style="bold red")
            text.append(f"({printable(tokenizer.id_to_token(originals[position]))})", style="red")
        else:
            text.append(token, style="dim" if token in ("[CLS]", "[SEP]") else "")
        text.append(" " if token != "[SEP]" else "\n")
    return text
