"""Text → vocabulary and corpus on disk, and reading a corpus back; the work is done in Rust (`_data`).

Everything that trains starts here: `train_vocab` and `prepare` write, `Corpus` and `Tokenizer` read,
`verify` checks.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from electra_fast import _data
from electra_fast.inputs import Kind, source
from electra_fast.prepare_report import PrepareReport, guess, summary
from electra_fast.reading_progress import ReadingProgress

StrPath = str | os.PathLike[str]
Ids = NDArray[np.int32]
Separator = Literal["blank-line", "file", "line"]
InvalidUtf8 = Literal["error", "replace"]

SPECIAL = ("pad", "unk", "cls", "sep", "mask")


class Tokenizer:
    """Text to ids by a BERT `vocab.txt` or a `tokenizer.json`, without adding special tokens.

    Args:
        path: The file; its extension tells which of the two it is. Or a folder that holds one: a run, an
            export, a Hugging Face model.
        lowercase: For `vocab.txt`: lower the text's case. By default what a file beside it says: a
            `tokenizer.json` with the same entries, a `tokenizer_config.json`, the manifest of its corpus. Without
            one, a vocabulary counts as cased if lowercasing or dropping accents would change an ordinary entry.
        strip_accents: For `vocab.txt`: drop accents. By default what that file says, or as `lowercase`.

    Raises:
        FileNotFoundError: There is no such file, or none in the folder.
        ValueError: It is no tokenizer, or lacks a special token (named).
    """

    def __init__(self, path: StrPath, *, lowercase: bool | None = None, strip_accents: bool | None = None) -> None:
        self._inner = _data.Tokenizer(os.fspath(path), lowercase, strip_accents)

    def __getstate__(self) -> tuple[Any, ...]:
        return (os.fspath(self._inner.path), self._inner.file[1], *self._inner.settings)

    def __setstate__(self, pickled: tuple[Any, ...]) -> None:
        self._inner = _data.Tokenizer.of_file(*pickled)

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
    def path(self) -> Path:
        """The file that was opened."""
        return self._inner.path

    @property
    def file(self) -> tuple[str, bytes]:
        """Name and content of the copy that a corpus or a run keeps."""
        return self._inner.file

    @property
    def content_hash(self) -> str:
        """Identifies entries, ids and rules, case included, whichever file says them: 32 hexadecimal digits."""
        return self._inner.content_hash()

    def to_json(self) -> str:
        """The text of a complete `tokenizer.json`."""
        return self._inner.to_json()

    @property
    def case_is_guessed(self) -> bool:
        """Whether nothing told the settings of a `vocab.txt`, so that they follow from its entries."""
        return self._inner.case_is_guessed

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

    def __getstate__(self) -> tuple[Path, str]:
        return self._inner.path, self.content_hash

    def __setstate__(self, pickled: tuple[Path, str]) -> None:
        self.path, content_hash = pickled
        self._inner = _data.Corpus(os.fspath(self.path), content_hash)

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
    inputs: StrPath | Iterable[StrPath] | Iterable[str] | Iterable[Mapping[str, Any]],
    *,
    vocab: StrPath | Tokenizer,
    out: StrPath,
    lowercase: bool | None = None,
    strip_accents: bool | None = None,
    documents: Separator = "blank-line",
    text_field: str = "text",
    invalid_utf8: InvalidUtf8 = "error",
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
        holdout: Fraction of documents, at least 0 and below 1, set aside as the corpus `out/holdout`. Which
            ones depends on their place alone; if none of two or more is drawn, the last one is taken.
        partition: `"I/N"`, counted from 1: only every N-th unit of the input. Once all N parts' files lie in
            one folder, any run without `partition` finishes it; parts run in the same folder finish themselves.
        threads: Threads that tokenise; 0 means all cores. The result does not depend on it.
        kind: What `inputs` is, where that rule is wrong: `files` or `documents` (a list of short ones).
        progress: Show a bar with ETA on standard error if that is a terminal, and say how it ended.

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
    with ReadingProgress("prepare", shown=progress) as bar:
        if progress and tokenizer.case_is_guessed:
            bar.say(guess(os.fspath(tokenizer.path), cased=not tokenizer.options["lowercase"]))
        report = PrepareReport(
            **_data.prepare(
                tokenizer._inner,
                os.fspath(out),
                **source(inputs, kind, _fields(text_field)),
                separator=documents,
                text_fields=_fields(text_field),
                invalid_utf8=invalid_utf8,
                holdout=holdout,
                partition=_parse_partition(partition),
                threads=_count(threads),
                progress=bar.update,
            )
        )
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
    with ReadingProgress("vocab", shown=progress) as bar:
        return _data.train_vocab(
            os.fspath(out),
            **source(inputs, kind, _fields(text_field)),
            size=size,
            lowercase=lowercase,
            strip_accents=strip_accents,
            min_frequency=min_frequency,
            separator=documents,
            text_fields=_fields(text_field),
            invalid_utf8=invalid_utf8,
            threads=_count(threads),
            progress=bar.update,
        )


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


def _fields(text_field: str) -> list[str]:
    return [field.strip() for field in text_field.split(",") if field.strip()]


def _count(threads: int) -> int | None:
    if threads < 0:
        raise ValueError(f"threads is {threads}; give 0 for all cores, or a number of them")
    return threads or None


def _parse_partition(partition: str | None) -> tuple[int, int] | None:
    if partition is None:
        return None
    index, _, count = partition.partition("/")
    if not (index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
        raise ValueError(f"partition is {partition!r}; write I/N with I from 1 to N, such as 1/4")
    return int(index), int(count)
