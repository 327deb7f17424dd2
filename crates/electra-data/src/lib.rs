//! Text to masked, packed Arrow batches for replaced-token detection: the engine of the Python package `electra-fast`,
//! and not yet a stable interface for others.
//!
//! Building a corpus: `input` (files to lines) → `tokenizer` → `format`, driven by [`prepare`].
//! Reading it: `format` ([`Corpus`]) → `loader` ([`Loader`]). Paths may be URLs of object stores.
//!
//! ```no_run
//! # use std::{path::Path, sync::Arc};
//! # use electra_data::*;
//! # fn main() -> Result<()> {
//! let tokenizer = Tokenizer::from_file(Path::new("vocab.txt"), None, None)?;
//! let text = TextSource::Files(vec!["text.txt".into()]);
//! prepare(text, &tokenizer, Path::new("corpus"), &PrepareOptions::default(), &mut |_| true)?;
//! let corpus = Arc::new(Corpus::open(Path::new("corpus"))?);
//! for batch in Loader::new(corpus, &LoaderOptions { epochs: Some(1), ..LoaderOptions::default() })? {
//!     println!("{} rows", batch?.num_rows());
//! }
//! # Ok(())
//! # }
//! ```

#[cfg(not(unix))]
compile_error!("electra-fast needs Linux or macOS; on Windows, use WSL 2");

mod choice;
mod error;
mod format;
mod input;
mod loader;
pub mod philox;
mod prepare;
mod regular_file;
mod store;
mod threads;
mod tokenizer;

pub use choice::{Choice, options_from};
pub use error::{Error, Result};
pub use format::{CacheOptions, Corpus, Shard, SpecialTokens, Verified};
pub use input::{
    DocumentSeparator, InputFormat, InvalidUtf8, PassedOver, ReadOptions, SkippedRecord, TextSource,
};
pub use loader::{Contents, CutAt, Loader, LoaderOptions, LoaderState, Masking, Packing, Poll, auto_lanes};
pub use prepare::{
    Alphabet, Coverage, DropDuplicates, OpenedJob, PrepareJob, PrepareOptions, PrepareReport, Progress,
    RepeatCount, RepeatedLine, Repeats, TaskReport, VocabOptions, VocabReport, job_tokenizer, prepare,
    prepare_input_groups, text_sample, train_vocab, verify,
};
pub use store::{
    attended, check_url, delete_objects, download, guard_environment, list_objects, upload, url_of,
};
pub use tokenizer::{Encoder, Pieces, SpecialNames, Tokenizer};
