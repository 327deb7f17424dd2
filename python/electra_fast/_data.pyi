"""The Rust data engine. Public names are documented where the package re-exports them."""

from typing import Self

VERSION: str

# --- loading -----------------------------------------------------------------------------------

class RecordBatch:
    """Rows of a batch, for any Arrow library: `pyarrow.record_batch(batch)` copies nothing."""

    @property
    def num_rows(self) -> int: ...
    def __arrow_c_schema__(self) -> object: ...
    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]: ...

class BatchLoader:
    """See `electra_fast.data.BatchLoader`."""

    def __init__(
        self,
        corpus: str,
        *,
        sequence_length: int,
        batch_size: int,
        seed: int,
        masking: str,
        mask_prob: float,
        packing: str,
        rank: int,
        world_size: int,
        num_threads: int,
        prefetch: int,
        epochs: int | None,
    ) -> None: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> RecordBatch: ...
    def state(self) -> str: ...
    def restore(self, state: str) -> None: ...
    @property
    def num_rows(self) -> int: ...
