"""The verbs `prepare` and `vocab`: text → corpus or vocabulary on disk; the work is done in Rust (`_data`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from electra_fast import _data
from electra_fast.data.corpus import Tokenizer
from electra_fast.data.coverage import corpus_coverage, coverage_warning, sample_coverage
from electra_fast.data.inputs import Kind, source
from electra_fast.data.prepare_report import PrepareReport, guess, summary
from electra_fast.data.reading import (
    Format,
    InvalidUtf8,
    Separator,
    StrPath,
    not_negative,
    reading_options,
    skipped_lines,
)
from electra_fast.errors import InputError
from electra_fast.progress import ReadingProgress


def prepare(
    inputs: StrPath | Iterable[StrPath] | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    vocab: StrPath | Tokenizer,
    out: StrPath,
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
    documents: Separator = "blank-line",
    text_field: str = "text",
    invalid_utf8: InvalidUtf8 = "error",
    format: Format = "auto",
    skip_bad_records: int = 0,
    holdout: float = 0.0,
    partition: str | None = None,
    threads: int = 0,
    kind: Kind = "auto",
    progress: bool = True,
) -> PrepareReport:
    """Turns text into a corpus of token shards in `out`; run again after an interruption, it goes on.

    Args:
        inputs: A path, or a list or tuple of paths: files (`.txt`, `.jsonl`, `.parquet`, `.arrow`, plain or
            `.gz`, `.zst`, `.xz`), folders, globs. Of a folder that `datasets` saved, the files that it names are
            read; of one with several splits, `train` alone: name another split's folder to read that. A list or
            tuple with a string that has a line end or more than 4,096 characters is one of documents, as is any
            other iterable of `str` or, like a `datasets.Dataset`, of records that have `text_field`. Documents are
            asked for from a thread of their own, and such a run starts again instead of resuming.
        vocab: A `vocab.txt`, a `tokenizer.json`, a folder that holds one, or an open tokenizer; not among `inputs`.
        out: The folder to make; empty, new, or left behind by the same run.
        lowercase: As for `Tokenizer`; not with an open one.
        strip_accents: As for `Tokenizer`; not with an open one.
        documents: What ends a document of a `.txt`: blank lines, the file, or each line.
        text_field: Field or column that holds the text; several, separated by commas, are joined by line ends.
        invalid_utf8: `error` stops and says where; `replace` reads bad bytes as U+FFFD.
        format: What files are. `auto` goes by the names' endings and passes over files of other kinds; with any
            other format every file that is named, lies in a folder or matches a glob, and is not hidden, is read
            as that, unpacked first if its name ends in `.gz`, `.zst` or `.xz`.
        skip_bad_records: How many records of JSON lines may be left out over the whole input because they are
            broken, lack the text field or hold no text there. They are listed in `out/skipped.jsonl`.
        holdout: Fraction of documents, at least 0 and below 1, set aside as the corpus `out/holdout`. Which
            ones depends on their place alone; if none of two or more is drawn, the last one is taken.
        partition: `"I/N"`, counted from 1: only every N-th unit of the input. Once all N parts' files lie in
            one folder, any run without `partition` finishes it; parts run in the same folder finish themselves.
        threads: Threads that tokenize; 0 means all cores. The result does not depend on it.
        kind: What `inputs` is, where that rule is wrong: `files` or `documents` (a list of short ones).
        progress: Show a bar with ETA on standard error, or a line every ten seconds if that is no terminal; warn
            if the vocabulary does not cover a sample of the text; say how it ended.

    Returns:
        What was done.

    Raises:
        FileNotFoundError: An input or the vocabulary does not exist.
        TypeError: `inputs` is a dictionary of splits, a data frame or no text (named, with its position).
        ValueError: Text, vocabulary, options or the output folder cannot be used; the message says which,
            where (file, line or byte) and what to do.
        OSError: Reading or writing failed, for example on a full disk; what is finished is kept.
    """
    tokenizer = _open_tokenizer(vocab, lowercase, strip_accents)
    inner = tokenizer._inner
    reading = reading_options(documents, text_field, invalid_utf8, format, skip_bad_records)
    text = source(inputs, kind, reading["text_fields"])
    with ReadingProgress("prepare", shown=progress) as bar:
        if progress and tokenizer.case_is_guessed:
            bar.say(guess(os.fspath(tokenizer.path), cased=not tokenizer.options["lowercase"]))
        sample = None
        if progress and not (Path(out) / "manifest.json").exists():
            sample = sample_coverage(text, inner, os.fspath(out), **reading)
            bar.warn(coverage_warning(sample, inner))
        report = PrepareReport(
            **_data.prepare(
                inner,
                os.fspath(out),
                **text,
                **reading,
                holdout=holdout,
                partition=_parse_partition(partition),
                threads=not_negative("threads", threads) or None,
                progress=bar.update,
            )
        )
        if report.complete:
            found = corpus_coverage(_data.Corpus(os.fspath(out)), inner)
            report = replace(report, unknown_share=found.unknown_share, tokens_per_word=found.tokens_per_word)
            if sample is not None:
                found = replace(found, unknown_words=sample.unknown_words)
            bar.warn(coverage_warning(found, inner))
        if report.skipped_records:
            listed = os.path.join(out, "skipped.jsonl") if report.complete else None
            bar.warn(skipped_lines(report.skipped_records, report.first_skipped, listed))
        if progress:  # what each packing keeps is counted for it: seconds, for a large corpus
            bar.say(summary(report, out, tokenizer.why_not_fast))
    return report


def train_vocab(
    inputs: StrPath | Iterable[StrPath] | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    out: StrPath,
    size: int = 30_522,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    min_frequency: int = 2,
    documents: Separator = "blank-line",
    text_field: str = "text",
    invalid_utf8: InvalidUtf8 = "error",
    format: Format = "auto",
    skip_bad_records: int = 0,
    sample: int = 1 << 30,
    seed: int = 0,
    threads: int = 0,
    kind: Kind = "auto",
    progress: bool = True,
) -> int:
    """Trains a WordPiece vocabulary, the same one for the same text.

    Args:
        inputs: As for `prepare`.
        out: The `vocab.txt` to write; a `tokenizer.json` beside it tells its case. With the ending `.json`, a
            tokenizer.json alone. Nothing that exists is overwritten.
        size: Entries, [PAD] [UNK] [CLS] [SEP] [MASK] included, which come first.
        lowercase: Lower the text's case.
        strip_accents: Drop accents; by default as `lowercase`.
        min_frequency: How often a pair of pieces must occur to become one.
        documents: As for `prepare`.
        text_field: As for `prepare`.
        invalid_utf8: As for `prepare`.
        format: As for `prepare`.
        skip_bad_records: As for `prepare`; the first ten are said, none is written down.
        sample: Of more bytes of text than this, words are counted in a sample of about half as many to as many:
            documents (of a long one, parts of 1 MiB) drawn by the hash of `seed` and their number. 0: in all of it.
        seed: Decides the sample.
        threads: As for `prepare`.
        kind: As for `prepare`.
        progress: As for `prepare`.

    Returns:
        How many entries it has: `size`, or fewer if the text does not give more.

    Raises:
        FileNotFoundError: An input does not exist.
        TypeError: As for `prepare`.
        ValueError: The text or an option cannot be used, or a file is in the way.
        OSError: Reading or writing failed.
    """
    reading = reading_options(documents, text_field, invalid_utf8, format, skip_bad_records)
    with ReadingProgress("vocab", shown=progress) as bar:

        def counted(num_words: int, counted_bytes: int, text_bytes: int) -> None:
            if counted_bytes < text_bytes:
                share = f"{counted_bytes / 1e9:.2g} of {text_bytes / 1e9:.2g} GB"
                bar.say(f"counted words in {share} of text (seed {seed}); sample=0 (--sample 0) counts all of it")
            bar.say(f"merging the pieces of {num_words:,} words into a vocabulary")

        report = _data.train_vocab(
            os.fspath(out),
            **source(inputs, kind, reading["text_fields"]),
            **reading,
            size=size,
            lowercase=lowercase,
            strip_accents=strip_accents,
            min_frequency=min_frequency,
            threads=not_negative("threads", threads) or None,
            sample=not_negative("sample", sample) or None,
            seed=not_negative("seed", seed),
            progress=bar.update,
            counted=counted,
        )
        if report["skipped_records"]:
            bar.warn(skipped_lines(report["skipped_records"], report["first_skipped"], None))
    return int(report["num_entries"])


def _open_tokenizer(vocab: StrPath | Tokenizer, lowercase: bool | None, strip_accents: bool | None) -> Tokenizer:
    if not isinstance(vocab, Tokenizer):
        return Tokenizer(vocab, lowercase=lowercase, strip_accents=strip_accents)
    if lowercase is not None or strip_accents is not None:
        raise InputError("lowercase and strip_accents were settled when the tokenizer was opened: leave them out")
    return vocab


def _parse_partition(partition: str | None) -> tuple[int, int] | None:
    if partition is None:
        return None
    index, _, count = partition.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise InputError(f"partition is {partition!r}; write I/N with I from 1 to N, such as 1/4")
    return int(index), int(count)
