//! A finished corpus, opened for reading: its manifest and its shards.

use std::path::{Path, PathBuf};

use super::manifest::{Manifest, SpecialTokens};
use super::mmap::{access_error, damaged};
use super::shard::Shard;
use crate::error::{Error, Result};

/// The folder of the validation split inside a corpus.
pub(crate) const VALIDATION: &str = "holdout";

/// A corpus on disk. Opening it reads the manifest and checks the lengths of the files, nothing else.
#[derive(Debug)]
pub struct Corpus {
    dir: PathBuf,
    manifest: Manifest,
    shards: Vec<Shard>,
    /// The number of documents before each shard, and the total at the end.
    starts: Vec<u64>,
}

impl Corpus {
    /// Opens the corpus in `dir`. A folder without a manifest is [`Error::NotFound`]; a manifest or a file
    /// length that is not what was written is [`Error::Damaged`].
    pub fn open(dir: &Path) -> Result<Self> {
        let manifest = Manifest::read(dir)?;
        for entry in &manifest.shards {
            check_length(&dir.join(&entry.tokens.file), entry.tokens.bytes)?;
            check_length(&dir.join(&entry.lines.file), entry.lines.bytes)?;
        }
        let shards: Vec<_> = manifest.shards.iter().map(|entry| Shard::new(dir, &manifest, entry)).collect();
        let mut starts = vec![0];
        for shard in &shards {
            starts.push(starts[starts.len() - 1] + shard.num_documents());
        }
        Ok(Self { dir: dir.to_owned(), manifest, shards, starts })
    }

    /// The shards, in the order in which documents are numbered.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Tokens in all documents, without any special tokens.
    pub fn num_tokens(&self) -> u64 {
        self.manifest.num_tokens
    }

    /// Documents in all shards.
    pub fn num_documents(&self) -> u64 {
        self.manifest.num_documents
    }

    /// Documents without any token, which were left out when the corpus was made.
    pub fn empty_documents(&self) -> u64 {
        self.manifest.empty_documents
    }

    /// Identifies the tokens, their order and the tokenizer: 32 hexadecimal digits.
    pub fn content_hash(&self) -> &str {
        &self.manifest.content_hash
    }

    /// Identifies the tokenizer: two corpora with the same one have the same ids.
    pub fn tokenizer_hash(&self) -> &str {
        &self.manifest.tokenizer.hash
    }

    /// Ids of the five special tokens.
    pub fn special_tokens(&self) -> SpecialTokens {
        self.manifest.tokenizer.special_tokens
    }

    /// Size of the vocabulary: every id is below this.
    pub fn vocab_size(&self) -> u32 {
        self.manifest.tokenizer.vocab_size
    }

    /// The folder of the corpus.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The corpus's copy of the tokenizer's file.
    pub fn tokenizer_path(&self) -> PathBuf {
        self.dir.join(&self.manifest.tokenizer.file)
    }

    /// Settings to open [`Corpus::tokenizer_path`] with: lowercase and strip_accents.
    pub fn tokenizer_settings(&self) -> (Option<bool>, Option<bool>) {
        (self.manifest.tokenizer.lowercase, self.manifest.tokenizer.strip_accents)
    }

    /// The options that the corpus was prepared with, as a JSON object.
    pub fn options(&self) -> String {
        self.manifest.options.to_string()
    }

    /// The folder of the validation split, itself a corpus, if there is one.
    pub fn validation(&self) -> Option<PathBuf> {
        self.manifest.has_validation.then(|| self.dir.join(VALIDATION))
    }

    /// The token ids of a document, numbered over all shards.
    pub fn document(&self, index: u64) -> Result<Vec<u32>> {
        let count = self.num_documents();
        if index >= count {
            return Err(Error::Input(format!(
                "document {index} is out of range: the corpus has {count} documents"
            )));
        }
        let number = self.starts.partition_point(|&start| start <= index) - 1;
        let (shard, local) = (&self.shards[number], (index - self.starts[number]) as usize);
        let ends = shard.document_ends()?;
        let start = if local == 0 { 0 } else { ends[local - 1] };
        let mut ids = vec![0; (ends[local] - start) as usize];
        shard.copy_tokens(u64::from(start), &mut ids)?;
        Ok(ids.into_iter().map(|id| id as u32).collect())
    }
}

/// A file shorter than what was written must not be mapped: reading past its end would kill the process.
fn check_length(path: &Path, expected: u64) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.len() == expected => Ok(()),
        Ok(found) => {
            let length = found.len();
            let last = length.min(expected) / super::header::BLOCK_BYTES as u64;
            Err(damaged(path, format!("{length} bytes instead of {expected}: truncated in block {last}")))
        }
        Err(error) => Err(access_error(path, error)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::testing::write_corpus;

    #[test]
    fn a_corpus_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Corpus>();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn what_is_written_is_read(
            documents in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(0_u32..70_000, 0..200), 0..4), 0..40),
            wide in any::<bool>(), max_tokens in 1_u64..2_000,
        ) {
            let dir = tempfile::tempdir().unwrap();
            let size = if wide { 70_000 } else { 60_000 };
            let documents: Vec<Vec<Vec<u32>>> = documents.into_iter()
                .map(|d| d.into_iter().map(|l| l.into_iter().map(|id| id % size).collect()).collect()).collect();
            write_corpus(dir.path(), size, &documents, max_tokens);
            let corpus = Corpus::open(dir.path()).unwrap();
            let kept: Vec<_> = documents.iter().filter(|d| d.iter().any(|l| !l.is_empty())).collect();
            prop_assert_eq!(corpus.num_documents(), kept.len() as u64);
            for (index, document) in kept.iter().enumerate() {
                prop_assert_eq!(corpus.document(index as u64).unwrap(), document.concat());
            }
            let lines = corpus.shards().iter()
                .flat_map(|s| (0..s.num_documents()).map(|d| s.line_lengths(d).unwrap()));
            for (found, document) in lines.zip(&kept) {
                let lengths: Vec<u32> = document.iter().map(|l| l.len() as u32).collect();
                let first = lengths.iter().position(|&n| n > 0).unwrap();
                let last = lengths.iter().rposition(|&n| n > 0).unwrap();
                prop_assert_eq!(&found[..], &lengths[first..=last]);
            }
            prop_assert!(corpus.document(kept.len() as u64).is_err());
        }
    }
}
