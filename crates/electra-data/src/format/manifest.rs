//! `manifest.json`: what makes a folder a corpus. Written last, refused when a single byte is off.

use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::header::{FORMAT_VERSION, HEADER, Header, Kind};
use super::mmap::damaged;
use crate::error::{Error, Result};

/// The manifest's name inside a corpus.
pub(crate) const MANIFEST: &str = "manifest.json";
/// No manifest is longer: it has a few hundred bytes a shard of up to 2^27 tokens.
const LONGEST: u64 = 1 << 30;
/// The folder of unit records (see `job`); there without a manifest, it means unfinished work.
pub(crate) const PARTS: &str = "parts";

/// Ids of the five tokens that training needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialTokens {
    /// Fills rows up.
    pub pad: u32,
    /// Stands for what the vocabulary cannot spell.
    pub unk: u32,
    /// Opens a piece.
    pub cls: u32,
    /// Closes a piece.
    pub sep: u32,
    /// Hides a token.
    pub mask: u32,
}

/// The tokenizer that wrote the corpus; its file lies beside the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TokenizerEntry {
    /// `vocab.txt` or `tokenizer.json`.
    pub file: String,
    /// xxh3-128 of that file's bytes, hexadecimal.
    pub file_hash: String,
    /// What shards carry in their header: vocabulary and settings, hexadecimal.
    pub hash: String,
    pub lowercase: Option<bool>,
    pub strip_accents: Option<bool>,
    pub vocab_size: u32,
    pub special_tokens: SpecialTokens,
}

impl TokenizerEntry {
    /// The hash as shards carry it.
    pub fn hash_value(&self) -> u64 {
        u64::from_str_radix(&self.hash, 16).unwrap_or(0)
    }
}

/// One file of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileEntry {
    pub file: String,
    pub bytes: u64,
    /// xxh3-128 of the file's block table (the checksums of all that comes before), hexadecimal.
    pub hash: String,
}

/// One shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ShardEntry {
    pub tokens: FileEntry,
    pub lines: FileEntry,
    pub num_tokens: u64,
    pub num_documents: u64,
}

impl ShardEntry {
    /// Whether names and counts can be those of a shard with ids of `width` bytes. What is mapped
    /// and allocated follows from the counts, so they have to fit the lengths of real files.
    pub fn is_possible(&self, width: u16) -> bool {
        let &Self { num_tokens, num_documents, .. } = self;
        let kind = Kind::Tokens { width };
        let body_length = num_tokens.saturating_mul(width.into());
        let header = Header { kind, num_tokens, num_documents, tokenizer_hash: 0, body_length };
        let least_lines = num_documents.saturating_mul(9).saturating_add(HEADER as u64);
        (1..=u64::from(u32::MAX)).contains(&num_tokens)
            && (1..=num_tokens).contains(&num_documents)
            && header.layout().is_some_and(|layout| layout.file_length as u64 == self.tokens.bytes)
            && self.lines.bytes > least_lines
            && is_plain(&self.tokens.file)
            && is_plain(&self.lines.file)
    }
}

/// Whether this names a file of the folder itself and not one elsewhere.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|last| last == name)
}

/// The whole manifest, fields in the order in which they are written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Manifest {
    pub format_version: u32,
    /// Version of electra-fast that wrote it.
    pub written_by: String,
    pub content_hash: String,
    pub num_tokens: u64,
    pub num_documents: u64,
    /// Documents that had no token and were left out.
    pub empty_documents: u64,
    /// Records of the input that could not be read and were left out.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_records: u64,
    /// 2 or 4.
    pub token_bytes: u16,
    pub tokenizer: TokenizerEntry,
    /// Hash of the inputs' names and sizes and of every option: is this the corpus that was asked for?
    pub job: String,
    pub options: serde_json::Value,
    /// Whether `holdout/` is part of this corpus.
    pub holdout: bool,
    pub shards: Vec<ShardEntry>,
    /// xxh3-128 of this file with the empty string here, hexadecimal.
    pub checksum: String,
}

impl Manifest {
    /// Adds up the shards and computes both hashes.
    pub fn seal(mut self) -> Self {
        self.num_tokens = sum(self.shards.iter().map(|shard| shard.num_tokens));
        self.num_documents = sum(self.shards.iter().map(|shard| shard.num_documents));
        self.content_hash = self.hash_content();
        self.checksum = String::new();
        self.checksum = hex128(xxh3_128(self.canonical().as_bytes()));
        self
    }

