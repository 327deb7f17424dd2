"""`prepare` and `vocab`: from text to a corpus or a vocabulary. Rust (`_data`) does the work."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from electra_fast import _data
from electra_fast.data.corpus import Corpus, Tokenizer, location
from electra_fast.data.coverage import Coverage, sample_texts, sample_warnings, unknown_warning
from electra_fast.data.inputs import (
    Format,
    InvalidUtf8,
    Kind,
    Separator,
    StrPath,
    not_negative,
    passed_over_warning,
    reading_options,
    skipped_lines,
    source,
)
from electra_fast.data.prepare_executor import prepare_on
from electra_fast.data.prepare_report import PrepareReport, Vocabulary, guess, notes, packings_of, words_counted
from electra_fast.data.tokenizer_folder import open_tokenizer
from electra_fast.data.trimming import trim_tokenizer
from electra_fast.errors import InputError
from electra_fast.progress import ReadingProgress


def prepare(
    inputs: StrPath | Iterable[StrPath] | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    vocab: StrPath | Tokenizer,
    out: StrPath,
    cased: bool | None = None,
    strip_accents: bool | None = None,
    documents: Separator = "blank-line",
    text: str = "text",
    invalid_utf8: InvalidUtf8 = "error",
    format: Format = "auto",
    skip_bad_rows: int = 0,
    holdout: float = 0.0,
    drop_duplicates: Literal["documents", "lines"] | None = None,
    partition: str | None = None,
    verify_inputs: bool = False,
    threads: int = 0,
    executor: Executor | None = None,
    kind: Kind = "auto",
    progress: bool = True,
) -> PrepareReport:
    """Tokenizes text into a corpus of shards in `out`; resumes when run again after an interruption.

    Args:
        inputs: A path, or a list or tuple of paths: files (`.txt`, `.jsonl`, `.ndjson`, `.json`, `.parquet`, `.arrow`,
            `.feather`, plain or `.gz`, `.zst`, `.xz`), folders, globs. A `.json` has objects, one per line, in a list
            or in sequence; in a folder, a `.json` without records that have text is skipped. From a folder
            saved by `datasets`, only the listed files are read, and of several splits only `train` (to read
            another split, pass its folder). A list or tuple in which a string has a newline or more than 4,096
            characters is a list of documents, and so is any other iterable of `str` or of records with the field
            `text`, such as a `datasets.Dataset`. Documents are consumed in a separate thread, and an interrupted
            run over documents starts again from the beginning.
        vocab: A `vocab.txt`, `tokenizer.json` or `spm.model`, a folder with one, or an open tokenizer; not in `inputs`.
        out: The output folder, or its URL (`s3://`, `gs://`, `az://`): new, empty, or left by an interruption of the
            same run.
        cased: As for `Tokenizer`; not allowed with an open tokenizer.
        strip_accents: As for `Tokenizer`; not allowed with an open tokenizer.
        documents: Separator of documents in a `.txt`: blank lines, files, or line ends.
        text: Field or column with the text; several, separated by commas, are joined with newlines. A dot leads
            into an object or struct: `review.body`.
        invalid_utf8: `error` stops and reports the position; `replace` reads invalid bytes, and unpaired surrogates in
            JSON and in documents from Python, as U+FFFD.
        format: Format of the files. `auto` uses the file extension and ignores files of other kinds. Any other format
            applies to every file, whether named, in a folder or matched by a glob, except hidden ones; files ending
            in `.gz`, `.zst` or `.xz` are decompressed first.
        skip_bad_rows: Maximum number of JSON records, over the whole input, to skip because they are
            malformed, lack the text field or have no text in it. They are listed in `out/skipped.jsonl`.
        holdout: Fraction of documents, at least 0 and below 1, for the validation set, the corpus `out/holdout`.
            The choice depends only on the documents' positions; of two or more documents, at least one is chosen.
        drop_duplicates: Drop `documents` or `lines` that have occurred before in the corpus, in the order of its
            inputs, and documents that this leaves without lines. Trailing whitespace and blank lines do not
            count; blank lines are kept. Dropping comes before `holdout`, so no duplicate is in both sets. The text is
            read twice, so it must be in files. With `partition`, run each one twice: the first run hashes its text,
            and the second, after all first runs, builds the corpus.
        partition: `"I/N"`, counted from 1: process only every Nth input group. When the files of all N partitions are
            in one folder, a run without `partition` completes it; partitions that share a folder or URL complete
            it themselves.
        verify_inputs: Hash every input in full to detect changes since work in `out` was finished. By default, inputs
            are compared by size, modification time and a hash of their beginning, middle and end, and hashed in full
            only if their modification time differs, which misses a change elsewhere in a large file that keeps its
            size and time. Objects in a store are always compared by ETag.
        threads: Tokenizer threads; 0 means one per core, or one per task of an executor. Does not affect the result.
        executor: Build the input groups in tasks of this executor, on other cores or machines: `ProcessPoolExecutor`,
            Dask's `Client.get_executor()`, mpi4py's `MPIPoolExecutor`. Its workers must see `inputs` and `out`
            under the same paths or URLs. Does not affect the result. Not for documents, and not with `partition`.
        kind: `files` or `documents`, if the rule above would misread `inputs`, for example a list of short documents.
        progress: Show a progress bar with ETA on standard error, or a line every ten seconds if it is not a
            terminal; warn if the vocabulary does not cover a sample of the text; count the tokens in each packing.

    Returns:
        A report, whose `print` is a summary.

    Raises:
        FileNotFoundError: An input or the vocabulary does not exist.
        TypeError: `inputs` is a dictionary of splits or a data frame, or an entry is not text (the message names it).
        ValueError: Text, vocabulary, options or the output folder cannot be used, or an input has changed since the
            corpus in it was finished; the message has the cause, the position (file, line or byte) and the remedy.
        OSError: Reading or writing failed, for example on a full disk; completed work is kept.
        ExecutorFailed: The executor lost its workers, or they cannot run this package; completed work is kept.
    """
    out = _data.url_of(os.fspath(out)) or out
    tokenizer = _open_tokenizer(vocab, cased, strip_accents)
    inner = tokenizer._inner
    reading = reading_options(documents, text, invalid_utf8, format, skip_bad_rows)
    text_source = source(inputs, kind, reading["text_fields"], invalid_utf8)
    with ReadingProgress("prepare", shown=progress) as bar:
        if progress and tokenizer.casing_inferred:
            bar.say(guess(tokenizer))
        if progress and tokenizer.fallback_reason:
            reason = tokenizer.fallback_reason
            bar.say(f"the tokenizers crate tokenizes the text, which is many times slower, because {reason}")
        beginning: list[str] = []
        sample = None
        if progress and not _is_complete(out):
            beginning = sample_texts(text_source, (inner, os.fspath(out)), **reading)
            sample = Coverage(*_data.text_coverage(inner, beginning))
            bar.warn(unknown_warning(sample, beginning, inner), *sample_warnings(beginning, inner))
        arguments = {
            **text_source,
            **reading,
            "holdout": holdout,
            "drop_duplicates": drop_duplicates,
            "partition": _parse_partition(partition),
            "verify_inputs": verify_inputs,
            "threads": not_negative("threads", threads) or None,
        }
        if executor is None:
            counts = _data.prepare(inner, os.fspath(out), **arguments, progress=bar.update)
        else:
            counts = prepare_on(executor, inner, os.fspath(out), bar, **arguments)
        bar.warn(passed_over_warning(counts))
        report = PrepareReport.of(os.fspath(out), counts)
        if report.complete:
            coverage = Corpus(out).coverage()
            report = replace(report, unknown_share=coverage.unknown_share, tokens_per_word=coverage.tokens_per_word)
            if sample is not None:
                coverage = replace(coverage, unknown_words=sample.unknown_words)
            bar.warn(unknown_warning(coverage, beginning, inner))
        if report.rebuilt_input_groups:
            bar.warn(
                f"warning: {report.rebuilt_input_groups:,} finished input groups were prepared again, because their "
                f"files changed (for example {report.changed_input})"
            )
        if report.skipped_rows:
            listed = os.path.join(out, "skipped.jsonl") if report.complete else None
            bar.warn(*skipped_lines(report.skipped_rows, report.first_skipped, listed))
        if progress:
            for note in notes(report):
                bar.say(note)
            if report.complete and not report.already_complete:
                report = replace(report, packings=packings_of(report.out))
    return report


def vocab(
    inputs: StrPath | Iterable[StrPath] | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    out: StrPath,
    trim: StrPath | None = None,
    size: int | None = None,
    cased: bool = False,
    strip_accents: bool = False,
    character_coverage: float = 0.9999,
    min_frequency: int = 2,
    documents: Separator = "blank-line",
    text: str = "text",
    invalid_utf8: InvalidUtf8 = "error",
    format: Format = "auto",
    skip_bad_rows: int = 0,
    sample: int = 1 << 30,
    seed: int = 0,
    threads: int = 0,
    kind: Kind = "auto",
    progress: bool = True,
) -> Vocabulary:
    """Trains a WordPiece vocabulary, or trims a model's vocabulary; deterministic for the same text.

    Args:
        inputs: As for `prepare`.
        out: The `vocab.txt` to write, with a `tokenizer.json` and a `tokenizer_config.json` next to it that record
            the casing; if it ends in `.json`, only a tokenizer.json. Existing files are never overwritten. With `trim`,
            a folder, new or empty.
        trim: A model (run, export, folder of `transformers`) or a tokenizer's file. Its tokenizer, WordPiece, BPE or
            Unigram, keeps the entries that the text uses, the entries that they are merged from, their characters and
            all of ASCII, bytes, special and added tokens. Text that needs no other entry is tokenized as before. All
            text counts; options for training are refused. Pass the result to `import_` as `vocab`.
        size: Number of entries, including [PAD] [UNK] [CLS] [SEP] [MASK], which come first; 30,522 by default. With
            `trim`, the number of entries to keep, the most frequent ones; by default all that the text uses.
        cased: Keep the case of the text instead of lowercasing it.
        strip_accents: Drop accents and other combining marks, like BERT's uncased vocabularies.
        character_coverage: The most frequent characters that make up this fraction of the text become entries, as do
            all ASCII characters of the text. A word with any other character is [UNK].
        min_frequency: Minimum number of occurrences of a pair of pieces to be merged.
        documents: As for `prepare`.
        text: As for `prepare`.
        invalid_utf8: As for `prepare`.
        format: As for `prepare`.
        skip_bad_rows: As for `prepare`; the first ten are printed, and no list is written.
        sample: Maximum number of bytes in which words are counted; 0 for no limit. From a longer text, a sample of half
            to all of this size is taken: documents, or 1 MiB parts of long ones, chosen by a hash of `seed` and index.
        seed: Seed of the sample.
        threads: As for `prepare`.
        kind: As for `prepare`.
        progress: As for `prepare`.

    Returns:
        The file or folder and its number of entries: `size`, or fewer if the text does not yield as many.

    Raises:
        FileNotFoundError: An input does not exist.
        TypeError: As for `prepare`.
        ValueError: The text, the tokenizer or an option cannot be used, or the output exists.
        OSError: Reading or writing failed.
    """
    reading = reading_options(documents, text, invalid_utf8, format, skip_bad_rows)
    text_source = source(inputs, kind, reading["text_fields"], invalid_utf8)
    if trim is not None:
        training = {"cased": cased, "strip_accents": strip_accents, "character_coverage": character_coverage}
        training |= {"min_frequency": min_frequency, "sample": sample, "seed": seed}
        for name, value in training.items():
            if value != inspect.signature(vocab).parameters[name].default:
                raise InputError(f"{name} = {value}: applies to training a vocabulary only; remove {name} or trim")
        threads = not_negative("threads", threads)
        return trim_tokenizer(trim, out, size, text_source, reading, threads=threads, progress=progress)
    with ReadingProgress("vocab", shown=progress) as bar:

        def counted(*counts: Any) -> None:
            for line in words_counted(seed, *counts):
                bar.say(line)

        beginning = sample_texts(text_source, None, **reading) if progress else []
        report = _data.train_vocab(
            os.fspath(out),
            **text_source,
            **reading,
            size=30_522 if size is None else size,
            lowercase=not cased,
            strip_accents=strip_accents,
            character_coverage=character_coverage,
            min_frequency=min_frequency,
            threads=not_negative("threads", threads) or None,
            sample=not_negative("sample", sample) or None,
            seed=not_negative("seed", seed),
            progress=bar.update,
            counted=counted,
        )
        bar.warn(passed_over_warning(report))
        if report["skipped_rows"]:
            bar.warn(*skipped_lines(report["skipped_rows"], report["first_skipped"], None))
        bar.warn(*sample_warnings(beginning, open_tokenizer(os.fspath(out))[0]))
    return Vocabulary(os.fspath(out), report["num_entries"], report["skipped_files"], report["skipped_rows"])


def _open_tokenizer(vocab: StrPath | Tokenizer, cased: bool | None, strip_accents: bool | None) -> Tokenizer:
    if not isinstance(vocab, Tokenizer):
        return Tokenizer(vocab, cased=cased, strip_accents=strip_accents)
    if cased is not None or strip_accents is not None:
        raise InputError("cased and strip_accents: not allowed for an open Tokenizer; pass its path, or remove them")
    return vocab


def _is_complete(out: StrPath) -> bool:
    if isinstance(place := location(out), Path):
        return (place / "manifest.json").exists()
    if place.startswith("http"):  # no request, since web servers are read-only
        return False
    try:
        Corpus(place)
    except FileNotFoundError:
        return False
    return True


def _parse_partition(partition: str | None) -> tuple[int, int] | None:
    if partition is None:
        return None
    index, _, count = partition.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise InputError(f"partition = {partition!r}: must be I/N with I from 1 to N, such as 1/4")
    return int(index), int(count)
