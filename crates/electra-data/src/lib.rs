//! Text to masked, packed Arrow batches for replaced-token detection.
//!
//! Building a corpus: `corpus` (files to lines) → `tokenize` → `shard`, driven by `prepare`; the fast
//! tokenizer under `tokenize` is `wordpiece`.
//! Reading it: `shard` → `order`, `pack` → `group` → `mask` → `batch`, driven by `loader`.

pub mod batch;
pub mod coverage;
pub mod error;
pub mod group;
pub mod loader;
pub mod mask;
pub mod options;
pub mod order;
pub mod pack;
pub mod philox;
pub mod prepare;
pub mod reading;
pub mod shard;
pub mod store;
pub mod synthetic;
pub mod tokenize;
pub mod verify;
pub mod vocab;

mod ascii;
mod columns;
mod corpus;
mod draw;
mod durable;
mod finish;
mod format;
#[cfg(test)]
mod hostile;
mod input;
mod job;
mod manifest;
mod mapped;
mod normalize;
mod pieces;
mod pipeline;
mod saved;
mod skipped;
#[cfg(test)]
mod testing;
mod text;
mod threads;
mod tokenizer_json;
mod unit;
mod vocab_files;
mod vocab_txt;
mod word_cache;
mod word_counts;
mod wordpiece;
mod writer;

pub use coverage::Coverage;
pub use error::{Error, Result};
pub use manifest::SpecialTokens;
pub use prepare::{Options, Report, Source, prepare};
pub use reading::{Documents, Format, Reading};
pub use shard::Shard;
pub use skipped::SkippedRecord;
pub use store::Corpus;
pub use text::InvalidUtf8;
pub use tokenize::{Encoder, Tokenizer};
pub use unit::Progress;
pub use verify::{Verified, verify};
pub use vocab::{VocabOptions, VocabReport, train_vocab};
