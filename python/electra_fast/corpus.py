"""Text → vocabulary and corpus on disk, and reading a corpus back; the work is done in Rust (`_data`).

Everything that trains starts here: `train_vocab` and `prepare` write, `Corpus` and `Tokenizer` read,
`verify` checks.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from electra_fast import _data
from electra_fast.coverage import Coverage, corpus_coverage, coverage_warning, sample_coverage
from electra_fast.prepare_report import PrepareReport, summary
from electra_fast.reading import (
    Format,
    InvalidUtf8,
    Kind,
    Separator,
    StrPath,
    not_negative,
    reading_options,
    skipped_lines,
    source_of,
)
from electra_fast.reading_progress import ReadingProgress

Ids = NDArray[np.int32]

SPECIAL = ("pad", "unk", "cls", "sep", "mask")


class Tokenizer:
    """Text to ids by a BERT `vocab.txt` or a `tokenizer.json`, without adding special tokens.

    Args:
        path: The file; its extension tells which of the two it is.
        lowercase: For `vocab.txt`: lower the text's case. By default a vocabulary counts as cased if
            lowercasing would change an ordinary entry.
        strip_accents: For `vocab.txt`: drop accents. By default as `lowercase`.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is no tokenizer, or lacks a special token (named).
    """

    def __init__(self, path: StrPath, *, lowercase: bool | None = None, strip_accents: bool | None = None) -> None:
        self._inner = _data.Tokenizer(os.fspath(path), lowercase, strip_accents)

    @classmethod
    def of(cls, corpus: Corpus) -> Tokenizer:
        """The tokenizer that a corpus was prepared with, from the corpus' own copy."""
        return cls(corpus.tokenizer_path, **corpus.tokenizer_options)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text: int32 arrays of shape [tokens]. Runs on all cores without the GIL."""
        return [_to_numpy(ids) for ids in self._inner.encode_batch(list(texts))]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Text that reads like what the ids came from."""
        return self._inner.decode([operator.index(token) for token in ids])

    def id_to_token(self, token_id: SupportsIndex) -> str:
        """The vocabulary's entry with this id; `IndexError` if there is none."""
        token = self._inner.id_to_token(operator.index(token_id))
        if token is None:
            raise IndexError(f"id {token_id} is not in a vocabulary of {self.vocab_size} entries")
        return token

    @property
    def fast(self) -> bool:
        """Whether ids come from the package's own fast path rather than the `tokenizers` crate."""
        return self._inner.fast

    @property
    def why_not_fast(self) -> str | None:
        """Why the crate has to serve, as a clause like "its model is not WordPiece"; `None` if it does not."""
        return self._inner.why_not_fast

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        return self._inner.vocab_size

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of `pad`, `unk`, `cls`, `sep` and `mask`."""
        return dict(zip(SPECIAL, self._inner.special_tokens, strict=True))

    @property
    def options(self) -> dict[str, bool | None]:
        """Settings in force, `lowercase` and `strip_accents`; both `None` for a `tokenizer.json`."""
        return dict(zip(("lowercase", "strip_accents"), self._inner.settings, strict=True))


class Corpus(Sequence[Ids]):
    """A folder that `prepare` finished: `len` is its documents, `corpus[i]` the ids of one.

    Opening reads the manifest alone; a file's blocks are compared with their checksums when they are
    first touched.

    Raises:
        FileNotFoundError: The folder, or a manifest in it, does not exist.
        ValueError: A file is damaged or cut off (named, with the block).
    """

    def __init__(self, path: StrPath) -> None:
        self.path = Path(path)
        self._inner = _data.Corpus(os.fspath(path))

    def __repr__(self) -> str:
        return f"Corpus({str(self.path)!r}): {len(self):,} documents, {self.num_tokens:,} tokens"

    def __len__(self) -> int:
        return self._inner.num_documents

    def __getitem__(self, index: Any) -> Any:
        """Ids of a document: int32, shape [tokens]; a list of such arrays for a slice."""
        if isinstance(index, slice):
            return [self._document(number) for number in range(*index.indices(len(self)))]
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"document {number} of a corpus that has {len(self)}")
        return self._document(number % len(self))

    def __iter__(self) -> Iterator[Ids]:
        return (self._document(number) for number in range(len(self)))

    def _document(self, number: int) -> Ids:
        return _to_numpy(self._inner.document(number))

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, special tokens not counted (there are none on disk)."""
        return self._inner.num_tokens

    @property
    def empty_documents(self) -> int:
        """Documents that had no token and were left out."""
        return self._inner.empty_documents

    def coverage(self) -> Coverage:
        """How well the vocabulary covers the corpus: [UNK] per token, tokens per word."""
        return corpus_coverage(self._inner, Tokenizer.of(self)._inner)

    @property
    def content_hash(self) -> str:
        """Identifies tokens, order and tokenizer: 32 hexadecimal digits."""
        return self._inner.content_hash

    @property
    def vocab_size(self) -> int:
        """Every id is below this."""
        return self._inner.vocab_size

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of `pad`, `unk`, `cls`, `sep` and `mask`."""
        return dict(zip(SPECIAL, self._inner.special_tokens, strict=True))

    @property
    def shards(self) -> list[tuple[int, int]]:
        """Documents and tokens of each shard."""
        return self._inner.shards

    @property
    def holdout(self) -> Path | None:
        """The folder of the held-out corpus, if there is one."""
        return self._inner.holdout

    @property
    def tokenizer_path(self) -> Path:
        """The corpus' own copy of the tokenizer that made it."""
        return self._inner.tokenizer_path

    @property
    def tokenizer_options(self) -> dict[str, bool | None]:
        """Settings to open `tokenizer_path` with: `lowercase` and `strip_accents`."""
        return dict(zip(("lowercase", "strip_accents"), self._inner.tokenizer_settings, strict=True))


