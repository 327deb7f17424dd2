//! Text to masked, packed Arrow batches for replaced-token detection.
//!
//! Building a corpus: `corpus` (files to lines) → `tokenize` → `shard`, driven by `prepare`.
//! Reading it: `shard` → `order`, `pack` → `group` → `mask` → `batch`, driven by `loader`.

pub mod batch;
pub mod error;
pub mod group;
pub mod loader;
pub mod mask;
pub mod options;
pub mod order;
pub mod pack;
pub mod philox;
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
