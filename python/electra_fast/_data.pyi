"""The Rust data engine. Public names are documented where the package re-exports them."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

VERSION: str

# --- preparing ---------------------------------------------------------------------------------

class Tokenizer:
    """See `electra_fast.data.corpus.Tokenizer`; ids are bytes of little-endian u32."""

    def __init__(self, path: str, lowercase: bool | None = None, strip_accents: bool | None = None) -> None: ...
    @staticmethod
    def restored(
        path: str,
        file: tuple[str, bytes],
        settings: tuple[bool | None, bool | None],
        special_tokens: tuple[int, int, int, int, int],
    ) -> Tokenizer: ...
    @staticmethod
    def of_corpus(corpus: Corpus) -> Tokenizer: ...
    @property
    def file(self) -> tuple[str, bytes]: ...
    def encode_batch(self, texts: list[str]) -> list[bytes]: ...
    def encode_with_offsets(self, texts: list[str]) -> list[list[bytes]]: ...
    def decode(self, ids: list[int]) -> str: ...
    def id_to_token(self, id: int) -> str | None: ...
    def content_hash(self) -> str: ...
    def to_json(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def case_is_guessed(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def fast(self) -> bool: ...
    @property
    def why_not_fast(self) -> str | None: ...
    @property
    def settings(self) -> tuple[bool | None, bool | None]: ...
    @property
    def special_tokens(self) -> tuple[int, int, int, int, int]: ...

class Corpus:
    """See `electra_fast.data.corpus.Corpus`; ids are bytes of little-endian u32."""

    def __init__(self, path: str, content_hash: str | None = None) -> None: ...
    def document(self, index: int) -> bytes: ...
    def coverage(self, tokenizer: Tokenizer) -> tuple[int, int, int | None, list[tuple[str, int]]]: ...
    def token_counts(self) -> bytes: ...
    @property
    def path(self) -> str: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def empty_documents(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def content_hash(self) -> str: ...
    @property
    def special_tokens(self) -> tuple[int, int, int, int, int]: ...
    @property
    def shards(self) -> list[tuple[int, int]]: ...
    @property
    def tokenizer_path(self) -> Path: ...
    @property
    def tokenizer_settings(self) -> tuple[bool | None, bool | None]: ...
    @property
    def options(self) -> str: ...
    @property
    def holdout(self) -> str | None: ...
    @property
    def token_bytes(self) -> int: ...

def prepare(
    tokenizer: Tokenizer,
    out: str,
    *,
    files: list[str] | None = None,
    documents: Iterator[str] | None = None,
    separator: str = "blank-line",
    text_fields: list[str],
    invalid_utf8: str = "error",
    format: str = "auto",
    skip_bad_records: int = 0,
    holdout: float = 0.0,
    partition: tuple[int, int] | None = None,
    threads: int | None = None,
    progress: Callable[[int, int, int, int], None] | None = None,
    _part_bytes: int | None = None,
) -> dict[str, Any]: ...

class PrepareJob:
    """The parent's side of a corpus that tasks prepare: holds the lease on its folder until it is closed."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        out: str,
        *,
        files: list[str],
        separator: str = "blank-line",
        text_fields: list[str],
        invalid_utf8: str = "error",
        format: str = "auto",
        skip_bad_records: int = 0,
        holdout: float = 0.0,
        _part_bytes: int | None = None,
    ) -> None: ...
    def units(self) -> list[tuple[int, int]]: ...
    def settings(self) -> str: ...
    def unit(self, number: int) -> str: ...
    def finish(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

def job_tokenizer(settings: str) -> Tokenizer: ...
def prepare_units(settings: str, units: list[str], tokenizer: Tokenizer, threads: int = 1) -> tuple[int, int, int]: ...
def sample_coverage(
    tokenizer: Tokenizer,
    out: str,
    *,
    files: list[str] | None = None,
    documents: list[str] | None = None,
    separator: str = "blank-line",
    text_fields: list[str],
    invalid_utf8: str = "error",
    format: str = "auto",
    skip_bad_records: int = 0,
) -> tuple[int, int, int | None, list[tuple[str, int]]]: ...
def train_vocab(
    out: str,
    *,
    files: list[str] | None = None,
    documents: Iterator[str] | None = None,
    size: int,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    min_frequency: int = 2,
    separator: str = "blank-line",
    text_fields: list[str],
    invalid_utf8: str = "error",
    format: str = "auto",
    skip_bad_records: int = 0,
    threads: int | None = None,
    sample: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int, int, int], None] | None = None,
    counted: Callable[[int, int, int], None] | None = None,
) -> dict[str, Any]: ...
def url_of(path: str) -> str | None: ...
def verify(path: str) -> tuple[int, int, list[str]]: ...

# --- loading -----------------------------------------------------------------------------------

class RecordBatch:
    """Rows of a batch, for any Arrow library: `pyarrow.record_batch(batch)` copies nothing.

    The fixed-size columns share one buffer of 4-byte elements; `layout` gives the offset and the row width
    of each column, in elements.
    """

    @property
    def num_rows(self) -> int: ...
    @property
    def layout(self) -> list[tuple[int, int]]: ...
    def segment_ends(self) -> bytearray: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __arrow_c_schema__(self) -> object: ...
    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]: ...

class BatchLoader:
    """See `electra_fast.data.loader.BatchLoader`."""

    def __init__(
        self,
        corpora: Sequence[tuple[str | Path, float | None]],
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        masking: str,
        mask_prob: float,
        packing: str,
        cut_at: str,
        rank: int,
        world_size: int,
        num_threads: int,
        prefetch: int,
        epochs: int | None,
        cache_dir: str | None = None,
        cache_bytes: int | None = None,
    ) -> None: ...
    @property
    def corpora(self) -> list[tuple[str, float | None]]: ...
    def passes(self) -> list[float]: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> RecordBatch: ...
    def state(self) -> str: ...
    def restore(self, state: str) -> None: ...
    def contents(self) -> tuple[int, int, int]: ...
    @property
    def num_rows(self) -> int: ...

def mixture_weights(corpora: Sequence[tuple[str | Path, float | None]]) -> list[int]: ...
