//! Reading text: files, folders and globs of any supported format become a stream of documents.

mod arrow;
mod division;
#[cfg(test)]
mod division_tests;
mod documents;
mod encoding;
mod files;
mod identity;
mod input_file;
mod json;
mod json_objects;
mod pipeline;
mod raw_file;
mod read_options;
mod sampler;
mod saved_dataset;
mod skipped;
mod stored;
mod tables;
mod text;
mod zstd_window;

pub use read_options::{DocumentSeparator, InputFormat, InvalidUtf8, ReadOptions, TextSource};
pub use skipped::SkippedRecord;

pub(crate) use division::{InputGroup, PART_BYTES, Part};
pub(crate) use documents::{read_file, read_input_group};
pub(crate) use files::Inputs;
pub use files::PassedOver;
pub(crate) use identity::{Comparison, InputIdentity};
pub(crate) use input_file::{Compression, InputFile};
pub(crate) use pipeline::{
    Batcher, GroupEnd, Intake, Mark, TextBatch, Watch, default_threads, read_beginning, with_workers,
};
pub(crate) use sampler::{Sampled, Sampler};
pub(crate) use skipped::{SKIPPED, SkipLog, first_skipped, skipped_to_jsonl};
pub(crate) use text::{Cut, character_boundary};
