//! Text to masked, packed Arrow batches for replaced-token detection.
//!
//! Building a corpus: `corpus` (files to lines) → `tokenize` → `shard`, driven by `prepare`.
//! Reading it: `shard` → `order`, `pack` → `mask` → `batch`.

pub mod error;
pub mod shard;
pub mod store;

mod durable;
mod format;
mod job;
mod manifest;
mod mapped;
#[cfg(test)]
mod testing;
mod writer;

pub use error::{Error, Result};
pub use manifest::SpecialTokens;
pub use shard::Shard;
pub use store::Corpus;