    /// The one way to spell this manifest.
    pub fn canonical(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Reads and checks `dir/manifest.json`.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        let length = std::fs::metadata(&path).map_err(|error| no_manifest(dir, error))?.len();
        if length > LONGEST {
            return Err(damaged(&path, format!("not a manifest ({length} bytes long)")));
        }
        let bytes = std::fs::read(&path).map_err(|error| no_manifest(dir, error))?;
        Self::parse(&path, &bytes)
    }

    fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let newer = |version: u64| {
            format!("format version {version}, but this release reads {FORMAT_VERSION}: prepare it again")
        };
        let value: serde_json::Value = serde_json::from_slice(bytes)
            .map_err(|error| damaged(path, format!("not a manifest ({error})")))?;
        match value["format_version"].as_u64() {
            Some(version) if version != u64::from(FORMAT_VERSION) => {
                return Err(Error::Damaged { path: path.to_owned(), reason: newer(version) });
            }
            _ => {}
        }
        let manifest: Self = serde_json::from_slice(bytes)
            .map_err(|error| damaged(path, format!("not a manifest ({error})")))?;
        let sealed = manifest.clone().seal();
        if sealed != manifest || manifest.canonical().as_bytes() != bytes {
            return Err(damaged(path, "its checksum does not hold: it was edited or damaged".into()));
        }
        match manifest.impossible() {
            Some(what) => Err(damaged(path, format!("{what}: no release wrote it like that"))),
            None => Ok(manifest),
        }
    }

    /// What cannot be in a manifest that `prepare` wrote, however right its checksum is.
    fn impossible(&self) -> Option<String> {
        let TokenizerEntry { file, hash, vocab_size, special_tokens: s, .. } = &self.tokenizer;
        if !matches!(self.token_bytes, 2 | 4) {
            return Some(format!("token_bytes is {}", self.token_bytes));
        }
        if [s.pad, s.unk, s.cls, s.sep, s.mask].iter().any(|id| id >= vocab_size) || *vocab_size > 1 << 31 {
            return Some(format!("special tokens and a vocabulary of {vocab_size} contradict each other"));
        }
        if !is_plain(file) || hash.len() != 16 || u64::from_str_radix(hash, 16).is_err() {
            return Some("the tokenizer's entry is malformed".to_owned());
        }
        let wrong = self.shards.iter().position(|shard| !shard.is_possible(self.token_bytes))?;
        Some(format!("the names, counts or lengths of shard {wrong} (from 0) contradict each other"))
    }

    fn hash_content(&self) -> String {
        let mut hash = Xxh3::new();
        hash.update(&FORMAT_VERSION.to_le_bytes());
        hash.update(&self.token_bytes.to_le_bytes());
        hash.update(self.tokenizer.hash.as_bytes());
        for shard in &self.shards {
            hash.update(shard.tokens.hash.as_bytes());
            hash.update(shard.lines.hash.as_bytes());
        }
        hex128(hash.digest128())
    }
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A sum of counts that may be anybody's: too large is as wrong as it gets, but no panic.
pub(crate) fn sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}

/// 128 bits as 32 hexadecimal digits.
pub(crate) fn hex128(hash: u128) -> String {
    format!("{hash:032x}")
}

fn no_manifest(dir: &Path, error: std::io::Error) -> Error {
    if error.kind() != std::io::ErrorKind::NotFound {
        return Error::io(dir.join(MANIFEST), error);
    }
    if !dir.exists() {
        let hint = "; `electra-fast prepare` makes a corpus".to_owned();
        return Error::NotFound { path: dir.to_owned(), hint };
    }
    let reason = if dir.join(PARTS).exists() {
        "; it is an unfinished corpus: run the same `electra-fast prepare` again"
    } else {
        "; it is not a corpus: `electra-fast prepare` makes one"
    };
    Error::NotFound { path: dir.join(MANIFEST), hint: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::testing::write_corpus;
    use super::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        write_corpus(dir.path(), 100, &[vec![vec![5, 6]]], 1);
        let path = dir.path().join(MANIFEST);
        let sound = std::fs::read(&path).unwrap();
        assert!(Manifest::read(dir.path()).is_ok());
        for bit in 0..sound.len() * 8 {
            let mut flipped = sound.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(Manifest::parse(&path, &flipped).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn another_version_is_told_apart_from_damage() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(MANIFEST), "{\"format_version\": 9}").unwrap();
        let error = Manifest::read(dir.path()).unwrap_err().to_string();
        assert!(error.contains("format version 9, but this release reads 1"), "{error}");
    }
}