def prepare(
    inputs: StrPath | Iterable[StrPath] | Iterable[str],
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
            read; of one with several splits, `train` alone: name another split's folder to read that. Any other
            iterable of `str` is a stream of documents, asked from a thread of its own; such a run starts again
            instead of going on.
        vocab: A `vocab.txt`, a `tokenizer.json`, or an open tokenizer.
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
        threads: Threads that tokenise; 0 means all cores. The result does not depend on it.
        kind: What `inputs` is, where the rule above guesses wrong: `files` or `documents`.
        progress: Show a bar with ETA on standard error, or a line every ten seconds if that is no terminal; warn
            if the vocabulary does not cover a sample of the text; say how it ended.

    Returns:
        What was done.

    Raises:
        FileNotFoundError: An input or the vocabulary does not exist.
        ValueError: Text, vocabulary, options or the output folder cannot be used; the message says which,
            where (file, line or byte) and what to do.
        OSError: Reading or writing failed, for example on a full disk; what is finished is kept.
    """
    tokenizer = _open_tokenizer(vocab, lowercase, strip_accents)
    inner, source = tokenizer._inner, source_of(inputs, kind)
    reading = reading_options(documents, text_field, invalid_utf8, format, skip_bad_records)
    with ReadingProgress("prepare", shown=progress) as bar:
        sample = None
        if progress and not (Path(out) / "manifest.json").exists():
            sample = sample_coverage(source, inner, os.fspath(out), **reading)
            bar.warn(coverage_warning(sample, inner))
        report = PrepareReport(
            **_data.prepare(
                inner,
                os.fspath(out),
                **source,
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
    inputs: StrPath | Iterable[StrPath] | Iterable[str],
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
    """Trains a WordPiece vocabulary and writes it as a `vocab.txt`, the same one for the same text.

    Args:
        inputs: As for `prepare`.
        out: The file to write.
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
        ValueError: The text or an option cannot be used.
        OSError: Reading or writing failed.
    """
    with ReadingProgress("vocab", shown=progress) as bar:

        def counted(num_words: int, counted_bytes: int, text_bytes: int) -> None:
            if counted_bytes < text_bytes:
                share = f"{counted_bytes / 1e9:.2g} of {text_bytes / 1e9:.2g} GB"
                bar.say(f"counted words in {share} of text (seed {seed}); sample=0 (--sample 0) counts all of it")
            bar.say(f"merging the pieces of {num_words:,} words into a vocabulary")

        report = _data.train_vocab(
            os.fspath(out),
            **source_of(inputs, kind),
            **reading_options(documents, text_field, invalid_utf8, format, skip_bad_records),
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


def verify(path: StrPath) -> dict[str, Any]:
    """Checks every checksum, length and table of a corpus and its held-out part.

    Returns:
        `files` and `bytes` read, and the `content_hash`.

    Raises:
        FileNotFoundError: There is no corpus.
        ValueError: Something is damaged: every damaged file and block, separated by "; also ".
    """
    num_files, num_bytes, damaged = _data.verify(os.fspath(path))
    if damaged:
        more = "" if len(damaged) == 1 else f" ({len(damaged)} damaged places in all)"
        raise ValueError("; also ".join(damaged) + more)
    return {"files": num_files, "bytes": num_bytes, "content_hash": Corpus(path).content_hash}


def _to_numpy(ids: bytes) -> Ids:
    return np.frombuffer(ids, dtype="<u4").astype(np.int32)


def _open_tokenizer(vocab: StrPath | Tokenizer, lowercase: bool | None, strip_accents: bool | None) -> Tokenizer:
    if not isinstance(vocab, Tokenizer):
        return Tokenizer(vocab, lowercase=lowercase, strip_accents=strip_accents)
    if lowercase is not None or strip_accents is not None:
        raise ValueError("lowercase and strip_accents were settled when the tokenizer was opened: leave them out")
    return vocab


def _parse_partition(partition: str | None) -> tuple[int, int] | None:
    if partition is None:
        return None
    index, _, count = partition.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"partition is {partition!r}; write I/N with I from 1 to N, such as 1/4")
    return int(index), int(count)
