//! Text to masked, packed Arrow batches for replaced-token detection.
//!
//! Building a corpus: `corpus` (files to lines) → `tokenize` → `shard`, driven by `prepare`.
//! Reading it: `shard` → `order`, `pack` → `mask` → `batch`.

pub mod error;
pub mod order;
pub mod philox;
