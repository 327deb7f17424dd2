//! Text to masked, packed Arrow batches for replaced-token detection.
//!
//! Building a corpus: `input` (files to lines) → `tokenizer` → `format`, driven by `prepare`.
//! Reading it: `format` → `loader`.

mod error;
mod format;
mod input;
pub mod loader;
pub mod philox;
mod prepare;
mod threads;
mod tokenizer;

pub use error::{Error, Result};
pub use format::{Corpus, Shard, SpecialTokens, Verified, verify, write_sparse};
pub use input::{Documents, Format, InvalidUtf8, Reading, SkippedRecord};
pub use prepare::{
    Coverage, Options, Progress, Report, Source, VocabOptions, VocabReport, prepare, train_vocab,
};
pub use tokenizer::{Encoder, Tokenizer};
