//! A finished corpus, opened for reading: a manifest and its shards.

use std::path::{Path, PathBuf};

use super::manifest::{Manifest, SpecialTokens};
use super::mmap::damaged;
use super::shard::Shard;
use crate::error::{Error, Result};

/// The name of the held-out corpus inside a corpus.
pub(crate) const HOLDOUT: &str = "holdout";

/// A corpus on disk. Opening it reads the manifest and looks at the files' lengths, no more.
#[derive(Debug)]
pub struct Corpus {
    dir: PathBuf,
    manifest: Manifest,
    shards: Vec<Shard>,
    /// Documents before each shard, and all of them at the end.
    starts: Vec<u64>,
}

impl Corpus {
    /// Opens the corpus in a folder that `prepare` finished.
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

    /// The shards in the order in which documents are numbered.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Tokens of all documents, without any special tokens.
    pub fn num_tokens(&self) -> u64 {
        self.manifest.num_tokens
    }

    /// Documents of all shards.
    pub fn num_documents(&self) -> u64 {
        self.manifest.num_documents
    }

    /// Documents that had no token and were left out when the corpus was made.
    pub fn empty_documents(&self) -> u64 {
        self.manifest.empty_documents
    }

    /// Identifies the tokens, their order and the tokenizer: 32 hexadecimal digits.
    pub fn content_hash(&self) -> &str {
        &self.manifest.content_hash
    }

    /// Ids of the five special tokens.
    pub fn special_tokens(&self) -> SpecialTokens {
        self.manifest.tokenizer.special_tokens
    }

    /// Entries of the vocabulary: every id is below this.
    pub fn vocab_size(&self) -> u32 {
        self.manifest.tokenizer.vocab_size
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The corpus's own copy of the tokenizer that made it.
    pub fn tokenizer_path(&self) -> PathBuf {
        self.dir.join(&self.manifest.tokenizer.file)
    }

    /// Settings to open [`Corpus::tokenizer_path`] with: lowercase and strip_accents.
    pub fn tokenizer_settings(&self) -> (Option<bool>, Option<bool>) {
        (self.manifest.tokenizer.lowercase, self.manifest.tokenizer.strip_accents)
    }

    /// The options that the corpus was prepared with, as JSON.
    pub fn options(&self) -> String {
        self.manifest.options.to_string()
    }

    /// The folder of the held-out corpus, if there is one.
    pub fn holdout(&self) -> Option<PathBuf> {
        self.manifest.holdout.then(|| self.dir.join(HOLDOUT))
    }

    /// The ids of one document, counted over all shards.
    pub fn document(&self, index: u64) -> Result<Vec<u32>> {
        let count = self.num_documents();
        if index >= count {
            return Err(Error::Input(format!("document {index} of a corpus that has {count}")));
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

/// A file that is shorter than what was written must not be mapped: reading past its end kills.
fn check_length(path: &Path, expected: u64) -> Result<()> {
    match std::fs::metadata(path) {
        Ok(found) if found.len() == expected => Ok(()),
        Ok(found) => {
            let length = found.len();
            let last = length.min(expected) / super::header::BLOCK as u64;
            Err(damaged(path, format!("{length} bytes instead of {expected}: truncated in block {last}")))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(damaged(path, "missing, though the manifest names it".into()))
        }
        Err(error) => Err(Error::io(path, error)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::write_corpus;
    use super::*;

    #[test]
    fn the_library_can_be_shared_between_threads() {
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
