//! Reading text: from files, folders and globs of any supported format to a stream of documents.

mod documents;
mod files;
mod pipeline;
mod read_options;
mod sampler;
mod saved_dataset;
mod skipped;
mod tables;
mod text;

pub use read_options::{Documents, Format, Reading};
pub use skipped::SkippedRecord;
pub use text::InvalidUtf8;

pub(crate) use documents::read_file;
pub(crate) use files::{Compression, Inputs};
pub(crate) use pipeline::{Batch, Batcher, Intake, Mark, beginning, default_threads, run};
pub(crate) use sampler::{Draw, Drawn};
pub(crate) use skipped::{SKIPPED, SkipLog, read_first, to_lines};
pub(crate) use text::{Cut, character_boundary};
