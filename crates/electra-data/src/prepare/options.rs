//! The options of `prepare`, and the fingerprint of everything that the resulting bytes depend on.

use serde_json::{Value, json};

use super::pass::DropDuplicates;
use crate::choice::Choice;
use crate::error::{Error, Result};
use crate::format::{FORMAT_VERSION, ShardSpec, hash_hex};
use crate::input::{InputFile, Inputs, PART_BYTES, ReadOptions, default_threads};
use crate::tokenizer::Tokenizer;

/// A shard ends at the first document boundary after this many tokens …
const SHARD_TOKENS: u64 = 1 << 27;
/// … or documents.
const SHARD_DOCUMENTS: usize = 1 << 22;

/// Options for making a corpus.
#[derive(Clone, Debug, Default)]
pub struct PrepareOptions {
    /// Options for reading files.
    pub reading: ReadOptions,
    /// Fraction of documents that go to the validation split in `holdout/`, at least 0 and below 1.
    ///
    /// A document is chosen by its position in the corpus alone. If none of at least two documents is chosen,
    /// the last one is.
    pub validation_fraction: f64,
    /// Leave out what has occurred before in the corpus.
    pub drop_duplicates: Option<DropDuplicates>,
    /// (I, N): build only every N-th input group, starting with the I-th, counted from 1.
    pub partition: Option<(usize, usize)>,
    /// Compare the whole content of inputs with what finished work was made of, also of those whose size,
    /// modification time and samples are the same.
    pub verify_inputs: bool,
    /// Number of threads that tokenize; `None` for one per core.
    pub threads: Option<usize>,
    /// Larger files are read in parts of at most so many bytes; `None` for 512 MiB. For tests.
    #[doc(hidden)]
    pub part_bytes: Option<u64>,
}

impl PrepareOptions {
    pub(super) fn check(&self) -> Result<()> {
        let holdout = self.validation_fraction;
        if !(0.0..1.0).contains(&holdout) {
            return Err(Error::Input(format!(
                "holdout is {holdout}; give a fraction of at least 0 and below 1"
            )));
        }
        if let Some((index, count)) = self.partition
            && !(1..=count).contains(&index)
        {
            return Err(Error::Input(format!(
                "partition {index}/{count}: count from 1/{count} to {count}/{count}"
            )));
        }
        if self.threads == Some(0) {
            return Err(Error::Input("threads is 0; give at least 1".to_owned()));
        }
        if self.reading.text_fields.is_empty() {
            return Err(Error::Input("no text field is named; the usual one is \"text\"".to_owned()));
        }
        Ok(())
    }

    pub(super) fn num_threads(&self) -> usize {
        self.threads.unwrap_or_else(default_threads)
    }

    pub(super) fn part_bytes(&self) -> u64 {
        self.part_bytes.unwrap_or(PART_BYTES)
    }

    /// Everything that the resulting bytes depend on, in one hash.
    pub(super) fn fingerprint(&self, tokenizer: &Tokenizer, inputs: &Value) -> String {
        let parts = json!([FORMAT_VERSION, tokenizer.hash(), self.to_json(), inputs]);
        hash_hex(parts.to_string().as_bytes())
    }

    /// The fingerprint for these files: the size of parts counts only where there are parts.
    pub(super) fn fingerprint_of(&self, tokenizer: &Tokenizer, inputs: &Inputs) -> String {
        let part_bytes = self.part_bytes();
        let entry = |file: &InputFile| {
            if file.is_divided(&self.reading, part_bytes) {
                json!([file.name, file.size, part_bytes])
            } else {
                json!([file.name, file.size])
            }
        };
        self.fingerprint(tokenizer, &inputs.files.iter().map(entry).collect())
    }

    /// Options that decide the content, so without `skip_bad_records`. Some are included only if given: corpora
    /// made before there was that option must keep their fingerprint.
    pub(super) fn to_json(&self) -> Value {
        let reading = &self.reading;
        let mut options = json!({
            "documents": reading.separator.name(),
            "text_fields": reading.text_fields,
            "invalid_utf8": reading.invalid_utf8.name(),
            "holdout": self.validation_fraction,
        });
        if let Some(format) = reading.format {
            options["format"] = format.name().into();
        }
        if let Some(what) = self.drop_duplicates {
            options["drop_duplicates"] = what.name().into();
        }
        options
    }
}

/// Options for the shards written by an attempt with this name.
pub(super) fn shard_spec(tokenizer: &Tokenizer, attempt: &str) -> ShardSpec {
    ShardSpec {
        width: if tokenizer.vocab_size() <= 1 << 16 { 2 } else { 4 },
        tokenizer_hash: tokenizer.hash(),
        tag: attempt.to_owned(),
        max_tokens: SHARD_TOKENS,
        max_documents: SHARD_DOCUMENTS,
    }
}
